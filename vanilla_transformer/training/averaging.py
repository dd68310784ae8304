"""The mean of the weights of several checkpoints (section 6.1 of the paper)."""

import os
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..files import new_directory
from ..info import config_and_class


def average(checkpoints: list[str | os.PathLike], out: str | os.PathLike, force: bool = False) -> None:
    """Writes `averaged(checkpoints)` to the directory `out`, with the tokenizer of the first.

    Raises:
        FileExistsError: if `out` exists and `force` is not given.
        ValueError: as `averaged`.
    """
    with new_directory(out, force, checkpoints) as directory:
        averaged(checkpoints).save_pretrained(directory)
        for file in sorted(Path(checkpoints[0]).glob("tokenizer*")):
            shutil.copyfile(file, directory / file.name)


def averaged(checkpoints: list[str | os.PathLike]) -> PreTrainedModel:
    """The model of the first checkpoint with the mean, in float64, of the weights of all.

    Raises:
        ValueError: if their architectures or the shapes of their weights differ.
    """
    model, *others = (load(checkpoint) for checkpoint in checkpoints)
    sums = {name: weight.double() for name, weight in model.named_parameters()}
    for checkpoint, other in zip(checkpoints[1:], others):
        found = dict(other.named_parameters())
        shapes, expected = ({name: tuple(weight.shape) for name, weight in of.items()} for of in (found, sums))
        if type(other) is not type(model) or shapes != expected:
            raise ValueError(f"{checkpoint} is not of the same architecture and shape as {checkpoints[0]}")
        for name, weight in found.items():
            sums[name] = sums[name] + weight.double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(sums[name] / len(checkpoints))
    return model


def load(checkpoint):
    _, model_class = config_and_class(checkpoint)
    return model_class.from_pretrained(checkpoint, dtype=torch.float32)
