"""Texts to rows of tokens, and rows of similar length through the model together."""

import reprlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from tokenizers import Encoding

from ...errors import TooLong
from ...heads import HEADS, READS_CHOICES, Task, has_task
from ...inference.inputs import (
    bucket_by_length,
    check_positions,
    num_positions,
    pad_sequences,
)
from ..checks import Pair, TokenizerErrors, with_names
from ..text_model import TextModel

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


def plain_row(ids: list[int]) -> TokenRow:
    """Return the row of `ids`, all of token type 0."""
    return TokenRow(ids, [0] * len(ids))


def encode_texts(
    runtime: TextModel, texts: Sequence[str | Pair], cut: Cut | None = None
) -> list[Encoding]:
    """Return the encoding of each text, with special tokens. With `cut`, it is the first window;
    `overflowing` has the others. There is one warning of texts that are truncated. Raises TooLong
    if `cut` rejects a text."""
    tokenizer = runtime.tokenizer
    with runtime.lock, TokenizerErrors(runtime.path):
        if cut is not None and not cut.rejects:
            side = cut.side or runtime.tokenizer_settings.truncation_side
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
            warn_of_cut(runtime, cut)
    return rows


def warn_of_cut(runtime: TextModel, cut: Cut) -> None:
    """Warn that `cut` has truncated a text, once for each runtime."""
    if runtime.has_cut or cut.stride is not None:
        return
    runtime.has_cut = True
    seen = f"a text for {runtime.info.directory} has too many tokens"
    warnings.warn(
        f"{seen}, expected at most {cut.longest}: it is cut, as longer texts after it are",
        stacklevel=2,
    )


def decode(runtime: TextModel, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Return the text of the token ids `ids`, see `TextModel.decode`."""
    [text] = runtime.decode([list(ids)], skip_special_tokens)
    return text


def join(runtime: TextModel, tokens: Sequence[str]) -> str:
    """Return the text of `tokens`, which are strings, joined by the tokenizer's decoder."""
    decoder = runtime.tokenizer.decoder
    return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))


def require(runtime: TextModel, task: Task) -> None:
    """Raise ValueError if the head of the export does not support `task`."""
    if not has_task(runtime.info.architecture, task):
        seen = f"{task.method} does not support this export, a {runtime.info.architecture}"
        expected = [name for name, head in HEADS.items() if task in head.tasks]
        raise ValueError(f"{seen}, expected one of {', '.join(expected)}")


def run_rows(
    runtime: TextModel,
    rows: Sequence[Row],
    read: Callable[[Any, dict[str, np.ndarray]], T],
    names: Sequence[str] | None = None,
) -> list[T]:
    """Run the model and return `read(row, outputs)` of each row, in order. Outputs by name have the
    shape (S, ...) per token, without padding, or (...) per row.

    Rows of similar length run together. `names` are the names of rows in errors.

    Raises:
        ValueError: if a row has no tokens or too many, before the model runs; or as
            `Runtime.outputs`.
    """
    model, info = runtime.runtime, runtime.info
    for row, name in zip(rows, names or [name for _, name in with_names(rows)]):
        check_row(row.ids, name, info.config)
    arrays = [*pad_sequences([row.ids for row in rows], info.config.get("pad_token_id"))]
    if runtime.tokenizer_settings.has_types:
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
    runtime: TextModel,
    windows: Sequence[Sequence[Row]],
    read: Callable[[Any, dict[str, np.ndarray]], T],
    names: Sequence[str],
) -> list[list[T]]:
    """Return the results of `run_rows` for the windows of each text. `names` are those of the
    texts."""
    rows = [row for group in windows for row in group]
    row_names = [name for name, group in zip(names, windows) for _ in group]
    results = iter(run_rows(runtime, rows, read, row_names))
    return [[next(results) for _ in group] for group in windows]


def check_row(ids: list[int], name: str, config: dict) -> None:
    if not ids:
        raise ValueError(f"{name} has no tokens, expected words that the tokenizer knows")
    if len(ids) <= config["max_position_embeddings"]:
        return
    row = np.array([ids])
    try:
        check_positions(num_positions(row, np.ones_like(row), config), config)
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


def label_names(runtime: TextModel) -> list[str]:
    """Return the names of the labels in the order of the scores.

    Raises:
        ValueError: if `id2label` lacks a label.
    """
    names = runtime.info.config["id2label"]
    missing = [number for number in range(len(names)) if str(number) not in names]
    if missing:
        seen = (
            f"{runtime.info.directory / 'config.json'} has the id2label keys "
            f"{reprlib.repr(list(names))}"
        )
        raise ValueError(
            f"{seen}, expected all numbers from 0 to {len(names) - 1}: {missing[0]} is missing"
        )
    return [str(names[str(number)]) for number in range(len(names))]
