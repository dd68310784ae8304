"""Tables of sinusoids in other orders than the paper's: all sines first, then all cosines."""

import math
from collections.abc import Callable

import torch

from .tensors import TensorFiles


def marian_table(rows: int, width: int) -> torch.Tensor:
    """The paper's angles, pos / 10000^(2i / width) (section 3.5), in float64: (rows, width)."""
    frequencies = 10000.0 ** (-torch.arange(width // 2, dtype=torch.double) * 2 / width)
    return sines_then_cosines(rows, frequencies)


def fairseq_table(rows: int, width: int, pad_token_id: int | None) -> torch.Tensor:
    """pos / 10000^(i / (width / 2 - 1)), as tensor2tensor has it: (rows, width). The row of padding
    is 0. In float32, as the models compute it whatever they are in."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    table = sines_then_cosines(rows, frequencies)
    table = torch.nn.functional.pad(table, (0, width % 2))
    if pad_token_id is not None:
        table[pad_token_id : pad_token_id + 1] = 0
    return table


def sines_then_cosines(rows: int, frequencies: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(rows, dtype=frequencies.dtype)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def check_table(
    files: TensorFiles, name: str, table: Callable[[int], torch.Tensor], tolerance: float = 2e-3
) -> None:
    """A file's tensor `name`, if there is one, has to be `table` of its number of rows: the reader
    computes it. The default `tolerance` is that of half precision, and is the least for such.

    Raises:
        ValueError: for another table, which would be lost.
    """
    if name not in files.shapes:
        return
    found, dtype = files.read(name).double(), files.shapes[name][1]
    expected = table(len(found) if found.ndim else 0).double()
    if found.shape != expected.shape:
        raise ValueError(
            f"{name} has the shape {list(found.shape)}, expected {list(expected.shape)}"
        )
    if not torch.allclose(found, expected, atol=max(tolerance, torch.finfo(dtype).eps / 4), rtol=0):
        raise ValueError(
            f"{name} is not the table of sinusoids, and another one cannot be represented"
        )
