"""Exported graphs keep their contract, and a failed export leaves nothing behind."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from checkpoints import CHECKPOINTS, HEADS, KEY_WIDTH, VALUE_WIDTH, VOCABULARY, WIDTH
from onnx import numpy_helper
from safetensors.torch import load_file
from transformers import DynamicCache

from vanilla_transformer_export.exporting import export as exporting

B, S, T, P = "batch_size", "source_length", "target_length", "past_length"
PS, TOTAL = "past_source_length", "past_length + target_length"
INT, FLOAT = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
TOKENS = {"input_ids": (INT, [B, S]), "attention_mask": (INT, [B, S])}
HIDDEN = {"last_hidden_state": (FLOAT, [B, S, WIDTH])}


def key(length):
    return FLOAT, [B, HEADS, length, KEY_WIDTH]


def value(length):
    return FLOAT, [B, HEADS, length, VALUE_WIDTH]


def causal(layers):
    inputs = {
        "input_ids": (INT, [B, T]),
        "attention_mask": (INT, [B, TOTAL]),
        "position_ids": (INT, [B, T]),
    }
    outputs = {"logits": (FLOAT, [B, T, VOCABULARY])}
    for n in range(layers):
        inputs |= {f"past_key_values.{n}.key": key(P), f"past_key_values.{n}.value": value(P)}
        outputs |= {f"present.{n}.key": key(TOTAL), f"present.{n}.value": value(TOTAL)}
    return inputs, outputs


def seq2seq(layers):
    inputs = {
        "input_ids": (INT, [B, T]),
        "encoder_attention_mask": (INT, [B, S]),
        "encoder_hidden_states": (FLOAT, [B, S, WIDTH]),
    }
    outputs = {"logits": (FLOAT, [B, T, VOCABULARY])}
    for n in range(layers):
        inputs |= {
            f"past_key_values.{n}.decoder.key": key(P),
            f"past_key_values.{n}.decoder.value": value(P),
            f"past_key_values.{n}.encoder.key": key(PS),
            f"past_key_values.{n}.encoder.value": value(PS),
        }
        outputs |= {
            f"present.{n}.decoder.key": key(TOTAL),
            f"present.{n}.decoder.value": value(TOTAL),
            f"present.{n}.encoder.key": key(S),
            f"present.{n}.encoder.value": value(S),
        }
    return inputs, outputs


# checkpoint: {file: (inputs, outputs)}
CONTRACT = {
    "encoder": {"onnx/model.onnx": (TOKENS, HIDDEN)},
    "masked-lm": {"onnx/model.onnx": (TOKENS, {"logits": (FLOAT, [B, S, VOCABULARY])})},
    "classification": {"onnx/model.onnx": (TOKENS, {"logits": (FLOAT, [B, 3])})},
    "pretraining": {
        "onnx/model.onnx": (
            TOKENS | {"token_type_ids": (INT, [B, S])},
            {
                "prediction_logits": (FLOAT, [B, S, VOCABULARY]),
                "seq_relationship_logits": (FLOAT, [B, 2]),
            },
        )
    },
    "answers": {
        "onnx/model.onnx": (
            TOKENS,
            {"start_logits": (FLOAT, [B, S]), "end_logits": (FLOAT, [B, S])},
        )
    },
    "causal": {"onnx/model.onnx": causal(2)},
    "causal-relative": {"onnx/model.onnx": causal(1)},
    "causal-learned": {"onnx/model.onnx": causal(1)},
    "seq2seq": {
        "onnx/encoder_model.onnx": (TOKENS, HIDDEN),
        "onnx/decoder_model_merged.onnx": seq2seq(2),
    },
    "seq2seq-untied": {
        "onnx/encoder_model.onnx": (TOKENS, HIDDEN),
        "onnx/decoder_model_merged.onnx": seq2seq(1),
    },
    "seq2seq-rotary": {
        "onnx/encoder_model.onnx": (TOKENS, HIDDEN),
        "onnx/decoder_model_merged.onnx": seq2seq(1),
    },
}
every_graph = pytest.mark.parametrize(
    "name, file", [(name, file) for name, files in CONTRACT.items() for file in files]
)


def tensors(values):
    """Return {name: (type, axes)} of `values`, in order."""
    types = {value.name: value.type.tensor_type for value in values}
    return {
        name: (kind.elem_type, [dim.dim_param or dim.dim_value for dim in kind.shape.dim])
        for name, kind in types.items()
    }


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_export_has_exactly_the_graphs_of_its_variant(exported, name):
    result = {
        path.relative_to(exported(name).directory).as_posix()
        for path in exported(name).directory.rglob("*.onnx*")
    }
    assert result == set(CONTRACT[name])


@every_graph
def test_inputs_and_outputs_match_contract(exported, name, file):
    graph = onnx.load(exported(name).directory / file).graph
    inputs, outputs = CONTRACT[name][file]
    assert list(tensors(graph.input).items()) == list(inputs.items())
    assert list(tensors(graph.output).items()) == list(outputs.items())


@every_graph
def test_graph_is_plain_onnx_without_branches(exported, name, file):
    model = onnx.load(exported(name).directory / file)
    assert [(opset.domain, opset.version <= 21) for opset in model.opset_import] == [("", True)]
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    # a window is a bias of the scores in short texts and cuts blocks of long ones
    branches = {"If"} if name == "answers" else set()
    assert {"If", "Loop", "Scan"} & {node.op_type for node in model.graph.node} == branches
    assert not model.functions


@every_graph
def test_graph_file_has_all_weights_and_no_local_paths(exported, name, file):
    path = exported(name).directory / file
    data = path.read_bytes()
    for trace in (
        b".py",
        b"site-packages",
        exporting.__file__.rpartition("/")[0].encode(),
        b"/home",
        b"Traceback",
        b"pkg.torch",
    ):
        assert trace not in data
    assert not any(
        weight.external_data
        for weight in onnx.load(path, load_external_data=False).graph.initializer
    )


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_each_weight_is_stored_once(exported, name):
    checkpoint = load_file(exported(name).checkpoint / "model.safetensors")
    expected = sum(weight.numel() * 4 for weight in checkpoint.values())
    weights = [
        w
        for file in CONTRACT[name]
        for w in onnx.load(exported(name).directory / file).graph.initializer
    ]
    actual = sum(numpy_helper.to_array(weight).nbytes for weight in weights)
    if name == "seq2seq":  # the encoder's file and the decoder's each hold the tied embedding
        expected += VOCABULARY * WIDTH * 4
    if name == "causal-relative":  # biases of 257 distances instead of 32 buckets
        expected += (257 - 32) * HEADS * 4
    if name == "answers":  # the window of a block of 64 queries, a boolean for each key
        expected += 64 * 3 * 64
    # constants of the graph, but no additional matrix
    assert 0 <= actual - expected < WIDTH * KEY_WIDTH * 4


@pytest.mark.parametrize(
    "name, is_tied", [("causal", True), ("causal-learned", False), ("masked-lm", True)]
)
def test_only_tied_head_shares_embedding_matrix(exported, name, is_tied):
    graph = onnx.load(exported(name).directory / "onnx/model.onnx").graph
    shapes = [tuple(weight.dims) for weight in graph.initializer]
    width = exported(name).model.config.embedding_size
    assert shapes.count((VOCABULARY, width)) + shapes.count((width, VOCABULARY)) == (
        1 if is_tied else 2
    )


# ---------------------------------------------------------------------------- graphs in onnxruntime


def session(exported, name, file="onnx/model.onnx"):
    return onnxruntime.InferenceSession(exported(name).directory / file)


def assert_close(computed, expected):
    np.testing.assert_allclose(computed, expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (2, 2), (5, 30)], ids=str)
@pytest.mark.parametrize("name", ["encoder", "masked-lm", "classification"])
@torch.no_grad()
def test_encoder_graph_supports_all_batch_sizes_and_lengths(exported, name, shape):
    ids = torch.randint(VOCABULARY, shape)
    mask = torch.ones_like(ids)
    mask[-1, shape[1] // 2 + 1 :] = 0
    actual = session(exported, name).run(
        None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    )[0]
    expected = exported(name).model(ids, mask)[0]
    real = mask.bool() if name != "classification" else torch.ones(shape[0], dtype=torch.bool)
    assert_close(actual[real.numpy()], expected[real])


@pytest.mark.parametrize(
    "batch, lengths", [(1, (1, 1, 1)), (1, (6, 1, 1)), (4, (1, 5, 1, 2)), (2, (3, 8))], ids=str
)
@pytest.mark.parametrize("name", ["causal", "causal-learned"])
@torch.no_grad()
def test_decoder_graph_matches_torch_at_first_and_later_steps(exported, name, batch, lengths):
    model, layers = exported(name).model, exported(name).model.config.num_hidden_layers
    decoder, cache, start = session(exported, name), DynamicCache(), 0
    past = {
        f"past_key_values.{n}.{part}": np.zeros((batch, HEADS, 0, width), np.float32)
        for n in range(layers)
        for part, width in (("key", KEY_WIDTH), ("value", VALUE_WIDTH))
    }
    for length in lengths:
        ids = torch.randint(VOCABULARY, (batch, length))
        positions = torch.arange(start, start + length).expand(batch, -1)
        start += length
        mask = torch.ones(batch, start, dtype=torch.long)
        feeds = {
            "input_ids": ids.numpy(),
            "attention_mask": mask.numpy(),
            "position_ids": positions.numpy(),
        }
        logits, *present = decoder.run(None, {**feeds, **past})
        past = dict(zip(past, present, strict=True))
        assert_close(logits, model(ids, mask, past_key_values=cache).logits)
        for n in range(layers):
            assert_close(past[f"past_key_values.{n}.key"], cache.layers[n].keys)
            assert_close(past[f"past_key_values.{n}.value"], cache.layers[n].values)


@pytest.mark.parametrize(
    "batch, source, lengths", [(1, 1, (1, 1, 1)), (2, 13, (4, 1)), (5, 3, (1, 2, 6))], ids=str
)
@pytest.mark.parametrize("name", ["seq2seq", "seq2seq-untied"])
@torch.no_grad()
def test_seq2seq_decoder_graph_matches_torch_at_first_and_later_steps(
    exported, name, batch, source, lengths
):
    model = exported(name).model
    encoder = session(exported, name, "onnx/encoder_model.onnx")
    decoder = session(exported, name, "onnx/decoder_model_merged.onnx")
    ids, mask = (
        torch.randint(VOCABULARY, (batch, source)),
        torch.ones(batch, source, dtype=torch.long),
    )
    mask[-1, source // 2 + 1 :] = 0
    hidden = encoder.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
    tokens, start = torch.randint(VOCABULARY, (batch, sum(lengths))), 0
    expected = model(ids, mask, tokens, use_cache=False).logits
    past = {
        i.name: np.zeros((batch, HEADS, 0, i.shape[3]), np.float32)
        for i in decoder.get_inputs()
        if i.name.startswith("past_key_values")
    }
    for length in lengths:
        piece = slice(start, start + length)
        start += length
        feeds = {"input_ids": tokens[:, piece].numpy(), "encoder_attention_mask": mask.numpy()}
        logits, *present = decoder.run(None, {**feeds, "encoder_hidden_states": hidden, **past})
        past = dict(zip(past, present, strict=True))
        assert_close(logits, expected[:, piece])
        assert {states.shape[2] for states in present[::4]} == {start}
        assert {states.shape[2] for states in present[2::4]} == {source}
