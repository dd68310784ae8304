"""What an export is made of, and what a target is: a way to write and to run graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import onnx_ir as ir
    from transformers import PreTrainedModel

    from ..generation.step import Step
    from ..graphs.config import Config
    from ..graphs.context import TargetGraphs
    from ..runtime.decoder import DecoderFactory, LoadedExport

# tokens from which on a row is read alone, so that where it has no padding attention needs no mask
LONG = 512


@dataclass(frozen=True)
class TensorSpec:
    """One input or output; a `str` in `shape` is an axis, shared by all tensors that name it.

    Args:
        range: the lowest and the highest number that callers may give; any if `None`.
        default: what stands everywhere where a caller gives nothing; `None` if something must be
            given.
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    range: tuple[int, int] | None = None
    default: int | None = None

    @property
    def axes(self) -> dict[int, str]:
        return {index: size for index, size in enumerate(self.shape) if isinstance(size, str)}


@dataclass(frozen=True)
class GraphSpec:
    """One ONNX file, relative to the export directory, with its inputs and outputs in order.

    Args:
        example_sizes: sizes of an image that `serve` runs once at its start, for a graph that reads
            images of any size.
        is_on_demand: whether sessions of it are made while generating, for axes that are known
            then.
    """

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    example_sizes: dict[str, int] = field(default_factory=dict)
    is_on_demand: bool = False


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


def shape_of(tensor: TensorSpec, sizes: dict[str, int]) -> list[int]:
    """The shape of `tensor` where its axes have these `sizes`."""
    return [sizes[size] if isinstance(size, str) else size for size in tensor.shape]
