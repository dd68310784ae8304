"""Attention maps are softmax(Q K^T / sqrt(d_k)) of the checkpoint's weights, and figures that
appear whole or not at all."""

import numpy as np
import pytest
import reference
import torch
from checkpoints import perturbed, toy_corpus
from matplotlib.figure import Figure
from messages import check_message, raises
from PIL import Image

from vanilla_transformer.attention_maps import (
    AttentionMaps,
    attention_maps,
    plot,
    save_attention_maps,
)
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer_export.cli.main import main

LINES = [text for pair in toy_corpus(50, seed=0) for text in pair]
SOURCE, TARGET = toy_corpus(1, seed=3)[0]
SHAPE = dict(
    vocab_size=60,
    hidden_size=24,
    intermediate_size=32,
    num_attention_heads=3,
    head_dim=6,
    value_head_dim=5,
)
ENCODER, DECODER, PAIR = (
    "VanillaEncoderForMaskedLM",
    "VanillaDecoderForCausalLM",
    "VanillaSeq2SeqForConditionalGeneration",
)
DEPTH = {ENCODER: {"num_hidden_layers": 2}, DECODER: {"num_hidden_layers": 2}}
DEPTH[PAIR] = {"encoder_layers": 2, "decoder_layers": 2}


def made(architecture, **fields):
    tokenizer = train_tokenizer(
        LINES, 60, variant="encoder" if architecture == ENCODER else "seq2seq"
    )
    return perturbed(architecture, {**SHAPE, **DEPTH[architecture], **fields}).double(), tokenizer


@pytest.fixture
def by_hand(monkeypatch):
    """A function that runs one of the reference and gives the weights (T, S) of its heads, in the
    order they are computed."""
    attention, result = reference.attention, []

    def recorded(q, k, v, visible, bias=None):
        result.append(attention(q, k, np.eye(len(k)), visible, bias))
        return attention(q, k, v, visible, bias)

    def run(computed, model, *arguments):
        monkeypatch.setattr(reference, "attention", recorded)
        config = model.config
        positions = {"relative": dict(buckets=8, max_distance=16)}.get(
            config.position_embedding_type, {}
        )
        paper = reference.Paper(
            24, 3, 6, 5, 2, positions=config.position_embedding_type, **positions
        )
        computed(
            {name: weight.numpy() for name, weight in model.state_dict().items()}, paper, *arguments
        )
        return result

    return run


def check(maps, expected):
    assert maps.weights.shape == (2, 3, len(maps.queries), len(maps.keys))
    np.testing.assert_allclose(
        maps.weights, np.array(expected).reshape(maps.weights.shape), rtol=0, atol=1e-12
    )
    np.testing.assert_allclose(maps.weights.sum(-1), 1, rtol=0, atol=1e-12)
    assert maps.weights.std(axis=-1).max() > 0.05  # heads that look somewhere


@pytest.mark.parametrize("positions", [{}, {"position_embedding_type": "rotary"}])
def test_an_encoder_s_maps_are_those_of_the_formula(by_hand, positions):
    model, tokenizer = made(ENCODER, **positions)
    maps = attention_maps(model, tokenizer, SOURCE)
    ids = tokenizer(SOURCE)["input_ids"]
    check(maps, by_hand(reference.encoder_lm, model, ids, [1] * len(ids), range(len(ids))))
    assert (maps.kind, maps.queries) == ("encoder", maps.keys)
    assert maps.keys == tokenizer.convert_ids_to_tokens(ids)


def test_a_decoder_s_maps_are_causal_and_its_text_goes_on(by_hand):
    fields = dict(
        position_embedding_type="relative",
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
    )
    model, tokenizer = made(DECODER, **fields)
    maps = attention_maps(model, tokenizer, SOURCE)
    ids = tokenizer(SOURCE, add_special_tokens=False)["input_ids"]
    check(maps, by_hand(reference.decoder_lm, model, ids, [1] * len(ids), range(len(ids))))
    assert (np.triu(maps.weights, 1) == 0).all()
    assert "</s>" not in maps.keys


def test_seq2seq_has_three_kinds_of_maps(by_hand):
    model, tokenizer = made(PAIR)
    source, target = tokenizer(SOURCE)["input_ids"], [1, *tokenizer(TARGET)["input_ids"][:-1]]
    actual = {
        kind: attention_maps(model, tokenizer, SOURCE, TARGET, kind)
        for kind in ("encoder", "decoder", "cross")
    }
    ones = [1] * len(source), [1] * len(target)
    expected = by_hand(
        reference.seq2seq_lm, model, source, ones[0], target, ones[1], range(len(target))
    )
    # three heads look at the target, then three at the source
    decoder = [expected[6 + 6 * layer :][:6] for layer in range(2)]
    check(actual["encoder"], expected[:6])
    check(actual["decoder"], decoder[0][:3] + decoder[1][:3])
    check(actual["cross"], decoder[0][3:] + decoder[1][3:])
    assert (np.triu(actual["decoder"].weights, 1) == 0).all()
    names = [tokenizer.convert_ids_to_tokens(ids) for ids in (target, source)]
    assert [actual["cross"].queries, actual["cross"].keys] == names
    assert [actual["decoder"].queries, actual["encoder"].queries] == names
    np.testing.assert_array_equal(
        attention_maps(model, tokenizer, SOURCE, TARGET).weights, actual["cross"].weights
    )


def test_without_a_target_it_is_the_model_s_own_translation():
    model, tokenizer = made(PAIR)
    model.generation_config.update(max_length=9, num_beams=3)
    own = model.generate(**tokenizer(SOURCE, return_tensors="pt"))[0]
    maps = attention_maps(model, tokenizer, SOURCE)
    assert maps.queries == tokenizer.convert_ids_to_tokens(own[:-1])
    outputs = model(
        torch.tensor([tokenizer(SOURCE)["input_ids"]]),
        decoder_input_ids=own[None, :-1],
        output_attentions=True,
    )
    np.testing.assert_allclose(
        maps.weights, torch.cat(outputs.cross_attentions).detach().numpy(), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(
    "architecture, arguments, seen",
    [
        (ENCODER, dict(source=""), ()),
        (PAIR, dict(source=SOURCE, target=""), ()),
        (ENCODER, dict(source="a", target="b"), "b"),
        (DECODER, dict(source="a", kind="cross"), "cross"),
        (PAIR, dict(source="a", kind="self"), "self"),
    ],
)
def test_what_a_model_does_not_read_or_have_is_refused(architecture, arguments, seen):
    with raises(ValueError, seen=seen):
        attention_maps(*made(architecture), **arguments)


# ------------------------------------------------------------------------------------------ figures


def shown(figure):
    """The arrays of a figure, without its colorbar."""
    return [axes.images[0].get_array() for axes in figure.axes if axes.images]


MAPS = AttentionMaps(
    "cross",
    np.random.default_rng(0).random((2, 3, 4, 5)),
    list("abcd"),
    ["$x", "y$", "▁", "\\frac", "_"],
)


@pytest.mark.parametrize("layer, head", [(None, None), (1, None), (None, 2), (1, 2)])
def test_the_figure_has_the_maps_asked_for(layer, head):
    layers, heads = (range(2) if layer is None else [layer]), (range(3) if head is None else [head])
    figure = plot(MAPS, layer, head)
    for actual, expected in zip(
        shown(figure), [MAPS.weights[i, j] for i in layers for j in heads], strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    labels = [
        [label.get_text() for label in axis.get_ticklabels()]
        for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis)
    ]
    assert labels == ([MAPS.keys, MAPS.queries] if (layer, head) == (1, 2) else [[], []])


@pytest.mark.parametrize(
    "arguments, seen, expected",
    [
        ((2, 0), 2, (0, 1)),
        ((0, -1), -1, (0, 2)),
    ],
)
def test_a_layer_or_a_head_that_does_not_exist_is_refused(arguments, seen, expected):
    with raises(ValueError, seen=seen, expected=expected):
        plot(MAPS, *arguments)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    model, tokenizer = made(PAIR)
    model.float().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_the_verb_writes_a_figure_and_replaces_it_with_force_only(checkpoint, tmp_path):
    out = tmp_path / "new" / "map.png"
    command = ["attention", str(checkpoint), SOURCE, TARGET, "--output", str(out)]
    main(command)
    with Image.open(out) as image:
        grid = image.size
        assert image.format == "PNG" and min(grid) > 300
    with raises(SystemExit, expected="--force"):
        main([*command, "--layer", "0", "--head", "1"])
    main([*command, "--layer", "0", "--head", "1", "--force"])
    with Image.open(out) as image:
        assert image.size != grid
    assert [path.name for path in out.parent.iterdir()] == ["map.png"]


@pytest.mark.parametrize(
    "options, seen, expected",
    [
        (["--layer", "5"], 5, (0, 1)),
        (["--layer", "1" + 18 * "0"], 1000000000000000000, (0, 1)),
        (["--layer", "1" + 30 * "0"], "1" + 30 * "0", "2**63"),
        (["--head", "-1"], -1, (0, "2**63")),
        (["--head", "x"], "x", 0),
        (["--kind", "self"], ("attention", "self"), ()),
        (["--output", "map"], "map", (".eps", ".jpeg", ".jpg", ".pdf", ".png")),
        (["--output", "map.safetensors"], "map.safetensors", ()),
        (["--output", ".png"], ".png", ()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_verb_writes_nothing_when_it_is_asked_for_what_is_not_there(
    checkpoint, tmp_path, options, seen, expected, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["attention", str(checkpoint), SOURCE, "--output", "map.png", *options])
    assert caught.value.code == 2
    check_message(capsys.readouterr().err.splitlines()[-1], seen=seen, expected=expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["PNG", "pdf", "svg", "jpg", "webp"])
def test_the_name_of_a_figure_tells_its_format(checkpoint, tmp_path, kind):
    save_attention_maps(checkpoint, tmp_path / f"map.{kind}", SOURCE, TARGET, layer=0, head=0)
    assert (tmp_path / f"map.{kind}").stat().st_size > 1000


def test_a_text_with_more_tokens_than_maps_can_show_is_refused(checkpoint, tmp_path):
    with raises(ValueError, expected=(4729, 6)):
        save_attention_maps(checkpoint, tmp_path / "map.png", "dog " * 5000)


def test_a_tokenizer_that_is_larger_than_the_vocabulary_is_refused():
    model, _ = made(PAIR)
    with raises(ValueError, expected=(0, 59)):
        attention_maps(model, train_tokenizer(LINES, 80), LINES[0] + LINES[1])


def test_no_room_on_the_disk_leaves_no_half_figure(checkpoint, tmp_path, monkeypatch):
    def full(figure, file, **options):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with raises(OSError, seen="map.png"):
        save_attention_maps(checkpoint, tmp_path / "map.png", SOURCE, TARGET)
    assert list(tmp_path.iterdir()) == []
