"""Errors for requests that the scheduler rejects."""

from ..errors import RequestError


def overloaded(num_waiting: int, max_waiting: int) -> RequestError:
    """Return the error, status 429, of a request that finds the queue full.

    `num_waiting` rows are waiting, and `max_waiting` is the limit.
    """
    return RequestError(
        429,
        f"{num_waiting} rows are waiting, expected at most {max_waiting}: try again later",
        retry_after=1,
    )


def shutting_down() -> RequestError:
    """Return the error, status 503, of a request to a server that is shutting down."""
    return RequestError(503, "the server is shutting down: ask another one", retry_after=5)
