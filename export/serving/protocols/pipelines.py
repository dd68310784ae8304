"""`/predict/{task}`: what a model's head is for, in the formats of transformers' pipelines.
`InferenceClient(model=url)` of huggingface_hub is a client, where `url` is that of the task."""

import base64
import binascii
import codecs
import functools
import inspect
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, create_model

from ...errors import RequestError, TooLong, UsageError, did_you_mean
from ...heads import IMAGE, PAIR, PIPELINES, TEXT, Task
from ...scheduler.request import GenerationInput
from ...text.tasks.classification import checked_candidates
from ...text.tasks.rows import rows_of, run, single_texts, softmax, strings
from ...text.tasks.translation import Splitting
from ...text_runtime import TextRuntime, task_function
from ..models import ServedModel
from ..translation.translator import offloaded, translate
from .protocol import Protocol, checked_options, models_of, name_in_path, settings_of, validated
from .text_embeddings import in_json, listed

router = APIRouter(tags=["pipelines"])

CHARACTERS = 250_000  # maximum of one text
MOST_WINDOWS = 2000  # maximum of one context
# Fields of text-generation-inference that a client can be told to leave out, see
# `generation_options`.
LEFT_OUT: tuple[str, ...] = (
    "adapter_id",
    "best_of",
    "decoder_input_details",
    "details",
    "frequency_penalty",
    "grammar",
    "stop",
    "top_n_tokens",
    "truncate",
)
LEFT_OUT += ("typical_p", "watermark", "clean_up_tokenization_spaces", "truncation")


class PipelineRequest(BaseModel):
    """Fields that are none of these are parameters too."""

    model_config = ConfigDict(extra="allow", strict=True)

    inputs: Any = Field(
        description="As the pipeline of the task takes them; an image is its bytes in base64."
    )
    parameters: dict[str, Any] | None = Field(None, description="Options of the task.")
    stream: bool | None = Field(None, description="Must not be true: `/v1/completions` streams.")
    model: str | None = Field(
        None, description="The name of a model; the only one that fits if not given."
    )
    options: dict[str, Any] | None = Field(None, description="Has no effect.")


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
    """Return what the pipeline `task` of transformers returns for `inputs`."""
    if task not in PIPELINES:
        known = f"expected one of {', '.join(PIPELINES)}{did_you_mean(task, PIPELINES)}"
        raise RequestError(404, f"no task {task!r:.100}, {known}")
    reads_images = PIPELINES[task].forms == (IMAGE,)
    body = body_of(await request.body(), request.headers.get("content-type", ""), reads_images)
    model = models_of(request).choose(
        lambda model: model.has_task(PIPELINES[task]),
        f"do {task}",
        name_in_path(request),
        body.model,
    )
    given = {**(body.model_extra or {}), **(body.parameters or {})}
    parameters = {name: value for name, value in given.items() if value is not None}
    if body.stream:
        raise UsageError("stream is true, expected false: /v1/completions streams")
    answer_all = generated if task in GENERATION_OPTIONS else run_task
    return await answer_all(model, task, body, parameters, settings_of(request).max_batch)


async def run_task(
    model: ServedModel, name: str, body: PipelineRequest, given: dict[str, Any], most: int
) -> Response:
    """Answer with what a model reads, without generation."""
    form, task = FORMATS.get(name, Format()), PIPELINES[name]
    ours = {TEXT: texts, PAIR: pairs, IMAGE: images}
    read = form.inputs or ours.get(task.forms[0]) or objects(*task.forms[0])
    inputs = read(body.inputs, most)
    options = options_of(form, task, given)
    form.check(model, inputs, options)
    answers = form.answers or functools.partial(plain, task)
    return in_json(await model.read(len(inputs.rows), answer, answers, model, inputs, options))


def answer(
    answers: "Answers", model: ServedModel, inputs: "RequestInputs", options: dict[str, Any]
) -> bytes:
    found = answers(model.runtime, inputs.rows, options)
    return (
        listed(iter(found))
        if inputs.is_list
        else json.dumps(found[0], ensure_ascii=False, allow_nan=False).encode()
    )


def body_of(content: bytes, media_type: str, reads_images: bool) -> PipelineRequest:
    """Return the request in `content`. Bytes are an image if the task reads images.

    Raises:
        ValueError: for what is no JSON object.
        RequestValidationError: for fields of another type.
    """
    begins_an_object = content.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"{"
    is_json = media_type.split(";")[0].strip() == "application/json" or begins_an_object
    if reads_images and not is_json:
        return PipelineRequest.model_validate({"inputs": content})
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not JSON: {error}, expected an object with inputs") from None
    if not isinstance(found, dict):
        raise UsageError(f"the body is {found!r:.80}, expected an object with inputs")
    with validated(found, "body"):
        return PipelineRequest.model_validate(found)


# ------------------------------------------------------------------------------------------- inputs


@dataclass
class RequestInputs:
    """The `rows` of a request, and whether it had a list of them, so that the response is a list
    too."""

    rows: list[Any]
    is_list: bool


def checked(rows: list[Any], is_list: bool, most: int) -> RequestInputs:
    if not rows:
        raise UsageError("inputs is empty, expected at least one")
    if len(rows) > most:
        raise TooLong(f"inputs has {len(rows)} items, expected at most {most}")
    for text in characters_of(rows):
        if len(text) > CHARACTERS:
            raise TooLong(f"a text has {len(text)} characters, expected at most {CHARACTERS}")
    return RequestInputs(rows, is_list)


def characters_of(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return [text for part in parts for text in characters_of(part)]


def texts(given: Any, most: int) -> RequestInputs:
    """Return one text as a list, or a list of texts."""
    return checked(given if isinstance(given, list) else [given], isinstance(given, list), most)


def classified_texts(given: Any, most: int) -> RequestInputs:
    """Return texts or pairs. The response to a single one is a list of one too, as
    huggingface_hub's client expects."""
    return RequestInputs(texts(given, most).rows, True)


def pairs(given: Any, most: int) -> RequestInputs:
    """Return a list of pairs from two texts, as a list or an object, or from a list of such
    pairs."""
    is_one = isinstance(given, dict) or (
        isinstance(given, list) and bool(given) and isinstance(given[0], str)
    )
    rows = [given] if is_one else given
    if not isinstance(rows, list):
        raise UsageError(f"inputs is {given!r:.80}, expected a pair of texts or a list of pairs")
    return checked([tuple(row) if isinstance(row, list) else row for row in rows], not is_one, most)


def objects(*keys: str) -> Callable[[Any, int], RequestInputs]:
    """Return the reader of an object with these keys, or of a list of such objects."""

    def read(given: Any, most: int) -> RequestInputs:
        rows = given if isinstance(given, list) else [given]
        for row in rows:
            if not isinstance(row, dict) or set(row) != set(keys):
                raise UsageError(
                    f"inputs is {row!r:.80}, expected an object with {' and '.join(keys)}"
                )
        found = checked(rows, isinstance(given, list), most)
        for row in rows:
            if isinstance(row[keys[1]], list) and len(row[keys[1]]) > most:
                raise TooLong(f"{keys[1]} has {len(row[keys[1]])} items, expected at most {most}")
        return found

    return read


def images(given: Any, most: int) -> RequestInputs:
    """Return images from bytes, from base64, or from a list of base64 texts."""
    rows = given if isinstance(given, list) else [given]
    checked([None] * len(rows), True, most)
    return RequestInputs(rows, isinstance(given, list))


def image_of(given: Any) -> Any:
    from PIL import Image

    from ...image_runtime import image_errors, rotate_upright

    if isinstance(given, str):
        try:
            given = base64.b64decode(
                given.rpartition(",")[2] if given.startswith("data:") else given, validate=True
            )
        except (binascii.Error, ValueError) as error:
            raise UsageError(
                f"inputs is {given!r:.40}, expected an image's bytes in base64: {error}"
            ) from None
    if not isinstance(given, bytes):
        raise UsageError(f"inputs is {given!r:.80}, expected an image's bytes in base64")
    try:
        with image_errors(), Image.open(io.BytesIO(given)) as file:
            return rotate_upright(file)
    except ValueError as error:
        raise UsageError(f"inputs: {error}") from None


# -------------------------------------------------------------------------------------------- tasks


Answers = Callable[[Any, list[Any], dict[str, Any]], Sequence[Any]]


@dataclass(frozen=True)
class Format:
    """The differences of a pipeline from the function of its task.

    Args:
        inputs: reads `inputs`, if not as the form of the task says.
        answers: returns the answer to each input, see `plain`.
        has_options: false if the pipeline has none.
        defaults: of options that have another default.
        check: raises TooLong for inputs that take too long.
    """

    inputs: Callable[[Any, int], RequestInputs] | None = None
    answers: Answers | None = None
    has_options: bool = True
    defaults: dict[str, Any] = field(default_factory=dict)
    check: Callable[[ServedModel, RequestInputs, dict[str, Any]], None] = (
        lambda model, inputs, options: None
    )


def plain(task: Task, runtime: Any, rows: list[Any], options: dict[str, Any]) -> Sequence[Any]:
    """Return the result of the function of a task for each row."""
    keys = task.forms[0]
    if keys == IMAGE:
        columns = [[image_of(row) for row in rows]]
    else:
        columns = [rows] if keys in (TEXT, PAIR) else [[row[key] for row in rows] for key in keys]
    found = task_function(task)(runtime, *columns, **options)
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in found]


def options_of(form: Format, task: Task, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a task. Their names and types are checked by the signature of its
    function, their values by the function."""
    fields = fields_of(task_function(task)) if form.has_options else {}
    if unknown := sorted(given.keys() - fields.keys()):
        expected = f"expected some of {', '.join(fields)}" if fields else "this task has none"
        raise UsageError(
            f"parameters has {unknown[0]!r:.60}, {expected}{did_you_mean(unknown[0], fields)}"
        )
    with validated(given, "body", "parameters"):
        model_of(tuple(fields.items())).model_validate(given)
    return {**form.defaults, **given}


@functools.cache
def fields_of(method: Callable[..., Any]) -> dict[str, Any]:
    found = inspect.signature(method).parameters.values()
    named = [each for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]
    return {
        each.name: (each.annotation, ... if each.default is each.empty else each.default)
        for each in named
    }


@functools.cache
def model_of(fields: tuple[tuple[str, Any], ...]) -> type[BaseModel]:
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    return create_model("Parameters", __config__=config, **dict(fields))


def zero_shot(runtime: TextRuntime, rows: list[Any], options: dict[str, Any]) -> Sequence[Any]:
    found = runtime.zero_shot(rows, **options)
    return [
        [{"label": label, "score": score} for label, score in zip(each["labels"], each["scores"])]
        for each in found
    ]


def check_candidates(model: ServedModel, inputs: RequestInputs, options: dict[str, Any]) -> None:
    count = len(inputs.rows) * len(checked_candidates(options["candidate_labels"]))
    if count > MOST_WINDOWS:
        raise TooLong(
            f"inputs and candidate_labels are {count} pairs, expected at most {MOST_WINDOWS}"
        )


def check_tag_windows(model: ServedModel, inputs: RequestInputs, options: dict[str, Any]) -> None:
    longest = model.runtime.tokenizer_settings.longest
    if longest is not None and options.get("stride"):
        room = (
            longest - model.runtime.tokenizer.num_special_tokens_to_add(False) - options["stride"]
        )
        check_windows(
            max(map(len, characters_of(inputs.rows)), default=0),
            room,
            f"stride={options['stride']}",
        )


def check_windows(tokens: int, new: int, why: str) -> None:
    """Raise TooLong for more windows than are read if each has `new` tokens."""
    if new > 0 and tokens // new > MOST_WINDOWS:
        raise TooLong(
            f"{why} may be {tokens // new} windows, expected at most {MOST_WINDOWS}: give shorter "
            "texts, or less"
        )


def answered(runtime: TextRuntime, rows: list[Any], options: dict[str, Any]) -> Sequence[Any]:
    found = runtime.answer(
        [row["question"] for row in rows], [row["context"] for row in rows], **options
    )
    return found if options.get("top_k", 1) > 1 else [each[0] for each in found]


def check_question(model: ServedModel, inputs: RequestInputs, options: dict[str, Any]) -> None:
    """Check the length of the question, because it may leave almost nothing of a window."""
    size = options.get("max_seq_len") or min(model.runtime.tokenizer_settings.longest or 384, 384)
    stride = options["doc_stride"] if options.get("doc_stride") is not None else min(size // 2, 128)
    for row in inputs.rows:
        context = row["context"] if isinstance(row["context"], str) else ""
        if len(context) > MOST_WINDOWS:
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


def features(runtime: TextRuntime, rows: list[Any], options: dict[str, Any]) -> Sequence[Any]:
    """Return the states of the tokens of each text with a batch axis of one, as in the pipeline."""
    found = rows_of(runtime, strings(rows))
    states: list[Any] = [None] * len(found)
    for index, outputs in run(runtime, found):
        states[index] = [outputs["last_hidden_state"].tolist()]
    return states


def similarities(runtime: TextRuntime, rows: list[Any], options: dict[str, Any]) -> Sequence[Any]:
    found = []
    for row in rows:
        sentences = row["sentences"]
        if not isinstance(sentences, list) or not sentences:
            expected = "expected a list of texts, at least one"
            raise UsageError(f"sentences is {sentences!r:.80}, {expected}")
        vectors = runtime.embed([row["source_sentence"], *sentences], **options)
        found.append(runtime.similarity(vectors[:1], vectors[1:])[0].tolist())
    return found


def followed(runtime: TextRuntime, rows: list[Any], options: dict[str, Any]) -> Sequence[Any]:
    scores = softmax(runtime.next_sentence(rows)).tolist()
    return [labelled(["isNext", "notNext"], own) for own in scores]


def chosen(runtime: TextRuntime, rows: list[Any], options: dict[str, Any]) -> Sequence[Any]:
    found = runtime.choose([row["text"] for row in rows], [row["choices"] for row in rows])
    return [
        labelled(row["choices"], softmax(scores).tolist())
        for row, scores in zip(rows, found, strict=True)
    ]


def labelled(labels: Sequence[str], scores: Sequence[float]) -> list[dict[str, Any]]:
    """Return the labels with their scores, best first."""
    return sorted(
        ({"label": label, "score": score} for label, score in zip(labels, scores)),
        key=lambda each: -each["score"],
    )


def image_features(runtime: Any, rows: list[Any], options: dict[str, Any]) -> Sequence[Any]:
    """Return the states (1, S, D) of each image, as in the pipeline; with `pool` (D,)."""
    found = [runtime.embed([image_of(row)], **options)[0].tolist() for row in rows]
    return found if options.get("pool") else [[states] for states in found]


# By the names of pipelines.
FORMATS = {
    "text-classification": Format(classified_texts, defaults={"top_k": None}),
    "zero-shot-classification": Format(answers=zero_shot, check=check_candidates),
    "token-classification": Format(check=check_tag_windows),
    "question-answering": Format(answers=answered, check=check_question),
    "feature-extraction": Format(answers=features, has_options=False),
    "sentence-similarity": Format(objects("source_sentence", "sentences"), similarities),
    "image-feature-extraction": Format(answers=image_features),
    "next-sentence": Format(answers=followed),
    "multiple-choice": Format(answers=chosen),
}
NAMES = {"translation": "translation_text", "summarization": "summary_text"}


# --------------------------------------------------------------------------------------- generation


async def generated(
    model: ServedModel, task: str, body: PipelineRequest, given: dict[str, Any], most: int
) -> Response:
    """Return each text's translation or continuation: `[{"generated_text": str}, ...]`, and for a
    list of texts a list of such lists."""
    inputs = texts(body.inputs, most)
    single_texts(inputs.rows)
    own, options = generation_options(task, given)
    if task == "translation":
        splitting = Splitting(copy_letterless=own.pop("copy_letterless"))
        found = await translate(model, inputs.rows, splitting=splitting, **own, **options)
    else:
        found = await continued(model, inputs.rows, own, options)
    if own.get("return_full_text"):
        found = [
            [row + text for text in texts] for row, texts in zip(inputs.rows, found, strict=True)
        ]
    name = NAMES.get(task, "generated_text")
    answers = [[{name: text} for text in each] for each in found]
    return JSONResponse(answers if inputs.is_list else answers[0])


# Of the pipelines that generate, beside those of `Runtime.generate`, with their defaults.
GENERATION_OPTIONS: dict[str, dict[str, Any]] = {
    "text-generation": {"return_full_text": True},
    "translation": {"src_lang": None, "tgt_lang": None, "copy_letterless": True},
    **dict.fromkeys(
        ("summarization", "text2text-generation"), {"src_lang": None, "tgt_lang": None}
    ),
}


def generation_options(task: str, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the task's own options and those of `Runtime.generate`.

    Raises:
        UsageError: for a name that is neither, and for a value that an option cannot have.
    """
    given = dict(given)
    more = given.pop("generate_parameters", {})
    if not isinstance(more, dict):
        raise UsageError(f"generate_parameters is {more!r:.80}, expected an object")
    given |= {name: value for name, value in more.items() if value is not None}
    own = {name: given.pop(name, default) for name, default in GENERATION_OPTIONS[task].items()}
    unused = [name for name in given if name in LEFT_OUT]
    if unused:
        # What huggingface_hub's client knows as "leave these out": it warns, and asks again without
        # them.
        raise UsageError(
            f"The following `model_kwargs` are not used by the model: {unused}, expected options "
            "of this server"
        )
    for name in ("return_full_text", "copy_letterless"):
        if name in own and not isinstance(own[name], bool):
            raise UsageError(f"{name} is {own[name]!r:.60}, expected true or false")
    for name in ("src_lang", "tgt_lang"):
        if own.get(name) is not None and not isinstance(own[name], str):
            raise UsageError(f"{name} is {own[name]!r:.60}, expected the name of a language")
    return own, checked_options(given)


async def continued(
    model: ServedModel, rows: list[str], own: dict[str, Any], options: dict[str, Any]
) -> list[list[str]]:
    assert model.scheduler is not None  # every model that generates has one
    size = sum(map(len, rows))
    inputs = await offloaded(size, admit_rows, model, rows, own, options)
    found = await model.scheduler.generate(inputs)
    decoded = iter(
        await offloaded(
            size, model.runtime.decode, [each.tokens for answers in found for each in answers]
        )
    )
    return [[next(decoded) for _ in answers] for answers in found]


def admit_rows(
    model: ServedModel, rows: list[str], own: dict[str, Any], options: dict[str, Any]
) -> list[GenerationInput]:
    assert model.scheduler is not None
    targets = model.runtime.target_options(own.get("tgt_lang"), len(rows), options)
    ids = model.runtime.rows(rows, own.get("src_lang"))
    admit = model.admission.admit
    return [admit(row, {**options, **target}) for row, target in zip(ids, targets)]
