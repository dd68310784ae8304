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


def not_loadable(name: str) -> RequestError:
    return RequestError(
        503,
        f"the model {name} cannot be loaded, see the log of the server: try again later",
        retry_after=5,
    )


def no_memory(name: str, size: int, limit: int, used: int, others: str) -> RequestError:
    """Return the error of a model of `size` bytes that does not fit into `limit` beside the models
    `others`, which take `used` bytes."""
    beside = f" beside {megabytes(used)} of {others}" if used else ""
    return RequestError(
        503,
        f"the model {name} takes about {megabytes(size)}{beside}, expected at most "
        f"{megabytes(limit)} together (--max-memory): try again when a model is unloaded",
        retry_after=5,
    )


def megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def busy(max_requests: int) -> RequestError:
    return RequestError(
        429,
        f"{max_requests} requests are running, which is the limit of this server: try again later",
        retry_after=1,
    )


def too_large(seen: int, max_size: int) -> RequestError:
    return RequestError(413, f"the body has at least {seen} bytes, expected at most {max_size}")
