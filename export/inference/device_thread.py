"""The thread that uses devices.

onnxruntime keeps captured CUDA graphs by thread: the first run of a graph in another thread would
run it three times. A copy in another thread would break a capture. So one thread of a process opens
and runs the sessions on devices, and copies from and to them.
"""

import functools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

Args = ParamSpec("Args")
Result = TypeVar("Result")


class DeviceThread:
    """A thread with a queue of calls. It starts with the first call."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process = 0  # the process of the thread, which a fork does not copy

    def call(self, function: Callable[[], Result]) -> Result:
        """Call `function` in the thread and return its result, or raise its error."""
        self.start()
        if threading.current_thread() is self.thread:
            return function()
        future: Future[Result] = Future()
        self.calls.put((future, function))
        return future.result()

    def start(self) -> None:
        with self.lock:
            if self.process == os.getpid():
                return
            self.process = os.getpid()
            self.calls: queue.SimpleQueue[tuple[Future, Callable]] = queue.SimpleQueue()
            self.thread = threading.Thread(target=self.run, name="device", daemon=True)
            self.thread.start()

    def run(self) -> None:
        while True:
            answer(*self.calls.get())  # which keeps no reference to the last call


def answer(future: Future, function: Callable) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


DEVICE_THREAD = DeviceThread()


def in_device_thread(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Return `function`, run in the device thread. Callers wait for it."""

    @functools.wraps(function)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        return DEVICE_THREAD.call(functools.partial(function, *args, **kwargs))

    return call
