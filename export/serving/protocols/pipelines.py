"""The endpoint `/predict/{task}`: the tasks of all heads, in the formats of transformers'
pipelines. A client is `InferenceClient(model=url)` of huggingface_hub, where `url` includes the
task."""

import base64
import binascii
import codecs
import functools
import inspect
import io
import json
import operator
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, create_model

from ...engine.inputs import GenerationInput
from ...errors import RequestError, TooLong, UsageError, did_you_mean
from ...heads import IMAGE, MAX_CHARACTERS, PAIR, PIPELINES, TEXT, Task
from ...text.tasks.classification import parse_candidates
from ...text.tasks.rows import check_strings, check_texts, encode_texts, run, softmax
from ...text.tasks.translation import Splitting
from ...text_runtime import TextRuntime, task_function
from ..models import ServedModel
from ..translation.translator import call_off_loop, check_characters, translate
from .protocol import (
    Items,
    Protocol,
    check_names_and_sizes,
    name_in_path,
    parse_body,
    served_models,
    server_settings,
    short_repr,
    validated,
)
from .text_embeddings import json_response, render_list

router = APIRouter(tags=["pipelines"])

GENERAL = "text2text-generation"  # the pipeline that promises no kind of text
MAX_ALL_CHARACTERS = 1_000_000  # of all texts; their tokens take up to 300 times their size
MAX_WINDOWS = 2000  # maximum number of windows of a text
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
    model: str | None = Field(
        None, description="name of a model; by default the only model that fits"
    )
    options: dict[str, Any] | None = Field(None, description="has no effect")


def error_body(error: RequestError) -> dict[str, Any]:
    return {"error": error.message}


PROTOCOL = Protocol("pipelines", router, error_body)
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["inputs"],
                    "properties": {
                        "inputs": {},
                        "parameters": {"type": "object"},
                        "stream": {"type": "boolean"},
                    },
                }
            },
            "image/*": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


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
    model = served_models(request).choose(
        lambda model: model.has_task(PIPELINES[task]),
        f"do {task}",
        name_in_path(request),
        body.model,
    )
    check_pipeline(model, task)
    fields = {**(body.model_extra or {}), **(body.parameters or {})}
    parameters = {name: value for name, value in fields.items() if value is not None}
    if body.stream:
        raise UsageError("stream is true, expected false: use /v1/completions to stream")
    answer_all = generate_answers if task in GENERATION_OPTIONS else run_task
    return await answer_all(model, task, body, parameters, server_settings(request).max_batch)


def check_pipeline(model: ServedModel, task: str) -> None:
    """Raise RequestError 404 for a pipeline that `model`, trained for another one, would run
    without an error and answer wrongly."""
    pipeline = model.runtime.info.pipeline
    if pipeline is not None and task not in (pipeline, GENERAL):
        raise RequestError(
            404,
            f"task is {task!r}, expected {pipeline} or {GENERAL}: {model.name} was trained for "
            f"{pipeline}",
        )


async def run_task(
    model: ServedModel, name: str, body: PipelineRequest, parameters: dict[str, Any], max_rows: int
) -> Response:
    """Return the response of a task that does not generate. `name` is that of its pipeline,
    `parameters` its options, and `max_rows` the maximum number of inputs.

    Raises UsageError or TooLong for wrong inputs, RequestValidationError for parameters of a wrong
    type, and RequestError if the model has too much work.
    """
    form, task = FORMATS.get(name, Format()), PIPELINES[name]
    ours = {TEXT: read_texts, PAIR: read_pairs, IMAGE: read_images}
    read = form.inputs or ours.get(task.forms[0]) or object_reader(*task.forms[0])
    inputs = read(body.inputs, max_rows)
    options = check_parameters(form, task, parameters)
    form.check(model, inputs, options)
    answers = form.answers or functools.partial(call_task, task)
    return json_response(
        await model.read(len(inputs.rows), encode_answers, answers, model, inputs, options)
    )


def encode_answers(
    answers: "Answers", model: ServedModel, inputs: "RequestInputs", options: dict[str, Any]
) -> bytes:
    results = answers(model.runtime, inputs.rows, options)
    return (
        render_list(iter(results))
        if inputs.is_list
        else json.dumps(results[0], ensure_ascii=False, allow_nan=False).encode()
    )


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


# ------------------------------------------------------------------------------------------- inputs


@dataclass
class RequestInputs:
    """The inputs of a request as `rows`. `is_list` is True if the request has a list; the response
    is then a list too."""

    rows: list[Any]
    is_list: bool


def check_inputs(rows: list[Any], is_list: bool, max_rows: int) -> RequestInputs:
    if not rows:
        raise UsageError("inputs is empty, expected at least one input")
    if len(rows) > max_rows:
        raise TooLong(f"inputs has {len(rows)} items, expected at most {max_rows}")
    sizes = [len(text) for text in find_texts(rows)]
    for name, size, limit in (
        ("a text has", max(sizes, default=0), MAX_CHARACTERS),
        ("the texts have", sum(sizes), MAX_ALL_CHARACTERS),
    ):
        if size > limit:
            raise TooLong(f"{name} {size} characters, expected at most {limit}")
    return RequestInputs(rows, is_list)


def find_texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return [text for part in parts for text in find_texts(part)]


def read_texts(value: Any, max_rows: int) -> RequestInputs:
    """Return the rows of `value`, a text or a list of texts; their types are not checked.

    Raises TooLong for more than `max_rows` or a text of more than `MAX_CHARACTERS`, and UsageError
    for none.
    """
    return check_inputs(
        value if isinstance(value, list) else [value], isinstance(value, list), max_rows
    )


def read_texts_as_list(value: Any, max_rows: int) -> RequestInputs:
    """Return the rows of `value`: one text or pair (an object), or a list of them.

    The response to one input is a list too, which huggingface_hub expects.

    Raises:
        TooLong: for more than `max_rows`, or a text of more than `MAX_CHARACTERS`.
        UsageError: for no rows.
    """
    return RequestInputs(read_texts(value, max_rows).rows, True)


def read_pairs(value: Any, max_rows: int) -> RequestInputs:
    """Return the rows of `value`, a pair of texts or a list of pairs. A pair is a list or an
    object.

    Raises TooLong for more than `max_rows`, and UsageError for other values.
    """
    is_one = isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], str)
    )
    rows = [value] if is_one else value
    if not isinstance(rows, list):
        raise UsageError(
            f"inputs is {short_repr(value)}, expected a pair of texts or a list of pairs"
        )
    return check_inputs(
        [tuple(row) if isinstance(row, list) else row for row in rows], not is_one, max_rows
    )


def object_reader(*keys: str) -> Callable[[Any, int], RequestInputs]:
    """Return a function from (value, max_rows) to rows: an object with these `keys`, or a list of
    such objects.

    It raises TooLong for more than `max_rows` objects, or more items in a list of the second key,
    and UsageError for other values.
    """

    def read(value: Any, max_rows: int) -> RequestInputs:
        rows = value if isinstance(value, list) else [value]
        for row in rows:
            if not isinstance(row, dict) or set(row) != set(keys):
                raise UsageError(
                    f"inputs is {short_repr(row)}, expected an object with {' and '.join(keys)}"
                )
        inputs = check_inputs(rows, isinstance(value, list), max_rows)
        for row in rows:
            if isinstance(row[keys[1]], list) and len(row[keys[1]]) > max_rows:
                raise TooLong(
                    f"{keys[1]} has {len(row[keys[1]])} items, expected at most {max_rows}"
                )
        return inputs

    return read


def read_images(value: Any, max_rows: int) -> RequestInputs:
    """Return the rows of `value`, an image or a list of images, which are not decoded yet. An image
    is bytes or base64.

    Raises TooLong for more than `max_rows`, and UsageError for none.
    """
    rows = value if isinstance(value, list) else [value]
    check_inputs([None] * len(rows), True, max_rows)
    return RequestInputs(rows, isinstance(value, list))


def decode_image(value: Any) -> Any:
    from PIL import Image

    from ...image_runtime import image_errors, rotate_upright

    if isinstance(value, str):
        try:
            value = base64.b64decode(
                value.rpartition(",")[2] if value.startswith("data:") else value, validate=True
            )
        except (binascii.Error, ValueError) as error:
            raise UsageError(
                f"inputs is {value!r:.40}, expected an image's bytes in base64: {error}"
            ) from None
    if not isinstance(value, bytes):
        raise UsageError(f"inputs is {short_repr(value)}, expected an image's bytes in base64")
    try:
        with image_errors(), Image.open(io.BytesIO(value)) as file:
            return rotate_upright(file)
    except ValueError as error:
        raise UsageError(f"inputs: {error}") from None


# -------------------------------------------------------------------------------------------- tasks


Answers = Callable[[Any, list[Any], dict[str, Any]], Sequence[Any]]


@dataclass(frozen=True)
class Format:
    """The differences between a pipeline of transformers and the function of its task.

    Args:
        inputs: returns the inputs as rows; by default the form of the task decides.
        answers: returns the result for each row; by default `call_task`.
        has_options: False if the pipeline has no options.
        defaults: options with another default than in the function.
        check: raises TooLong for inputs that would take too long.
    """

    inputs: Callable[[Any, int], RequestInputs] | None = None
    answers: Answers | None = None
    has_options: bool = True
    defaults: dict[str, Any] = field(default_factory=dict)
    check: Callable[[ServedModel, RequestInputs, dict[str, Any]], None] = (
        lambda model, inputs, options: None
    )


def call_task(task: Task, runtime: Any, rows: list[Any], options: dict[str, Any]) -> Sequence[Any]:
    """Return the result of the task's function for each row, as JSON values.

    `options` are the arguments of the function by name.
    """
    keys = task.forms[0]
    if keys == IMAGE:
        columns = [[decode_image(row) for row in rows]]
    else:
        columns = [rows] if keys in (TEXT, PAIR) else [[row[key] for row in rows] for key in keys]
    results = task_function(task)(runtime, *columns, **options)
    return [result.tolist() if isinstance(result, np.ndarray) else result for result in results]


def check_parameters(form: Format, task: Task, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a task: the request's `parameters`, and the defaults of `form`.

    The signature of the task's function decides about names and types; the function itself checks
    the values. Raises UsageError for an unknown name, and RequestValidationError for a missing
    option or a wrong type.
    """
    fields = signature_fields(task_function(task)) if form.has_options else {}
    if unknown := sorted(parameters.keys() - fields.keys()):
        names = f"one of {', '.join(fields)}" if fields else "no parameters for this task"
        raise UsageError(
            f"parameters has {unknown[0]!r:.60}, expected {names}{did_you_mean(unknown[0], fields)}"
        )
    with validated(parameters, "body", "parameters"):
        parameter_model(tuple(fields.items())).model_validate(parameters)
    return {**form.defaults, **parameters}


@functools.cache
def signature_fields(method: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(method).parameters.values()
    positional = [
        parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return {
        parameter.name: (
            json_type(parameter.annotation),
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in positional
    }


def json_type(annotation: Any) -> Any:
    """Return the type of values in JSON that fit `annotation`, in which sequences are lists."""
    if isinstance(annotation, types.UnionType):
        return functools.reduce(operator.or_, map(json_type, get_args(annotation)))
    if get_origin(annotation) is Sequence:
        return Items[get_args(annotation)[0]]  # type: ignore[misc]
    return annotation


@functools.cache
def parameter_model(fields: tuple[tuple[str, Any], ...]) -> type[BaseModel]:
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    return create_model("Parameters", __config__=config, **dict(fields))


def zero_shot(runtime: TextRuntime, rows: list[Any], options: dict[str, Any]) -> Sequence[Any]:
    results = runtime.zero_shot(rows, **options)
    return [
        [
            {"label": label, "score": score}
            for label, score in zip(result["labels"], result["scores"])
        ]
        for result in results
    ]


def check_candidates(model: ServedModel, inputs: RequestInputs, options: dict[str, Any]) -> None:
    count = len(inputs.rows) * len(parse_candidates(options["candidate_labels"]))
    if count > MAX_WINDOWS:
        raise TooLong(
            f"inputs and candidate_labels are {count} pairs, expected at most {MAX_WINDOWS}"
        )


def check_tag_windows(model: ServedModel, inputs: RequestInputs, options: dict[str, Any]) -> None:
    longest = model.runtime.tokenizer_settings.longest
    if longest is not None and options.get("stride"):
        room = (
            longest - model.runtime.tokenizer.num_special_tokens_to_add(False) - options["stride"]
        )
        check_windows(
            max(map(len, find_texts(inputs.rows)), default=0),
            room,
            f"stride={options['stride']}",
        )


def check_windows(tokens: int, new: int, why: str) -> None:
    """Raise TooLong if `tokens` tokens need more than `MAX_WINDOWS` windows with `new` more tokens
    each. Nothing is checked if `new` is not positive.

    `why` begins the message: the option that makes windows so small.
    """
    if new > 0 and tokens // new > MAX_WINDOWS:
        raise TooLong(
            f"{why} needs up to {tokens // new} windows, expected at most {MAX_WINDOWS}: use "
            "shorter texts or less overlap"
        )


def answer_questions(
    runtime: TextRuntime, rows: list[Any], options: dict[str, Any]
) -> Sequence[Any]:
    results = runtime.answer(
        [row["question"] for row in rows], [row["context"] for row in rows], **options
    )
    return results if options.get("top_k", 1) > 1 else [result[0] for result in results]


def check_question(model: ServedModel, inputs: RequestInputs, options: dict[str, Any]) -> None:
    """Raise TooLong if a context needs too many windows, because a long question leaves little room
    in each window.

    `inputs` are questions with their contexts, and `options` the parameters of the task.
    """
    size = options.get("max_seq_len") or min(model.runtime.tokenizer_settings.longest or 384, 384)
    stride = options["doc_stride"] if options.get("doc_stride") is not None else min(size // 2, 128)
    for row in inputs.rows:
        context = row["context"] if isinstance(row["context"], str) else ""
        if len(context) > MAX_WINDOWS:
            question = row["question"] if isinstance(row["question"], str) else ""
            tokens = len(
                model.runtime.tokenizer.encode(question[: 50 * size], add_special_tokens=False).ids
            )
            tokens = min(tokens, options.get("max_question_len") or tokens)
            check_windows(
                len(context),
                size - tokens - 4 - stride,
                f"doc_stride={stride} with max_seq_len={size}",
            )


def hidden_states(runtime: TextRuntime, rows: list[Any], options: dict[str, Any]) -> Sequence[Any]:
    """Return the hidden states (1, S, D) of each text as nested lists, as in the pipeline. `rows`
    are the texts; `options` are not used."""
    encodings = encode_texts(runtime, check_strings(rows))
    states: list[Any] = [None] * len(encodings)
    for index, outputs in run(runtime, encodings):
        states[index] = [outputs["last_hidden_state"].tolist()]
    return states


def compare_sentences(
    runtime: TextRuntime, rows: list[Any], options: dict[str, Any]
) -> Sequence[Any]:
    scores = []
    for row in rows:
        sentences = row["sentences"]
        if not isinstance(sentences, list) or not sentences:
            raise UsageError(f"sentences is {short_repr(sentences)}, expected a list of texts")
        vectors = runtime.embed([row["source_sentence"], *sentences], **options)
        scores.append(runtime.similarity(vectors[:1], vectors[1:])[0].tolist())
    return scores


def next_sentence(runtime: TextRuntime, rows: list[Any], options: dict[str, Any]) -> Sequence[Any]:
    scores = softmax(runtime.next_sentence(rows)).tolist()
    return [sort_labels(["isNext", "notNext"], pair) for pair in scores]


def multiple_choice(
    runtime: TextRuntime, rows: list[Any], options: dict[str, Any]
) -> Sequence[Any]:
    logits = runtime.choose([row["text"] for row in rows], [row["choices"] for row in rows])
    return [
        sort_labels(row["choices"], softmax(scores).tolist())
        for row, scores in zip(rows, logits, strict=True)
    ]


def sort_labels(labels: Sequence[str], scores: Sequence[float]) -> list[dict[str, Any]]:
    """Return {"label": label, "score": score} of each label, best first."""
    return sorted(
        ({"label": label, "score": score} for label, score in zip(labels, scores)),
        key=lambda item: -item["score"],
    )


def image_states(runtime: Any, rows: list[Any], options: dict[str, Any]) -> Sequence[Any]:
    """Return the hidden states (1, S, D) of each image in `rows` as nested lists, or (D,) with the
    option `pool`, as in the pipeline."""
    arrays = [runtime.embed([decode_image(row)], **options)[0].tolist() for row in rows]
    return arrays if options.get("pool") else [[states] for states in arrays]


# formats by name of the pipeline
FORMATS = {
    "text-classification": Format(read_texts_as_list, defaults={"top_k": None}),
    "zero-shot-classification": Format(answers=zero_shot, check=check_candidates),
    "token-classification": Format(check=check_tag_windows),
    "question-answering": Format(answers=answer_questions, check=check_question),
    "feature-extraction": Format(answers=hidden_states, has_options=False),
    "sentence-similarity": Format(object_reader("source_sentence", "sentences"), compare_sentences),
    "image-feature-extraction": Format(answers=image_states),
    "next-sentence": Format(answers=next_sentence),
    "multiple-choice": Format(answers=multiple_choice),
}
NAMES = {"translation": "translation_text", "summarization": "summary_text"}


# --------------------------------------------------------------------------------------- generation


async def generate_answers(
    model: ServedModel, task: str, body: PipelineRequest, parameters: dict[str, Any], max_rows: int
) -> Response:
    """Return the response with translations or continuations: `[{"generated_text": str}, ...]` for
    one text, and a list of such lists for a list of texts.

    The key is translation_text or summary_text for these tasks. `task` is the name of the pipeline,
    `parameters` are its options, and `max_rows` is the maximum number of texts. Raises UsageError,
    ValueError or TooLong for wrong inputs, and RequestError if the model has too much work.
    """
    inputs = read_texts(body.inputs, max_rows)
    check_texts(inputs.rows)
    task_options, options = generation_options(task, parameters)
    if task == "translation":
        splitting = Splitting(copy_letterless=task_options.pop("copy_letterless"))
        results = await translate(
            model, inputs.rows, splitting=splitting, **task_options, **options
        )
    else:
        results = await continue_texts(model, inputs.rows, task_options, options)
    if task_options.get("return_full_text"):
        results = [
            [row + text for text in group] for row, group in zip(inputs.rows, results, strict=True)
        ]
    name = NAMES.get(task, "generated_text")
    answers = [[{name: text} for text in group] for group in results]
    return JSONResponse(answers if inputs.is_list else answers[0])


# options of pipelines that generate, with their defaults, besides those of `Runtime.generate`
GENERATION_OPTIONS: dict[str, dict[str, Any]] = {
    "text-generation": {"return_full_text": True},
    "translation": {"src_lang": None, "tgt_lang": None, "copy_letterless": True},
    **dict.fromkeys(
        ("summarization", "text2text-generation"), {"src_lang": None, "tgt_lang": None}
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
    parameters |= {name: value for name, value in more.items() if value is not None}
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
    for name in ("return_full_text", "copy_letterless"):
        if name in task_options and not isinstance(task_options[name], bool):
            raise UsageError(f"{name} is {short_repr(task_options[name])}, expected true or false")
    for name in ("src_lang", "tgt_lang"):
        if task_options.get(name) is not None and not isinstance(task_options[name], str):
            raise UsageError(
                f"{name} is {short_repr(task_options[name])}, expected the name of a language"
            )
    check_names_and_sizes(parameters)
    return task_options, parameters


async def continue_texts(
    model: ServedModel, rows: list[str], languages: dict[str, Any], options: dict[str, Any]
) -> list[list[str]]:
    assert model.scheduler is not None  # every model that generates has one
    slot = model.admission.slot_size
    check_characters("text", map(len, rows), slot.source or slot.length)
    size = sum(map(len, rows))
    inputs = await call_off_loop(size, admit_rows, model, rows, languages, options)
    results = await model.scheduler.generate(inputs)
    decoded = iter(
        await call_off_loop(
            size, model.runtime.decode, [result.tokens for answers in results for result in answers]
        )
    )
    return [[next(decoded) for _ in answers] for answers in results]


def admit_rows(
    model: ServedModel, rows: list[str], languages: dict[str, Any], options: dict[str, Any]
) -> list[GenerationInput]:
    ids, checked = model.runtime.checked_rows(
        rows, languages.get("src_lang"), languages.get("tgt_lang"), options
    )
    return model.admission.admit_all(ids, checked)
