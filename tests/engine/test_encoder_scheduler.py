"""Tests of the encoder scheduler: rows of several requests run together with unchanged results."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from heads import HEADS, MANY, PAIRS, close, export_for_images, save_head, tokenizer_for
from messages import raises
from random_prompts import pad_rows

from vanilla_transformer_export import ImageRuntime, Runtime, TextRuntime, export
from vanilla_transformer_export.engine import encoder
from vanilla_transformer_export.engine.encoder import (
    EncoderGraph,
    EncoderInputs,
    EncoderScheduler,
    padded_length,
)
from vanilla_transformer_export.engine.inputs import encoder_feeds
from vanilla_transformer_export.errors import RequestError, TooLong
from vanilla_transformer_export.inference.session import SessionChanges
from vanilla_transformer_export.serving.models import batched


@pytest.fixture(scope="module")
def export_head(tmp_path_factory):
    """Return a function that exports a head of `HEADS` and returns the directory of the export.

    Its arguments are the head, changed fields of the config, and settings of the export.
    """
    result = {}

    def make(name, fields=(), **settings):
        key = name, fields, *settings.items()
        if key not in result:
            architecture, kind, own = HEADS[name]
            folder = tmp_path_factory.mktemp("head")
            tokenizer = tokenizer_for(kind, architecture)
            checkpoint = save_head(
                architecture, tokenizer, folder / "checkpoint", **{**own, **dict(fields)}
            )
            export(checkpoint, folder / "export", cases=1, **settings)
            result[key] = folder / "export"
        return result[key]

    return make


MEAN = (("classifier_pooling", "mean"), ("type_vocab_size", 0))


def random_rows(runtime, count=40, longest=50):
    rng = np.random.default_rng(0)
    size = runtime.config["vocab_size"]
    end = runtime.config["eos_token_id"]  # some classifiers read the end token
    return [[*rng.integers(4, size, rng.integers(1, longest)).tolist(), end] for _ in range(count)]


def run_rows(scheduler, rows):
    ids, mask = pad_rows(rows, pad=scheduler.graph.config["pad_token_id"])
    result = scheduler.run(
        encoder_feeds(scheduler.graph.model.info, {"input_ids": ids, "attention_mask": mask})
    )
    return [{name: values[place] for name, values in result.items()} for place in range(len(rows))]


def check_mixes(scheduler, mixes, per_token=False):
    """Check that rows in random mixes, run from several threads, have the bits of a row alone."""
    rows = random_rows(scheduler.graph)
    alone = [run_rows(scheduler, [row])[0] for row in rows]
    rng = np.random.default_rng(1)

    def check_mix(positions):
        for place, result in zip(
            positions, run_rows(scheduler, [rows[place] for place in positions]), strict=True
        ):
            for name, values in result.items():
                own = alone[place][name]
                values = values[: len(rows[place])] if per_token else values
                np.testing.assert_array_equal(values, own[: len(values)] if per_token else own)

    with ThreadPoolExecutor(6) as pool:
        done = [
            pool.submit(check_mix, rng.choice(len(rows), rng.integers(1, 9))) for _ in range(mixes)
        ]
        for each in done:
            each.result()


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_bit_identical_alone_and_in_200_mixes(export_head, threads):
    runtime = Runtime(export_head("classify", MEAN, target="cpu"), threads=threads)
    with contextlib.closing(EncoderScheduler(runtime.model, workers=2)) as scheduler:
        assert scheduler.graph.max_rows > 1  # rows do run together
        check_mixes(scheduler, 200)


def test_max_batch_rows_depends_on_device(export_head):
    model = Runtime(export_head("classify", MEAN, target="cpu"), threads=2).model
    graph = EncoderGraph(model)
    [row] = graph.rows(EncoderInputs(encoder_feeds(model.info, {"input_ids": [[5] * 8]})))
    assert graph.max_batch_rows(row) == 2 * 256 // 8
    model.loaded = replace(model.loaded, device="cuda")
    assert graph.max_batch_rows(row) == 16384 // 8


def test_rows_that_may_run_together_are_measured_once(export_head, monkeypatch):
    directory = export_head("classify", MEAN, target="cpu")
    first = EncoderGraph(Runtime(directory, threads=1).model)
    measured = []
    monkeypatch.setattr(encoder, "MEASURED", {**encoder.MEASURED})
    monkeypatch.setattr(encoder, "invariant_rows", lambda *graph: measured.append(graph) or (1, 7))
    again = EncoderGraph(Runtime(directory, threads=1).model)
    assert (again.max_rows, again.min_rows) == (first.max_rows, first.min_rows)
    changes = SessionChanges(without=("fusions",))
    for other in (Runtime(directory, threads=3), Runtime(directory, threads=1, changes=changes)):
        assert EncoderGraph(other.model).max_rows == 7
    assert len(measured) == 2


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [{"target": "cpu", "dtype": "int8"}, {"target": "cpu"}, {"dtype": "int8"}, {}],
    ids=str,
)
@pytest.mark.parametrize(
    "name",
    ["classify", "tag", "answer", "fill_mask", "classify by a decoder", "classify by both stacks"],
)
def test_rows_of_every_export_are_bit_identical_alone_and_in_mixes(
    export_head, name, settings, threads
):
    with contextlib.closing(
        EncoderScheduler(Runtime(export_head(name, **settings), threads=threads).model, workers=2)
    ) as scheduler:
        if settings.get("target") == "cpu" or not settings:
            assert scheduler.graph.max_rows > 1
        check_mixes(scheduler, 50, per_token=name in ("tag", "answer", "fill_mask"))


def test_workers_that_share_one_call_lose_no_rows(export_head):
    with contextlib.closing(
        EncoderScheduler(
            Runtime(export_head("classify", MEAN, target="cpu"), threads=1).model, workers=4
        )
    ) as scheduler:
        rows = random_rows(scheduler.graph, 40)
        for _ in range(50):
            assert all(result["logits"].any() for result in run_rows(scheduler, rows))


def test_padded_length_rounds_up_to_few_lengths():
    assert [padded_length(length, 512) for length in (1, 8, 9, 64, 65, 128, 129, 500)] == [
        8,
        8,
        16,
        64,
        80,
        128,
        160,
        512,
    ]
    assert [padded_length(length, 30) for length in (3, 25, 30, 31)] == [8, 30, 30, 31]
    assert all(padded_length(length, 512) % 8 == 0 for length in range(1, 500))


def test_batched_runtime_matches_plain_runtime(export_head):
    directory = export_head("classify", MEAN, target="cpu")
    runtime, plain = TextRuntime(directory, threads=1), TextRuntime(directory, threads=1)
    scheduler = batched(runtime, workers=2)
    with contextlib.closing(scheduler):
        close(runtime.classify(MANY), plain.classify(MANY))
        close(runtime.classify(PAIRS, top_k=None), plain.classify(PAIRS, top_k=None))
        close(runtime.zero_shot(MANY[:3], ["a", "b"]), plain.zero_shot(MANY[:3], ["a", "b"]))


# ---------------------------------------------------------------------------- requests, with a stub


class Session:
    """A session that sums the ids of each row, once `free` is set."""

    def __init__(self):
        self.free = threading.Event()
        self.free.set()
        self.shapes, self.order = [], []
        self.error = None

    def run(self, names, feeds):
        self.shapes.append(feeds["input_ids"].shape)
        self.order += feeds["input_ids"][:, 0].tolist()
        self.free.wait()
        if self.error is not None:
            raise self.error
        return [
            (feeds["input_ids"] * feeds["attention_mask"])
            .sum(axis=1, keepdims=True)
            .astype(np.float32)
        ]


@pytest.fixture
def stub(export_head, monkeypatch):
    """A scheduler with one worker whose session is a `Session`."""
    runtime = Runtime(export_head("classify", MEAN, target="cpu"), threads=1)
    session = Session()
    monkeypatch.setitem(runtime.model.loaded.sessions, "encoder", session)
    with contextlib.closing(EncoderScheduler(runtime.model, max_waiting=20)) as scheduler:
        session.shapes.clear()
        session.order.clear()
        yield scheduler, session
        session.free.set()


def submit(scheduler, rows):
    """Return a coroutine that runs `rows` and returns the first logit of each row."""
    return scheduler.call(
        len(rows), lambda: [float(result["logits"][0]) for result in run_rows(scheduler, rows)]
    )


async def wait_until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("nothing happened")


def test_rows_of_several_requests_run_together(stub):
    scheduler, session = stub

    async def ask():
        session.free.clear()
        first = asyncio.create_task(submit(scheduler, [[5]]))
        await wait_until(lambda: session.shapes)
        others = [asyncio.create_task(submit(scheduler, [[place, 1]])) for place in range(5, 15)]
        others.append(asyncio.create_task(submit(scheduler, [[5] * 9])))
        await wait_until(lambda: scheduler.engine.waiting == 11)
        session.free.set()
        assert await first == [5]
        assert await asyncio.gather(*others) == [*([place + 1] for place in range(5, 15)), [45]]

    asyncio.run(ask())
    assert session.shapes[0][1] == 8 and sorted(session.shapes[1:]) in (
        [(1, 16), (10, 8)],
        [(2, 16), (10, 8)],
    )


def test_long_request_does_not_delay_short_request(stub):
    scheduler, session = stub

    async def ask():
        session.free.clear()
        first = asyncio.create_task(submit(scheduler, [[5] * 50]))
        await wait_until(lambda: session.shapes)
        # At most 4 rows of 64 tokens run together.
        long = asyncio.create_task(submit(scheduler, [[6] * 60] * 12))
        await wait_until(lambda: scheduler.engine.waiting == 12)
        short = asyncio.create_task(submit(scheduler, [[7] * 60]))
        await wait_until(lambda: scheduler.engine.waiting == 13)
        session.free.set()
        await asyncio.gather(first, long, short)

    asyncio.run(ask())
    assert 7 in session.order[1:7]


def test_waiting_rows_of_cancelled_request_are_dropped(stub):
    scheduler, session = stub

    async def ask():
        session.free.clear()
        first = asyncio.create_task(submit(scheduler, [[5]]))
        await wait_until(lambda: session.shapes)
        gone = asyncio.create_task(submit(scheduler, [[6] * 20] * 3))
        stays = asyncio.create_task(submit(scheduler, [[7] * 20]))
        await wait_until(lambda: scheduler.engine.waiting == 4)
        gone.cancel()
        await wait_until(lambda: scheduler.engine.waiting == 1)
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        session.free.set()
        assert await first == [5] and await stays == [140]

    asyncio.run(ask())
    assert 6 not in session.order and scheduler.room.num_rows == 0


def test_full_queue_returns_429_but_empty_queue_accepts_large_request(stub):
    scheduler, session = stub

    async def ask():
        assert len(await submit(scheduler, [[5]] * 30)) == 30
        session.free.clear()
        waiting = asyncio.create_task(submit(scheduler, [[5]] * 18))
        await wait_until(lambda: scheduler.room.num_rows == 18)
        with raises(RequestError, seen="18 rows are waiting or running", expected=20) as refused:
            await submit(scheduler, [[5]] * 3)
        assert refused.value.status == 429 and refused.value.retry_after
        session.free.set()
        await waiting
        assert await submit(scheduler, [[5]] * 3) == [5] * 3

    asyncio.run(ask())


def test_failed_run_raises_runtime_error_and_later_request_succeeds(stub):
    scheduler, session = stub

    async def ask():
        session.error = ValueError("no memory")
        with raises(RuntimeError, seen="no memory"):
            await submit(scheduler, [[5]])
        session.error = None
        assert await submit(scheduler, [[5]]) == [5]

    asyncio.run(ask())


def test_closed_scheduler_answers_queued_requests_and_rejects_new_ones(stub):
    scheduler, session = stub

    async def ask():
        session.free.clear()
        queued = [asyncio.create_task(submit(scheduler, [[place]])) for place in (5, 6)]
        engine = scheduler.engine
        await wait_until(lambda: engine.waiting + len(session.order) == 2)  # one may be running
        scheduler.close()
        with pytest.raises(RequestError) as refused:
            await submit(scheduler, [[7]])
        assert refused.value.status == 503
        session.free.set()
        assert await asyncio.gather(*queued) == [[5], [6]]

    asyncio.run(ask())


def test_too_long_row_raises_and_error_names_length_and_limit(export_head):
    runtime = TextRuntime(export_head("classify", MEAN, target="cpu"), threads=1)
    with contextlib.closing(batched(runtime, max_source=20)):
        with raises(TooLong, seen=21, expected=20):
            runtime.classify(["a " * 19])
        runtime.classify(["a " * 18])


# ---------------------------------------------------------------------------------------- all tasks


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HEADS if name != "classify"])
def test_every_task_matches_plain_runtime(export_head, name):
    runtime, plain = (TextRuntime(export_head(name), threads=1) for _ in range(2))
    mask = "<mask>" if name == "fill_mask" else "[MASK]"
    calls = {
        "classify": lambda each: each.classify(PAIRS, top_k=None),
        "one": lambda each: each.classify(MANY),
        "tag": lambda each: each.tag(MANY, aggregation_strategy="simple"),
        "answer": lambda each: each.answer(
            MANY, MANY[::-1], top_k=2, max_seq_len=100, doc_stride=5
        ),
        "fill": lambda each: each.fill_mask([f"the {mask} man", f"{mask} and {mask}"]),
        "choose": lambda each: each.choose(MANY[:2], [MANY, MANY[:1]]),
        "pretraining": lambda each: each.next_sentence(PAIRS),
        "next": lambda each: each.next_sentence(PAIRS),
    }
    call = next(call for start, call in calls.items() if name.startswith(start))
    with contextlib.closing(batched(runtime, workers=2)):
        actual, expected = call(runtime), call(plain)
    if name in ("choose", "pretraining", "next_sentence"):
        for one, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    else:
        close(actual, expected)


@pytest.mark.slow
def test_images_of_concurrent_requests_match_plain_runtime(tmp_path):
    export_for_images(tmp_path, num_labels=3)
    pictures = [
        np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8) for seed in range(12)
    ]
    runtime, plain = (ImageRuntime(tmp_path / "export", threads=1) for _ in range(2))
    with contextlib.closing(batched(runtime, workers=2)), ThreadPoolExecutor(6) as pool:
        result = list(pool.map(lambda picture: runtime.classify([picture]), pictures))
        assert result == [[each] for each in runtime.classify(pictures)]
    close([each[0] for each in result], plain.classify(pictures))
