"""An opened checkpoint of any family, which is ours or becomes ours by a temporary conversion.

Only a conversion needs torch.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import huggingface_hub
from huggingface_hub.errors import CachedRepoTreeNotFoundError

from . import HAS_TORCH
from .checkpoint_config import CONFIGS, build_known_config, read_raw_config
from .checkpoint_files import FILES, checkpoint_directory
from .companions import MODULE_CONFIG, MODULE_WEIGHTS, Module, read_modules
from .errors import UsageError, torch_missing
from .files import CONFIG, MODULES
from .linked_copies import errors_name
from .variants import opened_variant


@dataclass(frozen=True)
class Source(os.PathLike):
    """An opened checkpoint, with the same text as the path or Hub id that the user gave.

    Args:
        name: the directory or Hub id.
        root: the directory, or the snapshot of the Hub id in the cache.
        directory: the files to read: `root`, or a copy with other weights or another config.
        content: the content of config.json. It always has `model_type`, which may be None.
        architecture: the first name in its `architectures`, or "none".
    """

    name: str | os.PathLike
    root: Path
    directory: Path
    content: dict[str, Any]
    architecture: str

    @classmethod
    def open(cls, source: str | os.PathLike) -> Self:
        """Return the checkpoint `source`, a directory or Hub id, or `source` if it is open.

        Only config.json is downloaded, see `download`. Raises FileNotFoundError without a
        config.json, and ValueError for a damaged one.
        """
        if isinstance(source, cls):
            return source
        root = checkpoint_directory(source, (CONFIG,))
        return cls(source, root, root, *read_raw_config(root))

    def __fspath__(self) -> str:
        return os.fspath(self.name)

    __str__ = __fspath__

    def at(self, directory: Path) -> Self:
        """Return the same checkpoint with the files in `directory`, whose config.json is read."""
        if directory == self.directory:
            return self
        content, name = read_raw_config(directory)
        return dataclasses.replace(self, directory=directory, content=content, architecture=name)

    @property
    def is_ours(self) -> bool:
        """True if it is a Vanilla Transformer checkpoint, which needs no conversion."""
        return self.content["model_type"] in CONFIGS

    def config(self) -> Any:
        """Return the config of a Vanilla Transformer checkpoint.

        Raises ValueError for a wrong value, and for another family or class.
        """
        return build_known_config(self.content, self.architecture, self.directory)

    def download(self, files: tuple[str, ...] = FILES) -> Path:
        """Download the `files` of a Hub id, shell patterns of names, and return the directory.

        By default these are config, tokenizer, weights and the files of modules.
        """
        if os.path.isdir(self.name):
            return self.directory
        # of the commit that config.json is of, whatever is pushed meanwhile
        get = partial(checkpoint_directory, self.name, commit=self.root.name)
        get(files)
        modules: tuple[Module, ...] = ()
        with contextlib.suppress(ValueError):  # raised where modules.json is read
            modules = read_modules(self.root / MODULES) if files == FILES else ()
        names = (MODULE_CONFIG, *MODULE_WEIGHTS)
        if paths := [f"{module.folder}/{name}" for module in modules for name in names]:
            get(tuple(paths))
        return self.directory

    def file_names(self) -> list[str]:
        """Return the sorted relative paths of the checkpoint's files.

        Of a directory they are at most one folder deep, and folders are included. Those of a Hub id
        come from the cached list of its files, and are empty without that list.
        """
        if os.path.isdir(self.name):
            paths = [path for pattern in ("*", "*/*") for path in self.root.glob(pattern)]
            return sorted(path.relative_to(self.root).as_posix() for path in paths)
        try:
            files = huggingface_hub.get_cached_repo_tree(str(self), revision=self.root.name)
        except CachedRepoTreeNotFoundError:
            return []
        return sorted(file.path for file in files)


@contextlib.contextmanager
def converted(
    source: str | os.PathLike,
    keep: str | os.PathLike | None = None,
    config: Mapping[str, Any] | None = None,
    leave_out: Iterable[str] = (),
    variant: str | None = None,
) -> Iterator[Source]:
    """Yield `source`, a directory, Hub id or open checkpoint, as a Vanilla Transformer checkpoint.

    A checkpoint of one of `FAMILIES` is converted into the directory `keep`, or into a temporary
    one that is removed afterwards. `config` replaces fields of its config.json, `leave_out` are
    patterns of names of tensors that are not converted, and `variant` "fp16" reads
    model.fp16.safetensors. The `directory` of the result has the files.

    Raises:
        UsageError: for `keep`, `config` or `leave_out` where nothing is converted.
        ImportError: for a checkpoint of another family where torch is not installed.
        FileExistsError: if `keep` exists and may not be replaced.
        FileNotFoundError, OSError: if files are missing, or the disk is full.
        ValueError: for a family that is not known, a field that cannot be represented, and unknown,
            missing or misshapen tensors.
    """
    source = Source.open(source)
    if source.is_ours:
        options = {"keep": keep and os.fspath(keep), "config": config, "leave_out": [*leave_out]}
        check_unconverted(source, options)
        with opened_variant(source.download(), variant) as directory:
            yield source.at(directory)
        return
    if not HAS_TORCH:
        family = f"model_type {source.content['model_type']}, architecture {source.architecture}"
        other = f"{source} is a checkpoint of another family ({family})"
        raise torch_missing(f"{other}, whose conversion")
    from .conversion import convert, log_notes

    with tempfile.TemporaryDirectory(prefix="vanilla-transformer-") as temporary:
        out = Path(keep or Path(temporary, "converted"))
        log_notes(convert(source, out, config=config, leave_out=leave_out, variant=variant))
        with errors_name(Path(keep or source), out):
            yield source.at(out)


def check_unconverted(source: Source, options: dict[str, Any]) -> None:
    """Raise UsageError if one of the `options` of a conversion is set for `source`, one of ours."""
    for name, value in options.items():
        if value:
            raise UsageError(
                f"{name} is {value!r}, and {source} needs no conversion: expected none"
            )
