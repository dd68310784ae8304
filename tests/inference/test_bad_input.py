"""Tests of invalid ids, masks and calls."""

import numpy as np
import pytest
from checkpoints import START, VOCABULARY, copy_folder, edit_json, seal
from messages import raises
from random_prompts import in_torch, prompts

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.errors import UsageError

IDS, MASK = prompts()


@pytest.mark.parametrize(
    "ids, mask, options, seen, expected",
    [
        (np.zeros((0, 4), np.int64), None, {}, (0, 4), ()),
        (np.zeros((2, 0), np.int64), None, {}, (2, 0), ()),
        (np.ones(4, np.int64), None, {}, 4, ()),
        (np.ones((1, 2, 3), np.int64), None, {}, (1, 2, 3), ()),
        ([], None, {}, 0, ()),
        (IDS.astype(np.float32), MASK, {}, "float32", ()),
        (IDS == 4, MASK, {}, "bool", ()),
        (IDS - 5, MASK, {}, -5, (0, 47)),
        (np.full((1, 3), 48), None, {}, 48, (0, 47)),
        (IDS, MASK[:, :-1], {}, (6, 8), (6, 9)),
        (IDS, MASK[0], {}, 9, (6, 9)),
        ([[5, 6], [7]], None, {}, ("input_ids", "[[5, 6], [7]]"), "one length"),
        (IDS, [[1], [1, 1]], {}, "attention_mask", "one length"),
        (IDS, MASK, dict(do_sample=True, seed=3, seeds=[0] * 6), ("seed", 3), "seeds"),
        (IDS, MASK * 2, {}, "0s", "1s"),
        (IDS, MASK * 0.5, {}, "0s", "1s"),
        (IDS, MASK * np.array([[1], [1], [0], [1], [1], [1]]), {}, 2, ()),
        (IDS, MASK, dict(typical_p=0.5), "typical_p", "num_beams"),
        (IDS, MASK, dict(eos_token_ids=(3,)), "eos_token_ids", ()),
        (IDS, MASK, dict(num_beams=0), ("num_beams", 0), (1, "2**63")),
        (IDS, MASK, dict(max_new_tokens=0), ("max_new_tokens", 0), (1, "2**63")),
        (IDS, MASK, dict(max_new_tokens=-3), -3, ()),
        (IDS, MASK, dict(decoder_start_token_id=-1), -1, (0, 47)),
        (IDS, MASK, dict(decoder_start_token_id=48), 48, (0, 47)),
        (IDS, MASK, dict(num_beams=49), ("num_beams", 49, 1, 48), ()),
        (IDS, MASK, dict(num_beams=2, eos_token_id=list(range(48))), ("num_beams", 2, 48), ()),
    ],
)
@pytest.mark.parametrize("name", ["seq2seq", "causal"])
def test_invalid_generate_input_error_names_value(
    runtimes, name, ids, mask, options, seen, expected
):
    with raises(ValueError, seen=seen, expected=expected):
        runtimes(name).generate(ids, mask, **options)


def test_arrays_of_several_lengths_and_other_arenas_are_rejected(runtimes):
    ragged = [[5, 6], [7]]
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        inputs = {"input_ids": IDS, name: ragged}
        with raises(ValueError, seen=(name, str(ragged)), expected="one length"):
            runtimes("encoder").outputs(**inputs)
    with raises(ValueError, seen="decoder_input_ids", expected="one length"):
        runtimes("seq2seq").generate(IDS, MASK, decoder_input_ids=ragged)
    with raises(UsageError, seen=("arena", "'x'"), expected=("True", "False")):
        Runtime(runtimes("encoder").info.directory, arena="x")


def test_mask_with_other_numbers_error_names_number(runtimes):
    mask = MASK.copy()
    mask[0, 0] = 2
    with raises(ValueError, seen=2, expected=("0s", "1s")):
        runtimes("encoder").encode(IDS, mask)


@pytest.mark.parametrize(
    "mask, found",
    [(IDS.astype(str), "<U21"), (np.full(IDS.shape, None), "object"), (IDS * 1j, "complex128")],
)
def test_non_numeric_mask_error_names_dtype(runtimes, mask, found):
    with raises(ValueError, seen=("attention_mask", found), expected=("0s", "1s")):
        runtimes("encoder").encode(IDS, mask)


@pytest.mark.parametrize("types", [IDS * 0.5, IDS.astype(str)])
def test_non_integer_token_type_ids_are_rejected(runtimes, types):
    with raises(ValueError, seen="token_type_ids"):
        runtimes("pretraining").outputs(IDS, MASK, types)


@pytest.mark.parametrize(
    "ids, seen", [(np.zeros((0, 4), np.int64), (0, 4)), (np.full((1, 1), 48), 48)]
)
def test_encode_rejects_invalid_ids(runtimes, ids, seen):
    with raises(ValueError, seen=seen):
        runtimes("encoder").encode(ids)


def test_input_longer_than_learned_positions_is_rejected(runtimes):
    """Both models have 40 positions. A prompt of 30 tokens leaves room for 11 new tokens, because
    the last token is not read."""
    row = np.full((1, 41), 5)
    assert runtimes("masked-lm").encode(row[:, :40]).shape == (1, 40, VOCABULARY)
    with raises(ValueError, seen=41, expected=40):
        runtimes("masked-lm").encode(row)
    runtimes("causal-learned").generate(row[:, :30], max_new_tokens=11)
    with raises(ValueError, seen=41, expected=40):
        runtimes("causal-learned").generate(row[:, :30], max_new_tokens=12)


def test_prompt_padding_takes_no_learned_positions(runtimes):
    ids, mask = np.full((1, 50), 5), np.zeros((1, 50), np.int64)
    mask[0, :3] = 1
    result = runtimes("causal-learned").generate(ids, mask, max_new_tokens=4)[0, 50:]
    alone = runtimes("causal-learned").generate(ids[:, :3], max_new_tokens=4)[0, 3:]
    np.testing.assert_array_equal(result, alone)


def test_long_input_with_sinusoidal_positions_matches_torch(exported, runtimes):
    ids, mask = prompts((200, 150))
    result = runtimes("seq2seq").generate(ids, mask, max_new_tokens=2)
    np.testing.assert_array_equal(
        result, in_torch(exported, "seq2seq", ids, mask, max_new_tokens=2)
    )


def test_unsupported_method_error_names_model_class(runtimes):
    with raises(ValueError, seen="VanillaDecoderForCausalLM"):
        runtimes("causal").encode(IDS, MASK)
    with raises(ValueError, seen="VanillaEncoderForMaskedLM"):
        runtimes("masked-lm").generate(IDS, MASK)


def test_missing_decoder_start_token_raises(exported, tmp_path):
    directory = copy_folder(exported("seq2seq").directory, tmp_path)
    for file in ("config.json", "generation_config.json"):
        edit_json(directory / file, decoder_start_token_id=None)
    seal(directory)
    with raises(ValueError, seen=("decoder_start_token_id", None)):
        Runtime(directory).generate(IDS, MASK)


def test_generation_begins_with_the_start_token(runtimes):
    assert runtimes("seq2seq").generate(IDS, MASK, max_new_tokens=1)[:, 0].tolist() == [
        START
    ] * len(IDS)
