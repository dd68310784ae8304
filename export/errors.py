"""The classes of errors, and suggestions for misspelled names.

A class or a field says what an error is about, so that no caller reads its message. Each class can
be pickled."""

from typing import Any

from .shared.errors import UsageError, did_you_mean, nearest

__all__ = ["UsageError", "did_you_mean", "nearest"]
TOKENIZER_FAILED = "tokenizer_failed"  # the code of requests that `tokenizers` cannot answer


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
