"""Tests of noise in the source sentences of translation."""

from difflib import SequenceMatcher
from random import Random

import pytest
from datasets import Dataset
from messages import raises

from vanilla_transformer.errors import UsageError
from vanilla_transformer.training.noise import NOISE, PASSES, add_noise
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.tasks import translation

TEXT = "Two men play chess in the park."


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("all capitals", "TWO MEN PLAY CHESS IN THE PARK."),
        ("no capitals", "two men play chess in the park."),
        ("no final stop", "Two men play chess in the park"),
        ("doubled spaces", "Two  men  play  chess  in  the  park."),
    ],
)
def test_noise_kinds_change_text(kind, expected):
    assert NOISE[kind](TEXT, Random(0)) == expected


@pytest.mark.parametrize(
    "text, errors", [(TEXT, 1), (f"{TEXT} A dog sleeps.", 2), ("a", 1), ("", 0)]
)
def test_typing_errors_occur_once_per_forty_characters(text, errors):
    for seed in range(50):
        noisy = NOISE["typing errors"](text, Random(seed))
        assert abs(len(noisy) - len(text)) <= max(1, errors)
        same = sum(block.size for block in SequenceMatcher(None, text, noisy).get_matching_blocks())
        assert len(text) - same <= 2 * errors
    assert len({NOISE["typing errors"](TEXT, Random(seed)) for seed in range(50)}) > 40


def test_noise_is_added_to_share_of_sources_and_not_to_targets():
    rows = Dataset.from_dict({"source": [TEXT] * 1000, "target": [*map(str, range(1000))]})
    noisy = add_noise(rows, 0.2)
    assert noisy["target"][:] == rows["target"][:] * PASSES
    share = sum(source != TEXT for source in noisy["source"]) / len(noisy)
    assert 0.17 < share < 0.23
    assert {kind(TEXT, Random(0)) for name, kind in NOISE.items() if name != "typing errors"} < {
        *noisy["source"]
    }
    assert add_noise(rows, 0.2)["source"][:] == noisy["source"][:]


def test_noise_is_added_to_training_text_only(tmp_path):
    (tmp_path / "en").write_text(f"{TEXT}\n" * 50)
    files = [str(tmp_path / "en")] * 2
    data = {"train": files, "validation": files, "source_noise": 1.0}
    assert {*translation.read(data, "validation")["source"]} == {TEXT}
    assert len({*translation.read(data, "train")["source"]}) > 4


def test_noise_with_streaming_raises():
    data = {"dataset": "name", "streaming": True, "source_noise": 0.2}
    with raises(UsageError, seen=("data.source_noise", 0.2), expected=(0, "data.streaming")):
        Recipe("translation", data)
