"""What of a row is drawn at random, anew each time it is seen: which words are masked, which pieces its words have."""

import json
from collections.abc import Callable, Iterable
from random import Random

from datasets import Dataset
from transformers import PreTrainedTokenizerFast


class Drawn:
    """Rows of which each epoch sees another draw. A draw depends on the seed, the epoch and the row's number alone, so that a
    run that goes on from a checkpoint sees what it would have seen.

    Args:
        rows: what the draws are of.
        draw: (row, random) -> what the model sees.
        seed: of the run.
        with_rows: whether the rows of a batch come as they are too, before their draws.
    """

    def __init__(self, rows: Dataset, draw: Callable[[dict, Random], dict], seed: int, with_rows: bool = False):
        self.rows, self.draw, self.seed, self.with_rows, self.epoch = rows, draw, seed, with_rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> list[dict]:
        """As a `DataLoader` asks for the rows of a batch."""
        rows = self.rows.__getitems__(indices)
        draws = [self.draw(row, Random(f"{self.seed} {self.epoch} {index}")) for index, row in zip(indices, rows, strict=True)]
        return rows + draws if self.with_rows else draws


class BpeDropout:
    """A tokenizer of kind "bpe" with BPE-dropout, for training text (Provilkov et al. 2020, algorithm 1): the merges of a word
    are done in their order as ever, but at each step every one that could be done is left out with probability `dropout`. The
    `tokenizers` library has that too, but draws from what cannot be given a seed. Names of special tokens are text here.

    Raises:
        ValueError: for a tokenizer of another kind, and a `dropout` that is no probability.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, dropout: float):
        self.backend, self.dropout = tokenizer.backend_tokenizer, dropout
        model = json.loads(self.backend.to_str())["model"]
        if model["type"] != "BPE" or self.backend.normalizer is None:
            raise ValueError(f'tokenizer.dropout={dropout} needs a tokenizer of kind "bpe", got one of {model["type"]}')
        if not 0 <= dropout < 1:
            raise ValueError(f"tokenizer.dropout is {dropout}, expected at least 0 and less than 1")
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
        self.ids, self.unknown = model["vocab"], tokenizer.unk_token_id
        *self.start, self.end = tokenizer("")["input_ids"]

    def __call__(self, texts: list[str], random: Random) -> dict[str, list[list[int]]]:
        return {"input_ids": [[*self.start, *self.encode(text, random), self.end] for text in texts]}

    def encode(self, text: str, random: Random) -> list[int]:
        words = self.backend.pre_tokenizer.pre_tokenize_str(self.backend.normalizer.normalize_str(text))
        return [self.ids.get(piece, self.unknown) for word, _ in words for piece in self.pieces(word, random)]

    def pieces(self, word: str, random: Random) -> list[str]:
        pieces = list(word)
        while merges := [
            (self.ranks[pair], place)
            for place, pair in enumerate(zip(pieces, pieces[1:]))
            if pair in self.ranks and random.random() >= self.dropout
        ]:
            _, place = min(merges)
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
        return pieces


class Replaced:
    """Draws of a row in which tokens gave place to others, each with probability `share`, to one of all that the training rows
    have, so that frequent words come often. Special tokens stay, and come in no other's place.

    Args:
        tokenizer: of the rows.
        share: the probability.
        rows: the tokens of each training row.
        draw: what is drawn first, if anything.

    Raises:
        ValueError: for a `share` that is no probability.
    """

    def __init__(self, tokenizer, share: float, rows: Iterable[list[int]], draw=None):
        if not 0 <= share <= 1:
            raise ValueError(f"replaced is {share}, expected a probability")
        self.share, self.draw, self.special = share, draw, set(tokenizer.all_special_ids)
        self.others = [index for row in rows for index in row if index not in self.special]

    def __call__(self, row: dict, random: Random) -> dict:
        row = self.draw(row, random) if self.draw else row
        return row | {"input_ids": [self.of(index, random) for index in row["input_ids"]]}

    def of(self, index: int, random: Random) -> int:
        if index in self.special or random.random() >= self.share:
            return index
        return random.choice(self.others)
