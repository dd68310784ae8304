"""Load on a server, from a process of its own: reads a load as JSON from its input, and prints what
came of it.

Raw HTTP/1.1 over connections that are kept, with requests that are made before the clock starts,
since the client has the same cores as what it measures. A load is {"port", "path", "bodies",
"seconds"} with either "connections", a closed loop: each asks as soon as it was answered, or
"rate", an open loop: requests come at random moments, that many in a second on average, whatever
has been answered. Latencies of the open loop count from the moment a request was due.
"""

import asyncio
import json
import random
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

PATIENCE = 60  # seconds; requests without an answer by then count as "hung"
LAST_CHUNK = b"\r\n0\r\n\r\n"
# seconds, after which a server may close a connection just when the next request is on its way
LONGEST_IDLE = 3
PAUSE = 0.02  # seconds until a closed loop continues after an error


def request(path: str, body: str | bytes, headers: dict[str, str] | None = None) -> bytes:
    body = body.encode() if isinstance(body, str) else body
    lines = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **(headers or {}),
    }
    return (
        f"POST {path} HTTP/1.1\r\n".encode()
        + "".join(f"{name}: {lines[name]}\r\n" for name in lines).encode()
        + b"\r\n"
        + body
    )


class Connection(asyncio.Protocol):
    """A connection that is kept, with one request at a time; it returns to `idle` after each.

    `ask` returns a future of (status, headers, body, time of the body's first byte).
    """

    def __init__(self, idle: list["Connection"]):
        self.idle, self.is_open, self.future = idle, False, None

    def connection_made(self, transport):
        self.transport, self.is_open = transport, True

    def ask(self, data: bytes) -> asyncio.Future:
        self.head, self.body, self.began = b"", b"", None
        self.future = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return self.future

    def data_received(self, data: bytes):
        if self.future is None:
            return
        if not self.head:
            self.body += data
            self.head, end, rest = self.body.partition(b"\r\n\r\n")
            if not end:
                self.head = b""
                return
            self.head, self.body = self.head.lower(), b""
            self.length = int(between(self.head, b"content-length:", b"\r\n") or -1)
            data = rest
        if data:
            self.began = self.began or time.perf_counter()
            self.body += data
        if len(self.body) == self.length or (
            self.length < 0 and (b"\r\n" + self.body).endswith(LAST_CHUNK)
        ):
            self.answered()

    def answered(self):
        future, self.future = self.future, None
        if b"connection: close" in self.head:
            self.is_open = False
            self.transport.close()
        else:
            self.idle.append(self)
            self.free_since = time.perf_counter()
        if not future.done():
            future.set_result(
                (int(self.head[9:12]), self.head, self.body, self.began or time.perf_counter())
            )

    def connection_lost(self, error):
        self.is_open = False
        if self.future and not self.future.done():
            self.future.set_exception(
                ConnectionResetError("lost after a part" if self.head or self.body else "lost")
            )


def between(text: bytes, start: bytes, end: bytes) -> bytes:
    return (text + end).partition(start)[2].partition(end)[0]


@dataclass
class Outcome:
    """The counts and latencies of the answers to a client.

    `statuses` counts answers by status, and errors by name. `latencies` and `firsts` are the
    seconds to the end and to the first byte, for answers with a status in `good`. `in_time` counts
    those that ended before the clock stopped. `wrong` counts unexpected answers, `unpromised`
    counts rejections without Retry-After.
    """

    good: tuple[int, ...] = (200,)

    statuses: Counter = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    in_time: int = 0
    wrong: int = 0
    unpromised: int = 0

    def summary(self, seconds: float) -> dict:
        return {
            "seconds": seconds,
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "per_second": self.in_time / seconds,
            "latency": quantiles(self.latencies),
            "first_byte": quantiles(self.firsts),
            "wrong": self.wrong,
            "unpromised": self.unpromised,
        }


def quantiles(seconds: list[float]) -> dict | None:
    """Return {"p50": …, "p95": …, "p99": …, "max": …} of `seconds`, or `None` if there are none.

    They are nearest ranks: times that occurred.
    """
    values = sorted(seconds)
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return (
        {
            name: values[max(0, -int(-share * len(values) // 1) - 1)]
            for name, share in shares.items()
        }
        if values
        else None
    )


class Client:
    """Sends `requests` in turn to a server, and counts the answers in `outcome`.

    `expected` are the bodies of their answers, if they are known.
    """

    def __init__(
        self,
        port: int,
        requests: list[bytes],
        expected: list[bytes] | None = None,
        host: str = "127.0.0.1",
    ):
        self.address, self.requests, self.expected = (host, port), requests, expected
        self.idle: list[Connection] = []
        self.outcome = Outcome()
        self.asked = 0
        self.end = float("inf")  # when the clock stops

    async def ask(self, due: float) -> bool:
        """Send the next request, and return True if there was an answer of any status.

        `due` is the time from which its latency counts.
        """
        index = self.asked % len(self.requests)
        self.asked += 1
        try:
            connection = await self.connection()
            status, head, body, began = await connection.ask(self.requests[index])
        except asyncio.CancelledError:
            self.outcome.statuses["hung"] += 1
            raise
        except OSError as error:
            self.outcome.statuses[f"{type(error).__name__} {error}"[:60]] += 1
            return False
        self.outcome.statuses[status] += 1
        if status in self.outcome.good:
            now = time.perf_counter()
            self.outcome.in_time += now < self.end
            self.outcome.latencies.append(now - due)
            self.outcome.firsts.append(began - due)
            self.outcome.wrong += self.expected is not None and body != self.expected[index]
        if status in (429, 503):
            self.outcome.unpromised += b"retry-after:" not in head
        return True

    async def connection(self) -> Connection:
        while self.idle:
            connection = self.idle.pop()
            if connection.is_open and time.perf_counter() < connection.free_since + LONGEST_IDLE:
                return connection
            connection.transport.close()
        return (
            await asyncio.get_running_loop().create_connection(
                lambda: Connection(self.idle), *self.address
            )
        )[1]

    async def closed(self, connections: int, seconds: float) -> None:
        self.end = time.perf_counter() + seconds

        async def loop():
            while (now := time.perf_counter()) < self.end:
                if not await self.ask(now):
                    await asyncio.sleep(PAUSE)

        await self.finish([asyncio.create_task(loop()) for _ in range(connections)], seconds)

    async def open(self, rate: float, seconds: float, seed: int) -> None:
        random_number = random.Random(seed)
        due = time.perf_counter()
        self.end = due + seconds
        tasks = []
        while (due := due + random_number.expovariate(rate)) < self.end:
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(self.ask(due)))
        await self.finish(tasks, 0)

    async def finish(self, tasks, seconds):
        _, hung = await asyncio.wait(tasks, timeout=seconds + PATIENCE)
        for task in hung:
            task.cancel()
        await asyncio.gather(*hung, return_exceptions=True)


async def run(load: dict) -> dict:
    requests = [request(load["path"], body) for body in load["bodies"]]
    expected = [body.encode() for body in load["expected"]] if load.get("expected") else None
    client = Client(load["port"], requests, expected)
    client.asked = load.get("first", 0)
    client.outcome.good = tuple(load.get("good", [200]))
    used = time.process_time()
    if "connections" in load:
        await client.closed(load["connections"], load["seconds"])
    else:
        await client.open(load["rate"], load["seconds"], load.get("seed", 0))
    return {**client.outcome.summary(load["seconds"]), "client_cpu": time.process_time() - used}


def main():
    load = json.load(sys.stdin)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        print(json.dumps(runner.run(run(load))))


if __name__ == "__main__":
    main()
