"""The endpoints of text-embeddings-inference
(https://github.com/huggingface/text-embeddings-inference): embeddings, classification and
reranking."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from tokenizers import Encoding, normalizers

from ... import __version__
from ...errors import TOKENIZER_FAILED, RequestError, TooLong, UsageError
from ...heads import CLASSIFY
from ...inference.inputs import MAX_TOKENS
from ...scheduler.encoder_scheduler import MAX_CALLS
from ...text.tasks import embedding
from ...text.tasks.classification import FUNCTIONS, sentence_config
from ...text.tasks.rows import (
    Cut,
    Pair,
    TokenRow,
    check_string,
    decode,
    encode_texts,
    label_names,
    run,
    tokenizer_errors,
)
from ...text_runtime import TextRuntime
from ..models import ServedModel
from .protocol import Protocol, name_in_path, served_models, server_settings, validated

router = APIRouter(tags=["text-embeddings-inference"])

# characters per token; longer texts are rejected before they are tokenized
MAX_TOKEN_LENGTH = 250
# characters of all texts of /tokenize; its response has about 100 bytes per token
MAX_CHARACTERS = 250_000
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
TYPES = {400: "Empty", 424: "Backend", 429: "Overloaded", 500: "Backend", 503: "Unhealthy"}
INPUTS = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]
            },
        },
        {"type": "array", "items": {"type": "integer"}},
    ]
}
PROMPT_NAME = "name of a prompt of the export, which precedes each text"
TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
IDS = {
    "anyOf": [
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
SEQUENCES = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        {"type": "array", "items": {"type": "array", "items": {"type": "string"}, "maxItems": 2}},
    ]
}


# ----------------------------------------------------------------------------------------- requests


class TEIRequest(BaseModel):
    """A request of text-embeddings-inference. Unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(
        None, description="name of a model; by default the only model that fits"
    )


class Truncation(TEIRequest):
    """The options of truncation."""

    truncate: bool | None = Field(
        False, description="true cuts texts that are too long; false rejects them"
    )
    truncation_direction: Literal["left", "right", "Left", "Right"] = Field(
        "right", description="side at which texts are cut"
    )

    @property
    def side(self) -> str:
        return self.truncation_direction.lower()


class EmbedAllRequest(Truncation):
    """Texts or token ids to embed, token by token."""

    inputs: Annotated[Any, WithJsonSchema(INPUTS)] = Field(
        description="text, token ids, or list of these", examples=["a dog"]
    )
    prompt_name: str | None = Field(None, description=PROMPT_NAME)


class EmbedRequest(EmbedAllRequest):
    """Texts or token ids to embed."""

    normalize: bool = Field(True, description="scale each vector to length 1")
    dimensions: int | None = Field(
        None, ge=1, description="number of values of each vector, from its start"
    )


class PredictRequest(Truncation):
    """Texts or pairs of texts to classify."""

    inputs: Annotated[Any, WithJsonSchema(SEQUENCES)] = Field(
        description="text, pair of texts, or list of lists of one or two texts",
        examples=["a fine film"],
    )
    raw_scores: bool = Field(False, description="return logits instead of probabilities")


class RerankRequest(Truncation):
    """A query and texts to rank."""

    query: str = Field(description="query that the texts are compared with")
    texts: list[str] = Field(description="texts to rank")
    raw_scores: bool = Field(False, description="return logits instead of probabilities")
    return_text: bool = Field(False, description="include the text of each rank in the response")


class Sentences(TEIRequest):
    """A sentence, and sentences to compare it with."""

    source_sentence: str = Field(description="sentence to compare")
    sentences: list[str] = Field(description="sentences to compare it with")


class SimilarityParameters(Truncation):
    """The options of a request to /similarity."""

    prompt_name: str | None = Field(None, description=PROMPT_NAME)


class SimilarityRequest(TEIRequest):
    """Sentences to compare."""

    inputs: Sentences = Field(description="sentences to compare")
    parameters: SimilarityParameters | None = Field(None, description="options")


class TokenizeRequest(TEIRequest):
    """Texts to tokenize."""

    inputs: Annotated[Any, WithJsonSchema(TEXTS)] = Field(
        description="text or list of texts", examples=["a dog"]
    )
    add_special_tokens: bool = Field(True, description="include special tokens")
    prompt_name: str | None = Field(None, description=PROMPT_NAME)


class DecodeRequest(TEIRequest):
    """Token ids to decode."""

    ids: Annotated[Any, WithJsonSchema(IDS)] = Field(
        description="token ids, or list of lists of token ids", examples=[[1, 2]]
    )
    skip_special_tokens: bool = Field(True, description="omit special tokens from the text")


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

    The export's sentence-transformers modules select pooling and linear maps. The field
    `normalize` decides about normalization."""
    model = choose_model(request, lambda model: model.embeds, "embed texts", body.model)
    inputs = parse_inputs("inputs", body.inputs, server_settings(request).max_batch, model.runtime)
    return json_response(await model.read(len(inputs), render_vectors, model, inputs, body))


@router.post("/embed_all")
async def embed_all(request: Request, body: EmbedAllRequest) -> Response:
    """Return the vectors of all tokens of each input, without pooling."""
    model = choose_model(request, lambda model: model.embeds, "embed texts", body.model)
    inputs = parse_inputs("inputs", body.inputs, server_settings(request).max_batch, model.runtime)
    return json_response(await model.read(len(inputs), render_states, model, inputs, body))


@router.post("/similarity")
async def similarity(request: Request, body: SimilarityRequest) -> Response:
    """Return the cosine similarity of a sentence to each of several other sentences."""
    model = choose_model(request, lambda model: model.embeds, "embed texts", body.model)
    if not body.inputs.sentences:
        raise empty_error("inputs.sentences")
    sentences = [body.inputs.source_sentence, *body.inputs.sentences]
    inputs = parse_inputs("inputs", sentences, server_settings(request).max_batch, model.runtime)
    how = body.parameters or SimilarityParameters.model_validate({})
    return JSONResponse(await model.read(len(inputs), cosine_similarities, model, inputs, how))


@router.post("/predict")
async def predict(request: Request, body: PredictRequest) -> Response:
    """Return all labels of each text or pair of texts, best first."""
    model = choose_model(request, classifies, "label texts", body.model)
    sequences, is_batch = parse_sequences(body.inputs)
    check_number("inputs", sequences, server_settings(request).max_batch)
    results = await model.read(len(sequences), labels, model, sequences, body, body.raw_scores)
    return JSONResponse(results if is_batch else results[0])


@router.post("/rerank")
async def rerank(request: Request, body: RerankRequest) -> Response:
    """Score how well each text answers the query. Return the best text first."""
    model = choose_model(
        request, reranks, "rerank texts, for which a head with one label is needed", body.model
    )
    if not body.texts:
        raise empty_error("texts")
    check_number("texts", body.texts, server_settings(request).max_batch)
    pairs = [(body.query, text) for text in body.texts]
    results = await model.read(len(pairs), compute_scores, model, pairs, body, body.raw_scores)
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

    `start` and `stop` are offsets in the UTF-8 bytes, as in text-embeddings-inference."""
    model = choose_model(request, has_tokenizer, "tokenize texts", body.model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"inputs is {body.inputs!r:.80}, expected a text or a list of texts")
    check_number("inputs", texts, server_settings(request).max_batch)
    size = sum(map(len, texts))
    if size > MAX_CHARACTERS:
        raise TooLong(f"inputs has {size} characters, expected at most {MAX_CHARACTERS}")
    return json_response(await model.read(len(texts), render_tokens, model.runtime, texts, body))


@router.post("/decode")
async def decode_ids(request: Request, body: DecodeRequest) -> Response:
    """Return the text of each list of token ids."""
    model = choose_model(request, has_tokenizer, "decode token ids", body.model)
    rows = parse_inputs("ids", body.ids, server_settings(request).max_batch, model.runtime)
    if any(isinstance(row, str) for row in rows):
        raise UsageError(
            f"ids is {body.ids!r:.80}, expected token ids or a list of lists of token ids"
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
    """Return information about the model, with the fields of text-embeddings-inference."""
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
        "max_batch_tokens": MAX_TOKENS * runtime.threads,
        "max_batch_requests": None,
        "max_client_batch_size": settings.max_batch,
        "auto_truncate": False,
        "tokenization_workers": MAX_CALLS,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
    return JSONResponse(facts)


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
    """Return the maximum number of tokens of a text that the model reads."""
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


# ------------------------------------------------------------------------------------------- inputs


def empty_error(name: str) -> RequestError:
    return RequestError(400, f"{name} is empty, expected at least one text")


def check_number(name: str, inputs: Sequence[Any], max_items: int) -> None:
    if not inputs:
        raise empty_error(name)
    if len(inputs) > max_items:
        raise TooLong(f"{name} has {len(inputs)} items, expected at most {max_items}")


def check_input(text: str, name: str) -> str:
    """Return `text`. Raises UsageError if it is empty; `name` is for the message. White space is
    accepted, as in text-embeddings-inference."""
    if not text:
        raise UsageError(f"{name} is '', expected at least one character", name)
    return check_string(text, name)


def parse_inputs(
    name: str, value: Any, max_items: int, runtime: TextRuntime
) -> list[str | list[int]]:
    """Return the list of texts and rows of token ids in `value`, the field `name` of a request.

    Raises UsageError for invalid values, RequestError for none, and TooLong for more than
    `max_items`.
    """
    inputs = [value] if isinstance(value, str) else value
    if isinstance(inputs, list) and inputs and all(type(item) is int for item in inputs):
        inputs = [inputs]
    if not isinstance(inputs, list):
        raise UsageError(
            f"{name} is {value!r:.80}, expected a text, token ids or a "
            f"list of texts and lists of token ids"
        )
    check_number(name, inputs, max_items)
    size = runtime.info.config["vocab_size"]
    for index, item in enumerate(inputs):
        if isinstance(item, str):
            check_input(item, f"{name} {index} of {len(inputs)}")
            continue
        if not isinstance(item, list) or not item or not all(type(token) is int for token in item):
            raise UsageError(f"{name} has {item!r:.80}, expected a text or token ids")
        outside = [token for token in item if not 0 <= token < size]
        if outside:
            raise UsageError(
                f"{name} has the token id {outside[0]}, expected ids from 0 to {size - 1}, the "
                f"vocabulary"
            )
    return inputs


def parse_sequences(value: Any) -> tuple[list[str | Pair], bool]:
    """Return a list of texts and pairs of texts, and True if the request has a list of them.

    Raises UsageError or RequestError for other values.
    """
    if isinstance(value, str):
        return [check_input(value, "inputs")], False
    if isinstance(value, list) and value and all(isinstance(item, list) for item in value):
        return [
            parse_sequence(item, f"inputs {index} of {len(value)}")
            for index, item in enumerate(value)
        ], True
    if value == []:
        raise empty_error("inputs")
    return [parse_sequence(value, "inputs")], False


def parse_sequence(value: Any, name: str) -> str | Pair:
    if (
        not isinstance(value, list)
        or len(value) not in (1, 2)
        or not all(isinstance(part, str) for part in value)
    ):
        raise UsageError(f"{name} is {value!r:.80}, expected a text, or a list of one or two texts")
    parts = [check_input(part, name) for part in value]
    return parts[0] if len(parts) == 1 else (parts[0], parts[1])


def encode(model: ServedModel, texts: Sequence[str | Pair], how: Truncation) -> list[Encoding]:
    """Return the encoding of each text, truncated if the request says so in `how`.

    Raises TooLong for a text that is too long without truncation.
    """
    limit = longest(model)
    if how.truncate:
        shortened = [first_characters(text, limit * MAX_TOKEN_LENGTH, how.side) for text in texts]
        return encode_texts(model.runtime, shortened, Cut(limit, side=how.side))
    for text in texts:
        size = len(text) if isinstance(text, str) else sum(map(len, text))
        if size > limit * MAX_TOKEN_LENGTH:
            raise TooLong(
                f"a text has {size} characters, expected at most {limit * MAX_TOKEN_LENGTH}: "
                f"shorten it or set truncate=true"
            )
    rows = encode_texts(model.runtime, texts)
    check_lengths([len(row.ids) for row in rows], limit)
    return rows


def check_lengths(lengths: Sequence[int], limit: int) -> None:
    if max(lengths) > limit:
        raise TooLong(
            f"a text has {max(lengths)} tokens, expected at most {limit}: shorten it or set "
            f"truncate=true"
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

    `how` has the truncation and the name of the prompt. Token ids are used unchanged. With a prompt
    they are decoded first.
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
    """Return the hidden states (S, D) of each input, and the number of tokens of the prompt.

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
    None for all.
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
    model: ServedModel, sequences: Sequence[str | Pair], how: Truncation, is_raw: bool
) -> list[np.ndarray]:
    """Return the scores of all labels for each of `sequences`: logits if `is_raw`, otherwise
    probabilities. Probabilities are sigmoids for independent labels and for a single label, else
    the softmax.

    `how` says whether, and on which side, texts that are too long are cut.
    """
    config = model.runtime.info.config
    is_independent = (
        config.get("problem_type") == "multi_label_classification" or len(config["id2label"]) == 1
    )
    function = FUNCTIONS["none" if is_raw else "sigmoid" if is_independent else "softmax"]
    rows = encode(model, sequences, how)
    results: list[np.ndarray] = [np.empty(0)] * len(rows)
    for index, outputs in run(model.runtime, rows):
        results[index] = function(outputs["logits"])
    return results


def labels(
    model: ServedModel, sequences: Sequence[str | Pair], how: Truncation, is_raw: bool
) -> list[list[dict[str, Any]]]:
    names = label_names(model.runtime)
    orders = [
        (scores, np.argsort(-scores, kind="stable").tolist())
        for scores in compute_scores(model, sequences, how, is_raw)
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
