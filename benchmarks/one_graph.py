"""One graph that generates beside the runtime: `python benchmarks/one_graph.py` prints JSON.

The shipped translator, the paper's base model and GPT-2 small, both with seeded weights, search
greedily: as one graph of `export --generate`, and in the runtime with the export that this was made
from. Both read the same tokens and give the same number of new ones, in turns, with as many
threads; what counts is the time of the runtime divided by that of the graph, above 1 where the
graph is faster. Run it on an idle machine.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import workload
from measure import cores, hardware, versions

from vanilla_transformer_export import Runtime, export

PACKAGES = ("vanilla-transformer", "onnxruntime", "numpy")
CARD = Path(__file__).parents[1] / "model_cards" / "vanilla-seq2seq-tiny-multi30k-en-de"
# kinds of models in `workload`; `None` for the card
KINDS = {"tiny": None, "base": "seq2seq", "decoder": "gpt2"}
TARGETS = (("portable", "fp32"), ("cpu", "fp32"), ("cpu", "int8"))
BATCHES = (1, 8, 32)
LENGTH = 32  # tokens of a source or a prompt


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="measured rounds, after a warm-up (5)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=64, help="maximum number of new tokens per row (64)"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (all CPUs)")
    parser.add_argument(
        "--models", nargs="+", choices=KINDS, default=list(KINDS), help="models to measure (all)"
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        choices=list(map("-".join, TARGETS)),
        help="targets to measure (all)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, to test the benchmark itself"
    )
    return parser.parse_args(arguments)


def make_checkpoint(name: str, quick: bool, root: Path) -> Path:
    """Return the checkpoint of the model `name`, which is made in `root` unless it is a card.

    With `quick` it is tiny.
    """
    kind = KINDS[name]
    if kind is None:
        return CARD
    (root / name).mkdir()
    workload.make_checkpoints(kind, quick, root / name)
    return root / name / "vanilla"


def inputs(checkpoint: Path, batch: int) -> np.ndarray:
    """Return `batch` rows of token ids (B, S): captions of the card, padded, or random tokens.

    Captions end by themselves; random rows have one length.
    """
    if checkpoint == CARD:
        from tokenizers import Tokenizer

        lines = (CARD / "examples.tsv").read_text(encoding="utf-8").splitlines()
        tokenizer = Tokenizer.from_file(str(CARD / "tokenizer.json"))
        tokenizer.enable_padding()
        texts = [lines[row % len(lines)].split("\t")[0] for row in range(batch)]
        return np.array([row.ids for row in tokenizer.encode_batch(texts)])
    last = read_config(checkpoint)["vocab_size"] - 1
    return np.random.default_rng(0).integers(workload.FIRST_TOKEN, last, (batch, LENGTH))


def read_config(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "config.json").read_text())


def runs(
    directory: Path, graph: Path, ids: np.ndarray, steps: int, threads: int | None = None
) -> dict[str, Callable[[], np.ndarray]]:
    """Return {"graph": function, "runtime": function}, which both return the sequences of `ids`.

    Args:
        directory: the export that the runtime opens.
        graph: the export with one graph.
        ids: the input (B, S).
        steps: the maximum number of new tokens.
        threads: CPU threads, by default all.
    """
    manifest = json.loads((graph / "manifest.json").read_text())
    [file] = manifest["variants"][manifest["default_dtype"]]["graphs"].values()
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads or cores()
    session = onnxruntime.InferenceSession(
        graph / file, settings, providers=["CPUExecutionProvider"]
    )
    runtime = Runtime(directory, threads=threads)
    pad = runtime.check_options({}).pad_token_id
    mask = (ids != pad).astype(np.int64)
    feeds = {
        "input_ids": ids,
        "attention_mask": mask,
        "max_new_tokens": np.full((len(ids), 1), steps),
    }
    return {
        "graph": lambda: session.run(["sequences"], feeds)[0],
        "runtime": lambda: runtime.generate(ids, mask, num_beams=1, max_new_tokens=steps),
    }


def measured(functions: dict[str, Callable[[], np.ndarray]], repeats: int, prompt: int) -> dict:
    """Time both functions of `runs` in `repeats` turns after a warm-up.

    Return speed (above 1 if the graph is faster), ratios, seconds, new_tokens and same_rows.
    Sequences begin with `prompt` tokens, which are not new.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    sequences = {name: run() for name, run in functions.items()}
    for _ in range(repeats):
        for name, run in functions.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    ratios = [
        runtime / graph for runtime, graph in zip(seconds["runtime"], seconds["graph"], strict=True)
    ]
    medians = {name: statistics.median(array) for name, array in seconds.items()}
    width = min(array.shape[1] for array in sequences.values())
    alike = (sequences["graph"][:, :width] == sequences["runtime"][:, :width]).all(axis=1)
    return {
        "speed": round(medians["runtime"] / medians["graph"], 3),
        "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
        "seconds": medians,
        "new_tokens": width - prompt,
        "same_rows": int(alike.sum()),
    }


def compared(
    checkpoint: Path, target: str, dtype: str, options: argparse.Namespace, root: Path
) -> dict[int, dict]:
    """Export `checkpoint` for `target` and `dtype` to `root`, and return {batch: measurements}.

    `options` has the number of new tokens, threads and repeats.
    """
    directory, graph = root / "parts", root / "one"
    settings = {"target": target, "dtype": dtype, "cases": 1}
    export(checkpoint, directory, **settings)
    export(checkpoint, graph, generate="greedy", **settings)
    steps, threads = options.new_tokens, options.threads
    both = {
        batch: runs(directory, graph, inputs(checkpoint, batch), steps, threads)
        for batch in BATCHES
    }
    prompt = LENGTH if "encoder_layers" not in read_config(checkpoint) else 1
    return {
        batch: measured(functions, options.repeats, prompt) for batch, functions in both.items()
    }


def run(options: argparse.Namespace) -> dict:
    speeds: dict[str, dict] = {}
    for name in options.models:
        with tempfile.TemporaryDirectory() as root:
            checkpoint = make_checkpoint(name, options.quick, Path(root))
            for target, dtype in TARGETS:
                if options.targets is None or f"{target}-{dtype}" in options.targets:
                    with tempfile.TemporaryDirectory() as exports:
                        results = compared(checkpoint, target, dtype, options, Path(exports))
                    speeds.setdefault(name, {})[f"{target}-{dtype}"] = results
    return {"hardware": hardware(), "versions": versions(PACKAGES), "models": speeds}


if __name__ == "__main__":
    print(json.dumps(run(parse()), indent=1))
