"""Tests of every kind of export on the CUDA provider: where nodes run, and what captures contain.

The kernels compute nothing, so tokens and outputs have only shapes here.
"""

import dataclasses

import numpy as np
import pytest
from dry import (
    CAPABILITY,
    CUDA,
    EXPORTS,
    TO_HOST,
    calls,
    inputs,
    nodes_elsewhere,
    sessions,
)
from exports import cases

from vanilla_transformer_export import Runtime

RUNS = [case for case in cases() if case.dtype != "bf16" or CAPABILITY >= 80]
GENERATE = [case for case in RUNS if case.generates]
READ = [case for case in RUNS if not case.generates]
GREEDY = dict(max_new_tokens=20, eos_token_id=[])
# arithmetic with sizes, and a look-up by them, that run on the host
SHAPES = {"Squeeze", "Concat", "Div", "Mul", "Neg", "Mod", "Add", "Sub", "Min", "Gather"}
BEAMS = GREEDY | dict(num_beams=3)


@pytest.mark.parametrize("case", GENERATE, ids=str)
def test_decoders_run_only_on_cuda_and_are_replayed(case):
    prompts = inputs(case)
    new = slice(1 if "Seq2Seq" in case.architecture else 12, None)
    with sessions() as opened, calls() as log:
        runtime = Runtime(EXPORTS / str(case))
        greedy = runtime.generate(**prompts, **GREEDY)
        beams = runtime.generate(**prompts, **BEAMS)
        sampled = runtime.generate(**prompts, **GREEDY, do_sample=True, seed=1)
    assert greedy[:, new].shape == sampled[:, new].shape == (3, 20) and len(beams) == 3
    replayed = [session for session in opened if is_replayed(session)]
    assert replayed and not any(map(nodes_elsewhere, replayed))
    log.check_captures()
    log.check_attention(case)
    assert len(log.starting("begin")) >= 2  # a greedy step, and a step with three beams
    assert len(log.starting("replay")) >= 3 * 18


@pytest.mark.parametrize("case", [case for case in RUNS if case.is_aligned], ids=str)
def test_alignment_graphs_run_on_cuda_after_searches_of_all_kinds(case):
    prompts = inputs(case)
    with sessions() as opened:
        runtime = Runtime(EXPORTS / str(case))
        for options in (GREEDY, BEAMS, GREEDY | dict(do_sample=True, seed=1)):
            rows = runtime.inputs(*prompts.values(), None, options)
            rows = [dataclasses.replace(row, is_aligned=True) for row in rows]
            for row, [sequence] in zip(rows, runtime.sequences(rows), strict=True):
                assert sequence.alignment.shape == (len(sequence.tokens), len(row.source))
    [found] = [each for each in opened if each.get_outputs()[0].name == "cross_attentions"]
    assert not is_replayed(found) and set(nodes_elsewhere(found)) <= SHAPES


def is_replayed(session):
    return session.get_provider_options().get(CUDA, {}).get("enable_cuda_graph") == "1"


@pytest.mark.parametrize("case", READ, ids=str)
def test_full_sequence_graphs_copy_only_inputs_and_outputs(case):
    with sessions() as opened:
        runtime = Runtime(EXPORTS / str(case))
    arguments = [inputs(case, length) for length in (12, 9)]
    for arrays in arguments:
        with calls() as log:
            outputs = runtime.outputs(**arrays)
        assert len(log.starting(TO_HOST)) == len(outputs)
        log.check_attention(case)
        assert all(len(output) == 3 for output in outputs.values())
    [session] = opened
    assert set(nodes_elsewhere(session)) <= SHAPES


@pytest.mark.skipif(CAPABILITY >= 80, reason="this device has bfloat16")
def test_bfloat16_is_rejected_on_devices_without_it():
    [case, *_] = [case for case in cases() if case.dtype == "bf16"]
    with pytest.raises(OSError, match="7.5.*8.0"):
        Runtime(EXPORTS / str(case))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_batches_of_all_sizes_capture_no_forbidden_call(dtype):
    [case] = [
        case for case in GENERATE if case[1:] == ("paper", dtype) and "Decoder" in case.architecture
    ]
    runtime, arrays = Runtime(EXPORTS / str(case)), inputs(case)
    with calls() as log:
        for rows in (1, 2, 3, 5, 8, 13):
            batch = {name: np.resize(array, (rows, 12)) for name, array in arrays.items()}
            runtime.generate(**batch, **GREEDY)
    log.check_captures()
