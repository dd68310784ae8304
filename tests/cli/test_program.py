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
from command_line import COMMAND, main, read_error
from messages import check_message, raises
from safetensors import SafetensorError

from vanilla_transformer.training import averaging
from vanilla_transformer_export import terminal as program
from vanilla_transformer_export.terminal import (
    error_message,
    one_line,
    open_standard_streams,
    warnings_in_one_line,
)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_command_exits_with_signal_code_and_leaves_no_files(
    tmp_path, monkeypatch, capsys, number, code
):
    def interrupted(*_):
        assert (tmp_path / ".out.partial").is_dir()
        os.kill(os.getpid(), number)
        time.sleep(60)  # until the signal arrives

    monkeypatch.setattr(averaging, "average_weights", interrupted)
    before, interrupts = (
        signal.getsignal(signal.SIGTERM),
        signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    with pytest.raises(SystemExit) as caught:
        main(["average", "one", "two", "--output", str(tmp_path / "out")])
    signal.signal(signal.SIGINT, interrupts)  # processes of a parallel test run ignore SIGINT
    assert caught.value.code == code
    assert capsys.readouterr().err == "vanilla-transformer: interrupted\n"
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before  # the handler of the caller is restored


@pytest.mark.parametrize(
    "error",
    [SafetensorError("os error 28"), RuntimeError("inline_container.cc:672 . unexpected pos 64")],
)
def test_full_disk_error_is_one_line(tmp_path, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr(averaging, "average_weights", full)
    assert str(error) in read_error("average", "one", "--output", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def forbidden(path):
    """Raise the error of a file that the user may not open; a superuser may open all."""
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@pytest.mark.parametrize(
    "place, opened, reason",
    [
        ("none", open, "No such file or directory"),
        ("", open, "Is a directory"),
        ("file", os.listdir, "Not a directory"),
        ("secret", forbidden, "Permission denied"),
    ],
)
def test_path_error_is_one_line_with_path_and_reason(tmp_path, monkeypatch, place, opened, reason):
    (tmp_path / "file").touch()
    monkeypatch.setattr(averaging, "average_weights", lambda *_: opened(tmp_path / place))
    message = read_error("average", "one", "--output", tmp_path / "out")
    check_message(message, seen=(tmp_path / place, reason))
    assert ", expected " in message and "[Errno" not in message


def test_error_of_file_descriptor_is_one_line_with_number_and_reason():
    message = error_message(FileNotFoundError(errno.ENOENT, "No such file or directory", 7))
    check_message(message, seen=(7, "No such file or directory"))
    assert "\n" not in message


@pytest.mark.parametrize("error", [KeyError("name"), RuntimeError("a mistake"), AssertionError()])
def test_internal_error_is_raised_with_traceback(tmp_path, monkeypatch, error):
    def mistaken(*_):
        raise error

    monkeypatch.setattr(averaging, "average_weights", mistaken)
    with pytest.raises(type(error)):
        main(["average", "one", "--output", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []


def test_missing_package_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vanilla_transformer.info", None)
    message = read_error("info", "anywhere")
    assert message.startswith("vanilla-transformer: import of vanilla_transformer.info halted")
    assert message.endswith(": pip install 'vanilla-transformer[torch]'")


def test_new_file_does_not_take_number_of_closed_standard_stream(tmp_path):
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


def test_no_file_stays_open_if_standard_streams_are_open():
    child = os.fork()
    if not child:
        try:
            os.closerange(3, 4096)
            open_standard_streams()
            os._exit(os.dup(0))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_signal_handlers_are_unchanged_outside_main_thread(capsys):
    """Only the main thread may set signal handlers, so a command in another thread sets none."""
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
def test_unwritable_standard_output_is_an_error(exported, monkeypatch, stdout, reason):
    monkeypatch.setattr(sys, "stdout", stdout)
    with raises(SystemExit, seen=("standard output", *reason)):
        main(["info", str(exported("encoder").checkpoint)])


@pytest.mark.parametrize("closed", ["exec >&-", "exec > /dev/full"])
def test_closed_or_full_standard_output_error_is_one_line(closed):
    script = f'{closed}; exec "$@"'
    arguments = ["sh", "-c", script, "sh", COMMAND, "doctor"]
    done = subprocess.run(arguments, stderr=subprocess.PIPE, text=True, timeout=300)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("vanilla-transformer: standard output ")


@pytest.mark.parametrize(
    "arguments", [["doctor"], ["--help"], ["export", "--help"], ["--version"]], ids=" ".join
)
def test_command_exits_quietly_on_closed_pipe(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [COMMAND, *arguments], stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=300
        )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("flags", [["--batch-size", "1"], ["--stream"]], ids=" ".join)
def test_generate_stops_on_closed_pipe(exported, tmp_path, flags):
    """Standard input never ends in this test."""
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


def test_user_warnings_are_one_line_and_others_are_unchanged():
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


def test_interrupt_while_the_command_is_imported_prints_no_traceback():
    program = """
import os, signal, sys

class Interrupt:
    def find_spec(name, *rest):
        if name == "vanilla_transformer_export.arguments":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt)
import vanilla_transformer_export.cli.main
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_import_of_the_command_leaves_the_interrupt_handler():
    program = (
        # a program that runs in the background may begin without a handler
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import vanilla_transformer_export.cli.main; "
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("value", ["x" * 10**6, "word " * 10**5, f"'{'a b ' * 10**5}'"])
def test_long_values_of_errors_are_cut(value):
    line = one_line(f"config.json has {value}, expected one of a, b")
    assert line.startswith("config.json has ") and line.endswith(", expected one of a, b")
    assert "characters)" in line and len(line) < 2100
    assert one_line("/a" * 140 + " is missing") == "/a" * 140 + " is missing"
