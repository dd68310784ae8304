"""The errors that reject a request, beside those of the engine. Each protocol has its own error
format."""

from ..errors import RequestError


def timed_out(seconds: float) -> RequestError:
    return RequestError(
        503,
        f"the request took longer than {seconds:g} seconds, the limit of this server",
        retry_after=1,
    )


def loading() -> RequestError:
    return RequestError(503, "the models are being loaded: try again later", retry_after=2)


def busy(max_requests: int) -> RequestError:
    return RequestError(
        429,
        f"{max_requests} requests are running, expected at most so many: try again later",
        retry_after=1,
    )


def too_large(seen: int, max_size: int) -> RequestError:
    return RequestError(413, f"a body of at least {seen} bytes, expected at most {max_size}")
