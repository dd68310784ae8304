"""Tests of continuous batching: in any batch, a job has the tokens of `Runtime.generate` and the
same bits."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from engine_requests import DECODER, MAX_NEW_TOKENS, OPTIONS, SEQ2SEQ, expected_tokens
from opened_engines import first_batch, open_client, run
from targets import SIZES

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.engine.capacity import batch_together, open_batch
from vanilla_transformer_export.engine.groups import Cohort, start_request
from vanilla_transformer_export.engine.inputs import LENGTH, STOP
from vanilla_transformer_export.engine.limits import Admission, Pace
from vanilla_transformer_export.engine.loop import Engine
from vanilla_transformer_export.engine.model import open_for_workers


def inputs(name, count=10, seed=0):
    """Return pairs of a source or prompt and, for every third seq2seq input, a target prefix."""
    rng = np.random.default_rng(seed)
    rows = [
        rng.integers(4, SIZES["vocab_size"], rng.integers(1, 18)).tolist() for _ in range(count)
    ]
    return [
        (row, rng.integers(4, 40, 3).tolist() if name == SEQ2SEQ and number % 3 == 2 else [])
        for number, row in enumerate(rows)
    ]


def admit_jobs(client, name, options=OPTIONS):
    return [
        with_prefix(client.admission.admit(ids, {"max_new_tokens": MAX_NEW_TOKENS, **each}), prefix)
        for ids, prefix in inputs(name)
        for each in options
    ]


def with_prefix(job, prefix):
    """Return `job` with a decoder prompt that goes on with the tokens `prefix`."""
    return dataclasses.replace(job, prompt=[*job.prompt, *prefix])


@pytest.mark.parametrize(
    "name, target, dtype",
    [
        (SEQ2SEQ, "cpu", "fp32"), (DECODER, "cpu", "fp32"), ("causal-window", "cpu", "fp32"),
        ("causal-grouped", "cpu", "fp32"), ("causal-grouped", "cpu", "int8"),
        (SEQ2SEQ, "portable", "fp32"), (DECODER, "portable", "fp32"), ("seq2seq-t5", "cpu", "fp32")
    ],
)  # fmt: skip
def test_batched_jobs_match_runtime_generate(exported_for, start_engine, name, target, dtype):
    _, directory = exported_for(name, target, dtype)
    client = start_engine(directory, workers=2)
    is_continuous = target == "cpu" and name != "seq2seq-t5"  # its heads are 12 wide
    assert (first_batch(client).joining is not None) == is_continuous
    assert client.admission.describe().startswith(
        "continuous batching, " if is_continuous else "static batches "
    )
    jobs = admit_jobs(client, name)
    shuffled = random.Random(0).sample(jobs, len(jobs))
    answers = dict(zip(shuffled, run(client, shuffled), strict=True))
    runtime = Runtime(directory, threads=1)
    reference = [
        expected_tokens(runtime, ids, prefix, each)
        for ids, prefix in inputs(name)
        for each in OPTIONS
    ]
    for job, rows in zip(jobs, reference, strict=True):
        actual = answers[job]
        assert [each.tokens for each in actual] == rows
        assert [each.finish_reason for each in actual] == [
            STOP if row[-1] == 2 else LENGTH for row in rows
        ]
        assert [each.score is None for each in actual] == [job.options.num_beams == 1] * len(actual)


# --------------------------------------------------------------------------------------------- bits


@pytest.fixture
def found(monkeypatch):
    """The bytes of the logits of each row at each step, by place of its input, sample and beam."""
    result, advance = {}, Cohort.advance

    def record_and_advance(cohort, logits):
        values = logits.of(cohort.rows)
        rows = values.reshape(len(cohort.groups), -1, values.shape[-1])
        for group, group_rows in zip(cohort.groups, rows, strict=True):
            if group not in cohort.running:
                continue
            [place] = [
                place
                for place, results in enumerate(group.request.results)
                if results is group.results
            ]
            for beam, row in enumerate(group_rows):
                result.setdefault((place, group.sample, beam), []).append(row.tobytes())
        return advance(cohort, logits)

    monkeypatch.setattr(Cohort, "advance", record_and_advance)
    return result


IN_FULL = [
    pytest.param(*each, marks=pytest.mark.slow)
    for each in ((SEQ2SEQ, "int8"), (SEQ2SEQ, "int4"), (DECODER, "int4"))
]


def run_in_batch(jobs, model, order, slots, most_joining):
    """Run `jobs` of `admit_jobs` in a batch with these `slots`. They join in `order`, a few at a
    time."""
    batch = open_batch(Admission(model.info, threads=model.threads, slots=slots), model)
    client_request = start_request(jobs)
    waiting = [client_request.waiting[place] for place in order]
    rng = random.Random(len(order))
    while waiting or batch.running or batch.prefilling:
        joining = []
        while (
            waiting
            and len(joining) < rng.randint(0, most_joining)
            and batch.fits(waiting[0], joining)
        ):
            joining.append(waiting.pop(0))
        batch.join(joining)
        batch.step()
        batch.remove([])
    assert client_request.error is None


@pytest.mark.parametrize("mixes", [2, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name, dtype", [(SEQ2SEQ, "fp32"), (DECODER, "int8"), *IN_FULL])
def test_row_logits_are_bit_identical_in_any_batch(exported_for, found, name, dtype, mixes):
    _, directory = exported_for(name, "cpu", dtype)
    for threads in (1, 2):
        client = open_client(directory, slots=8, threads=threads)
        model = open_for_workers(client.admission.info, threads)
        jobs = admit_jobs(client, name)
        found.clear()
        for place in range(len(jobs)):
            run_in_batch(jobs, model, [place], slots=4, most_joining=1)
        alone = dict(found)
        for mix in range(mixes):
            found.clear()
            order = random.Random(mix).sample(range(len(jobs)), len(jobs))
            slots, most_joining = 4 + 9 * mix % 61, 1 + mix % 7
            run_in_batch(jobs, model, order, slots, most_joining)
            assert found.keys() == alone.keys()
            assert all(found[row] == alone[row] for row in alone)


@pytest.mark.parametrize("name", [SEQ2SEQ, DECODER])
def test_ended_row_stands_still_until_another_one_joins(exported_for, name):
    """Else it would pass the last position of the model and of its slot."""
    _, directory = exported_for(name, "cpu")
    client = open_client(directory, slots=8)
    batch = first_batch(client)
    batch.pace = Pace(max_gaps=8)
    length = client.admission.slot_size.length
    options = {"max_new_tokens": length, "eos_token_id": 3}  # which it does not select
    job = client.admission.admit([5], options)
    first, *others = start_request([job] * 3).waiting
    batch.join([first])
    for step in range(2 * length - 1):
        if step == length - 1:
            batch.join(others)
        num_running = len(batch.running)
        assert batch.step() == num_running
        batch.remove([])
        if length <= step < 2 * length - 2:
            assert len(batch.joining.places) == 3 and batch.joining.size.length == length
    expected = expected_tokens(Runtime(directory, threads=1), [5], [], options)
    assert [group.results[0].tokens for group in (first, *others)] == expected * 3


def test_prompt_is_read_in_a_slot_that_stood_still(exported_for):
    _, directory = exported_for(DECODER, "cpu")
    client = open_client(directory, slots=8)
    batch = first_batch(client)
    batch.pace = Pace(chunk=16, max_gaps=8)
    lengths = [20] * 8 + [2] * 2  # two spare rows
    jobs = [client.admission.admit([5], {"max_new_tokens": length}) for length in lengths]
    options = {"max_new_tokens": 12}
    [later] = start_request([client.admission.admit([5, 6, 7, 8], options)]).waiting
    batch.join([*start_request(jobs).waiting])
    for step in range(20):
        batch.join([later] if step == 3 else [])
        batch.step()
        batch.remove([])
    expected = expected_tokens(Runtime(directory, threads=1), [5, 6, 7, 8], [], options)
    assert [later.results[0].tokens] == expected


@pytest.mark.parametrize("rows", [1, 3])
def test_no_group_fits_beside_the_last_slot(exported_for, rows):
    # what the queue counts as spare rows may be more, once some samples of a request have ended
    client = open_client(exported_for(DECODER, "cpu")[1], slots=12)
    batch = first_batch(client)
    groups = start_request([client.admission.admit([5], {"max_new_tokens": 30})] * 15).waiting
    job = client.admission.admit([5], {"do_sample": True, "num_return_sequences": rows})
    [later] = start_request([job]).waiting
    assert batch.fits(later, [*groups][: 15 - rows])
    batch.join([*groups][: 16 - rows])
    assert not batch.fits(later, [])
    batch.step()
    assert not batch.fits(later, [])


def test_long_prompt_is_prefilled_in_chunks_while_other_rows_continue(exported_for):
    _, directory = exported_for(DECODER, "cpu")
    client = open_client(directory, slots=8)
    batch = first_batch(client)
    batch.pace = Pace(chunk=4)
    short, long = (
        client.admission.admit([5], {"max_new_tokens": 30}),
        client.admission.admit(list(range(4, 22)), {"max_new_tokens": MAX_NEW_TOKENS}),
    )
    events = start_request([short], streams=True)
    [first], [second] = events.waiting, start_request([long]).waiting
    batch.join([first])
    batch.step()
    progress = []
    batch.join([second])
    while second in batch.prefilling:
        batch.step()
        progress.append((second.num_read, len(events.events)))
        batch.join([])
    assert progress == [(4, 2), (8, 3), (12, 4), (16, 5)]
    while not second.request.is_finished:
        batch.step()
    [generated] = second.results
    assert [generated.tokens] == expected_tokens(Runtime(directory, threads=1), long.prompt, [], {})


# ------------------------------------------------------------------------------------ probabilities


def test_logprobs_of_prompt_and_new_tokens_match_torch(exported_for, start_engine):
    model, directory = exported_for(DECODER, "cpu")
    client = start_engine(directory)
    prompt = [5, 9, 31, 7, 22]
    for options in ({}, dict(do_sample=True, seed=1, temperature=0.5)):
        job = client.admission.admit(
            prompt,
            {"max_new_tokens": MAX_NEW_TOKENS, **options},
            top_logprobs=3,
            scores_prompt=True,
        )
        [[result]] = run(client, [job])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + result.tokens])).logits[0].double()
        log_p = torch.log_softmax(logits, dim=-1).numpy()
        reported = [*result.prompt_logprobs, *result.logprobs]
        assert [each.token for each in reported] == [*prompt[1:], *result.tokens]
        for place, each in enumerate(reported):
            assert abs(each.logprob - log_p[place, each.token]) < 1e-4
            top_tokens = np.argsort(-log_p[place])[:3]
            assert [token for token, _ in each.top] == top_tokens.tolist()
            assert np.abs([value - log_p[place, token] for token, value in each.top]).max() < 1e-4


@pytest.mark.parametrize("target", ["cpu", "portable"])
def test_samples_are_seeded_with_seed_and_sample_number(exported_for, start_engine, target):
    _, directory = exported_for(DECODER, target)
    client, runtime = start_engine(directory), Runtime(directory, threads=1)
    options = dict(do_sample=True, top_k=0, max_new_tokens=MAX_NEW_TOKENS, seed=11)
    [result] = run(
        client, [client.admission.admit([5, 6, 7], {**options, "num_return_sequences": 4})]
    )
    for number, answer in enumerate(result):
        [row] = runtime.inputs(np.array([[5, 6, 7]]), None, None, options)
        uniforms = np.random.default_rng([11, number] if number else 11).random
        row = dataclasses.replace(row, uniforms=uniforms)
        [[expected]] = Engine([batch_together(runtime.model, [row])]).run([row])
        assert answer.tokens == expected.tokens
    assert len({tuple(answer.tokens) for answer in result}) > 1
