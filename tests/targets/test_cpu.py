"""Tests of the cpu target: onnxruntime's fused operators, caches in place and quantized weights."""

import numpy as np
import onnx
import pytest
import torch
from messages import raises
from targets import FILES, GENERATORS, SIZES, exports_for, generators, graph, ops, prompts
from written import operators, run, write

import vanilla_transformer
from vanilla_transformer_export import Options, Runtime, export, verify
from vanilla_transformer_export.graphs import quantization
from vanilla_transformer_export.graphs.layers import linear
from vanilla_transformer_export.graphs.quantization import int4_blocks, int8_columns, uint8_blocks
from vanilla_transformer_export.inference.rows import GenerationRequest
from vanilla_transformer_export.targets.cpu import rows
from vanilla_transformer_export.targets.cpu.rows import CpuBeamRows

exported = exports_for("cpu")


# --------------------------------------------------------------------------------------- the graphs


@generators
def test_each_layer_has_one_operator_per_attention_and_one_qkv_matmul(exported, name):
    model, directory = exported(name)
    layers = len(model.get_decoder().layers)
    result = ops(graph(directory, name))
    is_pair = name == "seq2seq"
    assert result["DecoderMaskedMultiHeadAttention" if is_pair else "GroupQueryAttention"] == layers
    assert result["MultiHeadAttention"] == (layers if name == "seq2seq" else 0)
    assert result["Softmax"] == result["If"] == result["Loop"] == 0
    # The logits are computed for the last token only, not gathered from the logits of all tokens.
    assert graph(directory, name).node[-1].op_type == "Add"
    # Rotary embeddings need separate projections of queries, keys and values. Otherwise one matmul
    # computes all three.
    per_layer = {"seq2seq": 6, "causal": 4, "causal-window": 6, "causal-grouped": 6}[name]
    assert result["MatMul"] == per_layer * layers + 1
    # One normalization per sub-layer, and a final one in pre-norm models. Queries, keys and outputs
    # of sub-layers may have others.
    per_layer = {"seq2seq": 3, "causal-grouped": 6}.get(name, 2)
    assert result["LayerNormalization"] == per_layer * layers + model.config.norm_first


def test_relative_bias_is_computed_once_and_rms_norm_is_one_operator(exported):
    model, directory = exported("seq2seq-t5")
    layers = len(model.get_decoder().layers)
    result = graph(directory, "seq2seq-t5")
    counts = ops(result)
    biases = {
        node.input[4] for node in result.node if node.op_type == "DecoderMaskedMultiHeadAttention"
    }
    assert (
        len(biases) == 1
        and counts["DecoderMaskedMultiHeadAttention"] == layers
        and counts["Log"] == 0
    )
    assert (
        counts["SimplifiedLayerNormalization"] == 3 * layers + 1
        and counts["Reciprocal"] == counts["ReduceMean"] == 0
    )
    assert counts["MatMul"] == 7 * layers + 1  # the gated feed-forward network has three
    result = graph(directory, "seq2seq-t5", 0)
    # with a bias
    assert {len(node.input) for node in result.node if node.op_type == "MultiHeadAttention"} == {6}
    assert ops(result)["SimplifiedLayerNormalization"] == 2 + 1


@pytest.mark.slow
def test_int8_matmuls_of_one_input_quantize_it_once(exported):
    """The gate and the value of a gated feed-forward network read the same input."""
    model, directory = exported("seq2seq-t5", "int8")
    layers = len(model.get_decoder().layers)
    counts = ops(graph(directory, "seq2seq-t5"))
    assert counts["MatMulIntegerToFloat"] == 7 * layers + 1 and counts["MatMul"] == 0
    assert counts["QuantizeLinear"] == 6 * layers + 1
    report = verify(directory, model, cases=20, seed=1)
    assert report.failures == [] and report.agreeing >= 0.9 * report.choices


@pytest.mark.parametrize("dtype", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["seq2seq", *(pytest.param(name, marks=pytest.mark.slow) for name in GENERATORS[1:])]
)
def test_every_matmul_is_quantized(exported, name, dtype):
    _, directory = exported(name, dtype)
    result, exact = ops(graph(directory, name)), ops(graph(exported(name)[1], name))
    operator = {"int8": "MatMulIntegerToFloat", "int4": "MatMulNBits"}[dtype]
    assert result["MatMul"] == 0 and result[operator] == exact["MatMul"]
    manifest = Runtime(directory).info.manifest
    assert result["GatherBlockQuantized"] == 1
    assert (manifest["target"], manifest["default_dtype"]) == ("cpu", dtype)


def test_weights_are_stored_once(exported):
    """Encoder and decoder share a data file with the embedding, its transpose and all matrices."""
    model, directory = exported("seq2seq", "int8")
    [data] = (path for path in directory.rglob("*") if path.suffix == ".onnx_data")
    tensors = {}
    for role in (0, 1):
        for weight in graph_without_data(directory, "seq2seq", role).initializer:
            if weight.external_data:
                place = {entry.key: entry.value for entry in weight.external_data}
                offset, length = int(place["offset"]), int(place["length"])
                assert place["location"] == data.name and offset % 64 == 0
                tensors[offset] = length
    ends = [offset + length for offset, length in sorted(tensors.items())]
    assert len(tensors) >= 4 and data.stat().st_size == ends[-1]
    assert all(0 <= after - end < 64 for end, after in zip(ends, sorted(tensors)[1:]))


def graph_without_data(directory, name, role):
    return onnx.load(directory / FILES[name][role], load_external_data=False).graph


def test_seq2seq_encoder_returns_cross_attention_keys_and_values(exported):
    model, directory = exported("seq2seq")
    ids, mask = np.array([[5, 6, 7, 8], [9, 10, 0, 0]]), np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
    result = Runtime(directory).outputs(ids, mask)
    with torch.no_grad():
        hidden = model.get_encoder()(
            torch.from_numpy(ids), torch.from_numpy(mask)
        ).last_hidden_state
        for i, layer in enumerate(model.get_decoder().layers):
            attention = layer.cross_attn
            for name, project in (("key", attention.k_proj), ("value", attention.v_proj)):
                expected = project(hidden).view(2, 4, 4, 8).transpose(1, 2).numpy()
                actual = result[f"present.{i}.encoder.{name}"]
                np.testing.assert_allclose(actual[0], expected[0], atol=1e-5)
                np.testing.assert_allclose(actual[1, :, :2], expected[1, :, :2], atol=1e-5)
    with raises(ValueError, seen="--target"):
        Runtime(directory).encode(ids, mask)


# ------------------------------------------------------------------------------- numerical accuracy


@pytest.mark.parametrize("dtype, agreement", [("int8", 0.95), ("int4", 0.6)])
@pytest.mark.parametrize("name", ["seq2seq", "causal"])
def test_quantized_models_choose_mostly_same_tokens(exported, name, dtype, agreement):
    model, directory = exported(name, dtype)
    report = verify(directory, model, cases=20, seed=1)
    assert report.failures == [] and report.max_error > 1e-4
    assert report.agreeing >= agreement * report.choices


@pytest.mark.parametrize("dtype, cosine", [("int8", 0.998), ("int4", 0.96)])
def test_quantized_encoder_outputs_have_high_cosine_similarity(exported, dtype, cosine):
    model, directory = exported("encoder", dtype)
    ids = np.random.default_rng(0).integers(0, 48, (3, 9))
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).prediction_logits.numpy()
    actual = Runtime(directory).encode(ids)
    norms = np.linalg.norm(actual, axis=-1) * np.linalg.norm(expected, axis=-1)
    assert ((actual * expected).sum(-1) / norms).min() > cosine


def matmul(x, matrix, dtype, before=None):
    """Return x W by onnxruntime in `dtype`. The operator `before`, if any, precedes it."""

    def part(g, value):
        return [linear(g, g.op(before, value) if before else value, "w")]

    model = write(part, {"w.weight": matrix.T.copy()}, {"x": x}, dtype=dtype)
    assert ("MatMulIntegerToFloat" if dtype == "int8" else "MatMulNBits") in operators(model)
    return run(model, {"x": x})[0]


@pytest.mark.parametrize("before, levels", [(None, 254), ("Relu", 255)])
def test_int8_matmul_error_is_within_rounding(before, levels):
    """The bound is half a step of the weights per column, and half a step of the inputs per row."""
    rng = np.random.default_rng(0)
    x, matrix = (
        rng.standard_normal((3, 256)).astype(np.float32),
        rng.standard_normal((256, 40)).astype(np.float32),
    )
    x *= np.array([[1e-3], [1], [50]], np.float32)
    result = matmul(x, matrix, "int8", before)
    exact = x.astype(np.float64) if before is None else np.maximum(x, 0).astype(np.float64)
    pairs = np.abs(matrix[::2] + matrix[1::2]).max(axis=0)
    steps = np.maximum(np.abs(matrix).max(axis=0), pairs) / 127
    ranges = np.abs(exact).max(axis=1, keepdims=True) * (2 if before is None else 1)
    allowed = np.abs(exact).sum(axis=1, keepdims=True) * steps / 2
    allowed += ranges / levels * 0.501 * (np.abs(matrix).sum(axis=0) + 256 * steps / 2)
    errors = np.abs(result - exact @ matrix)
    assert np.all(errors <= allowed) and np.all(errors.max(axis=1, keepdims=True) > 1e-5 * ranges)
    assert np.all(errors.std(axis=1) / (exact @ matrix).std(axis=1) < 0.02)


def test_int8_weights_cannot_overflow_int16():
    """Without VNNI, two neighbouring products with activations up to 255 are added in int16."""
    rng = np.random.default_rng(0)
    for matrix in (
        rng.standard_normal((65, 40)),
        rng.standard_t(2, (64, 40)),
        np.ones((8, 4)),
        np.zeros((8, 4)),
    ):
        integers, scales = int8_columns(matrix.astype(np.float32))
        pairs = integers[: len(integers) // 2 * 2].astype(int)
        assert 255 * np.abs(pairs[::2] + pairs[1::2]).max() <= 32767
        assert np.abs(integers.astype(int)).max() <= 127
        assert np.all(np.abs(integers * scales - matrix) <= scales * 0.5001)


@pytest.mark.parametrize("before", [None, "Relu"])
def test_int8_row_does_not_depend_on_other_rows(before):
    """The other rows are 1000 times as large, near the limits of float32, zero, inf or NaN."""
    rng = np.random.default_rng(0)
    x, matrix = (
        rng.standard_normal((9, 64)).astype(np.float32),
        rng.standard_normal((64, 40)).astype(np.float32),
    )
    alone = np.stack([matmul(row[None], matrix, "int8", before)[0] for row in x])
    x[1:7] *= np.array(
        [[1e3], [3e38 / np.abs(x[2]).max()], [1e-38], [1e-42], [0], [np.inf]], np.float32
    )
    x[7] = np.nan
    together = matmul(x, matrix, "int8", before)
    np.testing.assert_array_equal(together[[0, 8]], alone[[0, 8]])
    np.testing.assert_allclose(together[1], alone[1] * 1000, rtol=1e-5, atol=1e-2)
    assert np.all(np.isfinite(together[3:5])) and np.all(together[5] == 0)
    assert np.all(np.isnan(together[7]))


def test_int4_block_errors_are_mostly_within_half_a_step():
    """A step is an eighth of the block's largest weight, which itself is exact.

    A weight of the other sign may be off by a whole step.
    """
    matrix = np.random.default_rng(0).standard_normal((70, 40)).astype(np.float32)
    packed, scales = int4_blocks(matrix)
    assert packed.shape == (40, 3, 16) and scales.shape == (40, 3)
    integers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(40, 3, 32).astype(int) - 8
    result = (integers * scales[..., None]).reshape(40, 96).T
    assert np.all(result[70:] == 0)
    blocks = (
        np.abs(np.pad(matrix, ((0, 26), (0, 0))))
        .reshape(3, 32, 40)
        .max(axis=1)
        .repeat(32, axis=0)[:70]
    )
    errors = np.abs(result[:70] - matrix)
    assert np.all(errors <= blocks / 8 * 1.0001) and np.mean(errors <= blocks / 16 * 1.0001) > 0.95
    assert np.all(errors[np.abs(matrix) == blocks] < 1e-6)


def test_int4_matmul_matches_rounded_weights():
    rng = np.random.default_rng(0)
    x, matrix = (
        rng.standard_normal((3, 256)).astype(np.float32),
        rng.standard_normal((256, 40)).astype(np.float32),
    )
    packed, scales = int4_blocks(matrix)
    integers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(40, 8, 32).astype(int) - 8
    rounded = (integers * scales[..., None]).reshape(40, 256).T
    errors = np.abs(matmul(x, matrix, "int4") - x @ rounded)
    # the inputs are quantized to 8 bits
    inputs_rounded = np.abs(x).max() / 127 / 2 * np.abs(rounded).sum(axis=0) * 1.1
    assert np.all(errors <= inputs_rounded) and errors.max() > 1e-4


@pytest.mark.parametrize("width", [20, 128, 300])
def test_uint8_embedding_error_is_within_half_a_step(width):
    table = np.random.default_rng(0).standard_normal((9, width)).astype(np.float32)
    integers, scales = uint8_blocks(table)
    assert integers.shape == table.shape and scales.shape == (9, -(-width // 128))
    steps = scales.repeat(128, axis=1)[:, :width]
    assert np.all(np.abs((integers.astype(int) - 128) * steps - table) <= steps * 0.5001)
    assert np.all(np.abs(table).max(axis=1) / 127 >= scales.max(axis=1) * 0.9999)


def test_portable_int8_embedding_error_is_within_half_a_step():
    table = np.random.default_rng(0).standard_normal((9, 20)).astype(np.float32)
    table[3] = 0
    ids = {"ids": np.arange(9)[::-1].copy()}

    def part(g, value):
        return [g.target.precision.look_up(g, "table", value)]

    model = write(part, {"table": table}, ids, "portable", "int8")
    [result] = run(model, ids)
    steps = np.abs(table).max(axis=1, keepdims=True) / 127
    assert (
        np.all(np.abs(result[::-1] - table) <= steps * 0.5001)
        and np.abs(result[::-1] - table).max() > 0
    )
    assert model.ByteSize() < table.nbytes + 700


def test_quantization_in_slices_matches_whole_matrix(monkeypatch):
    matrix = np.random.default_rng(0).standard_normal((40, 33)).astype(np.float32)
    for quantize, axis, joined in ((int8_columns, 1, 1), (int4_blocks, 1, 0), (uint8_blocks, 0, 0)):
        expected = quantize(matrix)
        monkeypatch.setattr(quantization, "SLICE", 100)
        for actual, reference in zip(
            quantization.in_slices(quantize, matrix, axis, joined), expected, strict=True
        ):
            np.testing.assert_array_equal(actual, reference)


# --------------------------------------------------------------------------------------- generation


def start_decoder(runtime, ids, mask, source, new_tokens):
    """Return a decoder after the prefill of its prompts."""
    decoder = runtime.model.factory.open(
        GenerationRequest(Options(max_new_tokens=new_tokens), ids, mask, source)
    )
    decoder.prefill(ids, mask)
    return decoder


def pointers(decoder):
    return [cache.ctypes.data for cache in decoder.caches]


def test_caches_are_written_in_place_and_source_is_not_copied_for_beams(exported):
    runtime = Runtime(exported("seq2seq")[1])
    source = prompts("seq2seq")
    decoder = start_decoder(runtime, np.full((4, 1), 1), np.ones((4, 1), np.int64), source, 8)
    assert isinstance(decoder, CpuBeamRows)
    decoder.select(np.arange(4).repeat(3))
    places = pointers(decoder)
    before = np.array(decoder.caches)
    decoder.select(np.arange(12)[::-1].reshape(4, 3)[::-1].ravel())
    decoder.step(np.full((12, 1), 5))
    assert pointers(decoder) == places
    for cache, earlier in zip(decoder.caches, before, strict=True):
        changed = np.any(cache != earlier, axis=(0, 1, 3))
        assert changed.tolist() == [False, True] + [False] * 7, (
            "only the place of the new token, though all beams moved"
        )
    assert {len(states) for states in decoder.source.values()} == {4}


def test_beams_read_cache_of_their_parent_beam(exported):
    """The reference feeds the same tokens to rows that stay in place."""
    runtime = Runtime(exported("seq2seq")[1])
    source = prompts("seq2seq")
    rng, beams, steps = np.random.default_rng(0), 3, 7

    def beamed():
        decoder = start_decoder(
            runtime, np.full((4, 1), 1), np.ones((4, 1), np.int64), source, steps + 1
        )
        decoder.select(np.arange(4).repeat(beams))
        return decoder

    moving, histories = beamed(), np.empty((12, 0), np.int64)
    for _ in range(steps):
        parents = (rng.integers(0, beams, (4, beams)) + beams * np.arange(4)[:, None]).ravel()
        histories = np.concatenate([histories[parents], rng.integers(4, 48, (12, 1))], axis=1)
        moving.select(parents)
        actual = moving.step(histories[:, -1:]).copy()
        staying = beamed()
        for tokens in histories.T:
            expected = staying.step(tokens[:, None])
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_removed_inputs_do_not_change_others(exported):
    runtime = Runtime(exported("seq2seq")[1])
    source, kept = prompts("seq2seq"), np.array([0, 3, 2])

    def stepped():
        decoder = start_decoder(runtime, np.full((4, 1), 1), np.ones((4, 1), np.int64), source, 8)
        decoder.select(np.arange(4).repeat(3))
        parents = np.array([1, 1, 0, 3, 5, 4, 8, 7, 6, 9, 10, 10])
        decoder.select(parents)
        return decoder, decoder.step(np.arange(5, 17)[:, None]).copy()

    decoder, before = stepped()
    rows = (kept[:, None] * 3 + np.arange(3)).ravel()
    decoder.select(rows)
    actual = decoder.step(before[rows, -1].argmax(axis=1)[:, None])
    other, _ = stepped()
    expected = other.step(before[:, -1].argmax(axis=1)[:, None])[rows]
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    np.testing.assert_array_equal(source[1], prompts("seq2seq")[1])  # the caller's mask stays


def test_select_moves_rows_in_place(exported):
    runtime = Runtime(exported("causal")[1])
    decoder = start_decoder(runtime, *prompts("causal"), None, 4)
    places = pointers(decoder)
    before = np.array(decoder.caches)
    lengths = decoder.lengths.copy()
    decoder.select(np.array([0, 0, 2, 1]))
    for slot, parent in zip(decoder.places, [0, 0, 2, 1], strict=True):
        used = lengths[parent]
        assert decoder.lengths[slot] == used > 0
        np.testing.assert_array_equal(
            decoder.caches[:, slot, :, :used], before[:, parent, :, :used]
        )
    decoder.step(np.full((4, 1), 5))
    assert pointers(decoder) == places


# --------------------------------------------------------------------------------- rejected exports

WRONG = [
    (
        "VanillaDecoderForCausalLM",
        dict(num_hidden_layers=1, value_head_dim=16),
        "value_head_dim=16",
    ),
    ("VanillaDecoderForCausalLM", dict(num_hidden_layers=1, head_dim=6), "head_dim=6"),
    (
        "VanillaSeq2SeqForConditionalGeneration",
        dict(encoder_layers=1, decoder_layers=1, value_head_dim=16),
        "value_head_dim=16",
    ),
    (
        "VanillaSeq2SeqForConditionalGeneration",
        dict(encoder_layers=1, decoder_layers=1, sliding_window=3),
        "sliding_window=3",
    ),
]


@pytest.mark.parametrize("architecture, fields, seen", WRONG, ids=[seen for *_, seen in WRONG])
def test_unsupported_config_raises_before_files_are_written(architecture, fields, seen, tmp_path):
    model_class = getattr(vanilla_transformer, architecture)
    model_class(model_class.config_class(**SIZES, **fields)).save_pretrained(
        tmp_path / "checkpoint"
    )
    with raises(ValueError, seen=(seen, "cpu"), expected="--target portable"):
        export(tmp_path / "checkpoint", tmp_path / "out", target="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target, dtype", [("portable", "int4"), ("cpu", "fp16"), ("gpu", "fp32")])
def test_unknown_target_or_dtype_raises_value_error(target, dtype, tmp_path):
    with raises(ValueError, seen=target, expected=("portable", "fp32", "int8", "cpu")):
        export(tmp_path, tmp_path / "out", target=target, dtype=dtype)


def test_memory_that_a_thread_keeps_is_bounded(exported_for, monkeypatch):
    runtime = Runtime(exported_for("seq2seq", "cpu")[1])
    memory = runtime.model.factory.memory
    for limit in (0, 5_000, 1 << 28):
        monkeypatch.setattr(rows, "MAX_KEPT_BYTES", limit)
        memory.free.clear()
        runtime.generate(*prompts("seq2seq"), max_new_tokens=4, num_beams=2)
        kept = sum(map(len, memory.free))
        assert kept <= limit and (limit <= 5_000 or kept > 5_000)
