"""Causal language modeling: prediction of the next token of any text."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers import default_data_collator

from ...modeling_vanilla_transformer import VanillaDecoderForCausalLM
from ..data import BadRows, read_all_lines, read_text, split_files
from ..values import SHARE, SPLITS, KeyType, data_keys
from .task import Columns, Rows, Scored, Task

# A split is a file or several. Without one, the validation text is the last `validation_fraction`
# of the training text. An example has `block_size` tokens. With `documents = "line"` each line is a
# text of its own, which no other one is read with.
DATA = data_keys(
    *("directory", *SPLITS, "block_size", "skip_bad_rows"),
    validation_fraction=KeyType(float, SHARE),
    documents=KeyType(Literal["file", "line"]),
)


def read(data: dict, split: str) -> Rows | None:
    is_cut_off = split == "validation" and split not in data and "validation_fraction" in data
    if split not in data and not is_cut_off:
        return None
    text = joined_text(data, "train" if is_cut_off else split, reports=not is_cut_off)
    if is_cut_off:
        text = text[training_length(text, data) :]
    elif split == "train" and "validation" not in data:
        text = text[: training_length(text, data)]
    by_line = data.get("documents", "file") == "line"
    documents = [line for line in text.split("\n") if line] if by_line else [text]
    if not documents:
        raise ValueError(f"the {split} text has no lines, expected at least one document")
    return Dataset.from_dict({"text": documents})


def joined_text(data: dict, split: str, reports: bool) -> str:
    """Return the text of all files of a split, one after the other.

    It is read by lines if documents are lines or bad lines are skipped, and then each line ends
    with a line break. With `reports`, the number of skipped lines is printed, and ValueError raised
    if none is left. `data` is the [data] of the recipe.
    """
    bad = BadRows(data, split)
    if data.get("documents") != "line" and not bad.are_skipped:
        return "".join(read_text(path) for path in split_files(data, split))
    lines = read_all_lines(split_files(data, split), bad=bad, fault=None)
    if reports:
        bad.report(sum(map(bool, lines)))
    return "".join(line + "\n" for line in lines)


def training_length(text: str, data: dict) -> int:
    """Return how many characters at the start of `text` are for training, the rest being for
    validation.

    `data` is the [data] of the recipe, which sets the share.
    """
    return int(len(text) * (1 - data.get("validation_fraction", 0)))


def encode(columns: Columns, tokenizer: Callable, data: dict) -> Columns:
    """Return the `input_ids` of the documents in `columns["text"]`.

    A document that is a line ends with the end token, a whole file does not. Raises ValueError if
    the tokenizer has no end token but needs one. `data` is the [data] of the recipe.
    """
    if data.get("documents") != "line":
        return {"input_ids": tokenizer(columns["text"], add_special_tokens=False)["input_ids"]}
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError('the tokenizer has no end token, expected one for data.documents="line"')
    encoded = tokenizer(columns["text"], return_special_tokens_mask=True)
    added = zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
    return {"input_ids": [ids if special[-1:] == [1] else [*ids, end] for ids, special in added]}


def examples(rows: Rows, data: dict, split: str) -> Any:
    size = data["block_size"]
    if data.get("documents", "file") == "line":
        return Dataset.from_list(pack(rows["input_ids"], size))
    [ids] = rows["input_ids"]
    if len(ids) <= size:
        raise ValueError(
            f"the {split} text has {len(ids)} tokens, expected more than block_size={size}"
        )
    if split == "train":
        return Windows(ids, size)
    return Dataset.from_list(
        [example([ids[start : start + size + 1]], size) for start in range(0, len(ids) - 1, size)]
    )


class Windows:
    """A data set of every stretch of `size` tokens of `ids`, overlapping ones included.

    The labels of an example are the tokens that follow each of its tokens.
    """

    def __init__(self, ids: list[int], size: int):
        self.ids = np.array(ids)
        self.size = size

    def __len__(self) -> int:
        return len(self.ids) - self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        following = self.ids[index + 1 : index + 1 + self.size]
        return {
            "input_ids": self.ids[index : index + self.size],
            "labels": following,
            "shift_labels": following,
        }


def pack(documents: list[list[int]], size: int) -> list[dict]:
    """Return examples of `size` tokens, each with as many whole documents as fit, in their order.

    A document that is longer is continued in another example, and one of a single token is left
    out, because no token follows. The rest of an example is padding, which predicts nothing.
    """
    blocks = []
    capacity = 0
    for ids in documents:
        for start in range(0, len(ids) - 1, size):
            stretch = ids[start : start + size + 1]
            if len(stretch) - 1 > capacity:
                blocks.append([])
                capacity = size
            blocks[-1].append(stretch)
            capacity -= len(stretch) - 1
    return [example(block, size) for block in blocks]


def example(stretches: list[list[int]], size: int) -> dict[str, list[int]]:
    """Return one example of `size` tokens from several stretches of text.

    The inputs are each stretch without its last token, the labels each stretch without its first.
    Positions restart at 0 in each stretch, so that attention stays within it. Padding at the end
    predicts nothing.
    """
    ids = [token for stretch in stretches for token in stretch[:-1]]
    following = [token for stretch in stretches for token in stretch[1:]]
    positions = [position for stretch in stretches for position in range(len(stretch) - 1)]
    padding = size - len(ids)
    following += [-100] * padding
    positions += range(len(stretches[-1]) - 1, len(stretches[-1]) - 1 + padding)
    return {
        "input_ids": ids + [0] * padding,
        "labels": following,
        "shift_labels": following,
        "position_ids": positions,
    }


def reduce(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return -log p of each label, 0 where nothing is predicted: logits (B, T, V), labels (B, T) ->
    (B, T)."""
    return F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")


def metrics(prediction: tuple, scored: Scored) -> dict[str, Any]:
    """Return the mean negative log-likelihood per predicted token, in nats, and its exponential."""
    losses, labels = prediction
    nll = losses.sum(dtype=np.float64) / (labels != -100).sum()
    return {"nll": nll, "perplexity": np.exp(nll)}


TASK = Task(
    model=VanillaDecoderForCausalLM,
    pipeline="text-generation",
    data=DATA,
    needs=("block_size",),
    metric_names=("nll", "perplexity"),
    read=read,
    encode=encode,
    examples=examples,
    collator=lambda tokenizer, model: default_data_collator,
    reduce=reduce,
    metrics=metrics,
)
