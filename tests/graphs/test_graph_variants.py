"""Tests of exported graphs against torch, for each model class, config option, target and dtype."""

import itertools
import json
import shutil

import pytest
from checkpoints import perturbed
from graph_variants import COMMON, sizes, variants, variants_of_head
from transformers.activations import ACT2FN

from vanilla_transformer.source import Source
from vanilla_transformer_export import Runtime
from vanilla_transformer_export.exporting.checkpoint import Checkpoint
from vanilla_transformer_export.exporting.export import manifest_facts
from vanilla_transformer_export.exporting.graphs import write_graphs
from vanilla_transformer_export.exporting.options import ExportOptions
from vanilla_transformer_export.exporting.plan import plan_graphs, uses_target
from vanilla_transformer_export.graphs.config import Config
from vanilla_transformer_export.graphs.weights import CheckpointWeights
from vanilla_transformer_export.heads import GENERATORS, HEADS, M3_EMBEDDING, SPARSE_EMBEDDING
from vanilla_transformer_export.inference.export_info import write_manifest
from vanilla_transformer_export.proof.torch import torch_model
from vanilla_transformer_export.proof.verify import prove
from vanilla_transformer_export.targets.registry import get_target

# Every activation, in the layers and in a pooler, whose weights have another prefix.
ACTIVATIONS = {
    f"{act} activation": {"hidden_act": act, "gated": act in ("prelu", "silu"), "pooler_act": act}
    for act in ACT2FN
}
BODIES = ("VanillaEncoderModel", "VanillaVisionModel", *GENERATORS)
OTHERS = [name for name in HEADS if name not in (*BODIES, M3_EMBEDDING)]  # whose graph is a body
PORTABLE_FP32 = [("portable", "fp32", 18)]
OTHER_FP32 = [("cpu", "fp32", 23), ("cuda", "fp32", 24)]
FP32 = PORTABLE_FP32 + OTHER_FP32
# bfloat16 is left out, because the CPU has no operators for it.
FEWER_BITS = [("portable", "int8", 18), ("cpu", "int8", 23), ("cpu", "int4", 23)]
FEWER_BITS += [("cuda", "fp16", 24), ("cuda", "int8", 24)]
# Activations are the same in all dtypes except int8, which looks for ReLU. Some have their own
# operator from opset 20 on, which all of these have.
LATER_OPSETS = [("portable", "fp32", 20), ("cpu", "int8", 23), ("cuda", "fp32", 24)]
OPSETS = [
    ("portable", dtype, opset)
    for opset in get_target("portable").opsets
    for dtype in ("fp32", "int8")
]
MAX_MEAN_ERROR = {"int8": 0.1, "int4": 0.3, "fp16": 1.5e-3}  # relative to values of about 1


def find_difference(checkpoint, directory, options):
    """Return the differences between the graphs and torch, or an empty string."""
    graphs = plan_graphs(checkpoint, options)
    directory.mkdir()
    write_graphs(graphs, directory)
    (directory / "config.json").write_text(json.dumps(checkpoint.config_json))
    write_manifest(directory, **manifest_facts(checkpoint, graphs), **graphs.facts({}))
    runtime = Runtime(directory, device="cpu")
    # without the reference that `verify` makes
    with torch_model(checkpoint.model, graphs.shortlist):
        report = prove(runtime, checkpoint.model, None, cases=3)
    shutil.rmtree(directory)
    max_mean_error = MAX_MEAN_ERROR.get(options.dtype)
    is_near = max_mean_error is None or 0 < report.mean_error < max_mean_error
    return "" if is_near and not report.failures else f"{report}, {report.failures[:1]}"


def find_differences(architecture, table, formats, others, folder):
    """Return the differences between graphs and torch, by variant and format.

    Each variant has all `formats` and the next one of `others`.
    """
    result, rotation = {}, itertools.cycle([[other] for other in others] or [[]])
    for name, fields in table.items():
        fields = {**sizes(architecture), **fields}
        shortlist = fields.pop("shortlist", None)
        if architecture == SPARSE_EMBEDDING:
            fields["splade"] = {"pooling_strategy": "max", "activation_function": "log1p_relu"}
        model = perturbed(architecture, fields).float()  # xIELU is initialized in bfloat16
        model.save_pretrained(folder / name)
        config = Config(model.config, architecture)
        weights = CheckpointWeights(folder / name, config)
        checkpoint = Checkpoint(Source.open(folder / name), config, weights, {}, model)
        for target, dtype, opset in [*formats, *next(rotation)]:
            if uses_target(config) and get_target(target).unsupported_fields(config):
                continue
            options = ExportOptions(target, dtype, opset, shortlist=shortlist)
            if difference := find_difference(checkpoint, folder / "out", options):
                result[name, target, dtype, opset] = difference
    return result


@pytest.mark.parametrize("architecture", BODIES)
def test_body_variants_match_torch(architecture, tmp_path):
    table = variants(architecture)
    if "Seq2Seq" in architecture:  # its stacks are also those of the encoder and of the decoder
        formats = OTHER_FP32, [*PORTABLE_FP32, *FEWER_BITS]
        assert find_differences(architecture, table, *formats, tmp_path) == {}
        return
    # what a seq2seq model is compared for too has one format of another target in turn
    in_seq2seq = COMMON.keys() & table.keys()
    own = {name: fields for name, fields in table.items() if name not in in_seq2seq}
    shared = {name: table[name] for name in table if name in in_seq2seq}
    differences = find_differences(architecture, own, FP32, FEWER_BITS, tmp_path)
    formats = PORTABLE_FP32, OTHER_FP32 + FEWER_BITS
    assert differences | find_differences(architecture, shared, *formats, tmp_path) == {}


@pytest.mark.parametrize("architecture", OTHERS)
def test_head_variants_match_torch(architecture, tmp_path):
    table = variants_of_head(architecture)
    assert find_differences(architecture, table, PORTABLE_FP32, [], tmp_path) == {}


@pytest.mark.parametrize(
    "formats, others",
    [
        pytest.param(PORTABLE_FP32, LATER_OPSETS, id="in turn"),
        pytest.param(LATER_OPSETS, [], id="all", marks=pytest.mark.slow),
    ],
)
def test_activations_match_torch(formats, others, tmp_path):
    table = "VanillaEncoderModel", ACTIVATIONS
    assert find_differences(*table, formats, others, tmp_path) == {}


@pytest.mark.parametrize("architecture", BODIES)
def test_opsets_match_torch(architecture, tmp_path):
    table = {"gelu": {"hidden_act": "gelu"}}
    assert find_differences(architecture, table, OPSETS, [], tmp_path) == {}


# Ten times as many exports as the quick tests, which have every variant and every format.
@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*BODIES, *OTHERS])
def test_variants_match_torch_in_all_formats(architecture, tmp_path):
    formats = FP32 + FEWER_BITS
    assert find_differences(architecture, variants(architecture), formats, [], tmp_path) == {}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", BODIES)
def test_body_variants_match_torch_in_all_opsets(architecture, tmp_path):
    assert find_differences(architecture, variants(architecture), OPSETS[2:], [], tmp_path) == {}
