"""The endpoint `/predict/{task}`: the tasks of all heads, in the formats of transformers'
pipelines. A client is `InferenceClient(model=url)` of huggingface_hub, where `url` includes the
task."""

import codecs
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from ...errors import RequestError, TooLong, UsageError, did_you_mean
from ...heads import IMAGE, MAX_CHARACTERS, PIPELINES, TEXT
from ...shared.options import without_none
from ...text.checks import check_flags, check_texts
from ...text.languages import Direction
from ...text.tasks.segments import TextOptions
from ...text.tasks.task import are_objects, pipeline_call, read_inputs
from ..generation import MAX_KEPT, continue_texts, translate
from ..models import Ability, ServedModel
from .protocol import (
    BINARY,
    ModelName,
    Protocol,
    check_language_names,
    check_names_and_sizes,
    choose_model,
    json_response,
    parse_body,
    render_list,
    request_body,
    server_settings,
    short_repr,
    to_json,
)

router = APIRouter(tags=["pipelines"])

GENERAL = "text2text-generation"  # the pipeline that promises no kind of text
MAX_ALL_CHARACTERS = 1_000_000  # of all texts; their tokens take up to 300 times their size
# Fields of text-generation-inference that huggingface_hub omits after a certain error message, see
# `generation_options`.
LEFT_OUT = (
    "adapter_id",
    "best_of",
    "decoder_input_details",
    "details",
    "frequency_penalty",
    "grammar",
    "stop",
    "top_n_tokens",
    "truncate",
    "typical_p",
    "watermark",
    "clean_up_tokenization_spaces",
    "truncation",
)


class PipelineRequest(BaseModel):
    """A request to `/predict/{task}`. Other fields count as parameters."""

    model_config = ConfigDict(extra="allow", strict=True)

    inputs: Any = Field(description="inputs of the pipeline; an image is a file in base64")
    parameters: dict[str, Any] | None = Field(None, description="options of the task")
    stream: bool | None = Field(None, description="must not be true; /v1/completions can stream")
    model: ModelName = None
    options: dict[str, Any] | None = Field(None, description="has no effect")


PROTOCOL = Protocol(router)
BODY = request_body({"application/json": PipelineRequest.model_json_schema(), "image/*": BINARY})


@router.post("/predict/{task}", openapi_extra=BODY)
async def predict(request: Request, task: str) -> Response:
    """Return the results of the pipeline `task` of transformers for `inputs`.

    The response has the form of the pipeline's result: one result for one input, and a list of
    results in the same order for a list of inputs. Text classification returns a list of results
    also for one input. The result of a task that generates is a list of texts, such as
    `[{"generated_text": text}]`. For tasks with images, the body may also be an image file. An
    unknown task is rejected with 404, unknown parameters with 400."""
    if task not in PIPELINES:
        known = f"expected one of {', '.join(PIPELINES)}{did_you_mean(task, PIPELINES)}"
        raise RequestError(404, f"task is {task!r:.100}, {known}")
    reads_images = PIPELINES[task].forms == (IMAGE,)
    body = read_body(await request.body(), request.headers.get("content-type", ""), reads_images)
    does_task = Ability(f"do {task}", lambda model: model.has_task(PIPELINES[task]))
    model = await choose_model(request, does_task, body.model)
    pipeline = model.info.pipeline
    if pipeline is not None and task not in (pipeline, GENERAL):  # it would answer wrongly
        raise RequestError(
            404,
            f"task is {task!r}, expected {pipeline} or {GENERAL}: {model.name} was trained for "
            f"{pipeline}",
        )
    parameters = without_none({**(body.model_extra or {}), **(body.parameters or {})})
    if body.stream:
        raise UsageError("stream is true, expected false: use /v1/completions to stream")
    generates = task in GENERATION_OPTIONS
    keys = TEXT if generates else pipeline_call(task).keys
    rows, is_list = read_inputs(body.inputs, keys)
    check_sizes(rows, keys, server_settings(request).max_batch)
    answer_all = generate_answers if generates else run_task
    return await answer_all(model, task, rows, is_list, parameters)


async def run_task(
    model: ServedModel, name: str, rows: list[Any], is_list: bool, parameters: dict[str, Any]
) -> Response:
    """Return the response of a task that does not generate. `name` is that of its pipeline, `rows`
    are its inputs, `is_list` is True if the request has a list, and `parameters` are its options.

    Raises UsageError, ValueError or TooLong for wrong inputs and parameters, and RequestError if
    the model has too much work.
    """
    call = pipeline_call(name)
    call.check_options(name, parameters, "it in parameters")

    def answer() -> bytes:
        results = call(model.runtime, rows, parameters)
        has_list = is_list or call.is_always_list
        return render_list(results) if has_list else to_json(results[0])

    return json_response(await model.read(len(rows), answer))


def check_sizes(rows: list[Any], keys: tuple[str, ...], max_rows: int) -> None:
    """Raise TooLong for more than `max_rows` rows, or items in a list of an object with `keys`.
    Raise it also for a text of more than `MAX_CHARACTERS`, or `MAX_ALL_CHARACTERS` together."""
    lists = [("inputs", rows)]
    lists += [item for row in rows if are_objects(keys) for item in row.items()]
    for name, items in lists:
        if isinstance(items, list) and len(items) > max_rows:
            raise TooLong(f"{name} has {len(items)} items, expected at most {max_rows}")
    sizes = [] if keys == IMAGE else [len(text) for text in find_texts(rows)]
    for name, size, limit in (
        ("a text has", max(sizes, default=0), MAX_CHARACTERS),
        ("the texts have", sum(sizes), MAX_ALL_CHARACTERS),
    ):
        if size > limit:
            raise TooLong(f"{name} {size} characters, expected at most {limit}")


def find_texts(value: Any) -> Iterator[str]:
    """Yield all strings in `value`, in lists and objects of any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from find_texts(part)


def read_body(content: bytes, media_type: str, reads_images: bool) -> PipelineRequest:
    """Return the request in `content`. If `reads_images`, a body that is not JSON is an image file.

    `media_type` is the header Content-Type.

    Raises:
        UsageError: if the body is not a JSON object.
        RequestValidationError: if a field has another type.
    """
    begins_an_object = content.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"{"
    is_json = media_type.split(";")[0].strip() == "application/json" or begins_an_object
    if reads_images and not is_json:
        return PipelineRequest.model_validate({"inputs": content})
    return parse_body(content, PipelineRequest)


# --------------------------------------------------------------------------------------- generation

NAMES = {"translation": "translation_text", "summarization": "summary_text"}


async def generate_answers(
    model: ServedModel, task: str, rows: list[Any], is_list: bool, parameters: dict[str, Any]
) -> Response:
    """Return the response with translations or continuations: `[{"generated_text": str}, ...]` for
    one text, and a list of such lists for a list of texts.

    The key is translation_text or summary_text for these tasks. The arguments are those of
    `run_task`. Raises UsageError, ValueError or TooLong for wrong inputs, and RequestError if the
    model has too much work.
    """
    check_texts(rows)
    task_options, options = generation_options(task, parameters)
    has_prompt = task_options.pop("return_full_text", False)
    if task == "translation":
        text_options = take_text_options(task_options)
        direction = Direction("", "", **task_options)
        results = await translate(model, rows, direction, text_options, options)
    else:
        results = await continue_texts(model, rows, options, **task_options)
    if has_prompt:
        results = [[row + text for text in group] for row, group in zip(rows, results, strict=True)]
    name = NAMES.get(task, "generated_text")
    answers = [
        [
            {name: result}
            if isinstance(result, str)
            else {name: result.text, "alignments": result.alignments}
            for result in group
        ]
        for group in results
    ]
    return JSONResponse(answers if is_list else answers[0])


def take_text_options(options: dict[str, Any]) -> TextOptions:
    """Remove those of the `options` of a translation that `TextOptions` has, and return them.

    Raises UsageError if `keep` is a pattern: one can take a server hours. A list has at most
    `MAX_KEPT` texts.
    """
    text_options = TextOptions(**{name: options.pop(name) for name in TEXT_OPTIONS})
    keep = text_options.keep
    if isinstance(keep, str):
        raise UsageError(f"keep is {short_repr(keep)}, expected true or a list of texts", "keep")
    if isinstance(keep, list) and len(keep) > MAX_KEPT:
        raise TooLong(f"keep has {len(keep)} texts, expected at most {MAX_KEPT}")
    return text_options


# those of `TextOptions` that a request may set, with their defaults
TEXT_OPTIONS = {
    name: value
    for name, value in TextOptions()._asdict().items()
    if name not in ("split", "language")
}
# options of pipelines that generate, with their defaults, besides those of `Runtime.generate`
GENERATION_OPTIONS: dict[str, dict[str, Any]] = {
    "text-generation": {"return_full_text": True},
    "translation": {"src_lang": None, "tgt_lang": None, **TEXT_OPTIONS},
    **dict.fromkeys(
        ("summarization", "text2text-generation"),
        {"src_lang": None, "tgt_lang": None, "replace_unknowns": False},
    ),
}


def generation_options(
    task: str, parameters: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (options of the task, options of `Runtime.generate`) of the request's `parameters`.

    Raises:
        UsageError: if a name is unknown, an option of the task is invalid, or one of generation is
            too large.
    """
    parameters = dict(parameters)
    more = parameters.pop("generate_parameters", {})
    if not isinstance(more, dict):
        raise UsageError(f"generate_parameters is {short_repr(more)}, expected an object")
    parameters |= without_none(more)
    task_options = {
        name: parameters.pop(name, default) for name, default in GENERATION_OPTIONS[task].items()
    }
    unused = [name for name in parameters if name in LEFT_OUT]
    if unused:
        # huggingface_hub recognizes this message: it warns, and sends the request again without
        # these fields
        raise UsageError(
            f"The following `model_kwargs` are not used by the model: {unused}, expected options "
            "of this server"
        )
    flags = {name for name, value in GENERATION_OPTIONS[task].items() if value is not None}
    check_flags(**{name: task_options[name] for name in flags})
    check_language_names(task_options)
    check_names_and_sizes(parameters)
    return task_options, parameters
