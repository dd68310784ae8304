"""The options of a call of `generate`: those of the caller, of generation_config.json and of
config.json, checked together."""

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError, nearest
from ..shared.generation_options import (
    FIELDS,
    KINDS,
    SAMPLING_ONLY,
    SPECIAL_TOKENS,
)
from ..shared.options import (
    MAX_INT64,
    SEED,
    as_list,
    check_option,
    to_python,
)

if TYPE_CHECKING:
    from vanilla_transformer.generation_options import Options
else:  # which checkers of types do not find
    from ..shared.generation_options import Options

EXCLUDED_SCORE = np.float32(-1e9)  # transformers' score of an excluded beam
# Prompt lookup of transformers, which gives the tokens of greedy search in fewer steps.
PROMPT_LOOKUP = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
# Fields of generation_config.json that do not change tokens: bookkeeping, caches, compilation,
# other outputs of `transformers.generate`, prompt lookup and assistant models.
WITHOUT_EFFECT = {
    *PROMPT_LOOKUP,
    *(
        "bos_token_id",
        "transformers_version",
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
    ),
    *("prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config"),
    *(
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
    ),
    *(
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
    ),
    "target_lookbehind",
}
HARMLESS = FIELDS.keys() | WITHOUT_EFFECT
# Other fields must have a value without effect: this one, or by default 0 or `None`.
NEUTRAL = SAMPLING_ONLY | {
    "encoder_repetition_penalty": 1,
    "num_beam_groups": 1,
    "guidance_scale": 1,
}


def check_seeds(seeds: Sequence[int] | None, count: int, seed: int | None = None) -> None:
    """Raise UsageError if `seeds` is not None and has not one seed for each of `count` inputs, or
    if the option `seed` is set too."""
    if seeds is None:
        return
    if seed is not None:
        raise UsageError(f"seed is {seed}, expected no seed with seeds, or no seeds", "seed")
    if not isinstance(seeds, Sequence | np.ndarray) or not all(map(SEED.holds, seeds)):
        raise UsageError(f"seeds must be whole numbers of at least 0, got {reprlib.repr(seeds)}")
    if len(seeds) != count:
        raise UsageError(f"seeds has {len(seeds)} values, expected one for each of {count} inputs")


def check_single(options: dict[str, Any], user: str) -> dict[str, Any]:
    """Return `options`, by default with one result per text, whatever generation_config.json sets.

    Raises UsageError if `options` ask for several. The message says what `user` does with one.
    """
    count = options.get("num_return_sequences")
    if count not in (None, 1):
        raise UsageError(
            f"num_return_sequences is {count}, expected 1: {user} one translation per text"
        )
    return {"num_return_sequences": 1, **options}


def check(options: dict[str, Any]) -> dict[str, Any]:
    """Return valid `options` with numpy values converted to Python's. `None` is always valid.

    Raises:
        UsageError: for an unknown option or an invalid value.
    """
    check_names(options)
    plain = plain_values(options)
    for name, value in plain.items():
        if value is not None:
            check_option(name, value, KINDS[name])
    return plain


def check_names(options: dict[str, Any]) -> None:
    """Raise UsageError for an unknown option."""
    unknown = sorted(options.keys() - FIELDS.keys())
    for name in PROMPT_LOOKUP:
        if name in unknown:
            raise UsageError(
                f"{name} is {options[name]!r:.100}, expected no such option: prompt lookup only "
                "saves steps, and greedy search gives the same tokens",
                name,
            )
    if unknown:
        close = nearest(unknown[0], FIELDS)
        hint = f"did you mean {close}?" if close else f"expected some of {sorted(FIELDS)}"
        raise UsageError(f"unknown generation options {unknown}, {hint}")


def plain_values(options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` with numpy values converted to Python's."""
    return {name: to_python(value) for name, value in options.items()}


def resolve(
    options: dict[str, Any], generation_config: dict[str, Any], config: dict[str, Any]
) -> Options:
    """Return the options of a call. `Options.for_prompt` returns those for one of its prompts.

    `options` take precedence over `generation_config`, whose `None` counts as unset. A `None` in
    `options` overrides it too, and means the default of `Options`, or 0 for `top_k`. Special tokens
    come from the model's `config` otherwise, and the pad token is by default the first end token.
    `max_new_tokens` and `min_new_tokens` always take precedence over `max_length` and `min_length`.

    Args:
        options: options of the caller.
        generation_config: content of generation_config.json.
        config: content of config.json.

    Raises:
        UsageError: for an unknown option, tokens outside the vocabulary, invalid values, and values
            that cannot be combined.
        ValueError: for a field of `generation_config` that this runtime does not support.
    """
    check_names(options)
    options = plain_values(options)
    set_values = {name: value for name, value in generation_config.items() if value is not None}
    merged = {name: value for name, value in set_values.items() if name in FIELDS} | options
    for name in SPECIAL_TOKENS:
        merged[name] = special_token(name, options, generation_config, config)
    if merged["pad_token_id"] is None:
        merged["pad_token_id"] = next(iter(as_list(merged["eos_token_id"])), None)
    if merged.get("top_k", ...) is None:
        merged["top_k"] = 0  # only this option is turned off by `None`
    merged |= length_limits(merged, config)
    resolved = Options(**{name: value for name, value in merged.items() if value is not None})
    check_applied(generation_config, resolved.do_sample)
    resolved.check_vocabulary(config["vocab_size"])
    return resolved


def length_limits(options: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the options of lengths, of which those of new tokens take precedence.

    Without a maximum in `options` it is 20 new tokens, or what `max_position_embeddings` leaves.
    """
    limits: dict[str, Any] = {}
    if options.get("min_new_tokens") is not None:
        limits["min_length"] = None
    if options.get("max_new_tokens") is not None:
        limits["max_length"] = None
    elif options.get("max_length") is not None:
        limits["max_new_tokens"] = MAX_INT64
    else:
        limits["max_length"] = config["max_position_embeddings"]
    return limits


def check_applied(generation_config: dict[str, Any], is_sampling: bool) -> None:
    """Raise ValueError for a field of `generation_config` that is set but that this runtime does
    not support.

    Some fields count only if `is_sampling`.
    """
    for name in sorted(generation_config.keys() - HARMLESS):
        value = generation_config[name]
        is_neutral = value is None or value == NEUTRAL.get(name, 0) or name.startswith("_")
        if not is_neutral and (is_sampling or name not in SAMPLING_ONLY):
            raise ValueError(
                f"generation_config.json sets {name:.200} to {value!r:.200}, which this "
                "runtime does not support"
            )


def special_token(name: str, *sources: dict[str, Any]) -> Any:
    """Return the value of `name` in the first of `sources` that has the key, even if it is None.
    Return None if none has it."""
    for source in sources:
        if name in source:
            return source[name]
    return None
