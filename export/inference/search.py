"""Greedy search, sampling and beam search in numpy, with the same tokens as
`transformers.generate`.

A search is a state machine: `advance` takes the logits of the next token and returns the selected
tokens, until it is finished. The caller decides how requests are batched.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .logits import Prompt, Sampler, as_rows, log_sum_exp, top
from .options import EXCLUDED_SCORE, LOGITS_FUNCTIONS, Options
from .top_k import top_k_tokens

INITIAL_CAPACITY = 256  # initial capacity in new tokens; doubled when it is full


class Search(Protocol):
    """The search of one request of B inputs with K rows each. Rows of one input are adjacent."""

    finished: bool  # `advance` must not be called again

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
        self.prompt = prompt
        processors = [function(options, prompt) for function in LOGITS_FUNCTIONS]
        self.active = [process for process in processors if process is not None]

    def __bool__(self) -> bool:
        return bool(self.active)

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
        threads: CPU threads of beam search.
        seeds: sampling seeds, one per input; `None` samples all rows with `options.seed`.
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
        seeds: sampling seeds, one per input.
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
        self.choose = Sampler(options, seeds=seeds) if options.do_sample else greedy
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
            self.tokens = double_length(self.tokens, self.fill_token_id)
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


def greedy(logits: np.ndarray) -> np.ndarray:
    return logits.argmax(axis=1)


def double_length(tokens: np.ndarray, fill_token_id: int) -> np.ndarray:
    """Return `tokens` (..., t) as (..., 2 * t), padded at the end with `fill_token_id`."""
    return np.concatenate([tokens, np.full_like(tokens, fill_token_id)], axis=-1)


class BeamSearch:
    """Beam search with `num_beams` (K) hypotheses for each of B `inputs`.

    It returns the best `num_return_sequences` by sum(log p) / length^length_penalty. `processors`
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
        self.inputs = np.arange(inputs)[:, None]
        self.is_best = np.arange(options.candidates) < options.num_beams
        self.tokens = np.full(
            (inputs * options.num_beams, min(options.max_new_tokens, INITIAL_CAPACITY)),
            options.fill_token_id,
        )
        # The rows of one input are equal at first, so only the first row counts.
        first = np.where(np.arange(options.num_beams) == 0, np.float32(0), EXCLUDED_SCORE)
        self.scores = np.tile(first, (inputs, 1))
        self.ended = FinishedBeams(self.tokens, self.scores)
        self.can_improve = np.ones((inputs, 1), bool)
        self.length = 0
        self.finished = False

    def advance(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Select the best K running hypotheses and store those that just ended.

        Returns their last tokens and the rows of the batch that they continue, both (B * K,).
        Logits are (B * K, V), at the first call (B, V).
        """
        options = self.options
        if self.length == self.tokens.shape[1]:
            self.tokens = double_length(self.tokens, options.fill_token_id)
            self.ended.sequences = double_length(self.ended.sequences, options.fill_token_id)
        candidates, tokens, parents = self.best_candidates(logits)
        sequences = self.tokens[parents]
        sequences[:, :, self.length] = tokens
        self.length += 1
        ends = (tokens[..., None] == self.eos).any(axis=-1) | (
            self.length == options.max_new_tokens
        )

        # Keep the best K candidates that have not ended.
        self.scores, kept = top(
            np.where(ends, candidates + EXCLUDED_SCORE, candidates), options.num_beams
        )
        self.tokens = sequences[self.inputs, kept].reshape(self.tokens.shape)

        # Candidates of the best K that end now compete with earlier finished hypotheses.
        stops_early = options.early_stopping is True
        is_open = self.can_improve & ~self.ended.are_full() if stops_early else self.can_improve
        just_ended = ends & self.is_best & is_open
        if just_ended.any():
            scores = candidates / np.float32(self.length**options.length_penalty)
            self.ended.add(sequences, scores, just_ended, self.length)

        self.can_improve = self.can_improve & improvable(
            self.scores, self.ended, self.length, options
        )
        is_full = stops_early and self.ended.are_full().all()
        self.finished = bool(not self.can_improve.any() or is_full or ends.all())
        return self.tokens[:, self.length - 1].copy(), parents[self.inputs, kept].ravel()

    def best_candidates(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (scores, tokens, rows) of the best C candidates of each input, all (B, C).

        A score is the sum of log p. A candidate continues the row of the batch with one token. C is
        `options.candidates`.
        """
        beams = self.options.num_beams
        is_first = self.length == 0
        new = self.tokens[::beams, :0] if is_first else self.tokens[:, : self.length]
        count = min(self.options.candidates, logits.shape[1])
        if self.processors:
            log_p, tokens = process_logits(logits, new, count, self.processors)
        else:
            log_p, tokens = top_k_tokens(logits, count, self.threads)
        if is_first:
            log_p = np.repeat(log_p, beams, axis=0)
            tokens = np.repeat(tokens, beams, axis=0)
        per_row = log_p.shape[1]
        candidates, indices = top(
            (log_p + self.scores.reshape(-1, 1)).reshape(len(self.inputs), -1),
            self.options.candidates,
        )
        tokens = np.take_along_axis(tokens.reshape(len(self.inputs), -1), indices, axis=1)
        return candidates, tokens, self.inputs * beams + indices // per_row

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


class FinishedBeams:
    """The best K finished hypotheses of each of B inputs, best first.

    The arrays are shaped like `tokens` (B * K, length) and `scores` (B, K)."""

    def __init__(self, tokens: np.ndarray, scores: np.ndarray):
        self.sequences = tokens.reshape(*scores.shape, -1)
        self.scores = np.full_like(scores, -np.inf)
        self.lengths = np.zeros(scores.shape, np.int64)  # 0 for an empty slot

    def are_full(self) -> np.ndarray:
        return np.logical_and.reduce(self.lengths, axis=1, keepdims=True)

    def add(
        self, sequences: np.ndarray, scores: np.ndarray, just_ended: np.ndarray, length: int
    ) -> None:
        """Add the `sequences` (B, C, length) with `scores` (B, C) that have `just_ended` (B, C)."""
        scores = np.where(just_ended, scores, scores + EXCLUDED_SCORE)
        self.scores, best = top(np.concatenate([self.scores, scores], axis=1), self.scores.shape[1])
        inputs = np.arange(len(best))[:, None]
        self.sequences = np.concatenate([self.sequences, sequences], axis=1)[inputs, best]
        self.lengths = np.concatenate([self.lengths, just_ended * length], axis=1)[inputs, best]

    def best(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        width = self.lengths[:, :count].max()
        sequences = self.sequences[:, :count, :width].reshape(-1, width)
        return sequences, self.scores[:, :count].reshape(-1)


def improvable(
    scores: np.ndarray, ended: FinishedBeams, length: int, options: Options
) -> np.ndarray:
    """Return True for inputs whose best running hypothesis may still beat the worst finished one,
    (B, 1).

    `scores` (B, K) are those of running hypotheses with `length` tokens. `ended` are the finished
    hypotheses.
    """
    if options.early_stopping == "never" and options.length_penalty > 0:
        length = options.max_new_tokens
    possible = scores[:, :1] / np.float32(length**options.length_penalty)
    worst = np.where(ended.lengths > 0, ended.scores.min(axis=1, keepdims=True), EXCLUDED_SCORE)
    return np.logical_or.reduce(possible > worst, axis=1, keepdims=True)
