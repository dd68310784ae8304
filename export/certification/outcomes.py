"""The results of an export for the inputs of a reference."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np

from ..engine.client import Client
from ..engine.encoder import EncoderScheduler
from ..engine.inputs import Generated, GenerationInput, encoder_feeds
from ..engine.limits import Admission
from ..engine.loop import Engine
from ..engine.model import OnnxModel
from ..engine.offline import generate
from ..inference.inputs import pad_sequences
from .reference import Arrays, Reference, real_values, sample
from .tolerances import error_scale, relative_margins

BEAMS = 3
REQUESTS = 8  # at a time


def outcome(model: OnnxModel, reference: Reference) -> Arrays:
    """Return the results of an export for the inputs of a reference, by name.

    A model that reads full sequences has its outputs, see `outputs`. All outputs and logits are
    reduced by `sample`. A model that generates has

    - `logits` (B, T, V), each before one of the reference's tokens;
    - `greedy` (B, T), the tokens of greedy search;
    - `beams` (B, T) and `beam_scores` (B,), the best sequences of beam search and their scores.
    """
    if not model.info.generates:
        return {name: sample(values) for name, values in outputs(model, reference).items()}
    beams, scores = sequences(model, reference, num_beams=BEAMS)
    return {
        "logits": sample(next_logits(model, reference, reference.inputs["tokens"])),
        "greedy": sequences(model, reference)[0],
        "beams": beams,
        "beam_scores": np.array(scores, np.float32),
    }


def sequences(
    model: OnnxModel, reference: Reference, **options: Any
) -> tuple[np.ndarray, list[float | None]]:
    """Return the new tokens (B, T) and the scores of the rows of `reference`, with `options`
    besides its own."""
    rows = reference.rows(model.info, **options)
    results = [sequence for [sequence] in generate(model, rows)]
    fill = rows[0].options.fill_token_id
    tokens, _ = pad_sequences([result.tokens for result in results], fill)
    return tokens, [result.score for result in results]


def outputs(model: OnnxModel, reference: Reference) -> Arrays:
    """Run `model`, whose graph reads full sequences, on the inputs of `reference`. Return {name:
    output}, with zeros for padding."""
    spec = model.info.specs["encoder"]
    feeds = encoder_feeds(model.info, dict(reference.feeds))
    values = model.session("encoder").run([tensor.name for tensor in spec.outputs], feeds)
    return {
        tensor.name: without_padding(array, real_values(tensor, feeds))
        for tensor, array in zip(spec.outputs, values, strict=True)
    }


def without_padding(values: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return `values` (B, ..., C) with zeros where the boolean `real` (B, ...) is False."""
    return np.where(real[(...,) + (None,) * (values.ndim - real.ndim)], values, 0)


def next_logits(model: OnnxModel, reference: Reference, tokens: np.ndarray) -> np.ndarray:
    """Return the logits (B, T, V) before each of `tokens` (B, T), which are fed one by one."""
    request = reference.request()
    with closing(model.factory.open(request)) as decoder:
        logits = [decoder.prefill(request.input_ids, request.attention_mask)[:, -1:].copy()]
        for place in range(tokens.shape[1] - 1):
            logits.append(decoder.step(tokens[:, place : place + 1]).copy())
    return np.concatenate(logits, axis=1)


def record(model: OnnxModel, reference: Reference) -> Arrays:
    """Return the results that a reference keeps of an export: those of `outcome` and, if the model
    generates, of `generation_facts`."""
    results = outcome(model, reference)
    if model.info.generates:
        results |= generation_facts(
            functools.partial(next_logits, model, reference), results["greedy"], reference
        )
    return results


def generation_facts(
    next_logits: Callable[[np.ndarray], np.ndarray], greedy: np.ndarray, reference: Reference
) -> Arrays:
    """Return what other results are compared by:

    - `greedy_margins` (B, T), the margin of each token over the second best, 0 after the end;
    - `logprobs` (B, T), the log probabilities of the reference's tokens;
    - `scales` (B, T), the scales of errors of their logits.

    Args:
        next_logits: maps tokens (B, T) to the logits (B, T, V) before each of them.
        greedy: tokens of greedy search.
    """
    ended = np.isin(greedy, reference.request().options.eos_token_ids).cumsum(axis=1) > 0
    is_after_end = np.pad(ended, ((0, 0), (1, 0)))[:, :-1]
    margins = relative_margins(next_logits(greedy))
    tokens = reference.inputs["tokens"]
    logits = next_logits(tokens).astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logprobs = np.take_along_axis(shifted, tokens[..., None], axis=-1)[..., 0]
    return {
        "greedy_margins": np.where(is_after_end, 0, margins),
        "logprobs": logprobs - np.log(np.exp(shifted).sum(axis=-1)),
        "scales": error_scale(logits)[..., 0],
    }


# ------------------------------------------------------------------------- many requests at a time


def served_sequences(
    model: OnnxModel, reference: Reference
) -> tuple[list[Generated], list[Generated]]:
    """Return (greedy, scored): the results of `REQUESTS` requests that run at the same time in the
    batches of `serve`.

    `greedy` are those of one half, which generates the tokens of greedy search. The other half has
    the reference's tokens in the prompt and reports their log probabilities. The requests of each
    half have the rows of the reference in turn.
    """
    inputs = reference.rows(model.info)
    rows = [place % len(inputs) for place in range(REQUESTS // 2)]
    greedy = [inputs[row] for row in rows]
    scored = [scored_input(inputs[row], reference.inputs["tokens"][row]) for row in rows]
    source = max(len(row.source or ()) for row in inputs)
    length = max(len(row.prompt) + row.options.max_new_tokens for row in (*greedy, *scored))
    admission = Admission(model.info, 1, model.threads, REQUESTS, source or None, length)
    mixed = [row for pair in zip(greedy, scored) for row in pair]
    with closing(Client(admission, Engine.open(admission, model)).start()) as client:
        sequences = [sequence for [sequence] in client.run(mixed)]
    return sequences[::2], sequences[1::2]


def scored_input(row: GenerationInput, tokens: np.ndarray) -> GenerationInput:
    """Return `row` with `tokens` (T,) at the end of its prompt. It asks for the log probabilities
    of the prompt and for one new token."""
    return dataclasses.replace(
        row,
        options=dataclasses.replace(row.options, max_new_tokens=1),
        prompt=[*row.prompt, *tokens.tolist()],
        scores_prompt=True,
    )


def served_outputs(model: OnnxModel, rows: Sequence[Reference]) -> list[Arrays]:
    """Return the outputs of a full-sequence graph for `REQUESTS` requests at a time, each with one
    of `rows` in turn. They run in the batches of `serve`."""
    feeds = [encoder_feeds(model.info, dict(row.feeds)) for row in rows]
    requests = [feeds[place % len(feeds)] for place in range(REQUESTS)]
    with closing(EncoderScheduler(model)) as scheduler, ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(scheduler.run, requests))
