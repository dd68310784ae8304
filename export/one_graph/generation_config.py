"""Logits processors of generation_config.json as nodes, for a graph without options besides its
inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..inference.logits import PROCESSORS
from ..inference.options import Options, resolve
from ..shared.generation_options import DEFAULTS, SAMPLING, defaults_of_mode
from ..shared.options import as_list

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..graphs.ops import Ops

# The options that graphs here apply, of those that change logits or that only sampling has.
SUPPORTED = {
    *("bad_words_ids", "min_new_tokens", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "renormalize_logits"),
    *("temperature", "top_k", "top_p"),
}
# a decoder's count the prompt, whose length no exporter knows
OF_PROMPTS = ("min_length", "forced_bos_token_id")


@dataclass(frozen=True)
class Rules:
    """The special tokens and logits processors of a model with a vocabulary of `size` tokens."""

    options: Options
    size: int

    @classmethod
    def of(cls, mode: str, generation: dict[str, Any], config: dict[str, Any]) -> Rules:
        """Return the rules of `generation`, the content of generation_config.json, and of `config`,
        that of config.json.

        `mode` is "greedy", "sample" or "beam".

        Raises:
            ValueError: for a field with a value that the graph does not support, or that is
                invalid.
        """
        check_fields(mode, generation, config)
        options = {
            "do_sample": mode == "sample",
            "num_beams": 2 if mode == "beam" else 1,
            "max_new_tokens": 1,
        }
        return cls(
            resolve(options | {"length_penalty": 1.0}, generation, config).for_prompt(1),
            config["vocab_size"],
        )

    def applied(self, ops: Ops, scores: ir.Value, position: ir.Value, limit: ir.Value) -> ir.Value:
        """Return the processed `scores` (rows, V) of a token, its logits or log probabilities.

        The token follows `position` (a scalar) new tokens. `limit` (rows, 1) is the maximum number
        of new tokens."""
        options = self.options
        never = [
            word[0] for word in options.bad_words_ids or () if word[0] not in options.eos_token_ids
        ]
        scores = self.without(ops, scores, never)
        if options.min_new_tokens:
            scores = self.without(
                ops, scores, options.eos_token_ids, ops("Less", position, options.min_new_tokens)
            )
        if options.forced_bos_token_id is not None:
            scores = self.only(
                ops, scores, [options.forced_bos_token_id], ops("Equal", position, 0)
            )
        if options.forced_eos_token_id is not None:
            is_last = ops("Equal", position, ops("Sub", limit, 1))
            scores = self.only(ops, scores, as_list(options.forced_eos_token_id), is_last)
        scores = self.without(ops, scores, options.suppress_tokens or ())
        first = int(options.forced_bos_token_id is not None)
        return self.without(
            ops, scores, options.begin_suppress_tokens or (), ops("Equal", position, first)
        )

    def without(
        self, ops: Ops, scores: ir.Value, tokens: Any, condition: ir.Value | None = None
    ) -> ir.Value:
        """Return `scores` (rows, V) with -inf for `tokens`, where the `condition` holds or if it is
        None. Tokens outside the vocabulary are ignored."""
        known = [token for token in tokens if 0 <= token < self.size]
        if not known:
            return scores
        added = np.zeros(self.size, np.float32)
        added[known] = -np.inf
        return ops(
            "Add", scores, added if condition is None else ops("Where", condition, added, 0.0)
        )

    def only(self, ops: Ops, scores: ir.Value, tokens: Any, condition: ir.Value) -> ir.Value:
        """Return `scores` (rows, V) with 0 for `tokens` and -inf for all others, where the
        `condition` holds."""
        forced = np.full(self.size, -np.inf, np.float32)
        forced[list(tokens)] = 0
        return ops("Where", condition, forced, scores)


def check_fields(mode: str, generation: dict[str, Any], config: dict[str, Any]) -> None:
    """Raise ValueError if `generation` has a field that the graph of `mode` does not support.

    `generation` is the content of generation_config.json, `config` that of config.json.
    """
    names = {"num_return_sequences", *(function.__name__ for function in PROCESSORS)}
    names |= defaults_of_mode(SAMPLING).keys() if mode == "sample" else set()
    unsupported = {name: DEFAULTS[name] for name in sorted(names - SUPPORTED)}
    if config["model_type"] == "vanilla-decoder":
        unsupported |= dict.fromkeys(OF_PROMPTS)
    for name, neutral in unsupported.items():
        value = generation.get(name)
        if value is not None and value != neutral and (value or neutral):
            raise ValueError(
                f"generation_config.json has {name}={value!r:.100}, which --generate does not "
                f"support: expected {neutral}"
            )
    longer = [word for word in generation.get("bad_words_ids") or () if len(word) > 1]
    if longer:
        problem = (
            f"generation_config.json has bad_words_ids with {longer[0]!r:.100}, a word of "
            "several tokens"
        )
        raise ValueError(
            f"{problem}, which --generate does not support: expected words of one token"
        )
