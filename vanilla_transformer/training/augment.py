"""Random augmentation of training rows: masked, dropped or replaced words, and other subwords.

Each time a row is seen, its augmentation is another one.
"""

import json
from collections.abc import Callable, Iterable
from functools import partial
from random import Random

from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from .recipe import TEXT_AUGMENTATION, Recipe
from .tasks import TASKS

Row = dict[str, list | str]
# a row -> the augmented rows: one or, for R-Drop, two
Augmentation = Callable[[Row, Random], tuple[Row, ...]]


class AugmentedDataset:
    """Rows with another augmentation in each epoch.

    It depends only on the seed, the epoch and the row's number. A run that resumes from a
    checkpoint sees the same rows as an uninterrupted one.

    Args:
        rows: the rows without augmentation.
        augmentation: the function from a row to its augmented rows.
        seed: the seed of the run.
    """

    def __init__(self, rows: Dataset, augmentation: Augmentation, seed: int):
        self.rows = rows
        self.augmentation = augmentation
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> list[Row]:
        """Return the augmented rows of the numbers `indices`, a batch; a `DataLoader` calls this.

        With R-Drop there are two for each number: first one view of each row, then a second of
        each.
        """
        seeds = [f"{self.seed} {self.epoch} {index}" for index in indices]
        return augment(self.rows.__getitems__(indices), self.augmentation, seeds)


def augment(rows: list[Row], augmentation: Augmentation, seeds: list[str]) -> list[Row]:
    """Return `rows`, changed at random by `augmentation`, in the same order.

    If `augmentation` returns two views of a row, the first views of all rows come first, then the
    second views. `seeds` has a seed for each row.
    """
    views = [augmentation(row, Random(seed)) for row, seed in zip(rows, seeds, strict=True)]
    return [row for view in zip(*views, strict=True) for row in view]


def build_augmentation(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, rows: Dataset
) -> Augmentation | None:
    """Return the function that augments the training rows `rows`, or None if the model sees them
    unchanged.

    With R-Drop (the recipe's `r_drop`) it makes two of each row.
    """
    augment_row = row_augmentation(recipe, tokenizer, rows)
    r_drop = recipe.training.get("r_drop")
    if augment_row is None:
        return (lambda row, random: (row, row)) if r_drop else None
    if not r_drop:
        return lambda row, random: (augment_row(row, random),)
    # Wang et al. 2021: one pass of R-Drop over whole words, one over subwords, if a row has one
    # label, whatever its tokens.
    if TASKS[recipe.task].row_labels:
        return lambda row, random: (row, augment_row(row, random))
    return lambda row, random: (augment_row(row, random),) * 2


def row_augmentation(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, rows: Dataset
) -> Callable[[Row, Random], Row] | None:
    """Return the function that changes a row at random, or None if nothing is random.

    Words are changed by the recipe's `word_replacement` and `span_crop`, with words of `rows`.
    Subwords are changed by its `bpe_dropout`. Only without these, it is the task's own `augment`.
    """
    task = TASKS[recipe.task]
    dropout = recipe.tokenizer.get("bpe_dropout")
    shares = {name: recipe.training.get(name, 0) for name in TEXT_AUGMENTATION}
    if not dropout and not any(shares.values()):
        return task.augment and partial(task.augment, tokenizer=tokenizer)
    tokenize = BpeDropout(tokenizer, dropout) if dropout else lambda texts, random: tokenizer(texts)
    augment_text = TextAugmentation(**shares, texts=rows["text"]) if any(shares.values()) else None

    def encode_again(row: Row, random: Random) -> Row:
        if augment_text:
            row = row | {"text": augment_text(row["text"], random)}
        columns = {name: [value] for name, value in row.items()}
        encoded = task.encode(columns, partial(tokenize, random=random), recipe.data)
        return {name: value for name, [value] in encoded.items()}

    return encode_again


class BpeDropout:
    """A tokenizer of kind "bpe" with BPE-dropout for training text (Provilkov et al. 2020,
    algorithm 1).

    Merges of a word keep their order, but at each step every possible merge is skipped with
    probability `dropout`. The `tokenizers` library has BPE-dropout too, but without a seed. Names
    of special tokens are ordinary text here.

    Raises:
        ValueError: for a tokenizer of another kind.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, dropout: float):
        self.backend = tokenizer.backend_tokenizer
        self.dropout = dropout
        model = json.loads(self.backend.to_str())["model"]
        if model["type"] != "BPE" or self.backend.normalizer is None:
            raise ValueError(
                f'tokenizer.bpe_dropout={dropout} needs a tokenizer of kind "bpe", got one of '
                f"{model['type']}"
            )
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
        self.ids = model["vocab"]
        self.unknown = tokenizer.unk_token_id
        *self.start, self.end = tokenizer("")["input_ids"]

    def __call__(self, texts: list[str], random: Random) -> dict[str, list[list[int]]]:
        return {
            "input_ids": [[*self.start, *self.encode(text, random), self.end] for text in texts]
        }

    def encode(self, text: str, random: Random) -> list[int]:
        words = self.backend.pre_tokenizer.pre_tokenize_str(
            self.backend.normalizer.normalize_str(text)
        )
        return [
            self.ids.get(subword, self.unknown)
            for word, _ in words
            for subword in self.subwords(word, random)
        ]

    def subwords(self, word: str, random: Random) -> list[str]:
        symbols = list(word)
        while merges := [
            (self.ranks[pair], position)
            for position, pair in enumerate(zip(symbols, symbols[1:]))
            if pair in self.ranks and random.random() >= self.dropout
        ]:
            _, position = min(merges)
            symbols[position : position + 2] = [symbols[position] + symbols[position + 1]]
        return symbols


class TextAugmentation:
    """Random changes of a text, whose label then comes from teachers only.

    It follows "data augmentation for distillation" (Tang et al. 2019). With probability `span_crop`
    a random span replaces the text, with all lengths and then all positions equally likely. Then
    each word (by white space) is replaced with probability `word_replacement`. Replacements are
    drawn from all words of `texts`, so that frequent words come often.
    """

    def __init__(self, word_replacement: float, span_crop: float, texts: Iterable[str]):
        self.word_replacement = word_replacement
        self.span_crop = span_crop
        self.others = [word for text in texts for word in text.split()]

    def __call__(self, text: str, random: Random) -> str:
        words = text.split()
        if random.random() < self.span_crop:
            length = random.randint(1, len(words))
            start = random.randint(0, len(words) - length)
            words = words[start : start + length]
        return " ".join(
            random.choice(self.others) if random.random() < self.word_replacement else word
            for word in words
        )
