"""The model of a checkpoint in torch, which exports are compared with."""

import os

from transformers import PreTrainedModel

from vanilla_transformer.checkpoint import load_model
from vanilla_transformer.source import converted

from .checkpoint import exportable_config


def load_checkpoint(checkpoint: str | os.PathLike, variant: str | None = None) -> PreTrainedModel:
    """Return the model of a checkpoint directory or Hub id, in float32 and evaluation mode.

    Its class is the one that its config names. Families in `conversion.FAMILIES` are converted.
    `variant` "fp16" reads the weights in model.fp16.safetensors.

    Raises:
        FileNotFoundError, OSError: if files are missing or cannot be read.
        ValueError: for files that are damaged or do not fit each other, for a family that is not
            known, and for a model that no target exports.
    """
    with converted(checkpoint, variant=variant) as ours:
        exportable_config(ours)
        return load_model(ours)
