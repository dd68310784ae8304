"""Savings and costs of prompt lookup decoding.

`python benchmarks/lookup.py --data DIR`, where DIR holds Multi30k's raw files, decodes texts from
validation, one row at a time, with and without the option in turns:

- corrections and summaries, see `lookup_tasks`: the output copies the input. No shipped model
  copies, so the shipped translator is fine-tuned for each. `--models` is a folder that keeps
  these models and reuses them.
- translation: the shipped translator, where hardly anything can be copied.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
from lookup_tasks import CARD, TASKS, task_pairs, trained_model
from transformers import AutoTokenizer

from vanilla_transformer.training.data import read_parallel
from vanilla_transformer.training.metrics import chrf
from vanilla_transformer_export import Runtime, export

GREEDY = {"num_beams": 1, "max_new_tokens": 120}


def translations(data: Path) -> list[tuple[str, str]]:
    pairs = read_parallel(data / "val.en.gz", data / "val.de.gz")
    return random.Random(1).sample(pairs, len(pairs))


def generated(runtime: Runtime, rows: list[np.ndarray], **options) -> tuple[float, list[list[int]]]:
    """Generate for `rows` (1, S), one by one, and return the seconds and the tokens of each row.

    `options` are generation options.
    """
    start = time.perf_counter()
    outputs = [runtime.generate(row, **GREEDY, **options) for row in rows]
    return time.perf_counter() - start, [output[0].tolist() for output in outputs]


class CountedDecoders:
    """A `DecoderFactory` around `decoders`, whose decoders count their steps and the tokens they
    read.

    The `counts` are "steps" and "tokens"; prompts are not counted.
    """

    def __init__(self, decoders):
        self.decoders = decoders
        self.counts = Counter()

    def __getattr__(self, name: str):
        return getattr(self.decoders, name)

    def start(self, request):
        decoder = self.decoders.start(request)
        step = decoder.step

        def counted(tokens, *args):
            self.counts.update(steps=1, tokens=tokens.shape[1])
            return step(tokens, *args)

        decoder.step = counted
        return decoder


def step_counts(runtime: Runtime, rows: list[np.ndarray], **options) -> Counter:
    """Generate for `rows`, and return the numbers of "steps" and of the "tokens" that they read.

    `options` are generation options.
    """
    decoders = runtime.model.decoders
    runtime.model.decoders = CountedDecoders(decoders)
    generated(runtime, rows, **options)
    counts = runtime.model.decoders.counts
    runtime.model.decoders = decoders
    return counts


def measure(
    checkpoint: Path, pairs: list[tuple[str, str]], dtype: str, candidates: int, rounds: int
) -> dict:
    """Return the quality of an export of `checkpoint` on `pairs`, and the cost of prompt lookup.

    Args:
        checkpoint: the model.
        pairs: (source, target) texts.
        dtype: the dtype of the export's weights.
        candidates: the candidate tokens per step of prompt lookup.
        rounds: the number of timed rounds. Times are relative to those without prompt lookup.
    """
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    sources, targets = zip(*pairs, strict=True)
    rows = [np.array([tokenizer(source).input_ids]) for source in sources]
    lookup = {"prompt_lookup_num_tokens": candidates}
    with tempfile.TemporaryDirectory() as directory:
        export(checkpoint, Path(directory) / "export", target="cpu", dtype=dtype, cases=1)
        runtime = Runtime(Path(directory) / "export")
        counts = step_counts(runtime, rows, **lookup)  # also a warm-up
        _, expected = generated(runtime, rows)
        ratios, alike = [], []
        for _ in range(rounds):
            without, _ = generated(runtime, rows)
            seconds, tokens = generated(runtime, rows, **lookup)
            ratios.append(seconds / without)
            alike.append(sum(map(list.__eq__, tokens, expected)))
    if dtype == "fp32" and min(alike) < len(rows):
        raise SystemExit(
            f"{min(alike)} of {len(rows)} rows have the same tokens with prompt lookup, expected "
            "all in fp32"
        )
    texts = tokenizer.batch_decode(expected, skip_special_tokens=True)
    new_tokens = sum(len(row) - 1 for row in expected)  # without the start token
    return {
        "texts": len(rows),
        "same tokens": min(alike),
        "outputs as they should be": sum(map(str.__eq__, texts, targets)),
        "chrF": round(chrf(texts, targets), 1),
        "new tokens": round(new_tokens / len(rows), 1),
        "tokens per step": round(new_tokens / counts["steps"], 2),
        "candidates per step": round(counts["tokens"] / counts["steps"] - 1, 2),
        "time ratio": round(statistics.median(ratios), 3),
        "time ratios": [round(ratio, 3) for ratio in sorted(ratios)],
        "seconds without, last round": round(without, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="directory of Multi30k's raw files"
    )
    parser.add_argument(
        "--models", type=Path, help="directory for the trained models; by default they are not kept"
    )
    parser.add_argument(
        "--train", action="store_true", help="only train the models that --models does not have"
    )
    parser.add_argument(
        "--steps", type=int, default=800, help="optimizer steps of each trained model"
    )
    parser.add_argument(
        "--tasks", nargs="+", default=[*TASKS, "translation"], choices=[*TASKS, "translation"]
    )
    parser.add_argument(
        "--dtypes", nargs="+", default=["fp32", "int8"], help="precisions of the exports"
    )
    parser.add_argument("--candidates", type=int, default=10, help="prompt_lookup_num_tokens")
    parser.add_argument(
        "--texts", type=int, default=100, help="number of validation texts per task"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.train and not options.models:
        parser.error("--train needs --models, where the models are kept")
    with tempfile.TemporaryDirectory() as temporary:
        for task in options.tasks:
            run(task, options.models or Path(temporary), options)


def run(task: str, models: Path, options: argparse.Namespace) -> None:
    checkpoint, pairs = CARD, None
    if task in TASKS:
        checkpoint = trained_model(models, task, options.data / "train.en.gz", options.steps)
        pairs = task_pairs(task, options.data / "val.en.gz", seed=1)
    if options.train:
        return
    pairs = list(islice(pairs or translations(options.data), options.texts))
    for dtype in options.dtypes:
        about = {"task": task, "dtype": dtype, "candidates": options.candidates}
        print(
            json.dumps(
                about | measure(checkpoint, pairs, dtype, options.candidates, options.rounds)
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
