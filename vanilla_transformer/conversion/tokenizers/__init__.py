"""The tokenizers of other families' checkpoints, as the tokenizer.json that an export's runtime
reads."""

from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ...checkpoint import check_tokenizer, load_tokenizer, save_tokenizer
from ...checkpoint_files import has_tokenizer
from . import byt5, m2m_100, marian, nllb
from .sentencepiece_model import parse

logger = logging.get_logger(__name__)

TOKENIZER = "tokenizer.json"
MODELS = ("spiece.model", "sentencepiece.bpe.model")  # SentencePiece models


@dataclass(frozen=True)
class FoundTokenizer:
    """A checkpoint's tokenizer, backends that are saved beside its files (by name), and notes for
    users."""

    tokenizer: PreTrainedTokenizerBase
    backends: dict[str, Tokenizer] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def save(self, directory: Path, positions: int | None = None) -> None:
        """Write the tokenizer's files into `directory`.

        `positions` is the length of the model's position table. The tokenizer's `model_max_length`
        becomes at most that; None leaves it as it is.
        """
        save_tokenizer(
            self.tokenizer, directory, positions and min(positions, self.tokenizer.model_max_length)
        )
        for name, backend in self.backends.items():
            backend.save(str(directory / name))


def find_tokenizer(directory: Path) -> FoundTokenizer | None:
    """Return the tokenizer of the checkpoint in `directory`, or `None` without tokenizer files.

    The notes of the tokenizer are logged as warnings. They are those in the result.

    Raises:
        FileNotFoundError: for a file that is missing.
        ImportError: for a SentencePiece model without the packages that read it.
        ValueError: for files that are damaged, or whose tokenizer has rules that the `tokenizers`
            library does not have.
    """
    check_tokenizer(directory)
    tokenizer = build_tokenizer(directory) if has_tokenizer(directory) else None
    for note in tokenizer.notes if tokenizer else ():
        logger.warning(f"{directory}: {note}")
    return tokenizer


def build_tokenizer(directory: Path) -> FoundTokenizer:
    if any((directory / name).is_file() for name in ("source.spm", "target.spm")):
        tokenizer, notes = marian.make_tokenizer(directory)
        return FoundTokenizer(tokenizer, notes=notes)
    tokenizer = load(directory)
    kind = type(tokenizer).__name__
    if kind == "M2M100Tokenizer":
        backend, notes = m2m_100.make_backend(tokenizer, directory)
        return FoundTokenizer(tokenizer, {TOKENIZER: backend}, notes)
    if kind == "ByT5Tokenizer":
        return FoundTokenizer(tokenizer, {TOKENIZER: byt5.make_backend(tokenizer)})
    if not tokenizer.is_fast:
        remedy = "its exports take and return only token ids, unless you add a tokenizer.json"
        return FoundTokenizer(
            tokenizer, notes=[f"a {kind} cannot be converted to tokenizer.json: {remedy}"]
        )
    return FoundTokenizer(tokenizer)


def load(directory: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in `directory` like `AutoTokenizer`, or NLLB's with all its languages.

    Raises ImportError or ValueError that names the file, for a SentencePiece model that cannot be
    read.
    """
    models = [directory / name for name in MODELS if (directory / name).is_file()]
    if not models or (directory / TOKENIZER).is_file():
        return load_tokenizer(directory)
    parse(models[0])
    return nllb.make_tokenizer(directory) if nllb.is_bare(directory) else load_tokenizer(directory)
