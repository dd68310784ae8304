"""The command as tests run it: in a process of its own, or here up to its error."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vanilla_transformer_export.cli.main import main

COMMAND = Path(sys.executable).with_name("vanilla-transformer")


def command(*arguments, **kwargs):
    return subprocess.run(
        [COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300, **kwargs
    )


def read_json(*arguments):
    """Run the command with `arguments` in this process and return the JSON that it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main([str(argument) for argument in arguments])
    return json.loads(printed.getvalue())


def read_error(*arguments):
    """Run the command with `arguments` in this process and return its error message.

    Exceptions other than SystemExit are raised.
    """
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    code = caught.value.code
    message = errors.getvalue().splitlines()[-1] if code == 2 else code
    assert message.startswith("vanilla-transformer: ") and "\n" not in message
    return message
