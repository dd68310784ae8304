"""Tests of the messages between the server and its engine process, without a server."""

import asyncio
import pickle
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from messages import check_message
from opened_engines import open_client
from serving_load import wait_until

from vanilla_transformer_export.engine.inputs import Update
from vanilla_transformer_export.engine.loop import Client, Engine
from vanilla_transformer_export.engine.process import (
    Outbox,
    ProcessEngine,
    engine_process,
    portable,
)
from vanilla_transformer_export.errors import RequestError, UsageError


class Unusual(Exception):
    """An exception that cannot be created from its message alone."""

    def __init__(self, message, code):
        super().__init__(message)


@pytest.mark.parametrize(
    "error", [UsageError("a"), ValueError("b"), FileNotFoundError(2, "none", "c")]
)
def test_picklable_errors_keep_type_and_message(error):
    result = pickle.loads(pickle.dumps(portable(error)))
    assert (type(result), str(result)) == (type(error), str(error))


@pytest.mark.parametrize("error", [Unusual("a", 1), ValueError(threading.Lock())])
def test_unpicklable_errors_become_runtime_errors_with_same_message(error):
    result = pickle.loads(pickle.dumps(portable(error)))
    assert (type(result), str(result)) == (RuntimeError, str(error))


def test_closed_client_fails_pending_requests_and_rejects_new_ones():
    sent = []
    process = SimpleNamespace(error=None, send=sent.append)
    client = Client(SimpleNamespace(max_waiting=8), ProcessEngine(process, "a")).start()

    async def ask():
        pending = asyncio.create_task(client.generate([SimpleNamespace(num_rows=1)]))
        await asyncio.sleep(0)
        assert client.engine.waiting == 1
        client.close()
        for asked in (pending, client.generate([SimpleNamespace(num_rows=1)])):
            with pytest.raises(RequestError) as rejection:
                await asked
            assert rejection.value.status == 503

    asyncio.run(ask())
    assert [message[0] for message in sent] == ["put"] and not client.room.num_rows


def test_update_that_arrives_after_its_client_left_is_ignored():
    sent = []
    engine = ProcessEngine(SimpleNamespace(error=None, send=sent.append), "a")
    client = Client(SimpleNamespace(max_waiting=8), engine).start()

    async def ask():
        for _ in range(2):  # the future of the queue may be cancelled already, or not yet
            leaving = asyncio.create_task(client.generate([SimpleNamespace(num_rows=1)]))
            await asyncio.sleep(0)
            leaving.cancel()
            number = sent[-1][2]
            engine.received((1, 0), [], [(number, Update([], [[]], None))])
            with pytest.raises(asyncio.CancelledError):
                await leaving
            engine.received((1, 0), [], [(number, Update([], [[]], None))])

    asyncio.run(ask())
    assert not client.room.num_rows and not engine.receivers


def test_last_message_about_a_cancelled_request_has_no_running_rows(exported_for):
    """Otherwise the parent would report running rows until the next request."""
    client = open_client(exported_for("causal", "cpu")[1], slots=8)
    job = client.admission.admit([5], dict(max_new_tokens=50, min_new_tokens=50))
    for _ in range(5):
        messages, is_cancelled = [], threading.Event()
        engine = Engine.open(client.admission)
        [worker] = engine.workers

        def step(step=worker.batch.step, cancelled=is_cancelled):
            cancelled.wait(10)  # or a fast engine ends the request before
            return step()

        worker.batch.step = step
        outbox = Outbox(lambda *message, to=messages: to.append(message), engine)
        outbox.put(7, [job] * 8, False, time.perf_counter())
        wait_until(lambda: engine.running)  # noqa: B023
        outbox.cancel(7)
        is_cancelled.set()
        wait_until(lambda: not engine.running)  # noqa: B023
        engine.close()
        (started, running), activities, updates = messages[-1]
        assert (started, running, updates) == (8, 0, []) and activities[-1].rows == 8


def test_no_child_process_without_generating_models():
    with engine_process(False) as process:
        assert process is None


LARGE = """
import asyncio, os
from vanilla_transformer_export.engine import process

def fail(directory, dtype, sizes):
    raise ValueError(len(sizes["text"]) * "x")

process.open_engine = fail

async def main(started):
    await started.connect()
    for size in (0, 1, 10**7):
        try:
            await started.open("a", "directory", None, {"text": "y" * size})
        except ValueError as error:
            print(len(str(error)))
    os.kill(started.pid, 9)
    for _ in range(2):
        try:
            await started.open("a", "directory", None, {"text": ""})
        except ChildProcessError as error:
            print(error)

with process.engine_process(True) as started:
    asyncio.run(main(started))
"""


def test_messages_of_any_size_are_exchanged_and_end_of_child_is_reported():
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=60)
    *sizes, first, second = done.stdout.splitlines()
    assert sizes == ["0", "1", "10000000"] and first == second, done.stderr
    check_message(first, seen="SIGKILL")
