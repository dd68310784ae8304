"""Greedy search, sampling and beam search in numpy, with the same tokens as
`transformers.generate`.

A search is a state machine: `advance` takes the logits of the next token and returns the selected
tokens, until it is finished. The caller decides how requests are batched.
"""

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..inference.logits import LogitsProcessors, Sampler, as_rows, log_sum_exp, top
from ..inference.options import EXCLUDED_SCORE, Options
from ..inference.session import FATAL

if TYPE_CHECKING:
    import onnxruntime

INITIAL_CAPACITY = 256  # initial capacity in new tokens; doubled when it is full
NOT_FINITE = "some logits are NaN or infinite, expected numbers"


class Search(Protocol):
    """The search of G groups with equal options, each with K rows of a batch. Rows of one group are
    adjacent.

    Groups can leave and join between two steps, see `take` and `add`. Groups with processors only
    start together, because processors count the tokens of all rows.
    """

    options: Options
    is_finished: np.ndarray  # (G,)
    is_invalid: np.ndarray  # (G,), True after a step whose logits decide no token
    has_ended: bool  # True after a step in which groups finished or became invalid
    problem: str  # of invalid groups

    @property
    def num_best(self) -> int:
        """The number of best tokens of each row that decide the next ones, 0 if all logits do."""

    def advance(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the next tokens (G, K) and the rows of each group (G, K) that they continue.

        The rows are numbers from 0 to K - 1, `None` if each token continues its own row. The logits
        are (G * K, V), at the first call (B, V) for B inputs, and may be overwritten.
        """

    def advance_best(
        self, log_p: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Do what `advance` does, with the best `tokens` of each row and their `log_p`, both
        (rows, `num_best` or more)."""

    def take(self, groups: np.ndarray) -> "Search":
        """Return a search that goes on with some of the groups: indices, or a mask (G,). This one
        stays as it is."""

    def add(self, other: Any) -> None:
        """Append the groups of `other`, a search with equal options, both without processors."""

    def result(self, group: int) -> tuple[list[list[int]], list[float] | None]:
        """Return the new tokens of the sequences of a finished `group`, and their scores.

        The scores are `None` if they were not requested; beam search always has them.
        """


TOKEN_STATES = ("tokens", "lengths", "limits", "is_finished", "is_invalid")  # of `TokenSearch`


class TokenSearch:
    """The `Search` of greedy search or sampling, whose groups are single sequences.

    Args:
        options: resolved options, whose `max_new_tokens` counts less than `limits`.
        limits: (G,), the maximum number of new tokens of each sequence.
        processors: change the logits; sequences of one input are adjacent.
        sampler: draws the tokens; without one they are the most likely.
        is_scored: whether results have scores, sum(log p) / length^length_penalty. p is the softmax
            of the processed logits, before temperature and the filters of sampling.
    """

    problem = "no token can be generated: all are suppressed, or the logits are not finite"

    def __init__(
        self,
        options: Options,
        limits: np.ndarray,
        processors: LogitsProcessors | None = None,
        sampler: Sampler | None = None,
        is_scored: bool = False,
    ):
        self.options = options
        self.processors = processors or None
        self.sampler = sampler
        self.sums = np.zeros(len(limits)) if is_scored else None
        self.tokens = np.full(
            (len(limits), min(limits.max(), INITIAL_CAPACITY)), options.fill_token_id
        )
        self.lengths = np.zeros(len(limits), np.int64)
        self.limits = limits
        self.is_finished, self.is_invalid = np.zeros((2, len(limits)), bool)
        self.has_ended = False
        self.longest, self.shortest_limit = 0, int(limits.min())

    @property
    def num_best(self) -> int:
        return int(self.processors is None and self.sampler is None and self.sums is None)

    def advance(self, logits: np.ndarray) -> tuple[np.ndarray, None]:
        logits = as_rows(logits, len(self.limits))
        if self.processors is not None:
            self.processors(self.tokens[:, : self.longest], logits)
        # sampling overwrites the logits
        chosen_from = logits if self.sums is None else logits.copy()
        tokens = self.sampler(chosen_from) if self.sampler else chosen_from.argmax(axis=1)
        self.is_invalid = tokens < 0
        tokens = np.where(self.is_invalid, self.options.fill_token_id, tokens)
        if self.sums is not None:
            self.sums += np.where(self.is_finished, 0, token_log_p(logits, tokens))
        tokens = self.append(tokens)
        self.has_ended |= bool(self.is_invalid.any())
        return tokens, None

    def advance_best(self, log_p: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, None]:
        return self.append(tokens[:, 0]), None

    def append(self, tokens: np.ndarray) -> np.ndarray:
        """Append `tokens` (G,) to the sequences that are not finished, and return (G, 1), with the
        fill token for the others."""
        running = ~self.is_finished
        tokens = np.where(running, tokens, self.options.fill_token_id)
        if self.longest == self.tokens.shape[1]:
            self.tokens = widened(self.tokens, 2 * self.longest, self.options.fill_token_id)
        self.tokens[np.arange(len(tokens)), self.lengths] = tokens
        self.lengths += running
        self.longest += 1
        ends = np.zeros(len(tokens), bool)
        for token in self.options.eos_token_ids:
            ends |= tokens == token
        if self.longest >= self.shortest_limit:
            ends |= self.lengths == self.limits
        ends &= running
        self.has_ended = bool(ends.any())
        self.is_finished |= ends
        return tokens[:, None]

    def take(self, groups: np.ndarray) -> "TokenSearch":
        subset = copy.copy(self)
        for name in TOKEN_STATES:
            setattr(subset, name, getattr(self, name)[groups])
        subset.sums = None if self.sums is None else self.sums[groups]
        subset.processors = self.processors and self.processors.take(groups)
        subset.sampler = self.sampler and self.sampler.take(groups)
        subset.longest = int(subset.lengths.max(initial=0))
        return subset

    def add(self, other: "TokenSearch") -> None:
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        for search in (self, other):
            search.tokens = widened(search.tokens, width, self.options.fill_token_id)
        for name in TOKEN_STATES:
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))
        self.longest = max(self.longest, other.longest)
        self.shortest_limit = min(self.shortest_limit, other.shortest_limit)
        if self.sums is not None and other.sums is not None:
            self.sums = np.concatenate([self.sums, other.sums])
        if self.sampler is not None and other.sampler is not None:
            self.sampler = self.sampler.joined(other.sampler)

    def result(self, group: int) -> tuple[list[list[int]], list[float] | None]:
        length = self.lengths[group]
        tokens = [self.tokens[group, :length].tolist()]
        if self.sums is None:
            return tokens, None
        score = self.sums[group] / length**self.options.length_penalty
        return tokens, [float(np.float32(score))]


def token_log_p(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return log p (R,) of one of the `tokens` (R,) in each row of `logits` (R, V)."""
    maximum, log_sum = log_sum_exp(logits)
    return (np.take_along_axis(logits, tokens[:, None], axis=1) - maximum - log_sum)[:, 0]


BEAM_STATES = ("scores", "can_improve", "lengths", "is_finished", "is_invalid")  # of `BeamSearch`


class BeamSearch:
    """The `Search` with `num_beams` (K) hypotheses for each of G `groups`.

    Results are the best `num_return_sequences` by sum(log p) / length^length_penalty. `processors`
    change the log p of each token."""

    problem = NOT_FINITE

    def __init__(self, groups: int, options: Options, processors: LogitsProcessors | None = None):
        self.options = options
        self.processors = processors or None
        self.eos = np.array(options.eos_token_ids, np.int64)
        self.is_best = np.arange(options.candidates) < options.num_beams
        beams = (groups, options.num_beams)
        self.tokens = np.empty((*beams, 0), np.int64)  # (G, K, t)
        # The rows of one group are equal at first, so only the first row counts.
        first = np.where(np.arange(options.num_beams) == 0, np.float32(0), EXCLUDED_SCORE)
        self.scores = np.tile(first, (groups, 1))
        none = np.full(beams, -np.inf, np.float32)
        self.ended = FinishedBeams(
            self.tokens, none, np.zeros(beams, np.int64), options.fill_token_id
        )
        self.can_improve = np.ones((groups, 1), bool)
        self.lengths = np.zeros((groups, 1), np.int64)
        self.is_finished, self.is_invalid = np.zeros((2, groups), bool)
        self.has_ended = False

    @property
    def num_best(self) -> int:
        return 0 if self.processors else self.options.candidates

    @property
    def groups(self) -> np.ndarray:
        """(G, 1), the number of each group."""
        return np.arange(len(self.scores))[:, None]

    def advance(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self.processors is not None  # without, the best tokens of each row are enough
        rows = self.tokens if len(logits) == self.scores.size else self.tokens[:, :1]
        count = min(self.options.candidates, logits.shape[1])
        new = rows.reshape(len(logits), -1)
        return self.advance_best(*process_logits(logits, new, count, self.processors))

    def advance_best(self, log_p: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Select the best K running hypotheses of each group, and store those that just ended.

        Rows whose log p is NaN had logits that are not finite. Their groups are invalid.
        """
        is_nan = np.isnan(log_p[:, 0])
        if is_nan.any():
            self.is_invalid = is_nan.reshape(len(self.scores), -1).any(axis=1)
            log_p = np.where(is_nan[:, None], 0, log_p)
        options = self.options
        candidates, tokens, parents = self.best_candidates(log_p, tokens)
        sequences = self.continued(parents, tokens)
        self.lengths = self.lengths + 1
        ends = (tokens[..., None] == self.eos).any(axis=-1) | (
            self.lengths == options.max_new_tokens
        )

        # Keep the best K candidates that have not ended.
        self.scores, kept = top(
            np.where(ends, candidates + EXCLUDED_SCORE, candidates), options.num_beams
        )
        self.tokens = sequences[self.groups, kept]

        # Candidates of the best K that end now compete with earlier finished hypotheses.
        stops_early = options.early_stopping is True
        is_open = self.can_improve & ~self.ended.are_full() if stops_early else self.can_improve
        just_ended = ends & self.is_best & is_open
        if just_ended.any():
            scores = candidates / powers(self.lengths, options.length_penalty)
            self.ended.add(sequences, scores, just_ended, self.lengths)

        self.can_improve = self.can_improve & improvable(
            self.scores, self.ended, self.lengths, options
        )
        is_done = ~self.can_improve | ends.all(axis=1, keepdims=True)
        if stops_early:
            is_done |= self.ended.are_full()
        self.has_ended = bool(is_done.any()) or bool(is_nan.any())
        self.is_finished = self.is_finished | is_done[:, 0]
        return np.take_along_axis(tokens, kept, axis=1), np.take_along_axis(parents, kept, axis=1)

    def best_candidates(
        self, log_p: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (scores, tokens, beams) of the best C candidates of each input, all (B, C).

        A score is the sum of log p. A candidate continues a beam of its input with one token. C is
        `options.candidates`. `log_p` and `tokens` are as in `advance_best`.
        """
        count, per_row = len(self.scores), log_p.shape[1]
        if len(log_p) == count:  # at first, one row for all beams of an input
            log_p, tokens = (
                np.repeat(rows, self.scores.shape[1], axis=0) for rows in (log_p, tokens)
            )
        candidates, indices = top(
            (log_p + self.scores.reshape(-1, 1)).reshape(count, -1), self.options.candidates
        )
        tokens = np.take_along_axis(tokens.reshape(count, -1), indices, axis=1)
        return candidates, tokens, indices // per_row

    def continued(self, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return sequences (B, C, t): those of the beams `parents` with the next token of `tokens`,
        both (B, C)."""
        sequences = widened(
            self.tokens[self.groups, parents], self.lengths.max() + 1, self.options.fill_token_id
        )
        np.put_along_axis(sequences, self.lengths[:, :, None], tokens[:, :, None], axis=2)
        return sequences

    def take(self, groups: np.ndarray) -> "BeamSearch":
        subset = copy.copy(self)
        for name in BEAM_STATES:
            setattr(subset, name, getattr(self, name)[groups])
        subset.tokens = self.tokens[groups, :, : subset.lengths.max(initial=0)]
        subset.ended = self.ended.take(groups)
        subset.processors = self.processors and self.processors.take(groups)
        return subset

    def add(self, other: "BeamSearch") -> None:
        width = max(self.tokens.shape[2], other.tokens.shape[2])
        fill = self.options.fill_token_id
        both = [widened(search.tokens, width, fill) for search in (self, other)]
        self.tokens = np.concatenate(both)
        for name in BEAM_STATES:
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))
        self.ended = self.ended.joined(other.ended)

    def result(self, group: int) -> tuple[list[list[int]], list[float]]:
        count = self.options.num_return_sequences
        best = zip(self.ended.sequences[group, :count].tolist(), self.ended.lengths[group].tolist())
        tokens = [sequence[:length] for sequence, length in best]
        return tokens, self.ended.scores[group, :count].tolist()


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


@dataclass
class FinishedBeams:
    """The best K finished hypotheses of each of B inputs, best first.

    Args:
        sequences: tokens (B, K, t).
        scores: (B, K).
        lengths: (B, K), 0 where there is no hypothesis.
        fill_token_id: stands after the end of a sequence.
    """

    sequences: np.ndarray
    scores: np.ndarray
    lengths: np.ndarray
    fill_token_id: int

    def are_full(self) -> np.ndarray:
        return np.logical_and.reduce(self.lengths, axis=1, keepdims=True)

    def add(
        self,
        sequences: np.ndarray,
        scores: np.ndarray,
        just_ended: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        """Add those of `sequences` (B, C, t) that have `just_ended` (B, C), and keep the best K.

        They have `scores` (B, C) and `lengths` (B, 1).
        """
        scores = np.where(just_ended, scores, scores + EXCLUDED_SCORE)
        self.scores, best = top(np.concatenate([self.scores, scores], axis=1), self.scores.shape[1])
        inputs = np.arange(len(best))[:, None]
        earlier = widened(self.sequences, sequences.shape[2], self.fill_token_id)
        self.sequences = np.concatenate([earlier, sequences], axis=1)[inputs, best]
        self.lengths = np.concatenate([self.lengths, just_ended * lengths], axis=1)[inputs, best]

    def take(self, inputs: np.ndarray) -> "FinishedBeams":
        """Return the hypotheses of some `inputs`, which are indices or a mask (B,)."""
        lengths = self.lengths[inputs]
        sequences = self.sequences[inputs, :, : lengths.max(initial=0)]
        return FinishedBeams(sequences, self.scores[inputs], lengths, self.fill_token_id)

    def joined(self, other: "FinishedBeams") -> "FinishedBeams":
        """Return the hypotheses of both, those of `other` last."""
        width = max(self.sequences.shape[2], other.sequences.shape[2])
        sequences = [widened(ended.sequences, width, self.fill_token_id) for ended in (self, other)]
        return FinishedBeams(
            np.concatenate(sequences),
            np.concatenate([self.scores, other.scores]),
            np.concatenate([self.lengths, other.lengths]),
            self.fill_token_id,
        )


def improvable(
    scores: np.ndarray, ended: FinishedBeams, lengths: np.ndarray, options: Options
) -> np.ndarray:
    """Return True for inputs whose best running hypothesis may still beat the worst finished one,
    (B, 1).

    `scores` (B, K) and `lengths` (B, 1) are those of running hypotheses. `ended` are the finished
    hypotheses.
    """
    if options.early_stopping == "never" and options.length_penalty > 0:
        lengths = np.full_like(lengths, options.max_new_tokens)
    possible = scores[:, :1] / powers(lengths, options.length_penalty)
    worst = np.where(ended.lengths > 0, ended.scores.min(axis=1, keepdims=True), EXCLUDED_SCORE)
    return np.logical_or.reduce(possible > worst, axis=1, keepdims=True)


def powers(lengths: np.ndarray, exponent: float) -> np.ndarray:
    """Return length^exponent of each of `lengths` (B, 1), computed in float64 as in transformers
    and rounded to float32."""
    with np.errstate(all="ignore"):
        values = [np.float64(length) ** exponent for length in lengths.ravel().tolist()]
    return np.array(values, np.float32).reshape(lengths.shape)


def widened(sequences: np.ndarray, width: int, fill_token_id: int) -> np.ndarray:
    """Return `sequences` (..., t) padded to (..., width) with `fill_token_id`."""
    padding = np.full((*sequences.shape[:-1], width - sequences.shape[-1]), fill_token_id)
    return np.concatenate([sequences, padding], axis=-1)


# logits per run and thread: with their log-softmax they stay in the cache of a core
CHUNK = 1 << 18
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
    counts = np.array([count])
    results = [
        run(None, {"logits": logits[row : row + chunk], "count": counts})
        for row in range(0, len(logits), chunk)
    ]
    log_p, tokens = (np.concatenate(parts) for parts in zip(*results))
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
