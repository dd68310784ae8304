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
def test_values_are_found_in_their_role(message):
    check_message(message, seen=("size", 5, "config.json"), expected=3)


@pytest.mark.parametrize("message", ["size is 3, expected 5", "must be 5, got 3"])
def test_a_seen_value_is_not_the_expected_one(message):
    with pytest.raises(AssertionError, match="no expected 3"):
        check_message(message, expected=3)


@pytest.mark.parametrize("message", ["size is 3, expected 5", "expected 5, got size 3"])
def test_an_expected_value_is_not_the_seen_one(message):
    with pytest.raises(AssertionError, match="no seen 5"):
        check_message(message, seen=5)


def test_a_part_of_a_word_is_no_value():
    with pytest.raises(AssertionError, match="no seen 'size'"):
        check_message("sizes are 15", seen="size")
    with pytest.raises(AssertionError, match="no seen 5"):
        check_message("sizes are 15", seen=5)


def test_an_error_is_raised_with_its_values():
    with raises(ValueError, seen="-1", expected=("0", "1")) as raised:
        raise ValueError("got -1, expected a number from 0 to 1")
    assert isinstance(raised.value, ValueError)
    with pytest.raises(AssertionError, match="no seen 2"), raises(ValueError, seen=2):
        raise ValueError("got -1")
    with pytest.raises(KeyError), raises(ValueError):
        raise KeyError("another error")
