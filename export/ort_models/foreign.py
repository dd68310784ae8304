"""Graphs of whole sequences that another exporter wrote, such as optimum's for encoders."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from transformers.utils import CONFIG_NAME

from ..inference.devices import CUDA, TENSORRT, available_cpus, require
from ..inference.inputs import check_inputs
from ..inference.session import Session
from ..specs.graph_spec import TensorSpec

DTYPES = {"tensor(int64)": "int64", "tensor(int32)": "int32", "tensor(bool)": "bool"}
DTYPES |= {"tensor(float)": "float32", "tensor(float16)": "float16"}
DEFAULTS = {"attention_mask": 1, "token_type_ids": 0}
TOKEN_AXES = {2: ("batch_size", "length"), 3: ("batch_size", "num_choices", "length")}


class ForeignGraph:
    """A graph of another exporter, with the methods of `Runtime` that models call.

    Args:
        directory: directory with config.json.
        path: path of the graph.
        output_class: class of outputs of transformers, of which the graph must have some.
        threads: CPU threads per operator, by default all that this process may use.
        device: `"cpu"`, `"cuda"` or `"tensorrt"`; `"cpu"` if None.

    Raises:
        ValueError: if onnxruntime cannot load the graph, or it has other outputs.
        OSError: if the device is not available.
    """

    def __init__(
        self,
        directory: Path,
        path: Path,
        output_class: Any,
        threads: int | None = None,
        device: str | None = None,
    ):
        self.directory, self.path, self.device = (
            directory.resolve(),
            path.resolve(),
            device or "cpu",
        )
        providers = ["CPUExecutionProvider"]
        if self.device != "cpu":
            require(self.device)
            providers.insert(0, CUDA)
        if self.device == "tensorrt":
            providers.insert(0, TENSORRT)
        self.config = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or available_cpus()
        self.session = Session(str(path), options, providers, path)
        inner = self.session.inner
        self.output_names = [output.name for output in inner.get_outputs()]
        self.inputs = [self._describe(value) for value in inner.get_inputs()]
        if not (known := output_class.__dataclass_fields__.keys()) & {*self.output_names}:
            raise ValueError(f"{path} returns {self.output_names}, expected some of {[*known]}")

    def _describe(self, value: Any) -> TensorSpec:
        """Return the name, dtype, axes, range and default of an input `value` of onnxruntime.

        Tokens must be in the vocabulary. Masks and token types have defaults.
        """
        axes = tuple(axis if isinstance(axis, int) else str(axis) for axis in value.shape)
        is_ids, size = value.name == "input_ids", self.config.get("vocab_size")
        if is_ids or value.name in DEFAULTS:
            axes = TOKEN_AXES.get(len(axes), axes)
        limits = (0, size - 1) if is_ids and size else None
        dtype = DTYPES.get(value.type, "int64")
        return TensorSpec(value.name, dtype, axes, limits, default=DEFAULTS.get(value.name))

    @property
    def reads_images(self) -> bool:
        return self.inputs[0].name == "pixel_values"

    @property
    def files(self) -> list[Path]:
        """The paths of the graph, of external weights that are named after it, and of
        config.json."""
        return [*self.path.parent.glob(f"{self.path.name}*"), self.directory / CONFIG_NAME]

    def outputs(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Run the graph on `arrays`, its inputs by name, and return `{output: array}`.

        Raises:
            ValueError: for inputs that the graph does not take, of a wrong shape, dtype or range.
        """
        names = {tensor.name for tensor in self.inputs}
        if not np.any(arrays.get("token_type_ids")) and "token_type_ids" not in names:
            arrays.pop("token_type_ids", None)
        feeds = check_inputs(self.inputs, arrays, str(self.path))
        results = self.session.run(self.output_names, feeds)
        return dict(zip(self.output_names, results, strict=True))


def find_graph(root: Path, subfolder: str, file_name: str | None) -> Path:
    """Return the path of the graph `file_name` in `subfolder` of `root`, folders in it included.

    By default it is model.onnx, or the only graph.

    Raises:
        FileNotFoundError: if there is no such graph, or no name and several graphs.
    """
    graphs = sorted((root / subfolder).rglob("*.onnx"))
    name = Path(file_name or "model.onnx").name
    matches = [path for path in graphs if path.name == name]
    matches = matches or (graphs if file_name is None and len(graphs) == 1 else [])
    if not matches:
        names = [path.relative_to(root).as_posix() for path in graphs]
        raise FileNotFoundError(f"{root} has no {name}, expected as file_name one of {names}")
    return matches[0]
