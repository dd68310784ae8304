"""The servers of benchmarks/serving.py: how each is started, what it uses, and load on it."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from serving_models import DTYPES

HERE = Path(__file__).parent
BEST = "ours-calibrated"  # the export of ours that is compared
PATIENCE = 180  # seconds until a server is ready
TICKS = os.sysconf("SC_CLK_TCK")
OURS = [sys.executable, "-m", "vanilla_transformer_export", "serve"]
PEERS = [sys.executable, str(HERE / "serving_peers.py")]


@dataclass(frozen=True)
class Plan:
    """The command of a server, without the port.

    `max_connections` is the maximum number of connections in a closed loop. Some servers accept
    only a few at a time.
    """

    command: list[str]
    ready: str = "/health/ready"
    max_connections: int = 10**6


def plans(root: Path, model: str) -> dict[str, Plan]:
    """Return {name: plan} of all servers that translate with `model`, whose files are in `root`.

    Servers whose best setting depends on the machine have several.
    """
    folder, result = root / model, {}
    for dtype in DTYPES:
        result[f"ours-{dtype}"] = Plan([*OURS, str(folder / dtype), "--languages", "en-de"])
    for workers, threads in ((2, 1), (1, 2), (1, 1)):
        settings = ["--workers", str(workers), "--threads", str(threads)]
        ct2 = ["ctranslate2", str(folder / "ctranslate2-int8"), "--export", str(folder / "int8")]
        result[f"ctranslate2-int8-{workers}x{threads}"] = Plan([*PEERS, *ct2, *settings])
        result[f"transformers-{workers}x{threads}"] = Plan(
            [*PEERS, "transformers", str(folder / "transformers"), *settings],
            max_connections=2 * workers,
        )
    return result


class Server:
    """A process that runs the server of `plan` on the free `port`, until the end of the context.

    `seconds` is how long it took to be ready. Its output goes to the file `log`, and `environment`
    adds variables.

    Raises:
        RuntimeError: if it is not ready after `PATIENCE`, with the end of its output.
    """

    def __init__(self, plan: Plan, log: Path, environment: dict[str, str] | None = None):
        self.plan, self.port, start = plan, free_port(), time.perf_counter()
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*plan.command, "--port", str(self.port)],
                stdout=out,
                stderr=out,
                env={**os.environ, **(environment or {})},
            )
        while self.status(plan.ready) != 200:
            if self.process.poll() is not None or time.perf_counter() > start + PATIENCE:
                self.stop()
                log_end = log.read_text()[-500:] if log.is_file() else ""
                raise RuntimeError(
                    f"{' '.join(plan.command)} is not ready, expected it to listen: {log_end}"
                )
            time.sleep(0.01)
        self.seconds = time.perf_counter() - start

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def status(self, path: str) -> int | None:
        try:
            with urllib.request.urlopen(self.url(path), timeout=PATIENCE) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def post(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(
            self.url(path), json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)

    @property
    def processes(self) -> list[int]:
        """The ids of the process and of its children."""
        pid = self.process.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    @property
    def cpu(self) -> float:
        """The CPU seconds so far of all threads of the processes."""
        return sum(map(cpu_seconds, self.processes))

    @property
    def memory(self) -> int:
        """The bytes that the processes use now."""
        return sum(map(memory_bytes, self.processes))

    def start_load(self, **load) -> subprocess.Popen:
        """Start a client with the fields of `load`, as serving_client.py reads them, and return
        it."""
        command = [sys.executable, str(HERE / "serving_client.py")]
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        client.stdin.write(json.dumps({"port": self.port, **load}))
        client.stdin.close()
        return client

    def load(self, **load) -> dict:
        """Run a client with the fields of `load` to its end, and return its outcome.

        It also has "cpu_per_request", in seconds, and the "memory" afterwards.
        """
        if "connections" in load:
            load["connections"] = min(load["connections"], self.plan.max_connections)
        before = self.cpu
        summary = outcome(self.start_load(**load))
        answers = max(1, sum(summary["statuses"].values()))
        cpu = {
            "server": (self.cpu - before) / answers,
            "client": summary.pop("client_cpu") / answers,
        }
        return {**summary, "cpu_per_request": cpu, "memory": self.memory}


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds so far of all threads of the process `pid`."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_bytes(pid: int | str) -> int:
    """Return the bytes that the process `pid` uses now.

    Shared pages count in parts, so that the sum over processes is the memory of all.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def outcome(client: subprocess.Popen) -> dict:
    with client.stdout:
        text = client.stdout.read()
    if client.wait():
        raise RuntimeError(f"the client ended with code {client.returncode}, expected 0")
    return json.loads(text)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
