"""The endpoints of OpenAI for completions, embeddings and models
(https://platform.openai.com/docs/api-reference)."""

import asyncio
import base64
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from ...engine.inputs import check_options
from ...engine.loop import Client
from ...errors import UNKNOWN_PATH, RequestError, TooLong, UsageError
from ...heads import GENERATE
from ...inference.options import Options
from ...text.sentence_modules import normalize
from ...text.tasks import embedding
from ...text.tasks.task import JsonObject
from ...text.text_model import Cut, Row
from ..app import to_request_error
from ..generation import call_off_loop
from ..models import Ability, ServedModel
from .completions import Chunk, Completion, join_chunks
from .openai_requests import (
    CompletionFields,
    CompletionPrompt,
    CompletionRequest,
    EmbeddingRequest,
    check_fields,
    parse_options,
    parse_prompts,
    parse_prompts_or_inputs,
    parse_stops,
    too_long,
)
from .protocol import (
    EventStream,
    Protocol,
    choose_model,
    event,
    json_response,
    name_in_path,
    served_models,
    server_settings,
    to_json,
    wait_for_first,
)
from .text_embeddings import EMBEDS, check_dimensions, cut_for, encode_inputs
from .text_embeddings_requests import check_input

router = APIRouter(tags=["OpenAI"])

CHECK_COST = 100  # characters that are tokenized in the time that checking one input takes
COMPLETES = Ability("complete texts", lambda model: model.has_task(GENERATE))
DONE = b"data: [DONE]\n\n"
# our names of options in errors, and those of OpenAI
WORDS = {"max_new_tokens": "max_tokens", "num_return_sequences": "n", "input_ids": "prompt"}
ERRORS = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "model_not_found"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


# ------------------------------------------------------------------------------------------- errors


def error_body(error: RequestError) -> JsonObject:
    other = "invalid_request_error" if error.status < 500 else "server_error"
    kind, code = ERRORS.get(error.status, (other, None))
    is_field = (
        error.param in CompletionRequest.model_fields
        or error.param in EmbeddingRequest.model_fields
    )
    param = error.param if is_field else None
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": param,
            "code": error.code or code,
        }
    }


PROTOCOL = Protocol(router, error_body)


# -------------------------------------------------------------------------------------- completions


@router.post("/v1/chat/completions", include_in_schema=False)
async def chat() -> None:
    """Say where completions are: the models have no chat template."""
    raise RequestError(
        404,
        "there is no chat, because the models have no chat template: expected /v1/completions, "
        "with a prompt",
        code=UNKNOWN_PATH,
    )


@router.post("/v1/completions")
async def complete(request: Request, body: CompletionRequest) -> Any:
    """Continue each prompt `n` times.

    The response has the fields of OpenAI. `choices` has the `n` choices of the first prompt, then
    those of the second, and so on. With `stream` the response is server-sent events, each with the
    next part of one choice; the last is `[DONE]`. An error after the first part is an event with
    the field `error`.

    Besides the fields of OpenAI, a request can have generation options of transformers, such as
    `num_beams`."""
    model = await choose_model(request, COMPLETES, body.model)
    with api_names():
        options = check_options(model.info, parse_options(body, model.info.defaults))
    stops = parse_stops(body.stop)
    check_fields(body)
    prompts = await parse_prompts(body.prompt, model.runtime, server_settings(request).max_batch)
    size = sum(len(item.ids) for item in prompts) + CHECK_COST * len(prompts)
    with api_names():
        completions = await call_off_loop(
            size, make_completions, model, prompts, options, stops, body
        )
    about = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
    }
    if not body.stream:
        return json_response(await full_response(model.client, completions, about))
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    chunks = await wait_for_first(parts(model.client, completions))
    return EventStream(events(chunks, about, completions if with_usage else None))


def make_completions(
    model: ServedModel,
    prompts: Sequence[CompletionPrompt],
    options: Options,
    stops: list[str],
    body: CompletionFields,
) -> list[Completion]:
    """Return the completion to generate for each of `prompts`, with the checked `options`.

    `stops` are the stop sequences. Raises RequestError, TooLong or UsageError if the model cannot
    run a prompt.
    """
    max_length, new = model.admission.slot_size.length, options.max_new_tokens
    completions = []
    for place, (ids, text) in enumerate(prompts):
        if len(ids) + new - 1 > max_length:  # the last token is not decoded again
            seen = f"{len(ids)} tokens of the prompt and max_tokens={new}"
            raise too_long(f"{seen}, expected at most {max_length + 1} in total")
        admitted = model.admission.admit(
            ids,
            options,
            top_logprobs=body.logprobs,
            scores_prompt=bool(body.echo) and body.logprobs is not None,
            place=[place],
        )
        echoed = model.runtime.decode([ids])[0] if text is None else text
        begins = echoed if body.echo else ""
        first = place * options.num_return_sequences
        completions.append(
            Completion(model.runtime, admitted, first, begins, stops, body.max_tokens == 0)
        )
    return completions


@contextlib.contextmanager
def api_names() -> Iterator[None]:
    """Replace a TooLong or UsageError in the block by a UsageError with OpenAI's names of options,
    such as max_tokens for max_new_tokens."""
    try:
        yield
    except (TooLong, UsageError) as error:
        text, param = str(error), getattr(error, "param", None)
        for ours, theirs in WORDS.items():
            text = text.replace(ours, theirs)
        raise UsageError(text, None if param is None else WORDS.get(param, param)) from None


def count_usage(completions: Sequence[Completion]) -> dict[str, int]:
    read = sum(len(completion.input.prompt) for completion in completions)
    new = sum(completion.tokens for completion in completions)
    return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}


async def full_response(
    client: Client, completions: Sequence[Completion], about: JsonObject
) -> bytes:
    """Return the response as JSON, with the answer to each of `completions`. `about` are its fields
    besides choices and usage.

    With stop texts the tokens are streamed, so that generation ends there.
    """
    if completions[0].stops and not completions[0].is_buffered:
        chunks = [chunk async for chunk in parts(client, completions)]
        return render(about, completions, join_chunks(chunks))
    results = await client.generate([completion.input for completion in completions])
    pairs = [*zip(completions, results, strict=True)]

    def render_results() -> bytes:
        choices = (completion.full_choices(generated) for completion, generated in pairs)
        return render(about, completions, [*itertools.chain(*choices)])

    size = sum(completion.size(generated) for completion, generated in pairs)
    return await call_off_loop(size, render_results)


def render(about: JsonObject, completions: Sequence[Completion], choices: list[Chunk]) -> bytes:
    return to_json({**about, "choices": choices, "usage": count_usage(completions)})


async def parts(client: Client, completions: Sequence[Completion]) -> AsyncGenerator[Chunk, None]:
    """Yield the parts of all completions in the order of their arrival.

    The first error of a completion is raised and stops the others. Closing the iterator stops the
    generation.
    """
    if len(completions) == 1:
        async with aclosing(completions[0].chunks(client)) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    queue: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()

    async def forward(completion: Completion) -> None:
        try:
            async with aclosing(completion.chunks(client)) as chunks:
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


async def events(
    chunks: AsyncGenerator[Chunk, None], about: JsonObject, counted: Sequence[Completion] | None
) -> AsyncGenerator[bytes, None]:
    """Yield a server-sent event for each of `chunks`, with the fields `about`, and "[DONE]" at the
    end.

    If `counted` is not None, an event with the number of its tokens precedes the end. An error
    becomes an event before the end. A fault of the server is also raised after that event, without
    "[DONE]".
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

    `data` in the response has an object for each input, in their order. Its field `embedding` is a
    list of numbers, or with the `encoding_format` base64 the bytes of little-endian float32. Texts
    get the prompt of the export, token ids do not. Inputs with too many tokens are cut, or rejected
    if the server has `--auto-truncate false`."""
    model = await choose_model(request, EMBEDS, body.model)
    max_batch = server_settings(request).max_batch
    vocab_size = model.runtime.info.config["vocab_size"]
    inputs = parse_prompts_or_inputs("input", body.input, max_batch, vocab_size)
    cut = cut_for(request, model)
    about = {"object": "list", "model": model.name}
    try:
        return json_response(
            await model.read(len(inputs), render_embeddings, model, inputs, cut, body, about)
        )
    except TooLong as error:
        raise too_long(str(error)) from None


def render_embeddings(
    model: ServedModel, inputs: list[Any], cut: Cut, body: EmbeddingRequest, about: JsonObject
) -> bytes:
    """Return the response as JSON, with one vector for each of `inputs` and the fields `about`.

    Raises:
        TooLong: for an input that `cut` rejects.
        UsageError: for an empty text and an invalid number of dimensions.
        ValueError: for an input without tokens.
    """
    rows, prompt_length = embedding_rows(model, inputs, cut)
    width = body.dimensions or model.runtime.info.sentence_settings.truncate_dim
    vectors = embedding.vectors(model.runtime, rows, prompt_length, width)
    if body.dimensions is not None:
        check_dimensions(body.dimensions, vectors.shape[1])
        vectors = normalize(vectors)
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


def embedding_rows(model: ServedModel, inputs: list[Any], cut: Cut) -> tuple[Sequence[Row], int]:
    """Return the tokens of each input, and the number of tokens of the export's prompt, 0 without
    one. Inputs of token ids get no prompt. Raises UsageError for an empty text."""
    if not isinstance(inputs[0], str):
        return embedding.rows_to_embed(model.runtime, inputs, "", cut)
    for index, text in enumerate(inputs):
        check_input(text, f"input {index} of {len(inputs)}")
    return encode_inputs(model, inputs, None, cut)


# ------------------------------------------------------------------------------------------- models


@router.get("/v1/models")
async def list_models(request: Request) -> Any:
    """Return the models of this server, or only the model in the path.

    They are in `data`, each with the fields `id` (its name), `object`, `created` and `owned_by`."""
    name = name_in_path(request)
    models = served_models(request)
    entries = models if name is None else [models.find(name)]
    return JSONResponse({"object": "list", "data": [describe_model(model) for model in entries]})


@router.get("/v1/models/{id}")
async def show_model(request: Request, id: str) -> Any:
    """Return the fields `id`, `object`, `created` and `owned_by` of the model with the name `id`.

    Return status 404 if this server does not have the model."""
    return JSONResponse(describe_model(served_models(request).find(id)))


def describe_model(model: ServedModel) -> JsonObject:
    return {
        "id": model.name,
        "object": "model",
        "created": model.plan.created,
        "owned_by": "vanilla-transformer",
    }
