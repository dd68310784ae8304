"""Conversion of T5, v1.1, Flan-T5, ByT5 and mT5: folded weights, tied heads, old files and every
target.

The expected numbers are those of transformers' own classes.
"""

import json

import numpy as np
import pytest
import torch
import transformers
from checkpoints import default_parity, edit_json, edit_tensors
from command_line import read_json
from families import RIGHT, compute_outputs, random_model
from messages import raises
from safetensors.torch import load_file
from transformers import AutoConfig, GenerationConfig

import vanilla_transformer
from vanilla_transformer.conversion import convert, plan_conversion
from vanilla_transformer_export import Runtime, export
from vanilla_transformer_export.targets.registry import get_target

# Proportions of the real models: the heads together are wider than the residual stream, and a
# quarter of the ByT5 layers are in the decoder.
SIZES = dict(
    vocab_size=60, d_model=24, d_kv=16, num_heads=3, d_ff=40, num_layers=2, decoder_start_token_id=0
)
# small values, so that a few tokens reach the last bucket
SHORT = dict(relative_attention_num_buckets=8, relative_attention_max_distance=5)
KINDS = {
    "t5": ("T5", dict(feed_forward_proj="relu")),
    "v1.1": ("T5", dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "untied, scaled": ("T5", dict(feed_forward_proj="gated-gelu")),
    "tied, not scaled": ("T5", dict(tie_word_embeddings=False)),
    "byt5": (
        "T5",
        dict(
            feed_forward_proj="gated-gelu",
            num_layers=3,
            num_decoder_layers=1,
            tie_word_embeddings=False,
        ),
    ),
    "mt5": ("MT5", {}),
    "mt5, tied": ("MT5", {}),
}
UNTIED = ("v1.1", "untied, scaled", "byt5", "mt5")
kinds = pytest.mark.parametrize("kind", KINDS)


def save_checkpoint(
    kind, directory, architecture="ForConditionalGeneration", dtype=torch.float32, **changes
):
    """Save a checkpoint with random weights, and return its model as transformers loads it."""
    family, fields = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**SIZES | SHORT | fields | changes)
    model = random_model(f"{family}{architecture}", config, dtype)
    for name, weight in model.named_parameters():
        if name.endswith("n.q.weight"):  # as if trained: T5 does not scale the scores
            weight.data *= config.d_kv**-0.5
    model.save_pretrained(directory)
    if kind in UNTIED and architecture == "ForConditionalGeneration":
        head = torch.empty_like(model.shared.weight).uniform_(-0.4, 0.4)
        edit_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": head}))
    return type(model).from_pretrained(directory).eval()


def convert_and_load(tmp_path):
    facts = convert(tmp_path / "theirs", tmp_path / "ours")
    return (
        getattr(vanilla_transformer, facts["architecture"])
        .from_pretrained(tmp_path / "ours")
        .eval()
    )


def rows(side, rows=3):
    """Return token ids of several lengths, padded on `side`, and their mask."""
    mask = RIGHT if side == "right" else RIGHT.flip(1)
    return torch.randint(3, SIZES["vocab_size"], mask.shape).masked_fill(mask == 0, 0), mask


def relative_error(got, expected):
    return ((got - expected).abs().max() / expected.abs().max()).item()


# ------------------------------------------------------------------------------------------ numbers


@torch.no_grad()
def logits(model, ids, mask, target):
    """Return the logits of `target` in one pass, and in two steps with a cache."""
    full = model(ids, attention_mask=mask, decoder_input_ids=target).logits
    arguments = dict(
        encoder_outputs=model.get_encoder()(ids, attention_mask=mask), attention_mask=mask
    )
    first = model(**arguments, decoder_input_ids=target[:, :4], use_cache=True)
    then = model(
        **arguments, decoder_input_ids=target[:, 4:], past_key_values=first.past_key_values
    )
    return full, torch.cat([first.logits, then.logits], 1)


@pytest.mark.parametrize(
    "dtype, allowed", [(torch.float32, 1e-5), (torch.float64, 1e-6)], ids=["float32", "float64"]
)
@kinds
def test_logits_match_source_with_and_without_cache(kind, dtype, allowed, tmp_path):
    theirs = save_checkpoint(kind, tmp_path / "theirs", dtype=dtype)
    ours = convert_and_load(tmp_path)
    assert ours.config.tie_word_embeddings == (kind not in UNTIED)
    target = torch.randint(3, SIZES["vocab_size"], (3, 9))
    for side in ("right", "left"):
        ids, mask = rows(side)
        (full, in_steps), (expected, expected_in_steps) = (
            logits(model, ids, mask, target) for model in (ours, theirs)
        )
        assert (
            relative_error(full, expected) < allowed
            and relative_error(in_steps, expected_in_steps) < allowed
        )


@kinds
def test_logits_are_exact_if_source_norms_run_in_float64(kind, tmp_path, monkeypatch):
    def in_float64(self, states):
        return (
            self.weight
            * states
            * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )

    theirs = save_checkpoint(kind, tmp_path / "theirs", dtype=torch.float64)
    monkeypatch.setattr(type(theirs.encoder.final_layer_norm), "forward", in_float64)
    ours = convert_and_load(tmp_path)
    for side in ("right", "left"):
        ids, mask = rows(side)
        with torch.no_grad():
            arguments = dict(attention_mask=mask, decoder_input_ids=torch.randint(3, 60, (3, 9)))
            assert (
                relative_error(ours(ids, **arguments).logits, theirs(ids, **arguments).logits)
                < 1e-12
            )


@pytest.mark.parametrize("act", ["relu", "gelu", "gated-gelu", "gated-silu", "gated-relu", "tanh"])
def test_activations_match_source(act, tmp_path):
    theirs = save_checkpoint("t5", tmp_path / "theirs", "Model", feed_forward_proj=act)
    ours = convert_and_load(tmp_path)
    assert ours.config.gated == act.startswith("gated")
    arguments = dict(
        zip(("input_ids", "attention_mask"), rows("right")),
        decoder_input_ids=torch.randint(3, 60, (3, 5)),
    )
    [got], [expected] = (compute_outputs(model, arguments).values() for model in (ours, theirs))
    assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("kind", ["t5", "byt5", "mt5"])
def test_generated_tokens_match_source(kind, beams, tmp_path):
    theirs = save_checkpoint(kind, tmp_path / "theirs")
    ours = convert_and_load(tmp_path)
    for side in ("right", "left"):
        ids, mask = rows(side)
        arguments = dict(
            attention_mask=mask,
            num_beams=beams,
            max_new_tokens=12,
            no_repeat_ngram_size=2,
            do_sample=False,
        )
        expected = theirs.generate(ids, **arguments)
        assert (
            ours.generate(ids, **arguments).tolist() == expected.tolist()
            and len(expected.unique()) > 4
        )


# ------------------------------------------------------------------------------ folded and unfolded


@pytest.mark.parametrize(
    "dtype, rounding",
    [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)],
    ids=["bfloat16", "float16"],
)
def test_folded_half_precision_weights_are_rounded_once(dtype, rounding, tmp_path):
    """The error is at most half of the last bit where the factor is no power of 2. All other
    weights keep their bits."""
    save_checkpoint("t5", tmp_path / "theirs", d_kv=10).to(dtype).save_pretrained(
        tmp_path / "theirs"
    )
    convert(tmp_path / "theirs", tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    folded = {"decoder.final_layer_norm.weight": 24**-0.5}
    folded |= {name: 10**0.5 for name in theirs if name.endswith("n.q.weight")}
    for step in plan_conversion(tmp_path / "theirs").steps:
        [name], [our_name] = step.reads, step.writes
        expected = theirs[name].double() * folded.get(name, 1)
        error = ((ours[our_name].double() - expected) / expected).abs().max().item()
        assert ours[our_name].dtype == dtype and (
            1e-6 < error <= rounding if name in folded else error == 0
        ), name
    assert len(folded) == 1 + 2 + 2 * 2


@pytest.mark.parametrize("kind", [*UNTIED, "t5", "mt5, tied"])
def test_round_trip_keeps_tied_or_untied_head(kind, tmp_path):
    theirs = save_checkpoint(kind, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to=theirs.config.model_type)
    there, back = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert there.keys() == back.keys() and ("lm_head.weight" in back) == (kind in UNTIED)
    content = json.loads((tmp_path / "back" / "config.json").read_text())
    assert content["tie_word_embeddings"] == (kind not in UNTIED)
    if theirs.config.model_type == "t5":
        assert AutoConfig.from_pretrained(tmp_path / "back").scale_decoder_outputs == (
            kind not in UNTIED
        )
    again = type(theirs).from_pretrained(tmp_path / "back").eval()
    ids, mask = rows("right")
    with torch.no_grad():
        arguments = dict(attention_mask=mask, decoder_input_ids=ids)
        assert (
            relative_error(again(ids, **arguments).logits, theirs(ids, **arguments).logits) < 1e-5
        )


def test_different_embeddings_cannot_be_converted_to_t5(tmp_path):
    save_checkpoint("v1.1", tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    edit_tensors(
        tmp_path / "ours",
        lambda tensors: tensors["model.decoder.embeddings.embed_tokens.weight"].add_(1),
    )
    with raises(ValueError, seen=2):
        convert(tmp_path / "ours", tmp_path / "back", to="t5")
    assert not (tmp_path / "back").exists()


# -------------------------------------------------------------------------------------------- files


def test_old_tensor_names_are_read(tmp_path):
    """Old files have one matrix under four names, and an unused position table for
    cross-attention."""
    theirs = save_checkpoint("t5", tmp_path / "theirs")
    table = "decoder.block.0.layer.{}.{}.relative_attention_bias.weight"
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")

    def change(tensors):
        tensors.update({name: tensors["shared.weight"].clone() for name in names})
        tensors[table.format(1, "EncDecAttention")] = tensors[table.format(0, "SelfAttention")] * 3

    edit_tensors(tmp_path / "theirs", change)
    ours = convert_and_load(tmp_path)
    ids, mask = rows("right")
    arguments = dict(attention_mask=mask, decoder_input_ids=ids)
    with torch.no_grad():
        assert ours.config.tie_word_embeddings
        assert relative_error(ours(ids, **arguments).logits, theirs(ids, **arguments).logits) < 1e-5


def test_separate_embeddings_of_stacks_are_rejected(tmp_path):
    save_checkpoint("t5", tmp_path / "theirs")
    other = {"encoder.embed_tokens.weight": torch.randn(60, 24)}
    edit_tensors(
        tmp_path / "theirs",
        lambda tensors: tensors.update({"lm_head.weight": torch.randn(60, 24)} | other),
    )
    with raises(ValueError, seen=("shared.weight", "encoder.embed_tokens.weight")):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_encoder_only_checkpoint_leaves_out_decoder_tensors(tmp_path):
    theirs = save_checkpoint("v1.1", tmp_path / "theirs", "EncoderModel")
    assert not theirs.config.is_encoder_decoder
    full = random_model("T5Model", theirs.config)
    halves = {
        name: tensor
        for name, tensor in full.state_dict().items()
        if name.startswith("decoder.block.0")
    }
    edit_tensors(tmp_path / "theirs", lambda tensors: tensors.update(halves))
    facts = convert(tmp_path / "theirs", tmp_path / "ours")
    assert facts["architecture"] == "VanillaEncoderModel" and set(facts["left_out"]) == set(halves)
    ours = vanilla_transformer.VanillaEncoderModel.from_pretrained(tmp_path / "ours").eval()
    for side in ("right", "left"):
        arguments = dict(zip(("input_ids", "attention_mask"), rows(side)))
        got, expected = (
            compute_outputs(model, arguments)["last_hidden_state"] for model in (ours, theirs)
        )
        assert relative_error(got, expected) < 1e-5


def test_start_token_is_read_from_generation_config_and_required(tmp_path):
    save_checkpoint("t5", tmp_path / "theirs")
    edit_json(tmp_path / "theirs" / "config.json", decoder_start_token_id=None)
    assert plan_conversion(tmp_path / "theirs").model.config.decoder_start_token_id == 0
    GenerationConfig(eos_token_id=1).save_pretrained(tmp_path / "theirs")
    with raises(ValueError, seen=("decoder_start_token_id", None), expected=0):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    edit_json(tmp_path / "theirs" / "config.json", architectures=["T5Model"])
    # the base model does not generate, so it needs no start token
    assert plan_conversion(tmp_path / "theirs").model.config.decoder_start_token_id is None


@pytest.mark.parametrize(
    "changes, seen, expected",
    [
        (dict(is_decoder=True), ("is_decoder", True), False),
        (dict(is_encoder_decoder=False), ("is_encoder_decoder", False), True),
        (dict(dense_act_fn="nothing"), ("hidden_act", "nothing"), ()),
        (dict(relative_attention_num_buckets=7), ("relative_attention_num_buckets", 7), 4),
        (dict(d_kv=8), ("self_attn.q_proj.weight", 24), 24),
    ],
)
def test_invalid_config_is_rejected(changes, seen, expected, tmp_path):
    save_checkpoint("t5", tmp_path / "theirs")
    edit_json(tmp_path / "theirs" / "config.json", **changes)
    with raises(ValueError, seen=seen, expected=expected):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_info_describes_converted_model(tmp_path):
    theirs = save_checkpoint("v1.1", tmp_path / "theirs")
    facts = read_json("info", tmp_path / "theirs", "--json")
    ours = convert_and_load(tmp_path)
    assert facts["total_parameters"] == sum(parameter.numel() for parameter in ours.parameters())
    # one embedding matrix per stack
    assert facts["total_parameters"] == theirs.num_parameters() + theirs.shared.weight.numel()
    assert read_json("info", tmp_path / "ours", "--json")["flops"] == facts["flops"]


# ------------------------------------------------------------------------------------------ targets


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A source model whose rows end at different steps, and the directory of the source and
    converted checkpoints."""
    directory = tmp_path_factory.mktemp("t5")
    theirs = save_checkpoint("byt5", directory / "theirs")
    convert(directory / "theirs", directory / "ours")
    return theirs, directory


@pytest.mark.slow
@pytest.mark.parametrize("target, dtype", [("cpu", "fp32"), ("portable", "fp32"), ("cuda", "fp32")])
def test_exports_generate_same_tokens_as_source(pair, target, dtype, tmp_path):
    theirs, directory = pair
    export(directory / "ours", tmp_path / "out", target=target, dtype=dtype, cases=6)
    runtime = Runtime(tmp_path / "out", device="cpu")
    for side in ("right", "left"):
        ids, mask = rows(side)
        for settings in (
            dict(num_beams=1),
            dict(num_beams=3, length_penalty=0.7),
            dict(num_beams=4, num_return_sequences=2),
        ):
            settings |= dict(max_new_tokens=14, no_repeat_ngram_size=2)
            expected = theirs.generate(
                ids, attention_mask=mask, do_sample=False, **settings
            ).numpy()
            np.testing.assert_array_equal(
                runtime.generate(ids.numpy(), mask.numpy(), **settings), expected
            )


@pytest.mark.slow
@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_int8_exports_generate_nearly_same_tokens(pair, target, tmp_path):
    manifest = export(pair[1] / "ours", tmp_path / "out", target=target, dtype="int8", cases=6)
    assert default_parity(manifest)["agreeing_tokens"] > 0.8 * default_parity(manifest)["tokens"]
    assert (
        Runtime(tmp_path / "out").generate(rows("right")[0].numpy(), max_new_tokens=5).shape[0] == 3
    )


def test_weights_beyond_float16_range_use_bfloat16_activations(tmp_path):
    """Transformers keeps `wo` in float32 and clamps the residual stream in float16."""
    save_checkpoint("v1.1", tmp_path / "theirs")
    edit_tensors(
        tmp_path / "theirs",
        lambda t: t["encoder.block.1.layer.1.DenseReluDense.wo.weight"].mul_(1e6),
    )
    ours = convert_and_load(tmp_path)
    cuda = get_target("cuda")
    assert cuda.activations(ours, None) == cuda.activations(ours, "int8") == "bf16"
    with raises(ValueError, seen=("encoder.layers.1.feed_forward.down_proj", "float16", 65504)):
        cuda.activations(ours, "fp16")
