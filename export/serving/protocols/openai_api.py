"""The endpoints of OpenAI for completions, embeddings and models
(https://platform.openai.com/docs/api-reference)."""

import asyncio
import base64
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, create_model
from tokenizers import Encoding

from ...errors import RequestError, TooLong, UsageError
from ...inference import options as generation
from ...inference.options import special_token
from ...scheduler.client import Client
from ...scheduler.request import Generated, GenerationInput
from ...text.tasks import embedding
from ...text.tasks.rows import TokenRow, check_unicode
from ...text_runtime import TextRuntime, prompt
from ..app import to_request_error
from ..models import ServedModel
from ..streams import EventStream, event, to_json
from ..translation.translator import call_off_loop
from .completions import Chunk, Completion, join_chunks
from .protocol import Protocol, checked_options, name_in_path, served_models, server_settings
from .text_embeddings import check_dimensions, check_input

router = APIRouter(tags=["OpenAI"])

GREEDY = 1e-5  # lower temperatures mean greedy search, as in vLLM
CHECK_COST = 100  # characters that are tokenized in the time that checking one input takes
TOO_LONG = "context_length_exceeded"
DONE = b"data: [DONE]\n\n"
INPUTS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
EXPECTED = "a text, a list of texts, a list of token ids or a list of lists of token ids"
STOPS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        {"type": "null"},
    ]
}
# Most options of `Runtime.generate` are fields of a request. These have another name at OpenAI.
RENAMED = {
    "max_new_tokens",
    "max_length",
    "num_return_sequences",
    "do_sample",
    "temperature",
    "top_p",
    "seed",
}
SINGLE_ROW = {
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
}  # not possible if rows share a batch
NO_FIELDS = {*RENAMED, *SINGLE_ROW, "pad_token_id", "decoder_start_token_id"}
OPTIONS = [name for name in generation.FIELDS if name not in NO_FIELDS]
# fields that are not supported, with the only value that is accepted
NEUTRAL = {
    "best_of": 1,
    "suffix": "",
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
# our names of options in errors, and those of OpenAI
WORDS = {"max_new_tokens": "max_tokens", "num_return_sequences": "n", "input_ids": "prompt"}
ERRORS = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "model_not_found"),
}
ERRORS |= {429: ("rate_limit_error", "rate_limit_exceeded")}


# ----------------------------------------------------------------------------------------- requests


class StreamOptions(BaseModel):
    """The options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = Field(
        None, description="add a last part with the number of tokens"
    )
    include_obfuscation: bool | None = Field(None, description="has no effect")


class OpenAIRequest(BaseModel):
    """A request of the API of OpenAI. A field that is null counts as absent; unknown fields are
    rejected."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = Field(
        None, description="name of a model; by default the only model that fits"
    )
    user: str | None = Field(None, description="has no effect")


class CompletionFields(OpenAIRequest):
    """A request for completions. A field that is null counts as absent; unknown fields are
    rejected."""

    prompt: Annotated[Any, WithJsonSchema(INPUTS)] = Field(
        None,
        description=(f"prompts to continue: {EXPECTED}; by default the model's first token"),
        examples=["ROMEO:"],
    )
    max_tokens: int | None = Field(
        16, ge=0, le=2**31, description="maximum number of new tokens; 0 is for echo only"
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        description=(
            "sampling temperature; 0 is greedy search; by default the temperature of "
            "generation_config.json, or 1"
        ),
    )
    top_p: float | None = Field(
        None, ge=0, le=1, description=generation.FIELDS["top_p"].metadata["help"]
    )
    n: int | None = Field(
        1,
        ge=1,
        le=128,
        description="number of completions per prompt; more than 1 needs sampling or num_beams",
    )
    stop: Annotated[Any, WithJsonSchema(STOPS)] = Field(
        None, description="text, or list of up to 4 texts, that ends a completion"
    )
    seed: int | None = Field(
        None, ge=0, description="seed of sampling, for reproducible completions"
    )
    echo: bool | None = Field(False, description="begin the completion with the prompt")
    logprobs: int | None = Field(
        None, ge=0, le=5, description="number of top tokens with log probabilities per position"
    )
    stream: bool | None = Field(
        False, description="send the completion in parts, as server-sent events"
    )
    stream_options: StreamOptions | None = Field(None, description="options of stream")
    best_of: int | None = Field(None, description="not supported except for 1")
    suffix: str | None = Field(None, description="not supported")
    logit_bias: dict[str, float] | None = Field(None, description="not supported")
    presence_penalty: float | None = Field(0, description="not supported except for 0")
    frequency_penalty: float | None = Field(0, description="not supported except for 0")


class EmbeddingRequest(OpenAIRequest):
    """A request for embeddings. A field that is null counts as absent; unknown fields are
    rejected."""

    input: Annotated[Any, WithJsonSchema(INPUTS)] = Field(
        description=f"inputs to embed: {EXPECTED}", examples=["a dog"]
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        "float",
        description="list of numbers, or base64 of the vector as little-endian float32",
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        description=(
            "length of the vectors: their first values, normalized; by default the length of the "
            "model's vectors"
        ),
    )


if TYPE_CHECKING:
    CompletionRequest = CompletionFields
else:
    option_fields = {
        name: (Any, Field(None, description=generation.FIELDS[name].metadata["help"]))
        for name in OPTIONS
    }
    CompletionRequest = create_model(
        "CompletionRequest",
        __base__=CompletionFields,
        __doc__=CompletionFields.__doc__,
        **option_fields,
    )


def error_body(error: RequestError) -> dict[str, Any]:
    kind, code = ERRORS.get(
        error.status,
        ("invalid_request_error" if error.status < 500 else "server_error", error.code),
    )
    is_field = (
        error.param in CompletionRequest.model_fields
        or error.param in EmbeddingRequest.model_fields
    )
    param = error.param if is_field else None
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def too_long(message: str) -> RequestError:
    return RequestError(400, f"the input is too long: {message}", code=TOO_LONG)


PROTOCOL = Protocol("OpenAI", router, error_body)


# -------------------------------------------------------------------------------------- completions


class CompletionPrompt(NamedTuple):
    ids: list[int]
    text: str | None = None  # None if the request has token ids


@router.post("/v1/completions")
async def complete(request: Request, body: CompletionRequest) -> Any:
    """Continue each prompt `n` times.

    Besides the fields of OpenAI, a request can have generation options of transformers, such as
    `num_beams`."""
    model = served_models(request).choose(
        completes, "complete texts", name_in_path(request), body.model
    )
    scheduler: Client = model.scheduler  # type: ignore[assignment]
    options, stops = parse_options(body, model.runtime.info.defaults), parse_stops(body.stop)
    check_fields(body)
    prompts = await parse_prompts(body.prompt, model.runtime, server_settings(request).max_batch)
    size = sum(len(item.ids) for item in prompts) + CHECK_COST * len(prompts)
    completions = await call_off_loop(
        size, make_completions, model.runtime, scheduler, prompts, options, stops, body
    )
    about = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
    }
    if body.stream:
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return EventStream(
            events(
                await wait_for_first(parts(scheduler, completions)),
                about,
                completions if with_usage else None,
            )
        )
    return Response(
        await full_response(scheduler, completions, about), media_type="application/json"
    )


def make_completions(
    runtime: TextRuntime,
    scheduler: Client,
    prompts: Sequence[CompletionPrompt],
    options: dict[str, Any],
    stops: list[str],
    body: CompletionFields,
) -> list[Completion]:
    """Return the completion to generate for each of `prompts`. `options` are those of
    `Runtime.generate`.

    `stops` are the stop sequences.

    Raises:
        RequestError, UsageError: with OpenAI's names of options, if the model cannot run a prompt.
    """
    n, is_empty = options["num_return_sequences"], body.max_tokens == 0
    inputs = [admit_prompt(scheduler, item, options, body) for item in prompts]
    echoes = [""] * len(prompts)
    if body.echo:
        echoes = [
            runtime.decode([prompt.ids])[0] if prompt.text is None else prompt.text
            for prompt in prompts
        ]
    numbered = enumerate(zip(inputs, echoes, strict=True))
    return [
        Completion(runtime, prompt_input, index * n, begins, stops, is_empty)
        for index, (prompt_input, begins) in numbered
    ]


def completes(model: ServedModel) -> bool:
    return model.completes


def check_fields(body: CompletionFields) -> None:
    """Raise UsageError if a field is not supported, or two fields contradict each other."""
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name)
        if value not in (None, neutral):
            expected = f"null or {json.dumps(neutral)}"
            raise UsageError(
                f"{name} is {short_repr(value)}, expected {expected}: nothing else is supported",
                name,
            )
    if body.stream_options is not None and not body.stream:
        raise UsageError(
            "stream_options is set without stream, expected stream=true", "stream_options"
        )
    if body.max_tokens == 0 and not body.echo:
        raise UsageError("max_tokens is 0 without echo=true, expected at least 1", "max_tokens")


def parse_stops(stop: Any) -> list[str]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > 4
        or not all(isinstance(text, str) and text for text in stops)
    ):
        raise UsageError(
            f"stop is {short_repr(stop)}, expected a text or a list of up to 4 texts, not empty",
            "stop",
        )
    return stops


def parse_options(body: CompletionFields, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `Runtime.generate` for a request.

    Fields missing in the request come from `defaults`, those of generation_config.json, as in vLLM.
    Otherwise OpenAI's defaults apply: one completion, sampled from all tokens.

    Raises:
        UsageError: if a value is invalid, or if two values contradict each other.
    """
    values = {name: getattr(body, name) for name in OPTIONS}
    present = {name: value for name, value in values.items() if value is not None}
    options = checked_options({"num_beams": 1, **present})
    beams, n = options["num_beams"], body.n or 1
    temperature = body.temperature
    if temperature is None:
        temperature = 0 if beams > 1 else defaults.get("temperature", 1.0)
    is_sampled = temperature >= GREEDY
    if is_sampled and beams > 1:
        seen = f"temperature is {temperature:g} with num_beams {beams}"
        raise UsageError(f"{seen}, expected 0, because beam search does not sample", "temperature")
    if not is_sampled and n > beams:
        expected = f"at most num_beams, {beams}," if beams > 1 else "1"
        raise UsageError(
            f"n is {n} with temperature {temperature:g}, expected {expected}: more completions "
            f"need sampling",
            "n",
        )
    options |= {
        "max_new_tokens": 16 if body.max_tokens is None else max(1, body.max_tokens),
        "num_return_sequences": n,
    }
    options["do_sample"] = is_sampled
    if is_sampled:
        sampling = {"temperature": temperature, "top_p": body.top_p, "seed": body.seed}
        options |= {name: value for name, value in sampling.items() if value is not None}
        options.setdefault("top_k", defaults.get("top_k", 0))
    return options


def admit_prompt(
    scheduler: Client, item: CompletionPrompt, options: dict[str, Any], body: CompletionFields
) -> GenerationInput:
    """Return the generation input of the prompt `item`.

    Raises RequestError or UsageError, with OpenAI's names of options, if the model cannot run it.
    """
    scores_prompt = bool(body.echo) and body.logprobs is not None
    max_length, read, new = (
        scheduler.admission.slot_size.length,
        len(item.ids),
        options["max_new_tokens"],
    )
    if read + new - 1 > max_length:  # the last token is not decoded again
        seen = f"{read} tokens of the prompt and max_tokens={new}"
        raise too_long(f"{seen}, expected at most {max_length + 1} in total")
    try:
        return scheduler.admission.admit(
            item.ids, options, top_logprobs=body.logprobs, scores_prompt=scores_prompt
        )
    except (TooLong, UsageError) as error:
        raise with_api_names(error) from None


def with_api_names(error: TooLong | UsageError) -> UsageError:
    """Return `error` as a UsageError with OpenAI's names of options, such as max_tokens for
    max_new_tokens."""
    text, param = str(error), getattr(error, "param", None)
    for ours, theirs in WORDS.items():
        text = text.replace(ours, theirs)
    return UsageError(text, None if param is None else WORDS.get(param, param))


async def parse_prompts(value: Any, runtime: TextRuntime, max_items: int) -> list[CompletionPrompt]:
    """Return the prompts in `value`, with their token ids. A missing or empty prompt becomes the
    model's first token.

    Raises:
        UsageError: for invalid prompts, for more than `max_items`, and for an empty prompt if the
            model has no first token.
        RequestError: for too many token ids.
    """
    inputs: list[Any] = [""] if value is None else parse_inputs("prompt", value, max_items, runtime)
    if not isinstance(inputs[0], str):
        return [CompletionPrompt(ids) for ids in inputs]
    encodings = await call_off_loop(sum(map(len, inputs)), runtime.encode, inputs, True)
    rows: list[list[int]] = [prompt(encoding) for encoding in encodings]
    first = special_token("bos_token_id", runtime.info.generation_config, runtime.info.config)
    for index, ids in enumerate(rows):
        if not ids and first is None:
            seen = (
                f"prompt {index} of {len(rows)} is {short_repr(inputs[index])}, which has no tokens"
            )
            raise UsageError(
                f"{seen}, expected words: the model has no bos_token_id to start with", "prompt"
            )
    return [CompletionPrompt(ids or [first], text) for ids, text in zip(rows, inputs, strict=True)]


def parse_inputs(name: str, value: Any, max_items: int, runtime: TextRuntime) -> list[Any]:
    """Return the list of texts, or of rows of token ids, in `value`, the field `name` of a request.

    Raises:
        UsageError: for other values, for more than `max_items` and for ids outside the vocabulary.
        RequestError: for too many token ids.
    """
    inputs = [value] if isinstance(value, str) else value
    if not isinstance(inputs, list) or not inputs:
        raise UsageError(f"{name} is {short_repr(value)}, expected {EXPECTED}", name)
    if all(type(item) is int for item in inputs):
        inputs = [inputs]
    if len(inputs) > max_items:
        raise UsageError(f"{name} has {len(inputs)} items, expected at most {max_items}", name)
    if all(isinstance(item, str) for item in inputs):
        for index, text in enumerate(inputs):
            try:
                check_unicode(text, f"{name} {index} of {len(inputs)}")
            except ValueError as error:
                raise UsageError(str(error), name) from None
        return inputs
    size, longest = (
        runtime.info.config[field] for field in ("vocab_size", "max_position_embeddings")
    )
    for row in inputs:
        if not isinstance(row, list) or not row or not all(type(item) is int for item in row):
            raise UsageError(f"{name} has {short_repr(row)}, expected {EXPECTED}", name)
        if len(row) > longest:
            raise too_long(
                f"{name} has {len(row)} tokens, expected at most {longest}, the model's maximum"
            )
        outside = [token for token in row if not 0 <= token < size]
        if outside:
            raise UsageError(
                f"{name} has the token id {outside[0]}, expected ids from 0 to {size - 1}, the "
                f"vocabulary",
                name,
            )
    return inputs


def short_repr(value: Any) -> str:
    return f"{value!r:.80}"


def count_usage(completions: Sequence[Completion]) -> dict[str, int]:
    read, new = (
        sum(len(completion.input.prompt) for completion in completions),
        sum(completion.tokens for completion in completions),
    )
    return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}


async def full_response(
    scheduler: Client, completions: Sequence[Completion], about: dict[str, Any]
) -> bytes:
    """Return the response as JSON, with the answer to each of `completions`. `about` are its fields
    besides choices and usage.

    With stop texts the tokens are streamed, so that generation ends there.
    """
    if completions[0].stops and not completions[0].is_buffered:
        return render(
            about,
            join_chunks([chunk async for chunk in parts(scheduler, completions)]),
            completions,
        )
    results = await scheduler.generate([completion.input for completion in completions])
    size = sum(
        completion.size(generated)
        for completion, generated in zip(completions, results, strict=True)
    )
    return await call_off_loop(size, render_results, about, completions, results)


def render_results(
    about: dict[str, Any], completions: Sequence[Completion], results: list[list[Generated]]
) -> bytes:
    return render(
        about,
        [
            choice
            for completion, result in zip(completions, results, strict=True)
            for choice in completion.full_choices(result)
        ],
        completions,
    )


def render(about: dict[str, Any], choices: list[Chunk], completions: Sequence[Completion]) -> bytes:
    return to_json({**about, "choices": choices, "usage": count_usage(completions)})


async def parts(
    scheduler: Client, completions: Sequence[Completion]
) -> AsyncGenerator[Chunk, None]:
    """Yield the parts of all completions in the order of their arrival. Closing the iterator stops
    the generation."""
    if len(completions) == 1:
        async with aclosing(completions[0].chunks(scheduler)) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    queue: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()

    async def forward(completion: Completion) -> None:
        try:
            async with aclosing(completion.chunks(scheduler)) as chunks:
                async for chunk in chunks:
                    queue.put_nowait(chunk)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(forward(completion)) for completion in completions]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ------------------------------------------------------------------------------------------ streams


async def wait_for_first(chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
    """Wait for the first of `chunks` and return an iterator over all of them.

    Until then the request can be rejected with a status.
    """
    first = await anext(chunks)

    async def all_chunks() -> AsyncGenerator[Chunk, None]:
        async with aclosing(chunks):
            yield first
            async for chunk in chunks:
                yield chunk

    return all_chunks()


async def events(
    chunks: AsyncGenerator[Chunk, None], about: dict[str, Any], counted: Sequence[Completion] | None
) -> AsyncGenerator[bytes, None]:
    """Yield a server-sent event for each of `chunks`, with the fields `about`, and "[DONE]" at the
    end.

    If `counted` is not None, an event with the number of its tokens precedes the end. An error is
    an event too.
    """
    usage = {} if counted is None else {"usage": None}
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield event({**about, "choices": [chunk], **usage})
        if counted is not None:
            yield event({**about, "choices": [], "usage": count_usage(counted)})
    except Exception as error:
        rejection = to_request_error(error, PROTOCOL.validation)
        yield event(error_body(rejection))
        if rejection.status == 500:  # `Frame` logs it
            raise
    yield DONE


# --------------------------------------------------------------------------------------- embeddings


@router.post("/v1/embeddings")
async def embed(request: Request, body: EmbeddingRequest) -> Any:
    """Return one vector for each input.

    Texts get the prompt of the export. Token ids are embedded unchanged."""
    model = served_models(request).choose(
        lambda model: model.embeds, "embed texts", name_in_path(request), body.model
    )
    inputs = parse_inputs("input", body.input, server_settings(request).max_batch, model.runtime)
    about = {"object": "list", "model": model.name}
    assert model.encoder is not None  # every model that embeds has one
    try:
        content = await model.encoder.call(
            len(inputs), render_embeddings, model.runtime, inputs, body, about
        )
    except TooLong as error:
        raise too_long(str(error)) from None
    return Response(content, media_type="application/json")


def render_embeddings(
    runtime: TextRuntime, inputs: list[Any], body: EmbeddingRequest, about: dict[str, Any]
) -> bytes:
    """Return the response as JSON, with one vector for each of `inputs` and the fields `about`.

    Raises:
        UsageError: for an invalid number of dimensions.
        ValueError: for an input without tokens, and a model that does not embed.
    """
    rows, prompt_length = encode_inputs(runtime, inputs)
    vectors = embedding.vectors(runtime, rows, prompt_length, body.dimensions)
    if body.dimensions is not None:
        check_dimensions(body.dimensions, vectors.shape[1])
        vectors = embedding.normalize(vectors)
    values = (
        [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        if body.encoding_format == "base64"
        else vectors.tolist()
    )
    data = [
        {"object": "embedding", "index": index, "embedding": value}
        for index, value in enumerate(values)
    ]
    tokens = sum(len(row.ids) for row in rows)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return to_json({**about, "data": data, "usage": usage})


def encode_inputs(
    runtime: TextRuntime, inputs: list[Any]
) -> tuple[Sequence[Encoding | TokenRow], int]:
    """Return the tokens of each input, and the number of tokens of the export's prompt, 0 without
    one."""
    if not isinstance(inputs[0], str):
        return [TokenRow(ids, [0] * len(ids)) for ids in inputs], 0
    for index, text in enumerate(inputs):
        check_input(text, f"input {index} of {len(inputs)}")
    return embedding.rows_to_embed(
        runtime, inputs, embedding.select_prompt(embedding.sentence_config(runtime), None, None)
    )


# ------------------------------------------------------------------------------------------- models


@router.get("/v1/models")
async def list_models(request: Request) -> Any:
    """Return the models of this server, or only the model in the path."""
    name = name_in_path(request)
    models = served_models(request) if name is None else [find_model(request, name)]
    return JSONResponse({"object": "list", "data": [describe_model(model) for model in models]})


@router.get("/v1/models/{id}")
async def show_model(request: Request, id: str) -> Any:
    """Return what is known about the model with the name `id`."""
    return JSONResponse(describe_model(find_model(request, id)))


def find_model(request: Request, name: str) -> ServedModel:
    return served_models(request).choose(lambda model: True, "be used", name)


def describe_model(model: ServedModel) -> dict[str, Any]:
    created = int(model.runtime.info.directory.stat().st_mtime)
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "vanilla-transformer",
    }
