"""What comes between a model's logits and the choice of a token, in numpy: logits processors,
log-softmax, top-k, sampling.

The arithmetic is transformers', in float32. R rows, V tokens of vocabulary, T tokens of each row so
far.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

if TYPE_CHECKING:
    from .options import Options

BLOCK = 128  # columns of which `top` first sees only the largest value
CHUNK = 1 << 18  # logits that `log_sum_exp` works on at once, so that they stay in cache
NUCLEUS = 64  # tokens in which `Sampler` first looks for the nucleus

# (ids (R, T), scores (R, V)) -> None: changes the scores in place
Processor = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class Prompt:
    """The tokens (B, P) before the first new one, for seq2seq what each target begins with; and
    `padding` (B,), how many of them are padding, which the repetition penalty leaves out and all
    else counts."""

    ids: np.ndarray
    padding: np.ndarray

    @property
    def length(self) -> int:
        return self.ids.shape[1]


# Each of the following gives the processor that `options` (an `options.Options`) ask for, or `None`
# if they do not.


def repetition_penalty(options: "Options", prompt: Prompt) -> Processor | None:
    """Keskar et al. 2019, section 4.1: what was read or generated is less likely."""
    penalty = np.float32(options.repetition_penalty)

    def process(ids: np.ndarray, scores: np.ndarray) -> None:
        # Padding becomes the last token of its row: that one is real, and a token that stands there
        # twice is penalized once.
        is_padding = np.arange(ids.shape[1]) < as_rows(prompt.padding, len(ids))[:, None]
        tokens = np.where(is_padding, ids[:, -1:], ids)
        seen = np.take_along_axis(scores, tokens, axis=1)
        with np.errstate(over="ignore"):  # infinite, as in torch
            penalized = np.where(seen < 0, seen * penalty, seen / penalty)
        np.put_along_axis(scores, tokens, penalized, axis=1)

    return process if options.repetition_penalty != 1 else None


def no_repeat_ngrams(options: "Options", prompt: Prompt) -> Processor | None:
    size = options.no_repeat_ngram_size

    def process(ids: np.ndarray, scores: np.ndarray) -> None:
        if ids.shape[1] >= size:
            ngrams = sliding_window_view(ids, size, axis=1)
            begun = ids[:, None, ids.shape[1] + 1 - size :]
            rows, places = np.nonzero((ngrams[..., :-1] == begun).all(axis=-1))
            scores[rows, ngrams[rows, places, -1]] = -np.inf

    return process if size else None


def bad_words(options: "Options", prompt: Prompt) -> Processor | None:
    """The last token of each of `bad_words_ids` where its row ends in the others; an end token
    alone stays allowed."""
    ends = [[token] for token in options.eos_token_ids]
    words = [word for word in options.bad_words_ids or () if word not in ends]
    by_length = [
        np.array([word for word in words if len(word) == length])
        for length in sorted({len(word) for word in words})
    ]

    def process(ids: np.ndarray, scores: np.ndarray) -> None:
        for same_length in by_length:
            begun = same_length.shape[1] - 1
            if begun <= ids.shape[1]:
                rows, chosen = np.nonzero(
                    (ids[:, None, ids.shape[1] - begun :] == same_length[:, :-1]).all(axis=-1)
                )
                scores[rows, same_length[chosen, -1]] = -np.inf

    return process if words else None


def min_new_tokens(options: "Options", prompt: Prompt) -> Processor | None:
    if not options.eos_token_ids or not options.min_new_tokens:
        return None
    return partial(
        suppress,
        tokens=distinct(options.eos_token_ids),
        lengths=range(prompt.length + options.min_new_tokens),
    )


def forced_bos(options: "Options", prompt: Prompt) -> Processor | None:
    if options.forced_bos_token_id is None:
        return None
    return partial(force, tokens=options.forced_bos_token_id, length=1)


def forced_eos(options: "Options", prompt: Prompt) -> Processor | None:
    if options.forced_eos_token_id is None:
        return None
    return partial(
        force, tokens=options.forced_eos_token_id, length=prompt.length + options.max_new_tokens - 1
    )


def suppress_tokens(options: "Options", prompt: Prompt) -> Processor | None:
    return (
        partial(suppress, tokens=distinct(options.suppress_tokens))
        if options.suppress_tokens
        else None
    )


def begin_suppress_tokens(options: "Options", prompt: Prompt) -> Processor | None:
    if not options.begin_suppress_tokens:
        return None
    first = prompt.length + (prompt.length == 1 and options.forced_bos_token_id is not None)
    return partial(suppress, tokens=distinct(options.begin_suppress_tokens), lengths=(first,))


def renormalize(options: "Options", prompt: Prompt) -> Processor | None:
    """Beams are compared by log p of what the others left; one row alone chooses the same tokens
    without it."""

    def process(ids: np.ndarray, scores: np.ndarray) -> None:
        maximum, log_sum = log_sum_exp(scores)
        scores -= maximum
        scores -= log_sum

    return process if options.renormalize_logits and options.num_beams > 1 else None


def distinct(tokens: Sequence[int]) -> np.ndarray:
    """Each that can be one once, in order, so that a step looks at no more than the vocabulary
    has."""
    return np.unique([token for token in tokens if token >= 0]).astype(np.int64)


def suppress(
    ids: np.ndarray, scores: np.ndarray, tokens: np.ndarray, lengths: Container[int] | None = None
) -> None:
    """`tokens` are `distinct`."""
    if lengths is None or ids.shape[1] in lengths:
        scores[:, tokens[: np.searchsorted(tokens, scores.shape[1])]] = -np.inf


def force(ids: np.ndarray, scores: np.ndarray, tokens: int | list[int], length: int) -> None:
    if ids.shape[1] == length:
        scores[:] = -np.inf
        scores[:, tokens] = 0


def as_rows(values: np.ndarray, rows: int) -> np.ndarray:
    """(B, ...) -> (rows, ...), each repeated as often as that takes."""
    return values if len(values) == rows else np.repeat(values, rows // len(values), axis=0)


def log_sum_exp(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(R, V) -> the maximum of each row and log(sum(exp(row - maximum))), both (R, 1): minus one,
    then minus the other is the log-softmax, in the order torch subtracts them."""
    rows, width = logits.shape
    maximum, total = np.empty((2, rows, 1), np.float32)
    step = max(1, CHUNK // width)
    buffer = np.empty((min(step, rows), width), np.float32)
    for start in range(0, rows, step):
        chunk = logits[start : start + step]
        largest = np.max(chunk, axis=1, keepdims=True, out=maximum[start : start + step])
        shifted = np.subtract(chunk, largest, out=buffer[: len(chunk)])
        np.sum(np.exp(shifted, out=shifted), axis=1, keepdims=True, out=total[start : start + step])
    return maximum, np.log(total)


def top(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` largest of each row, largest first, ties by index: values and indices, (R,
    count).

    Of a wide row only the blocks with the largest maxima are looked into: each of the `count` best
    such blocks has a value that comes before all of any other block.
    """
    rows, width = scores.shape
    blocks = width // BLOCK
    if 2 * count > blocks:
        return largest(scores, count)
    whole = scores[:, : blocks * BLOCK]
    maxima = np.maximum.reduceat(whole, np.arange(0, blocks * BLOCK, BLOCK), axis=1)
    chosen = np.sort(largest(maxima, count)[1], axis=1)
    picked = whole.reshape(rows, blocks, BLOCK)[np.arange(rows)[:, None], chosen].reshape(rows, -1)
    if width % BLOCK:  # the rest of the row, less than a block, is always looked into
        picked = np.concatenate([picked, scores[:, blocks * BLOCK :]], axis=1)
        chosen = np.concatenate([chosen, np.full((rows, 1), blocks)], axis=1)
    values, indices = largest(picked, count)
    return values, np.take_along_axis(chosen, indices // BLOCK, axis=1) * BLOCK + indices % BLOCK


def largest(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """As `top`, looking at every value."""
    rows, width = scores.shape
    if count == width:
        indices = np.broadcast_to(np.arange(width), scores.shape)
    else:
        least = np.partition(scores, width - count, axis=1)[:, width - count, None]
        chosen = scores >= least
        found = np.count_nonzero(chosen)
        if found < rows * count:
            raise ValueError("some logits are NaN, expected numbers")
        if found > rows * count:  # ties for the last places
            above = scores > least
            equal = scores == least
            chosen = above | equal & (
                equal.cumsum(axis=1) <= count - above.sum(axis=1, keepdims=True)
            )
        indices = (
            np.flatnonzero(chosen).reshape(rows, count) - np.arange(0, scores.size, width)[:, None]
        )
    values = np.take_along_axis(scores, indices, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(values, order, axis=1), np.take_along_axis(indices, order, axis=1)


def derived_seed(seed: int, number: int) -> int:
    """Return a seed for the `number`th of several texts, as the lines of a file."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])


class Sampler:
    """Draws tokens as `options` (a `options.Options`) ask: `temperature`, `top_k`, `top_p` and
    `min_p`, in this order; from the same `seed` the same tokens. Where samples are drawn one by
    one, `sample` is the number of each. `seeds` replace `options.seed`: each input has its own, so
    that its tokens do not depend on the other inputs of the batch."""

    def __init__(self, options: "Options", sample: int = 0, seeds: Sequence[int] | None = None):
        self.temperature = np.float32(options.temperature)
        self.top_k = options.top_k
        self.top_p = options.top_p
        self.min_p = options.min_p
        samples = [sample] if seeds is None else range(options.num_return_sequences)
        self.generators: list[Any] = [
            np.random.default_rng([seed, number] if number and seed is not None else seed)
            for seed in ([options.seed] if seeds is None else seeds)
            for number in samples
        ]

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """Logits (R, V), which are overwritten -> tokens (R,).

        Raises:
            ValueError: for a row of which no token may follow.
        """
        # a row of -inf alone is found when drawing
        with np.errstate(invalid="ignore", over="ignore"):
            weights, tokens = self.weights(logits)
        rows, width = weights.shape
        if width <= 8 * BLOCK:
            places = self.draw(weights)
        else:  # first a block of the row, then a place in it
            blocks = self.draw(np.add.reduceat(weights, np.arange(0, width, BLOCK), axis=1))
            columns = blocks[:, None] * BLOCK + np.arange(BLOCK)
            inside = np.take_along_axis(weights, np.minimum(columns, width - 1), axis=1)
            places = blocks * BLOCK + self.draw(np.where(columns < width, inside, 0))
        return places if tokens is None else tokens[np.arange(rows), places]

    def draw(self, weights: np.ndarray) -> np.ndarray:
        """An index of each row, as likely as it weighs."""
        cumulative = weights.cumsum(axis=1, dtype=np.float64)
        if not (cumulative[:, -1] > 0).all():
            raise ValueError(
                "no token may follow: all are suppressed, or the logits are not finite"
            )
        each = len(weights) // len(self.generators)  # all rows, unless the inputs have seeds
        drawn = np.concatenate([generator.random((each, 1)) for generator in self.generators])
        return (cumulative <= drawn * cumulative[:, -1:]).sum(axis=1)

    def weights(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """What each token that may be drawn weighs, and which tokens these are, both (R, n) with
        any n; `None` for all, in order. A token that may not be drawn weighs 0."""
        if self.temperature != 1:
            np.divide(logits, self.temperature, out=logits)
        width = logits.shape[1]
        if not self.top_k and self.top_p == 1 and not self.min_p:
            np.subtract(logits, logits.max(axis=1, keepdims=True), out=logits)
            return np.exp(logits, out=logits), None
        total = None if self.top_k or self.top_p == 1 else np.exp(log_sum_exp(logits)[1])
        count = min(self.top_k + 1 if self.top_k else NUCLEUS, width)
        # Every filter keeps the first tokens of a sorted row: it is sorted as far as it takes to
        # see where these end.
        while True:
            values, tokens = top(logits, count)
            weights = self.filtered(values, total)
            if count == width or not weights[:, -1].any():
                return weights, tokens
            count = min(8 * count, width)

    def filtered(self, values: np.ndarray, total: np.ndarray | None) -> np.ndarray:
        """`values` (R, n), sorted, largest first -> exp(value - largest), 0 where a filter takes
        the token out. `total` (R, 1) is the sum of the whole row, where top_k does not cut it."""
        weights = np.exp(values - values[:, :1])
        if self.top_k:  # ties with the last of the k stay
            weights[values < values[:, min(self.top_k, values.shape[1]) - 1, None]] = 0
        if self.top_p < 1:
            total = weights.sum(axis=1, keepdims=True, dtype=np.float64) if total is None else total
            before = weights.cumsum(axis=1, dtype=np.float64) - weights
            weights[:, 1:][(1 - before / total <= 1 - self.top_p)[:, 1:]] = 0
        if self.min_p:
            weights[weights < np.float32(self.min_p) * weights[:, :1]] = 0
        return weights
