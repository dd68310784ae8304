"""The classes of errors, and suggestions for misspelled names.

A class or a field says what an error is about, so that no caller reads its message. Each class can
be pickled."""

from collections.abc import Iterable
from typing import Any

TOKENIZER_FAILED = "tokenizer_failed"  # the code of requests that `tokenizers` cannot answer


class UsageError(ValueError):
    """An option with a wrong name, type or value. Errors in files, and errors while running, are of
    other classes.

    Args:
        message: the value seen and the value expected.
        param: the name of the option, if the error is about one.
    """

    exit_code = 2  # as for argparse's errors

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class TooLong(ValueError):
    """An input with more tokens, rows or characters than can be read at once, however idle the
    server is."""


class TokenizerError(ValueError):
    """A failure of the library `tokenizers`."""


class SessionError(ValueError):
    """A failure of onnxruntime when it loads or runs a graph."""


class MissingImage(FileNotFoundError, ValueError):
    """A path of an image without a file. It is a ValueError too, because one input is wrong and the
    others can be computed."""


UNKNOWN_PATH = "unknown_url"  # the code of a path that does not exist, as OpenAI calls it


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        status: the HTTP status.
        message: the value seen and the value expected.
        param: the field of the request, if the error is about one.
        code: the kind of error, a word for programs, such as "context_length_exceeded".
        retry_after: seconds after which the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, self.message, self.param, self.code, self.retry_after)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that is most like `name`, or None if none is similar."""
    import difflib  # only errors need it

    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about `name`, such as "; did you mean 'cpu'?". It is empty if no
    name in `known` is similar."""
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else ""
