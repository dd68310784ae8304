"""What `export --tune` gains, measured: `python benchmarks/tuned.py` prints JSON.

The base model of the paper with seeded weights, in int8 for the cpu target: as it is by default, and tuned on this machine for
each goal. All three translate the same tokens greedily, in turns, with all threads; what counts is new tokens a second. Run it
on an idle machine: both the choices and the speeds follow what else runs.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import workload
from measure import hardware, spread, versions

from vanilla_transformer_export import Runtime, export
from vanilla_transformer_export.tuning import FILE, GOALS

PACKAGES = ("vanilla-transformer", "onnxruntime", "numpy")
BATCHES = (1, 8, 32)
LENGTH = 32  # tokens of a source


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds measured after a warm-up (5)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each row (64)")
    parser.add_argument("--quick", action="store_true", help="a tiny model: tries everything, measures nothing")
    return parser.parse_args(arguments)


def exports(root: Path, quick: bool) -> dict[str, Path]:
    """The default one and the tuned ones, by name."""
    workload.make_checkpoints("seq2seq", quick, root)
    found = {}
    for name, tune in {"default": None, **{goal: goal for goal in GOALS}}.items():
        found[name] = root / name
        export(root / "vanilla", found[name], cases=1, target="cpu", dtype="int8", tune=tune)
    return found


def measured(runtimes: dict[str, Runtime], batch: int, options: argparse.Namespace) -> dict[str, dict]:
    """New tokens a second of each for a batch, with the lowest and the highest; the first round warms up."""
    vocabulary = workload.fields("seq2seq", options.quick)["vocab_size"]
    ids = np.random.default_rng(0).integers(workload.FIRST_TOKEN, vocabulary - 1, (batch, LENGTH))
    speeds: dict[str, list[float]] = {name: [] for name in runtimes}
    for _ in range(1 + options.repeats):
        for name, runtime in runtimes.items():
            start = time.perf_counter()
            found = runtime.generate(ids, max_new_tokens=options.new_tokens)
            speeds[name].append(batch * (found.shape[1] - 1) / (time.perf_counter() - start))
    return {name: spread(each[1:]) for name, each in speeds.items()}


def run(options: argparse.Namespace, root: Path) -> dict:
    directories = exports(root, options.quick)
    runtimes = {name: Runtime(directory) for name, directory in directories.items()}
    return {
        "hardware": hardware(),
        "versions": versions(PACKAGES),
        "choices": {goal: json.loads((directories[goal] / FILE).read_text())["choices"] for goal in GOALS},
        "per_second": {batch: measured(runtimes, batch, options) for batch in BATCHES},
    }


if __name__ == "__main__":
    options = parse()
    with tempfile.TemporaryDirectory() as root:
        print(json.dumps(run(options, Path(root)), indent=1))
