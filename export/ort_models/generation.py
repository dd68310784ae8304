"""The classes of models that generate: transformers' `generate` over the decoders of an export."""

import inspect
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin
from transformers import modeling_outputs as outputs
from transformers.generation import GenerationMode

from .. import heads
from ..errors import SessionError
from ..inference.options import PROMPT_LOOKUP, Options, check_applied
from ..shared.generation_options import FIELDS
from ..shared.options import as_list, to_python, without_none
from .base import ORTModel, from_numpy, to_numpy
from .decoder_cache import DecoderCache, check_cache

# The keyword of caches, which transformers 5.24 renamed.
KEYWORDS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in KEYWORDS else "past_key_values"
NO_OUTPUTS = ("output_attentions", "output_hidden_states")  # of generation configs
LOOP_ONLY = (
    "do_sample",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    *PROMPT_LOOKUP,
)


class ORTModelForGeneration(GenerationMixin, ORTModel):
    """The base class of causal and seq2seq models, with `generate` of transformers."""

    is_generator = True
    output_modalities = ("text",)
    # the private names that `GenerationMixin` looks up
    base_model_prefix = ""
    _is_stateful = False

    @classmethod
    def is_remote_code(cls) -> bool:
        return False

    def get_experts_implementation(self) -> dict[str, str]:
        return {}

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, generation_mode: Any, *args: Any
    ) -> None:
        """Put a `DecoderCache` into `model_kwargs`, even for `use_cache=False`, if it has none."""
        self._check_guidance(generation_config.guidance_scale)
        generation_config.use_cache = True
        self.warn_of_ignored({name: getattr(generation_config, name) for name in NO_OUTPUTS})
        for name in NO_OUTPUTS:
            setattr(generation_config, name, False)
        is_assisted = (
            generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        )
        if (cache := model_kwargs.get(CACHE)) is not None:
            check_cache(cache, self.runtime)._is_user_defined = True
            return
        options = Options(
            generation_config.max_length,
            num_beams=max(generation_config.num_beams, generation_config.num_return_sequences),
        )
        model_kwargs[CACHE] = DecoderCache(self.runtime, options, is_assisted)

    def _check_guidance(self, scale: float | None) -> None:
        """Raise ValueError for guidance of an encoder-decoder, which transformers would give the
        generated tokens as sources."""
        if self.config.is_encoder_decoder and scale not in (None, 1):
            raise ValueError(f"guidance_scale is {scale}, expected None for an encoder-decoder")

    def _prepare_position_ids_for_generation(self, *args: Any) -> None:
        """Return None: decoders count positions by the mask."""

    def prepare_inputs_for_generation(
        self, *args: Any, tokenizer: Any = None, **kwargs: Any
    ) -> Any:
        """Leave out the `tokenizer` of `stop_strings`."""
        return super().prepare_inputs_for_generation(*args, **kwargs)

    def _prepare_text_encoder_decoder_kwargs_for_generation(
        self, inputs_tensor: torch.Tensor, model_kwargs: dict, **kwargs: Any
    ) -> dict:
        """Add the source as `encoder_outputs` with zeros as states: decoders encode it."""
        states = torch.zeros((*inputs_tensor.shape, 1), device=inputs_tensor.device)
        mask = model_kwargs.get("attention_mask")
        model_kwargs["encoder_outputs"] = with_source(states, inputs_tensor, mask)
        return model_kwargs

    def encode(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Return the encoder's outputs for sources (B, S), for `forward` and `generate`.

        Raises ValueError for wrong tokens and masks, and for targets whose encoder has no states.
        """
        states = self.runtime.encode(to_numpy(input_ids), to_numpy(attention_mask))
        return with_source(from_numpy(states, input_ids), input_ids, attention_mask)

    def generate(
        self,
        inputs: Any = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Generate tokens: arguments and results are those of `generate` of transformers.

        Greedy and beam search run in `Runtime.generate` if it supports all arguments. Otherwise
        transformers' own loop runs over the same decoders: sampling, processors, criteria,
        streamers, assistants, scores and caches.
        """
        arguments = kwargs if inputs is None else {"input_ids": inputs, **kwargs}
        ids = arguments.get("input_ids")
        fits_loop = ids is None or (isinstance(ids, torch.Tensor) and ids.ndim == 2)
        if not args:
            try:
                return self._search(generation_config, **arguments)
            except SessionError:  # the loop would run the same graphs
                raise
            except ValueError:  # the loop supports more, or has an error of its own
                if not fits_loop:
                    raise
        return super().generate(inputs, generation_config, *args, **kwargs)

    def _search(self, generation_config: GenerationConfig | None, **kwargs: Any) -> Any:
        """Return the tokens of `Runtime.generate`. Raises ValueError for unsupported arguments."""
        fields = vars(self.generation_config)
        changes = {} if generation_config is None else vars(generation_config)
        settings = fields | without_none(changes) | kwargs
        ids, mask, decoder_ids = (
            to_numpy(settings.pop(name, None))
            for name in ("input_ids", "attention_mask", "decoder_input_ids")
        )
        loop_only = {name for name in LOOP_ONLY if settings.get(name)}
        loop_only |= without_none(settings).keys() - fields.keys()
        if loop_only or ids is None:
            reason = sorted(loop_only) or "no tokens"
            raise ValueError(f"{reason} need the loop of transformers, expected tensors (B, S)")
        check_applied(settings, is_sampling=False)
        if not self.config.is_encoder_decoder:
            check_prompts(ids, mask, settings)
        elif mask is None:
            mask = np.ones_like(ids)
        options: dict[str, Any] = {name: settings.get(name) for name in FIELDS}
        if options["decoder_start_token_id"] is None:
            del options["decoder_start_token_id"]  # the export knows it
        tokens = self.runtime.generate(ids, mask, decoder_ids, **options)
        return from_numpy(tokens, kwargs["input_ids"])


def with_source(states: Any, input_ids: Any, attention_mask: Any) -> outputs.BaseModelOutput:
    """Return `states` as outputs of an encoder, whose attribute `source` decoders start from."""
    output = outputs.BaseModelOutput(last_hidden_state=states)
    ids, mask = to_numpy(input_ids), to_numpy(attention_mask)
    output.source = ids, np.ones_like(ids) if mask is None else mask
    return output


def check_prompts(ids: np.ndarray, mask: np.ndarray | None, settings: dict[str, Any]) -> None:
    """Raise ValueError unless prompts (B, S) are padded on the left with the pad token.

    `Runtime.generate` returns prompts in this form only.
    """
    tokens = as_list(settings.get("pad_token_id")) or as_list(settings.get("eos_token_id")) or [0]
    pad = to_python(tokens[0])
    is_padding = ids == pad if mask is None else mask == 0
    if is_padding[..., -1].any() or (is_padding & (ids != pad)).any():
        prompts = f"prompts padded on the right or with other tokens than {pad}"
        raise ValueError(f"{prompts} need the loop of transformers, expected tensors (B, S)")


def check_masks(expected: np.ndarray, source_mask: Any, target_mask: Any) -> None:
    """Raise ValueError if `source_mask`, whose rows may be repeated, is not the `expected` mask, or
    if a row of `target_mask` has zeros before ones. Masks may be `None`."""
    if source_mask is not None:
        mask = source_mask[:: len(source_mask) // len(expected) or 1]
        if not np.array_equal(mask, expected):
            masks = f"{mask.tolist()}, expected that of the encoder, {expected.tolist()}"
            raise ValueError(f"attention_mask is {masks}")
    if target_mask is not None and (np.diff(target_mask.astype(int), prepend=1) > 0).any():
        mask = target_mask.tolist()
        raise ValueError(f"decoder_attention_mask is {mask}, expected zeros only on the right")


class ORTModelForCausalLM(
    ORTModelForGeneration,
    output_class=outputs.CausalLMOutputWithPast,
    tasks=[heads.GENERATE],
):
    """An `ORTModel` of a decoder-only language model."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        position_ids: Any = None,
        use_cache: bool | None = None,
        *,
        cache: Any = None,
        logits_to_keep: int = 0,
        labels: Any = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Feed tokens and return the logits (B, T, V) after each, and a cache for the next call.

        Args:
            input_ids, attention_mask: tokens (B, T), padded on either side. Only the first call of
                a cache may have padding.
            past_key_values, cache: a cache that this model returned; transformers 5.24 renamed the
                argument.
            position_ids: positions (B, T), which must count the ones of the mask from 0.
            use_cache: ignored.
            logits_to_keep: the number of last tokens whose logits are returned. 0 is all, which
                only portable exports support. With 1 they follow the last token of each row that
                is not padding.
            return_dict: False to return a tuple in place of named outputs.
            labels, kwargs: ignored with a warning.

        Raises ValueError for wrong tokens, masks or positions, a cache of another model, and logits
        that the target does not return.
        """
        self.warn_of_ignored({"labels": labels, **kwargs})
        cache = check_cache(past_key_values if cache is None else cache, self.runtime)
        logits = cache.read(input_ids, logits_to_keep, attention_mask, positions=position_ids)
        return self._output({"logits": logits, CACHE: cache}, input_ids, return_dict)


class ORTModelForSeq2SeqLM(
    ORTModelForGeneration,
    output_class=outputs.Seq2SeqLMOutput,
    tasks=[heads.GENERATE_TARGETS],
):
    """An `ORTModel` of an encoder and a decoder that generates text from a source."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        decoder_input_ids: Any = None,
        decoder_attention_mask: Any = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        token_type_ids: Any = None,
        *,
        cache: Any = None,
        logits_to_keep: int = 0,
        labels: Any = None,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Feed target tokens and return logits (B, T, V), a cache, and the states of the encoder.

        Args:
            input_ids, attention_mask: sources (B, S), unless there are `encoder_outputs`.
            decoder_input_ids, decoder_attention_mask: target tokens (B, T), padded on the right.
            encoder_outputs: what this model's encoder returned for the sources. Changes of its
                states have no effect.
            past_key_values, cache, use_cache, return_dict: as for causal models.
            logits_to_keep: the number of last tokens whose logits are returned, padding included.
                0 is all, which only portable exports support.
            token_type_ids, labels, kwargs: ignored with a warning.

        Raises ValueError for wrong tokens or masks, encoder outputs or caches of another model, and
        logits that the target does not return.
        """
        self.warn_of_ignored({"labels": labels, "token_type_ids": token_type_ids, **kwargs})
        encoder_outputs = encoder_outputs or self.encode(input_ids, attention_mask)
        source = getattr(encoder_outputs, "source", None)
        if source is None:
            raise ValueError("encoder_outputs has no source, expected those of this encoder")
        check_masks(source[1], to_numpy(attention_mask), to_numpy(decoder_attention_mask))
        cache = check_cache(past_key_values if cache is None else cache, self.runtime)
        fields = {"encoder_last_hidden_state": encoder_outputs.last_hidden_state, CACHE: cache}
        fields["logits"] = cache.read(decoder_input_ids, logits_to_keep, source=source)
        return self._output(fields, decoder_input_ids, return_dict)

    def get_encoder(self, modality: str | None = None) -> Any:
        return self.encode
