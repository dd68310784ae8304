"""Tests of errors: wrong calls of predictions for whole files."""

import pyarrow
import pyarrow.parquet
import pytest
from shards import names, write

from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.files import ray as on_ray
from vanilla_transformer_export.files.formats import format_of
from vanilla_transformer_export.files.predictions import Predictions
from vanilla_transformer_export.files.rows import RecordFields
from vanilla_transformer_export.heads import CHOICES, PAIR, QUESTION, TEXT

pytestmark = pytest.mark.filterwarnings("ignore:.* was cut after")


def test_what_is_not_ours_is_refused_and_stays(bulk, runtime_of, tmp_path):
    source = write(tmp_path / "a", ["w5"])
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine" / "notes", ["mine"])
    export = runtime_of("seq2seq").path.parent
    (tmp_path / "other").mkdir()
    for inputs, out, kind, message in (
        (
            [source],
            tmp_path / "mine",
            FileExistsError,
            "mine holds notes: expected a new or an empty directory",
        ),
        (
            [source],
            tmp_path / "mine" / "notes",
            NotADirectoryError,
            "is a file, expected a directory or a new path",
        ),
        ([source], export / "out", UsageError, "inside the export"),
        ([source], tmp_path, UsageError, "the input .*a is inside the output"),
        ([source, source], tmp_path / "out", UsageError, "would both become .*out/a"),
        (
            [tmp_path / "none"],
            tmp_path / "out",
            FileNotFoundError,
            "none does not exist, expected a file",
        ),
        ([tmp_path], tmp_path / "out", IsADirectoryError, "is a directory, expected a file"),
    ):
        with pytest.raises(kind, match=message):
            bulk().to_directory(inputs, out)
    assert names(tmp_path) == ["a", "mine", "other"] and names(tmp_path / "mine") == ["notes"]


def test_wrong_usage_is_refused_before_anything_is_written(bulk, runtime_of, tmp_path):
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
    for settings, inputs, kind, message in (
        ({"options": {"src_lang": "de"}}, [text], UsageError, "src_lang is 'de', expected None"),
        ({"options": {"num_beams": 0}}, [text], UsageError, "num_beams"),
        ({"field": "en"}, [text], UsageError, "lines of text have no fields"),
        ({"output_field": "de"}, [text], UsageError, "output_field is 'de', expected None"),
        (
            {},
            [tmp_path / "b.parquet"],
            UsageError,
            "has a column translation already: .*--output-field NAME",
        ),
        (
            {"output_field": "text"},
            [tmp_path / "b.parquet"],
            UsageError,
            "has a column text already",
        ),
        (
            {},
            [tmp_path / "e.parquet"],
            ValueError,
            "e.parquet has several columns of the name text, expected one",
        ),
        (
            {},
            [jsonl],
            UsageError,
            "line 2 of .*e.jsonl has a field translation already: .*--output-field NAME",
        ),
        (
            {"output_field": "text"},
            [jsonl],
            UsageError,
            "line 1 of .*e.jsonl has a field text already",
        ),
        ({}, [tmp_path / "c.parquet"], UsageError, "it has the fields .'other'., expected text"),
        (
            {},
            [write(tmp_path / "d.parquet", ["w5"])],
            ValueError,
            "d.parquet is not a whole Parquet file",
        ),
        (
            {},
            [write(tmp_path / "d.parquet.gz", ["w5"])],
            UsageError,
            "compressed Parquet, expected a name without .gz",
        ),
    ):
        with pytest.raises(kind, match=message):
            bulk(**settings).to_directory(inputs, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(
        UsageError, match="the task reads question and context: expected JSON lines"
    ):
        format_of(text, Predictions(runtime_of("answers")))
    with pytest.raises(
        UsageError, match="field is 'a', expected None: the task reads question and context"
    ):
        RecordFields([QUESTION], "a")


def test_a_cluster_without_ray_names_the_extra(bulk, tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray, "ray", None)
    with pytest.raises(
        ImportError, match=r"Ray Data is not installed: pip install 'vanilla-transformer\[ray\]'"
    ):
        bulk().to_directory([write(tmp_path / "a", ["w5"])], tmp_path / "out", ray="auto")
    assert names(tmp_path) == ["a"]


def test_what_a_task_reads_of_an_object():
    pair = {"text": "a", "text_pair": "b", "id": 1}
    assert RecordFields([TEXT, PAIR]).of_record(pair).example == {"text": "a", "text_pair": "b"}
    assert RecordFields([TEXT, PAIR]).of_record({"text": "a", "id": 1}).example == {"text": "a"}
    assert RecordFields([TEXT], "en").of_record({"en": "a", "text": "b"}).example == {"text": "a"}
    nested = {"a": {"b": {"c": "x"}, "b.c": "y"}, "a.d": "z", "e": ["w"]}
    for name, text in {"a.b.c": "y", "a.d": "z"}.items():
        assert RecordFields([TEXT], name).of_record(nested).example == {"text": text}
    for name in ("a.x", "a.b.c.d", "e.0", "a.", ".a", "x.y"):
        assert "it has the fields" in RecordFields([TEXT], name).of_record(nested).fault
    assert RecordFields([CHOICES]).of_record({"text": "a", "choices": ["b"]}).example == {
        "text": "a",
        "choices": ["b"],
    }
