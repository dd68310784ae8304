"""A target: one way to write and to run graphs."""

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
    """One folder, and one line in the registry.

    The runtime has no torch and no onnx: of the methods here only `activations` and `graphs` need
    them.
    """

    @property
    def name(self) -> str: ...

    @property
    def help(self) -> str:
        """In a few words."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of the weights."""

    @property
    def opsets(self) -> tuple[int, ...]:
        """The first is the default."""

    @property
    def default_device(self) -> str: ...

    @property
    def max_workers(self) -> int | None:
        """The most threads of a scheduler that run sessions; None for any number."""

    @property
    def shares_weights(self) -> bool:
        """True if the graphs of an export have their weights in one file beside them, each weight
        once."""

    @property
    def is_standard(self) -> bool:
        """Only standard operators: other clients run the graphs, and several dtypes stand side by
        side."""

    @property
    def integer_dtypes(self) -> tuple[str, ...]:
        """Those of `dtypes` whose products are in integers, with scales that a text and ways that a
        machine can choose."""

    @property
    def generation_step(self) -> Callable[[dict[str, ir.Model]], Step] | None:
        """Makes the graphs of a model that generates, by role, the step of a graph that generates
        by itself, and uses them up; `None` where there is none."""

    def devices(self, roles: Collection[str], dtype: str) -> tuple[str, ...]:
        """What the graphs of these roles run on."""

    def unsupported_fields(self, config: Config) -> dict[str, str]:
        """Fields of `config` whose values the graphs cannot hold, and what fits."""

    def activations(self, model: PreTrainedModel | None, dtype: str | None) -> str:
        """What is computed in where the weights are of `dtype`, `None` for the default. `model` is
        `None` without torch.

        Raises:
            ValueError: if it cannot hold what the model computes.
        """

    def graph_specs(
        self, config: dict, architecture: str, dtype: str, activations: str
    ) -> dict[str, GraphSpec]:
        """The graphs by role: `"encoder"` reads whole sequences, `"decoder"` continues them; models
        that do both have both."""

    def step_role(self, config: dict, architecture: str) -> str | None:
        """That of the graph whose rows join and leave between two steps, each with its own length,
        and give the same bits whatever rows run beside them; `None` where there is none. A graph
        that is only that has the role `"step"`."""

    def graphs(self, dtype: str) -> TargetGraphs:
        """Return what writes the graphs with weights of `dtype`."""

    def parity_device(self, activations: str) -> str:
        """Return the device on which an export is compared with torch here.

        Raises:
            OSError: if no device of this machine computes in `activations`, with the reason.
        """

    def provider_options(self, role: str) -> dict[str, str]:
        """For the device's provider of onnxruntime, over those that hold for all targets."""

    def open(self, export: LoadedExport) -> DecoderFactory:
        """What generates with an export that has a decoder."""


def check_activations(activations: str, known: Collection[str]) -> None:
    """Raises ValueError for a type that the target's graphs are not computed in."""
    if activations not in known:
        raise ValueError(
            f"the activations are {activations!r:.100}, expected one of {', '.join(known)}"
        )
