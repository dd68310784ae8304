"""Tests of continuous batching: in any batch, a job has the tokens of `Runtime.generate` and the
same bits."""

import asyncio
import dataclasses
import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest
import torch
from messages import raises
from opened_engines import first_batch, open_client, run
from targets import SIZES

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.engine.capacity import batch_together, open_batch
from vanilla_transformer_export.engine.groups import Cohort, start_request
from vanilla_transformer_export.engine.inputs import LENGTH, STOP
from vanilla_transformer_export.engine.limits import Admission, Pace
from vanilla_transformer_export.engine.loop import Engine
from vanilla_transformer_export.engine.model import open_for_workers
from vanilla_transformer_export.errors import RequestError, SessionError, UsageError
from vanilla_transformer_export.inference.session import LoadedExport
from vanilla_transformer_export.targets.portable.rows import PortableRows

MAX_NEW_TOKENS = 9
OPTIONS = [
    dict(),
    dict(do_sample=True, seed=3),
    dict(do_sample=True, seed=4, temperature=0.7, top_k=5, top_p=0.9, min_p=0.02),
    dict(num_beams=3),
    dict(
        num_beams=4,
        num_return_sequences=2,
        length_penalty=0.4,
        early_stopping=True,
        renormalize_logits=True,
    ),
    dict(repetition_penalty=1.4, no_repeat_ngram_size=2, min_new_tokens=4),
    dict(
        bad_words_ids=[[7], [8, 9]],
        suppress_tokens=[11],
        begin_suppress_tokens=[12],
        forced_eos_token_id=2,
    ),
    dict(forced_bos_token_id=13, max_new_tokens=1),
]
SEQ2SEQ, DECODER = "seq2seq", "causal"


@pytest.fixture
def start_engine():
    """Return a function that starts an client, which is closed after the test."""
    started_engines = []

    def start(*args, **settings):
        started_engines.append(open_client(*args, slots=8, **settings).start())
        return started_engines[-1]

    yield start
    for client in started_engines:
        client.close()


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


def expected_tokens(runtime, ids, prefix, options):
    """Return the tokens of `Runtime.generate`, without padding."""
    start = np.array([prefix]) if prefix else None
    rows = runtime.generate(
        np.array([ids]),
        np.ones((1, len(ids)), int),
        start,
        **{"max_new_tokens": MAX_NEW_TOKENS, **options},
    )
    rows = rows[:, 1 + len(prefix) if "encoder" in runtime.specs else len(ids) :].tolist()
    return [row[: row.index(2) + 1] if 2 in row else row for row in rows]


def admit_jobs(client, name, options=OPTIONS, **others):
    return [
        client.admission.admit(ids, {"max_new_tokens": MAX_NEW_TOKENS, **each}, prefix, **others)
        for ids, prefix in inputs(name)
        for each in options
    ]


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


# ------------------------------------------------------------------------------------- the requests


def test_stream_yields_tokens_of_answer_and_frees_rows_when_closed(exported_for, start_engine):
    _, directory = exported_for(DECODER, "cpu")
    client = start_engine(directory)
    job = client.admission.admit(
        [5, 6], dict(do_sample=True, seed=2, num_return_sequences=3, max_new_tokens=30)
    )

    async def read(max_events):
        stream = client.stream(job)
        events = []
        async for event in stream:
            events.append(event)
            if len(events) == max_events:
                break
        await stream.aclose()
        return events

    async def check():
        [answers] = await client.generate([job])
        events = await read(None)
        for index, answer in enumerate(answers):
            own_events = [event for event in events if event.index == index]
            assert [event.token for event in own_events] == answer.tokens
            assert [event.finish_reason for event in own_events] == [None] * (
                len(own_events) - 1
            ) + [answer.finish_reason]
        await read(2)
        waiting = asyncio.create_task(client.generate([job] * 20))
        await asyncio.sleep(0.01)
        waiting.cancel()
        for _ in range(200):
            await asyncio.sleep(0.01)
            if not client.engine.running + client.engine.waiting:
                break
        assert client.engine.running == 0
        assert await client.generate([job]) == [answers]
        with raises(UsageError, seen=("num_beams", 2), expected=("num_beams", 1)):
            await anext(client.stream(client.admission.admit([5], dict(num_beams=2))))

    asyncio.run(check())


def test_static_batch_closes_decoder_with_last_row(exported_for, monkeypatch):
    client = open_client(exported_for(DECODER, "portable")[1], slots=2)
    batch = first_batch(client)
    job = client.admission.admit([5], dict(max_new_tokens=3))
    batch.join(list(start_request([job] * 2).waiting))
    closed = []
    monkeypatch.setattr(batch.rows, "close", lambda: closed.append(True))
    first, last = batch.running
    batch.remove([first])
    assert not closed
    batch.remove([last])
    assert closed == [True] and batch.rows is None


def test_failed_request_does_not_affect_others(exported_for, start_engine, monkeypatch):
    client = start_engine(exported_for(DECODER, "cpu")[1])
    suppressed = client.admission.admit(
        [5], dict(do_sample=True, suppress_tokens=list(range(SIZES["vocab_size"])))
    )
    fine = client.admission.admit([5, 6], dict(max_new_tokens=MAX_NEW_TOKENS))

    async def check():
        return await asyncio.gather(
            client.generate([suppressed]), client.generate([fine]), return_exceptions=True
        )

    error, answers = asyncio.run(check())
    assert isinstance(error, ValueError)
    assert answers == run(client, [fine])

    def fail(*args):
        raise Exception("no memory")  # the class of onnxruntime's errors

    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", fail)
    with raises(RuntimeError, seen="no memory"):
        run(client, [fine])
    with raises(SessionError, seen="no memory"):
        Engine.open(client.admission).run([fine])
    monkeypatch.undo()
    assert run(client, [fine]) == answers


def test_end_finishes_accepted_requests_and_close_fails_them(exported_for):
    directory = exported_for(DECODER, "cpu")[1]
    for closes in (False, True):
        client = open_client(directory, slots=8).start()
        job = client.admission.admit([5], dict(max_new_tokens=50, min_new_tokens=50))
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(run, client, [job] * 30)
            while not client.engine.running:
                time.sleep(0.001)
            if closes:
                client.close()
            else:
                client.engine.queue.close()
            if closes:
                with pytest.raises(RequestError) as refused:
                    running.result(30)
                assert refused.value.status == 503
            else:
                assert len(running.result(30)) == 30
        with pytest.raises(RequestError) as refused:
            run(client, [job])
        assert refused.value.status == 503 and not client.room.num_rows
        client.close()


def test_jobs_in_one_batch_keep_their_options(exported_for, start_engine):
    """Results equal those of jobs that run alone, in two orders."""
    client = start_engine(exported_for(SEQ2SEQ, "cpu")[1])
    jobs = [
        client.admission.admit([5, 6, 7], {"max_new_tokens": MAX_NEW_TOKENS, **each})
        for each in OPTIONS
    ]
    alone = [run(client, [job])[0] for job in jobs]
    assert run(client, jobs) == alone
    assert run(client, jobs[::-1]) == alone[::-1]


def test_empty_list_of_inputs_has_no_results(exported_for, start_engine):
    client = start_engine(exported_for(DECODER, "cpu")[1])
    assert run(client, []) == asyncio.run(client.generate([])) == []


@pytest.mark.parametrize("target", ["cpu", "portable"])
@pytest.mark.parametrize("name", [SEQ2SEQ, DECODER])
def test_groups_that_leave_in_any_state_do_not_change_others(exported_for, name, target):
    """Groups are removed before their first token, while their prompt is read, and later."""
    client = open_client(exported_for(name, target)[1], slots=64)
    model = open_for_workers(client.admission.info, 1)
    kinds = [{}, {"do_sample": True, "seed": 3, "num_return_sequences": 2}, {"num_beams": 2}]

    def jobs(options):
        reads = {} if "num_beams" in options else {"scores_prompt": True, "top_logprobs": 0}
        settings = {"max_new_tokens": 6, **options}
        rows = [[5 + row, 6, 7] for row in range(4)]
        return [client.admission.admit(row, settings, **reads) for row in rows]

    def run(inputs, leaves):
        """Return the tokens of each of `inputs`. Number i is removed before step `leaves[i]`."""
        batch = open_batch(client.admission, model)
        parts = list(start_request(inputs).waiting)
        batch.join(parts)
        for step in itertools.count():
            going = [part for place, part in enumerate(parts) if leaves.get(place) == step]
            gone = [group for group in batch.running if group.input in [p.input for p in going]]
            batch.remove(gone)
            if not (batch.running or batch.prefilling):
                break
            batch.join([])
            batch.step()
        return [[each and each.tokens for each in part.results] for part in parts]

    for options in kinds:
        inputs = jobs(options)
        expected = run(inputs, {})
        for leaves in ({0: 0}, {1: 1}, {0: 1, 2: 2}, {3: 4, 0: 5}, {0: 0, 1: 0, 2: 3}):
            actual = run(inputs, leaves)
            stay = [place for place in range(4) if place not in leaves]
            assert [actual[place] for place in stay] == [expected[place] for place in stay]


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"do_sample": True}, {"repetition_penalty": 1.3}], ids=str
)
@pytest.mark.parametrize("target", ["cpu", "portable"])
def test_request_with_logits_that_are_not_finite_fails_alone(exported_for, target, options, number):
    """Before the third token the second of three requests gets `number` among its logits."""
    client = open_client(exported_for(SEQ2SEQ, target)[1], slots=9)
    settings = {"max_new_tokens": MAX_NEW_TOKENS, "eos_token_id": [], "seed": 1, **options}
    jobs = [client.admission.admit([5 + row, 6, 7], settings) for row in range(3)]
    expected = [result[0].tokens for result in run(client.start(), jobs)]
    batch = open_batch(client.admission, open_for_workers(client.admission.info, 1))
    requests = [start_request([job]) for job in jobs]
    batch.join([part for request in requests for part in request.waiting])
    next_logits, steps = batch.next_logits, itertools.count()

    def damaged_logits(rows):
        logits = next_logits(rows)
        if next(steps) == 2:
            places = np.arange(len(logits)) if rows.places is None else rows.places
            logits[np.split(places, 3)[1], 5] = number
        return logits

    batch.next_logits = damaged_logits
    while batch.running:
        batch.step()
        batch.remove([])
    assert isinstance(requests[1].error, ValueError)
    for place in (0, 2):
        [[result]] = requests[place].results
        assert requests[place].error is None and result.tokens == expected[place]


def test_rows_are_closed_if_their_prompts_cannot_be_read(exported_for, monkeypatch):
    client = open_client(exported_for(DECODER, "portable")[1], slots=2)
    batch, closed = first_batch(client), []
    job = client.admission.admit([5], dict(max_new_tokens=3))

    def fail(*args):
        raise SessionError("no memory")

    monkeypatch.setattr(PortableRows, "prefill", fail)
    monkeypatch.setattr(PortableRows, "close", lambda rows: closed.append(rows))
    with raises(SessionError, seen="no memory"):
        batch.join(list(start_request([job]).waiting))
    assert len(closed) == 1 and batch.rows is None and not batch.running


def test_source_that_cannot_be_encoded_leaves_the_slots_as_they_were(
    exported_for, start_engine, monkeypatch
):
    client = start_engine(exported_for(SEQ2SEQ, "cpu")[1])
    job = client.admission.admit([5, 6], dict(max_new_tokens=MAX_NEW_TOKENS))

    def fail(*args):
        raise SessionError("no memory")

    monkeypatch.setattr(LoadedExport, "outputs", fail)
    with raises(RuntimeError, seen="no memory"):
        run(client, [job])
    monkeypatch.undo()
    [[answer]] = run(client, [job])
    runtime = Runtime(client.admission.info.directory, threads=1)
    assert [answer.tokens] == expected_tokens(runtime, [5, 6], [], {})


def test_samples_have_log_probabilities_of_their_own_tokens(exported_for, start_engine):
    client = start_engine(exported_for(DECODER, "cpu")[1])
    sampling = dict(do_sample=True, seed=1, num_return_sequences=3, max_new_tokens=9)
    job = client.admission.admit([5, 6, 7], sampling, top_logprobs=0)
    [samples] = run(client, [job])
    for sample in samples:
        assert [known.token for known in sample.logprobs] == sample.tokens
    assert len({tuple(sample.tokens) for sample in samples}) == 3
