"""Tests of reading text files: lines, errors, and bad rows that are skipped."""

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

SEPARATORS = "\x0b \x0c \x1c \x85 \u2028 \u2029 \r"  # line boundaries of `str.splitlines`


READERS = (read_lines, export_lines.read_lines)  # of training, and of files to run
PACKED = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.fixture(params=PACKED)
def write(tmp_path, request):
    """Return a function that writes bytes to a file, plain or compressed."""

    def write_file(content):
        path = tmp_path / f"a.txt{request.param}"
        path.write_bytes(PACKED[request.param](content))
        return path

    return write_file


# -------------------------------------------------------------------------------------------- lines


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_line_ends_and_byte_order_mark_are_removed(write, mark, end, last):
    path = write(f"{mark}one {end}\ttwo\ufeff{end if last else ''}".encode())
    assert read_lines(path) == ["one ", "\ttwo\ufeff"]
    assert read_text(path) == "one \n\ttwo\ufeff" + "\n" * last


def test_only_line_feed_ends_a_line(write):
    path = write(f"one{SEPARATORS}one\r\r\n two \rtwo\r".encode())
    assert read_lines(path) == [f"one{SEPARATORS}one\r", " two \rtwo\r"]
    assert read_text(path) == f"one{SEPARATORS}one\r\n two \rtwo\r"


def test_file_with_only_byte_order_mark_is_empty(write):
    with raises(ValueError, seen=1):
        read_lines(write(b"\xef\xbb\xbf"))
    assert read_text(write(b"\xef\xbb\xbf")) == ""


def test_only_byte_order_mark_of_first_line_is_removed():
    file = io.BytesIO("\ufeffone\n\ufefftwo".encode())
    assert [*export_lines.decode_lines(file, "a")] == ["one", "\ufefftwo"]


def test_too_long_line_is_read_as_one_line():
    content = b"x" * (3 * export_lines.LONGEST) + b"\ntwo\n"
    first, second = export_lines.raw_lines(io.BytesIO(content), "a")
    assert len(first) > export_lines.LONGEST and second == b"two"


def test_other_encodings_are_decoded(write):
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


def test_invalid_byte_error_names_line(write):
    path = write(b"one\ntwo \xff\nthree\n")
    for read in (read_text, read_lines):
        with raises(ValueError, seen=("a.txt", 2, "0xff")):
            read(path)


# --------------------------------------------------------------------------- limits and compression


@pytest.mark.parametrize("character", ["a", "\u4e0a"])
def test_line_limit_is_one_megabyte(write, character):
    max_characters = module.LONGEST // len(character.encode())
    longest = character * max_characters
    path = write(f"\ufeff{longest}\r\n{longest}".encode())
    assert read_lines(path) == [longest, longest]
    for longer in (longest + character, 5 * longest):
        path = write(f"one\n{longer}\r\ntwo\n".encode())
        with raises(ValueError, seen=("a.txt", 2, 1, "000")):
            read_lines(path)
        # the fault replaces the line, then the next line follows
        assert [len(line) < 100 for line in lines(path)] == [True] * 3
        # read_text has no limit per line
        assert read_text(path) == f"one\n{longer}\ntwo\n"


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_truncated_or_damaged_compressed_file_error_names_file(tmp_path, suffix):
    path, content = (
        tmp_path / f"a{suffix}",
        PACKED[suffix]("".join(f"{number}\n" for number in range(9999)).encode()),
    )
    for damaged in (content[:-9], b"no such file", content[:100] + b"x" * 100 + content[200:]):
        path.write_bytes(damaged)
        for read in (read_text, lambda path: [*export_lines.read_lines(path)]):
            with raises(ValueError, seen=f"a{suffix}"):
                read(path)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_damage_after_the_first_stream_is_an_error(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    first, second = (PACKED[suffix](text) for text in (b"one\ntw", b"o\nthree\n"))
    path.write_bytes(first + second)
    for read in READERS:
        path.write_bytes(first + second)
        assert [*read(path)] == ["one", "two", "three"]
        for rest in (b"X" + second[1:], second[:-1], second[:3], b"notes", second + b"X"):
            path.write_bytes(first + rest)
            with raises(ValueError, seen=f"a{suffix}"):
                [*read(path)]


def test_zeros_between_streams_of_xz_are_padding(tmp_path):
    """They are as many as a multiple of four (The .xz File Format, 2.2)."""
    first, second = map(lzma.compress, (b"one\n", b"two\n"))
    path = tmp_path / "a.xz"
    for zeros in (4, 8, 2**17):
        path.write_bytes(first + bytes(zeros) + second + bytes(zeros))
        for read in READERS:
            assert [*read(path)] == ["one", "two"]
    for content in (
        first + bytes(3) + second,
        first + bytes(5),
        bytes(4) + first,
        first + bytes(4) + b"X",
    ):
        path.write_bytes(content)
        for read in READERS:
            with raises(ValueError, seen="a.xz"):
                [*read(path)]


def test_large_compressed_files_of_many_streams_are_read(tmp_path):
    lines = [f"{number} is a line of a long file" for number in range(30_000)]
    content = "".join(f"{line}\n" for line in lines).encode()
    for suffix in (".bz2", ".xz"):
        path = tmp_path / f"a{suffix}"
        path.write_bytes(
            b"".join(
                PACKED[suffix](content[start : start + 99_999])
                for start in range(0, len(content), 99_999)
            )
        )
        assert [*export_lines.read_lines(path)] == lines


def test_endless_line_is_an_error(monkeypatch):
    monkeypatch.setattr(export_lines, "ENDLESS", 20_000_000)
    with open("/dev/zero", "rb") as file, raises(ValueError, seen=("line 1", "zero", "20,000,000")):
        [*export_lines.raw_lines(file, "zero")]
    long = io.BytesIO(b"x" * 15_000_000 + b"\ntwo\n")
    assert [len(line) > 3 for line in export_lines.raw_lines(long, "a")] == [True, False]


@pytest.mark.parametrize("suffix", [".zst", ".Z", ".lzma", ".lzo", ".rar"])
def test_unsupported_compression_is_rejected(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"w5")
    for read in (read_text, read_lines, lambda path: [*export_lines.read_lines(path)]):
        with raises(ValueError, seen=f"a{suffix}", expected=(".gz", ".bz2", ".xz")):
            read(path)


@pytest.mark.parametrize("name", [".gz", "gz", "a.gz.txt"])
def test_file_without_compression_suffix_is_plain_text(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"w5\n")
    assert [*export_lines.read_lines(path)] == read_lines(path) == ["w5"]


def bomb(path, line, megabytes):
    """Write `megabytes` MB of `line` into a gzip file of less than 1% of that size."""
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
def test_gzip_bomb_is_rejected_without_unpacking(tmp_path, monkeypatch, line, read):
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


def test_gzip_bomb_of_bad_rows_is_not_read_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ALWAYS_READ", 100_000)
    path, bad = bomb(tmp_path / "bomb.gz", b"\n", megabytes=2), BadRows({"skip_bad_rows": True})
    with raises(ValueError, seen="bomb.gz"):
        read_all_lines([path], bad=bad)
    assert 100_000 <= bad.count < 400_000 and len(bad.first) == 3


def test_compressible_text_is_not_rejected_as_gzip_bomb(tmp_path, monkeypatch):
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
FAULTS = ["empty", "empty", "0xe9", "1,000,000"]  # words of the messages about BAD


def fill(path, *rows):
    path.write_bytes(
        b"".join(row if isinstance(row, bytes) else f"{row}\n".encode() for row in rows)
    )
    return str(path)


def read(task, split="train", **data):
    """Return the rows that `task` reads from `split`, without bad rows."""
    return TASKS[task].read({"skip_bad_rows": True, **data}, split).to_dict()


def check_report(capsys, count, rows, *faults):
    """Check the line printed about `count` skipped rows of `rows`, and its `faults`."""
    [printed] = capsys.readouterr().out.splitlines()
    check_message(printed, seen=(count, rows))
    assert "data.skip_bad_rows" in printed
    assert len(printed) < 1000
    for fault in faults:
        assert fault in printed


@pytest.mark.parametrize("place", [0, 1])
def test_bad_row_is_skipped_on_both_sides_of_pair(tmp_path, capsys, place):
    names = ("source", "target")
    sides = [[f"{name}{number}" for number in range(6)] for name in names]
    files = [fill(tmp_path / name, *side) for name, side in zip(names, sides)]
    fill(tmp_path / names[place], sides[place][0], BAD[0], *BAD[2:], sides[place][4], "  ")
    assert read("translation", train=files) == {
        name: [side[0], side[4]] for name, side in zip(names, sides)
    }
    check_report(
        capsys,
        4,
        6,
        *(f"{files[place]}: line {number} " for number in (2, 3, 4)),
        *FAULTS[1:],
        "; ...)",
    )


@pytest.mark.parametrize("split, skips", [("train", False), ("validation", True), ("test", True)])
def test_bad_row_raises_outside_training_or_without_skip_bad_rows(tmp_path, split, skips):
    for row, fault in zip(BAD, FAULTS):
        file = fill(tmp_path / "lines", "one", row, "three")
        with raises(ValueError, seen=("lines", "line 2", fault)):
            read("masked-lm", split, **{split: file, "skip_bad_rows": skips})


def test_files_of_different_lengths_raise(tmp_path):
    files = [fill(tmp_path / "source", "one", "", "three"), fill(tmp_path / "target", "one", "two")]
    with raises(ValueError, seen=("source", 3, 2)):
        read("translation", train=files)


def test_file_with_only_bad_rows_raises(tmp_path):
    with raises(ValueError, seen=3):
        read("masked-lm", train=fill(tmp_path / "lines", "", " ", b"\xff\n"))


def test_skip_bad_rows_must_be_boolean():
    with raises(UsageError, seen=("data.skip_bad_rows", "yes"), expected="true or false"):
        Recipe("masked-lm", {"train": "lines", "skip_bad_rows": "yes"})


def test_bad_lines_of_language_model_text_are_skipped(tmp_path, capsys):
    lines = [f"line {number}" for number in range(8)]
    file = fill(tmp_path / "lines", *lines[:2], "", *BAD[2:], *lines[2:])
    for documents in ("line", "file"):
        settings = dict(train=file, documents=documents, validation_fraction=0.5)
        first, last = (
            read("causal-lm", **settings)["text"],
            read("causal-lm", "validation", **settings)["text"],
        )
        assert "".join(first + last).replace("\n", "") == "".join(lines)
        check_report(capsys, 2, 10, *FAULTS[2:])
    assert read("causal-lm", train=fill(tmp_path / "lines", "one", "", "two"), documents="file")[
        "text"
    ] == ["one\n\ntwo\n"]


def test_bad_sentences_of_documents_are_skipped(tmp_path, capsys):
    file = fill(tmp_path / "lines", "a", "b", "", "c", BAD[2], "d", LONG, "", "e")
    assert read("pretraining", train=file)["first"] == ["a", "c"]
    check_report(capsys, 2, 7, *FAULTS[2:])


@pytest.mark.parametrize(
    "task, more", [("sequence-classification", {}), ("masked-lm", {"labelled": True})]
)
def test_rows_with_bad_labels_are_skipped(tmp_path, capsys, task, more):
    file = fill(tmp_path / "lines", "good one", "alone", " unnamed", *BAD[1:], "bad two")
    assert read(task, train=file, **more)["text"] == ["one", "two"]
    check_report(
        capsys,
        5,
        7,
        "line 2 is 'alone', expected a label, a tab or a space, and a text",
        "line 3 is ' unnamed', expected a label",
    )


def test_bad_labels_of_folds_are_reported_once(tmp_path, capsys):
    file = fill(tmp_path / "lines", "good one", "alone", "bad two", "bad three")
    settings = dict(train=file, folds=3, fold=0)
    result = [
        read("sequence-classification", split, **settings)["text"]
        for split in ("train", "validation")
    ]
    assert sorted(result[0] + result[1]) == ["one", "three", "two"]
    check_report(capsys, 1, 4, "line 2 is 'alone'")


def test_bad_sentences_of_token_tags_are_skipped(tmp_path, capsys):
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
    check_report(
        capsys,
        3,
        5,
        "line 5 is 'alone', expected a word, a space or a tab, and a tag",
        "line 9 is not",
        "line 13 is longer than",
    )


def questions(*answers):
    """Return a data set like SQuAD: one context, and a question with each of `answers`."""
    entries = [
        {"id": f"q{number}", "question": "who?", "answers": result}
        for number, result in enumerate(answers)
    ]
    return {"data": [{"paragraphs": [{"context": "Ann ran", "qas": entries}]}]}


def test_bad_questions_are_skipped_or_raise(tmp_path, capsys):
    right = [{"text": "Ann", "answer_start": 0}]
    # the last two would be right if counted from the end
    pairs = [("Ann", 1), ("Ann", "0"), (None, 0), ("n", -1), ("Ann", -7)]
    wrong = [[], *([{"text": text, "answer_start": start}] for text, start in pairs)]
    file = fill(tmp_path / "squad.json", json.dumps(questions(right, *wrong)))
    assert read("question-answering", train=file)["id"] == ["q0", "q1"]  # q1 has no answer
    faults = [
        "q2: its context has 'nn ' at 1, expected the answer 'Ann'",
        "q3 has the answer 'Ann' at '0'",
    ]
    check_report(capsys, 5, 7, *faults)
    for answers in wrong[1:]:
        with raises(ValueError, seen="q0"):
            read(
                "question-answering",
                train=fill(tmp_path / "squad.json", json.dumps(questions(answers))),
                skip_bad_rows=False,
            )


def test_bad_rows_of_dataset_are_skipped(tmp_path, capsys):
    rows = {"en": ["one", None, "three", " ", "five"], "de": ["eins", "zwei", "", "vier", "fünf"]}
    DatasetDict(train=Dataset.from_dict(rows)).save_to_disk(tmp_path / "set")
    settings = dict(dataset=str(tmp_path / "set"), columns=["en", "de"])
    assert read("translation", **settings) == {
        "source": ["one", "five"],
        "target": ["eins", "fünf"],
    }
    check_report(capsys, 3, 5, "row 1: no source", "row 2: no target", "row 3: no source")
    with raises(UsageError, seen="skip_bad_rows", expected="data.streaming"):
        read("translation", **settings, streaming=True)


def test_bad_rows_of_tagged_dataset_are_skipped(tmp_path, capsys):
    rows = {
        "tokens": [["Ann", "ran"], ["Bob"], None, []],
        "ner_tags": [["PER", "O"], ["PER", "O"], ["O"], []],
    }
    DatasetDict(train=Dataset.from_dict(rows)).save_to_disk(tmp_path / "set")
    settings = dict(dataset=str(tmp_path / "set"))
    assert read("token-classification", **settings) == {
        "words": [["Ann", "ran"], []],
        "tags": [["PER", "O"], []],
    }
    check_report(
        capsys,
        2,
        4,
        "row 1: 1 words and 2 tags, expected one for each",
        "row 2: 0 words and 1 tags",
    )
    with raises(ValueError, seen=(1, 2, "tags")):
        read("token-classification", **settings, skip_bad_rows=False)


def test_texts_longer_than_block_size_are_skipped_or_raise(tmp_path, capsys):
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
    check_report(capsys, 1, 10, "block_size=8")
    recipe.data["skip_bad_rows"] = False
    with raises(ValueError, expected=("block_size", 8)):
        prepare(recipe)
