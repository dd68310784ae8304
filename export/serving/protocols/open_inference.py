"""The endpoints of the Open Inference Protocol, version 2
(https://github.com/kserve/open-inference-protocol). Clients of Triton and KServe use it: requests
and responses are tensors."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from ... import __version__
from ...engine.encoder import LENGTHS
from ...engine.inputs import GenerationInput, check_options, with_targets
from ...errors import RequestError, TooLong, UsageError
from ...heads import EMBED, HEADS, MAX_CHARACTERS, READS_TOKENS
from ...inference.inputs import check_contiguous, check_inputs
from ...shared.options import without_none
from ...specs.graph_spec import TensorSpec
from ...specs.sequences import token_inputs
from ...text.checks import check_strings
from ...text.text_model import Cut, Outputs
from ..generation import call_off_loop, continue_texts
from ..models import READY, ServedModel
from .protocol import (
    BINARY,
    Protocol,
    check_language_names,
    check_names_and_sizes,
    request_body,
    served_models,
    server_settings,
    use_model,
)
from .tensors import (
    JSON_LENGTH,
    TEXTS,
    VERSION,
    InputTensor,
    OutputTensor,
    describe_tensor,
    flag,
    parse_inputs,
    parse_outputs,
    read_request,
    render_answer,
)
from .text_embeddings import encode_inputs, longest

router = APIRouter(tags=["Open Inference Protocol"])

TEXT = TensorSpec("text", TEXTS, ("batch_size",))
GENERATED = TensorSpec("generated_text", TEXTS, ("batch_size",))
EMBEDDING = TensorSpec("embedding", "float32", ("batch_size", "embedding_size"))
LANGUAGES = ("src_lang", "tgt_lang")
ENCODER_PARAMETERS = ("truncate",)
SCHEMA = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "model_name": {"type": "string"},
        "parameters": {"type": "object"},
        "inputs": {"type": "array", "items": InputTensor.model_json_schema()},
        "outputs": {"type": "array", "items": OutputTensor.model_json_schema()},
    },
}
BODY = request_body({"application/json": SCHEMA, "application/octet-stream": BINARY})

PROTOCOL = Protocol(router)


# ----------------------------------------------------------------------------------- server, models


@router.get("/v2")
async def server(request: Request) -> JSONResponse:
    """Return the name, the version and the extensions of this server."""
    controls = ["model_repository"] if request.app.state.needs_token else []
    extensions = ["binary_tensor_data", *controls]
    return JSONResponse(
        {"name": "vanilla-transformer", "version": __version__, "extensions": extensions}
    )


@router.get("/v2/health/live")
async def live() -> JSONResponse:
    """Return status 200 while the process runs."""
    return JSONResponse({"live": True})


@router.get("/v2/health/ready")
async def ready(request: Request) -> JSONResponse:
    """Return status 200 if the server accepts requests, else 503."""
    is_ready = request.app.state.lifecycle.status == "ok"
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


async def check_version(version: str) -> None:
    """Raise RequestError 404 if `version` is not `VERSION`."""
    if version != VERSION:
        raise RequestError(
            404, f"version is {version!r:.60}, expected {VERSION}: each model has one version"
        )


VERSIONED: dict[str, Any] = {"dependencies": [Depends(check_version)]}


@router.get("/v2/models/{name}")
@router.get("/v2/models/{name}/versions/{version}", **VERSIONED)
async def metadata(request: Request, name: str) -> JSONResponse:
    """Return the inputs and outputs of a model.

    Each of `inputs` and `outputs` has `name`, `datatype` and `shape`, in which -1 is any size. A
    request has either the input `text` or the other inputs. Inputs with a default may be
    omitted."""
    model = served_models(request).find(name)
    return JSONResponse(
        {
            "name": name,
            "versions": [VERSION],
            "platform": "onnxruntime_onnx",
            "inputs": [*map(describe_tensor, inputs_for(model))],
            "outputs": [*map(describe_tensor, outputs_for(model))],
        }
    )


@router.get("/v2/models/{name}/ready")
@router.get("/v2/models/{name}/versions/{version}/ready", **VERSIONED)
async def model_ready(request: Request, name: str) -> JSONResponse:
    """Return status 200 if the model is loaded, 400 if it is not, and 404 if this server does not
    have it.

    A request to a model that is not loaded loads it."""
    is_ready = served_models(request).find(name).state == READY
    return JSONResponse({"name": name, "ready": is_ready}, 200 if is_ready else 400)


def inputs_for(model: ServedModel) -> tuple[TensorSpec, ...]:
    takes_texts = HEADS[model.architecture].reads == READS_TOKENS and model.reads_texts
    return ((TEXT,) if takes_texts else ()) + tensors_for(model)


def tensors_for(model: ServedModel) -> tuple[TensorSpec, ...]:
    """Return the specs of the inputs that replace texts.

    They are those of the graph of an encoder, or token ids and mask of a model that generates.
    """
    if not model.info.generates:
        return model.info.specs["encoder"].inputs
    return token_inputs(model.info.config, ("batch_size", "source_length"))


def outputs_for(model: ServedModel) -> tuple[TensorSpec, ...]:
    if model.info.generates:
        return (GENERATED,)
    return model.info.specs["encoder"].outputs + ((EMBEDDING,) if model.has_task(EMBED) else ())


# ---------------------------------------------------------------------------------------- inference


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed and checked request.

    Args:
        rows: number of sequences or images.
        outputs: names of the requested outputs; True if the output is sent in binary.
        parameters: options of the model.
    """

    id: str | None
    inputs: dict[str, np.ndarray]
    rows: int
    outputs: dict[str, bool]
    parameters: dict[str, Any]

    @property
    def texts(self) -> list[str] | None:
        return self.inputs[TEXT.name].tolist() if TEXT.name in self.inputs else None

    def answer(self, model: ServedModel, values: Outputs) -> Response:
        about = {"model_name": model.name, "model_version": VERSION, "id": self.id}
        requested = {name: values[name] for name in self.outputs}
        content, headers = render_answer(
            without_none(about),
            requested,
            [name for name, in_binary in self.outputs.items() if in_binary],
        )
        return Response(content, headers=headers)


@router.post("/v2/models/{name}/infer", openapi_extra=BODY)
@router.post("/v2/models/{name}/versions/{version}/infer", openapi_extra=BODY, **VERSIONED)
async def infer(request: Request, name: str) -> Response:
    """Return the outputs of a model. Inputs are texts, token ids or pixel values.

    The response has `outputs`, each with `name`, `datatype`, `shape` and `data`, the values in one
    flat list. Rows are in the order of the inputs. With `binary_data` the values follow the JSON as
    bytes instead; the header `Inference-Header-Content-Length` is then the length of the JSON. A
    model that generates has the one output `generated_text`."""
    model = await use_model(request, served_models(request).find(name))
    content = await request.body()
    max_rows = server_settings(request).max_batch
    parsed = await call_off_loop(
        len(content), parse_request, model, content, request.headers.get(JSON_LENGTH), max_rows
    )
    if not model.info.generates:
        return await model.read(parsed.rows, read_and_answer, model, parsed)
    texts = await generate_texts(model, parsed)
    return await call_off_loop(
        sum(map(len, texts)), parsed.answer, model, {GENERATED.name: np.array(texts, object)}
    )


def parse_request(
    model: ServedModel, content: bytes, json_length: str | None, max_rows: int
) -> ParsedRequest:
    """Return the request in `content`, checked except for its parameters.

    `json_length` is the header with the length of its JSON, if bytes follow it.

    Raises:
        UsageError, RequestValidationError: if the request is invalid.
        TooLong: if it has more than `max_rows` rows, or if rows of token ids are too long for an
            encoder. The lengths of texts are not checked yet.
    """
    body, binary = read_request(content, json_length)
    if body.model_name not in (None, model.name):
        raise UsageError(
            f"model_name is {body.model_name!r:.60}, expected {model.name!r}, the name in "
            f"the path, or no name"
        )
    inputs = parse_inputs(body.inputs, binary, inputs_for(model))
    outputs = parse_outputs(body, outputs_for(model))
    if TEXT.name in inputs and len(inputs) > 1:
        raise UsageError(
            f"inputs are {', '.join(inputs)}, expected either {TEXT.name} or the others"
        )
    first = next(iter(inputs.values()))
    if TEXT.name in inputs and first.ndim != 1:
        raise UsageError(f"{TEXT.name} has shape {list(first.shape)}, expected [n]")
    is_tokens = first.dtype == np.int64
    # each choice of a multiple choice input is a row
    rows = int(np.prod(first.shape[:-1])) if is_tokens else len(first)
    if rows > max_rows:
        raise TooLong(f"{next(iter(inputs))} has {rows} rows, expected at most {max_rows}")
    check_widths(model, inputs)
    parameters = {
        name: value
        for name, value in (body.parameters or {}).items()
        if name != "binary_data_output"
    }
    return ParsedRequest(body.id, inputs, rows, outputs, parameters)


def check_widths(model: ServedModel, inputs: dict[str, np.ndarray]) -> None:
    """Raise TooLong if rows of an encoder's input, padding included, are longer than its maximum.

    Outputs have the same padding, so wide padding would waste memory. Inputs of a model that
    generates are not checked.
    """
    if model.info.generates:
        return
    axes = {tensor.name: tensor.shape[-1] for tensor in model.encoder.graph.spec.inputs}
    longest = model.encoder.max_length
    for name, values in inputs.items():
        width = values.shape[-1] if axes.get(name) in LENGTHS else 0
        if width > longest:
            raise TooLong(f"{name} has rows of {width} tokens, expected at most {longest}")


# ----------------------------------------------------------------------------------------- encoders


def read_and_answer(model: ServedModel, parsed: ParsedRequest) -> Response:
    unknown = [name for name in parsed.parameters if name not in ENCODER_PARAMETERS]
    if unknown:
        raise UsageError(
            f"parameters has {unknown[0]!r:.60}, expected {', '.join(ENCODER_PARAMETERS)}"
        )
    truncates = flag("truncate", parsed.parameters.get("truncate"), False)
    texts = parsed.texts
    if texts is None:
        if truncates:
            raise UsageError(f"truncate is true without the input {TEXT.name}, expected false")
        return parsed.answer(
            model, tensor_outputs(model, parsed.inputs, EMBEDDING.name in parsed.outputs)
        )
    return parsed.answer(model, text_outputs(model, texts, parsed.outputs, truncates))


def tensor_outputs(
    model: ServedModel, inputs: dict[str, np.ndarray], with_embedding: bool
) -> Outputs:
    """Return {name: float32 array} of the outputs of the graph for `inputs` by name.

    If `with_embedding`, add the pooled vector of each row. Raises ValueError for wrong inputs.
    """
    outputs = {
        name: values.astype(np.float32)
        for name, values in model.runtime.runtime.outputs(**inputs).items()
    }
    if with_embedding:
        states = outputs["last_hidden_state"]
        mask = inputs.get("attention_mask", np.ones(states.shape[:2]))
        check_no_empty_rows(mask)
        outputs[EMBEDDING.name] = embeddings(
            model, [row_states[ones == 1] for row_states, ones in zip(states, mask, strict=True)], 0
        )
    return outputs


def check_no_empty_rows(mask: np.ndarray) -> None:
    has_tokens = mask.any(axis=1)
    if not has_tokens.all():
        raise ValueError(
            f"row {int(has_tokens.argmin())} of attention_mask is all 0, expected at least one 1"
        )


def text_outputs(
    model: ServedModel, texts: list[str], requested: dict[str, bool], truncates: bool
) -> Outputs:
    """Return {name: float32 array} of the outputs for `texts`, at least of those whose names are in
    `requested`. Rows are padded with zeros to the longest row.

    Texts to embed get the export's prompt.

    Raises:
        ValueError: if an input is not a text.
        TooLong: if a text has too many tokens and `truncates` is False.
    """
    check_strings(texts)
    cut = Cut(longest(model), rejects=not truncates)
    rows, prompt_length = encode_inputs(model, texts, None, cut)
    needed = {"last_hidden_state" if name == EMBEDDING.name else name for name in requested}
    outputs = model.runtime.run_rows(
        rows, lambda row, outputs: {name: outputs[name] for name in needed}
    )
    arrays = {name: padded_rows([values[name] for values in outputs]) for name in needed}
    if EMBEDDING.name in requested:
        states = [values["last_hidden_state"] for values in outputs]
        arrays[EMBEDDING.name] = embeddings(model, states, prompt_length)
    return arrays


def embeddings(model: ServedModel, states: Sequence[np.ndarray], prompt_length: int) -> np.ndarray:
    """Return one vector for the states (S, D) of each row, pooled by the modules of the export: (B,
    E) float32.

    The first `prompt_length` tokens are a prompt.
    """
    modules = model.runtime.sentence_modules
    return np.stack([modules.embedding(row_states, prompt_length) for row_states in states]).astype(
        np.float32
    )


def padded_rows(values: Sequence[np.ndarray]) -> np.ndarray:
    """Return `values`, arrays of different sizes, as one float32 array (B, ...), padded with
    zeros."""
    padded = np.zeros((len(values), *np.max([value.shape for value in values], axis=0)), np.float32)
    for row, value in zip(padded, values, strict=True):
        row[tuple(map(slice, value.shape))] = value
    return padded


# ----------------------------------------------------------------------------- models that generate


async def generate_texts(model: ServedModel, parsed: ParsedRequest) -> list[str]:
    """Return the translation or continuation of each text or row of token ids in a request.

    `parsed` has its inputs, and its parameters: generation options and languages.

    Raises:
        UsageError: for an invalid option or language, and for several results per row.
        TooLong: for a text or row that is too long.
        RequestError: if the queue is full or the server is shutting down.
    """
    parameters = dict(parsed.parameters)
    languages = {name: parameters.pop(name, None) for name in LANGUAGES}
    check_language_names(languages)
    check_names_and_sizes(parameters)
    options = {"num_return_sequences": 1, **parameters}
    several = options["num_return_sequences"]
    if several != 1:
        raise UsageError(f"num_return_sequences is {several}, expected 1: each row has one output")
    texts = parsed.texts
    if texts is not None:
        longest = max(map(len, texts))
        if longest > MAX_CHARACTERS:
            raise TooLong(f"a text has {longest} characters, expected at most {MAX_CHARACTERS}")
        return list(itertools.chain(*await continue_texts(model, texts, options, **languages)))
    if languages["src_lang"] is not None:
        raise UsageError(
            f"src_lang is {languages['src_lang']!r:.60} without the input {TEXT.name}, expected "
            f"null"
        )
    size = sum(values.size for values in parsed.inputs.values())
    results = await model.client.generate(
        await call_off_loop(
            size, token_id_inputs, model, parsed.inputs, languages["tgt_lang"], options
        )
    )
    tokens = [answer.tokens for [answer] in results]
    return await call_off_loop(sum(map(len, tokens)), model.runtime.decode, tokens)


def token_id_inputs(
    model: ServedModel, inputs: dict[str, np.ndarray], tgt_lang: str | None, options: dict[str, Any]
) -> list[GenerationInput]:
    """Return one generation input for each row of token ids, without its padding.

    Args:
        inputs: `input_ids` (B, S), and optionally `attention_mask` (B, S), which is 0 for padding.
        tgt_lang: the target language; `None` for the default of the model, if it has one.
        options: generation options.

    Raises:
        UsageError: for an invalid option or language.
        ValueError: for arrays that do not fit the model, a mask with holes, a row without tokens,
            and token ids that the model does not have.
        TooLong: for a row with too many tokens.
    """
    checked = check_options(model.runtime.info, options)
    feeds = check_inputs(tensors_for(model), dict(inputs), model.architecture)
    ids, mask = feeds["input_ids"], feeds["attention_mask"]
    check_contiguous(mask, "attention_mask")
    check_no_empty_rows(mask)
    rows = [row_ids[ones == 1].tolist() for row_ids, ones in zip(ids, mask, strict=True)]
    targets = model.runtime.languages.target_options(tgt_lang, len(rows), options)
    return model.admission.admit_all(rows, with_targets(model.runtime.info, checked, targets))
