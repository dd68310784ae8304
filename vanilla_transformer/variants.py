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
    """Return the name of the index of the shards of the weights `name`."""
    return f"{name}.index.json"


def find_variants(
    directory: Path, names: Collection[str] = (WEIGHTS, PICKLE)
) -> dict[str, dict[str, str]]:
    """Return the files of each variant of the weights `names`, by the names that they have without
    the variant."""
    variants: dict[str, dict[str, str]] = {}
    for file in sorted(path.name for path in directory.iterdir() if path.is_file()):
        for pattern, plain in name_patterns(names):
            match = re.fullmatch(pattern, file)
            if match and not SHARD.fullmatch(match[1]):
                variants.setdefault(match[1], {})[plain] = file
    return variants


def name_patterns(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield patterns of the names with a variant, and the name without it. An index has the variant
    at one of two places."""
    for name in names:
        stem, suffix = map(re.escape, os.path.splitext(name))
        yield rf"{stem}\.(.+){suffix}", name
        yield rf"{stem}{suffix}\.index\.(.+)\.json", index_name(name)
        yield rf"{stem}\.(.+){suffix}\.index\.json", index_name(name)


def has_weights(directory: Path, variant: str | None) -> bool:
    """Return whether `directory` has safetensors weights, those of `variant` if that is not
    None."""
    if variant is not None:
        return variant in find_variants(directory, (WEIGHTS,))
    return any((directory / name).is_file() for name in (WEIGHTS, index_name(WEIGHTS)))


def variant_hint(directory: Path, names: Collection[str]) -> str:
    """Return the end of an error about missing weights: the variants that are there, with their
    flags."""
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
    """Return a linked copy of `directory` in which the weights of `variant` have the names without
    it.

    Raises:
        FileNotFoundError: if there are none.
    """
    check_variant(directory, variant)
    copy = linked_copy(
        directory, {plain for name in (WEIGHTS, PICKLE) for plain in (name, index_name(name))}
    )
    for plain, file in find_variants(directory)[variant].items():
        Path(copy.name, plain).symlink_to(directory.resolve() / file)
    return copy


@contextlib.contextmanager
def opened_variant(directory: Path, variant: str | None) -> Iterator[Path]:
    """Yield `directory`, or with a `variant` a linked copy of it that is gone afterwards. Errors
    name `directory`."""
    if variant is None:
        yield directory
        return
    with linked_variant(directory, variant) as copy, errors_name(directory, Path(copy)):
        yield Path(copy)
