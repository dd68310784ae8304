"""Tests of full-sequence graphs: choices, decoder heads, bare seq2seq models, ragged batches."""

import functools

import numpy as np
import onnx
import pytest
import torch
from checkpoints import copy_folder, default_graphs, edit_json, perturbed, seal
from filelock import FileLock
from messages import raises
from written import run, write

import vanilla_transformer
from vanilla_transformer_export import Runtime, export, verify
from vanilla_transformer_export.graphs.layers import linear
from vanilla_transformer_export.heads import HEADS, model_class
from vanilla_transformer_export.inference import inputs as inputs_module
from vanilla_transformer_export.inference.inputs import bucket_by_length

VOCABULARY, WIDTH, NARROW = 48, 32, 24
SIZES = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=40, num_attention_heads=4)
MODELS = {
    "choices": (
        "VanillaEncoderForMultipleChoice",
        dict(num_hidden_layers=1, type_vocab_size=2, pooler_act="tanh"),
    ),
    "decoder": (
        "VanillaDecoderModel",
        dict(
            num_hidden_layers=2,
            position_embedding_type="relative",
            value_head_dim=10,
            embedding_size=NARROW,
        ),
    ),
    "decoder-labels": (
        "VanillaDecoderForSequenceClassification",
        dict(num_hidden_layers=2, position_embedding_type="rotary", sliding_window=4, num_labels=3),
    ),
    "decoder-tokens": (
        "VanillaDecoderForTokenClassification",
        dict(num_hidden_layers=1, num_labels=5),
    ),
    "decoder-answers": (
        "VanillaDecoderForQuestionAnswering",
        dict(num_hidden_layers=1, position_embedding_type="learned", position_ids_from="mask"),
    ),
    "pair-labels": (
        "VanillaSeq2SeqForSequenceClassification",
        dict(encoder_layers=1, decoder_layers=2, num_labels=3),
    ),
    "pair-answers": (
        "VanillaSeq2SeqForQuestionAnswering",
        dict(encoder_layers=1, decoder_layers=1, wrap_last_token=True, norm_first=True),
    ),
    "means": (
        "VanillaEncoderForSequenceClassification",
        dict(num_hidden_layers=1, classifier_pooling="mean", num_labels=3),
    ),
    "pair": (
        "VanillaSeq2SeqModel",
        dict(encoder_layers=1, decoder_layers=2, embedding_size=NARROW),
    ),
    "encoder": ("VanillaEncoderForMaskedLM", dict(num_hidden_layers=1)),
    "tokens": ("VanillaEncoderForTokenClassification", dict(num_hidden_layers=1, num_labels=5)),
    "sentences": (
        "VanillaEncoderForNextSentencePrediction",
        dict(num_hidden_layers=1, pooler_act="tanh"),
    ),
    "causal": ("VanillaDecoderForCausalLM", dict(num_hidden_layers=1)),
    "seq2seq": ("VanillaSeq2SeqForConditionalGeneration", dict(encoder_layers=1, decoder_layers=1)),
}
FULL_SEQUENCE = [
    "choices",
    "decoder",
    "decoder-labels",
    "decoder-tokens",
    "decoder-answers",
    "means",
    "pair-labels",
    "pair-answers",
]
FULL_SEQUENCE += ["pair"]
# the other models have the same graphs except for the last layer
SLOW = ["decoder", "decoder-tokens", "pair-answers"]
WITH_LOGITS = {
    "choices",
    "means",
    "decoder-labels",
    "decoder-tokens",
    "decoder-answers",
    "pair-labels",
    "pair-answers",
}


def build(name):
    architecture, fields = MODELS[name]
    return perturbed(architecture, {**SIZES, **fields})


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function that exports a model of `MODELS`, and returns it and the directory."""
    root = tmp_path_factory.mktemp("sequence-graphs")

    @functools.cache
    def make(name, target="portable", dtype="fp32"):
        model, directory = build(name), root / f"{name}-{target}-{dtype}"
        with FileLock(f"{directory}.lock"):
            if not directory.exists():
                model.save_pretrained(root / name)
                export(root / name, directory, cases=3, target=target, dtype=dtype)
        return model, directory

    return make


def axes(values):
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in values
    }


B, S, T, C = "batch_size", "source_length", "target_length", "num_choices"
CONTRACT = {
    "choices": (
        dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), [B, C, S]),
        {"logits": [B, C]},
    ),
    "decoder": (
        dict.fromkeys(("input_ids", "attention_mask"), [B, S]),
        {"last_hidden_state": [B, S, NARROW]},
    ),
    "decoder-labels": (dict.fromkeys(("input_ids", "attention_mask"), [B, S]), {"logits": [B, 3]}),
    "decoder-tokens": (
        dict.fromkeys(("input_ids", "attention_mask"), [B, S]),
        {"logits": [B, S, 5]},
    ),
    "decoder-answers": (
        dict.fromkeys(("input_ids", "attention_mask"), [B, S]),
        {"start_logits": [B, S], "end_logits": [B, S]},
    ),
    "pair-labels": (dict.fromkeys(("input_ids", "attention_mask"), [B, S]), {"logits": [B, 3]}),
    "pair-answers": (
        dict.fromkeys(("input_ids", "attention_mask"), [B, S]),
        {"start_logits": [B, S], "end_logits": [B, S]},
    ),
    "means": (dict.fromkeys(("input_ids", "attention_mask"), [B, S]), {"logits": [B, 3]}),
    "pair": (
        {name: [B, S] for name in ("input_ids", "attention_mask")}
        | {name: [B, T] for name in ("decoder_input_ids", "decoder_attention_mask")},
        {"last_hidden_state": [B, T, NARROW], "encoder_last_hidden_state": [B, S, WIDTH]},
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FULL_SEQUENCE],
)
def test_graph_has_inputs_and_outputs_of_optimum(exported, name):
    graph = onnx.load(exported(name)[1] / "onnx/model.onnx").graph
    assert (axes(graph.input), axes(graph.output)) == CONTRACT[name]
    assert {node.domain for node in graph.node} == {""}


@pytest.mark.parametrize("target", ["portable", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FULL_SEQUENCE],
)
def test_40_cases_agree_with_torch(exported, name, target):
    model, directory = exported(name, target)
    report = verify(directory, model, cases=40, seed=1)
    assert report.failures == [] and report.agreeing == report.choices
    assert (report.choices > 30) == (name in WITH_LOGITS)
    assert 0 < report.mean_error <= report.max_error < 1e-4


@pytest.mark.parametrize(
    "dtype, operator",
    [("int8", "MatMulIntegerToFloat"), pytest.param("int4", "MatMulNBits", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "name",
    [
        "decoder",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in FULL_SEQUENCE
            if name != "decoder"
        ),
    ],
)
def test_cpu_target_quantizes_matmuls(exported, name, dtype, operator):
    model, directory = exported(name, "cpu", dtype)
    count = sum(
        node.op_type == operator for node in onnx.load(directory / "onnx/model.onnx").graph.node
    )
    assert count >= 6
    report = verify(directory, model, cases=10, seed=1)
    assert report.failures == [] and 1e-4 < report.mean_error < (0.1 if dtype == "int8" else 0.6)


@pytest.mark.parametrize(
    "name", ["pair", *(pytest.param(name, marks=pytest.mark.slow) for name in FULL_SEQUENCE[:-1])]
)
def test_cuda_target_matches_torch_with_fused_operators(exported, name):
    model, directory = exported(name, "cuda")
    assert verify(directory, model, cases=9, device="cpu").failures == []
    result = [node.op_type for node in onnx.load(directory / "onnx/model.onnx").graph.node]
    encoder, decoder = {"pair": (1, 2), "pair-labels": (1, 2), "pair-answers": (1, 1)}.get(
        name, (0, 0)
    )
    single = {"decoder": 2, "decoder-labels": 2}.get(name, 1)
    layers, norms = (
        (encoder + decoder, 2 * encoder + 3 * decoder) if encoder else (single, 2 * single)
    )
    # A pair has one more Split, for the keys and values of cross-attention in all layers.
    assert (result.count("Split"), result.count("SkipLayerNormalization")) == (
        layers + (encoder > 0),
        norms,
    )


def test_every_model_class_has_an_export_head():
    names = [name for name in vars(vanilla_transformer) if name.startswith("Vanilla")]
    models = {name for name in names if name.endswith("Model") or "For" in name} - {
        "VanillaPreTrainedModel"
    }
    classes = models - {name for name in models if name.endswith("Config")}
    assert classes == set(map(model_class, HEADS))


def test_decoder_rows_can_be_padded_on_either_side(exported):
    runtime = Runtime(exported("decoder-labels")[1])
    rows = [[5, 6, 7], [8, 9, 10, 11, 12]]
    alone = [runtime.encode(np.array([row]))[0] for row in rows]
    for padding, mask in (([5, 6, 7, 3, 3], [1, 1, 1, 0, 0]), ([3, 3, 5, 6, 7], [0, 0, 1, 1, 1])):
        result = runtime.encode(np.array([padding, rows[1]]), np.array([mask, [1] * 5]))
        np.testing.assert_allclose(result, alone, atol=1e-5)


# ------------------------------------------------------------------------- int8, standard operators


@pytest.mark.parametrize(
    "name", ["encoder", "causal", pytest.param("seq2seq", marks=pytest.mark.slow)]
)
def test_portable_int8_uses_standard_operators_and_agrees_with_torch(exported, name):
    model, directory = exported(name, "portable", "int8")
    manifest = Runtime(directory).info.manifest
    for file in default_graphs(manifest).values():
        assert file.endswith("_int8.onnx")
        graph = onnx.load(directory / file).graph
        assert {node.domain for node in graph.node} == {""}
        matmuls = [node for node in graph.node if node.op_type == "MatMulInteger"]
        assert len(matmuls) >= 6
        weights = {weight.name: weight for weight in graph.initializer}
        assert {weights[node.input[1]].data_type for node in matmuls} == {onnx.TensorProto.INT8}
        assert not [
            node for node in graph.node if node.op_type == "MatMul" and node.input[1] in weights
        ]
        rounded = [node.input[0] for node in graph.node if node.op_type == "DynamicQuantizeLinear"]
        # an input of several matmuls is quantized once
        assert len(rounded) == len(set(rounded)) < len(matmuls)
    report = verify(directory, model, cases=20, seed=1)
    assert report.failures == [] and report.mean_error > 1e-4
    assert report.agreeing >= 0.9 * report.choices > 100


def test_int8_matmul_multiplies_quantized_factors():
    """The expected values follow the definition.

    The input has 256 steps between its extremes, and each column of weights has 127. More error is
    allowed where the sum of two products overflows 16 bits on some CPUs.
    """
    rng = np.random.default_rng(0)
    x, weight = (
        rng.standard_normal((3, 64)).astype(np.float32),
        rng.standard_normal((64, 40)).astype(np.float32),
    )
    weight[:, 7] = 0
    model = write(
        lambda g, value: [linear(g, value, "w")],
        {"w.weight": weight.T.copy()},
        {"x": x},
        "portable",
        "int8",
    )
    onnx.checker.check_model(model)
    [result] = run(model, {"x": x})
    step = (max(x.max(), 0) - min(x.min(), 0)) / 255
    places = np.clip(np.rint(x / step) + np.rint(-x.min() / step), 0, 255) - np.rint(
        -x.min() / step
    )
    largest = np.maximum(np.abs(weight).max(axis=0), np.abs(weight[::2] + weight[1::2]).max(axis=0))
    scales = np.maximum(largest, 1e-30) / 127
    np.testing.assert_allclose(
        result, places * step @ (np.rint(weight / scales) * scales), atol=1e-3
    )
    assert 1e-3 < np.abs(result - x @ weight).max() < 0.5 and not result[:, 7].any()


# ------------------------------------------------------------------------------------ invalid input


def test_multiple_choice_input_must_have_three_axes(exported):
    runtime = Runtime(exported("choices")[1])
    with raises(ValueError, seen=("batch_size", 2, 3), expected=("num_choices", "source_length")):
        runtime.outputs(np.ones((2, 3), int))
    with raises(ValueError, seen=(2, 0, 3), expected=1):
        runtime.outputs(np.ones((2, 0, 3), int))
    with raises(ValueError, seen=("attention_mask", 2, 4), expected=(2, 3, 4)):
        runtime.outputs(np.ones((2, 3, 4), int), np.ones((2, 4), int))
    with raises(ValueError, seen="VanillaEncoderForMultipleChoice"):
        runtime.generate(np.ones((2, 3, 4), int))


def test_seq2seq_classifier_needs_end_token_in_each_row(exported):
    model, directory = exported("pair-labels")
    runtime, ids = Runtime(directory), np.array([[5, 2, 6, 2], [5, 2, 7, 8], [4, 9, 2, 2]])
    with torch.no_grad():
        np.testing.assert_allclose(
            runtime.encode(ids), model(torch.from_numpy(ids)).logits, atol=1e-5
        )
    mask = np.array([[1] * 4, [1, 0, 0, 0], [0] * 4])
    for bad_ids, seen in ((np.full((2, 3), 5), (0,)), (ids, (1,))):
        with raises(ValueError, seen=("input_ids", *seen), expected=2):
            runtime.encode(bad_ids, mask[: len(bad_ids), : bad_ids.shape[1]])


def test_decoder_input_ids_are_checked(exported):
    runtime, ids = Runtime(exported("pair")[1]), np.full((2, 3), 5)
    with raises(ValueError, seen=("VanillaSeq2SeqModel", "decoder_input_ids")):
        runtime.outputs(ids)
    for wrong, seen, expected in (
        ((np.full((3, 3), 5),), ("decoder_input_ids", 3), (2, "target_length")),
        ((np.full((2, 0), 5),), "decoder_input_ids", (2, "target_length", 1)),
        ((np.full((2, 3), VOCABULARY),), (), (0, 47)),
        ((ids, np.ones((2, 4), int)), "decoder_attention_mask", ()),
    ):
        with raises(ValueError, seen=seen, expected=expected):
            runtime.outputs(ids, None, None, *wrong)
    with raises(ValueError, seen=("VanillaEncoderForMaskedLM", "decoder_input_ids")):
        Runtime(exported("encoder")[1]).outputs(ids, decoder_input_ids=ids)


def test_decoder_input_longer_than_learned_positions_is_rejected(exported, tmp_path):
    directory = copy_folder(exported("pair")[1], tmp_path)
    edit_json(
        directory / "config.json", position_embedding_type="learned", max_position_embeddings=6
    )
    seal(directory)
    runtime, ids = Runtime(directory), np.full((2, 6), 5)
    assert runtime.encode(ids, decoder_input_ids=ids).shape == (2, 6, NARROW)
    with raises(ValueError, seen=(7, "learned"), expected=6):
        runtime.encode(ids, decoder_input_ids=np.full((2, 7), 5))


# ----------------------------------------------------------------------------------- ragged batches


def ragged(lengths, seed=0):
    rng, longest = np.random.default_rng(seed), max(lengths)
    mask = (np.arange(longest) < np.array(lengths)[:, None]).astype(np.int64)
    return np.where(mask == 1, rng.integers(4, VOCABULARY, mask.shape), 0), mask


LENGTHS = [40, 3, 17, 9, 38, 2, 21, 5, 30, 12, 7, 33, 0, 25, 4, 19] * 3


@pytest.mark.parametrize(
    "name, target",
    [
        *((name, "portable") for name in ("encoder", *FULL_SEQUENCE) if name not in SLOW),
        *(
            pytest.param(name, "portable", marks=pytest.mark.slow)
            for name in ("tokens", "sentences", *SLOW)
        ),
        pytest.param("encoder", "cpu", marks=pytest.mark.slow),
        pytest.param("seq2seq", "cpu", marks=pytest.mark.slow),
    ],
)
def test_bucketed_ragged_batch_matches_single_run(exported, monkeypatch, name, target):
    runtime = Runtime(exported(name, target)[1])
    ids, mask = ragged(LENGTHS)
    feeds = {}
    if name == "pair-labels":
        ids[mask.any(axis=1), mask.sum(axis=1)[mask.any(axis=1)] - 1] = 2
    if name == "choices":
        ids, mask = (array.reshape(-1, 2, array.shape[1])[:, [0, 1, 0]] for array in (ids, mask))
    if name == "pair":
        feeds["decoder_input_ids"], feeds["decoder_attention_mask"] = ragged(LENGTHS[::-1])
    assert len(bucket_by_length(mask, 512)) > 2
    actual = runtime.outputs(ids, mask, **feeds)
    monkeypatch.setattr(inputs_module, "MIN_TOKENS", 10**9)
    monkeypatch.setattr(inputs_module, "MAX_TOKENS", 10**9)
    expected = runtime.outputs(ids, mask, **feeds)
    assert list(actual) == list(expected)
    for tensor in runtime.specs["encoder"].outputs:
        got, reference = actual[tensor.name], expected[tensor.name]
        assert (got.shape, got.dtype) == (reference.shape, reference.dtype)
        real = mask.any(axis=-1)
        if S in tensor.shape:  # (B, S, ...), or (B, H, S, d)
            got, reference = (
                np.moveaxis(array, tensor.shape.index(S), 1) for array in (got, reference)
            )
            real = mask == 1
        np.testing.assert_allclose(got[real], reference[real], atol=1e-5)
        assert np.isfinite(got).all()


@pytest.mark.parametrize(
    "threads, runs", [(1, [(6, 40), (6, 40), (12, 4)]), (2, [(12, 40), (12, 4)])]
)
def test_encoder_runs_short_rows_apart_from_long_rows(exported, monkeypatch, threads, runs):
    """A run has at most 256 tokens per thread. A spy replaces the session."""
    runtime, sizes = Runtime(exported("encoder")[1], threads=threads), []
    session = runtime.model.loaded.sessions["encoder"]

    class Session:
        def run(self, names, feeds):
            sizes.append(feeds["input_ids"].shape)
            return session.run(names, feeds)

    monkeypatch.setitem(runtime.model.loaded.sessions, "encoder", Session())
    runtime.encode(*ragged([40, 4] * 12))
    assert sizes == runs


@pytest.mark.parametrize(
    "lengths, groups",
    [
        ([8], [[0]]),
        ([100, 90, 86, 92], [[0, 1, 2, 3]]),  # little padding
        ([60, 1, 1, 1], [[0, 1, 2, 3]]),  # few tokens
        ([200, 20, 190, 18], [[0, 2], [1, 3]]),
        ([1, 128, 128], [[1, 2], [0]]),
        ([0, 0], [[0, 1]]),
        ([128] * 6, [[0, 1, 2, 3], [4, 5]]),  # 512 tokens at most
    ],
)
def test_rows_of_similar_length_run_together(lengths, groups):
    mask = (np.arange(200) < np.array(lengths)[:, None]).astype(np.int64)
    result = bucket_by_length(mask, 512)
    assert [sorted(rows.tolist()) for rows, _ in result] == groups
    assert [longest for _, longest in result] == [
        max(1, *(lengths[row] for row in rows)) for rows in groups
    ]


def test_buckets_limit_padding_and_keep_left_padded_rows_together(
    monkeypatch,
):
    monkeypatch.setattr(inputs_module, "MIN_TOKENS", 1)
    mask = ragged([length for length in LENGTHS * 8 if length])[1]
    groups = bucket_by_length(mask, 10**9)
    cost = sum(len(rows) * longest for rows, longest in groups)
    assert mask.sum() <= cost <= mask.sum() / (1 - inputs_module.MAX_PADDING) < 0.6 * mask.size
    assert sorted(row for rows, _ in groups for row in rows.tolist()) == list(range(len(mask)))
    assert len(bucket_by_length(mask[:, ::-1], 10**9)) == 1
