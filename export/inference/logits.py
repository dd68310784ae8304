"""Logits processors, log-softmax, top-k and sampling in numpy.

The arithmetic is that of transformers, in float32. Shapes: R rows, V vocabulary size, T tokens per
row so far.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

if TYPE_CHECKING:
    from .options import Options

BLOCK = 128  # columns per block; `top` looks at block maxima first
CHUNK = 1 << 18  # logits that `log_sum_exp` processes at once, to fit into the CPU cache
NUCLEUS = 64  # tokens that `sampling_weights` sorts first to find the nucleus

# (ids (R, T), scores (R, V)) -> None: changes the scores in place
LogitsProcessor = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class Prompt:
    """The prompts `ids` (B, P), for seq2seq the decoder prompts, and their number of `padding`
    tokens (B,). The repetition penalty ignores padding; other processors count it."""

    ids: np.ndarray
    padding: np.ndarray

    @property
    def length(self) -> int:
        return self.ids.shape[1]


# Each of the following functions has the name of an option, and returns its processor, or `None` if
# `options` (`options.Options`) do not enable it.


def repetition_penalty(options: "Options", prompt: Prompt) -> LogitsProcessor | None:
    """Return the processor that penalizes earlier tokens (Keskar et al. 2019, section 4.1), or None
    if it is off.

    `options` sets the penalty. The tokens of `prompt` are earlier tokens too.
    """
    penalty = np.float32(options.repetition_penalty)

    def process(ids: np.ndarray, scores: np.ndarray) -> None:
        # Padding is replaced by the last token of its row, which is real. A token that occurs
        # twice is penalized once.
        is_padding = np.arange(ids.shape[1]) < as_rows(prompt.padding, len(ids))[:, None]
        tokens = np.where(is_padding, ids[:, -1:], ids)
        seen = np.take_along_axis(scores, tokens, axis=1)
        with np.errstate(over="ignore"):  # overflows to infinity, as in torch
            penalized = np.where(seen < 0, seen * penalty, seen / penalty)
        np.put_along_axis(scores, tokens, penalized, axis=1)

    return process if options.repetition_penalty != 1 else None


def no_repeat_ngram_size(options: "Options", prompt: Prompt) -> LogitsProcessor | None:
    size = options.no_repeat_ngram_size

    def process(ids: np.ndarray, scores: np.ndarray) -> None:
        if ids.shape[1] >= size:
            ngrams = sliding_window_view(ids, size, axis=1)
            last_tokens = ids[:, None, ids.shape[1] + 1 - size :]
            rows, positions = np.nonzero((ngrams[..., :-1] == last_tokens).all(axis=-1))
            scores[rows, ngrams[rows, positions, -1]] = -np.inf

    return process if size else None


def bad_words_ids(options: "Options", prompt: Prompt) -> LogitsProcessor | None:
    """Return the processor that suppresses the last token of each of `bad_words_ids` after its
    other tokens, or None.

    A single end token is not suppressed. `prompt` are the tokens before the first new one.
    """
    ends = [[token] for token in options.eos_token_ids]
    words = [word for word in options.bad_words_ids or () if word not in ends]
    by_length = [
        np.array([word for word in words if len(word) == length])
        for length in sorted({len(word) for word in words})
    ]

    def process(ids: np.ndarray, scores: np.ndarray) -> None:
        for same_length in by_length:
            prefix_length = same_length.shape[1] - 1
            if prefix_length <= ids.shape[1]:
                rows, matches = np.nonzero(
                    (ids[:, None, ids.shape[1] - prefix_length :] == same_length[:, :-1]).all(
                        axis=-1
                    )
                )
                scores[rows, same_length[matches, -1]] = -np.inf

    return process if words else None


def min_new_tokens(options: "Options", prompt: Prompt) -> LogitsProcessor | None:
    if not options.eos_token_ids or not options.min_new_tokens:
        return None
    return partial(
        suppress,
        tokens=distinct(options.eos_token_ids),
        lengths=range(prompt.length + options.min_new_tokens),
    )


def forced_bos_token_id(options: "Options", prompt: Prompt) -> LogitsProcessor | None:
    if options.forced_bos_token_id is None:
        return None
    return partial(force, tokens=options.forced_bos_token_id, length=1)


def forced_eos_token_id(options: "Options", prompt: Prompt) -> LogitsProcessor | None:
    if options.forced_eos_token_id is None:
        return None
    return partial(
        force, tokens=options.forced_eos_token_id, length=prompt.length + options.max_new_tokens - 1
    )


def suppress_tokens(options: "Options", prompt: Prompt) -> LogitsProcessor | None:
    return (
        partial(suppress, tokens=distinct(options.suppress_tokens))
        if options.suppress_tokens
        else None
    )


def begin_suppress_tokens(options: "Options", prompt: Prompt) -> LogitsProcessor | None:
    if not options.begin_suppress_tokens:
        return None
    first = prompt.length + (prompt.length == 1 and options.forced_bos_token_id is not None)
    return partial(suppress, tokens=distinct(options.begin_suppress_tokens), lengths=(first,))


def renormalize_logits(options: "Options", prompt: Prompt) -> LogitsProcessor | None:
    """Return the processor that normalizes the log p of beams after the other processors, or None
    if it is off.

    Without beams it would not change the selected tokens. `options` turns it on; `prompt` is not
    used.
    """

    def process(ids: np.ndarray, scores: np.ndarray) -> None:
        maximum, log_sum = log_sum_exp(scores)
        scores -= maximum
        scores -= log_sum

    return process if options.renormalize_logits and options.num_beams > 1 else None


PROCESSORS = (  # in the order of transformers
    repetition_penalty,
    no_repeat_ngram_size,
    bad_words_ids,
    min_new_tokens,
    forced_bos_token_id,
    forced_eos_token_id,
    suppress_tokens,
    begin_suppress_tokens,
    renormalize_logits,
)


PROCESSOR_NAMES = {function.__name__ for function in PROCESSORS}


class LogitsProcessors:
    """The logits processors of `options`, in the order of transformers. False if there are none."""

    def __init__(self, options: "Options", prompt: Prompt):
        self.options = options
        self.prompt = prompt
        processors = [
            function(options, prompt)
            for function in PROCESSORS
            if function.__name__ in options.changed
        ]
        self.active = [process for process in processors if process is not None]

    def __bool__(self) -> bool:
        return bool(self.active)

    def take(self, inputs: np.ndarray) -> "LogitsProcessors":
        """Return the processors of some `inputs`, which are indices or a mask (B,)."""
        return LogitsProcessors(
            self.options, Prompt(self.prompt.ids[inputs], self.prompt.padding[inputs])
        )

    def __call__(self, new: np.ndarray, scores: np.ndarray) -> None:
        """Change `scores` (R, V) in place, with the `new` tokens (R, t) after the prompts.

        R is a multiple of B. Rows of one prompt are adjacent."""
        ids = np.concatenate([as_rows(self.prompt.ids, len(scores)), new], axis=1)
        for process in self.active:
            process(ids, scores)


def distinct(tokens: Sequence[int]) -> np.ndarray:
    """Return the distinct non-negative token ids, sorted."""
    return np.array(sorted({token for token in tokens if token >= 0}), np.int64)


def suppress(
    ids: np.ndarray, scores: np.ndarray, tokens: np.ndarray, lengths: Container[int] | None = None
) -> None:
    """Set the scores (R, V) of `tokens`, from `distinct`, to -inf in place.

    Tokens outside the vocabulary are ignored. If there are `lengths`, do so only if the number of
    tokens per row so far, with the prompt, is in them.
    """
    if lengths is None or ids.shape[1] in lengths:
        scores[:, tokens[: np.searchsorted(tokens, scores.shape[1])]] = -np.inf


def force(ids: np.ndarray, scores: np.ndarray, tokens: int | list[int], length: int) -> None:
    if ids.shape[1] == length:
        scores[:] = -np.inf
        scores[:, tokens] = 0


def as_rows(values: np.ndarray, rows: int) -> np.ndarray:
    """Return `values` (B, ...) as (rows, ...), each row repeated rows / B times."""
    return values if len(values) == rows else np.repeat(values, rows // len(values), axis=0)


def log_sum_exp(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the maximum of each row of logits (R, V), and log(sum(exp(row - maximum))), both (R,
    1).

    The log-softmax is logits - maximum - log_sum, in this order, as in torch.
    """
    rows, width = logits.shape
    maximum, total = np.empty((2, rows, 1), np.float32)
    step = max(1, CHUNK // width)
    buffer = np.empty((min(step, rows), width), np.float32)
    for start in range(0, rows, step):
        chunk = logits[start : start + step]
        row_maximum = np.max(chunk, axis=1, keepdims=True, out=maximum[start : start + step])
        shifted = np.subtract(chunk, row_maximum, out=buffer[: len(chunk)])
        np.sum(np.exp(shifted, out=shifted), axis=1, keepdims=True, out=total[start : start + step])
    return maximum, np.log(total)


def top(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `count` largest `scores` of each row (R, V) and their indices, both (R, count).

    They are sorted, largest first, ties by index. Only the `count` blocks of a wide row with the
    largest maxima are searched: the other blocks cannot have a top value. `count` is at most V.
    Raises ValueError for NaN.
    """
    rows, width = scores.shape
    blocks = width // BLOCK
    if 2 * count > blocks:
        return largest(scores, count)
    full_blocks = scores[:, : blocks * BLOCK]
    maxima = np.maximum.reduceat(full_blocks, np.arange(0, blocks * BLOCK, BLOCK), axis=1)
    block_indices = np.sort(largest(maxima, count)[1], axis=1)
    picked = full_blocks.reshape(rows, blocks, BLOCK)[
        np.arange(rows)[:, None], block_indices
    ].reshape(rows, -1)
    if width % BLOCK:  # always search the remainder of the row
        picked = np.concatenate([picked, scores[:, blocks * BLOCK :]], axis=1)
        block_indices = np.concatenate([block_indices, np.full((rows, 1), blocks)], axis=1)
    values, indices = largest(picked, count)
    return values, np.take_along_axis(
        block_indices, indices // BLOCK, axis=1
    ) * BLOCK + indices % BLOCK


def largest(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `count` largest `scores` of each row (R, V) and their indices, both (R, count).

    They are sorted, largest first, ties by index. All values are searched, not only some blocks.
    `count` is at most V. Raises ValueError for NaN.
    """
    rows, width = scores.shape
    # NaN is the largest value for `partition`
    largest_values = np.partition(scores, width - count, axis=1)[:, width - count :]
    if np.isnan(largest_values).any():
        raise ValueError("some logits are NaN, expected numbers")
    threshold = largest_values[:, :1]
    is_top = scores >= threshold
    if np.count_nonzero(is_top) > rows * count:  # ties at the smallest value
        above = scores > threshold
        equal = scores == threshold
        is_top = above | equal & (equal.cumsum(axis=1) <= count - above.sum(axis=1, keepdims=True))
    indices = (
        np.flatnonzero(is_top).reshape(rows, count) - np.arange(0, scores.size, width)[:, None]
    )
    values = np.take_along_axis(scores, indices, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(values, order, axis=1), np.take_along_axis(indices, order, axis=1)


def row_seed(seed: int, *place: int) -> int:
    """Return the seed of one row, derived from the `seed` of its call and its `place` there.

    `place` is the number of the row, or the number of a text and that of its sentence. Number 0
    keeps the seed.
    """
    for number in place:
        if number:
            seed = int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])
    return seed


def row_seeds(seed: int | None, count: int) -> list[int] | None:
    """Return the seeds of `count` rows of a call with this `seed`. None stays None, random
    seeds."""
    return None if seed is None else [row_seed(seed, number) for number in range(count)]


def row_uniforms(seed: int | None, sample: int = 0) -> Callable[[], float]:
    """Return a function that returns the next random number of [0, 1), for the `sample` with this
    number of a row. `seed` is that of the row, None for a random one."""
    return np.random.default_rng([seed, sample] if sample and seed is not None else seed).random


def sample(
    logits: np.ndarray, options: "Options", uniforms: Iterable[Callable[[], float]]
) -> np.ndarray:
    """Sample tokens (R,) from logits (R, V), which are overwritten, with `temperature`, `top_k`,
    `top_p` and `min_p` of `options`, applied in this order.

    Each of `uniforms` returns the next random number of [0, 1) of a row. The token is -1 if all
    tokens of a row are suppressed, or a logit is NaN or infinity.
    """
    is_finite = np.isfinite(logits.max(axis=1))
    logits[~is_finite] = 0
    with np.errstate(invalid="ignore", over="ignore"):  # of a tiny temperature
        weights, tokens = sampling_weights(logits, options)
    rows, width = weights.shape
    if width <= 8 * BLOCK:
        indices, is_drawn = draw(weights, uniforms)
    else:  # sample a block of the row, then a column of the block
        totals = np.add.reduceat(weights, np.arange(0, width, BLOCK), 1)
        blocks, is_drawn = draw(totals, uniforms)
        columns = blocks[:, None] * BLOCK + np.arange(BLOCK)
        inside = np.take_along_axis(weights, np.minimum(columns, width - 1), axis=1)
        indices = blocks * BLOCK + draw(np.where(columns < width, inside, 0), uniforms)[0]
    sampled = indices if tokens is None else tokens[np.arange(rows), indices]
    return np.where(is_finite & is_drawn, sampled, -1)


def sampling_weights(
    logits: np.ndarray, options: "Options"
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the sampling weights and their tokens, both (R, n), for logits (R, V), which are
    overwritten.

    n is at most V, because only the likely tokens are sorted. Tokens are None if all are in
    order. Filtered tokens have weight 0.
    """
    if (temperature := np.float32(options.temperature)) != 1:
        np.divide(logits, temperature, out=logits)
    width = logits.shape[1]
    if not options.top_k and options.top_p == 1 and not options.min_p:
        np.subtract(logits, logits.max(axis=1, keepdims=True), out=logits)
        return np.exp(logits, out=logits), None
    total = None if options.top_k or options.top_p == 1 else np.exp(log_sum_exp(logits)[1])
    count = min(options.top_k + 1 if options.top_k else NUCLEUS, width)
    # Every filter keeps a prefix of a sorted row, so sort only until the end of this prefix.
    while True:
        values, tokens = top(logits, count)
        weights = filter_weights(values, options, total)
        if count == width or not weights[:, -1].any():
            return weights, tokens
        count = min(8 * count, width)


def filter_weights(values: np.ndarray, options: "Options", total: np.ndarray | None) -> np.ndarray:
    """Return the weights exp(value - largest), 0 for filtered tokens.

    `values` (R, n) are sorted, largest first. `total` (R, 1) is the sum of the weights of the
    whole row, or `None` if top_k cuts the row."""
    weights = np.exp(values - values[:, :1])
    if options.top_k:  # keep ties with the last of the k
        weights[values < values[:, min(options.top_k, values.shape[1]) - 1, None]] = 0
    if options.top_p < 1:
        total = weights.sum(axis=1, keepdims=True, dtype=np.float64) if total is None else total
        # Drop a token if the tokens before it sum to top_p already; the first one stays. The
        # difference from 1 is what transformers compares.
        before = weights.cumsum(axis=1, dtype=np.float64) - weights
        weights[:, 1:][(1 - before / total <= 1 - options.top_p)[:, 1:]] = 0
    if options.min_p:
        weights[weights < np.float32(options.min_p) * weights[:, :1]] = 0
    return weights


def draw(
    weights: np.ndarray, uniforms: Iterable[Callable[[], float]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return an index for each row of `weights` (R, n), and False for rows without positive
    weights, both (R,).

    The probability of an index is proportional to its weight. Each of `uniforms` returns the next
    random number of [0, 1) of a row.
    """
    cumulative = weights.cumsum(axis=1, dtype=np.float64)
    drawn = np.array([[uniform()] for uniform in uniforms])
    indices = (cumulative <= drawn * cumulative[:, -1:]).sum(axis=1)
    is_positive = cumulative[:, -1] > 0
    return np.where(is_positive, indices, 0), is_positive


def process_logits(
    logits: np.ndarray, new: np.ndarray, count: int, processors: LogitsProcessors
) -> tuple[np.ndarray, np.ndarray]:
    """Return the top `count` log p and tokens of each row, both (rows, count), after `processors`
    changed the log p.

    `new` (rows, t) are the new tokens so far. `logits` (rows, V) are overwritten. The log p of rows
    whose logits are not finite are NaN.
    """
    maximum, log_sum = log_sum_exp(logits)
    is_invalid = ~np.isfinite(maximum + log_sum)
    logits -= maximum
    logits -= log_sum
    logits[is_invalid[:, 0]] = 0
    processors(new, logits)
    log_p, tokens = top(logits, count)
    return np.where(is_invalid, np.nan, log_p), tokens
