"""The text-to-text pipelines that transformers 5 removed, with the API of transformers 4.

This file imports nothing of the package, so a checkpoint can carry it.
"""

import difflib
import re
import reprlib
import warnings
from typing import Any

from transformers import (
    BatchEncoding,
    GenerationConfig,
    Pipeline,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

logger = logging.get_logger(__name__)

LANGUAGE_PAIR = re.compile(r"translation_(.+?)_to_(.+)")


class Text2TextGenerationPipeline(Pipeline):
    """Text in, generated text out: `[{"generated_text": str}]` for a string, a list of such dicts
    for a list.

    A generator or a dataset gives an iterator with a list of dicts for each text. With
    `num_return_sequences` above 1 each text gives a list of that many dicts.

    The arguments are those of a call, or of `transformers.pipeline` for every call.

    Args:
        truncation (`bool` or `str`, defaults to `False`): cut a text that is longer than the
            tokenizer's `model_max_length`. It is an error of the model otherwise.
        return_tensors (`bool`, defaults to `False`): `"generated_token_ids"` (a tensor) instead
            of the text.
        return_text (`bool`, *optional*): the opposite of `return_tensors`.
        clean_up_tokenization_spaces (`bool`, defaults to `False`): as in the tokenizer's `decode`.
        stop_sequence (`str`, *optional*): generation ends with the first token of it.
        batch_size (`int`, defaults to 1): texts that are generated together.
        assistant_model, assistant_tokenizer (*optional*): for assisted generation, for
            `transformers.pipeline` only.
        generate_kwargs: parameters of `generate`. Missing ones come from the model config's
            `task_specific_params[task]`, then from the model's generation config, then from the
            defaults of the pipeline (`max_new_tokens=256, num_beams=4`). `max_length` replaces a
            `max_new_tokens` of a later source, and the reverse. With a `generation_config` in a
            call, only the model's generation config is used besides.

    The text is put after the `prefix` of the model config's `task_specific_params[task]`, or of the
    model config, if any.

    Raises:
        TypeError: for a text that is not a string.
        ValueError: for a model that is not an encoder-decoder, a missing tokenizer, an empty text,
            a `stop_sequence` without tokens, and a token id outside the model's vocabulary.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True
    _pipeline_calls_generate = True
    _default_generation_config = GenerationConfig(max_new_tokens=256, num_beams=4)
    return_name = "generated"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> None:
        if not (model.config.is_encoder_decoder and model.can_generate()):
            raise ValueError(
                f"expected an encoder-decoder model that generates, got {type(model).__name__}"
            )
        if tokenizer is None:
            raise ValueError("expected a tokenizer, got None")
        super().__init__(model=model, tokenizer=tokenizer, **kwargs)
        # transformers 5 ignores this field of the checkpoints that were published for transformers
        # 4.
        for_task = dict(
            (getattr(model.config, "task_specific_params", None) or {}).get(self.task, {})
        )
        self.prefix = for_task.pop("prefix", self.prefix)
        self._generate_kwargs = {**_one_limit(for_task), **_one_limit(self._generate_kwargs)}

    def _sanitize_parameters(
        self,
        truncation=None,
        return_tensors=None,
        return_text=None,
        clean_up_tokenization_spaces=None,
        stop_sequence=None,
        **generate_kwargs,
    ):
        preprocess = {"truncation": truncation}
        postprocess = {
            "return_tensors": return_tensors if return_text is None else not return_text,
            "clean_up_tokenization_spaces": clean_up_tokenization_spaces,
        }
        if stop_sequence is not None:
            stop_ids = self.tokenizer.encode(stop_sequence, add_special_tokens=False)
            if not stop_ids:
                raise ValueError(
                    f"stop_sequence must have at least one token, got {stop_sequence!r}"
                )
            if len(stop_ids) > 1:
                warnings.warn(
                    f"stop_sequence has {len(stop_ids)} tokens; generation ends with the first "
                    f"of them",
                    stacklevel=3,
                )
            generate_kwargs["eos_token_id"] = stop_ids[0]
        if self.assistant_model is not None:
            generate_kwargs["assistant_model"] = self.assistant_model
        if self.assistant_tokenizer is not None:
            generate_kwargs.update(
                tokenizer=self.tokenizer, assistant_tokenizer=self.assistant_tokenizer
            )
        return _without_none(preprocess), _one_limit(generate_kwargs), _without_none(postprocess)

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        if isinstance(inputs, list) and not inputs:
            return []
        results = super().__call__(inputs, **kwargs)
        if isinstance(inputs, list) and all(len(result) == 1 for result in results):
            return [result[0] for result in results]
        return results

    def preprocess(self, text: str, **kwargs: Any) -> BatchEncoding:
        if not isinstance(text, str):
            raise TypeError(f"the text must be a string, got {text!r}")
        if not text.strip():
            raise ValueError(f"the text must be a non-empty string, got {text!r}")
        inputs = self.tokenize(text, **kwargs)
        vocab_size = self.model.get_input_embeddings().num_embeddings
        largest = inputs["input_ids"].max().item()
        if largest >= vocab_size:
            raise ValueError(
                f"the tokenizer gave token id {largest}, but the model's vocabulary has "
                f"{vocab_size} entries: "
                "they do not belong together"
            )
        inputs.pop("token_type_ids", None)  # `generate` rejects unused inputs
        return inputs

    def tokenize(self, text: str, truncation: bool | str = False) -> BatchEncoding:
        return self.tokenizer(
            (self.prefix or "") + text, return_tensors="pt", truncation=truncation
        )

    def _forward(self, model_inputs, **generate_kwargs):
        rows, input_length = model_inputs["input_ids"].shape
        if "generation_config" in generate_kwargs:
            kwargs = params = generate_kwargs
        else:
            kwargs = self._prepare_generate_kwargs(generate_kwargs)
            params = {**self._generate_kwargs, **generate_kwargs}
        # The user did not choose the pipeline's default, so it causes no warning.
        params = self._get_set_generation_params(params)
        if limit := params.get("max_new_tokens") or params.get("max_length"):
            self.check_length(input_length, limit)
        output_ids = self.model.generate(**model_inputs, **kwargs)
        # (texts, sequences of each, T)
        return {"output_ids": output_ids.reshape(rows, -1, output_ids.shape[-1])}

    def check_length(self, input_length: int, limit: int) -> None:
        """Do nothing. Subclasses warn if `limit`, the maximum output length, does not suit an input
        of `input_length` tokens."""

    def postprocess(
        self,
        model_outputs: dict[str, Any],
        return_tensors: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> list[dict[str, Any]]:
        sequences = model_outputs["output_ids"][0]
        if return_tensors:
            return [{f"{self.return_name}_token_ids": ids} for ids in sequences]
        texts = self.tokenizer.batch_decode(
            sequences,
            skip_special_tokens=True,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
        )
        return [{f"{self.return_name}_text": text} for text in texts]


class SummarizationPipeline(Text2TextGenerationPipeline):
    """A `Text2TextGenerationPipeline` that returns `"summary_text"` or `"summary_token_ids"`.

    It warns if an input is shorter than the maximum length of the summary.
    """

    return_name = "summary"

    def check_length(self, input_length: int, limit: int) -> None:
        if input_length < limit:
            logger.warning(
                f"The input has {input_length} tokens and its summary may have {limit}: a summary "
                "is usually shorter, "
                f"consider max_length={input_length // 2}."
            )


class TranslationPipeline(Text2TextGenerationPipeline):
    """A `Text2TextGenerationPipeline` that returns `"translation_text"` or
    `"translation_token_ids"`.

    Further args: `src_lang` and `tgt_lang` (`str`, default to the xx and yy of the task
    `translation_xx_to_yy`) for multilingual tokenizers, in the tokenizer's own codes; another
    language is a ValueError. Other tokenizers ignore them with a warning. Inputs of multilingual
    tokenizers get no prefix. It warns if an input is longer than 0.9 of the maximum length of the
    translation.
    """

    return_name = "translation"

    def _sanitize_parameters(self, src_lang=None, tgt_lang=None, **kwargs):
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        return (
            {**preprocess, **_without_none({"src_lang": src_lang, "tgt_lang": tgt_lang})},
            forward,
            postprocess,
        )

    def tokenize(
        self,
        text: str,
        truncation: bool | str = False,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
    ) -> BatchEncoding:
        if hasattr(self.tokenizer, "_build_translation_inputs"):
            if (
                src_lang is None
                and tgt_lang is None
                and (pair := LANGUAGE_PAIR.fullmatch(self.task))
            ):
                src_lang, tgt_lang = pair.groups()
            if src_lang is None or tgt_lang is None:
                raise ValueError(
                    f"src_lang is {src_lang!r} and tgt_lang {tgt_lang!r}, expected languages of "
                    "the tokenizer"
                )
            languages = choose_languages(self.model, self.tokenizer, src_lang, tgt_lang)
            return BatchEncoding(
                {**self.tokenizer(text, return_tensors="pt", truncation=truncation), **languages}
            )
        if src_lang is not None or tgt_lang is not None:
            name = type(self.tokenizer).__name__
            logger.warning_once(
                f"{name} has no languages to choose, so {src_lang=} and {tgt_lang=} have no effect."
            )
        return super().tokenize(text, truncation)

    def check_length(self, input_length: int, limit: int) -> None:
        if input_length > 0.9 * limit:
            logger.warning(
                f"The input has {input_length} tokens and its translation may have {limit} only: "
                "consider a larger max_length."
            )


def choose_languages(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    src_lang: str | None,
    tgt_lang: str | None,
) -> dict[str, int]:
    """Set the source language of a multilingual `tokenizer`, and return options of `generate` for
    the target.

    They are the token of `tgt_lang` as {"decoder_start_token_id": id} for mBART's tokenizer (Liu et
    al. 2020, 2.2), unless the model starts with a token that is no language. Otherwise they are
    {"forced_bos_token_id": id}. A language that is None changes nothing; without a target the
    options are empty.

    Raises:
        ValueError: for a language that the tokenizer does not have. A tokenizer that is not
            multilingual has none.
    """
    codes = getattr(tokenizer, "lang_code_to_id", None)
    if codes is None:  # NLLB's tokenizer
        codes = {
            str(token): tokenizer.convert_tokens_to_ids(str(token))
            for token in tokenizer.extra_special_tokens
        }
    for name, language in {"src_lang": src_lang, "tgt_lang": tgt_lang}.items():
        if language is not None and language not in codes:
            same = [code for code in codes if code.partition("_")[0] == language.partition("_")[0]]
            close = same or difflib.get_close_matches(language, codes, n=1)
            known = f"one of {reprlib.repr([*codes])}" + (
                f"; did you mean {close[0]!r}?" if close else ""
            )
            raise ValueError(
                f"{name} {language!r} is not a language of the tokenizer, expected {known}"
            )
    if src_lang is not None:
        tokenizer.src_lang = src_lang
    if tgt_lang is None:
        return {}
    start = model.generation_config.decoder_start_token_id
    is_start = type(tokenizer).__name__ == "MBartTokenizer" and (
        start is None or start in codes.values()
    )
    return {"decoder_start_token_id" if is_start else "forced_bos_token_id": codes[tgt_lang]}


def _without_none(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if value is not None}


def _one_limit(generate_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `generate_kwargs`. If it has only one of `max_length` and `max_new_tokens`, the other
    is None in the result.

    `generate` prefers `max_new_tokens` wherever it was set.
    """
    limits = {"max_length", "max_new_tokens"}
    if len(limits & generate_kwargs.keys()) == 1:
        return {**dict.fromkeys(limits), **generate_kwargs}
    return generate_kwargs
