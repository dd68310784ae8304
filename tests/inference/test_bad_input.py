"""Tests of errors: ids, masks and calls that a model does not accept."""

import numpy as np
import pytest
from checkpoints import START, VOCABULARY, copy_of, edit_json, seal
from random_prompts import in_torch, prompts

from vanilla_transformer_export import Runtime

IDS, MASK = prompts()


@pytest.mark.parametrize(
    "ids, mask, options, message",
    [
        (np.zeros((0, 4), np.int64), None, {}, r"\(0, 4\)"),
        (np.zeros((2, 0), np.int64), None, {}, r"\(2, 0\)"),
        (np.ones(4, np.int64), None, {}, r"\(4,\)"),
        (np.ones((1, 2, 3), np.int64), None, {}, r"\(1, 2, 3\)"),
        ([], None, {}, r"\(0,\)"),
        (IDS.astype(np.float32), MASK, {}, "float32"),
        (IDS == 4, MASK, {}, "bool"),
        (IDS - 5, MASK, {}, r"\[0, 47\].* got -5 to"),
        (np.full((1, 3), 48), None, {}, r"\[0, 47\].* got 48 to 48"),
        (IDS, MASK[:, :-1], {}, r"shape \(6, 9\), got shape \(6, 8\)"),
        (IDS, MASK[0], {}, r"shape \(6, 9\), got shape \(9,\)"),
        (IDS, MASK * 2, {}, "0s and 1s"),
        (IDS, MASK * 0.5, {}, "0s and 1s"),
        (IDS, MASK * np.array([[1], [1], [0], [1], [1], [1]]), {}, "row 2 has no tokens"),
        (IDS, MASK, dict(typical_p=0.5), r"\['typical_p'\], expected some of .*num_beams"),
        (IDS, MASK, dict(eos_token_ids=(3,)), "eos_token_ids"),
        (
            IDS,
            MASK,
            dict(num_beams=0),
            r"num_beams must be a whole number from 1 to 2\*\*63 - 1, got 0",
        ),
        (
            IDS,
            MASK,
            dict(max_new_tokens=0),
            r"max_new_tokens must be a whole number from 1 to 2\*\*63 - 1, got 0",
        ),
        (IDS, MASK, dict(max_new_tokens=-3), "got -3"),
        (
            IDS,
            MASK,
            dict(num_beams=49),
            "num_beams 49 and 1 end tokens are too many for a vocabulary of 48",
        ),
        (
            IDS,
            MASK,
            dict(num_beams=2, eos_token_id=list(range(48))),
            "num_beams 2 and 48 end tokens are too many",
        ),
    ],
)
@pytest.mark.parametrize("name", ["seq2seq", "causal"])
def test_bad_input_is_refused_with_the_value_seen(runtimes, name, ids, mask, options, message):
    with pytest.raises(ValueError, match=message):
        runtimes(name).generate(ids, mask, **options)


def test_a_mask_of_other_numbers_is_refused_with_the_number_seen(runtimes):
    mask = MASK.copy()
    mask[0, 0] = 2
    with pytest.raises(ValueError, match="0s and 1s.* 2"):
        runtimes("encoder").encode(IDS, mask)


@pytest.mark.parametrize(
    "mask, found",
    [(IDS.astype(str), "<U"), (np.full(IDS.shape, None), "object"), (IDS * 1j, "complex128")],
)
def test_a_mask_that_is_no_numbers_is_refused_with_its_type(runtimes, mask, found):
    with pytest.raises(ValueError, match=f"attention_mask must be 0s and 1s, got {found}"):
        runtimes("encoder").encode(IDS, mask)


@pytest.mark.parametrize("types", [IDS * 0.5, IDS.astype(str)])
def test_token_types_that_are_no_integers_are_refused(runtimes, types):
    with pytest.raises(ValueError, match="token_type_ids must be integers, got"):
        runtimes("pretraining").outputs(IDS, MASK, types)


@pytest.mark.parametrize(
    "ids, message", [(np.zeros((0, 4), np.int64), r"\(0, 4\)"), (np.full((1, 1), 48), "got 48")]
)
def test_encode_refuses_bad_input_too(runtimes, ids, message):
    with pytest.raises(ValueError, match=message):
        runtimes("encoder").encode(ids)


def test_a_learned_position_table_has_an_end(runtimes):
    """Its 40 rows: 40 tokens are encoded; 30 tokens of a prompt and 11 new ones are fed but for the
    last."""
    row = np.full((1, 41), 5)
    assert runtimes("masked-lm").encode(row[:, :40]).shape == (1, 40, VOCABULARY)
    with pytest.raises(ValueError, match="41 tokens.* 40 learned"):
        runtimes("masked-lm").encode(row)
    runtimes("causal-learned").generate(row[:, :30], max_new_tokens=11)
    with pytest.raises(ValueError, match="40 learned"):
        runtimes("causal-learned").generate(row[:, :30], max_new_tokens=12)


def test_the_padding_of_a_prompt_takes_no_learned_positions(runtimes):
    ids, mask = np.full((1, 50), 5), np.zeros((1, 50), np.int64)
    mask[0, :3] = 1
    found = runtimes("causal-learned").generate(ids, mask, max_new_tokens=4)[0, 50:]
    alone = runtimes("causal-learned").generate(ids[:, :3], max_new_tokens=4)[0, 3:]
    np.testing.assert_array_equal(found, alone)


def test_sinusoidal_positions_have_no_end(exported, runtimes):
    ids, mask = prompts((200, 150))
    found = runtimes("seq2seq").generate(ids, mask, max_new_tokens=2)
    np.testing.assert_array_equal(found, in_torch(exported, "seq2seq", ids, mask, max_new_tokens=2))


def test_a_model_is_asked_only_for_what_it_can_do(runtimes):
    with pytest.raises(ValueError, match="VanillaDecoderForCausalLM has no encoder"):
        runtimes("causal").encode(IDS, MASK)
    with pytest.raises(ValueError, match="VanillaEncoderForMaskedLM cannot generate"):
        runtimes("masked-lm").generate(IDS, MASK)


def test_a_missing_start_token_is_an_error(exported, tmp_path):
    directory = copy_of(exported("seq2seq").directory, tmp_path)
    for file in ("config.json", "generation_config.json"):
        edit_json(directory / file, decoder_start_token_id=None)
    seal(directory)
    with pytest.raises(ValueError, match="decoder_start_token_id is None"):
        Runtime(directory).generate(IDS, MASK)


def test_generation_begins_with_the_start_token(runtimes):
    assert runtimes("seq2seq").generate(IDS, MASK, max_new_tokens=1)[:, 0].tolist() == [
        START
    ] * len(IDS)
