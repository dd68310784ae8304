"""The files of an export: their inputs and outputs."""

from dataclasses import dataclass, field

# tokens from which on a row is read alone, so that where it has no padding attention needs no mask
LONG = 512


@dataclass(frozen=True)
class TensorSpec:
    """One input or output; a `str` in `shape` is an axis, shared by all tensors that name it.

    Args:
        range: the lowest and the highest number that callers may pass; any if `None`.
        default: the value everywhere if a caller passes no tensor; `None` if it is required.
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    range: tuple[int, int] | None = None
    default: int | None = None


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


def concrete_shape(tensor: TensorSpec, sizes: dict[str, int]) -> list[int]:
    """Return the shape of `tensor` with each named axis replaced by its number in `sizes`."""
    return [sizes[size] if isinstance(size, str) else size for size in tensor.shape]
