"""Beam search of a batch that finished inputs leave."""

import numpy as np

from .decoder import Decoder, GenerationRequest, ShrinkingDecoder
from .search import BeamSearch

# Inputs leave once they are at least this share of the batch: each time costs as much as a fraction
# of a step.
MIN_SHARE = 1 / 8


def run_beams(
    decoder: Decoder, request: GenerationRequest, search: BeamSearch
) -> tuple[np.ndarray, np.ndarray]:
    """Return the new tokens (B * N, T) of the best N `num_return_sequences`, and their scores
    (B * N,)."""
    beams = request.options.num_beams
    inputs = np.arange(len(request.input_ids))  # that are in the batch
    done: list[tuple[np.ndarray, BeamSearch]] = []
    logits = decoder.prefill(request.input_ids, request.attention_mask)
    decoder.expand(beams)
    while True:
        tokens, parents = search.advance(logits[:, -1])
        is_finished = search.is_finished
        if search.finished:
            break
        if isinstance(decoder, ShrinkingDecoder) and is_finished.mean() >= MIN_SHARE:
            done.append((inputs[is_finished], search.take(is_finished)))
            kept = without_gaps(is_finished)
            decoder.keep(kept)
            inputs, search = inputs[kept], search.take(kept)
            tokens = tokens.reshape(-1, beams)[kept].ravel()
            beam_indices = parents.reshape(-1, beams)[kept] % beams
            parents = (np.arange(len(kept))[:, None] * beams + beam_indices).ravel()
        logits = decoder.step(tokens[:, None], parents)
    return merged([*done, (inputs, search)], request)


def without_gaps(is_finished: np.ndarray) -> np.ndarray:
    """Return the indices of unfinished inputs. Those at the front stay at their places, and the
    last ones take the places of finished ones."""
    running = np.flatnonzero(~is_finished)
    count = len(running)
    kept = np.arange(count)
    kept[is_finished[:count]] = running[running >= count]
    return kept


def merged(
    parts: list[tuple[np.ndarray, BeamSearch]], request: GenerationRequest
) -> tuple[np.ndarray, np.ndarray]:
    """Return the results of searches, each with the numbers of its inputs, in the order of the
    inputs."""
    results = [search.result() for _, search in parts]
    count, copies = len(request.input_ids), request.options.num_return_sequences
    width = max(tokens.shape[1] for tokens, _ in results)
    all_tokens = np.full((count, copies, width), request.options.fill_token_id)
    all_scores = np.empty((count, copies), np.float32)
    for (inputs, _), (tokens, scores) in zip(parts, results):
        all_tokens[inputs, :, : tokens.shape[1]] = tokens.reshape(len(inputs), copies, -1)
        all_scores[inputs] = scores.reshape(len(inputs), copies)
    return all_tokens.reshape(count * copies, width), all_scores.ravel()
