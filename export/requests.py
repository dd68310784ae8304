"""Checks of arguments, and the requests made from them. No graph is needed."""

from typing import Any

import numpy as np

from .errors import UsageError
from .heads import GENERATORS, HEADS
from .inference import options as option_fields
from .inference.export_info import ExportInfo
from .inference.inputs import (
    check_contiguous,
    check_ends,
    check_input,
    check_inputs,
    check_patches,
    check_positions,
    check_sequence_inputs,
    move_padding,
    num_positions,
)
from .inference.options import Options, as_list, resolve, special_token
from .inference.rows import GenerationRequest, check_memory
from .specs.sequences import token_inputs


def check_options(info: ExportInfo, options: dict[str, Any]) -> Options:
    """Return `options`, with those of generation_config.json, or else defaults, for all that is
    not set.

    Raises UsageError or ValueError for options that are wrong whatever the inputs are. Raises
    ValueError for a model that does not generate.
    """
    check_generates(info)
    return resolve_options(info, option_fields.check(options), prompt_length=1)


def check_generates(info: ExportInfo) -> None:
    """Raise ValueError for a model that does not generate."""
    if not info.generates:
        methods = " or ".join(task.method for task in HEADS[info.architecture].tasks)
        raise ValueError(
            f"{info.architecture} cannot generate, expected one of {', '.join(GENERATORS)}: use "
            f"{methods or 'encode'}"
        )


def resolve_options(info: ExportInfo, options: dict[str, Any], prompt_length: int) -> Options:
    """Return `options` and, for all that is not set, those of generation_config.json or defaults.

    `prompt_length` is the number of tokens of the prompts, padding included. Raises UsageError or
    ValueError as `resolve` does.
    """
    return resolve(options, info.generation_config | info.defaults, info.config, prompt_length)


# ------------------------------------------------------------------------------- whole sequences


def encoder_feeds(info: ExportInfo, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the inputs of the encoder graph by name, checked, from the arguments `inputs` of
    `Runtime.outputs`.

    Raises:
        ValueError: for an input that is missing, unknown to the graph, of a wrong shape or out of
            range, for what `check_sequences` rejects, and for an export without this graph.
    """
    if "encoder" not in info.specs:
        raise ValueError(f"{info.architecture} has no encoder: use generate")
    spec = info.specs["encoder"]
    feeds = check_sequence_inputs(spec.inputs, inputs, info.architecture)
    check_sequences(info, feeds)
    return feeds


def check_sequences(info: ExportInfo, feeds: dict[str, np.ndarray]) -> None:
    """Raise ValueError for tokens or images that fit the graph's types and ranges but not the
    model.

    It checks sizes of images, lengths, gaps in a decoder's mask, and end tokens. `feeds` are the
    inputs of the graph by name.
    """
    if "pixel_values" in feeds:
        check_patches(feeds["pixel_values"], info.config)
    for prefix in ("", "decoder_"):
        if f"{prefix}input_ids" not in feeds:
            continue
        ids = feeds[f"{prefix}input_ids"]
        mask = feeds[f"{prefix}attention_mask"]
        check_positions(num_positions(ids, mask, info.config), info.config)
        if prefix or info.config["model_type"] == "vanilla-decoder":
            check_contiguous(mask, f"{prefix}attention_mask")
    if HEADS[info.architecture].needs_end_token:
        ends = as_list(info.config.get("eos_token_id"))
        check_ends(feeds["input_ids"], feeds["attention_mask"], ends)


# ------------------------------------------------------------------------------------ generation


def generation_request(
    info: ExportInfo,
    input_ids: np.ndarray,
    attention_mask: np.ndarray | None,
    decoder_input_ids: np.ndarray | None,
    options: dict[str, Any],
    is_scored: bool = False,
) -> GenerationRequest:
    """Check a call of `Runtime.generate` and return its batch.

    Args:
        info: the export.
        input_ids: tokens (B, S), the sources or prompts.
        attention_mask: 0 for padding; by default 0 for pad tokens.
        decoder_input_ids: decoder prompts (B, P) of a seq2seq model, by default the start token.
        options: the generation options by name.
        is_scored: True if scores are returned.

    Raises:
        UsageError: for an unknown option, an invalid value, options that cannot be combined, and a
            batch that needs more memory than this machine has.
        ValueError: for inputs of a wrong shape or range, a row without tokens, zeros between ones
            in the mask of a decoder's prompt, too many tokens, or a model that does not generate.
    """
    options = option_fields.check(options)
    check_generates(info)
    ids, mask = prompts(info, input_ids, attention_mask, options)
    if not mask.any(axis=1).all():
        raise ValueError(
            f"row {int(mask.any(axis=1).argmin())} has no tokens, expected at least one in every "
            f"row"
        )
    if "encoder" in info.specs:
        request = seq2seq_request(info, (ids, mask), decoder_input_ids, options, is_scored)
    elif decoder_input_ids is not None:
        raise ValueError(f"{info.architecture} takes no decoder_input_ids: its prompt is input_ids")
    else:
        request = decoder_request(info, (ids, mask), options, is_scored)
    # before a search has a state of its rows; a decoder adds its caches
    check_memory(request, info.config["vocab_size"], cache_bytes=0)
    return request


def decoder_request(
    info: ExportInfo,
    prompt: tuple[np.ndarray, np.ndarray],
    options: dict[str, Any],
    is_scored: bool,
) -> GenerationRequest:
    """Return the batch of a decoder. Its prompts (ids and mask) are moved to be padded on the left.

    `options` have known names and kinds. Raises UsageError or ValueError as `resolve` does, and
    ValueError if prompts or new tokens are too long, or a mask has gaps. `is_scored` is True if
    scores are returned.
    """
    ids, mask = prompt
    final = resolve_options(info, options, ids.shape[1])
    check_contiguous(mask, "attention_mask")
    check_positions(int(mask.sum(axis=1).max()) + final.max_new_tokens - 1, info.config)
    assert final.pad_token_id is not None  # see `resolve`
    ids, mask = move_padding(ids, mask, "left", final.pad_token_id)
    return GenerationRequest(final, ids, mask, None, is_scored)


def seq2seq_request(
    info: ExportInfo,
    source: tuple[np.ndarray, np.ndarray],
    decoder_input_ids: np.ndarray | None,
    options: dict[str, Any],
    is_scored: bool,
) -> GenerationRequest:
    """Return the batch of a seq2seq model. Its `source` (ids and mask) is moved to be padded on the
    right.

    `options` have known names and kinds. Raises UsageError or ValueError as `resolve` and
    `start_tokens` do, and ValueError if sources or new tokens are too long.
    `decoder_input_ids` (B, P) are the decoder prompts, by default the start token. `is_scored` is
    True if scores are returned.
    """
    ids, mask = source
    start = start_tokens(info, len(ids), decoder_input_ids, options)
    final = resolve_options(info, options, start.shape[1])
    check_positions(num_positions(ids, mask, info.config), info.config)
    check_positions(start.shape[1] + final.max_new_tokens - 1, info.config)
    assert final.pad_token_id is not None  # see `resolve`
    source = move_padding(ids, mask, "right", final.pad_token_id)
    return GenerationRequest(final, start, np.ones_like(start), source, is_scored)


def prompts(
    info: ExportInfo,
    input_ids: np.ndarray,
    attention_mask: np.ndarray | None,
    options: dict[str, Any],
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask (B, S), checked.

    The default mask is 0 for pad tokens, unless the pad token is also an end token; both may be set
    in `options`. Raises ValueError for arrays of a wrong dtype, shape or range.
    """
    pad = special_token("pad_token_id", options, info.defaults, info.config)
    ends = as_list(special_token("eos_token_id", options, info.defaults, info.config))
    if attention_mask is None and pad is not None and pad not in ends:
        attention_mask = np.asarray(input_ids) != pad
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    tensors = token_inputs(info.config, ("batch_size", "source_length"))
    feeds = check_inputs(tensors, inputs, info.architecture)
    return feeds["input_ids"], feeds["attention_mask"]


def start_tokens(
    info: ExportInfo,
    rows: int,
    decoder_input_ids: np.ndarray | None,
    options: dict[str, Any],
) -> np.ndarray:
    """Return the decoder prompts (rows, P): the start token, then `decoder_input_ids` if there are
    any.

    If any row of `decoder_input_ids` begins with the start token, all rows stay as they are, as in
    transformers. The start token is `decoder_start_token_id` of `options`, else of
    generation_config.json or config.json.

    Raises:
        UsageError: if the start token is outside the vocabulary.
        ValueError: if there is no start token, or `decoder_input_ids` are invalid.
    """
    start = special_token("decoder_start_token_id", options, info.defaults, info.config)
    if start is None:
        raise ValueError(
            "decoder_start_token_id is None, expected the token id generation starts from"
        )
    size = info.config["vocab_size"]
    if not 0 <= start < size:
        raise UsageError(f"decoder_start_token_id must be in [0, {size - 1}], got {start}")
    starts = np.full((rows, 1), start)
    if decoder_input_ids is None:
        return starts
    tensor = token_inputs(info.config, ("batch_size", "target_length"), prefix="decoder_")[0]
    ids = check_input(tensor, np.asarray(decoder_input_ids), {"batch_size": rows})
    return ids if (ids[:, 0] == start).any() else np.concatenate([starts, ids], axis=1)
