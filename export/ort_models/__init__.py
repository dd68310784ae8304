"""Exports as models of transformers, with the classes and arguments of optimum-onnx.

Needs torch and transformers, and sentence-transformers for `OrtTransformer`.
"""

import vanilla_transformer  # noqa: F401 - registers pipelines that transformers 5 removed

from .base import ORTModel
from .generation import ORTModelForCausalLM, ORTModelForSeq2SeqLM
from .optimum_stand_in import stand_in_for_optimum
from .pipelines import pipeline
from .task_models import (
    ORTModelForFeatureExtraction,
    ORTModelForImageClassification,
    ORTModelForMaskedLM,
    ORTModelForMultipleChoice,
    ORTModelForQuestionAnswering,
    ORTModelForSequenceClassification,
    ORTModelForTokenClassification,
)

ONNX_WEIGHTS_NAME = "model.onnx"  # which sentence-transformers imports

__all__ = [
    "ONNX_WEIGHTS_NAME",
    "ORTModel",
    "ORTModelForCausalLM",
    "ORTModelForFeatureExtraction",
    "ORTModelForImageClassification",
    "ORTModelForMaskedLM",
    "ORTModelForMultipleChoice",
    "ORTModelForQuestionAnswering",
    "ORTModelForSeq2SeqLM",
    "ORTModelForSequenceClassification",
    "ORTModelForTokenClassification",
    "pipeline",
    "stand_in_for_optimum",
]


def __getattr__(name: str) -> object:
    if name == "OrtTransformer":  # imports sentence-transformers
        from .sentences import OrtTransformer

        return OrtTransformer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
