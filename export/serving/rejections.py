"""The errors with which the server rejects or ends a request. The scheduler has its own."""

from ..errors import RequestError


def timed_out(seconds: float) -> RequestError:
    return RequestError(
        503,
        f"the request took longer than {seconds:g} seconds, the limit of this server",
        retry_after=1,
    )


def loading() -> RequestError:
    return RequestError(503, "the server is loading its models: try again later", retry_after=2)


def busy(max_requests: int) -> RequestError:
    return RequestError(
        429,
        f"{max_requests} requests are running, which is the limit of this server: try again later",
        retry_after=1,
    )


def too_large(seen: int, max_size: int) -> RequestError:
    return RequestError(413, f"the body has at least {seen} bytes, expected at most {max_size}")
