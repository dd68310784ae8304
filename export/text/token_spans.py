"""Spans of tokens in a source, and in a generated text."""

from collections.abc import Collection, Sequence

from tokenizers import Encoding

from .alignments import Span
from .detokenizer import Detokenizer
from .tokenization_spaces import CleaningDetokenizer


def source_spans(row: Sequence[int], encoding: Encoding) -> list[Span]:
    """Return the span in a text of each token of `row`, (0, 0) for tokens that are no text.

    `encoding` is that of the text without special tokens. `row` has its tokens, with special tokens
    or languages around them.
    """
    ids = encoding.ids
    starts = range(len(row) - len(ids) + 1)
    before = next((start for start in starts if [*row[start : start + len(ids)]] == ids), 0)
    spans = [(0, 0)] * before + list(encoding.offsets)
    return spans[: len(row)] + [(0, 0)] * (len(row) - len(spans))


def target_spans(
    tokens: Sequence[int],
    detokenizer: Detokenizer | CleaningDetokenizer,
    special_ids: Collection[int],
) -> tuple[str, list[Span]]:
    """Return the text of generated `tokens`, and the span of each in it.

    A special token has an empty span. Tokens whose text comes with that of a later one, such as
    parts of a character, have the span of that one. `detokenizer` is a new one.
    """
    text = ""
    spans: list[Span] = []
    waiting: list[int] = []  # numbers of tokens without their text yet
    for token in [*tokens, None]:
        piece = detokenizer.end() if token is None else detokenizer.add(token)
        span = len(text), len(text) + len(piece)
        text += piece
        if token is not None:
            waiting += [] if token in special_ids else [len(spans)]
            spans.append((span[0], span[0]))
        if piece:
            for number in waiting:
                spans[number] = span
            waiting = []
    return text, spans
