"""Made-up text in the form that each recipe reads, checkpoints that some start or learn from, and
what makes a run small."""

import gzip
from pathlib import Path

import numpy as np
from checkpoints import OPINIONS, toy_corpus
from datasets import Dataset, DatasetDict
from PIL import Image

from vanilla_transformer import (
    VanillaEncoderConfig,
    VanillaEncoderForMaskedLM,
    VanillaEncoderForSequenceClassification,
    VanillaSeq2SeqConfig,
    VanillaSeq2SeqForConditionalGeneration,
)
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.tokenizer import train_tokenizer

# Of all checkpoints here too, with one layer.
SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
LAYERS = {"translation": ("encoder_layers", "decoder_layers")}
PIECES = {"word": 15, "bpe": 40}  # subwords of `OPINIONS`, even without a fifth of the lines
STEPS = {
    "max_steps": 4,
    "num_train_epochs": 2,
    "eval_steps": 2,
    "save_steps": 2,
    "tokens_per_update": 128,
    "tokens_per_batch": 64,
}
VOCABULARY = {"translation": 60, "token-classification": 30, "pretraining": 40}
STORY = ["the film wins.", "the plot bores.", "the cast shines.", "the film fails."]
TAGGED = "the O\nold B-PER\ndog I-PER\nruns O\n\nthe O\nbig B-PER\nbird I-PER\nsings O\n\n"


def small(recipe: Recipe) -> dict:
    """Return changes of `recipe`, {key: value}, that only reduce sizes and steps."""
    layers = LAYERS.get(recipe.task, ("num_hidden_layers",))
    settings = {
        f"model.{name}": value for name, value in (SHAPE | dict.fromkeys(layers, 1)).items()
    }
    settings |= {
        f"training.{name}": value for name, value in STEPS.items() if name in recipe.training
    }
    if recipe.generation:
        settings["generation.max_new_tokens"] = 8
    if "vocab_size" in recipe.tokenizer:
        settings["tokenizer.vocab_size"] = (
            VOCABULARY.get(recipe.task) or PIECES[recipe.tokenizer["kind"]]
        )
    return settings


def lacking(recipe: Recipe, folder: Path) -> dict:
    """Return changes, {key: value}, that supply what `recipe` leaves to its user or takes from the
    Hub.

    Text and checkpoints are made in `folder`.
    """
    if recipe.task == "question-answering":
        return {
            "data.dataset": data_set(folder / "questions", questions()),
            "model.path": checkpoint(folder / "start"),
        }
    if recipe.task == "image-classification":
        return {"data.dataset": pictures(folder / "pictures")}
    if "dataset" in recipe.data:
        pairs = [
            {"translation": {"en": source, "de": target}}
            for source, target in toy_corpus(60, seed=0)
        ]
        return {"data.dataset": data_set(folder / "pairs", pairs)}
    settings = {} if recipe.data.keys() & {"train"} else made_up_names(recipe)
    if not (recipe.tokenizer or recipe.model):
        settings["model.path"] = checkpoint(folder / "start")
    if recipe.training.get("word_replacement"):
        names = recipe.data["label_names"]
        settings["training.teachers"] = [
            classifier(folder / name, names=names) for name in ("first", "second")
        ]
    return settings


def made_up_names(recipe):
    if recipe.task == "translation":
        return {
            f"data.{split}": [f"{split}.en", f"{split}.de"] for split in ("train", "validation")
        }
    return {f"data.{split}": f"{split}.txt" for split in ("train", "validation")}


def write_text(recipe: Recipe, folder: Path) -> None:
    """Write the files of the recipe's [data] to `folder`."""
    folder.mkdir(exist_ok=True)
    for split in ("train", "validation", "test"):
        files = recipe.data.get(split, [])
        files = [files] if isinstance(files, str) else files
        for file, text in zip(files, texts(recipe)):
            data = text.encode(recipe.data.get("encoding", "UTF-8"))
            (folder / file).write_bytes(gzip.compress(data) if file.endswith(".gz") else data)


def texts(recipe) -> list[str]:
    """Return the content of each file of a split, for the recipe's task."""
    pairs = toy_corpus(60, seed=0)
    if recipe.task == "translation":
        return ["".join(line + "\n" for line in side) for side in zip(*pairs, strict=True)]
    if recipe.task == "causal-lm":
        return ["".join(source + "\n" for source, _ in pairs) * 3]
    if recipe.task == "pretraining":
        return ["\n".join(STORY) + "\n\n" + "\n".join(reversed(STORY)) + "\n"]
    if recipe.task == "token-classification":
        return [TAGGED * 4]
    lines = "".join(line + "\n" for line in OPINIONS)
    return [
        lines.replace("bad ", "0 ").replace("good ", "1 ")
        if "label_names" in recipe.data
        else lines
    ]


def questions():
    context = "the film wins and the cast shines"
    answers = [("who wins", "the film"), ("who shines", "the cast")]
    return [
        {"id": str(index), "question": question, "context": context,
         "answers": {"text": [answer], "answer_start": [context.index(answer)]}}
        for index, (question, answer) in enumerate(answers * 4)
    ]  # fmt: skip


def data_set(path: Path, rows: list[dict]) -> str:
    DatasetDict(dict.fromkeys(("train", "validation"), Dataset.from_list(rows))).save_to_disk(path)
    return str(path)


def pictures(path: Path) -> str:
    """Write dark and bright images to `path`, as a directory of splits and labels, and return
    it."""
    numbers = np.random.default_rng(0)
    for split, count in (("train", 24), ("validation", 8)):
        for number in range(count):
            label = ("bright", "dark")[number % 2]
            (path / split / label).mkdir(parents=True, exist_ok=True)
            pixels = numbers.integers(0, 100, (8, 8)) + (0 if label == "dark" else 150)
            Image.fromarray(pixels.astype(np.uint8)).save(path / split / label / f"{number}.png")
    return str(path)


def translator(path: Path) -> str:
    """Save a new translation model to `path` and return it."""
    lines = [line for pair in toy_corpus(60, seed=0) for line in pair]
    config = VanillaSeq2SeqConfig(vocab_size=60, encoder_layers=1, decoder_layers=1, **SHAPE)
    return saved(VanillaSeq2SeqForConditionalGeneration(config), train_tokenizer(lines, 60), path)


def make_tokenizer(kind):
    return train_tokenizer(
        [line.split(" ", 1)[1] for line in OPINIONS], PIECES[kind], kind, variant="encoder"
    )


def checkpoint(path: Path, kind: str = "word") -> str:
    """Save a new model of masked words with a tokenizer of `kind` to `path` and return it."""
    return saved(VanillaEncoderForMaskedLM(config(kind)), make_tokenizer(kind), path)


def classifier(path: Path, kind: str = "word", names=("bad", "good")) -> str:
    """Save a new classifier with a tokenizer of `kind` to `path` and return it.

    Its labels are `names`, by default those of `OPINIONS`.
    """
    labels = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
    }
    return saved(
        VanillaEncoderForSequenceClassification(config(kind, **labels)), make_tokenizer(kind), path
    )


def config(kind, **fields):
    return VanillaEncoderConfig(
        vocab_size=PIECES[kind], num_hidden_layers=1, type_vocab_size=2, **SHAPE, **fields
    )


def saved(model, tokenizer, path):
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
