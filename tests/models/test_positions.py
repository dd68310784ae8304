"""Tests of OPT and RoBERTa positions against transformers, with rows padded on any side."""

import numpy as np
import pytest
import torch
from checkpoints import copy_folder, edit_json, perturbed, seal
from families import assert_exact, converted, random_config, random_model
from messages import raises
from models import build

from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaDecoderModel,
    VanillaEncoderConfig,
    VanillaEncoderModel,
    VanillaSeq2SeqConfig,
    VanillaSeq2SeqModel,
)
from vanilla_transformer.conversion import convert
from vanilla_transformer_export import Runtime, export

MODELS = [
    ("opt", "OPTModel"),
    ("opt", "OPTForCausalLM"),
    ("opt", "OPTForSequenceClassification"),
    ("roberta", "RobertaModel"),
    ("roberta", "RobertaForMaskedLM"),
    ("roberta", "RobertaForSequenceClassification"),
    ("roberta", "RobertaForTokenClassification"),
]
WIDTH = 9
models = pytest.mark.parametrize("family, architecture", MODELS)
sides = pytest.mark.parametrize("side", ["left", "right", "both"])


def source(family, architecture, dtype=torch.float32, **changes):
    config = random_config(family, architecture, 0)
    config.update(changes)
    return random_model(architecture, config, dtype)


def padded(config, side, rows=4):
    """Return random token ids (B, S) and their mask (B, S).

    Rows have random padding on `side` and at least one token.
    """
    ids, mask = (
        torch.randint(3, config.vocab_size, (rows, WIDTH)),
        torch.ones(rows, WIDTH, dtype=torch.long),
    )
    for row in mask:
        left, right = torch.randint(0, 5, (2,)).tolist()
        row[: left if side != "right" else 0] = 0
        row[WIDTH - right if side != "left" else WIDTH :] = 0
    assert 0 < mask.sum() < mask.numel()
    return ids.masked_fill(mask == 0, config.pad_token_id), mask


def states(outputs):
    return outputs[0] if "last_hidden_state" in outputs else outputs.logits


def assert_same(actual, expected, mask, dtype=torch.float32):
    """Check that states of real tokens are equal, or whole rows where there is no mask."""
    real = mask.bool() if mask is not None and expected.ndim == 3 else slice(None)
    assert_exact(actual[real], expected[real], dtype)


# ----------------------------------------------------------------------------------------- in torch


@torch.no_grad()
@sides
@models
def test_padded_rows_match_transformers_with_and_without_mask(family, architecture, side, tmp_path):
    theirs = source(family, architecture, torch.float64)
    ours = converted(theirs, tmp_path, torch.float64)
    ids, mask = padded(theirs.config, side)
    assert_same(
        states(ours(ids, mask)), states(theirs(ids, attention_mask=mask)), mask, torch.float64
    )
    assert_same(states(ours(ids)), states(theirs(ids)), None, torch.float64)


@torch.no_grad()
@sides
@models
def test_inputs_embeds_match_transformers(family, architecture, side, tmp_path):
    theirs = source(family, architecture)
    ours = converted(theirs, tmp_path)
    ids, mask = padded(theirs.config, side)
    # OPT finds the last token by the padding id, which embeddings do not show.
    if "SequenceClassification" in architecture and family == "opt":
        ids, mask = ids[:, :5], None
    embeds = theirs.get_input_embeddings()(ids)
    expected = theirs(inputs_embeds=embeds, attention_mask=mask)
    assert_same(states(ours(inputs_embeds=embeds, attention_mask=mask)), states(expected), mask)


@torch.no_grad()
@models
def test_explicit_position_ids_match_transformers(family, architecture, tmp_path):
    """Our positions begin at 0, those of RoBERTa after the padding id."""
    theirs = source(family, architecture)
    ours = converted(theirs, tmp_path)
    ids, mask = padded(theirs.config, "right")
    positions = torch.stack([torch.randperm(WIDTH) for _ in ids]) + 3
    first = theirs.config.pad_token_id + 1 if family == "roberta" else 0
    expected = states(theirs(ids, attention_mask=mask, position_ids=positions + first))
    assert_same(states(ours(ids, mask, position_ids=positions)), expected, mask)
    assert not torch.allclose(states(ours(ids, mask)), expected, atol=1e-3)


@torch.no_grad()
@sides
@pytest.mark.parametrize("architecture", ["OPTModel", "OPTForCausalLM"])
def test_positions_after_cache_match_transformers(architecture, side, tmp_path):
    theirs = source("opt", architecture, torch.float64)
    ours = converted(theirs, tmp_path, torch.float64)
    ids, mask = padded(theirs.config, side)
    for kwargs in (dict(attention_mask=mask), {}):
        caches = [
            model(ids[:, :4], **{n: m[:, :4] for n, m in kwargs.items()}).past_key_values
            for model in (ours, theirs)
        ]
        actual, expected = (
            model(ids[:, 4:], past_key_values=cache, **kwargs)
            for model, cache in zip((ours, theirs), caches)
        )
        # A query that sees no token at all has no defined output.
        seen = mask[:, 4:] if kwargs else None
        assert_same(states(actual), states(expected), seen, torch.float64)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("settings", [dict(), dict(num_beams=3)], ids=["greedy", "beams"])
def test_generation_from_left_padded_prompts_matches_transformers(settings, use_cache, tmp_path):
    theirs = source("opt", "OPTForCausalLM", eos_token_id=2)
    ours = converted(theirs, tmp_path)
    ids, mask = padded(theirs.config, "left")
    fields = dict(
        max_new_tokens=8, do_sample=False, no_repeat_ngram_size=2, use_cache=use_cache, **settings
    )
    expected = theirs.generate(ids, attention_mask=mask, **fields)
    assert len(expected.unique()) > 4, "a model that repeats itself proves little"
    assert ours.generate(ids, attention_mask=mask, **fields).tolist() == expected.tolist()


@torch.no_grad()
@pytest.mark.parametrize(
    "model_class", [VanillaEncoderModel, VanillaDecoderModel, VanillaSeq2SeqModel]
)
@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "rotary"])
@pytest.mark.parametrize("counts", ["mask", "ids"])
def test_padded_row_matches_single_row_in_every_stack(model_class, kind, counts):
    model = build(
        model_class,
        position_embedding_type=kind,
        position_ids_from=counts,
        max_position_embeddings=6,
    )
    ids, mask = (
        torch.tensor([[0, 0, 0, 5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 0, 0, 0]]),
        torch.ones(2, 8, dtype=torch.long),
    )
    mask[ids == 0] = 0
    row = ids[1:, :5]
    kwargs = [dict(input_ids=ids, attention_mask=mask), dict(input_ids=row)]
    if model_class is VanillaSeq2SeqModel:
        kwargs[0] |= dict(decoder_input_ids=ids, decoder_attention_mask=mask)
        kwargs[1] |= dict(decoder_input_ids=row)
    padded, alone = (model(**tensors).last_hidden_state for tensors in kwargs)
    torch.testing.assert_close(
        padded[mask.bool()].view(2, 5, -1), alone.expand(2, -1, -1), atol=1e-5, rtol=1e-5
    )


def test_padding_does_not_count_toward_max_position_embeddings():
    model = build(
        VanillaEncoderModel,
        position_embedding_type="learned",
        position_ids_from="ids",
        max_position_embeddings=6,
    )
    assert model.embeddings.embed_positions.num_embeddings == 7
    assert model(torch.tensor([[5] * 6 + [0] * 4])).last_hidden_state.isfinite().all()
    with raises(ValueError, seen=(6, "max_position_embeddings")):
        model(torch.tensor([[5] * 7]))


# ----------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    "config_class", [VanillaEncoderConfig, VanillaDecoderConfig, VanillaSeq2SeqConfig]
)
def test_position_ids_from_defaults_to_place_in_new_and_old_configs(config_class):
    old = config_class().to_dict()
    assert old.pop("position_ids_from") == "place"
    assert config_class.from_dict(old).position_ids_from == "place"


def test_position_ids_from_ids_requires_pad_token_id():
    with raises(ValueError, seen=("position_ids_from", None), expected=("ids", "pad_token_id")):
        VanillaEncoderConfig(position_ids_from="ids", pad_token_id=None)


@pytest.mark.parametrize(
    "to, architecture, fields",
    [
        ("bert", "VanillaEncoderModel", dict(embedding_norm=True, scale_embedding=False)),
        ("gpt2", "VanillaDecoderModel", dict(norm_first=True, scale_embedding=False)),
        ("bart", "VanillaSeq2SeqModel", dict(embedding_norm=True)),
        ("marian", "VanillaSeq2SeqModel", dict(position_embedding_type="sinusoidal")),
    ],
)
@pytest.mark.parametrize("counts", ["mask", "ids"])
def test_convert_rejects_position_ids_from_that_family_does_not_support(
    to, architecture, fields, counts, tmp_path
):
    sizes = dict(vocab_size=20, hidden_size=16, intermediate_size=20, num_attention_heads=2)
    fields = dict(position_embedding_type="learned") | fields
    perturbed(architecture, sizes | fields | dict(position_ids_from=counts)).save_pretrained(
        tmp_path / "ours"
    )
    with raises(ValueError, seen=("position_ids_from", counts), expected="place"):
        convert(tmp_path / "ours", tmp_path / "theirs", to=to)
    assert not (tmp_path / "theirs").exists()


# ------------------------------------------------------------------------------------------ exports


def exported(theirs, tmp_path, target, **options):
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "export", target=target, cases=6, **options)
    return Runtime(tmp_path / "export", device="cpu")


SLOW_TARGETS = [("portable", {}), ("cuda", dict(dtype="fp32"))]
TARGETS = pytest.mark.parametrize(
    "target, options",
    [("cpu", {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_TARGETS)],
)


@torch.no_grad()
@TARGETS
@pytest.mark.parametrize(
    "family, architecture", [("roberta", "RobertaModel"), ("opt", "OPTForSequenceClassification")]
)
def test_exports_match_transformers(family, architecture, target, options, tmp_path):
    theirs = source(family, architecture)
    runtime = exported(theirs, tmp_path, target, **options)
    assert {"position_ids", "positions"}.isdisjoint(
        tensor.name for tensor in runtime.specs["encoder"].inputs
    )
    for side in ("left", "right", "both"):
        ids, mask = padded(theirs.config, side, rows=8)
        expected = states(theirs(ids, attention_mask=mask))
        assert_same(torch.from_numpy(runtime.encode(ids.numpy(), mask.numpy())), expected, mask)
        actual = torch.from_numpy(runtime.encode(ids.numpy()))
        # OPT's classifier finds the last token by its id, ours by the mask
        if family == "roberta" or side == "left":
            assert_same(actual, states(theirs(ids)), None)


@TARGETS
@pytest.mark.parametrize("beams", [1, 3])
def test_exported_generation_from_left_padded_prompts_matches_transformers(
    beams, target, options, tmp_path
):
    theirs = source(
        "opt",
        "OPTForCausalLM",
        hidden_size=24,
        num_attention_heads=3,
        word_embed_proj_dim=24,
        eos_token_id=2,
    )
    runtime = exported(theirs, tmp_path, target, **options)
    ids, mask = padded(theirs.config, "left")
    fields = dict(max_new_tokens=8, do_sample=False, no_repeat_ngram_size=2, num_beams=beams)
    expected = theirs.generate(ids, attention_mask=mask, **fields)
    assert len(expected.unique()) > 4, "a model that repeats itself proves little"
    assert runtime.generate(ids.numpy(), mask.numpy(), **fields).tolist() == expected.tolist()


@torch.no_grad()
@pytest.mark.parametrize(
    "target, counts",
    [
        ("cpu", "ids"),
        pytest.param("cpu", "mask", marks=pytest.mark.slow),
        pytest.param("portable", "ids", marks=pytest.mark.slow),
        pytest.param("portable", "mask", marks=pytest.mark.slow),
    ],
)
def test_exported_seq2seq_encoder_does_not_count_padding(counts, target, tmp_path):
    fields = dict(
        vocab_size=48, hidden_size=32, intermediate_size=40, num_attention_heads=4, encoder_layers=1
    )
    fields |= dict(decoder_layers=1, position_ids_from=counts, eos_token_id=None)
    model = perturbed("VanillaSeq2SeqForConditionalGeneration", fields, scale=0.4)
    model.save_pretrained(tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "export", target=target, cases=6)
    ids, mask = (
        torch.tensor([[0, 0, 7, 8, 9], [5, 6, 7, 8, 9]]),
        torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
    )
    fields = dict(max_new_tokens=6, no_repeat_ngram_size=1)
    expected = model.generate(ids, attention_mask=mask, **fields).tolist()
    assert expected[0] == model.generate(ids[:1, 2:], **fields)[0].tolist() != expected[1]
    assert (
        Runtime(tmp_path / "export").generate(ids.numpy(), mask.numpy(), **fields).tolist()
        == expected
    )


def test_runtime_rejects_too_many_tokens_and_unknown_position_ids_from(tmp_path):
    model = perturbed(
        "VanillaEncoderModel",
        dict(
            vocab_size=20, hidden_size=16, intermediate_size=20, num_attention_heads=2,
            num_hidden_layers=1, position_embedding_type="learned", position_ids_from="ids",
            max_position_embeddings=8
        ),
    )  # fmt: skip
    model.save_pretrained(tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "export", cases=3)
    runtime, ids = Runtime(tmp_path / "export"), np.array([[5] * 8 + [0] * 4])
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).last_hidden_state
    np.testing.assert_allclose(runtime.encode(ids), expected, atol=1e-5)
    with raises(ValueError, seen=(9, "learned"), expected=8):
        runtime.encode(np.array([[5] * 9]))
    directory = copy_folder(tmp_path / "export", tmp_path)
    edit_json(directory / "config.json", position_ids_from="places")
    seal(directory)
    with raises(
        ValueError, seen=("position_ids_from", "places"), expected=("place", "mask", "ids")
    ):
        Runtime(directory)
