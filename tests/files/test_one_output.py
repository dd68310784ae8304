"""Tests of generation over lines of text into one file: order, bad lines, resuming, errors."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from checkpoints import with_words
from messages import check_message, raises
from shards import Stopped, some_lines, stop_after, write

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.cli.main import main
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.files import run
from vanilla_transformer_export.files.formats import Lines, generated_text
from vanilla_transformer_export.files.predictions import Predictions
from vanilla_transformer_export.files.run import Runner

SAMPLING = dict(do_sample=True, top_k=20, seed=11, max_new_tokens=8)
BEAMS = dict(num_beams=3, max_new_tokens=8)
COMMAND = [sys.executable, "-m", "vanilla_transformer_export.cli.main", "generate"]


@pytest.fixture(scope="module")
def export(exported, tmp_path_factory):
    return with_words(exported("seq2seq").directory, tmp_path_factory.mktemp("batches"))


@pytest.fixture(scope="module")
def runtime(export):
    return TextRuntime(export, threads=1)


def runner(runtime, options=BEAMS, shard_lines=8, skips=True, field=None, prefix=None, **settings):
    predictions = Predictions(runtime, "generate", options, **settings)
    return Runner(predictions, field, None, prefix, shard_lines, skips)


def partial_path(out):
    return out.with_name(f".{out.name}.partial")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------------------------------- output


def test_output_lines_equal_single_line_generation(runtime, tmp_path):
    lines = some_lines(50)
    report = runner(runtime, batch_size=4).to_file(write(tmp_path / "in", lines), tmp_path / "out")
    alone = [runtime.generate([line], **BEAMS)[0] if line else "" for line in lines]
    assert (tmp_path / "out").read_text() == "".join(text + "\n" for text in alone)
    assert "" in lines and len(set(alone)) > 10 and report["lines"] == 50
    assert names(tmp_path) == ["in", "out"]


def test_scores_follow_tab_and_n_best_uses_moses_format(runtime, tmp_path):
    lines = ["w5 w6", "", "w7", "w8 w9 w10"]
    source = write(tmp_path / "in", lines)
    runner(runtime, scores=True).to_file(source, tmp_path / "scores")
    runner(runtime, n_best=2, shard_lines=3).to_file(source, tmp_path / "best")
    expected = {
        line: runtime.generate_with_scores([line], num_return_sequences=2, **BEAMS)
        for line in lines
        if line
    }
    actual = [line.split("\t") for line in (tmp_path / "scores").read_text().splitlines()]
    assert actual.pop(1) == [""]
    for (text, score), (texts, scores) in zip(actual, expected.values(), strict=True):
        assert text == texts[0] and float(score) == pytest.approx(scores[0], abs=2e-6)
    actual = [line.split(" ||| ") for line in (tmp_path / "best").read_text().splitlines()]
    assert [row[0] for row in actual] == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert [actual.pop(2), actual.pop(2)] == [["1", "", "0.000000"]] * 2
    reference = [pair for texts, scores in expected.values() for pair in zip(texts, scores)]
    for (_, text, score), (expected_text, expected_score) in zip(actual, reference, strict=True):
        assert text == expected_text and float(score) == pytest.approx(expected_score, abs=2e-6)
    assert float(actual[0][2]) > float(actual[1][2])


def test_records_contain_texts_and_scores(runtime, tmp_path):
    rows = [{"text": "w5 w6"}, {"text": ""}, {"text": "w8 w9 w10"}]
    source = write(tmp_path / "in.jsonl", map(json.dumps, rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    runner(runtime).to_file(source, tmp_path / "out.jsonl")
    runner(runtime, scores=True).to_file(source, tmp_path / "scores.jsonl")
    runner(runtime, n_best=2).to_file(tmp_path / "in.parquet", tmp_path / "best.parquet")
    texts = [runtime.generate([row["text"]], **BEAMS)[0] if row["text"] else None for row in rows]
    result = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert result == [row | {"translation": text} for row, text in zip(rows, texts)]
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [row["translation"] and row["translation"]["text"] for row in scores] == texts
    best = pyarrow.parquet.read_table(tmp_path / "best.parquet").to_pydict()["translation"]
    assert best[1] is None
    pairs = json.loads(best[2])
    assert pairs[0]["text"] == texts[2] and pairs[0]["score"] > pairs[1]["score"]


def test_samples_are_sorted_by_score(runtime):
    [printed] = runner(runtime, SAMPLING, n_best=5).lines([b"w5 w6", b"w7"], "line {}")
    scores = [float(line.split(" ||| ")[2]) for line in printed.splitlines()]
    scores = np.array(scores).reshape(2, 5)
    assert (np.diff(scores, axis=1) <= 0).all() and len(set(scores.ravel())) > 5


def derived_seeds(count):
    """Return the seeds of `count` rows of a call with seed 11."""
    sequences = [np.random.SeedSequence([11, number]) for number in range(1, count)]
    return [11, *(int(each.generate_state(1, np.uint64)[0]) for each in sequences)]


def test_each_sentence_is_sampled_with_seed_of_its_text(runtime):
    options = {name: value for name, value in SAMPLING.items() if name != "seed"}
    actual = runtime.translate(["w6", "w5 w6. w7 w8. w9"], **SAMPLING)
    seeds = derived_seeds(2)[1:]
    assert actual[1:] == runtime.translate(["w5 w6. w7 w8. w9"], seeds=seeds, **options)
    assert actual[1:] != runtime.translate(["w5 w6. w7 w8. w9"], **SAMPLING)


@pytest.mark.parametrize("task", ["generate", "translate"])
def test_each_line_is_sampled_with_its_own_seed(runtime, task):
    """Batch size and shard size do not change the samples. The lines are the rows of one call."""
    lines = [line or "w5" for line in some_lines(12)]
    method = getattr(runtime, task)
    options = {name: value for name, value in SAMPLING.items() if name != "seed"}
    expected = [
        method([line], seeds=[seed], **options)[0] for line, seed in zip(lines, derived_seeds(12))
    ]
    assert method(lines, **SAMPLING) == expected
    for batch_size, shard_lines in ((1, 5), (4, 12)):
        predictions = Predictions(runtime, task, SAMPLING, batch_size)
        printed = Runner(predictions, shard_lines=shard_lines).lines(map(str.encode, lines), "{}")
        assert "".join(printed).splitlines() == expected
    assert len(set(expected)) > 5


def test_number_of_seeds_must_match_number_of_texts(runtime):
    for call in (runtime.generate, runtime.translate, runtime.generate_with_scores):
        with raises(UsageError, seen=("seeds", 2), expected=1):
            call(["w5"], seeds=[1, 2], do_sample=True)
    ids = np.array([[5, 6]])
    with raises(UsageError, seen=("seeds", 2), expected=1):
        runtime.runtime.generate(ids, seeds=[1, 2], do_sample=True)


@pytest.mark.parametrize("seeds", [[-1], ["a"], [1.5], [None], 1, "1"])
def test_invalid_seeds_are_rejected(runtime, seeds):
    for call in (runtime.generate, runtime.translate):
        with raises(UsageError, seen=("seeds", seeds), expected=0):
            call(["w5"], seeds=seeds, do_sample=True)


def test_seeds_may_be_any_sequence_of_integers(runtime):
    outputs = [
        runtime.generate(["w5", "w6"], seeds=seeds, do_sample=True)
        for seeds in ([0, 1], (0, 1), range(2), np.arange(2))
    ]
    assert all(output == outputs[0] for output in outputs)


def test_translations_start_with_target_prefixes(runtime, tmp_path):
    lines, rng = some_lines(30, seed=3), np.random.default_rng(5)
    prefixes = [
        " ".join(f"w{token}" for token in rng.integers(4, 48, rng.integers(0, 4))) for _ in lines
    ]
    source, prefix_file = write(tmp_path / "in", lines), write(tmp_path / "prefixes", prefixes)
    job = runner(runtime, batch_size=4, prefix=prefix_file)
    job.to_file(source, tmp_path / "out")
    actual = (tmp_path / "out").read_text()
    for line, prefix, text in zip(lines, prefixes, actual.splitlines(), strict=True):
        expected = runtime.generate([line], target_prefix=[prefix], **BEAMS)[0] if line else ""
        assert text == expected and (not line or text.startswith(prefix))
    assert "".join(job.file(source)) == actual
    job.to_directory([source], tmp_path / "outs")
    assert (tmp_path / "outs" / "in").read_text() == actual


def test_gzip_and_carriage_returns_give_same_output_as_plain_text(runtime, tmp_path):
    lines = some_lines(9)
    (tmp_path / "in.gz").write_bytes(gzip.compress("\r\n".join(lines).encode("utf-8-sig")))
    for source in (tmp_path / "in.gz", write(tmp_path / "in", lines)):
        runner(runtime).to_file(source, tmp_path / f"{source.name}-out")
    assert (tmp_path / "in.gz-out").read_bytes() == (tmp_path / "in-out").read_bytes()
    assert "".join(runner(runtime).file(tmp_path / "in.gz")) == (tmp_path / "in-out").read_text()


def test_line_breaks_within_a_result_become_spaces():
    assert generated_text(0, "one\r\n\ntwo\n", None) == "one two "


def test_empty_input_gives_empty_output(runtime, tmp_path):
    (tmp_path / "new").mkdir()
    runner(runtime).to_file(write(tmp_path / "in", []), tmp_path / "new" / "out")
    assert (tmp_path / "new" / "out").read_bytes() == b"" and names(tmp_path / "new") == ["out"]


# --------------------------------------------------------------------------------------- bad lines


def test_bad_lines_are_written_to_file_next_to_output(runtime, tmp_path):
    lines = [b"w5", b"w6 \xff", b"w7"]
    (tmp_path / "in").write_bytes(b"\n".join(lines))
    report = runner(runtime).to_file(tmp_path / "in", tmp_path / "out")
    first, third = (runtime.generate([text], **BEAMS)[0] for text in ("w5", "w7"))
    assert (tmp_path / "out").read_text() == f"{first}\n\n{third}\n" and report["bad"] == 1
    bad = json.loads((tmp_path / "out.bad.jsonl").read_text())
    assert bad["line"] == 2 and "UTF-8" in bad["reason"]
    assert names(tmp_path) == ["in", "out", "out.bad.jsonl"]
    (tmp_path / "out").unlink()
    with raises(FileExistsError, seen="out.bad.jsonl"):
        runner(runtime).to_file(tmp_path / "in", tmp_path / "out")
    write(tmp_path / "in", ["w5"])
    runner(runtime).to_file(tmp_path / "in", tmp_path / "out", force=True)
    assert names(tmp_path) == ["in", "out"]


@pytest.mark.parametrize("bad", ["w6 \udcff", "w6 " * 60], ids=["bytes", "too long"])
def test_bad_line_stops_run_and_skipping_resumes(exported, tmp_path, bad):
    folder = with_words(exported("causal-learned").directory, tmp_path)  # 40 positions
    job = Predictions(TextRuntime(folder, threads=1), "generate", dict(max_new_tokens=4))
    (tmp_path / "in").write_bytes(
        "\n".join(["w5"] * 5 + [bad, "w7"]).encode(errors="surrogateescape")
    )
    for output in (Runner.to_file, Runner.to_directory):
        source, out = tmp_path / "in", tmp_path / output.__name__
        paths = source if output is Runner.to_file else [source]
        with raises(ValueError, seen=6):
            output(Runner(job, shard_lines=4, skips_bad_lines=False), paths, out)
        report = output(Runner(job, shard_lines=4), paths, out)
        assert report["bad"] == 1
    with raises(ValueError, seen=6):
        [*Runner(job, shard_lines=4, skips_bad_lines=False).file(tmp_path / "in")]
    with pytest.warns(UserWarning, match="line 6 "):
        printed = "".join(Runner(job, shard_lines=4).file(tmp_path / "in"))
    assert printed == (tmp_path / "to_file").read_text()
    assert [not text for text in printed.splitlines()] == [False] * 5 + [True, False]


def test_run_stopped_by_bad_line_resumes_after_repair(runtime, tmp_path, monkeypatch):
    source, job = tmp_path / "in", runner(runtime, shard_lines=2, skips=False)
    source.write_bytes(b"w5\nw6\nw7 \xff\n")
    with raises(ValueError, seen=3):
        job.to_file(source, tmp_path / "out")
    computed, lines = stop_after(monkeypatch, 9), ["w5", "w6", "w7"]
    job.to_file(write(source, lines), tmp_path / "out")
    assert computed == [2]  # the first line of the second shard
    alone = [runtime.generate([line], **BEAMS)[0] for line in lines]
    assert (tmp_path / "out").read_text().splitlines() == alone


# ----------------------------------------------------------------------------------------- resuming


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


# ------------------------------------------------------------------------------------------- errors


def test_invalid_output_path_is_rejected_and_force_overwrites(runtime, export, tmp_path):
    source, job = write(tmp_path / "in", ["w5"]), runner(runtime)
    for out, kind, seen, expected in (
        (source, UsageError, "in", ()),
        (tmp_path, FileExistsError, (), ()),
        (tmp_path / "out.gz", UsageError, (), ".gz"),
        (tmp_path / "out.jsonl", UsageError, (), ".jsonl"),
        (tmp_path / "out.parquet", UsageError, "out.parquet", ()),
        (export / "out", UsageError, "out", ()),
        (write(tmp_path / "there", ["mine"]), FileExistsError, (), "--force"),
    ):
        with raises(kind, seen=seen, expected=expected):
            job.to_file(source, out)
    assert (tmp_path / "there").read_text() == "mine\n"
    job.to_file(source, tmp_path / "there", force=True)
    assert (tmp_path / "there").read_text() != "mine\n"
    assert names(tmp_path) == ["in", "there"]


def test_file_of_bad_lines_never_replaces_an_input(runtime, tmp_path):
    source = write(tmp_path / "out.jsonl.bad.jsonl", ['{"text": "w5"}'])
    with raises(UsageError, seen="out.jsonl.bad.jsonl"):
        runner(runtime).to_file(source, tmp_path / "out.jsonl", force=True)
    assert names(tmp_path) == ["out.jsonl.bad.jsonl"]


def test_existing_file_of_bad_lines_beside_a_linked_output_is_kept(runtime, tmp_path):
    source = write(tmp_path / "in", ["w5"])
    kept = write(tmp_path / "real.bad.jsonl", ["mine"])
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with raises(FileExistsError, seen="real.bad.jsonl", expected="--force"):
        runner(runtime).to_file(source, tmp_path / "link")
    assert kept.read_text() == "mine\n" and not (tmp_path / "real").exists()


def test_parquet_input_requires_parquet_output(runtime, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["w5"]}), tmp_path / "a.parquet")
    with raises(UsageError, seen="Parquet", expected=".parquet"):
        runner(runtime).to_file(tmp_path / "a.parquet", tmp_path / "out.jsonl")
    with raises(UsageError, seen="a.parquet"):
        [*runner(runtime).file(tmp_path / "a.parquet")]


def test_invalid_input_is_rejected_and_leaves_no_output(runtime, tmp_path):
    for name, content, seen in (
        ("bad.gz", b"w5\n", "gzip"),
        ("bad.gz", gzip.compress(b"w5 " * 999)[:-9], "gzip"),
    ):
        (tmp_path / name).write_bytes(content)
        with raises(ValueError, seen=seen):
            runner(runtime).to_file(tmp_path / name, tmp_path / "out")
    with pytest.raises(FileNotFoundError):
        runner(runtime).to_file(tmp_path / "none", tmp_path / "out")
    three, two = write(tmp_path / "three", ["w5"] * 3), write(tmp_path / "two", ["w5"] * 2)
    with raises(ValueError, seen=2, expected=3):
        runner(runtime, prefix=two).to_file(three, tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_named_pipe_input_is_rejected(runtime, tmp_path):
    os.mkfifo(tmp_path / "in")
    for write_results, paths in (("to_file", tmp_path / "in"), ("to_directory", [tmp_path / "in"])):
        with raises(UsageError, seen="in"):
            getattr(runner(runtime), write_results)(paths, tmp_path / "out")
    assert names(tmp_path) == ["in"]


def test_input_changed_during_run_raises(runtime, tmp_path, monkeypatch):
    source, compute = write(tmp_path / "in", ["w5", "w6"]), run.compute

    def change_and_compute(*args):
        write(source, ["w7", "w6", "w5"])
        return compute(*args)

    monkeypatch.setattr(run, "compute", change_and_compute)
    with raises(ValueError, seen="in"):
        runner(runtime).to_file(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unsupported_options_are_rejected(runtime, exported, tmp_path):
    for name, value in {"num_return_sequences": 1, "seeds": [1], "target_prefix": ["w5"]}.items():
        with raises(UsageError, seen=name):
            runner(runtime, {name: value})
    with raises(UsageError, seen="num_return_sequences", expected=("num_beams", 2)):
        runner(runtime, dict(num_beams=2), n_best=3)
    with raises(UsageError, seen="beams"):
        runner(runtime, dict(beams=2))
    with raises(UsageError, seen="n_best"):
        Predictions(runtime, "translate", n_best=2)
    encoder = TextRuntime(with_words(exported("classification").directory, tmp_path), threads=1)
    with raises(
        UsageError,
        seen=("generate", "VanillaEncoderForSequenceClassification"),
        expected=("classify", "zero-shot"),
    ):
        runner(encoder, {})
    with raises(UsageError, seen="num_beams"):
        Predictions(encoder, None, {"num_beams": 2})
    (tmp_path / "decoder").mkdir()
    decoder = TextRuntime(with_words(exported("causal").directory, tmp_path / "decoder"), threads=1)
    assert [Predictions(model).field for model in (runtime, decoder)] == [
        "translation",
        "prediction",
    ]
    source = write(tmp_path / "in", ["w5"])
    with raises(UsageError, expected="decoder"):
        runner(decoder, {}, prefix=source)
    with raises(UsageError, seen="translate", expected="generate"):
        Runner(Predictions(runtime, "translate"), target_prefix=source)
    other = write(tmp_path / "other", ["w5"])
    with raises(UsageError, seen=2):
        runner(runtime, prefix=source).to_directory([source, other], tmp_path / "out")


@pytest.mark.parametrize(
    "arguments, seen, expected",
    [
        (["w5", "--input", "in"], ("--input", "--stream"), ()),
        (["--input", "in", "--stream"], ("--input", "--stream"), ()),
        (["--output", "out"], ("--output", "--output-dir", "--input"), ()),
        (["--output-dir", "out", "--stream"], ("--output", "--output-dir", "--input"), ()),
        (["--input", "in", "--output", "a", "--output-dir", "b"], (), ()),
        (["--input", "a", "b", "--output", "out"], ("--input", 2), "--output-dir"),
        (["--input", "a", "--input", "b"], ("--input", 2), "--output-dir"),
        (["--input", "in", "--force"], ("--force", "--output"), ()),
        (["--input", "in", "--output-dir", "out", "--force"], ("--force", "--output"), ()),
        (["--input", "in", "--output", "out", "--ray", "auto"], ("--ray", "--output-dir"), ()),
        (["--target-prefix", "in"], ("--target-prefix", "--input"), ()),
        (["w5", "--output-field", "de"], ("--output-field", "--input"), ()),
        (["--on-bad-line", "drop"], "drop", ()),
        (["w5", "--scores"], "--scores", "--stream"),
        (["--n-best", "2", "--stream"], "--n-best", "--stream"),
        (["--n-best", "2", "--scores"], (), ()),
    ],
)
def test_conflicting_arguments_exit_with_code_2(arguments, seen, expected, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "anywhere", *arguments])
    assert stopped.value.code == 2
    check_message(capsys.readouterr().err, seen=seen, expected=expected)


def test_n_best_above_num_beams_error_names_flag(export, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["generate", str(export), "--num-beams", "2", "--n-best", "3"])
    assert stopped.value.code == 2
    check_message(capsys.readouterr().err, seen=("--n-best", 3), expected=("num_beams", 2))


# ------------------------------------------------------------------------------------------- memory

# `ru_maxrss` is not used, because a child process starts with the peak of its parent.
PEAK = """
import re, sys
from vanilla_transformer_export.cli.main import main
main(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.slow
def test_memory_is_constant_for_ten_times_more_lines(export, tmp_path):
    """Compare 10,000 lines (8 MB) with 1,000 lines (0.8 MB, which is more than one window)."""
    peaks = []
    for count in (1000, 10_000):
        lines = [f"{line} {'  ' * 400}w7" for line in some_lines(count)]
        source = write(tmp_path / f"in-{count}", lines)
        assert source.stat().st_size > 800 * count
        files = ["--input", str(source), "--output", str(tmp_path / f"out-{count}")]
        options = ["--max-new-tokens", "4", "--threads", "1", "--shard-lines", "512"]
        done = subprocess.run(
            [sys.executable, "-c", PEAK, "generate", str(export), *files, *options],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(done.stdout.splitlines()[-1]) * 1024)
        assert len((tmp_path / f"out-{count}").read_text().splitlines()) == count
    assert peaks[1] - peaks[0] < 2_000_000, peaks
