"""Pipelines of transformers around exports."""

import os
from typing import Any

import transformers
from transformers.pipelines import check_task

from .base import MODEL_CLASSES, ORTModel

HUB_ARGUMENTS = ("revision", "token", "trust_remote_code")


def pipeline(
    task: Any = None,
    model: Any = None,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Return the pipeline of transformers for `task`, with tokenizer or image processor of the
    export by default.

    Args:
        task: task of the pipeline, for which transformers raises KeyError if it is unknown.
        model: export or checkpoint as for `from_pretrained`, or a model of this package.
        model_kwargs: arguments of `from_pretrained`.
        kwargs: arguments of `transformers.pipeline`.
    """
    if isinstance(model, str | os.PathLike) and task is not None:
        auto_classes = check_task(task)[1]["pt"]
        known = [value for value in MODEL_CLASSES.values() if value.auto_class in auto_classes]
        if not known:
            raise ValueError(f"task {task!r} is not one that exports have, expected another")
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
        model = known[0].from_pretrained(model, **hub, **(model_kwargs or {}))
    if isinstance(model, ORTModel):
        processor = "tokenizer" if "text" in model.input_modalities else "image_processor"
        if kwargs.get(processor) is None and kwargs.get("feature_extractor") is None:
            kwargs[processor] = str(model.source.directory)
    return transformers.pipeline(task, model=model, **kwargs)
