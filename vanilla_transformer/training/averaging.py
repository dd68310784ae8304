"""The mean of the weights of several checkpoints (section 6.1 of the paper)."""

import os
import shutil

import torch
from transformers import PreTrainedModel

from ..checkpoint import TOKENIZER_FILES, checkpoint_directory
from ..checkpoint import load_checkpoint as load
from ..files import new_directory


def average(checkpoints: list[str | os.PathLike], out: str | os.PathLike, force: bool = False) -> None:
    """Writes `averaged(checkpoints)` to the directory `out`, with the tokenizer of the first.

    Raises:
        FileExistsError: if `out` cannot be written, see `files.new_directory`.
        FileNotFoundError, ValueError: as `averaged`.
    """
    with new_directory(out, force, checkpoints) as directory:
        averaged(checkpoints).save_pretrained(directory)
        first = checkpoint_directory(checkpoints[0])
        for name in TOKENIZER_FILES:
            if (first / name).is_file():
                shutil.copyfile(first / name, directory / name)


def averaged(checkpoints: list[str | os.PathLike]) -> PreTrainedModel:
    """The model of the first checkpoint with the mean, in float64, of the weights of all.

    Raises:
        FileNotFoundError, ValueError: as `checkpoint.load_checkpoint`; ValueError if their architectures or the shapes of
            their weights differ.
    """
    model = load(checkpoints[0])
    sums = {name: weight.double() for name, weight in model.named_parameters()}
    for checkpoint in checkpoints[1:]:
        other = load(checkpoint)
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
