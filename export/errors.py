"""What went wrong by the caller's hand, and what was probably meant."""

from collections.abc import Iterable


class UsageError(ValueError):
    """An option whose name, type or range is wrong, as opposed to what is found in files or while running."""

    exit_code = 2  # of the command, as argparse's own errors


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is most like `name`, if any is."""
    import difflib  # only errors need it

    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about `name`; empty if none of `known` is like it."""
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else ""
