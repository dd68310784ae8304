"""Small checkpoints with a tokenizer or image processor, and their exports."""

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest
import transformers
from checkpoints import toy_corpus
from filelock import FileLock
from heads import LABELLED, TAGS, export_for_images, save_head, word_pieces
from targets import build

from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer_export import export

ENCODER = "VanillaEncoderFor"
TYPES = {"type_vocab_size": 2}
HEADS = {
    "states": ("VanillaEncoderModel", {**TYPES, "pooler_act": "tanh"}),
    "fill-mask": (f"{ENCODER}MaskedLM", TYPES),
    "pretraining": (f"{ENCODER}PreTraining", {**TYPES, "pooler_act": "tanh"}),
    "answer": (f"{ENCODER}QuestionAnswering", TYPES),
    "classify": (f"{ENCODER}SequenceClassification", {**TYPES, **LABELLED}),
    "tag": (f"{ENCODER}TokenClassification", {**TYPES, "id2label": TAGS}),
    "choose": (f"{ENCODER}MultipleChoice", TYPES),
}


@dataclass(frozen=True)
class Exported:
    checkpoint: Path
    directory: Path


def save_generator(name, folder):
    build(name).save_pretrained(folder)
    lines = [text for pair in toy_corpus(50, seed=0) for text in pair]
    train_tokenizer(lines, 48, variant=name if name == "seq2seq" else "decoder").save_pretrained(
        folder
    )


@pytest.fixture(scope="session")
def saved(shared_root):
    """A name of `HEADS`, "images", or "seq2seq" and "causal" with a target -> the checkpoint and
    its export. Tests change copies of the files only."""

    @functools.cache
    def make(name: str, target: str = "portable") -> Exported:
        folder = shared_root / f"ort-{name}"
        result = Exported(folder / "model", folder / ("export" if name == "images" else target))
        with FileLock(f"{folder}.lock"):
            if not result.checkpoint.exists():
                if name == "images":
                    export_for_images(folder)
                elif name in HEADS:
                    architecture, fields = HEADS[name]
                    save_head(architecture, word_pieces(), result.checkpoint, **fields)
                else:
                    save_generator(name, result.checkpoint)
            if not result.directory.exists():
                export(result.checkpoint, result.directory, cases=1, target=target)
        return result

    return make


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module", params=["portable", "cpu"])
def target(request):
    return request.param
