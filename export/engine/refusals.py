"""What a job is refused with."""


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
    """A job that the slots cannot hold, whatever else is running."""


def overloaded(waiting: int, most: int) -> Refusal:
    return Refusal(429, f"{waiting} rows are waiting, expected at most {most}: try again later", retry_after=1)


def draining() -> Refusal:
    return Refusal(503, "the server is shutting down: ask another one", retry_after=5)
