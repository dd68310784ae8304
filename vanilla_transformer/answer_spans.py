"""The spans of a context that answer a question, by the probabilities of their ends (Devlin et al.
2019, section 4.2). Without torch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding


class Window(NamedTuple):
    """A part of a context that the model has read, after or before the question.

    Attributes:
        encoding: the tokens of the question and the context.
        sequence: the position of the context in the pair, 0 or 1.
        tokens: the positions of the context's tokens.
        start, end: the probability of each of `tokens` to begin and to end the answer.
        null_score: the probability that the CLS token does both, or 0 without one: no answer.
    """

    encoding: Encoding
    sequence: int
    tokens: list[int]
    start: np.ndarray
    end: np.ndarray
    null_score: float


def read_window(
    encoding: Encoding, logits: Sequence[np.ndarray], sequence: int, cls_id: int | None
) -> Window:
    """Return the window `encoding` with the probabilities of `logits`, those of starts and of ends,
    each (S,).

    `sequence` is the position of the context in the pair, and `cls_id` the id of the CLS token.
    """
    tokens = [index for index, position in enumerate(encoding.sequence_ids) if position == sequence]
    cls = [index for index, token in enumerate(encoding.ids) if token == cls_id][:1]
    cls = [index for index in cls if index not in tokens]
    powers = [
        np.exp(row - row.max(initial=-np.inf))
        for row in (values[tokens + cls] for values in logits)
    ]
    start, end = (row / row.sum() for row in powers)
    null_score = float(start[-1] * end[-1]) if cls else 0.0
    return Window(encoding, sequence, tokens, start[: len(tokens)], end[: len(tokens)], null_score)


def find_answers(
    windows: Sequence[Window],
    context: str,
    top_k: int,
    max_answer_len: int,
    handle_impossible_answer: bool,
    align_to_words: bool,
) -> list[dict[str, Any]]:
    """Return the `top_k` best answers in the `windows` of a context, best first.

    An answer is `{"score": float, "start": int, "end": int, "answer": str}`. Spans with the same
    text, ignoring case, are one answer, and their scores are added.

    Args:
        max_answer_len: maximum number of tokens of an answer.
        handle_impossible_answer: whether the empty answer competes, with the lowest null score.
        align_to_words: whether answers are extended to whole words.
    """
    # spans may become equal when they are extended to words, so more are needed
    count = 2 * top_k + 10 if align_to_words else top_k
    answers: dict[str, dict] = {}
    for window in windows:
        for first, last, score in best_spans(window, max_answer_len, count):
            start, end = find_characters(window, first, last, align_to_words)
            text = context[start:end]
            answer = {"score": 0.0, "start": start, "end": end, "answer": text}
            answers.setdefault(text.lower(), answer)["score"] += score
    results = list(answers.values())
    if handle_impossible_answer:
        null_score = min(window.null_score for window in windows)
        results.append({"score": null_score, "start": 0, "end": 0, "answer": ""})
    return sorted(results, key=lambda answer: -answer["score"])[:top_k]


def best_spans(window: Window, max_answer_len: int, count: int) -> list[tuple[int, int, float]]:
    """Return (first token, last token, probability) of the `count` best spans, best first.

    Tokens are positions in the window. A span has at most `max_answer_len` tokens.
    """
    length = len(window.tokens)
    ordered = np.triu(np.ones((length, length), bool))
    firsts, lasts = np.nonzero(np.tril(ordered, min(max_answer_len, length) - 1))
    scores = window.start[firsts] * window.end[lasts]
    best = np.argsort(-scores, kind="stable")[:count]
    return [
        (window.tokens[firsts[index]], window.tokens[lasts[index]], float(scores[index]))
        for index in best
    ]


def find_characters(window: Window, first: int, last: int, align_to_words: bool) -> tuple[int, int]:
    """Return (start, end) of the tokens `first` to `last` as characters of the context, end
    exclusive.

    With `align_to_words` they are extended to words, as far as these are in this window.
    """
    encoding = window.encoding
    words = [encoding.token_to_word(token) for token in (first, last)]
    if align_to_words and None not in words:  # some tokenizers have no words
        extents = [encoding.word_to_chars(word, window.sequence) for word in words]
    else:
        extents = [encoding.offsets[token] for token in (first, last)]
    return extents[0][0], extents[1][1]
