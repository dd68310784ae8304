"""A graph as onnxruntime runs it.

onnxruntime raises classes that have only `Exception` in common. Here each is a SessionError of one
line, and onnxruntime's log, which says the same, is silent."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SessionError
from ..specs.graph_spec import GraphSpec
from .devices import require_running

if TYPE_CHECKING:  # a process that only asks another one for answers has no use for it
    import onnxruntime

FATAL = 4  # among onnxruntime's levels of a log
# How long idle threads wait awake for work: longer than from one step to the next, and shorter than
# what onnxruntime does, tens of milliseconds, in which those of an encoder keep the processors from
# the decoder's.
SPIN_MICROSECONDS = "300"


class Session:
    """The graph `graph`, a path or its content, in an `onnxruntime.InferenceSession`, which is
    `inner`.

    Args:
        path: the file of the graph, for errors.

    Raises:
        ValueError: if onnxruntime cannot load it.
    """

    def __init__(
        self, graph: str | bytes, options: "onnxruntime.SessionOptions", providers: list, path: Path
    ):
        import onnxruntime

        self.path = path
        options.log_severity_level = FATAL
        try:  # a provider that fails is an error, and not replaced by another one
            self.inner = onnxruntime.InferenceSession(
                graph, options, providers=providers, enable_fallback=0
            )
        except Exception as error:
            raise self.explained(error, "load") from None

    def run(self, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs `names`. Raises SessionError if onnxruntime fails, as where an input takes
        more memory than there is."""
        try:
            return self.inner.run(names, feeds)
        except Exception as error:
            shapes = {name: feeds[name].shape for name in feeds if name.endswith("input_ids")}
            raise self.explained(error, "run", f" with {shapes}") from None

    def run_bound(
        self, binding: "onnxruntime.IOBinding", options: "onnxruntime.RunOptions | None" = None
    ) -> None:
        """As `run`, with inputs and outputs as `io_binding` has them."""
        try:
            self.inner.run_with_iobinding(binding, options)
        except Exception as error:
            raise self.explained(error, "run") from None

    def io_binding(self) -> "onnxruntime.IOBinding":
        return self.inner.io_binding()

    def explained(self, error: Exception, what: str, given: str = "") -> SessionError:
        import onnxruntime

        reason = " ".join(str(error).split())
        return SessionError(
            f"onnxruntime {onnxruntime.__version__} cannot {what} {self.path}{given}: {reason}"
        )


@dataclass(frozen=True)
class Sessions:
    """The sessions of an export's graphs, by role.

    Args:
        directory: the export.
        specs: the graphs, by role.
        contents: graphs whose sessions are made on demand, by role; they are read when the export
            is opened.
        providers: a role -> what runs its graph, each what those before it cannot, and their
            options.
        threads: processor threads of one operator.
        arena: whether onnxruntime keeps memory from one run for the next.
    """

    directory: Path
    specs: dict[str, GraphSpec]
    contents: dict[str, bytes]
    providers: Callable[[str], list[tuple[str, dict]]]
    threads: int
    arena: bool

    def open(self, roles: list[str]) -> dict[str, Session]:
        """Open the graphs of `roles`, on CPUs side by side, as each is opened by one thread."""
        is_on_processor = all(len(self.providers(role)) == 1 for role in roles)
        with ThreadPoolExecutor(len(roles) if is_on_processor else 1) as pool:
            return dict(zip(roles, pool.map(self.make, roles)))

    def make(self, role: str, sizes: dict[str, int] | None = None) -> Session:
        """A new one of the graph of `role`, with some axes fixed to `sizes`.

        Raises:
            ValueError: if onnxruntime cannot load the graph, or it does not fit its spec.
            OSError: if a provider does not run.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.enable_cpu_mem_arena = self.arena
        for axis, size in (sizes or {}).items():
            options.add_free_dimension_override_by_name(axis, size)
        options.intra_op_num_threads = self.threads
        options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN_MICROSECONDS)
        path = self.directory / self.specs[role].file
        # a graph in memory may name files of its folder too, and no others
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
    """Raises ValueError if the graph takes or returns anything but what `spec`, which follows from
    config.json, says."""
    for values, expected in (
        (session.get_inputs(), spec.inputs),
        (session.get_outputs(), spec.outputs),
    ):
        by_name = {value.name: value for value in values}
        if differ := by_name.keys() ^ {tensor.name for tensor in expected}:
            raise ValueError(
                f"{path} does not fit config.json: only one of them has {min(differ)}, export again"
            )
        for tensor in expected:
            value = by_name[tensor.name]
            kind = f"tensor({tensor.dtype.replace('float32', 'float')})"
            sizes = [
                size if isinstance(size, str) else own
                for own, size in zip(value.shape, tensor.shape)
            ]
            if (value.type, sizes, len(value.shape)) != (
                kind,
                list(tensor.shape),
                len(tensor.shape),
            ):
                wanted = f"as config.json says {kind} {list(tensor.shape)}: export again"
                raise ValueError(
                    f"{path} has {tensor.name} of {value.type} {value.shape}, expected {wanted}"
                )
