"""The context of all functions here: the graph, the config and weights of its model, and the
operators of the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnx_ir import Value

from ..specs.alignment import AlignmentHead
from .config import Config
from .ops import CONTRIB, Ops, branch
from .weights import WeightStore, unchanged

Values = dict[str, Value]  # inputs of a graph by name
Pair = tuple[Value, Value]  # keys and values
Pairs = list[Pair]  # one per layer


# Number of the layer, name of the module, x -> the input of the module's last linear map; of
# attention (B, T, H * d_v).
Attention = Callable[[int, str, Value], Value]


@dataclass(frozen=True)
class Tokens:
    """The tokens that an encoder reads: ids and mask (B, S), and their positions (B or 1, S)."""

    ids: Value
    mask: Value
    positions: Value


def flat(pairs: Pairs) -> list[Value]:
    """Return keys and values of all layers in one list: [key, value, key, value, ...], in the order
    of specs. `pairs` has them by layer."""
    return [value for pair in pairs for value in pair]


class Caches:
    """Keys and values of each layer, those that a graph reads and those that its attention appends
    to `present`.

    A seq2seq model has caches of its decoder's tokens, and of the source (`is_source`).
    """

    def __init__(self, inputs: Values, is_source: bool = False):
        names = [
            name
            for name in inputs
            if name.startswith("past_key_values") and (".encoder." in name) == is_source
        ]
        self.past: Pairs = [
            (inputs[key], inputs[value]) for key, value in zip(names[::2], names[1::2])
        ]
        self.present: Pairs = []


@dataclass(frozen=True)
class Precision:
    """The form of matrices in a graph.

    Args:
        matmul: x (..., K), names of linear maps, whose matrices are (N, K), and a bias or `None` ->
            x W + b, the columns of all matrices side by side.
        look_up: the name of a table (V, D) and ids -> their rows.
    """

    matmul: Callable[[GraphContext, Value, Sequence[str], Value | None], Value]
    look_up: Callable[[GraphContext, str, Value], Value]


@dataclass(frozen=True)
class Dialect:
    """The parts of a layer for which targets have different operators.

    Args:
        rms_norm: x, a weight and epsilon -> the norm of root mean squares.
        linears: x and names of linear maps -> the result of each.
        activated_linear: x, the name of a linear map and an activation -> the activation of the
            map.
        add_and_norm: x, the input of the last map of a sublayer, its name, the name of a norm or
            `None` -> the sum with x, and its norm, or the sum again.
        rotate: queries or keys (B, T, H * d), H, positions (B or 1, T) and the type of the layer ->
            the same turned by rotary positions.
        last_index: int64 (B, T), the index of each token that counts and 0 for the others -> the
            largest of each row, (B,).
        mask_value: number added to the scores of keys that are not read.
        token_multiple: encoders pad their batches to a multiple of this number of tokens.
    """

    rms_norm: Callable[[GraphContext, Value, Value, float], Value]
    linears: Callable[..., list[Value]]
    activated_linear: Callable[[GraphContext, Value, str, str], Value]
    add_and_norm: Callable[[GraphContext, Value, Value, str, str | None], tuple[Value, Value]]
    rotate: Callable[[GraphContext, Value, int, Value, str], Value]
    last_index: Callable[[GraphContext, Value], Value]
    mask_value: float
    token_multiple: int = 1


WriteGraph = Callable[["GraphContext", Values], list[Value]]  # inputs by name -> outputs in order
EncoderAttention = Callable[["GraphContext", Tokens | None], Attention]


@dataclass(frozen=True)
class TargetGraphs:
    """The graphs of a target in one dtype.

    Args:
        attention: returns the function that writes an encoder's attention, for `layers.stack` to
            call. It gets `None` for images instead of tokens.
        write: functions that write a graph, with the keys of `exporting.graphs.graph_kind`. They
            get the inputs by name and return the outputs in order.
    """

    dialect: Dialect
    precision: Precision
    attention: EncoderAttention
    write: Mapping[str, WriteGraph]


# its name, which no other has, and the function that writes it
Branch = tuple[str, Callable[["GraphContext"], Value]]


@dataclass(frozen=True)
class GraphContext:
    """One graph while it is written. `op` appends nodes, `store` has the weights.

    Args:
        shortlist: the tokens that have logits; all if `None`.
        calibration: what the inputs of matrices were on a text, see `input_scales.Calibration`;
            `None` without.
        alignment: the heads whose cross-attention an alignment graph returns.
    """

    op: Ops
    config: Config
    store: WeightStore
    target: TargetGraphs
    opset: int
    shortlist: list[int] | None = None
    calibration: Any = None
    alignment: Sequence[AlignmentHead] = ()

    def contrib(self, op_type: str, *operands: Any, **attributes: Any) -> Value:
        """Append a node with the operator `op_type`, which only onnxruntime has, and return its
        output.

        `operands` are its inputs, and `attributes` its attributes by name.
        """
        return self.op(op_type, *operands, domain=CONTRIB, **attributes)

    def choose(self, condition: Value, then: Branch, otherwise: Branch) -> Value:
        """Return the value of `then` if `condition` is true, else that of `otherwise`. Only
        one of them is computed."""
        graphs = []
        for name, write in (then, otherwise):
            ops = Ops(self.op.dtype, self.op)
            graphs.append(branch(name, ops, write(replace(self, op=ops))))
        return self.op("If", condition, then_branch=graphs[0], else_branch=graphs[1])

    def has(self, name: str) -> bool:
        """Return True if the checkpoint has weights of this `name`."""
        return name in self.store.weights

    def weight(self, name: str) -> Value:
        """Return the weights `name` as a value of the graph, in the dtype of `store`."""
        return self.transform_weights([name], unchanged)[0]

    def bias(self, name: str) -> Value | None:
        """Return the bias of the linear map `name`, or None if it has none."""
        return self.weight(f"{name}.bias") if self.has(f"{name}.bias") else None

    def matrices(self, names: Sequence[str], transform: Callable, *arguments: Any) -> list[Value]:
        """Return the arrays `transform(*matrices, *arguments)` as values of the graph.

        The matrices (N, K) are the weights of the linear maps `names`, in this order. `transform`
        returns a tuple.
        """
        return self.transform_weights([f"{name}.weight" for name in names], transform, *arguments)

    def transform_weights(
        self, names: Sequence[str], transform: Callable, *arguments: Any
    ) -> list[Value]:
        """Return the arrays `transform(*weights, *arguments)` as values of the graph.

        `transform` gets the weights `names` in the dtype of `store` and returns a tuple. Equal
        calls share one tensor in all graphs of an export.
        """
        tensors = self.store.transform_weights(names, transform, *arguments)
        return [self.op.initializer(id(tensor), tensor) for tensor in tensors]
