"""Tests of text files: their lines, errors, and bad rows that may be skipped."""

import bz2
import gzip
import io
import json
import lzma
import tracemalloc

import pytest
from datasets import Dataset, DatasetDict
from messages import check_message, raises

from vanilla_transformer.errors import UsageError
from vanilla_transformer.training import data as module
from vanilla_transformer.training.data import BadRows, lines, read_all_lines, read_lines, read_text
from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.tasks import TASKS
from vanilla_transformer_export.files import text_lines as export_lines

SEPARATORS = "\x0b \x0c \x1c \x85 \u2028 \u2029 \r"  # all of which `str.splitlines` ends a line at


PACKED = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.fixture(params=PACKED)
def write(tmp_path, request):
    """Bytes -> a file of them, plain or compressed."""

    def made(content):
        path = tmp_path / f"a.txt{request.param}"
        path.write_bytes(PACKED[request.param](content))
        return path

    return made


# --------------------------------------------------------------------------- what belongs to a line


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_lines_lose_their_ends_and_a_file_its_byte_order_mark(write, mark, end, last):
    path = write(f"{mark}one {end}\ttwo\ufeff{end if last else ''}".encode())
    assert read_lines(path) == ["one ", "\ttwo\ufeff"]
    assert read_text(path) == "one \n\ttwo\ufeff" + "\n" * last


def test_only_a_line_feed_ends_a_line(write):
    path = write(f"one{SEPARATORS}one\r\r\n two \rtwo\r".encode())
    assert read_lines(path) == [f"one{SEPARATORS}one\r", " two \rtwo\r"]
    assert read_text(path) == f"one{SEPARATORS}one\r\n two \rtwo\r"


def test_a_file_with_only_a_byte_order_mark_is_empty(write):
    with raises(ValueError, seen=1):
        read_lines(write(b"\xef\xbb\xbf"))
    assert read_text(write(b"\xef\xbb\xbf")) == ""


def test_only_the_byte_order_mark_of_the_first_line_goes():
    file = io.BytesIO("\ufeffone\n\ufefftwo".encode())
    assert [*export_lines.decode_lines(file, "a")] == ["one", "\ufefftwo"]


def test_the_rest_of_a_line_that_is_too_long_is_not_another_line():
    content = b"x" * (3 * export_lines.LONGEST) + b"\ntwo\n"
    first, second = export_lines.raw_lines(io.BytesIO(content), "a")
    assert len(first) > export_lines.LONGEST and second == b"two"


def test_other_encodings_are_read_as_they_are(write):
    assert read_lines(write("caf\u00e9\r\nth\u00e9".encode("latin-1")), "latin-1") == [
        "caf\u00e9",
        "th\u00e9",
    ]
    assert read_lines(write("caf\u00e9\r\n\u4e0a\n".encode("utf-16")), "UTF-16") == [
        "caf\u00e9",
        "\u4e0a",
    ]
    with raises(ValueError, seen=("a.txt", "UTF-16", "truncated data")):
        read_lines(write("caf\u00e9\r\n".encode("utf-16")[:-1]), "UTF-16")
    with raises(UsageError, seen="hex"):
        read_lines(write(b"a"), "hex")


def test_a_byte_that_is_no_text_is_named_with_its_line(write):
    path = write(b"one\ntwo \xff\nthree\n")
    for read in (read_text, read_lines):
        with raises(ValueError, seen=("a.txt", 2, "0xff")):
            read(path)


# --------------------------------------------------------------------------------- what is too much


@pytest.mark.parametrize("character", ["a", "\u00e9", "\u4e0a"])
def test_a_line_may_have_a_megabyte(write, character):
    most = module.LONGEST // len(character.encode())
    longest = character * most
    path = write(f"\ufeff{longest}\r\n{longest}".encode())
    assert read_lines(path) == [longest, longest]
    for longer in (longest + character, 5 * longest):
        path = write(f"one\n{longer}\r\ntwo\n".encode())
        with raises(ValueError, seen=("a.txt", 2, 1, "000")):
            read_lines(path)
        # the fault in place of the line, then the next one
        assert [len(line) < 100 for line in lines(path)] == [True] * 3
        # a text without line breaks is one, as long as it is
        assert read_text(path) == f"one\n{longer}\ntwo\n"


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_a_compressed_file_that_is_cut_short_or_damaged_is_named(tmp_path, suffix):
    path, content = (
        tmp_path / f"a{suffix}",
        PACKED[suffix]("".join(f"{number}\n" for number in range(9999)).encode()),
    )
    for damaged in (content[:-9], b"no such file", content[:100] + b"x" * 100 + content[200:]):
        path.write_bytes(damaged)
        for read in (read_text, lambda path: [*export_lines.read_lines(path)]):
            with raises(ValueError, seen=f"a{suffix}"):
                read(path)


@pytest.mark.parametrize("suffix", [".zst", ".Z", ".lzma", ".lzo", ".rar"])
def test_a_compression_that_is_not_read_is_named(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"w5")
    for read in (read_text, read_lines, lambda path: [*export_lines.read_lines(path)]):
        with raises(ValueError, seen=f"a{suffix}", expected=(".gz", ".bz2", ".xz")):
            read(path)


@pytest.mark.parametrize("name", [".gz", "gz", "a.gz.txt"])
def test_a_name_without_the_ending_of_a_compression_is_plain_text(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"w5\n")
    assert [*export_lines.read_lines(path)] == read_lines(path) == ["w5"]


def bomb(path, line, megabytes):
    """A megabyte of `line`, again and again, in a thousandth of the room."""
    member = gzip.compress(line * (1_000_000 // len(line)))
    path.write_bytes(member * megabytes)
    assert path.stat().st_size < megabytes * 10_000
    return path


SKIPPED = BadRows({"skip_bad_rows": True})


@pytest.mark.parametrize(
    "read",
    [read_text, read_lines, lambda path: read_all_lines([path], bad=SKIPPED)],
    ids=["text", "lines", "without bad rows"],
)
@pytest.mark.parametrize(
    "line", [b"a" * 1_000_000, b"a" * 499_999 + b"\n"], ids=["one line", "many"]
)
def test_a_gz_bomb_is_refused_without_being_unpacked(tmp_path, monkeypatch, line, read):
    monkeypatch.setattr(module, "ALWAYS_READ", 4_000_000)
    path = bomb(tmp_path / "bomb.gz", line, megabytes=200)
    values = dict(expected=100)
    if read is read_lines and b"\n" not in line:
        values = dict(seen=("line 1", "1,000,000"))
    tracemalloc.start()
    try:
        with raises(ValueError, **values):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()


def test_a_gz_bomb_of_bad_rows_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ALWAYS_READ", 100_000)
    path, bad = bomb(tmp_path / "bomb.gz", b"\n", megabytes=2), BadRows({"skip_bad_rows": True})
    with raises(ValueError, seen="bomb.gz"):
        read_all_lines([path], bad=bad)
    assert 100_000 <= bad.count < 400_000 and len(bad.first) == 3


def test_text_is_no_bomb(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ALWAYS_READ", 0)
    text = "".join(
        f"{number} is a number and {number + 1} is the next.\n" for number in range(30_000)
    )
    (tmp_path / "text.gz").write_bytes(gzip.compress(text.encode()))
    assert read_text(tmp_path / "text.gz") == text
    assert len(read_lines(tmp_path / "text.gz")) == 30_000


# ----------------------------------------------------------------------------------------- bad rows

LONG = "x" * 1_000_001
BAD = ["", "", b"caf\xe9\n", LONG]
FAULTS = ["empty", "empty", "0xe9", "1,000,000"]  # what the messages about them name


def fill(path, *rows):
    path.write_bytes(
        b"".join(row if isinstance(row, bytes) else f"{row}\n".encode() for row in rows)
    )
    return str(path)


def read(task, split="train", **data):
    """Return the rows that a task reads of a split, without bad ones."""
    return TASKS[task].read({"skip_bad_rows": True, **data}, split).to_dict()


def told(capsys, count, rows, *faults):
    [printed] = capsys.readouterr().out.splitlines()
    check_message(printed, seen=(count, rows))
    assert "data.skip_bad_rows" in printed
    assert len(printed) < 1000
    for fault in faults:
        assert fault in printed


@pytest.mark.parametrize("place", [0, 1])
def test_pairs_stay_pairs_where_one_side_is_bad(tmp_path, capsys, place):
    names = ("source", "target")
    sides = [[f"{name}{number}" for number in range(6)] for name in names]
    files = [fill(tmp_path / name, *side) for name, side in zip(names, sides)]
    fill(tmp_path / names[place], sides[place][0], BAD[0], *BAD[2:], sides[place][4], "  ")
    assert read("translation", train=files) == {
        name: [side[0], side[4]] for name, side in zip(names, sides)
    }
    told(
        capsys,
        4,
        6,
        *(f"{files[place]}: line {number} " for number in (2, 3, 4)),
        *FAULTS[1:],
        "; ...)",
    )


@pytest.mark.parametrize("split, skips", [("train", False), ("validation", True), ("test", True)])
def test_elsewhere_than_in_training_text_and_without_the_key_the_first_bad_row_is_an_error(
    tmp_path, split, skips
):
    for row, fault in zip(BAD, FAULTS):
        file = fill(tmp_path / "lines", "one", row, "three")
        with raises(ValueError, seen=("lines", "line 2", fault)):
            read("masked-lm", split, **{split: file, "skip_bad_rows": skips})


def test_files_of_different_lengths_are_no_rows_to_skip(tmp_path):
    files = [fill(tmp_path / "source", "one", "", "three"), fill(tmp_path / "target", "one", "two")]
    with raises(ValueError, seen=("source", 3, 2)):
        read("translation", train=files)


def test_a_text_of_which_nothing_is_left_is_an_error(tmp_path):
    with raises(ValueError, seen=3):
        read("masked-lm", train=fill(tmp_path / "lines", "", " ", b"\xff\n"))


def test_another_value_than_true_and_false_is_refused(tmp_path):
    with raises(UsageError, seen=("data.skip_bad_rows", "yes")):
        read("masked-lm", train=fill(tmp_path / "lines", "one"), skip_bad_rows="yes")


def test_lines_of_a_language_model(tmp_path, capsys):
    lines = [f"line {number}" for number in range(8)]
    file = fill(tmp_path / "lines", *lines[:2], "", *BAD[2:], *lines[2:])
    for documents in ("line", "file"):
        given = dict(train=file, documents=documents, validation_fraction=0.5)
        first, last = (
            read("causal-lm", **given)["text"],
            read("causal-lm", "validation", **given)["text"],
        )
        assert "".join(first + last).replace("\n", "") == "".join(lines)
        told(capsys, 2, 10, *FAULTS[2:])
    assert read("causal-lm", train=fill(tmp_path / "lines", "one", "", "two"), documents="file")[
        "text"
    ] == ["one\n\ntwo\n"]


def test_sentences_of_documents(tmp_path, capsys):
    file = fill(tmp_path / "lines", "a", "b", "", "c", BAD[2], "d", LONG, "", "e")
    assert read("pretraining", train=file)["first"] == ["a", "c"]
    told(capsys, 2, 7, *FAULTS[2:])


@pytest.mark.parametrize(
    "task, more", [("sequence-classification", {}), ("masked-lm", {"labelled": True})]
)
def test_labels(tmp_path, capsys, task, more):
    file = fill(tmp_path / "lines", "good one", "alone", " unnamed", *BAD[1:], "bad two")
    assert read(task, train=file, **more)["text"] == ["one", "two"]
    told(
        capsys,
        5,
        7,
        "line 2 is 'alone', expected a label, a space and a text",
        "line 3 is ' unnamed', expected a label",
    )


def test_labels_of_folds_are_told_of_once(tmp_path, capsys):
    file = fill(tmp_path / "lines", "good one", "alone", "bad two", "bad three")
    given = dict(train=file, folds=3, fold=0)
    result = [
        read("sequence-classification", split, **given)["text"] for split in ("train", "validation")
    ]
    assert sorted(result[0] + result[1]) == ["one", "three", "two"]
    told(capsys, 1, 4, "line 2 is 'alone'")


def test_sentences_of_tags(tmp_path, capsys):
    lines = [
        "Ann PER",
        "ran O",
        "",
        "Bob PER",
        "alone",
        "ran",
        "",
        "",
        BAD[2],
        "Eve PER",
        "",
        "Eve PER",
        f"{LONG} O",
        "",
        "he O",
    ]
    assert read("token-classification", train=fill(tmp_path / "lines", *lines))["words"] == [
        ["Ann", "ran"],
        ["he"],
    ]
    told(
        capsys,
        3,
        5,
        "line 5 is 'alone', expected a word, a space or a tab, and a tag",
        "line 9 is not",
        "line 13 is longer than",
    )


def questions(*answers):
    """Return a data set like SQuAD: one context, and a question with each of `answers`."""
    asked = [
        {"id": f"q{number}", "question": "who?", "answers": result}
        for number, result in enumerate(answers)
    ]
    return {"data": [{"paragraphs": [{"context": "Ann ran", "qas": asked}]}]}


def test_questions(tmp_path, capsys):
    right = [{"text": "Ann", "answer_start": 0}]
    # where the last one would be, from the end
    pairs = [("Ann", 1), ("Ann", "0"), (None, 0), ("n", -1), ("Ann", -7)]
    wrong = [[], *([{"text": text, "answer_start": start}] for text, start in pairs)]
    file = fill(tmp_path / "squad.json", json.dumps(questions(right, *wrong)))
    assert read("question-answering", train=file)["id"] == ["q0"]
    faults = [
        "q1 has no answer",
        "q2: its context has 'nn ' at 1, expected the answer 'Ann'",
        "q3 has the answer 'Ann' at '0'",
    ]
    told(capsys, 6, 7, *faults)
    for answers in wrong:
        with raises(ValueError, seen="q0"):
            read(
                "question-answering",
                train=fill(tmp_path / "squad.json", json.dumps(questions(answers))),
                skip_bad_rows=False,
            )


def test_rows_of_a_data_set(tmp_path, capsys):
    rows = {"en": ["one", None, "three", " ", "five"], "de": ["eins", "zwei", "", "vier", "fünf"]}
    DatasetDict(train=Dataset.from_dict(rows)).save_to_disk(tmp_path / "set")
    given = dict(dataset=str(tmp_path / "set"), columns=["en", "de"])
    assert read("translation", **given) == {"source": ["one", "five"], "target": ["eins", "fünf"]}
    told(capsys, 3, 5, "row 1: no source", "row 2: no target", "row 3: no source")
    with raises(UsageError, seen="skip_bad_rows", expected="data.streaming"):
        read("translation", **given, streaming=True)


def test_rows_of_a_data_set_with_tags(tmp_path, capsys):
    rows = {
        "tokens": [["Ann", "ran"], ["Bob"], None, []],
        "ner_tags": [["PER", "O"], ["PER", "O"], ["O"], []],
    }
    DatasetDict(train=Dataset.from_dict(rows)).save_to_disk(tmp_path / "set")
    given = dict(dataset=str(tmp_path / "set"))
    assert read("token-classification", **given) == {
        "words": [["Ann", "ran"], []],
        "tags": [["PER", "O"], []],
    }
    told(
        capsys,
        2,
        4,
        "row 1: 1 words and 2 tags, expected one for each",
        "row 2: 0 words and 1 tags",
    )
    with raises(ValueError, seen=(1, 2, "tags")):
        read("token-classification", **given, skip_bad_rows=False)


def test_a_recipe_with_texts_too_long_for_its_blocks(tmp_path, capsys):
    data = {
        "train": fill(tmp_path / "lines", *["the cat"] * 9, "the cat " * 9),
        "block_size": 8,
        "skip_bad_rows": True,
    }
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
    recipe = Recipe("masked-lm", data, {"kind": "bpe", "vocab_size": 14}, sizes)
    tokenizer, _, rows = prepare(recipe)
    ids = [token for row in rows["train"]["input_ids"] for token in row]
    assert tokenizer.decode(ids, skip_special_tokens=True).split() == ["the", "cat"] * 9
    told(capsys, 1, 10, "block_size=8")
    recipe.data["skip_bad_rows"] = False
    with raises(ValueError, expected=("block_size", 8)):
        prepare(recipe)
