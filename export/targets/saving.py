"""Traced graphs -> files."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx_ir as ir

PROTOBUF_LIMIT = 1_900_000_000  # bytes of weights: a message can hold 2 GB, so what is above goes into a file of its own
SHARED_WEIGHTS = "model.onnx_data"
MIN_EXTERNAL = 1024  # bytes: smaller weights stay in the graph, where onnxruntime can fold them into others
PAGE = 4096  # bytes, what a file is mapped in


def save_graphs(graphs: dict[Path, ir.Model]) -> None:
    """Weights stay in their graph, or go to `<path>_data` where they are more than `PROTOBUF_LIMIT`."""
    for path, graph in graphs.items():
        path.parent.mkdir(exist_ok=True)
        if sum(tensor.nbytes for _, _, tensor in weights_of(graph)) > PROTOBUF_LIMIT:
            move_weights([graph], path.with_name(f"{path.name}_data"))
        ir.save(graph, path)


def save_with_shared_weights(graphs: dict[Path, ir.Model]) -> None:
    """All weights go to one file beside the graphs, each once: onnxruntime maps it into memory."""
    for path in graphs:
        path.parent.mkdir(exist_ok=True)
    move_weights(graphs.values(), next(iter(graphs)).with_name(SHARED_WEIGHTS))
    for path, graph in graphs.items():
        ir.save(graph, path)


def move_weights(graphs: Iterable[ir.Model], path: Path) -> None:
    """Writes the weights of `graphs` to `path`, at multiples of the page size, and has the graphs refer to it."""
    places: dict[bytes, int] = {}
    with open(path, "wb") as file:
        for name, value, tensor in itertools.chain.from_iterable(map(weights_of, graphs)):
            if tensor.nbytes < MIN_EXTERNAL:
                continue
            content = tensor.tobytes()
            key = hashlib.sha256(content).digest()
            if key not in places:
                file.write(bytes(-file.tell() % PAGE))
                places[key] = file.tell()
                file.write(content)
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor(
                path.name, places[key], len(content), tensor.dtype, shape=shape, name=name, base_dir=path.parent
            )


def weights_of(graph: ir.Model) -> Iterator[tuple[str, ir.Value, ir.TensorProtocol]]:
    """The name of each initializer, itself, and the weights that it holds."""
    for name, value in graph.graph.initializers.items():
        assert value.const_value is not None  # only a graph that is being built has initializers without
        yield name, value, value.const_value
