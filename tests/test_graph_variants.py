"""Each class of model with each option of its config, for each target and dtype: the graphs give
what torch gives."""

import json
import shutil

import pytest
from checkpoints import perturbed
from transformers.activations import ACT2FN

from vanilla_transformer_export import verify
from vanilla_transformer_export.exporting.checkpoint import Checkpoint
from vanilla_transformer_export.exporting.export import facts_of
from vanilla_transformer_export.exporting.options import ExportOptions
from vanilla_transformer_export.exporting.plan import Graphs, uses_target
from vanilla_transformer_export.graphs.config import Config
from vanilla_transformer_export.graphs.weights import CheckpointWeights
from vanilla_transformer_export.heads import GENERATORS, HEADS
from vanilla_transformer_export.inference.export_info import write_manifest
from vanilla_transformer_export.targets.registry import get_target

SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
RELATIVE = {
    "position_embedding_type": "relative",
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 5,
}
LEARNED = {"position_embedding_type": "learned", "max_position_embeddings": 60}
ROTARY = {"position_embedding_type": "rotary"}
T5 = {
    **RELATIVE, "norm_type": "rms_norm", "norm_first": True, "gated": True,
    "hidden_act": "gelu_new", "linear_bias": False, "scale_embedding": False, "lm_head_bias": False,
}  # fmt: skip
COMMON = {
    "paper": {},
    "pre-norm": {**LEARNED, "norm_first": True, "linear_bias": False},
    "pre-norm without final norm": {"norm_first": True, "final_norm": False},
    "post-norm with final norm": {
        "final_norm": True,
        "scale_embedding": False,
        "hidden_act": "gelu",
    },
    "embedding norm": {"embedding_norm": True, "layer_norm_eps": 1e-3},
    "rotary": {**ROTARY, "rope_theta": 50.0},
    "relative": RELATIVE,
    "many buckets": {"position_embedding_type": "relative"},
    "learned relative": {**RELATIVE, **LEARNED, "position_embedding_type": "learned_relative"},
    "no positions": {"position_embedding_type": "none"},
    "positions from ids": {**LEARNED, "position_ids_from": "ids"},
    "positions from mask": {**LEARNED, "position_ids_from": "mask"},
    "sinusoids from ids": {"position_ids_from": "ids"},
    "sinusoids from mask": {"position_ids_from": "mask"},
    "gated rms norm": {"norm_type": "rms_norm", "gated": True, "hidden_act": "silu"},
    "t5": T5,
    "wide heads": {"head_dim": 24, "value_head_dim": 24},
    "other values": {"head_dim": 8, "value_head_dim": 12},
    "odd heads": {"head_dim": 6, "value_head_dim": 10},
    "untied": {"tie_word_embeddings": False, "hidden_act": "gelu_new"},
    "narrow embeddings": {"embedding_size": 20},
    "narrow embeddings with norm": {
        "embedding_size": 20,
        "embedding_norm": True,
        "lm_transform_act": "gelu",
    },
    "window": {"sliding_window": 5},
    "rotary window": {"sliding_window": 5, **ROTARY},
    "relative window": {"sliding_window": 5, **RELATIVE},
}
SHORTLIST = {"shortlist": {"shortlist": [0, 1, 2, 5, 30, 47]}}  # of models that generate
DECODER = {"several layers": {**RELATIVE, "num_hidden_layers": 3}}
ENCODER = {
    **DECODER,
    "bert": {
        **LEARNED,
        "type_vocab_size": 2,
        "pooler_act": "tanh",
        "lm_transform_act": "gelu",
        "embedding_norm": True,
    },
    "electra": {"token_transform_act": "gelu"},
    "mean": {"classifier_pooling": "mean"},
}
SEQ2SEQ = {
    "tables of each stack": {"share_encoder_decoder_embeddings": False},
    "wrapped": {"wrap_last_token": True},
    "several layers": {**RELATIVE, "encoder_layers": 3, "decoder_layers": 2},
}
VISION = {
    "vit": {},
    "odd images": {"image_size": [13, 22], "patch_size": [4, 5], "num_first_tokens": 2},
    "pooled": {"pooler_act": "tanh"},
    "interpolated": {"interpolate_pos_encoding": True},
    "post-norm with final norm": {
        "norm_first": False,
        "final_norm": True,
        "linear_bias": False,
        "num_channels": 1,
    },
    **{
        name: COMMON[name] for name in ("gated rms norm", "wide heads", "other values", "odd heads")
    },
}
# Every activation, also as that of a pooler, whose weights have another prefix.
ACTIVATIONS = {
    f"{act} activation": {"hidden_act": act, "gated": act in ("prelu", "silu"), "pooler_act": act}
    for act in ACT2FN
}
# Classes with all bodies are compared for all targets and dtypes, other classes for one. The CPU
# has no operators for bfloat16.
BODIES = ("VanillaEncoderModel", "VanillaVisionModel", *GENERATORS)
OTHERS = [name for name in HEADS if name not in BODIES]
FIRST = [("portable", "fp32", 18)]
FORMATS = [
    *FIRST,
    ("portable", "int8", 18),
    *(("cpu", dtype, 21) for dtype in ("fp32", "int8", "int4")),
]
FORMATS += [("cuda", dtype, 24) for dtype in ("fp32", "fp16", "int8")]
# Activations are alike in all dtypes but int8, which looks for ReLU. Some have an operator of their
# own from opset 20 on.
OF_ACTIVATIONS = [*FIRST, ("portable", "fp32", 20), ("cpu", "int8", 21), ("cuda", "fp32", 24)]
OPSETS = [
    ("portable", dtype, opset)
    for opset in get_target("portable").opsets
    for dtype in ("fp32", "int8")
]
MAX_MEAN_ERROR = {"int8": 0.1, "int4": 0.3, "fp16": 1.5e-3}  # relative to values of about 1


def variants(architecture):
    if "Vision" in architecture:
        return VISION
    kind = (
        ENCODER if "Encoder" in architecture else SEQ2SEQ if "Seq2Seq" in architecture else DECODER
    )
    return COMMON | kind | (SHORTLIST if architecture in GENERATORS else {})


def sizes(architecture):
    if "Vision" in architecture:
        others = {name: size for name, size in SIZES.items() if name != "vocab_size"}
        return {**others, "num_hidden_layers": 1, "image_size": 12, "patch_size": 4}
    return {
        **SIZES,
        **(
            {"encoder_layers": 1, "decoder_layers": 1}
            if "Seq2Seq" in architecture
            else {"num_hidden_layers": 1}
        ),
    }


def problem(checkpoint, directory, options):
    """What differs from torch; nothing if all is as it should be."""
    graphs = Graphs.plan(checkpoint, options)
    directory.mkdir()
    graphs.write(directory)
    (directory / "config.json").write_text(json.dumps(checkpoint.config_json))
    write_manifest(directory, **facts_of(checkpoint, graphs), **graphs.facts({}))
    report = verify(directory, checkpoint.model, cases=3, device="cpu")
    shutil.rmtree(directory)
    most = MAX_MEAN_ERROR.get(options.dtype)
    is_near = most is None or 0 < report.mean_error < most
    return "" if is_near and not report.failures else f"{report}, {report.failures[:1]}"


def problems(architecture, table, formats, folder):
    """What differs from torch, by variant and format."""
    found = {}
    for name, fields in table.items():
        fields = {**sizes(architecture), **fields}
        shortlist = fields.pop("shortlist", None)
        model = perturbed(architecture, fields).float()  # xIELU begins in bfloat16
        model.save_pretrained(folder / name)
        config = Config(model.config, architecture)
        weights = CheckpointWeights(folder / name, config)
        checkpoint = Checkpoint(name, folder / name, config, weights, {}, model)
        for target, dtype, opset in formats:
            if uses_target(config) and get_target(target).unsupported_fields(config):
                continue
            options = ExportOptions(target, dtype, opset, shortlist=shortlist)
            if difference := problem(checkpoint, folder / "out", options):
                found[name, target, dtype, opset] = difference
    return found


@pytest.mark.parametrize("architecture", BODIES)
def test_every_variant_of_a_body_gives_what_torch_gives_in_every_format(architecture, tmp_path):
    assert problems(architecture, variants(architecture), FORMATS, tmp_path) == {}


@pytest.mark.parametrize("architecture", OTHERS)
def test_every_variant_of_every_class_gives_what_torch_gives(architecture, tmp_path):
    assert problems(architecture, variants(architecture), FIRST, tmp_path) == {}


def test_every_activation_gives_what_torch_gives(tmp_path):
    assert problems("VanillaEncoderModel", ACTIVATIONS, OF_ACTIVATIONS, tmp_path) == {}


@pytest.mark.parametrize("architecture", BODIES)
def test_every_opset_gives_what_torch_gives(architecture, tmp_path):
    assert problems(architecture, {"gelu": {"hidden_act": "gelu"}}, OPSETS, tmp_path) == {}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", OTHERS)
def test_every_variant_of_every_class_gives_what_torch_gives_in_every_format(
    architecture, tmp_path
):
    assert problems(architecture, variants(architecture), FORMATS[1:], tmp_path) == {}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", BODIES)
def test_every_variant_of_a_body_gives_what_torch_gives_in_every_opset(architecture, tmp_path):
    assert problems(architecture, variants(architecture), OPSETS[2:], tmp_path) == {}
