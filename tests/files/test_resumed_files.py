"""Tests of predictions for whole files that stop and resume."""

import gzip
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time

import pyarrow
import pyarrow.parquet
import pytest
from messages import check_message, raises
from shards import Stopped, contents, names, some_lines, stop_after, write

from vanilla_transformer_export.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:.* was cut after")
COMMAND = [sys.executable, "-m", "vanilla_transformer_export.cli.main"]


# ----------------------------------------------------------------------------------------- going on


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
    (tmp_path / "out" / "a.parts" / ".000009.new").write_text("of a longer input")
    with pytest.warns(UserWarning, match="000001"):
        bulk().to_directory([source], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_bad_lines_of_earlier_shards_stop_a_call_that_stops_at_bad_lines(bulk, tmp_path):
    source = tmp_path / "a"
    source.write_bytes(b"w5\n\xff\n" + b"w6\n" * 28)
    begun(bulk(), [source], tmp_path / "out", 2)
    with raises(ValueError, seen=("line 2", "a")):
        bulk(skips_bad_lines=False).to_directory([source], tmp_path / "out")


def test_shards_of_lines_that_were_repaired_are_made_again(bulk, tmp_path):
    lines, source = some_lines(30), tmp_path / "a"
    begun(bulk(), [write(source, lines)], tmp_path / "out", 3)
    write(source, ["w9 w8 w7", *lines[1:]])
    with pytest.MonkeyPatch.context() as patch:
        done = stop_after(patch, 100)
        bulk().to_directory([source], tmp_path / "out")
    assert len(done) == 2  # the first and the last
    bulk().to_directory([source], tmp_path / "whole")
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
    with raises(ValueError, seen=f"a.{kind}"):
        bulk(shard_lines=50).to_directory([source], tmp_path / "out")
    source.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        done = stop_after(patch, 100)
        bulk(shard_lines=50).to_directory([source], tmp_path / "out")
    assert len(done) == (8 if kind == "parquet" else len(done) < 8 and len(done))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    "error, seen",
    [(MemoryError("12 GB"), (12, "GB")), (OSError(28, "full"), "full")],
)
def test_what_stops_a_run_says_what_is_kept(bulk, tmp_path, error, seen):
    source = write(tmp_path / "a", some_lines(30))
    caught = begun(bulk(), [source], tmp_path / "out", 2, error)
    assert isinstance(caught.value, OSError)
    check_message(str(caught.value), seen=seen)
    assert "the finished shards stay in" in str(caught.value)
    assert bulk().to_directory([source], tmp_path / "out")["lines"] == 30


def call_of(runtime_of, source, **flags):
    """Return the arguments of the command for `source`, without the output."""
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
        actual = capsys.readouterr().out.splitlines()
        assert actual == runtime.translate(lines, max_new_tokens=4, copy_letterless=copies)
        assert (actual[1] == "12345") == copies


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
    assert done.returncode == 1 and "File too large" in done.stderr, done.stderr
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
    """SIGKILL ends the command at random moments."""
    source = write(tmp_path / "a", some_lines(300))
    call = call_of(runtime_of, source, shard_lines=2, max_new_tokens=8)
    main([*call, "--output-dir", str(tmp_path / "whole")])
    killed(call, tmp_path / "out", kills=3, shards=20)
    assert (tmp_path / "out" / "a").read_bytes() == (tmp_path / "whole" / "a").read_bytes()
    assert names(tmp_path / "out") == ["a", "manifest.json"]


def killed(call, out, kills, shards):
    """Run the command and kill it `kills` times, each time after about `shards` more shards.

    Return the peak memory of its last run.
    """
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
    for other, given, seen in (
        (bulk(shard_lines=9), inputs, ("shard_lines", 8, 9)),
        (bulk(options={"max_new_tokens": 9}), inputs, ("max_new_tokens", 8, 9)),
        (bulk(), inputs[:1], "out"),
        (bulk(model=("seq2seq", "another")), inputs, "out"),
    ):
        with raises(FileExistsError, seen=seen):
            other.to_directory(given, tmp_path / "out")
    bulk().to_directory(inputs, tmp_path / "out")
    write(tmp_path / "a", some_lines(29))
    with raises(FileExistsError, seen="out/a"):
        bulk().to_directory(inputs, tmp_path / "out")


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
    with raises(FileExistsError, seen="out"):
        bulk().to_directory([source], tmp_path / "out")
    other.communicate(b"\n")
    assert bulk().to_directory([source], tmp_path / "out")["lines"] == 30


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
    actual = (tmp_path / "out" / "a").read_text().splitlines()
    expected = dict(zip(lines, actual))
    assert len(actual) == len(lines) == len(expected)
    for line in random.Random(0).sample(lines, 200):
        assert runtime_of("seq2seq").translate([line], max_new_tokens=4) == [expected[line]]
