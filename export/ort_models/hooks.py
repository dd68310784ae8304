"""The private names of transformers that its `GenerationMixin` looks up in a model."""

import inspect
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode
from transformers.modeling_outputs import BaseModelOutput

from .decoder_cache import DecoderCache, Source

# The keyword of caches, which transformers 5.24 renamed.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)


class TransformersHooks(GenerationMixin):
    """`GenerationMixin` with what it expects of a `PreTrainedModel`."""

    base_model_prefix = ""
    _is_stateful = False

    @classmethod
    def is_remote_code(cls) -> bool:
        return False

    def get_experts_implementation(self) -> dict[str, str]:
        return {}

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Put a `DecoderCache` into `model_kwargs`, unless one is there. `use_cache=False` has no
        effect."""
        generation_config.use_cache = True
        if (passed := model_kwargs.get(CACHE)) is not None:
            check_cache(passed)._is_user_defined = True
            return
        is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        model_kwargs[CACHE] = DecoderCache(
            self.runtime,  # type: ignore[attr-defined]
            max(generation_config.num_beams, generation_config.num_return_sequences),
            max_cache_length + 1,
            is_croppable=is_assisted or bool(generation_config.is_assistant),
        )

    def _prepare_text_encoder_decoder_kwargs_for_generation(
        self, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        """Put the source into `model_kwargs` without its states. The decoder encodes it."""
        encoder = self.get_encoder()  # type: ignore[attr-defined]
        source = encoder.check(inputs_tensor, model_kwargs.get("attention_mask"))
        states = torch.zeros((*source[0].shape, 1), device=inputs_tensor.device)
        model_kwargs["encoder_outputs"] = with_source(states, source)
        return model_kwargs


def check_cache(cache: Any) -> DecoderCache:
    """Return a cache of an export. Raise ValueError for another one."""
    if not isinstance(cache, DecoderCache):
        raise ValueError(
            f"the cache is a {type(cache).__name__}, expected one that this model returned, or None"
        )
    return cache


def with_source(states: Any, source: Source) -> BaseModelOutput:
    """Return encoder outputs that remember their source, from which decoders start."""
    output = BaseModelOutput(last_hidden_state=states)
    output.source = source  # type: ignore[attr-defined]
    return output
