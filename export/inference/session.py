"""Graphs in onnxruntime sessions.

The errors of onnxruntime have only the base class `Exception`. They are raised as SessionErrors of
one line. onnxruntime's log, which repeats them, is silenced."""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SessionError, UsageError
from ..specs.graph_spec import GraphSpec
from .device_thread import call_in_device_thread
from .devices import CUDA, TENSORRT, require_running
from .export_info import ExportInfo
from .inputs import max_run_tokens, run_by_length
from .rows import position_bytes

if TYPE_CHECKING:  # not imported in processes that run no graph
    import onnxruntime

FATAL = 4  # log level of onnxruntime
# Fusions of onnxruntime that slow CPUs down. Its fused sum and layer norm takes 5 times as long as
# the two operators, because it is not vectorized. Its fused bias and GELU is slower than `Gelu`.
SLOW_FUSIONS = ["SkipLayerNormFusion", "BiasGeluFusion"]
# Time that idle threads spin: longer than the pause between two steps, and shorter than the tens of
# milliseconds of onnxruntime's default. Otherwise the threads of an encoder compete for CPUs with
# the decoder's.
SPIN_MICROSECONDS = "300"
CAPTURE, FUSIONS = "capture", "fusions"
# onnxruntime's numbers of the kinds of attention kernels on CUDA, for its option sdpa_kernel
ATTENTION_KERNELS = {"flash": 1, "efficient": 2, "math": 16}


@dataclass(frozen=True)
class SessionChanges:
    """Changes to how onnxruntime runs graphs, which show the cause of a wrong result.

    Args:
        without: parts to leave out. "capture" runs each node of a CUDA graph by itself. "fusions"
            runs the nodes as they were written, without onnxruntime's rewriting; then nothing is
            captured either, because some shapes are computed on the CPU.
        attention: the only kind of attention kernel on CUDA, a name in `ATTENTION_KERNELS`; by
            default that of the target.
    """

    without: tuple[str, ...] = ()
    attention: str | None = None

    @property
    def captures(self) -> bool:
        return not self.without

    def check(self, device: str) -> None:
        """Raise UsageError for an unknown part or kernel, and for one that `device` does not
        have."""
        for part in self.without:
            if part not in (CAPTURE, FUSIONS):
                raise UsageError(f"without has {part!r}, expected {CAPTURE!r} or {FUSIONS!r}")
        if self.attention not in (None, *ATTENTION_KERNELS):
            known = ", ".join(ATTENTION_KERNELS)
            raise UsageError(f"attention is {self.attention!r}, expected one of {known}")
        only_on_cuda = [f"without {CAPTURE!r}"] * (CAPTURE in self.without)
        only_on_cuda += [f"attention {self.attention!r}"] * (self.attention is not None)
        if only_on_cuda and device != "cuda":
            raise UsageError(f"{only_on_cuda[0]} has no effect on {device!r}, expected 'cuda'")


class Session:
    """A session of one graph, around the `onnxruntime.InferenceSession` `inner`.

    Args:
        graph: path or content of the graph.
        options: session options.
        providers: execution providers.
        path: file of the graph, for errors.

    Raises:
        ValueError: if onnxruntime cannot load it.
    """

    def __init__(
        self, graph: str | bytes, options: "onnxruntime.SessionOptions", providers: list, path: Path
    ):
        import onnxruntime

        self.path = path
        options.log_severity_level = FATAL
        self.is_on_cpu = len(providers) == 1  # the CPU comes last in every list
        opened = functools.partial(
            onnxruntime.InferenceSession,
            graph,
            options,
            providers=providers,
            disabled_optimizers=SLOW_FUSIONS if self.is_on_cpu else [],
            enable_fallback=0,
        )
        try:  # a failing provider is an error, without fallback
            self.inner = self.call(opened)
        except Exception as error:
            raise self.describe_error(error, "load") from None

    def run(self, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Return the outputs `names` for the inputs `feeds` by name. Raises SessionError if
        onnxruntime fails, such as out of memory."""
        try:
            return self.call(self.inner.run, names, feeds)
        except Exception as error:
            shapes = {name: feeds[name].shape for name in feeds if name.endswith("input_ids")}
            raise self.describe_error(error, "run", f" with {shapes}") from None

    def run_bound(
        self, binding: "onnxruntime.IOBinding", options: "onnxruntime.RunOptions | None" = None
    ) -> None:
        """Run the graph with the inputs and outputs of `binding`. Raises SessionError if
        onnxruntime fails.

        `options` are onnxruntime's options of one run.
        """
        try:
            self.call(self.inner.run_with_iobinding, binding, options)
        except Exception as error:
            raise self.describe_error(error, "run") from None

    def io_binding(self) -> "onnxruntime.IOBinding":
        return self.inner.io_binding()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with `args`, in the device thread unless the session runs on the CPU."""
        return function(*args) if self.is_on_cpu else call_in_device_thread(function, *args)

    def describe_error(self, error: Exception, what: str, feeds: str = "") -> SessionError:
        import onnxruntime

        reason = " ".join(str(error).split())
        return SessionError(
            f"onnxruntime {onnxruntime.__version__} cannot {what} {self.path}{feeds}: {reason}"
        )


@dataclass(frozen=True)
class LoadedExport:
    """An export with the sessions of its graphs, by role.

    Args:
        info: the export, with the specs of its graphs.
        threads: CPU threads per operator.
        target_options: maps a role to the options of the target for the CUDA provider.
        device: device that the graphs run on.
        arena: whether onnxruntime keeps memory between runs.
        engine_cache: directory of compiled TensorRT engines.
        profiles: directory to which sessions write profiles of their kernels when they close, or
            `None`. The names of profiles begin with the role. Then no CUDA graph is captured,
            because a replay has no kernels.
        changes: to how the graphs run.
        sessions: open sessions, by role.
        contents: graphs of sessions that are made on demand, by role. They are read when the
            export is opened.
    """

    info: ExportInfo
    threads: int
    target_options: Callable[[str], dict[str, str]]
    device: str = "cpu"
    arena: bool = True
    engine_cache: Path | None = None
    profiles: Path | None = None
    changes: SessionChanges = SessionChanges()
    sessions: dict[str, Session] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)

    @property
    def config(self) -> dict:
        """The content of config.json."""
        return self.info.config

    @property
    def specs(self) -> dict[str, GraphSpec]:
        """The specs of the graphs, by role."""
        return self.info.specs

    @property
    def captures(self) -> bool:
        """True if targets may capture CUDA graphs."""
        return self.profiles is None and self.changes.captures

    @property
    def max_tokens(self) -> int:
        """Maximum tokens in one run of a full-sequence graph. More tokens would only take
        memory."""
        return max_run_tokens(self.device, self.threads)

    @functools.cached_property
    def position_bytes(self) -> int:
        """The bytes that one token of one row takes in the caches of the decoder."""
        return position_bytes(self.specs["decoder"])

    def outputs(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs of the encoder by name, for checked inputs `feeds` by name."""
        spec = self.specs["encoder"]
        return run_by_length(self.sessions["encoder"].run, spec, feeds, self.max_tokens)

    def encode(self, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
        """Return the outputs of the encoder by name, for checked ids and mask (B, S) of sources."""
        return self.outputs({"input_ids": ids, "attention_mask": mask})

    def open(self, roles: Sequence[str]) -> None:
        """Open sessions of the graphs of `roles`, in parallel on CPUs."""
        with ThreadPoolExecutor(len(roles) if self.device == "cpu" else 1) as pool:
            self.sessions.update(zip(roles, pool.map(self.make_session, roles)))

    def make_session(self, role: str, sizes: dict[str, int] | None = None) -> Session:
        """Return a new session of the graph of `role`, with some axes fixed to `sizes`, {axis:
        size}.

        Raises:
            ValueError: if onnxruntime cannot load the graph, or the graph does not match its spec.
            OSError: if a provider does not run.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.enable_cpu_mem_arena = self.arena
        if FUSIONS in self.changes.without:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if self.profiles is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(self.profiles / role)
        for axis, size in (sizes or {}).items():
            options.add_free_dimension_override_by_name(axis, size)
        options.intra_op_num_threads = self.threads
        options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN_MICROSECONDS)
        path = self.info.directory / self.specs[role].file
        # a graph in memory may load external data from its own folder only
        if role in self.contents:
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(path.parent)
            )
        providers = self.providers(role)
        session = Session(self.contents.get(role, str(path)), options, providers, path)
        for provider, _ in providers:
            require_running(provider, session.inner.get_providers())
        check_graph(session.inner, self.specs[role], path)
        return session

    def providers(self, role: str) -> list[tuple[str, dict[str, str]]]:
        """Return the execution providers of the graph of `role` as (name, options).

        A provider runs the nodes that the providers before it do not support.
        """
        providers: list[tuple[str, dict[str, str]]] = [("CPUExecutionProvider", {})]
        if self.device != "cpu":
            # float32 is not rounded to 19 bits.
            options = {"enable_cuda_graph": "0", "use_tf32": "0", **self.target_options(role)}
            if not self.captures:
                options["enable_cuda_graph"] = "0"
            if self.changes.attention is not None:
                options["sdpa_kernel"] = str(ATTENTION_KERNELS[self.changes.attention])
            providers.insert(0, (CUDA, options))
        if self.device == "tensorrt" and role == "encoder":
            providers.insert(0, (TENSORRT, engine_options(self.info, self.engine_cache)))
        return providers


def engine_options(info: ExportInfo, engine_cache: Path | None) -> dict[str, str]:
    """Return TensorRT's options about compiled engines, or {} without an `engine_cache`.

    TensorRT names its engines after the graph, not the weights: each export has a directory of its
    own.
    """
    if engine_cache is None:
        return {}
    files = json.dumps(info.manifest["files"], sort_keys=True)
    path = engine_cache / hashlib.sha256(files.encode()).hexdigest()[:16]
    return {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(path)}


def check_graph(session: "onnxruntime.InferenceSession", spec: GraphSpec, path: Path) -> None:
    """Raise ValueError if names, types or shapes of the graph's inputs and outputs differ from
    `spec`. `session` has the graph open.

    The spec follows from config.json. `path` is the graph, for the message.
    """
    for values, expected in (
        (session.get_inputs(), spec.inputs),
        (session.get_outputs(), spec.outputs),
    ):
        by_name = {value.name: value for value in values}
        if differ := by_name.keys() ^ {tensor.name for tensor in expected}:
            raise ValueError(
                f"{path} does not match config.json: only one of them has {min(differ)}, "
                "export again"
            )
        for tensor in expected:
            value = by_name[tensor.name]
            kind = f"tensor({tensor.dtype.replace('float32', 'float')})"
            sizes = [
                size if isinstance(size, str) else actual
                for actual, size in zip(value.shape, tensor.shape)
            ]
            if (value.type, sizes, len(value.shape)) != (
                kind,
                list(tensor.shape),
                len(tensor.shape),
            ):
                demand = f"as config.json says {kind} {list(tensor.shape)}: export again"
                raise ValueError(
                    f"{path} has {tensor.name} of {value.type} {value.shape}, expected {demand}"
                )
