"""Tests of encoders without a manifest, as other exporters write them."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from messages import raises
from onnx import TensorProto, helper
from transformers import AutoConfig, BertConfig, BertForSequenceClassification

from vanilla_transformer_export.ort_models import (
    ORTModelForCausalLM,
    ORTModelForFeatureExtraction,
    ORTModelForSeq2SeqLM,
    ORTModelForSequenceClassification,
    pipeline,
)

IDS = np.array([[5, 6, 7, 8], [9, 10, 11, 12]])
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0]])


@pytest.fixture
def foreign(saved, tmp_path):
    """A directory with the graph of a classifier under another name, configs and tokenizer."""
    directory = saved("classify").directory
    (tmp_path / "onnx").mkdir()
    shutil.copy(directory / "onnx/model.onnx", tmp_path / "onnx/model_O3.onnx")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory / name, tmp_path)
    return tmp_path


def open_classifier(*args, **options):
    return ORTModelForSequenceClassification.from_pretrained(*args, **options)


def test_graph_logits_match_export_also_when_pickled_or_saved(saved, foreign, tmp_path):
    expected = open_classifier(saved("classify").directory)(IDS, attention_mask=MASK).logits
    for options in ({}, {"file_name": "model_O3.onnx"}, {"subfolder": "onnx"}):
        model = open_classifier(foreign, **options)
        actual = model(IDS, attention_mask=MASK).logits
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
        assert model.config.model_type == "bert"
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again(IDS, attention_mask=MASK).logits, actual)
    # the next line replaces this export
    open_classifier(saved("classify").directory).save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "saved")
    np.testing.assert_array_equal(
        open_classifier(tmp_path / "saved")(IDS).logits, model(IDS).logits
    )


def test_pipeline_loads_graph_without_manifest(saved, foreign):
    texts = ["the old man", "two dogs"]
    actual = pipeline("text-classification", model=foreign)(texts)
    expected = pipeline("text-classification", model=saved("classify").directory)(texts)
    assert [answer["label"] for answer in actual] == [answer["label"] for answer in expected]


@pytest.mark.filterwarnings("ignore")
def test_graph_that_torch_exported_matches_torch(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_labels": 3}
    config = BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    config.save_pretrained(tmp_path)
    ids, mask = torch.tensor(IDS), torch.tensor(MASK)
    names = ["input_ids", "attention_mask"]
    torch.onnx.export(
        model,
        (ids, mask),
        tmp_path / "bert.onnx",
        input_names=names,
        output_names=["logits"],
        dynamic_axes={name: {0: "rows", 1: "length"} for name in names},
        dynamo=False,
    )
    other_ids = ids.flip(0)[:, :3]
    actual = open_classifier(tmp_path)(other_ids, attention_mask=mask[:, :3]).logits
    expected = model(other_ids, mask[:, :3]).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("graph", ["onnx/decoder_model_merged.onnx", "model.onnx"])
@pytest.mark.parametrize("model_class", [ORTModelForCausalLM, ORTModelForSeq2SeqLM])
def test_graphs_that_generate_raise_and_name_export(tmp_path, model_class, graph):
    write_graph(tmp_path / graph, TOKENS, 1)
    write_config(tmp_path)
    for options in ({}, {"file_name": Path(graph).name}, {"config": BertConfig()}):
        with raises(ValueError, seen=Path(graph).name, expected=("export=True", "checkpoint")):
            model_class.from_pretrained(tmp_path, **options)


def test_missing_or_unsuitable_graph_or_inputs_error_names_values(foreign):
    with raises(FileNotFoundError, seen="model_O3", expected="other"):
        open_classifier(foreign, file_name="other.onnx")
    with raises(ValueError, seen="logits", expected=("last_hidden_state", "pooler_output")):
        ORTModelForFeatureExtraction.from_pretrained(foreign)
    model = open_classifier(foreign)
    with raises(ValueError, seen=(5, 99), expected=("input_ids", 0, 68)):
        model(np.array([[5, 99]]))
    with raises(ValueError, seen=None, expected="input_ids"):
        model(attention_mask=MASK)


def write_graph(path, inputs, number):
    """Write a classifier of 2 labels with `inputs`, {name: type}. All logits are `number`."""
    values = [helper.make_tensor_value_info(name, inputs[name], ["b", "s"]) for name in inputs]
    value = helper.make_tensor("value", TensorProto.FLOAT, [1], [number])
    nodes = [
        helper.make_node("Shape", [next(iter(inputs))], ["rows"], end=1),
        helper.make_node("Concat", ["rows", "labels"], ["shape"], axis=0),
        helper.make_node("ConstantOfShape", ["shape"], ["logits"], value=value),
    ]
    labels = helper.make_tensor("labels", TensorProto.INT64, [1], [2])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", 2])
    graph = helper.make_graph(nodes, "classifier", values, [logits], [labels])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)


def write_config(folder, **fields):
    BertConfig(num_labels=2, **fields).save_pretrained(folder)


TOKENS = {"input_ids": TensorProto.INT64}


def first_logit(*args, **options):
    return open_classifier(*args, **options)(IDS).logits[0, 0]


def test_file_name_with_folder_or_least_deep_graph_is_opened(tmp_path):
    write_config(tmp_path)
    for number, file in enumerate(("model.onnx", "small/model.onnx", "small/deep/model.onnx")):
        write_graph(tmp_path / file, TOKENS, number)
        assert first_logit(tmp_path, file_name=file) == number
    assert first_logit(tmp_path) == first_logit(tmp_path, file_name="model.onnx") == 0
    assert first_logit(tmp_path, subfolder="small") == 1
    with raises(FileNotFoundError, seen="small/model.onnx", expected="tiny/model.onnx"):
        open_classifier(tmp_path, file_name="tiny/model.onnx")
    (tmp_path / "model.onnx").rename(tmp_path / "model_int8.onnx")
    write_graph(tmp_path / "other/model.onnx", TOKENS, 3)
    with raises(ValueError, seen=("model.onnx", "small", "other")):
        open_classifier(tmp_path)


def test_config_of_subfolder_is_preferred(tmp_path):
    write_graph(tmp_path / "sub/model.onnx", TOKENS, 1)
    write_config(tmp_path / "sub", id2label={0: "no", 1: "yes"})
    assert open_classifier(tmp_path, subfolder="sub").config.id2label[1] == "yes"
    write_config(tmp_path)
    assert open_classifier(tmp_path, subfolder="sub").config.id2label[1] == "yes"


def test_mask_and_types_without_effect_are_dropped_if_graph_lacks_them(tmp_path):
    write_config(tmp_path)
    write_graph(tmp_path / "model.onnx", TOKENS, 1)
    model = open_classifier(tmp_path)
    ones, zeros = np.ones_like(IDS), np.zeros_like(IDS)
    assert model(IDS, attention_mask=ones, token_type_ids=zeros).logits[0, 0] == 1
    with raises(ValueError, seen="attention_mask"):
        model(IDS, attention_mask=MASK)


def test_graph_with_input_of_unknown_dtype_or_name_raises(tmp_path):
    write_config(tmp_path)
    for inputs in ({**TOKENS, "position_ids": TensorProto.INT64}, {"input_ids": TensorProto.INT8}):
        write_graph(tmp_path / "model.onnx", inputs, 1)
        with raises(ValueError, seen=("model.onnx", [*inputs][-1])):
            open_classifier(tmp_path)
    write_graph(tmp_path / "model.onnx", {**TOKENS, "attention_mask": TensorProto.DOUBLE}, 1)
    assert open_classifier(tmp_path)(IDS, attention_mask=MASK).logits[0, 0] == 1


CODE = """
from transformers import BertConfig

class OtherConfig(BertConfig):
    model_type = "other"
"""


def test_config_with_code_is_trusted_or_passed(tmp_path):
    write_graph(tmp_path / "model.onnx", TOKENS, 1)
    fields = {"model_type": "other", "auto_map": {"AutoConfig": "other.OtherConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "other.py").write_text(CODE)
    assert first_logit(tmp_path, config=BertConfig()) == 1
    open_classifier(tmp_path, trust_remote_code=True).save_pretrained(tmp_path / "saved")
    model = open_classifier(tmp_path / "saved", trust_remote_code=True)
    assert type(model.config).__name__ == "OtherConfig"
    assert pickle.loads(pickle.dumps(model))(IDS).logits[0, 0] == 1


def test_saved_graph_has_tokenizer_and_no_graphs_of_another_model(
    foreign, tmp_path, tmp_path_factory
):
    out = tmp_path_factory.mktemp("saved")
    open_classifier(foreign).save_pretrained(out)
    assert (out / "tokenizer.json").is_file()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (foreign / "onnx/model_O3.onnx").rename(foreign / "onnx/other.onnx")
    with raises(FileExistsError, seen=(str(out), "model_O3.onnx")):
        open_classifier(foreign).save_pretrained(out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    write_config(tmp_path / "bert", num_hidden_layers=1)
    write_graph(tmp_path / "bert/model.onnx", TOKENS, 1)
    config = AutoConfig.from_pretrained(tmp_path / "bert")
    config.id2label = {0: "no", 1: "yes"}
    open_classifier(tmp_path / "bert", config=config).save_pretrained(tmp_path / "labels")
    assert json.loads((tmp_path / "labels/config.json").read_text())["id2label"]["1"] == "yes"
