"""Greedy and beam search in numpy, token for token what `transformers.generate` does.

Both drive a `Step`: a function from the last token of every row, and the rows the caches are to be taken from, to the
logits of the next token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

NEVER = np.float32(-1e9)  # transformers' score of a beam that must not be chosen

# (tokens (rows,), taken_from (rows,) or None) -> logits (rows, vocabulary)
Step = Callable[[np.ndarray, np.ndarray | None], np.ndarray]


@dataclass(frozen=True)
class Options:
    """Fields of transformers' `GenerationConfig`, with its defaults. `eos_token_ids` may be empty."""

    max_new_tokens: int = 20
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0


def greedy(step: Step, logits: np.ndarray, options: Options) -> np.ndarray:
    """`logits` (rows, vocabulary) of the first token -> the new tokens (rows, up to max_new_tokens), padded behind the
    end token."""
    running = np.ones(len(logits), bool)
    tokens = []
    while True:
        tokens.append(np.where(running, logits.argmax(axis=-1), options.pad_token_id))
        running &= ~np.isin(tokens[-1], options.eos_token_ids)
        if not running.any() or len(tokens) == options.max_new_tokens:
            return np.stack(tokens, axis=1)
        logits = step(tokens[-1], None)


def beam_search(step: Step, logits: np.ndarray, options: Options) -> np.ndarray:
    """As `greedy`, for the best of `num_beams` (K) hypotheses by sum(log p) / length^length_penalty.

    `logits` are those of (B * K) rows, each of B inputs K times in a row.
    """
    K, length = options.num_beams, options.max_new_tokens
    B, V = len(logits) // K, logits.shape[-1]
    candidates = max(2, 1 + len(options.eos_token_ids)) * K  # so that K are left when the best K all end
    if candidates > K * V:
        raise ValueError(f"num_beams {K} needs {candidates} candidates, but {K} beams have {K * V} continuations")
    running = np.full((B, K, length), options.pad_token_id)
    finished = running.copy()
    # Rows of one input are equal at first: only the first of them counts.
    running_scores = np.tile(np.where(np.arange(K) == 0, np.float32(0), NEVER), (B, 1))
    finished_scores = np.full((B, K), NEVER)
    is_finished = np.zeros((B, K), bool)
    can_improve = np.ones((B, 1), bool)
    for t in range(length):
        scores = (log_softmax(logits).reshape(B, K, V) + running_scores[..., None]).reshape(B, K * V)
        scores, chosen = top(scores, candidates)
        beam, token = np.divmod(chosen, V)
        sequences = np.take_along_axis(running, beam[..., None], axis=1)
        sequences[:, :, t] = token
        ends = np.isin(token, options.eos_token_ids) | (t + 1 == length)

        # The best K candidates that go on.
        running_scores, kept = top(np.where(ends, scores + NEVER, scores), K)
        running = np.take_along_axis(sequences, kept[..., None], axis=1)

        # Those of the best K that end here compete with the hypotheses that ended before.
        just_finished = ends & (np.arange(candidates) < K)
        closed = ~can_improve | ((options.early_stopping is True) & is_finished.all(axis=1, keepdims=True))
        ended_scores = scores / np.float32((t + 1) ** options.length_penalty)
        ended_scores = np.where(just_finished & ~closed, ended_scores, ended_scores + NEVER)
        finished_scores, best = top(np.concatenate([finished_scores, ended_scores], axis=1), K)
        finished = np.take_along_axis(np.concatenate([finished, sequences], axis=1), best[..., None], axis=1)
        is_finished = np.take_along_axis(np.concatenate([is_finished, just_finished], axis=1), best, axis=1)

        can_improve = can_improve & improvable(running_scores, finished_scores, is_finished, t + 1, options)
        if not can_improve.any() or (options.early_stopping is True and is_finished.all()) or ends.all():
            break
        taken_from = np.take_along_axis(beam, kept, axis=1) + np.arange(B)[:, None] * K
        logits = step(running[:, :, t].ravel(), taken_from.ravel())
    return up_to_end(finished[:, 0], options)


def improvable(running_scores, finished_scores, is_finished, length, options):
    """Whether the best running hypothesis may still beat the worst finished one; (B, 1)."""
    if options.early_stopping == "never" and options.length_penalty > 0:
        length = options.max_new_tokens
    possible = running_scores[:, :1] / np.float32(length**options.length_penalty)
    worst = np.where(is_finished, finished_scores.min(axis=1, keepdims=True), NEVER)
    return (possible > worst).any(axis=1, keepdims=True)


def up_to_end(sequences, options):
    """Cuts (B, T) behind the longest hypothesis, each of which is over at its end token."""
    ends = np.isin(sequences, options.eos_token_ids)
    lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, sequences.shape[1])
    unfinished = ~ends.any(axis=1)
    if unfinished.any():
        return sequences
    return sequences[:, : lengths.max()]


def top(scores, count):
    """The `count` largest of each row, best first, ties by index: (values, indices)."""
    indices = np.argpartition(-scores, count - 1, axis=-1)[:, :count]
    indices.sort(axis=-1)
    order = np.argsort(-np.take_along_axis(scores, indices, axis=-1), axis=-1, kind="stable")
    indices = np.take_along_axis(indices, order, axis=-1)
    return np.take_along_axis(scores, indices, axis=-1), indices


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
