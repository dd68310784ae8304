"""Rotary positions and the matrices around them in other families.

There the point i of a head is in components i and i + d / 2, here in 2i and 2i + 1. So rows of
query and key maps, and weights of norms of them, change places.
"""

import torch

from .fields import Fields, Ours, require
from .tensors import SAME, Op, TensorMap, joined, tensor_map, zeros

HALVES = Op("in two parts", lambda t: t.chunk(2), lambda *parts: torch.cat(parts))


def paired(width: int) -> Op:
    """Return the operation that brings the components of heads of `width` into our order."""

    def to_ours(t):
        return (t.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).reshape(t.shape),)

    def to_theirs(t):
        return t.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).reshape(t.shape)

    return Op("halves of heads paired", to_ours, to_theirs)


def paired_thirds(width: int) -> Op:
    """Return the operation on queries, keys and values in one tensor, of which the first two are
    `paired`."""
    pairs = paired(width)

    def to_ours(t):
        query, key, value = t.chunk(3)
        return (*pairs.to_ours(query), *pairs.to_ours(key), value)

    return Op(
        "in three parts, halves of heads paired",
        to_ours,
        lambda q, k, v: torch.cat([pairs.to_theirs(q), pairs.to_theirs(k), v]),
    )


def no_bias(name: str, size: int) -> TensorMap:
    """Return the map of a bias that only our module `name` has, of `size` zeros."""
    return TensorMap((f"{name}.bias",), "", zeros(size))


def fused(
    ours: str, parts: dict[str, str], theirs: str, op: Op, ends: tuple[str, ...], order: Op
) -> list[TensorMap]:
    """Return the maps of linear maps that files of the Hub have in one tensor, and classes of
    transformers in several.

    Args:
        ours: name of our module that has the parts.
        parts: names of the linear maps there, each with the name in the class.
        theirs: name of all of them in files.
        op: the operation that makes our tensors of the one in files.
        ends: "weight", or "weight" and "bias".
        order: the operation that makes our queries and keys of those of the class.
    """
    maps = joined([f"{ours}.{name}" for name in parts], theirs, op, ends)
    for end in ends:
        for name, class_name in parts.items():
            convert = order if name in ("q_proj", "k_proj") else SAME
            maps.append(tensor_map(f"{ours}.{name}.{end}", f"{class_name}.{end}", convert))
    return maps


def one_base(ours: Ours) -> Fields:
    """Return the `rope_parameters` of `ours` for families whose layers have the same angles.

    Raises ValueError for other positions, and for several bases.
    """
    require(ours, position_embedding_type="rotary")
    if "rope_theta" not in ours.rope_parameters:
        raise ValueError(
            f"rope_parameters={ours.rope_parameters!r} cannot be converted, expected one base for "
            "all layers"
        )
    return ours.rope_parameters
