"""Tests of the texts of `generate`: arguments, or the lines of standard input."""

import io
import os

import pytest
from messages import raises

from vanilla_transformer_export import text_runtime as text
from vanilla_transformer_export.cli import main as cli


class Echo:
    """A runtime that gives back its texts."""

    architecture = "VanillaDecoderForCausalLM"

    def __init__(self, directory, threads, **options):
        self.runtime = self.info = self

    def check_options(self, options):
        pass

    def rows_together(self, rows, batch_size, options, is_scored):
        return batch_size

    def generate(self, texts, /, **options):
        return [*map(repr, texts)]

    def target_options(self, tgt_lang, count, options):
        return [{}] * count


@pytest.fixture
def generate(monkeypatch, capsys):
    """Runs the verb with these bytes on standard input, `None` if it is closed."""
    monkeypatch.setattr(text, "TextRuntime", Echo)

    def run(given, *arguments):
        monkeypatch.setattr(
            "sys.stdin", given if given is None else io.TextIOWrapper(io.BytesIO(given), "latin-1")
        )
        cli.main(["generate", "anywhere", *arguments])
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize(
    "given", ["one \ntw\u00f6\n", "one \r\ntw\u00f6\r\n", "\ufeffone \r\ntw\u00f6"], ids=ascii
)
def test_lines_lose_their_ends_and_the_first_a_byte_order_mark(generate, given):
    assert generate(given.encode()) == [repr("one "), repr("tw\u00f6")]


def test_only_a_line_feed_ends_a_line_and_what_is_in_it_stays(generate):
    lines = ["a\rb\x0b\x0c\x85\u2028c \ufeff", "\ufeff\u00a0d\r"]
    assert generate("\r\n".join(lines).encode()) == [*map(repr, lines)]


def test_arguments_stay_as_they_are_and_standard_input_is_not_read(generate):
    assert generate(None, "\ufeffone\r\n", "two ") == [repr("\ufeffone\r\n"), repr("two ")]


@pytest.mark.parametrize(
    "given, seen",
    [
        (None, ()),
        (b"one\ntwo \xe9\n", (2, "utf-8", "0xe9")),
        (b"\xff\xfeo\0n\0e\0", 1),
        (b"one\n" + b"x" * 1_000_001, (2, 1, "000")),
    ],
    ids=["closed", "latin-1", "UTF-16", "long"],
)
def test_what_is_no_text_is_refused_in_one_line(generate, given, seen):
    with raises(SystemExit, seen=seen) as stopped:
        generate(given)
    assert len(str(stopped.value).splitlines()) == 1  # and code 1, as for any exit with a message


def test_a_line_may_have_a_megabyte(generate):
    longest = "\u00e9" * 500_000
    assert generate(f"\ufeff{longest}\r\n{longest}".encode()) == [repr(longest)] * 2


@pytest.mark.parametrize(
    "arguments, name",
    [
        (["generate", "anywhere", "caf\udce9"], "TEXT"),
        (["generate", "anywhere", "text", "--set", "seed=\udce9"], "--set"),
        (["attention", "anywhere", "caf\udce9", "--output", "a.png"], "SOURCE"),
        (["attention", "anywhere", "text", "caf\udce9", "--output", "a.png"], "TARGET"),
    ],
)
def test_an_argument_that_is_not_utf_8_is_named(arguments, name, capsys):
    assert os.fsdecode(b"caf\xe9") == "caf\udce9"  # as Python hands it over
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {name}" in message and "UTF-8" in message and "\\xe9" in message


def test_an_empty_line_gives_an_empty_line(generate):
    assert generate(b"\none\n\n \ntwo\n") == ["", repr("one"), "", "", repr("two")]
    assert generate(b"") == []


def test_lines_are_answered_in_order_shard_by_shard(generate):
    """However long they are, and more than fit into one shard."""
    lines = ["x" * (length % 7 + 1) + str(length) for length in range(23)]
    given = "\n".join(lines).encode()
    assert generate(given, "--batch-size", "3", "--shard-lines", "6") == [*map(repr, lines)]


def test_bad_lines_may_be_skipped_and_are_named(generate):
    with pytest.warns(UserWarning, match="line 2 .*UTF-8"):
        result = generate(b"one\n\xff\nthree", "--on-bad-line", "skip")
    assert result == [repr("one"), "", repr("three")]
