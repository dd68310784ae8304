"""`pipeline("translation")` under transformers 5, which removed it, with the arguments and results of transformers 4.

It serves any encoder-decoder model, ours and transformers' own.
"""

import transformers.pipelines
from transformers import GenerationConfig, Pipeline
from transformers.models.auto.modeling_auto import AutoModelForSeq2SeqLM


class TranslationPipeline(Pipeline):
    """Text in, translated text out: `[{"translation_text": str}]` for a string, a list of such dicts for a list.

    Args of a call: `truncation` (bool, defaults to `False`: a text too long for the model is an error),
    `clean_up_tokenization_spaces` (bool), `src_lang` and `tgt_lang` (str, for multilingual tokenizers),
    `return_tensors` (bool: `translation_token_ids` in place of the text), and every generation parameter. With
    `num_return_sequences` above 1 each text gives a list of that many dicts.

    Raises:
        ValueError: for an empty text, and for a token id outside the model's vocabulary.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True
    _pipeline_calls_generate = True
    _default_generation_config = GenerationConfig(max_new_tokens=256, num_beams=4)
    return_name = "translation"

    def _sanitize_parameters(
        self,
        truncation=None,
        src_lang=None,
        tgt_lang=None,
        return_tensors=None,
        return_text=None,
        clean_up_tokenization_spaces=None,
        **generate_kwargs,
    ):
        preprocess = {"truncation": truncation, "src_lang": src_lang, "tgt_lang": tgt_lang}
        postprocess = {
            "return_tensors": return_tensors if return_text is None else not return_text,
            "clean_up_tokenization_spaces": clean_up_tokenization_spaces,
        }

        def given(parameters):
            return {name: value for name, value in parameters.items() if value is not None}

        return given(preprocess), generate_kwargs, given(postprocess)

    def __call__(self, *args, **kwargs):
        results = super().__call__(*args, **kwargs)
        if isinstance(args[0], list) and all(len(result) == 1 for result in results):
            return [result[0] for result in results]
        return results

    def preprocess(self, text, truncation=False, src_lang=None, tgt_lang=None):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"the text to translate must be a non-empty string, got {text!r}")
        if hasattr(self.tokenizer, "_build_translation_inputs"):
            inputs = self.tokenizer._build_translation_inputs(
                text, return_tensors="pt", truncation=truncation, src_lang=src_lang, tgt_lang=tgt_lang
            )
        elif src_lang is None and tgt_lang is None:
            inputs = self.tokenizer(text, return_tensors="pt", truncation=truncation)
        else:
            name = type(self.tokenizer).__name__
            raise ValueError(f"{name} has no languages to choose, got src_lang={src_lang!r} and tgt_lang={tgt_lang!r}")
        vocab_size = self.model.get_input_embeddings().num_embeddings
        if (largest := inputs["input_ids"].max().item()) >= vocab_size:
            raise ValueError(
                f"the tokenizer gave token id {largest}, but the model's vocabulary has {vocab_size} entries: "
                "they do not belong together"
            )
        inputs.pop("token_type_ids", None)
        return inputs

    def _forward(self, model_inputs, **generate_kwargs):
        kwargs = self._prepare_generate_kwargs(generate_kwargs)
        rows = model_inputs["input_ids"].shape[0]
        output_ids = self.model.generate(**model_inputs, **kwargs)
        return {"output_ids": output_ids.reshape(rows, -1, output_ids.shape[-1])}  # (texts, sequences of each, T)

    def postprocess(self, model_outputs, return_tensors=False, clean_up_tokenization_spaces=None):
        sequences = model_outputs["output_ids"][0]
        if return_tensors:
            return [{f"{self.return_name}_token_ids": ids} for ids in sequences]
        texts = self.tokenizer.batch_decode(
            sequences, skip_special_tokens=True, clean_up_tokenization_spaces=clean_up_tokenization_spaces
        )
        return [{f"{self.return_name}_text": text} for text in texts]


def register_pipelines():
    """Make `transformers.pipeline("translation")` find our class.

    transformers 5 refuses the names in `REMOVED_TASKS` before it looks into the registry, so the name is taken out of
    there first.
    """
    getattr(transformers.pipelines, "REMOVED_TASKS", {}).pop("translation", None)
    registry = transformers.pipelines.PIPELINE_REGISTRY
    if "translation" not in registry.supported_tasks:
        registry.register_pipeline(
            "translation", pipeline_class=TranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
        )
