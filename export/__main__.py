"""`python -m vanilla_transformer_export` is the command `vanilla-transformer`."""

import signal


def main() -> None:
    """Run the command. Until its modules are imported, Ctrl-C ends the process without a
    traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not if it is ignored, as in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli.main import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
