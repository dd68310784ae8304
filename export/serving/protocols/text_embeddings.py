"""The endpoints of text-embeddings-inference
(https://github.com/huggingface/text-embeddings-inference): embeddings, classification and
reranking."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from tokenizers import Encoding

from ... import __version__
from ...engine.encoder import MAX_CALLS, max_row_length
from ...errors import TOKENIZER_FAILED, RequestError, TooLong, UsageError
from ...heads import CLASSIFY, CLASSIFY_IMAGES, EMBED, EMBED_SPARSE, MAX_CHARACTERS
from ...text.checks import Pair, TokenizerErrors, is_strings
from ...text.model_facts import model_facts
from ...text.scores import FUNCTIONS, probability_function
from ...text.sentence_modules import normalize, read_poolings
from ...text.tasks import embedding, reranking
from ...text.tasks.classification import label_rows
from ...text.tasks.task import JsonObject
from ...text.text_model import Cut, Row, TextModel
from ..models import Ability, ServedModel, max_batch_tokens
from .protocol import (
    Protocol,
    json_response,
    name_in_path,
    render_list,
    served_models,
    server_settings,
    short_repr,
    use_model,
    validate,
)
from .text_embeddings_requests import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PredictRequest,
    RerankRequest,
    SimilarityRequest,
    TEIRequest,
    TokenizeRequest,
    Truncation,
    check_number,
    empty_error,
    parse_sequences,
    parse_texts,
)

router = APIRouter(tags=["text-embeddings-inference"])

# characters per token; longer texts are rejected before they are tokenized
MAX_TOKEN_LENGTH = 250
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
TYPES = {400: "Empty", 424: "Backend", 429: "Overloaded", 500: "Backend", 503: "Unhealthy"}


EMBEDS = Ability("embed texts", lambda model: model.has_task(EMBED))
EMBEDS_SPARSE = Ability("embed texts as sparse vectors", lambda model: model.has_task(EMBED_SPARSE))
CLASSIFIES = Ability("label texts", lambda model: model.has_task(CLASSIFY))
RERANKS = Ability(
    "rerank texts, for which a head with one label is needed",
    lambda model: CLASSIFIES.fits(model) and len(model.info.config["id2label"]) == 1,
)
READS = Ability("embed or label texts", lambda model: model.has_task(EMBED, EMBED_SPARSE, CLASSIFY))
TOKENIZES = Ability("tokenize texts", lambda model: model.reads_texts)
DECODES = Ability("decode token ids", lambda model: model.reads_texts)


# ------------------------------------------------------------------------------------------- errors


def error_body(error: RequestError) -> JsonObject:
    kind = "Tokenizer" if error.code == TOKENIZER_FAILED else TYPES.get(error.status, "Validation")
    return {"error": error.message, "error_type": kind}


PROTOCOL = Protocol(router, error_body, validation=422)


# ---------------------------------------------------------------------------------------- endpoints


@router.post("/")
async def answer(request: Request, body: JsonObject) -> Response:
    """Respond like /embed, /rerank or /predict, depending on the task of the model.

    `InferenceClient(model=url)` of huggingface_hub sends its requests to this path."""
    name = body.get("model")
    model = find_model(request, READS, name if isinstance(name, str) else None)
    endpoint, form = next(
        (endpoint, form) for ability, endpoint, form in ENDPOINTS if ability.fits(model)
    )
    return await endpoint(request, validate(body, form))


@router.post("/embed")
async def embed(request: Request, body: EmbedRequest) -> Response:
    """Return one vector for each input.

    The response is a list of lists of numbers in the order of the inputs, also for one input. The
    export's sentence-transformers modules select pooling and linear maps. The field `normalize`
    decides about normalization."""

    def vectors(model: ServedModel, rows: Sequence[Row], prompt_length: int) -> list[Any]:
        result = plain_vectors(model, rows, prompt_length, body.dimensions)
        if body.dimensions is not None:
            check_dimensions(body.dimensions, result.shape[1])
        return (normalize(result) if body.normalize else result).tolist()

    return await embed_with(request, EMBEDS, body, vectors)


@router.post("/embed_sparse")
async def embed_sparse(request: Request, body: EmbedSparseRequest) -> Response:
    """Return one sparse vector for each input.

    The response is a list in the order of the inputs, also for one input. Each entry is a list of
    `{"index": number, "value": number}` with the values that are not 0, where `index` is the id of
    a token. The model must be a masked language model with SpladePooling, or a BGE-M3."""

    def vectors(model: ServedModel, rows: Sequence[Row], _: int) -> Iterable[Any]:
        return embedding.sparse_vectors(
            model.runtime, rows, model.info.sentence_settings.max_active_dims
        )

    return await embed_with(request, EMBEDS_SPARSE, body, vectors)


@router.post("/embed_all")
async def embed_all(request: Request, body: EmbedAllRequest) -> Response:
    """Return the vectors of all tokens of each input, without pooling.

    The response is a list in the order of the inputs, also for one input. Each entry has a list of
    numbers for each token, with the special tokens and those of a prompt."""

    def vectors(model: ServedModel, rows: Sequence[Row], _: int) -> Iterable[Any]:
        return (states.tolist() for states in embedding.hidden_states(model.runtime, rows))

    return await embed_with(request, EMBEDS, body, vectors)


async def embed_with(
    request: Request, ability: Ability, body: EmbedAllRequest, vectors: Callable[..., Iterable[Any]]
) -> Response:
    """Return the response with a list of numbers for each input of `body`: those that `vectors`
    returns from the model, the tokens of the inputs, and the number of tokens of the prompt.

    Raises errors as `choose_model` and `parse_texts` do.
    """
    model = await choose_model(request, ability, body.model)
    inputs, cut = read_inputs(request, model, body.inputs), cut_for(request, model, body)

    def answer() -> bytes:
        return render_list(vectors(model, *encode_inputs(model, inputs, body.prompt_name, cut)))

    return json_response(await model.read(len(inputs), answer))


@router.post("/similarity")
async def similarity(request: Request, body: SimilarityRequest) -> Response:
    """Return the cosine similarity of a sentence to each of several other sentences.

    The response is a list of numbers in the order of `sentences`."""
    model = await choose_model(request, EMBEDS, body.model)
    if not body.inputs.sentences:
        raise empty_error("inputs.sentences")
    inputs = read_inputs(request, model, [body.inputs.source_sentence, *body.inputs.sentences])
    prompt_name = None if body.parameters is None else body.parameters.prompt_name
    cut = cut_for(request, model, body.parameters)

    def answer() -> list[float]:
        rows = encode_inputs(model, inputs, prompt_name, cut)
        vectors = normalize(plain_vectors(model, *rows))
        return (vectors[1:] @ vectors[0]).tolist()

    return JSONResponse(await model.read(len(inputs), answer))


@router.post("/predict")
async def predict(request: Request, body: PredictRequest) -> Response:
    """Return all labels of each text or pair of texts, best first.

    The response to a text or a pair is a list of `{"score": number, "label": name}`. The response
    to a list of lists is a list of such lists, in the same order. Scores are probabilities, or
    logits with `raw_scores`."""
    model = await choose_model(request, CLASSIFIES, body.model)
    sequences, is_batch = parse_sequences(body.inputs)
    check_number("inputs", sequences, server_settings(request).max_batch)
    cut = cut_for(request, model, body)
    config = model.runtime.info.config
    function = FUNCTIONS["none" if body.raw_scores else probability_function(config)]

    def answer() -> list[Any]:
        rows, _ = encode_inputs(model, sequences, None, cut)
        return label_rows(model.runtime, rows, function)

    results = await model.read(len(sequences), answer)
    return JSONResponse(results if is_batch else results[0])


@router.post("/rerank")
async def rerank(request: Request, body: RerankRequest) -> Response:
    """Score how well each text answers the query. Return the best text first.

    The response is a list of `{"index": number, "score": number}`, where `index` is the position of
    the text in the request. With `return_text` each entry has the `text` too. The model must have
    one label."""
    model = await choose_model(request, RERANKS, body.model)
    check_number("texts", body.texts, server_settings(request).max_batch)
    cut = cut_for(request, model, body)
    pairs = [(body.query, text) for text in body.texts]

    def answer() -> list[JsonObject]:
        rows = rows_to_rank(model, pairs, cut)
        return reranking.rank_texts(reranking.score_rows(model.runtime, rows, body.raw_scores))

    ranks = await model.read(len(pairs), answer)
    texts = [{"text": body.texts[rank["index"]]} if body.return_text else {} for rank in ranks]
    return JSONResponse([{**rank, **text} for rank, text in zip(ranks, texts)])


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Return the tokens of each text.

    The response is a list of tokens for each text, also for one text. A token has the fields `id`,
    `text`, `special`, `start` and `stop`. `start` and `stop` are offsets in the UTF-8 bytes of the
    text after its prompt is added, null for special tokens. Texts are not truncated."""
    model = await choose_model(request, TOKENIZES, body.model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not is_strings(texts):
        raise UsageError(f"inputs is {short_repr(body.inputs)}, expected a text or a list of texts")
    check_number("inputs", texts, server_settings(request).max_batch)
    size = sum(map(len, texts))  # the response has about 100 bytes per token
    if size > MAX_CHARACTERS:
        raise TooLong(f"inputs has {size} characters, expected at most {MAX_CHARACTERS}")
    return json_response(await model.read(len(texts), render_tokens, model.runtime, texts, body))


@router.post("/decode")
async def decode_ids(request: Request, body: DecodeRequest) -> Response:
    """Return the text of each list of token ids.

    The response is a list of texts in the same order, also for one list."""
    model = await choose_model(request, DECODES, body.model)
    rows = read_inputs(request, model, body.ids, "ids")
    if any(isinstance(row, str) for row in rows):
        raise UsageError(
            f"ids is {short_repr(body.ids)}, expected token ids or a list of lists of token ids"
        )
    skips = body.skip_special_tokens
    return JSONResponse(await model.read(len(rows), model.runtime.decode, rows, skips))


@router.get("/info")
async def info(request: Request, model: str | None = None) -> Response:
    """Return information about the model, with the fields of text-embeddings-inference.

    More fields are the choices that the model makes, such as its pooling, prompts and target, and
    `warnings` of those that are probably wrong. The vocabulary is checked while the model is
    loaded. Any model may be named; otherwise it is the only one that embeds or labels texts, or
    the only one of a server without such a model.
    """
    is_named = model is not None or name_in_path(request) is not None
    accepts_all = is_named or not any(map(READS.fits, served_models(request)))
    ability = READS._replace(fits=lambda model: True) if accepts_all else READS
    served = find_model(request, ability, model)
    settings, dtype = server_settings(request), served.info.dtype
    arrangement = served.plan.arrangement
    tokenizer = getattr(served.runtime, "tokenizer", None)  # only of a loaded model of texts
    choices = await asyncio.to_thread(model_facts, served.info, arrangement.threads, tokenizer)
    limit = max_row_length(served.info.config, settings.max_source)
    facts: JsonObject = {
        "model_id": served.name,
        "model_sha": None,
        "model_dtype": DTYPES.get(dtype, dtype),
        "served_model_name": served.name,
        "model_type": model_type(served),
        "max_concurrent_requests": settings.requests,
        "max_input_length": cut_length(served, limit) if served.reads_texts else None,
        "max_batch_tokens": max_batch_tokens(served.info, arrangement),
        "max_batch_requests": None,
        "max_client_batch_size": settings.max_batch,
        "auto_truncate": settings.auto_truncate,
        "tokenization_workers": MAX_CALLS,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
    # a path of the server is none of the client's business
    directory, problems = str(served.info.directory), choices["warnings"]
    facts["warnings"] = [problem.replace(directory, served.name) for problem in problems]
    return JSONResponse(choices | facts)


# (ability, endpoint, request class) of POST /; the first ability that the model has counts
ENDPOINTS: tuple[tuple[Ability, Callable[..., Any], type[TEIRequest]], ...] = (
    (EMBEDS, embed, EmbedRequest),
    (EMBEDS_SPARSE, embed_sparse, EmbedSparseRequest),
    (RERANKS, rerank, RerankRequest),
    (CLASSIFIES, predict, PredictRequest),
)


# ------------------------------------------------------------------------------------------- models


async def choose_model(request: Request, ability: Ability, name: str | None) -> ServedModel:
    """Return what `find_model` returns, as `use_model` does."""
    return await use_model(request, find_model(request, ability, name))


def find_model(request: Request, ability: Ability, name: str | None) -> ServedModel:
    """Return the model of the path, or with this `name`, or the only one with the `ability`. It
    need not be loaded.

    Raises:
        RequestError: 422 for an unknown name, and 424 if no model, several models or the named one
            do not fit, as in text-embeddings-inference.
    """
    try:
        return served_models(request).choose(ability, name_in_path(request) or name)
    except RequestError as error:
        raise RequestError(424 if error.status == 400 else 422, error.message) from None


def longest(model: ServedModel) -> int:
    """Return the maximum number of tokens of a text that the model reads, including special
    tokens."""
    return cut_length(model, model.encoder.max_length)


def cut_length(model: ServedModel, limit: int) -> int:
    """Return `limit`, the maximum number of tokens of a row, or fewer if the export says so."""
    return min(limit, embedding.max_length(model.info)) if model.has_prompts else limit


def model_type(model: ServedModel) -> JsonObject:
    if EMBEDS.fits(model):
        modules = model.info.manifest.get("sentence_modules") or [{}]
        return {"embedding": {"pooling": "+".join(read_poolings(modules[0]))}}
    if EMBEDS_SPARSE.fits(model):
        return {"embedding": {"pooling": "splade"}}
    if not model.has_task(CLASSIFY, CLASSIFY_IMAGES):
        return {}
    config = model.info.config
    names = {"id2label": config["id2label"], "label2id": config.get("label2id") or {}}
    return {"reranker" if RERANKS.fits(model) else "classifier": names}


# ------------------------------------------------------------------------------------------- tokens


def read_inputs(
    request: Request, model: ServedModel, value: Any, name: str = "inputs"
) -> list[str | list[int]]:
    """Return the texts and rows of token ids in `value`, the field `name` of `request`. Raises
    errors as `parse_texts` does."""
    vocab_size = model.runtime.info.config["vocab_size"]
    return parse_texts(name, value, server_settings(request).max_batch, vocab_size)


def cut_for(request: Request, model: ServedModel, body: Truncation | None = None) -> Cut:
    """Return how texts that are too long are cut, by default as the server's settings say."""
    options = body or Truncation.model_validate({})
    return options.cut(longest(model), server_settings(request).auto_truncate)


def limit_characters(texts: Sequence[Any], cut: Cut) -> list[Any]:
    """Return `texts`, which may be pairs or token ids, with as many characters as can be tokens
    within `cut`. If it rejects texts, raise TooLong for a text of more characters."""
    limit = cut.longest * MAX_TOKEN_LENGTH
    if not cut.rejects:
        return [first_characters(text, limit, cut.side) for text in texts]
    for text in texts:
        size = sum(map(len, text)) if isinstance(text, tuple) else len(text)
        if size > limit:
            raise TooLong(
                f"a text has {size} characters, expected at most {limit} without truncation"
            )
    return list(texts)


def first_characters(text: Any, max_length: int, side: str | None) -> Any:
    """Return the first `max_length` characters of a text or of each text of a pair, or the last
    ones if `side` is "left". Token ids are returned unchanged."""
    if isinstance(text, tuple):
        return tuple(first_characters(part, max_length, side) for part in text)
    if isinstance(text, list):
        return text
    return text[-max_length:] if side == "left" else text[:max_length]


def encode_inputs(
    model: ServedModel, inputs: Sequence[Any], prompt_name: str | None, cut: Cut
) -> tuple[Sequence[Row], int]:
    """Return the tokens of each input, and the number of tokens of the prompt, 0 without one.

    Inputs to embed are texts, which follow the prompt, or token ids; all others are texts or pairs.
    Raises UsageError for an unknown prompt, and TooLong for an input that is too long without
    truncation.
    """
    if not model.has_prompts:
        return model.runtime.encode_texts(limit_characters(inputs, cut), cut), 0
    prompt = embedding.select_prompt(model.info.sentence_settings, prompt_name, None)
    inputs = limit_characters(inputs, cut)
    return embedding.rows_to_embed(model.runtime, inputs, prompt, cut)


def rows_to_rank(model: ServedModel, pairs: Sequence[Pair], cut: Cut) -> Sequence[Row]:
    """Return the tokens of each pair of a query and a text, with the instruction of the export.
    Raises TooLong for a pair that `cut` rejects."""
    instruction = reranking.select_instruction(model.runtime)
    return reranking.pair_rows(model.runtime, limit_characters(pairs, cut), instruction, cut)


def plain_vectors(
    model: ServedModel, rows: Sequence[Row], prompt_length: int, width: int | None = None
) -> np.ndarray:
    """Return one vector for each of `rows` (B, E), without the last normalization of the export.
    `width` is the number of values of each vector, None for all."""
    modules = model.runtime.sentence_modules.without_normalization()
    return embedding.vectors(model.runtime, rows, prompt_length, width, modules)


def check_dimensions(dimensions: int, width: int) -> None:
    """Raise UsageError if `dimensions` is more than `width`, the length of the vectors."""
    if dimensions > width:
        raise UsageError(f"dimensions is {dimensions}, expected at most {width}", "dimensions")


def render_tokens(runtime: TextModel, texts: Sequence[str], body: TokenizeRequest) -> bytes:
    prompt = embedding.select_prompt(runtime.info.sentence_settings, body.prompt_name, None)
    prompted = [prompt + text for text in texts]
    with TokenizerErrors(runtime.path):
        encodings = runtime.encode(prompted, special_tokens=body.add_special_tokens)
    return render_list(
        describe_tokens(encoding, text) for encoding, text in zip(encodings, prompted, strict=True)
    )


def describe_tokens(encoding: Encoding, text: str) -> list[JsonObject]:
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
