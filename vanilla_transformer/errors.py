"""The errors of this package: wrong usage, and packages that are not installed."""


class UsageError(ValueError):
    """A wrong name, type or range of an option or recipe key.

    Errors in files and at run time are other exceptions.
    """

    exit_code = 2  # exit status of the command, as in argparse


def torch_missing(task: str) -> ImportError:
    """Return the error of a `task` that needs torch, where torch is not installed."""
    return ImportError(
        f"{task} needs torch and transformers: pip install 'vanilla-transformer[torch]'"
    )
