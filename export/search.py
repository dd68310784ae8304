"""Greedy search, sampling and beam search in numpy, token for token what `transformers.generate` does.

All drive a `Step`: a function from the last token of every row, and the rows the caches are to be taken from, to the
logits of the next token.
"""

import math
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from .errors import UsageError
from .logits import Processors, Sampler, log_sum_exp, top

ROOM = 256  # new tokens that there is room for at first; it doubles as they come
NEVER = np.float32(-1e9)  # transformers' score of a beam that must not be chosen

# (tokens (rows,), taken_from (rows,) or None) -> logits (rows, vocabulary), which may be overwritten, valid until the next step
Step = Callable[[np.ndarray, np.ndarray | None], np.ndarray]

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

# What each option must be: in words, and as a test.
COUNT = "a whole number from 1 to 2**63 - 1", lambda value: is_whole(value) and value >= 1
COUNT_OR_0 = "a whole number from 0 to 2**63 - 1", lambda value: is_whole(value) and value >= 0
POSITIVE = "a float32 number above 0", lambda value: is_number(value) and value >= SMALLEST
PROBABILITY = "a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1
TOKEN = "a token id", lambda value: is_whole(value)
TOKENS = "a list of token ids", lambda value: is_list(value, is_whole)
ONE_OR_MORE = "a token id or a list of them", lambda value: is_whole(value) or is_list(value, is_whole)
FLAG = "True or False", lambda value: isinstance(value, bool)
EXPECTED = {
    **dict.fromkeys(("max_new_tokens", "max_length", "num_beams", "num_return_sequences"), COUNT),
    **dict.fromkeys(("min_new_tokens", "min_length", "top_k", "no_repeat_ngram_size", "pad_token_id"), COUNT_OR_0),
    **dict.fromkeys(("temperature", "repetition_penalty"), POSITIVE),
    **dict.fromkeys(("top_p", "min_p"), PROBABILITY),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), TOKENS),
    **dict.fromkeys(("forced_bos_token_id", "decoder_start_token_id"), TOKEN),
    **dict.fromkeys(("forced_eos_token_id", "eos_token_id"), ONE_OR_MORE),
    "length_penalty": ("a float32 number", lambda value: is_number(value)),
    "early_stopping": ("True, False or 'never'", lambda value: isinstance(value, bool) or value == "never"),
    "do_sample": FLAG,
    "seed": ("a whole number of at least 0", lambda value: is_integer(value) and value >= 0),
    "bad_words_ids": (
        "a list of lists of token ids, none empty",
        lambda value: is_list(value, lambda word: is_list(word, is_whole) and word) and value,
    ),
}


def checked(options: dict) -> dict:
    """`options` of `Runtime.generate` in Python's own numbers and lists, instead of numpy's; `None` is always allowed.

    Raises:
        UsageError: for a name that is none of them, and for a value that one cannot have.
    """
    if unknown := options.keys() - EXPECTED.keys():
        raise UsageError(f"unknown generation options {sorted(unknown)}, expected some of {sorted(EXPECTED)}")
    options = {name: plain(value) for name, value in options.items()}
    for name, value in options.items():
        expected, holds = EXPECTED[name]
        if value is not None and not holds(value):
            raise UsageError(f"{name} must be {expected}, got {reprlib.repr(value)}")
    return options


def plain(value):
    """numpy's integers are not as long as Python's, and its `True` is not `True`."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Options:
    """Fields of transformers' `GenerationConfig`, with its defaults. `seed` is that of the sampling, by default another each
    time. `eos_token_ids` may be empty. `temperature`, `top_k`, `top_p` and `min_p` have an effect with `do_sample` only.

    Raises:
        UsageError: for values that do not go together; each by itself must be `checked`.
    """

    max_new_tokens: int = 20
    min_new_tokens: int = 0
    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: list[list[int]] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | list[int] | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0

    def __post_init__(self):
        if self.do_sample and self.num_beams > 1:
            raise UsageError(f"do_sample=True does not go with num_beams={self.num_beams}, expected num_beams=1")
        if self.num_return_sequences > self.num_beams and not self.do_sample:
            most = f"num_beams, {self.num_beams}," if self.num_beams > 1 else "1"
            raise UsageError(f"num_return_sequences must be at most {most} without do_sample, got {self.num_return_sequences}")
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            forced = as_list(getattr(self, name))
            if forced and set(forced) <= set(as_list(self.suppress_tokens)):
                raise UsageError(f"{name} must have a token that suppress_tokens has not, got {forced}")
        # Scores are divided by length^length_penalty, a float32, and must stay above `NEVER`.
        least, most = (math.log(limit) / math.log(max(self.max_new_tokens, 2)) for limit in (1e-6, LARGEST))
        if self.num_beams > 1 and not least <= self.length_penalty <= most:
            expected = f"from {least:.4g} to {most:.4g} with max_new_tokens={self.max_new_tokens}"
            raise UsageError(f"length_penalty must be {expected}, got {self.length_penalty}")

    def check_vocabulary(self, size: int) -> None:
        """Raises UsageError for more beams than a vocabulary of `size` tokens can fill, and for tokens it does not have."""
        if self.candidates > self.num_beams * size or self.num_beams > size:
            ends = f" and {len(self.eos_token_ids)} end tokens" if self.eos_token_ids else ""
            raise UsageError(f"num_beams {self.num_beams}{ends} are too many for a vocabulary of {size} tokens")
        for name in ("pad_token_id", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids"):
            tokens = np.concatenate([np.ravel(ids) for ids in as_list(getattr(self, name))] or [[]])
            if outside := [int(token) for token in tokens if not 0 <= token < size]:
                raise UsageError(f"{name} must be in [0, {size - 1}], the vocabulary, got {outside[0]}")

    @property
    def candidates(self):
        """Of beam search, for each input and step: enough that `num_beams` are left when the best of them all end."""
        return max(2, 1 + len(self.eos_token_ids)) * self.num_beams

    @property
    def beam_fill_token_id(self):
        """What beam search puts behind the end token: to transformers, a pad token of 0 is none there."""
        return self.pad_token_id or next(iter(self.eos_token_ids), 0)


def is_integer(value):
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_whole(value):
    return is_integer(value) and -(2**63) <= value < 2**63


def is_number(value):
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) <= LARGEST


def as_list(value):
    return [] if value is None else value if isinstance(value, list | tuple) else [value]


def is_list(value, holds):
    return isinstance(value, list | tuple) and all(map(holds, value))


class Scores:
    """Of each of `rows` that grow token by token: the sum of log p, and how many tokens it is of, the end token too. p is the
    softmax of the processed logits, before what sampling does to them."""

    def __init__(self, rows: int):
        self.sums, self.lengths = np.zeros(rows), np.zeros(rows, np.int64)

    def add(self, logits: np.ndarray, tokens: np.ndarray, running: np.ndarray) -> None:
        maximum, log_sum = log_sum_exp(logits)
        log_p = np.take_along_axis(logits, tokens[:, None], axis=1) - maximum - log_sum
        self.sums += np.where(running, log_p[:, 0], 0)
        self.lengths += running

    def normalized(self, length_penalty: float) -> np.ndarray:
        """As beam search does: sum(log p) / length^length_penalty."""
        return (self.sums / self.lengths**length_penalty).astype(np.float32)


def one_by_one(
    step: Step, logits: np.ndarray, options: Options, process: Processors | None = None, scores: Scores | None = None
) -> Iterator[np.ndarray]:
    """Greedy search, or sampling with `do_sample`: yields the next token of each row (rows,), the pad token behind the end
    token, until every row has ended or has `max_new_tokens`.

    `logits` (rows, vocabulary) are those of the first token; `process` changes the logits of each; `scores` are added to.
    """
    choose = Sampler(options) if options.do_sample else greedy
    eos = np.array(options.eos_token_ids, np.int64)
    running, new = np.ones(len(logits), bool), np.empty((len(logits), min(options.max_new_tokens, ROOM)), np.int64)
    for t in range(options.max_new_tokens):
        if t == new.shape[1]:
            new = doubled(new, options.pad_token_id)
        if process:
            process(new[:, :t], logits)
        unchanged = logits.copy() if scores else None  # sampling overwrites them
        new[:, t] = tokens = np.where(running, choose(logits), options.pad_token_id)
        if scores:
            scores.add(unchanged, tokens, running)
        yield tokens
        running &= (tokens[:, None] != eos).all(axis=1)
        if t + 1 == options.max_new_tokens or not running.any():
            return
        logits = step(tokens, None)


def doubled(tokens, pad_token_id):
    """`tokens` (..., t) -> (..., 2 * t), padded."""
    return np.concatenate([tokens, np.full_like(tokens, pad_token_id)], axis=-1)


def greedy(logits):
    return logits.argmax(axis=1)


def beam_search(
    step: Step, logits: np.ndarray, options: Options, process: Processors | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The best `num_return_sequences` (N) of `num_beams` (K) hypotheses of each of B inputs, by
    sum(log p) / length^length_penalty -> (B * N, up to max_new_tokens), behind the end token `beam_fill_token_id`; and these
    scores (B * N,).

    `logits` (B, vocabulary) are those of the first token; every step is given K rows for each input, which stand together.
    `process` changes the log p of each token.
    """
    K, length, count, eos = options.num_beams, options.max_new_tokens, options.candidates, np.array(options.eos_token_ids)
    B = len(logits)
    inputs, is_best = np.arange(B)[:, None], np.arange(count) < K
    fill = options.beam_fill_token_id
    running = np.full((B * K, min(length, ROOM)), fill)
    # Rows of one input are equal at first: only the first of them counts.
    scores = np.tile(np.where(np.arange(K) == 0, np.float32(0), NEVER), (B, 1))
    finished = Finished(running, scores)
    can_improve = np.ones((B, 1), bool)
    for t in range(length):
        if t == running.shape[1]:
            running, finished.sequences = (doubled(each, fill) for each in (running, finished.sequences))
        log_p, tokens = best_tokens(logits, running[:, :t] if t else running[::K, :0], count, process)
        if t == 0:
            log_p, tokens = np.repeat(log_p, K, axis=0), np.repeat(tokens, K, axis=0)
        candidates, chosen = top((log_p + scores.reshape(-1, 1)).reshape(B, -1), count)
        tokens = np.take_along_axis(tokens.reshape(B, -1), chosen, axis=1)
        parents = inputs * K + chosen // log_p.shape[1]
        sequences = running[parents]
        sequences[:, :, t] = tokens
        ends = (tokens[..., None] == eos).any(axis=-1) | (t + 1 == length)

        # The best K candidates that go on.
        scores, kept = top(np.where(ends, candidates + NEVER, candidates), K)
        running = sequences[inputs, kept].reshape(B * K, -1)

        # Those of the best K that end here compete with the hypotheses that ended before.
        closed = ~can_improve | ((options.early_stopping is True) & finished.are_full())
        just_finished = ends & is_best & ~closed
        if just_finished.any():
            finished.add(sequences, candidates / np.float32((t + 1) ** options.length_penalty), just_finished, t + 1)

        can_improve = can_improve & improvable(scores, finished, t + 1, options)
        if not can_improve.any() or (options.early_stopping is True and finished.are_full().all()) or ends.all():
            break
        logits = step(running[:, t].copy(), parents[inputs, kept].ravel())
    return finished.best(options.num_return_sequences)


def best_tokens(logits, new, count, process):
    """log p and index of the best `count` tokens (rows, count) of each row, or of all there are, behind the `new` tokens."""
    maximum, log_sum = log_sum_exp(logits)
    count = min(count, logits.shape[1])
    if not process:  # the same for all tokens of a row, so it need be subtracted from the best only
        values, tokens = top(logits, count)
        return values - maximum - log_sum, tokens
    logits -= maximum
    logits -= log_sum
    process(new, logits)
    return top(logits, count)


class Finished:
    """The best K finished hypotheses of each of B inputs, best first: like the `running` ones (B * K, length) at the start."""

    def __init__(self, running, scores):
        self.sequences = running.reshape(*scores.shape, -1)
        self.scores = np.full_like(scores, -np.inf)
        self.lengths = np.zeros(scores.shape, np.int64)  # 0 where there is none yet

    def are_full(self):
        return self.lengths.all(axis=1, keepdims=True)

    def add(self, sequences, scores, just_finished, length):
        """Those of `sequences` (B, C, length) with `scores` (B, C) that have `just_finished` (B, C)."""
        scores = np.where(just_finished, scores, scores + NEVER)
        self.scores, best = top(np.concatenate([self.scores, scores], axis=1), self.scores.shape[1])
        inputs = np.arange(len(best))[:, None]
        self.sequences = np.concatenate([self.sequences, sequences], axis=1)[inputs, best]
        self.lengths = np.concatenate([self.lengths, just_finished * length], axis=1)[inputs, best]

    def best(self, count):
        width = self.lengths[:, :count].max()
        return self.sequences[:, :count, :width].reshape(-1, width), self.scores[:, :count].reshape(-1)


def improvable(scores, finished, length, options):
    """Whether the best running hypothesis may still beat the worst finished one; (B, 1)."""
    if options.early_stopping == "never" and options.length_penalty > 0:
        length = options.max_new_tokens
    possible = scores[:, :1] / np.float32(length**options.length_penalty)
    worst = np.where(finished.lengths > 0, finished.scores.min(axis=1, keepdims=True), NEVER)
    return (possible > worst).any(axis=1, keepdims=True)
