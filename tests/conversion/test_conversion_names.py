"""Sources whose config.json does not name what their tensors are, or names more than the files
hold."""

import json
import logging

import pytest
import torch
import transformers
from checkpoints import SIZES, edit_json, perturbed
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
from vanilla_transformer_export.cli.main import main


def saved(architecture, family, directory, **changes):
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


def edit_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def assert_equal_outputs(directory, theirs, out, **settings):
    facts = convert(directory, out, **settings)
    ours = getattr(vanilla_transformer, facts["architecture"]).from_pretrained(out).eval()
    given = make_arguments(theirs)
    got, expected = compute_outputs(ours, given), compute_outputs(theirs, given)
    assert expected.keys() <= got.keys() and expected
    for name in expected:
        assert_exact(got[name], expected[name], torch.float32)
    return facts


# --------------------------------------------------------------------------------- names of classes

OLD_NAMES = [
    ("t5", "T5ForConditionalGeneration", "T5WithLMHeadModel"),
    ("mt5", "MT5ForConditionalGeneration", "T5ForConditionalGeneration"),
    ("bert", "BertForMaskedLM", "TFBertForMaskedLM"),
    ("bart", "BartForConditionalGeneration", "FlaxBartForConditionalGeneration"),
    ("xlm-roberta", "XLMRobertaForMaskedLM", "RobertaForMaskedLM"),
    ("bert", "BertForMaskedLM", "AntibodyModel"),  # a class of its own, read by the tensors
]


@pytest.mark.parametrize("family, architecture, name", OLD_NAMES)
def test_old_names_of_classes_and_those_of_other_frameworks(family, architecture, name, tmp_path):
    model = saved(architecture, family, tmp_path / "theirs")
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


@pytest.mark.parametrize("missing", [None, [], "absent"], ids=str)
@pytest.mark.parametrize("family, architecture", BY_TENSORS)
def test_without_architectures_the_class_is_the_one_that_the_tensors_fit(
    family, architecture, missing, tmp_path
):
    saved(architecture, family, tmp_path)
    expected = str(plan_conversion(tmp_path)).splitlines()
    if missing == "absent":
        drop_fields(tmp_path, "architectures")
    else:
        edit_json(tmp_path / "config.json", architectures=missing)
    plan = plan_conversion(tmp_path)
    assert str(plan).splitlines() == [*expected, *plan.remarks]
    assert len(plan.remarks) == 1 and architecture in plan.remarks[0]


@pytest.mark.parametrize("name", ["SentenceTransformer", "AutoModel"])
def test_a_family_is_found_beside_a_class_that_is_no_model(name, tmp_path):
    """The class stands in config.json without a model_type."""
    saved("DistilBertModel", "distilbert", tmp_path)
    edit_json(tmp_path / "config.json", architectures=[name])
    drop_fields(tmp_path, "model_type")
    if name == "AutoModel":  # which transformers has: users say what it is
        with raises(ValueError, expected=("DistilBertModel", "--set", "architectures")):
            plan_conversion(tmp_path)
    else:
        assert type(plan_conversion(tmp_path).model).__name__ == "VanillaEncoderModel"


def test_an_old_tagger_with_a_pooler_could_be_two_classes(tmp_path):
    """Files of 2019 look like this: they have a pooler, and their config names no architecture."""
    model = saved("BertForTokenClassification", "bert", tmp_path / "theirs")
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
def test_without_a_model_type_the_family_is_that_of_the_class_or_of_the_tensors(
    family, architecture, names_class, tmp_path
):
    model = saved(architecture, family, tmp_path / "theirs")
    drop_fields(tmp_path / "theirs", "model_type", *(() if names_class else ("architectures",)))
    facts = assert_equal_outputs(tmp_path / "theirs", model, tmp_path / "ours")
    assert len(facts["notes"]) == (0 if names_class else 2)


def test_bases_of_several_families_are_told_apart_by_a_vocabulary_or_a_flag(tmp_path):
    model = saved("BertModel", "bert", tmp_path / "theirs")
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


def test_a_family_that_cannot_be_converted_is_known_by_its_class(tmp_path):
    saved("BertModel", "bert", tmp_path)
    edit_json(tmp_path / "config.json", architectures=["AlbertModel"])
    drop_fields(tmp_path, "model_type")
    with raises(ValueError, seen=("model_type", "ALBERT")):
        plan_conversion(tmp_path)


def test_fields_are_set_on_the_command_line_for_both_verbs(tmp_path, capsys):
    model = saved("BertForMaskedLM", "bert", tmp_path / "theirs")
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
    given = make_arguments(model)
    assert_exact(
        compute_outputs(ours, given)["logits"],
        compute_outputs(model, given)["logits"],
        torch.float32,
    )
    main(["export", str(tmp_path / "theirs"), str(tmp_path / "export"), *words])
    result = Runtime(tmp_path / "export").outputs(
        **{name: tensor.numpy() for name, tensor in given.items()}
    )["logits"]
    mask = given["attention_mask"].bool()
    assert_exact(
        torch.from_numpy(result)[mask], compute_outputs(model, given)["logits"], torch.float32
    )


def test_fields_and_patterns_are_not_for_checkpoints_of_ours(tmp_path):
    perturbed("VanillaEncoderModel", SIZES).save_pretrained(tmp_path / "ours")
    with raises(UsageError, seen="bert"):
        convert(tmp_path / "ours", tmp_path / "out", to="bert", config={"vocab_size": 9})
    with raises(UsageError, seen=("leave_out", "x")):
        export(tmp_path / "ours", tmp_path / "out", leave_out=["x"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "field, value", [("model_type", 5), ("architectures", 5), ("architectures", {"a": 1})]
)
def test_a_field_of_a_wrong_type_is_refused(field, value, tmp_path):
    saved("BertModel", "bert", tmp_path)
    with raises(ValueError, seen=(field, value)):
        plan_conversion(tmp_path, config={field: value})


# ------------------------------------------------------------------------------------ missing heads

HEADLESS = [
    (family, base, head)
    for family, base in {
        "bert": "BertModel",
        "roberta": "RobertaModel",
        "mpnet": "MPNetModel",
        "distilbert": "DistilBertModel",
        "electra": "ElectraModel",
        "gpt2": "GPT2Model",
        "opt": "OPTModel",
        "biogpt": "BioGptModel",
        "bart": "BartModel",
        "t5": "T5Model",
        "vit": "ViTModel",
        "deit": "DeiTModel",
    }.items()
    for head in ARCHITECTURES[family]
    if head.endswith(
        ("MaskedLM", "PreTraining", "Classification", "WithTeacher", "QuestionAnswering")
    )
    and head != "T5ForTokenClassification"
]


@pytest.mark.parametrize("family, base, head", HEADLESS)
def test_without_any_of_its_head_the_base_class_is_converted(family, base, head, tmp_path):
    model = saved(base, family, tmp_path / "theirs")
    edit_json(tmp_path / "theirs" / "config.json", architectures=[head])
    facts = assert_equal_outputs(tmp_path / "theirs", model, tmp_path / "ours")
    assert facts["notes"] == [
        f"the head of {head} is missing, so the base class {base} is converted"
    ]


def test_an_untied_head_that_is_missing(tmp_path):
    model = saved("GPT2Model", "gpt2", tmp_path / "theirs", tie_word_embeddings=False)
    edit_json(tmp_path / "theirs" / "config.json", architectures=["GPT2LMHeadModel"])
    notes = assert_equal_outputs(tmp_path / "theirs", model, tmp_path / "ours")["notes"]
    assert notes == [
        "the head of GPT2LMHeadModel is missing, so the base class GPT2Model is converted"
    ]


@pytest.mark.parametrize(
    "family, architecture",
    [("t5", "T5ForConditionalGeneration"), ("mt5", "MT5ForConditionalGeneration")],
)
def test_transformers_ties_a_head_of_t5_that_is_missing(family, architecture, tmp_path):
    saved(
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


def test_an_encoder_of_t5_without_its_classifier(tmp_path):
    model = saved("T5EncoderModel", "t5", tmp_path / "theirs")
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
def test_half_of_a_head_is_an_error(family, architecture, kept, tmp_path):
    model = saved(architecture, family, tmp_path)
    body = f"{model.base_model_prefix}."
    edit_tensors(
        tmp_path, lambda t: [t.pop(name) for name in list(t) if not name.startswith((body, kept))]
    )
    with raises(ValueError, seen=architecture):
        plan_conversion(tmp_path)


def test_half_of_a_body_is_an_error(tmp_path):
    saved("MPNetModel", "mpnet", tmp_path)
    edit_json(tmp_path / "config.json", architectures=["MPNetForMaskedLM"])
    edit_tensors(tmp_path, lambda t: t.pop("encoder.layer.0.attention.attn.q.weight"))
    with raises(ValueError, seen=("MPNetForMaskedLM", "encoder.layer.0.attention.attn.q.weight")):
        plan_conversion(tmp_path)


def test_the_weights_of_another_class_are_named(tmp_path):
    saved("BertForMaskedLM", "bert", tmp_path)
    edit_json(tmp_path / "config.json", architectures=["BertForQuestionAnswering"])
    missing = ("BertForQuestionAnswering", "qa_outputs.weight", "qa_outputs.bias")
    with raises(ValueError, seen=(*missing, "BertForMaskedLM", "--set")):
        plan_conversion(tmp_path)


def test_a_file_without_a_head_is_exported_with_a_warning(tmp_path, caplog, monkeypatch):
    model = saved("MPNetModel", "mpnet", tmp_path / "theirs")
    edit_json(tmp_path / "theirs" / "config.json", architectures=["MPNetForMaskedLM"])
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    export(tmp_path / "theirs", tmp_path / "export", cases=3)
    assert "MPNetForMaskedLM" in caplog.text
    given = make_arguments(model)
    result = Runtime(tmp_path / "export").outputs(
        **{name: tensor.numpy() for name, tensor in given.items()}
    )
    states = torch.from_numpy(result["last_hidden_state"])[given["attention_mask"].bool()]
    assert_exact(states, compute_outputs(model, given)["last_hidden_state"], torch.float32)


# ---------------------------------------------------------------------------------- unknown tensors

FURTHER = [
    ("bert", "BertForMaskedLM", "cls.chain.dense.weight"),
    ("bert", "BertForTokenClassification", "crf.transitions"),
    ("gpt2", "GPT2LMHeadModel", "v_head.summary.weight"),
    ("roberta", "RobertaModel", "projection.weight"),
    ("bart", "BartForConditionalGeneration", "length_predictor.weight"),
    ("t5", "T5ForConditionalGeneration", "value_head.0.weight"),
    ("vit", "ViTForImageClassification", "decoder.0.weight"),
]


@pytest.mark.parametrize("family, architecture, name", FURTHER)
def test_further_heads_are_left_out_and_listed(family, architecture, name, tmp_path):
    model = saved(architecture, family, tmp_path / "theirs")
    edit_tensors(tmp_path / "theirs", lambda t: t.update({name: torch.ones(2, 2)}))
    facts = assert_equal_outputs(tmp_path / "theirs", model, tmp_path / "ours")
    assert facts["left_out"] == [name]
    assert facts["notes"] == [f"left out tensors that no class of {family} has: {name}"]


@pytest.mark.parametrize(
    "pattern", ["encoder.layer.*.adapter.*", "bert.encoder.*.adapter.weight", "*adapter*"]
)
def test_a_pattern_leaves_out_what_is_inside_of_a_layer(pattern, tmp_path, capsys):
    model = saved("BertForMaskedLM", "bert", tmp_path / "theirs")
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


def test_a_pattern_that_matches_nothing_or_what_is_needed_is_refused(tmp_path):
    saved("BertForMaskedLM", "bert", tmp_path)
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
def test_a_foreign_prefix_of_all_names_is_named(family, architecture, prefix, tmp_path):
    saved(architecture, family, tmp_path)
    if prefix == "model." and family == "bart":
        prefix = "net."  # BART's base model has this prefix itself
    edit_tensors(
        tmp_path, lambda t: [t.update({f"{prefix}{name}": t.pop(name)}) for name in list(t)]
    )
    with raises(ValueError, seen=prefix):
        plan_conversion(tmp_path)
