"""The Protocol of targets: a target writes graphs and runs them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol

from ..specs.graph_spec import GraphSpec

if TYPE_CHECKING:
    import onnx_ir as ir
    from transformers import PreTrainedModel

    from ..graphs.config import Config
    from ..graphs.context import TargetGraphs
    from ..inference.decoder import DecoderFactory, LoadedExport
    from ..one_graph.step import Step


class Target(Protocol):
    """A target: a folder of modules and a line in the registry.

    Only `activations` and `graphs` may need torch and onnx, which the runtime does not have.
    """

    @property
    def name(self) -> str: ...

    @property
    def help(self) -> str:
        """A short description for the command line."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of weights that the target supports."""

    @property
    def opsets(self) -> tuple[int, ...]:
        """The ONNX opsets that the target supports; the first is the default."""

    @property
    def default_device(self) -> str: ...

    @property
    def max_workers(self) -> int | None:
        """The maximum number of workers that run sessions; None for no limit."""

    @property
    def shares_weights(self) -> bool:
        """True if the graphs of an export share one file of weights."""

    @property
    def is_standard(self) -> bool:
        """True if graphs have only standard operators. Other clients can run them, and one export
        may have several dtypes."""

    @property
    def integer_dtypes(self) -> tuple[str, ...]:
        """The dtypes with integer matmuls. A calibration text may set their scales, and the CPU
        their methods."""

    @property
    def generation_step(self) -> Callable[[dict[str, ir.Model]], Step] | None:
        """The function that builds the `Step` of `export --generate` from graphs by role, or
        `None`.

        It consumes the graphs."""

    def devices(self, roles: Collection[str], dtype: str) -> tuple[str, ...]:
        """Return the devices that the graphs of these roles run on."""

    def unsupported_fields(self, config: Config) -> dict[str, str]:
        """Return the fields of `config` with unsupported values, and the values expected."""

    def activations(self, model: PreTrainedModel | None, dtype: str | None) -> str:
        """Return the dtype of activations for weights of `dtype`, or of the default dtype for
        `None`.

        `model` is `None` without torch.

        Raises:
            ValueError: if the model overflows in this dtype.
        """

    def graph_specs(
        self, config: dict, architecture: str, dtype: str, activations: str
    ) -> dict[str, GraphSpec]:
        """Return the specs of the graphs by role: `"encoder"`, `"decoder"` or both.

        An encoder reads full sequences, and a decoder generates tokens."""

    def step_role(self, config: dict, architecture: str) -> str | None:
        """Return the role of the graph for continuous batching, or `None` without one.

        Each row has its own length, and its results have the same bits in any batch. A graph that
        is used for nothing else has the role `"step"`."""

    def graphs(self, dtype: str) -> TargetGraphs:
        """Return the functions that write graphs with weights of `dtype`."""

    def parity_device(self, activations: str) -> str:
        """Return the device on which an export is compared with torch here.

        Raises:
            OSError: if no device of this machine computes in `activations`, with the reason.
        """

    def provider_options(self, role: str) -> dict[str, str]:
        """Return options of the device's onnxruntime provider, which override common ones."""

    def open(self, export: LoadedExport) -> DecoderFactory:
        """Return the decoder factory of a loaded export that has a decoder."""


def check_activations(activations: str, known: Collection[str]) -> None:
    """Raise ValueError if the target does not support this dtype of activations."""
    if activations not in known:
        raise ValueError(
            f"the activations are {activations!r:.100}, expected one of {', '.join(known)}"
        )
