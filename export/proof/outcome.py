"""The results of an export for the inputs of a proof, under the names of `torch`."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np

from ..engine.alignments import cross_attentions, encoded
from ..engine.capacity import batch_together
from ..engine.encoder import EncoderScheduler
from ..engine.inputs import Generated, GenerationInput, encoder_feeds
from ..engine.limits import Admission
from ..engine.loop import Engine
from ..engine.model import OnnxModel
from ..heads import EMBED, EMBED_MULTI_VECTOR, HEADS
from ..inference.inputs import pad_sequences
from ..inference.rows import GenerationRequest
from ..specs import alignment
from ..text.sentence_modules import Files, read_modules, read_token_heads
from .compare import error_scale, relative_margins
from .reference import Arrays, Reference, compared_outputs, decoder_ids

BEAMS = 3
REQUESTS = 8  # at a time
STATES = 3  # tokens of the text that heads embed


def outcome(model: OnnxModel, case: Reference, steps: Sequence[int] = ()) -> Arrays:
    """Return the outputs of the encoder graph for the inputs of `case`, by name.

    A model that generates also has the `logits` (B, T, V) before each of `tokens`.

    `steps` are the numbers of tokens of the first steps, where graphs return logits after each
    token of a step. All other steps have one.
    """
    results = outputs(model, case)
    if model.info.generates:
        results["logits"] = next_logits(model, case.request(), case.inputs["tokens"], steps)
    return results


def searches(model: OnnxModel, reference: Reference) -> Arrays:
    """Return the results of searches from the inputs of `reference`; none for a model that does not
    generate:

    - `greedy` (B, T), the tokens of greedy search;
    - `beam_scores` (B,), the scores of the best sequences of beam search. Several sequences may be
      the best, so their tokens are not compared.
    """
    if not model.info.generates:
        return {}
    beams, greedy = (
        [sequence for [sequence] in run_together(model, reference.rows(model.info, **options))]
        for options in ({"num_beams": BEAMS}, {})
    )
    fill = reference.generation_options.fill_token_id
    tokens, _ = pad_sequences([row.tokens for row in greedy], fill)
    return {"greedy": tokens, "beam_scores": np.array([row.score for row in beams], np.float32)}


def run_together(model: OnnxModel, rows: Sequence[GenerationInput]) -> list[list[Generated]]:
    """Return the sequences of each of `rows`, which start together."""
    return Engine([batch_together(model, rows)]).run(rows)


def record(model: OnnxModel, reference: Reference) -> Arrays:
    """Return the results that a reference keeps of an export: its outcome, its searches and its
    alignment, and what others are compared by, see `greedy_margins` and `token_facts`."""
    results = outcome(model, reference) | searches(model, reference)
    results |= alignment_weights(model, reference)
    if model.info.generates:
        greedy = results["greedy"]
        logits = next_logits(model, reference.request(), greedy)
        margins = greedy_margins(logits, greedy, reference)
        results |= {"greedy_margins": margins, **token_facts(results["logits"], reference)}
    return results


def outputs(model: OnnxModel, case: Reference) -> Arrays:
    """Return the outputs of the encoder graph for the inputs of `case` by name, without keys and
    values for a decoder."""
    names = [tensor.name for tensor in compared_outputs(model.info)]
    if not names:
        return {}
    inputs = [tensor.name for tensor in model.info.specs["encoder"].inputs]
    feeds = {name: array for name, array in case.feeds.items() if name in inputs}
    values = model.session("encoder").run(names, encoder_feeds(model.info, feeds))
    return dict(zip(names, values, strict=True))


def next_logits(
    model: OnnxModel, request: GenerationRequest, tokens: np.ndarray, steps: Sequence[int] = ()
) -> np.ndarray:
    """Return the logits (B, T, V) before each of `tokens` (B, T), see `step_logits`."""
    logits = step_logits(model, request, tokens, steps)
    return np.concatenate([values.copy() for values in logits], axis=1)


def step_logits(
    model: OnnxModel, request: GenerationRequest, tokens: np.ndarray, steps: Sequence[int] = ()
) -> Iterator[np.ndarray]:
    """Yield the logits (B, t, V) before each of `tokens` (B, T), which follow the prompts of
    `request` and are fed in `steps`, see `outcome`. They are valid until the next step."""
    with closing(model.factory.open(request)) as rows:
        yield rows.prefill(request.input_ids, request.attention_mask)[:, -1:]
        first = np.cumsum([0, *steps]) if rows.all_logits else [0]
        places = [*first, *range(first[-1] + 1, tokens.shape[1])]
        for start, end in zip(places, places[1:]):
            yield rows.step(tokens[:, start:end])


def alignment_weights(model: OnnxModel, case: Reference) -> Arrays:
    """Return `cross_attentions` (B, heads, T, S), what the alignment graph returns for the source
    and the tokens of `case`; nothing for an export without one."""
    if alignment.ROLE not in model.info.specs:
        return {}
    source = case.inputs["input_ids"], case.inputs["attention_mask"]
    targets = decoder_ids(case.inputs["start"], case.inputs["tokens"])
    return {alignment.OUTPUT: cross_attentions(model, encoded(model, *source), targets)}


def head_vectors(files: Files, manifest: Mapping[str, Any], hidden_size: int) -> Arrays:
    """Return what the heads of text embeddings, which the runtime applies itself, make of fixed
    states of `hidden_size` values, by name. A model that embeds no texts has none.

    `manifest` has the architecture and the sentence modules, and `files` the weights. The arrays
    have one axis, so that `sample` leaves no value out. Raises ValueError for modules and weights
    that the runtime cannot follow.
    """
    tasks, results = HEADS[manifest["architecture"]].tasks, {}
    states = np.cos(np.arange(STATES * hidden_size)).reshape(STATES, -1).astype(np.float32)
    if EMBED in tasks:
        modules = read_modules(manifest.get("sentence_modules") or [], files, hidden_size)
        results["vector"] = modules.embedding(states, prompt_length=1)
    if EMBED_MULTI_VECTOR in tasks:
        heads = read_token_heads(files, hidden_size)
        results |= {"token_weights": heads.weights(states), "token_vectors": heads.vectors(states)}
    return {name: values.ravel() for name, values in results.items()}


def greedy_margins(logits: np.ndarray, greedy: np.ndarray, reference: Reference) -> np.ndarray:
    """Return the margin of each of the tokens `greedy` (B, T) over the second best, 0 after the
    end. `logits` (B, T, V) are those before the tokens."""
    ended = np.isin(greedy, reference.generation_options.eos_token_ids).cumsum(axis=1) > 0
    is_after_end = np.pad(ended, ((0, 0), (1, 0)))[:, :-1]
    return np.where(is_after_end, 0, relative_margins(logits))


def token_facts(logits: np.ndarray, reference: Reference) -> Arrays:
    """Return the log probabilities `logprobs` (B, T) of the reference's tokens, and the `scales`
    (B, T) of errors of their `logits` (B, T, V)."""
    tokens = reference.inputs["tokens"]
    exact = logits.astype(np.float64)
    shifted = exact - exact.max(axis=-1, keepdims=True)
    logprobs = np.take_along_axis(shifted, tokens[..., None], axis=-1)[..., 0]
    logprobs -= np.log(np.exp(shifted).sum(axis=-1))
    return {"logprobs": logprobs, "scales": error_scale(exact)[..., 0]}


# ------------------------------------------------------------------------- many requests at a time


def served_sequences(model: OnnxModel, reference: Reference) -> dict[str, Any]:
    """Return the results of `REQUESTS` requests that run at the same time in the batches of
    `serve`: the rows `greedy` and the array `logprobs`.

    One half generates the tokens (T,) of greedy search. The other half has the reference's tokens
    in the prompt and reports their log probabilities (B, T). The requests of each half have the
    rows of the reference in turn.
    """
    inputs = reference.rows(model.info)
    rows = [place % len(inputs) for place in range(REQUESTS // 2)]
    greedy = [inputs[row] for row in rows]
    scored = [scored_input(inputs[row], reference.inputs["tokens"][row]) for row in rows]
    source = max(len(row.source or ()) for row in inputs)
    length = max(len(row.prompt) + row.options.max_new_tokens for row in (*greedy, *scored))
    admission = Admission(model.info, 1, model.threads, REQUESTS, source or None, length)
    mixed = [row for pair in zip(greedy, scored) for row in pair]
    sequences = [sequence for [sequence] in Engine.open(admission, model).run(mixed)]
    count = reference.inputs["tokens"].shape[1]
    logprobs = [
        [token.logprob for token in (sequence.prompt_logprobs or [])[-count:]]
        for sequence in sequences[1::2]
    ]
    greedy_tokens = [np.array(sequence.tokens) for sequence in sequences[::2]]
    return {"greedy": greedy_tokens, "logprobs": np.array(logprobs)}


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
