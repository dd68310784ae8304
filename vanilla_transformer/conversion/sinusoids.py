"""Tables of sinusoids in other orders than the paper's: all sines first, then all cosines."""

import math
from collections.abc import Callable

import torch

from .tensors import TensorFiles


def marian_table(rows: int, width: int) -> torch.Tensor:
    """Return sinusoids of pos / 10000^(2i / width) as transformers' Marian has them: (rows, width),
    float64.

    All sines come first, then all cosines; the paper interleaves them (section 3.5).
    """
    frequencies = 10000.0 ** (-torch.arange(width // 2, dtype=torch.double) * 2 / width)
    return sines_then_cosines(rows, frequencies)


def fairseq_table(rows: int, width: int, pad_token_id: int | None) -> torch.Tensor:
    """Return the sinusoids of tensor2tensor and fairseq, of pos / 10000^(i / (width / 2 - 1)):
    (rows, width), float32.

    Positions start at 0, and width / 2 is rounded down. All sines come first, then all cosines,
    then a zero column if `width` is odd. Row `pad_token_id` is 0, unless that is None.
    """
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
    """Raise ValueError if `files` have a tensor `name` that differs from `table(number of its
    rows)`.

    The table is computed when the model runs, so other values would be lost. `tolerance` is the
    largest absolute difference, or a quarter of the epsilon of the tensor's dtype if that is more.
    """
    if name not in files.shapes:
        return
    stored, dtype = files.read(name).double(), files.shapes[name][1]
    expected = table(len(stored) if stored.ndim else 0).double()
    if stored.shape != expected.shape:
        raise ValueError(
            f"{name} has the shape {list(stored.shape)}, expected {list(expected.shape)}"
        )
    if not torch.allclose(
        stored, expected, atol=max(tolerance, torch.finfo(dtype).eps / 4), rtol=0
    ):
        raise ValueError(
            f"{name} has values that the other family cannot store, expected those that it computes"
        )
