"""The endpoints of LibreTranslate (https://docs.libretranslate.com)."""

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ...errors import RequestError, nearest
from ...heads import TRANSLATE
from ...text.languages import Direction, language_name
from ...text.tasks.segments import HTML, TextOptions, plain_text
from ...text.tasks.task import JsonObject
from ..generation import MAX_KEPT, call_off_loop, translate
from ..models import Ability, ServedModel
from .protocol import (
    Items,
    Protocol,
    name_in_path,
    parse_body,
    request_body,
    served_models,
    server_settings,
    use_model,
    validate,
)

TRANSLATES = Ability("translate", lambda model: model.has_task(TRANSLATE))
AUTO = "auto"
NO_LIMIT = -1
# milliseconds that LibreTranslate's page waits after a key press, by default
FRONTEND_TIMEOUT = 500
MAX_FORM_FIELDS = 1000  # Starlette's limit of a multipart form
MAX_UNKNOWN_FIELDS = 20  # that are compared with the known ones
MAX_LISTED_PAIRS = 10  # pairs of languages in an error


class Error(BaseModel):
    """An error response."""

    error: str = Field(description="message with the value seen and the value expected")


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error} for status in (400, 401, 403, 413, 429, 500, 503)
}
router = APIRouter(tags=["LibreTranslate"], responses=ERRORS)


class Translation(BaseModel):
    """A request to translate texts.

    Unknown fields are ignored. One that resembles a field is named in the header `Warning` of the
    response."""

    model_config = ConfigDict(extra="allow")

    q: str | Items[str] = Field(
        description="text or list of texts to translate", examples=["A dog runs across a field."]
    )
    source: str = Field(
        description='language code of the texts, or "auto" if the server has one source language',
        examples=["en"],
    )
    target: str = Field(description="language code of the translation", examples=["de"])
    format: Annotated[Literal["text", "html"], BeforeValidator(lambda value: value or "text")] = (
        "text"
    )
    alternatives: Annotated[int, BeforeValidator(lambda value: 0 if value is None else value)] = (
        Field(
            0,
            ge=0,
            description=(
                "number of alternative translations; there may be fewer, because duplicates are "
                "omitted"
            ),
        )
    )
    alignments: Annotated[bool, BeforeValidator(lambda value: value or False)] = Field(
        False,
        description="add the words that belong together; only with the format text",
    )
    copy_letterless: bool = Field(
        True, description="copy sentences without letters, such as 12:30 or ***"
    )
    keep: bool | Annotated[list[str], Field(max_length=MAX_KEPT)] | None = Field(
        None,
        description=(
            "texts that stay unchanged in the translation, or true for placeholders such as {name} "
            "and %s, and addresses; needs a model with word alignments"
        ),
    )
    api_key: str | None = Field(None, description="token of the server, if it requires one")
    model: str | None = Field(
        None, description="name of a model, if several translate these languages"
    )


Span = tuple[int, int]  # of characters in a text
Pairs = list[tuple[Span, Span]]


class DetectedLanguage(BaseModel):
    """The source language of a text, if the request has the source "auto"."""

    confidence: float = Field(0, description="always 0, because the language is not detected")
    language: str = Field(description="language code")


class Translated(BaseModel):
    """The response of /translate. The values are lists if the request has a list of texts."""

    translatedText: str | list[str] = Field(description="best translation")
    detectedLanguage: DetectedLanguage | list[DetectedLanguage] | None = Field(
        None, description="source language, if the request has the source auto"
    )
    alternatives: list[str] | list[list[str]] | None = Field(
        None, description="other translations, if the request has alternatives"
    )
    alignments: Pairs | list[Pairs] | None = Field(
        None,
        description=(
            "words of the text and of translatedText that belong together, if the request has "
            "alignments: the start and the end of their characters"
        ),
    )


class Language(BaseModel):
    """A language and the languages it can be translated to."""

    code: str = Field(description="language code")
    name: str = Field(description="English name")
    targets: list[str] = Field(
        description="codes of the target languages; empty if no model translates from the language"
    )


FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
SCHEMA = Translation.model_json_schema()
BODY = request_body(dict.fromkeys(("application/json", *FORMS), SCHEMA))


@router.post("/translate", openapi_extra=BODY, responses={200: {"model": Translated}})
async def translate_texts(request: Request) -> JSONResponse:
    """Translate a text or a list of texts of any length, sentence by sentence.

    Translations are in the order of the texts. A blank text is returned unchanged. With the format
    "html" only text is translated, and tags inside a sentence stay around their words."""
    body = await read_body(request)
    if not body.q:
        raise RequestError(
            400, f"Invalid request: q is {body.q!r}, expected a text or a list of texts"
        )
    model, direction = model_for(request, body)
    await use_model(request, model)
    check_counts(request, model, body)
    texts = [body.q] if isinstance(body.q, str) else body.q
    text_options = TextOptions(
        copy_letterless=body.copy_letterless,
        markup=HTML if body.format == HTML else None,
        keep=body.keep,
        return_alignments=body.alignments,
        language=direction.source,
    )
    options = search_options(model, body.alternatives + 1)
    translations = await translate(model, texts, direction, text_options, options)
    fields = [text_fields(body, direction, best, others) for best, *others in translations]
    if isinstance(body.q, str):
        [answer] = fields
    else:
        answer = {name: [of_text[name] for of_text in fields] for name in fields[0]}
    return JSONResponse(answer, headers=warnings(body))


def warnings(body: Translation) -> dict[str, str]:
    """Return the header `Warning` (RFC 7234, 5.5) with the first unknown field that resembles a
    field of `Translation`, or no header."""
    for name in islice(body.model_extra or (), MAX_UNKNOWN_FIELDS):
        if meant := nearest(name, Translation.model_fields):
            return {"Warning": f'299 - "{ascii(name[:40])} is ignored, expected {meant!r}"'}
    return {}


def check_counts(request: Request, model: ServedModel, body: Translation) -> None:
    """Raise RequestError 400 if there are more texts than the setting `max_batch`, and for
    alignments of HTML. A translation and its alternatives must also fit into the slots of a
    worker."""
    max_texts = server_settings(request).max_batch
    if isinstance(body.q, list) and len(body.q) > max_texts:
        raise RequestError(
            400, f"Invalid request: q has {len(body.q)} texts, expected at most {max_texts}"
        )
    if body.alignments and body.format == "html":
        raise RequestError(
            400, "Invalid request: alignments is true with the format html, expected text"
        )
    rows = model.admission.slot_size.rows
    if body.alternatives >= rows:
        raise RequestError(
            400,
            f"Invalid request: alternatives is {body.alternatives}, expected at most {rows - 1}",
        )


def text_fields(
    body: Translation, direction: Direction, best: Any, others: Sequence[Any]
) -> JsonObject:
    """Return the fields of a `Translated` response to a request with one text, by name.

    `best` and `others` are its translations. They are texts, or have alignments if the request
    `body` asks for them. `direction` has the source and target language. Alternatives that are
    empty or occur twice are omitted.
    """
    text = plain_text(best)
    fields: JsonObject = {"translatedText": text}
    if body.source == AUTO:
        fields["detectedLanguage"] = {"confidence": 0, "language": direction.source}
    if body.alternatives > 0:
        texts = dict.fromkeys(map(plain_text, others))
        fields["alternatives"] = [other for other in texts if other not in ("", text)]
    if body.alignments:
        fields["alignments"] = best.alignments
    return fields


def search_options(model: ServedModel, count: int) -> dict[str, Any]:
    """Return the generation options for `count` translations of a text. For more than one, beam
    search has `count` beams, or the model's number of beams if that is larger."""
    if count == 1:
        return {}
    beams = max(count, model.info.defaults.get("num_beams") or 1)
    return {"num_beams": beams, "num_return_sequences": count, "do_sample": False}


# ----------------------------------------------------------------------------------------- the body


async def read_body(request: Request) -> Translation:
    """Return the request from a JSON body or a form. Several fields `q` of a form become a list.

    Raises:
        RequestValidationError: if a field is missing or has another type.
        UsageError: if the body is neither JSON nor a form.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in FORMS:
        return parse_body(await request.body(), Translation)
    return validate(await read_form(request, kind), Translation)


async def read_form(request: Request, kind: str) -> JsonObject:
    """Return the fields of a form of the media type `kind`. Several fields `q` become a list.

    Line breaks of `q` become "\\n", because browsers send "\\r\\n".

    Raises:
        RequestError: 400 if a URL-encoded body is not UTF-8.
        HTTPException: 400 if a multipart body is not valid or has a file.
    """
    pairs: list[tuple[str, str]]
    if kind == FORMS[1]:
        async with request.form(max_files=0) as form:
            pairs = [(name, str(value)) for name, value in form.multi_items()]
    else:
        body = await request.body()
        try:
            pairs = await call_off_loop(
                len(body),
                lambda: parse_qsl(
                    body.decode(),
                    keep_blank_values=True,
                    errors="strict",
                    max_num_fields=MAX_FORM_FIELDS,
                ),
            )
        except ValueError as error:
            raise RequestError(
                400, f"Invalid request: the body is not a form in UTF-8: {error}"
            ) from None
    texts = [value.replace("\r\n", "\n") for name, value in pairs if name == "q"]
    return dict(pairs) | ({"q": texts[0] if len(texts) == 1 else texts} if texts else {})


# ------------------------------------------------------------------------------------ the languages


def translators(request: Request, name: str | None = None) -> list[ServedModel]:
    """Return all models that translate, or only the model in the path, or else with this `name`.

    Raises RequestError: 404 for an unknown name, 400 if that model or no model translates.
    """
    models = served_models(request)
    name = name_in_path(request) or name
    matches = [*filter(TRANSLATES.fits, models)] if name is None else []
    return matches or [models.choose(TRANSLATES, name)]


def model_for(request: Request, body: Translation) -> tuple[ServedModel, Direction]:
    """Return the model and the direction for the languages of the request.

    Raises:
        RequestError: 400 if no model or several models translate these languages, or the source is
            "auto" with several source languages; 404 for an unknown model.
    """
    models = translators(request, body.model)
    source = only_source(models) if body.source.lower() == AUTO else body.source
    directions = [(model, model.directions.find(source, body.target)) for model in models]
    matches = {model.name: (model, direction) for model, direction in directions if direction}
    if not matches:
        pairs = [f"{source} to {target}" for model in models for source, target in model.languages]
        more = f" and {len(pairs) - MAX_LISTED_PAIRS} more" if len(pairs) > MAX_LISTED_PAIRS else ""
        served = ", ".join(pairs[:MAX_LISTED_PAIRS]) + more
        raise RequestError(
            400,
            f"{source!r:.50} to {body.target!r:.50} is not supported, expected one of: {served}",
        )
    model = served_models(request).only([model for model, _ in matches.values()], TRANSLATES)
    return matches[model.name]


def only_source(models: list[ServedModel]) -> str:
    """Return the only source language of `models`. Raises RequestError 400 if there are several, or
    if it is unknown."""
    sources = set().union(*(model.directions.sources for model in models))
    if len(sources) != 1:
        served = (
            ", ".join(sorted(sources)[:MAX_LISTED_PAIRS]) if sources else "the code of a language"
        )
        raise RequestError(
            400,
            f"source is auto, which needs a server with one source language, expected one of: "
            f"{served}",
        )
    return sources.pop()


@router.get("/languages", response_model=list[Language])
async def languages(request: Request) -> JSONResponse:
    """Return the languages of this server, each with its target languages.

    A language that is only a target has no targets itself. The languages are sorted by their
    English names, the targets by their codes."""
    targets: dict[str, set[str]] = {}
    for model in translators(request):
        for source, codes in model.directions.targets.items():
            targets[source] = targets.get(source, set()) | codes
    entries = [
        {"code": code, "name": language_name(code), "targets": sorted(codes)}
        for code, codes in targets.items()
    ]
    return JSONResponse(sorted(entries, key=lambda language: str(language["name"])))


@router.get("/frontend/settings")
async def frontend_settings(request: Request) -> JSONResponse:
    """Return the settings of LibreTranslate's page: limits and the first language pair."""
    pairs = [pair for model in translators(request) for pair in model.languages]
    source, target = pairs[0] if pairs else ("", "")
    needs_key = request.app.state.needs_token
    return JSONResponse(
        {
            "apiKeys": needs_key,
            "charLimit": NO_LIMIT,
            "filesTranslation": False,
            "frontendTimeout": FRONTEND_TIMEOUT,
            "keyRequired": needs_key,
            "language": {
                "source": {"code": source, "name": language_name(source)},
                "target": {"code": target, "name": language_name(target)},
            },
            "suggestions": False,
            "supportedFilesFormat": [],
        }
    )


@router.post("/detect")
async def detect() -> None:
    """Return status 403, because this server does not detect languages.

    Send the language of the text as `source` to /translate. /languages lists the languages.
    """
    raise RequestError(
        403,
        "Language detection is disabled on this server: send the language of the text as `source` "
        "to /translate. GET /languages lists the languages.",
    )


@router.post("/suggest")
async def suggest() -> None:
    """Return status 403, because this server does not store suggestions."""
    raise RequestError(403, "Suggestions are disabled on this server: it stores no translations.")


@router.post("/translate_file")
async def translate_file() -> None:
    """Return status 403, because this server does not read files. Use /translate."""
    raise RequestError(
        403, "File translation is disabled on this server: send the text of the file to /translate."
    )


# Clients read keyRequired before they have a key, and Mastodon sends no key to /languages.
PUBLIC_PATHS = frozenset({"/languages", "/frontend/settings"})
PROTOCOL = Protocol(router, public_paths=PUBLIC_PATHS)
