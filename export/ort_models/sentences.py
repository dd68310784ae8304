"""Exports in sentence-transformers without its backend for optimum."""

from typing import Any

from sentence_transformers.base.modules import Transformer

from .generation import ORTModelForCausalLM
from .task_models import (
    ORTModelForFeatureExtraction,
    ORTModelForMaskedLM,
    ORTModelForSequenceClassification,
)

MODEL_CLASSES = {
    "feature-extraction": ORTModelForFeatureExtraction,
    "fill-mask": ORTModelForMaskedLM,
    "sequence-classification": ORTModelForSequenceClassification,
    "text-generation": ORTModelForCausalLM,
}


class OrtTransformer(Transformer):
    """The `Transformer` module of sentence-transformers with an export as its model.

    `SentenceTransformer(modules=[OrtTransformer(directory), Pooling(...)])` encodes with it.
    """

    def _load_model(
        self,
        model_name_or_path: str,
        transformer_task: str,
        config: Any,
        backend: str,
        is_peft_model: bool,
        **model_kwargs: Any,
    ) -> Any:
        """Open the export, with `model_kwargs` as the arguments of `from_pretrained`."""
        if transformer_task not in MODEL_CLASSES:
            raise ValueError(
                f"transformer_task is {transformer_task!r}, expected one of {list(MODEL_CLASSES)}"
            )
        model_class = MODEL_CLASSES[transformer_task]
        return model_class.from_pretrained(model_name_or_path, config=config, **model_kwargs)
