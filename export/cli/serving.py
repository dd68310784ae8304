"""The verb that answers HTTP requests."""

import argparse
import contextlib
import os

from ..arguments import SOURCE, Parser, add_argument
from ..terminal import say
from .verbs import verb


def serve_arguments(parser: Parser) -> None:
    from ..serving.settings import add_settings

    exports_help = "export directories; NAME=PATH sets the model's name, by default the directory's"
    add_argument(parser, "exports", SOURCE, exports_help, nargs="+", metavar="EXPORT")
    add_settings(parser)


@verb("serve exports over HTTP", serve_arguments, extras="cpu,serve")
def serve(args: argparse.Namespace) -> None:
    from ..engine.process import engine_process
    from ..serving.settings import parse_settings, read_token, sources

    settings = parse_settings(args, os.environ)
    token = read_token(settings, os.environ)
    exports = sources(args.exports, settings.languages)

    def tell(line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk does not stop a server
            say(line)

    with engine_process(any(source.generates for source in exports)) as process:
        from ..serving.server import serve  # late, or the process would copy it

        serve(exports, settings, token, tell, process)
