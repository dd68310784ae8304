"""The heads of BGE-M3 (Chen et al. 2024): linear maps of the state of each token, to its weight in
a sparse embedding and to its vector in a multi-vector embedding."""

from typing import NamedTuple

import numpy as np

from ..shared.files import TOKEN_HEADS
from .sentence_modules import Files, Step, check_shapes, file_tensors


class TokenHeads(NamedTuple):
    """Functions from states (S, D) of tokens to weights (S, 1), which may be below 0, and to
    vectors (S, E)."""

    weights: Step
    vectors: Step


def read_token_heads(files: Files, hidden_size: int) -> TokenHeads:
    """Return the heads of an export, for states of `hidden_size` values.

    Raises ValueError if a file is missing or no safetensors file, or has tensors of other shapes or
    values that are not finite.
    """
    sparse, multi_vector = (f"{head}.safetensors" for head in TOKEN_HEADS)
    return TokenHeads(
        linear(files, sparse, hidden_size, 1), linear(files, multi_vector, hidden_size)
    )


def linear(files: Files, name: str, in_features: int, out_features: int | None = None) -> Step:
    """Return the linear map with the weights in the file `name`. `out_features` may be any number
    if it is None."""
    tensors = file_tensors(files, name, "heads of BGE-M3")
    size = out_features or max(tensors.get("weight", np.ones(1)).size // in_features, 1)
    shapes = {"weight": (size, in_features), "bias": (size,)}
    check_shapes(files.directory / name, tensors, shapes)
    weight, bias = tensors["weight"], tensors["bias"]
    return lambda states: states @ weight.T + bias
