"""Rows of like length in batches of so many tokens."""

from datasets import Dataset

from .draws import Drawn


class TokenBatches:
    """Batches as the items of a data set: item i is a list of rows of like length, so that little of a batch is padding and
    all batches cost about the same (section 5.1 of the paper). They are made once; `Trainer` shuffles their order.

    Args:
        rows: what the batches are made of.
        lengths: the numbers of tokens of each row, one for each of its sides; sorted by the first.
        limit: tokens of the longest side of a batch, padding included, by these `lengths`.
        each: the number of batches is a multiple of this, those of an update over all processes, so that none of these has
            fewer: as many of the largest as it takes are cut in two.

    Raises:
        ValueError: for a row that is longer than `limit`.
    """

    def __init__(self, rows: Dataset | Drawn, lengths: list[tuple[int, ...]], limit: int, each: int = 1):
        longest = max(map(max, lengths))
        if longest > limit:
            raise ValueError(f"the longest row has {longest} tokens, expected at most {limit}, those of a batch")
        self.rows, self.batches, width = rows, [[]], 0
        for index in sorted(range(len(rows)), key=lengths.__getitem__):
            width = max(width, *lengths[index])
            if (len(self.batches[-1]) + 1) * width > limit:
                self.batches.append([])
                width = max(lengths[index])
            self.batches[-1].append(index)
        for _ in range(min(-len(self.batches) % each, len(rows) - len(self.batches))):
            largest = max(self.batches, key=len)
            half = len(largest) // 2
            self.batches.append(largest[:half])
            del largest[:half]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> list[dict]:
        return [self.rows[place] for place in self.batches[index]]

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.rows, Drawn):
            self.rows.set_epoch(epoch)


def collate_batches(collator):
    """`collator` for items that are rows, or lists of them."""

    def collate(items):
        return collator([row for item in items for row in (item if isinstance(item, list) else [item])])

    return collate
