"""Tests of the queue: turns of requests, groups that join, and the batch that they join."""

import asyncio
import functools
import threading

import pytest
from messages import raises
from opened_engines import first_batch, open_client, run

from vanilla_transformer_export.engine import batch as generation_batch
from vanilla_transformer_export.engine.groups import start_request
from vanilla_transformer_export.engine.limits import Pace
from vanilla_transformer_export.engine.queue import MAX_DEFERRED, RequestQueue
from vanilla_transformer_export.errors import RequestError

DECODER = "causal"


def test_long_request_does_not_delay_short_ones_and_full_queue_returns_429(exported_for):
    client = open_client(exported_for(DECODER, "cpu")[1], slots=2, max_waiting=30)
    job = functools.partial(client.admission.admit, [5], dict(max_new_tokens=3))
    order = []
    queue = client.engine.queue
    bulk, single = (start_request([job() for _ in range(count)]) for count in (20, 1))
    client.engine.queue.put(bulk)
    client.engine.queue.put(single)
    assert queue.num_rows == 21
    with raises(RequestError, seen=21, expected=30) as refused:
        run(client, [job() for _ in range(10)])
    assert (refused.value.status, refused.value.retry_after) == (429, 1)
    batch = first_batch(client)
    while queue.num_rows:
        parts = queue.take(batch)
        batch.join(parts)
        order += [part.request for part in parts]
        while batch.running:
            batch.step()
            batch.remove([])
    assert order[:3] == [bulk, single, bulk] and order.count(bulk) == 20

    # an empty queue accepts a request of more rows than may wait
    async def ask():
        with client.request([job() for _ in range(40)]):
            assert client.engine.waiting == 40

    asyncio.run(ask())
    assert client.engine.waiting == 0  # it was cancelled
    queue.close()
    for put in (lambda: client.engine.queue.put(single), lambda: run(client, [job()])):
        with pytest.raises(RequestError) as refused:
            put()
        assert refused.value.status == 503


def test_new_request_uses_spare_rows_beside_a_long_one(exported_for, monkeypatch):
    monkeypatch.setattr(generation_batch, "WAIT_PER_PART", 0.0)
    client = open_client(exported_for(DECODER, "cpu")[1], slots=4)
    job = client.admission.admit([5], dict(max_new_tokens=3))
    batch, queue = first_batch(client), client.engine.queue
    long, first, second = (start_request([job] * count) for count in (9, 1, 1))

    def joining():
        parts = queue.take(batch)
        batch.join(parts)
        return [part.request for part in parts]

    client.engine.queue.put(long)
    assert joining() == [long] * 4 and joining() == []
    client.engine.queue.put(first)
    client.engine.queue.put(second)
    assert joining() == [first] and joining() == []
    batch.step()
    assert batch.num_rows == 5
    for part in list(batch.running):
        batch.remove([part])
    assert joining() == [second, long, long, long]


def test_request_that_was_overtaken_for_long_is_next(exported_for, monkeypatch):
    monkeypatch.setattr("vanilla_transformer_export.engine.queue.MAX_OVERTAKEN", 0.0)
    client = open_client(exported_for(DECODER, "cpu")[1], slots=1)
    job = client.admission.admit([5], dict(max_new_tokens=3))
    long, new = (start_request([job] * count) for count in (3, 1))
    client.engine.queue.put(long)
    [part] = client.engine.queue.take(first_batch(client))
    assert part.request is long
    client.engine.queue.put(new)
    assert list(client.engine.queue.requests) == [long, new]


def test_cancelled_request_leaves_queue_and_full_batch_takes_nothing(
    exported_for,
):
    client = open_client(exported_for(DECODER, "cpu")[1], slots=1, max_waiting=4)
    job = client.admission.admit([5], dict(max_new_tokens=3))
    queue, batch = client.engine.queue, first_batch(client)
    first, gone, last = (start_request([job] * count) for count in (2, 2, 2))
    client.engine.queue.put(first)
    client.engine.queue.put(gone)
    batch.join(queue.take(batch))
    assert (batch.num_free_rows, queue.take(batch), queue.num_rows) == (0, [], 3)
    with raises(RequestError, seen=3, expected=4):
        run(client, [job] * 2)
    queue.cancel(gone)
    assert queue.num_rows == 1
    queue.put(last)
    assert queue.num_rows == 3


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize(
    "options", [dict(), dict(num_beams=4), dict(do_sample=True, num_return_sequences=4)]
)
def test_running_rows_of_cancelled_request_are_freed(exported_for, options, steps):
    client = open_client(exported_for(DECODER, "cpu")[1], slots=4)
    [worker] = client.engine.workers
    job = client.admission.admit([5], dict(max_new_tokens=9, **options))
    request = start_request([job])
    client.engine.queue.put(request)
    worker.batch.join(worker.queue.take(worker.batch))
    for _ in range(steps):
        worker.batch.step()
    assert worker.batch.num_free_rows == 4 - job.num_rows
    client.engine.queue.cancel(request)
    worker.remove_finished()
    assert worker.batch.num_free_rows == 4 and not worker.batch.running


def test_rows_join_a_running_batch_in_groups(exported_for, monkeypatch):
    client = open_client(exported_for(DECODER, "cpu")[1], slots=12)
    job = client.admission.admit([5], dict(max_new_tokens=3))
    batch, queue = first_batch(client), RequestQueue()
    batch.num_spare_rows = 0

    def put(count):
        for _ in range(count):
            queue.put(start_request([job]))

    def joining():
        parts = queue.take(batch)
        batch.join(parts)
        return len(parts)

    def leave(count):
        for part in batch.running[:count]:
            batch.remove([part])

    monkeypatch.setattr("vanilla_transformer_export.engine.batch.WAIT_PER_PART", 1000.0)
    put(3)
    assert joining() == 3  # no running rows would have to wait
    put(7)
    assert joining() == 0
    put(1)
    assert joining() == 8
    put(1)
    assert joining() == 0
    monkeypatch.setattr(generation_batch, "WAIT_PER_PART", 0.0)
    assert joining() == 1
    put(20)
    queue.close()
    assert joining() == 0  # the batch is full
    leave(5)
    assert joining() == 0  # 5 rows fit, but soon 8 will fit
    leave(3)
    assert joining() == 8
    leave(9)
    assert joining() == 9
    leave(9)
    assert joining() == 3  # all waiting rows


def test_new_rows_join_the_larger_batch_until_it_has_its_preferred_rows(exported_for, monkeypatch):
    monkeypatch.setattr(generation_batch, "WAIT_PER_PART", 0.0)
    monkeypatch.setattr("vanilla_transformer_export.engine.queue.MAX_DEFERRED", 1000.0)
    client = open_client(exported_for(DECODER, "cpu")[1], slots=16, workers=2)
    job = client.admission.admit([5], dict(max_new_tokens=20, min_new_tokens=20))
    queue = RequestQueue()
    larger, smaller = (worker.batch for worker in client.engine.workers)
    larger.pace = smaller.pace = Pace(chunk=16, preferred_rows=4)

    def joining(batch, count):
        for _ in range(count):
            queue.put(start_request([job]))
        parts = queue.take(batch)
        batch.join(parts)
        return len(parts)

    assert [joining(smaller, 1), joining(larger, 2), joining(larger, 0)] == [1, 2, 0]
    assert joining(smaller, 1) == 0  # deferred to the larger batch
    assert joining(larger, 0) == 1
    assert joining(smaller, 1) == 0
    monkeypatch.setattr("vanilla_transformer_export.engine.queue.MAX_DEFERRED", 0.0)
    assert joining(smaller, 0) == 1  # it has waited long enough for the larger batch
    monkeypatch.setattr("vanilla_transformer_export.engine.queue.MAX_DEFERRED", 1000.0)
    assert [joining(larger, 2), joining(larger, 0)] == [2, 0]
    assert joining(smaller, 1) == 1  # the larger batch has its preferred rows


@pytest.mark.parametrize("join_delay, is_deferred", [(999.0, True), (1000.0, False)])
def test_parts_are_not_deferred_to_a_batch_with_a_long_join_delay(
    exported_for, monkeypatch, join_delay, is_deferred
):
    monkeypatch.setattr("vanilla_transformer_export.engine.batch.WAIT_PER_PART", join_delay)
    monkeypatch.setattr("vanilla_transformer_export.engine.queue.MAX_DEFERRED", 1000.0)
    client = open_client(exported_for(DECODER, "cpu")[1], slots=16, workers=2)
    job = client.admission.admit([5], dict(max_new_tokens=20))
    queue = RequestQueue()
    larger, smaller = (worker.batch for worker in client.engine.workers)
    larger.pace = Pace(chunk=16, preferred_rows=4)
    first, second = (start_request([job]) for _ in range(2))
    queue.put(first)
    larger.join(queue.take(larger))
    queue.put(second)
    assert queue.take(larger) == []
    assert queue.should_defer(smaller, second.arrived_at) == is_deferred


def test_rows_that_do_not_fit_the_larger_batch_join_another_at_once(exported_for, monkeypatch):
    monkeypatch.setattr(generation_batch, "WAIT_PER_PART", 0.0)
    monkeypatch.setattr("vanilla_transformer_export.engine.queue.MAX_DEFERRED", 1000.0)
    client = open_client(exported_for(DECODER, "cpu")[1], slots=16, workers=2)
    queue, admit = RequestQueue(), client.admission.admit
    larger, smaller = (worker.batch for worker in client.engine.workers)
    larger.pace = smaller.pace = Pace(chunk=16, preferred_rows=100)
    rows = larger.capacity
    queue.put(start_request([admit([5], dict(max_new_tokens=20))]))
    larger.join(queue.take(larger))
    assert queue.take(larger) == []
    queue.put(start_request([admit([5], dict(max_new_tokens=20))] * rows))
    waits, taken, wait = threading.Event(), [], queue.changed.wait

    def announced_wait(seconds):
        waits.set()
        return wait(seconds)

    monkeypatch.setattr(queue.changed, "wait", announced_wait)
    worker = threading.Thread(target=lambda: taken.extend(queue.take(smaller)), daemon=True)
    worker.start()
    assert waits.wait(60)  # its parts are deferred to the larger batch
    assert len(queue.take(larger)) == rows - 1
    worker.join(60)
    assert len(taken) == 1


def test_preferred_rows_count_beams_and_unread_prompts(exported_for, monkeypatch):
    monkeypatch.setattr(generation_batch, "WAIT_PER_PART", 0.0)
    client = open_client(exported_for(DECODER, "cpu")[1], slots=16)
    batch, queue = first_batch(client), RequestQueue()
    batch.pace = Pace(chunk=1, preferred_rows=9)
    beams = client.admission.admit([5], dict(num_beams=4, max_new_tokens=20))
    long = client.admission.admit([5, 6, 7, 8], dict(max_new_tokens=20))
    should_grow = []
    for job, count in ((beams, 2), (long, 1)):
        queue.put(start_request([job] * count))
        batch.join(queue.take(batch))
        batch.join([])  # reads the second prompt of the beams
        should_grow.append(batch.should_grow)
    assert [len(batch.running), len(batch.prefilling), should_grow] == [2, 1, [True, False]]


def test_part_is_deferred_no_longer_than_its_limit(exported_for):
    client = open_client(exported_for(DECODER, "cpu")[1], slots=4)
    batch, queue = first_batch(client), RequestQueue()
    assert queue.wait_seconds(batch, 0.0) is None
    request = start_request([client.admission.admit([5], {})])
    queue.put(request)
    assert queue.wait_seconds(batch, request.arrived_at + 0.004) == pytest.approx(
        MAX_DEFERRED - 0.004
    )


def test_large_sequence_group_is_not_overtaken_indefinitely(exported_for, monkeypatch):
    monkeypatch.setattr("vanilla_transformer_export.engine.queue.MAX_OVERTAKEN", 0.0)
    monkeypatch.setattr(generation_batch, "WAIT_PER_PART", 0.0)
    client = open_client(exported_for(DECODER, "cpu")[1], slots=4)
    batch, queue = first_batch(client), RequestQueue()
    small = client.admission.admit([5], dict(max_new_tokens=20, min_new_tokens=20))
    queue.put(start_request([small]))
    batch.join(queue.take(batch))
    queue.put(start_request([client.admission.admit([5], dict(num_beams=4))]))
    queue.put(start_request([small] * 3))
    assert queue.take(batch) == []  # the beams wait for all slots and join next
    batch.remove(batch.running[:1])
    assert [part.num_rows for part in queue.take(batch)] == [4]


def test_small_requests_join_spare_rows_beside_samples_that_wait_too_long(
    exported_for, monkeypatch
):
    """8 requests of 4 samples: 2 fill the slots, and the next one is overdue. Small ones join in
    the 2 spare rows, whatever becomes free. All free slots are kept for the samples."""
    monkeypatch.setattr("vanilla_transformer_export.engine.queue.MAX_OVERTAKEN", 0.0)
    monkeypatch.setattr(generation_batch, "WAIT_PER_PART", 0.0)
    client = open_client(exported_for(DECODER, "cpu")[1], slots=8)
    batch, queue = first_batch(client), RequestQueue()
    options = dict(do_sample=True, num_return_sequences=4, max_new_tokens=9, min_new_tokens=9)
    samples = [start_request([client.admission.admit([5], options)]) for _ in range(8)]
    small = client.admission.admit([5], dict(max_new_tokens=9))
    singles = [start_request([small]) for _ in range(4)]
    pair = start_request([small] * 2)

    def joining():
        parts = queue.take(batch)
        batch.join(parts)
        return [part.request for part in parts]

    def leave(request, count=None):
        batch.remove([part for part in batch.running if part.request is request][:count])

    for request in samples:
        queue.put(request)
    assert joining() == samples[:2] and joining() == []
    for request in (*singles[:2], pair):
        queue.put(request)
    assert joining() == singles[:2] and joining() == []
    batch.step()  # each sample has a group now
    leave(samples[0], 3)
    assert joining() == []  # 3 slots are kept for the next samples, and no spare row is free
    leave(singles[0])
    assert joining() == []  # both rows of the pair need spare rows
    queue.put(singles[2])
    assert joining() == [singles[2]]
    leave(samples[0])
    assert joining() == [samples[2]] and joining() == []
    leave(singles[1])
    leave(singles[2])
    assert joining() == [pair, pair] and joining() == []
    assert batch.num_rows + sum(group.num_rows for group in batch.prefilling) <= 10


def test_large_requests_use_no_spare_rows(exported_for, monkeypatch):
    monkeypatch.setattr(generation_batch, "WAIT_PER_PART", 0.0)
    client = open_client(exported_for(DECODER, "cpu")[1], slots=8)
    batch, queue = first_batch(client), RequestQueue()
    job = client.admission.admit([5], dict(max_new_tokens=9))
    queue.put(start_request([job] * 3))
    batch.join(queue.take(batch))
    queue.put(start_request([job] * 12))
    batch.join(queue.take(batch))
    assert len(batch.running) == 8 and queue.take(batch) == []
    queue.put(start_request([job] * 3))  # one more than there are spare rows
    assert queue.take(batch) == []
    queue.put(start_request([job] * 2))
    assert len(queue.take(batch)) == 2


def test_rows_join_half_of_a_batch_after_the_queue_is_closed(exported_for):
    """No more requests come then, so rows do not wait until a group of them can join."""
    client = open_client(exported_for(DECODER, "cpu")[1], slots=4)
    lengths = [2, 2, 9, 9, *[3] * 6]
    jobs = [client.admission.admit([5], dict(max_new_tokens=length)) for length in lengths]
    batch, queue = first_batch(client), client.engine.queue
    queue.put(start_request(jobs))
    batch.join(queue.take(batch))
    queue.close()
    batch.step()
    assert queue.take(batch) == []
    batch.step()
    batch.remove([])
    assert len(batch.running) == 2 and len(queue.take(batch)) == 2
