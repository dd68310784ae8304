"""A model as the tasks use it: its tokenizer, the settings of its export, and what runs it."""

import contextlib
import functools
import threading
import warnings
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from ..inference.export_info import TARGET_TOKENIZER, ExportInfo
from ..inference.inputs import pad_sequences
from ..specs.alignment import ROLE as ALIGNMENT
from .checks import TokenizerErrors, check_texts, check_unicode, with_names
from .detokenizer import CleaningDetokenizer, Detokenizer, TokenNames, clean_up
from .languages import Choice, read_languages, sentence_languages
from .problems import pooling_problems, text_problems
from .sentence_modules import SentenceModules, TokenHeads, read_modules, read_token_heads
from .tokenizer_settings import (
    TokenizerSettings,
    read_tokenizer,
    read_tokenizer_settings,
)

TOGETHER = 64  # texts that the tokenizer cuts at once


class TextModel:
    """A model and its tokenizer. `runtime` runs the model: a `Runtime`, or an object with the same
    `info` and methods.

    Raises:
        FileNotFoundError: if the export has no tokenizer.
        ValueError: if tokenizer.json is damaged or was added later.
    """

    def __init__(self, runtime: Any):
        self.runtime = runtime
        self.info: ExportInfo = runtime.info
        self.path = self.info.directory / "tokenizer.json"
        tokenizer = read_tokenizer(self.info)
        if tokenizer is None:
            raise FileNotFoundError(
                f"{self.path} is missing: the checkpoint had no tokenizer, so this export takes "
                "only ids"
            )
        self.tokenizer = tokenizer
        # of generated texts, if it differs
        self.target_tokenizer = read_tokenizer(self.info, TARGET_TOKENIZER) or tokenizer
        self.languages = read_languages(self.info)
        self.lock = threading.Lock()  # protects the tokenizer, whose truncation some tasks change
        self.has_cut = False  # True once there was a warning of texts that are truncated
        # None of what generates does: there a long text blocks no short one.
        self.may_cut = not self.info.generates

    @functools.cached_property
    def sentence_languages(self) -> dict[str | None, str]:
        """The code of the language whose rules split sentences, by the name of the language."""
        return sentence_languages(self.info, self.languages)

    @functools.cached_property
    def tokenizer_settings(self) -> TokenizerSettings:
        return read_tokenizer_settings(self.info, self.tokenizer)

    @functools.cached_property
    def sentence_modules(self) -> SentenceModules:
        """The sentence modules of the export; without any, the mean of the token states.

        There is a warning for each of `pooling_problems` and `text_problems`.
        """
        info = self.info
        modules = info.manifest.get("sentence_modules") or []
        result = read_modules(modules, info, info.config["hidden_size"])
        for problem in (*pooling_problems(info), *text_problems(info)):
            warnings.warn(problem, stacklevel=1)
        return result

    @functools.cached_property
    def token_heads(self) -> TokenHeads:
        """The heads of BGE-M3."""
        return read_token_heads(self.info, self.info.config["hidden_size"])

    @functools.cached_property
    def aligns_markup(self) -> bool:
        """True if markup in sentences is put around the words that theirs became. Without an
        alignment graph it is False, with a warning."""
        aligns = ALIGNMENT in self.info.specs
        if not aligns:
            warnings.warn(
                f"{self.info.directory} has no alignment graph, so each text between two tags is "
                "translated as a sentence: export again with --target cpu",
                stacklevel=1,
            )
        return aligns

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokenizer's special tokens, which are no text."""
        return frozenset(
            id for id, token in self.tokenizer.get_added_tokens_decoder().items() if token.special
        )

    @functools.cached_property
    def token_names(self) -> TokenNames:
        return TokenNames(self.tokenizer, self.special_ids, self.path)

    def detokenizer(
        self, hidden: Collection[int] | None = None
    ) -> Detokenizer | CleaningDetokenizer:
        """Return an incremental detokenizer for one row of tokens, cleaning up spaces if the
        tokenizer does. `hidden` are the tokens that are no text, by default all special ones."""
        special_ids = self.special_ids if hidden is None else hidden
        detokenizer = Detokenizer(self.tokenizer, special_ids, self.path)
        cleans_up = self.tokenizer_settings.cleans_up
        return CleaningDetokenizer(detokenizer) if cleans_up else detokenizer

    def tokenize(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and mask (B, S) of `texts`, padded on the right. A decoder's prompts get no
        end token."""
        return self.batch(self.rows(texts))

    def batch(self, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        return pad_sequences(rows, self.info.config.get("pad_token_id"))

    def rows(self, texts: list[str], src_lang: Choice = None) -> list[list[int]]:
        """Return the token ids of each text in the language `src_lang`, None for the tokenizer's
        own. A decoder's prompt gets no end token.

        Raises ValueError unless `texts` are a list of strings that are not blank, and for a text
        that begins with an unknown language. Raises UsageError for an unknown `src_lang`.
        """
        texts = check_texts(texts)
        self.languages.check_words(texts)
        if src_lang is not None:
            return self.languages.rows(
                [encoding.ids for encoding in self.encodings(texts, special_tokens=False)], src_lang
            )
        encodings = self.encodings(texts, special_tokens=True)
        return [
            encoding.ids if "encoder" in self.info.specs else prompt(encoding)
            for encoding in encodings
        ]

    def encodings(self, texts: list[str], special_tokens: bool) -> Iterator[Encoding]:
        """Yield the encodings of `texts`, with or without special tokens.

        They are encoded a few at a time: an encoding takes hundreds of times the memory of its
        text.
        """
        for start in range(0, len(texts), TOGETHER):
            yield from self.encode(texts[start : start + TOGETHER], special_tokens)

    def decode(self, rows: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each row of token ids, the same as `AutoTokenizer.batch_decode`.
        `skip_special_tokens` leaves out tokens such as the end token."""
        with TokenizerErrors(self.path):
            texts = self.tokenizer.decode_batch(rows, skip_special_tokens=skip_special_tokens)
        return [clean_up(text) for text in texts] if self.tokenizer_settings.cleans_up else texts

    def encode(
        self, texts: list[str], special_tokens: bool, tokenizer: Tokenizer | None = None
    ) -> list[Encoding]:
        """Return the encoding of each text, with or without special tokens.

        The default `tokenizer` is that of source texts. Raises ValueError for a text that is not
        valid Unicode, or if the tokenizer fails on a text.
        """
        for text, name in with_names(texts):
            check_unicode(text, name)
        selected = tokenizer or self.tokenizer
        with self.lock if self.may_cut else contextlib.nullcontext(), TokenizerErrors(self.path):
            if len(texts) == 1:  # without the threads of a batch
                return [selected.encode(texts[0], add_special_tokens=special_tokens)]
            return selected.encode_batch(texts, add_special_tokens=special_tokens)


def prompt(encoding: Encoding) -> list[int]:
    """Return the token ids that a decoder continues.

    If the tokenizer ends a text with a special token, the tokens that it added are left out.
    """
    added = encoding.special_tokens_mask
    return (
        [token for token, is_added in zip(encoding.ids, added) if not is_added]
        if added[-1:] == [1]
        else encoding.ids
    )
