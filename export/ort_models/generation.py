"""The classes of models that generate: transformers' `generate` over the decoders of an export."""

import inspect
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin
from transformers import modeling_outputs as outputs
from transformers.generation import GenerationMode
from transformers.utils import GENERATION_CONFIG_NAME

from .. import heads
from ..inference.inputs import position_limit
from ..inference.options import FIELDS, check_applied
from .base import ORTModel, converter, to_numpy, warn_of_ignored
from .decoder_cache import DecoderCache, Source, check_source

# The keyword of caches, which transformers 5.24 renamed.
KEYWORDS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in KEYWORDS else "past_key_values"
INPUTS = {"input_ids", "attention_mask", "decoder_input_ids"}
OTHER_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits")
SEARCHES = (GenerationMode.GREEDY_SEARCH, GenerationMode.BEAM_SEARCH)


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
        """Put a `DecoderCache` into `model_kwargs` unless the caller passed a cache.

        It is put there for `use_cache=False` too, and `use_cache` is set to True.
        `generation_config` has the numbers of beams and of tokens; `generation_mode` is the search.
        """
        generation_config.use_cache = True
        if (cache := model_kwargs.get(CACHE)) is not None:
            cache._is_user_defined = True
            return
        is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        model_kwargs[CACHE] = DecoderCache(
            self.runtime,
            max(generation_config.num_beams, generation_config.num_return_sequences),
            generation_config.max_length,
            is_croppable=is_assisted or bool(generation_config.is_assistant),
        )

    def _prepare_text_encoder_decoder_kwargs_for_generation(
        self, inputs_tensor: torch.Tensor, model_kwargs: dict, **kwargs: Any
    ) -> dict:
        """Add `encoder_outputs` to `model_kwargs` and return them.

        They hold the checked source `inputs_tensor`, and zeros as states: the decoder encodes it.
        """
        arrays = to_numpy(ids=inputs_tensor, mask=model_kwargs.get("attention_mask"))
        source = check_source(self.runtime, **arrays)
        states = torch.zeros((*source[0].shape, 1), device=inputs_tensor.device)
        model_kwargs["encoder_outputs"] = with_source(states, source)
        return model_kwargs


class ORTModelForGeneration(PrivateNames, ORTModel):
    """An `ORTModel` with `generate` of transformers; the base class of causal and seq2seq
    models."""

    output_modalities = ("text",)

    def __init__(
        self, directory: Any, config: Any = None, generation_config: Any = None, **arguments: Any
    ):
        super().__init__(directory, config, **arguments)
        if generation_config is None and (self.directory / GENERATION_CONFIG_NAME).is_file():
            generation_config = GenerationConfig.from_pretrained(directory)
        self.generation_config = generation_config or GenerationConfig()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "generation_config": self.generation_config}

    def can_generate(self) -> bool:
        return True

    def generate(
        self, inputs: Any = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        """Generate tokens: arguments and results are those of `generate` of transformers.

        Greedy and beam search run in `Runtime.generate` if all arguments are fields of `Options`.
        Otherwise transformers' own loop runs over the same decoders: sampling, processors,
        criteria, streamers, assistants, scores and caches.
        """
        if inputs is not None and kwargs.get("input_ids") is None:
            kwargs["input_ids"], inputs = inputs, None
        kwargs |= {name: torch.as_tensor(kwargs[name]) for name in INPUTS & set_names(kwargs)}
        arguments = self._runtime_arguments(generation_config, kwargs) if inputs is None else None
        if arguments is None:
            return super().generate(inputs, generation_config, **kwargs)
        return converter(kwargs["input_ids"])(self.runtime.generate(**arguments))

    def _runtime_arguments(self, generation_config: Any, kwargs: dict) -> dict[str, Any] | None:
        """Return the arguments of `Runtime.generate` by name, or `None` for the loop of
        transformers.

        `generation_config` and `kwargs` are the arguments of `generate`.
        """
        config, rest = self._prepare_generation_config(generation_config, **kwargs)
        names = set_names(rest)
        if "input_ids" not in names or names - INPUTS or not runs_in_runtime(config):
            return None
        arguments: dict[str, Any] = to_numpy(**{name: rest[name] for name in names})
        prompt = "decoder_input_ids" if self.config.is_encoder_decoder else "input_ids"
        length = arguments[prompt].shape[1] if prompt in arguments else 1
        length = length + config.max_new_tokens if config.max_new_tokens else config.max_length
        if length - 1 > (position_limit(self.runtime.config) or length):
            return None  # it may still end before its last position
        arguments |= {name: getattr(config, name) for name in FIELDS if hasattr(config, name)}
        configs = [self.generation_config, generation_config or GenerationConfig()]
        if kwargs.get("max_length") is None and not any(config.max_length for config in configs):
            arguments["max_length"] = None  # the default counts from the end of the prompt
        if config.decoder_start_token_id is None:
            del arguments["decoder_start_token_id"]  # the export knows it
        if self.config.is_encoder_decoder:
            arguments.setdefault("attention_mask", np.ones_like(arguments["input_ids"]))
        return arguments

    def _read(self, ids: Any, mask: Any, source: Any, cache: Any, kept: int) -> tuple[Any, Any]:
        """Feed tokens and return `(logits, cache)`. Logits are a tensor or an array, like `ids`.

        Args:
            ids: new tokens (B, T).
            mask: 0 for padding of a prompt.
            source: tokens and mask of the source, `None` for a decoder-only model.
            cache: a cache that this model returned, `None` for a new one.
            kept: the number of last tokens whose logits are returned, 0 for all.

        Raises:
            ValueError: for another kind of cache, wrong tokens or masks, and logits that the target
                does not return.
        """
        cache = DecoderCache(self.runtime) if cache is None else cache
        if not isinstance(cache, DecoderCache):
            raise ValueError(f"the cache is a {type(cache).__name__}, expected one of this model")
        arrays = to_numpy(ids=ids, mask=mask)
        logits = cache.read(arrays["ids"], arrays.get("mask"), source, kept)
        return converter(ids)(logits), cache


def set_names(arguments: dict[str, Any]) -> set[str]:
    """Return the names of arguments that are not `None`."""
    return {name for name, value in arguments.items() if value is not None}


def runs_in_runtime(config: GenerationConfig) -> bool:
    """Return True if `Runtime.generate` supports all that is set in `config`."""
    mode = config.get_generation_mode()
    if mode not in SEARCHES and (config.do_sample or not config.prompt_lookup_num_tokens):
        return False
    try:
        check_applied(config.to_dict(), is_sampling=False)
    except ValueError:
        return False
    return not any(getattr(config, name) for name in OTHER_OUTPUTS)


def with_source(states: Any, source: Source) -> outputs.BaseModelOutput:
    """Return outputs of an encoder with `states`, and with the attribute `source`.

    A decoder starts from the `source`, its tokens and mask.
    """
    output = outputs.BaseModelOutput(last_hidden_state=states)
    output.source = source
    return output


class ORTModelForCausalLM(ORTModelForGeneration):
    """An `ORTModel` of a decoder-only language model."""

    tasks = (heads.GENERATE,)

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        past_key_values: Any = None,
        cache: Any = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        position_ids: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Feed tokens and return the logits (B, T, V) after each, and a cache for the next call.

        Args:
            input_ids, attention_mask: (B, T), padded on either side. Positions follow the mask.
            past_key_values, cache: a cache that this model returned; transformers 5.24 renamed the
                argument.
            logits_to_keep: the number of last tokens whose logits are returned. 0 is all, which
                only portable exports support.
            return_dict: False to return a tuple in place of named outputs.
            position_ids, use_cache: ignored.
            kwargs: other arguments, ignored with a warning.

        Raises:
            ValueError: for wrong tokens, masks or caches, and for logits that the target does not
                return.
        """
        warn_of_ignored(self, kwargs)
        cache = past_key_values if cache is None else cache
        logits, cache = self._read(input_ids, attention_mask, None, cache, logits_to_keep)
        output = outputs.CausalLMOutputWithPast(logits=logits, **{CACHE: cache})
        return output.to_tuple() if return_dict is False else output


class ORTModelForSeq2SeqLM(ORTModelForGeneration):
    """An `ORTModel` of an encoder and a decoder that generates text from a source."""

    tasks = (heads.GENERATE_TARGETS,)

    def encode(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Return the encoder's outputs, with `last_hidden_state` (B, S, D), for sources (B, S).

        They remember the tokens and mask of the source, for `forward`. `kwargs` are ignored.

        Raises:
            ValueError: for ids outside the vocabulary, wrong masks, and more tokens than positions.
        """
        arrays = to_numpy(input_ids=input_ids, attention_mask=attention_mask)
        states = converter(input_ids)(self.runtime.encode(**arrays))
        return with_source(states, check_source(self.runtime, *arrays.values()))

    def get_encoder(self, modality: str | None = None) -> Any:
        return self.encode

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        decoder_input_ids: Any = None,
        decoder_attention_mask: Any = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        cache: Any = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Feed target tokens and return the logits (B, T, V), a cache, and the states of the
        encoder.

        Args:
            input_ids, attention_mask: sources (B, S), needed unless there are `encoder_outputs`.
            decoder_input_ids, decoder_attention_mask: target tokens (B, T), padded on the right.
            encoder_outputs: what this model's encoder returned for the sources.
            past_key_values, cache: a cache that this model returned; transformers 5.24 renamed the
                argument.
            logits_to_keep: the number of last tokens whose logits are returned. 0 is all, which
                only portable exports support.
            return_dict: False to return a tuple in place of named outputs.
            use_cache: ignored.
            kwargs: other arguments, ignored with a warning.

        Raises:
            ValueError: without `decoder_input_ids`, for padding on the left, for encoder outputs of
                another model, for wrong tokens, masks or caches, and for logits that the target
                does not return.
        """
        warn_of_ignored(self, kwargs)
        if decoder_input_ids is None:
            raise ValueError("decoder_input_ids is None, expected token ids (B, T)")
        if encoder_outputs is None:
            encoder_outputs = self.encode(input_ids, attention_mask)
        if (source := getattr(encoder_outputs, "source", None)) is None:
            raise ValueError("encoder_outputs has no source, expected those of this encoder")
        cache = past_key_values if cache is None else cache
        logits, cache = self._read(
            decoder_input_ids, decoder_attention_mask, source, cache, logits_to_keep
        )
        states = encoder_outputs.last_hidden_state
        output = outputs.Seq2SeqLMOutput(
            logits=logits, encoder_last_hidden_state=states, **{CACHE: cache}
        )
        return output.to_tuple() if return_dict is False else output
