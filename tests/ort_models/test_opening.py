"""Tests of `from_pretrained` with optimum's arguments, `save_pretrained`, pickling and devices."""

import copy
import importlib.util
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from checkpoints import copy_folder
from command_line import main
from messages import raises
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, WatermarkingConfig

from vanilla_transformer_export import Runtime, TextRuntime, export
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.ort_models import (
    ORTModel,
    ORTModelForCausalLM,
    ORTModelForFeatureExtraction,
    ORTModelForMaskedLM,
    ORTModelForSeq2SeqLM,
    ORTModelForSequenceClassification,
    ORTModelForTokenClassification,
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


def open_classifier(*args, **options):
    return ORTModelForSequenceClassification.from_pretrained(*args, **options)


def test_arguments_choose_threads_device_dtype_and_folder(several, saved):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model = open_classifier(several, session_options=options, provider="AzureExecutionProvider")
    assert (model.runtime.threads, model.runtime.device) == (1, "cpu")
    for file_name in ("model_int8.onnx", "onnx/model_int8.onnx"):
        model = open_classifier(str(several), file_name=file_name, subfolder="onnx")
        assert model.runtime.dtype == "int8"
    assert open_classifier(several.parent, subfolder="several").runtime.dtype == "fp32"
    config = AutoConfig.for_model("bert", num_labels=7)
    assert (
        open_classifier(several, config=config, use_merged=True, use_io_binding=False).config
        is config
    )
    model = open_classifier(
        several, providers=["CPUExecutionProvider"], provider="CUDAExecutionProvider"
    )
    assert model.device == torch.device("cpu")


def test_arguments_without_effect_are_logged(directory, caplog):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.enable_mem_pattern = False
    options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    providers = [("CPUExecutionProvider", {"use_arena": "0"})]
    options = {"session_options": options, "provider_options": {"arena": 1}, "use_cache": False}
    open_classifier(directory, providers=providers, target="cpu", **options)
    assert [record.getMessage() for record in caplog.records] == [
        "use_cache=False has no effect",
        "provider_options={'arena': 1} has no effect",
        "the options [{'use_arena': '0'}] of CPUExecutionProvider have no effect",
        "session_options sets enable_mem_pattern, execution_mode, log_severity_level, expected "
        "only intra_op_num_threads",
        f"target='cpu' has no effect on the graphs in {directory}",
    ]


def test_invalid_arguments_raise(directory):
    providers = ("CPUExecutionProvider", "CUDAExecutionProvider")
    with raises(UsageError, seen=("provider", "NoProvider"), expected=providers):
        open_classifier(directory, provider="NoProvider")
    with raises(OSError, seen="CUDA", expected="on the CPU"):
        open_classifier(directory, provider="CUDAExecutionProvider")
    with raises(FileNotFoundError, seen=(str(directory), "other.onnx"), expected="model.onnx"):
        open_classifier(directory, file_name="other.onnx")
    with raises(TypeError, seen="file", expected=("local_files_only", "session_options")):
        open_classifier(directory, file="model.onnx")
    with raises(TypeError, seen="dict", expected="SessionOptions"):
        open_classifier(directory, session_options={"intra_op_num_threads": 1})
    with raises(TypeError, seen="dict", expected="PreTrainedConfig"):
        open_classifier(directory, config={"num_labels": 3})
    with raises(TypeError, seen="ORTModel", expected="ORTModelForMaskedLM"):
        ORTModel.from_pretrained(directory)
    with raises(FileNotFoundError, seen=(str(directory), "nope")):
        open_classifier(directory, subfolder="nope")
    with raises(OSError, seen="./no/such/folder"):
        open_classifier("./no/such/folder", subfolder="onnx")
    with pytest.raises(OSError, match="no-such-model is neither .* nor on the Hub: it is not in"):
        open_classifier("no-such-model", local_files_only=True)
    seen = ("VanillaEncoderForSequenceClassification", "ORTModelForMaskedLM")
    with raises(ValueError, seen=seen, expected="VanillaEncoderForMaskedLM"):
        ORTModelForMaskedLM.from_pretrained(directory)


def test_checkpoint_is_exported_when_opened(saved, tmp_path, caplog):
    checkpoint = saved("classify").checkpoint
    expected = open_classifier(saved("classify").directory)(IDS).logits
    model = open_classifier(checkpoint)
    assert "has no ONNX graphs: it is exported" in caplog.text
    temporary = model.runtime.info.directory
    np.testing.assert_array_equal(model(IDS).logits, expected)
    model.save_pretrained(tmp_path / "saved")
    del model
    assert not temporary.exists()
    np.testing.assert_array_equal(open_classifier(tmp_path / "saved")(IDS).logits, expected)
    assert TextRuntime(tmp_path / "saved").classify(["the man"])
    caplog.clear()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint / name, tmp_path / "saved")
    with raises(FileNotFoundError, seen="model_int8.onnx", expected="model.onnx"):
        open_classifier(tmp_path / "saved", export=True, file_name="model_int8.onnx")
    assert "has ONNX graphs and export=True: it is exported again" in caplog.text


def test_checkpoint_is_exported_for_target_and_class(saved):
    model = ORTModelForSeq2SeqLM.from_pretrained(saved("seq2seq").checkpoint, target="cpu")
    assert model.runtime.target == "cpu"
    # a checkpoint with another head: the states of its encoder
    states = ORTModelForFeatureExtraction.from_pretrained(saved("fill-mask").checkpoint)
    assert states(IDS).last_hidden_state.shape == (2, 4, 32)


def test_saved_model_opens_with_tokenizer_saved_after_it(directory, tmp_path):
    model, out = open_classifier(directory), tmp_path / "out"
    for _ in range(2):  # the second time over the first, as a pipeline does
        model.save_pretrained(out)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.add_tokens(["another"])
        tokenizer.save_pretrained(out)
    assert AutoTokenizer.from_pretrained(out).convert_tokens_to_ids("another") == 69
    again = open_classifier(out)
    np.testing.assert_array_equal(again(IDS).logits, model(IDS).logits)
    assert Runtime(out).architecture == model.runtime.architecture
    again.save_pretrained(out)  # in place
    assert open_classifier(out).config.id2label == model.config.id2label


def test_changed_config_fields_are_saved(saved, directory, tmp_path):
    model = open_classifier(directory)
    model.config.id2label = {0: "no", 1: "maybe", 2: "yes"}
    model.config.label2id = {"no": 0, "maybe": 1, "yes": 2}
    model.save_pretrained(tmp_path / "labels")
    again = open_classifier(tmp_path / "labels")
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
    for num_beams in (1, 3):
        again.generation_config.num_beams = num_beams
        again.save_pretrained(tmp_path / "beams")  # in place
        assert Runtime(tmp_path / "beams").defaults["num_beams"] == num_beams


def test_export_saved_over_earlier_one_has_only_its_own_graphs(saved, several, tmp_path):
    open_classifier(several).save_pretrained(tmp_path / "out")
    assert (tmp_path / "out/onnx/model_int8.onnx").exists()
    model = open_classifier(saved("classify").directory)
    model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out/onnx/model_int8.onnx").exists()
    np.testing.assert_array_equal(open_classifier(tmp_path / "out")(IDS).logits, model(IDS).logits)


def test_pickled_model_keeps_outputs_and_changed_configs(saved, tmp_path):
    model = open_classifier(saved("classify").directory, provider="CPUExecutionProvider")
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again(IDS).logits, model(IDS).logits)
    model = ORTModelForCausalLM.from_pretrained(saved("causal").directory)
    model.generation_config.num_beams, model.config.note = 3, "changed"
    again = pickle.loads(pickle.dumps(model))
    again.save_pretrained(tmp_path)
    saved_again = ORTModelForCausalLM.from_pretrained(tmp_path)
    assert saved_again.generation_config.num_beams == again.generation_config.num_beams == 3
    assert json.loads((tmp_path / "config.json").read_text())["note"] == "changed"


def test_checkpoint_in_folder_beside_export_is_exported(saved, tmp_path):
    shutil.copytree(saved("classify").directory, tmp_path / "root")
    shutil.copytree(saved("tag").checkpoint, tmp_path / "root/v2")
    for root, folder in ((tmp_path / "root", "v2"), (tmp_path, "root/v2")):
        model = ORTModelForTokenClassification.from_pretrained(root, subfolder=folder)
        assert model.runtime.architecture == "VanillaEncoderForTokenClassification"


def test_save_without_source_files_raises_and_keeps_earlier_export(directory, tmp_path):
    for name in ("source", "out"):
        shutil.copytree(directory, tmp_path / name)
    model = open_classifier(tmp_path / "source")
    shutil.rmtree(tmp_path / "source")
    with raises(FileNotFoundError, seen=str(tmp_path / "source"), expected="onnx/model.onnx"):
        model.save_pretrained(tmp_path / "out")
    assert open_classifier(tmp_path / "out")(IDS).logits.shape == (2, 3)


def test_saved_int8_model_opens_with_int8(several, tmp_path):
    open_classifier(several, file_name="model_int8.onnx").save_pretrained(tmp_path / "out")
    assert open_classifier(tmp_path / "out").runtime.dtype == "int8"
    assert open_classifier(tmp_path / "out", file_name="model.onnx").runtime.dtype == "fp32"
    main(["certify", str(tmp_path / "out")])


def test_config_argument_and_watermark_are_saved(saved, directory, tmp_path):
    config = AutoConfig.from_pretrained(directory)
    config.id2label = {0: "no", 1: "maybe", 2: "yes"}
    open_classifier(directory, config=config).save_pretrained(tmp_path / "labels")
    folders = (directory, tmp_path / "labels")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert after == {**before, "id2label": {"0": "no", "1": "maybe", "2": "yes"}}
    open_classifier(directory, config=str(tmp_path / "labels")).save_pretrained(tmp_path / "again")
    assert open_classifier(tmp_path / "again").config.id2label[1] == "maybe"
    generator = ORTModelForCausalLM.from_pretrained(saved("causal").directory)
    generator.generation_config.watermarking_config = WatermarkingConfig(bias=2.5)
    generator.save_pretrained(tmp_path / "marked")
    again = ORTModelForCausalLM.from_pretrained(tmp_path / "marked")
    assert again.generation_config.watermarking_config.bias == 2.5


def test_config_of_cached_hub_repository_is_used(directory, tmp_path):
    """The cache has the layout that huggingface_hub documents."""
    repository = tmp_path / "models--someone--config"
    shutil.copytree(directory, repository / "snapshots/1234")
    (repository / "refs").mkdir()
    (repository / "refs/v1").write_text("1234")
    config = json.loads((directory / "config.json").read_text())
    labels = {"0": "no", "1": "maybe", "2": "yes"}
    (repository / "snapshots/1234/config.json").write_text(
        json.dumps(config | {"id2label": labels})
    )
    cache = {"cache_dir": tmp_path, "local_files_only": True, "revision": "v1"}
    model = open_classifier(directory, config="someone/config", **cache)
    assert model.config.id2label[1] == "maybe"


def test_generation_config_of_model_that_does_not_generate_is_saved(directory, tmp_path):
    model = open_classifier(directory)
    model.generation_config = GenerationConfig(num_beams=3)
    model.save_pretrained(tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").num_beams == 3
    assert open_classifier(tmp_path / "out")(IDS).logits.shape == (2, 3)


def test_save_with_push_to_hub_also_pushes(directory, tmp_path, monkeypatch):
    model, calls = open_classifier(directory), []

    def push(self, repo_id, token=None):
        calls.append((repo_id, token))

    monkeypatch.setattr(type(model), "push_to_hub", push)
    model.save_pretrained(tmp_path / "out", push_to_hub=True, token="t", max_shard_size="1GB")
    model.save_pretrained(tmp_path / "out", push_to_hub=True, repo_id="someone/model")
    assert calls == [("out", "t"), ("someone/model", None)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_temporary_export_is_shared_by_copies_and_processes_but_not_pickled(saved):
    model = open_classifier(saved("classify").checkpoint)
    folder, copies = model.runtime.info.directory, [copy.copy(model), copy.deepcopy(model)]
    with pytest.raises(pickle.PicklingError, match="call save_pretrained"):
        pickle.dumps(model)
    set_spawning_popen(True)  # as while a process starts
    try:
        content = ForkingPickler.dumps(model)
    finally:
        set_spawning_popen(None)
    if (child := os.fork()) == 0:
        try:
            os._exit(pickle.loads(content)(IDS).logits.shape != (2, 3))
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    if (child := os.fork()) == 0:
        for each in (model, *copies):
            each._temporary = None  # as if the model were gone
        os._exit(0)
    os.waitpid(child, 0)
    del model
    assert all(each(IDS).logits.shape == (2, 3) for each in copies)
    del copies
    assert not folder.exists()


def test_bfloat16_inputs_equal_other_inputs(directory):
    model, ids = open_classifier(directory), torch.from_numpy(IDS)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    actual = model(ids, attention_mask=mask.bfloat16()).logits
    assert torch.equal(actual, model(ids, attention_mask=mask).logits)


def test_moving_to_other_device_warns_once_and_outputs_stay_on_model_device(directory, caplog):
    model = open_classifier(directory)
    assert model.to("cuda") is model.to(torch.device("cuda")) is model.to(torch.float16) is model
    assert model.to("cpu").eval().device == torch.device("cpu")
    actual = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in actual] == [
        "the model stays on cpu and cannot move to cuda"
    ]
    assert model(torch.from_numpy(IDS)).logits.device == model.device
    assert model.get_input_embeddings() == SimpleNamespace(num_embeddings=69)


def test_unused_inputs_are_logged_and_outputs_may_be_tuple(directory, caplog):
    model = open_classifier(directory)
    output = model(IDS, labels=np.array([0, 1]), output_attentions=False, return_dict=False)
    assert isinstance(output, tuple) and output[0].shape == (2, 3)
    assert "ORTModelForSequenceClassification ignores labels, which no graph takes" in caplog.text
    assert "output_attentions" not in caplog.text
    with pytest.raises(ValueError, match=r"input_ids must be in \[0, 68\], got 5 to 99"):
        model(np.array([[5, 99]]))


def test_masked_lm_opens_pretraining_model(saved):
    logits = ORTModelForMaskedLM.from_pretrained(saved("pretraining").directory)(IDS).logits
    assert logits.shape == (2, 4, 69)


def test_package_import_does_not_load_torch_or_ort_models():
    code = (
        "import sys, vanilla_transformer_export\n"
        "from vanilla_transformer_export import Runtime, TextRuntime\n"
        "print({'torch', 'transformers', 'vanilla_transformer_export.ort_models'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


@pytest.fixture
def modules():
    """The modules of this process without optimum, which are restored after the test."""
    before = dict(sys.modules)
    for name in before:
        if name.partition(".")[0] == "optimum":  # another test's stand-in
            del sys.modules[name]
    yield sys.modules
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]
    sys.modules.update(before)


def test_optimum_stand_in_is_importable_and_created_once(modules):
    stand_in_for_optimum()
    from optimum.onnxruntime import ONNX_WEIGHTS_NAME
    from optimum.onnxruntime import ORTModelForMaskedLM as theirs

    assert (theirs, ONNX_WEIGHTS_NAME) == (ORTModelForMaskedLM, "model.onnx")
    module = modules["optimum.onnxruntime"]
    stand_in_for_optimum()
    assert modules["optimum.onnxruntime"] is module
    assert importlib.util.find_spec("optimum.onnxruntime") is module.__spec__


def test_optimum_stand_in_raises_if_optimum_onnxruntime_is_installed(
    modules, tmp_path, monkeypatch
):
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


def test_saving_copied_export_keeps_manifest(directory, tmp_path):
    copied = copy_folder(directory, tmp_path)
    manifest = json.loads((copied / "manifest.json").read_text())
    open_classifier(copied).save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/manifest.json").read_text()) == manifest


def test_target_of_the_export_itself_is_not_logged(directory, caplog):
    open_classifier(directory, target="portable")
    assert caplog.records == []
