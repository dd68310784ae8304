"""Tests of attention maps of exports, against those of the checkpoint in torch."""

import subprocess
import sys

import numpy as np
import pytest
from alignments import card
from command_line import read_error
from messages import check_message, raises
from PIL import Image
from transformers import AutoTokenizer

from vanilla_transformer.attention_maps import attention_maps as checkpoint_maps
from vanilla_transformer_export import TextRuntime, export, load_checkpoint
from vanilla_transformer_export.attention_maps import attention_maps, plot
from vanilla_transformer_export.errors import UsageError

CARD = card("en-fr")  # whose heads are of two layers
SOURCE, TARGET = "a dog runs across a green field .", "un chien court dans un champ ."


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "out"
    export(CARD, path, target="cpu", cases=1)
    return path


@pytest.fixture(scope="module")
def runtime(directory):
    return TextRuntime(directory)


@pytest.mark.parametrize("texts", [(SOURCE,), (SOURCE, TARGET)])
def test_maps_are_those_of_the_checkpoint(runtime, texts):
    expected = checkpoint_maps(load_checkpoint(CARD), AutoTokenizer.from_pretrained(CARD), *texts)
    found = attention_maps(runtime, *texts)
    assert (found.kind, found.keys, found.queries) == ("cross", expected.keys, expected.queries)
    heads = [(layer, head) for layer, head, _ in runtime.info.manifest["alignment"]["heads"]]
    assert found.weights.shape == expected.weights.shape and len(heads) == 3
    for place in np.ndindex(found.weights.shape[:2]):
        of_head = expected.weights[place] if place in heads else np.nan
        np.testing.assert_allclose(found.weights[place], of_head, rtol=0, atol=1e-5)
    figure = plot(found)
    drawn = [axes.get_title() for axes in figure.axes if axes.images]
    assert drawn == [f"layer {layer}, head {head}" for layer, head in sorted(heads)]


def test_other_heads_are_rejected_with_those_that_there_are(runtime):
    layer, head, _ = runtime.info.manifest["alignment"]["heads"][0]
    maps = attention_maps(runtime, SOURCE)
    assert len([axes for axes in plot(maps, layer, head).axes if axes.images]) == 1
    with raises(UsageError, seen="layer is 2", expected=f"layer {layer} head {head}"):
        plot(maps, 2, 3)


def test_command_draws_an_export_without_torch(directory, tmp_path):
    code = """
import sys
from vanilla_transformer_export.cli.main import main
main(sys.argv[1:])
assert not {"torch", "transformers"} & sys.modules.keys()
"""
    command = ["attention", directory, SOURCE, "--output", tmp_path / "map.png"]
    subprocess.run([sys.executable, "-c", code, *map(str, command)], check=True, timeout=120)
    with Image.open(tmp_path / "map.png") as image:
        assert image.format == "PNG" and min(image.size) > 200


def test_wrong_uses_write_nothing(directory, tmp_path):
    out = ["--output", str(tmp_path / "map.png")]
    for more, seen, expected in (
        (["--kind", "encoder"], "encoder", "cross"),
        (["--variant", "fp16"], "fp16", "none"),
        (["--layer", "9"], 9, (0, 3)),
    ):
        message = read_error("attention", directory, SOURCE, *out, *more)
        check_message(message, seen=seen, expected=expected)
    assert "' ' has no tokens" in read_error("attention", directory, SOURCE, " ", *out)
    assert not (tmp_path / "map.png").exists()


def test_export_without_graph_says_what_it_lacks(tmp_path):
    export(CARD, tmp_path / "portable", cases=1)
    message = read_error("attention", tmp_path / "portable", "A dog.", "--output", "map.png")
    check_message(message, seen="no alignment graph", expected="--alignments")
