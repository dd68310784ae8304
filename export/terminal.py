"""The frame of a program around its commands: streams, signals and warnings, and errors in one
line."""

import contextlib
import errno
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import NoReturn

PROGRAM = "vanilla-transformer"
MAX_VALUE, MAX_LINE = 300, 2000  # characters of an error
LONG_VALUE = re.compile(rf"'[^']{{{MAX_VALUE},}}'|\"[^\"]{{{MAX_VALUE},}}\"|\S{{{MAX_VALUE},}}")
# Of a path, by what the operating system says of it.
EXPECTED = {
    errno.ENOENT: "expected it to exist",
    errno.EISDIR: "expected a file",
    errno.ENOTDIR: "expected a directory",
    errno.EEXIST: "expected a directory or a new path",
    errno.EACCES: "expected one that this user may read, or write to for an output",
    errno.EROFS: "expected a place that can be written to",
}


def open_standard_streams() -> None:
    """Open standard streams that are closed on the null device.

    Otherwise the next open file gets the number of the stream and receives what libraries print.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception, so that the process cleans up as with Ctrl-C."""


@contextlib.contextmanager
def raise_on_termination() -> Iterator[None]:
    def terminate(*_):
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # not the main thread: the program that called decides what signals do
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Print warnings of this package, and deprecations, as one line without a source location in
    the block."""
    before = warnings.formatwarning
    package = os.path.join(os.path.dirname(__file__), "")

    def formatted(message, category, filename, *place):
        if issubclass(category, FutureWarning | DeprecationWarning) or filename.startswith(package):
            return f"{PROGRAM}: warning: {one_line(message)}\n"
        return before(message, category, filename, *place)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


class OutputClosed(BrokenPipeError):
    """The reader of standard output has gone, as `head` does after its last line."""


def say(result: object, end: str = "\n") -> None:
    """Print `result`, then `end`, and flush, so that a failed write shows here and not when the
    interpreter exits.

    Raises:
        OutputClosed: if the reader of standard output has gone.
        OSError: if standard output is closed, or cannot be written.
    """
    if sys.stdout is None:
        raise OSError("standard output is closed, expected an open one for the result")
    with output_errors():
        print(result, end=end, flush=True)


def flush_output() -> None:
    """Flush standard output, if there is one. Raises OutputClosed if its reader has gone, else
    OSError."""
    if sys.stdout is not None:
        with output_errors():
            sys.stdout.flush()


@contextlib.contextmanager
def output_errors() -> Iterator[None]:
    """Replace an OSError of writing to standard output in the block, and discard the rest of its
    buffer.

    Raises:
        OutputClosed: if the reader of standard output has gone (BrokenPipeError).
        OSError: for any other OSError, with a message that names standard output.
    """
    try:
        yield
    except OSError as error:
        # the rest of the buffer is not written again
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        kind = OutputClosed if isinstance(error, BrokenPipeError) else OSError
        raise kind(f"standard output cannot be written: {error.strerror or error}") from None


def is_expected(error: Exception) -> bool:
    """Return True if `error` is about wrong input, files or devices, so that its message is enough
    for users.

    Errors of other libraries are known by name, because none is imported here.
    """
    if isinstance(
        error,
        OSError
        | ValueError
        | FloatingPointError
        | ImportError
        | FutureWarning
        | DeprecationWarning,
    ):
        return True
    if type(error).__module__ == "huggingface_hub.errors":  # a config's type checks
        return True
    # Of safetensors and of torch where no room is left on the disk.
    return type(error).__name__ == "SafetensorError" or "inline_container.cc" in str(error)


def one_line(text: object) -> str:
    """Return `text` without line breaks, and with the start and the end of what is too long: of
    values, which are words or quoted, and of the line."""
    line = " ".join(str(text).split())
    shortened = LONG_VALUE.sub(lambda value: cut(value[0], MAX_VALUE), line)
    return cut(shortened, MAX_LINE)


def cut(text: str, limit: int) -> str:
    """Return `text`, or if it has more than `limit` characters its start and its end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}...({len(text) - 2 * half:,} characters)...{text[-half:]}"


def error_message(error: object) -> object:
    """Return the message of `error`. If the operating system only names a path, add what was
    expected there."""
    if not isinstance(error, OSError) or error.filename is None:
        return error
    expected = EXPECTED.get(error.errno or 0)
    return error if expected is None else f"{str(error.filename)!r}: {error.strerror}, {expected}"


def fail(error: object, code: int = 1) -> NoReturn:
    """End the process with the exit status `code`, and `error` as one line on standard error."""
    line = f"{PROGRAM}: {one_line(error_message(error))}"
    if code == 1:
        sys.exit(line)
    print(line, file=sys.stderr)
    sys.exit(code)
