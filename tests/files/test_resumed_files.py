"""Tests of bulk prediction over files that stops and resumes."""

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
from command_line import main
from messages import check_message, raises
from shards import Stopped, contents, names, some_lines, stop_after, write

pytestmark = pytest.mark.filterwarnings("ignore:.* was cut after")
COMMAND = [sys.executable, "-m", "vanilla_transformer_export"]


# ----------------------------------------------------------------------------------------- resuming


def interrupt_run(bulk, inputs, out, count, error=Stopped):
    """Start a run that stops after `count` shards, and return its exception info."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, count, error)
        with pytest.raises(Exception) as caught:
            bulk.to_directory(inputs, out)
    return caught


def test_resumed_run_computes_only_missing_shards(bulk, tmp_path, monkeypatch):
    inputs = [write(tmp_path / "a", some_lines(30)), write(tmp_path / "b", some_lines(30, seed=1))]
    report = bulk().to_directory(inputs, tmp_path / "out")
    complete = contents(tmp_path / "out")
    for count in (0, 3, 4, 6):
        out = tmp_path / f"out-{count}"
        interrupt_run(bulk(), inputs, out, count)
        with pytest.MonkeyPatch.context() as patch:
            done = stop_after(patch, 100)
            again = bulk().to_directory(inputs, out)
        assert len(done) == 8 - count and again["lines"] == report["lines"] == 60
        assert contents(out) == complete
    done = stop_after(monkeypatch, 0)
    assert bulk().to_directory(inputs, tmp_path / "out") == report and done == []


def test_truncated_shard_is_recomputed(bulk, tmp_path):
    source = write(tmp_path / "a", some_lines(30))
    bulk().to_directory([source], tmp_path / "whole")
    interrupt_run(bulk(), [source], tmp_path / "out", 3)
    part = tmp_path / "out" / "a.parts" / "000001"
    part.write_bytes(part.read_bytes()[:-3])
    (tmp_path / "out" / "a.parts" / "000002.facts").write_text('{"input": ')
    (tmp_path / "out" / "a.parts" / f".{3:032x}.new").write_text("half")
    (tmp_path / "out" / "a.parts" / f".{9:032x}.new").write_text("of a longer input")
    with pytest.warns(UserWarning, match="000001"):
        bulk().to_directory([source], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_bad_line_of_finished_shard_raises_if_not_skipped(bulk, tmp_path):
    source = tmp_path / "a"
    source.write_bytes(b"w5\n\xff\n" + b"w6\n" * 28)
    interrupt_run(bulk(), [source], tmp_path / "out", 2)
    with raises(ValueError, seen=("line 2", "a")):
        bulk(skips_bad_lines=False).to_directory([source], tmp_path / "out")


def test_shards_of_changed_lines_are_recomputed(bulk, tmp_path):
    lines, source = some_lines(30), tmp_path / "a"
    interrupt_run(bulk(), [write(source, lines)], tmp_path / "out", 3)
    write(source, ["w9 w8 w7", *lines[1:]])
    with pytest.MonkeyPatch.context() as patch:
        done = stop_after(patch, 100)
        bulk().to_directory([source], tmp_path / "out")
    assert len(done) == 2  # the changed shard and the missing shard
    bulk().to_directory([source], tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["gz", "parquet"])
def test_truncated_input_raises_and_repaired_input_resumes(bulk, tmp_path, kind):
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
def test_error_reports_that_finished_shards_are_kept(bulk, tmp_path, error, seen):
    source = write(tmp_path / "a", some_lines(30))
    caught = interrupt_run(bulk(), [source], tmp_path / "out", 2, error)
    assert isinstance(caught.value, OSError)
    check_message(str(caught.value), seen=seen)
    assert "the finished shards stay in" in str(caught.value)
    assert bulk().to_directory([source], tmp_path / "out")["lines"] == 30


def command_arguments(runtime_of, source, **flags):
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
    call = command_arguments(runtime_of, source, max_new_tokens=4)
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


def test_full_disk_keeps_finished_shards_and_run_resumes(runtime_of, tmp_path):
    """Limit files to 2000 bytes, which the results of the third shard exceed."""
    rows = [
        {"text": f"w{5 + number} w6 w7", "more": "x" * 3000 * (number == 25)}
        for number in range(40)
    ]
    source = write(tmp_path / "a.jsonl", map(json.dumps, rows))
    call = command_arguments(runtime_of, source, shard_lines=10, max_new_tokens=2)
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


def test_killed_command_resumes_to_same_result(runtime_of, tmp_path):
    """SIGKILL ends the command at random moments."""
    source = write(tmp_path / "a", some_lines(150))
    call = command_arguments(runtime_of, source, shard_lines=2, max_new_tokens=8)
    main([*call, "--output-dir", str(tmp_path / "whole")])
    run_with_kills(call, tmp_path / "out", kills=2, shards=15)
    assert (tmp_path / "out" / "a").read_bytes() == (tmp_path / "whole" / "a").read_bytes()
    assert names(tmp_path / "out") == ["a", "manifest.json"]


def run_with_kills(call, out, kills, shards):
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
    return measure_peak_memory(call, out)


def measure_peak_memory(call, out):
    """Run the command to its end and return its peak memory in KiB."""
    process = subprocess.Popen(
        [*COMMAND, *call, "--output-dir", str(out)], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return usage.ru_maxrss


# ------------------------------------------------------------------------------------------- errors


def test_resuming_with_other_arguments_is_rejected(bulk, tmp_path):
    inputs = [write(tmp_path / "a", some_lines(30)), write(tmp_path / "b", ["w5"])]
    interrupt_run(bulk(), inputs, tmp_path / "out", 2)
    for other, new_inputs, seen in (
        (bulk(shard_lines=9), inputs, ("shard_lines", 8, 9)),
        (bulk(options={"max_new_tokens": 9}), inputs, ("max_new_tokens", 8, 9)),
        (bulk(), inputs[:1], "out"),
        (bulk(model=("seq2seq", "another")), inputs, "out"),
    ):
        with raises(FileExistsError, seen=seen):
            other.to_directory(new_inputs, tmp_path / "out")
    bulk().to_directory(inputs, tmp_path / "out")
    write(tmp_path / "a", some_lines(29))
    with raises(FileExistsError, seen="out/a"):
        bulk().to_directory(inputs, tmp_path / "out")


def test_directory_locked_by_another_process_is_rejected(bulk, tmp_path):
    source = write(tmp_path / "a", some_lines(30))
    interrupt_run(bulk(), [source], tmp_path / "out", 2)
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
def test_fifty_thousand_lines_run_in_constant_memory(runtime_of, tmp_path):
    """The command is killed twice. The last run needs as much memory as a tenth of the lines."""
    lines = [
        f"w{4 + number % 44} w{4 + number // 44 % 44} w{4 + number // 1936 % 44}"
        for number in range(50_000)
    ]
    source = write(tmp_path / "a", lines)
    call = command_arguments(runtime_of, source, shard_lines=500, max_new_tokens=4)
    peak_memory = run_with_kills(call, tmp_path / "out", kills=2, shards=20)
    small_source = write(tmp_path / "few", lines[:5000])
    assert peak_memory < 1.1 * measure_peak_memory(
        command_arguments(runtime_of, small_source, shard_lines=500, max_new_tokens=4),
        tmp_path / "out-of-few",
    )
    actual = (tmp_path / "out" / "a").read_text().splitlines()
    expected = dict(zip(lines, actual))
    assert len(actual) == len(lines) == len(expected)
    for line in random.Random(0).sample(lines, 200):
        assert runtime_of("seq2seq").translate([line], max_new_tokens=4) == [expected[line]]


def test_resuming_with_another_output_field_is_rejected(bulk, tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "w5"}\n' * 20)
    interrupt_run(bulk(), [source], tmp_path / "out", 1)
    with raises(FileExistsError, seen=("output_field", None, "other")):
        bulk(output_field="other").to_directory([source], tmp_path / "out")
    bulk().to_directory([source], tmp_path / "out")
