"""Two tasks whose outputs copy from what is read, made from captions, and small models that are
trained for them.

- corrections: three captions, with letters exchanged in two words -> the captions as they were.
- summaries: five captions, two of them with a word for a child -> these two, in their order.

Captions that do not end with a full stop are left out, so that a model can see where one ends.
"""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import vanilla_transformer  # noqa: F401  registers the models
from vanilla_transformer.files import new_directory
from vanilla_transformer.training.data import read_lines

CARD = Path(__file__).parents[1] / "model_cards" / "vanilla-seq2seq-tiny-multi30k-en-de"
BATCH, LEARNING_RATE = 16, 2e-3
CAPTIONS, ERRORS = 3, 2  # captions and errors of a text to correct
READ, KEPT = 5, 2  # captions of a text to summarize, and of its summary
CHILD = {"baby", "boy", "boys", "child", "children", "girl", "girls", "kid", "kids"}

Pairs = Iterator[tuple[str, str]]  # an endless stream of a source and its target


def with_errors(text: str, rng: random.Random) -> str:
    """Return `text` with two neighboring letters exchanged in `ERRORS` words, chosen by `rng`."""
    words = text.split(" ")
    long = [index for index, word in enumerate(words) if len(word) > 3]
    for index in rng.sample(long, min(ERRORS, len(long))):
        first = rng.randrange(1, len(words[index]) - 2)
        word = words[index]
        words[index] = word[:first] + word[first + 1] + word[first] + word[first + 2 :]
    return " ".join(words)


def corrections(captions: list[str], rng: random.Random) -> Pairs:
    while True:
        text = " ".join(rng.sample(captions, CAPTIONS))
        yield with_errors(text, rng), text


def is_of_a_child(caption: str) -> bool:
    return not CHILD.isdisjoint(caption.lower().rstrip(".").replace(",", "").split())


def summaries(captions: list[str], rng: random.Random) -> Pairs:
    others, kept = (
        [caption for caption in captions if is_of_a_child(caption) is has_child]
        for has_child in (False, True)
    )
    while True:
        texts = rng.sample(others, READ - KEPT) + rng.sample(kept, KEPT)
        rng.shuffle(texts)
        yield " ".join(texts), " ".join(filter(is_of_a_child, texts))


TASKS: dict[str, Callable[[list[str], random.Random], Pairs]] = {
    "corrections": corrections,
    "summaries": summaries,
}


def task_pairs(task: str, file: Path, seed: int) -> Pairs:
    """Return an endless stream of (source, target) of `task`, made from the captions in `file`.

    `seed` determines them.
    """
    captions = [line for line in read_lines(file) if line.endswith(".")]
    return TASKS[task](captions, random.Random(seed))


def trained_model(models: Path, task: str, file: Path, steps: int) -> Path:
    """Return the directory in `models` of the card's model after `steps` of training on `task`.

    The model is trained on the captions in `file` if the directory does not exist.
    """
    directory = models / f"{task}-{steps}"
    if not directory.exists():
        with new_directory(directory) as new:
            train(task_pairs(task, file, seed=0), steps, new)
    return directory


def train(pairs: Pairs, steps: int, directory: Path) -> None:
    """Train the card's model on `pairs` for `steps` updates, and save it to `directory`.

    There is no dropout, because no text comes twice.
    """
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_pretrained(CARD, dropout=0.0, embedding_dropout=0.0).train()
    tokenizer = AutoTokenizer.from_pretrained(CARD)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for step in range(1, steps + 1):
        sources, targets = zip(*(next(pairs) for _ in range(BATCH)), strict=True)
        batch = tokenizer(list(sources), padding=True, return_tensors="pt")
        labels = tokenizer(list(targets), padding=True, return_tensors="pt")
        labels = labels.input_ids.masked_fill(labels.attention_mask == 0, -100)
        loss = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels
        ).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step} of {steps}, loss {loss.item():.3f}", file=sys.stderr)
    model.eval().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
