"""Requests and responses of the Open Inference Protocol. The values of a tensor are in the JSON,
flat or nested, or follow it as bytes (Triton's extension for binary data). Numbers are
little-endian in row-major order. 4 bytes with the length precede each text."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from ...errors import UsageError, did_you_mean
from ...specs.graph_spec import TensorSpec
from ...text.tasks.task import JsonObject
from .protocol import STRICT, Items, parse_body, short_repr

# header with the number of bytes of JSON, if binary data follow
JSON_LENGTH = "Inference-Header-Content-Length"
VERSION = "1"  # version of every model, like Triton's first version
TEXTS = "bytes"  # dtype of texts in a TensorSpec; all others are numpy's
DATATYPES = {TEXTS: "BYTES", "int64": "INT64", "float32": "FP32"}
WIDTH = 4  # number of bytes of the length before each text
# types of values in JSON
TYPES: dict[str, set[type]] = {TEXTS: {str}, "int64": {int}, "float32": {int, float}}
SHARED_MEMORY = "shared_memory"
Parameters = JsonObject | None


class InputTensor(BaseModel):
    """An input with its values, in the JSON or as bytes after it."""

    model_config = STRICT

    name: str = Field(description="name of the input")
    shape: Items[int] = Field(min_length=1, description="sizes of all axes")
    datatype: str = Field(
        description="data type, as in the metadata of the model", examples=["BYTES"]
    )
    parameters: Parameters = Field(
        None, description="binary_data_size: number of bytes of the values after the JSON"
    )
    data: Any = Field(None, description="values in one list, or in nested lists")


class OutputTensor(BaseModel):
    """A requested output."""

    model_config = STRICT

    name: str = Field(description="name of the output")
    parameters: Parameters = Field(
        None, description="binary_data: send the values as bytes after the JSON"
    )


class InferRequest(BaseModel):
    """A request for the outputs of a model."""

    model_config = STRICT

    id: str | None = Field(None, description="id of the request, which the response repeats")
    model_name: str | None = Field(None, description="name of the model, as in the path")
    parameters: Parameters = Field(
        None,
        description="options of the model, and binary_data_output, the default of binary_data",
    )
    inputs: Items[InputTensor] = Field(min_length=1, description="inputs of the model")
    outputs: Items[OutputTensor] | None = Field(
        None, description="requested outputs; by default all"
    )


def describe_tensor(tensor: TensorSpec) -> JsonObject:
    """Return the name, datatype and shape of a tensor for the protocol. A dynamic size is -1."""
    shape = [-1 if isinstance(size, str) else size for size in tensor.shape]
    return {"name": tensor.name, "datatype": DATATYPES[tensor.dtype], "shape": shape}


# ----------------------------------------------------------------------------------------- requests


def read_request(content: bytes, json_length: str | None) -> tuple[InferRequest, memoryview]:
    """Return the request in `content`, and the bytes that follow its JSON, if any.

    `json_length` is the header with the length of the JSON, None if there is no more than JSON.

    Raises:
        UsageError: if the length is not a number or exceeds the body, or the JSON is not an object.
        RequestValidationError: if a field is missing, unknown or of another type.
    """
    end = len(content)
    if json_length is not None:
        if (
            not (json_length.isascii() and json_length.isdecimal())
            or len(json_length) > 18
            or int(json_length) > end
        ):
            raise UsageError(
                f"{JSON_LENGTH} is {json_length!r:.60}, expected a number up to {end}, the size "
                "of the body"
            )
        end = int(json_length)
    return parse_body(content[:end], InferRequest), memoryview(content)[end:]


def parse_inputs(
    tensors: Sequence[InputTensor], binary: memoryview, known: Sequence[TensorSpec]
) -> dict[str, np.ndarray]:
    """Return {name: array} of the input tensors of a request, whose JSON is `tensors`. Texts are
    strings in an array of objects.

    `binary` are the bytes after the JSON, and `known` the inputs of the model. Whether one of these
    is missing, and whether shapes fit the model, is not checked.

    Raises:
        UsageError: if a name is not `known` or occurs twice, if values do not fit the datatype or
            the shape, if a size is less than 1, or if the number of bytes is wrong. Also for
            tensors in shared memory.
    """
    specs = {tensor.name: tensor for tensor in known}
    arrays: dict[str, np.ndarray] = {}
    offset = 0
    for tensor in tensors:
        check_tensor(tensor, "input", specs, arrays)
        dtype = specs[tensor.name].dtype
        if tensor.datatype != DATATYPES[dtype]:
            raise UsageError(
                f"{tensor.name} has datatype {tensor.datatype!r:.60}, expected {DATATYPES[dtype]}"
            )
        if min(tensor.shape) < 1:
            raise UsageError(
                f"{tensor.name} has shape {short_repr(tensor.shape)}, expected sizes of at least 1"
            )
        size = binary_size(tensor, len(binary) - offset)
        values = (
            json_values(tensor, dtype)
            if size is None
            else binary_values(binary[offset : offset + size], tensor, dtype)
        )
        offset += size or 0
        arrays[tensor.name] = values.reshape(tensor.shape)
    if offset != len(binary):
        raise UsageError(
            f"{len(binary)} bytes follow the JSON, expected {offset}, the sum of all "
            f"binary_data_size"
        )
    return arrays


def binary_size(tensor: InputTensor, remaining: int) -> int | None:
    """Return the number of bytes after the JSON that hold the values of `tensor`, or None if the
    JSON holds them.

    `remaining` is the maximum. Raises UsageError for another value, and for a tensor with values in
    both places.
    """
    size = (tensor.parameters or {}).get("binary_data_size")
    if size is None:
        return None
    if type(size) is not int or not 0 <= size <= remaining:
        raise UsageError(
            f"binary_data_size of {tensor.name} is {short_repr(size)}, expected at most "
            f"{remaining}, the remaining bytes"
        )
    if tensor.data is not None:
        raise UsageError(f"{tensor.name} has data and binary_data_size, expected only one of them")
    return size


def check_tensor(
    tensor: InputTensor | OutputTensor, kind: str, known: Collection[str], before: Collection[str]
) -> None:
    """Raise UsageError if the name of `tensor` is not `known` or is one of those `before`, and if
    it is in shared memory. `kind` is "input" or "output"."""
    name = tensor.name
    if name not in known:
        expected = f"expected some of {', '.join(known)}{did_you_mean(name, known)}"
        raise UsageError(f"the name of an {kind} is {name!r:.60}, {expected}")
    if name in before:
        raise UsageError(f"{kind}s has {name} twice, expected it once")
    if any(parameter.startswith(SHARED_MEMORY) for parameter in tensor.parameters or ()):
        raise UsageError(
            f"{name} is in shared memory, which is not supported: expected its values in the body"
        )


def json_values(tensor: InputTensor, dtype: str) -> np.ndarray:
    """Return the values of `tensor` in the JSON as an array of `dtype`, of objects for `TEXTS`.

    The array is flat or has the shape of `tensor`. Raises UsageError if the values do not fit type
    or shape.
    """
    if not isinstance(tensor.data, list):
        raise UsageError(
            f"data of {tensor.name} is {short_repr(tensor.data)}, expected a list of values"
        )
    # a numpy string type would reserve the size of the longest text for each value
    values = np.array(tensor.data, object)
    count = math.prod(tensor.shape)
    if values.size != count or (values.ndim > 1 and list(values.shape) != tensor.shape):
        shape = f"{short_repr(tensor.shape)}"
        raise UsageError(
            f"data of {tensor.name} has shape {list(values.shape)}, expected {shape} or "
            f"[{count}] to fit its shape"
        )
    types = set(map(type, values.flat))
    if wrong := types - TYPES[dtype]:
        seen = next(value for value in values.flat if type(value) in wrong)
        raise UsageError(
            f"data of {tensor.name} has {short_repr(seen)}, expected values of {DATATYPES[dtype]}"
        )
    if dtype == TEXTS:
        return values
    try:
        # values too large for float32 become infinite, and the reader rejects them
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    except OverflowError:
        raise UsageError(
            f"data of {tensor.name} has a number outside of the range of {DATATYPES[dtype]}"
        ) from None


def binary_values(content: memoryview, tensor: InputTensor, dtype: str) -> np.ndarray:
    """Return the values of `tensor` in the bytes `content` as a flat array.

    `dtype` is that of the bytes, in little-endian order: a name of numpy, or `TEXTS` for texts. The
    caller gives the array its shape. Raises UsageError if the number of values does not fit the
    shape of `tensor`, and for bytes that are no texts.
    """
    count = math.prod(tensor.shape)
    if dtype == TEXTS:
        texts = binary_texts(content, tensor.name)
        if len(texts) != count:
            raise UsageError(
                f"{tensor.name} has {len(texts)} texts, expected {count} to fit its shape"
            )
        return np.array(texts, object)
    little = np.dtype(dtype).newbyteorder("<")
    if len(content) != count * little.itemsize:
        expected = (
            f"{count * little.itemsize} for {DATATYPES[dtype]} of shape {short_repr(tensor.shape)}"
        )
        raise UsageError(
            f"binary_data_size of {tensor.name} is {len(content)}, expected {expected}"
        )
    return np.frombuffer(content, little)


def binary_texts(content: memoryview, name: str) -> list[str]:
    texts: list[str] = []
    offset = 0
    while offset < len(content):
        start = offset + WIDTH
        offset = start + int.from_bytes(content[offset:start], "little")
        if offset > len(content):
            raise UsageError(
                f"text {len(texts)} of {name} ends at byte {offset}, expected at most "
                f"{len(content)}, the size of its data"
            )
        try:
            texts.append(str(content[start:offset], "utf-8"))
        except UnicodeDecodeError as error:
            raise UsageError(f"text {len(texts)} of {name} is not valid UTF-8: {error}") from None
    return texts


def parse_outputs(body: InferRequest, known: Sequence[TensorSpec]) -> dict[str, bool]:
    """Return {name: True if the values are sent as bytes} of the requested outputs; by default all
    of `known`.

    Raises:
        UsageError: if a name is not `known` or occurs twice, or a parameter is not supported or has
            another type.
    """
    in_binary = flag("binary_data_output", (body.parameters or {}).get("binary_data_output"), False)
    names = [tensor.name for tensor in known]
    outputs: dict[str, bool] = {}
    for tensor in body.outputs or ():
        check_tensor(tensor, "output", names, outputs)
        parameters = tensor.parameters or {}
        if parameters.get("classification"):
            raise UsageError(
                f"classification of {tensor.name} is set, which is not supported: sort the values "
                f"instead"
            )
        outputs[tensor.name] = flag(
            f"binary_data of {tensor.name}", parameters.get("binary_data"), in_binary
        )
    return outputs or dict.fromkeys(names, in_binary)


def flag(name: str, value: Any, default: bool) -> bool:
    """Return `value`, or `default` if it is None. Raises UsageError unless it is True or False;
    `name` is for the message."""
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{name} is {short_repr(value)}, expected true or false")
    return default if value is None else value


# ------------------------------------------------------------------------------------------ answers


def render_answer(
    about: JsonObject, outputs: Mapping[str, np.ndarray], in_binary: Collection[str]
) -> tuple[bytes, dict[str, str]]:
    """Return the body of a response and its headers.

    `about` are fields of its JSON. `outputs` are arrays of objects for texts, and of the types of
    `DATATYPES` for numbers. Those in `in_binary` follow the JSON as bytes. Raises ValueError if the
    JSON would have NaN or infinity.
    """
    tensors, parts = [], []
    for name, values in outputs.items():
        datatype = DATATYPES[TEXTS if values.dtype == object else values.dtype.name]
        facts: JsonObject = {"name": name, "datatype": datatype, "shape": list(values.shape)}
        if name in in_binary:
            parts.append(to_bytes(values))
            facts["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            facts["data"] = values.ravel().tolist()
        tensors.append(facts)
    header = json.dumps({**about, "outputs": tensors}, ensure_ascii=False, allow_nan=False).encode()
    if not parts:
        return header, {"Content-Type": "application/json"}
    return b"".join([header, *parts]), {
        "Content-Type": "application/octet-stream",
        JSON_LENGTH: str(len(header)),
    }


def to_bytes(values: np.ndarray) -> bytes:
    if values.dtype != object:
        return values.astype(values.dtype.newbyteorder("<")).tobytes()
    texts = [text.encode() for text in values.flat]
    return b"".join(len(text).to_bytes(WIDTH, "little") + text for text in texts)
