"""The model classes in pipelines of transformers."""

import os
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.pipelines import check_task

from .base import ORTModel
from .generation import ORTModelForCausalLM, ORTModelForSeq2SeqLM
from .task_models import (
    ORTModelForFeatureExtraction,
    ORTModelForImageClassification,
    ORTModelForMaskedLM,
    ORTModelForMultipleChoice,
    ORTModelForQuestionAnswering,
    ORTModelForSequenceClassification,
    ORTModelForTokenClassification,
)

MODEL_CLASSES = (
    ORTModelForCausalLM,
    ORTModelForFeatureExtraction,
    ORTModelForImageClassification,
    ORTModelForMaskedLM,
    ORTModelForMultipleChoice,
    ORTModelForQuestionAnswering,
    ORTModelForSeq2SeqLM,
    ORTModelForSequenceClassification,
    ORTModelForTokenClassification,
)
HUB_ARGUMENTS = ("revision", "token", "trust_remote_code")


def register_classes() -> None:
    """Register each class with its Auto class under a config of its own, so that pipelines list it
    as supported."""
    for model_class in MODEL_CLASSES:
        name = model_class.__name__
        config_class = type(f"{name}Config", (PreTrainedConfig,), {"model_type": name.lower()})
        model_class.auto_class.register(config_class, model_class, exist_ok=True)


def pipeline(
    task: str | None = None,
    model: str | os.PathLike | ORTModel | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Return the pipeline of transformers for `task` around an export.

    Args:
        task: task of the pipeline.
        model: export or checkpoint as for `from_pretrained`, or a model of this package.
        model_kwargs: arguments of `from_pretrained`.
        kwargs: arguments of `transformers.pipeline`. Tokenizer and image processor are by default
            those of the export.

    Raises:
        KeyError: by transformers, for an unknown task.
        ValueError: for a task without a model class here.
    """
    if isinstance(model, str | os.PathLike) and task is not None:
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
        model = find_class(task).from_pretrained(model, **hub, **(model_kwargs or {}))
    if isinstance(model, ORTModel):
        reads_text = "text" in model.input_modalities
        processor = "tokenizer" if reads_text else "image_processor"
        if kwargs.get(processor) is None and kwargs.get("feature_extractor") is None:
            kwargs[processor] = str(model.directory)
    return transformers.pipeline(task, model=model, **kwargs)


def find_class(task: str) -> Any:
    """Return the model class of a pipeline's task."""
    auto_classes = check_task(task)[1]["pt"]
    for model_class in MODEL_CLASSES:
        if model_class.auto_class in auto_classes:
            return model_class
    raise ValueError(f"task {task!r} has no class of models here, expected another task")
