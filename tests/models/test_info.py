"""Tests of `vanilla-transformer info` against torch's counters and sums by hand."""

import json

import pytest
import torch
from checkpoints import CHECKPOINTS, EOS, SIZES, build, perturbed
from command_line import main, read_json
from messages import raises
from torch.utils.flop_counter import FlopCounterMode

from vanilla_transformer import VanillaSeq2SeqConfig, VanillaSeq2SeqForConditionalGeneration


@pytest.fixture(params=CHECKPOINTS)
def model(request, tmp_path):
    model = build(request.param)
    model.save_pretrained(tmp_path)
    return model


def test_parameters_add_up_to_num_parameters(model, tmp_path):
    facts = read_json("info", tmp_path, "--json")
    assert facts["architecture"] == type(model).__name__
    assert facts["total_parameters"] == sum(facts["parameters"].values()) == model.num_parameters()
    assert facts["memory"]["float32"] == 4 * model.num_parameters()
    assert facts["memory"]["float16 or bfloat16"] == 2 * model.num_parameters()


@pytest.mark.parametrize("lengths", [(5, 3), (9, 6)])
def test_flops_match_torch_counter(model, lengths, tmp_path):
    source, target = lengths
    config = model.config
    flops = read_json("info", tmp_path, "--json")["flops"]
    is_encoder_decoder = config.is_encoder_decoder
    is_decoder = "Decoder" in type(model).__name__
    kwargs = dict(input_ids=torch.zeros(1, source, dtype=int))
    kwargs |= (
        dict(decoder_input_ids=torch.zeros(1, target, dtype=int)) if is_encoder_decoder else {}
    )
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**kwargs)
    if is_encoder_decoder:
        attended_pairs = config.encoder_layers * source**2 + config.decoder_layers * (
            target**2 + source * target
        )
    else:
        attended_pairs = config.num_hidden_layers * source**2
    expected = flops.get("source token", 0) * source + flops.get("sequence", 0)
    expected += flops.get("target token", 0) * (
        target if is_encoder_decoder else source if is_decoder else 0
    )
    assert (
        counter.get_total_flops()
        == expected + attended_pairs * flops["attention to one token, per layer"]
    )


@pytest.mark.parametrize(
    "architecture",
    ["VanillaSeq2SeqForSequenceClassification", "VanillaSeq2SeqForQuestionAnswering"],
)
def test_flops_of_seq2seq_heads_match_torch_counter(architecture, tmp_path):
    model, length = (
        perturbed(architecture, SIZES | dict(encoder_layers=2, decoder_layers=3, num_labels=2)),
        7,
    )
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    flops = read_json("info", tmp_path, "--json")["flops"]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.full((1, length), EOS))
    expected = (flops["source token"] + flops["target token"]) * length + flops.get("sequence", 0)
    assert (
        counter.get_total_flops()
        == expected + (2 + 2 * 3) * length**2 * flops["attention to one token, per layer"]
    )


@pytest.mark.parametrize("length", [5, 9])
@pytest.mark.parametrize(
    "architecture, shape",
    [
        ("VanillaEncoderForMultipleChoice", (1, 3)),
        ("VanillaEncoderForNextSentencePrediction", (1,)),
        ("VanillaEncoderForTokenClassification", (1,)),
        ("VanillaDecoderForSequenceClassification", (1,)),
        ("VanillaDecoderForTokenClassification", (1,)),
    ],
)
def test_flops_of_encoder_and_decoder_heads_match_torch_counter(
    architecture, shape, length, tmp_path
):
    kind = dict(pooler_act="tanh", token_transform_act="gelu") if "Encoder" in architecture else {}
    model = perturbed(architecture, SIZES | dict(num_hidden_layers=2, num_labels=3, **kind))
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    flops = read_json("info", tmp_path, "--json")["flops"]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(*shape, length, dtype=int))
    per_token = flops.get("source token", 0) + flops.get("target token", 0)
    attention = 2 * length**2 * flops["attention to one token, per layer"]
    assert counter.get_total_flops() == shape[-1] * (
        per_token * length + flops.get("sequence", 0) + attention
    )


def info_of_preset(name, directory, **fields):
    """Return what `info` prints of a directory with the config of a model of the paper alone."""
    config = VanillaSeq2SeqConfig.preset(name, **fields)
    config.architectures = [VanillaSeq2SeqForConditionalGeneration.__name__]
    config.save_pretrained(directory)
    return read_json("info", directory, "--json")


def test_base_model_matches_counts_by_hand(tmp_path):
    facts = info_of_preset("base", tmp_path)
    attention, feed_forward, norm = (
        4 * (512 * 512 + 512),
        512 * 2048 + 2048 + 2048 * 512 + 512,
        1024,
    )
    assert facts["parameters"] == {
        "encoder.embeddings": 37000 * 512,
        "encoder.layers": 6 * (attention + feed_forward + 2 * norm),
        "decoder.layers": 6 * (2 * attention + feed_forward + 3 * norm),
        "lm_head": 37000,
    }
    assert facts["cache_values"] == 6 * 2 * 512
    assert facts["variant"] == "seq2seq" and facts["shape"]["encoder_layers"] == 6
    assert (
        facts["flops"]["source token"] == 6 * 2 * (4 * 512**2 + 2 * 512 * 2048) + 6 * 2 * 2 * 512**2
    )


def test_info_prints_text_or_json(tmp_path, capsys):
    build("causal").save_pretrained(tmp_path)
    main(["info", str(tmp_path)])
    text = capsys.readouterr().out
    main(["info", str(tmp_path), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert text.startswith("VanillaDecoderForCausalLM (decoder)\n")
    assert f"parameters in all {facts['total_parameters']:>,}".split() == [
        word
        for line in text.splitlines()
        if line.startswith("parameters in all")
        for word in line.split()
    ]


def test_foreign_config_without_weights_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with raises(SystemExit, expected=("model.safetensors", "pytorch_model.bin")):
        main(["info", str(tmp_path)])


@pytest.mark.parametrize("name, subwords, millions", [("base", 40_000, 65), ("big", 36_000, 213)])
def test_preset_without_attention_biases_has_parameters_of_papers_table_3(
    name, subwords, millions, tmp_path
):
    """The paper rounds to millions and says "about 37000 tokens"; docs/paper.md has the rest."""
    biases = {"attention_bias": False, "lm_head_bias": False}
    facts = info_of_preset(name, tmp_path, vocab_size=subwords, **biases)
    assert round(facts["total_parameters"] / 1e6) == millions


def test_command_prints_preset_and_needs_exactly_one_model(tmp_path, capsys):
    assert read_json("info", "--preset", "base", "--json") == info_of_preset("base", tmp_path)
    for arguments, seen in (
        ([], "neither"),
        (["nothere", "--preset", "base"], "both"),
        (["--preset", "bas"], "'bas', expected one of ['base', 'big', 'tiny']"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["info", *arguments])
        assert seen in capsys.readouterr().err
