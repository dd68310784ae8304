"""Errors say what they are about in fields, which cross to another process."""

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
WORDS_OF_AN_ERROR = re.compile(
    r"in str\(\w*error\w*\)|str\(\w*error\w*\)\.(startswith|endswith|find)|message\.startswith"
)
# torch raises RuntimeError for a file of its own that is cut short, as for everything else
OF_TORCH = {"terminal.py"}


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
def test_errors_cross_to_another_process_with_their_fields(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)


def test_no_code_decides_by_the_words_of_an_error():
    readers = {
        path.name for path in ROOT.rglob("*.py") if WORDS_OF_AN_ERROR.search(path.read_text())
    }
    assert readers == OF_TORCH
