"""Tests of the files that conversion reads, rejects and writes."""

import ctypes
import gc
import json
import logging
import os
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import sentencepiece
import torch
import transformers
from checkpoints import edit_json
from command_line import read_error
from families import assert_exact, compute_outputs, make_arguments, random_config, random_model
from messages import check_message, raises
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

import vanilla_transformer
from vanilla_transformer.conversion import convert, plan_conversion
from vanilla_transformer.conversion.registry import FAMILIES
from vanilla_transformer.conversion.rejected import ANY, REJECTED
from vanilla_transformer_export import TextRuntime, export
from vanilla_transformer_export.cli.main import main

SPECIAL_TOKENS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}


@pytest.fixture
def bert(tmp_path):
    """Save a BERT checkpoint with the masked-LM head; return its directory and the model."""
    return save_checkpoint("BertForMaskedLM", "bert", tmp_path)


def save_checkpoint(architecture, family, tmp_path, **changes):
    config = random_config(family, architecture, 0)
    config.update(changes)
    model = random_model(architecture, config)
    model.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs", model


def edit_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def assert_converts(directory, theirs, tmp_path):
    result = convert(directory, tmp_path / "ours")
    ours = (
        getattr(vanilla_transformer, result["architecture"])
        .from_pretrained(tmp_path / "ours")
        .eval()
    )
    inputs = make_arguments(theirs)
    got, expected = compute_outputs(ours, inputs), compute_outputs(theirs, inputs)
    for name in expected:
        assert_exact(got[name], expected[name], torch.float32)
    return result


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


# ----------------------------------------------------------------------------- rejected checkpoints

UNREPRESENTABLE = [
    ("bert", "BertModel", dict(is_decoder=True)),
    ("bert", "BertModel", dict(position_embedding_type="relative_key")),
    ("roberta", "RobertaModel", dict(is_decoder=True)),
    ("electra", "ElectraForMultipleChoice", dict(summary_type="last")),
    ("gpt2", "GPT2Model", dict(add_cross_attention=True)),
    ("opt", "OPTModel", dict(layer_norm_elementwise_affine=False)),
    ("bart", "BartModel", dict(decoder_ffn_dim=9)),
    ("bart", "BartModel", dict(decoder_attention_heads=2)),
    ("m2m_100", "M2M100Model", dict(pad_token_id=None)),
    (
        "m2m_100",
        "M2M100Model",
        dict(decoder_start_token_id=random_config("m2m_100", "", 0).pad_token_id),
    ),
    ("marian", "MarianModel", dict(decoder_vocab_size=9)),
]


@pytest.mark.parametrize(
    "family, architecture, field",
    UNREPRESENTABLE,
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else x,
)
def test_unsupported_config_value_raises_with_field_name(family, architecture, field, tmp_path):
    directory, _ = save_checkpoint(architecture, family, tmp_path)
    edit_json(directory / "config.json", **field)
    [(name, value)] = field.items()
    with raises(ValueError, seen=(name, value)):
        convert(directory, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_gpt2_whose_tokenizer_gives_it_token_types_is_rejected(tmp_path):
    """GPT-2 adds the embeddings of the tokens 0 and 1 for them, which no text shows: a BERT
    tokenizer changes all states. `generate` passes no token types."""
    directory, model = save_checkpoint("GPT2Model", "gpt2", tmp_path)
    size = model.config.vocab_size
    tokenizer = BertTokenizer({**SPECIAL_TOKENS, **{f"w{id}": id for id in range(5, size)}})
    tokenizer.save_pretrained(directory)
    inputs = AutoTokenizer.from_pretrained(directory)("w7 w9", return_tensors="pt")
    with torch.no_grad():
        states = [model(**inputs), model(inputs["input_ids"])]
    assert (states[0][0] - states[1][0]).abs().max() > 0.01
    with raises(ValueError, seen=(directory, "token_type_ids"), expected="model_input_names"):
        convert(directory, tmp_path / "ours")
    with raises(ValueError, seen="token_type_ids", expected="model_input_names"):
        export(directory, tmp_path / "export")
    edit_json(directory / "tokenizer_config.json", model_input_names=["input_ids"])
    assert_converts(directory, model, tmp_path)
    inputs = ["input_ids", "token_type_ids"]
    edit_json(tmp_path / "ours" / "tokenizer_config.json", model_input_names=inputs)
    with raises(ValueError, seen="token_type_ids", expected="model_input_names"):
        convert(tmp_path / "ours", tmp_path / "back", to="gpt2")
    random_model("GPT2LMHeadModel", model.config).save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    convert(tmp_path / "lm", tmp_path / "our-lm")


def test_odd_width_with_sinusoidal_positions_raises(tmp_path):
    directory, _ = save_checkpoint("MarianModel", "marian", tmp_path)
    edit_json(
        directory / "config.json", d_model=15, encoder_attention_heads=3, decoder_attention_heads=3
    )
    with raises(ValueError, seen=("d_model", 15)):
        plan_conversion(directory)


def test_unsupported_architecture_is_rejected(bert):
    edit_json(bert[0] / "config.json", architectures=["BertLMHeadModel"])
    with raises(ValueError, seen="architectures", expected="BertModel"):
        plan_conversion(bert[0])


def test_unknown_family_is_rejected(bert):
    edit_json(bert[0] / "config.json", model_type="nope")
    with raises(ValueError, seen=("model_type", "nope")):
        plan_conversion(bert[0])


def rejected_name(row):
    return "-".join(str(value) for value in row.fields.values() if value is not ANY)


@pytest.mark.parametrize("row", REJECTED, ids=rejected_name)
def test_rejected_checkpoint_has_reason_and_alternative(row, bert):
    fields = {name: 8 if value is ANY else value for name, value in row.fields.items()}
    is_reachable = len(fields) > 1 or fields.get("model_type") not in FAMILIES
    assert row.reason and row.instead and is_reachable
    for form in (fields, {"rope_scaling": fields}) if "rope_type" in fields else (fields,):
        edit_json(bert[0] / "config.json", **form)
        with raises(ValueError, seen=(*fields, *fields.values(), row.reason, row.instead)):
            plan_conversion(bert[0])


def test_defaults_of_a_class_are_rejected_with_a_reason(tmp_path):
    config = transformers.EuroBertConfig(architectures=["EuroBertForSequenceClassification"])
    config.save_pretrained(tmp_path)  # whose classifier_pooling is late
    with raises(ValueError, seen=("classifier_pooling", "late")):
        plan_conversion(tmp_path)
    transformers.Gemma3TextConfig().save_pretrained(tmp_path)
    with raises(ValueError, seen=("use_bidirectional_attention", False)):
        plan_conversion(tmp_path)


def test_to_is_required_for_our_checkpoints_and_rejected_for_others(bert, tmp_path):
    convert(bert[0], tmp_path / "ours")
    with raises(ValueError, seen="model_type"):
        plan_conversion(tmp_path / "ours")
    with raises(ValueError, seen=("model_type", "bert")):
        plan_conversion(bert[0], to="bert")


@pytest.mark.parametrize(
    "name",
    [
        "bert.adapter.weight",
        "bert.encoder.layer.0.scale",
        "encoder.norm.weight",
        "cls.predictions.scale.weight",
    ],
)
def test_error_names_unknown_tensors(name, bert):
    edit_tensors(
        bert[0], lambda t: t.update({name: torch.ones(3), "cls.chain.weight": torch.ones(2)})
    )
    unknown = name.removeprefix("bert.")
    with raises(ValueError, seen=("BertForMaskedLM", unknown, "--leave-out")):
        plan_conversion(bert[0])


def test_error_names_missing_tensors(bert):
    names = ["encoder.layer.0.output.dense.bias", "cls.predictions.transform.dense.weight"]
    edit_tensors(bert[0], lambda t: [t.pop(f"bert.{names[0]}"), t.pop(names[1])])
    with raises(ValueError, seen=("BertForMaskedLM", ", ".join(names))):
        plan_conversion(bert[0])


def test_error_names_tensors_of_wrong_shape(bert):
    edit_json(bert[0] / "config.json", intermediate_size=999)
    with raises(ValueError, seen=("intermediate.dense.weight", "up_proj.weight"), expected=999):
        plan_conversion(bert[0])


class Payload:
    def __reduce__(self):
        return (os.mkdir, ("payload-ran",))


def test_pickle_with_code_is_rejected_and_not_executed(bert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (bert[0] / "model.safetensors").unlink()
    torch.save({"weight": Payload()}, bert[0] / "pytorch_model.bin")
    with raises(ValueError, seen=("weights_only", True, "GLOBAL")):
        plan_conversion(bert[0])
    assert not (tmp_path / "payload-ran").exists()


def test_truncated_file_is_rejected(bert):
    data = (bert[0] / "model.safetensors").read_bytes()
    (bert[0] / "model.safetensors").write_bytes(data[: len(data) // 2])
    with raises(ValueError, seen=("model.safetensors", len(data) // 2)):
        plan_conversion(bert[0])


def test_error_names_unreachable_hub_id():
    with raises(FileNotFoundError, seen="someone/nothing"):
        plan_conversion("someone/nothing")


def test_error_names_missing_files(bert, tmp_path):
    with raises(FileNotFoundError, seen="nowhere"):
        plan_conversion(tmp_path / "nowhere")
    (bert[0] / "model.safetensors").unlink()
    with raises(FileNotFoundError, expected=("model.safetensors", "pytorch_model.bin")):
        plan_conversion(bert[0])
    (bert[0] / "config.json").unlink()
    with raises(FileNotFoundError, seen="config.json"):
        plan_conversion(bert[0])


def test_existing_conversion_is_replaced_only_with_force(bert, tmp_path):
    for source, out, to in (
        (bert[0], tmp_path / "ours", None),
        (tmp_path / "ours", tmp_path / "again", "bert"),
    ):
        architecture = convert(source, out, to)["architecture"]
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        with raises(FileExistsError, seen=out.name, expected="--force"):
            convert(source, out, to)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        assert convert(source, out, to, force=True)["architecture"] == architecture
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_force_does_not_replace_source_or_foreign_checkpoint(bert, tmp_path):
    convert(bert[0], tmp_path / "ours")
    with raises(FileExistsError, seen="theirs"):
        convert(tmp_path / "ours", bert[0], "bert", force=True)
    with raises(ValueError, seen="ours"):
        convert(tmp_path / "ours", tmp_path / "ours", "bert", force=True)


# ------------------------------------------------------------------------- tokenizers and pipelines


def make_tokenizer(vocab_size, pad, eos, mask=None, template="$A </s>"):
    """Return a tokenizer of words `w3`, `w4` ... with special tokens at the ids of the model."""
    special = {pad: "<pad>", eos: "</s>"} | ({mask: "<mask>"} if mask is not None else {})
    vocabulary = {
        special.get(i, "<unk>" if i == max(special) + 1 else f"w{i}"): i for i in range(vocab_size)
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.WhitespaceSplit(),
        decoders.WordPiece(prefix="##"),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("</s>", eos)]
    )
    tokens = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>") | (
        {"mask_token": "<mask>"} if mask else {}
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="left",
        **tokens,
    )


PIPELINES = [
    ("bert", "BertForMaskedLM", "fill-mask", "w7 w8 <mask> w9"),
    ("roberta", "RobertaForSequenceClassification", "text-classification", "w7 w8 w9"),
    ("distilbert", "DistilBertForTokenClassification", "token-classification", "w7 w8 w9"),
    ("gpt2", "GPT2LMHeadModel", "text-generation", "w7 w8 w9"),
    ("opt", "OPTForCausalLM", "text-generation", "w7 w8 w9"),
]


@pytest.mark.parametrize("family, architecture, task, text", PIPELINES)
def test_converted_checkpoint_gives_same_pipeline_results(
    family, architecture, task, text, tmp_path
):
    directory, model = save_checkpoint(architecture, family, tmp_path)
    config = model.config
    eos = config.eos_token_id if config.eos_token_id is not None else 2
    make_tokenizer(config.vocab_size, config.pad_token_id, eos, mask=5).save_pretrained(directory)
    convert(directory, tmp_path / "ours")
    options = dict(do_sample=False, max_new_tokens=6) if task == "text-generation" else {}
    ours, theirs = (
        pipeline(task, model=str(tmp_path / name))(text, **options) for name in ("ours", "theirs")
    )
    assert [{k: v for k, v in result.items() if "score" not in k} for result in ours] == [
        {k: v for k, v in result.items() if "score" not in k} for result in theirs
    ]
    assert [result.get("score") for result in ours] == pytest.approx(
        [result.get("score") for result in theirs], abs=1e-5
    )


def test_converted_opt_keeps_leading_token_and_generates_same_text(tmp_path):
    directory, theirs = save_checkpoint("OPTForCausalLM", "opt", tmp_path)
    tokenizer = make_tokenizer(
        theirs.config.vocab_size, theirs.config.pad_token_id, 2, template="</s> $A"
    )
    tokenizer.save_pretrained(directory)
    convert(directory, tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "onnx", cases=2)
    texts = ["w7 w8 w9", "w5"]
    result = TextRuntime(tmp_path / "onnx").generate(texts, max_new_tokens=6, min_new_tokens=6)
    for text, line in zip(texts, result, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        assert inputs["input_ids"][0, 0] == 2
        outputs = theirs.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert line == tokenizer.decode(
            outputs[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    assert any(result)


def test_words_of_a_converted_marian_are_aligned_by_the_first_head_of_the_last_layer(tmp_path):
    """The head that CTranslate2 reads, and that Marian's guided training aligns."""
    directory, _ = save_checkpoint("MarianMTModel", "marian", tmp_path, decoder_layers=3)
    convert(directory, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["alignment_heads"] == [[2, 0, "made"]]
    manifest = export(directory, tmp_path / "export", target="cpu", cases=1)
    assert manifest["alignment"] == {"heads": [[2, 0, "made"]]}


def test_converted_marian_has_a_tokenizer_and_gives_same_translations(tmp_path):
    (tmp_path / "text").write_text(
        "\n".join(f"a man sees the dog number {i} in the park" for i in range(200))
    )
    directory, _ = save_checkpoint("MarianMTModel", "marian", tmp_path)
    (tmp_path / "spm").mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "spm" / "source"),
        vocab_size=40,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm" / "source.model"))
    names = [
        "</s>",
        "<unk>",
        *(pieces.id_to_piece(i) for i in range(3, 38)),
        ">>deu<<",
        ">>nld<<",
        "<pad>",
    ]
    for name in ("source.spm", "target.spm"):
        (directory / name).write_bytes((tmp_path / "spm" / "source.model").read_bytes())
    (directory / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"source_lang": "en", "target_lang": "de"})
    )
    tokens = dict(pad_token_id=39, decoder_start_token_id=39, eos_token_id=0, forced_eos_token_id=0)
    config = transformers.MarianConfig(
        **{
            **random_config("marian", "", 0).to_dict(),
            **tokens,
            "vocab_size": 40,
            "decoder_vocab_size": 40,
        }
    )
    model = random_model("MarianMTModel", config)
    model.generation_config.update(
        num_beams=3, max_new_tokens=8, no_repeat_ngram_size=2, min_new_tokens=4, **tokens
    )
    model.save_pretrained(directory)
    facts = convert(directory, tmp_path / "ours")
    assert facts["notes"][0] in str(plan_conversion(directory))
    assert type(AutoTokenizer.from_pretrained(tmp_path / "ours")).__name__ == "TokenizersBackend"
    texts = ["a man sees the dog", "the park"]
    ours, theirs = (
        pipeline("translation", model=str(tmp_path / name))(texts) for name in ("ours", "theirs")
    )
    assert ours == theirs and any(result["translation_text"] for result in ours)


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
