"""The tokenizer of a checkpoint of another family, with a tokenizer.json, which is all that an export's runtime reads.

Most families have one, or transformers makes it from a SentencePiece model. Those that transformers runs in Python get one
here: Marian, M2M100 and ByT5.
"""

from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer
from transformers import NllbTokenizer, PreTrainedTokenizerBase

from ...checkpoint import has_tokenizer, load_tokenizer, read_raw_config, readers_errors, save_tokenizer
from ...files import TARGET_TOKENIZER
from . import byt5, m2m_100, marian
from .sentencepiece_model import parse

TOKENIZER = "tokenizer.json"
MODELS = ("spiece.model", "sentencepiece.bpe.model")  # of SentencePiece


@dataclass(frozen=True)
class FoundTokenizer:
    """A checkpoint's tokenizer; what is saved beside its own files, by name; and what is to be known of it, in words."""

    tokenizer: PreTrainedTokenizerBase
    backends: dict[str, Tokenizer] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def save(self, directory: Path, positions: int | None = None) -> None:
        """Writes its files; texts are at most as long as a table of `positions` if there is one."""
        save_tokenizer(self.tokenizer, directory, positions and min(positions, self.tokenizer.model_max_length))
        for name, backend in self.backends.items():
            backend.save(str(directory / name))


def find_tokenizer(directory: Path) -> FoundTokenizer | None:
    """That of the checkpoint in `directory`; `None` without files of one.

    Raises:
        FileNotFoundError: for a file that is missing.
        ImportError: for a SentencePiece model without the packages that read it.
        ValueError: for files that are damaged, or whose tokenizer cannot be made, see `marian` and `sentencepiece_model`.
    """
    if not has_tokenizer(directory):
        return None
    if any((directory / name).is_file() for name in ("source.spm", "target.spm")):
        tokenizer, target, notes = marian.make_tokenizers(directory)
        return FoundTokenizer(tokenizer, {TARGET_TOKENIZER: target}, notes)
    tokenizer = load(directory)
    kind = type(tokenizer).__name__
    if kind == "M2M100Tokenizer":
        backend, notes = m2m_100.make_backend(tokenizer, directory)
        return FoundTokenizer(tokenizer, {TOKENIZER: backend}, notes)
    if kind == "ByT5Tokenizer":
        return FoundTokenizer(tokenizer, {TOKENIZER: byt5.make_backend(tokenizer)})
    if not tokenizer.is_fast:
        remedy = "exports of it take and give only token ids, unless you add a tokenizer.json"
        return FoundTokenizer(tokenizer, notes=[f"no tokenizer.json can be made of a {kind}: {remedy}"])
    return FoundTokenizer(tokenizer)


def load(directory: Path) -> PreTrainedTokenizerBase:
    """As `AutoTokenizer`; with errors that say which file is wrong, where transformers makes a tokenizer of a model."""
    models = [path for name in MODELS if (path := directory / name).is_file()]
    if not models or (directory / TOKENIZER).is_file():
        return load_tokenizer(directory)
    parse(models[0])
    is_named = any((directory / name).is_file() for name in ("vocab.json", "tokenizer_config.json"))
    if is_named or read_raw_config(directory)[0]["model_type"] != "m2m_100":
        return load_tokenizer(directory)
    with readers_errors(models[0]):  # of NLLB, which has the model type of M2M100 and no vocab.json
        return NllbTokenizer.from_pretrained(directory)
