"""Errors for requests that the scheduler rejects."""

from ..errors import RequestError


def overloaded(waiting: int, most: int) -> RequestError:
    return RequestError(
        429, f"{waiting} rows are waiting, expected at most {most}: try again later", retry_after=1
    )


def draining() -> RequestError:
    return RequestError(503, "the server is shutting down: ask another one", retry_after=5)
