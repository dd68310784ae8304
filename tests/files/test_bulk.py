"""Whole files in shards: every line once and in order, bad ones set aside, and a call that goes on
wherever one stopped."""

import bz2
import functools
import gzip
import json
import lzma
import os
import random
import resource
import signal
import subprocess
import sys
import time

import bulk as benchmark
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from bulk import write_lines
from checkpoints import edit_json, with_words

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.cli.main import main
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.files import progress, run
from vanilla_transformer_export.files import ray as on_ray
from vanilla_transformer_export.files.formats import format_of
from vanilla_transformer_export.files.predictions import Predictions
from vanilla_transformer_export.files.rows import RecordFields
from vanilla_transformer_export.files.run import Runner
from vanilla_transformer_export.heads import CHOICES, PAIR, QUESTION, TEXT

pytestmark = pytest.mark.filterwarnings("ignore:.* was cut after")
COMMAND = [sys.executable, "-m", "vanilla_transformer_export.cli.main"]
OPTIONS = {"max_new_tokens": 8}


@pytest.fixture(scope="module")
def runtime_of(exported, tmp_path_factory):
    """The name of an export -> the runtime of a copy, with a tokenizer of words; `comment` is in
    its manifest."""

    @functools.cache
    def opened(name, comment=None):
        folder = with_words(exported(name).directory, tmp_path_factory.mktemp("bulk"))
        edit_json(folder / "manifest.json", comment=comment)
        return TextRuntime(folder, threads=1)

    return opened


@pytest.fixture
def bulk(runtime_of):
    """A translation in shards of eight lines, with other settings where they are given."""

    def made(task="translate", model=("seq2seq",), options=OPTIONS, shard_lines=8, **settings):
        predictions = Predictions(runtime_of(*model), task, options if task == "translate" else {})
        return Runner(predictions, shard_lines=shard_lines, **settings)

    return made


def some_lines(count, seed=0):
    """Each with its number in it; one in eight has no words."""
    rng = np.random.default_rng(seed)
    lines = [
        " ".join(f"w{token}" for token in rng.integers(4, 48, rng.integers(1, 10)))
        for _ in range(count)
    ]
    return ["" if rng.random() < 1 / 8 else line for line in lines]


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def translated(runtime, lines, blank=""):
    """Each line by itself."""
    return [runtime.translate([line], **OPTIONS)[0] if line.strip() else blank for line in lines]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def bad_lines(path):
    return [
        (found["line"], found["reason"]) for found in map(json.loads, path.read_text().splitlines())
    ]


# ---------------------------------------------------------------------------------- what is written


def test_each_line_is_translated_once_and_in_order(bulk, runtime_of, tmp_path):
    first, second = some_lines(30), some_lines(8, seed=1)
    inputs = [write(tmp_path / "a.en", first), tmp_path / "b.en.gz"]
    inputs[1].write_bytes(gzip.compress("\r\n".join(second).encode("utf-8-sig")))
    report = bulk().to_directory(inputs, tmp_path / "out")
    for name, lines in {"a.en": first, "b.en": second}.items():
        found = (tmp_path / "out" / name).read_text().split("\n")
        assert found == [*translated(runtime_of("seq2seq"), lines), ""]
        assert report["files"][str(tmp_path / "out" / name)]["lines"] == len(lines)
    assert (report["lines"], report["bad"]) == (38, 0)
    assert names(tmp_path / "out") == ["a.en", "b.en", "manifest.json"]


def test_json_lines_keep_their_other_fields(bulk, runtime_of, tmp_path):
    lines = some_lines(12)
    rows = [{"id": number, "en": line, "more": ["é", None]} for number, line in enumerate(lines)]
    source = write(tmp_path / "a.jsonl", [json.dumps(row) for row in rows])
    bulk(field="en").to_directory([source], tmp_path / "out")
    found = [json.loads(line) for line in (tmp_path / "out" / "a.jsonl").read_text().splitlines()]
    expected = translated(runtime_of("seq2seq"), lines, None)
    assert [row.pop("translation") for row in found] == expected and found == rows


@pytest.mark.parametrize("count", [20, 0])
def test_tables_keep_their_other_columns(bulk, runtime_of, tmp_path, count):
    lines = some_lines(count)
    columns = {"id": pyarrow.array(range(count), "int64"), "text": pyarrow.array(lines, "string")}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=11)
    report = bulk().to_directory([tmp_path / "a.parquet"], tmp_path / "out")
    found = pyarrow.parquet.read_table(tmp_path / "out" / "a.parquet").to_pydict()
    expected = translated(runtime_of("seq2seq"), lines, None)
    assert (
        found == {"id": [*range(count)], "text": lines, "translation": expected}
        and report["lines"] == count
    )


def test_predictions_of_text_are_json_lines(bulk, runtime_of, tmp_path):
    lines = [line or "w5" for line in some_lines(10)]
    bulk(None, ["classification"]).to_directory([write(tmp_path / "a", lines)], tmp_path / "out")
    found = [json.loads(line) for line in (tmp_path / "out" / "a.jsonl").read_text().splitlines()]
    for own, [expected] in zip(found, runtime_of("classification").classify(lines), strict=True):
        assert own[0]["label"] == expected["label"] and own[0]["score"] == pytest.approx(
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
        found = column.to_pylist()
    else:
        found = [
            json.loads(line) for line in (tmp_path / "out" / "a.txt.jsonl").read_text().splitlines()
        ]
    np.testing.assert_allclose(found, runtime_of("encoder").embed(lines), rtol=0, atol=1e-6)


def test_an_input_without_lines_gives_an_output_without_lines(bulk, tmp_path):
    assert bulk().to_directory([write(tmp_path / "a", [])], tmp_path / "out")["lines"] == 0
    assert (tmp_path / "out" / "a").read_bytes() == b""


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_nested_field_is_read_and_the_results_get_another_name(bulk, runtime_of, tmp_path, kind):
    """As translation data sets of the Hub: the field `translation` holds both languages."""
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
    "name, content, message",
    [
        ("a.zst", b"w5", "a.zst is a Zstandard file, expected plain text, .gz, .bz2, .xz"),
        ("a.txt.Z", b"w5", "a.txt.Z is a compress file, expected plain text"),
        ("a.txt.lzma", b"w5", "a.txt.lzma is a LZMA file, expected plain text"),
        (
            "a.txt",
            bytes.fromhex("1f9d9061"),
            "has the first bytes of a compress file, expected plain text",
        ),
        ("a.tar.gz", gzip.compress(b"w5", mtime=0), "a.tar.gz is a tar file, expected plain text"),
        (
            "a",
            bytes.fromhex("28b52ffd2010810000"),
            "has the first bytes of a Zstandard file, expected plain text",
        ),
        (
            "a",
            bz2.compress(b"w5"),
            "has the first bytes of a bzip2 file, expected a name that ends with .bz2",
        ),
        (
            "a",
            bz2.compress(b""),
            "has the first bytes of a bzip2 file, expected a name that ends with .bz2",
        ),
        (
            "a.jsonl",
            gzip.compress(b"w5", mtime=0),
            "has the first bytes of a gzip file, expected a name that ends with .gz",
        ),
        (
            "a.en",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            "git-lfs pointer.*git lfs pull",
        ),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer"),
    ],
)
def test_files_that_hold_no_lines_are_refused_before_anything_is_written(
    bulk, tmp_path, name, content, message
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        bulk().to_directory([tmp_path / name], tmp_path / "out")
    assert names(tmp_path) == [name]


# ---------------------------------------------------------------------------------------- bad lines


def test_bad_lines_of_text_are_set_aside_and_leave_their_place(bulk, runtime_of, tmp_path):
    lines = [line.encode() for line in some_lines(20)]
    lines[3], lines[17] = b"caf\xe9", b"w5 " * 400_000
    (tmp_path / "a").write_bytes(b"\n".join(lines))
    report = bulk().to_directory([tmp_path / "a"], tmp_path / "out")
    lines[3] = lines[17] = b""
    expected = translated(runtime_of("seq2seq"), [line.decode() for line in lines])
    assert (tmp_path / "out" / "a").read_text().split("\n") == [*expected, ""]
    first, second = bad_lines(tmp_path / "out" / "a.bad.jsonl")
    assert first[0] == 4 and "not UTF-8 text" in first[1]
    assert second == (18, "it has more than 1,000,000 bytes, expected at most that")
    assert (report["lines"], report["bad"]) == (20, 2)


def test_bad_json_lines(bulk, tmp_path):
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
    found = [json.loads(line) for line in (tmp_path / "out" / "a.jsonl").read_text().splitlines()]
    assert [row and row["translation"] for row in found[:7]] == [
        found[0]["translation"],
        *[None] * 6,
    ]
    assert (
        found[0]["translation"] is not None is not found[7]["translation"]
        and found[1] is found[2] is found[5] is None
    )
    assert [row and {**row, "translation": 0} for row in found[3:5]] == [
        {"other": "w5", "translation": 0},
        {"text": None, "translation": 0},
    ]
    assert found[6]["text"] == "\ud800"
    numbers, reasons = zip(*bad_lines(tmp_path / "out" / "a.jsonl.bad.jsonl"))
    assert numbers == (2, 3, 4, 5, 7)
    for reason, words in zip(
        reasons,
        (
            "no JSON",
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
def test_a_line_with_two_fields_of_one_name_is_set_aside(bulk, tmp_path, line):
    report = bulk().to_directory(
        [write(tmp_path / "a.jsonl", [line, '{"text": "w5"}'])], tmp_path / "out"
    )
    first, second = (tmp_path / "out" / "a.jsonl").read_text().splitlines()
    assert first == "null" and "translation" in json.loads(second) and report["bad"] == 1
    [(place, reason)] = bad_lines(tmp_path / "out" / "a.jsonl.bad.jsonl")
    assert place == 1 and ("'text' is there twice" in reason or "'b' is there twice" in reason)


@pytest.mark.parametrize("number", ["1e400", "-1e999", "NaN", "Infinity", '[{"a": 1E+400}]'])
def test_numbers_that_json_cannot_hold_are_set_aside(bulk, tmp_path, number):
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
    [(place, reason)] = bad_lines(tmp_path / "out" / "a.jsonl.bad.jsonl")
    assert place == 1 and number.strip('[{}]"a: ') in reason


def test_an_escaped_name_of_the_output_field_is_set_aside(bulk, tmp_path):
    lines = ['{"text": "w5", "\\u0074ranslation": 1}', '{"text": "w5"}']
    bulk().to_directory([write(tmp_path / "a.jsonl", lines)], tmp_path / "out")
    [(place, reason)] = bad_lines(tmp_path / "out" / "a.jsonl.bad.jsonl")
    assert place == 1 and "has a field translation already" in reason


def test_what_is_too_long_for_the_model_is_bad_and_its_neighbours_are_not(
    bulk, runtime_of, tmp_path
):
    lines = ["w5 w1 w6"] * 20
    lines[2] = lines[13] = "w5 " * 60  # of 40 positions
    predictions = Predictions(runtime_of("causal-learned"), None, OPTIONS)
    Runner(predictions).to_directory([write(tmp_path / "a", lines)], tmp_path / "out")
    found = (tmp_path / "out" / "a").read_text().split("\n")
    assert [place for place, text in enumerate(found) if not text] == [2, 13, 20]
    assert [number for number, _ in bad_lines(tmp_path / "out" / "a.bad.jsonl")] == [3, 14]


# ----------------------------------------------------------------------------------------- going on


class Stopped(Exception):
    pass


def stop_after(monkeypatch, count, error=Stopped):
    """So many shards."""
    compute, done = run.compute, []

    def stopping(*arguments):
        done.append(arguments[2])
        if len(done) > count:
            raise error
        return compute(*arguments)

    monkeypatch.setattr(run, "compute", stopping)
    return done


def begun(bulk, inputs, out, count, error=Stopped):
    """A run that stopped after so many shards."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, count, error)
        with pytest.raises(Exception) as caught:
            bulk.to_directory(inputs, out)
    return caught


def test_only_what_is_left_is_computed_and_the_result_is_the_same(bulk, tmp_path, monkeypatch):
    inputs = [write(tmp_path / "a", some_lines(30)), write(tmp_path / "b", some_lines(30, seed=1))]
    report = bulk().to_directory(inputs, tmp_path / "out")
    whole = contents(tmp_path / "out")
    for count in (0, 3, 4, 6):
        out = tmp_path / f"out-{count}"
        begun(bulk(), inputs, out, count)
        with pytest.MonkeyPatch.context() as patch:
            done = stop_after(patch, 100)
            again = bulk().to_directory(inputs, out)
        assert len(done) == 8 - count and again["lines"] == report["lines"] == 60
        assert contents(out) == whole
    done = stop_after(monkeypatch, 0)
    assert bulk().to_directory(inputs, tmp_path / "out") == report and done == []


def test_a_truncated_shard_is_made_again(bulk, tmp_path):
    source = write(tmp_path / "a", some_lines(30))
    bulk().to_directory([source], tmp_path / "whole")
    begun(bulk(), [source], tmp_path / "out", 3)
    part = tmp_path / "out" / "a.parts" / "000001"
    part.write_bytes(part.read_bytes()[:-3])
    (tmp_path / "out" / "a.parts" / "000002.facts").write_text('{"input": ')
    (tmp_path / "out" / "a.parts" / ".000003.new").write_text("half")
    with pytest.warns(
        UserWarning, match="000001 is damaged, expected what was written there: it is made again"
    ):
        bulk().to_directory([source], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["gz", "parquet"])
def test_a_truncated_input_is_an_error_that_goes_on_when_it_is_repaired(bulk, tmp_path, kind):
    lines, source = some_lines(400), tmp_path / f"a.{kind}"
    source.write_bytes(gzip.compress("\n".join(lines).encode()))
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": lines}), source)
    content = source.read_bytes()
    bulk(shard_lines=50).to_directory([source], tmp_path / "whole")
    source.write_bytes(content[: len(content) - 500])
    with pytest.raises(ValueError, match=f"a.{kind} is not a whole (gzip|Parquet) file"):
        bulk(shard_lines=50).to_directory([source], tmp_path / "out")
    source.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        done = stop_after(patch, 100)
        bulk(shard_lines=50).to_directory([source], tmp_path / "out")
    assert len(done) == (8 if kind == "parquet" else len(done) < 8 and len(done))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    "error, message",
    [(MemoryError("12 GB"), "not enough memory: 12 GB"), (OSError(28, "full"), "full")],
)
def test_what_stops_a_run_says_what_is_kept(bulk, tmp_path, error, message):
    source = write(tmp_path / "a", some_lines(30))
    caught = begun(bulk(), [source], tmp_path / "out", 2, error)
    assert isinstance(caught.value, OSError) and message in str(caught.value)
    assert "the shards that are whole stay in" in str(caught.value)
    assert bulk().to_directory([source], tmp_path / "out")["lines"] == 30


def call_of(runtime_of, source, **flags):
    """Of the command, without its output."""
    words = [
        str(word)
        for name, value in flags.items()
        for word in (f"--{name.replace('_', '-')}", value)
    ]
    export = str(runtime_of("seq2seq").path.parent)
    return ["predict", export, "--task", "translate", "--input", str(source), *words]


def test_lines_without_letters_are_copied(runtime_of, tmp_path, capsys):
    lines = ["w5 w6", "12345", "***", "w7. 7.", "12:30"]
    source = write(tmp_path / "a", lines)
    call = call_of(runtime_of, source, max_new_tokens=4)
    runtime = runtime_of("seq2seq")
    for flags, copies in ([], True), (["--set", "copy_letterless=false"], False):
        main([*call, *flags, "--output-dir", str(tmp_path / str(copies))])
        expected = runtime.translate(lines, max_new_tokens=4, copy_letterless=copies)
        assert (tmp_path / str(copies) / "a").read_text() == "".join(
            f"{line}\n" for line in expected
        )
    capsys.readouterr()
    predict = [
        "predict",
        str(runtime.path.parent),
        "--task",
        "translate",
        "--set",
        "max_new_tokens=4",
    ]
    for copies in (True, False):
        main([*predict, "--set", f"copy_letterless={str(copies).lower()}", *lines])
        found = capsys.readouterr().out.splitlines()
        assert found == runtime.translate(lines, max_new_tokens=4, copy_letterless=copies)
        assert (found[1] == "12345") == copies


def test_a_full_disk_leaves_whole_shards(runtime_of, tmp_path):
    """A process that may write no file of more than 2000 bytes; the results of the third shard are
    longer."""
    rows = [
        {"text": f"w{5 + number} w6 w7", "more": "x" * 3000 * (number == 25)}
        for number in range(40)
    ]
    source = write(tmp_path / "a.jsonl", map(json.dumps, rows))
    call = call_of(runtime_of, source, shard_lines=10, max_new_tokens=2)
    main([*call, "--output-dir", str(tmp_path / "whole")])
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # noqa: E731
    again = [*COMMAND, *call, "--output-dir", str(tmp_path / "out")]
    done = subprocess.run(again, preexec_fn=limit, capture_output=True, text=True)
    assert (
        done.returncode == 1 and "File too large; the shards that are whole stay in" in done.stderr
    ), done.stderr
    assert names(tmp_path / "out" / "a.jsonl.parts") == [
        "000000.facts",
        "000000.jsonl",
        "000001.facts",
        "000001.jsonl",
    ]
    done = subprocess.run(again, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = contents(tmp_path / "whole")
    assert {**contents(tmp_path / "out"), "manifest.json": b""} == {
        **expected,
        "manifest.json": b"",
    }


def test_a_killed_command_goes_on_to_the_same_result(runtime_of, tmp_path):
    """With SIGKILL, at moments that nobody chose."""
    source = write(tmp_path / "a", some_lines(300))
    call = call_of(runtime_of, source, shard_lines=2, max_new_tokens=8)
    main([*call, "--output-dir", str(tmp_path / "whole")])
    killed(call, tmp_path / "out", kills=3, shards=20)
    assert (tmp_path / "out" / "a").read_bytes() == (tmp_path / "whole" / "a").read_bytes()
    assert names(tmp_path / "out") == ["a", "manifest.json"]


def killed(call, out, kills, shards):
    """As `peak`, of a command that is killed so often before, each time some `shards` later."""
    rng = random.Random(1)
    for _ in range(kills):
        before = len([*out.glob("*.parts/*.facts")])
        process = subprocess.Popen(
            [*COMMAND, *call, "--output-dir", str(out)], stdout=subprocess.DEVNULL
        )
        while len([*out.glob("*.parts/*.facts")]) < before + shards and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    return peak(call, out)


def peak(call, out):
    """Runs the command to its end: the most memory that it had, in KiB."""
    process = subprocess.Popen(
        [*COMMAND, *call, "--output-dir", str(out)], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return usage.ru_maxrss


# ------------------------------------------------------------------------------------------ refused


def test_a_call_with_other_arguments_is_refused_by_name(bulk, tmp_path):
    inputs = [write(tmp_path / "a", some_lines(30)), write(tmp_path / "b", ["w5"])]
    begun(bulk(), inputs, tmp_path / "out", 2)
    for other, given, message in (
        (bulk(shard_lines=9), inputs, "shard_lines 8, now 9"),
        (bulk(options={"max_new_tokens": 9}), inputs, "max_new_tokens 8, now 9"),
        (bulk(), inputs[:1], r"inputs \[.*a.*b.*\], now \[.*a'\]"),
        (bulk(model=("seq2seq", "another")), inputs, "another export"),
    ):
        with pytest.raises(FileExistsError, match=message):
            other.to_directory(given, tmp_path / "out")
    bulk().to_directory(inputs, tmp_path / "out")
    write(tmp_path / "a", some_lines(29))
    with pytest.raises(
        FileExistsError,
        match="out/a was made of other lines than .*a has now: expected the same lines",
    ):
        bulk().to_directory(inputs, tmp_path / "out")


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


def test_two_processes_do_not_write_one_directory(bulk, tmp_path):
    source = write(tmp_path / "a", some_lines(30))
    begun(bulk(), [source], tmp_path / "out", 2)
    hold = (
        "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); "
        "print(flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, tmp_path / "out"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    other.stdout.readline()
    with pytest.raises(
        FileExistsError, match="out is being written by another process: expected to be alone"
    ):
        bulk().to_directory([source], tmp_path / "out")
    other.communicate(b"\n")
    assert bulk().to_directory([source], tmp_path / "out")["lines"] == 30


# ----------------------------------------------------------------------------------------- progress


def test_what_is_told_without_a_terminal(bulk, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0)
    bulk().to_directory([write(tmp_path / "a", some_lines(16))], tmp_path / "out")
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("16 of 16 lines, ") and said[-1].endswith(" a second, 00:00 left")


def test_the_benchmark_runs(runtime_of, tmp_path, monkeypatch, capsys):
    """Here in one process, where its memory is of no interest."""
    monkeypatch.setattr(benchmark, "isolated", lambda function, *arguments: function(*arguments))
    source = write(tmp_path / "a", ["w5 w6", "", "w7"])
    export = str(runtime_of("seq2seq").path.parent)
    benchmark.main([export, "--captions", str(source), "--lines", "20", "--repeats", "1"])
    found = json.loads(capsys.readouterr().out)
    assert (found["lines"], found["bad"]) == (20, 0) and found["ratio"] > 0
    assert write_lines(source, 3, tmp_path / "b").read_text() == "0 w5 w6\n1 w7\n2 w5 w6\n"


@pytest.mark.slow
def test_fifty_thousand_lines_in_constant_memory(runtime_of, tmp_path):
    """Killed twice. What is left takes as much memory as a tenth of the lines does."""
    lines = [
        f"w{4 + number % 44} w{4 + number // 44 % 44} w{4 + number // 1936 % 44}"
        for number in range(50_000)
    ]
    source = write(tmp_path / "a", lines)
    call = call_of(runtime_of, source, shard_lines=500, max_new_tokens=4)
    most = killed(call, tmp_path / "out", kills=2, shards=20)
    few = write(tmp_path / "few", lines[:5000])
    assert most < 1.1 * peak(
        call_of(runtime_of, few, shard_lines=500, max_new_tokens=4), tmp_path / "out-of-few"
    )
    found = (tmp_path / "out" / "a").read_text().splitlines()
    expected = dict(zip(lines, found))
    assert len(found) == len(lines) == len(expected)
    for line in random.Random(0).sample(lines, 200):
        assert runtime_of("seq2seq").translate([line], max_new_tokens=4) == [expected[line]]
