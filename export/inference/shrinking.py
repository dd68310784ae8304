"""Beam search of a batch that finished inputs leave."""

from collections.abc import Sequence

import numpy as np

from .rows import Decoder, GenerationRequest, ShrinkingDecoder
from .search import BeamSearch

# Inputs leave once they are at least this share of the batch: each time costs as much as a fraction
# of a step.
MIN_SHARE = 1 / 8


def run_beams(
    decoder: Decoder, request: GenerationRequest, search: BeamSearch
) -> tuple[np.ndarray, np.ndarray]:
    """Return the new tokens (B * N, T) of the best sequences of each input, and their scores
    (B * N,).

    N is `num_return_sequences`. `decoder` has not read the prompts yet; the caller closes it.
    """
    beams = request.options.num_beams
    inputs = np.arange(len(request.input_ids))  # that are in the batch
    done = []
    shrinking = decoder if isinstance(decoder, ShrinkingDecoder) else None
    logits = decoder.prefill(request.input_ids, request.attention_mask)
    decoder.expand(beams)
    while True:
        tokens, parents = search.advance(logits[:, -1])
        is_finished = search.is_finished
        if search.finished:
            break
        if shrinking is not None and is_finished.mean() >= MIN_SHARE:
            done.append((inputs[is_finished], *search.take(is_finished).result()))
            kept = without_gaps(is_finished)
            shrinking.keep(kept)
            inputs, search = inputs[kept], search.take(kept)
            tokens = tokens.reshape(-1, beams)[kept].ravel()
            beam_indices = parents.reshape(-1, beams)[kept] % beams
            parents = (np.arange(len(kept))[:, None] * beams + beam_indices).ravel()
        logits = decoder.step(tokens[:, None], parents)
    return gather_results([*done, (inputs, *search.result())], request)


def without_gaps(is_finished: np.ndarray) -> np.ndarray:
    """Return the indices of unfinished inputs. Those at the front stay at their places, and the
    last ones take the places of finished ones."""
    running = np.flatnonzero(~is_finished)
    count = len(running)
    kept = np.arange(count)
    kept[is_finished[:count]] = running[running >= count]
    return kept


def gather_results(
    parts: Sequence[tuple[Sequence[int] | np.ndarray, np.ndarray, np.ndarray]],
    request: GenerationRequest,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens (B * N, T) and scores (B * N,) of all B inputs of `request`.

    Each of `parts` has the numbers of its n inputs, their tokens (n * N, t) and scores (n * N,).
    """
    count, copies = len(request.input_ids), request.options.num_return_sequences
    width = max(tokens.shape[1] for _, tokens, _ in parts)
    all_tokens = np.full((count, copies, width), request.options.fill_token_id)
    all_scores = np.empty((count, copies), np.float32)
    for inputs, tokens, scores in parts:
        all_tokens[inputs, :, : tokens.shape[1]] = tokens.reshape(len(inputs), copies, -1)
        all_scores[inputs] = scores.reshape(len(inputs), copies)
    return all_tokens.reshape(count * copies, width), all_scores.ravel()
