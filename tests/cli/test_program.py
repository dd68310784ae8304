"""Tests of standard streams, signals, warnings and one-line errors of the command."""

import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
from checkpoints import with_words
from command_line import COMMAND, read_error
from messages import check_message, raises
from safetensors import SafetensorError

from vanilla_transformer.training import averaging
from vanilla_transformer_export import terminal as program
from vanilla_transformer_export.cli.main import main
from vanilla_transformer_export.terminal import (
    error_message,
    open_standard_streams,
    warnings_in_one_line,
)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_verb_ends_with_one_line_its_code_and_nothing_on_disk(
    tmp_path, monkeypatch, capsys, number, code
):
    def interrupted(*_):
        assert (tmp_path / ".out.partial").is_dir()
        os.kill(os.getpid(), number)
        time.sleep(60)  # until it is there

    monkeypatch.setattr(averaging, "average_weights", interrupted)
    before, interrupts = (
        signal.getsignal(signal.SIGTERM),
        signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    with pytest.raises(SystemExit) as caught:
        main(["average", "one", "two", "--output", str(tmp_path / "out")])
    signal.signal(signal.SIGINT, interrupts)  # which the processes of a parallel test run ignore
    assert caught.value.code == code
    assert capsys.readouterr().err == "vanilla-transformer: interrupted\n"
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before  # whoever calls `main` keeps its own


@pytest.mark.parametrize(
    "error",
    [SafetensorError("os error 28"), RuntimeError("inline_container.cc:672 . unexpected pos 64")],
)
def test_a_full_disk_is_one_line_whoever_finds_it(tmp_path, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr(averaging, "average_weights", full)
    assert str(error) in read_error("average", "one", "--output", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "place, opened, reason",
    [
        ("none", open, "No such file or directory"),
        ("", open, "Is a directory"),
        ("file", os.listdir, "Not a directory"),
    ],
)
def test_what_is_wrong_with_a_path_is_one_line_with_what_was_expected(
    tmp_path, monkeypatch, place, opened, reason
):
    (tmp_path / "file").touch()
    monkeypatch.setattr(averaging, "average_weights", lambda *_: opened(tmp_path / place))
    message = read_error("average", "one", "--output", tmp_path / "out")
    check_message(message, seen=(tmp_path / place, reason))


def test_a_file_that_has_a_number_in_place_of_a_name_is_one_line_too():
    message = error_message(FileNotFoundError(errno.ENOENT, "No such file or directory", 7))
    check_message(message, seen=(7, "No such file or directory"))


@pytest.mark.parametrize("error", [KeyError("name"), RuntimeError("a mistake"), AssertionError()])
def test_a_mistake_of_ours_keeps_its_traceback(tmp_path, monkeypatch, error):
    def mistaken(*_):
        raise error

    monkeypatch.setattr(averaging, "average_weights", mistaken)
    with pytest.raises(type(error)):
        main(["average", "one", "--output", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_missing_is_one_line_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vanilla_transformer.info", None)
    message = read_error("info", "anywhere")
    assert message.startswith("vanilla-transformer: import of vanilla_transformer.info halted")
    assert message.endswith(": pip install 'vanilla-transformer[torch]'")


def test_no_file_gets_the_number_of_a_closed_standard_stream(tmp_path):
    child = os.fork()
    if not child:
        try:
            os.close(0)
            os.close(2)
            open_standard_streams()
            os._exit(os.open(tmp_path / "file", os.O_CREAT))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) > 2


def test_nothing_stays_open_where_no_standard_stream_was_closed():
    child = os.fork()
    if not child:
        try:
            os.closerange(3, 4096)
            open_standard_streams()
            os._exit(os.dup(0))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_the_library_leaves_signals_alone(capsys):
    """Also the command does, where it is called in a thread: only the main one may set what they
    do."""
    before, done = signal.getsignal(signal.SIGTERM), []
    thread = threading.Thread(
        target=lambda: (main(["doctor"]), done.append(signal.getsignal(signal.SIGTERM)))
    )
    thread.start()
    thread.join()
    assert done == [before]


# ----------------------------------------------------------------------------- streams and warnings


class Unwritable(io.StringIO):
    def flush(self):
        raise OSError(errno.ENOSPC, "No space left")


@pytest.mark.parametrize("stdout, reason", [(None, ()), (Unwritable(), ("No space left",))])
def test_a_result_that_nobody_can_read_is_an_error(exported, monkeypatch, stdout, reason):
    monkeypatch.setattr(sys, "stdout", stdout)
    with raises(SystemExit, seen=("standard output", *reason)):
        main(["info", str(exported("encoder").checkpoint)])


@pytest.mark.parametrize("closed", ["exec >&-", "exec > /dev/full"])
def test_closed_or_full_standard_output_is_one_line(closed):
    script = f'{closed}; exec "$@"'
    arguments = ["sh", "-c", script, "sh", COMMAND, "doctor"]
    done = subprocess.run(arguments, stderr=subprocess.PIPE, text=True, timeout=300)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("vanilla-transformer: standard output ")


@pytest.mark.parametrize(
    "arguments", [["doctor"], ["--help"], ["export", "--help"], ["--version"]], ids=" ".join
)
def test_a_command_whose_reader_has_gone_ends_quietly(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [COMMAND, *arguments], stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=300
        )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("flags", [["--batch-size", "1"], ["--stream"]], ids=" ".join)
def test_generate_stops_when_its_reader_has_gone(exported, tmp_path, flags):
    """Standard input never ends here."""
    words = [
        COMMAND,
        "generate",
        with_words(exported("seq2seq").directory, tmp_path),
        "--max-new-tokens",
        "2",
        *flags,
    ]
    with subprocess.Popen(["yes", "w5 w6"], stdout=subprocess.PIPE) as endless:
        with subprocess.Popen(
            words, stdin=endless.stdout, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout.readline()
            process.stdout.close()
            assert (process.wait(timeout=300), process.stderr.read()) == (0, b"")
        endless.stdout.close()


def test_warnings_for_users_are_one_line_and_others_as_they_were():
    before = warnings.formatwarning
    with warnings_in_one_line():
        for category in (FutureWarning, DeprecationWarning):
            assert (
                warnings.formatwarning("two\nlines", category, "a.py", 1)
                == "vanilla-transformer: warning: two lines\n"
            )
        ours = (UserWarning, program.__file__, 1)  # a file of the package
        assert (
            warnings.formatwarning("two\nlines", *ours)
            == "vanilla-transformer: warning: two lines\n"
        )
        place = ("a.py", 1, "x = 1")
        assert warnings.formatwarning("text", UserWarning, *place) == before(
            "text", UserWarning, *place
        )
    assert warnings.formatwarning is before
