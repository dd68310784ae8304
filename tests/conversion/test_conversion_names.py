"""Conversion of sources whose config.json names no class or a wrong one, or whose tensors are
missing or unknown."""

import json
import logging

import pytest
import torch
import transformers
from checkpoints import SIZES, edit_json, edit_tensors, perturbed
from command_line import main
from families import (
    ARCHITECTURES,
    assert_exact,
    compute_outputs,
    make_arguments,
    random_config,
    random_model,
)
from messages import raises
from safetensors.torch import load_file, save_file

import vanilla_transformer
from vanilla_transformer.conversion import convert, plan_conversion
from vanilla_transformer.errors import UsageError
from vanilla_transformer_export import Runtime, export


def save_random_model(architecture, family, directory, **changes):
    config = random_config(family, architecture, 0)
    config.update(changes)
    model = random_model(architecture, config)
    model.save_pretrained(directory)
    return model


def drop_fields(directory, *names):
    path = directory / "config.json"
    content = json.loads(path.read_text())
    path.write_text(
        json.dumps({name: value for name, value in content.items() if name not in names})
    )


def assert_equal_outputs(directory, theirs, out, **settings):
    facts = convert(directory, out, **settings)
    ours = getattr(vanilla_transformer, facts["architecture"]).from_pretrained(out).eval()
    arguments = make_arguments(theirs)
    got, expected = compute_outputs(ours, arguments), compute_outputs(theirs, arguments)
    assert expected.keys() <= got.keys() and expected
    for name in expected:
        assert_exact(got[name], expected[name], torch.float32)
    return facts


# -------------------------------------------------------------------------------------- class names

OLD_NAMES = [
    ("t5", "T5ForConditionalGeneration", "T5WithLMHeadModel"),
    ("mt5", "MT5ForConditionalGeneration", "T5ForConditionalGeneration"),
    ("bert", "BertForMaskedLM", "TFBertForMaskedLM"),
    ("bart", "BartForConditionalGeneration", "FlaxBartForConditionalGeneration"),
    ("xlm-roberta", "XLMRobertaForMaskedLM", "RobertaForMaskedLM"),
    ("bert", "BertForMaskedLM", "AntibodyModel"),  # a custom class, inferred from the tensors
]


@pytest.mark.parametrize("family, architecture, name", OLD_NAMES)
def test_old_or_foreign_class_name_is_resolved_with_note(family, architecture, name, tmp_path):
    model = save_random_model(architecture, family, tmp_path / "theirs")
    edit_json(tmp_path / "theirs" / "config.json", architectures=[name])
    [note] = assert_equal_outputs(tmp_path / "theirs", model, tmp_path / "ours")["notes"]
    assert name in note and architecture in note


BY_TENSORS = [
    ("bert", "BertModel"),
    ("bert", "BertForPreTraining"),
    ("bert", "BertForMaskedLM"),
    ("bert", "BertForTokenClassification"),
    ("distilbert", "DistilBertModel"),
    ("distilbert", "DistilBertForSequenceClassification"),
    ("electra", "ElectraForPreTraining"),
    ("roberta", "RobertaForSequenceClassification"),
    ("gpt2", "GPT2Model"),
    ("gpt2", "GPT2LMHeadModel"),
    ("opt", "OPTForCausalLM"),
    ("bart", "BartForConditionalGeneration"),
    ("t5", "T5EncoderModel"),
    ("t5", "T5ForQuestionAnswering"),
    ("vit", "ViTForImageClassification"),
]


@pytest.mark.parametrize("family, architecture", BY_TENSORS)
def test_missing_architectures_are_inferred_from_tensors(family, architecture, tmp_path):
    save_random_model(architecture, family, tmp_path)
    expected = str(plan_conversion(tmp_path)).splitlines()
    for missing in (None, [], "absent") if architecture == "BertModel" else ("absent",):
        if missing == "absent":
            drop_fields(tmp_path, "architectures")
        else:
            edit_json(tmp_path / "config.json", architectures=missing)
        plan = plan_conversion(tmp_path)
        assert str(plan).splitlines() == [*expected, *plan.remarks], missing
        assert len(plan.remarks) == 1 and architecture in plan.remarks[0]


@pytest.mark.parametrize("name", ["SentenceTransformer", "AutoModel"])
def test_family_is_inferred_for_unknown_class_and_auto_class_is_rejected(name, tmp_path):
    """config.json names a class that is not a model, and has no model_type."""
    save_random_model("DistilBertModel", "distilbert", tmp_path)
    edit_json(tmp_path / "config.json", architectures=[name])
    drop_fields(tmp_path, "model_type")
    if name == "AutoModel":  # a class of transformers: users have to set the right one
        with raises(ValueError, expected=("DistilBertModel", "--set", "architectures")):
            plan_conversion(tmp_path)
    else:
        assert type(plan_conversion(tmp_path).model).__name__ == "VanillaEncoderModel"


def test_ambiguous_class_is_rejected_until_architectures_is_set(tmp_path):
    """BERT taggers of 2019 have a pooler, and their config names no architecture."""
    model = save_random_model("BertForTokenClassification", "bert", tmp_path / "theirs")
    width = model.config.hidden_size
    pooler = {
        "bert.pooler.dense.weight": torch.ones(width, width),
        "bert.pooler.dense.bias": torch.ones(width),
    }
    edit_tensors(tmp_path / "theirs", lambda t: t.update(pooler))
    drop_fields(tmp_path / "theirs", "architectures")
    classes = ("BertForSequenceClassification", "BertForTokenClassification")
    with raises(ValueError, seen="architectures", expected=(*classes, "--set")):
        plan_conversion(tmp_path / "theirs")
    settings = dict(config={"architectures": "BertForTokenClassification"})
    assert_equal_outputs(tmp_path / "theirs", model, tmp_path / "ours", **settings)


@pytest.mark.parametrize(
    "family, architecture",
    [("bert", "BertForMaskedLM"), ("gpt2", "GPT2LMHeadModel"), ("vit", "ViTModel")],
)
@pytest.mark.parametrize("names_class", [True, False])
def test_missing_model_type_is_inferred_from_class_or_tensors(
    family, architecture, names_class, tmp_path
):
    model = save_random_model(architecture, family, tmp_path / "theirs")
    drop_fields(tmp_path / "theirs", "model_type", *(() if names_class else ("architectures",)))
    facts = assert_equal_outputs(tmp_path / "theirs", model, tmp_path / "ours")
    assert len(facts["notes"]) == (0 if names_class else 2)


def test_ambiguous_family_is_resolved_by_setting_or_vocabulary(tmp_path):
    model = save_random_model("BertModel", "bert", tmp_path / "theirs")
    drop_fields(tmp_path / "theirs", "model_type", "architectures", "pad_token_id")
    with raises(
        ValueError, seen=("model_type", None), expected=("bert", "--set", "model_type", "NAME")
    ):
        plan_conversion(tmp_path / "theirs")
    assert_equal_outputs(
        tmp_path / "theirs", model, tmp_path / "ours", config={"model_type": "bert"}
    )
    words = [
        *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        *(f"w{i}" for i in range(5, model.config.vocab_size)),
    ]
    (tmp_path / "theirs" / "vocab.txt").write_text("\n".join(words))
    facts = assert_equal_outputs(tmp_path / "theirs", model, tmp_path / "again")
    assert facts["tokenizer"] == "BertTokenizer"


def test_error_names_unsupported_family_of_class(tmp_path):
    save_random_model("BertModel", "bert", tmp_path)
    edit_json(tmp_path / "config.json", architectures=["LongformerModel"])
    drop_fields(tmp_path, "model_type")
    with raises(ValueError, seen=("model_type", "Longformer")):
        plan_conversion(tmp_path)


def test_convert_and_export_commands_set_config_fields(tmp_path, capsys):
    model = save_random_model("BertForMaskedLM", "bert", tmp_path / "theirs")
    edit_json(
        tmp_path / "theirs" / "config.json",
        model_type="nope",
        architectures=["Nope"],
        hidden_act="nope",
    )
    fields = [
        "model_type=bert",
        "architectures=BertForMaskedLM",
        f"hidden_act={model.config.hidden_act}",
    ]
    words = [word for field in fields for word in ("--set", field)]
    main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), *words])
    ours = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours").eval()
    arguments = make_arguments(model)
    assert_exact(
        compute_outputs(ours, arguments)["logits"],
        compute_outputs(model, arguments)["logits"],
        torch.float32,
    )
    main(["export", str(tmp_path / "theirs"), str(tmp_path / "export"), *words])
    result = Runtime(tmp_path / "export").outputs(
        **{name: tensor.numpy() for name, tensor in arguments.items()}
    )["logits"]
    mask = arguments["attention_mask"].bool()
    assert_exact(
        torch.from_numpy(result)[mask], compute_outputs(model, arguments)["logits"], torch.float32
    )


def test_config_and_leave_out_are_rejected_for_vanilla_checkpoints(tmp_path):
    perturbed("VanillaEncoderModel", SIZES).save_pretrained(tmp_path / "ours")
    with raises(UsageError, seen="bert"):
        convert(tmp_path / "ours", tmp_path / "out", to="bert", config={"vocab_size": 9})
    with raises(UsageError, seen=("leave_out", "x")):
        export(tmp_path / "ours", tmp_path / "out", leave_out=["x"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "field, value", [("model_type", 5), ("architectures", 5), ("architectures", {"a": 1})]
)
def test_config_field_of_wrong_type_is_rejected(field, value, tmp_path):
    save_random_model("BertModel", "bert", tmp_path)
    with raises(ValueError, seen=(field, value)):
        plan_conversion(tmp_path, config={field: value})


# ------------------------------------------------------------------------------------ missing heads

HEADLESS = [
    ("bert", "BertModel"),
    ("roberta", "RobertaModel"),
    ("mpnet", "MPNetModel"),
    ("distilbert", "DistilBertModel"),
    ("electra", "ElectraModel"),
    ("gpt2", "GPT2Model"),
    ("opt", "OPTModel"),
    ("biogpt", "BioGptModel"),
    ("bart", "BartModel"),
    ("t5", "T5Model"),
    ("vit", "ViTModel"),
    ("deit", "DeiTModel"),
]
HEADS = ("MaskedLM", "PreTraining", "Classification", "WithTeacher", "QuestionAnswering")


@pytest.mark.parametrize("family, base", HEADLESS)
def test_base_class_is_converted_if_head_is_missing(family, base, tmp_path):
    model = save_random_model(base, family, tmp_path / "theirs")
    expected = str(plan_conversion(tmp_path / "theirs")).splitlines()
    for head in ARCHITECTURES[family]:
        if not head.endswith(HEADS) or head == "T5ForTokenClassification":
            continue
        edit_json(tmp_path / "theirs" / "config.json", architectures=[head])
        plan = plan_conversion(tmp_path / "theirs")
        note = f"the head of {head} is missing, so the base class {base} is converted"
        assert plan.notes == [note] and str(plan).splitlines() == [*expected, note]
    facts = assert_equal_outputs(tmp_path / "theirs", model, tmp_path / "ours")
    assert facts["notes"] == [note]


def test_base_class_is_converted_if_untied_head_is_missing(tmp_path):
    model = save_random_model("GPT2Model", "gpt2", tmp_path / "theirs", tie_word_embeddings=False)
    edit_json(tmp_path / "theirs" / "config.json", architectures=["GPT2LMHeadModel"])
    notes = assert_equal_outputs(tmp_path / "theirs", model, tmp_path / "ours")["notes"]
    assert notes == [
        "the head of GPT2LMHeadModel is missing, so the base class GPT2Model is converted"
    ]


@pytest.mark.parametrize(
    "family, architecture",
    [("t5", "T5ForConditionalGeneration"), ("mt5", "MT5ForConditionalGeneration")],
)
def test_missing_t5_head_is_tied_as_in_transformers(family, architecture, tmp_path):
    save_random_model(
        architecture.replace("ForConditionalGeneration", "Model"),
        family,
        tmp_path / "theirs",
        tie_word_embeddings=True,
    )
    edit_json(
        tmp_path / "theirs" / "config.json", architectures=[architecture], tie_word_embeddings=False
    )
    model = getattr(transformers, architecture).from_pretrained(tmp_path / "theirs").eval()
    assert assert_equal_outputs(tmp_path / "theirs", model, tmp_path / "ours")["notes"] == []


def test_t5_encoder_is_converted_if_classifier_is_missing(tmp_path):
    model = save_random_model("T5EncoderModel", "t5", tmp_path / "theirs")
    edit_json(tmp_path / "theirs" / "config.json", architectures=["T5ForTokenClassification"])
    notes = assert_equal_outputs(tmp_path / "theirs", model, tmp_path / "ours")["notes"]
    assert notes == [
        "the head of T5ForTokenClassification is missing, so the base class T5EncoderModel is "
        "converted"
    ]


@pytest.mark.parametrize(
    "family, architecture, kept",
    [
        ("bert", "BertForMaskedLM", "cls.predictions.transform"),
        ("roberta", "RobertaForMaskedLM", "lm_head.dense"),
        ("roberta", "RobertaForSequenceClassification", "classifier.dense"),
        ("distilbert", "DistilBertForSequenceClassification", "pre_classifier"),
        ("deit", "DeiTForImageClassificationWithTeacher", "cls_classifier"),
    ],
)
def test_incomplete_head_is_rejected(family, architecture, kept, tmp_path):
    model = save_random_model(architecture, family, tmp_path)
    body = f"{model.base_model_prefix}."
    edit_tensors(
        tmp_path, lambda t: [t.pop(name) for name in list(t) if not name.startswith((body, kept))]
    )
    with raises(ValueError, seen=architecture):
        plan_conversion(tmp_path)


def test_incomplete_base_model_is_rejected(tmp_path):
    save_random_model("MPNetModel", "mpnet", tmp_path)
    edit_json(tmp_path / "config.json", architectures=["MPNetForMaskedLM"])
    edit_tensors(tmp_path, lambda t: t.pop("encoder.layer.0.attention.attn.q.weight"))
    with raises(ValueError, seen=("MPNetForMaskedLM", "encoder.layer.0.attention.attn.q.weight")):
        plan_conversion(tmp_path)


def test_error_names_missing_weights_and_matching_class(tmp_path):
    save_random_model("BertForMaskedLM", "bert", tmp_path)
    edit_json(tmp_path / "config.json", architectures=["BertForQuestionAnswering"])
    missing = ("BertForQuestionAnswering", "qa_outputs.weight", "qa_outputs.bias")
    with raises(ValueError, seen=(*missing, "BertForMaskedLM", "--set")):
        plan_conversion(tmp_path)


def test_export_without_head_logs_warning(tmp_path, caplog, monkeypatch):
    model = save_random_model("MPNetModel", "mpnet", tmp_path / "theirs")
    edit_json(tmp_path / "theirs" / "config.json", architectures=["MPNetForMaskedLM"])
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    export(tmp_path / "theirs", tmp_path / "export", cases=3)
    assert "MPNetForMaskedLM" in caplog.text
    arguments = make_arguments(model)
    result = Runtime(tmp_path / "export").outputs(
        **{name: tensor.numpy() for name, tensor in arguments.items()}
    )
    states = torch.from_numpy(result["last_hidden_state"])[arguments["attention_mask"].bool()]
    assert_exact(states, compute_outputs(model, arguments)["last_hidden_state"], torch.float32)


# ---------------------------------------------------------------------------------- unknown tensors

EXTRA_TENSORS = [
    ("bert", "BertForMaskedLM", "cls.chain.dense.weight"),
    ("bert", "BertForTokenClassification", "crf.transitions"),
    ("gpt2", "GPT2LMHeadModel", "v_head.summary.weight"),
    ("roberta", "RobertaModel", "projection.weight"),
    ("bart", "BartForConditionalGeneration", "length_predictor.weight"),
    ("t5", "T5ForConditionalGeneration", "value_head.0.weight"),
    ("vit", "ViTForImageClassification", "decoder.0.weight"),
]


@pytest.mark.parametrize("family, architecture, name", EXTRA_TENSORS)
def test_extra_heads_are_left_out_and_reported(family, architecture, name, tmp_path):
    model = save_random_model(architecture, family, tmp_path / "theirs")
    edit_tensors(tmp_path / "theirs", lambda t: t.update({name: torch.ones(2, 2)}))
    facts = assert_equal_outputs(tmp_path / "theirs", model, tmp_path / "ours")
    assert facts["left_out"] == [name]
    assert facts["notes"] == [f"left out tensors that no class of {family} has: {name}"]


@pytest.mark.parametrize(
    "pattern", ["encoder.layer.*.adapter.*", "bert.encoder.*.adapter.weight", "*adapter*"]
)
def test_leave_out_pattern_matches_tensors_inside_layers(pattern, tmp_path, capsys):
    model = save_random_model("BertForMaskedLM", "bert", tmp_path / "theirs")
    edit_tensors(
        tmp_path / "theirs",
        lambda t: t.update({"bert.encoder.layer.0.adapter.weight": torch.ones(2)}),
    )
    main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--leave-out", pattern])
    assert json.loads(capsys.readouterr().out)["left_out"] == ["encoder.layer.0.adapter.weight"]
    facts = assert_equal_outputs(
        tmp_path / "theirs", model, tmp_path / "again", leave_out=[pattern]
    )
    assert facts["left_out"] == ["encoder.layer.0.adapter.weight"]


def test_leave_out_of_nothing_or_of_required_tensors_is_rejected(tmp_path):
    save_random_model("BertForMaskedLM", "bert", tmp_path)
    with raises(ValueError, seen="leave_out", expected="cls.predictions"):
        plan_conversion(tmp_path, leave_out=["clls.*"])
    with raises(ValueError, seen=("BertForMaskedLM", "encoder.layer.0.attention")):
        plan_conversion(tmp_path, leave_out=["*.attention.*"])


@pytest.mark.parametrize(
    "prefix", ["model.", "module.", "module.model.", "0.auto_model.", "encoder."]
)
@pytest.mark.parametrize(
    "family, architecture",
    [("bert", "BertForMaskedLM"), ("bart", "BartModel"), ("gpt2", "GPT2Model")],
)
def test_error_names_foreign_prefix_of_tensors(family, architecture, prefix, tmp_path):
    save_random_model(architecture, family, tmp_path)
    if prefix == "model." and family == "bart":
        prefix = "net."  # BART's base model has this prefix itself
    edit_tensors(
        tmp_path, lambda t: [t.update({f"{prefix}{name}": t.pop(name)}) for name in list(t)]
    )
    with raises(ValueError, seen=prefix):
        plan_conversion(tmp_path)


@pytest.mark.parametrize(
    "family, architecture, bias, changes",
    [
        ("t5", "T5EncoderModel", "encoder.block.0.layer.0.SelfAttention.k.bias", {}),
        ("opt", "OPTForCausalLM", "model.decoder.layers.0.fc1.bias", {"enable_bias": False}),
        ("llama", "LlamaForCausalLM", "model.layers.0.mlp.up_proj.bias", {}),
    ],
)
def test_bias_that_the_config_lacks_is_an_error(family, architecture, bias, changes, tmp_path):
    save_random_model(architecture, family, tmp_path / "theirs", **changes)
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    width = len(tensors[bias.replace(".bias", ".weight")])
    save_file(tensors | {bias: torch.ones(width)}, file, {"format": "pt"})
    with raises(ValueError, seen=bias.removeprefix("model.")):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
