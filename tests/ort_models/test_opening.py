"""`from_pretrained` with optimum's arguments, `save_pretrained`, and objects that are pickled or
moved."""

import importlib.util
import json
import logging
import pickle
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from checkpoints import copy_folder
from transformers import AutoConfig, AutoTokenizer

from vanilla_transformer_export import Runtime, TextRuntime, export
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.ort_models import (
    ORTModelForCausalLM,
    ORTModelForFeatureExtraction,
    ORTModelForMaskedLM,
    ORTModelForSeq2SeqLM,
    ORTModelForSequenceClassification,
    stand_in_for_optimum,
)

IDS = np.array([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.fixture
def directory(saved):
    return saved("classify").directory


@pytest.fixture
def several(saved, tmp_path):
    """An export with two dtypes."""
    export(saved("classify").checkpoint, tmp_path / "several", dtype=["fp32", "int8"], cases=1)
    return tmp_path / "several"


def opened(*args, **options):
    return ORTModelForSequenceClassification.from_pretrained(*args, **options)


def test_arguments_choose_threads_device_dtype_and_folder(several, saved):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model = opened(several, session_options=options, provider="AzureExecutionProvider")
    assert (model.runtime.threads, model.runtime.device) == (1, "cpu")
    for file_name in ("model_int8.onnx", "onnx/model_int8.onnx"):
        model = opened(str(several), file_name=file_name, subfolder="onnx")
        assert model.runtime.dtype == "int8"
    assert opened(several.parent, subfolder="several").runtime.dtype == "fp32"
    config = AutoConfig.for_model("bert", num_labels=7)
    assert opened(several, config=config, use_merged=True, use_io_binding=False).config is config
    model = opened(several, providers=["CPUExecutionProvider"], provider="CUDAExecutionProvider")
    assert model.device == torch.device("cpu")


def test_arguments_without_effect_are_warnings(directory, caplog):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.enable_mem_pattern = False
    opened(directory, session_options=options, provider_options={"arena": 1}, use_cache=False)
    assert [record.getMessage() for record in caplog.records] == [
        "use_cache=False has no effect",
        "provider_options={'arena': 1} has no effect",
        "session_options sets enable_mem_pattern, log_severity_level, expected only "
        "intra_op_num_threads",
    ]


def test_wrong_arguments_are_one_line(directory, saved, tmp_path):
    with pytest.raises(UsageError, match="provider 'NoProvider' is not supported, expected one of"):
        opened(directory, provider="NoProvider")
    with pytest.raises(OSError, match="no CUDA, its providers are"):
        opened(directory, provider="CUDAExecutionProvider")
    with pytest.raises(FileNotFoundError, match=r"has no other.onnx, expected one of \['model.on"):
        opened(directory, file_name="other.onnx")
    with pytest.raises(TypeError, match=r"unknown \['file'\], expected some of"):
        opened(directory, file="model.onnx")
    with pytest.raises(OSError, match="find them in the cached files"):
        opened("no-such-model", local_files_only=True)
    actual = "has VanillaEncoderForSequenceClassification, expected for ORTModelForMaskedLM one of"
    with pytest.raises(ValueError, match=f"{actual} VanillaEncoderForMaskedLM"):
        ORTModelForMaskedLM.from_pretrained(directory)


def test_a_checkpoint_is_exported_on_the_way(saved, tmp_path, caplog):
    checkpoint = saved("classify").checkpoint
    expected = opened(saved("classify").directory)(IDS).logits
    model = opened(checkpoint)
    assert "has no ONNX graphs: it is exported" in caplog.text
    temporary = model.runtime.info.directory
    np.testing.assert_array_equal(model(IDS).logits, expected)
    model.save_pretrained(tmp_path / "saved")
    del model
    assert not temporary.exists()
    np.testing.assert_array_equal(opened(tmp_path / "saved")(IDS).logits, expected)
    assert TextRuntime(tmp_path / "saved").classify(["the man"])
    caplog.clear()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint / name, tmp_path / "saved")
    opened(tmp_path / "saved", export=True)
    assert "has ONNX graphs and export=True: it is exported again" in caplog.text


def test_the_target_and_the_class_of_an_export_on_the_way(saved):
    model = ORTModelForSeq2SeqLM.from_pretrained(saved("seq2seq").checkpoint, target="cpu")
    assert model.runtime.target == "cpu"
    # a checkpoint with another head: the states of its encoder
    states = ORTModelForFeatureExtraction.from_pretrained(saved("fill-mask").checkpoint)
    assert states(IDS).last_hidden_state.shape == (2, 4, 32)


def test_what_is_saved_opens_with_a_tokenizer_that_was_saved_after_it(directory, tmp_path):
    model, out = opened(directory), tmp_path / "out"
    for _ in range(2):  # the second time over the first, as a pipeline does
        model.save_pretrained(out)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.add_tokens(["another"])
        tokenizer.save_pretrained(out)
    assert AutoTokenizer.from_pretrained(out).convert_tokens_to_ids("another") == 69
    again = opened(out)
    np.testing.assert_array_equal(again(IDS).logits, model(IDS).logits)
    assert Runtime(out).architecture == model.runtime.architecture
    again.save_pretrained(out)  # in place
    assert opened(out).config.id2label == model.config.id2label


def test_changed_fields_of_configs_are_saved(saved, directory, tmp_path):
    model = opened(directory)
    model.config.id2label = {0: "no", 1: "maybe", 2: "yes"}
    model.config.label2id = {"no": 0, "maybe": 1, "yes": 2}
    model.save_pretrained(tmp_path / "labels")
    again = opened(tmp_path / "labels")
    assert again.config.id2label == model.config.id2label
    classify = TextRuntime(tmp_path / "labels").classify
    assert {answer["label"] for answer in classify(["the man"], top_k=None)[0]} == {
        "no",
        "maybe",
        "yes",
    }
    config = json.loads((tmp_path / "labels/config.json").read_text())
    original = json.loads((directory / "config.json").read_text())
    assert {name for name in config if config[name] != original[name]} == {"id2label", "label2id"}
    generator = ORTModelForCausalLM.from_pretrained(saved("causal").directory)
    generator.generation_config.num_beams = 3
    generator.save_pretrained(tmp_path / "beams")
    again = ORTModelForCausalLM.from_pretrained(tmp_path / "beams")
    assert again.generation_config.num_beams == 3
    assert again.runtime.defaults["num_beams"] == 3
    again.generation_config.num_beams = 1
    again.save_pretrained(tmp_path / "beams")  # in place
    assert Runtime(tmp_path / "beams").defaults["num_beams"] == 1


def test_a_saved_export_leaves_no_graphs_of_an_earlier_one(saved, several, tmp_path):
    opened(several).save_pretrained(tmp_path / "out")
    assert (tmp_path / "out/onnx/model_int8.onnx").exists()
    model = opened(saved("classify").directory)
    model.save_pretrained(tmp_path / "out")
    np.testing.assert_array_equal(opened(tmp_path / "out")(IDS).logits, model(IDS).logits)


def test_objects_are_pickled_by_directory_and_arguments(saved, tmp_path):
    model = opened(saved("classify").directory, provider="CPUExecutionProvider")
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again(IDS).logits, model(IDS).logits)
    model = ORTModelForCausalLM.from_pretrained(saved("causal").directory)
    model.generation_config.num_beams, model.config.note = 3, "changed"
    again = pickle.loads(pickle.dumps(model))
    again.save_pretrained(tmp_path)
    saved_again = ORTModelForCausalLM.from_pretrained(tmp_path)
    assert saved_again.generation_config.num_beams == again.generation_config.num_beams == 3
    assert json.loads((tmp_path / "config.json").read_text())["note"] == "changed"


def test_another_device_is_one_warning_and_outputs_return_to_theirs(directory, caplog):
    model = opened(directory)
    assert model.to("cuda") is model.to(torch.device("cuda")) is model.to(torch.float16) is model
    assert model.to("cpu").eval().device == torch.device("cpu")
    actual = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in actual] == [
        "the model stays on cpu and cannot move to cuda"
    ]
    assert model(torch.from_numpy(IDS)).logits.device == model.device
    assert model.get_input_embeddings() == SimpleNamespace(num_embeddings=69)


def test_inputs_that_no_graph_takes_are_a_warning_and_outputs_may_be_a_tuple(directory, caplog):
    model = opened(directory)
    output = model(IDS, labels=np.array([0, 1]), output_attentions=False, return_dict=False)
    assert isinstance(output, tuple) and output[0].shape == (2, 3)
    assert "ORTModelForSequenceClassification ignores labels, which no graph takes" in caplog.text
    assert "output_attentions" not in caplog.text
    with pytest.raises(ValueError, match=r"input_ids must be in \[0, 68\], got 5 to 99"):
        model(np.array([[5, 99]]))


def test_masked_lm_opens_a_model_for_pretraining(saved):
    logits = ORTModelForMaskedLM.from_pretrained(saved("pretraining").directory)(IDS).logits
    assert logits.shape == (2, 4, 69)


def test_the_package_itself_imports_none_of_it():
    code = (
        "import sys, vanilla_transformer_export\n"
        "from vanilla_transformer_export import Runtime, TextRuntime\n"
        "print({'torch', 'transformers', 'vanilla_transformer_export.ort_models'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


@pytest.fixture
def modules():
    """The modules of this process, which are restored after the test."""
    before = dict(sys.modules)
    yield sys.modules
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]


def test_a_stand_in_for_optimum_is_found_and_made_once(modules):
    stand_in_for_optimum()
    from optimum.onnxruntime import ONNX_WEIGHTS_NAME
    from optimum.onnxruntime import ORTModelForMaskedLM as theirs

    assert (theirs, ONNX_WEIGHTS_NAME) == (ORTModelForMaskedLM, "model.onnx")
    module = modules["optimum.onnxruntime"]
    stand_in_for_optimum()
    assert modules["optimum.onnxruntime"] is module
    assert importlib.util.find_spec("optimum.onnxruntime") is module.__spec__


def test_no_stand_in_where_optimum_is_installed(modules, tmp_path, monkeypatch):
    (tmp_path / "optimum").mkdir()
    (tmp_path / "optimum/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    stand_in_for_optimum()  # beside another part of optimum
    assert modules["optimum"].__file__ == str(tmp_path / "optimum/__init__.py")
    del modules["optimum.onnxruntime"], modules["optimum"]
    (tmp_path / "optimum/onnxruntime.py").touch()
    importlib.invalidate_caches()
    with pytest.raises(ImportError, match="optimum.onnxruntime is installed, expected none"):
        stand_in_for_optimum()


def test_json_of_a_copied_export_is_unchanged(directory, tmp_path):
    copied = copy_folder(directory, tmp_path)
    manifest = json.loads((copied / "manifest.json").read_text())
    opened(copied).save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/manifest.json").read_text()) == manifest
