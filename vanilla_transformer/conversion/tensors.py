"""Tensor files read and written one tensor at a time, and the maps of which tensor becomes which.

A conversion is a list of `TensorMap`s. Read forwards they make our tensors of another project's,
read backwards the reverse.
"""

import contextlib
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import logging

from ..checkpoint import TORCH_DTYPES, Shapes, stored_shapes
from ..checkpoint_files import weight_files
from ..files import PICKLE, WEIGHTS, check_no_pointer
from ..source import Source
from .fields import Ours

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
logger = logging.get_logger(__name__)


# --------------------------------------------------------------------------------------------- maps


@dataclass(frozen=True)
class Op:
    """An operation that makes one or several of our tensors from the source's, and its inverse.

    `to_theirs` is `None` if no family needs the inverse.
    """

    name: str
    to_ours: Callable[..., tuple[torch.Tensor, ...]]
    to_theirs: Callable[..., torch.Tensor] | None = None


SAME = Op("", lambda t: (t,), lambda t: t)
# a product or sum of a weight in half precision, which that precision would round
WIDE = Op(
    "at least float32",
    lambda t: (t.to(torch.promote_types(t.dtype, torch.float32)),),
    lambda t: t,
)
TRANSPOSED = Op("transposed", lambda t: (t.T,), lambda t: t.T)
ROW = Op("one row", lambda t: (t[0],), lambda t: t[None])
THIRDS = Op("in three parts", lambda t: t.chunk(3), lambda *parts: torch.cat(parts))
THIRDS_TRANSPOSED = Op(
    "in three parts, transposed",
    lambda t: tuple(part.T for part in t.chunk(3, dim=1)),
    lambda *parts: torch.cat([part.T for part in parts], dim=1),
)


def drop_rows(count: int) -> Op:
    """Return an operation that drops the first `count` rows of a position table, which no token
    reads.

    Its inverse puts rows of zeros in their place.
    """
    return Op(
        f"from row {count}",
        lambda t: (t[count:],),
        lambda t: torch.cat([torch.zeros_like(t[:1]).expand(count, -1), t]),
    )


def scaled(factor: float) -> Op:
    return Op(f"times {factor:g}", lambda t: (t * factor,), lambda t: t / factor)


def constant(name: str, value: Callable[[], torch.Tensor]) -> Op:
    """Return an operation that reads no tensor and returns `value()`, in both directions.

    It makes a tensor that one side needs and the other lacks. `name` is what a printed plan shows.
    """
    return Op(name, lambda: (value(),), value)


def equal(count: int) -> Op:
    """Return an operation that makes `count` equal tensors of one.

    Its inverse returns the first of them, and raises ValueError if they differ.
    """

    def one(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        if not first.is_meta and not all(torch.equal(first, other) for other in others):
            raise ValueError(
                f"{count} tensors of one shape differ, expected equal ones: the family has only one"
            )
        return first

    return Op(f"{count} times", lambda t: (t,) * count, one)


def zeros(*shape: int) -> Op:
    return constant("zeros", lambda: torch.zeros(shape))


def then(first: Op, second: Op) -> Op:
    """Return an operation that applies `first` to the source's tensor, then `second` to each
    result. `second` makes one tensor of one."""
    return Op(
        ", ".join(filter(None, [first.name, second.name])),
        lambda t: tuple(second.to_ours(part)[0] for part in first.to_ours(t)),
        lambda *parts: first.to_theirs(*(second.to_theirs(part) for part in parts)),
    )


@dataclass(frozen=True)
class TensorMap:
    """A map between a tensor of the source family and tensors of ours.

    Attributes:
        ours: names in our model. Empty if only the source has this tensor.
        theirs: name in the source's class. Empty if the source computes what we store: then it
            converts back only if our values are the computed ones.
        op: the operation that converts the tensor.
        also: other names in the source's files. If a file has several, they must be equal.
        otherwise: names to read if a file has none of the others.
        extra_inputs: more source tensors that `op` reads, only in the direction to ours.
        stored: the name in files, if it differs from the name in the class. Both are read, and
            `stored` is written.
    """

    ours: tuple[str, ...]
    theirs: str
    op: Op = SAME
    also: tuple[str, ...] = ()
    otherwise: tuple[str, ...] = ()
    extra_inputs: tuple[str, ...] = ()
    stored: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs, *self.also, *((self.stored,) if self.stored else ()))

    @property
    def all_theirs(self) -> tuple[str, ...]:
        return tuple(name for name in (*self.names, *self.otherwise, *self.extra_inputs) if name)


def tensor_map(
    ours: str,
    theirs: str,
    op: Op = SAME,
    also: tuple[str, ...] = (),
    otherwise: tuple[str, ...] = (),
) -> TensorMap:
    return TensorMap((ours,), theirs, op, also, otherwise)


def linear(
    ours: str, theirs: str, bias: bool = True, op: Op = SAME, hub: str | None = None
) -> list[TensorMap]:
    """Return the tensor maps of the weight and the bias of a linear map or a norm.

    `ours` and `theirs` are the module's names, and `hub` is its name in files of the Hub, if that
    differs from the name in the class of transformers. `op` converts the weight. Without `bias`
    only the weight is mapped.
    """
    return [
        tensor_map(
            f"{ours}.{part}",
            f"{theirs}.{part}",
            convert,
            otherwise=(f"{hub}.{part}",) if hub else (),
        )
        for part, convert in (("weight", op), ("bias", SAME))[: 1 + bias]
    ]


def joined(
    ours: Sequence[str], theirs: str, op: Op, ends: Iterable[str] = ("weight", "bias")
) -> list[TensorMap]:
    """Return the tensor maps of linear maps of ours that are the one module `theirs` in the source.

    `op` makes our tensors of one of theirs. `ends` are "weight", "bias" or both.
    """
    return [
        TensorMap(tuple(f"{name}.{end}" for name in ours), f"{theirs}.{end}", op) for end in ends
    ]


def modules(
    names: Mapping[str, str], ours: str = "", theirs: str = "", bias: bool = True, op: Op = SAME
) -> list[TensorMap]:
    """Return the tensor maps of linear maps and norms, {our name: their name}.

    `ours` and `theirs` stand in front of all names, such as "model.layers.0.". `op` converts the
    weights. Without `bias` only the weights are mapped.
    """
    return [
        entry
        for name, their_name in names.items()
        for entry in linear(f"{ours}{name}", f"{theirs}{their_name}", bias, op)
    ]


def layers(
    names: Mapping[str, str], ours: str, theirs: str, count: int, bias: bool = True
) -> list[TensorMap]:
    """Return the tensor maps of `count` layers of the same `modules`. `ours` and `theirs` are the
    names of the lists of layers."""
    return [
        entry
        for i in range(count)
        for entry in modules(names, f"{ours}.{i}.", f"{theirs}.{i}.", bias)
    ]


def tokens(ours: Ours, theirs: str, head: str) -> list[TensorMap]:
    """Return the tensor maps of a single stack's token embeddings and its vocabulary projection.

    `theirs` and `head` are their names in the source. They are one tensor if `ours`, our config,
    ties them.
    """
    tied = ours.tie_word_embeddings
    maps = [
        tensor_map("model.embeddings.embed_tokens.weight", theirs, also=(head,) if tied else ())
    ]
    return maps if tied else [*maps, tensor_map("lm_head.weight", head)]


# ------------------------------------------------------------------------------------------ reading


class TensorFiles:
    """The tensors of a checkpoint directory or of one file, by name, read when asked for.

    `shapes` maps each name to its shape and dtype. `prefixed` are the names that had the prefix of
    a base model. `removed` are tensors that are not converted. By default `files` are the
    safetensors file or its shards, or else the pickles. Pickles are read with `weights_only=True`
    and memory-mapped; a pickle of torch before 1.6 is loaded into memory, with a warning.

    Raises:
        FileNotFoundError: if there are no weights, or a shard is missing.
        ValueError: for a truncated or damaged file, or a pickle that holds more than tensors.
    """

    def __init__(self, path: str | os.PathLike, files: list[Path] | None = None) -> None:
        self.path = Path(path)
        self.shapes: Shapes = {}
        self.prefixed: set[str] = set()
        self.removed: list[str] = []
        self._where: dict[str, tuple[Path, str]] = {}
        self._pickled: dict[str, torch.Tensor] = {}
        if files is None:
            is_file = self.path.is_file()
            files = [self.path] if is_file else weight_files(self.path, (WEIGHTS, PICKLE))
        for file in files:
            check_no_pointer(file)
            if file.suffix != ".safetensors":
                self._open_pickle(file)
                continue
            shapes = stored_shapes(file)
            self.shapes |= shapes
            self._where |= {name: (file, name) for name in shapes}

    def _open_pickle(self, file: Path) -> None:
        is_mapped = zipfile.is_zipfile(file)
        try:
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
        except Exception as error:  # torch raises errors of its own, of zipfile and of pickle
            raise ValueError(
                f"{file} does not load with weights_only=True: {unpickling_fault(error)}"
            ) from None
        if not is_mapped:
            logger.warning(
                f"{file} was written by torch before 1.6 and cannot be memory-mapped: all of "
                "it is loaded into memory"
            )
        if not isinstance(tensors, dict) or not all(
            isinstance(name, str)
            and isinstance(value, torch.Tensor)
            and value.layout == torch.strided
            for name, value in tensors.items()
        ):
            raise ValueError(
                f"{file} holds {type(tensors).__name__}, expected a state dict: names and dense "
                f"tensors"
            )
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPE_NAMES:
                raise ValueError(
                    f"{file}: {name} is of type {tensor.dtype}, expected one of "
                    f"{list(DTYPE_NAMES.values())}"
                )
        self._pickled |= tensors
        self.shapes |= {
            name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
        }

    def rename(self, new_name: Callable[[str], str]) -> None:
        for names in (self.shapes, self._where, self._pickled):
            renamed = {new_name(name): value for name, value in names.items()}
            if len(renamed) != len(names):
                raise ValueError(
                    f"{self.path} has tensors under two names each: {sorted(names)[:5]} ..."
                )
            names.clear()
            names.update(renamed)

    def strip(self, prefix: str) -> None:
        """Remove `prefix` from all names that begin with it, and keep their new names in
        `prefixed`.

        It is the prefix of a base model inside a model with a head, such as "bert.".
        """
        self.prefixed = {
            name.removeprefix(prefix) for name in self.shapes if name.startswith(prefix)
        }
        self.rename(lambda name: name.removeprefix(prefix))

    def remove(self, names: Iterable[str]) -> None:
        """Remove the tensors `names` from `shapes`, so that they are not converted, and add them to
        `removed`."""
        for name in names:
            del self.shapes[name]
            self.removed.append(name)

    def read(self, name: str) -> torch.Tensor:
        if name in self._pickled:
            return self._pickled[name]
        file, stored = self._where[name]
        # Opened for each tensor: the pages of an open file would add up to the whole checkpoint.
        with safe_open(file, "pt") as tensors:
            return tensors.get_tensor(stored)


def unequal_weights(source: Source, rivals: list[list[list[Path]]]) -> list[str]:
    """Return a warning for each item of `rivals` with a set of weights that has another value in a
    tensor than the first set. `rivals` are those of `companions.rival_weights`.

    This library and transformers read the first set only. Tensors of one set only are not compared,
    and a set that cannot be read is ignored.
    """
    return [warning for sets in rivals for warning in unequal_sets(source, *sets)]


def unequal_sets(source: Source, first: list[Path], *others: list[Path]) -> list[str]:
    """Return a warning if one of `others`, sets of weights of `source`, has another value in a
    tensor than the set `first`."""
    directory = source.directory
    read = first[0].relative_to(directory)
    with contextlib.suppress(ValueError, OSError):
        for files in others:
            name = unequal_name(TensorFiles(directory, first), TensorFiles(directory, files))
            if name is not None:
                other = f"{files[0].relative_to(directory)} than in {read}, expected the same"
                return [f"{source} has another {name} in {other}: {read} is read"]
    return []


def unequal_name(first: TensorFiles, second: TensorFiles) -> str | None:
    """Return the first name of a tensor that both have with different values, or None."""
    for name in sorted(first.shapes.keys() & second.shapes.keys()):
        if not torch.equal(first.read(name).float(), second.read(name).float()):
            return name
    return None


def unpickling_fault(error: Exception) -> str:
    """Return one line with the reason of torch's unpickling `error`, without its advice to load the
    file with weights_only=False."""
    lines = [
        line.strip()
        for line in str(error).partition("\n\nCheck the documentation")[0].splitlines()
        if line.strip()
    ]
    fault = lines[-1] if lines else type(error).__name__
    return fault.removeprefix("WeightsUnpickler error: ").partition(". Please use")[0]


# ------------------------------------------------------------------------------------------ writing


def write_safetensors(
    path: Path, shapes: Shapes, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write a safetensors file of the pairs (name, tensor) in `tensors`, one at a time.

    The header is written first, from `shapes`: {name: (shape, dtype)}. Only one tensor must be in
    memory.

    Raises:
        RuntimeError: if a pair differs from `shapes` in name, shape or dtype. The order counts.
        ValueError: if there are more or fewer pairs than `shapes`.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (shape, dtype) in shapes.items():
        end = start + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for (name, (shape, dtype)), (tensor_name, tensor) in zip(
            shapes.items(), tensors, strict=True
        ):
            if (tensor_name, tuple(tensor.shape), tensor.dtype) != (name, shape, dtype):
                raise RuntimeError(
                    f"the next tensor is {tensor_name} {tuple(tensor.shape)} {tensor.dtype}, "
                    f"expected {name} {shape} {dtype}"
                )
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
