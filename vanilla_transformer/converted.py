"""Checkpoints of any family as one of ours: unchanged, or converted temporarily.

Only a conversion needs torch.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import HAS_TORCH
from .checkpoint_config import CONFIGS, read_raw_config
from .checkpoint_files import checkpoint_directory
from .errors import UsageError, torch_missing
from .files import CONFIG
from .linked_copies import errors_name
from .variants import opened_variant


@contextlib.contextmanager
def converted(
    source: str | os.PathLike,
    keep: str | os.PathLike | None = None,
    config: Mapping[str, Any] | None = None,
    leave_out: Iterable[str] = (),
    variant: str | None = None,
) -> Iterator[Path]:
    """Yield the directory of `source` as a Vanilla Transformer checkpoint, converting it if needed.

    A checkpoint of one of `FAMILIES` is converted into the directory `keep`, or into a temporary
    one that is removed afterwards. `config` replaces fields of its config.json, `leave_out` are
    patterns of names of tensors that are not converted, and `variant` "fp16" reads
    model.fp16.safetensors.

    Raises:
        UsageError: for `keep`, `config` or `leave_out` where nothing is converted.
        ImportError: for a checkpoint of another family where torch is not installed.
        FileExistsError: if `keep` exists and may not be replaced.
        FileNotFoundError, OSError: if files are missing, or the disk is full.
        ValueError: for a family that is not known, a field that cannot be represented, and unknown,
            missing or misshapen tensors.
    """
    if is_ours(source):
        for name, value in {
            "keep": keep and os.fspath(keep),
            "config": config,
            "leave_out": [*leave_out],
        }.items():
            if value:
                raise UsageError(
                    f"{name} is {value!r}, and {source} needs no conversion: expected none"
                )
        with opened_variant(checkpoint_directory(source), variant) as directory:
            yield directory
        return
    if not HAS_TORCH:
        raise torch_missing(
            f"{source} is a checkpoint of another family ({family_hint(source)}), whose conversion"
        )
    from .conversion import convert, log_notes

    if keep is not None:
        log_notes(convert(source, keep, config=config, leave_out=leave_out, variant=variant))
        yield Path(keep)
    else:
        with tempfile.TemporaryDirectory(prefix="vanilla-transformer-") as directory:
            out = Path(directory, "converted")
            log_notes(convert(source, out, config=config, leave_out=leave_out, variant=variant))
            with errors_name(Path(source), out):
                yield out


def is_ours(source: str | os.PathLike) -> bool:
    """Return True if `source`, a directory or Hub id, is a Vanilla Transformer checkpoint, which
    needs no conversion.

    Raises FileNotFoundError without config.json, and ValueError for a damaged one."""
    content, _ = read_raw_config(checkpoint_directory(source, (CONFIG,)))
    return content["model_type"] in CONFIGS


def family_hint(source: str | os.PathLike) -> str:
    """Return the family of a checkpoint for an error, such as "model_type bert, architecture
    BertModel".

    `source` is a directory or Hub id.
    """
    content, architecture = read_raw_config(checkpoint_directory(source, (CONFIG,)))
    return f"model_type {content['model_type']}, architecture {architecture}"
