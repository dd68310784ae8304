"""The classes of models that generate: transformers' `generate` over the decoders of an export."""

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput
from transformers.utils import GENERATION_CONFIG_NAME

from .. import heads
from ..inference.inputs import position_limit
from ..inference.options import FIELDS, Options, check_applied
from .base import ORTModel, converter, to_numpy, warn_of_ignored
from .decoder_cache import DecoderCache, Source, check_source
from .hooks import CACHE, TransformersHooks, check_cache, with_source

INPUTS = {"input_ids", "attention_mask", "decoder_input_ids"}
OTHER_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits")
SEARCHES = (GenerationMode.GREEDY_SEARCH, GenerationMode.BEAM_SEARCH)


class ORTModelForGeneration(TransformersHooks, ORTModel):
    """A model that generates."""

    output_modalities = ("text",)

    def __init__(
        self,
        directory: Any,
        config: Any = None,
        generation_config: GenerationConfig | None = None,
        **arguments: Any,
    ):
        super().__init__(directory, config, **arguments)
        self.generation_config = generation_config or self._saved_generation_config()

    def _saved_generation_config(self) -> GenerationConfig:
        if (self.directory / GENERATION_CONFIG_NAME).is_file():
            return GenerationConfig.from_pretrained(self.directory)
        return GenerationConfig.from_model_config(self.config)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "generation_config": self.generation_config}

    def can_generate(self) -> bool:
        return True

    def generate(
        self, inputs: Any = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        """Return what `generate` of transformers returns, with its arguments.

        Greedy and beam search run in `Runtime.generate` if all arguments are fields of `Options`.
        Everything else runs in the loop of transformers over the same decoders: sampling, logits
        processors, stopping criteria, streamers, assistants, scores and caches.
        """
        if inputs is not None and kwargs.get("input_ids") is None:
            kwargs["input_ids"], inputs = inputs, None
        tensors = {name: torch.as_tensor(kwargs[name]) for name in INPUTS & set_names(kwargs)}
        kwargs |= tensors
        arguments = self._runtime_arguments(generation_config, kwargs) if inputs is None else None
        if arguments is None:
            return super().generate(inputs, generation_config, **kwargs)
        return converter(kwargs["input_ids"])(self.runtime.generate(**arguments))

    def _cache(self, cache: Any) -> DecoderCache:
        return DecoderCache(self.runtime) if cache is None else check_cache(cache)

    def _runtime_arguments(
        self, generation_config: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return the arguments of `Runtime.generate`, or `None` for the loop of transformers."""
        prepared, rest = self._prepare_generation_config(generation_config, **kwargs)
        names = set_names(rest)
        if "input_ids" not in names or names - INPUTS or not runs_in_runtime(prepared):
            return None
        inputs = to_numpy({name: rest[name] for name in names})
        options = {name: getattr(prepared, name) for name in FIELDS if hasattr(prepared, name)}
        configs = [self.generation_config, generation_config or GenerationConfig()]
        if kwargs.get("max_length") is None and all(
            config.max_length is None for config in configs
        ):
            options["max_length"] = None  # the default counts from the end of the prompt
        if options["decoder_start_token_id"] is None:
            del options["decoder_start_token_id"]  # the export knows it
        if self.config.is_encoder_decoder:
            inputs.setdefault("attention_mask", np.ones_like(inputs["input_ids"]))
        return {**inputs, **options} if self._has_positions(inputs, options) else None

    def _has_positions(self, inputs: dict[str, np.ndarray], options: dict[str, Any]) -> bool:
        """Return whether learned positions suffice for the longest result. If not, the loop of
        transformers may still end earlier."""
        limit = position_limit(self.runtime.config)
        if limit is None:
            return True
        if self.config.is_encoder_decoder:
            prompt = 1 + inputs.get("decoder_input_ids", np.empty((1, 0))).shape[1]
        else:
            prompt = inputs["input_ids"].shape[1]
        default = min(prompt + Options.max_new_tokens, limit)
        new = options["max_new_tokens"] or (options["max_length"] or default) - prompt
        return prompt + new - 1 <= limit


def set_names(arguments: dict[str, Any]) -> set[str]:
    """Return the names of arguments that are not `None`."""
    return {name for name, value in arguments.items() if value is not None}


def runs_in_runtime(config: GenerationConfig) -> bool:
    """Return whether `Runtime.generate` supports all that is set in `config`."""
    mode = config.get_generation_mode()
    if mode not in SEARCHES and not config.prompt_lookup_num_tokens:
        return False
    if config.do_sample or any(getattr(config, name) for name in OTHER_OUTPUTS):
        return False
    try:
        check_applied(config.to_dict(), is_sampling=False)
    except ValueError:
        return False
    return True


def finish(output: Any, state: DecoderCache, use_cache: Any, as_dict: Any) -> Any:
    """Return the output with the cache `state` unless `use_cache` is False, as a tuple if `as_dict`
    is False."""
    if use_cache is not False:
        output[CACHE] = state
    return output.to_tuple() if as_dict is False else output


class ORTModelForCausalLM(ORTModelForGeneration):
    """A decoder with a language model head."""

    tasks = (heads.GENERATE,)
    auto_class = AutoModelForCausalLM

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        past_key_values: Any = None,
        cache: Any = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the logits (B, T, V) after the last `logits_to_keep` tokens, or all for 0, and a
        cache.

        Args:
            input_ids: new tokens (B, T).
            attention_mask: (B, T), 0 for padding on either side. With a cache it has no effect.
            past_key_values, cache: a cache that this model returned. transformers 5.24 renamed it.
            logits_to_keep: number of tokens. Targets other than portable need 1.
            use_cache: whether a cache is returned, by default True.
            return_dict: whether the output is an object with names, by default True.
            kwargs: inputs of other models, which are ignored with a warning.

        Raises:
            ValueError: as `DecoderCache.read`.
        """
        kwargs.pop("position_ids", None)  # they follow from the mask
        warn_of_ignored(self, kwargs)
        state = self._cache(past_key_values if cache is None else cache)
        arrays = to_numpy({"ids": input_ids, "mask": attention_mask})
        logits = state.read(**arrays, num_logits=logits_to_keep)
        output = CausalLMOutputWithPast(logits=converter(input_ids)(logits))
        return finish(output, state, use_cache, return_dict)


class SourceEncoder:
    """The encoder of a seq2seq export."""

    main_input_name = "input_ids"

    def __init__(self, runtime: Any):
        self.runtime = runtime

    def check(self, input_ids: Any, attention_mask: Any) -> Source:
        """Return ids and mask of the source as arrays. Raise as `check_source`."""
        arrays = to_numpy({"ids": input_ids, "mask": attention_mask})
        return check_source(self.runtime, arrays["ids"], arrays.get("mask"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(
        self, input_ids: Any, attention_mask: Any = None, return_dict: Any = None, **kwargs: Any
    ) -> Any:
        """Return the states (B, S, D) of the source. Raise ValueError as `Runtime.encode`."""
        source = self.check(input_ids, attention_mask)
        states = self.runtime.encode(
            **to_numpy({"input_ids": input_ids, "attention_mask": attention_mask})
        )
        output = with_source(converter(input_ids)(states), source)
        return output.to_tuple() if return_dict is False else output


class ORTModelForSeq2SeqLM(ORTModelForGeneration):
    """An encoder and a decoder with a language model head."""

    tasks = (heads.GENERATE_TARGETS,)
    auto_class = AutoModelForSeq2SeqLM

    @property
    def encoder(self) -> SourceEncoder:
        return SourceEncoder(self.runtime)

    def get_encoder(self, modality: str | None = None) -> SourceEncoder:
        return self.encoder

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
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the logits (B, T, V) after the last `logits_to_keep` tokens, or all for 0, a cache
        and the states of the encoder.

        Args:
            input_ids, attention_mask: the source (B, S).
            decoder_input_ids: new tokens (B, T).
            decoder_attention_mask: (B, T), 0 for padding on the right only.
            encoder_outputs: outputs of this model's encoder, in place of `input_ids`.
            past_key_values, cache: a cache that this model returned. transformers 5.24 renamed it.
            logits_to_keep: number of tokens. Targets other than portable need 1.
            use_cache: whether a cache is returned, by default True.
            return_dict: whether the output is an object with names, by default True.
            kwargs: inputs of other models, which are ignored with a warning.

        Raises:
            ValueError: without `decoder_input_ids`, for padding on the left, for encoder outputs of
                another model, and as `DecoderCache.read`.
        """
        warn_of_ignored(self, kwargs)
        state = self._cache(past_key_values if cache is None else cache)
        check_targets(decoder_input_ids, decoder_attention_mask)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask)
        ids = to_numpy({"ids": decoder_input_ids})["ids"]
        logits = state.read(ids, None, find_source(encoder_outputs), logits_to_keep)
        output = Seq2SeqLMOutput(
            logits=converter(decoder_input_ids)(logits),
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
        )
        return finish(output, state, use_cache, return_dict)


def check_targets(ids: Any, mask: Any) -> None:
    """Raise ValueError for targets that are missing or padded on the left."""
    if ids is None:
        raise ValueError("decoder_input_ids is None, expected token ids (B, T)")
    if mask is not None and not mask[:, 0].all():
        raise ValueError("decoder_attention_mask begins with 0, expected padding on the right only")


def find_source(encoder_outputs: Any) -> Source:
    """Return the source of encoder outputs. Raise ValueError if another encoder made them."""
    if (source := getattr(encoder_outputs, "source", None)) is None:
        raise ValueError(
            f"encoder_outputs is a {type(encoder_outputs).__name__} without its source, expected "
            "what the encoder of this model returned"
        )
    return source
