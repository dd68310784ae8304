"""Tests of the cuda target's captured graphs, on the CPU with an emulation of their capture."""

import asyncio
import contextlib
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from opened_engines import run
from targets import exports_for, prompts

from vanilla_transformer_export import Options, Runtime
from vanilla_transformer_export.engine.capacity import open_batch
from vanilla_transformer_export.engine.groups import start_request
from vanilla_transformer_export.engine.limits import Admission
from vanilla_transformer_export.engine.loop import Client, Engine
from vanilla_transformer_export.engine.model import OnnxModel, open_export
from vanilla_transformer_export.errors import SessionError
from vanilla_transformer_export.inference.rows import GenerationRequest
from vanilla_transformer_export.inference.session import Session
from vanilla_transformer_export.targets.cuda import buffers
from vanilla_transformer_export.targets.cuda.rows import CudaRows, CudaRowsFactory

exported = exports_for("cuda")
SEARCHES = [
    dict(),
    dict(num_beams=3),
    dict(num_beams=4, num_return_sequences=2, early_stopping=True),
    dict(do_sample=True, seed=3),
    dict(repetition_penalty=1.3),
    dict(num_beams=2, no_repeat_ngram_size=2),
]


class Captures:
    """An emulation of CUDA graphs: the first run of a graph id in a thread runs it three times."""

    def __init__(self, monkeypatch):
        self.graphs = set()  # session id and graph id
        self.threads = {}
        run_bound = Session.run_bound

        def run(session, binding, options=None):
            name = "-1" if options is None else options.get_run_config_entry("gpu_graph_id")
            key = (id(session), int(name), threading.get_ident())
            times = 1 if int(name) < 0 or key in self.threads else 3
            if int(name) >= 0:
                self.threads[key] = session  # kept alive, so that no other session gets its id
                self.graphs.add(key[:2])
            for _ in range(times):
                run_bound(session, binding, options)

        monkeypatch.setattr(Session, "run_bound", run)


def search_all(runtime, name):
    return [
        runtime.generate(*prompts(name, seed), max_new_tokens=9, **search).tolist()
        for seed in (0, 1)
        for search in SEARCHES
    ]


@pytest.mark.parametrize("name", ["seq2seq", "causal"])
def test_all_threads_get_same_tokens_from_one_capture_thread(exported, name, monkeypatch):
    directory = exported(name)[1]
    expected = search_all(Runtime(directory, device="cpu"), name)
    captures = Captures(monkeypatch)
    runtime = Runtime(directory, device="cpu")
    assert search_all(runtime, name) == expected
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(search_all, runtime, name) for _ in range(4)]
        assert [result.result() for result in results] == [expected] * 4
    assert len({thread for _, _, thread in captures.threads}) == 1


def test_greedy_steps_are_queued_and_only_last_step_is_synchronized(exported, monkeypatch):
    waits = []
    run_bound = Session.run_bound

    def run(session, binding, options=None):
        if options is not None and int(options.get_run_config_entry("gpu_graph_id")) > 0:
            waits.append(
                options.get_run_config_entry("disable_synchronize_execution_providers") == "0"
            )
        run_bound(session, binding, options)

    monkeypatch.setattr(Session, "run_bound", run)
    runtime = Runtime(exported("causal")[1], device="cpu")
    runtime.generate(np.array([[5, 6]]), max_new_tokens=20, eos_token_id=[])
    steps = [False] * 6 + [True] + [False] * 7 + [True] + [False] * 3 + [True]
    assert waits == [True, *steps]  # after the capture


def random_request(rng):
    """Return a request of up to 32 rows of up to 100 tokens, and up to 3 beams."""
    rows, length, beams = rng.integers(1, [33, 101, 4]).tolist()
    ids = rng.integers(4, 48, (rows, length))
    options = Options(max_new_tokens=int(rng.integers(1, 40)), num_beams=beams)
    return GenerationRequest(options, ids, np.ones_like(ids))


def test_random_request_sizes_capture_few_graphs(exported, monkeypatch):
    """There are 6 row counts, 3 slot counts and 3 beam counts. Beam search has one more graph."""
    captures = Captures(monkeypatch)
    decoders = Runtime(exported("causal")[1], device="cpu").model.factory
    rng = np.random.default_rng(0)
    for _ in range(1000):
        request = random_request(rng)
        decoder = decoders.open(request)
        if request.options.num_beams > 1:
            decoder.buffers.beam_graph(request.options)
        decoder.close()
    assert len(captures.graphs) <= 6 * 3 * (1 + 2 + 2)
    assert decoders.pool.num_graphs == len(captures.graphs)
    assert len(decoders.pool.free) <= 6 * 3
    assert len(decoders.pool.beam_sessions) <= 6 * 3 * 2


@pytest.mark.parametrize("limit", ["MAX_KEPT_BYTES", "MAX_GRAPHS"])
@pytest.mark.parametrize("name", ["seq2seq", "causal"])
def test_zero_limits_keep_no_graphs_and_give_same_tokens(exported, name, limit, monkeypatch):
    directory = exported(name)[1]
    expected = search_all(Runtime(directory, device="cpu"), name)
    captures = Captures(monkeypatch)
    monkeypatch.setattr(buffers, limit, 0)
    runtime = Runtime(directory, device="cpu")
    assert search_all(runtime, name) == expected
    assert not captures.graphs
    pool = runtime.model.factory.pool
    assert pool.num_graphs == 0 and [kept.steps for kept in pool.free] == [{}] * len(pool.free)
    assert (pool.num_bytes == 0) == (limit == "MAX_KEPT_BYTES") == (not pool.free)


def test_beam_search_without_a_session_runs_in_numpy(exported, monkeypatch):
    directory = exported("causal")[1]
    options = dict(max_new_tokens=9, num_beams=3)
    expected = Runtime(directory, device="cpu").generate(*prompts("causal"), **options)
    monkeypatch.setattr(buffers, "MAX_BEAM_SESSIONS", 0)
    runtime = Runtime(directory, device="cpu")
    assert runtime.generate(*prompts("causal"), **options).tolist() == expected.tolist()
    assert runtime.model.factory.pool.beam_sessions == {}


def test_full_pool_returns_larger_buffers(exported, monkeypatch):
    runtime = Runtime(exported("seq2seq")[1], device="cpu")
    ids, mask = (np.repeat(array, 2, axis=0) for array in prompts("seq2seq"))
    expected = runtime.generate(ids, mask, max_new_tokens=6).tolist()
    pool = runtime.model.factory.pool
    monkeypatch.setattr(buffers, "MAX_KEPT_BYTES", pool.num_bytes)
    [kept] = pool.free
    assert runtime.generate(ids[:3], mask[:3], max_new_tokens=6).tolist() == expected[:3]
    assert pool.free == [kept] and kept.sizes["batch_size"] == 8


def test_capture_has_slots_for_three_runs(exported, monkeypatch):
    """A run fills one slot per beam, here 40 of the 64 that the request needs."""
    directory = exported("causal")[1]
    options = dict(do_sample=True, seed=1, num_return_sequences=40, max_new_tokens=1)
    expected = Runtime(directory, device="cpu").generate(*prompts("causal"), **options)
    Captures(monkeypatch)
    actual = Runtime(directory, device="cpu").generate(*prompts("causal"), **options)
    assert actual.tolist() == expected.tolist()


def test_prompt_lengths_are_rounded_up_to_powers_of_two(exported, monkeypatch):
    lengths = set()
    prompt_graph = buffers.Buffers.prompt_graph

    def record(self, length, beams):
        lengths.add(length)
        return prompt_graph(self, length, beams)

    monkeypatch.setattr(buffers.Buffers, "prompt_graph", record)
    runtime = Runtime(exported("causal")[1], device="cpu")
    for length in range(1, 40):
        runtime.generate(np.full((1, length), 5), max_new_tokens=1)
    assert lengths == {1, 2, 4, 8, 16, 32, 64}


# --------------------------------------------------------------------------------------- the engine


def random_rows(count):
    rng = np.random.default_rng(0)
    return [rng.integers(4, 48, rng.integers(1, 18)).tolist() for _ in range(count)]


def new_tokens(runtime, name, row, options):
    start = 1 if name == "seq2seq" else len(row)
    tokens = runtime.generate(np.array([row]), np.ones((1, len(row)), int), **options)
    return [ids[: ids.index(2) + 1] if 2 in ids else ids for ids in tokens[:, start:].tolist()]


@pytest.mark.parametrize("name", ["seq2seq", "causal"])
def test_engine_matches_rows_alone(exported, name, monkeypatch):
    """The requests mix all searches and different numbers of new tokens."""
    info, rows = open_export(exported(name)[1]), random_rows(8)
    admission = Admission(info, slots=16, max_waiting=1000)
    cases = [
        (row, {**options, "max_new_tokens": 5 + number % 3})
        for options in SEARCHES
        for number, row in enumerate(rows)
    ]
    runtime = Runtime(exported(name)[1], device="cpu")
    expected = [new_tokens(runtime, name, *case) for case in cases]
    shuffled = random.Random(0).sample(range(len(cases)), len(cases))
    Captures(monkeypatch)
    engine = Engine.open(admission, OnnxModel(info, 1, device="cpu"))
    with contextlib.closing(Client(admission, engine).start()) as client:
        results = run(client, [admission.admit(*cases[place]) for place in shuffled])
    for place, sequences in zip(shuffled, results, strict=True):
        assert [sequence.tokens for sequence in sequences] == expected[place], cases[place]


@pytest.fixture
def calls(monkeypatch):
    """The number of calls of each function that copies between host and device."""
    counts = Counter()
    for owner, name in (
        (CudaRows, "step"), (buffers.DeviceGraph, "put"), (CudaRowsFactory, "start_search")
    ):  # fmt: skip
        function = getattr(owner, name)

        def count(*args, _name=name, _function=function, **kwargs):
            counts[_name] += 1
            return _function(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)
    return counts


@pytest.mark.parametrize("name", ["seq2seq", "causal"])
def test_greedy_stream_stays_on_device(exported, calls, name):
    runtime = Runtime(exported(name)[1], device="cpu")
    calls.clear()  # the calls during the export do not count
    ids, mask = prompts(name)
    expected = runtime.generate(ids, mask, max_new_tokens=20)[:, 1 if name == "seq2seq" else 7 :]
    steps = list(runtime.stream(ids, mask, max_new_tokens=20))
    assert np.stack(steps, axis=1).tolist() == expected.tolist()
    assert calls["step"] == 0 and calls["start_search"] == 2
    assert len(runtime.model.factory.pool.free) == 1
    next(runtime.stream(ids, mask, max_new_tokens=20))  # abandoned
    assert len(runtime.model.factory.pool.free) == 1


@pytest.mark.parametrize("beams, streams", [(1, False), (1, True), (3, False)])
def test_greedy_and_beam_search_of_batch_stay_on_device(exported, calls, beams, streams):
    info = open_export(exported("seq2seq")[1])
    admission = Admission(info, slots=16)
    options = dict(max_new_tokens=20, num_beams=beams, eos_token_id=[])
    inputs = [admission.admit(row, options) for row in ([5, 6, 7], [8, 9, 10])]
    updates = []
    request = start_request(inputs, updates.append, streams)
    batch = open_batch(admission, OnnxModel(info, 1, device="cpu"))
    [first, second] = request.waiting
    assert batch.fits(first, []) and batch.fits(second, [first])
    batch.join([first, second])
    calls.clear()
    num_steps = num_tokens = 0
    while not request.is_finished:
        num_tokens += batch.step()
        num_steps += 1
        request.answer()
    assert not calls
    assert num_steps == (20 if streams else 3) and num_tokens == 2 * 20
    assert [len(result.tokens) for [result] in updates[-1].results] == [20, 20]
    batch.remove([first, second])
    assert batch.search is None and len(batch.factory.pool.free) == 1


def test_failed_capture_raises_and_buffers_are_reused(exported, monkeypatch):
    info = open_export(exported("causal")[1])
    admission = Admission(info, slots=4)
    model = OnnxModel(info, 1, device="cpu")
    client = Client(admission, Engine.open(admission, model)).start()
    bind = buffers.bind_and_capture
    monkeypatch.setattr(buffers, "bind_and_capture", fail)
    with pytest.raises(RuntimeError) as error:
        asyncio.run(client.generate([admission.admit([5], {})]))
    assert not isinstance(error.value, ValueError) and "900" in str(error.value)
    monkeypatch.setattr(buffers, "bind_and_capture", bind)
    assert run(client, [admission.admit([5], {})]) and len(model.factory.pool.free) == 1
    client.close()


def fail(*args):
    raise SessionError("CUDA failure 900: operation not permitted when stream is capturing")
