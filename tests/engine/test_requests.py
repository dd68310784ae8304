"""Tests of the requests of an engine: streams, cancelled and rejected requests, and errors."""

import asyncio
import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest
from engine_requests import DECODER, MAX_NEW_TOKENS, OPTIONS, SEQ2SEQ, expected_tokens
from messages import raises
from opened_engines import first_batch, open_client, run
from targets import SIZES

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.engine.capacity import open_batch
from vanilla_transformer_export.engine.groups import start_request
from vanilla_transformer_export.engine.loop import Engine
from vanilla_transformer_export.engine.model import open_for_workers
from vanilla_transformer_export.errors import RequestError, SessionError, UsageError
from vanilla_transformer_export.inference.session import LoadedExport
from vanilla_transformer_export.targets.portable.rows import PortableRows


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
