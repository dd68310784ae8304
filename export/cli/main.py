"""The `vanilla-transformer` command: its parser, and what a process does around a verb. Each verb
declares its arguments beside its function, which has no logic of its own and imports what it needs
when it runs."""

from . import end_at_interrupt

with end_at_interrupt():  # before `main` handles it, as imports take a while
    import argparse
    import sys
    from collections.abc import Mapping, Sequence

    from .. import UNINSTALLED
    from ..arguments import Parser, choice_type
    from ..terminal import (
        PROGRAM,
        OutputClosed,
        Terminated,
        fail,
        is_expected,
        open_standard_streams,
        raise_on_termination,
        warnings_in_one_line,
    )
    from . import checkpoints, doctor, exports, predictions, serving, training

VERBS = {
    verb.name: verb
    for verb in (
        training.train,
        training.average,
        checkpoints.convert,
        checkpoints.info,
        checkpoints.attention,
        exports.export,
        exports.verify,
        exports.certify,
        predictions.generate,
        predictions.predict,
        exports.evaluate,
        serving.serve,
        doctor.doctor,
    )
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with the arguments `argv`, by default `sys.argv[1:]`.

    An error is one line on standard error and ends the process. The exit code is 2 for wrong usage,
    1 for other errors, 130 for Ctrl-C and 143 for SIGTERM. Faults of the program are raised with
    their traceback. If the reader of standard output is gone, the process ends silently with code
    0.
    """
    open_standard_streams()
    try:
        with raise_on_termination(), warnings_in_one_line():
            run(parse(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt as interrupt:
        what = "; ".join(["interrupted", *interrupt.args])  # and how to resume, if it can
        fail(what, 143 if isinstance(interrupt, Terminated) else 130)
    except OutputClosed:
        sys.exit(0)
    except Exception as error:
        if is_expected(error):
            fail(error, getattr(error, "exit_code", 1))
        raise


def run(args: argparse.Namespace) -> None:
    try:
        args.run(args)
    except ImportError as error:
        if error.name:  # a missing module; errors of the library itself have a remedy
            raise ImportError(f"{error}: pip install '{PROGRAM}[{args.extras}]'") from error
        raise


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments in `argv`; `run` is the function of their verb.

    Raises:
        UsageError: for what the command does not take.
    """
    if not argv or argv[0] not in VERBS:
        main_parser().parse(argv[:1])  # --help and --version exit, all else is an error
    name, *words = argv
    verb = VERBS[name]
    parser = Parser(prog=f"{PROGRAM} {name}", description=f"{verb.help[0].upper()}{verb.help[1:]}.")
    parser.set_defaults(run=verb.run, extras=verb.extras)
    verb.declare(parser)
    return parser.parse(words)


def main_parser() -> Parser:
    """Return the parser of the arguments before a verb, such as --version."""
    package = package_metadata()
    lines = [f"    {name:<15} {verb.help}" for name, verb in VERBS.items()]
    parser = Parser(
        prog=PROGRAM,
        usage="%(prog)s [-h] [--version] VERB ...",
        description=package["Summary"],
        epilog="\n".join(
            ["verbs:", *lines, "", f"`{PROGRAM} VERB --help` lists the arguments of a verb."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {package['Version']}")
    parser.add_argument(
        "verb", metavar="VERB", type=choice_type("verb", VERBS), help=argparse.SUPPRESS
    )
    return parser


def package_metadata() -> Mapping[str, str]:
    """Return the package's summary and version. Both are placeholders if the package is on the path
    but not installed."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        package = metadata(PROGRAM)
    except PackageNotFoundError:
        return {"Summary": "", "Version": UNINSTALLED}
    return {"Summary": str(package.json.get("summary", "")), "Version": package["Version"]}


if __name__ == "__main__":
    main()
