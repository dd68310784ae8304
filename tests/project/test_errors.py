"""Tests of errors: pickling keeps their fields, and no code parses their messages."""

import pickle
import re
from pathlib import Path

import pytest

import vanilla_transformer_export
from vanilla_transformer_export.errors import (
    RequestError,
    SessionError,
    TokenizerError,
    TooLong,
    UsageError,
)

ROOT = Path(vanilla_transformer_export.__file__).parent
MESSAGE_PARSING = re.compile(
    r"in str\(\w*error\w*\)|str\(\w*error\w*\)\.(startswith|endswith|find)|message\.startswith"
)
# torch raises RuntimeError for truncated files, as for everything else
EXCEPTIONS = {"terminal.py"}


@pytest.mark.parametrize(
    "error",
    [
        UsageError("n is 3, expected 1", "n"),
        RequestError(400, "n is 3, expected 1", "n", "unsupported", 5),
        SessionError("onnxruntime cannot run it"),
        TokenizerError("the tokenizer failed"),
        TooLong("3 tokens, expected at most 2"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_pickled_errors_keep_type_message_and_fields(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)


def test_no_code_parses_error_messages():
    readers = {path.name for path in ROOT.rglob("*.py") if MESSAGE_PARSING.search(path.read_text())}
    assert readers == EXCEPTIONS
