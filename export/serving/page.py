"""The page at `/` and its endpoints. The page is one HTML file that loads everything else from this
server."""

import base64
import hashlib
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, Field

from ..engine.inputs import Generated, GenerationInput
from ..errors import RequestError
from ..heads import GENERATE, IMAGE, TRANSLATE, find_task
from ..specs.alignment import ROLE as ALIGNMENT
from ..text.tasks.segments import Piece, TextOptions, join_parts
from ..text.tasks.task import JsonObject
from .generation import TranslationJob, call_off_loop, plan_job
from .models import Ability, ServedModel
from .protocols.protocol import (
    EventStream,
    Protocol,
    choose_model,
    event,
    name_in_path,
    served_models,
    wait_for_first,
)

MAX_TOKENS = 2048  # maximum number of tokens of a continuation
GENERATES = Ability("generate text", lambda model: model.has_task(TRANSLATE, GENERATE))
PAGE = files(__package__).joinpath("page.html").read_text(encoding="utf-8")

router = APIRouter(tags=["page"], include_in_schema=False)


def hashes(element: str) -> str:
    """Return the hashes of the contents of the HTML element `element` in `PAGE`, such as "script".

    They are in the format of a Content-Security-Policy, separated by spaces.
    """
    contents = re.findall(rf"<{element}>(.*?)</{element}>", PAGE, re.DOTALL)
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in contents
    )


# The page loads nothing from other servers, runs only its own script, and cannot be framed.
POLICY = (
    f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src "
    "'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PageRequest(BaseModel):
    """A text to translate or to continue."""

    text: str
    model: str | None = None
    source: str = ""
    target: str = ""
    max_new_tokens: int = Field(64, ge=1, le=MAX_TOKENS)
    temperature: float = Field(0, ge=0, le=100)


@router.get("/")
async def page() -> HTMLResponse:
    return HTMLResponse(PAGE, headers=HEADERS)


@router.get("/page/models")
async def models(request: Request) -> JSONResponse:
    """Return a list of the models, or only of the model in the path; empty for an unknown name.

    Each has the fields `name`, `task` and `architecture`. A model that translates also has `pairs`,
    lists of a source and a target language. A model that fills masks has `mask`, its mask token, if
    its tokenizer has one and it is loaded."""
    name = name_in_path(request)
    return JSONResponse(
        [describe_model(model) for model in served_models(request) if name in (None, model.name)]
    )


def describe_model(model: ServedModel) -> JsonObject:
    match = find_task(model.architecture, None)
    task = f"{match.name}-image" if match.forms == (IMAGE,) else match.name
    task = TRANSLATE.name if model.has_task(TRANSLATE) else task
    facts: JsonObject = {"name": model.name, "task": task, "architecture": model.architecture}
    if task == TRANSLATE.name:
        facts["pairs"] = model.languages
    if task == "fill-mask" and model.runtime is not None:
        mask = model.runtime.tokenizer_settings.special_tokens["mask_token"]
        if mask is not None:
            facts["mask"] = model.runtime.tokenizer.id_to_token(mask)
    return facts


@router.post("/page/stream")
async def stream(request: Request, body: PageRequest) -> EventStream:
    """Stream a translation or a continuation as server-sent events.

    Each event is `{"text": ...}` with the next part. If the model has an alignment graph, an event
    `{"alignments": ...}` follows the last part of a translation, as in /translate. The last event
    is `{"done": true}`, or `{"error": message}` if a later sentence is rejected. If the model
    fails, the stream ends without either. Translations are greedy; a continuation is sampled if
    `temperature` is not 0."""
    model = await choose_model(request, GENERATES, body.model)
    answer = translation if model.has_task(TRANSLATE) else completion
    return EventStream(events(await wait_for_first(answer(model, body), {"text": ""})))


async def events(pieces: AsyncGenerator[JsonObject, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        try:
            async for fields in pieces:
                yield event(fields)
        except (RequestError, ValueError) as error:
            yield event({"error": str(error)})
            return
    yield event({"done": True})


async def translation(model: ServedModel, body: PageRequest) -> AsyncGenerator[JsonObject, None]:
    """Yield the parts of the translation that `translate` returns with greedy search, and then its
    alignments if the export has an alignment graph.

    Raises:
        RequestError: 400 for languages that the model does not translate; or if the queue is full
            or the server is shutting down.
        ValueError: for a blank text, and TooLong for one that is too long.
    """
    direction = model.directions.find(body.source, body.target)
    if direction is None:
        pairs = ", ".join(f"{source} to {target}" for source, target in model.languages[:10])
        raise RequestError(
            400,
            f"{body.source!r:.40} to {body.target!r:.40} is not supported, expected one of: "
            f"{pairs}",
        )
    options = {"num_beams": 1, "do_sample": False}
    text_options = TextOptions(keep=False, return_alignments=ALIGNMENT in model.info.specs)
    job = await call_off_loop(
        len(body.text), plan_job, model, [body.text], direction, text_options, options
    )
    results: list[Generated] = []
    async with aclosing(sentences(model, job, results)) as pieces:
        async for piece in pieces:
            yield {"text": piece}
    if text_options.return_alignments:
        [translated] = job.join(results)
        yield {"alignments": translated.alignments}


async def sentences(
    model: ServedModel, job: TranslationJob, results: list[Generated]
) -> AsyncGenerator[str, None]:
    """Yield the translation of the only text of `job` in pieces, as soon as they are generated.

    Its sentences are translated one after another. What is generated is added to `results`. White
    space and untranslated parts of the text are yielded with the pieces.
    """
    waiting = iter(job.inputs)
    before: list[Piece] = []
    num_sent = 0  # characters
    for part in job.plan.parts[0]:
        text = "" if part.is_translated else part.text
        if part.is_translated:
            async with aclosing(stream_text(model, next(waiting), results)) as pieces:
                async for piece in pieces:
                    text += piece
                    full_text = join_parts([*before, (text, True)])
                    yield full_text[num_sent:]
                    num_sent = len(full_text)
        before.append((text, part.is_sentence))
    if rest := join_parts(before)[num_sent:]:
        yield rest


async def completion(model: ServedModel, body: PageRequest) -> AsyncGenerator[JsonObject, None]:
    [tokens] = await call_off_loop(len(body.text), model.runtime.rows, [body.text])
    max_new_tokens = max(
        1, min(body.max_new_tokens, model.admission.slot_size.length + 1 - len(tokens))
    )
    sampled = (
        {"do_sample": True, "temperature": body.temperature}
        if body.temperature
        else {"do_sample": False}
    )
    prompt_input = model.admission.admit(
        tokens,
        {"num_beams": 1, "num_return_sequences": 1, "max_new_tokens": max_new_tokens, **sampled},
    )
    async with aclosing(stream_text(model, prompt_input)) as pieces:
        async for piece in pieces:
            yield {"text": piece}


async def stream_text(
    model: ServedModel,
    generation_input: GenerationInput,
    results: list[Generated] | None = None,
) -> AsyncGenerator[str, None]:
    detokenizer = model.runtime.detokenizer()
    async with aclosing(model.client.stream(generation_input, results)) as tokens:
        async for token in tokens:
            if piece := detokenizer.add(token.token):
                yield piece
    if rest := detokenizer.end():
        yield rest


PROTOCOL = Protocol(router, public_paths=frozenset({"/"}))
