"""Errors for requests that the scheduler rejects."""

from ..errors import RequestError

# Small requests, of at most this number of rows, may exceed the limit of waiting rows by a share,
# so that long lists of texts do not exclude all others.
SMALL_ROWS, SMALL_SHARE = 16, 8


def check_room(
    num_waiting: int, num_rows: int, max_waiting: int, num_small: int, state: str = "waiting"
) -> None:
    """Check that the queue has room for a request. An empty queue accepts any number of rows.

    Args:
        num_waiting: the number of rows in the queue, or in another `state`.
        num_rows: the number of rows of the request.
        max_waiting: the maximum of both together.
        num_small: the rows of unanswered requests of at most `SMALL_ROWS`. Such a request is
            accepted while they have less than a share of `max_waiting`.

    Raises:
        RequestError: 429 if the queue has no room.
    """
    is_small = num_rows <= SMALL_ROWS and num_small + num_rows <= max_waiting // SMALL_SHARE
    if num_waiting and num_waiting + num_rows > max_waiting and not is_small:
        raise overloaded(num_waiting, num_rows, max_waiting, state)


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
