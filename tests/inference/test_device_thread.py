"""Tests of the thread that uses devices."""

import functools
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.inference.device_thread import DEVICE_THREAD, in_device_thread


@in_device_thread
def thread():
    return threading.current_thread()


@in_device_thread
def nested():
    return thread()


def test_callers_of_all_threads_share_the_thread():
    with ThreadPoolExecutor(4) as pool:
        threads = {future.result() for future in [pool.submit(thread) for _ in range(20)]}
    assert threads == {DEVICE_THREAD.thread, nested()} != {threading.current_thread()}


def test_a_caller_gets_the_error_and_the_thread_goes_on():
    with pytest.raises(ZeroDivisionError):
        DEVICE_THREAD.call(lambda: 1 // 0)
    assert DEVICE_THREAD.call(lambda: 1) == 1


def test_the_thread_keeps_nothing_of_a_call():
    class Array:
        pass

    array = Array()
    reference = weakref.ref(array)
    assert DEVICE_THREAD.call(functools.partial(isinstance, array, Array))
    del array
    thread()
    assert reference() is None


def test_a_forked_process_has_a_thread_of_its_own():
    thread()
    if not (pid := os.fork()):
        os._exit(7 if thread().is_alive() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_session_on_a_device_runs_there(exported, monkeypatch):
    runtime = Runtime(exported("encoder").directory)
    session = runtime.model.session("encoder")
    threads = []

    class Inner:
        def run(self, *args):
            threads.append(threading.current_thread())

        run_with_iobinding = run

    monkeypatch.setattr(session, "inner", Inner())
    for is_on_cpu in (True, False):
        monkeypatch.setattr(session, "is_on_cpu", is_on_cpu)
        session.run([], {})
        session.run_bound(None)
    assert threads == [threading.current_thread()] * 2 + [DEVICE_THREAD.thread] * 2
