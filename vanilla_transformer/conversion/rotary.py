"""Rotary positions of other families: the point i of a head is in components i and i + d / 2. Ours
are 2i and 2i + 1, so rows of query and key maps, and norms of them, change places."""

import torch

from .tensors import Op, TensorMap, zeros


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


def halves(names: tuple[str, str], theirs: str) -> TensorMap:
    """Return the map of two of our tensors that are the halves of one of theirs."""
    return TensorMap(names, theirs, HALVES)


def no_bias(name: str, *shape: int) -> TensorMap:
    """Return the map of a bias of zeros, which the source lacks."""
    return TensorMap((f"{name}.bias",), "", zeros(*shape))


HALVES = Op("in two parts", lambda t: t.chunk(2), lambda *parts: torch.cat(parts))
