"""What of a row is drawn at random, anew each time it is seen: which words are masked, left out or give place to others, and
which pieces they have."""

import json
from collections.abc import Callable, Iterable
from random import Random

from datasets import Dataset
from transformers import PreTrainedTokenizerFast

Draw = Callable[[dict, Random], tuple[dict, ...]]  # what the model sees of a row: one row or, for R-Drop, two


class Drawn:
    """Rows of which each epoch sees another draw. A draw depends on the seed, the epoch and the row's number alone, so that a
    run that goes on from a checkpoint sees what it would have seen.

    Args:
        rows: what the draws are of.
        draw: what is drawn of each.
        seed: of the run.
    """

    def __init__(self, rows: Dataset, draw: Draw, seed: int):
        self.rows, self.draw, self.seed, self.epoch = rows, draw, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> list[dict]:
        """As a `DataLoader` asks for the rows of a batch."""
        seeds = [f"{self.seed} {self.epoch} {index}" for index in indices]
        return drawn(self.rows.__getitems__(indices), self.draw, seeds)


def drawn(rows: list[dict], draw: Draw, seeds: list[str]) -> list[dict]:
    """The first of each row's draws, then the second of each, if there are such."""
    draws = [draw(row, Random(seed)) for row, seed in zip(rows, seeds, strict=True)]
    return [row for view in zip(*draws, strict=True) for row in view]


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


class Augmented:
    """Text of which only teachers can say something, drawn from that of a row (after Tang et al. 2019, "data augmentation for
    distillation"): with probability `spans` a part of it, all lengths and then all its places alike likely; then words, as
    white space parts them, give place to others, each with probability `replaced`, to one of all that `texts` have, so that
    frequent words come often.

    Raises:
        ValueError: for what is no probability.
    """

    def __init__(self, replaced: float, spans: float, texts: Iterable[str]):
        for name, value in {"replaced": replaced, "spans": spans}.items():
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}, expected a probability")
        self.replaced, self.spans, self.others = replaced, spans, [word for text in texts for word in text.split()]

    def __call__(self, text: str, random: Random) -> str:
        words = text.split()
        if random.random() < self.spans:
            length = random.randint(1, len(words))
            start = random.randint(0, len(words) - length)
            words = words[start : start + length]
        return " ".join(random.choice(self.others) if random.random() < self.replaced else word for word in words)
