"""Graphs that other exporters wrote, such as optimum's and those for Transformers.js."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
from transformers.utils import GENERATION_CONFIG_NAME

from ..inference.devices import CUDA, TENSORRT, available_cpus, require
from ..inference.export_info import ExportInfo
from ..inference.inputs import check_sequence_inputs, move_padding
from ..inference.rows import GenerationRequest, next_input_name
from ..inference.session import Session
from ..specs.graph_spec import TensorSpec
from .saving import companion_files, read_json

DTYPES = {f"tensor({name})": name for name in ("int64", "int32", "bool", "float16")}
DTYPES |= {"tensor(float)": "float32", "tensor(double)": "float64"}
# device of each provider, which leaves nodes that it does not support to the next ones
DEVICES = {TENSORRT: "tensorrt", CUDA: "cuda", "CPUExecutionProvider": "cpu"}
DEFAULTS = {"attention_mask": 1, "token_type_ids": 0}
TOKEN_AXES = {2: ("batch_size", "length"), 3: ("batch_size", "num_choices", "length")}
Form = Mapping[str, str]  # names of graphs by role
MERGED = "decoder_model_merged"
SPLIT: Form = {"decoder": "decoder_model", "step": "decoder_with_past_model"}
DECODERS: list[Form] = [{"decoder": MERGED}, SPLIT, {"decoder": "decoder_model"}]
# forms of repositories, the preferred one first
ENCODER_FORMS: list[Form] = [{"encoder": "model"}]
DECODER_FORMS = [{"decoder": "model"}, *DECODERS]
SEQ2SEQ_FORMS = [{"encoder": "encoder_model", **form} for form in DECODERS]
PAST, STATES, STATES_MASK = "past_key_values", "encoder_hidden_states", "encoder_attention_mask"
ENCODER_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "pixel_values"}
DECODER_INPUTS = {"input_ids", "attention_mask", "position_ids", "use_cache_branch"}
DECODER_INPUTS |= {STATES, STATES_MASK}  # and caches


class ForeignRuntime:
    """Graphs without a manifest, with the attributes and methods of a `Runtime` that models use.

    `graphs` are paths by role in `directory`. `config` is the content of config.json. `device` is
    `"cpu"`, the default, `"cuda"` or `"tensorrt"`. By default all CPU threads are used.

    Raises ValueError if onnxruntime cannot load a graph, or if it has other inputs or outputs, and
    OSError if the device is not available.
    """

    target = "portable"

    def __init__(
        self,
        directory: Path,
        graphs: Mapping[str, Path],
        config: dict[str, Any],
        threads: int | None = None,
        device: str | None = None,
    ):
        self.info = read_info(directory, graphs, config)
        self.architecture, self.config = self.info.architecture, self.info.config
        self.device, self.threads = device or "cpu", threads or available_cpus()
        self.graphs = {
            role: Graph(path, role == "encoder", self.threads, self.device)
            for role, path in graphs.items()
        }
        if {"encoder", "decoder"} <= graphs.keys():
            self.graphs["encoder"].require_output("last_hidden_state")
        self.output_names = [name for graph in self.graphs.values() for name in graph.outputs]
        self.model = SimpleNamespace(decoders=self)

    def outputs(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Return all outputs of the encoder by name. Raises ValueError for wrong `arrays`.

        For a graph without masks, a mask must be 1 everywhere.
        """
        graph = self.graphs["encoder"]
        if "attention_mask" not in graph.inputs and np.all(arrays.get("attention_mask") == 1):
            arrays["attention_mask"] = None
        tensors = [input_spec(value, self.config) for value in graph.inputs.values()]
        return graph.run(check_sequence_inputs(tensors, arrays, str(graph.path)))

    def encode(self, input_ids: np.ndarray, attention_mask: Any = None) -> np.ndarray:
        """Return the states (B, S, D) of sources (B, S)."""
        outputs = self.outputs(input_ids=input_ids, attention_mask=attention_mask)
        return outputs["last_hidden_state"]

    def start(self, request: GenerationRequest) -> "ForeignDecoder":
        """Encode the source of `request`, if it has one, and return the decoder of its prompts."""
        if (source := request.source) is None:
            return ForeignDecoder(self.graphs, {})
        return ForeignDecoder(self.graphs, {STATES: self.encode(*source), STATES_MASK: source[1]})


class Graph:
    """The graph in the file `path`, open on a `device` with CPU `threads`.

    Raises ValueError for unknown inputs or dtypes, and for a decoder without logits.
    """

    def __init__(self, path: Path, is_encoder: bool, threads: int, device: str):
        if device != "cpu":
            require(device)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        providers = [*itertools.dropwhile(lambda provider: DEVICES[provider] != device, DEVICES)]
        self.path, self.session = path, Session(str(path), options, providers, path)
        self.inputs = {value.name: value for value in self.session.inner.get_inputs()}
        self.outputs = {value.name: value for value in self.session.inner.get_outputs()}
        self._check(is_encoder)

    def _check(self, is_encoder: bool) -> None:
        caches = {name for name in self.inputs if PAST in name}
        known = ENCODER_INPUTS if is_encoder else DECODER_INPUTS | caches
        if unknown := sorted(self.inputs.keys() - known):
            kind = "encoder" if is_encoder else "decoder"
            raise ValueError(f"{self.path} has the inputs {unknown}, which no {kind} feeds")
        types = {name: value.type for name, value in self.inputs.items()}
        if not {*types.values()} <= DTYPES.keys():
            raise ValueError(f"{self.path} has the inputs {types}, expected only {[*DTYPES]}")
        if not is_encoder:
            self.require_output("logits")

    def require_output(self, name: str) -> None:
        """Raise ValueError if the graph has no output `name` with 3 axes."""
        shapes = {output: value.shape for output, value in self.outputs.items()}
        if len(shapes.get(name, ())) != 3:
            raise ValueError(f"{self.path} returns {shapes}, expected {name} with 3 axes")

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the graph on those of `feeds` that are its inputs, and return all outputs by name.

        Feeds are cast to the dtypes of the inputs. Raises KeyError for a missing input.
        """
        arrays = {
            name: feeds[name].astype(DTYPES[value.type], copy=False)
            for name, value in self.inputs.items()
        }
        return dict(zip(self.outputs, self.session.run([*self.outputs], arrays)))

    def empty_caches(self, rows: int) -> dict[str, np.ndarray]:
        """Return caches without tokens for this number of `rows`, by the names of the inputs."""
        caches = {}
        for name, value in self.inputs.items():
            if PAST in name:
                shape = [axis if isinstance(axis, int) else 0 for axis in value.shape[1:]]
                caches[name] = np.zeros((rows, *shape))
        return caches


class ForeignDecoder:
    """The `Decoder` of graphs that another exporter wrote, some of which read one token per step.

    Graphs without caches read all tokens again. `source` are the encoder's states and mask, by the
    names of the inputs.
    """

    all_logits, max_step_tokens = True, 1

    def __init__(self, graphs: Mapping[str, Graph], source: Mapping[str, np.ndarray]):
        self.first, self.later = graphs["decoder"], graphs.get("step", graphs["decoder"])
        self.arrays = dict(source)  # also all tokens, their mask, and caches

    def prefill(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        ids, mask = move_padding(input_ids, attention_mask, "left", 0)
        self.arrays |= {"input_ids": ids, "attention_mask": mask}
        return self._run()

    def step(self, tokens: np.ndarray, beam_idx: np.ndarray | None = None) -> np.ndarray:
        if beam_idx is not None:
            self._change(lambda array: array[beam_idx])
        new = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        for name, array in new.items():
            self.arrays[name] = np.concatenate([self.arrays[name], array], axis=1)
        return self._run()[:, -1:]

    def _run(self) -> np.ndarray:
        """Read all tokens, or the last one if there are caches, and return the logits."""
        is_later = any(PAST in name for name in self.arrays)
        graph, unread = (self.later, slice(-1, None)) if is_later else (self.first, slice(None))
        feeds = graph.empty_caches(len(self.arrays["input_ids"])) | self.arrays
        positions = np.maximum(feeds["attention_mask"].cumsum(axis=1) - 1, 0)
        feeds |= {"input_ids": feeds["input_ids"][:, unread], "position_ids": positions[:, unread]}
        outputs = graph.run(feeds | {"use_cache_branch": np.array([is_later])})
        for name, states in outputs.items():
            cache = next_input_name(name)
            if cache in self.later.inputs and not (is_later and ".encoder." in name):
                self.arrays[cache] = states
        return outputs["logits"].astype(np.float32, copy=False)

    def _change(self, function: Callable[[np.ndarray], np.ndarray]) -> None:
        """Apply `function` to tokens, mask and caches, but not to what beams of an input share."""
        for name, array in self.arrays.items():
            if "encoder" not in name:
                self.arrays[name] = function(array)

    def crop(self, count: int) -> None:
        """Remove the last `count` tokens."""
        end = self.arrays["input_ids"].shape[1] - count
        self._change(lambda array: array[:, :end] if array.ndim == 2 else array[:, :, :end])

    def expand(self, expand_size: int) -> None:
        for name, array in self.arrays.items():
            self.arrays[name] = np.repeat(array, expand_size, axis=0)

    def close(self) -> None:
        """Do nothing: there are no shared buffers to release."""


def read_info(directory: Path, graphs: Mapping[str, Path], config: dict[str, Any]) -> ExportInfo:
    """Return the configs and the names of the files of `graphs`, paths by role, in `directory`."""
    files = [file for path in graphs.values() for file in path.parent.glob(f"{path.name}*")]
    names = {file.relative_to(directory).as_posix() for file in files} | companion_files(directory)
    manifest = {"architecture": str(directory), "files": dict.fromkeys(sorted(names))}
    generation_config = read_json(directory / GENERATION_CONFIG_NAME)
    return ExportInfo(directory, manifest, config, generation_config, {}, {})


def input_spec(value: Any, config: Mapping[str, Any]) -> TensorSpec:
    """Return the spec of an input of a graph, whose tokens must be in the config's vocabulary."""
    axes = tuple(axis if isinstance(axis, int) else str(axis) for axis in value.shape)
    is_ids, size = value.name == "input_ids", config.get("vocab_size")
    if is_ids or value.name in DEFAULTS:
        axes = TOKEN_AXES.get(len(axes), axes)
    limits = (0, size - 1) if is_ids and size else None
    return TensorSpec(value.name, DTYPES[value.type], axes, limits, DEFAULTS.get(value.name))


def matching_forms(forms: Sequence[Form], file_name: str | Path | None) -> Sequence[Form]:
    """Return `forms` with file names: those that have the graph `file_name`, or all without a name.

    The graphs of a form have the ending of `file_name`, such as _int8 in decoder_model_int8.onnx. A
    `file_name` that no form has is the graph of each role.
    """
    stem = Path(file_name or "").stem
    known = [name for form in forms for name in form.values() if stem.startswith(name)]
    ending = stem.removeprefix(max(known, key=len, default=stem))
    files = [{role: f"{name}{ending}.onnx" for role, name in form.items()} for form in forms]
    if not stem:
        return files
    file = f"{stem}.onnx"
    return [form for form in files if file in form.values()] or [dict.fromkeys(forms[0], file)]


def find_graphs(folder: Path, forms: Sequence[Form], file_name: str | None) -> dict[str, Path]:
    """Return `{role: path}` of the graphs of the first of `forms` that `folder` has.

    Subfolders are searched too, and the least deep ones are preferred. `file_name` is one of the
    graphs, see `matching_forms`, and may have folders. For forms of one graph, it is by default the
    only graph.

    Raises FileNotFoundError if no form has all its graphs, and ValueError if two folders of the
    same depth have them.
    """
    graphs = [*folder.rglob(str(Path(file_name or "").parent / "*.onnx"))]
    is_single = file_name is None and len(graphs) == len(forms[0]) == 1
    expected = matching_forms(forms, graphs[0] if is_single else file_name)
    parents = sorted({path.parent for path in graphs}, key=lambda path: (len(path.parts), path))
    for form in expected:
        folders = [path for path in parents if {path / file for file in form.values()} <= {*graphs}]
        if len(folders) > 1 and len(folders[0].parts) == len(folders[1].parts):
            first, second = (str(parent.relative_to(folder)) for parent in folders[:2])
            files = [*form.values()]
            raise ValueError(f"{files} are in {first} and {second}, expected one: pass subfolder")
        if folders:
            return {role: folders[0] / file for role, file in form.items()}
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.onnx")]
    raise FileNotFoundError(f"{folder} has the graphs {names}, expected {file_name or expected}")
