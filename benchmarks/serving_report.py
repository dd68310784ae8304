"""The results of benchmarks/serving.py as tables.

Reads the JSON file only, which is the argument of the command. Values are medians of the rounds,
followed by the smallest and the largest.
"""

import json
import sys
from pathlib import Path
from statistics import median

from serving_servers import BEST

MEGA = 1e6


def tables(result: dict) -> str:
    parts = [
        setting(result),
        floors_table(result),
        *(TABLES[part](result[part]) for part in TABLES if part in result),
    ]
    return "\n\n".join(part for part in parts if part)


def setting(result):
    """Return the machine of `result`, or for several machines, which parts were measured on
    each."""
    machines = {}
    for part, models in result.items():
        for model, entry in models.items():
            machines.setdefault(machine(entry), []).append(f"{part} {model}")
    lines = [
        f"{line} Of {', '.join(parts)}." if len(machines) > 1 else line
        for line, parts in machines.items()
    ]
    return "\n\n".join(lines)


def machine(entry):
    hardware = entry["hardware"]
    packages = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
    quick = "; tiny models, which measure nothing" if entry["quick"] else ""
    return (
        f"{hardware['cpu']}, {hardware['cores']} cores ({', '.join(hardware['instructions'])})"
        f"{quick}. {packages}."
    )


def table(title, header, rows):
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return f"**{title}**\n\n" + "\n".join(
        "| " + " | ".join(map(str, line)) + " |" for line in lines
    )


def number(value):
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def spread(values, scale=1):
    return (
        f"{number(scale * values['median'])} ({number(scale * values['min'])} - "
        f"{number(scale * values['max'])})"
    )


def milliseconds(loads, rank, field="latency"):
    """Return the median over the rounds `loads` of a `rank`, such as "p95", in milliseconds, as
    text.

    `field` is "latency" or "first_byte".
    """
    values = [load[field][rank] for load in loads if load[field]]
    return number(1000 * median(values)) if values else "-"


def errors(loads):
    """Return the number of answers of the rounds `loads` that are not 200, by status, as text."""
    counts = {}
    for load in loads:
        for status, count in load["statuses"].items():
            if status != "200":
                counts[status] = counts.get(status, 0) + count
    return ", ".join(f"{count} of {status}" for status, count in counts.items()) or "none"


# ------------------------------------------------------------------------------------------- floors


def best(speeds: dict, start: str) -> float | None:
    """Return the largest median speed of settings that begin with `start`, or `None` without any.

    `speeds` are {setting: speeds}.
    """
    medians = [
        speed["per_second"]["median"] for name, speed in speeds.items() if name.startswith(start)
    ]
    return max(medians, default=None)


def ratio(first, second):
    return None if first is None or not second else first / second


def floors(result: dict) -> list[tuple[str, float | None, float, bool]]:
    """Return the targets: (name, measured value, bound, True if more is better).

    The value is `None` if `result` does not have it.
    """

    def read_part(part, model):
        return result.get(part, {}).get(model, {}).get("found", {})

    rows = []
    for model in ("tiny", "base"):
        for dtype, floor in (("fp32", 1.0), ("int8", 0.9), ("calibrated", 0.9)):
            speeds = read_part("offline", model).get(dtype, {})
            share = ratio(best(speeds, "engine"), best(speeds, "runtime"))
            rows.append(
                (
                    f"engine without HTTP / the runtime's batches, {model} {dtype}",
                    share,
                    floor,
                    True,
                )
            )
    for model, floor in (("tiny", 0.75), ("base", 0.9)):
        offline = best(read_part("offline", model).get("calibrated", {}), "runtime")
        rows.append(
            (
                f"over HTTP / the runtime's batches, {model} int8, calibrated",
                ratio(best(read_part("saturation", model), BEST), offline),
                floor,
                True,
            )
        )
    tiny = read_part("saturation", "tiny")
    for peer, floor in (("ctranslate2-int8", 1.2), ("transformers", 50)):
        rows.append(
            (
                f"over HTTP / {peer}, tiny int8",
                ratio(best(tiny, BEST), best(tiny, peer)),
                floor,
                True,
            )
        )
    ratios = read_part("latency", "tiny").get("ratios", {})
    for rank, bound in (("p95", 5), ("p99", 7)):
        rows.append(
            (
                f"{rank} at half load / unloaded median",
                ratios.get(rank, {}).get("median"),
                bound,
                False,
            )
        )
    for name, field, bound in (
        ("median unloaded", "unloaded_median", 1),
        ("p99 at half load", "half_p99", 20),
    ):
        seconds = read_part("refusals", "tiny").get(field, {}).get("median")
        rows.append(
            (f"refusing a malformed request, ms, {name}", seconds and 1000 * seconds, bound, False)
        )
    for model, bound in (("tiny", 1.5), ("base", 3)):
        rows.append(
            (
                f"start to ready, s, {model} int8",
                read_part("start", model).get("seconds", {}).get("median"),
                bound,
                False,
            )
        )
    above = read_part("memory", "tiny").get("above")
    rows.append(
        ("memory above the loaded model and its slots, MB", above and above / MEGA, 60, False)
    )
    return rows


def floors_table(result):
    rows = []
    for name, value, bound, is_floor in floors(result):
        sign = "at least" if is_floor else "at most"
        is_met = value is not None and (value >= bound if is_floor else value <= bound)
        rows.append(
            [
                name,
                number(value),
                f"{sign} {bound}",
                "-" if value is None else "yes" if is_met else "no",
            ]
        )
    return table("what is to be reached", ["", "measured", "goal", "reached"], rows)


# ------------------------------------------------------------------------------------------- tables


def offline_table(models):
    rows = [
        [f"{model}, {dtype}, {name}", spread(engine["per_second"]), share(engine["same"])]
        for model, part in models.items()
        for dtype, engines in part["found"].items()
        for name, engine in engines.items()
    ]
    header = [
        "kind, threads beside each other, threads of each, rows",
        "sentences/s",
        "same tokens as the runtime",
    ]
    return table("without HTTP", header, rows)


def share(same):
    """Return `same` as a percentage, "-" for None: an engine of texts has no tokens to compare."""
    return "-" if same is None else f"{100 * same:.1f}%"


def saturation_table(models):
    rows = []
    for model, part in models.items():
        for name, server in part["found"].items():
            loads = server["rounds"]
            cpu = [
                1000 * median(load["cpu_per_request"][side] for load in loads)
                for side in ("server", "client")
            ]
            ranks = [milliseconds(loads, rank) for rank in ("p50", "p95", "p99")]
            memory = number(max(load["memory"] for load in loads) / MEGA)
            rows.append(
                [
                    f"{model}, {name}",
                    spread(server["per_second"]),
                    *ranks,
                    *map(number, cpu),
                    memory,
                    errors(loads),
                ]
            )
    header = [
        "",
        "requests/s",
        "p50, ms",
        "p95",
        "p99",
        "processor of the server, ms a request",
        "of the client",
        "memory, MB",
        "errors",
    ]
    return table("closed loop of 64 connections", header, rows)


def latency_table(models):
    rows = []
    for model, part in models.items():
        results = part["found"]
        for name in ("unloaded", "half"):
            loads = [loads_by_name[name] for loads_by_name in results["rounds"]]
            rows.append(
                [
                    f"{model}, {name}",
                    *(milliseconds(loads, rank) for rank in ("p50", "p95", "p99")),
                    errors(loads),
                ]
            )
        rows.append(
            [
                f"{model}, half / unloaded median",
                *(spread(results["ratios"][rank]) for rank in ("p50", "p95", "p99")),
                "-",
            ]
        )
    return table(
        "one connection, and half the rate of the closed loop",
        ["", "p50, ms", "p95", "p99", "errors"],
        rows,
    )


def rates_table(models):
    rows = []
    for model, part in models.items():
        for server, results in part["found"].items():
            for share, load in results["loads"].items():
                rate = float(share) * results["closed_per_second"]
                ranks = [milliseconds([load], rank) for rank in ("p50", "p95", "p99")]
                name = f"{model}, {server}, {100 * float(share):.0f}%"
                rows.append(
                    [name, number(rate), number(load["per_second"]), *ranks, errors([load])]
                )
    header = [
        "Poisson arrivals at a share of its own closed loop",
        "asked/s",
        "answered/s",
        "p50, ms",
        "p95",
        "p99",
        "errors",
    ]
    return table("open loop", header, rows)


def start_table(models):
    return table(
        "start to ready",
        ["", "s"],
        [[model, spread(part["found"]["seconds"])] for model, part in models.items()],
    )


def growing_table(title):
    def make_rows(models):
        rows = []
        for model, part in models.items():
            results, load = part["found"], part["found"]["load"]
            counts = [load["statuses"].get(status, 0) for status in ("200", "429", "503")]
            sizes = [number(results["samples"][index] / MEGA) for index in (0, -1)]
            minutes = number(load["seconds"] / 60)
            wrong = [load["wrong"], load["unpromised"]]
            rows.append(
                [
                    model,
                    minutes,
                    *counts,
                    errors([load]),
                    *wrong,
                    *sizes,
                    f"{results['growth'] / MEGA:.1f}",
                ]
            )
        header = [
            "",
            "minutes",
            "200",
            "429",
            "503",
            "all that was no 200",
            "wrong",
            "no Retry-After",
        ]
        return table(title, [*header, "memory at first, MB", "at last", "growth, MB"], rows)

    return make_rows


def decoder_table(models):
    rows = []
    for name, results in models["decoder"]["found"].items():
        speeds = [load["per_second"] for load in results["whole"]]
        firsts = [milliseconds(results["streams"], rank, "first_byte") for rank in ("p50", "p99")]
        rows.append(
            [name, number(median(speeds)), *firsts, errors(results["whole"] + results["streams"])]
        )
    header = ["", "completions/s", "time to first token, p50, ms", "p99", "errors"]
    return table("completions of the shipped decoder, 8 connections", header, rows)


TABLES = {
    "offline": offline_table,
    "saturation": saturation_table,
    "latency": latency_table,
    "rates": rates_table,
    "start": start_table,
    "memory": growing_table("memory in a closed loop of 64 connections"),
    "overload": growing_table(
        "twice the rate of the closed loop, each answer compared with the one given alone"
    ),
    "decoder": decoder_table,
}


def main(path):
    print(tables(json.loads(Path(path).read_text())))


if __name__ == "__main__":
    main(sys.argv[1])
