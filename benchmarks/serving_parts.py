"""The parts of benchmarks/serving.py: functions of a `Run` and a model that return JSON values."""

import itertools
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from measure import isolated, spread
from serving_models import DTYPES
from serving_offline import loaded_memory, offline
from serving_servers import BEST, OURS, PEERS, Plan, Server, outcome, plans

CONNECTIONS = 64
SHARES = (0.25, 0.5, 0.75, 0.9, 1.1)  # shares of the closed loop's rate
MALFORMED = [
    "",
    "{",
    "[]",
    '"a"',
    "{}",
    '{"q": 5}',
    '{"q": [1]}',
    '{"q": "a", "alternatives": "x"}',
    '{"q": 5' + 4000 * " ",
]
PROBE_RATE = 20  # malformed requests per second beside the load
PROMPT = "ROMEO:\n"
STREAM_TOKENS = 32


@dataclass(frozen=True)
class Run:
    """The settings of a serving benchmark.

    Requests take the `captions` in turn. A server has `repeats` rounds of `seconds`; parts that
    look for growth take `minutes`. `root` has the models, see serving_models.py.
    """

    root: Path
    captions: list[str]
    seconds: float
    repeats: int
    minutes: float
    servers: list[str] | None = None

    @property
    def translations(self) -> dict:
        bodies = [json.dumps({"q": text, "source": "en", "target": "de"}) for text in self.captions]
        return {"path": "/translate", "bodies": bodies, "seconds": self.seconds}

    @property
    def warm_up(self) -> dict:
        return self.translations | {"seconds": min(2, self.seconds)}

    def start(self, stack: ExitStack, name: str, plan: Plan) -> Server:
        (self.root / "logs").mkdir(parents=True, exist_ok=True)
        return stack.enter_context(Server(plan, self.root / "logs" / f"{name}.log"))

    def ours(self, stack: ExitStack, model: str) -> Server:
        """Start our server of `model` with int8 weights, warm it up and return it; `stack` ends
        it."""
        server = self.start(stack, f"{model}-ours", plans(self.root, model)[BEST])
        server.load(**self.warm_up, connections=CONNECTIONS)
        return server


def saturation(run: Run, model: str) -> dict:
    """Measure a closed loop on each server of `model`, in turns: each client asks when answered.

    Return {server: its rounds and requests per second}. `run` has the settings.
    """
    selected = {
        name: plan
        for name, plan in plans(run.root, model).items()
        if run.servers is None or name in run.servers
    }
    results = {name: {"ready_seconds": None, "rounds": []} for name in selected}
    with ExitStack() as stack:
        servers = {
            name: run.start(stack, f"{model}-{name}", plan) for name, plan in selected.items()
        }
        for name, server in servers.items():
            results[name]["ready_seconds"] = server.seconds
            server.load(**run.warm_up, connections=CONNECTIONS)
        for repeat in range(run.repeats):
            for name, server in servers.items():
                load = server.load(**run.translations, connections=CONNECTIONS, first=repeat * 97)
                results[name]["rounds"].append(load)
    for of_server in results.values():
        of_server["per_second"] = spread([load["per_second"] for load in of_server["rounds"]])
    return results


def latency(run: Run, model: str) -> dict:
    """Measure the latency of our server of `model`: one connection, and half of its highest rate.

    The half are Poisson arrivals: requests at random moments. Return the rounds and the ratios of
    both. `run` has the settings.
    """
    with ExitStack() as stack:
        server = run.ours(stack, model)
        rate = server.load(**run.translations, connections=CONNECTIONS)["per_second"]
        rounds = []
        for repeat in range(run.repeats):
            unloaded = server.load(**run.translations, connections=1, first=repeat * 97)
            half = server.load(**run.translations, rate=rate / 2, seed=repeat, first=repeat * 97)
            rounds.append({"unloaded": unloaded, "half": half})
    median = statistics.median(load["unloaded"]["latency"]["p50"] for load in rounds)
    ratios = {
        rank: spread(
            [load["half"]["latency"][rank] / load["unloaded"]["latency"]["p50"] for load in rounds]
        )
        for rank in ("p50", "p95", "p99")
    }
    return {
        "closed_per_second": rate,
        "unloaded_median": median,
        "ratios": ratios,
        "rounds": rounds,
    }


def rates(run: Run, model: str) -> dict:
    """Measure Poisson arrivals, requests at random moments, at rising shares of the highest rate.

    That rate is each server's own closed loop. Return {server: loads by share}. `run` has the
    settings.
    """
    results = {}
    for name in (BEST, "ctranslate2-int8-2x1"):
        with ExitStack() as stack:
            server = run.start(stack, f"{model}-{name}", plans(run.root, model)[name])
            server.load(**run.warm_up, connections=CONNECTIONS)
            rate = server.load(**run.translations, connections=CONNECTIONS)["per_second"]
            loads = {share: server.load(**run.translations, rate=share * rate) for share in SHARES}
            results[name] = {"closed_per_second": rate, "loads": loads}
    return results


def refusals(run: Run, model: str) -> dict:
    """Measure malformed requests to our server of `model`, alone and beside half its highest rate.

    Return the rounds and their medians. `run` has the settings.
    """
    malformed = {
        "path": "/translate",
        "bodies": MALFORMED,
        "seconds": run.seconds,
        "good": [400, 422],
    }
    with ExitStack() as stack:
        server = run.ours(stack, model)
        rate = server.load(**run.translations, connections=CONNECTIONS)["per_second"]
        rounds = []
        for repeat in range(run.repeats):
            alone = server.load(**malformed, connections=1)
            load = server.start_load(**run.translations, rate=rate / 2, seed=repeat)
            rounds.append(
                {"unloaded": alone, "half": server.load(**malformed, rate=PROBE_RATE, seed=repeat)}
            )
            outcome(load)
    medians = [rates["unloaded"]["latency"]["p50"] for rates in rounds]
    return {
        "unloaded_median": spread(medians),
        "half_p99": spread([rates["half"]["latency"]["p99"] for rates in rounds]),
        "rounds": rounds,
    }


def start(run: Run, model: str) -> dict:
    """Return the seconds from the command until our server of `model` is ready.

    `run` has the number of repeats.
    """
    plan, seconds = plans(run.root, model)[BEST], []
    for _ in range(run.repeats):
        with ExitStack() as stack:
            seconds.append(run.start(stack, f"{model}-start", plan).seconds)
    return {"seconds": spread(seconds)}


def memory(run: Run, model: str) -> dict:
    """Measure the memory of our server of `model` during a closed loop, and return it in bytes.

    `above` is the memory beyond that of a process without a server plus all slots. Slots that were
    never touched make it too low, but only a little, because arrays lie in pages of 2 MB. `run` has
    the settings.
    """
    with ExitStack() as stack:
        server = run.start(stack, f"{model}-memory", plans(run.root, model)[BEST])
        ready = server.memory
        samples, load = sampled(run, server, {"connections": CONNECTIONS})
    sizes = isolated(loaded_memory, run.root / model / DTYPES[0])
    above = max(samples) - sizes["loaded"] - sizes["slots"]
    return {
        **sizes,
        "ready": ready,
        "above": above,
        "samples": samples,
        "growth": growth(samples),
        "load": load,
    }


def overload(run: Run, model: str) -> dict:
    """Measure our server of `model` at twice the rate of the closed loop.

    Accepted requests must get the same answer as a request alone; rejected ones a Retry-After.
    Return the memory over time and the outcome. `run` has the settings.
    """
    with ExitStack() as stack:
        server = run.ours(stack, model)
        rate = server.load(**run.translations, connections=CONNECTIONS)["per_second"]
        alone = [
            json.dumps(
                server.post("/translate", json.loads(body)),
                separators=(",", ":"),
                ensure_ascii=False,
            )
            for body in run.translations["bodies"]
        ]
        samples, load = sampled(run, server, {"rate": 2 * rate, "expected": alone})
    return {"closed_per_second": rate, "samples": samples, "growth": growth(samples), "load": load}


def sampled(run: Run, server: Server, load: dict) -> tuple[list[int], dict]:
    """Run `load` for `run.minutes` on `server`.

    Return its memory in each second, in bytes, and the outcome of the client.
    """
    client = server.start_load(**run.translations | {"seconds": 60 * run.minutes}, **load)
    samples = []
    while client.poll() is None:
        samples.append(server.memory)
        time.sleep(1)
    return samples, outcome(client)


def growth(samples: list[int]) -> int:
    """Return the growth of `samples` in bytes from the second to the last quarter, by their
    medians."""
    quarter = max(1, len(samples) // 4)
    return int(
        statistics.median(samples[-quarter:])
        - statistics.median(samples[quarter : 2 * quarter] or samples)
    )


def decoder(run: Run, card: Path) -> dict:
    """Measure completions of the shipped decoder `card` by our server and by `transformers serve`.

    Return {server: {"whole": rounds, "streams": rounds}}. `run` has the settings.
    """
    name = {"ours-int8": str(run.root / "decoder"), "transformers-serve": str(card)}
    commands = {
        "ours-int8": Plan([*OURS, name["ours-int8"]]),
        "transformers-serve": Plan(
            [*PEERS, "transformers-serve", name["transformers-serve"]], ready="/health"
        ),
    }
    results = {server: {"whole": [], "streams": []} for server in commands}
    with ExitStack() as stack:
        servers = {
            server: run.start(stack, f"decoder-{server}", plan) for server, plan in commands.items()
        }
        for _, (label, server) in itertools.product(range(run.repeats), servers.items()):
            body = {
                "model": name[label] if label != "ours-int8" else "decoder",
                "prompt": PROMPT,
                "max_tokens": STREAM_TOKENS,
            }
            for kind, more in (("whole", {}), ("streams", {"stream": True})):
                bodies = [json.dumps({**body, "temperature": 0, **more})]
                load = {
                    "path": "/v1/completions",
                    "bodies": bodies,
                    "seconds": run.seconds,
                    "connections": 8,
                }
                results[label][kind].append(server.load(**load))
    return results


MODELS = ("tiny", "base")
# parts of the benchmark, and their models
PARTS = {
    "offline": (offline, MODELS),
    "saturation": (saturation, MODELS),
    "latency": (latency, ("tiny",)),
    "rates": (rates, ("tiny",)),
    "refusals": (refusals, ("tiny",)),
    "start": (start, MODELS),
    "memory": (memory, ("tiny",)),
    "overload": (overload, ("tiny",)),
    "decoder": (decoder, ("decoder",)),
}
