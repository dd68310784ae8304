"""Variants of a checkpoint's weights, by transformers' names.

For "fp16" these are model.fp16.safetensors, or the shards that model.safetensors.index.fp16.json
names.
"""

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from .files import PICKLE, WEIGHTS
from .linked_copies import errors_name, linked_copy

SHARD = re.compile(r".*-\d+-of-\d+")


def index_name(name: str) -> str:
    """Return the name of the index of sharded weights: "model.safetensors.index.json" for the
    `name` "model.safetensors"."""
    return f"{name}.index.json"


# names of files and indexes of weights without a variant
PLAIN_NAMES = [plain for name in (WEIGHTS, PICKLE) for plain in (name, index_name(name))]


def find_variants(
    directory: Path, names: Collection[str] = (WEIGHTS, PICKLE)
) -> dict[str, dict[str, str]]:
    """Return {variant: {plain: file}} of the weights in `directory` that have a variant.

    `file` is the name of a file, and `plain` the same name without the variant. Only the weights
    `names` and their indexes count. Shards and files without a variant are left out.
    """
    variants: dict[str, dict[str, str]] = {}
    for file in sorted(path.name for path in directory.iterdir() if path.is_file()):
        for pattern, plain in name_patterns(names):
            match = re.fullmatch(pattern, file)
            if match and not SHARD.fullmatch(match[1]):
                variants.setdefault(match[1], {})[plain] = file
    return variants


def name_patterns(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (pattern, plain) for the weights `names` and their indexes.

    A name has a variant if `re.fullmatch` finds the pattern in it; group 1 is the variant. `plain`
    is the name without a variant. An index has two patterns, for two places of the variant. Shards
    match too, with a group such as "fp16-00001-of-00002": the caller leaves them out.
    """
    for name in names:
        stem, suffix = map(re.escape, os.path.splitext(name))
        yield rf"{stem}\.(.+){suffix}", name
        yield rf"{stem}{suffix}\.index\.(.+)\.json", index_name(name)
        yield rf"{stem}\.(.+){suffix}\.index\.json", index_name(name)


def has_weights(directory: Path, variant: str | None) -> bool:
    """Return True if `directory` has safetensors weights, of `variant` if that is not None."""
    if variant is not None:
        return variant in find_variants(directory, (WEIGHTS,))
    return any((directory / name).is_file() for name in (WEIGHTS, index_name(WEIGHTS)))


def variant_hint(directory: Path, names: Collection[str]) -> str:
    """Return the end of an error about missing weights: for each variant of `names` in `directory`,
    the flag that reads it. It is empty without variants."""
    variants = {
        variant: min(files.values()) for variant, files in find_variants(directory, names).items()
    }
    return "".join(f"; --variant {variant} reads {file}" for variant, file in variants.items())


def check_variant(directory: Path, variant: str) -> None:
    """Raise FileNotFoundError if `directory` has no weights of `variant`."""
    variants = find_variants(directory)
    if variant in variants:
        return
    stem, suffix = os.path.splitext(WEIGHTS)
    files = ", ".join(sorted(os.listdir(directory))[:10]) or "nothing"
    hint = f", whose variants are {' and '.join(variants)}" if variants else ""
    raise FileNotFoundError(
        f"{directory} has no weights of the variant {variant!r}: expected "
        f"{stem}.{variant}{suffix}, found {files}{hint}"
    )


def linked_variant(directory: Path, variant: str) -> TemporaryDirectory:
    """Return a temporary copy of `directory`, made of links, in which the weights of `variant` have
    names without it.

    Raises:
        FileNotFoundError: if there are no weights of `variant`.
    """
    check_variant(directory, variant)
    copy = linked_copy(directory, PLAIN_NAMES)
    for plain, file in find_variants(directory)[variant].items():
        Path(copy.name, plain).symlink_to(directory.resolve() / file)
    return copy


@contextlib.contextmanager
def opened_variant(directory: Path, variant: str | None) -> Iterator[Path]:
    """Yield `directory`, or with a `variant` a linked copy in which its weights have names without
    it.

    The copy is removed afterwards. Errors name `directory`. Raises FileNotFoundError if there are
    no weights of `variant`.
    """
    if variant is None:
        yield directory
        return
    with linked_variant(directory, variant) as copy, errors_name(directory, Path(copy)):
        yield Path(copy)
