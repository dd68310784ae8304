"""A forked child process: its start, its end with the parent, and its heap."""

import contextlib
import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # from sys/prctl.h
M_ARENA_MAX = -8  # from malloc.h
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # termination signals, handled by the parent


def fork(run: Callable[[], None]) -> int:
    """Fork a child process that calls `run` and exits, and return its process id.

    The exit code is 1 if `run` raises, else 0. The child ignores termination signals, which the
    parent handles.

    Raises:
        OSError: if the system cannot start another process.
    """
    # The signal may be ignored by inheritance, and then no one can wait for a child.
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with warnings.catch_warnings():
        # a warning about threads: they are numpy's and end before a fork
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = os.fork()
        except OSError as error:
            raise OSError(
                f"cannot start the process of the workers: {error.strerror or error}, expected "
                "room for one more process"
            ) from None
    if not pid:
        try:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            run()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return pid


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. It does nothing outside of
    Linux."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def share_heap() -> None:
    """Let all threads share one arena of malloc, the C library's pool of memory.

    With an arena per thread, glibc keeps freed memory: 7 MB in the two processes of a server. Other
    systems ignore it.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def trim_heap() -> None:
    """Return freed memory to the system, as far as the C library can. Others than glibc ignore
    it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
