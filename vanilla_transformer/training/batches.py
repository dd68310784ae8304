"""Batches of rows of similar length, limited by their number of tokens."""

from collections.abc import Callable, Iterator
from itertools import count
from random import Random

import torch
from datasets import Dataset, IterableDataset

from .augment import Augmentation, AugmentedDataset, Row, augment

SIDES = ("labels", "input_ids")  # the columns of a row that have tokens
BUFFER = 10_000  # rows of a stream that are shuffled and sorted together


class TokenBatches:
    """A data set whose items are batches: lists of rows of similar length.

    Little of a batch is padding, and all batches cost about the same (section 5.1 of the paper).
    They are made once; `Trainer` shuffles their order.

    Args:
        rows: the rows of the batches.
        lengths: the numbers of tokens of each row, one for each of its sides; sorted by the first.
        limit: tokens of the longest side of a batch, padding included, by these `lengths`.
        divisor: the number of batches is a multiple of this, the batches of an update over all
            processes, so that no process has fewer. As many of the largest batches as needed are
            cut in two.

    Raises:
        ValueError: for a row that is longer than `limit`.
    """

    def __init__(
        self,
        rows: Dataset | AugmentedDataset,
        lengths: list[tuple[int, ...]],
        limit: int,
        divisor: int = 1,
    ):
        self.rows = rows
        self.batches = cut(lengths, limit)
        for _ in range(min(-len(self.batches) % divisor, len(rows) - len(self.batches))):
            largest = max(self.batches, key=len)
            half = len(largest) // 2
            self.batches.append(largest[:half])
            del largest[:half]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> list[dict]:
        return self.rows.__getitems__(self.batches[index])

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.rows, AugmentedDataset):
            self.rows.set_epoch(epoch)


class TokenStream(torch.utils.data.IterableDataset):
    """An endless stream of batches, of rows that are read as they are needed, again and again.

    `BUFFER` rows at a time are shuffled and cut into batches. `augmentation` and `seed` are as in
    `AugmentedDataset`.
    """

    def __init__(
        self, rows: IterableDataset, limit: int, seed: int, augmentation: Augmentation | None = None
    ):
        super().__init__()
        self.rows = rows
        self.limit = limit
        self.seed = seed
        self.augmentation = augmentation

    def __iter__(self) -> Iterator[list[Row]]:
        for epoch in count():
            stream = self.rows.shuffle(seed=self.seed + epoch, buffer_size=BUFFER)
            for part, columns in enumerate(stream.iter(BUFFER)):
                yield from self.batches(columns, f"{self.seed} {epoch} {part}")

    def batches(self, columns: dict[str, list], seed: str) -> Iterator[list[Row]]:
        """Yield the batches of one part of the stream in random order.

        `columns` are {name: values} of its rows. Order and augmentation follow from `seed`.
        """
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        batches = cut(
            [tuple(len(row[name]) for name in SIDES if name in row) for row in rows], self.limit
        )
        Random(seed).shuffle(batches)
        # augmented one batch at a time: all at once would stop the training for seconds
        for row_indices in batches:
            batch = [rows[row_index] for row_index in row_indices]
            seeds = [f"{seed} {row_index}" for row_index in row_indices]
            yield augment(batch, self.augmentation, seeds) if self.augmentation else batch


def cut(lengths: list[tuple[int, ...]], limit: int) -> list[list[int]]:
    """Return lists of row numbers, one for each batch of at most `limit` tokens, padding included.

    Rows are sorted by their `lengths`, the numbers of tokens of each side. Raises ValueError for a
    row that is longer than `limit`.
    """
    longest = max(map(max, lengths))
    if longest > limit:
        raise ValueError(
            f"the longest row has {longest} tokens, expected at most {limit}, the tokens of a batch"
        )
    batches = [[]]
    width = 0
    for row_index in sorted(range(len(lengths)), key=lengths.__getitem__):
        width = max(width, *lengths[row_index])
        if (len(batches[-1]) + 1) * width > limit:
            batches.append([])
            width = max(lengths[row_index])
        batches[-1].append(row_index)
    return batches


def collate_batches(collator: Callable[[list[Row]], dict]) -> Callable[[list], dict]:
    """Return a function like `collator`, from rows to a batch, that also accepts lists of rows
    among the rows."""

    def collate(items: list) -> dict:
        return collator(
            [row for item in items for row in (item if isinstance(item, list) else [item])]
        )

    return collate
