"""Tests that `certify` and `verify` find faults in graphs and manifests.

Hashes are updated after each fault, so that only computed values reveal it.
"""

import json

import numpy as np
import onnx
import pytest
from checkpoints import copy_folder, seal
from onnx import helper, numpy_helper

from vanilla_transformer_export import verify
from vanilla_transformer_export.proof.certify import certify

ENCODER, CAUSAL, SEQ2SEQ = ("encoder", "portable"), ("causal", "portable"), ("seq2seq", "cpu")
INT8, CUDA = ("causal", "cpu", "int8"), ("seq2seq", "cuda", "fp16")
INT8_SEQ2SEQ = ("seq2seq", "cpu", "int8")
WINDOW, PORTABLE_INT8 = ("causal-window", "portable"), ("seq2seq", "portable", "int8")
MODEL, SOURCES = "onnx/model.onnx", "onnx/encoder_model.onnx"
DECODER, STEP = "onnx/decoder_model_merged.onnx", "onnx/decoder_step_model.onnx"
BEAMS, ALIGNMENT = "onnx/beam_search.onnx", "onnx/alignment_model.onnx"
CANDIDATES = "onnx/decoder_candidates_model.onnx"


# ------------------------------------------------------------------------------- faults of graphs


def find_weight(graph, part):
    """Return the first weight that has `part` in its name."""
    return next(weight for weight in graph.initializer if part in weight.name)


def change_weight(part, change):
    def fault(graph):
        weight = find_weight(graph, part)
        values = change(numpy_helper.to_array(weight).copy())
        weight.CopyFrom(numpy_helper.from_array(values, weight.name))

    return fault


def change_one_value(values):
    values.ravel()[values.size // 2] += 0.01
    return values


def scale_one_column(values):
    values[values.shape[-1] // 2] *= 1.5
    return values


def make_not_finite(values):
    values[7] = np.nan
    return values


def negate(values):
    return -values


def roll_rows(values):
    return np.roll(values, 1, axis=0)


def zeros(values):
    return np.zeros_like(values)


def swap_weights(graph):
    """Swap weights of the first and the second layer."""
    first, second = (find_weight(graph, f"layers.{layer}.feed_forward.up") for layer in (0, 1))
    first.name, second.name = second.name, first.name


def rename_inputs(names):
    def fault(graph):
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]

    return fault


def swap(first, second):
    return rename_inputs({first: second, second: first})


def replace_input(name, operator, *others):
    """Return a fault that replaces the input `name` by the output of `operator` on it."""

    def fault(graph):
        rename_inputs({name: "changed"})(graph)
        inputs = [name, *others] if others else [name, name]
        graph.node.insert(0, helper.make_node(operator, inputs, ["changed"]))

    return fault


def mask_of_ones(mask):
    def fault(graph):
        kind = next(value.type.tensor_type.elem_type for value in graph.input if value.name == mask)
        rename_inputs({mask: "ones"})(graph)
        graph.node.insert(0, helper.make_node("Cast", ["same"], ["ones"], to=kind))
        graph.node.insert(0, helper.make_node("Equal", [mask, mask], ["same"]))

    return fault


def change_attribute(operator, name, change):
    def fault(graph):
        nodes = [node for node in graph.node if node.op_type == operator]
        for node in nodes:
            for attribute in node.attribute:
                if attribute.name == name:
                    value = helper.get_attribute_value(attribute)
                    attribute.CopyFrom(helper.make_attribute(name, change(value)))
        assert nodes

    return fault


def replace_operator(before, after):
    def fault(graph):
        nodes = [node for node in graph.node if node.op_type == before]
        for node in nodes:
            node.op_type = after
        assert nodes

    return fault


def change_inner(before, after):
    """Return a fault like `replace_operator`, in the body of the loop of a graph."""

    def fault(graph):
        [loop] = [node for node in graph.node if node.op_type == "Loop"]
        [body] = [attribute.g for attribute in loop.attribute if attribute.name == "body"]
        replace_operator(before, after)(body)

    return fault


def change_scale(graph):
    """Change the scale of attention: an attribute, or the constant 1 / sqrt(6) or 1 / sqrt(8)."""
    attributes = [
        attribute
        for node in graph.node
        for attribute in node.attribute
        if attribute.name == "scale"
    ]
    for attribute in attributes:
        attribute.f *= 0.8
    for weight in graph.initializer:
        values = numpy_helper.to_array(weight)
        if not weight.dims and min(abs(float(values) - size**-0.5) for size in (6, 8)) < 1e-3:
            attributes.append(weight)
            weight.CopyFrom(numpy_helper.from_array(values * values.dtype.type(0.8), weight.name))
    assert attributes


def pool_second_token(graph):
    """Let the pooler read the second token."""
    node = next(node for node in graph.node if node.op_type == "Gather" and node.attribute)
    node.input[1] = "second"
    graph.initializer.append(numpy_helper.from_array(np.array(1), "second"))


def skip_residual(graph):
    """Leave the input of a sublayer out of its sum."""
    node = [node for node in graph.node if node.op_type == "Add"][-3]
    node.input[0] = node.input[1]


SECOND_UP = "layers.1.feed_forward.up_proj.weight"
GRAPH_FAULTS = {
    "scale of attention": (ENCODER, MODEL, change_scale),
    "no mask": (ENCODER, MODEL, mask_of_ones("attention_mask")),
    "no token types": (ENCODER, MODEL, replace_input("token_type_ids", "Sub")),
    "pooled token": (ENCODER, MODEL, pool_second_token),
    "epsilon": (
        ENCODER, MODEL, change_attribute("LayerNormalization", "epsilon", lambda value: 100 * value)
    ),
    "activation": (ENCODER, MODEL, replace_operator("Relu", "LeakyRelu")),
    "axis of a softmax": (ENCODER, MODEL, change_attribute("Softmax", "axis", lambda axis: -2)),
    "one value of a matrix": (ENCODER, MODEL, change_weight(SECOND_UP, change_one_value)),
    "a bias of zeros": (
        ENCODER, MODEL, change_weight("layers.0.feed_forward.down_proj.bias", zeros)
    ),
    "future tokens": (CAUSAL, MODEL, replace_operator("LessOrEqual", "Less")),
    "positions": (CAUSAL, MODEL, replace_input("position_ids", "Sub")),
    "caches of two layers": (CAUSAL, MODEL, swap("past_key_values.0.key", "past_key_values.1.key")),
    "keys for values": (CAUSAL, MODEL, swap("past_key_values.1.key", "past_key_values.1.value")),
    "weights of two layers": (CAUSAL, MODEL, swap_weights),
    "embeddings of other tokens": (CAUSAL, MODEL, change_weight("embed_tokens", roll_rows)),
    "a value that is not finite": (
        CAUSAL, MODEL, change_weight("lm_head.bias", make_not_finite)
    ),
    "residual": (CAUSAL, MODEL, skip_residual),
    "window": (WINDOW, MODEL, replace_operator("LessOrEqual", "Less")),
    "scale of a column": (
        INT8, MODEL, change_weight(f"{SECOND_UP}.int8_matrices.1", scale_one_column)
    ),
    "integers": (INT8, MODEL, change_weight("layers.1.self_attn.o_proj.weight.int8", negate)),
    "mask of sources": (SEQ2SEQ, SOURCES, mask_of_ones("attention_mask")),
    "mask of a decoder": (SEQ2SEQ, DECODER, mask_of_ones("encoder_attention_mask")),
    "weight of a step": (
        SEQ2SEQ, STEP, change_weight("layers.0.cross_attn.q_proj.weight", change_one_value)
    ),
    "caches of a step": (
        SEQ2SEQ, STEP, swap("past_key_values.0.decoder.key", "past_key_values.1.decoder.key")
    ),
    "caches of sources": (
        SEQ2SEQ, STEP, swap("past_key_values.0.encoder.key", "past_key_values.1.encoder.key")
    ),
    "weight of best tokens": (
        SEQ2SEQ, CANDIDATES, change_weight("layers.0.cross_attn.q_proj.weight", negate)
    ),
    "weight of best tokens in int8": (
        INT8_SEQ2SEQ, CANDIDATES, change_weight("layers.0.cross_attn.q_proj.weight.int8", negate)
    ),
    "log p of best tokens": (SEQ2SEQ, CANDIDATES, change_inner("LogSoftmax", "Softmax")),
    "mask of an alignment": (SEQ2SEQ, ALIGNMENT, mask_of_ones("encoder_attention_mask")),
    "scale of an alignment": (SEQ2SEQ, ALIGNMENT, change_scale),
    "weight of an alignment in int8": (
        INT8_SEQ2SEQ, ALIGNMENT, change_weight("layers.0.cross_attn.q_proj.weight.int8", negate)
    ),
    "scale in half precision": (CUDA, DECODER, change_scale),
    "mask on a GPU": (CUDA, DECODER, mask_of_ones("encoder_attention_mask")),
    "caches on a GPU": (
        CUDA, DECODER, swap("past_key_values.0.decoder.value", "past_key_values.1.decoder.value")
    ),
    "weight on a GPU": (
        CUDA, SOURCES, change_weight("layers.0.self_attn.o_proj.weight", negate)
    ),
    "beams": (CUDA, BEAMS, replace_operator("LogSoftmax", "Softmax")),
    "another target in int8": (PORTABLE_INT8, "onnx/decoder_model_merged_int8.onnx", change_scale),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPH_FAULTS)
def test_graph_fault_is_found_by_both(exported_for, tmp_path, name):
    export, file, fault = GRAPH_FAULTS[name]
    checkpoint, source = exported_for(*export)
    directory = copy_folder(source, tmp_path)
    model = onnx.load(directory / file)
    fault(model.graph)
    onnx.save(model, directory / file)
    seal(directory)
    check_both_fail(directory, checkpoint)


class FaultFound(Exception):
    pass


def check_both_fail(directory, checkpoint):
    """Check that `certify` and `verify` find a fault, or cannot open the export."""
    with pytest.raises((FaultFound, ValueError)):  # ValueError if the export cannot be opened
        certify(directory, "cpu", threads=1, tell=stop_at_failure)
    with pytest.raises((FaultFound, ValueError)):
        for failure in verify(directory, checkpoint, cases=1, device="cpu").failures:
            raise FaultFound(failure)


def stop_at_failure(check):
    """Raise FaultFound for a check that failed: further checks take most of the time."""
    if not check.ok:
        raise FaultFound(check)


# ---------------------------------------------------------------------------- faults of manifests


def first_variant(manifest):
    return next(iter(manifest["variants"].values()))


def swap_files(manifest):
    graphs = first_variant(manifest)["graphs"]
    graphs["encoder"], graphs["decoder"] = graphs["decoder"], graphs["encoder"]


MANIFEST_FAULTS = {
    "target": (ENCODER, lambda manifest: manifest.update(target="cpu")),
    "opset": (ENCODER, lambda manifest: manifest.update(opset=20)),
    "tolerance": (
        CAUSAL,
        lambda manifest: first_variant(manifest)["tolerance"].update(max_error=9),
    ),
    "no tolerance": (CAUSAL, lambda manifest: first_variant(manifest).pop("tolerance")),
    "no step": (SEQ2SEQ, lambda manifest: manifest.pop("step")),
    "files of two graphs": (SEQ2SEQ, swap_files),
    "activations": (CUDA, lambda manifest: manifest.update(activations="fp32")),
}


@pytest.mark.parametrize("name", MANIFEST_FAULTS)
def test_manifest_fault_is_found_by_both(exported_for, tmp_path, name):
    export, fault = MANIFEST_FAULTS[name]
    checkpoint, source = exported_for(*export)
    directory = copy_folder(source, tmp_path)
    manifest = json.loads((directory / "manifest.json").read_text())
    fault(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    check_both_fail(directory, checkpoint)
