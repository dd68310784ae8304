"""Tests of the thread that runs all work on devices."""

import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.inference.device_thread import in_device_thread


@in_device_thread
def get_thread():
    return threading.current_thread()


@in_device_thread
def get_thread_nested():
    return get_thread()


def test_callers_of_all_threads_share_device_thread():
    with ThreadPoolExecutor(4) as pool:
        threads = {future.result() for future in [pool.submit(get_thread) for _ in range(20)]}
    assert threads == {get_thread(), get_thread_nested()} != {threading.current_thread()}


def test_error_reaches_caller_and_device_thread_keeps_running():
    with pytest.raises(ZeroDivisionError):
        in_device_thread(lambda: 1 // 0)()
    assert in_device_thread(lambda: 1)() == 1


def test_device_thread_keeps_no_reference_to_arguments():
    class Array:
        """An object without attributes, only to be referred to."""

    array = Array()
    reference = weakref.ref(array)
    assert in_device_thread(isinstance)(array, Array)
    del array
    get_thread()
    assert reference() is None


def test_forked_process_has_own_device_thread():
    get_thread()
    if not (pid := os.fork()):
        os._exit(7 if get_thread().is_alive() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_device_session_runs_in_device_thread(exported, monkeypatch):
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
    assert threads == [threading.current_thread()] * 2 + [get_thread()] * 2
