"""Tests of usage errors of bulk prediction over files."""

import pyarrow
import pyarrow.parquet
import pytest
from messages import raises
from shards import names, write

from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.files import ray as on_ray
from vanilla_transformer_export.files.formats import select_format
from vanilla_transformer_export.files.predictions import Predictions
from vanilla_transformer_export.files.rows import RecordFields
from vanilla_transformer_export.heads import CHOICES, PAIR, QUESTION, TEXT

pytestmark = pytest.mark.filterwarnings("ignore:.* was cut after")


def test_unusable_paths_are_rejected_and_existing_files_kept(bulk, runtime_of, tmp_path):
    source = write(tmp_path / "a", ["w5"])
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine" / "notes", ["mine"])
    export = runtime_of("seq2seq").path.parent
    (tmp_path / "other").mkdir()
    for inputs, out, kind, seen in (
        ([source], tmp_path / "mine", FileExistsError, ("mine", "notes")),
        ([source], tmp_path / "mine" / "notes", NotADirectoryError, "notes"),
        ([source], export / "out", UsageError, "out"),
        ([source], tmp_path, UsageError, "a"),
        ([source, source], tmp_path / "out", UsageError, "out/a"),
        ([tmp_path / "none"], tmp_path / "out", FileNotFoundError, "none"),
        ([tmp_path], tmp_path / "out", IsADirectoryError, ()),
    ):
        with raises(kind, seen=seen):
            bulk().to_directory(inputs, out)
    assert names(tmp_path) == ["a", "mine", "other"] and names(tmp_path / "mine") == ["notes"]


@pytest.mark.parametrize("name", ["manifest.json", "a.bad.jsonl", "a.parts"])
def test_input_named_as_another_file_of_the_run_is_rejected(bulk, tmp_path, name):
    """The outputs of `a` and of this input would be one file, and one of them would be lost."""
    inputs = [write(tmp_path / "a", ["w5"]), write(tmp_path / name, ['{"text": "w5"}'])]
    with raises(UsageError, seen=f"out/{name}"):
        bulk().to_directory(inputs, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    if name != "manifest.json":
        bulk().to_directory(inputs[1:], tmp_path / "alone")
        assert names(tmp_path / "alone") == [name, "manifest.json"]


def test_invalid_arguments_raise_before_output_is_written(bulk, runtime_of, tmp_path):
    text = write(tmp_path / "a", ["w5"])
    pyarrow.parquet.write_table(
        pyarrow.table({"translation": ["w5"], "text": ["w5"]}), tmp_path / "b.parquet"
    )
    pyarrow.parquet.write_table(pyarrow.table({"other": ["w5"]}), tmp_path / "c.parquet")
    doubled = pyarrow.table([["w5"], ["w6"]], names=["text", "text"])
    pyarrow.parquet.write_table(doubled, tmp_path / "e.parquet")
    jsonl = write(
        tmp_path / "e.jsonl",
        ['{"text": "w5", "a": "translation"}', '{"text": "w5", "translation": {"de": "w7"}}'],
    )
    for settings, inputs, kind, seen, expected in (
        ({"options": {"src_lang": "de"}}, [text], UsageError, ("src_lang", "de"), None),
        ({"options": {"num_beams": 0}}, [text], UsageError, "num_beams", ()),
        ({"field": "en"}, [text], UsageError, (), "a"),
        ({"output_field": "de"}, [text], UsageError, ("output_field", "de"), None),
        ({}, [tmp_path / "b.parquet"], UsageError, "translation", ("--output-field", "NAME")),
        ({"output_field": "text"}, [tmp_path / "b.parquet"], UsageError, "b.parquet", ()),
        ({}, [tmp_path / "e.parquet"], ValueError, "e.parquet", ()),
        ({}, [jsonl], UsageError, (2, "e.jsonl", "translation"), ("--output-field", "NAME")),
        ({"output_field": "text"}, [jsonl], UsageError, (1, "e.jsonl"), ()),
        ({}, [tmp_path / "c.parquet"], UsageError, "other", ()),
        ({}, [write(tmp_path / "d.parquet", ["w5"])], ValueError, ("d.parquet", "Parquet"), ()),
        ({}, [write(tmp_path / "d.parquet.gz", ["w5"])], UsageError, "Parquet", ".gz"),
    ):
        with raises(kind, seen=seen, expected=expected):
            bulk(**settings).to_directory(inputs, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with raises(UsageError, seen=("question", "context"), expected=".jsonl"):
        select_format(text, Predictions(runtime_of("answers")))
    with raises(UsageError, seen="a", expected=None):
        RecordFields([QUESTION], "a")


def test_options_of_another_task_name_that_task(runtime_of):
    for model, task, options, seen, expected in (
        ("seq2seq", None, {"markup": "html"}, ("markup", "translate", "generate"), "translate"),
        ("seq2seq", "generate", {"split": False}, "split", "translate"),
        ("seq2seq", "translate", {"target_prefix": ["w5"]}, "target_prefix", "generate"),
        ("classification", None, {"candidate_labels": ["a"]}, "candidate_labels", "zero-shot"),
        ("classification", "zero-shot", {"function_to_apply": "none"}, (), "classify"),
    ):
        with raises(UsageError, seen=seen, expected=expected):
            Predictions(runtime_of(model), task, options)
    for options in ({"markup": "html"}, {"return_alignments": True}):
        with raises(UsageError, seen=next(iter(options)), expected="num_beams"):
            Predictions(runtime_of("causal"), None, options)


def test_missing_ray_error_names_extra(bulk, tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray, "ray", None)
    with raises(ImportError, seen="vanilla-transformer[cpu,ray]"):
        bulk().to_directory([write(tmp_path / "a", ["w5"])], tmp_path / "out", ray="auto")
    assert names(tmp_path) == ["a"]


def test_record_fields_read_named_and_nested_fields():
    pair = {"text": "a", "text_pair": "b", "id": 1}
    assert RecordFields([TEXT, PAIR]).parse_record(pair).example == {"text": "a", "text_pair": "b"}
    assert RecordFields([TEXT, PAIR]).parse_record({"text": "a", "id": 1}).example == {"text": "a"}
    assert RecordFields([TEXT], "en").parse_record({"en": "a", "text": "b"}).example == {
        "text": "a"
    }
    nested = {"a": {"b": {"c": "x"}, "b.c": "y"}, "a.d": "z", "e": ["w"]}
    for name, text in {"a.b.c": "y", "a.d": "z"}.items():
        assert RecordFields([TEXT], name).parse_record(nested).example == {"text": text}
    for name in ("a.x", "a.b.c.d", "e.0", "a.", ".a", "x.y"):
        assert "it has the fields" in RecordFields([TEXT], name).parse_record(nested).fault
    assert RecordFields([CHOICES]).parse_record({"text": "a", "choices": ["b"]}).example == {
        "text": "a",
        "choices": ["b"],
    }
