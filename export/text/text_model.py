"""Protocols of a model as the tasks use it: its tokenizer, the settings of its export, and its
runs. `TextRuntime` implements them."""

import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Encoding, Tokenizer

from ..inference.export_info import ExportInfo
from .detokenizer import Detokenizer
from .languages import Choice, Languages
from .sentence_modules import SentenceModules
from .token_heads import TokenHeads
from .tokenization_spaces import CleaningDetokenizer
from .tokenizer_settings import TokenizerSettings


class TextModel(Protocol):
    """A model and its tokenizer.

    `path` is tokenizer.json, and `lock` protects the tokenizer's truncation. `runtime` has
    `max_tokens` and `outputs`, as `Runtime`. `has_cut` is True once there was a warning of texts
    that are truncated.
    """

    info: ExportInfo
    runtime: Any
    path: Path
    tokenizer: Tokenizer
    lock: threading.Lock
    has_cut: bool

    @property
    def tokenizer_settings(self) -> TokenizerSettings: ...

    @property
    def sentence_modules(self) -> SentenceModules: ...

    @property
    def token_heads(self) -> TokenHeads: ...

    def encode(self, texts: list[str], special_tokens: bool) -> list[Encoding]:
        """Return the encoding of each text, with or without special tokens."""

    def decode(self, rows: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each row of token ids, the same as `AutoTokenizer.batch_decode`.
        `skip_special_tokens` leaves out tokens such as the end token."""


class Translator(TextModel, Protocol):
    """A model that translates: texts become rows of token ids, and rows become texts."""

    languages: Languages

    @property
    def special_ids(self) -> frozenset[int]: ...

    def detokenizer(
        self, hidden: Collection[int] | None = None
    ) -> Detokenizer | CleaningDetokenizer:
        """Return an incremental detokenizer for one row of tokens."""

    @property
    def aligns_markup(self) -> bool:
        """True if markup in sentences is put around the words that theirs became."""

    @property
    def sentence_languages(self) -> dict[str | None, str]: ...

    def rows(self, texts: list[str], src_lang: Choice = None) -> list[list[int]]:
        """Return the token ids of each text in the language `src_lang`."""

    def encodings(self, texts: list[str], special_tokens: bool) -> Iterator[Encoding]:
        """Yield the encodings of `texts`, with or without special tokens."""

    def batch(self, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and mask (B, S) of `rows`, padded on the right."""
