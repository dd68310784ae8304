"""The `vanilla-transformer` command."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def end_at_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process in the block, without a traceback.

    Threads other than the main thread cannot change what signals do: there this has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
