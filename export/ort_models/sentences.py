"""Exports as modules of sentence-transformers."""

from typing import Any

from sentence_transformers.base.modules import Transformer

from .base import MODEL_CLASSES

# task of sentence-transformers -> class of models
CLASSES = {
    "feature-extraction": "ORTModelForFeatureExtraction",
    "fill-mask": "ORTModelForMaskedLM",
    "sequence-classification": "ORTModelForSequenceClassification",
    "text-generation": "ORTModelForCausalLM",
}


class OrtTransformer(Transformer):
    """The module `Transformer` of sentence-transformers with an export as its model.

    `SentenceTransformer(modules=[OrtTransformer(directory), Pooling(...)])` embeds with it.
    `model_kwargs` are the arguments of `from_pretrained`.
    """

    def _load_model(self, path: str, task: str, config: Any, *args: Any, **options: Any) -> Any:
        if task not in CLASSES:
            raise ValueError(f"transformer_task is {task!r}, expected one of {list(CLASSES)}")
        return MODEL_CLASSES[CLASSES[task]].from_pretrained(path, config=config, **options)
