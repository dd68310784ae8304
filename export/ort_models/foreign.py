"""Graphs that other exporters wrote, such as optimum's and those for Transformers.js."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
from transformers.utils import CONFIG_NAME

from ..inference.decoder import LoadedExport, next_input_name
from ..inference.devices import CUDA, TENSORRT, available_cpus, require
from ..inference.inputs import check_sequence_inputs
from ..inference.session import Session
from ..specs.graph_spec import GraphSpec, TensorSpec
from ..targets.portable.decoder import PortableDecoders

DTYPES = {"tensor(int64)": "int64", "tensor(int32)": "int32", "tensor(bool)": "bool"}
DTYPES |= {"tensor(float)": "float32", "tensor(float16)": "float16"}
DEFAULTS = {"attention_mask": 1, "token_type_ids": 0}
TOKEN_AXES = {2: ("batch_size", "length"), 3: ("batch_size", "num_choices", "length")}
MERGED, STEP = "decoder_model_merged", "decoder_with_past_model"
# names of graphs by role, the preferred name first
ENCODER_GRAPHS = {"encoder": ["model"]}
DECODER_GRAPHS = {"decoder": ["model", MERGED, "decoder_model"], "step": [STEP]}
SEQ2SEQ_GRAPHS = {"encoder": ["encoder_model"], "decoder": [MERGED, "decoder_model"]}
SEQ2SEQ_GRAPHS |= {"step": [STEP]}
CACHE = "past_key_values"
TOKENS = f"{CACHE}.tokens"  # in place of caches, if a decoder reads all tokens in each step
STATES = "encoder_hidden_states"
DECODER_INPUTS = {"input_ids", "attention_mask", "position_ids", "use_cache_branch", STATES}
DECODER_INPUTS |= {"encoder_attention_mask"}


class ForeignRuntime:
    """Graphs without a manifest, with the attributes and methods of a `Runtime` that models use.

    Args:
        directory: directory with config.json.
        graphs: paths of the graphs, by role.
        threads: CPU threads per operator, by default all that this process may use.
        device: `"cpu"`, `"cuda"` or `"tensorrt"`; `"cpu"` if None.

    Raises:
        ValueError: if onnxruntime cannot load a graph, or a decoder has other inputs or outputs.
        OSError: if the device is not available.
    """

    target = "portable"

    def __init__(
        self,
        directory: Path,
        graphs: Mapping[str, Path],
        threads: int | None = None,
        device: str | None = None,
    ):
        self.architecture, self.device = str(directory), device or "cpu"
        self.threads = threads or available_cpus()
        self.config = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
        self.sessions = {role: self._open(path) for role, path in graphs.items()}
        if "decoder" in graphs:
            self.model = SimpleNamespace(decoders=self._portable_decoders())

    def _open(self, path: Path) -> Session:
        """Return a session of the graph `path` on the device.

        Raises:
            ValueError: if onnxruntime cannot load the graph.
            OSError: if the device is not available.
        """
        providers = ["CPUExecutionProvider"]
        if self.device != "cpu":
            require(self.device)
            providers = [TENSORRT] * (self.device == "tensorrt") + [CUDA, *providers]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        return Session(str(path), options, providers, path)

    def _describe(self, value: Any) -> TensorSpec:
        """Return the spec of `value`, an input of a graph.

        Tokens must be in the vocabulary. Masks and token types have defaults.
        """
        axes = tuple(axis if isinstance(axis, int) else str(axis) for axis in value.shape)
        is_ids, size = value.name == "input_ids", self.config.get("vocab_size")
        if is_ids or value.name in DEFAULTS:
            axes = TOKEN_AXES.get(len(axes), axes)
        limits = (0, size - 1) if is_ids and size else None
        dtype = DTYPES.get(value.type, "int64")
        return TensorSpec(value.name, dtype, axes, limits, default=DEFAULTS.get(value.name))

    def _portable_decoders(self) -> PortableDecoders:
        """Return the decoders of the graphs.

        Raises:
            ValueError: without a vocabulary, and for graphs with other inputs or outputs.
        """
        if "vocab_size" not in self.config:
            raise ValueError(f"{self.architecture} has no vocab_size in {CONFIG_NAME}, expected it")
        graph = DecoderGraph(self.sessions["decoder"], self.sessions.get("step"))
        export = LoadedExport(
            {"vocab_size": self.config["vocab_size"]},
            {"decoder": graph.spec},
            {"decoder": graph},  # type: ignore[dict-item]
            lambda role, sizes: self.sessions[role],
            self.device,
            lambda ids, mask: {"last_hidden_state": self.encode(ids, mask)},
        )
        return PortableDecoders(export)

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs of the last graph."""
        return output_names([*self.sessions.values()][-1])

    def outputs(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Return `{name: array}` of all outputs of the encoder for its inputs, `arrays`.

        Raises:
            ValueError: for an input that is missing or unknown, or has a wrong shape or range.
        """
        session = self.sessions["encoder"]
        inputs = [self._describe(value) for value in session.inner.get_inputs()]
        feeds = check_sequence_inputs(inputs, arrays, str(session.path))
        names = output_names(session)
        return dict(zip(names, session.run(names, feeds)))

    def encode(self, input_ids: np.ndarray, attention_mask: Any = None) -> np.ndarray:
        """Return the states (B, S, D) of sources (B, S).

        Raises:
            ValueError: for wrong tokens or masks.
        """
        outputs = self.outputs(input_ids=input_ids, attention_mask=attention_mask)
        return outputs["last_hidden_state"]


class DecoderGraph:
    """The decoder graphs of another exporter, as the one graph that a `PortableDecoder` runs.

    Args:
        first: graph that reads the first tokens, and later ones too if there is no `step`.
        step: graph that reads later tokens.

    Raises:
        ValueError: for inputs that no known exporter has, and without logits.
    """

    def __init__(self, first: Session, step: Session | None):
        self.first, self.step = first, step or first
        inputs = {value.name: value.shape for value in self.step.inner.get_inputs()}
        caches = {name: shape[1:] for name, shape in inputs.items() if name.startswith(CACHE)}
        presents = [name.replace(CACHE, "present") for name in caches]
        if unknown := sorted(inputs.keys() - caches.keys() - DECODER_INPUTS):
            raise ValueError(f"{self.step.path} has the inputs {unknown}, which no decoder feeds")
        check_outputs(first, presents)
        axes = caches or {TOKENS: [1, "length"]}
        axes |= {"attention_mask": ["length"]} if "attention_mask" in inputs else {}
        tensors = [
            TensorSpec(name, "float32", ("batch_size", *(size or "length" for size in sizes)))
            for name, sizes in axes.items()
        ]
        names = ["logits", *(presents or ["present.tokens"])]
        outputs = [TensorSpec(name, "float32", ()) for name in names]
        self.spec = GraphSpec(first.path.name, tuple(tensors), tuple(outputs))

    def run(self, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Run the graph for first or later tokens and return the outputs `names`: logits, caches.

        `feeds` are the inputs by name. Encoder caches stay those of the first call.
        """
        tokens = feeds["input_ids"]
        if TOKENS in feeds:
            return self._run_all_tokens(feeds)
        is_first = feeds[next_input_name(names[1])].shape[2] == 0
        if not is_first and STATES in feeds and tokens.shape[1] > 1:
            return self._run_each_token(names, feeds)
        session = self.first if is_first else self.step
        outputs = run_graph(session, {**feeds, "use_cache_branch": np.array([not is_first])})
        kept = {name for name in names if ".encoder." in name and not is_first}
        return [feeds[next_input_name(name)] if name in kept else outputs[name] for name in names]

    def _run_each_token(self, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Return the outputs `names` for `feeds`, as `run` does, one token after the other.

        Encoder-decoders are traced with steps of one token.
        """
        logits = []
        for tokens in np.split(feeds["input_ids"], feeds["input_ids"].shape[1], axis=1):
            results = self.run(names, {**feeds, "input_ids": tokens})
            feeds = {**feeds, **dict(zip(map(next_input_name, names), results))}
            logits.append(results[0])
        return [np.concatenate(logits, axis=1), *results[1:]]

    def _run_all_tokens(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Return logits after the new tokens of `feeds`, and all tokens, which are the cache.

        The graph has no caches: it reads earlier and new tokens.
        """
        length = feeds["input_ids"].shape[1]
        tokens = np.concatenate([feeds[TOKENS][:, 0], feeds["input_ids"]], axis=1).astype(np.int64)
        feeds = {**feeds, "input_ids": tokens}
        if "attention_mask" in feeds:
            feeds["position_ids"] = np.maximum(feeds["attention_mask"].cumsum(axis=1) - 1, 0)
        return [run_graph(self.first, feeds)["logits"][:, -length:], tokens[:, None]]


def check_outputs(session: Session, presents: list[str]) -> None:
    """Check that the decoder of `session` returns logits (B, T, V) and the caches `presents`.

    Raises:
        ValueError: if an output is missing, or the logits have other axes.
    """
    shapes = {value.name: value.shape for value in session.inner.get_outputs()}
    if missing := sorted({"logits", *presents} - shapes.keys()):
        raise ValueError(f"{session.path} returns {[*shapes]}, expected {missing} too")
    if len(shapes["logits"]) != 3:
        raise ValueError(f"{session.path} has logits {shapes['logits']}, expected 3 axes")


def output_names(session: Session) -> list[str]:
    """Return the names of the outputs of `session`."""
    return [value.name for value in session.inner.get_outputs()]


def run_graph(session: Session, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run the graph of `session` and return `{name: array}` of all its outputs.

    Those of `feeds` that are no inputs are left out, the others get the dtypes of the graph.
    """
    inputs = {value.name: DTYPES[value.type] for value in session.inner.get_inputs()}
    names = output_names(session)
    arrays = {name: feeds[name].astype(dtype, copy=False) for name, dtype in inputs.items()}
    outputs = dict(zip(names, session.run(names, arrays)))
    return outputs | {"logits": outputs["logits"].astype(np.float32, copy=False)}


def find_graphs(
    folder: Path, roles: Mapping[str, list[str]], file_name: str | None, use_merged: bool
) -> dict[str, Path]:
    """Return `{role: path}` of the graphs in a folder.

    Args:
        folder: folder with graphs, also in folders of it.
        roles: names of graphs by role, the preferred name first. A step is optional.
        file_name: name of the graph, or of one of them, whose ending the others have too, as in
            decoder_model_int8.onnx.
        use_merged: whether a merged decoder is preferred.

    Raises:
        FileNotFoundError: for a graph that is not there.
    """
    paths = {path.name: path for path in sorted(folder.rglob("*.onnx"))}
    stem, ending = Path(file_name or "").stem, ""
    if known := [name for names in roles.values() for name in names if stem.startswith(name)]:
        ending = stem.removeprefix(max(known, key=len))
    elif stem or (len(paths) == 1 and len(roles.keys() - {"step"}) == 1):
        roles = {next(iter(roles)): [stem or Path(next(iter(paths))).stem]}
    graphs = {}
    for role, stems in roles.items():
        names = [f"{name}{ending}.onnx" for name in stems if use_merged or name != MERGED]
        if matches := [paths[name] for name in names if name in paths]:
            graphs[role] = matches[0]
        elif role != "step":
            raise FileNotFoundError(
                f"{folder} has no {names[0]}, expected as file_name one of {[*paths]}"
            )
    if "step" in graphs and graphs["decoder"].stem != f"decoder_model{ending}":
        del graphs["step"]  # others take the caches themselves
    return graphs
