"""Tests of the states of a served model."""

import asyncio
import threading

import pytest

from vanilla_transformer_export.serving.models import READY, UNLOADED, ServedModel


def test_cancelled_and_failing_changes_leave_a_usable_model():
    """The first load fails, the second is cancelled by its caller, the third call waits for it."""
    opened = threading.Event()

    async def open_once():
        if not opened.is_set():
            opened.set()
            raise OSError("no file")
        await asyncio.sleep(0.05)
        return (None,) * 4

    async def run():
        model = ServedModel("a", None, open_once, lambda model, seconds: None)
        with pytest.raises(OSError, match="no file"):
            await model.load()
        assert (model.state, model.problem) == (UNLOADED, "no file")
        first = asyncio.create_task(model.load())
        await asyncio.sleep(0.01)
        first.cancel()
        await model.acquire()
        assert (model.state, model.problem, model.num_requests) == (READY, "", 1)
        unloads = [asyncio.create_task(model.unload()) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert not any(unload.done() for unload in unloads)
        model.release()
        await asyncio.gather(*unloads)
        assert model.state == UNLOADED
        model.unload_if_idle(0.0)
        await model.acquire()
        model.unload_if_idle(0.0)
        assert model.state == READY  # a request uses it
        model.release()
        model.unload_if_idle(1000.0)
        assert model.state == READY
        model.unload_if_idle(0.0)
        await model.load()
        assert model.state == READY

    asyncio.run(run())
