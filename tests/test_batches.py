"""Files of lines: results in order, a partial file that a killed run goes on with, and what is
refused."""

import gzip
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from checkpoints import with_words

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.cli.main import main
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.files import text_lines as lines
from vanilla_transformer_export.files.text_lines import Batches, generate_file

SAMPLING = dict(do_sample=True, top_k=20, seed=11, max_new_tokens=8)
BEAMS = dict(num_beams=3, max_new_tokens=8)
COMMAND = [sys.executable, "-m", "vanilla_transformer_export.cli.main", "generate"]


@pytest.fixture(scope="module")
def export(exported, tmp_path_factory):
    return with_words(exported("seq2seq").directory, tmp_path_factory.mktemp("batches"))


@pytest.fixture(scope="module")
def runtime(export):
    return TextRuntime(export, threads=1)


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(lines, "WINDOW", 2)


def some_lines(count, seed=0):
    """Of up to nine words; one in eight has none."""
    rng = np.random.default_rng(seed)
    lines = [
        " ".join(f"w{token}" for token in rng.integers(4, 48, rng.integers(1, 10)))
        for _ in range(count)
    ]
    return ["" if rng.random() < 1 / 8 else line for line in lines]


def write(path, lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def partial_of(out):
    return out.with_name(f".{out.name}.partial"), out.with_name(f".{out.name}.partial.state")


# ---------------------------------------------------------------------------------- what is written


def test_each_line_gives_what_it_gives_alone(runtime, tmp_path, small_windows):
    lines = some_lines(50)
    generate_file(
        Batches(runtime, BEAMS, batch_size=4), write(tmp_path / "in", lines), tmp_path / "out"
    )
    alone = [runtime.generate([line], **BEAMS)[0] if line else "" for line in lines]
    assert (tmp_path / "out").read_text() == "".join(text + "\n" for text in alone)
    assert "" in lines and len(set(alone)) > 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_scores_stand_behind_a_tab_and_n_best_lists_are_those_of_moses(runtime, tmp_path):
    lines = ["w5 w6", "", "w7", "w8 w9 w10"]
    source = write(tmp_path / "in", lines)
    generate_file(Batches(runtime, BEAMS, scores=True), source, tmp_path / "scores")
    generate_file(Batches(runtime, BEAMS, n_best=2), source, tmp_path / "best")
    expected = {
        line: runtime.generate_with_scores([line], num_return_sequences=2, **BEAMS)
        for line in lines
        if line
    }
    found = [line.split("\t") for line in (tmp_path / "scores").read_text().splitlines()]
    assert found.pop(1) == [""]
    for (text, score), (texts, scores) in zip(found, expected.values(), strict=True):
        assert text == texts[0] and float(score) == pytest.approx(scores[0], abs=2e-6)
    found = [line.split(" ||| ") for line in (tmp_path / "best").read_text().splitlines()]
    assert [row[0] for row in found] == ["0", "0", "1", "2", "2", "3", "3"]
    assert found.pop(2) == ["1", "", "0.000000"]
    wanted = [pair for texts, scores in expected.values() for pair in zip(texts, scores)]
    for (_, text, score), (expected_text, expected_score) in zip(found, wanted, strict=True):
        assert text == expected_text and float(score) == pytest.approx(expected_score, abs=2e-6)
    assert float(found[0][2]) > float(found[1][2])


def test_samples_come_with_the_likeliest_first(runtime):
    [window] = Batches(runtime, SAMPLING, n_best=5).windows(["w5 w6", "w7"])
    scores = np.array([float(line.split(" ||| ")[2]) for line in window]).reshape(2, 5)
    assert (np.diff(scores, axis=1) <= 0).all() and len(set(scores.ravel())) > 5


def test_translations_begin_with_their_prefixes(runtime, tmp_path, small_windows):
    lines, rng = some_lines(30, seed=3), np.random.default_rng(5)
    prefixes = [
        " ".join(f"w{token}" for token in rng.integers(4, 48, rng.integers(0, 4))) for _ in lines
    ]
    files = write(tmp_path / "in", lines), tmp_path / "out", write(tmp_path / "prefixes", prefixes)
    generate_file(Batches(runtime, BEAMS, batch_size=4), *files)
    for line, prefix, found in zip(
        lines, prefixes, (tmp_path / "out").read_text().splitlines(), strict=True
    ):
        if line:
            assert found == runtime.generate([line], target_prefix=[prefix], **BEAMS)[0]
            assert found.startswith(prefix)
        else:
            assert found == ""


def test_packed_text_and_carriage_returns_are_read_as_plain_text_is(runtime, tmp_path):
    lines = some_lines(9)
    (tmp_path / "in.gz").write_bytes(gzip.compress("\r\n".join(lines).encode("utf-8-sig")))
    for source in (tmp_path / "in.gz", write(tmp_path / "in", lines)):
        generate_file(Batches(runtime, BEAMS), source, tmp_path / f"{source.name}-out")
    assert (tmp_path / "in.gz-out").read_bytes() == (tmp_path / "in-out").read_bytes()


def test_line_breaks_within_a_result_become_spaces():
    rows = Batches.written(
        type("Plain", (), dict(n_best=None, scores=False)), 0, [("one\r\n\ntwo\n", 0.0)]
    )
    assert rows == ["one two "]


def test_an_input_without_lines_gives_an_output_without_lines(runtime, tmp_path):
    generate_file(Batches(runtime, {}), write(tmp_path / "in", []), tmp_path / "new" / "out")
    assert (tmp_path / "new" / "out").read_bytes() == b""
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


# ----------------------------------------------------------------------------------------- going on


class Stopped(Exception):
    pass


@pytest.mark.parametrize("options", [BEAMS, SAMPLING], ids=["beams", "sampled"])
def test_wherever_a_run_is_cut_off_the_result_is_the_same(
    runtime, tmp_path, small_windows, options
):
    """Anything of the partial file may have been written that the state does not know of yet, and
    half a line of the state."""
    job = Batches(runtime, options, batch_size=3, n_best=2)
    source, out = write(tmp_path / "in", some_lines(40)), tmp_path / "out"
    generate_file(job, source, out)
    whole = out.read_bytes()
    states, write_lines = [], lines.Partial.write

    def noted(self, lines, done):
        write_lines(self, lines, done)
        states.append([path.read_bytes() for path in partial_of(out)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines.Partial, "write", noted)
        generate_file(job, source, out, force=True)
    assert len(states) == 7 and out.read_bytes() == whole
    rng = random.Random(0)
    for _ in range(12):
        out.unlink()
        number = rng.randrange(len(states) - 1)
        (before, state), (after, later) = states[number : number + 2]
        partial, log = partial_of(out)
        partial.write_bytes(after[: rng.randint(len(before), len(after))])
        log.write_bytes(later[: rng.randint(len(state), len(later) - 1)])
        generate_file(job, source, out)
        assert out.read_bytes() == whole
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_only_what_is_left_is_computed(runtime, tmp_path, monkeypatch, small_windows):
    job, lines = Batches(runtime, BEAMS, batch_size=3), some_lines(40)
    source, out, count = write(tmp_path / "in", lines), tmp_path / "out", 0
    generate_rows = TextRuntime.generate_rows

    def counted(self, rows, *args, **options):
        nonlocal count
        if count >= 20:
            raise Stopped
        count += len(rows)
        return generate_rows(self, rows, *args, **options)

    monkeypatch.setattr(TextRuntime, "generate_rows", counted)
    with pytest.raises(Stopped):
        generate_file(job, source, out)
    assert len(partial_of(out)[0].read_text().splitlines()) == 18
    monkeypatch.setattr(TextRuntime, "generate_rows", generate_rows)
    seen, results = [], Batches.results
    monkeypatch.setattr(
        Batches,
        "results",
        lambda self, first, *rest: seen.append(first) or results(self, first, *rest),
    )
    generate_file(job, source, out)
    assert seen == [18, 24, 30, 36]


def test_a_killed_command_goes_on_to_the_same_result(export, tmp_path):
    """With SIGKILL, at moments that nobody chose."""
    source, out, expected = (
        write(tmp_path / "in", some_lines(400)),
        tmp_path / "out",
        tmp_path / "expected",
    )
    options = [
        "--batch-size",
        "1",
        "--set",
        "do_sample=true",
        "--set",
        "seed=4",
        "--threads",
        "1",
        "--max-new-tokens",
        "12",
    ]
    main([*COMMAND[3:], str(export), "--input", str(source), "--output", str(expected), *options])
    rng, kills, log = random.Random(1), 0, partial_of(out)[1]
    while not out.exists():
        run = subprocess.Popen(
            [*COMMAND, str(export), "--input", str(source), "--output", str(out), *options]
        )
        records = log.read_bytes().count(b"\n") if log.exists() else 0
        while run.poll() is None and kills < 4:
            if log.exists() and log.read_bytes().count(b"\n") >= records + 2:
                time.sleep(rng.uniform(0, 0.02))
                run.kill()
                run.wait()
        assert run.wait() in (0, -signal.SIGKILL)
        kills += run.returncode == -signal.SIGKILL
    assert kills >= 2
    assert out.read_bytes() == expected.read_bytes()


@pytest.fixture
def begun(runtime, tmp_path, monkeypatch, small_windows):
    """The arguments of a run that was stopped behind its first window."""
    files = write(tmp_path / "in", some_lines(20)), tmp_path / "out"
    results = Batches.results

    def stopping(self, first, *rest):
        if first:
            raise Stopped
        return results(self, first, *rest)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Batches, "results", stopping)
        generate_file(Batches(runtime, BEAMS, batch_size=4), *files)
    return files


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(options=dict(num_beams=2, max_new_tokens=8)),
            "num_beams 3, now 2: expected the same call, or that you remove it",
        ),
        (dict(options=dict(num_beams=3)), "another max_new_tokens 8, now None: "),
        (dict(batch_size=5), "another batch_size 4, now 5: "),
        (dict(scores=True), "another scores False, now True: "),
        (dict(n_best=2), "another n_best None, now 2: "),
    ],
    ids=str,
)
def test_a_call_with_other_options_is_refused_and_what_was_begun_stays(
    runtime, begun, change, message
):
    before = [path.read_bytes() for path in partial_of(begun[1])]
    job = Batches(**{**dict(runtime=runtime, options=BEAMS, batch_size=4), **change})
    with pytest.raises(FileExistsError, match=message):
        generate_file(job, *begun)
    assert [path.read_bytes() for path in partial_of(begun[1])] == before
    generate_file(Batches(runtime, BEAMS, batch_size=4), *begun)


def test_a_call_with_another_input_or_export_is_refused_by_name(exported, runtime, begun, tmp_path):
    (tmp_path / "other").mkdir()
    other = TextRuntime(
        with_words(exported("seq2seq-untied").directory, tmp_path / "other"), threads=1
    )
    with pytest.raises(FileExistsError, match="another export: expected the same call"):
        generate_file(Batches(other, BEAMS, batch_size=4), *begun)
    with pytest.raises(FileExistsError, match="another target_prefix: expected the same call"):
        generate_file(Batches(runtime, BEAMS, batch_size=4), *begun, begun[0])
    write(begun[0], some_lines(20, seed=1))
    with pytest.raises(
        FileExistsError, match="another input, threads 1, now 2: expected the same call"
    ):
        generate_file(
            Batches(TextRuntime(runtime.path.parent, threads=2), BEAMS, batch_size=4), *begun
        )


def test_a_run_that_ends_before_its_first_window_leaves_nothing(runtime, tmp_path, monkeypatch):
    source = write(tmp_path / "in", some_lines(5))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Batches, "results", lambda *args: (_ for _ in ()).throw(Stopped))
        generate_file(Batches(runtime, BEAMS), source, tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []
    generate_file(Batches(runtime, {}), source, tmp_path / "new" / "out")


def test_two_processes_do_not_write_one_file(runtime, begun):
    partial, state = partial_of(begun[1])
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print(flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    other.stdout.readline()
    before = partial.read_bytes(), state.read_bytes()
    with pytest.raises(
        FileExistsError, match="out is being written by another process: expected to be alone"
    ):
        generate_file(Batches(runtime, BEAMS, batch_size=4), *begun)
    other.communicate(b"\n")
    assert (partial.read_bytes(), state.read_bytes()) == before


# ------------------------------------------------------------------------------------------ refused


def test_an_output_that_may_not_be_written_is_refused(runtime, export, tmp_path):
    source, job = write(tmp_path / "in", ["w5"]), Batches(runtime, BEAMS)
    for out, kind, message in (
        (source, UsageError, "the output is .*in, an input"),
        (tmp_path, FileExistsError, "is no file, expected one or a new path"),
        (tmp_path / "out.gz", UsageError, "written as plain text: expected a name without .gz"),
        (export / "out", UsageError, "inside the export: expected a place outside"),
        (
            write(tmp_path / "there", ["mine"]),
            FileExistsError,
            "exists already; expected a new path, or --force",
        ),
    ):
        with pytest.raises(kind, match=message):
            generate_file(job, source, out)
    assert (tmp_path / "there").read_text() == "mine\n"
    generate_file(job, source, tmp_path / "there", force=True)
    assert (tmp_path / "there").read_text() != "mine\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "there"]


def test_input_that_is_no_text_is_refused_before_anything_is_written(runtime, tmp_path):
    job, bad = Batches(runtime, BEAMS), tmp_path / "bad"
    for name, content, message in (
        ("bad", b"w5\n\xff\n", "line 2 of .*bad is not UTF-8 text"),
        ("bad", b"x" * 1_000_001, "line 1 of .*bad has more than 1,000,000 bytes"),
        ("bad.gz", b"w5\n", "is not a whole gzip file"),
        ("bad.gz", gzip.compress(b"w5 " * 999)[:-9], "is not a whole gzip file"),
    ):
        bad = tmp_path / name
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            generate_file(job, bad, tmp_path / "out")
    with pytest.raises(FileNotFoundError):
        generate_file(job, tmp_path / "none", tmp_path / "out")
    three = write(tmp_path / "three", ["w5"] * 3)
    with pytest.raises(ValueError, match="two has 2 lines, expected 3 as .*three"):
        generate_file(job, three, tmp_path / "out", write(tmp_path / "two", ["w5"] * 2))
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_an_error_names_lines_and_what_is_done_stays(exported, tmp_path, small_windows):
    runtime = TextRuntime(with_words(exported("causal-learned").directory, tmp_path), threads=1)
    lines = ["w5"] * 4 + ["w6", "w7 " * 60, "w8", "w9"]
    with pytest.raises(
        ValueError, match="among the lines 6, 8: max_length must be more than the 60 tokens of"
    ):
        generate_file(
            Batches(runtime, {}, batch_size=2), write(tmp_path / "in", lines), tmp_path / "out"
        )
    assert len(partial_of(tmp_path / "out")[0].read_text().splitlines()) == 4


def test_what_changes_while_it_is_read_is_an_error(runtime, tmp_path, monkeypatch):
    source, results = write(tmp_path / "in", ["w5", "w6"]), Batches.results

    def changing(self, *args):
        write(source, ["w7", "w6", "w5"])
        return results(self, *args)

    monkeypatch.setattr(Batches, "results", changing)
    with pytest.raises(ValueError, match="in or its prefixes changed while they were read"):
        generate_file(Batches(runtime, BEAMS), source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_options_that_cannot_be_are_refused_at_once(runtime, exported, tmp_path):
    with pytest.raises(
        UsageError, match="num_return_sequences has no effect on lines: expected n_best"
    ):
        Batches(runtime, dict(num_return_sequences=2))
    with pytest.raises(UsageError, match="num_return_sequences must be at most num_beams, 2,"):
        Batches(runtime, dict(num_beams=2), n_best=3)
    with pytest.raises(UsageError, match=r"unknown generation options \['beams'\]"):
        Batches(runtime, dict(beams=2))
    reader = TextRuntime(with_words(exported("classification").directory, tmp_path), threads=1)
    with pytest.raises(ValueError, match="VanillaEncoderForSequenceClassification cannot generate"):
        Batches(reader, {})
    (tmp_path / "decoder").mkdir()
    decoder = TextRuntime(with_words(exported("causal").directory, tmp_path / "decoder"), threads=1)
    source = write(tmp_path / "in", ["w5"])
    with pytest.raises(
        UsageError, match="a target prefix is for seq2seq, and this export is a decoder"
    ):
        generate_file(Batches(decoder, {}), source, tmp_path / "out", source)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["w5", "--input", "in"], "--input goes without texts"),
        (["--output", "out"], "--output needs --input, and goes without --stream"),
        (
            ["--input", "in", "--output", "out", "--stream"],
            "--output needs --input, and goes without --stream",
        ),
        (["--input", "in", "--target-prefix", "in"], "--target-prefix needs --input and --output"),
        (["--input", "in", "--force"], "--force needs --input and --output"),
        (["w5", "--scores"], "--scores is for lines, expected no texts and no --stream"),
        (["--n-best", "2", "--stream"], "--n-best is for lines, expected no texts and no --stream"),
        (["--n-best", "2", "--scores"], "not allowed with argument"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "anywhere", *arguments])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- memory

# Not `ru_maxrss`, which begins with what the process that started this one has.
PEAK = """
import re, sys
from vanilla_transformer_export.cli.main import main
main(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.slow
def test_ten_times_the_lines_take_no_more_memory(export, tmp_path):
    """10,000 lines of 8 MB in all beside 1,000 of 0.8 MB, which are more than one window of
    them."""
    peaks = []
    for count in (1000, 10_000):
        lines = [f"{line} {'  ' * 400}w7" for line in some_lines(count)]
        source = write(tmp_path / f"in-{count}", lines)
        assert source.stat().st_size > 800 * count
        files = ["--input", str(source), "--output", str(tmp_path / f"out-{count}")]
        options = ["--max-new-tokens", "4", "--threads", "1"]
        done = subprocess.run(
            [sys.executable, "-c", PEAK, "generate", str(export), *files, *options],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(done.stdout) * 1024)
        assert len((tmp_path / f"out-{count}").read_text().splitlines()) == count
    assert peaks[1] - peaks[0] < 2_000_000, peaks
