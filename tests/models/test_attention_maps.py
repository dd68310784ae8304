"""Tests of attention maps, softmax(Q K^T / sqrt(d_k)), and of their figures."""

import numpy as np
import pytest
import reference
import torch
from checkpoints import perturbed, toy_corpus
from command_line import main
from messages import check_message, raises
from PIL import Image

from vanilla_transformer.attention_maps import (
    AttentionMaps,
    attention_maps,
    plot,
    save_attention_maps,
)
from vanilla_transformer.training.tokenizer import train_tokenizer

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


def build_model(architecture, **fields):
    tokenizer = train_tokenizer(
        LINES, 60, variant="encoder" if architecture == ENCODER else "seq2seq"
    )
    return perturbed(architecture, {**SHAPE, **DEPTH[architecture], **fields}).double(), tokenizer


@pytest.fixture
def reference_weights(monkeypatch):
    """Return a function that runs a reference model and returns the weights (T, S) of its heads, in
    the order of computation."""
    attention, result = reference.attention, []

    def recorded(q, k, v, visible, bias=None):
        result.append(attention(q, k, np.eye(len(k)), visible, bias))
        return attention(q, k, v, visible, bias)

    def run(reference_model, model, *arguments):
        monkeypatch.setattr(reference, "attention", recorded)
        config = model.config
        positions = {"relative": dict(buckets=8, max_distance=16)}.get(
            config.position_embedding_type, {}
        )
        paper = reference.Paper(
            24, 3, 6, 5, 2, positions=config.position_embedding_type, **positions
        )
        reference_model(
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
    assert maps.weights.std(axis=-1).max() > 0.05  # attention is not uniform


@pytest.mark.parametrize("positions", [{}, {"position_embedding_type": "rotary"}])
def test_encoder_maps_match_reference(reference_weights, positions):
    model, tokenizer = build_model(ENCODER, **positions)
    maps = attention_maps(model, tokenizer, SOURCE)
    ids = tokenizer(SOURCE)["input_ids"]
    check(
        maps, reference_weights(reference.encoder_lm, model, ids, [1] * len(ids), range(len(ids)))
    )
    assert (maps.kind, maps.queries) == ("encoder", maps.keys)
    assert maps.keys == tokenizer.convert_ids_to_tokens(ids)


def test_decoder_maps_are_causal_and_have_no_end_token(reference_weights):
    fields = dict(
        position_embedding_type="relative",
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
    )
    model, tokenizer = build_model(DECODER, **fields)
    maps = attention_maps(model, tokenizer, SOURCE)
    ids = tokenizer(SOURCE, add_special_tokens=False)["input_ids"]
    check(
        maps, reference_weights(reference.decoder_lm, model, ids, [1] * len(ids), range(len(ids)))
    )
    assert (np.triu(maps.weights, 1) == 0).all()
    assert "</s>" not in maps.keys


def test_seq2seq_has_three_kinds_of_maps(reference_weights):
    model, tokenizer = build_model(PAIR)
    source, target = tokenizer(SOURCE)["input_ids"], [1, *tokenizer(TARGET)["input_ids"][:-1]]
    actual = {
        kind: attention_maps(model, tokenizer, SOURCE, TARGET, kind)
        for kind in ("encoder", "decoder", "cross")
    }
    ones = [1] * len(source), [1] * len(target)
    expected = reference_weights(
        reference.seq2seq_lm, model, source, ones[0], target, ones[1], range(len(target))
    )
    # in each layer, three heads attend to the target, then three to the source
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


def test_missing_target_is_translated_by_model():
    model, tokenizer = build_model(PAIR)
    model.generation_config.update(max_length=9, num_beams=3)
    translation = model.generate(**tokenizer(SOURCE, return_tensors="pt"))[0]
    maps = attention_maps(model, tokenizer, SOURCE)
    assert maps.queries == tokenizer.convert_ids_to_tokens(translation[:-1])
    outputs = model(
        torch.tensor([tokenizer(SOURCE)["input_ids"]]),
        decoder_input_ids=translation[None, :-1],
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
def test_unsupported_text_or_kind_is_rejected(architecture, arguments, seen):
    with raises(ValueError, seen=seen):
        attention_maps(*build_model(architecture), **arguments)


# ------------------------------------------------------------------------------------------ figures


def figure_arrays(figure):
    """Return the arrays of a figure, without its colorbar."""
    return [axes.images[0].get_array() for axes in figure.axes if axes.images]


MAPS = AttentionMaps(
    "cross",
    np.random.default_rng(0).random((2, 3, 4, 5)),
    list("abcd"),
    ["$x", "y$", "▁", "\\frac", "_"],
)


@pytest.mark.parametrize("layer, head", [(None, None), (1, None), (None, 2), (1, 2)])
def test_figure_shows_selected_layers_and_heads(layer, head):
    layers, heads = (range(2) if layer is None else [layer]), (range(3) if head is None else [head])
    figure = plot(MAPS, layer, head)
    for actual, expected in zip(
        figure_arrays(figure), [MAPS.weights[i, j] for i in layers for j in heads], strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    maps = [axes for axes in figure.axes if axes.images]
    rows, columns = len(layers), len(heads)
    assert [tick_labels(axes.xaxis) for axes in maps[-columns:]] == [MAPS.keys] * columns
    assert [tick_labels(axes.yaxis) for axes in maps[::columns]] == [MAPS.queries] * rows
    assert not any(tick_labels(axes.xaxis) for axes in maps[:-columns])
    assert not any(tick_labels(axes.yaxis) for number, axes in enumerate(maps) if number % columns)


def tick_labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_tokens_that_do_not_fit_one_of_several_maps_are_not_shown():
    keys = [str(number) for number in range(60)]
    weights = np.random.default_rng(0).random((1, 2, 4, 60))
    figure = plot(AttentionMaps("cross", weights, list("abcd"), keys))
    first, second = (axes for axes in figure.axes if axes.images)
    assert tick_labels(first.xaxis) == tick_labels(second.xaxis) == []
    assert tick_labels(first.yaxis) == list("abcd")


@pytest.mark.parametrize(
    "arguments, seen, expected",
    [
        ((2, 0), 2, (0, 1)),
        ((0, -1), -1, (0, 2)),
    ],
)
def test_missing_layer_or_head_is_rejected(arguments, seen, expected):
    with raises(ValueError, seen=seen, expected=expected):
        plot(MAPS, *arguments)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    model, tokenizer = build_model(PAIR)
    model.float().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_attention_command_writes_figure_and_overwrites_only_with_force(checkpoint, tmp_path):
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
def test_attention_command_with_invalid_options_writes_nothing(
    checkpoint, tmp_path, options, seen, expected, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["attention", str(checkpoint), SOURCE, "--output", "map.png", *options])
    assert caught.value.code == 2
    check_message(capsys.readouterr().err.splitlines()[-1], seen=seen, expected=expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "kind, signature",
    [("PNG", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<svg"), ("jpg", b"JFIF"), ("webp", b"WEBP")],
)
def test_figure_is_saved_in_format_of_suffix(checkpoint, tmp_path, kind, signature):
    save_attention_maps(checkpoint, tmp_path / f"map.{kind}", SOURCE, TARGET, layer=0, head=0)
    content = (tmp_path / f"map.{kind}").read_bytes()
    assert signature in content[:1000] and len(content) > 1000


def test_text_with_too_many_tokens_for_maps_is_rejected(checkpoint, tmp_path):
    with raises(ValueError, expected=(4729, 6)):
        save_attention_maps(checkpoint, tmp_path / "map.png", "dog " * 5000)


def test_tokenizer_larger_than_vocabulary_is_rejected():
    model, _ = build_model(PAIR)
    with raises(ValueError, expected=60):
        attention_maps(model, train_tokenizer(LINES, 80), LINES[0] + LINES[1])


def test_full_disk_leaves_no_partial_figure(checkpoint, tmp_path, monkeypatch):
    def save_half(figure, file, **options):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save_half)
    with raises(OSError, seen="map.png"):
        save_attention_maps(checkpoint, tmp_path / "map.png", SOURCE, TARGET)
    assert list(tmp_path.iterdir()) == []
