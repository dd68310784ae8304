"""Inputs of generation, their results, and checks of callers' arguments, without graphs."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..heads import GENERATORS, HEADS
from ..inference.export_info import ExportInfo
from ..inference.inputs import (
    as_array,
    check_contiguous,
    check_ends,
    check_input,
    check_inputs,
    check_patches,
    check_positions,
    check_row_positions,
    check_sequence_inputs,
    last_lengths,
    move_padding,
    num_positions,
    position_limit,
)
from ..inference.logits import row_seeds
from ..inference.options import Options, check_seeds, resolve
from ..inference.rows import check_memory
from ..shared.options import as_list
from ..specs.sequences import token_inputs

# why a sequence ended: at an end token, or at the maximum length
STOP, LENGTH = "stop", "length"


@dataclass(frozen=True, eq=False)
class GenerationInput:
    """One checked input to generate from, made by `Admission.admit`.

    Each of its beams or samples is a row of the batch.

    Args:
        options: resolved options, see `options.resolve`.
        prompt: tokens before the first new one. For seq2seq it is the decoder prompt, which begins
            with the start token.
        source: source tokens of a seq2seq model, read by the encoder.
        top_logprobs: number of best tokens that are reported with their log probabilities at each
            position, besides the generated token; `None` for no log probabilities.
        scores_prompt: True to report log probabilities of the prompt's tokens too, without the
            first.
        padding: number of padding tokens before the prompt. Some options count them, as in
            transformers.
        seed: seed of sampling in place of `options.seed`, derived from it with `logits.row_seed`.
        is_scored: True to report the score of each sequence without beams too.
        is_aligned: True to report the alignment of each sequence with its source.
        unknown_token: token whose sequences report their alignments too; `None` for none. A
            sequence has it in its prompt or among its new tokens.
        uniforms: returns the random numbers of sampling, by default those of `seed`.
        source_mask: 0 for masked tokens of the source, by default 1 for all.
    """

    options: Options
    prompt: Sequence[int]
    source: Sequence[int] | None = None
    top_logprobs: int | None = None
    scores_prompt: bool = False
    padding: int = 0
    seed: int | None = None
    is_scored: bool = False
    is_aligned: bool = False
    unknown_token: int | None = None
    uniforms: Callable[[], float] | None = None
    source_mask: Sequence[int] | None = None

    @property
    def num_rows(self) -> int:
        return self.options.rows_per_input

    @property
    def num_independent_results(self) -> int:
        """The number of results that finish independently of each other.

        It is `num_return_sequences` with sampling, otherwise 1, because beams finish together.
        """
        return self.options.num_return_sequences if self.options.do_sample else 1


@dataclass(frozen=True)
class TokenLogprobs:
    """The log probability of a token, and `top`, the best tokens at its position with theirs.

    `top` is `[(token, log probability), …]`, best first. The values are the log softmax of the
    model's logits.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Generated:
    """One sequence generated from an input. The beams of an input are sorted, best first.

    Args:
        tokens: the new tokens, including the end token if it was generated.
        finish_reason: `STOP` (an end token) or `LENGTH` (the maximum number of tokens).
        score: the score of beam search, otherwise `None`.
        prompt_logprobs: log probabilities of the prompt's tokens after the first, if requested.
        logprobs: log probabilities of the new tokens, if requested.
        alignment: how much each token attends to each token of the source, (P - 1 + T, S) float32,
            if requested. The P - 1 tokens of the prompt after the start token come first.
    """

    tokens: list[int]
    finish_reason: str
    score: float | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    logprobs: list[TokenLogprobs] | None = None
    alignment: np.ndarray | None = None


@dataclass(frozen=True)
class Event:
    """A new `token` of a streamed request, in its sequence number `index`.

    The last token of a sequence has a `finish_reason`. `logprobs` is set if requested.
    """

    index: int
    token: int
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None


class Update(NamedTuple):
    """A change of a request: its new `events`, and in the last update its `results` or its
    `error`.

    The results are the sequences of each input. Those of beam search are sorted, best first;
    samples are in the order of their numbers.
    """

    events: list[Event]
    results: list[list[Generated]] | None
    error: Exception | None

    @property
    def is_last(self) -> bool:
        """True if the request is answered or has failed."""
        return self.results is not None or self.error is not None

    def read_results(self) -> list[list[Generated]]:
        """Return the results of the last update, or raise its error."""
        if self.error is not None:
            raise self.error
        assert self.results is not None  # it is the last update
        return self.results


class Activity(NamedTuple):
    """A step of a worker, for metrics.

    Args:
        waits: the seconds that each part waited that has joined.
        first_tokens: the seconds from the arrival of a request to its first token.
        rows: the number of rows of the step.
        tokens: the number of their new tokens.
    """

    waits: list[float]
    first_tokens: list[float]
    rows: int
    tokens: int


def ignore_activity(activity: Activity) -> None:
    """Do nothing, where there are no metrics."""


# ------------------------------------------------------------------------------------------- checks


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
    return resolve(options, info.generation_config, info.config)


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
    info: ExportInfo, ids: Sequence[int], options: Options
) -> tuple[Options, Sequence[int], Sequence[int] | None]:
    """Check one row of tokens without padding and return its options, prompt and source.

    The source of a seq2seq model is `ids`, and its prompt the start token. Another model has the
    prompt `ids` and no source. `options` are those of the call.

    Raises:
        UsageError: for a prompt that reaches `max_length`.
        ValueError: for no tokens, tokens that the model does not have, and more tokens than it has
            learned positions.
    """
    check_tokens(info, ids)
    if "encoder" not in info.specs:
        return fit_positions(info, options, len(ids), len(ids)), ids, None
    if position_limit(info.config) is not None:
        check_row_positions(ids, info.config)
    [start] = start_tokens(info, 1, None, options).tolist()
    return fit_positions(info, options, len(start), len(start)), start, ids


def generation_inputs(
    info: ExportInfo,
    input_ids: np.ndarray,
    attention_mask: np.ndarray | None,
    decoder_input_ids: np.ndarray | None,
    options: dict[str, Any] | Options,
    is_scored: bool = False,
    seeds: Sequence[int] | None = None,
) -> list[GenerationInput]:
    """Check a call of `Runtime.generate` and return its rows.

    Args:
        info: the export.
        input_ids: tokens (B, S), the sources or prompts.
        attention_mask: 0 for padding; by default 0 for pad tokens.
        decoder_input_ids: decoder prompts (B, P) of a seq2seq model, by default the start token.
        options: the generation options by name, or checked ones.
        is_scored: True if scores are returned.
        seeds: one for each row; by default derived from the option `seed`.

    Raises:
        UsageError: for an unknown option, an invalid value, options that cannot be combined,
            another number of `seeds`, and rows that need more memory than this machine has.
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
        starts = start_tokens(info, len(ids), decoder_input_ids, checked)
        check_positions(num_positions(ids, mask, info.config), info.config)
        final = fit_positions(info, checked, starts.shape[1], starts.shape[1])
        rows = seq2seq_rows(ids, mask, starts, final.pad_token_id or 0)
    else:
        if decoder_input_ids is not None:
            raise ValueError(
                f"{info.architecture} takes no decoder_input_ids: its prompt is input_ids"
            )
        check_contiguous(mask, "attention_mask")
        final = fit_positions(info, checked, ids.shape[1], int(mask.sum(axis=1).max()))
        rows = [
            {"prompt": row[is_token].tolist(), "padding": int((~is_token).sum())}
            for row, is_token in zip(ids, mask == 1)
        ]
    # before a search has a state of its rows; a decoder adds its caches
    check_memory(len(rows), final, info.config["vocab_size"])
    check_seeds(seeds, len(rows), None if options is checked else checked.seed)
    if seeds is None:
        seeds = row_seeds(final.seed, len(rows))
    return [
        GenerationInput(final, is_scored=is_scored, seed=seed, **row)
        for row, seed in zip(rows, [None] * len(rows) if seeds is None else seeds, strict=True)
    ]


def seq2seq_rows(
    ids: np.ndarray, mask: np.ndarray, starts: np.ndarray, pad_token_id: int
) -> list[dict[str, Any]]:
    """Return the fields of an input, by name, for each row. Padding of the sources is left out.

    `ids` and `mask` (B, S) are the sources, `starts` (B, P) the decoder prompts.
    """
    ids, mask = move_padding(ids, mask, "right", pad_token_id)
    lengths = last_lengths(mask)
    has_holes = (mask.sum(axis=1) < lengths).tolist()
    rows = zip(starts.tolist(), ids.tolist(), mask.tolist(), lengths, has_holes)
    return [
        {"prompt": start, "source": row[:length], "source_mask": kept[:length] if holes else None}
        for start, row, kept, length, holes in rows
    ]


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
        attention_mask = as_array("input_ids", input_ids) != pad
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    tensors = token_inputs(info.config, ("batch_size", "source_length"))
    feeds = check_inputs(tensors, inputs, info.architecture)
    return feeds["input_ids"], feeds["attention_mask"]


def check_tokens(info: ExportInfo, ids: Sequence[int]) -> None:
    """Raise ValueError for no tokens, and for one outside the vocabulary, as `prompts` does."""
    if not ids or min(ids) < 0 or max(ids) >= info.config["vocab_size"]:
        prompts(info, np.array([ids], np.int64), np.ones((1, len(ids)), np.int64), Options())


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
    ids = check_input(tensor, decoder_input_ids, {"batch_size": rows})
    return ids if (ids[:, 0] == start).any() else np.concatenate([starts, ids], axis=1)
