"""What went wrong by the caller's hand."""


class UsageError(ValueError):
    """An option or recipe key whose name, type or range is wrong, as opposed to what is found in files or while running."""

    exit_code = 2  # of the command, as argparse's own errors
