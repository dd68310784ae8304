"""Graphs in onnxruntime sessions.

The errors of onnxruntime have only the base class `Exception`. They are raised as SessionErrors of
one line. onnxruntime's log, which repeats them, is silenced."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SessionError, UsageError
from ..specs.graph_spec import GraphSpec
from .device_thread import DEVICE_THREAD
from .devices import require_running

if TYPE_CHECKING:  # not imported in processes that run no graph
    import onnxruntime

FATAL = 4  # log level of onnxruntime
# Time that idle threads spin: longer than the pause between two steps, and shorter than the tens of
# milliseconds of onnxruntime's default. Otherwise the threads of an encoder compete for CPUs with
# the decoder's.
SPIN_MICROSECONDS = "300"
# Fusions of onnxruntime that slow CPUs down. Its fused sum and layer norm takes 5 times as long as
# the two operators, because it is not vectorized. Its fused bias and GELU is slower than `Gelu`.
SLOW_FUSIONS = ["SkipLayerNormFusion", "BiasGeluFusion"]
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
        if self.is_on_cpu:
            return function(*args)
        return DEVICE_THREAD.call(functools.partial(function, *args))

    def describe_error(self, error: Exception, what: str, feeds: str = "") -> SessionError:
        import onnxruntime

        reason = " ".join(str(error).split())
        return SessionError(
            f"onnxruntime {onnxruntime.__version__} cannot {what} {self.path}{feeds}: {reason}"
        )


@dataclass(frozen=True)
class Sessions:
    """The sessions of an export's graphs, by role.

    Args:
        directory: export directory.
        specs: specs of the graphs, by role.
        contents: graphs of sessions that are opened on demand, by role. They are read when the
            export is opened.
        providers: maps a role to execution providers with options, in order of precedence.
        threads: CPU threads per operator.
        arena: whether onnxruntime keeps memory between runs.
        profiles: directory to which sessions write profiles of their kernels when they close, or
            `None`. The names of profiles begin with the role.
        optimizes: whether onnxruntime rewrites graphs, as with fusions.
    """

    directory: Path
    specs: dict[str, GraphSpec]
    contents: dict[str, bytes]
    providers: Callable[[str], list[tuple[str, dict]]]
    threads: int
    arena: bool
    profiles: Path | None = None
    optimizes: bool = True

    def open(self, roles: list[str]) -> dict[str, Session]:
        """Return {role: session} of the graphs of `roles`, opened in parallel on CPUs."""
        is_on_cpu = all(len(self.providers(role)) == 1 for role in roles)
        with ThreadPoolExecutor(len(roles) if is_on_cpu else 1) as pool:
            return dict(zip(roles, pool.map(self.make, roles)))

    def make(self, role: str, sizes: dict[str, int] | None = None) -> Session:
        """Return a new session of the graph of `role`, with some axes fixed to `sizes`, {axis:
        size}.

        Raises:
            ValueError: if onnxruntime cannot load the graph, or the graph does not match its spec.
            OSError: if a provider does not run.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.enable_cpu_mem_arena = self.arena
        if not self.optimizes:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if self.profiles is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(self.profiles / role)
        for axis, size in (sizes or {}).items():
            options.add_free_dimension_override_by_name(axis, size)
        options.intra_op_num_threads = self.threads
        options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN_MICROSECONDS)
        path = self.directory / self.specs[role].file
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
