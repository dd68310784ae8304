"""The names of files in checkpoints and exports, and what both packages read of files: JSON,
hashes, metadata of cards, git-lfs pointers and headers of safetensors files."""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

MANIFEST, CARD = "manifest.json", "README.md"  # files of an export
CONFIG = "config.json"  # the config of a checkpoint
WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"  # unsharded weights of a checkpoint
TRITON_CONFIG = "config.pbtxt"  # the configuration of a Triton model
TRITON_MARK = "# Written by vanilla-transformer export."  # the first line of this configuration
CHECKPOINT_FILES = "files.json"  # the hashes in a checkpoint of a training run, written last
IMAGE_PROCESSOR = "preprocessor_config.json"
MODULES = "modules.json"  # sentence-transformers' modules after the model
# weights of BGE-M3's heads, which map the state of each token to a weight and to a vector; the
# files are safetensors, or as FlagEmbedding writes them
TOKEN_HEADS, PICKLED_HEAD = ("sparse_linear", "colbert_linear"), ".pt"
# key in the config of a checkpoint that we wrote for another library
VERSION_KEY = "vanilla_transformer_version"
VOCABULARIES = (  # a checkpoint with one of these has a tokenizer
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "source.spm",
    "target.spm",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer_config.json",  # the only file of a byte tokenizer
)
# for target text that is split differently from source text
TARGET_TOKENIZER = "target_tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    *VOCABULARIES,
    TARGET_TOKENIZER,
    "target_vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
)
FRONT_MATTER = re.compile(r"\s*---\r?\n(.*?)\r?\n---[ \t]*\r?(?:\n|$)", re.DOTALL)  # of a card
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # first bytes of every git-lfs pointer


def check_no_pointer(path: str | os.PathLike) -> None:
    """Raise ValueError if the file `path` is a pointer of git-lfs, of a clone that was made without
    git-lfs. A missing file is no error."""
    if not Path(path).is_file():
        return
    with open(path, "rb") as file:
        check_content(path, file.read(len(LFS_POINTER)))


def check_content(path: str | os.PathLike, content: bytes) -> None:
    """Raise ValueError if the `content` of the file `path` is a pointer of git-lfs."""
    if content.startswith(LFS_POINTER):
        raise ValueError(
            f"{path} is a git-lfs pointer, expected the file itself: run `git lfs pull` in the "
            "clone"
        )


def sha256(path: Path) -> str:
    """Return the SHA-256 of the file `path` in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_stamp(status: os.stat_result) -> tuple:
    """Return a tuple that changes if the file of `status` is replaced, modified or renamed."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def json_object(path: Path, content: bytes) -> dict[str, Any]:
    """Return the parsed `content` of the file `path`. Raise ValueError unless it is a JSON
    object."""
    check_content(path, content)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path} is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {value!r:.100}, expected a JSON object")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if the file is missing or holds anything
    else."""
    try:
        return json_object(path, path.read_bytes())
    except (OSError, ValueError):
        return {}


def card_metadata(path: Path) -> dict[str, Any]:
    """Return the YAML metadata at the start of the card `path`; empty if there is no card or they
    cannot be read.

    Values are strings, or lists and objects of them: `language: no` is Norwegian. Empty ones and
    null are left out.
    """
    import yaml  # of huggingface_hub, which tokenizers needs; takes 20 ms to import

    try:
        matched = FRONT_MATTER.match(path.read_text(encoding="utf-8-sig"))
        metadata = yaml.load(matched[1], yaml.BaseLoader) if matched else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    fields = metadata.items() if isinstance(metadata, dict) else ()
    return {name: value for name, value in fields if value not in ("", "null", "~")}


def write_json(path: Path, content: Any, sort_keys: bool = False) -> Path:
    """Write `content` to the file `path` as JSON, and return `path`."""
    text = json.dumps(content, indent=2, sort_keys=sort_keys, default=str, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def safetensors_header(file: BinaryIO) -> tuple[int, dict[str, Any]]:
    """Return the byte where the data of a safetensors `file` begin, and {name: facts}.

    The facts are dtype, shape and data_offsets. Raises ValueError or TypeError if it is no such
    file.
    """
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return 8 + size, header
