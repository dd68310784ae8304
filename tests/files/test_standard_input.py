"""Tests of the texts of `generate`, from arguments or from standard input."""

import io
import os

import pytest
from command_line import main
from messages import raises

from vanilla_transformer_export import text_runtime as text


class Echo:
    """A runtime that returns the repr of each text."""

    architecture = "VanillaDecoderForCausalLM"
    specs = {}

    def __init__(self, directory, threads, **options):
        self.runtime = self.info = self.languages = self

    def check_options(self, options):
        pass  # all options are valid

    def generate(self, texts, /, **options):
        return [*map(repr, texts)]

    def target_options(self, tgt_lang, count, options):
        return [{}] * count


@pytest.fixture
def generate(monkeypatch, capsys):
    """Return a function that runs `generate` with bytes on standard input, or None if closed."""
    monkeypatch.setattr(text, "TextRuntime", Echo)

    def run(given, *arguments):
        monkeypatch.setattr(
            "sys.stdin", given if given is None else io.TextIOWrapper(io.BytesIO(given), "latin-1")
        )
        main(["generate", "anywhere", *arguments])
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize(
    "given", ["one \ntw\u00f6\n", "one \r\ntw\u00f6\r\n", "\ufeffone \r\ntw\u00f6"], ids=ascii
)
def test_line_ends_and_byte_order_mark_are_removed(generate, given):
    assert generate(given.encode()) == [repr("one "), repr("tw\u00f6")]


def test_only_line_feed_ends_a_line(generate):
    lines = ["a\rb\x0b\x0c\x85\u2028c \ufeff", "\ufeff\u00a0d\r"]
    assert generate("\r\n".join(lines).encode()) == [*map(repr, lines)]


def test_arguments_are_unchanged_and_standard_input_is_not_read(generate):
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
def test_invalid_input_exits_with_one_line_message(generate, given, seen):
    with raises(SystemExit, seen=seen) as stopped:
        generate(given)
    assert len(str(stopped.value).splitlines()) == 1  # an exit with a message has code 1


def test_line_of_one_megabyte_is_accepted(generate):
    longest = "\u00e9" * 500_000
    given = f"\ufeff{longest}\r\n{longest}".encode()
    assert generate(given, "--max-characters", "500000") == [repr(longest)] * 2
    for limit in ([], ["--max-characters", "499999"]):
        with raises(
            SystemExit, seen=(1, "500,000"), expected="250,000" if not limit else "499,999"
        ):
            generate(given, *limit)


@pytest.mark.parametrize(
    "arguments, name",
    [
        (["generate", "anywhere", "caf\udce9"], "TEXT"),
        (["generate", "anywhere", "text", "--set", "seed=\udce9"], "--set"),
        (["attention", "anywhere", "caf\udce9", "--output", "a.png"], "SOURCE"),
        (["attention", "anywhere", "text", "caf\udce9", "--output", "a.png"], "TARGET"),
    ],
)
def test_non_utf8_argument_error_names_argument(arguments, name, capsys):
    assert os.fsdecode(b"caf\xe9") == "caf\udce9"  # as Python passes it in sys.argv
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {name}" in message and "UTF-8" in message and "\\xe9" in message


def test_empty_lines_give_empty_lines(generate):
    assert generate(b"\none\n\n \ntwo\n") == ["", repr("one"), "", "", repr("two")]
    assert generate(b"") == []


def test_output_keeps_order_of_lines_across_shards(generate):
    """The lines differ in length and fill several shards."""
    lines = ["x" * (length % 7 + 1) + str(length) for length in range(23)]
    given = "\n".join(lines).encode()
    assert generate(given, "--batch-size", "3", "--shard-lines", "6") == [*map(repr, lines)]


def test_bad_lines_are_skipped_with_warning(generate):
    with pytest.warns(UserWarning, match="line 2 .*UTF-8"):
        result = generate(b"one\n\xff\nthree", "--on-bad-line", "skip")
    assert result == [repr("one"), "", repr("three")]
