"""The files of a checkpoint: where they are, JSON, weights and tokenizers. Without torch and
transformers."""

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open

from .files import (
    CONFIG,
    PICKLED_HEAD,
    TOKEN_HEADS,
    TOKENIZER_FILES,
    VOCABULARIES,
    WEIGHTS,
    check_no_pointer,
    json_object,
    write_json,
)
from .generation_options import KINDS
from .options import COUNT_OR_0, FLAG, NUMBER, ONE_OR_MORE_TOKENS, as_list
from .variants import index_name, variant_hint

GENERATION_CONFIG = "generation_config.json"
FLOATS = ("F64", "F32", "F16", "BF16")
DTYPES = (*FLOATS, "I64", "I32", "U8", "BOOL")  # dtypes of tensors in safetensors files
# files of a Hub repository; its folders hold exports and the checkpoints of a training run
FILES = ("*.json", "*.txt", "*.spm", "*.model", "*.jinja", "*.safetensors")
FILES += tuple(f"{head}{PICKLED_HEAD}" for head in TOKEN_HEADS)
# kinds of fields of a generation config that are no options of ours
OTHER_KINDS = {
    "encoder_no_repeat_ngram_size": COUNT_OR_0,
    "typical_p": NUMBER,
    **dict.fromkeys(("use_cache", "output_attentions", "output_hidden_states"), FLAG),
    **dict.fromkeys(("output_scores", "output_logits"), FLAG),
}
WIDEST = {int: COUNT_OR_0, float: NUMBER}  # kinds of numbers that have no effect in some modes
# fields of a tokenizer's config in which transformers records where it was loaded from
LOADING_FIELDS = ("is_local", "local_files_only")
TOKENIZER_OF_BYTES = "ByT5Tokenizer"
OF_THE_HUB = ("constraints", "dola_layers", "force_words_ids", "penalty_alpha")
INPUT_NAMES = ["input_ids", "attention_mask"]  # inputs of a `PreTrainedTokenizerFast`
# Published files have -1 for a missing token.
OPTIONAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def checkpoint_directory(
    source: str | os.PathLike,
    files: tuple[str, ...] = FILES,
    commit: str | None = None,
    **options: Any,
) -> Path:
    """Return the directory `source`, or the cached one of the Hub id `source`.

    The `files` of a Hub id, shell patterns of names, are downloaded if they are not in the cache.
    `commit` is the name of the directory that an earlier call returned, so that all files are of
    one commit. `options` are those of `huggingface_hub.snapshot_download`, such as `revision`.

    Raises:
        FileNotFoundError: if it is neither, and where the Hub cannot be reached and the cache may
            have a part of them only.
        NotADirectoryError: if it is a file.
    """
    path, name, expected = (
        Path(source),
        os.fspath(source),
        "expected a checkpoint directory or a Hub id",
    )
    if name and path.is_dir():
        return path
    if name and os.path.lexists(path):
        hint = f", such as {path.parent}" if (path.parent / CONFIG).is_file() else ""
        raise NotADirectoryError(f"{source} is not a directory, {expected}{hint}")
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise FileNotFoundError(f"{source or repr(name)} does not exist, {expected}") from None
    if commit is not None:
        options["revision"] = commit
    partial = "the cache has only a part of it and the Hub cannot be reached"
    try:
        ignored = None if any("/" in file for file in files) else ["*/*"]
        directory = Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=list(files), ignore_patterns=ignored, **options
            )
        )
    except RepositoryNotFoundError:
        reason = "the Hub has no repository of this name, or none that this login may read"
    except IncompleteSnapshotError:
        reason = partial
    except LocalEntryNotFoundError:  # with a commit, of a single file
        reason = partial if commit else "it is not in the cache and the Hub cannot be reached"
    except (OSError, ValueError) as error:  # errors of the Hub client
        reason = one_line(error)
    else:
        if files == FILES:
            check_cached(name, directory)
        return directory
    raise FileNotFoundError(f"{source} is neither a checkpoint directory nor on the Hub: {reason}")


def check_cached(name: str, directory: Path) -> None:
    """Raise FileNotFoundError if it is unknown whether the repository `name` has a tokenizer.

    `directory` is its snapshot in the cache of the Hub. Without a tokenizer there, the cached list
    of the repository's files decides. `from_pretrained` caches no such list, only the files that it
    reads: the tokenizer may then be missing because it was never downloaded.
    """
    if has_tokenizer(directory):
        return
    try:
        huggingface_hub.get_cached_repo_tree(name, revision=directory.name)
    except CachedRepoTreeNotFoundError:
        remedy = f"run `hf download {name}` where the Hub can be reached, or give a directory"
        raise FileNotFoundError(
            f"the cache has no tokenizer of {name}, and cannot say whether the Hub has one: "
            f"{remedy}"
        ) from None


def check_tokenizer_files(directory: Path) -> None:
    """Raise ValueError if a tokenizer file in `directory` is a git-lfs pointer.

    A tokenizer would read the pointer's lines as its vocabulary.
    """
    for name in TOKENIZER_FILES:
        check_no_pointer(directory / name)


def has_tokenizer(directory: Path) -> bool:
    """Return True if `directory` has tokenizer files, or a tokenizer class that needs none."""
    if any((directory / name).is_file() for name in VOCABULARIES):
        return True
    path = directory / CONFIG
    return path.is_file() and read_json(path).get("tokenizer_class") == TOKENIZER_OF_BYTES


def for_every_version(directory: Path, changes: dict | None = None) -> None:
    """Rewrite tokenizer_config.json in `directory`, if it exists, so that transformers 4 reads it
    too.

    `changes` are fields to set. transformers 5 has new names for the class of a fast tokenizer and
    for extra special tokens. Its defaults are written out: without them transformers 4 and
    Transformers.js remove spaces from decoded texts.
    """
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return
    before = read_json(path)
    content = {name: value for name, value in before.items() if name not in LOADING_FIELDS} | (
        changes or {}
    )
    content.setdefault("clean_up_tokenization_spaces", False)
    if content.get("tokenizer_class") == "TokenizersBackend":
        # Without input names, transformers 4 would add token types.
        content = {"model_input_names": INPUT_NAMES, **content}
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    if content != before:
        write_json(path, content, sort_keys=True)


def check_generation(path: Path, vocab_size: int) -> None:
    """Raise ValueError for a wrong value in the generation_config.json at `path`, if it exists.

    Token ids, except those of bos and eos, must be below `vocab_size`. Null is valid everywhere.
    Numbers may be out of range, as they may have no effect. transformers notices most wrong types
    only while it generates.
    """
    content = read_json(path) if path.is_file() else {}
    for name, value in content.items():
        if value is not None and (fault := generation_fault(name, value, vocab_size)):
            raise ValueError(f"{path} has {name} {shorten(value)}, {fault}")


def generation_fault(name: str, value: object, vocab_size: int) -> str | None:
    """Return what is expected instead of `value` in the field `name` of a generation config, or
    None if the value is valid."""
    if name in OF_THE_HUB:
        return "which runs code from the Hub in transformers: expected none"
    kind = KINDS.get(name) or OTHER_KINDS.get(name)
    if name.endswith("_token_id"):
        tokens = as_list(value) if kind is ONE_OR_MORE_TOKENS else [value]
        # a model need not be able to generate these two
        size = 2**31 if name in ("bos_token_id", "eos_token_id") else vocab_size
        is_right = tokens and all(type(token) is int and 0 <= token < size for token in tokens)
        return (
            None if is_right or is_absent_token(name, value) else f"expected one of [0, {size - 1}]"
        )
    kind = kind and WIDEST.get(kind.read, kind)
    return None if kind is None or kind.holds(value) else f"expected {kind.expected}"


def is_absent_token(name: str, value: object) -> bool:
    """Return True if `value` is negative and `name` a special token's field: files mean that there
    is no such token."""
    return name in OPTIONAL_TOKENS and type(value) is int and value < 0


def weight_files(directory: Path, names: tuple[str, ...] = (WEIGHTS,)) -> list[Path]:
    """Return the paths of the weights in `directory`: the first file of `names` that exists, or its
    shards, which an index names.

    Raises:
        FileNotFoundError: without weights, or if a shard is missing.
        ValueError: for an invalid index, and for a git-lfs pointer.
    """
    for paths in weight_sets(directory, names):
        return paths
    files = ", ".join(sorted(os.listdir(directory))[:10]) or "nothing"
    raise FileNotFoundError(
        f"{directory} has no weights: expected {' or '.join(names)}, found "
        f"{files}{variant_hint(directory, names)}"
    )


def weight_sets(directory: Path, names: tuple[str, ...]) -> Iterator[list[Path]]:
    """Yield the paths of each set of weights in `directory`: files of `names`, and their shards.

    The first set is the one that is read. Raises as `weight_files`.
    """
    for name in names:
        if (directory / name).is_file():
            check_no_pointer(directory / name)
            yield [directory / name]
        index = directory / index_name(name)
        if index.is_file():
            yield shards(index, Path(name).suffix)


def shards(index: Path, suffix: str) -> list[Path]:
    content = read_json(index)
    weight_map = content.get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise ValueError(
            f"{index} has the weight_map {shorten(weight_map)}, expected an object with the file "
            "name of each tensor"
        )
    if not isinstance(content.get("metadata", {}), dict):
        raise ValueError(
            f"{index} has the metadata {shorten(content['metadata'])}, expected a JSON object"
        )
    names = sorted(set(weight_map.values()))
    wrong = [name for name in names if Path(name).name != name or Path(name).suffix != suffix]
    if wrong:
        raise ValueError(f"{index} names {shorten(wrong)}, expected {suffix} files beside it")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{index.parent} lacks {', '.join(missing[:5])}, which {index.name} names"
        )
    for name in names:
        check_no_pointer(index.parent / name)
    return [index.parent / name for name in names]


# ------------------------------------------------------------------------------------------ weights


def stored_tensors(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return {name: (shape, dtype)} of the tensors in a safetensors file, with dtypes such as
    "F32".

    Only the header is read.

    Raises:
        ValueError: for an incomplete file, and for an unsupported dtype.
    """
    facts = {}
    try:
        # reads the header and compares it with the size of the file
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118, it is no dict
                part = tensors.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    raise ValueError(
                        f"{file}: {name} is of type {part.get_dtype()}, expected one of {[*DTYPES]}"
                    )
                facts[name] = tuple(part.get_shape()), part.get_dtype()
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a complete safetensors file ({file.stat().st_size} bytes): {error}"
        ) from None
    return facts


def check_tensors(
    architecture: str,
    expected: dict[str, tuple[int, ...]],
    tied: Collection[str],
    stored: dict[str, tuple[tuple[int, ...], str]],
    where: Path,
) -> None:
    """Raise ValueError unless the tensors in files are the `expected` ones, {name: shape}, in
    floating point.

    `tied` names may be missing. `stored` is {name: (shape, dtype)} of the files. Its names may
    begin with "model."; those of `expected` and `tied` must not. Errors name the class
    `architecture` and the checkpoint `where`.
    """
    shapes = {bare(name): shape for name, (shape, _) in stored.items()}
    other = {
        name: f"{shapes[name]} for {expected[name]}" for name in expected.keys() & shapes.keys()
    }
    problems = {
        "missing": expected.keys() - tied - shapes.keys(),
        "unexpected": shapes.keys() - expected.keys(),
        "of another shape": {
            f"{name} {other[name]}" for name in other if shapes[name] != expected[name]
        },
        "not floating point": {name for name, (_, dtype) in stored.items() if dtype not in FLOATS},
    }
    for problem, names in problems.items():
        if names:
            some = ", ".join(sorted(names)[:5])
            raise ValueError(
                f"the weights of {where} do not fit {architecture}: {len(names)} are "
                f"{problem}: {some}"
            )


def bare(name: str) -> str:
    """Return `name` without the prefix "model.", which classes with a head have and base models
    lack.

    Each of them loads the other's files.
    """
    return name.removeprefix("model.")


# ------------------------------------------------------------------------------------------- errors


def read_json(path: Path) -> dict:
    """Return the JSON object in the file `path`.

    Raises:
        ValueError: if it holds something else.
    """
    return json_object(path, path.read_bytes())


@contextlib.contextmanager
def readers_errors(path: Path) -> Iterator[None]:
    """Turn an error that a library raises while it reads `path` into a ValueError that names
    `path`.

    Panics of Rust libraries are included. OSError and ImportError pass unchanged, because their
    messages already name the file.
    """
    try:
        yield
    except (OSError, ImportError):  # their messages already name the file
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # of Rust; not an Exception
        if not (is_panic or isinstance(error, Exception)):
            raise
        raise ValueError(f"{path}: {one_line(error)}") from None


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (
        text
        if isinstance(error, ValueError | StrictDataclassError)
        else f"{type(error).__name__}: {text}"
    )


def shorten(value: object) -> str:
    return f"{value!r:.100}"
