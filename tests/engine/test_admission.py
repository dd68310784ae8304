"""Tests of admission: sizes that fit, options that are valid, and the default sizes."""

import dataclasses

import numpy as np
import pytest
from messages import raises
from opened_engines import open_client
from targets import SIZES

from vanilla_transformer_export import Options
from vanilla_transformer_export.engine.inputs import generation_inputs
from vanilla_transformer_export.engine.limits import (
    Admission,
    Arrangement,
    Pace,
    arrange_workers,
    slots_per_worker,
    token_cost,
)
from vanilla_transformer_export.engine.model import open_export
from vanilla_transformer_export.errors import TooLong, UsageError
from vanilla_transformer_export.targets.cpu.slots import SlotRows

MAX_NEW_TOKENS = 9
SEQ2SEQ, DECODER = "seq2seq", "causal"


def test_input_that_does_not_fit_raises_and_error_names_size_and_limit(exported_for):
    client = open_client(exported_for(DECODER, "cpu")[1], slots=4, max_length=20)
    with raises(TooLong, seen=21, expected=20):
        client.admission.admit([5] * 21, {})
    with raises(TooLong, seen=("max_new_tokens", 11, 21), expected=20):
        client.admission.admit([5] * 11, dict(max_new_tokens=11))
    client.admission.admit([5] * 11, dict(max_new_tokens=10))
    with raises(TooLong, seen=5, expected=4):
        client.admission.admit([5], dict(num_beams=5))
    with raises(UsageError, seen=("num_beams", 2), expected=("num_beams", 1)):
        client.admission.admit([5], dict(num_beams=2), top_logprobs=1)
    with raises(ValueError, seen=500, expected=("input_ids", 0, SIZES["vocab_size"] - 1)):
        client.admission.admit([500], {})
    with raises(UsageError, seen=(3, "slots", 4, "workers")):
        open_client(exported_for(DECODER, "cpu")[1], workers=4, slots=3)
    client = open_client(exported_for(SEQ2SEQ, "cpu")[1], slots=8, max_source=6)
    with raises(TooLong, seen=7, expected=6):
        client.admission.admit([5] * 7, {})


def test_slot_length_is_limited_by_learned_positions(exported_for):
    """Positions of other kinds do not limit the slots."""
    learned, other = (
        open_client(exported_for(name, "cpu")[1], slots=8, max_length=2000)
        for name in (DECODER, SEQ2SEQ)
    )
    assert (learned.admission.slot_size.length, other.admission.slot_size.length) == (60, 2000)
    assert learned.admission.info.config["position_embedding_type"] == "learned"


def test_slots_that_exceed_memory_raise_usage_error(exported_for, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(SlotRows, "stacked", full)
    with raises(UsageError, seen=(8, 30, "MB")):
        open_client(exported_for(DECODER, "cpu")[1], slots=8, max_length=30)


@pytest.mark.parametrize("limit", ["slots", "max_source", "max_length"])
def test_slots_that_no_machine_can_address_raise_the_same_error(exported_for, limit):
    limits = {"slots": 8, limit: 2**62}
    with raises(UsageError, seen=("no memory", 2**62, "MB"), expected="fewer slots"):
        open_client(exported_for(SEQ2SEQ, "cpu")[1], **limits)


def test_options_and_tokens_are_validated_despite_cached_options(exported_for):
    client = open_client(exported_for(SEQ2SEQ, "cpu")[1], slots=8)
    first = client.admission.admit([5, 6], dict(num_beams=1, do_sample=False, suppress_tokens=[7]))
    assert (
        client.admission.admit([5, 6, 7], dict(num_beams=1, do_sample=False)).options
        != first.options
    )
    again = client.admission.admit([8], dict(num_beams=1, do_sample=False))
    assert (again.options, again.source, again.prompt) == (
        client.admission.admit([8], dict(do_sample=False, num_beams=1)).options,
        [8],
        [1],
    )
    with raises(UsageError, seen="num_beams"):
        client.admission.admit([5], dict(num_beams=True, do_sample=False))
    with raises(UsageError, seen="do_sample"):
        client.admission.admit([5], dict(num_beams=1, do_sample=0))
    for invalid_ids in ([48], [-1], []):
        with raises(ValueError, seen="input_ids"):
            client.admission.admit(invalid_ids, dict(num_beams=1, do_sample=False))


def test_admitted_job_matches_a_call_of_generate(exported_for):
    client = open_client(exported_for(SEQ2SEQ, "cpu")[1], slots=8)
    job = client.admission.admit([5, 6, 7], dict(max_new_tokens=MAX_NEW_TOKENS))
    [row] = generation_inputs(
        client.admission.info,
        np.array([[5, 6, 7]]),
        np.ones((1, 3), int),
        None,
        dict(max_new_tokens=MAX_NEW_TOKENS),
    )
    assert isinstance(job.options, Options)
    assert (job.options, list(job.prompt), list(job.source)) == (
        row.options,
        list(row.prompt),
        [5, 6, 7],
    )


def test_describe_notes_too_few_slots_for_default_beams(exported_for):
    info = open_export(exported_for(SEQ2SEQ, "cpu")[1])
    with_beams = dataclasses.replace(info, generation_config={"num_beams": 5})
    assert "too few" not in Admission(info, slots=4).describe()
    assert "4 rows each (too few for the 5 beams" in Admission(with_beams, slots=4).describe()


def test_small_models_use_several_workers_and_large_models_all_threads():
    tiny = dict(
        decoder_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        head_dim=32,
        intermediate_size=256,
        vocab_size=6000,
    )
    base = dict(
        decoder_layers=6,
        hidden_size=512,
        num_attention_heads=8,
        head_dim=64,
        intermediate_size=2048,
        vocab_size=37000,
    )
    gpt2 = dict(
        num_hidden_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        head_dim=64,
        intermediate_size=3072,
        vocab_size=50257,
    )
    assert arrange_workers(tiny, 2) == arrange_workers(base, 2) == Arrangement(2, 1)
    assert arrange_workers(gpt2, 2) == Arrangement(1, 2)
    assert arrange_workers(tiny, 4, 2) == arrange_workers(gpt2, 4, 2) == Arrangement(2, 2)
    assert arrange_workers(tiny, 3, 2) == Arrangement(2, 1)
    with raises(UsageError, seen=("workers", 5000), expected=2):
        arrange_workers(tiny, 2, 5000)
    assert [Pace.of(config).chunk for config in (tiny, base, gpt2)] == [256, 32, 16]
    assert [Pace.of(config).max_source_tokens for config in (tiny, base)] == [512, 122]
    one_key = {**gpt2, "num_key_value_heads": 1}
    assert token_cost(gpt2) - token_cost(one_key) == 12 * 2 * (768 - 64) * 768
    decoder = {**gpt2, "hidden_size": 128, "num_attention_heads": 2}
    preferred = [Pace.of(config).preferred_rows for config in (tiny, base, gpt2, decoder)]
    assert preferred == [24, 0, 0, 0]
    assert (
        slots_per_worker(2, 4_000_000) == 32
        and slots_per_worker(1, 100_000_000) == 10
        and slots_per_worker(4, 2**31) == 1
    )
