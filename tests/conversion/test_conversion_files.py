"""Tests of the files that conversion reads and writes, in the layouts of their versions."""

import ctypes
import gc
import json
import logging
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import edit_json, edit_tensors
from command_line import main, read_error
from families import random_config, random_model
from messages import check_message, raises
from safetensors.torch import load_file
from saved_families import assert_converts, save_checkpoint
from transformers import AutoModel

import vanilla_transformer
from vanilla_transformer.conversion import convert, plan_conversion

# ------------------------------------------------------------------------------------------ layouts


def test_sharded_checkpoint_is_converted(bert, tmp_path):
    directory, model = bert
    model.save_pretrained(tmp_path / "shards", max_shard_size=4000)
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    assert_converts(tmp_path / "shards", model, tmp_path)


@pytest.mark.parametrize("shards", [1, 2])
def test_pickled_weights_are_converted(bert, shards, tmp_path):
    directory, model = bert
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {
        f"pytorch_model-{i}.bin" if shards > 1 else "pytorch_model.bin": names[i::shards]
        for i in range(shards)
    }
    for file, part in parts.items():
        torch.save({name: tensors[name] for name in part}, directory / file)
    if shards > 1:
        index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_converts(directory, model, tmp_path)


def test_tensorflow_tensor_names_are_converted(bert, tmp_path):
    directory, model = bert

    def rename(tensors):
        for name in list(tensors):
            old = re.sub(
                r"LayerNorm\.bias$",
                "LayerNorm.beta",
                re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", name),
            )
            tensors[old] = tensors.pop(name)

    edit_tensors(directory, rename)
    assert_converts(directory, model, tmp_path)


@pytest.mark.parametrize(
    "family, architecture, prefix",
    [("gpt2", "GPT2LMHeadModel", "transformer."), ("bert", "BertModel", "")],
)
def test_tensor_names_with_and_without_base_model_prefix_are_converted(
    family, architecture, prefix, tmp_path
):
    directory, model = save_checkpoint(architecture, family, tmp_path)

    def rename(tensors):
        for name in list(tensors):
            tensors[name.removeprefix(prefix) if prefix else f"bert.{name}"] = tensors.pop(name)

    edit_tensors(directory, rename)
    assert_converts(directory, model, tmp_path)


def test_tensors_of_other_heads_are_reported_as_left_out(tmp_path):
    """bert-base-uncased is such a checkpoint.

    Its config names the masked-LM head, and its file has all heads of pre-training.
    """
    directory, model = save_checkpoint("BertForPreTraining", "bert", tmp_path)
    edit_json(directory / "config.json", architectures=["BertForMaskedLM"])
    masked = transformers.BertForMaskedLM.from_pretrained(directory).eval()
    result = assert_converts(directory, masked, tmp_path)
    assert result["left_out"] == sorted(
        f"{name}.{part}"
        for name in ("cls.seq_relationship", "pooler.dense")
        for part in ("weight", "bias")
    )


def test_buffers_of_old_checkpoints_are_ignored(tmp_path):
    directory, model = save_checkpoint("GPT2LMHeadModel", "gpt2", tmp_path)
    edit_tensors(
        directory,
        lambda t: t.update(
            {
                "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8),
                "transformer.h.0.attn.masked_bias": torch.ones(()),
            }
        ),
    )
    assert assert_converts(directory, model, tmp_path)["left_out"] == []


@pytest.mark.parametrize(
    "family, architecture, name",
    [
        ("marian", "MarianMTModel", "model.encoder.embed_positions.weight"),
        ("pegasus", "PegasusForConditionalGeneration", "model.decoder.embed_positions.weight"),
        ("m2m_100", "M2M100ForConditionalGeneration", "model.encoder.embed_positions.weights"),
    ],
)
def test_stored_sinusoidal_table_is_accepted_and_other_tables_raise(
    family, architecture, name, tmp_path
):
    directory, model = save_checkpoint(architecture, family, tmp_path)
    table = model.get_parameter_or_buffer(name).clone()
    edit_tensors(directory, lambda t: t.update({name: table}))
    assert_converts(directory, model, tmp_path)
    for wrong in (table + 0.1, table[:, 1:].contiguous()):
        edit_tensors(directory, lambda t, wrong=wrong: t.update({name: wrong}))
        with raises(ValueError, seen=name.removeprefix("model.")):
            plan_conversion(directory)


HEADS = {
    "BertForMaskedLM": ("bert", "cls.predictions.decoder.weight"),
    "GPT2LMHeadModel": ("gpt2", "lm_head.weight"),
    "BartForConditionalGeneration": ("bart", "lm_head.weight"),
    "MarianMTModel": ("marian", "lm_head.weight"),
    "M2M100ForConditionalGeneration": ("m2m_100", "lm_head.weight"),
    "PegasusForCausalLM": ("pegasus", "lm_head.weight"),
    "T5ForConditionalGeneration": ("t5", "lm_head.weight"),  # untied, and still scaled
    "MT5ForConditionalGeneration": ("mt5", "lm_head.weight"),
}


@pytest.mark.parametrize("architecture", HEADS)
def test_head_that_differs_from_embeddings_is_converted_untied(architecture, tmp_path):
    family, head = HEADS[architecture]
    directory, model = save_checkpoint(architecture, family, tmp_path, tie_word_embeddings=True)
    other = torch.empty_like(model.get_input_embeddings().weight).uniform_(-0.4, 0.4)
    edit_tensors(directory, lambda t: t.update({head: other}))
    theirs = type(model).from_pretrained(directory).eval()
    assert torch.equal(theirs.get_output_embeddings().weight, other) and not torch.equal(
        model.get_input_embeddings().weight, other
    )
    assert_converts(directory, theirs, tmp_path)
    assert not transformers.AutoConfig.from_pretrained(tmp_path / "ours").tie_word_embeddings


@pytest.mark.parametrize(
    "family, architecture",
    [("mbart", "MBartModel"), ("m2m_100", "M2M100Model"), ("opt", "OPTModel")],
)
def test_training_only_fields_are_reported_as_left_out(family, architecture, tmp_path):
    name = "layerdrop" if family == "opt" else "decoder_layerdrop"
    directory, model = save_checkpoint(architecture, family, tmp_path, **{name: 0.1})
    assert assert_converts(directory, model, tmp_path)["left_out"][-1] == f"{name}=0.1"
    assert f"{name}=0.1" in str(plan_conversion(directory)).splitlines()[-1]


def test_base_model_without_pooler_is_converted(tmp_path):
    directory, _ = save_checkpoint("BertModel", "bert", tmp_path)
    edit_tensors(directory, lambda t: [t.pop(name) for name in list(t) if "pooler" in name])
    convert(directory, tmp_path / "ours")
    model = AutoModel.from_pretrained(tmp_path / "ours")
    assert model.pooler is None and model.config.pooler_act is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tensors_keep_their_dtype(dtype, tmp_path):
    model = random_model("BartForConditionalGeneration", random_config("bart", "", 0)).to(dtype)
    model.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert {
        tensor.dtype for tensor in load_file(tmp_path / "ours" / "model.safetensors").values()
    } == {dtype}
    assert transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").dtype == dtype


def test_special_tokens_outside_the_vocabulary_become_none(tmp_path):
    directory, model = save_checkpoint(
        "GPT2LMHeadModel", "gpt2", tmp_path, bos_token_id=50256, eos_token_id=50256
    )
    assert_converts(directory, model, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    assert config.bos_token_id is None and config.eos_token_id is None


def memory_of_conversion(root):
    """Return the bytes by which the memory of this process, a fork, grows when it converts the
    checkpoint `large` of the directory `root`. It converts `small` before."""
    torch.set_num_threads(1)  # the threads of the first process are not in a fork
    convert(root / "small", root / "small-ours")  # a fork maps the code of libraries anew
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that is held already would hide what is needed
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
    before = peak()
    convert(root / "large", root / "large-ours")
    return peak() - before


def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak of a process is read there"
)
@pytest.mark.parametrize("kind", ["safetensors", pytest.param("bin", marks=pytest.mark.slow)])
def test_peak_memory_is_below_1_3_times_the_checkpoint(tmp_path, kind):
    for name, fields in (("small", dict(n_layer=1, n_embd=8, vocab_size=20)), ("large", {})):
        sizes = (
            dict(vocab_size=10000, n_embd=512, n_layer=6, n_head=4, bos_token_id=1, eos_token_id=1)
            | fields
        )
        with torch.device("meta"):
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        model.to_empty(device="cpu").tie_weights()
        for parameter in model.parameters():
            parameter.data.zero_()
        model.save_pretrained(tmp_path / name)
        if kind == "bin":
            (tmp_path / name / "model.safetensors").unlink()
            torch.save(model.state_dict(), tmp_path / name / "pytorch_model.bin")
    size = max(file.stat().st_size for file in (tmp_path / "large").iterdir())
    assert size > 90e6
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        assert pool.submit(memory_of_conversion, tmp_path).result(300) < 1.3 * size


def test_pickle_from_before_torch_1_6_is_converted_with_warning(tmp_path, caplog, monkeypatch):
    directory, model = save_checkpoint("BertModel", "bert", tmp_path)
    (directory / "model.safetensors").unlink()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for is_zip in (True, False):
        torch.save(
            model.state_dict(),
            directory / "pytorch_model.bin",
            _use_new_zipfile_serialization=is_zip,
        )
        assert not caplog.text
        convert(directory, tmp_path / f"ours-{is_zip}")
    check_message(caplog.text, seen=("pytorch_model.bin", 1.6))
    weights = [
        load_file(tmp_path / f"ours-{is_zip}" / "model.safetensors") for is_zip in (True, False)
    ]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


# ------------------------------------------------------------------------------------- command line


def test_dry_run_prints_mapping_and_writes_nothing(bert, tmp_path, capsys):
    main(["convert", str(bert[0]), str(tmp_path / "ours"), "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    width = bert[1].config.hidden_size
    assert lines[0].startswith("VanillaEncoderForMaskedLM, ")
    assert f"pooler.dense.bias -> model.pooler.dense.bias [{width}]" not in lines
    query = "encoder.layer.0.attention.self.query.bias -> model.layers.0.self_attn.q_proj.bias"
    assert f"{query} [{width}]" in lines
    assert len(lines) == 1 + len(load_file(bert[0] / "model.safetensors"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def test_dry_run_of_gpt2_shows_split_and_transposed_tensors(tmp_path, capsys):
    directory, _ = save_checkpoint("GPT2Model", "gpt2", tmp_path)
    main(["convert", str(directory), str(tmp_path / "ours"), "--dry-run"])
    [line] = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("h.0.attn.c_attn.weight")
    ]
    assert all(f"layers.0.self_attn.{projection}_proj.weight" in line for projection in "qkv")
    assert "(in three parts, transposed" in line


def test_command_converts_in_both_directions(bert, tmp_path, capsys):
    main(["convert", str(bert[0]), str(tmp_path / "ours")])
    printed = json.loads(capsys.readouterr().out)
    assert (
        printed["architecture"] == "VanillaEncoderForMaskedLM"
        and printed["parameters"] == bert[1].num_parameters()
    )
    main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "bert"])
    assert json.loads(capsys.readouterr().out)["architecture"] == "BertForMaskedLM"


def test_command_error_is_one_line_with_file_and_field(bert, tmp_path):
    edit_json(bert[0] / "config.json", is_decoder=True)
    message = read_error("convert", bert[0], tmp_path / "ours")
    check_message(message, seen=("config.json", "is_decoder", True), expected=False)


def test_converted_checkpoint_has_code_and_auto_map_of_saved_model(bert, tmp_path):
    """test_remote_code.py runs the code of saved models without the package."""
    convert(bert[0], tmp_path / "ours")
    model = vanilla_transformer.VanillaEncoderForMaskedLM.from_pretrained(tmp_path / "ours")
    model.save_pretrained(tmp_path / "saved")
    saved, ours = (
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.py")}
        for name in ("saved", "ours")
    )
    assert saved == ours and ours.keys() == {
        "configuration_vanilla_transformer.py",
        "layers_vanilla_transformer.py",
        "modeling_vanilla_transformer.py",
    }
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["auto_map"] == vanilla_transformer.VanillaEncoderConfig.default_auto_map
    assert config["architectures"] == ["VanillaEncoderForMaskedLM"]


@pytest.mark.parametrize("token, ours", [(39, 39), (40, None), ([2, 40], None), (-1, None)])
def test_special_tokens_outside_the_vocabulary_are_none(tmp_path, token, ours):
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    config = transformers.BertConfig(vocab_size=40, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "there")
    edit_json(tmp_path / "there" / "config.json", eos_token_id=token)
    convert(tmp_path / "there", tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text()).get("eos_token_id") == ours
