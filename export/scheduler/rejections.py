"""Errors for requests that the scheduler rejects."""

from ..errors import RequestError


def overloaded(
    num_waiting: int, num_rows: int, max_waiting: int, state: str = "waiting"
) -> RequestError:
    """Return the error, status 429, of a request for which the queue has no room.

    `num_waiting` rows are waiting, or in another `state`. The request has `num_rows`. Both together
    may be `max_waiting`.
    """
    return RequestError(
        429,
        f"{num_waiting} rows are {state} and this request has {num_rows}, expected at most "
        f"{max_waiting} together: try again later",
        retry_after=1,
    )


def shutting_down() -> RequestError:
    """Return the error, status 503, of a request to a server that is shutting down."""
    return RequestError(503, "the server is shutting down: ask another one", retry_after=5)
