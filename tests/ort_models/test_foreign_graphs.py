"""Tests of graphs without a manifest, as other exporters write them."""

import json
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from messages import raises
from onnx import TensorProto, helper
from transformers import AutoConfig, BertConfig

from vanilla_transformer_export.ort_models import (
    ORTModelForCausalLM,
    ORTModelForFeatureExtraction,
    ORTModelForMaskedLM,
    ORTModelForSeq2SeqLM,
    ORTModelForSequenceClassification,
    pipeline,
)
from vanilla_transformer_export.ort_models.generation import CACHE

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


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """Repositories that optimum-onnx 0.1.0 wrote with write_foreign_graphs.py, in folders with the
    outputs of torch. A merged decoder also has the split graphs."""
    folder = tmp_path_factory.mktemp("foreign")
    with tarfile.open(Path(__file__).parent / "foreign_graphs.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


GENERATORS = [
    ("gpt2", {}),
    ("gpt2-no-cache", {}),
    ("bloom", {}),
    ("marian", {}),
    ("marian", {"use_merged": False}),
    ("marian-no-cache", {}),
    ("t5", {}),
    ("t5", {"use_merged": False}),
]


def read_expected(folder):
    """Return the inputs, the logits and the tokens of torch."""
    expected = json.loads((folder / "expected.json").read_text())
    inputs = {name: torch.tensor(values) for name, values in expected.pop("inputs").items()}
    return inputs, {name: torch.tensor(values) for name, values in expected.items()}


def open_generator(folder, **options):
    is_decoder = (folder / "model.onnx").is_file()
    model_class = ORTModelForCausalLM if is_decoder else ORTModelForSeq2SeqLM
    return model_class.from_pretrained(folder, **options)


@pytest.mark.parametrize("name, options", GENERATORS, ids=str)
def test_generator_logits_and_tokens_match_torch(repositories, name, options):
    model = open_generator(repositories / name, **options)
    inputs, expected = read_expected(repositories / name)
    is_token = inputs["attention_mask"].bool() if name.startswith(("gpt2", "bloom")) else ...
    logits = model(**inputs).logits
    torch.testing.assert_close(logits[is_token], expected["logits"][is_token], rtol=0, atol=1e-4)
    prompt = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    for search, arguments in SEARCHES.items():
        tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False, **arguments)
        assert torch.equal(tokens, expected[search]), search


SEARCHES = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "penalty": {"repetition_penalty": 3.0},
}


@pytest.mark.parametrize("name", ["gpt2", "gpt2-no-cache", "marian", "marian-no-cache"])
def test_assisted_generation_and_steps_of_several_tokens_match_plain_results(repositories, name):
    model = open_generator(repositories / name)
    inputs, _ = read_expected(repositories / name)
    prompt = {name: inputs[name][:1] for name in ("input_ids", "attention_mask")}
    expected = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
        actual = model.generate(**prompt, max_new_tokens=8, do_sample=False, **options)
        assert torch.equal(actual, expected), options
    ids = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    inputs = {name: tensor[:1] for name, tensor in inputs.items() if name != "position_ids"}
    logits = model(**inputs).logits
    first = model(**{**inputs, ids: inputs[ids][:, :1], "attention_mask": None})
    rest = model(**{**inputs, ids: inputs[ids][:, 1:]}, past_key_values=get_cache(first))
    actual = torch.cat([first.logits, rest.logits], 1)
    torch.testing.assert_close(actual, logits, rtol=0, atol=1e-4)


def test_decoder_without_step_graph_generates_same_tokens(repositories, tmp_path):
    graphs = ("decoder_model_merged.onnx", "decoder_with_past_model.onnx")
    left_out = shutil.ignore_patterns(*graphs)
    marian = shutil.copytree(repositories / "marian", tmp_path / "marian", ignore=left_out)
    inputs, expected = read_expected(marian)
    prompt = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    tokens = open_generator(marian).generate(**prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(tokens, expected["greedy"])


def get_cache(output):
    return getattr(output, CACHE)


def test_wrong_class_or_token_ids_raise_for_decoder_graph(repositories, tmp_path):
    gpt2 = shutil.copytree(repositories / "gpt2", tmp_path / "gpt2")
    with raises(ValueError, seen=("model.onnx", "past_key_values.0.key", "position_ids")):
        ORTModelForMaskedLM.from_pretrained(gpt2)
    with raises(ValueError, seen=(5, 99), expected=("input_ids", 0, 63)):
        ORTModelForCausalLM.from_pretrained(gpt2).generate(torch.tensor([[5, 99]]))


def test_encoder_logits_match_torch(repositories):
    inputs, expected = read_expected(repositories / "bert")
    logits = open_classifier(repositories / "bert")(**inputs).logits
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-4)


def test_seq2seq_repository_is_saved_pickled_and_opened_by_suffix(repositories, tmp_path):
    inputs, expected = read_expected(repositories / "marian")
    model = open_generator(repositories / "marian")
    model.generation_config.num_beams = 3
    model.generation_config.num_return_sequences = 2
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.onnx")} == {
        "encoder_model.onnx",
        "decoder_model_merged.onnx",
    }
    for path in tmp_path.glob("*.onnx"):
        path.rename(tmp_path / f"{path.stem}_int8.onnx")
    again = open_generator(tmp_path, file_name="decoder_model_merged_int8.onnx")
    for loaded in (again, pickle.loads(pickle.dumps(again))):
        prompt = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        tokens = loaded.generate(**prompt, max_new_tokens=8, do_sample=False)
        assert torch.equal(tokens, expected["beams"])


def test_file_name_selects_split_decoder_and_unknown_name_raises(repositories):
    inputs, expected = read_expected(repositories / "marian")
    split = {"encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"}
    for name in ("decoder_model.onnx", "decoder_with_past_model.onnx"):
        model = open_generator(repositories / "marian", file_name=name)
        assert {graph.path.name for graph in model.runtime.graphs.values()} == split
    torch.testing.assert_close(model(**inputs).logits, expected["logits"], rtol=0, atol=1e-4)
    with raises(FileNotFoundError, seen="decoder_model.onnx", expected="typo.onnx"):
        open_generator(repositories / "marian", file_name="typo.onnx")


def test_encoder_of_generator_without_states_raises(repositories, tmp_path):
    marian = shutil.copytree(repositories / "marian", tmp_path / "marian")
    write_graph(marian / "encoder_model.onnx", TOKENS, 1)
    with raises(ValueError, seen=("encoder_model.onnx", "logits"), expected="last_hidden_state"):
        open_generator(marian)


def test_missing_or_unsuitable_graph_or_inputs_error_names_values(foreign):
    with raises(FileNotFoundError, seen="model_O3", expected="other"):
        open_classifier(foreign, file_name="other.onnx")
    with raises(ValueError, seen="logits", expected=("last_hidden_state", "pooler_output")):
        ORTModelForFeatureExtraction.from_pretrained(foreign)
    with raises(ValueError, seen=("model_O3.onnx", "token_type_ids", "decoder")):
        ORTModelForCausalLM.from_pretrained(foreign)
    with raises(FileNotFoundError, seen="model_O3", expected=("encoder_model", "decoder_model")):
        ORTModelForSeq2SeqLM.from_pretrained(foreign)
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


def test_saved_graphs_have_tokenizer_and_no_graphs_of_another_model(
    foreign, repositories, tmp_path
):
    open_classifier(foreign).save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved/tokenizer.json").is_file()
    open_generator(repositories / "marian").save_pretrained(tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    other = open_generator(repositories / "marian-no-cache")
    with raises(FileExistsError, seen=(str(tmp_path / "out"), "decoder_model_merged.onnx")):
        other.save_pretrained(tmp_path / "out")
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    write_config(tmp_path / "bert", num_hidden_layers=1)
    write_graph(tmp_path / "bert/model.onnx", TOKENS, 1)
    config = AutoConfig.from_pretrained(tmp_path / "bert")
    config.id2label = {0: "no", 1: "yes"}
    open_classifier(tmp_path / "bert", config=config).save_pretrained(tmp_path / "labels")
    assert json.loads((tmp_path / "labels/config.json").read_text())["id2label"]["1"] == "yes"
