"""JinaBERT v2 against its formula in float64: transformers has no class of it."""

import json
import math

import numpy as np
import pytest
import torch
from messages import raises
from safetensors.numpy import load_file, save_file

import vanilla_transformer
from vanilla_transformer.conversion import convert
from vanilla_transformer_export import Runtime, export

SIZES = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 64}
CONFIG = {
    "architectures": ["JinaBertForMaskedLM"],
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    "classifier_dropout": None,
    "emb_pooler": "mean",
    "feed_forward_type": "geglu",
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 8192,
    "model_max_length": 8192,
    "model_type": "bert",
    "pad_token_id": 0,
    "position_embedding_type": "alibi",
    "type_vocab_size": 2,
    "use_cache": True,
}
LAYER = {
    "attention.self.query": (24, 24), "attention.self.key": (24, 24),
    "attention.self.value": (24, 24), "attention.output.dense": (24, 24),
    "attention.output.LayerNorm": (24,), "mlp.wo": (24, 20), "mlp.layernorm": (24,),
}  # fmt: skip
BODY = {
    "embeddings.LayerNorm": (24,), "pooler.dense": (24, 24),
    **{f"encoder.layer.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()},
}  # fmt: skip
TABLES = {
    "embeddings.word_embeddings": (64, 24), "embeddings.token_type_embeddings": (2, 24),
    **{f"encoder.layer.{i}.mlp.gated_layers": (40, 24) for i in range(2)},
}  # fmt: skip


def save(directory, heads, prefix="", **changes):
    """Save a random checkpoint with the names of the Hub, and return its tensors in float64."""
    random = np.random.default_rng(heads)
    tensors = {}
    for name, shape in {**BODY, **TABLES}.items():
        spread = shape[-1] ** -0.5 if len(shape) == 2 else 0.3
        tensors[f"{name}.weight"] = random.normal(len(shape) == 1, spread, shape)
        if name in BODY:
            tensors[f"{name}.bias"] = random.normal(0, 0.3, shape[:1])
    if changes.get("id2label"):
        tensors["classifier.weight"] = random.normal(0, 0.3, (1, 24))
        tensors["classifier.bias"] = random.normal(0, 0.3, (1,))
    tensors = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    directory.mkdir()
    named = {name if "class" in name else prefix + name: tensors[name] for name in tensors}
    save_file(named, directory / "model.safetensors")
    content = CONFIG | SIZES | {"num_attention_heads": heads} | changes
    (directory / "config.json").write_text(json.dumps(content))
    return {name: tensor.astype(np.float64) for name, tensor in tensors.items()}


# ------------------------------------------------------------------------------------- the formula


def slopes(heads):
    """Return the slopes of Press et al. 2022: a geometric sequence from 2^(-8/n) on with that
    ratio. If n is no power of two, every second slope of the next power of two follows those of the
    last."""
    if heads & (heads - 1) == 0:
        return [(2 ** (-8 / heads)) ** (i + 1) for i in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return slopes(below) + slopes(2 * below)[0::2][: heads - below]


def norm(weights, name, x):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def softmax(scores):
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def attend(weights, name, x, heads):
    """Return attention whose scores lose slope * |i - j|, (T, D)."""
    q, k, v = (
        np.split(linear(weights, f"{name}.{part}", x), heads, axis=1)
        for part in ("query", "key", "value")
    )
    parts = np.array_split(np.arange(len(x)), len(x) // 512 + 1)
    outputs = [
        np.concatenate([softmax(scores(q[h], k[h], slope, part)) @ v[h] for part in parts])
        for h, slope in enumerate(slopes(heads))
    ]
    return np.concatenate(outputs, axis=1)


def scores(q, k, slope, queries):
    distance = np.abs(queries[:, None] - np.arange(len(k)))
    return q[queries] @ k.T / math.sqrt(q.shape[1]) - slope * distance


def encode(weights, ids, heads):
    """Return the states (T, D) of one row of `ids` without padding."""
    x = weights["embeddings.word_embeddings.weight"][ids]
    x = x + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm(weights, "embeddings.LayerNorm", x)
    for i in range(2):
        layer = f"encoder.layer.{i}"
        attended = attend(weights, f"{layer}.attention.self", x, heads)
        attended = linear(weights, f"{layer}.attention.output.dense", attended)
        x = norm(weights, f"{layer}.attention.output.LayerNorm", attended + x)
        both = x @ weights[f"{layer}.mlp.gated_layers.weight"].T
        product = gelu(both[:, :20]) * both[:, 20:]
        x = norm(weights, f"{layer}.mlp.layernorm", linear(weights, f"{layer}.mlp.wo", product) + x)
    return x


def rows(lengths, side):
    """Return ids and mask of random rows, padded on the `side`."""
    longest = max(lengths)
    ids = np.random.default_rng(0).integers(4, 64, (len(lengths), longest))
    mask = (np.arange(longest) < np.array(lengths)[:, None]).astype(np.int64)
    mask = mask if side == "right" else mask[:, ::-1]
    return ids * mask, mask.copy()


def check_states(actual, weights, ids, mask, heads, tolerance):
    for states, row, real in zip(actual, ids, mask.astype(bool), strict=True):
        expected = encode(weights, row[real], heads)
        assert np.abs(states[real] - expected).max() <= tolerance * np.abs(expected).max()


# ------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12])
def test_states_equal_the_formula(heads, side, tmp_path):
    weights = save(tmp_path / "hub", heads)
    convert(tmp_path / "hub", tmp_path / "ours")
    model = vanilla_transformer.VanillaEncoderModel.from_pretrained(tmp_path / "ours").eval()
    ids, mask = rows((60, 17, 1), side)
    with torch.no_grad():
        actual = model(torch.from_numpy(ids), torch.from_numpy(mask)).last_hidden_state.numpy()
    check_states(actual, weights, ids, mask, heads, 1e-5)


@pytest.mark.parametrize(
    "target, dtype, tolerance",
    [
        ("portable", "fp32", 1e-4),
        ("cpu", "fp32", 1e-4),
        ("cuda", "fp32", 1e-4),
        ("cuda", "fp16", 1e-2),
    ],
)
def test_exports_equal_the_formula(target, dtype, tolerance, tmp_path):
    weights = save(tmp_path / "hub", 6)
    export(tmp_path / "hub", tmp_path / "out", target=target, dtype=dtype, cases=2)
    ids, mask = rows((600, 31, 2), "right")
    runtime = Runtime(tmp_path / "out", device="cpu", threads=1)
    actual = runtime.outputs(ids, mask)["last_hidden_state"]
    check_states(actual, weights, ids, mask, 6, tolerance)


@pytest.mark.parametrize("target", ["portable", "cpu", "cuda"])
def test_int8_vectors_point_where_those_of_the_formula_do(target, tmp_path):
    weights = save(tmp_path / "hub", 6)
    export(tmp_path / "hub", tmp_path / "out", target=target, dtype="int8", cases=2)
    ids, mask = rows((60, 31, 20), "right")
    runtime = Runtime(tmp_path / "out", device="cpu", threads=1)
    actual = runtime.outputs(ids, mask)["last_hidden_state"]
    for states, row, real in zip(actual, ids, mask.astype(bool), strict=True):
        vector, expected = states[real].mean(0), encode(weights, row[real], 6).mean(0)
        cosine = vector @ expected / np.linalg.norm(vector) / np.linalg.norm(expected)
        assert 1e-7 < 1 - cosine < 3e-3


# 8192, as many as the models are for, takes 10 s; 2500 are the same operators
@pytest.mark.parametrize("length", [2500, pytest.param(8192, marks=pytest.mark.slow)])
def test_long_text_equals_the_formula(length, tmp_path):
    weights = save(tmp_path / "hub", 2)
    export(tmp_path / "hub", tmp_path / "out", target="cpu", cases=1)
    ids, mask = rows((length,), "right")
    actual = Runtime(tmp_path / "out", threads=1).outputs(ids, mask)["last_hidden_state"]
    check_states(actual, weights, ids, mask, 2, 1e-4)


def test_reranker_scores_equal_the_formula(tmp_path):
    changes = {"architectures": ["JinaBertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    weights = save(tmp_path / "hub", 3, "bert.", **changes)
    result = convert(tmp_path / "hub", tmp_path / "ours")
    assert result["architecture"] == "VanillaEncoderForSequenceClassification"
    model = vanilla_transformer.VanillaEncoderForSequenceClassification.from_pretrained(
        tmp_path / "ours"
    ).eval()
    ids, mask = rows((30,), "right")
    with torch.no_grad():
        actual = model(torch.from_numpy(ids), torch.from_numpy(mask)).logits.numpy()
    pooled = np.tanh(linear(weights, "pooler.dense", encode(weights, ids[0], 3)[0]))
    np.testing.assert_allclose(actual[0], linear(weights, "classifier", pooled), atol=1e-5)


@pytest.mark.parametrize(
    "changes, seen, expected",
    [
        ({"feed_forward_type": "original"}, "feed_forward_type='original'", "geglu"),
        ({"feed_forward_type": "reglu"}, "feed_forward_type='reglu'", "geglu"),
        ({"position_embedding_type": "relative_key"}, "relative_key", "alibi"),
    ],
)
def test_other_networks_and_positions_are_rejected(changes, seen, expected, tmp_path):
    save(tmp_path / "hub", 3, **changes)
    with raises(ValueError, seen=seen, expected=expected):
        convert(tmp_path / "hub", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_norms_of_queries_and_keys_are_rejected_by_name(tmp_path):
    save(tmp_path / "hub", 3)
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    for name in ("layer_norm_q", "layer_norm_k"):
        tensors[f"encoder.layer.0.attention.self.{name}.weight"] = np.ones(24, np.float32)
    save_file(tensors, tmp_path / "hub" / "model.safetensors")
    with raises(ValueError, seen="layer_norm_q", expected="jina-embeddings-v2-base-en"):
        convert(tmp_path / "hub", tmp_path / "ours")


def test_bert_cannot_hold_alibi(tmp_path):
    save(tmp_path / "hub", 3)
    convert(tmp_path / "hub", tmp_path / "ours")
    with raises(ValueError, seen="gated=True", expected="False"):
        convert(tmp_path / "ours", tmp_path / "back", to="bert")
