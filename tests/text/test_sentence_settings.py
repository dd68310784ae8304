"""Tests of the settings of sentence-transformers beside a model: what is applied gives its vectors,
and what would change them otherwise is an error."""

import json
import os
import shutil

import numpy as np
import pytest
from checkpoints import copy_folder, edit_json
from command_line import read_error, read_json
from heads import save_head, word_pieces
from messages import check_message, raises
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from vanilla_transformer_export import TextRuntime, export

LENGTH_CONFIG = "sentence_bert_config.json"
MODEL_CONFIG = "config_sentence_transformers.json"
TEXTS = ["the old man", "[MASK] The Red House [SEP] a Book", "the river and " * 20 + "a woman"]
TEXT_ONLY = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
POOLED = {"text": {"method": "forward", "method_output_name": "pooler_output"}}
MESSAGES = {**TEXT_ONLY, "message": {"method": "forward"}}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The directory of a model of sentence-transformers."""
    root = tmp_path_factory.mktemp("original")
    plain = save_head("VanillaEncoderModel", word_pieces(), root / "plain")
    modules = [Transformer(plain, max_seq_length=20), Pooling(32, pooling_mode="mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(root / "model"))
    return root / "model"


@pytest.fixture
def checkpoint(original, tmp_path):
    return copy_folder(original, tmp_path)


def write(path, **fields):
    path.write_text(json.dumps(fields))


def opened(checkpoint, out):
    export(checkpoint, out, cases=1)
    return TextRuntime(out, threads=1)


def same_as_theirs(checkpoint, runtime, **options):
    model = SentenceTransformer(str(checkpoint), device="cpu")
    expected = model.encode(TEXTS, **options)
    np.testing.assert_allclose(runtime.embed(TEXTS, **options), expected, rtol=1e-5, atol=1e-5)
    return expected


# ------------------------------------------------------------- fields of the module Transformer


@pytest.mark.parametrize(
    "fields",
    [
        {"processing_kwargs": {"text": {"add_special_tokens": False}}},
        {"processing_kwargs": {"text": {"max_length": 9}}},
        {"processing_kwargs": {"common": {"max_length": 9}}},
        {"tokenizer_args": {"truncation_side": "left"}},
        {"processor_kwargs": {"truncation_side": "left"}},
        {"processor_kwargs": {"model_max_length": 9}},
        {"config_args": {"hidden_act": "tanh"}},
        {"config_kwargs": {"hidden_act": "tanh"}},
    ],
    ids=str,
)
def test_fields_that_change_vectors_are_errors_of_export(original, checkpoint, tmp_path, fields):
    edit_json(checkpoint / LENGTH_CONFIG, **fields)
    before, after = (
        SentenceTransformer(str(path), device="cpu").encode(TEXTS)
        for path in (original, checkpoint)
    )
    assert not np.allclose(before, after, atol=1e-2)
    [(name, value)] = fields.items()
    while isinstance(value, dict):
        [(part, value)] = value.items()
        name += f".{part}"
    with raises(ValueError, seen=(str(checkpoint / LENGTH_CONFIG), name, str(value))):
        export(checkpoint, tmp_path / "out", cases=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "fields, seen, expected",
    [
        ({"unknown": 1}, "unknown=1", "no such field"),
        ({"query_length": 5}, "query_length=5", "no such field"),
        ({"tokenizer_name_or_path": "a"}, "tokenizer_name_or_path='a'", "no such field"),
        ({"transformer_task": "fill-mask"}, "transformer_task", "feature-extraction"),
        ({"modality_config": POOLED}, "pooler_output", "last_hidden_state"),
        ({"modality_config": MESSAGES}, "modality_config.message.method", "no such field"),
        ({"modality_config": 5}, "modality_config=5", "no such field"),
        ({"config_args": {"hidden_act": "tanh"}}, "config_args.hidden_act", "config.json"),
        ({"tokenizer_args": {"a": 1}}, "tokenizer_args.a=1", "tokenizer_config.json"),
    ],
    ids=str,
)
def test_field_that_is_not_applied_is_an_error_and_a_warning_of_older_exports(
    original, checkpoint, tmp_path, fields, seen, expected
):
    edit_json(checkpoint / LENGTH_CONFIG, **fields)
    with raises(ValueError, seen=(LENGTH_CONFIG, seen), expected=expected) as raised:
        export(checkpoint, tmp_path / "new", cases=1)
    export(original, tmp_path / "old", cases=1)
    shutil.copy(checkpoint / LENGTH_CONFIG, tmp_path / "old")
    runtime = TextRuntime(tmp_path / "old", threads=1)
    message = str(raised.value).replace(str(checkpoint), str(tmp_path / "old"))
    with pytest.warns(UserWarning) as caught:
        runtime.embed(["a book"])
    assert [str(warning.message) for warning in caught] == [message]
    assert message in read_json("info", tmp_path / "old", "--json")["warnings"]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_seq_length": 12, "do_lower_case": False},  # as versions 2 to 5 write it
        {
            "model_args": {"trust_remote_code": True, "attn_implementation": "eager"},
            "tokenizer_args": {"trust_remote_code": True, "use_fast": True},
            "config_args": {"trust_remote_code": True},
            "max_seq_length": 12,
        },
        {
            "transformer_task": "feature-extraction",
            "modality_config": TEXT_ONLY,
            "module_output_name": "token_embeddings",
            "model_kwargs": {"dtype": "float32", "add_pooling_layer": False},
            "processing_kwargs": {
                "text": {"padding": "longest", "truncation": True, "add_special_tokens": True},
                "chat_template": {"add_generation_prompt": True},  # no text is a message
            },
            "unpad_inputs": False,
            "query_length": None,
        },
    ],
    ids=["old", "arguments", "new"],
)
def test_fields_that_change_no_vector_are_let_through(checkpoint, tmp_path, fields):
    write(checkpoint / LENGTH_CONFIG, **fields)
    runtime = opened(checkpoint, tmp_path / "out")
    same_as_theirs(checkpoint, runtime)
    assert read_json("info", tmp_path / "out", "--json")["warnings"] == []


def test_config_of_several_is_that_of_sentence_transformers(checkpoint, tmp_path):
    (checkpoint / LENGTH_CONFIG).write_text("{}")
    for length, family in enumerate(("albert", "distilbert", "roberta", "unknown"), 8):
        write(checkpoint / f"sentence_{family}_config.json", max_seq_length=length)
    same_as_theirs(checkpoint, opened(checkpoint, tmp_path / "out"))
    theirs = SentenceTransformer(str(checkpoint), device="cpu")
    facts = read_json("info", tmp_path / "out", "--json")
    assert facts["max_seq_length"] == theirs.max_seq_length == 10


# ------------------------------------------------------------------------------------ lower case


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        {"type": "NFC"},
        {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
        {
            "type": "Sequence",
            "normalizers": [
                {"type": "Replace", "pattern": {"String": "The"}, "content": "man"},
                {"type": "Lowercase"},
            ],
        },
    ],
    ids=str,
)
def test_lower_case_spares_added_tokens(checkpoint, tmp_path, normalizer):
    edit_json(checkpoint / LENGTH_CONFIG, do_lower_case=True)
    edit_json(checkpoint / "tokenizer.json", normalizer=normalizer)
    edit_json(checkpoint / "tokenizer_config.json", tokenizer_class="TokenizersBackend")
    runtime = opened(checkpoint, tmp_path / "out")
    ids = runtime.encode(["[MASK] Man"], special_tokens=False)[0].ids
    assert ids == [runtime.tokenizer.token_to_id(token) for token in ("[MASK]", "man")]
    same_as_theirs(checkpoint, runtime)
    same_as_theirs(checkpoint, runtime, prompt="[SEP] The Book ")


def test_lower_case_of_a_cross_encoder(classifier, tmp_path):
    CrossEncoder(str(classifier), device="cpu").save_pretrained(str(tmp_path / "model"))
    edit_json(tmp_path / "model/tokenizer.json", normalizer=None)
    edit_json(tmp_path / "model/tokenizer_config.json", tokenizer_class="TokenizersBackend")
    pair = ("The Man", "[MASK] a RIVER")
    scores = []
    for lowers in (False, True):
        edit_json(tmp_path / "model" / LENGTH_CONFIG, do_lower_case=lowers)
        [score] = CrossEncoder(str(tmp_path / "model"), device="cpu").predict([pair])
        runtime = opened(tmp_path / "model", tmp_path / f"out {lowers}")
        [[label]], [[rank]] = runtime.classify([pair]), runtime.rerank([pair[0]], [[pair[1]]])
        assert [label["score"], rank["score"]] == pytest.approx([score] * 2, abs=1e-5)
        scores.append(score)
    assert abs(scores[0] - scores[1]) > 1e-3


# ---------------------------------------------------------------------------------- wrong values


@pytest.mark.parametrize(
    "name, field, value, expected",
    [
        (LENGTH_CONFIG, "max_seq_length", "32", "whole number"),
        (LENGTH_CONFIG, "max_seq_length", -5, "whole number"),
        (LENGTH_CONFIG, "max_seq_length", 20.0, "whole number"),
        (LENGTH_CONFIG, "max_seq_length", True, "whole number"),
        (LENGTH_CONFIG, "do_lower_case", "yes", "True or False"),
        (MODEL_CONFIG, "prompts", ["a"], "object"),
        (MODEL_CONFIG, "prompts", {"query": 5}, "object"),
        (MODEL_CONFIG, "default_prompt_name", 5, "string"),
        (MODEL_CONFIG, "similarity_fn_name", "hamming", "cosine"),
        (MODEL_CONFIG, "truncate_dim", "7", "whole number"),
        (MODEL_CONFIG, "max_active_dims", 0, "whole number"),
        (MODEL_CONFIG, "max_active_dims", "5", "whole number"),
        (MODEL_CONFIG, "activation_fn", 5, "string"),
    ],
)
def test_invalid_value_is_an_error_of_export_and_of_opening(
    original, checkpoint, tmp_path, name, field, value, expected
):
    edit_json(checkpoint / name, **{field: value})
    seen = (str(checkpoint / name), field, value)
    with raises(ValueError, seen=seen, expected=expected):
        export(checkpoint, tmp_path / "new", cases=1)
    assert not (tmp_path / "new").exists()
    export(original, tmp_path / "old", cases=1)
    shutil.copy(checkpoint / name, tmp_path / "old")
    seen = (str(tmp_path / "old" / name), field, value)
    with raises(ValueError, seen=seen):
        TextRuntime(tmp_path / "old")
    check_message(read_error("info", tmp_path / "old"), seen=seen)


def test_values_that_are_null_are_those_of_no_file(checkpoint, tmp_path):
    write(checkpoint / LENGTH_CONFIG, max_seq_length=None, do_lower_case=False)
    write(
        checkpoint / MODEL_CONFIG,
        prompts={"query": None, "a": "the book"},
        **dict.fromkeys(("default_prompt_name", "similarity_fn_name", "truncate_dim")),
    )
    runtime = opened(checkpoint, tmp_path / "out")
    expected = same_as_theirs(checkpoint, runtime)
    same_as_theirs(checkpoint, runtime, prompt_name="a")
    np.testing.assert_allclose(runtime.encode_query(TEXTS), expected, rtol=1e-5, atol=1e-5)


ACTIVATION = "torch.nn.modules.activation.Tanh"
PLACES = {
    "sentence_transformers": {"activation_fn": "my.Act"},
    "sbert_ce_default_activation_function": "my.Act",
}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    directory = tmp_path_factory.mktemp("classifier") / "model"
    head = "VanillaEncoderForSequenceClassification"
    return save_head(head, word_pieces(), directory, num_labels=1, type_vocab_size=2)


@pytest.mark.parametrize("field", [MODEL_CONFIG, *PLACES])
def test_activation_that_is_not_supported_is_an_error_of_export(classifier, tmp_path, field):
    checkpoint = copy_folder(classifier, tmp_path)
    if field == MODEL_CONFIG:
        write(checkpoint / field, activation_fn="my.Act")
    else:
        edit_json(checkpoint / "config.json", **{field: PLACES[field]})
    with raises(ValueError, seen=(field, "my.Act", str(checkpoint)), expected="torch.nn.Tanh"):
        export(checkpoint, tmp_path / "out", cases=1)


def test_activation_of_several_is_that_of_sentence_transformers(classifier, tmp_path):
    CrossEncoder(str(classifier), device="cpu").save_pretrained(str(tmp_path / "model"))
    edit_json(tmp_path / "model" / MODEL_CONFIG, activation_fn=ACTIVATION)
    recorded = {"activation_fn": ACTIVATION.replace("Tanh", "Sigmoid")}
    edit_json(tmp_path / "model/config.json", sentence_transformers=recorded)
    expected = CrossEncoder(str(tmp_path / "model"), device="cpu").predict([("a", "the man")])
    [[label]] = opened(tmp_path / "model", tmp_path / "out").classify([("a", "the man")])
    assert label["score"] == pytest.approx(expected[0], abs=1e-5)


# ----------------------------------------------------------------------- files of an open export


def test_files_that_are_touched_or_removed_change_nothing_of_an_open_export(checkpoint, tmp_path):
    write(checkpoint / MODEL_CONFIG, prompts={"query": "the book"}, default_prompt_name="query")
    runtime = opened(checkpoint, tmp_path / "out")
    names = (LENGTH_CONFIG, MODEL_CONFIG, "tokenizer_config.json")
    for name in names:
        os.utime(tmp_path / "out" / name)
    expected = same_as_theirs(checkpoint, runtime)
    for name in names:
        (tmp_path / "out" / name).unlink()
    np.testing.assert_array_equal(runtime.embed(TEXTS), expected := runtime.embed(TEXTS))
    np.testing.assert_array_equal(runtime.encode_query(TEXTS), expected)


@pytest.mark.parametrize("name", [LENGTH_CONFIG, MODEL_CONFIG])
def test_damaged_file_is_an_error_of_opening(checkpoint, tmp_path, name):
    export(checkpoint, tmp_path / "out", cases=1)
    (tmp_path / "out" / name).write_text("{")
    with raises(ValueError, seen=str(tmp_path / "out" / name), expected="property name"):
        TextRuntime(tmp_path / "out", threads=1)
    (tmp_path / "out" / name).write_text("[]")
    with pytest.raises(ValueError) as raised:
        TextRuntime(tmp_path / "out", threads=1)
    check_message(str(raised.value), seen=name, expected="JSON object")
