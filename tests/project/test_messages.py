"""Tests of the check of error messages that other tests use."""

import pytest
from messages import check_message, raises


@pytest.mark.parametrize(
    "message",
    [
        "size is 5 in config.json, expected 3",
        "expected 3, got size 5 in config.json",
        "must be 3 at least, got size 5 in config.json",
        "size 5 of config.json, while the model has 3",
    ],
)
def test_seen_and_expected_values_are_recognized(message):
    check_message(message, seen=("size", 5, "config.json"), expected=3)


@pytest.mark.parametrize("message", ["size is 3, expected 5", "must be 5, got 3"])
def test_seen_value_does_not_count_as_expected(message):
    with pytest.raises(AssertionError, match="no expected 3"):
        check_message(message, expected=3)


@pytest.mark.parametrize("message", ["size is 3, expected 5", "expected 5, got size 3"])
def test_expected_value_does_not_count_as_seen(message):
    with pytest.raises(AssertionError, match="no seen 5"):
        check_message(message, seen=5)


def test_part_of_word_does_not_count_as_value():
    with pytest.raises(AssertionError, match="no seen 'size'"):
        check_message("sizes are 15", seen="size")
    with pytest.raises(AssertionError, match="no seen 5"):
        check_message("sizes are 15", seen=5)


def test_raises_checks_error_type_and_values():
    with raises(ValueError, seen="-1", expected=("0", "1")) as raised:
        raise ValueError("got -1, expected a number from 0 to 1")
    assert isinstance(raised.value, ValueError)
    with pytest.raises(AssertionError, match="no seen 2"), raises(ValueError, seen=2):
        raise ValueError("got -1")
    with pytest.raises(KeyError), raises(ValueError):
        raise KeyError("another error")
