"""Tests of a run to one output that was stopped and runs again."""

import random
import signal
import subprocess
import sys
import time

import pytest
from checkpoints import with_words
from command_line import main
from messages import raises
from shards import BEAMS, SAMPLING, Stopped, names, runner, some_lines, stop_after, write

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.files import run
from vanilla_transformer_export.files.formats import Lines

COMMAND = [sys.executable, "-m", "vanilla_transformer_export", "generate"]


def partial_path(out):
    return out.with_name(f".{out.name}.partial")


def stopped(job, source, out, count):
    """Start a run that stops after `count` shards."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, count)
        job.to_file(source, out)


@pytest.mark.parametrize("options", [BEAMS, SAMPLING], ids=["beams", "sampled"])
def test_interrupted_runs_resume_to_same_result(runtime, tmp_path, options):
    """Shards and their facts files may be half written."""
    job = runner(runtime, options, shard_lines=6, n_best=2)
    source, out = write(tmp_path / "in", some_lines(40)), tmp_path / "out"
    job.to_file(source, out)
    complete, rng = out.read_bytes(), random.Random(0)
    for count in range(1, 7):
        out.unlink()
        stopped(job, source, out, count)
        parts = partial_path(out) / "out.parts"
        for path in rng.sample(sorted(parts.iterdir()), min(count, 2)):
            path.write_bytes(path.read_bytes()[: rng.randint(0, path.stat().st_size - 1)])
        (parts / f".{count:032x}.new").write_text("half")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *args, **settings: None)
            job.to_file(source, out)
        assert out.read_bytes() == complete and names(tmp_path) == ["in", "out"]


@pytest.mark.parametrize("count", [0, 1])
def test_interrupted_command_says_where_it_resumes_if_a_shard_is_finished(
    export, tmp_path, monkeypatch, capsys, count
):
    source, out = write(tmp_path / "in", ["w5", "w6"]), tmp_path / "out"
    compute, calls = run.compute, []

    def compute_or_interrupt(*args):
        calls.append(args)
        if len(calls) > count:
            raise KeyboardInterrupt
        return compute(*args)

    monkeypatch.setattr(run, "compute", compute_or_interrupt)
    command = ["generate", str(export), "--input", str(source), "--output", str(out)]
    with pytest.raises(SystemExit) as end:
        main([*command, "--shard-lines", "1", "--max-new-tokens", "2"])
    assert end.value.code == 130
    message = capsys.readouterr().err.splitlines()[-1]
    kept = f"; the finished shards stay in {partial_path(out)}, and the same command resumes there"
    assert message == f"vanilla-transformer: interrupted{kept * count}"
    assert partial_path(out).exists() == bool(count)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "full")], ids=repr)
def test_run_that_stops_while_its_first_shard_is_written_leaves_nothing_and_runs_again(
    runtime, tmp_path, monkeypatch, error
):
    source, out = write(tmp_path / "in", ["w5 w6", "w7"]), tmp_path / "out"

    def fail(*_):
        assert (partial_path(out) / "out.parts").is_dir()
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(Lines, "write", fail)
        runner(runtime).to_file(source, out)
    assert names(tmp_path) == ["in"]
    runner(runtime).to_file(source, out)
    assert out.read_text().splitlines() == runtime.generate(["w5 w6", "w7"], **BEAMS)
    assert names(tmp_path) == ["in", "out"]


def test_killed_command_resumes_to_same_result(export, tmp_path):
    """SIGKILL ends the command at random moments."""
    source, out, expected = (
        write(tmp_path / "in", some_lines(200)),
        tmp_path / "out",
        tmp_path / "expected",
    )
    options = ["--shard-lines", "4", "--threads", "1", "--max-new-tokens", "12"]
    options += ["--set", "do_sample=true", "--set", "seed=4"]
    main([*COMMAND[3:], str(export), "--input", str(source), "--output", str(expected), *options])
    rng, kills = random.Random(1), 0
    while not out.exists():
        process = subprocess.Popen(
            [*COMMAND, str(export), "--input", str(source), "--output", str(out), *options],
            stdout=subprocess.DEVNULL,
        )
        before = len([*partial_path(out).rglob("*.facts")])
        while process.poll() is None and kills < 2:
            if len([*partial_path(out).rglob("*.facts")]) >= before + 5:
                time.sleep(rng.uniform(0, 0.02))
                process.kill()
                process.wait()
        assert process.wait() in (0, -signal.SIGKILL)
        kills += process.returncode == -signal.SIGKILL
    assert kills >= 2 and out.read_bytes() == expected.read_bytes()
    assert names(tmp_path) == ["expected", "in", "out"]


@pytest.fixture
def interrupted_run(runtime, tmp_path):
    """Return the input and the output path of a run that stopped after its first shard."""
    files = write(tmp_path / "in", some_lines(20)), tmp_path / "out"
    stopped(runner(runtime), *files, 1)
    return files


@pytest.mark.parametrize(
    "change, seen",
    [
        (dict(options=dict(num_beams=2, max_new_tokens=8)), ("num_beams", 3, 2)),
        (dict(options=dict(num_beams=3)), ("max_new_tokens", 8, None)),
        (dict(batch_size=5), ("batch_size", 32, 5)),
        (dict(shard_lines=5), ("shard_lines", 8, 5)),
        (dict(scores=True), ("scores", False, True)),
        (dict(n_best=2), ("n_best", None, 2)),
    ],
    ids=str,
)
def test_resuming_with_other_options_is_rejected_and_partial_output_kept(
    runtime, interrupted_run, change, seen
):
    before = sorted(partial_path(interrupted_run[1]).rglob("*"))
    with raises(FileExistsError, seen=seen):
        runner(runtime, **change).to_file(*interrupted_run)
    assert sorted(partial_path(interrupted_run[1]).rglob("*")) == before
    runner(runtime).to_file(*interrupted_run)


def test_resuming_with_other_export_prefixes_or_threads_is_rejected(
    exported, runtime, interrupted_run, tmp_path
):
    (tmp_path / "other").mkdir()
    other = TextRuntime(
        with_words(exported("seq2seq-untied").directory, tmp_path / "other"), threads=1
    )
    with raises(FileExistsError, seen=".out.partial"):
        runner(other).to_file(*interrupted_run)
    with raises(FileExistsError, seen=("target_prefix", None)):
        runner(runtime, prefix=interrupted_run[0]).to_file(*interrupted_run)
    with raises(FileExistsError, seen=("threads", 1, 2)):
        runner(TextRuntime(runtime.path.parent, threads=2)).to_file(*interrupted_run)


def test_changed_lines_are_recomputed(runtime, interrupted_run):
    lines = some_lines(20)
    write(interrupted_run[0], ["w9", *lines[1:]])
    runner(runtime).to_file(*interrupted_run)
    assert interrupted_run[1].read_text().startswith(runtime.generate(["w9"], **BEAMS)[0])


def test_shard_of_changed_prefix_is_recomputed(runtime, tmp_path):
    source, prefixes = write(tmp_path / "in", ["w5", "w6"]), tmp_path / "prefixes"
    job = runner(runtime, shard_lines=1, prefix=write(prefixes, ["w7", "w8"]))
    stopped(job, source, tmp_path / "out", 1)
    write(prefixes, ["w9", "w8"])
    job.to_file(source, tmp_path / "out")
    first, second = (tmp_path / "out").read_text().splitlines()
    assert first == runtime.generate(["w5"], target_prefix=["w9"], **BEAMS)[0]
    assert second == runtime.generate(["w6"], target_prefix=["w8"], **BEAMS)[0]


def test_run_stopped_before_first_shard_leaves_no_files(runtime, tmp_path):
    source = write(tmp_path / "in", some_lines(5))
    stopped(runner(runtime), source, tmp_path / "out", 0)
    assert names(tmp_path) == ["in"]
    runner(runtime, {}).to_file(source, tmp_path / "out")


def test_output_locked_by_another_process_is_rejected(runtime, interrupted_run):
    before = sorted(partial_path(interrupted_run[1]).rglob("*"))
    hold = (
        "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); "
        "print(flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, partial_path(interrupted_run[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    other.stdout.readline()
    with raises(FileExistsError, seen=".out.partial"):
        runner(runtime).to_file(*interrupted_run)
    other.communicate(b"\n")
    assert sorted(partial_path(interrupted_run[1]).rglob("*")) == before
