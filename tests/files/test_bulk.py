"""Tests of predictions for files in shards: every line once and in order, bad lines reported."""

import bz2
import gzip
import json
import lzma
import time

import bulk as benchmark
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from bulk import write_lines
from messages import raises
from shards import OPTIONS, names, some_lines, translated, write

from vanilla_transformer_export.files import progress_bar
from vanilla_transformer_export.files.predictions import Predictions
from vanilla_transformer_export.files.run import Runner

pytestmark = pytest.mark.filterwarnings("ignore:.* was cut after")


def read_bad_lines(path):
    return [
        (result["line"], result["reason"])
        for result in map(json.loads, path.read_text().splitlines())
    ]


# ------------------------------------------------------------------------------------------ outputs


def test_each_line_is_translated_once_and_in_order(bulk, runtime_of, tmp_path):
    first, second = some_lines(30), some_lines(8, seed=1)
    inputs = [write(tmp_path / "a.en", first), tmp_path / "b.en.gz"]
    inputs[1].write_bytes(gzip.compress("\r\n".join(second).encode("utf-8-sig")))
    report = bulk().to_directory(inputs, tmp_path / "out")
    for name, lines in {"a.en": first, "b.en": second}.items():
        result = (tmp_path / "out" / name).read_text().split("\n")
        assert result == [*translated(runtime_of("seq2seq"), lines), ""]
        assert report["files"][str(tmp_path / "out" / name)]["lines"] == len(lines)
    assert (report["lines"], report["bad"]) == (38, 0)
    assert names(tmp_path / "out") == ["a.en", "b.en", "manifest.json"]


def test_json_lines_keep_their_other_fields(bulk, runtime_of, tmp_path):
    lines = some_lines(12)
    rows = [{"id": number, "en": line, "more": ["é", None]} for number, line in enumerate(lines)]
    source = write(tmp_path / "a.jsonl", [json.dumps(row) for row in rows])
    bulk(field="en").to_directory([source], tmp_path / "out")
    actual = [json.loads(line) for line in (tmp_path / "out" / "a.jsonl").read_text().splitlines()]
    expected = translated(runtime_of("seq2seq"), lines, None)
    assert [row.pop("translation") for row in actual] == expected and actual == rows


@pytest.mark.parametrize(
    "more",
    [
        ', "price": 0.12345678901234567890123, "id": 9007199254740993',
        ', "a": [1.10, {"b": -0, "c": 1E5}], "d": 1e-400',
        ',\t"escaped": "\\u00e9\\ud800", "raw": "é" ',
    ],
)
@pytest.mark.parametrize("end", ["\n", " \r\n"])
def test_json_lines_come_back_as_they_were_read(bulk, tmp_path, more, end):
    source = tmp_path / "a.jsonl"
    source.write_bytes(f'{{"text": "w5"{more}}}{end}{{"other": 1.10 }}\n'.encode())
    bulk().to_directory([source], tmp_path / "out")
    first, second = (tmp_path / "out" / "a.jsonl").read_text().splitlines()
    assert first.startswith(f'{{"text": "w5"{more.rstrip()}, "translation": "')
    assert "translation" in json.loads(first) and second == '{"other": 1.10, "translation": null}'


def test_binary_columns_of_utf8_are_texts(bulk, runtime_of, tmp_path):
    lines = [line or "w5" for line in some_lines(6)]
    texts = [line.encode() for line in lines] + [b"\xff", None]
    nested = pyarrow.array([{"doc": text} for text in texts], pyarrow.struct({"doc": "binary"}))
    for kind in ("binary", "large_binary"):
        columns = {"text": pyarrow.array(texts, kind), "nested": nested}
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
        for field in ("text", "nested.doc"):
            out = tmp_path / f"{kind}-{field}"
            assert bulk(field=field).to_directory([tmp_path / "a.parquet"], out)["bad"] == 2
            table = pyarrow.parquet.read_table(out / "a.parquet")
            expected = [*translated(runtime_of("seq2seq"), lines), None, None]
            assert table["translation"].to_pylist() == expected
            assert table["text"].to_pylist() == texts and table["text"].type == kind
            [first, second] = read_bad_lines(out / "a.parquet.bad.jsonl")
            assert first[0] == 7 and "UTF-8" in first[1] and second[0] == 8


@pytest.mark.parametrize("count", [20, 0])
def test_tables_keep_their_other_columns(bulk, runtime_of, tmp_path, count):
    lines = some_lines(count)
    columns = {"id": pyarrow.array(range(count), "int64"), "text": pyarrow.array(lines, "string")}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=11)
    report = bulk().to_directory([tmp_path / "a.parquet"], tmp_path / "out")
    actual = pyarrow.parquet.read_table(tmp_path / "out" / "a.parquet").to_pydict()
    expected = translated(runtime_of("seq2seq"), lines, None)
    assert (
        actual == {"id": [*range(count)], "text": lines, "translation": expected}
        and report["lines"] == count
    )


def test_predictions_of_text_are_json_lines(bulk, runtime_of, tmp_path):
    lines = [line or "w5" for line in some_lines(10)]
    bulk(None, ["classification"]).to_directory([write(tmp_path / "a", lines)], tmp_path / "out")
    actual = [json.loads(line) for line in (tmp_path / "out" / "a.jsonl").read_text().splitlines()]
    for labels, [expected] in zip(
        actual, runtime_of("classification").classify(lines), strict=True
    ):
        assert labels[0]["label"] == expected["label"] and labels[0]["score"] == pytest.approx(
            expected["score"], abs=1e-6
        )


@pytest.mark.parametrize("kind", ["txt", "parquet"])
def test_embeddings(bulk, runtime_of, tmp_path, kind):
    lines = [line or "w5" for line in some_lines(10)]
    source = write(tmp_path / f"a.{kind}", lines)
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": lines}), source)
    bulk("embed", ["encoder"]).to_directory([source], tmp_path / "out")
    if kind == "parquet":
        column = pyarrow.parquet.read_table(tmp_path / "out" / "a.parquet")["embedding"]
        assert column.type == pyarrow.list_(pyarrow.float32())
        result = column.to_pylist()
    else:
        result = [
            json.loads(line) for line in (tmp_path / "out" / "a.txt.jsonl").read_text().splitlines()
        ]
    np.testing.assert_allclose(result, runtime_of("encoder").embed(lines), rtol=0, atol=1e-6)


def test_empty_input_gives_empty_output(bulk, tmp_path):
    assert bulk().to_directory([write(tmp_path / "a", [])], tmp_path / "out")["lines"] == 0
    assert (tmp_path / "out" / "a").read_bytes() == b""


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_nested_field_is_read_and_results_use_output_field(bulk, runtime_of, tmp_path, kind):
    """Translation data sets of the Hub look like this: the field `translation` holds both
    languages."""
    lines = [line or "w5" for line in some_lines(6)]
    rows = [{"translation": {"en": line, "de": "w9"}} for line in lines]
    source = write(tmp_path / f"a.{kind}", map(json.dumps, rows))
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    bulk(field="translation.en", output_field="found").to_directory([source], tmp_path / "out")
    written = tmp_path / "out" / source.name
    read = (
        pyarrow.parquet.read_table(written).to_pylist()
        if kind == "parquet"
        else [*map(json.loads, written.read_text().splitlines())]
    )
    expected = translated(runtime_of("seq2seq"), lines)
    assert read == [row | {"found": text} for row, text in zip(rows, expected)]


@pytest.mark.parametrize("compressed", [gzip, bz2, lzma], ids=lambda module: module.__name__)
@pytest.mark.parametrize("name", ["a.en", "a.jsonl"])
def test_compressed_files_are_read_as_plain_ones(bulk, tmp_path, compressed, name):
    suffix = {gzip: ".gz", bz2: ".bz2", lzma: ".xz"}[compressed]
    content = "".join(
        f"{json.dumps({'text': line}) if name == 'a.jsonl' else line}\n" for line in some_lines(9)
    ).encode()
    (tmp_path / name).write_bytes(content)
    (tmp_path / f"{name}{suffix}").write_bytes(compressed.compress(content))
    for source, out in ((tmp_path / name, "plain"), (tmp_path / f"{name}{suffix}", "packed")):
        bulk().to_directory([source], tmp_path / out)
    assert names(tmp_path / "packed") == names(tmp_path / "plain") == [name, "manifest.json"]
    assert (tmp_path / "packed" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


@pytest.mark.parametrize(
    "name, content, seen, expected",
    [
        ("a.zst", b"w5", ("a.zst", "Zstandard"), (".gz", ".bz2", ".xz")),
        ("a.txt.Z", b"w5", ("a.txt.Z", "compress"), ()),
        ("a.txt.lzma", b"w5", ("a.txt.lzma", "LZMA"), ()),
        ("a.txt", bytes.fromhex("1f9d9061"), "compress", ()),
        ("a.tar.gz", gzip.compress(b"w5", mtime=0), "a.tar.gz", ()),
        ("a", bytes.fromhex("28b52ffd2010810000"), "Zstandard", ()),
        ("a", bz2.compress(b"w5"), "bzip2", ".bz2"),
        ("a", bz2.compress(b""), "bzip2", ".bz2"),
        ("a.jsonl", gzip.compress(b"w5", mtime=0), "gzip", ".gz"),
        (
            "a.en",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            "git-lfs",
            (),
        ),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "git-lfs", ()),
    ],
)
def test_unsupported_file_raises_before_output_is_written(
    bulk, tmp_path, name, content, seen, expected
):
    (tmp_path / name).write_bytes(content)
    with raises(ValueError, seen=seen, expected=expected):
        bulk().to_directory([tmp_path / name], tmp_path / "out")
    assert names(tmp_path) == [name]


# ---------------------------------------------------------------------------------------- bad lines


def test_bad_text_lines_are_reported_and_leave_an_empty_line(bulk, runtime_of, tmp_path):
    lines = [line.encode() for line in some_lines(20)]
    lines[3], lines[17] = b"caf\xe9", b"w5 " * 400_000
    (tmp_path / "a").write_bytes(b"\n".join(lines))
    report = bulk().to_directory([tmp_path / "a"], tmp_path / "out")
    lines[3] = lines[17] = b""
    expected = translated(runtime_of("seq2seq"), [line.decode() for line in lines])
    assert (tmp_path / "out" / "a").read_text().split("\n") == [*expected, ""]
    first, second = read_bad_lines(tmp_path / "out" / "a.bad.jsonl")
    assert first[0] == 4 and "UTF-8" in first[1]
    assert second[0] == 18 and "1,000,000" in second[1]
    assert (report["lines"], report["bad"]) == (20, 2)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_texts_of_too_many_characters_are_bad_lines(bulk, runtime_of, tmp_path, kind):
    lines = ["w5", "é" * 31, "w6 " * 10 + "w", "w7"]
    source = write(tmp_path / f"a.{kind}", lines)
    if kind == "jsonl":
        write(source, [json.dumps({"text": line}) for line in lines])
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": lines}), source)
    job = Runner(Predictions(runtime_of("seq2seq"), "translate", OPTIONS, max_characters=30))
    assert job.to_directory([source], tmp_path / "out")["bad"] == 2
    [bad_file] = (tmp_path / "out").glob("*.bad.jsonl")
    numbers, reasons = zip(*read_bad_lines(bad_file))
    assert numbers == (2, 3) and all(
        "31 characters, expected at most 30" in text for text in reasons
    )


@pytest.mark.parametrize("kind", ["txt", "parquet"])
def test_shards_have_a_limit_of_bytes(bulk, tmp_path, monkeypatch, kind):
    lines = [f"w{5 + number} {'w6 ' * 300}" for number in range(40)]
    source = write(tmp_path / f"a.{kind}", lines)
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": lines}), source, row_group_size=11)
    shards, results = [], []
    for limit in (4_000_000, 5000, 1):
        for module in ("shards", "parquet"):
            name = f"vanilla_transformer_export.files.{module}.MAX_SHARD_BYTES"
            monkeypatch.setattr(name, limit)
        [source_input] = bulk(shard_lines=30).inputs([source])
        shards.append([len(shard) for shard in source_input.shards(30)])
        bulk(shard_lines=30).to_directory([source], tmp_path / f"out-{limit}")
        results.append((tmp_path / f"out-{limit}" / source.name).read_bytes())
    assert shards[0] == [30, 10] and max(shards[1]) < 17 and sum(shards[1]) == 40
    if kind == "txt":
        assert shards[1] == [6] * 6 + [4] and shards[2] == [1] * 40
        assert results[0] == results[1] == results[2]


def test_bad_json_lines_are_reported(bulk, tmp_path):
    lines = [
        '{"text": "w5"}',
        "{",
        "[1]",
        '{"other": "w5"}',
        '{"text": null}',
        "",
        '{"text": "\\ud800"}',
        '{"text": "w6"}',
    ]
    bulk().to_directory([write(tmp_path / "a.jsonl", lines)], tmp_path / "out")
    result = [json.loads(line) for line in (tmp_path / "out" / "a.jsonl").read_text().splitlines()]
    assert [row and row["translation"] for row in result[:7]] == [
        result[0]["translation"],
        *[None] * 6,
    ]
    assert (
        result[0]["translation"] is not None is not result[7]["translation"]
        and result[1] is result[2] is result[5] is None
    )
    assert [row and {**row, "translation": 0} for row in result[3:5]] == [
        {"other": "w5", "translation": 0},
        {"text": None, "translation": 0},
    ]
    assert result[6]["text"] == "\ud800"
    numbers, reasons = zip(*read_bad_lines(tmp_path / "out" / "a.jsonl.bad.jsonl"))
    assert numbers == (2, 3, 4, 5, 7)
    for reason, words in zip(
        reasons,
        (
            "not valid JSON",
            "expected a JSON object",
            "expected text",
            "its text is None",
            "not valid Unicode",
        ),
    ):
        assert words in reason


@pytest.mark.parametrize(
    "line", ['{"text": "w5", "text": "w6"}', '{"text": "w5", "a": [{"b": 1, "b": 1}]}']
)
def test_json_line_with_duplicate_field_is_reported(bulk, tmp_path, line):
    report = bulk().to_directory(
        [write(tmp_path / "a.jsonl", [line, '{"text": "w5"}'])], tmp_path / "out"
    )
    first, second = (tmp_path / "out" / "a.jsonl").read_text().splitlines()
    assert first == "null" and "translation" in json.loads(second) and report["bad"] == 1
    [(place, reason)] = read_bad_lines(tmp_path / "out" / "a.jsonl.bad.jsonl")
    assert place == 1 and ("'text'" in reason or "'b'" in reason)


def test_duplicate_among_many_fields_is_found_in_linear_time(bulk, tmp_path):
    fields = "".join(f', "k{number}": 1' for number in range(60_000))
    line = f'{{"text": "w5"{fields}, "z": 1, "z": 2}}'
    start = time.perf_counter()
    report = bulk().to_directory([write(tmp_path / "a.jsonl", [line])], tmp_path / "out")
    assert report["bad"] == 1 and time.perf_counter() - start < 20  # it took minutes
    [(_, reason)] = read_bad_lines(tmp_path / "out" / "a.jsonl.bad.jsonl")
    assert "'z'" in reason


@pytest.mark.parametrize("number", ["1e400", "-1e999", "NaN", "Infinity", '[{"a": 1E+400}]'])
def test_json_line_with_nonfinite_number_is_reported(bulk, tmp_path, number):
    lines = [
        f'{{"text": "w5", "score": {number}}}',
        '{"text": "w5", "score": 1e300, "id": 123456789012345678901234567890}',
    ]
    report = bulk().to_directory([write(tmp_path / "a.jsonl", lines)], tmp_path / "out")
    first, second = (tmp_path / "out" / "a.jsonl").read_text().splitlines()
    assert (
        first == "null"
        and json.loads(second)["id"] == 123456789012345678901234567890
        and report["bad"] == 1
    )
    [(place, reason)] = read_bad_lines(tmp_path / "out" / "a.jsonl.bad.jsonl")
    assert place == 1 and number.strip('[{}]"a: ') in reason


def test_json_line_with_escaped_output_field_is_reported(bulk, tmp_path):
    lines = ['{"text": "w5", "\\u0074ranslation": 1}', '{"text": "w5"}']
    bulk().to_directory([write(tmp_path / "a.jsonl", lines)], tmp_path / "out")
    [(place, reason)] = read_bad_lines(tmp_path / "out" / "a.jsonl.bad.jsonl")
    assert place == 1 and "translation" in reason


def test_too_long_line_is_reported_and_neighbours_are_kept(bulk, runtime_of, tmp_path):
    lines = ["w5 w1 w6"] * 20
    lines[2] = lines[13] = "w5 " * 60  # more than the 40 positions
    predictions = Predictions(runtime_of("causal-learned"), None, OPTIONS)
    Runner(predictions).to_directory([write(tmp_path / "a", lines)], tmp_path / "out")
    [text] = runtime_of("causal-learned").generate(lines[:1], **OPTIONS)
    expected = ["" if number in (2, 13) else text for number in range(20)]
    assert text and (tmp_path / "out" / "a").read_text().split("\n") == [*expected, ""]
    assert [number for number, _ in read_bad_lines(tmp_path / "out" / "a.bad.jsonl")] == [3, 14]


# ----------------------------------------------------------------------------------------- progress


def test_progress_is_printed_without_terminal(bulk, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress_bar, "SECONDS", 0)
    bulk().to_directory([write(tmp_path / "a", some_lines(16))], tmp_path / "out")
    message = capsys.readouterr().err.splitlines()
    assert message[-1].startswith("16 of 16 lines, ") and message[-1].endswith(
        " a second, 00:00 left"
    )


def test_first_warning_of_a_file_is_shown_and_all_are_counted(bulk, runtime_of, tmp_path):
    lines = [line for line in some_lines(40) if line]
    with pytest.warns(UserWarning) as expected:
        runtime_of("seq2seq").translate(lines, max_new_tokens=1)
    source = write(tmp_path / "a.en", lines)
    with pytest.warns(UserWarning) as caught:
        report = bulk(options={"max_new_tokens": 1}).to_directory([source], tmp_path / "out")
    [message] = [str(warning.message) for warning in caught]
    [(name, counts)] = report["files"].items()
    start, _, first = message.partition(", the first: ")
    assert (
        counts["warnings"] == len(expected) > 1 and start == f"warnings of {name}: {len(expected)}"
    )
    assert first in [str(warning.message) for warning in expected]


def test_benchmark_runs(runtime_of, tmp_path, monkeypatch, capsys):
    """The benchmark runs in one process here, because memory is not measured."""
    monkeypatch.setattr(benchmark, "isolated", lambda function, *arguments: function(*arguments))
    source = write(tmp_path / "a", ["w5 w6", "", "w7"])
    export = str(runtime_of("seq2seq").path.parent)
    benchmark.main([export, "--captions", str(source), "--lines", "20", "--repeats", "1"])
    result = json.loads(capsys.readouterr().out)
    assert (result["lines"], result["bad"]) == (20, 0) and result["ratio"] > 0
    assert write_lines(source, 3, tmp_path / "b").read_text() == "0 w5 w6\n1 w7\n2 w5 w6\n"


def test_results_in_json_are_readable_text(bulk, tmp_path):
    """Letters that are no ASCII stand in the file as they are."""
    source = tmp_path / "a.jsonl"
    source.write_text(
        '{"text": "12 \u20ac"}\n{"text": "\u00e9\\u00e9", "id": 1}\n', encoding="utf-8"
    )
    bulk().to_directory([source], tmp_path / "out")
    first, second = (tmp_path / "out" / "a.jsonl").read_text(encoding="utf-8").splitlines()
    assert first == '{"text": "12 \u20ac", "translation": "12 \u20ac"}'
    assert second.startswith('{"text": "\u00e9\\u00e9", "id": 1, "translation": ')
