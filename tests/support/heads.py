"""Checkpoints of every head with a tokenizer, and what the tests of pipelines and of tasks
share."""

import functools

import pytest
import torch
import transformers
from checkpoints import SIZES, perturbed
from families import random_config, random_model
from transformers import BertTokenizer
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import vanilla_transformer
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer_export import export

TEXTS = ["the old man sees a red house", "two dogs run", "a woman reads the book ."]
LABELS = {0: "contradiction", 1: "neutral", 2: "entailment"}
LABELLED = {"id2label": LABELS, "label2id": {label: index for index, label in LABELS.items()}}
TAGS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC"}

# texts of many lengths, with words that the tokenizers do not know
MANY = [
    *TEXTS,
    *(
        " ".join(["the old man and a woman , the river ; Zürich houses"] * count)
        for count in (1, 3, 2)
    ),
]
PAIRS = [
    ("two dogs run", "a red house"),
    ("the man", "the woman reads the old book ."),
    *zip(MANY, MANY[1:]),
]
PREFIXES = {
    "xlm-roberta": "XLMRoberta",
    "mpnet": "MPNet",
    "distilbert": "DistilBert",
    "modernbert": "ModernBert",
}
ENCODER = "VanillaEncoderFor"
# name: (architecture, tokenizer, fields)
HEADS = {
    "classify": (f"{ENCODER}SequenceClassification", "pieces", {"type_vocab_size": 2, **LABELLED}),
    "tag": (f"{ENCODER}TokenClassification", "pieces", {"id2label": TAGS, "type_vocab_size": 2}),
    "answer": (f"{ENCODER}QuestionAnswering", "byte-bpe", {"type_vocab_size": 2}),
    "fill_mask": (
        f"{ENCODER}MaskedLM",
        "bpe",
        {"position_embedding_type": "learned", "max_position_embeddings": 160},
    ),
    "choose": (f"{ENCODER}MultipleChoice", "pieces", {"type_vocab_size": 2}),
    "pretraining": (
        f"{ENCODER}PreTraining",
        "pieces",
        {"type_vocab_size": 2, "pooler_act": "tanh"},
    ),
    "next_sentence": (
        f"{ENCODER}NextSentencePrediction",
        "pieces",
        {"type_vocab_size": 2, "pooler_act": "tanh"},
    ),
    "one label": (
        f"{ENCODER}SequenceClassification",
        "pieces",
        {"num_labels": 1, "type_vocab_size": 2},
    ),
    "classify by a decoder": ("VanillaDecoderForSequenceClassification", "bpe", LABELLED),
    "classify by both stacks": ("VanillaSeq2SeqForSequenceClassification", "bpe", LABELLED),
    "tag by a decoder": ("VanillaDecoderForTokenClassification", "bpe", {"id2label": TAGS}),
    "tag words with spaces": (f"{ENCODER}TokenClassification", "byte-bpe", {"id2label": TAGS}),
    "answer without words' spaces": (f"{ENCODER}QuestionAnswering", "bpe", {}),
    "answer with pieces": (f"{ENCODER}QuestionAnswering", "pieces", {"type_vocab_size": 2}),
    "answer by a decoder": ("VanillaDecoderForQuestionAnswering", "bpe", {}),
    "answer by both stacks": ("VanillaSeq2SeqForQuestionAnswering", "bpe", {}),
}
PICTURES = {"image_size": 16, "patch_size": 4, "num_hidden_layers": 2, "num_attention_heads": 4}
VARIANTS = {"Decoder": "decoder", "Encoder": "encoder", "Seq2Seq": "seq2seq"}


def word_pieces(**options):
    """Return a tokenizer for [CLS] question [SEP] context [SEP] that splits words into pieces."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [
        "the",
        "old",
        "man",
        "red",
        "house",
        "woman",
        "book",
        "and",
        "river",
        "##s",
        "##ing",
        *".,?",
    ]
    entries = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{letter}" for letter in letters[:-1]),
        *words,
    ]
    return BertTokenizer(
        vocab={entry: index for index, entry in enumerate(dict.fromkeys(entries))}, **options
    )


def tokenizer_for(kind, architecture):
    if kind == "pieces":
        return word_pieces()
    variant = next(name for prefix, name in VARIANTS.items() if prefix in architecture)
    lines = [*MANY, "This example is about animals or people ."] * 2
    return train_tokenizer(
        lines, 100 if kind == "bpe" else 300, kind, variant, token_types=kind == "byte-bpe"
    )


def save_head(architecture, tokenizer, directory, **fields):
    """Save a checkpoint of one layer with `tokenizer` to `directory`, and return its path.

    `fields` are those of its config. Its weights are large enough for answers that differ.
    """
    transformers.set_seed(0)
    model_class = getattr(vanilla_transformer, architecture)
    sizes = {**SIZES, "vocab_size": len(tokenizer), "num_hidden_layers": 1}
    model = model_class(model_class.config_class(**{**sizes, **fields})).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def head_exports(make_folder):
    """Return a function that returns the checkpoint and the export of a head of `HEADS`.

    Its first call for a head makes them in a folder of `make_folder`.
    """

    @functools.cache
    def make(name):
        architecture, kind, fields = HEADS[name]
        folder = make_folder("head")
        tokenizer = tokenizer_for(kind, architecture)
        checkpoint = save_head(architecture, tokenizer, folder / "checkpoint", **fields)
        export(checkpoint, folder / "export", cases=1)
        return checkpoint, folder / "export"

    return make


def save_family(family, head, directory, **fields):
    """Save a random checkpoint of `family` of transformers with a tokenizer to `directory`.

    `head` is the end of its class name, such as "ForMaskedLM". `fields` are those of its config.
    """
    architecture = PREFIXES.get(family, family.capitalize()) + head
    tokenizer = word_pieces()
    config = random_config(family, architecture, 0)
    config.update({"vocab_size": len(tokenizer), "max_position_embeddings": 200, **fields})
    specials = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.sep_token_id}
    config.update({**specials, "bos_token_id": tokenizer.cls_token_id})
    random_model(architecture, config).save_pretrained(directory)
    if getattr(config, "type_vocab_size", 0) < 2:
        tokenizer = word_pieces(model_input_names=["input_ids", "attention_mask"])
    tokenizer.save_pretrained(directory)


def export_for_images(folder, architecture="VanillaVisionForImageClassification", **fields):
    """Save a model of 16 x 16 images and its image processor, export them, and return the model.

    The checkpoint is `folder / "model"`, the export `folder / "export"`. `fields` are those of its
    config.
    """
    model = perturbed(
        architecture, {"hidden_size": 32, "intermediate_size": 40, **PICTURES, **fields}
    )
    model.save_pretrained(folder / "model")
    ViTImageProcessorPil(size=16).save_pretrained(folder / "model")
    export(folder / "model", folder / "export", cases=1)
    return model


def close(actual, expected, absolute=1e-6):
    """Assert that two nested structures are equal, with numbers within the accuracy of float32.

    `absolute` is the tolerance of numbers near 0.
    """
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for name in expected:
            close(actual[name], expected[name], absolute)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected):
            close(one, other, absolute)
    elif isinstance(expected, float):
        assert float(actual) == pytest.approx(expected, rel=1e-4, abs=absolute)
    else:
        assert actual == expected
