"""The errors of both packages: wrong usage, misspelled names, and packages that are missing."""

from collections.abc import Iterable


class UsageError(ValueError):
    """A wrong name, type or range of an option or recipe key.

    Errors in files and at run time are other exceptions. `param` is the name of the option, if the
    error is about one.
    """

    exit_code = 2  # exit status of the command, as in argparse

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that is most like `name`, or None if none is similar."""
    import difflib  # only errors need it

    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def did_you_mean(name: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """Return the end of an error about `name`, such as "; did you mean 'cpu'?".

    If no name in `known` is similar, it suggests the first of `elsewhere`; without any it is empty.
    """
    close = nearest(name, known) or next(iter(elsewhere), None)
    return f"; did you mean {close!r}?" if close else ""


def torch_missing(task: str) -> ImportError:
    """Return the error of a `task` that needs torch, where torch is not installed."""
    return ImportError(
        f"{task} needs torch and transformers: pip install 'vanilla-transformer[torch]'"
    )
