"""Greedy search, sampling and beam search in numpy, with the same tokens as
`transformers.generate`.

A search is a state machine: `advance` takes the logits of the next token and returns the selected
tokens, until it is finished. The caller decides how requests are batched.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..inference.logits import LogitsProcessors, as_rows, log_sum_exp, process_logits, sample
from ..inference.options import EXCLUDED_SCORE, Options
from ..inference.session import FATAL
from ..shared.options import MAX_INT64

if TYPE_CHECKING:
    import onnxruntime

INITIAL_CAPACITY = 256  # initial capacity in new tokens; doubled when it is full
NO_TOKEN = -1  # in place of a token that no logits decide
NOT_FINITE = "some logits are NaN or infinite, expected numbers"


class StepLogits:
    """The logits (rows, V) after one step of a batch. The best tokens of all rows are found once,
    for all searches.

    Args:
        values: the logits, in the order of the graph. With `tokens`, log p of these.
        places: the place of each row in `values`, None if they have the order of the rows.
        threads: CPU threads that select the best tokens.
        tokens: (rows, C), the best tokens, if the graph has found them.
    """

    def __init__(
        self,
        values: np.ndarray,
        places: np.ndarray | None = None,
        threads: int = 1,
        tokens: np.ndarray | None = None,
    ):
        self.values = values
        self.places = places
        self.threads = threads
        self.greedy: np.ndarray | None = None
        self.top = None if tokens is None else (values, tokens)

    def of(self, rows: slice) -> np.ndarray:
        """Return the logits of `rows`, which the caller may overwrite."""
        return self.values[rows if self.places is None else self.places[rows]]

    def most_likely(self, rows: slice) -> np.ndarray:
        """Return the `greedy_tokens` of `rows`, (R,)."""
        if self.greedy is None:
            self.greedy = greedy_tokens(self.values)
        return self.greedy[rows if self.places is None else self.places[rows]]

    def best(self, rows: slice, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return log p and numbers of the `count` best tokens of `rows`, both (R, count)."""
        count = min(count, self.values.shape[1])
        if self.top is None or self.top[0].shape[1] < count:
            self.top = top_k_tokens(self.values, count, self.threads)
        log_p, tokens = self.top
        places = rows if self.places is None else self.places[rows]
        return log_p[places, :count], tokens[places, :count]


class Search(Protocol):
    """The search of G groups with equal options, each with K rows of a batch. Rows of one group are
    adjacent.

    Groups can leave and join between two steps, see `keep`. Groups with processors only start
    together, because processors count the tokens of all rows.
    """

    states: tuple[str, ...]  # names of arrays with a place for each group
    fill: int  # the token after the end of a sequence
    processors: LogitsProcessors | None
    is_finished: np.ndarray  # (G,), True for groups that have ended, in any way
    is_invalid: np.ndarray  # (G,), True after a step whose logits decide no token
    ended: list[int]  # groups that ended in the last step, invalid ones too
    problem: str  # of invalid groups

    def advance(self, logits: StepLogits, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the next tokens (G * K,), and the row of the groups (G * K,) that each continues,
        `None` if each continues its own.

        The logits are those of `rows`, at first one for each input.
        """

    def end(self, ends: np.ndarray) -> None:
        """Finish the groups where `ends` (G,) is True, and add those to `ended` that were not
        finished before."""

    def note_groups(self) -> None:
        """Note what only changes when groups leave or join."""

    def result(self, group: int) -> tuple[list[list[int]], list[float] | None]:
        """Return the new tokens of the sequences of a finished `group`, and their scores.

        The scores are `None` if they were not requested; beam search always has them.
        """


class TokenSearch:
    """The `Search` of greedy search or sampling, whose groups are single sequences.

    Args:
        options: resolved options, whose `max_new_tokens` counts less than `limits`.
        limits: (G,), the maximum number of new tokens of each sequence.
        processors: change the logits; sequences of one input are adjacent.
        uniforms: returns the next random number of [0, 1) of each sequence, for sampling.
        is_scored: whether results have scores, sum(log p) / length^length_penalty. p is the softmax
            of the processed logits, before temperature and the filters of sampling.
    """

    problem = "no token can be generated: all are suppressed, or the logits are not finite"

    def __init__(
        self,
        options: Options,
        limits: np.ndarray,
        processors: LogitsProcessors | None = None,
        uniforms: Sequence[Callable[[], float]] | None = None,
        is_scored: bool = False,
    ):
        self.options, self.fill = options, options.fill_token_id
        self.end_tokens = frozenset((*options.eos_token_ids, NO_TOKEN))
        self.processors = processors
        self.uniforms = np.array(uniforms or [], object)
        self.is_scored = is_scored
        self.states: tuple[str, ...] = ("tokens", "lengths", "limits", "is_finished")
        self.states += ("uniforms",) * options.do_sample + ("sums",) * is_scored
        self.is_plain = not (processors or options.do_sample or is_scored)
        self.tokens = np.full((len(limits), min(limits.max(), INITIAL_CAPACITY)), self.fill)
        self.lengths, self.limits = np.zeros(len(limits), np.int64), limits
        self.sums = np.zeros(len(limits))
        self.is_finished, self.is_invalid = np.zeros((2, len(limits)), bool)
        self.ended: list[int] = []
        self.note_groups()

    def note_groups(self) -> None:
        """Note what only changes when groups end, leave or join."""
        self.places = np.arange(len(self.limits))
        self.running = ~self.is_finished
        self.all_run = bool(self.running.all())
        self.longest = int(self.lengths.max(initial=0))
        self.next_limit = int(self.limits[self.running].min(initial=MAX_INT64))

    def advance(self, logits: StepLogits, rows: slice) -> tuple[np.ndarray, None]:
        if self.is_plain:
            return self.append(logits.most_likely(rows)), None
        values = as_rows(logits.of(rows), len(self.limits))
        if self.processors is not None:
            self.processors(self.tokens[:, : self.longest], values)
        tokens = self.choose(values)
        if self.is_scored:
            values[tokens == NO_TOKEN] = 0
            self.sums += np.where(self.is_finished, 0, token_log_p(values, tokens))
        return self.append(tokens), None

    def choose(self, logits: np.ndarray) -> np.ndarray:
        """Return the next token (G,) of each row of `logits` (G, V), `NO_TOKEN` for invalid
        rows."""
        if not self.options.do_sample:
            return greedy_tokens(logits)
        # sampling overwrites the logits
        return sample(logits.copy() if self.is_scored else logits, self.options, self.uniforms)

    def append(self, tokens: np.ndarray) -> np.ndarray:
        """Append `tokens` (G,) to the sequences that are not finished, and return them, with the
        fill token for the others. A sequence with `NO_TOKEN` is invalid."""
        if not self.all_run:
            tokens = np.where(self.running, tokens, self.fill)
        is_last = self.longest + 1 >= self.next_limit
        may_end = is_last or not self.end_tokens.isdisjoint(tokens.tolist())
        if may_end:
            is_end = is_in(tokens, self.end_tokens)
            self.is_invalid = tokens == NO_TOKEN
            tokens = np.where(self.is_invalid, self.fill, tokens)
        if self.longest == self.tokens.shape[1]:
            self.tokens = widened(self.tokens, 2 * self.longest, self.fill)
        self.tokens[self.places, self.lengths] = tokens
        self.lengths += self.running
        self.longest += 1
        self.ended = []
        if may_end:
            self.end(is_end | (self.lengths == self.limits))
        return tokens

    def end(self, ends: np.ndarray) -> None:
        self.ended += np.flatnonzero(ends & self.running).tolist()
        self.is_finished = self.is_finished | ends
        self.note_groups()

    def result(self, group: int) -> tuple[list[list[int]], list[float] | None]:
        length = self.lengths[group]
        tokens = [self.tokens[group, :length].tolist()]
        if not self.is_scored:
            return tokens, None
        score = self.sums[group] / length**self.options.length_penalty
        return tokens, [float(np.float32(score))]


def greedy_tokens(logits: np.ndarray) -> np.ndarray:
    """Return the token (R,) with the largest logit in each row of `logits` (R, V), `NO_TOKEN` if
    that logit is not finite. Of equal logits, it is the lowest token. NaN counts as the largest."""
    tokens = logits.argmax(axis=1)
    largest = logits[np.arange(len(logits)), tokens]
    return np.where(np.isfinite(largest), tokens, NO_TOKEN)


def token_log_p(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return log p (R,) of one of the `tokens` (R,) in each row of `logits` (R, V)."""
    maximum, log_sum = log_sum_exp(logits)
    return (np.take_along_axis(logits, tokens[:, None], axis=1) - maximum - log_sum)[:, 0]


class BeamSearch:
    """The `Search` with `num_beams` (K) hypotheses for each of G `groups`.

    Results are the best `num_return_sequences` by sum(log p) / length^length_penalty. `processors`
    change the log p of each token."""

    # `ended` are the best K finished hypotheses, best first, with a length of 0 where there is none
    states: tuple[str, ...] = (
        *("tokens", "scores", "lengths", "can_improve", "is_finished", "is_invalid"),
        *("ended_tokens", "ended_scores", "ended_lengths", "worst"),
    )
    problem = NOT_FINITE

    def __init__(self, groups: int, options: Options, processors: LogitsProcessors | None = None):
        self.options, self.fill = options, options.fill_token_id
        self.beams, self.candidates = options.num_beams, options.candidates
        self.end_tokens = frozenset(options.eos_token_ids)
        self.processors = processors
        beams = (groups, self.beams)
        self.tokens = self.ended_tokens = np.empty((*beams, 0), np.int64)  # (G, K, t)
        # The rows of one group are equal at first, so only the first row counts.
        first = np.where(np.arange(self.beams) == 0, np.float32(0), EXCLUDED_SCORE)
        self.scores = np.tile(first, (groups, 1))
        self.ended_scores = np.full(beams, -np.inf, np.float32)
        self.ended_lengths = np.zeros(beams, np.int64)
        self.worst = np.full((groups, 1), EXCLUDED_SCORE)  # that a better hypothesis replaces
        self.can_improve = np.ones((groups, 1), bool)
        self.lengths = np.zeros((groups, 1), np.int64)
        self.is_finished, self.is_invalid = np.zeros((2, groups), bool)
        self.ended: list[int] = []
        self.note_groups()

    def note_groups(self) -> None:
        self.groups = np.arange(len(self.scores))[:, None]
        self.first_rows = self.groups * self.beams
        self.longest = int(self.lengths.max(initial=0))
        self.tokens = self.tokens[:, :, : self.longest]
        self.ended_tokens = self.ended_tokens[:, :, : self.longest]

    def advance(self, logits: StepLogits, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        if self.processors is None:
            return self.advance_best(*logits.best(rows, self.candidates))
        values = logits.of(rows)
        new = self.tokens if len(values) == self.scores.size else self.tokens[:, :1]
        count = min(self.candidates, values.shape[1])
        new = new.reshape(len(values), -1)
        return self.advance_best(*process_logits(values, new, count, self.processors))

    def advance_best(self, log_p: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Do what `advance` does, with the best `tokens` of each row and their `log_p`, both
        (rows, C or more), C of `options.candidates`.

        It selects the best K running hypotheses of each group, and stores those that just ended.
        Rows whose log p is NaN had logits that are not finite. Their groups are invalid.
        """
        is_nan = np.isnan(log_p[:, 0])
        if has_nan := bool(is_nan.any()):
            self.is_invalid = is_nan.reshape(len(self.scores), -1).any(axis=1)
            log_p = np.where(is_nan[:, None], 0, log_p)
        scores, tokens, parents = self.best_candidates(log_p, tokens)
        self.lengths = self.lengths + 1
        self.longest += 1
        is_done: np.ndarray | bool = False
        ends = is_in(tokens, self.end_tokens) | (self.lengths == self.options.max_new_tokens)
        if ends.any():
            is_done = self.finish(ends, scores, self.continued(parents, tokens))
            # Keep the best K candidates that have not ended.
            scores, kept = self.best(np.where(ends, scores + EXCLUDED_SCORE, scores), self.beams)
            tokens, parents = tokens[self.groups, kept], parents[self.groups, kept]
        else:  # the candidates are sorted
            beams = self.beams
            scores, tokens, parents = scores[:, :beams], tokens[:, :beams], parents[:, :beams]
        self.scores, self.tokens = scores, self.continued(parents, tokens)
        self.can_improve = self.can_improve & (self.possible_scores() > self.worst)
        is_done = is_done | ~self.can_improve
        self.ended = []
        if has_nan or is_done.any():
            self.end(is_done[:, 0] | self.is_invalid)
        return tokens.ravel(), (self.first_rows + parents).ravel()

    def end(self, ends: np.ndarray) -> None:
        self.ended += np.flatnonzero(ends & ~self.is_finished).tolist()
        self.is_finished = self.is_finished | ends

    def best_candidates(
        self, log_p: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (scores, tokens, beams) of the best C candidates of each group, all (G, C).

        A score is the sum of log p. A candidate continues a beam of its group with one token.
        `log_p` and `tokens` are as in `advance_best`.
        """
        count, per_row = len(self.scores), log_p.shape[1]
        if len(log_p) == count:  # at first, one row for all beams of a group
            log_p, tokens = (np.repeat(rows, self.beams, axis=0) for rows in (log_p, tokens))
        sums = (log_p + self.scores.reshape(-1, 1)).reshape(count, -1)
        scores, indices = self.best(sums, self.candidates)
        return scores, tokens.reshape(count, -1)[self.groups, indices], indices // per_row

    def best(self, scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the `count` largest `scores` of each group, (G, n), and their indices.

        They are sorted, largest first, ties by index. `top` takes longer for so few numbers.
        """
        indices = (-scores).argsort(axis=1, kind="stable")[:, :count]
        return scores[self.groups, indices], indices

    def continued(self, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return sequences (G, n, t): those of the beams `parents` with the next token of `tokens`,
        both (G, n)."""
        before = self.tokens[self.groups, parents]
        sequences = np.concatenate([before, tokens[:, :, None]], axis=2)
        # of groups that joined later they are shorter
        sequences[self.groups, np.arange(tokens.shape[1]), self.lengths - 1] = tokens
        return sequences

    def possible_scores(self) -> np.ndarray:
        """Return the best score (G, 1) that the running hypotheses of each group may still get."""
        scores, penalty = self.scores[:, :1], self.options.length_penalty
        if self.options.early_stopping == "never" and penalty > 0:
            return scores / power(self.options.max_new_tokens, penalty)
        return scores / self.penalties()

    def penalties(self) -> np.ndarray:
        """Return length^length_penalty (G, 1) of the running hypotheses of each group."""
        count = 1 << self.longest.bit_length()
        return first_powers(count, self.options.length_penalty)[self.lengths]

    def finish(self, ends: np.ndarray, scores: np.ndarray, sequences: np.ndarray) -> np.ndarray:
        """Store candidates that end, and return True for groups whose search is done, (G, 1).

        Those of the best K that end, `ends` (G, C), compete with earlier finished hypotheses.
        `scores` (G, C) and `sequences` (G, C, t) are those of all candidates.
        """
        stops_early = self.options.early_stopping is True
        is_open = self.can_improve & ~self.are_full() if stops_early else self.can_improve
        just_ended = ends & is_open
        just_ended[:, self.beams :] = False
        if just_ended.any():
            self.store(just_ended, scores, sequences)
        is_done = np.logical_and.reduce(ends, axis=1, keepdims=True)
        return is_done | self.are_full() if stops_early else is_done

    def are_full(self) -> np.ndarray:
        """Return True for groups with K finished hypotheses, (G, 1)."""
        return np.logical_and.reduce(self.ended_lengths, axis=1, keepdims=True)

    def store(self, just_ended: np.ndarray, scores: np.ndarray, sequences: np.ndarray) -> None:
        """Keep the best K of the finished hypotheses and the candidates that have `just_ended`."""
        scores = scores / self.penalties()
        scores = np.where(just_ended, scores, scores + EXCLUDED_SCORE)
        both = np.concatenate([self.ended_scores, scores], axis=1)
        self.ended_scores, kept = self.best(both, self.beams)
        self.ended_tokens = joined(self.ended_tokens, sequences, 1, self.fill)[self.groups, kept]
        lengths = np.concatenate([self.ended_lengths, just_ended * self.lengths], axis=1)
        self.ended_lengths = lengths[self.groups, kept]
        worst = self.ended_scores.min(axis=1, keepdims=True)
        worst = np.where(self.ended_lengths > 0, worst, EXCLUDED_SCORE)
        self.worst = worst.min(axis=1, keepdims=True)

    def result(self, group: int) -> tuple[list[list[int]], list[float]]:
        count = self.options.num_return_sequences
        best = zip(self.ended_tokens[group, :count].tolist(), self.ended_lengths[group].tolist())
        tokens = [sequence[:length] for sequence, length in best]
        return tokens, self.ended_scores[group, :count].tolist()


def keep(search: Search, kept: np.ndarray, other: Search | None = None) -> None:
    """Let `search` go on with the groups at the places `kept` (G,) only, in this order.

    After its own groups the places count those of `other`, a search with equal options. Both then
    have no processors.
    """
    for name in search.states:
        values = getattr(search, name)
        if other is not None:
            values = joined(values, getattr(other, name), 0, search.fill)
        setattr(search, name, values[kept])
    search.processors = search.processors and search.processors.take(kept)
    search.note_groups()


def joined(first: np.ndarray, second: np.ndarray, axis: int, fill: int) -> np.ndarray:
    """Return both arrays one after the other along `axis`. If there is another axis, the last is as
    long as the longer one, padded with `fill`."""
    if first.ndim > 1:
        width = max(first.shape[-1], second.shape[-1])
        first, second = widened(first, width, fill), widened(second, width, fill)
    return np.concatenate([first, second], axis=axis)


def is_in(tokens: np.ndarray, numbers: Collection[int]) -> np.ndarray:
    """Return True where one of `tokens` is one of `numbers`."""
    flags = np.zeros(tokens.shape, bool)
    for number in numbers:
        flags |= tokens == number
    return flags


@functools.lru_cache(maxsize=64)
def first_powers(count: int, exponent: float) -> np.ndarray:
    """Return the `power` of the lengths 0 to `count` - 1."""
    return np.array([power(length, exponent) for length in range(count)])


def power(length: int, exponent: float) -> np.float32:
    """Return length^exponent, computed in float64 as in transformers and rounded to float32."""
    with np.errstate(all="ignore"):
        return np.float32(np.float64(length) ** exponent)


def widened(sequences: np.ndarray, width: int, fill_token_id: int) -> np.ndarray:
    """Return `sequences` (..., t) padded to (..., width) with `fill_token_id`."""
    shape = (*sequences.shape[:-1], width - sequences.shape[-1])
    padding = np.full(shape, fill_token_id, sequences.dtype)
    return np.concatenate([sequences, padding], axis=-1)


# logits per run and thread: with their log-softmax they stay in the cache of a core
CHUNK = 1 << 17
# minimum logits for several threads: fewer take less time than the threads take to wake up
MIN_SHARED_LOGITS = 1 << 19
# written by tests/support/top_k_graph.py, because the runtime works without onnx
GRAPH = Path(__file__).with_name("top_k.onnx")


def top_k_tokens(logits: np.ndarray, count: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Return log p and index of the top `count` tokens of each row, both (rows, count).

    `logits` are (rows, V). The best token comes first, ties are sorted by index. All log p of a row
    are NaN if the row has NaN or infinity, or only -infinity. `threads` is the number of CPU
    threads.
    """
    threads = threads if logits.size > MIN_SHARED_LOGITS else 1
    run, chunk = session(threads).run, max(1, threads * CHUNK // logits.shape[1])
    feeds = {"logits": logits, "count": np.array([count])}
    if len(logits) <= chunk:
        return tuple(run(None, feeds))
    parts = [logits[row : row + chunk] for row in range(0, len(logits), chunk)]
    log_p, tokens = map(np.concatenate, zip(*[run(None, feeds | {"logits": p}) for p in parts]))
    return log_p, tokens


@functools.cache
def session(threads: int) -> "onnxruntime.InferenceSession":
    """Return the session of the graph for top-k with this number of `threads`, one for each number.

    The threads do not spin between two steps, because they would compete with the decoder's threads
    for CPUs.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = FATAL
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(GRAPH, options, providers=["CPUExecutionProvider"])
