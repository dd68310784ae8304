"""The runtime gives what torch and `transformers.generate` give, without them."""

import itertools
import json
import re
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from checkpoints import EOS, PAD, START, VOCABULARY, copy_folder, edit_json, seal

from vanilla_transformer_export import Options, Runtime
from vanilla_transformer_export.inference import devices
from vanilla_transformer_export.inference.inputs import move_padding
from vanilla_transformer_export.inference.search import BeamSearch, TokenSearch
from vanilla_transformer_export.model import open_export
from vanilla_transformer_export.requests import generation_request

GENERATORS = ("seq2seq", "seq2seq-untied", "causal", "causal-learned")
LENGTHS = (7, 1, 4, 9, 2, 9)
every_generator = pytest.mark.parametrize("name", GENERATORS)


@pytest.fixture(scope="module")
def runtimes(exported):
    """name -> its Runtime, loaded once."""
    loaded = {}

    def load(name):
        if name not in loaded:
            loaded[name] = Runtime(exported(name).directory)
        return loaded[name]

    return load


def prompts(lengths=LENGTHS, side="right", seed=0, pad=PAD):
    """Random ordinary tokens, ids and mask (B, S), padded on `side`."""
    rng, longest = np.random.default_rng(seed), max(lengths)
    ids, mask = np.full((len(lengths), longest), pad), np.zeros((len(lengths), longest), np.int64)
    for row, length in enumerate(lengths):
        real = slice(0, length) if side == "right" else slice(longest - length, longest)
        ids[row, real], mask[row, real] = rng.integers(4, VOCABULARY, length), 1
    return ids, mask


@torch.no_grad()
def in_torch(exported, name, ids, mask, **options):
    model = exported(name).model
    return model.generate(
        torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **options
    ).numpy()


def prompts_for(exported, name, **kwargs):
    """transformers reads a decoder's prompts padded on the left only."""
    side = "right" if name.startswith("seq2seq") else "left"
    return prompts(**{"side": side, "pad": exported(name).model.config.pad_token_id, **kwargs})


def new_from(name, ids):
    """Where the new tokens start."""
    return 1 if name.startswith("seq2seq") else ids.shape[1]


# ----------------------------------------------------------------------------- against transformers


@every_generator
@pytest.mark.parametrize("seed", range(3))
def test_greedy_search_gives_the_tokens_of_transformers(exported, runtimes, name, seed):
    ids, mask = prompts_for(exported, name, seed=seed)
    found = runtimes(name).generate(ids, mask, max_new_tokens=16)
    np.testing.assert_array_equal(
        found, in_torch(exported, name, ids, mask, max_new_tokens=16, do_sample=False)
    )


@every_generator
def test_the_rows_of_these_tests_end_at_different_times(exported, runtimes, name):
    lengths = set()
    for seed, beams in itertools.product(range(3), (1, 4)):
        ids, mask = prompts_for(exported, name, seed=seed)
        new = runtimes(name).generate(ids, mask, max_new_tokens=16, num_beams=beams)[
            :, new_from(name, ids) :
        ]
        lengths |= {int(row.argmax()) if row.any() else 16 for row in new == EOS}
    assert len(lengths) > 2


@every_generator
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
def test_beam_search_gives_the_tokens_of_transformers(
    exported, runtimes, name, early_stopping, length_penalty
):
    for num_beams in (2, 3, 5):
        options = dict(
            num_beams=num_beams,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
            max_new_tokens=10,
        )
        ids, mask = prompts_for(exported, name, seed=num_beams)
        found = runtimes(name).generate(ids, mask, **options)
        np.testing.assert_array_equal(found, in_torch(exported, name, ids, mask, **options))


@every_generator
@pytest.mark.parametrize("num_beams", [1, 4])
def test_every_length_gives_the_tokens_of_transformers(exported, runtimes, name, num_beams):
    for length, new in ((1, 1), (1, 5), (2, 1), (13, 3), (30, 7)):
        ids, mask = prompts_for(exported, name, lengths=(length, 1, (length + 1) // 2))
        options = dict(num_beams=num_beams, max_new_tokens=new)
        found, expected = (
            runtimes(name).generate(ids, mask, **options),
            in_torch(exported, name, ids, mask, **options),
        )
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@every_generator
@pytest.mark.parametrize("num_beams", [1, 2, 3, 4, 5])
def test_many_batches_give_the_tokens_of_transformers(exported, runtimes, name, num_beams):
    for seed in range(40):
        rng = np.random.default_rng(seed)
        ids, mask = prompts_for(
            exported, name, lengths=tuple(rng.integers(1, 20, rng.integers(1, 8))), seed=seed
        )
        options = dict(num_beams=num_beams, max_new_tokens=int(rng.integers(1, 20)))
        if num_beams > 1:
            options |= dict(
                early_stopping=(False, True, "never")[seed % 3],
                length_penalty=float(rng.uniform(-1, 2)),
            )
        found, expected = (
            runtimes(name).generate(ids, mask, **options),
            in_torch(exported, name, ids, mask, **options),
        )
        np.testing.assert_array_equal(found, expected)


@every_generator
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_does_not_change_the_new_tokens_of_a_row(
    runtimes, name, num_beams, side
):
    ids, mask = prompts(side=side)
    options = dict(num_beams=num_beams, max_new_tokens=8)
    together = runtimes(name).generate(ids, mask, **options)[:, new_from(name, ids) :]
    for row, real in enumerate(mask.astype(bool)):
        prompt = ids[row : row + 1, real]
        alone = runtimes(name).generate(prompt, np.ones_like(prompt), **options)[
            0, new_from(name, prompt) :
        ]
        width = min(len(alone), together.shape[1])
        np.testing.assert_array_equal(together[row, :width], alone[:width])
        assert EOS in alone[:width] or len(alone) == together.shape[1] == 8


def test_a_prompt_comes_back_padded_on_the_left(runtimes):
    ids, mask = prompts((2, 3))
    found = runtimes("causal").generate(ids, mask, max_new_tokens=1)
    np.testing.assert_array_equal(found[:, :3], [[PAD, *ids[0, :2]], ids[1]])


def test_padding_moves_to_either_side_and_the_row_stays_as_it_is():
    """A hole in a row is part of it; a row of padding stays where it is."""
    ids = np.array([[5, 9, 6, 9], [9, 9, 9, 7], [9, 5, 9, 6], [9, 9, 9, 9]])
    mask = np.array([[1, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 0]])
    found = [
        [array.tolist() for array in move_padding(ids, mask, side, 3)] for side in ("left", "right")
    ]
    assert found[0][0] == [[3, 5, 3, 6], [3, 3, 3, 7], [3, 5, 3, 6], [3] * 4]
    assert found[0][1] == [[0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 0, 1], [0] * 4]
    assert found[1][0] == [[5, 3, 6, 3], [7, 3, 3, 3], [5, 3, 6, 3], [3] * 4]
    assert found[1][1] == [[1, 0, 1, 0], [1, 0, 0, 0], [1, 0, 1, 0], [0] * 4]


def with_holes(seed=0, lengths=(9, 6, 3, 7), side="right"):
    """Rows of several lengths in which tokens between the first and the last are masked."""
    ids, mask = prompts(lengths, side=side, seed=seed)
    rng = np.random.default_rng(seed)
    for row in mask:
        first, *inside, last = np.flatnonzero(row)
        row[rng.choice(inside, len(inside) // 2, replace=False)] = 0
    return ids, mask


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["seq2seq", "seq2seq-untied", "seq2seq-rotary"])
def test_tokens_that_are_masked_within_a_source_count_as_positions(
    exported, runtimes, name, num_beams
):
    """As in transformers; before, the others moved together."""
    for seed in range(2):
        ids, mask = with_holes(seed)
        options = dict(max_new_tokens=8, num_beams=num_beams)
        found, expected = (
            runtimes(name).generate(ids, mask, **options),
            in_torch(exported, name, ids, mask, **options),
        )
        np.testing.assert_array_equal(found, expected)
        together = runtimes(name).generate(*with_no_holes(ids, mask), **options)
        assert found.tolist() != together.tolist()


def with_no_holes(ids, mask):
    order = np.argsort(1 - mask, axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(mask, order, axis=1)


@pytest.mark.parametrize(
    "name", ["encoder", "masked-lm", "classification", "pretraining", "answers", "seq2seq"]
)
@torch.no_grad()
def test_tokens_that_are_masked_within_a_text_are_not_read(exported, runtimes, name):
    """Sinusoidal, learned, rotary and no positions, a window, heads for tokens and for texts."""
    model = exported(name).model
    model = model.get_encoder() if name.startswith("seq2seq") else model
    for side in ("right", "left"):
        ids, mask = with_holes(side=side)
        expected = model(torch.from_numpy(ids), torch.from_numpy(mask))
        for key, found in runtimes(name).outputs(ids, mask).items():
            wanted = expected[key].numpy()
            real = mask == 1 if found.ndim > 1 and found.shape[:2] == mask.shape else slice(None)
            np.testing.assert_allclose(found[real], wanted[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["causal", "causal-relative", "causal-learned"])
def test_a_hole_in_the_prompt_of_a_decoder_is_refused_with_its_place(runtimes, name):
    ids, mask = prompts(side="left", pad=3)
    mask[0] = [0, 0, 1, 1, 0, 0, 1, 1, 1]
    with pytest.raises(
        ValueError, match="row 0 of attention_mask has ones again at place 6, after zeros"
    ):
        runtimes(name).generate(ids, mask)
    with pytest.raises(ValueError, match="row 0 of attention_mask has ones again at place 6"):
        runtimes(name).stream(ids, mask)


@every_generator
def test_pad_tokens_are_masked_when_no_mask_is_given(exported, runtimes, name):
    ids, mask = prompts_for(exported, name)
    with_mask = runtimes(name).generate(ids, mask, max_new_tokens=6)
    np.testing.assert_array_equal(runtimes(name).generate(ids, max_new_tokens=6), with_mask)


@pytest.mark.parametrize(
    "name", ["encoder", "masked-lm", "classification", "seq2seq", "seq2seq-untied"]
)
@torch.no_grad()
def test_encode_gives_the_values_of_torch(exported, runtimes, name):
    ids, mask = prompts()
    model = exported(name).model
    model = model.get_encoder() if name.startswith("seq2seq") else model
    expected = model(torch.from_numpy(ids), torch.from_numpy(mask))[0].numpy()
    found = runtimes(name).encode(ids, mask)
    assert (found.shape, found.dtype) == (expected.shape, np.float32)
    real = mask == 1 if found.ndim == 3 else slice(None)
    np.testing.assert_allclose(found[real], expected[real], rtol=1e-4, atol=1e-4)
    full = model(torch.from_numpy(ids))[0].numpy()
    np.testing.assert_allclose(runtimes(name).encode(ids), full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["encoder", "masked-lm", "classification", "seq2seq"])
def test_a_row_of_padding_stays_finite_and_leaves_the_others_unchanged(runtimes, name):
    ids, mask = prompts((5, 3, 5))
    before = runtimes(name).encode(ids, mask)
    mask[1] = 0
    after = runtimes(name).encode(ids, mask)
    assert np.isfinite(after).all()
    np.testing.assert_allclose(after[[0, 2]], before[[0, 2]], rtol=1e-5, atol=1e-5)


def test_lists_small_integers_and_boolean_masks_are_taken(runtimes):
    ids, mask = prompts()
    expected = runtimes("seq2seq").generate(ids, mask, max_new_tokens=5)
    for same_ids, same_mask in ((ids.tolist(), mask.tolist()), (ids.astype(np.uint8), mask == 1)):
        np.testing.assert_array_equal(
            runtimes("seq2seq").generate(same_ids, same_mask, max_new_tokens=5), expected
        )


def test_one_thread_gives_the_same_tokens(exported, runtimes):
    ids, mask = prompts()
    found = Runtime(exported("seq2seq").directory, threads=1).generate(ids, mask, max_new_tokens=5)
    np.testing.assert_array_equal(found, runtimes("seq2seq").generate(ids, mask, max_new_tokens=5))


def test_without_an_arena_the_tokens_are_the_same(exported, runtimes):
    ids, mask = prompts()
    runtime = Runtime(exported("seq2seq").directory, arena=False)
    assert [
        session.inner.get_session_options().enable_cpu_mem_arena
        for session in runtime.model.sessions.values()
    ] == [False, False]
    session = runtimes("seq2seq").model.sessions["decoder"].inner
    assert session.get_session_options().enable_cpu_mem_arena
    expected = runtimes("seq2seq").generate(ids, mask, max_new_tokens=5)
    np.testing.assert_array_equal(runtime.generate(ids, mask, max_new_tokens=5), expected)


# --------------------------------------------------------------------------- generation_config.json


def with_settings(exported, tmp_path, name, **settings):
    """A runtime, and the model in torch, of a checkpoint whose generation_config.json has
    `settings`."""
    directory = copy_folder(exported(name).directory, tmp_path)
    edit_json(directory / "generation_config.json", **settings)
    seal(directory)
    model = exported(name).model
    config = type(model.generation_config).from_pretrained(directory)
    return Runtime(directory), config


@pytest.mark.parametrize(
    "settings",
    [
        dict(max_new_tokens=3),
        dict(max_new_tokens=9, num_beams=4),
        dict(max_new_tokens=9, num_beams=3, length_penalty=0.0),
        dict(max_new_tokens=9, num_beams=3, length_penalty=2.0, early_stopping=True),
        dict(max_new_tokens=9, num_beams=3, length_penalty=-1.0, early_stopping="never"),
        dict(max_new_tokens=9, eos_token_id=[EOS, 7, 11]),
        dict(max_new_tokens=9, num_beams=3, eos_token_id=[EOS, 7, 11]),
        dict(max_new_tokens=9, num_beams=2, do_sample=False, use_cache=True, early_stopping=False),
        dict(max_new_tokens=9, pad_token_id=5),
        dict(max_length=12),
        dict(),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["seq2seq", "causal-learned"])
def test_the_checkpoints_generation_config_is_honoured(exported, tmp_path, name, settings):
    runtime, config = with_settings(exported, tmp_path, name, **settings)
    ids, mask = prompts_for(exported, name)
    found, expected = (
        runtime.generate(ids, mask),
        in_torch(exported, name, ids, mask, generation_config=config),
    )
    start = new_from(name, ids)
    np.testing.assert_array_equal(found[:, start:], expected[:, start:])


@pytest.mark.parametrize(
    "beams", [{}, dict(num_beams=3), dict(num_beams=4, num_return_sequences=3)], ids=str
)
@pytest.mark.parametrize("eos", [EOS, [11, 20, EOS]], ids=str)
@pytest.mark.parametrize("pad", [0, None, 5])
@pytest.mark.parametrize("name", ["seq2seq", "causal"])
def test_rows_that_have_ended_are_filled_as_in_transformers(
    exported, tmp_path, monkeypatch, name, pad, eos, beams
):
    """Its beam search takes a pad token of 0 for none, and fills with the first end token; its
    greedy search does not."""
    runtime, config = with_settings(exported, tmp_path, name, pad_token_id=pad, eos_token_id=eos)
    monkeypatch.setattr(exported(name).model, "generation_config", config)
    ids, mask = prompts_for(exported, name, lengths=4 * LENGTHS)
    options = dict(max_new_tokens=12, **beams)
    found, expected = (
        tokens[:, new_from(name, ids) :]
        for tokens in (
            runtime.generate(ids, mask, **options),
            in_torch(exported, name, ids, mask, **options),
        )
    )
    np.testing.assert_array_equal(found, expected)
    fills = {int(row[-1]) for row in found if np.isin(row[:-1], eos).any()}
    assert fills == {pad if pad or (pad == 0 and not beams) else np.ravel(eos)[0]}


@pytest.mark.parametrize("pad", [0, 5])
def test_sampled_rows_that_have_ended_are_filled_with_the_pad_token(exported, tmp_path, pad):
    """As transformers' are: both draw the only token that is left at each step."""
    runtime, config = with_settings(exported, tmp_path, "seq2seq", pad_token_id=pad)
    ids, mask = prompts_for(exported, "seq2seq", seed=3)
    options = dict(max_new_tokens=12, do_sample=True, top_k=1)
    expected = in_torch(exported, "seq2seq", ids, mask, generation_config=config, **options)
    np.testing.assert_array_equal(runtime.generate(ids, mask, **options), expected)
    assert (expected[:, -1] == pad).any()


def test_options_go_over_the_generation_config(exported, tmp_path, runtimes):
    runtime, _ = with_settings(
        exported, tmp_path, "seq2seq", max_new_tokens=3, num_beams=4, length_penalty=0.5
    )
    ids, mask = prompts()
    found = runtime.generate(ids, mask, max_new_tokens=7, num_beams=1)
    np.testing.assert_array_equal(found, runtimes("seq2seq").generate(ids, mask, max_new_tokens=7))


@pytest.mark.parametrize(
    "field, value",
    [
        ("encoder_repetition_penalty", 1.2),
        ("encoder_no_repeat_ngram_size", 3),
        ("sequence_bias", [[[5], 1.5]]),
        ("exponential_decay_length_penalty", [3, 1.1]),
        ("diversity_penalty", 0.5),
        ("penalty_alpha", 0.6),
        ("stop_strings", ["."]),
        ("num_beam_groups", 2),
    ],
)
def test_a_generation_config_field_that_is_not_applied_is_refused_by_name(
    exported, tmp_path, field, value
):
    runtime, _ = with_settings(exported, tmp_path, "seq2seq", **{field: value})
    with pytest.raises(ValueError, match=f"{field} to .*not apply") as caught:
        runtime.generate(*prompts())
    assert repr(value) in str(caught.value)


# ---------------------------------------------------------------------------------------- bad input


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
    directory = copy_folder(exported("seq2seq").directory, tmp_path)
    for file in ("config.json", "generation_config.json"):
        edit_json(directory / file, decoder_start_token_id=None)
    seal(directory)
    with pytest.raises(ValueError, match="decoder_start_token_id is None"):
        Runtime(directory).generate(IDS, MASK)


def test_generation_begins_with_the_start_token(runtimes):
    assert runtimes("seq2seq").generate(IDS, MASK, max_new_tokens=1)[:, 0].tolist() == [
        START
    ] * len(IDS)


def test_a_fresh_process_generates_without_torch_and_transformers(exported):
    code = """
import sys
import numpy as np
import vanilla_transformer_export as package
from vanilla_transformer_export import text_runtime
from vanilla_transformer_export.cli import main
from vanilla_transformer_export.inference import export_info, search
from vanilla_transformer_export.targets import registry
loaded = package.Runtime(sys.argv[1])
print(loaded.generate(np.array([[5, 6, 7]]), num_beams=2, max_new_tokens=3).shape[0])
heavy = {"torch", "transformers", "onnx", "onnx_ir", "safetensors"}
print(sorted(heavy & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(exported("seq2seq").directory)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout.split("\n"), done.stderr) == (["1", "[]", ""], "")


# --------------------------------------------------------------------------------------- the search


class Language:
    """p(token | prefix) for every prefix over a small vocabulary, as a look-up table per input."""

    def __init__(self, inputs, vocabulary, length, seed):
        rng = np.random.default_rng(seed)
        self.vocabulary, self.length = vocabulary, length
        self.tables = [
            {
                prefix: rng.normal(scale=2, size=vocabulary).astype(np.float32)
                for prefix in self.prefixes()
            }
            for _ in range(inputs)
        ]

    def prefixes(self):
        return itertools.chain.from_iterable(
            itertools.product(range(self.vocabulary), repeat=length)
            for length in range(self.length)
        )

    def start(self, rows_per_input):
        """The logits of the first token, one row for each input; from here on `step` follows the
        rows."""
        self.rows = [(table, ()) for table in self.tables for _ in range(rows_per_input)]
        return np.stack([table[()] for table in self.tables])

    def step(self, tokens, beam_idx):
        rows = self.rows if beam_idx is None else [self.rows[index] for index in beam_idx]
        self.rows = [
            (table, (*prefix, int(token)))
            for (table, prefix), token in zip(rows, tokens, strict=True)
        ]
        return np.stack([table[prefix] for table, prefix in self.rows])

    def drive(self, search, rows_per_input=1):
        """What `search` finds, fed the logits of this language."""
        logits = self.start(rows_per_input)
        while True:
            following = search.advance(logits)
            if search.finished:
                return search.result()[0]
            logits = self.step(*following)

    def best(self, table, options):
        """The sequence with the largest sum(log p) / length^penalty of all, by trying each."""
        scores = {}
        for sequence in itertools.product(range(self.vocabulary), repeat=self.length):
            ends = [
                index + 1 for index, token in enumerate(sequence) if token in options.eos_token_ids
            ]
            sequence = sequence[: min(ends, default=self.length)]
            log_p = 0.0
            for index, token in enumerate(sequence):
                logits = table[sequence[:index]].astype(np.float64)
                log_p += logits[token] - np.log(np.exp(logits).sum())
            scores[sequence] = log_p / len(sequence) ** options.length_penalty
        return max(scores, key=scores.get)


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize(
    "vocabulary, length, eos",
    [(4, 3, (2,)), (4, 4, (2,)), (3, 4, (0,)), (4, 3, (1, 2)), (3, 3, ())],
)
def test_an_exhaustive_beam_search_finds_the_best_of_all_sequences(
    vocabulary, length, eos, length_penalty
):
    options = Options(
        max_new_tokens=length,
        num_beams=64,
        length_penalty=length_penalty,
        early_stopping="never",
        eos_token_id=eos,
    )
    for seed in range(5):
        language = Language(3, vocabulary, length, seed)
        found = language.drive(BeamSearch(3, options), options.num_beams)
        expected = [language.best(table, options) for table in language.tables]
        assert found.shape[1] == max(map(len, expected))
        padded = [(*sequence, *eos[:1] * (found.shape[1] - len(sequence))) for sequence in expected]
        assert found.tolist() == [list(sequence) for sequence in padded]


def test_greedy_search_takes_the_best_token_each_time_and_pads_behind_the_end():
    language = Language(8, 4, 5, seed=1)
    options = Options(max_new_tokens=5, eos_token_id=(2,), pad_token_id=3)
    found = language.drive(TokenSearch(8, options))
    expected = []
    for table in language.tables:
        sequence = ()
        while len(sequence) < 5 and 2 not in sequence:
            sequence = (*sequence, int(table[sequence].argmax()))
        expected.append([*sequence, *[3] * (5 - len(sequence))])
    assert len({sum(token == 3 for token in row) for row in expected}) > 1
    assert found.tolist() == expected


def test_one_beam_and_greedy_search_agree():
    language = Language(6, 4, 4, seed=2)
    options = Options(max_new_tokens=4, num_beams=1, eos_token_id=())
    beams = language.drive(BeamSearch(6, options))
    np.testing.assert_array_equal(beams, language.drive(TokenSearch(6, options)))


def test_every_beam_may_end_at_the_first_token():
    language = Language(2, 3, 3, seed=0)
    for table in language.tables:
        table[()] = np.array([-30, 30, -30], np.float32)
    options = Options(max_new_tokens=3, num_beams=2, early_stopping=True, eos_token_id=(1,))
    found = language.drive(BeamSearch(2, options), 2)
    assert found[:, 0].tolist() == [1, 1]


# -------------------------------------------------------------------------------- CUDA and TensorRT


@pytest.mark.parametrize(
    "device, engine_cache", [("cuda", None), ("tensorrt", None), ("tensorrt", "engines")]
)
def test_providers_are_asked_for_in_order_and_each_must_run(
    exported, monkeypatch, tmp_path, device, engine_cache
):
    """The encoder on TensorRT, what that cannot run and the decoder on CUDA. onnxruntime is a spy
    here."""
    directory, asked = exported("seq2seq").directory, {}
    running = [devices.CUDA, "CPUExecutionProvider"]

    class Session:
        def __init__(self, path, options, providers, enable_fallback):
            assert not enable_fallback  # one that fails is not replaced without a word
            asked[path.rpartition("/")[2]] = providers

        def get_providers(self):
            return running

    monkeypatch.setattr(
        "vanilla_transformer_export.inference.session.check_graph", lambda session, spec, path: None
    )
    monkeypatch.setattr(devices, "facts", lambda: {"cuda_problem": None, "tensorrt_problem": None})
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    given = dict(device=device, engine_cache=engine_cache and tmp_path / engine_cache)
    before = []
    if device == "tensorrt":
        with pytest.raises(
            OSError, match="TensorrtExecutionProvider was asked for and onnxruntime fell back to"
        ):
            Runtime(directory, **given)
        before = [devices.TENSORRT]
        running = [*before, *running]
    Runtime(directory, **given)
    names = {file: [name for name, _ in providers] for file, providers in asked.items()}
    on_cuda = [devices.CUDA, "CPUExecutionProvider"]
    assert names == {"encoder_model.onnx": before + on_cuda, "decoder_model_merged.onnx": on_cuda}
    options = asked["decoder_model_merged.onnx"][0][1]
    assert options == {"enable_cuda_graph": "0", "use_tf32": "0"}
    if device == "tensorrt":
        engines = asked["encoder_model.onnx"][0][1]
        assert engines.keys() == (
            {"trt_engine_cache_enable", "trt_engine_cache_path"} if engine_cache else set()
        )
        assert engines.get("trt_engine_cache_path", "").startswith(
            str(tmp_path / "engines") if engine_cache else ""
        )


def test_engines_of_other_weights_are_kept_elsewhere(exported, tmp_path):
    runtimes = [Runtime(exported(name).directory) for name in ("encoder", "encoder", "masked-lm")]
    for runtime in runtimes:
        runtime.model.engine_cache = tmp_path
    first, again, other = (
        runtime.model._engine_options()["trt_engine_cache_path"] for runtime in runtimes
    )
    assert first == again != other


def test_tensorrt_is_refused_where_it_has_nothing_to_compile_or_is_not_there(
    exported, monkeypatch, tmp_path
):
    with pytest.raises(
        ValueError, match="'tensorrt' does not go with VanillaDecoderForCausalLM, target 'portable'"
    ):
        Runtime(exported("causal").directory, device="tensorrt")
    directory = exported("encoder").directory
    integers = copy_folder(directory, tmp_path)
    [facts] = json.loads((integers / "manifest.json").read_text())["variants"].values()
    edit_json(integers / "manifest.json", default_dtype="int8", variants={"int8": facts})
    with pytest.raises(ValueError, match="dtype 'int8', expected one of .'cpu', 'cuda'.$"):
        Runtime(integers, device="tensorrt")
    with pytest.raises(OSError, match="this onnxruntime has no CUDA"):
        Runtime(directory, device="tensorrt")
    with pytest.raises(
        ValueError, match="engine_cache is of no use on device 'cpu', expected device='tensorrt'"
    ):
        Runtime(directory, engine_cache="engines")
    with pytest.raises(
        ValueError,
        match="onnx/engines, inside the export: expected a place outside, its files stay",
    ):
        Runtime(directory, device="tensorrt", engine_cache=directory / "onnx/engines")
    monkeypatch.setattr(devices, "providers", lambda: [devices.CUDA, "CPUExecutionProvider"])
    monkeypatch.setattr(devices, "gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(devices, "LIBRARIES", ())
    with pytest.raises(
        OSError, match="this onnxruntime has no TensorRT, its providers are .*: use CUDA alone"
    ):
        Runtime(directory, device="tensorrt")


def test_what_another_process_runs_is_checked_without_graphs(exported):
    directory = exported("seq2seq").directory
    whole, info = Runtime(directory, threads=1), open_export(directory)
    ids, options = np.array([[5, 6, 7]]), {"max_new_tokens": 3}
    wanted = whole.request(ids, None, None, options)
    found = generation_request(info, ids, None, None, options)
    assert found.options == wanted.options and found.input_ids.tolist() == wanted.input_ids.tolist()
    for wrong in ({"max_new_tokens": 0}, {"nope": 1}):
        with pytest.raises(ValueError) as expected:
            whole.request(ids, None, None, wrong)
        with pytest.raises(type(expected.value), match=f"^{re.escape(str(expected.value))}$"):
            generation_request(info, ids, None, None, wrong)


def test_onnxruntime_is_imported_when_graphs_are_loaded(exported):
    code = (
        "import sys; from vanilla_transformer_export.model import OnnxModel, open_export\n"
        "info = open_export(sys.argv[1])\nmodel = OnnxModel(info, threads=1)\n"
        "print('onnxruntime' in sys.modules)\nmodel.session('encoder')\n"
        "print('onnxruntime' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, exported("encoder").directory], capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "True"], done.stderr
