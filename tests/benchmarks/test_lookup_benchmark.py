"""Tests of benchmarks/lookup.py: the synthetic tasks, and a short run. No speed is asserted."""

import gzip
import json
import random
import sys
from itertools import islice

import lookup
import lookup_tasks
import numpy as np
import pytest
from messages import raises

CAPTIONS = [
    "A man rides a horse.",
    "A boy, in red, jumps.",
    "The Kids are here.",
    "Two women talk outside.",
    "A boyish man smokes.",
    "One baby sleeps.",
    "People wait for a train.",
]
CAPTIONS_ABOUT_CHILDREN = {CAPTIONS[place] for place in (1, 2, 5)}


def test_corrections_swap_adjacent_letters_in_at_most_two_words():
    for source, target in islice(lookup_tasks.corrections(CAPTIONS, random.Random(0)), 50):
        assert sum(caption in target for caption in CAPTIONS) == 3
        changed = [
            pair
            for pair in zip(source.split(" "), target.split(" "), strict=True)
            if pair[0] != pair[1]
        ]
        assert len(changed) <= 2  # swapping two equal letters changes nothing
        for wrong, right in changed:
            [first, second] = [
                place
                for place, letters in enumerate(zip(wrong, right, strict=True))
                if len({*letters}) == 2
            ]
            assert second == first + 1 and wrong[first : second + 1] == right[second] + right[first]


def test_summaries_keep_the_two_captions_about_children_in_order():
    for source, target in islice(lookup_tasks.summaries(CAPTIONS, random.Random(0)), 50):
        captions = sorted((caption for caption in CAPTIONS if caption in source), key=source.index)
        assert " ".join(captions) == source and len(captions) == 5
        kept = [caption for caption in captions if caption in CAPTIONS_ABOUT_CHILDREN]
        assert " ".join(kept) == target and len(kept) == 2


@pytest.fixture
def run_benchmark(tmp_path, monkeypatch, capsys):
    """Return a function that runs the benchmark on synthetic captions -> its JSON lines."""
    for name in ("train.en", "val.en", "val.de"):
        (tmp_path / f"{name}.gz").write_bytes(
            gzip.compress("".join(f"{line}\n" for line in CAPTIONS).encode())
        )

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["lookup.py", "--data", str(tmp_path), *arguments])
        lookup.main()
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return call


def test_models_are_trained_once_per_number_of_steps(run_benchmark, tmp_path, monkeypatch):
    models = tmp_path / "models"
    options = ["--train", "--models", str(models), "--tasks", "summaries", "translation"]
    assert run_benchmark(*options, "--steps", "1") == []
    [first] = models.rglob("*.safetensors")
    before = first.read_bytes()
    assert run_benchmark(*options, "--steps", "2") == []
    assert {path.parent.name for path in models.rglob("*.safetensors")} == {
        "summaries-1",
        "summaries-2",
    }
    monkeypatch.setattr(lookup_tasks, "train", None)
    run_benchmark(*options, "--steps", "1")
    assert first.read_bytes() == before
    with pytest.raises(SystemExit):
        run_benchmark("--train")


@pytest.mark.slow
def test_short_run_prints_one_line_per_task_and_dtype(run_benchmark):
    options = ["--steps", "1", "--texts", "2", "--rounds", "3", "--candidates", "4", "--tasks"]
    result = [
        *run_benchmark(*options, "corrections", "--dtypes", "int8"),
        *run_benchmark(*options, "translation", "--dtypes", "fp32"),
    ]
    assert [(line["task"], line["dtype"]) for line in result] == [
        ("corrections", "int8"),
        ("translation", "fp32"),
    ]
    for line in result:
        assert (line["texts"], line["candidates"], len(line["time ratios"])) == (2, 4, 3)
        assert line["time ratio"] == line["time ratios"][1]
        assert 1 <= line["tokens per step"] <= 1 + line["candidates per step"] <= 5
        assert line["same tokens"] == 2 or line["dtype"] == "int8"


def test_fp32_token_mismatch_is_an_error(monkeypatch):
    outputs = iter([[[1, 5, 2]], [[1, 5, 2]], [[1, 5, 2]], [[1, 6, 2]]])
    monkeypatch.setattr(lookup, "generated", lambda *args, **options: (1.0, next(outputs)))
    with raises(SystemExit, seen=(0, 1), expected="fp32"):
        lookup.measure(
            lookup_tasks.CARD, [("A dog runs.", "Ein Hund rennt.")], "fp32", candidates=4, rounds=1
        )


class FakeRuntime:
    """A stand-in for a runtime: decoders read a prompt of one token, then 1, 3 and 1 tokens."""

    def __init__(self):
        self.model = self.decoders = self

    def start(self, request):
        return SteppedDecoder()

    def generate(self, row, **options):
        decoder = self.decoders.start(row)
        for count in (1, 1, 3, 1):
            decoder.step(np.zeros((1, count)))
        return np.array([[1, 2, 3]])


class SteppedDecoder:
    def step(self, tokens):
        return tokens


def test_step_counts_returns_steps_and_tokens():
    runtime = FakeRuntime()
    assert lookup.step_counts(runtime, [None, None]) == {"steps": 8, "tokens": 12}
    assert runtime.decoders is runtime
