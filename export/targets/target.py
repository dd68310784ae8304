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
    from ..inference.rows import LoadedExport, RowsFactory
    from ..one_graph.step import Step


class Target(Protocol):
    """The methods and facts of a target: how its graphs are written for one kind of runtime, and
    run.

    Each target is a folder of modules here and a line in the registry. Only `activations` and
    `graphs` may need torch and onnx, which the runtime does not have.
    """

    @property
    def name(self) -> str: ...

    @property
    def help(self) -> str:
        """A short description of the target for the help of the command line."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of weights that the target supports, for example `"fp32"` and `"int8"`."""

    @property
    def opsets(self) -> tuple[int, ...]:
        """The versions of the ONNX operators that the target supports; the first is the default."""

    @property
    def default_device(self) -> str: ...

    @property
    def max_workers(self) -> int | None:
        """The maximum number of worker threads that serve an export; `None` for no limit."""

    @property
    def shares_weights(self) -> bool:
        """True if all graphs of an export read their weights from one shared file."""

    @property
    def is_standard(self) -> bool:
        """True if graphs have only standard operators. Other clients can run them, and one export
        may have several dtypes."""

    @property
    def integer_dtypes(self) -> tuple[str, ...]:
        """The dtypes whose matmuls compute in integers, none for most targets.

        A calibration text may set the scales of their activations, and `cpu` may choose their
        methods.
        """

    @property
    def generation_step(self) -> Callable[[dict[str, ir.Model]], Step] | None:
        """The function that makes the `Step` of an export with `--generate`, or `None` for a target
        without `--generate`.

        It takes the graphs by role (`{"decoder": model, …}`) and changes them, so the caller must
        not use them again.
        """

    def devices(self, roles: Collection[str], dtype: str) -> tuple[str, ...]:
        """Return the devices that graphs of this target support, for example `("cpu", "cuda")`.

        This machine may lack some of them.

        Args:
            roles: the roles of all graphs of the export, such as `"encoder"`.
            dtype: the dtype of the weights of these graphs.
        """

    def unsupported_fields(self, config: Config) -> dict[str, str]:
        """Return `{field: expected value}` of the fields of `config` that the target cannot export.

        It is empty if the model can be exported. The expected values are text for a message.
        """

    def activations(self, model: PreTrainedModel | None, dtype: str | None) -> str:
        """Return the dtype in which graphs with weights of `dtype` compute activations.

        Args:
            model: is checked for overflow; `None` if torch is not installed.
            dtype: the dtype of the weights, or `None` for the target's default. The result is then
                the dtype of the weights too.

        Raises:
            ValueError: if activations of `model` overflow in the dtype that `dtype` needs.
        """

    def graph_specs(
        self, config: dict, architecture: str, dtype: str, activations: str
    ) -> dict[str, GraphSpec]:
        """Return `{role: spec}`, the inputs and outputs of each graph that the export has.

        The role `"encoder"` reads full sequences and `"decoder"` generates tokens. Targets may add
        others, for example `"step"`.

        Args:
            config: the fields of the model's config.json.
            architecture: the name of the model class, such as `VanillaDecoderForCausalLM`.
            dtype: the dtype of the weights.
            activations: the dtype that the method `activations` returned for `dtype`.

        Raises:
            ValueError: if the target does not support `activations`.
        """

    def step_role(self, config: dict, architecture: str) -> str | None:
        """Return the role of the graph that decodes batches in which rows join and leave at any
        time.

        It is `None` if there is no such graph. Rows may differ in length, and their results do not
        depend on the other rows. A graph that only serves this has the role `"step"`.

        Args:
            config: the fields of the model's config.json.
            architecture: the name of the model class.
        """

    def graphs(self, dtype: str) -> TargetGraphs:
        """Return the functions that write the nodes of graphs with weights of `dtype`."""

    def parity_device(self, activations: str) -> str:
        """Return the device of this machine on which an export is compared with the torch model.

        Raises:
            OSError: if no device of this machine computes in the dtype `activations`, with the
                reason.
        """

    def provider_options(self, role: str) -> dict[str, str]:
        """Return onnxruntime options of the execution provider for the graph `role`.

        They take precedence over the options that all targets use.
        """

    def open(self, export: LoadedExport) -> RowsFactory:
        """Return the factory that makes decoders of a loaded export, which must have a decoder
        graph."""


def check_activations(activations: str, known: Collection[str]) -> None:
    """Check that the dtype `activations` is in `known`, the dtypes that the target computes in.

    Raises:
        ValueError: if it is not.
    """
    if activations not in known:
        raise ValueError(
            f"the activations are {activations!r:.100}, expected one of {', '.join(known)}"
        )
