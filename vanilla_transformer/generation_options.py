"""The options of `generate`: the fields of generation_config.json that our runtime applies.

Recipes, the check of checkpoints, exports, the command line and HTTP read them here. Without torch.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from .errors import UsageError
from .options import (
    COUNT,
    COUNT_OR_0,
    FLAG,
    FLAG_OR_NEVER,
    LARGEST_FLOAT32,
    MAX_INT64,
    NUMBER,
    ONE_OR_MORE_TOKENS,
    POSITIVE,
    PROBABILITY,
    SEED,
    TOKEN,
    TOKENS,
    WORDS,
    Kind,
    as_list,
    check_option,
    fields_by_name,
    option,
    to_python,
)

SAMPLING, BEAMS = "with do_sample", "beam search"  # modes that some options need to have an effect


@dataclass(frozen=True)
class Options:
    """The generation options: `seed`, and the fields of transformers' `GenerationConfig` that our
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
        NUMBER, 1.0, "scores are divided by length^length_penalty", mode=BEAMS
    )
    early_stopping: bool | str = option(
        FLAG_OR_NEVER,
        False,
        "stop at num_beams finished sequences, or 'never' while better ones are possible",
        mode=BEAMS,
    )
    num_return_sequences: int = option(
        COUNT, 1, "number of sequences per input: samples, or the best of num_beams"
    )
    do_sample: bool = option(FLAG, False, "sample tokens instead of choosing the most likely")
    temperature: float = option(
        POSITIVE, 1.0, "temperature by which logits are divided", mode=SAMPLING
    )
    top_k: int = option(
        COUNT_OR_0, 50, "keep this many of the most likely tokens; 0 keeps all", mode=SAMPLING
    )
    top_p: float = option(
        PROBABILITY,
        1.0,
        "nucleus sampling, which keeps the smallest set of tokens whose "
        "probabilities sum to at least top_p",
        mode=SAMPLING,
    )
    min_p: float = option(
        PROBABILITY,
        0.0,
        "minimum probability of a token, relative to the most likely one",
        mode=SAMPLING,
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
        """Check all values, and replace `None` by defaults and numpy values by Python's."""
        for name, value in vars(self).items():
            if value is DEFAULTS[name]:
                continue
            plain = DEFAULTS[name] if value is None else to_python(value)
            object.__setattr__(self, name, plain)
            if value is not None:
                check_option(name, plain, KINDS[name])

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
    def changed(self) -> set[str]:
        """Names of the options that are not their defaults."""
        return {name for name, default in DEFAULTS.items() if getattr(self, name) != default}

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


FIELDS = fields_by_name(Options)
DEFAULTS = {name: field.default for name, field in FIELDS.items()}
KINDS: dict[str, Kind] = {name: field.metadata["kind"] for name, field in FIELDS.items()}
# where tokens outside the vocabulary are an error; others ignore such tokens, as in transformers
IN_VOCABULARY = [name for name, field in FIELDS.items() if "in_vocabulary" in field.metadata]
SPECIAL_TOKENS = ("eos_token_id", "pad_token_id", "decoder_start_token_id")
# fields of generation_config.json that our runtime does not apply, which have an effect only with
# do_sample, with the values that have none
SAMPLING_ONLY = {"typical_p": 1, "top_h": 0, "epsilon_cutoff": 0, "eta_cutoff": 0}


def defaults_of_mode(mode: str) -> dict[str, Any]:
    """Return {name: default} of the options that have an effect only in `mode`."""
    return {name: DEFAULTS[name] for name in FIELDS if FIELDS[name].metadata["mode"] == mode}
