"""The cpu target: onnxruntime's own operators, caches in place, quantized weights, and still the model's own tokens."""

import collections
import functools

import numpy as np
import onnx
import pytest
import torch
import transformers
from checkpoints import EOS, PAD
from filelock import FileLock

import vanilla_transformer
from vanilla_transformer_export.build import export
from vanilla_transformer_export.decoding import FixedCaches
from vanilla_transformer_export.runtime import Runtime
from vanilla_transformer_export.verify import verify

SIZES = dict(vocab_size=48, hidden_size=32, intermediate_size=40, num_attention_heads=4)
LEARNED = dict(position_embedding_type="learned", max_position_embeddings=60, norm_first=True, linear_bias=False)
MODELS = {
    "seq2seq": ("VanillaSeq2SeqForConditionalGeneration", dict(encoder_layers=1, decoder_layers=2)),
    "causal": ("VanillaDecoderForCausalLM", dict(num_hidden_layers=2, **LEARNED)),
    "causal-window": (
        "VanillaDecoderForCausalLM",
        dict(num_hidden_layers=1, position_embedding_type="rotary", sliding_window=5, tie_word_embeddings=False),
    ),
    "encoder": (
        "VanillaEncoderForPreTraining",
        dict(num_hidden_layers=2, type_vocab_size=2, pooler_act="tanh", head_dim=6, value_head_dim=10),
    ),
}
GENERATORS = ["seq2seq", "causal", "causal-window"]
FILES = {"seq2seq": ("onnx/encoder_model.onnx", "onnx/decoder_model_merged.onnx")}
generators = pytest.mark.parametrize("name", GENERATORS)


def build(name):
    architecture, fields = MODELS[name]
    transformers.set_seed(0)
    model_class = getattr(vanilla_transformer, architecture)
    model = model_class(model_class.config_class(**{**SIZES, **fields})).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    if model.can_generate():
        model.lm_head.bias.data[EOS] += 1.5  # so that rows end at different times
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A name of `MODELS` and a dtype -> the model, and the directory of its export."""
    root = tmp_path_factory.mktemp("cpu")

    @functools.cache
    def make(name, dtype="fp32"):
        model, directory = build(name), root / f"{name}-{dtype}"
        with FileLock(f"{directory}.lock"):
            if not directory.exists():
                model.save_pretrained(root / name)
                export(root / name, directory, cases=3, target="cpu", dtype=dtype)
        return model, directory

    return make


def graph(directory, name, role=-1):
    return onnx.load(directory / FILES.get(name, ("onnx/model.onnx",))[role]).graph


def ops(found):
    return collections.Counter(node.op_type for node in found.node)


# ------------------------------------------------------------------------------------------------------------- the graphs


@generators
def test_each_layer_has_one_operator_for_each_attention_and_one_product_for_queries_keys_and_values(exported, name):
    model, directory = exported(name)
    layers = len(model.get_decoder().layers) if name == "seq2seq" else model.config.num_hidden_layers
    found = ops(graph(directory, name))
    assert found["GroupQueryAttention"] == layers
    assert found["MultiHeadAttention"] == (layers if name == "seq2seq" else 0)
    assert found["Softmax"] == found["If"] == found["Loop"] == 0
    optimized = Runtime(directory).artifact.manifest["optimized"]["decoder"]
    # Rotary positions stand between the projections and the attention, so those stay apart.
    assert optimized["pack_projections"] == (0 if name == "causal-window" else layers)
    per_layer = {"seq2seq": 6, "causal": 4, "causal-window": 6}[name]
    assert found["MatMul"] == per_layer * layers + 1


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@generators
def test_every_matrix_product_is_quantized(exported, name, dtype):
    _, directory = exported(name, dtype)
    found, exact = ops(graph(directory, name)), ops(graph(exported(name)[1], name))
    assert found["MatMul"] == 0 and found["MatMulNBits"] == exact["MatMul"]
    manifest = Runtime(directory).artifact.manifest
    assert manifest["optimized"]["decoder"]["quantize_weights"] == exact["MatMul"]
    assert (manifest["target"], manifest["dtype"]) == ("cpu", dtype)
    bits = {attribute.i for node in graph(directory, name).node for attribute in node.attribute if attribute.name == "bits"}
    assert bits == {8 if dtype == "int8" else 4}


def test_the_encoder_of_a_pair_returns_the_keys_and_values_of_the_decoder(exported):
    model, directory = exported("seq2seq")
    ids, mask = np.array([[5, 6, 7, 8], [9, 10, 0, 0]]), np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
    found = Runtime(directory).outputs(ids, mask)
    with torch.no_grad():
        hidden = model.get_encoder()(torch.from_numpy(ids), torch.from_numpy(mask)).last_hidden_state
        for i, layer in enumerate(model.get_decoder().layers):
            key = layer.cross_attn.k_proj(hidden).view(2, 4, 4, 8).transpose(1, 2).numpy()
            np.testing.assert_allclose(found[f"present.{i}.encoder.key"][0], key[0], atol=1e-5)
            np.testing.assert_allclose(found[f"present.{i}.encoder.key"][1, :, :2], key[1, :, :2], atol=1e-5)
    with pytest.raises(ValueError, match="returns keys and values for its decoder only: use --target portable"):
        Runtime(directory).encode(ids, mask)


# ------------------------------------------------------------------------------------------------------------ the numbers


@pytest.mark.parametrize("name", MODELS)
def test_40_cases_agree_with_torch(exported, name):
    model, directory = exported(name)
    report = verify(directory, model, cases=40, seed=1)
    assert report.failures == [] and report.values > 10_000
    assert report.agreeing == report.tokens


@pytest.mark.parametrize("dtype, agreement", [("int8", 0.95), ("int4", 0.6)])
@pytest.mark.parametrize("name", ["seq2seq", "causal"])
def test_quantized_weights_choose_nearly_the_same_tokens(exported, name, dtype, agreement):
    model, directory = exported(name, dtype)
    report = verify(directory, model, cases=20, seed=1)
    assert report.failures == [] and report.tolerance is None
    assert report.max_error > 1e-4
    assert report.agreeing >= agreement * report.tokens


@pytest.mark.parametrize("dtype, cosine", [("int8", 0.9995), ("int4", 0.97)])
def test_quantized_encoders_point_in_nearly_the_same_direction(exported, dtype, cosine):
    model, directory = exported("encoder", dtype)
    ids = np.random.default_rng(0).integers(0, 48, (3, 9))
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).prediction_logits.numpy()
    found = Runtime(directory).encode(ids)
    norms = np.linalg.norm(found, axis=-1) * np.linalg.norm(expected, axis=-1)
    assert ((found * expected).sum(-1) / norms).min() > cosine


@pytest.mark.parametrize("bits, block", [(8, 128), (4, 32)])
def test_a_quantized_product_is_that_of_the_rounded_weights(bits, block):
    """By the definition: one scale per block of a column, the largest weight at the end of the range."""
    from onnx import TensorProto, helper, numpy_helper
    from onnxruntime import InferenceSession

    from vanilla_transformer_export.optimize import quantize_weights

    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 256)).astype(np.float32), rng.standard_normal((256, 40)).astype(np.float32)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, size]) for name, size in (("x", 256), ("y", 40))]
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    model = helper.make_model(
        helper.make_graph([node], "g", values[:1], values[1:], [numpy_helper.from_array(weight, "w")]),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    assert quantize_weights(model, bits, block) == 1
    [found] = InferenceSession(model.SerializeToString()).run(None, {"x": x})
    blocks = np.abs(weight.reshape(256 // block, block, 40)).astype(np.float64)
    scales = blocks.max(axis=1) / (2 ** (bits - 1) - 1)
    weights_rounded = np.abs(x).reshape(3, 256 // block, block).sum(axis=-1) @ scales / 2
    inputs_rounded = np.abs(x).max() / 127 / 2 * np.abs(weight).sum(axis=0) * 1.1  # they become 8 bits too
    errors = np.abs(found - x @ weight)
    assert np.all(errors <= weights_rounded + inputs_rounded) and errors.max() > 1e-4


# ------------------------------------------------------------------------------------------------------------- generation


def prompts(name, seed=0):
    """Rows of several lengths: right-padded sources, left-padded prompts."""
    rng, lengths = np.random.default_rng(seed), [7, 1, 4, 6]
    ids, mask = np.full((4, 7), PAD), np.zeros((4, 7), np.int64)
    for row, length in enumerate(lengths):
        real = slice(0, length) if name == "seq2seq" else slice(7 - length, 7)
        ids[row, real], mask[row, real] = rng.integers(4, 48, length), 1
    return ids, mask


@pytest.mark.parametrize("beams", [1, 2, 5])
@generators
def test_generated_tokens_are_those_of_transformers(exported, name, beams):
    model, directory = exported(name)
    runtime = Runtime(directory)
    for seed in range(3):
        ids, mask = prompts(name, seed)
        settings = dict(max_new_tokens=14, num_beams=beams)
        with torch.no_grad():
            given = dict(attention_mask=torch.from_numpy(mask), do_sample=False)
            expected = model.generate(torch.from_numpy(ids), **given, **settings).numpy()
        found = runtime.generate(ids, mask, **settings)
        start = 1 if name == "seq2seq" else 7
        for got, wanted in zip(found[:, start:].tolist(), expected[:, start:].tolist(), strict=True):
            end = wanted.index(EOS) + 1 if EOS in wanted else len(wanted)
            assert got[:end] == wanted[:end]


@pytest.mark.parametrize("name", ["causal", "causal-window"])
def test_padding_may_stand_on_either_side_and_changes_nothing(exported, name):
    runtime = Runtime(exported(name)[1])
    ids, mask = prompts(name)
    rows = [row[real == 1] for row, real in zip(ids, mask)]
    right = np.array([[*row, *[PAD] * (7 - len(row))] for row in rows])
    found = [runtime.generate(given, max_new_tokens=6)[:, 7:].tolist() for given in (ids, right)]
    assert found[0] == found[1]
    for row, got in zip(rows, found[0]):
        alone = runtime.generate(row[None], max_new_tokens=6)[0, len(row) :].tolist()
        assert got[: len(alone)] == alone


def test_caches_are_written_in_place_and_the_source_is_never_copied_for_beams(exported):
    runtime = Runtime(exported("seq2seq")[1])
    source = prompts("seq2seq")
    decoding, *start = runtime.decoding(np.full((4, 1), 1), None, source, 8)
    assert isinstance(decoding, FixedCaches)
    decoding.start(*start)
    decoding.repeat(3)
    pointers = {name: cache.data_ptr() for name, cache in decoding.caches.items()}
    before = {name: cache.numpy().copy() for name, cache in decoding.caches.items()}
    decoding.next(np.full(12, 5), None)
    assert {name: cache.data_ptr() for name, cache in decoding.caches.items()} == pointers
    for name, cache in decoding.caches.items():
        changed = np.any(cache.numpy() != before[name], axis=(0, 1, 3))
        assert changed.tolist() == [False, True] + [False] * 7, "only the place of the new token"
    assert {states.shape()[0] for name, states in decoding.source.items()} == {4}


def test_only_rows_that_change_move(exported):
    runtime = Runtime(exported("causal")[1])
    decoding, *start = runtime.decoding(*prompts("causal"), None, 4)
    decoding.start(*start)
    before = {name: cache.numpy().copy() for name, cache in decoding.caches.items()}
    lengths = decoding.lengths.copy()
    decoding.reorder(np.array([0, 0, 2, 1]))
    for name, cache in decoding.caches.items():
        assert np.array_equal(cache.numpy()[:, :, :7], before[name][[0, 0, 2, 1]][:, :, :7])
    assert decoding.lengths.tolist() == lengths[[0, 0, 2, 1]].tolist()


# --------------------------------------------------------------------------------------------------------------- refusals

WRONG = [
    (
        "VanillaDecoderForCausalLM",
        dict(num_hidden_layers=1, position_embedding_type="relative"),
        "position_embedding_type='relative'",
    ),
    ("VanillaDecoderForCausalLM", dict(num_hidden_layers=1, value_head_dim=16), "value_head_dim=16"),
    ("VanillaDecoderForCausalLM", dict(num_hidden_layers=1, head_dim=6), "head_dim=6"),
    ("VanillaEncoderForMaskedLM", dict(num_hidden_layers=1, sliding_window=3), "sliding_window=3"),
    (
        "VanillaSeq2SeqForConditionalGeneration",
        dict(encoder_layers=1, decoder_layers=1, sliding_window=3),
        "sliding_window=3",
    ),
]


@pytest.mark.parametrize("architecture, fields, said", WRONG, ids=[said for *_, said in WRONG])
def test_what_the_operators_cannot_hold_is_refused_by_name(architecture, fields, said, tmp_path):
    model_class = getattr(vanilla_transformer, architecture)
    model_class(model_class.config_class(**SIZES, **fields)).save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=f"{said} does not fit the cpu target, expected .*: use --target portable"):
        export(tmp_path / "checkpoint", tmp_path / "out", target="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target, dtype", [("portable", "int8"), ("cpu", "fp16"), ("gpu", "fp32")])
def test_a_target_or_dtype_that_does_not_exist_is_refused(target, dtype, tmp_path):
    expected = f"no target '{target}' with dtype '{dtype}', expected one of: portable with fp32; cpu with fp32, int8, int4"
    with pytest.raises(ValueError, match=expected):
        export(tmp_path, tmp_path / "out", target=target, dtype=dtype)
