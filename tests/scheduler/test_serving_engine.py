"""Tests of continuous batching: in any batch, a job has the tokens of `Runtime.generate` and the
same bits."""

import asyncio
import random
import threading
import time

import numpy as np
import pytest
import torch
from messages import raises
from opened_engines import first_batch, open_engine
from targets import SIZES

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.errors import RequestError, UsageError
from vanilla_transformer_export.inference.search import start_search
from vanilla_transformer_export.scheduler.request import LENGTH, STOP
from vanilla_transformer_export.scheduler.sequence_group import start_request
from vanilla_transformer_export.scheduler.slot_batch import SlotBatch, SlotSize
from vanilla_transformer_export.scheduler.static_batch import StaticBatch

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
    """Return a function that starts an engine, which is closed after the test."""
    started_engines = []

    def start(*args, **settings):
        started_engines.append(open_engine(*args, slots=8, **settings).start())
        return started_engines[-1]

    yield start
    for engine in started_engines:
        engine.close()


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


def admit_jobs(engine, name, options=OPTIONS, **others):
    return [
        engine.admission.admit(ids, {"max_new_tokens": MAX_NEW_TOKENS, **each}, prefix, **others)
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
    engine = start_engine(directory, workers=2)
    is_continuous = target == "cpu" and name != "seq2seq-t5"  # its heads are 12 wide
    assert isinstance(
        engine.scheduler.workers[0].batch, SlotBatch if is_continuous else StaticBatch
    )
    assert engine.admission.describe().startswith(
        "continuous batching, " if is_continuous else "static batches "
    )
    jobs = admit_jobs(engine, name)
    shuffled = random.Random(0).sample(jobs, len(jobs))
    answers = dict(zip(shuffled, engine.run(shuffled), strict=True))
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


class Recorded(SlotBatch):
    """A slot batch that keeps the logits of each row at each step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.found = {}

    def step(self):
        self.close_gaps()
        rows = [(run, run.slots.index(slot)) for slot, run in enumerate(self.slots)]
        new_tokens = super().step()
        for slot, (run, row) in enumerate(rows):
            place = [part.input for part in run.request.parts].index(run.input)
            logits = self.found.setdefault((place, run.index, row), [])
            logits.append(self.logits[slot].tobytes())
        return new_tokens


IN_FULL = [
    pytest.param(*each, marks=pytest.mark.slow)
    for each in ((SEQ2SEQ, "int8"), (SEQ2SEQ, "int4"), (DECODER, "int4"))
]


def record_logits(engine, name, order, slots, most_joining):
    """Return the logits of jobs that join in `order`, a few at a time."""
    batch = Recorded(
        first_batch(engine).model,
        SlotSize(slots, engine.admission.slot_size.source, engine.admission.slot_size.length),
    )
    client_request = start_request(admit_jobs(engine, name), lambda *update: None)
    runs = list(client_request.waiting)
    waiting = [runs[place] for place in order]
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
        for run in [run for run in batch.running if run.is_finished]:
            batch.remove(run)
    assert client_request.error is None
    return batch.found


@pytest.mark.parametrize("mixes", [2, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name, dtype", [(SEQ2SEQ, "fp32"), (DECODER, "int8"), *IN_FULL])
def test_row_logits_are_bit_identical_in_any_batch(exported_for, name, dtype, mixes):
    _, directory = exported_for(name, "cpu", dtype)
    count = len(inputs(name)) * len(OPTIONS)
    for threads in (1, 2):
        engine = open_engine(directory, slots=8, threads=threads)
        alone = {}
        for place in range(count):
            alone |= record_logits(engine, name, [place], slots=4, most_joining=1)
        for mix in range(mixes):
            order = random.Random(mix).sample(range(count), count)
            together = record_logits(
                engine, name, order, slots=4 + 9 * mix % 61, most_joining=1 + mix % 7
            )
            assert together.keys() == alone.keys()
            assert all(together[row] == alone[row] for row in alone)


def test_long_prompt_is_prefilled_in_chunks_while_other_rows_continue(exported_for):
    _, directory = exported_for(DECODER, "cpu")
    engine = open_engine(directory, slots=8)
    batch = first_batch(engine)
    batch.chunk = 4
    short, long = (
        engine.admission.admit([5], {"max_new_tokens": 30}),
        engine.admission.admit(list(range(4, 22)), {"max_new_tokens": MAX_NEW_TOKENS}),
    )
    client_request = start_request([short, long], lambda *update: None)
    first, second = client_request.waiting
    batch.join([first])
    batch.step()
    progress = []
    batch.join([second])
    while second in batch.prefilling:
        batch.step()
        progress.append((second.num_prefilled, len(first.tokens)))
        batch.join([])
    assert progress == [(4, 2), (8, 3), (12, 4), (16, 5)]
    while not second.is_finished:
        batch.step()
    assert [second.tokens] == expected_tokens(Runtime(directory, threads=1), long.prompt, [], {})


# ------------------------------------------------------------------------------------ probabilities


def test_logprobs_of_prompt_and_new_tokens_match_torch(exported_for, start_engine):
    model, directory = exported_for(DECODER, "cpu")
    engine = start_engine(directory)
    prompt = [5, 9, 31, 7, 22]
    for options in ({}, dict(do_sample=True, seed=1, temperature=0.5)):
        job = engine.admission.admit(
            prompt,
            {"max_new_tokens": MAX_NEW_TOKENS, **options},
            top_logprobs=3,
            scores_prompt=True,
        )
        [[result]] = engine.run([job])
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
    engine, runtime = start_engine(directory), Runtime(directory, threads=1)
    options = dict(do_sample=True, top_k=0, max_new_tokens=MAX_NEW_TOKENS, seed=11)
    [result] = engine.run(
        [engine.admission.admit([5, 6, 7], {**options, "num_return_sequences": 4})]
    )
    for number, answer in enumerate(result):
        request = runtime.request(np.array([[5, 6, 7]]), None, None, options)
        search = start_search(request.options, request.prompt)
        search.choose.uniforms = [np.random.default_rng([11, number] if number else 11).random]
        list(runtime.model.tokens(request, search))
        row = search.result()[0][0].tolist()
        assert answer.tokens == (row[: row.index(2) + 1] if 2 in row else row)
    assert len({tuple(answer.tokens) for answer in result}) > 1


# ------------------------------------------------------------------------------------- the requests


def test_stream_yields_tokens_of_answer_and_frees_rows_when_closed(exported_for, start_engine):
    _, directory = exported_for(DECODER, "cpu")
    engine = start_engine(directory)
    job = engine.admission.admit(
        [5, 6], dict(do_sample=True, seed=2, num_return_sequences=3, max_new_tokens=30)
    )

    async def read(max_events):
        stream = engine.stream(job)
        events = []
        async for event in stream:
            events.append(event)
            if len(events) == max_events:
                break
        await stream.aclose()
        return events

    async def check():
        [answers] = await engine.generate([job])
        events = await read(None)
        for index, answer in enumerate(answers):
            own_events = [event for event in events if event.index == index]
            assert [event.token for event in own_events] == answer.tokens
            assert [event.finish_reason for event in own_events] == [None] * (
                len(own_events) - 1
            ) + [answer.finish_reason]
        await read(2)
        waiting = asyncio.create_task(engine.generate([job] * 20))
        await asyncio.sleep(0.01)
        waiting.cancel()
        for _ in range(200):
            await asyncio.sleep(0.01)
            if not engine.running + engine.waiting:
                break
        assert engine.running == 0
        assert await engine.generate([job]) == [answers]
        with raises(UsageError, seen=("num_beams", 2), expected=("num_beams", 1)):
            await anext(engine.stream(engine.admission.admit([5], dict(num_beams=2))))

    asyncio.run(check())


def test_static_batch_closes_decoder_with_last_row(exported_for, monkeypatch):
    engine = open_engine(exported_for(DECODER, "portable")[1], slots=2)
    batch = first_batch(engine)
    job = engine.admission.admit([5], dict(max_new_tokens=3))
    engine.put(start_request([job] * 2, lambda *update: None))
    batch.join(engine.scheduler.queue.take(batch))
    closed = []
    monkeypatch.setattr(batch.decoder, "close", lambda: closed.append(True))
    first, last = batch.running
    batch.remove(first)
    assert not closed
    batch.remove(last)
    assert closed == [True] and batch.decoder is None


def test_failed_request_does_not_affect_others(exported_for, start_engine, monkeypatch):
    engine = start_engine(exported_for(DECODER, "cpu")[1])
    suppressed = engine.admission.admit(
        [5], dict(do_sample=True, suppress_tokens=list(range(SIZES["vocab_size"])))
    )
    fine = engine.admission.admit([5, 6], dict(max_new_tokens=MAX_NEW_TOKENS))

    async def check():
        return await asyncio.gather(
            engine.generate([suppressed]), engine.generate([fine]), return_exceptions=True
        )

    error, answers = asyncio.run(check())
    assert isinstance(error, ValueError)
    assert answers == engine.run([fine])
    run = engine.scheduler.workers[0].batch.session.run_bound
    monkeypatch.setattr(
        engine.scheduler.workers[0].batch.session,
        "run_bound",
        lambda *args: (_ for _ in ()).throw(ValueError("no memory")),
    )
    with raises(RuntimeError, seen="no memory"):
        engine.run([fine])
    monkeypatch.setattr(engine.scheduler.workers[0].batch.session, "run_bound", run)
    assert engine.run([fine]) == answers


def test_close_finishes_accepted_requests_or_gives_up_at_timeout(exported_for):
    directory = exported_for(DECODER, "cpu")[1]
    for seconds, finished in ((60, True), (0, False)):
        engine = open_engine(directory, slots=8).start()
        results = []

        def ask(engine=engine, results=results):
            try:
                results.append(
                    engine.run(
                        [engine.admission.admit([5], dict(max_new_tokens=50, min_new_tokens=50))]
                        * 30
                    )
                )
            except RequestError as refusal:
                results.append(refusal.status)

        asking = threading.Thread(target=ask)
        asking.start()
        while not engine.running:
            time.sleep(0.001)
        assert engine.close(seconds) is finished
        asking.join(30)
        [result] = results
        assert result == 503 if not finished else len(result) == 30
        with pytest.raises(RequestError) as refused:
            engine.run([engine.admission.admit([5], {})])
        assert refused.value.status == 503


def test_jobs_in_one_batch_keep_their_options(exported_for, start_engine):
    """Results equal those of jobs that run alone, in two orders."""
    engine = start_engine(exported_for(SEQ2SEQ, "cpu")[1])
    jobs = [
        engine.admission.admit([5, 6, 7], {"max_new_tokens": MAX_NEW_TOKENS, **each})
        for each in OPTIONS
    ]
    alone = [engine.run([job])[0] for job in jobs]
    assert engine.run(jobs) == alone
    assert engine.run(jobs[::-1]) == alone[::-1]


def test_empty_list_of_inputs_has_no_results(exported_for, start_engine):
    engine = start_engine(exported_for(DECODER, "cpu")[1])
    assert engine.run([]) == asyncio.run(engine.generate([])) == []
