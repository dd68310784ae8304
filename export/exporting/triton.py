"""A model of Triton Inference Server (https://github.com/triton-inference-server/server), as a
folder of a model repository. Triton's backend of onnxruntime runs its graph with dynamic batching
and no code."""

import shutil
from collections.abc import Collection
from pathlib import Path

from ..graphs.saving import data_files
from ..specs.graph_spec import GraphSpec, TensorSpec
from ..targets.target import Target

CONFIG = "config.pbtxt"
# of the version 1; with weights in files of their own a folder, in which the graph has this name
# again
GRAPH = "1/model.onnx"
# model_config.proto of https://github.com/triton-inference-server/common
TYPES = {"int64": "TYPE_INT64", "int32": "TYPE_INT32", "float32": "TYPE_FP32", "bool": "TYPE_BOOL"}
BATCH_AXIS = "batch_size"
MAX_BATCH = 32  # rows of one run
QUEUE_DELAY = 1000  # microseconds that a request waits for others
TEMPLATE = """# Written by vanilla-transformer export.
backend: "onnxruntime"
max_batch_size: {max_batch}
{tensors}
dynamic_batching {{
  max_queue_delay_microseconds: {delay}
}}
"""
INSTANCES = """instance_group [
  {{ kind: {kind} }}
]
"""


def write_triton_model(spec: GraphSpec, export: Path, directory: Path, kind: str | None) -> None:
    """Write config.pbtxt and the graph of `spec`, from the directory `export`, to `directory`.

    The name of `directory` is the model's. It must exist, without a folder "1". `kind` is the kind
    of the instances, see `instance_kind`. Raises ValueError as `config_text` does.
    """
    config = config_text(spec) + ("" if kind is None else INSTANCES.format(kind=kind))
    (directory / CONFIG).write_text(config, encoding="utf-8")
    graph, source = directory / GRAPH, export / spec.file
    if data := data_files(source):
        graph /= graph.name
    graph.parent.mkdir(parents=True)
    shutil.copyfile(source, graph)
    for name in data:
        shutil.copyfile(source.parent / name, graph.parent / name)


def instance_kind(target: Target, roles: Collection[str], dtype: str) -> str | None:
    """Return the kind of Triton's instances that run the graphs of these `roles`: "KIND_CPU",
    "KIND_GPU", or `None` for a GPU where there is one."""
    if set(target.devices(roles, dtype)) == {"cpu"}:
        return "KIND_CPU"
    return None if target.default_device == "cpu" else "KIND_GPU"


def config_text(spec: GraphSpec) -> str:
    """Return the content of config.pbtxt, the configuration of a Triton model with the graph of
    `spec`.

    Raises:
        ValueError: for a tensor that is not a batch axis with at least one axis after it, or of a
            type that Triton does not have.
    """
    tensors = "\n".join([tensor_list("input", spec.inputs), tensor_list("output", spec.outputs)])
    return TEMPLATE.format(max_batch=MAX_BATCH, tensors=tensors, delay=QUEUE_DELAY)


def tensor_list(name: str, tensors: Collection[TensorSpec]) -> str:
    return "\n".join([f"{name} [", ",\n".join(map(tensor_config, tensors)), "]"])


def tensor_config(tensor: TensorSpec) -> str:
    """Return the entry of `tensor` in config.pbtxt. It leaves out the batch axis, which Triton puts
    in front; -1 is any size.

    Raises ValueError if the tensor is not a batch axis with at least one axis after it, or has a
    type that Triton does not have.
    """
    if tensor.shape[:1] != (BATCH_AXIS,) or len(tensor.shape) < 2:
        raise ValueError(
            f"{tensor.name} has shape {tensor.shape}, expected {BATCH_AXIS} and at least one "
            "axis after it"
        )
    if tensor.dtype not in TYPES:
        raise ValueError(
            f"{tensor.name} has dtype {tensor.dtype}, expected one of {', '.join(TYPES)}"
        )
    sizes = ", ".join(str(-1 if isinstance(size, str) else size) for size in tensor.shape[1:])
    return f'  {{ name: "{tensor.name}", data_type: {TYPES[tensor.dtype]}, dims: [ {sizes} ] }}'
