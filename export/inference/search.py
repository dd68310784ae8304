"""Greedy search, sampling and beam search in numpy, with the same tokens as
`transformers.generate`.

A search is a state machine: `advance` takes the logits of the next token and returns the selected
tokens, until it is finished. The caller decides how requests are batched.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .logits import Prompt, Sampler, as_rows, log_sum_exp, row_seeds, row_uniforms, top
from .options import EXCLUDED_SCORE, Options
from .top_k import NOT_FINITE, top_k_tokens

INITIAL_CAPACITY = 256  # initial capacity in new tokens; doubled when it is full


class Search(Protocol):
    """The search of one request of B inputs with K rows each. Rows of one input are adjacent."""

    @property
    def finished(self) -> bool:
        """True if `advance` must not be called again."""

    def advance(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the next tokens (B * K,) and the rows (B * K,) that they continue.

        The rows are `None` if each token continues its own row. The logits are (B * K, V), at the
        first call (B, V), and may be overwritten."""

    def result(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the new tokens (B * N, T) and their scores (B * N,).

        N is `num_return_sequences`. Tokens after the end token are padding. The scores are `None`
        if they were not requested."""


class LogitsProcessors:
    """The logits processors of `options`, in the order of transformers. False if there are none."""

    def __init__(self, options: Options, prompt: Prompt):
        self.options = options
        self.prompt = prompt
        processors = [function(options, prompt) for function in options.logits_functions]
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


def start_search(
    options: Options,
    prompt: Prompt,
    is_scored: bool = False,
    threads: int = 1,
    seeds: Sequence[int] | None = None,
) -> Search:
    """Return the search of `options` for the inputs of `prompt`.

    Args:
        options: resolved options.
        prompt: tokens before the first new one.
        is_scored: whether `result` returns scores; beam search always does.
        threads: CPU threads that select the top k of beam search.
        seeds: sampling seeds, one per input; by default derived from `options.seed`.
    """
    processors = LogitsProcessors(options, prompt)
    if options.num_beams > 1:
        return BeamSearch(len(prompt.ids), options, processors, threads)
    scores = Scores(len(prompt.ids) * options.num_return_sequences) if is_scored else None
    return TokenSearch(len(prompt.ids), options, processors, scores, seeds)


class Scores:
    """The sums of log p of `rows` sequences, and their numbers of tokens, including the end token.

    p is the softmax of the processed logits, before temperature and the filters of sampling."""

    def __init__(self, rows: int):
        self.sums = np.zeros(rows)
        self.lengths = np.zeros(rows, np.int64)

    def add(self, logits: np.ndarray, tokens: np.ndarray, running: np.ndarray) -> None:
        maximum, log_sum = log_sum_exp(logits)
        log_p = np.take_along_axis(logits, tokens[:, None], axis=1) - maximum - log_sum
        self.sums += np.where(running, log_p[:, 0], 0)
        self.lengths += running

    def normalized(self, length_penalty: float) -> np.ndarray:
        """Return the scores (rows,) by the formula of beam search, sum(log p) /
        length^length_penalty."""
        return (self.sums / self.lengths**length_penalty).astype(np.float32)


class TokenSearch:
    """Greedy search, or sampling with `do_sample`, with `num_return_sequences` rows per input.

    Each row ends by itself, with pad tokens after its end token.

    Args:
        inputs: number of inputs.
        options: resolved options.
        processors: change the logits.
        scores: log probabilities of the tokens are added to them.
        seeds: sampling seeds, one per input; by default derived from `options.seed`.
    """

    def __init__(
        self,
        inputs: int,
        options: Options,
        processors: LogitsProcessors | None = None,
        scores: Scores | None = None,
        seeds: Sequence[int] | None = None,
    ):
        self.rows = inputs * options.num_return_sequences
        self.options = options
        self.fill_token_id = options.fill_token_id
        self.processors = processors or None
        self.scores = scores
        self.choose = start_sampler(inputs, options, seeds) if options.do_sample else greedy
        self.eos = np.array(options.eos_token_ids, np.int64)
        self.running = np.ones(self.rows, bool)
        self.tokens = np.empty((self.rows, min(options.max_new_tokens, INITIAL_CAPACITY)), np.int64)
        self.length = 0
        self.finished = False

    def advance(self, logits: np.ndarray) -> tuple[np.ndarray, None]:
        """Return one token per row, (rows,), selected by the logits, and None: each row continues
        itself.

        Finished rows get the pad token. Logits are (B, V) or (rows, V).
        """
        logits = as_rows(logits, self.rows)
        if self.length == self.tokens.shape[1]:
            self.tokens = widened(self.tokens, 2 * self.length, self.fill_token_id)
        if self.processors is not None:
            self.processors(self.tokens[:, : self.length], logits)
        # sampling overwrites the logits
        chosen_from = logits if self.scores is None else logits.copy()
        tokens = np.where(self.running, self.choose(chosen_from), self.fill_token_id)
        if self.scores is not None:
            self.scores.add(logits, tokens, self.running)
        self.tokens[:, self.length] = tokens
        self.length += 1
        self.running &= (tokens[:, None] != self.eos).all(axis=1)
        self.finished = self.length == self.options.max_new_tokens or not self.running.any()
        return tokens, None

    def result(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the new tokens (rows, T), and the scores (rows,) or None if they were not
        requested."""
        scores = self.scores.normalized(self.options.length_penalty) if self.scores else None
        return self.tokens[:, : self.length], scores


def start_sampler(inputs: int, options: Options, seeds: Sequence[int] | None) -> Sampler:
    """Return the sampler of `inputs` with `num_return_sequences` samples each. `seeds` has the seed
    of each input; by default they are derived from `options.seed`."""
    input_seeds: Sequence[int | None]
    input_seeds = seeds or row_seeds(options.seed, inputs) or [None] * inputs
    samples = range(options.num_return_sequences)
    uniforms = [row_uniforms(seed, sample) for seed in input_seeds for sample in samples]
    return Sampler(options, uniforms)


def greedy(logits: np.ndarray) -> np.ndarray:
    return logits.argmax(axis=1)


ROW_STATES = ("scores", "can_improve", "lengths", "is_finished")  # of `BeamSearch`, (B, ...)


class BeamSearch:
    """Beam search with `num_beams` (K) hypotheses for each of B `inputs`.

    It returns the best `num_return_sequences` by sum(log p) / length^length_penalty. Inputs can
    leave and join between two steps, see `take` and `add`, and then differ in length. `processors`
    change the log p of each token. Without processors, `threads` CPU threads select the top k."""

    def __init__(
        self,
        inputs: int,
        options: Options,
        processors: LogitsProcessors | None = None,
        threads: int = 1,
    ):
        self.options = options
        self.threads = threads
        self.processors = processors
        self.eos = np.array(options.eos_token_ids, np.int64)
        self.is_best = np.arange(options.candidates) < options.num_beams
        beams = (inputs, options.num_beams)
        self.tokens = np.empty((*beams, 0), np.int64)  # (B, K, t)
        # The rows of one input are equal at first, so only the first row counts.
        first = np.where(np.arange(options.num_beams) == 0, np.float32(0), EXCLUDED_SCORE)
        self.scores = np.tile(first, (inputs, 1))
        none = np.full(beams, -np.inf, np.float32)
        self.ended = FinishedBeams(
            self.tokens, none, np.zeros(beams, np.int64), options.fill_token_id
        )
        self.can_improve = np.ones((inputs, 1), bool)
        self.lengths = np.zeros((inputs, 1), np.int64)
        self.is_finished = np.zeros(inputs, bool)  # of each input

    @property
    def finished(self) -> bool:
        return bool(self.is_finished.all())

    @property
    def inputs(self) -> np.ndarray:
        """(B, 1), the number of each input."""
        return np.arange(len(self.scores))[:, None]

    def advance(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Select the best K running hypotheses and store those that just ended.

        Returns the last tokens of the running ones, and the rows of the batch that these continue,
        both (B * K,). Logits are (B * K, V), at the first call (B, V).
        """
        tokens, parents = self.advance_top(*self.top_tokens(logits))
        return tokens.ravel(), (self.inputs * self.options.num_beams + parents).ravel()

    def top_tokens(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log p and ids of the best tokens of each row of `logits` (R, V), both (R, n).

        Raises:
            ValueError: if a row has NaN or infinity, or only -infinity.
        """
        count = min(self.options.candidates, logits.shape[1])
        if not self.processors:
            log_p, tokens = top_k_tokens(logits, count, self.threads)
            if np.isnan(log_p).any():
                raise ValueError(NOT_FINITE)
            return log_p, tokens
        rows = self.tokens if len(logits) == self.scores.size else self.tokens[:, :1]
        return process_logits(logits, rows.reshape(len(logits), -1), count, self.processors)

    def advance_top(self, log_p: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Do what `advance` does, with `log_p` and ids of the best `tokens` of each row, from
        `top_tokens`.

        Returns the last tokens of the best K hypotheses, and the beams from 0 to K - 1 of their
        input that they continue, both (B, K).
        """
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
        self.tokens = sequences[self.inputs, kept]

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
        self.is_finished = self.is_finished | is_done[:, 0]
        return np.take_along_axis(tokens, kept, axis=1), np.take_along_axis(parents, kept, axis=1)

    def best_candidates(
        self, log_p: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (scores, tokens, beams) of the best C candidates of each input, all (B, C).

        A score is the sum of log p. A candidate continues a beam of its input with one token. C is
        `options.candidates`. `log_p` and `tokens` are as in `advance_top`.
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
            self.tokens[self.inputs, parents], self.lengths.max() + 1, self.options.fill_token_id
        )
        np.put_along_axis(sequences, self.lengths[:, :, None], tokens[:, :, None], axis=2)
        return sequences

    def take(self, inputs: np.ndarray) -> "BeamSearch":
        """Return a search that goes on with some of the inputs: indices, or a mask (B,). This one
        stays as it is."""
        subset = copy.copy(self)
        for name in ROW_STATES:
            setattr(subset, name, getattr(self, name)[inputs])
        subset.tokens = self.tokens[inputs, :, : subset.lengths.max(initial=0)]
        subset.ended = self.ended.take(inputs)
        subset.processors = self.processors and self.processors.take(inputs)
        return subset

    def add(self, other: "BeamSearch") -> None:
        """Append the inputs of `other`, a search with equal options and without processors."""
        width = max(self.tokens.shape[2], other.tokens.shape[2])
        fill = self.options.fill_token_id
        both = [widened(search.tokens, width, fill) for search in (self, other)]
        self.tokens = np.concatenate(both)
        for name in ROW_STATES:
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))
        self.ended = self.ended.joined(other.ended)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens (B * N, T) and scores (B * N,) of the N best finished hypotheses of
        each input.

        N is `num_return_sequences`.
        """
        return self.ended.best(self.options.num_return_sequences)


def process_logits(
    logits: np.ndarray, new: np.ndarray, count: int, processors: LogitsProcessors
) -> tuple[np.ndarray, np.ndarray]:
    """Return the top `count` log p and tokens of each row, both (rows, count), after `processors`
    changed the log p.

    `new` (rows, t) are the new tokens so far. `logits` (rows, V) are overwritten.
    """
    maximum, log_sum = log_sum_exp(logits)
    logits -= maximum
    logits -= log_sum
    processors(new, logits)
    return top(logits, count)


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

    def best(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens (B * count, t) and scores (B * count,) of the best `count` of each
        input."""
        width = self.lengths[:, :count].max()
        sequences = self.sequences[:, :count, :width].reshape(-1, width)
        return sequences, self.scores[:, :count].reshape(-1)


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
