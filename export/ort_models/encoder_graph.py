"""Encoders without a manifest, as other exporters write them, such as optimum."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from transformers.utils import GENERATION_CONFIG_NAME

from ..inference.devices import CUDA, TENSORRT, available_cpus, require
from ..inference.export_info import ExportInfo
from ..inference.inputs import check_sequence_inputs
from ..inference.session import Session
from ..specs.graph_spec import TensorSpec
from .saving import companion_files, read_json

DTYPES = {f"tensor({name})": name for name in ("int64", "int32", "bool", "float16")}
DTYPES |= {"tensor(float)": "float32", "tensor(double)": "float64"}
# device of each provider, which leaves nodes that it does not support to the next ones
DEVICES = {TENSORRT: "tensorrt", CUDA: "cuda", "CPUExecutionProvider": "cpu"}
DEFAULTS = {"attention_mask": 1, "token_type_ids": 0}
INPUTS = {"input_ids", "attention_mask", "token_type_ids", "pixel_values"}
TOKEN_AXES = {2: ("batch_size", "length"), 3: ("batch_size", "num_choices", "length")}
DEFAULT_NAME = "model.onnx"


class ForeignEncoder:
    """The graph in the file `path`, with the attributes and methods of a `Runtime` that models use.

    `config` is the content of config.json, which is in `directory`. `device` is `"cpu"`, the
    default, `"cuda"` or `"tensorrt"`. By default all CPU threads are used.

    Raises ValueError if onnxruntime cannot load the graph, or if it has other inputs, and OSError
    if the device is not available.
    """

    target = "portable"

    def __init__(
        self,
        directory: Path,
        path: Path,
        config: dict[str, Any],
        threads: int | None = None,
        device: str | None = None,
    ):
        self.info = read_info(directory, path, config)
        self.architecture, self.config = self.info.architecture, self.info.config
        self.path, self.device, self.threads = path, device or "cpu", threads or available_cpus()
        if self.device != "cpu":
            require(self.device)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        providers = itertools.dropwhile(lambda name: DEVICES[name] != self.device, DEVICES)
        self.session = Session(str(path), options, [*providers], path)
        types = {value.name: value.type for value in self.session.inner.get_inputs()}
        if unknown := sorted(types.keys() - INPUTS):
            expected = f"an encoder's: {sorted(INPUTS)}"
            raise ValueError(f"{path} has the inputs {unknown}, expected {expected}")
        if not {*types.values()} <= DTYPES.keys():
            raise ValueError(f"{path} has the inputs {types}, expected only {[*DTYPES]}")
        self.inputs = [input_spec(value, config) for value in self.session.inner.get_inputs()]
        self.output_names = [value.name for value in self.session.inner.get_outputs()]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how pickle and `copy` open the graph again, as a `Runtime` does."""
        arguments = self.info.directory, self.path, self.config, self.threads, self.device
        return type(self), arguments

    def outputs(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Return all outputs by name. Raises ValueError for wrong `arrays`.

        For a graph without masks, a mask must be 1 everywhere.
        """
        dtypes = {tensor.name: tensor.dtype for tensor in self.inputs}
        if "attention_mask" not in dtypes and np.all(arrays.get("attention_mask") == 1):
            arrays["attention_mask"] = None
        checked = check_sequence_inputs(self.inputs, arrays, str(self.path))
        feeds = {name: checked[name].astype(dtypes[name], copy=False) for name in dtypes}
        return dict(zip(self.output_names, self.session.run(self.output_names, feeds)))


def read_info(directory: Path, path: Path, config: dict[str, Any]) -> ExportInfo:
    """Return the configs and the names of the files of the graph `path` in `directory`."""
    files = path.parent.glob(f"{path.name}*")
    names = {file.relative_to(directory).as_posix() for file in files} | companion_files(directory)
    manifest = {"architecture": str(directory), "files": dict.fromkeys(sorted(names))}
    generation_config = read_json(directory / GENERATION_CONFIG_NAME)
    return ExportInfo(directory, manifest, config, generation_config, {}, {})


def input_spec(value: Any, config: dict[str, Any]) -> TensorSpec:
    """Return the spec of an input of a graph, whose tokens must be in the config's vocabulary."""
    axes = tuple(axis if isinstance(axis, int) else str(axis) for axis in value.shape)
    is_ids, size = value.name == "input_ids", config.get("vocab_size")
    if is_ids or value.name in DEFAULTS:
        axes = TOKEN_AXES.get(len(axes), axes)
    limits = (0, size - 1) if is_ids and size else None
    return TensorSpec(value.name, DTYPES[value.type], axes, limits, DEFAULTS.get(value.name))


def find_graph(folder: Path, file_name: str | None) -> Path:
    """Return the path of the graph `file_name`, which may have folders, in or below `folder`.

    The least deep one is preferred. The default is the only graph, or model.onnx of several.

    Raises FileNotFoundError if there is none, and ValueError if two have the same depth.
    """
    graphs = sorted(folder.rglob("*.onnx"), key=lambda path: (len(path.parts), path))
    name = str(file_name or (graphs[0].name if len(graphs) == 1 else DEFAULT_NAME))
    matching = [path for path in graphs if path.match(name)]
    if not matching:
        names = [path.relative_to(folder).as_posix() for path in graphs]
        raise FileNotFoundError(f"{folder} has the graphs {names}, expected {name}")
    if len(matching) > 1 and len(matching[0].parts) == len(matching[1].parts):
        names = [path.relative_to(folder).as_posix() for path in matching[:2]]
        raise ValueError(f"{folder} has {names}, expected one: pass subfolder")
    return matching[0]
