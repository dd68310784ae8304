"""What a request is refused with. Each protocol puts it into its own error format."""


class Refusal(Exception):
    """An answer that is no answer.

    Args:
        status: of HTTP.
        message: the value seen and the value expected.
        retry_after: seconds after which it may be worth asking again.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after = retry_after


class TooLong(ValueError):
    """A request that the slots cannot hold, whatever else is running."""


def overloaded(waiting: int, most: int) -> Refusal:
    return Refusal(429, f"{waiting} rows are waiting, expected at most {most}: try again later", retry_after=1)


def draining() -> Refusal:
    return Refusal(503, "the server is shutting down: ask another one", retry_after=5)


def timed_out(seconds: float) -> Refusal:
    return Refusal(503, f"the request took longer than {seconds:g} seconds, the limit of this server", retry_after=1)


def loading() -> Refusal:
    return Refusal(503, "the models are being loaded: try again later", retry_after=2)


def busy(most: int) -> Refusal:
    return Refusal(429, f"{most} requests are running, expected at most so many: try again later", retry_after=1)


def too_large(seen: int, most: int) -> Refusal:
    return Refusal(413, f"a body of at least {seen} bytes, expected at most {most}")
