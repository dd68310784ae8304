"""Lines in a second of `predict --task translate`, from file to file, against the runtime's offline
batches, from ids to ids: `python benchmarks/bulk.py EXPORT --captions FILE`, where FILE has a
caption on each line, .gz or plain.

The captions are repeated up to `--lines`, each with its number. Both search greedily, in workers
where the export has them, each in a process of its own, in turns. It prints a line of JSON: the
ratio, and the most memory that translating a tenth of the lines, and all of them, took.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

from engines import memory
from measure import isolated

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.files.predictions import Predictions
from vanilla_transformer_export.files.run import SHARD_LINES, Runner
from vanilla_transformer_export.files.text_lines import read_lines
from vanilla_transformer_export.inference.inputs import pad_sequences

GREEDY = {"num_beams": 1}  # greedy search, for which the runtime uses workers


def write_lines(captions: Path, count: int, path: Path) -> Path:
    """Write `count` lines to `path` and return it: the captions in the file `captions`.

    They are repeated as needed, and each begins with its number, from 0 on.
    """
    texts = [line.strip() for line in read_lines(captions) if line.strip()]
    with open(path, "w", encoding="utf-8") as file:
        for number, text in zip(range(count), itertools.cycle(texts)):
            file.write(f"{number} {text}\n")
    return path


def bulk(export: Path, source: Path, output: Path) -> dict:
    """Translate the lines of `source` into the new directory `output` with `export`.

    Return {"per_second": lines, "peak": most memory of the process in bytes, "bad": bad lines}.
    """
    runtime = TextRuntime(export)
    runtime.generate(["A man."] * 64, **GREEDY)  # warm-up: opens the sessions of the workers
    start = time.perf_counter()
    report = Runner(Predictions(runtime, "translate", GREEDY)).to_directory([source], output)
    return {
        "per_second": report["lines"] / (time.perf_counter() - start),
        "peak": memory("VmHWM"),
        "bad": report["bad"],
    }


def offline(export: Path, source: Path) -> float:
    """Return the lines per second of `Runtime.generate`, without the time of the tokenizer.

    The lines are those of `source`. Each call has as many rows as a shard has lines.
    """
    runtime = TextRuntime(export)
    runtime.generate(["A man."] * 64, **GREEDY)
    seconds, count = 0.0, 0
    lines = read_lines(source)
    while texts := list(itertools.islice(lines, SHARD_LINES)):
        ids, mask = pad_sequences(runtime.rows(texts), 0)
        start = time.perf_counter()
        runtime.runtime.generate(ids, mask, **GREEDY)
        seconds += time.perf_counter() - start
        count += len(texts)
    return count / seconds


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("export", type=Path)
    parser.add_argument("--captions", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        source = write_lines(args.captions, args.lines, Path(folder) / "lines.txt")
        tenth = write_lines(args.captions, args.lines // 10, Path(folder) / "tenth.txt")
        first = isolated(bulk, args.export, tenth, Path(folder) / "tenth")
        results, expected = [], []
        for number in range(args.repeats):
            results.append(isolated(bulk, args.export, source, Path(folder) / f"out-{number}"))
            expected.append(isolated(offline, args.export, source))
    rates = {
        "bulk": [record["per_second"] for record in results],
        "offline": expected,
    }
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = [bulk_rate / other for bulk_rate, other in zip(rates["bulk"], rates["offline"])]
    result = {
        "lines": args.lines,
        "bad": results[0]["bad"],
        **{f"{name}_per_second": round(x, 1) for name, x in medians.items()},
    }
    result |= {
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio": round(statistics.median(ratios), 3),
    }
    print(
        json.dumps(
            result
            | {
                "peak_of_a_tenth": first["peak"],
                "peak": max(record["peak"] for record in results),
            }
        )
    )


if __name__ == "__main__":
    main()
