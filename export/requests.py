"""Checks of arguments, and the requests made from them. No graph is needed."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .heads import GENERATORS, HEADS
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
    position_limit,
)
from .inference.options import Options, as_list, resolve
from .inference.rows import GenerationRequest, check_memory
from .specs.sequences import token_inputs


def check_options(info: ExportInfo, options: dict[str, Any] | Options) -> Options:
    """Return the checked options of a call, for prompts of any length.

    They are `options`, with those of generation_config.json, or else defaults, for all that is not
    set. Options that this function returned are returned unchanged, so a call checks its own once.

    Raises UsageError or ValueError for options that are wrong whatever the inputs are. Raises
    ValueError for a model that does not generate.
    """
    if isinstance(options, Options):
        return options
    check_generates(info)
    return resolve(options, info.generation_config | info.defaults, info.config)


def with_targets(
    info: ExportInfo, options: Options, targets: Sequence[dict[str, Any]]
) -> list[Options]:
    """Return `options` with those of each of `targets`, which select the language of a row.

    Rows of one language share their options. Raises UsageError for tokens outside the vocabulary.
    """
    shared: dict[tuple, Options] = {(): options}
    for target in targets:
        if (key := tuple(target.items())) not in shared:
            shared[key] = dataclasses.replace(options, **target)
            shared[key].check_vocabulary(info.config["vocab_size"])
    return [shared[tuple(target.items())] for target in targets]


def check_generates(info: ExportInfo) -> None:
    """Raise ValueError for a model that does not generate."""
    if not info.generates:
        methods = " or ".join(task.method for task in HEADS[info.architecture].tasks)
        raise ValueError(
            f"{info.architecture} cannot generate, expected one of {', '.join(GENERATORS)}: use "
            f"{methods or 'encode'}"
        )


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


def check_row(
    info: ExportInfo, ids: Sequence[int], prefix: Sequence[int], options: Options
) -> tuple[Options, Sequence[int], Sequence[int] | None]:
    """Check one row of tokens without padding and return its options, prompt and source.

    The source of a seq2seq model is `ids`, and its prompt the start token with `prefix`. Another
    model has the prompt `ids` and no source. `options` are those of the call.

    Raises:
        UsageError: for a prompt that reaches `max_length`.
        ValueError: for no tokens, tokens that the model does not have, a `prefix` that it does not
            read, and more tokens than it has learned positions.
    """
    check_tokens(info, ids)
    if "encoder" not in info.specs:
        check_no_prefix(info, prefix or None)
        return fit_positions(info, options, len(ids), len(ids)), ids, None
    if position_limit(info.config) is not None:
        row = np.array([ids])
        check_positions(num_positions(row, np.ones_like(row), info.config), info.config)
    [start] = start_tokens(info, 1, np.array([prefix]) if prefix else None, options).tolist()
    return fit_positions(info, options, len(start), len(start)), start, ids


def generation_request(
    info: ExportInfo,
    input_ids: np.ndarray,
    attention_mask: np.ndarray | None,
    decoder_input_ids: np.ndarray | None,
    options: dict[str, Any] | Options,
    is_scored: bool = False,
) -> GenerationRequest:
    """Check a call of `Runtime.generate` and return its batch.

    Args:
        info: the export.
        input_ids: tokens (B, S), the sources or prompts.
        attention_mask: 0 for padding; by default 0 for pad tokens.
        decoder_input_ids: decoder prompts (B, P) of a seq2seq model, by default the start token.
        options: the generation options by name, or checked ones.
        is_scored: True if scores are returned.

    Raises:
        UsageError: for an unknown option, an invalid value, options that cannot be combined, and a
            batch that needs more memory than this machine has.
        ValueError: for inputs of a wrong shape or range, a row without tokens, zeros between ones
            in the mask of a decoder's prompt, too many tokens, or a model that does not generate.
    """
    checked = check_options(info, options)
    ids, mask = prompts(info, input_ids, attention_mask, checked)
    if not mask.any(axis=1).all():
        raise ValueError(
            f"row {int(mask.any(axis=1).argmin())} has no tokens, expected at least one in every "
            f"row"
        )
    if "encoder" in info.specs:
        request = seq2seq_request(info, (ids, mask), decoder_input_ids, checked, is_scored)
    else:
        check_no_prefix(info, decoder_input_ids)
        request = decoder_request(info, (ids, mask), checked, is_scored)
    # before a search has a state of its rows; a decoder adds its caches
    check_memory(request, info.config["vocab_size"], cache_bytes=0)
    return request


def decoder_request(
    info: ExportInfo, prompt: tuple[np.ndarray, np.ndarray], options: Options, is_scored: bool
) -> GenerationRequest:
    """Return the batch of a decoder. Its prompts (ids and mask) are moved to be padded on the left.

    Raises UsageError if the prompts reach `max_length`, and ValueError if prompts or new tokens are
    too long, or a mask has gaps. `is_scored` is True if scores are returned.
    """
    ids, mask = prompt
    check_contiguous(mask, "attention_mask")
    final = fit_positions(info, options, ids.shape[1], int(mask.sum(axis=1).max()))
    ids, mask = move_padding(ids, mask, "left", final.pad_token_id or 0)
    return GenerationRequest(final, ids, mask, None, is_scored)


def seq2seq_request(
    info: ExportInfo,
    source: tuple[np.ndarray, np.ndarray],
    decoder_input_ids: np.ndarray | None,
    options: Options,
    is_scored: bool,
) -> GenerationRequest:
    """Return the batch of a seq2seq model. Its `source` (ids and mask) is moved to be padded on the
    right.

    Raises UsageError if the decoder prompts reach `max_length`, and ValueError if sources or new
    tokens are too long, or as `start_tokens` does. `decoder_input_ids` (B, P) are the decoder
    prompts, by default the start token. `is_scored` is True if scores are returned.
    """
    ids, mask = source
    start = start_tokens(info, len(ids), decoder_input_ids, options)
    check_positions(num_positions(ids, mask, info.config), info.config)
    final = fit_positions(info, options, start.shape[1], start.shape[1])
    source = move_padding(ids, mask, "right", final.pad_token_id or 0)
    return GenerationRequest(final, start, np.ones_like(start), source, is_scored)


def fit_positions(info: ExportInfo, options: Options, length: int, tokens: int) -> Options:
    """Return `options` for prompts of `length` tokens with padding, at most `tokens` without.

    Raises UsageError as `Options.for_prompt` does, and ValueError if they and their new tokens are
    more than the learned positions.
    """
    final = options.for_prompt(length)
    check_positions(tokens + final.max_new_tokens - 1, info.config)  # the last token is not read
    return final


def prompts(
    info: ExportInfo, input_ids: np.ndarray, attention_mask: np.ndarray | None, options: Options
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask (B, S), checked.

    The default mask is 0 for pad tokens, unless the pad token is also an end token; both are
    those of `options`. Raises ValueError for arrays of a wrong dtype, shape or range.
    """
    pad = options.pad_token_id
    if attention_mask is None and pad is not None and pad not in options.eos_token_ids:
        attention_mask = np.asarray(input_ids) != pad
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    tensors = token_inputs(info.config, ("batch_size", "source_length"))
    feeds = check_inputs(tensors, inputs, info.architecture)
    return feeds["input_ids"], feeds["attention_mask"]


def check_tokens(info: ExportInfo, ids: Sequence[int]) -> None:
    """Raise ValueError for no tokens, and for one outside the vocabulary, as `prompts` does."""
    if not ids or min(ids) < 0 or max(ids) >= info.config["vocab_size"]:
        prompts(info, np.array([ids], np.int64), np.ones((1, len(ids)), np.int64), Options())


def check_no_prefix(info: ExportInfo, decoder_input_ids: Any) -> None:
    """Raise ValueError unless `decoder_input_ids` are None, for a model without an encoder."""
    if decoder_input_ids is not None:
        raise ValueError(f"{info.architecture} takes no decoder_input_ids: its prompt is input_ids")


def start_tokens(
    info: ExportInfo, rows: int, decoder_input_ids: np.ndarray | None, options: Options
) -> np.ndarray:
    """Return the decoder prompts (rows, P): the start token, then `decoder_input_ids` if there are
    any.

    If any row of `decoder_input_ids` begins with the start token, all rows stay as they are, as in
    transformers. The start token is that of `options`. Raises ValueError if there is none, or if
    `decoder_input_ids` are invalid.
    """
    start = options.decoder_start_token_id
    if start is None:
        raise ValueError(
            "decoder_start_token_id is None, expected the token id generation starts from"
        )
    starts = np.full((rows, 1), start)
    if decoder_input_ids is None:
        return starts
    tensor = token_inputs(info.config, ("batch_size", "target_length"), prefix="decoder_")[0]
    ids = check_input(tensor, np.asarray(decoder_input_ids), {"batch_size": rows})
    return ids if (ids[:, 0] == start).any() else np.concatenate([starts, ids], axis=1)
