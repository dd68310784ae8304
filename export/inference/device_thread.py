"""The thread that uses devices.

onnxruntime keeps captured CUDA graphs by thread: the first run of a graph in another thread would
run it three times. A copy in another thread would break a capture. So one thread of a process opens
and runs the sessions on devices, and copies from and to them.
"""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Args = ParamSpec("Args")
Result = TypeVar("Result")
LOCAL = threading.local()  # has `is_device_thread` in that thread only
LOCK = threading.Lock()
POOLS: dict[int, ThreadPoolExecutor] = {}  # by process, because a fork copies no thread


def device_pool() -> ThreadPoolExecutor:
    """Return the pool of the only device thread of this process."""
    with LOCK:
        if os.getpid() not in POOLS:
            mark = functools.partial(setattr, LOCAL, "is_device_thread", True)
            POOLS[os.getpid()] = ThreadPoolExecutor(1, "device", mark)
        return POOLS[os.getpid()]


def call_in_device_thread(
    function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs
) -> Result:
    """Call `function` in the device thread and return its result, or raise its error."""
    if hasattr(LOCAL, "is_device_thread"):
        return function(*args, **kwargs)
    return device_pool().submit(function, *args, **kwargs).result()


def in_device_thread(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Return `function`, run in the device thread. Callers wait for it."""

    @functools.wraps(function)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        return call_in_device_thread(function, *args, **kwargs)

    return call
