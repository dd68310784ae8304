"""A model as the tasks use it: texts become rows of tokens, and rows of similar length run
together."""

import contextlib
import dataclasses
import functools
import reprlib
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from tokenizers import Encoding, Tokenizer

from ..engine.inputs import Generated
from ..errors import TooLong
from ..heads import HEADS, READS_CHOICES, Task, has_task
from ..inference.export_info import TARGET_TOKENIZER, ExportInfo
from ..inference.inputs import bucket_by_length, check_row_positions, pad_sequences
from ..inference.logits import row_seeds
from ..inference.options import Options
from ..specs.alignment import ROLE as ALIGNMENT
from .checks import Pair, TokenizerErrors, check_texts, check_unicode, with_names
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


MAX_WINDOWS = 2000  # of a text in a request


class Cut(NamedTuple):
    """The truncation of texts to `longest` tokens. `strategy` selects the part of a pair that is
    cut. `side` is the tokenizer's by default. If it `rejects`, a longer text is an error instead.
    With `stride`, nothing is lost: windows of one text follow, which share that number of tokens.
    """

    longest: int
    strategy: str = "longest_first"
    stride: int | None = None
    side: str | None = None
    rejects: bool = False

    def fits(self, length: int) -> bool:
        """Return True if a row of `length` tokens is not cut. Raises TooLong if it is rejected."""
        if length > self.longest and self.rejects:
            raise TooLong(
                f"a text has {length} tokens, expected at most {self.longest} without truncation"
            )
        return length <= self.longest

    def cut_ids(self, ids: list[int]) -> list[int]:
        """Return the first `longest` of `ids`, or the last ones if `side` is "left"."""
        if self.fits(len(ids)):
            return ids
        return ids[-self.longest :] if self.side == "left" else ids[: self.longest]


class TokenRow(NamedTuple):
    """Token ids that replace an `Encoding`, and the token type of each."""

    ids: list[int]
    type_ids: list[int]


Row = Encoding | TokenRow
T = TypeVar("T")
Outputs = dict[str, np.ndarray]  # of a graph, by name


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
        # False for models that generate: then no lock is held, and a long text delays no short one
        self.may_cut = not self.info.generates

    def close(self) -> None:
        """Free the memory of the graphs, see `Runtime.close`."""
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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

    # ------------------------------------------------------------- rows through the model

    def encode_texts(self, texts: Sequence[str | Pair], cut: Cut | None = None) -> list[Encoding]:
        """Return the encoding of each text, with special tokens. With `cut`, it is the first
        window; `overflowing` has the others. There is one warning of texts that are truncated.
        Raises TooLong if `cut` rejects a text."""
        tokenizer = self.tokenizer
        with self.lock, TokenizerErrors(self.path):
            if cut is not None and not cut.rejects:
                side = cut.side or self.tokenizer_settings.truncation_side
                tokenizer.enable_truncation(
                    cut.longest, strategy=cut.strategy, stride=cut.stride or 0, direction=side
                )
            try:
                rows = tokenizer.encode_batch(list(texts))
            finally:
                tokenizer.no_truncation()
        if cut is not None:
            cut.fits(max((len(row.ids) for row in rows), default=0))
            if any(len(row.ids) == cut.longest and row.overflowing for row in rows):
                self.warn_of_cut(cut)
        return rows

    def warn_of_cut(self, cut: Cut) -> None:
        """Warn that `cut` has truncated a text, once for each model."""
        if self.has_cut or cut.stride is not None:
            return
        self.has_cut = True
        seen = f"a text for {self.info.directory} has too many tokens"
        warnings.warn(
            f"{seen}, expected at most {cut.longest}: it is cut, as longer texts after it are",
            stacklevel=2,
        )

    def decode_row(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of the token ids `ids`, see `decode`."""
        [text] = self.decode([list(ids)], skip_special_tokens)
        return text

    def join_tokens(self, tokens: Sequence[str]) -> str:
        """Return the text of `tokens`, which are strings, joined by the tokenizer's decoder."""
        decoder = self.tokenizer.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    def require(self, task: Task) -> None:
        """Raise ValueError if the head of the export does not support `task`."""
        if not has_task(self.info.architecture, task):
            seen = f"{task.method} does not support this export, a {self.info.architecture}"
            expected = [name for name, head in HEADS.items() if task in head.tasks]
            raise ValueError(f"{seen}, expected one of {', '.join(expected)}")

    def run_rows(
        self,
        rows: Sequence[Row],
        read: Callable[[Any, Outputs], T],
        names: Sequence[str] | None = None,
    ) -> list[T]:
        """Run the model and return `read(row, outputs)` of each row, in order. Outputs by name have
        the shape (S, ...) per token, without padding, or (...) per row.

        Rows of similar length run together. `names` are the names of rows in errors.

        Raises:
            ValueError: if a row has no tokens or too many, before the model runs; or as
                `Runtime.outputs`.
        """
        model, info = self.runtime, self.info
        for row, name in zip(rows, names or [name for _, name in with_names(rows)]):
            check_row(row.ids, name, info.config)
        arrays = [*pad_sequences([row.ids for row in rows], info.config.get("pad_token_id"))]
        if self.tokenizer_settings.has_types:
            arrays.append(pad_sequences([row.type_ids for row in rows], 0)[0])
        tensors = info.specs["encoder"].outputs
        per_token = {tensor.name for tensor in tensors if tensor.shape[1:2] == ("source_length",)}
        results: list[Any] = [None] * len(rows)
        for indices, length in bucket_by_length(arrays[1], model.max_tokens):
            batch = [array[indices, :length] for array in arrays]
            if HEADS[info.architecture].reads == READS_CHOICES:
                batch = [array[:, None] for array in batch]
            outputs = model.outputs(*batch)
            for position, index in enumerate(indices.tolist()):
                size = len(rows[index].ids)
                row_outputs = {
                    name: values[position, :size] if name in per_token else values[position]
                    for name, values in outputs.items()
                }
                results[index] = read(rows[index], row_outputs)
        return results

    def run_windows(
        self,
        windows: Sequence[Sequence[Row]],
        read: Callable[[Any, Outputs], T],
        names: Sequence[str],
    ) -> list[list[T]]:
        """Return the results of `run_rows` for the windows of each text. `names` are those of the
        texts."""
        rows = [row for group in windows for row in group]
        row_names = [name for name, group in zip(names, windows) for _ in group]
        results = iter(self.run_rows(rows, read, row_names))
        return [[next(results) for _ in group] for group in windows]

    def label_names(self) -> list[str]:
        """Return the names of the labels in the order of the scores.

        Raises:
            ValueError: if `id2label` lacks a label.
        """
        names = self.info.config["id2label"]
        missing = [number for number in range(len(names)) if str(number) not in names]
        if missing:
            seen = (
                f"{self.info.directory / 'config.json'} has the id2label keys "
                f"{reprlib.repr(list(names))}"
            )
            raise ValueError(
                f"{seen}, expected all numbers from 0 to {len(names) - 1}: {missing[0]} is missing"
            )
        return [str(names[str(number)]) for number in range(len(names))]

    # ------------------------------------------------------------------------------- generation

    def generate_rows(
        self,
        rows: list[list[int]],
        options: Sequence[Options],
        prefixes: list[list[int]] | None = None,
        seeds: Sequence[int] | None = None,
        is_scored: bool = False,
        are_aligned: Sequence[bool] | None = None,
        unknown_token: int | None = None,
    ) -> list[Generated]:
        """Return the B * N results for `rows` of token ids. Their tokens follow the start token or
        the prompt, and have the prefix.

        Rows with prefixes of the same length and one target language run together.

        Args:
            options: those of each row, which differ in their target language only.
            prefixes: tokens that each result begins with, one list for each row; by default none.
            seeds: seeds of sampling, one for each row; by default derived from that of `options`.
            is_scored: True if results have scores.
            are_aligned: True for each row whose results have alignments; by default none has.
            unknown_token: token whose results have alignments too.
        """
        count = len(rows)
        if seeds is None:
            seeds = row_seeds(options[0].seed, count)
        prefixes, are_aligned = prefixes or [[]] * count, are_aligned or [False] * count
        kinds: dict[tuple[int, int], list[int]] = {}
        for row in range(count):
            kinds.setdefault((len(prefixes[row]), id(options[row])), []).append(row)
        by_row: dict[int, list[Generated]] = {}
        for (length, _), indices in kinds.items():
            shared = options[indices[0]]
            first = self.languages.first_tokens(shared)
            starts = np.array([first + prefixes[row] for row in indices]) if length else None
            padded = self.batch([rows[row] for row in indices])
            input_seeds = None if seeds is None else [seeds[row] for row in indices]
            inputs = self.runtime.inputs(*padded, starts, shared, is_scored, input_seeds)
            if any(are_aligned) or unknown_token is not None:
                inputs = [
                    dataclasses.replace(
                        checked, is_aligned=are_aligned[row], unknown_token=unknown_token
                    )
                    for row, checked in zip(indices, inputs, strict=True)
                ]
            results = self.runtime.sequences(inputs)
            for row, checked, sequences in zip(indices, inputs, results, strict=True):
                by_row[row] = sequences
                if checked.source and (prefix := checked.prompt[1:]):
                    by_row[row] = [
                        dataclasses.replace(sequence, tokens=[*prefix, *sequence.tokens])
                        for sequence in sequences
                    ]
        return [result for row in range(count) for result in by_row[row]]


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


def plain_row(ids: list[int]) -> TokenRow:
    """Return the row of `ids`, all of token type 0."""
    return TokenRow(ids, [0] * len(ids))


def check_row(ids: list[int], name: str, config: dict) -> None:
    if not ids:
        raise ValueError(f"{name} has no tokens, expected words that the tokenizer knows")
    if len(ids) <= config["max_position_embeddings"]:
        return
    try:
        check_row_positions(ids, config)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_windows(name: str, length: int, new: int, max_windows: int | None) -> None:
    """Raise TooLong if the text `name` of `length` tokens needs more than `max_windows` windows,
    each with `new` more tokens. None is no limit."""
    if max_windows is not None and length // new > max_windows:
        raise TooLong(
            f"{name} needs {length // new} windows, expected at most {max_windows}: use shorter "
            "texts or less overlap"
        )
