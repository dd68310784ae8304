"""The options of `generate`.

Each option is a field of `Options` with a default, a kind and a help text. The command line, the
docstring of `Runtime.generate` and the table of the documentation are generated from the fields.
Those that change logits have a function in `logits.PROCESSORS`.
"""

import dataclasses
import functools
import math
import reprlib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from ..errors import UsageError, nearest

MAX_INT64 = 2**63 - 1
SMALLEST_FLOAT32 = float(np.finfo(np.float32).tiny)
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
EXCLUDED_SCORE = np.float32(-1e9)  # transformers' score of an excluded beam


def is_integer(value: object) -> TypeGuard[int]:
    # Test for int first, because isinstance with an abstract class is slow.
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_int64(value: object) -> bool:
    return is_integer(value) and -MAX_INT64 - 1 <= value <= MAX_INT64


def is_float32(value: object) -> bool:
    if type(value) not in (int, float) and (isinstance(value, bool) or not isinstance(value, Real)):
        return False
    number: Any = value  # an int may be too large for a float
    return bool(-LARGEST_FLOAT32 <= number <= LARGEST_FLOAT32)


def is_list(value: object, holds: Callable[[object], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(holds, value))


def as_list(value: Any) -> list | tuple:
    """Return a list: empty for None, with one element for a single value, lists and tuples
    unchanged."""
    if value is None:
        return []
    return value if isinstance(value, list | tuple) else [value]


class Kind(NamedTuple):
    """The kind of an option: the expected values in words, and a test."""

    expected: str
    holds: Callable[[Any], bool]


COUNT = Kind("a whole number from 1 to 2**63 - 1", lambda value: is_int64(value) and value >= 1)
COUNT_OR_0 = Kind(
    "a whole number from 0 to 2**63 - 1", lambda value: is_int64(value) and value >= 0
)
SEED = Kind("a whole number of at least 0", lambda value: is_integer(value) and value >= 0)
NUMBER = Kind("a float32 number", is_float32)
POSITIVE = Kind(
    "a float32 number above 0", lambda value: is_float32(value) and value >= SMALLEST_FLOAT32
)
PROBABILITY = Kind("a number from 0 to 1", lambda value: is_float32(value) and 0 <= value <= 1)
FLAG = Kind("True or False", lambda value: isinstance(value, bool))
FLAG_OR_NEVER = Kind(
    "True, False or 'never'", lambda value: isinstance(value, bool) or value == "never"
)
TOKEN = Kind("a token id", is_int64)
TOKENS = Kind("a list of token ids", lambda value: is_list(value, is_int64))
ONE_OR_MORE_TOKENS = Kind(
    "a token id or a list of them", lambda value: is_int64(value) or is_list(value, is_int64)
)
WORDS = Kind(
    "a list of lists of token ids, none empty",
    lambda value: (
        bool(value) and is_list(value, lambda word: bool(word) and is_list(word, is_int64))
    ),
)


def option(kind: Kind, default: Any, help: str, in_vocabulary: bool = False) -> Any:
    """Return a field of `Options`.

    Args:
        kind: the expected values.
        default: the default value.
        help: help text of the command line and the documentation.
        in_vocabulary: True if tokens outside the vocabulary are an error. Other options ignore
            such tokens, as in transformers.
    """
    metadata = {"kind": kind, "help": help, "in_vocabulary": in_vocabulary}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """The generation options: `seed`, and the fields of transformers' `GenerationConfig` that this
    runtime supports, with the same names, meanings and defaults.

    Raises:
        UsageError: for an invalid value, and for values that cannot be combined.
    """

    max_new_tokens: int = option(
        COUNT,
        20,
        "maximum number of new tokens; if max_length is set, by default what that leaves",
    )
    max_length: int | None = option(
        COUNT,
        None,
        "maximum number of tokens including the prompt; ignored if max_new_tokens is set, here or "
        "in generation_config.json",
    )
    num_beams: int = option(
        COUNT,
        1,
        "number of beams of beam search; 1 is greedy search, or sampling if do_sample is true",
    )
    length_penalty: float = option(
        NUMBER, 1.0, "beam search: scores are divided by length^length_penalty"
    )
    early_stopping: bool | str = option(
        FLAG_OR_NEVER,
        False,
        "beam search: stop at num_beams finished sequences, or 'never' while better ones are "
        "possible",
    )
    num_return_sequences: int = option(
        COUNT, 1, "number of sequences per input: samples, or the best of num_beams"
    )
    do_sample: bool = option(FLAG, False, "sample tokens instead of choosing the most likely")
    temperature: float = option(
        POSITIVE, 1.0, "with do_sample: temperature by which logits are divided"
    )
    top_k: int = option(
        COUNT_OR_0, 50, "with do_sample: keep this many of the most likely tokens; 0 keeps all"
    )
    top_p: float = option(
        PROBABILITY,
        1.0,
        "with do_sample: nucleus sampling, which keeps the smallest set of tokens whose "
        "probabilities sum to at least top_p",
    )
    min_p: float = option(
        PROBABILITY,
        0.0,
        "with do_sample: minimum probability of a token, relative to the most likely one",
    )
    seed: int | None = option(
        SEED, None, "seed of sampling, from which inputs derive theirs; default: a random seed"
    )
    repetition_penalty: float = option(
        POSITIVE,
        1.0,
        "penalty for tokens that occurred before; above 1 makes them less likely",
    )
    no_repeat_ngram_size: int = option(
        COUNT_OR_0,
        0,
        "n-grams of this size may not repeat; 0 turns it off",
    )
    bad_words_ids: list[list[int]] | None = option(
        WORDS,
        None,
        "token sequences that are never generated",
        in_vocabulary=True,
    )
    min_new_tokens: int = option(COUNT_OR_0, 0, "minimum number of new tokens before the end token")
    min_length: int | None = option(
        COUNT_OR_0,
        None,
        "minimum number of tokens including the prompt; ignored if min_new_tokens is set, here or "
        "in generation_config.json",
    )
    forced_bos_token_id: int | None = option(
        TOKEN,
        None,
        "token to generate first",
        in_vocabulary=True,
    )
    forced_eos_token_id: int | list[int] | None = option(
        ONE_OR_MORE_TOKENS,
        None,
        "token to generate last if max_new_tokens is reached",
        in_vocabulary=True,
    )
    suppress_tokens: list[int] | None = option(TOKENS, None, "tokens that are never generated")
    begin_suppress_tokens: list[int] | None = option(
        TOKENS, None, "tokens that are never generated first"
    )
    renormalize_logits: bool = option(
        FLAG,
        False,
        "beam search: normalize probabilities again after all options above",
    )
    eos_token_id: int | list[int] | None = option(
        ONE_OR_MORE_TOKENS, None, "token that ends a sequence; default: the model's"
    )
    pad_token_id: int | None = option(
        COUNT_OR_0,
        None,
        "token that fills finished sequences; default: the model's",
        in_vocabulary=True,
    )
    decoder_start_token_id: int | None = option(
        TOKEN,
        None,
        "first decoder token of an encoder-decoder model; default: the model's",
        in_vocabulary=True,
    )

    def __post_init__(self) -> None:
        self._set_values()
        self._check_search()
        self._check_forced_tokens()
        self._check_length_penalty()

    def _set_values(self) -> None:
        """Check all values, and replace `None` by defaults."""
        options = {name: value for name, value in vars(self).items() if value is not DEFAULTS[name]}
        for name, value in check_values(plain_values(options)).items():
            value = DEFAULTS[name] if value is None else value
            if value is not options[name]:
                object.__setattr__(self, name, value)

    def _check_search(self) -> None:
        """Raise UsageError for options of different kinds of search."""
        if self.do_sample and self.num_beams > 1:
            raise UsageError(
                f"do_sample=True cannot be combined with num_beams={self.num_beams}, expected "
                "num_beams=1"
            )
        if self.num_return_sequences > self.num_beams and not self.do_sample:
            maximum = f"num_beams, {self.num_beams}," if self.num_beams > 1 else "1"
            name, count = "num_return_sequences", self.num_return_sequences
            raise UsageError(
                f"{name} must be at most {maximum} without do_sample, got {count}", name
            )

    def _check_forced_tokens(self) -> None:
        """Raise UsageError if all tokens that are forced at a position are suppressed."""
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            forced = as_list(getattr(self, name))
            if forced and set(forced) <= set(as_list(self.suppress_tokens)):
                raise UsageError(
                    f"{name} must contain a token that suppress_tokens does not suppress, got "
                    f"{forced}",
                    name,
                )

    def _check_length_penalty(self) -> None:
        """Raise UsageError if beam search would divide scores by a number that is too large for
        float32, or so small that they fall below `EXCLUDED_SCORE`.

        The number is a length up to `max_new_tokens` with the exponent `length_penalty`. With
        `max_length` the prompt decides about it, see `for_prompt`.
        """
        if self.num_beams == 1 or self.max_length is not None:
            return
        lowest, highest = (
            math.log(limit) / math.log(max(self.max_new_tokens, 2))
            for limit in (1e-6, LARGEST_FLOAT32)
        )
        if not lowest <= self.length_penalty <= highest:
            expected = (
                f"from {lowest:.4g} to {highest:.4g} with max_new_tokens={self.max_new_tokens}"
            )
            raise UsageError(
                f"length_penalty must be {expected}, got {self.length_penalty}", "length_penalty"
            )

    @functools.cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(as_list(self.eos_token_id))

    @property
    def fill_token_id(self) -> int:
        """Token that fills a row after its end token: the pad token, else the first end token, else
        0.

        In beam search a pad token of 0 counts as unset, as in transformers.
        """
        if self.pad_token_id or (self.pad_token_id == 0 and self.num_beams == 1):
            return self.pad_token_id
        return next(iter(self.eos_token_ids), 0)

    @functools.cached_property
    def set_names(self) -> frozenset[str]:
        """The names of the options that are not defaults."""
        return frozenset(name for name in FIELDS if getattr(self, name) != DEFAULTS[name])

    @property
    def rows_per_input(self) -> int:
        return max(self.num_beams, self.num_return_sequences)

    @property
    def candidates(self) -> int:
        """Number of beam search candidates per input and step. At least `num_beams` remain if the
        best candidates end."""
        return max(2, 1 + len(self.eos_token_ids)) * self.num_beams

    def for_prompt(self, length: int) -> "Options":
        """Return the options for a prompt of `length` tokens, padding included: with the new tokens
        that `max_length` and `min_length` leave, in place of both.

        Raises UsageError if the prompt leaves no room.
        """
        if self.max_length is None and not self.min_length:
            return self
        max_room = MAX_INT64 if self.max_length is None else self.max_length - length
        if max_room <= 0:
            raise UsageError(
                f"max_length must be more than {length}, the prompt's tokens, got {self.max_length}"
            )
        min_room = 0 if self.min_length is None else self.min_length - length
        return dataclasses.replace(
            self,
            max_new_tokens=min(self.max_new_tokens, max_room),
            min_new_tokens=max(self.min_new_tokens, min_room),
            max_length=None,
            min_length=None,
        )

    def check_vocabulary(self, size: int) -> None:
        """Raise UsageError for tokens outside a vocabulary of `size` tokens, or too many beams for
        it. Only the options `IN_VOCABULARY` are checked; others ignore such tokens."""
        if self.candidates > self.num_beams * size or self.num_beams > size:
            ends = f" and {len(self.eos_token_ids)} end tokens" if self.eos_token_ids else ""
            raise UsageError(
                f"num_beams={self.num_beams}{ends} are too many for a vocabulary of {size} tokens",
                "num_beams",
            )
        for name in IN_VOCABULARY:
            if (value := getattr(self, name)) is None:
                continue
            words = map(as_list, as_list(value))
            outside = [token for word in words for token in word if not 0 <= token < size]
            if outside:
                raise UsageError(
                    f"{name} must be in [0, {size - 1}], the vocabulary, got {outside[0]}", name
                )


def check_seeds(seeds: Sequence[int] | None, count: int) -> None:
    """Raise UsageError if `seeds` is not None and has not one seed for each of `count` inputs."""
    if seeds is None:
        return
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


FIELDS = {field.name: field for field in dataclasses.fields(Options)}
DEFAULTS = {name: field.default for name, field in FIELDS.items()}
IN_VOCABULARY = tuple(name for name, field in FIELDS.items() if field.metadata["in_vocabulary"])

# Prompt lookup of transformers, which gives the tokens of greedy search in fewer steps.
PROMPT_LOOKUP = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
SPECIAL_TOKENS = ("eos_token_id", "pad_token_id", "decoder_start_token_id")
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
# fields that have no effect without do_sample
SAMPLING_ONLY = {"typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"}
# Other fields must have a value without effect: this one, or by default 0 or `None`.
NEUTRAL = {
    "encoder_repetition_penalty": 1,
    "num_beam_groups": 1,
    "typical_p": 1,
    "guidance_scale": 1,
}


def check(options: dict[str, Any]) -> dict[str, Any]:
    """Return valid `options` with numpy values converted to Python's. `None` is always valid.

    Raises:
        UsageError: for an unknown option or an invalid value.
    """
    check_names(options)
    return check_values(plain_values(options))


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


def check_values(options: dict[str, Any]) -> dict[str, Any]:
    """Return `options`. Raises UsageError for an invalid value; `None` is always valid."""
    for name, value in options.items():
        kind = FIELDS[name].metadata["kind"]
        if value is not None and not kind.holds(value):
            raise UsageError(f"{name} must be {kind.expected}, got {reprlib.repr(value)}", name)
    return options


def plain_values(options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` with numpy values converted to Python's."""
    return {name: to_python(value) for name, value in options.items()}


def to_python(value: Any) -> Any:
    """Return numpy scalars and arrays as Python values, also in lists and tuples. Tuples become
    lists.

    Other values are returned unchanged, also dicts and their values.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    return [to_python(item) for item in value] if isinstance(value, list | tuple) else value


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


def options_text(indent: str = "") -> str:
    """Return a line "name: help (default)" for each field of `Options`, for a docstring, wrapped at
    100 columns.

    Lines begin with `indent`.
    """
    entries = [
        f"{name}: {field.metadata['help']} ({field.default!r})" for name, field in FIELDS.items()
    ]
    hanging = textwrap.TextWrapper(100, initial_indent=indent, subsequent_indent=f"{indent}    ")
    return "\n".join(map(hanging.fill, entries))


def options_table() -> str:
    """Return a Markdown table of the fields of `Options`, and of the other fields of
    generation_config.json that exports accept without applying them."""
    lines = ["| option | default | must be | meaning |", "|---|---|---|---|"]
    for name, field in FIELDS.items():
        lines.append(
            f"| `{name}` | `{field.default!r}` | {field.metadata['kind'].expected} | "
            f"{field.metadata['help']} |"
        )
    for name in sorted(WITHOUT_EFFECT):
        lines.append(f"| `{name}` | | anything | of generation_config.json: has no effect |")
    for name in sorted(SAMPLING_ONLY):
        neutral = f"`None` or `{NEUTRAL.get(name, 0)}`"
        lines.append(
            f"| `{name}` | | {neutral} with do_sample | of generation_config.json: not applied |"
        )
    return "\n".join(lines)
