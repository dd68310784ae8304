"""The endpoints of text-embeddings-inference
(https://github.com/huggingface/text-embeddings-inference): embeddings, classification and
reranking."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from tokenizers import Encoding, normalizers

from ... import __version__
from ...errors import TOKENIZER_FAILED, RequestError, TooLong, UsageError
from ...heads import CLASSIFY
from ...scheduler.encoder_scheduler import MAX_CALLS
from ...text.model_facts import model_facts
from ...text.tasks import embedding, reranking
from ...text.tasks.classification import FUNCTIONS, sentence_config
from ...text.tasks.rows import (
    Cut,
    Pair,
    TokenRow,
    decode,
    encode_texts,
    label_names,
    run,
    tokenizer_errors,
)
from ...text_runtime import TextRuntime
from ..models import ServedModel
from .protocol import (
    Protocol,
    name_in_path,
    served_models,
    server_settings,
    short_repr,
    validated,
)
from .text_embeddings_requests import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    PredictRequest,
    RerankRequest,
    SimilarityParameters,
    SimilarityRequest,
    TEIRequest,
    TokenizeRequest,
    Truncation,
    check_number,
    empty_error,
    parse_inputs,
    parse_sequences,
)

router = APIRouter(tags=["text-embeddings-inference"])

# characters per token; longer texts are rejected before they are tokenized
MAX_TOKEN_LENGTH = 250
# characters of all texts of /tokenize; its response has about 100 bytes per token
MAX_CHARACTERS = 250_000
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
TYPES = {400: "Empty", 424: "Backend", 429: "Overloaded", 500: "Backend", 503: "Unhealthy"}


# ------------------------------------------------------------------------------------------- errors


def error_body(error: RequestError) -> dict[str, Any]:
    kind = "Tokenizer" if error.code == TOKENIZER_FAILED else TYPES.get(error.status, "Validation")
    return {"error": error.message, "error_type": kind}


PROTOCOL = Protocol("text-embeddings-inference", router, error_body, validation=422)


# ---------------------------------------------------------------------------------------- endpoints


@router.post("/")
async def answer(request: Request, body: dict[str, Any]) -> Response:
    """Respond like /embed, /rerank or /predict, depending on the task of the model.

    `InferenceClient(model=url)` of huggingface_hub sends its requests to this path."""
    name = body.get("model")
    model = choose_model(
        request, reads, "embed or label texts", name if isinstance(name, str) else None
    )
    endpoint, form = next((endpoint, form) for fits, endpoint, form in ENDPOINTS if fits(model))
    with validated(body, "body"):
        checked = form.model_validate(body)
    return await endpoint(request, checked)


@router.post("/embed")
async def embed(request: Request, body: EmbedRequest) -> Response:
    """Return one vector for each input.

    The response is a list of lists of numbers in the order of the inputs, also for one input. The
    export's sentence-transformers modules select pooling and linear maps. The field `normalize`
    decides about normalization."""
    model = choose_model(request, lambda model: model.embeds, "embed texts", body.model)
    settings = server_settings(request)
    inputs = parse_inputs("inputs", body.inputs, settings.max_batch, model.runtime)
    body = body.with_default(settings.auto_truncate)
    return json_response(await model.read(len(inputs), render_vectors, model, inputs, body))


@router.post("/embed_all")
async def embed_all(request: Request, body: EmbedAllRequest) -> Response:
    """Return the vectors of all tokens of each input, without pooling.

    The response is a list in the order of the inputs, also for one input. Each entry has a list of
    numbers for each token, with the special tokens and those of a prompt."""
    model = choose_model(request, lambda model: model.embeds, "embed texts", body.model)
    settings = server_settings(request)
    inputs = parse_inputs("inputs", body.inputs, settings.max_batch, model.runtime)
    body = body.with_default(settings.auto_truncate)
    return json_response(await model.read(len(inputs), render_states, model, inputs, body))


@router.post("/similarity")
async def similarity(request: Request, body: SimilarityRequest) -> Response:
    """Return the cosine similarity of a sentence to each of several other sentences.

    The response is a list of numbers in the order of `sentences`."""
    model = choose_model(request, lambda model: model.embeds, "embed texts", body.model)
    if not body.inputs.sentences:
        raise empty_error("inputs.sentences")
    sentences = [body.inputs.source_sentence, *body.inputs.sentences]
    settings = server_settings(request)
    inputs = parse_inputs("inputs", sentences, settings.max_batch, model.runtime)
    how = body.parameters or SimilarityParameters.model_validate({})
    how = how.with_default(settings.auto_truncate)
    return JSONResponse(await model.read(len(inputs), cosine_similarities, model, inputs, how))


@router.post("/predict")
async def predict(request: Request, body: PredictRequest) -> Response:
    """Return all labels of each text or pair of texts, best first.

    The response to a text or a pair is a list of `{"score": number, "label": name}`. The response
    to a list of lists is a list of such lists, in the same order. Scores are probabilities, or
    logits with `raw_scores`."""
    model = choose_model(request, classifies, "label texts", body.model)
    sequences, is_batch = parse_sequences(body.inputs)
    settings = server_settings(request)
    check_number("inputs", sequences, settings.max_batch)
    body = body.with_default(settings.auto_truncate)
    results = await model.read(len(sequences), labels, model, sequences, body, body.raw_scores)
    return JSONResponse(results if is_batch else results[0])


@router.post("/rerank")
async def rerank(request: Request, body: RerankRequest) -> Response:
    """Score how well each text answers the query. Return the best text first.

    The response is a list of `{"index": number, "score": number}`, where `index` is the position of
    the text in the request. With `return_text` each entry has the `text` too. The model must have
    one label."""
    model = choose_model(
        request, reranks, "rerank texts, for which a head with one label is needed", body.model
    )
    if not body.texts:
        raise empty_error("texts")
    settings = server_settings(request)
    check_number("texts", body.texts, settings.max_batch)
    body = body.with_default(settings.auto_truncate)
    pairs = [(body.query, text) for text in body.texts]
    results = await model.read(len(pairs), rank_scores, model, pairs, body)
    ranks = sorted(
        ((float(scores[0]), index) for index, scores in enumerate(results)),
        key=lambda rank: (-rank[0], rank[1]),
    )
    texts = [{"text": body.texts[index]} if body.return_text else {} for _, index in ranks]
    return JSONResponse(
        [{"index": index, **text, "score": score} for (score, index), text in zip(ranks, texts)]
    )


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Return the tokens of each text.

    The response is a list of tokens for each text, also for one text. A token has the fields `id`,
    `text`, `special`, `start` and `stop`. `start` and `stop` are offsets in the UTF-8 bytes of the
    text after its prompt is added, null for special tokens. Texts are not truncated."""
    model = choose_model(request, has_tokenizer, "tokenize texts", body.model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"inputs is {short_repr(body.inputs)}, expected a text or a list of texts")
    check_number("inputs", texts, server_settings(request).max_batch)
    size = sum(map(len, texts))
    if size > MAX_CHARACTERS:
        raise TooLong(f"inputs has {size} characters, expected at most {MAX_CHARACTERS}")
    return json_response(await model.read(len(texts), render_tokens, model.runtime, texts, body))


@router.post("/decode")
async def decode_ids(request: Request, body: DecodeRequest) -> Response:
    """Return the text of each list of token ids.

    The response is a list of texts in the same order, also for one list."""
    model = choose_model(request, has_tokenizer, "decode token ids", body.model)
    rows = parse_inputs("ids", body.ids, server_settings(request).max_batch, model.runtime)
    if any(isinstance(row, str) for row in rows):
        raise UsageError(
            f"ids is {short_repr(body.ids)}, expected token ids or a list of lists of token ids"
        )

    def texts() -> list[str]:
        return [
            decode(model.runtime, row, body.skip_special_tokens)
            for row in rows
            if isinstance(row, list)
        ]

    return JSONResponse(await model.read(len(rows), texts))


@router.get("/info")
async def info(request: Request, model: str | None = None) -> Response:
    """Return information about the model, with the fields of text-embeddings-inference.

    More fields are the choices that the model makes, such as its pooling, prompts and target, and
    `warnings` of those that are probably wrong.
    """
    served = choose_model(request, reads, "embed or label texts", model)
    settings, runtime = server_settings(request), served.runtime.runtime
    dtype = runtime.dtype
    facts = {
        "model_id": served.name,
        "model_sha": None,
        "model_dtype": DTYPES.get(dtype, dtype),
        "served_model_name": served.name,
        "model_type": model_type(served),
        "max_concurrent_requests": settings.requests,
        "max_input_length": longest(served),
        "max_batch_tokens": runtime.max_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": settings.max_batch,
        "auto_truncate": settings.auto_truncate,
        "tokenization_workers": MAX_CALLS,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
    return JSONResponse(model_facts(served.runtime) | facts)


# (condition, endpoint, request class) of POST /; the first condition that is true counts
ENDPOINTS: tuple[tuple[Callable[[Any], bool], Callable[..., Any], type[TEIRequest]], ...] = (
    (lambda model: model.embeds, embed, EmbedRequest),
    (lambda model: reranks(model), rerank, RerankRequest),
    (lambda model: classifies(model), predict, PredictRequest),
)


# ------------------------------------------------------------------------------------------- models


def choose_model(
    request: Request, fits: Callable[[ServedModel], bool], purpose: str, name: str | None
) -> ServedModel:
    """Return the model of the path, or with this `name`, or the only one that `fits`. `purpose`
    completes "a model that can ..." in errors.

    Raises:
        RequestError: 422 for an unknown name, and 424 if no model, several models or the named one
            do not fit, as in text-embeddings-inference.
    """
    try:
        return served_models(request).choose(fits, purpose, name_in_path(request), name)
    except RequestError as error:
        raise RequestError(424 if error.status == 400 else 422, error.message) from None


def classifies(model: ServedModel) -> bool:
    return model.has_task(CLASSIFY)


def reranks(model: ServedModel) -> bool:
    return classifies(model) and len(model.runtime.info.config["id2label"]) == 1


def reads(model: ServedModel) -> bool:
    return model.embeds or classifies(model)


def has_tokenizer(model: ServedModel) -> bool:
    return isinstance(model.runtime, TextRuntime)


def longest(model: ServedModel) -> int:
    """Return the maximum number of tokens of a text that the model reads, including special
    tokens."""
    limit = (
        model.runtime.info.config["max_position_embeddings"]
        if model.encoder is None
        else model.encoder.max_length
    )
    return min(limit, embedding.length_and_case(model.runtime)[0]) if model.embeds else limit


def model_type(model: ServedModel) -> dict[str, Any]:
    if model.embeds:
        return {"embedding": {"pooling": "+".join(model.runtime.sentence_modules.poolings)}}
    config = model.runtime.info.config
    names = {"id2label": config["id2label"], "label2id": config.get("label2id") or {}}
    return {"reranker" if reranks(model) else "classifier": names}


# ------------------------------------------------------------------------------------------- tokens


def encode(model: ServedModel, texts: Sequence[str | Pair], how: Truncation) -> Sequence[Encoding]:
    """Return the encoding of each text, with special tokens, truncated if the request says so in
    `how`.

    Raises TooLong for a text that is too long without truncation.
    """
    return encode_within(
        model, texts, how, lambda texts, cut: encode_texts(model.runtime, texts, cut)
    )


def encode_within(
    model: ServedModel,
    texts: Sequence[Any],
    how: Truncation,
    tokenize: Callable[[Sequence[Any], Cut | None], Sequence[Any]],
) -> Sequence[Any]:
    """Return `tokenize(texts, cut)`, the tokens of each text or pair, where `cut` is None without
    truncation.

    Raises TooLong for a text that is too long without truncation.
    """
    limit = longest(model)
    if how.truncate:
        shortened = [first_characters(text, limit * MAX_TOKEN_LENGTH, how.side) for text in texts]
        return tokenize(shortened, Cut(limit, side=how.side))
    for text in texts:
        size = len(text) if isinstance(text, str) else sum(map(len, text))
        if size > limit * MAX_TOKEN_LENGTH:
            raise TooLong(
                f"a text has {size} characters, expected at most {limit * MAX_TOKEN_LENGTH} "
                f"without truncation"
            )
    rows = tokenize(texts, None)
    check_lengths([len(row.ids) for row in rows], limit)
    return rows


def check_lengths(lengths: Sequence[int], limit: int) -> None:
    if max(lengths) > limit:
        raise TooLong(
            f"a text has {max(lengths)} tokens, expected at most {limit} without truncation"
        )


def first_characters(text: str | Pair, max_length: int, side: str) -> str | Pair:
    """Return the first `max_length` characters of a text or of each text of a pair, or the last
    ones if `side` is "left"."""
    if isinstance(text, str):
        return text[:max_length] if side == "right" else text[-max_length:]
    first, second = (first_characters(part, max_length, side) for part in text)
    return first, second  # type: ignore[return-value]


def rows_to_embed(
    model: ServedModel,
    inputs: Sequence[str | list[int]],
    how: EmbedAllRequest | SimilarityParameters,
) -> tuple[list[Encoding | TokenRow], int]:
    """Return the tokens of each input, and the number of tokens of the prompt, 0 without one.

    `how` has the truncation and the name of the prompt. Without a prompt, token ids are used
    unchanged, apart from truncation. With one, they are decoded and encoded again after it. Raises
    UsageError for an unknown prompt, and TooLong for an input that is too long without truncation.
    """
    runtime = model.runtime
    prompt = embedding.select_prompt(sentence_config(runtime), how.prompt_name, None)
    lowered = (
        normalizers.Lowercase().normalize_str if embedding.length_and_case(runtime)[1] else str
    )
    if prompt:
        inputs = [
            item if isinstance(item, str) else decode(runtime, item, skip_special_tokens=True)
            for item in inputs
        ]
    texts = [lowered(prompt + item) for item in inputs if isinstance(item, str)]
    encodings = iter(encode(model, texts, how) if texts else [])
    rows = [
        next(encodings) if isinstance(item, str) else cut_ids(item, longest(model), how)
        for item in inputs
    ]
    length = (
        embedding.count_prompt_tokens(encode_texts(runtime, [lowered(prompt)])[0]) if prompt else 0
    )
    return rows, min(length, longest(model))


def cut_ids(ids: list[int], limit: int, how: Truncation) -> TokenRow:
    if how.truncate:
        ids = ids[:limit] if how.side == "right" else ids[-limit:]
    check_lengths([len(ids)], limit)
    return TokenRow(ids, [0] * len(ids))


# ------------------------------------------------------------------------------------------ answers


def json_response(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def render_list(values: Iterator[Any]) -> bytes:
    """Return `values` as a JSON list. Each value is encoded on its own, so that other threads can
    run."""
    return (
        b"["
        + b",".join(
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode() for value in values
        )
        + b"]"
    )


def compute_states(
    model: ServedModel,
    inputs: Sequence[str | list[int]],
    how: EmbedAllRequest | SimilarityParameters,
) -> tuple[list[np.ndarray], int]:
    """Return the hidden states (S, D) of each input with its prompt, and the number of tokens of
    the prompt, 0 without one.

    `inputs` are texts or token ids. `how` has the truncation and the name of the prompt.
    """
    rows, prompt_length = rows_to_embed(model, inputs, how)
    states: list[np.ndarray] = [np.empty(0)] * len(rows)
    for index, outputs in run(model.runtime, rows):
        states[index] = outputs["last_hidden_state"]
    return states, prompt_length


def vectors(
    model: ServedModel,
    inputs: Sequence[str | list[int]],
    how: EmbedAllRequest | SimilarityParameters,
    width: int | None = None,
) -> list[np.ndarray]:
    """Return one vector (E,) for each input, without the last normalization of the export.

    `how` has the truncation and the name of the prompt. `width` is the number of values to return,
    from the start of each vector, None for all. Raises UsageError if a vector has fewer.
    """
    modules = model.runtime.sentence_modules
    steps = modules.steps
    while steps and steps[-1] is embedding.normalize:
        steps = steps[:-1]
    states, prompt_length = compute_states(model, inputs, how)
    results = [
        replace(modules, steps=steps).embedding(row_states, prompt_length) for row_states in states
    ]
    if width is not None:
        check_dimensions(width, len(results[0]))
    return [vector[:width] for vector in results]


def check_dimensions(dimensions: int, width: int) -> None:
    """Raise UsageError if `dimensions` is more than `width`, the length of the vectors."""
    if dimensions > width:
        raise UsageError(f"dimensions is {dimensions}, expected at most {width}", "dimensions")


def render_vectors(
    model: ServedModel, inputs: Sequence[str | list[int]], body: EmbedRequest
) -> bytes:
    rows = vectors(model, inputs, body, body.dimensions)
    return render_list(
        (embedding.normalize(vector) if body.normalize else vector).tolist() for vector in rows
    )


def render_states(
    model: ServedModel, inputs: Sequence[str | list[int]], body: EmbedAllRequest
) -> bytes:
    return render_list(states.tolist() for states in compute_states(model, inputs, body)[0])


def cosine_similarities(
    model: ServedModel, inputs: Sequence[str | list[int]], how: SimilarityParameters
) -> list[float]:
    embeddings = embedding.normalize(np.stack(vectors(model, inputs, how)))
    return (embeddings[1:] @ embeddings[0]).tolist()


def compute_scores(
    model: ServedModel, rows: Sequence[Encoding | TokenRow], is_raw: bool
) -> list[np.ndarray]:
    """Return the scores of all labels for each of `rows`: logits if `is_raw`, otherwise
    probabilities. Probabilities are sigmoids for independent labels and for a single label, else
    the softmax."""
    config = model.runtime.info.config
    is_independent = (
        config.get("problem_type") == "multi_label_classification" or len(config["id2label"]) == 1
    )
    function = FUNCTIONS["none" if is_raw else "sigmoid" if is_independent else "softmax"]
    results: list[np.ndarray] = [np.empty(0)] * len(rows)
    for index, outputs in run(model.runtime, rows):
        results[index] = function(outputs["logits"])
    return results


def rank_scores(model: ServedModel, pairs: Sequence[Pair], body: RerankRequest) -> list[np.ndarray]:
    """Return the score of each pair of a query and a text, in the prompt of the model if it has
    one."""
    instruction = reranking.select_instruction(model.runtime)

    def tokenize(pairs: Sequence[Pair], cut: Cut | None) -> Sequence[Encoding | TokenRow]:
        return reranking.pair_rows(model.runtime, pairs, instruction, cut)

    rows = encode_within(model, pairs, body, tokenize)
    return compute_scores(model, rows, body.raw_scores)


def labels(
    model: ServedModel, sequences: Sequence[str | Pair], how: Truncation, is_raw: bool
) -> list[list[dict[str, Any]]]:
    names = label_names(model.runtime)
    orders = [
        (scores, np.argsort(-scores, kind="stable").tolist())
        for scores in compute_scores(model, encode(model, sequences, how), is_raw)
    ]
    return [
        [{"score": float(scores[label]), "label": names[label]} for label in order]
        for scores, order in orders
    ]


def render_tokens(runtime: TextRuntime, texts: Sequence[str], body: TokenizeRequest) -> bytes:
    prompt = embedding.select_prompt(sentence_config(runtime), body.prompt_name, None)
    prompted = [prompt + text for text in texts]
    with tokenizer_errors(runtime.path):
        encodings = runtime.encode(prompted, special_tokens=body.add_special_tokens)
    return render_list(
        describe_tokens(encoding, text) for encoding, text in zip(encodings, prompted, strict=True)
    )


def describe_tokens(encoding: Encoding, text: str) -> list[dict[str, Any]]:
    offsets = np.cumsum([0, *(len(letter.encode()) for letter in text)]).tolist()
    facts = zip(
        encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True
    )
    return [
        {
            "id": id,
            "text": token if is_special else text[start:end],
            "special": bool(is_special),
            "start": None if is_special else offsets[start],
            "stop": None if is_special else offsets[end],
        }
        for id, token, is_special, (start, end) in facts
    ]
