"""The companion files of a checkpoint: image processors, sentence-transformers' modules, and the
heads of BGE-M3.

They are copied wherever the weights go.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import HAS_TORCH
from .checkpoint_files import read_json, readers_errors, shorten, weight_sets
from .errors import torch_missing
from .files import MODULES, PICKLE, PICKLED_HEAD, TOKEN_HEADS, WEIGHTS, check_no_pointer
from .our_files import COMPANION, TOKEN_HEAD

MODULE_CONFIG = "config.json"
MODULE_WEIGHTS = (WEIGHTS, PICKLE)
# names of the weights of each of BGE-M3's heads; the first one that exists is read
HEAD_WEIGHTS = [(f"{head}.safetensors", f"{head}{PICKLED_HEAD}") for head in TOKEN_HEADS]
SPLADE = "SpladePooling"  # pools the logits of a masked language model
# first modules, which load the model; the second one is of older versions
MODELS = ("Transformer", "MLMTransformer")
# kind of module -> tuples of file names; a module needs one file of each tuple
REQUIRED_FILES = {
    "Pooling": ((MODULE_CONFIG,),),
    SPLADE: ((MODULE_CONFIG,),),
    "Dense": ((MODULE_CONFIG,), MODULE_WEIGHTS),
    "LayerNorm": ((MODULE_CONFIG,), MODULE_WEIGHTS),
    "Normalize": (),
    "LogitScore": ((MODULE_CONFIG,),),
}


@dataclass(frozen=True)
class Module:
    """An entry of modules.json: its folder and its class name, with the package of foreign
    classes."""

    kind: str
    folder: str


@dataclass(frozen=True)
class Companions:
    """The `modules` after a model, and the files of image processors, sentence-transformers and
    BGE-M3.

    `files` has their paths by the names they have in a checkpoint.
    """

    modules: tuple[Module, ...] = ()
    files: dict[str, Path] = field(default_factory=dict)

    def copy(self, directory: Path) -> None:
        for name, file in self.files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, directory / name)

    def copy_without_pickles(self, directory: Path) -> None:
        """Copy the files to `directory`, with weights as safetensors, which can be read without
        torch.

        Raises ImportError for pickled weights where torch is not installed, and ValueError for a
        damaged file."""
        self.copy(directory)
        for name, file in self.files.items():
            if name.endswith((PICKLE, PICKLED_HEAD)):
                replace_pickle(file, directory / name)

    def copy_for_flag_embedding(self, directory: Path) -> None:
        """Copy the files to `directory`, with BGE-M3's heads in torch's format, the only one that
        FlagEmbedding reads."""
        import torch
        from safetensors.torch import load_file

        self.copy(directory)
        for name in filter(TOKEN_HEAD.fullmatch, self.files):
            if (path := directory / name).suffix != PICKLED_HEAD:
                torch.save(load_file(path), path.with_suffix(PICKLED_HEAD))
                path.unlink()

    @property
    def has_token_heads(self) -> bool:
        """True if the checkpoint has the heads of BGE-M3."""
        return any(map(TOKEN_HEAD.fullmatch, self.files))

    def facts(self) -> list[dict]:
        """Return a dict for each module after the model, in order: `type`, `folder` and the content
        of the module's config.json."""
        files = [self.files.get(f"{module.folder}/{MODULE_CONFIG}") for module in self.modules]
        return [
            {"type": module.kind, "folder": module.folder, **(read_json(file) if file else {})}
            for module, file in zip(self.modules, files)
        ]


def replace_pickle(path: Path, copy: Path) -> None:
    """Replace `copy`, a copy of the weights `path` in torch's format, with a safetensors file in
    its folder.

    Raises ImportError where torch is not installed, and ValueError for a damaged file.
    """
    if not HAS_TORCH:
        raise torch_missing(f"reading {path}, a file of torch,")
    from .conversion.tensors import TensorFiles, write_safetensors

    files = TensorFiles(path)
    name = WEIGHTS if path.name == PICKLE else f"{path.stem}.safetensors"
    tensors = ((tensor, files.read(tensor)) for tensor in files.shapes)
    write_safetensors(copy.with_name(name), files.shapes, tensors)
    copy.unlink()


def companions(directory: Path) -> Companions:
    """Return the companion files and modules of the checkpoint in `directory`.

    Raises:
        FileNotFoundError: if a module lacks a file, or one of BGE-M3's heads is missing.
        ValueError: for a modules.json that is damaged or names a module that is not known.
    """
    modules = read_modules(directory / MODULES)
    names = [name for name in sorted(os.listdir(directory)) if COMPANION.fullmatch(name)]
    names += [name for module in modules for name in module_files(directory, module)]
    names += token_head_files(directory)
    for name in names:
        check_no_pointer(directory / name)
        if name.endswith(".json") and name != MODULES:
            read_json(directory / name)
    return Companions(modules, {name: directory / name for name in names})


def read_modules(path: Path) -> tuple[Module, ...]:
    """Return the modules after the model from the modules.json at `path`; none if it does not
    exist.

    Raises ValueError for a damaged file, one that does not begin with a Transformer, and unknown
    modules.
    """
    if not path.is_file():
        return ()
    check_no_pointer(path)
    with readers_errors(path):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, list) or not content:
        raise ValueError(f"{path} holds {shorten(content)}, expected a list of modules")
    first, *rest = [parse_module(path, entry) for entry in content]
    if first.kind not in MODELS or first.folder:
        raise ValueError(
            f"{path} begins with a {first.kind} in {first.folder!r}, expected a Transformer in ''"
        )
    unknown = [module.kind for module in rest if module.kind not in REQUIRED_FILES]
    if unknown:
        raise ValueError(
            f"{path} has modules of type {', '.join(unknown)}, expected "
            f"{', '.join(REQUIRED_FILES)}: convert leaves all out with --leave-out {MODULES}"
        )
    return tuple(rest)


def parse_module(path: Path, entry: object) -> Module:
    """Return the module of `entry`, an item of the modules.json at `path`. Raises ValueError for an
    item without a type and a folder.

    Classes have moved between versions of sentence-transformers, so only their names count.
    """
    kind, folder = (
        (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
    )
    if (
        not isinstance(kind, str)
        or not isinstance(folder, str)
        or not re.fullmatch(r"[\w-]*", folder)
    ):
        raise ValueError(
            f"{path} has the module {shorten(entry)}, expected its type and the name of its folder"
        )
    return Module(
        kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind, folder
    )


def module_files(directory: Path, module: Module) -> list[str]:
    """Return the paths of the config and the weights of `module`, relative to `directory`.

    If there are safetensors and pickled weights, only the safetensors count. Raises
    FileNotFoundError if one that the module needs is missing.
    """
    files = {}
    for names in ((MODULE_CONFIG,), MODULE_WEIGHTS):
        paths = [f"{module.folder}/{name}" for name in names]
        files[names] = first_file(directory, paths)
        if names in REQUIRED_FILES[module.kind] and not files[names]:
            raise FileNotFoundError(
                f"{directory} lacks {' or '.join(paths)}, which {MODULES} asks for"
            )
    return [name for names in files.values() for name in names]


def token_head_files(directory: Path) -> list[str]:
    """Return the names of the weights of BGE-M3's heads in `directory`, none if it has none.

    If there are safetensors and pickled weights, only the safetensors count. Raises
    FileNotFoundError if one of the heads is missing.
    """
    files = [first_file(directory, names) for names in HEAD_WEIGHTS]
    present = [name for names in files for name in names]
    if present and not all(files):
        missing = " or ".join(HEAD_WEIGHTS[files.index([])])
        raise FileNotFoundError(f"{directory} has {present[0]} of BGE-M3, expected {missing} too")
    return present


def first_file(directory: Path, names: Sequence[str]) -> list[str]:
    """Return [name] of the first of `names` that `directory` has, [] if it has none."""
    return [name for name in names if (directory / name).is_file()][:1]


def rival_weights(directory: Path, modules: Sequence[Module]) -> list[list[list[Path]]]:
    """Return the sets of weights of each part that has several, such as safetensors and pickles.

    The parts are the model in `directory`, each of `modules` and each head of BGE-M3. A set is a
    list of files, and the first one is read. A part with a damaged index of shards is left out.
    """
    folders = dict.fromkeys(["", *(module.folder for module in modules)])
    choices = [(directory / folder, MODULE_WEIGHTS) for folder in folders]
    choices += [(directory, names) for names in HEAD_WEIGHTS]
    rivals = []
    for folder, names in choices:
        with contextlib.suppress(ValueError, OSError):
            rivals.append(list(weight_sets(folder, names)))
    return [sets for sets in rivals if len(sets) > 1]
