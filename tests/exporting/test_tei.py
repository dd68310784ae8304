"""Text-embeddings-inference can serve exports: they have the files that its router/src/lib.rs and
backends/ort/src/lib.rs read, and the outputs of torch."""

import json

import numpy as np
import onnxruntime
import pytest
import torch
from standins import SHAPE
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import vanilla_transformer
from vanilla_transformer import VanillaEncoderConfig
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer_export import export

TEXTS = ["the film wins", "who sees the old man and the big dog, but a red bird?", "a naïve café"]
LABELS = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}


@pytest.fixture(
    scope="module", params=["VanillaEncoderModel", "VanillaEncoderForSequenceClassification"]
)
def served(request, tmp_path_factory):
    """A model, its tokenizer and its export."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tei")
    tokenizer = train_tokenizer(TEXTS * 4, 60, variant="encoder", token_types=True)
    labels = LABELS if "Classification" in request.param else {}
    config = VanillaEncoderConfig(
        vocab_size=60, num_hidden_layers=1, type_vocab_size=2, **SHAPE, **labels
    )
    model = getattr(vanilla_transformer, request.param)(config).eval()
    model.save_pretrained(folder / "checkpoint")
    tokenizer.save_pretrained(folder / "checkpoint")
    export(folder / "checkpoint", folder / "out", cases=2)
    return model, AutoTokenizer.from_pretrained(folder / "checkpoint"), folder / "out"


def is_index(value):
    return type(value) is int and value >= 0


def test_config_json_has_fields_and_types_that_tei_reads(served):
    model, _, directory = served
    config = json.loads((directory / "config.json").read_text())
    assert all(isinstance(name, str) for name in config["architectures"]) and isinstance(
        config["model_type"], str
    )
    assert all(
        is_index(config[name])
        for name in ("max_position_embeddings", "hidden_size", "num_hidden_layers")
    )
    assert all(
        config[name] is None or is_index(config[name]) for name in ("pad_token_id", "eos_token_id")
    )
    assert "auto_map" not in config
    assert all(isinstance(label, str) for label in config["id2label"].values())
    assert all(is_index(number) for number in config["label2id"].values())
    is_classifier = any(name.endswith("Classification") for name in config["architectures"])
    assert is_classifier == hasattr(model, "classifier")
    # other types start only with --pooling or 1_Pooling/config.json
    assert "bert" in config["model_type"]
    # position ids of these types start elsewhere
    assert not any(name in config["model_type"] for name in ("roberta", "camembert"))
    side = json.loads((directory / "tokenizer_config.json").read_text()).get(
        "padding_side", "right"
    )
    assert side == "right"


def outputs(directory, texts):
    """Return the outputs for `texts` in one batch, as text-embeddings-inference runs it.

    Rows are right-padded with the config's pad token.
    """
    session = onnxruntime.InferenceSession(directory / "onnx/model.onnx")
    config = json.loads((directory / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    rows = tokenizer.encode_batch(texts)
    longest = max(len(row.ids) for row in rows)
    pad = [longest - len(row.ids) for row in rows]
    inputs = {
        "input_ids": [row.ids + [config["pad_token_id"]] * count for row, count in zip(rows, pad)],
        "attention_mask": [[1] * len(row.ids) + [0] * count for row, count in zip(rows, pad)],
        "token_type_ids": [row.type_ids + [0] * count for row, count in zip(rows, pad)],
    }
    names = [tensor.name for tensor in session.get_inputs()]
    assert set(names) <= inputs.keys()
    result = session.run(None, {name: np.array(inputs[name]) for name in names})
    return dict(zip([tensor.name for tensor in session.get_outputs()], result)), np.array(
        inputs["attention_mask"]
    )[..., None]


@pytest.mark.parametrize("count", [1, 3])
@torch.no_grad()
def test_batch_outputs_match_torch(served, count):
    model, tokenizer, directory = served
    actual, mask = outputs(directory, TEXTS[:count])
    expected = [model(**tokenizer(text, return_tensors="pt"))[0] for text in TEXTS[:count]]
    if hasattr(model, "classifier"):
        np.testing.assert_allclose(actual["logits"], torch.cat(expected), rtol=1e-4, atol=1e-5)
        return
    states = actual["last_hidden_state"]
    first, mean = states[:, 0], (states * mask).sum(1) / mask.sum(1)
    np.testing.assert_allclose(
        first, torch.stack([tensor[0, 0] for tensor in expected]), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        mean, torch.stack([tensor[0].mean(0) for tensor in expected]), rtol=1e-4, atol=1e-5
    )
