"""Tests of conversion to other families: outputs match, and a round trip keeps every tensor."""

import pytest
import torch
import transformers
from families import (
    BACK,
    RIGHT,
    SEEDS,
    assert_exact,
    cases,
    compute_outputs,
    every_class_once,
    make_arguments,
    random_config,
    random_model,
)
from models_of_families import HEAD, converted_back, our_model
from safetensors.torch import load_file

from vanilla_transformer.conversion import FAMILIES, convert

# Number of rows of the position table that no token reads.
UNREAD_ROWS = {
    "bart": 2,
    "mbart": 2,
    "opt": 1,
    "roberta": 1,
    "mpnet": 1,
}
OURS = {family: names.values() for family, names in BACK.items()}


@every_class_once(OURS)
def test_checkpoint_converted_back_gives_same_outputs(family, architecture, dtype, seed, tmp_path):
    ours = our_model(family, architecture, seed, dtype)
    theirs = converted_back(ours, family, tmp_path)
    assert theirs.dtype == dtype
    inputs = make_arguments(ours)
    got, expected = compute_outputs(theirs, inputs), compute_outputs(ours, inputs)
    if family in ("marian", "pegasus") and architecture == "VanillaSeq2SeqModel":
        got["last_hidden_state"] = got["last_hidden_state"].unflatten(-1, (2, -1)).mT.flatten(-2)
    assert got.keys() == expected.keys() and got
    for name in got:
        assert_exact(got[name], expected[name], dtype, family)


@pytest.mark.parametrize(
    "family", ["gpt2", "opt", "qwen3", "bart", "mbart", "marian", "m2m_100", "pegasus", "t5"]
)
def test_model_converted_back_generates_same_tokens(family, tmp_path):
    architecture = HEAD[family]
    ours = our_model(family, architecture, 0, eos_token_id=2)
    ours.generation_config.update(
        max_new_tokens=12,
        do_sample=False,
        no_repeat_ngram_size=1,
        min_new_tokens=6,
        pad_token_id=0,
    )
    theirs = converted_back(ours, family, tmp_path)
    inputs = dict(input_ids=make_arguments(ours)["input_ids"], attention_mask=RIGHT)
    if family in ("gpt2", "opt", "qwen3"):
        inputs = {name: tensor.flip(1) for name, tensor in inputs.items()}
    for beams in (1, 4):
        expected = ours.generate(**inputs, num_beams=beams)
        assert len(expected.unique()) > 4, "a model that repeats itself proves little"
        assert theirs.generate(**inputs, num_beams=beams).tolist() == expected.tolist()


def read_tensors(path, architecture):
    """Return {name: tensor} of a checkpoint, by the names in its file.

    NomicBERT and GTE have two kinds of names in files; theirs are those in the class
    `architecture`.
    """
    if architecture.startswith(("NomicBert", "Gte")):
        return getattr(transformers, architecture).from_pretrained(path).state_dict()
    return load_file(path / "model.safetensors")


@SEEDS
@pytest.mark.parametrize("family, architecture", cases(BACK))
def test_round_trip_keeps_every_tensor(family, architecture, seed, tmp_path):
    config = random_config(family, architecture, seed)
    plain = dict(
        scale_decoder_outputs=True,  # as in T5 with a tied head
        qkv_bias=True,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        share_encoder_decoder_embeddings=True,
        query_pre_attn_scalar=getattr(config, "head_dim", None),
        norm_bias=True,
        classifier_bias=True,
    )
    config.update({name: value for name, value in plain.items() if hasattr(config, name)})
    if FAMILIES[family].variant == "seq2seq":
        config.update({"classifier_dropout": 0.0})
    random_model(architecture, config).save_pretrained(tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to=family)
    there, back = (read_tensors(tmp_path / name, architecture) for name in ("there", "back"))
    unread = {"model.shared.weight", "shared.weight", "cls.predictions.bias", "lm_head.bias"}
    unread.add("predictions.bias")  # of ALBERT
    unread = set() if getattr(config, "tie_word_embeddings", True) else unread
    unsaved = (
        {name for name in back if "embed_positions" in name}
        if architecture == "MarianMTModel"
        else set()
    )
    assert there.keys() == back.keys() - unsaved
    for name in there.keys() - unread:
        offset = (
            UNREAD_ROWS.get(FAMILIES[family].like or family, 0)
            if "embed_positions" in name or "position_embeddings" in name
            else 0
        )
        # the scale is not a power of 2
        is_scaled = family == "t5" and name == "decoder.final_layer_norm.weight"
        is_scaled |= family == "deberta-v2" and "query_proj" in name
        if is_scaled or (family == "gemma3_text" and "norm" in name):
            torch.testing.assert_close(there[name], back[name], rtol=1e-6, atol=0)
        else:
            assert torch.equal(there[name][offset:], back[name][offset:]), name
