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
    """Return the transformers pipeline of a `task` with an export as its model.

    The tokenizer or image processor is by default that of the export.

    Args:
        task: name of the task, for which transformers raises KeyError if it is unknown.
        model: directory or Hub repository as for `from_pretrained`, or a model of this package.
        model_kwargs: arguments of `from_pretrained`.
        kwargs: arguments of `transformers.pipeline`.

    Raises:
        ValueError: for a task that exports do not have, if `model` is a path or name.
    """
    if isinstance(model, str | os.PathLike) and task is not None:
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
        model = find_class(task).from_pretrained(model, **hub, **(model_kwargs or {}))
    if isinstance(model, ORTModel):
        processor = "tokenizer" if "text" in model.input_modalities else "image_processor"
        if kwargs.get(processor) is None and kwargs.get("feature_extractor") is None:
            kwargs[processor] = str(model.runtime.info.directory)
    return transformers.pipeline(task, model=model, **kwargs)


def find_class(task: str) -> type[ORTModel]:
    """Return the class of models for `task`. Raises ValueError if there is none."""
    auto_classes = check_task(task)[1]["pt"]
    for model_class in MODEL_CLASSES.values():
        if model_class.auto_class in auto_classes:
            return model_class
    names = ", ".join(sorted(auto_class.__name__ for auto_class in auto_classes))
    ours = ", ".join(sorted({value.auto_class.__name__ for value in MODEL_CLASSES.values()}))
    raise ValueError(f"task {task!r} needs {names}, expected a task of one of {ours}")
