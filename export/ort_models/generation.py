"""The classes of models that generate: transformers' `generate` over the decoders of an export."""

import contextlib
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin
from transformers import modeling_outputs as outputs
from transformers.generation import GenerationMode

from .. import heads
from ..inference.decoder import INITIAL_CAPACITY
from ..inference.options import FIELDS, Options, check_applied
from ..runtime import Runtime
from .base import ORTModel, from_numpy, to_numpy
from .decoder_cache import DecoderCache
from .foreign import DECODER_FORMS, SEQ2SEQ_FORMS

# The keyword of caches, which transformers 5.24 renamed.
KEYWORDS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in KEYWORDS else "past_key_values"
INPUTS = {"input_ids", "attention_mask", "decoder_input_ids"}
LOOP_ONLY = ("do_sample", "return_dict_in_generate", "output_scores", "output_logits")


class PrivateNames(GenerationMixin):
    """The private methods and attributes that transformers' `GenerationMixin` looks up in a
    model."""

    base_model_prefix = ""
    _is_stateful = False
    runtime: Any

    @classmethod
    def is_remote_code(cls) -> bool:
        return False

    def get_experts_implementation(self) -> dict[str, str]:
        return {}

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, generation_mode: Any, *args: Any
    ) -> None:
        """Put a `DecoderCache` into `model_kwargs`, also for `use_cache=False`, unless the caller
        passed a cache."""
        generation_config.use_cache = True
        if (cache := model_kwargs.get(CACHE)) is not None:
            cache._is_user_defined = True
            return
        is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        options = Options(
            generation_config.max_length,
            num_beams=max(generation_config.num_beams, generation_config.num_return_sequences),
            prompt_lookup_num_tokens=1 if is_assisted or generation_config.is_assistant else None,
        )
        model_kwargs[CACHE] = DecoderCache(self.runtime, options)

    def _prepare_text_encoder_decoder_kwargs_for_generation(
        self, inputs_tensor: torch.Tensor, model_kwargs: dict, **kwargs: Any
    ) -> dict:
        """Add the source as `encoder_outputs` with zeros as states: decoders encode it."""
        states = torch.zeros((*inputs_tensor.shape, 1), device=inputs_tensor.device)
        mask = model_kwargs.get("attention_mask")
        model_kwargs["encoder_outputs"] = with_source(states, inputs_tensor, mask)
        return model_kwargs


class ORTModelForGeneration(PrivateNames, ORTModel):
    """An `ORTModel` with `generate` of transformers; the base class of causal and seq2seq
    models."""

    output_modalities = ("text",)

    def can_generate(self) -> bool:
        return True

    def encode(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Return the encoder's outputs for sources (B, S), for `forward` and `generate`.

        Raises ValueError for wrong tokens and masks, and for targets whose encoder has no states.
        """
        states = self.runtime.encode(to_numpy(input_ids), to_numpy(attention_mask))
        return with_source(from_numpy(states, input_ids), input_ids, attention_mask)

    def generate(
        self, inputs: Any = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        """Generate tokens: arguments and results are those of `generate` of transformers.

        Greedy and beam search run in `Runtime.generate` if it supports all arguments. Otherwise
        transformers' own loop runs over the same decoders: sampling, processors, criteria,
        streamers, assistants, scores and caches.
        """
        ids = {} if inputs is None else {"input_ids": inputs}
        with contextlib.suppress(ValueError):  # the loop supports more, or has an error of its own
            return self._search(generation_config, **ids, **kwargs)
        return super().generate(inputs, generation_config, **kwargs)

    def _search(self, generation_config: GenerationConfig | None, **kwargs: Any) -> Any:
        """Return the tokens of `Runtime.generate`. Raises ValueError if it does not support the
        arguments."""
        fields, changed = vars(self.generation_config), vars(generation_config or SimpleNamespace())
        settings = fields | set_values(changed) | kwargs
        arrays: dict[str, Any] = {name: to_numpy(settings.pop(name, None)) for name in INPUTS}
        loop_only = {name for name in LOOP_ONLY if settings.get(name)}
        loop_only |= set_values(settings).keys() - fields.keys()
        if loop_only or arrays["input_ids"] is None or not isinstance(self.runtime, Runtime):
            raise ValueError(f"Runtime.generate does not support {loop_only} or the model")
        check_applied(settings, is_sampling=False)
        if self.config.is_encoder_decoder and arrays["attention_mask"] is None:
            arrays["attention_mask"] = np.ones_like(arrays["input_ids"])
        options: dict[str, Any] = {name: settings.get(name) for name in FIELDS}
        if options["decoder_start_token_id"] is None:
            del options["decoder_start_token_id"]  # the export knows it
        return from_numpy(self.runtime.generate(**arrays, **options), kwargs["input_ids"])

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        decoder_input_ids: Any = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        cache: Any = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        position_ids: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Feed tokens and return the logits (B, T, V) after each, a cache for the next call, and
        the states of an encoder.

        Args:
            input_ids, attention_mask: tokens (B, T) of a decoder-only model, padded on either side;
                sources (B, S) of a seq2seq model, unless there are `encoder_outputs`.
            decoder_input_ids: target tokens (B, T) of a seq2seq model, padded on the right.
            encoder_outputs: what this model's encoder returned for the sources.
            past_key_values, cache: a cache that this model returned; transformers 5.24 renamed the
                argument.
            logits_to_keep: the number of last tokens whose logits are returned. 0 is all, which
                only portable exports support.
            return_dict: False to return a tuple in place of named outputs.
            position_ids, use_cache: ignored.
            kwargs: other arguments, ignored with a warning.

        Raises:
            ValueError: for wrong tokens or masks, encoder outputs or caches of another model, and
                logits that the target does not return.
        """
        self.warn_of_ignored(kwargs)
        ids, mask, source = input_ids, attention_mask, None
        if self.config.is_encoder_decoder:
            encoder_outputs = encoder_outputs or self.encode(input_ids, attention_mask)
            ids, mask, source = decoder_input_ids, None, getattr(encoder_outputs, "source", None)
            if source is None:
                raise ValueError("encoder_outputs has no source, expected those of this encoder")
        cache = past_key_values if cache is None else cache
        cache = DecoderCache(self.runtime, Options(INITIAL_CAPACITY)) if cache is None else cache
        if not isinstance(cache, DecoderCache):
            raise ValueError(f"the cache is a {type(cache).__name__}, expected one of this model")
        logits = cache.read(to_numpy(ids), to_numpy(mask), source, logits_to_keep)
        output = self.output_class(logits=from_numpy(logits, ids), **{CACHE: cache})
        if source is not None:
            output["encoder_last_hidden_state"] = encoder_outputs.last_hidden_state
        return output.to_tuple() if return_dict is False else output


def set_values(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not `None`."""
    return {name: value for name, value in arguments.items() if value is not None}


def with_source(states: Any, input_ids: Any, attention_mask: Any) -> outputs.BaseModelOutput:
    """Return `states` as outputs of an encoder, whose attribute `source` decoders start from."""
    output = outputs.BaseModelOutput(last_hidden_state=states)
    output.source = to_numpy(input_ids), to_numpy(attention_mask)
    return output


class ORTModelForCausalLM(
    ORTModelForGeneration,
    output_class=outputs.CausalLMOutputWithPast,
    tasks=[heads.GENERATE],
    forms=DECODER_FORMS,
):
    """An `ORTModel` of a decoder-only language model."""


class ORTModelForSeq2SeqLM(
    ORTModelForGeneration,
    output_class=outputs.Seq2SeqLMOutput,
    tasks=[heads.GENERATE_TARGETS],
    forms=SEQ2SEQ_FORMS,
):
    """An `ORTModel` of an encoder and a decoder that generates text from a source."""

    def get_encoder(self, modality: str | None = None) -> Any:
        return self.encode
