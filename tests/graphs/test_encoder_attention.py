"""Tests of the attention of encoders in graphs: rotary and disentangled positions, windows by
layer, long texts."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from checkpoints import perturbed
from graph_variants import ENCODER, SIZES
from transformers import LlamaConfig
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from vanilla_transformer_export import Runtime, export
from vanilla_transformer_export.graphs.disentangled import buckets_by_distance
from vanilla_transformer_export.graphs.positions import angle_steps

TARGETS = ("portable", "cpu")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function that exports a model of `ENCODER`, and returns it and the directory."""
    made = {}

    def make(name, target):
        if (name, target) not in made:
            model = perturbed(
                "VanillaEncoderModel", SIZES | {"num_hidden_layers": 2} | ENCODER[name]
            )
            folder = tmp_path_factory.mktemp(target)
            model.save_pretrained(folder / "model")
            export(folder / "model", folder / "out", target=target, cases=1)
            made[name, target] = model, folder / "out"
        return made[name, target]

    return make


def rows(lengths, side):
    """Return ids and mask of random rows of these lengths, padded on the `side`."""
    longest = max(lengths)
    ids = np.random.default_rng(0).integers(4, 48, (len(lengths), longest))
    mask = (np.arange(longest) < np.array(lengths)[:, None]).astype(np.int64)
    return ids, mask if side == "right" else mask[:, ::-1].copy()


# ------------------------------------------------------------------------------------------ rotary


@pytest.mark.parametrize("base", [1000.0, 10000.0, 20000.0, 160000.0, 500000.0])
def test_angles_at_position_8191_are_those_of_transformers(base):
    parameters = {"rope_type": "default", "rope_theta": base}
    config = LlamaConfig(hidden_size=768, num_attention_heads=12, rope_parameters=parameters)
    expected = LlamaRotaryEmbedding(config).inv_freq.numpy() * np.float32(8191)
    actual = angle_steps(64, base) * np.float32(8191)
    np.testing.assert_array_max_ulp(actual, expected, maxulp=1)
    assert (actual != expected).mean() < 0.05


def test_rotary_positions_are_one_operator_with_tables_for_each_type_of_layer(exported):
    _, directory = exported("modernbert", "cpu")
    names = [node.op_type for node in onnx.load(directory / "onnx/model.onnx").graph.node]
    assert names.count("RotaryEmbedding") == 2 * ENCODER["modernbert"]["num_hidden_layers"]
    assert names.count("Sin") == names.count("Cos") == 2


# ------------------------------------------------------------------------------------ disentangled


@pytest.mark.parametrize("count, largest", [(256, 512), (32, 128), (5, 9), (6, 9), (9, 513)])
def test_buckets_are_those_of_transformers(count, largest):
    buckets = buckets_by_distance(count, largest)
    reach = len(buckets) // 2
    distances = np.arange(-2 * reach, 2 * reach + 1)
    expected = make_log_bucket_position(torch.from_numpy(distances), count, largest)
    expected = (expected.long() + count).clamp(0, 2 * count - 1).numpy()
    assert (buckets[distances.clip(-reach, reach) + reach] == expected).all()


@pytest.mark.parametrize("target", TARGETS)
def test_products_are_computed_for_the_distances_of_a_text_only(exported, target, tmp_path):
    """A text of n tokens has 2n - 1 distances, here with a bucket each."""
    _, directory = exported("deberta", target)
    path = directory / "onnx/model.onnx"
    model = onnx.load(path)
    products = [node.input[0] for node in model.graph.node if node.op_type == "GatherElements"]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in products)
    onnx.save(model, path.with_name("products.onnx"))
    ids = np.full((2, 3), 5)
    session = onnxruntime.InferenceSession(path.with_name("products.onnx"))
    results = session.run(products, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    assert [result.shape for result in results] == 4 * [(2, 4, 3, 5)]


# -------------------------------------------------------------------------------------- long texts


@pytest.mark.parametrize(
    "name, target, side",
    [
        (name, target, ("left", "right")[(place + turn) % 2])
        for place, name in enumerate(["modernbert", "gte", "odd buckets"])
        for turn, target in enumerate(TARGETS)
    ],
)
def test_long_rows_in_one_batch_match_torch(exported, name, target, side):
    """onnxruntime runs the graph itself, which does not sort rows by length."""
    model, directory = exported(name, target)
    session = onnxruntime.InferenceSession(directory / "onnx/model.onnx")
    ids, mask = rows((600, 7, 515), side)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids), torch.from_numpy(mask)).last_hidden_state.numpy()
    actual = session.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": mask})[0]
    np.testing.assert_allclose(actual[mask == 1], expected[mask == 1], atol=1e-4)


@pytest.mark.parametrize("target", TARGETS)
def test_rows_of_2000_tokens_match_torch(exported, target):
    model, directory = exported("modernbert", target)
    ids, mask = rows((2000, 1), "right")
    with torch.no_grad():
        expected = model(torch.from_numpy(ids), torch.from_numpy(mask)).last_hidden_state.numpy()
    actual = Runtime(directory, threads=1).outputs(ids, mask)["last_hidden_state"]
    np.testing.assert_allclose(actual[mask == 1], expected[mask == 1], atol=1e-4)
