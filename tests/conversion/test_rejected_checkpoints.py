"""Tests of checkpoints that conversion rejects, each with the reason."""

import os

import pytest
import torch
import transformers
from checkpoints import edit_json, edit_tensors
from families import random_config, random_model
from messages import raises
from saved_families import assert_converts, save_checkpoint
from transformers import AutoTokenizer, BertTokenizer

from vanilla_transformer.conversion import convert, plan_conversion
from vanilla_transformer.conversion.registry import FAMILIES
from vanilla_transformer.conversion.rejected import ANY, REJECTED
from vanilla_transformer_export import export

SPECIAL_TOKENS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
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
