"""OpenAI's endpoints of completions, embeddings and models
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
from ..app import refusal_of
from ..models import ServedModel
from ..streams import EventStream, event, json_of
from ..translation.translator import offloaded
from .completions import Chunk, Completion, joined
from .protocol import Protocol, checked_options, models_of, name_in_path, settings_of
from .text_embeddings import check_dimensions, check_input

router = APIRouter(tags=["OpenAI"])

GREEDY = 1e-5  # a temperature below means the likeliest token, as in vLLM
INLINE_CHARACTERS = 100  # characters are cut into tokens while one input is checked
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
EXPECTED = "a text, a list of texts, a list of token ids or a list of such lists"
STOPS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        {"type": "null"},
    ]
}
# Options of `Runtime.generate` that are fields of a request under their own names: all but those
# for which OpenAI has another name, and those that say nothing to a decoder of one row.
NAMED_OTHERWISE = {
    "max_new_tokens",
    "max_length",
    "num_return_sequences",
    "do_sample",
    "temperature",
    "top_p",
    "seed",
}
OF_ONE_ROW = {"prompt_lookup_num_tokens", "max_matching_ngram_size"}  # not where rows share a batch
NO_FIELDS = {*NAMED_OTHERWISE, *OF_ONE_ROW, "pad_token_id", "decoder_start_token_id"}
OPTIONS = [name for name in generation.FIELDS if name not in NO_FIELDS]
# nothing else goes
NEUTRAL = {
    "best_of": 1,
    "suffix": "",
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
# ours and theirs, in errors
WORDS = {"max_new_tokens": "max_tokens", "num_return_sequences": "n", "input_ids": "prompt"}
ERRORS = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "model_not_found"),
}
ERRORS |= {429: ("rate_limit_error", "rate_limit_exceeded")}


# ----------------------------------------------------------------------------------------- requests


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = Field(
        None, description="Whether a last part tells the number of tokens."
    )
    include_obfuscation: bool | None = Field(None, description="Has no effect.")


class OpenAIRequest(BaseModel):
    """A request with fields that OpenAI has. A field that is `null` counts as absent; an unknown
    field is rejected."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = Field(
        None, description="The name of a model; the only one that fits if not given."
    )
    user: str | None = Field(None, description="Has no effect.")


class CompletionFields(OpenAIRequest):
    prompt: Annotated[Any, WithJsonSchema(INPUTS)] = Field(
        None,
        description=(
            f"What is continued: {EXPECTED}; the model's first token if empty or not given."
        ),
        examples=["ROMEO:"],
    )
    max_tokens: int | None = Field(
        16, ge=0, le=2**31, description="New tokens at most; 0 with echo only."
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        description=(
            "0 takes the likeliest token; that of generation_config.json if not given, else 1."
        ),
    )
    top_p: float | None = Field(
        None, ge=0, le=1, description=generation.FIELDS["top_p"].metadata["help"]
    )
    n: int | None = Field(
        1,
        ge=1,
        le=128,
        description="Answers to each prompt; more than one are sampled, or of beams.",
    )
    stop: Annotated[Any, WithJsonSchema(STOPS)] = Field(
        None, description="A text, or up to 4, at which an answer ends."
    )
    seed: int | None = Field(None, ge=0, description="The same seed gives the same answers.")
    echo: bool | None = Field(False, description="Whether the answer begins with the prompt.")
    logprobs: int | None = Field(
        None, ge=0, le=5, description="How many of the likeliest tokens are told at each place."
    )
    stream: bool | None = Field(
        False, description="Whether the answer comes in parts, as server-sent events."
    )
    stream_options: StreamOptions | None = Field(None, description="With stream only.")
    best_of: int | None = Field(None, description="Not supported, but for 1.")
    suffix: str | None = Field(None, description="Not supported.")
    logit_bias: dict[str, float] | None = Field(None, description="Not supported.")
    presence_penalty: float | None = Field(0, description="Not supported, but for 0.")
    frequency_penalty: float | None = Field(0, description="Not supported, but for 0.")


class EmbeddingRequest(OpenAIRequest):
    input: Annotated[Any, WithJsonSchema(INPUTS)] = Field(
        description=f"What is embedded: {EXPECTED}.", examples=["a dog"]
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        "float",
        description="base64 is that of the vector's numbers, float32, the lowest byte first.",
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        description=(
            "Length of the vectors: their first values, normalized; those of the model if not "
            "given."
        ),
    )


if TYPE_CHECKING:
    CompletionRequest = CompletionFields
else:
    own = {
        name: (Any, Field(None, description=generation.FIELDS[name].metadata["help"]))
        for name in OPTIONS
    }
    CompletionRequest = create_model("CompletionRequest", __base__=CompletionFields, **own)


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
    return RequestError(400, f"the context is too long: {message}", code=TOO_LONG)


PROTOCOL = Protocol("OpenAI", router, error_body)


# -------------------------------------------------------------------------------------- completions


class CompletionPrompt(NamedTuple):
    ids: list[int]
    text: str | None = None  # if it was given


@router.post("/v1/completions")
async def complete(request: Request, body: CompletionRequest) -> Any:
    """Continues each prompt, `n` times. Besides the fields of OpenAI it takes options of
    `Runtime.generate`."""
    model = models_of(request).choose(
        completes, "complete texts", name_in_path(request), body.model
    )
    scheduler: Client = model.scheduler  # type: ignore[assignment]
    options, stops = options_of(body, model.runtime.info.defaults), stops_of(body.stop)
    check_fields(body)
    prompts = await prompts_of(body.prompt, model.runtime, settings_of(request).max_batch)
    size = sum(len(each.ids) for each in prompts) + INLINE_CHARACTERS * len(prompts)
    asked = await offloaded(size, asked_of, model.runtime, scheduler, prompts, options, stops, body)
    about = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
    }
    if body.stream:
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return EventStream(
            events(await begun(parts(scheduler, asked)), about, asked if with_usage else None)
        )
    return Response(await whole(scheduler, asked, about), media_type="application/json")


def asked_of(
    runtime: TextRuntime,
    scheduler: Client,
    prompts: Sequence[CompletionPrompt],
    options: dict[str, Any],
    stops: list[str],
    body: CompletionFields,
) -> list[Completion]:
    """Return the completion to generate for each prompt. Raises as `admit_prompt`."""
    n, is_empty = options["num_return_sequences"], body.max_tokens == 0
    inputs = [admit_prompt(scheduler, each, options, body) for each in prompts]
    echoes = [""] * len(prompts)
    if body.echo:
        echoes = [
            runtime.decode([prompt.ids])[0] if prompt.text is None else prompt.text
            for prompt in prompts
        ]
    made = enumerate(zip(inputs, echoes, strict=True))
    return [
        Completion(runtime, generation_input, place * n, begins, stops, is_empty)
        for place, (generation_input, begins) in made
    ]


def completes(model: ServedModel) -> bool:
    return model.completes


def check_fields(body: CompletionFields) -> None:
    """Raise UsageError for fields that are not supported or do not go together."""
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name)
        if value not in (None, neutral):
            expected = f"null or {json.dumps(neutral)}"
            raise UsageError(
                f"{name} is {shown(value)}, expected {expected}: it is not supported here", name
            )
    if body.stream_options is not None and not body.stream:
        raise UsageError(
            "stream_options is given without stream, expected stream to be true", "stream_options"
        )
    if body.max_tokens == 0 and not body.echo:
        raise UsageError("max_tokens is 0 without echo, expected at least 1", "max_tokens")


def stops_of(stop: Any) -> list[str]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > 4
        or not all(isinstance(each, str) and each for each in stops)
    ):
        raise UsageError(
            f"stop is {shown(stop)}, expected a text or up to 4, none of them empty", "stop"
        )
    return stops


def options_of(body: CompletionFields, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `Runtime.generate`. Fields missing in the request come from `defaults`,
    of generation_config.json, as in vLLM. Otherwise OpenAI's defaults apply: one row, sampled from
    all tokens.

    Raises:
        UsageError: for a value that an option cannot have, and for values that do not go together.
    """
    values = {name: getattr(body, name) for name in OPTIONS}
    given = {name: value for name, value in values.items() if value is not None}
    options = checked_options({"num_beams": 1, **given})
    beams, n = options["num_beams"], body.n or 1
    temperature = body.temperature
    if temperature is None:
        temperature = 0 if beams > 1 else defaults.get("temperature", 1.0)
    is_sampled = temperature >= GREEDY
    if is_sampled and beams > 1:
        seen = f"temperature is {temperature:g} with num_beams {beams}"
        raise UsageError(f"{seen}, expected temperature 0 with beams", "temperature")
    if not is_sampled and n > beams:
        expected = f"at most num_beams, {beams}," if beams > 1 else "1"
        raise UsageError(
            f"n is {n} with temperature {temperature:g}, expected {expected} where nothing is "
            f"sampled",
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
    scheduler: Client, each: CompletionPrompt, options: dict[str, Any], body: CompletionFields
) -> GenerationInput:
    """Return the input to generate from. Raises RequestError and UsageError for what the engine
    cannot do, in the words of the request."""
    scores_prompt = bool(body.echo) and body.logprobs is not None
    most, read, new = scheduler.admission.slot_size.length, len(each.ids), options["max_new_tokens"]
    if read + new - 1 > most:  # the last one is not read again
        found = f"{read} tokens of the prompt and max_tokens {new}"
        raise too_long(f"{found}, expected at most {most + 1} together")
    try:
        return scheduler.admission.admit(
            each.ids, options, top_logprobs=body.logprobs, scores_prompt=scores_prompt
        )
    except (TooLong, UsageError) as error:
        raise in_their_words(error) from None


def in_their_words(error: TooLong | UsageError) -> UsageError:
    """Return `error` with OpenAI's names of options."""
    text, param = str(error), getattr(error, "param", None)
    for ours, theirs in WORDS.items():
        text = text.replace(ours, theirs)
    return UsageError(text, None if param is None else WORDS.get(param, param))


async def prompts_of(given: Any, runtime: TextRuntime, most: int) -> list[CompletionPrompt]:
    """Return the prompts. A missing or empty prompt becomes the model's first token. Raises
    UsageError if the model has none, for invalid prompts, and for more than `most`."""
    inputs: list[Any] = [""] if given is None else inputs_of("prompt", given, most, runtime)
    if not isinstance(inputs[0], str):
        return [CompletionPrompt(ids) for ids in inputs]
    encodings = await offloaded(sum(map(len, inputs)), runtime.encode, inputs, True)
    found: list[list[int]] = [prompt(encoding) for encoding in encodings]
    first = special_token("bos_token_id", runtime.info.generation_config, runtime.info.config)
    for place, ids in enumerate(found):
        if not ids and first is None:
            seen = f"prompt {place} of {len(found)} is {shown(inputs[place])}, which has no tokens"
            raise UsageError(
                f"{seen}: expected words, as the model has no first token of its own", "prompt"
            )
    return [CompletionPrompt(ids or [first], text) for ids, text in zip(found, inputs, strict=True)]


def inputs_of(name: str, given: Any, most: int, runtime: TextRuntime) -> list[Any]:
    """Return texts, or rows of ids. Raises UsageError for anything else, for more than `most`, and
    for ids that the model lacks."""
    inputs = [given] if isinstance(given, str) else given
    if not isinstance(inputs, list) or not inputs:
        raise UsageError(f"{name} is {shown(given)}, expected {EXPECTED}", name)
    if all(type(each) is int for each in inputs):
        inputs = [inputs]
    if len(inputs) > most:
        raise UsageError(f"{name} has {len(inputs)} items, expected at most {most}", name)
    if all(isinstance(each, str) for each in inputs):
        for place, text in enumerate(inputs):
            try:
                check_unicode(text, f"{name} {place} of {len(inputs)}")
            except ValueError as error:
                raise UsageError(str(error), name) from None
        return inputs
    size, longest = (
        runtime.info.config[field] for field in ("vocab_size", "max_position_embeddings")
    )
    for row in inputs:
        if not isinstance(row, list) or not row or not all(type(each) is int for each in row):
            raise UsageError(f"{name} has {shown(row)}, expected {EXPECTED}", name)
        if len(row) > longest:
            raise too_long(
                f"{name} has {len(row)} tokens, expected at most {longest}, the model's positions"
            )
        outside = [token for token in row if not 0 <= token < size]
        if outside:
            raise UsageError(
                f"{name} has the token {outside[0]}, expected ids in [0, {size - 1}], the "
                f"vocabulary",
                name,
            )
    return inputs


def shown(value: Any) -> str:
    return f"{value!r:.80}"


def usage_of(asked: Sequence[Completion]) -> dict[str, int]:
    read, new = sum(len(each.input.prompt) for each in asked), sum(each.tokens for each in asked)
    return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}


async def whole(scheduler: Client, asked: Sequence[Completion], about: dict[str, Any]) -> bytes:
    """Return the response in JSON. Answers that a stop text may end are read token by token, so
    that they end there."""
    if asked[0].stops and not asked[0].is_replayed:
        return rendered(about, joined([chunk async for chunk in parts(scheduler, asked)]), asked)
    found = await scheduler.generate([each.input for each in asked])
    size = sum(each.size(generated) for each, generated in zip(asked, found, strict=True))
    return await offloaded(size, of_generated, about, asked, found)


def of_generated(
    about: dict[str, Any], asked: Sequence[Completion], found: list[list[Generated]]
) -> bytes:
    return rendered(
        about,
        [choice for each, own in zip(asked, found, strict=True) for choice in each.whole(own)],
        asked,
    )


def rendered(about: dict[str, Any], choices: list[Chunk], asked: Sequence[Completion]) -> bytes:
    return json_of({**about, "choices": choices, "usage": usage_of(asked)})


async def parts(scheduler: Client, asked: Sequence[Completion]) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of all choices in the order of their arrival. Closing it early stops all
    that runs."""
    if len(asked) == 1:
        async with aclosing(asked[0].chunks(scheduler)) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    queue: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()

    async def forward(each: Completion) -> None:
        try:
            async with aclosing(each.chunks(scheduler)) as chunks:
                async for chunk in chunks:
                    queue.put_nowait(chunk)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(forward(each)) for each in asked]
    try:
        running = len(tasks)
        while running:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                running -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ------------------------------------------------------------------------------------------ streams


async def begun(chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
    """Return an iterator over the same chunks once the first of them is there. Until then the
    request can be rejected with a status."""
    first = await anext(chunks)

    async def all_of() -> AsyncGenerator[Chunk, None]:
        async with aclosing(chunks):
            yield first
            async for chunk in chunks:
                yield chunk

    return all_of()


async def events(
    chunks: AsyncGenerator[Chunk, None], about: dict[str, Any], counted: Sequence[Completion] | None
) -> AsyncGenerator[bytes, None]:
    """Yield an event for each chunk, then one with the number of tokens if `counted`. An error is
    an event too."""
    usage = {} if counted is None else {"usage": None}
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield event({**about, "choices": [chunk], **usage})
        if counted is not None:
            yield event({**about, "choices": [], "usage": usage_of(counted)})
    except Exception as error:
        refusal = refusal_of(error, PROTOCOL.validation)
        yield event(error_body(refusal))
        if refusal.status == 500:  # for the log
            raise
    yield DONE


# --------------------------------------------------------------------------------------- embeddings


@router.post("/v1/embeddings")
async def embed(request: Request, body: EmbeddingRequest) -> Any:
    """One vector for each input, as `TextRuntime.embed` gives it. Token ids are embedded as they
    are."""
    model = models_of(request).choose(
        lambda model: model.embeds, "embed texts", name_in_path(request), body.model
    )
    inputs = inputs_of("input", body.input, settings_of(request).max_batch, model.runtime)
    about = {"object": "list", "model": model.name}
    assert model.encoder is not None  # every model that embeds has one
    try:
        content = await model.encoder.call(
            len(inputs), embeddings_of, model.runtime, inputs, body, about
        )
    except TooLong as error:
        raise too_long(str(error)) from None
    return Response(content, media_type="application/json")


def embeddings_of(
    runtime: TextRuntime, inputs: list[Any], body: EmbeddingRequest, about: dict[str, Any]
) -> bytes:
    """Return the response in JSON. Raises as `TextRuntime.embed`."""
    rows, prompt_length = rows_of(runtime, inputs)
    vectors = embedding.vectors(runtime, rows, prompt_length, body.dimensions)
    if body.dimensions is not None:
        check_dimensions(body.dimensions, vectors.shape[1])
        vectors = embedding.normalized(vectors)
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
    return json_of({**about, "data": data, "usage": usage})


def rows_of(runtime: TextRuntime, inputs: list[Any]) -> tuple[Sequence[Encoding | TokenRow], int]:
    """Return the tokens of each input, and how many of them are the prompt's. Ids are used
    unchanged."""
    if not isinstance(inputs[0], str):
        return [TokenRow(ids, [0] * len(ids)) for ids in inputs], 0
    for place, text in enumerate(inputs):
        check_input(text, f"input {place} of {len(inputs)}")
    return embedding.rows_to_embed(
        runtime, inputs, embedding.chosen_prompt(embedding.sentence_config(runtime), None, None)
    )


# ------------------------------------------------------------------------------------------- models


@router.get("/v1/models")
async def list_models(request: Request) -> Any:
    """The models here, or the one that the path names."""
    name = name_in_path(request)
    named = models_of(request) if name is None else [model_of(request, name)]
    return JSONResponse({"object": "list", "data": [described(model) for model in named]})


@router.get("/v1/models/{id}")
async def show_model(request: Request, id: str) -> Any:
    return JSONResponse(described(model_of(request, id)))


def model_of(request: Request, name: str) -> ServedModel:
    return models_of(request).choose(lambda model: True, "do this", name)


def described(model: ServedModel) -> dict[str, Any]:
    made = int(model.runtime.info.directory.stat().st_mtime)
    return {"id": model.name, "object": "model", "created": made, "owned_by": "vanilla-transformer"}
