"""The reference of an export: what torch computes in float32 from a few inputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from ..certification.outcomes import BEAMS, generation_facts, record, without_padding
from ..certification.reference import (
    TORCH,
    Arrays,
    Reference,
    manifest_facts,
    real_values,
    sample,
)
from ..heads import HEADS, READS_IMAGES
from ..inference.inputs import move_padding
from ..inference.options import special_token
from ..runtime import Runtime
from ..specs.graph_spec import GraphSpec, concrete_shape
from .checkpoint import Checkpoint
from .parity import long_length, max_positions, sequence_inputs, torch_outputs
from .plan import Graphs
from .shortlist_head import with_shortlist

LENGTHS = (40, 17, 6)  # tokens of the rows; learned positions are a limit
NEW_TOKENS = 20
NUM_PIXELS = 1009  # which images repeat; a prime, so that no two rows of an image are the same
RECORDED = ("int8", "int4")  # dtypes whose errors against torch hide others


def write_reference(
    checkpoint: Checkpoint, graphs: Graphs, directory: Path, facts: dict[str, Any]
) -> None:
    """Compute the reference of `graphs` with torch and write it to the export `directory`. `facts`
    are the fields of its manifest."""
    assert checkpoint.model is not None
    model = checkpoint.model
    with torch.no_grad(), with_shortlist(model, graphs.source.shortlist):
        if checkpoint.generates:
            reference = generation_reference(model, checkpoint)
        else:
            reference = sequence_reference(model, graphs.specs[graphs.dtypes[0]]["encoder"])
    reference.manifest.update(manifest_facts(facts))
    reference.write(directory)


def add_recorded(directory: Path, dtypes: list[str], device: str) -> None:
    """Add the results of the export itself to its reference in `directory`, for those of `dtypes`
    that are in `RECORDED`.

    It runs on `device`. Call `write_reference` before.
    """
    recorded = [dtype for dtype in dtypes if dtype in RECORDED]
    reference = Reference.read(directory)
    for dtype in recorded:
        model = Runtime(directory, device=device, dtype=dtype).model
        reference.results[dtype] = record(model, reference)
    if recorded:
        reference.write(directory)


# ----------------------------------------------------------------- models that read full sequences


def sequence_reference(model: PreTrainedModel, spec: GraphSpec) -> Reference:
    """Return the reference of a model that reads full sequences or images: random inputs of the
    graph of `spec`, and torch's outputs."""
    rng = np.random.default_rng(0)
    is_vision = HEADS[type(model).__name__].reads == READS_IMAGES
    inputs = (image_inputs if is_vision else text_inputs)(model, spec, rng)
    reference = Reference({}, {}, inputs, {})
    feeds = reference.feeds
    outputs = torch_outputs(model, spec, feeds)
    reference.results[TORCH] = {
        tensor.name: sample(without_padding(outputs[tensor.name], real_values(tensor, feeds)))
        for tensor in spec.outputs
    }
    return reference


def image_inputs(model: PreTrainedModel, spec: GraphSpec, rng: np.random.Generator) -> Arrays:
    """Return random pixels and the shape (2, C, H, W) of two images, which repeat these pixels.

    They have the size of the config, or 3.5 patches on each side if the graph takes any size.
    """
    height, width = (3 * side + side // 2 for side in model.config.patch_shape)
    sizes = {"batch_size": 2, "height": height, "width": width}
    pixels = rng.standard_normal(NUM_PIXELS).astype(np.float32)
    return {"pixels": pixels, "shape": np.array(concrete_shape(spec.inputs[0], sizes))}


def text_inputs(model: PreTrainedModel, spec: GraphSpec, rng: np.random.Generator) -> Arrays:
    rows = random_rows(model.config, rng, max_positions(model.config))
    return sequence_inputs(spec, model.config, rng, rows)


def random_rows(config: Any, rng: np.random.Generator, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random ids and the mask (B, S) of rows of `LENGTHS`, padded on the right.

    The first is longer where an encoder works in blocks from some length on. It is cut at `limit`,
    the second at half and the third at a quarter of it. They have all tokens of a small vocabulary.
    """
    longest = max(LENGTHS[0], long_length(config))
    lengths = np.maximum(1, np.minimum((longest, *LENGTHS[1:]), [limit, limit // 2, limit // 4]))
    shape = len(lengths), lengths.max()
    ids = np.resize(rng.permutation(config.vocab_size), shape)
    return ids, (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)


# ---------------------------------------------------------------------------- models that generate


def generation_reference(model: PreTrainedModel, checkpoint: Checkpoint) -> Reference:
    """Return the reference of a model that generates: random inputs, torch's logits, and its tokens
    of greedy search and of beam search."""
    rng = np.random.default_rng(0)
    inputs, options = generation_inputs(model, checkpoint, rng)
    reference = Reference({}, options, inputs, {})
    logits = logits_function(model, inputs)
    greedy = greedy_tokens(logits, reference)
    beams, scores = beam_sequences(model, reference)
    reference.results[TORCH] = {
        "logits": sample(logits(inputs["tokens"])),
        "greedy": greedy,
        **generation_facts(logits, greedy, reference),
        "beams": beams,
        "beam_scores": scores,
    }
    return reference


def generation_inputs(
    model: PreTrainedModel, checkpoint: Checkpoint, rng: np.random.Generator
) -> tuple[Arrays, dict[str, Any]]:
    """Return the inputs of a reference, see `Reference`, and the options of `generate`."""
    config, generation = model.config, checkpoint.generation
    ends, pad, start = (
        special_token(name, generation, checkpoint.config_json)
        for name in ("eos_token_id", "pad_token_id", "decoder_start_token_id")
    )
    positions = max_positions(config)
    length = min(NEW_TOKENS, max(1, positions // 2))
    is_seq2seq = config.is_encoder_decoder
    ids, mask = random_rows(config, rng, positions if is_seq2seq else positions - length)
    tokens = rng.integers(0, config.vocab_size, (len(ids), length))
    if pad is not None:  # a pad token counts no position in some models
        tokens[tokens == pad] = (pad + 1) % config.vocab_size
    if not is_seq2seq:
        ids, mask = move_padding(ids, mask, "left", 0)
    inputs = {"input_ids": ids, "attention_mask": mask, "tokens": tokens}
    if is_seq2seq:
        inputs["start"] = np.full((len(ids), 1), start or 0)
    options = {"max_new_tokens": length, "eos_token_id": ends, "pad_token_id": pad}
    return inputs, {name: value for name, value in options.items() if value is not None}


def logits_function(model: PreTrainedModel, inputs: Arrays) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that maps tokens (B, T) to the logits (B, T, V) before each of them."""
    ids, mask = (torch.from_numpy(inputs[name]) for name in ("input_ids", "attention_mask"))
    if "start" not in inputs:
        return lambda tokens: decoder_logits(model, ids, mask, torch.from_numpy(tokens))
    start, encoded = torch.from_numpy(inputs["start"]), model.get_encoder()(ids, mask)

    def logits(tokens: np.ndarray) -> np.ndarray:
        fed = torch.cat([start, torch.from_numpy(tokens)[:, :-1]], dim=1)
        arguments = dict(attention_mask=mask, decoder_input_ids=fed, use_cache=False)
        return model(encoder_outputs=encoded, **arguments).logits.numpy()

    return logits


def decoder_logits(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor
) -> np.ndarray:
    """Return the logits (B, T, V) before each of `tokens` (B, T), which follow a prompt."""
    ids = torch.cat([ids, tokens[:, :-1]], dim=1)
    mask = torch.cat([mask, torch.ones_like(tokens[:, :-1])], dim=1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return model(ids, mask, positions, use_cache=False).logits[:, -tokens.shape[1] :].numpy()


def greedy_tokens(logits: Callable[[np.ndarray], np.ndarray], reference: Reference) -> np.ndarray:
    """Return the tokens (B, T) of greedy search. `logits` is that of `logits_function`."""
    options = reference.request().options
    tokens = np.full_like(reference.inputs["tokens"], options.fill_token_id)
    has_ended = np.zeros(len(tokens), bool)
    for step in range(tokens.shape[1]):
        best = logits(tokens[:, : step + 1])[:, -1].argmax(axis=-1)
        tokens[:, step] = np.where(has_ended, options.fill_token_id, best)
        has_ended |= np.isin(best, options.eos_token_ids)
    return tokens


def beam_sequences(model: PreTrainedModel, reference: Reference) -> tuple[np.ndarray, np.ndarray]:
    """Return the best new tokens (B, T) of beam search by transformers, and their scores (B,)."""
    inputs, start = reference.inputs, reference.inputs.get("start")
    with without_settings(model, None if start is None else int(start[0, 0])):
        result = model.generate(  # type: ignore[operator]  # a model that generates
            torch.from_numpy(inputs["input_ids"]),
            attention_mask=torch.from_numpy(inputs["attention_mask"]),
            num_beams=BEAMS,
            output_scores=True,
            return_dict_in_generate=True,
            **reference.options,
        )
    prompt = inputs["input_ids"].shape[1] if start is None else 1
    return result.sequences[:, prompt:].numpy(), result.sequences_scores.numpy()


@contextmanager
def without_settings(model: PreTrainedModel, start: int | None) -> Iterator[None]:
    """Replace the generation settings of `model` in the block with defaults.

    `start` is the first token of a decoder, None for a decoder-only model. The runtime applies the
    settings outside of graphs.
    """
    before = model.generation_config
    model.generation_config = GenerationConfig(decoder_start_token_id=start)
    try:
        yield
    finally:
        model.generation_config = before
