"""What is traced once in a run of the tests is known by all that its graph depends on, and nobody changes it for the next."""

from types import SimpleNamespace

import onnx_ir as ir
import torch
from checkpoints import build
from traces import contents, once
from transformers import AutoModelForCausalLM


def test_a_model_is_known_wherever_it_was_loaded_from(tmp_path):
    found = set()
    for folder in (tmp_path / "one", tmp_path / "other"):
        build("causal").save_pretrained(folder)
        found.add(contents(AutoModelForCausalLM.from_pretrained(folder)))
    assert len(found) == 1


def test_another_weight_field_or_implementation_is_another_model():
    def weight(model):
        with torch.no_grad():
            model.lm_head.bias[3] += 1

    changes = (
        lambda model: None,
        weight,
        lambda model: setattr(model.config, "sliding_window", 3),
        lambda model: setattr(model.get_decoder().layers[0].self_attn, "scaling", 0.1),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: model.half(),
    )
    found = set()
    for change in changes:
        model = build("causal")
        change(model)
        found.add(contents(model))
    assert len(found) == len(changes)


def test_each_gets_a_copy_of_the_graph():
    traced = []

    def trace(module, spec, opset):
        traced.append(opset)
        x = ir.val("x", ir.DataType.FLOAT, [2])
        node = ir.node("Relu", [x])
        return ir.Model(ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": opset}, name="g"), ir_version=10)

    trace = once(trace)
    module, spec = torch.nn.ReLU(), SimpleNamespace(inputs=(), outputs=(), example_sizes={})
    first = trace(module, spec, 18)
    first.graph.append(ir.node("Neg", first.graph.outputs))
    assert [node.op_type for node in trace(module, spec, 18).graph] == ["Relu"]
    trace(module, spec, 19)
    assert traced == [18, 19]
