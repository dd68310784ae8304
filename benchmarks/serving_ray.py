"""What a second core gives, and what Ray's proxy adds: python benchmarks/serving_ray.py EXPORT

EXPORT is the shipped translator for the cpu target. It needs the extra `ray`, taskset, two idle cores, and two minutes. The
servers take turns. It prints a table of medians: the milliseconds of one client that asks alone, and the answers in a second
that 64 connections get. `--serve` is how it starts the one in Ray.
"""

import argparse
import contextlib
import itertools
import json
import signal
import statistics
import sys
import tempfile
from pathlib import Path

from serving_servers import OURS, Plan, Server

CONNECTIONS = {"one client, ms": 1, "64 connections, answers/s": 64}
WHO = ("a dog", "two men", "a girl in red", "the old woman", "three children", "a white cat")
WHAT = ("runs across a field", "looks at the sea", "plays with a ball in the park near the river", "is sitting on a bench")
BODIES = [json.dumps({"q": f"{who} {what}.", "source": "en", "target": "de"}) for who, what in itertools.product(WHO, WHAT)]


def plans(export: Path) -> dict[str, Plan]:
    here = [*OURS, str(export), "--languages", "en-de", "--log-level", "error"]
    in_ray = [sys.executable, __file__, str(export), "--serve"]
    return {
        "`serve`, 1 core": Plan(["taskset", "-c", "0", *here]),
        "`serve`, 2 cores": Plan(["taskset", "-c", "0,1", *here]),
        "Ray, 2 replicas of 1 core": Plan(in_ray),
    }


def serve_in_ray(export: Path, port: int) -> None:
    """Until SIGTERM."""
    import ray
    from ray import serve

    from vanilla_transformer_export.ray import app

    built = app({"exports": str(export), "languages": "en-de", "replicas": 2, "log_level": "error"})
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(built, blocking=False)
        signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()


def measured(servers: dict[str, Server], seconds: float, repeats: int) -> dict[str, dict[str, float]]:
    """The medians for each server."""
    found = {name: {column: [] for column in CONNECTIONS} for name in servers}
    for repeat in range(-1, repeats):  # the first round warms up
        for name, server in servers.items():
            for column, connections in CONNECTIONS.items():
                load = server.load(path="/translate", bodies=BODIES, seconds=seconds, connections=connections)
                assert set(load["statuses"]) == {"200"}, load["statuses"]
                if repeat >= 0:
                    alone = connections == 1
                    found[name][column].append(1000 * load["latency"]["p50"] if alone else load["per_second"])
    return {name: {column: statistics.median(runs) for column, runs in each.items()} for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("--seconds", type=float, default=4, help="of a load; default: 4")
    parser.add_argument("--repeats", type=int, default=3, help="of each load; default: 3")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve_in_ray(args.export, args.port)
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = enumerate(plans(args.export).items())
        servers = {name: stack.enter_context(Server(plan, logs / str(number))) for number, (name, plan) in started}
        found = measured(servers, args.seconds, args.repeats)
    print(f"| | {' | '.join(CONNECTIONS)} |\n|---|{'---:|' * len(CONNECTIONS)}")
    for name, values in found.items():
        print(f"| {name} | {' | '.join(f'{values[column]:.1f}' for column in CONNECTIONS)} |")


if __name__ == "__main__":
    main()
