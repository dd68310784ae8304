"""Graphs as files."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import onnx_ir as ir

PROTOBUF_LIMIT = 1_900_000_000  # bytes of weights; a protobuf message can hold 2 GB
# bytes; smaller tensors stay in the graph, where onnxruntime can fold them into others
MIN_EXTERNAL = 1024
# Alignment in a file that is mapped into memory, in bytes: pages for large tensors, cache lines
# for others.
PAGE, LINE = 4096, 64
MIN_PAGED = 2**20  # bytes of a tensor that begins at a page
GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9  # fields of ModelProto, GraphProto and TensorProto


def save_graph(model: ir.Model, path: Path) -> None:
    """Write `model` with its weights to the ONNX file `path`, and create its directory if needed.

    If weights have more than `PROTOBUF_LIMIT` bytes, they go to `<path>_data`. One tensor at a time
    is in memory. Do not use `model` afterwards: its weights are removed or moved to that file.
    """
    path.parent.mkdir(exist_ok=True)
    tensors = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }
    if sum(tensor.nbytes for tensor in tensors.values()) > PROTOBUF_LIMIT:
        move_weights(model, path.with_name(f"{path.name}_data"))
        ir.save(model, path)
        return
    model.graph.initializers.clear()
    proto = ir.to_proto(model)
    graph = proto.graph.SerializeToString()
    proto.ClearField("graph")
    headers = {name: initializer_header(name, tensor) for name, tensor in tensors.items()}
    size = len(graph) + sum(len(headers[name]) + tensor.nbytes for name, tensor in tensors.items())
    with open(path, "wb") as file:
        file.write(proto.SerializeToString() + field_header(GRAPH, size) + graph)
        for name, tensor in tensors.items():
            file.write(headers[name])
            write_content(file, tensor)


def initializer_header(name: str, tensor: ir.TensorProtocol) -> bytes:
    """Return the bytes of an initializer `name` that come before the content of `tensor`, in
    protobuf."""
    facts = onnx.TensorProto(
        name=name, data_type=int(tensor.dtype), dims=tuple(tensor.shape.numpy())
    ).SerializeToString()
    facts += field_header(RAW_DATA, tensor.nbytes)
    return field_header(INITIALIZER, len(facts) + tensor.nbytes) + facts


def field_header(number: int, size: int) -> bytes:
    """Return protobuf's header of the field `number`, a message or byte string of `size` bytes."""
    return bytes([number << 3 | 2, *varint(size)])


def varint(number: int) -> Iterator[int]:
    """Yield the bytes of `number` as protobuf's variable-length integer: 7 bits each, the lowest
    first."""
    while number > 127:
        yield number & 127 | 128
        number >>= 7
    yield number


def move_weights(model: ir.Model, path: Path) -> None:
    """Write the weights of `model` to the file `path`, and replace them with references to it.
    Weights of less than `MIN_EXTERNAL` bytes stay."""
    with open(path, "wb") as file:
        for name, value in model.graph.initializers.items():
            if value.const_value is not None and value.const_value.nbytes >= MIN_EXTERNAL:
                value.const_value = write_external(file, path, name, value.const_value)


def data_files(graph: Path) -> list[str]:
    """Return the sorted names of the files with weights of the ONNX file `graph`; they lie beside
    it."""
    model = ir.load(graph)
    tensors = [value.const_value for part in model.graphs() for value in part.initializers.values()]
    return sorted(
        {str(tensor.location) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}
    )


def write_external(
    file: BinaryIO, path: Path, name: str, tensor: ir.TensorProtocol
) -> ir.ExternalTensor:
    """Append `tensor` to `file`, which is open at `path`, aligned for a map into memory.

    Returns a tensor `name` that refers to the place in the file.
    """
    file.write(bytes(-file.tell() % (PAGE if tensor.nbytes >= MIN_PAGED else LINE)))
    offset, shape = file.tell(), ir.Shape(tensor.shape.numpy())
    write_content(file, tensor)
    return ir.ExternalTensor(
        path.name, offset, tensor.nbytes, tensor.dtype, shape=shape, name=name, base_dir=path.parent
    )


def write_content(file: BinaryIO, tensor: ir.TensorProtocol) -> None:
    file.write(np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data)
