"""Beam search of the base encoder-decoder against `OVModelForSeq2SeqLM` of optimum-intel: `python
benchmarks/openvino_beams.py --openvino PYTHON`, where PYTHON is the interpreter of an environment
with optimum-intel[openvino]. Version 2.2 exports Marian's class with transformers up to 4.57.6.

Both read the same seeded weights and rows of 32 tokens, search with 4 beams and generate 64 tokens,
which no row ends earlier. They take turns, each in a process of its own, with two threads. Prints
versions, and a line of JSON for each batch: the medians, and the share of rows with the tokens of
our fp32. Without `--openvino` only our exports run.
"""

import argparse
import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

BATCHES = (1, 8, 32)
BEAMS, LENGTH, NEW_TOKENS, THREADS = 4, 32, 64, 2
OPTIMUM = ("optimum-intel", "openvino", "transformers")
# engine: its packages
ENGINES = {
    "openvino": OPTIMUM,  # in its default precision
    "openvino-fp32": OPTIMUM,
    "openvino-int8": OPTIMUM,
    "cpu-fp32": ("vanilla-transformer", "onnxruntime"),
    "cpu-int8": ("vanilla-transformer", "onnxruntime"),
    "cpu-calibrated": ("vanilla-transformer", "onnxruntime"),
}


def open_engine(engine: str, files: Path):
    """Return a function from token ids (B, S) to the new tokens (B, `NEW_TOKENS`)."""
    if not engine.startswith("openvino"):
        from vanilla_transformer_export import Runtime

        # as many workers as threads, for a batch of many beams
        runtime = Runtime(files / engine, threads=THREADS, workers=THREADS)
        options = {"num_beams": BEAMS, "max_new_tokens": NEW_TOKENS, "eos_token_id": []}
        return lambda ids: runtime.generate(ids, np.ones_like(ids), **options)[:, -NEW_TOKENS:]
    import torch
    from optimum.intel import OVModelForSeq2SeqLM

    config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": THREADS}
    if engine == "openvino-fp32":  # the default is bf16 on CPUs that have it
        config["INFERENCE_PRECISION_HINT"] = "f32"
    model = OVModelForSeq2SeqLM.from_pretrained(
        files / "transformers",
        export=True,
        load_in_8bit=engine == "openvino-int8",
        ov_config=config,
    )
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None

    def generate(ids):
        tokens = torch.from_numpy(ids)
        result = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            num_beams=BEAMS,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
        )
        return result.numpy()[:, -NEW_TOKENS:]

    return generate


def work(engine: str, files: Path) -> None:
    """Generate from the rows of each file that standard input names, and print the seconds.

    The tokens are written beside the rows. The first line that is printed has versions.
    """
    generate = open_engine(engine, files)
    print(json.dumps({name: version(name) for name in ENGINES[engine]}), flush=True)
    for line in sys.stdin:
        ids = np.load(files / f"{line.strip()}.npy")
        start = time.perf_counter()
        tokens = generate(ids)
        seconds = time.perf_counter() - start
        np.save(files / f"{line.strip()}-{engine}.npy", tokens)
        print(seconds, flush=True)


def prepare(files: Path, quick: bool) -> None:
    """Write the models and the rows of each batch to `files`, unless they are there.

    With `quick` the model is tiny.
    """
    import workload
    from measure import isolated

    if (files / "vanilla").exists():
        return
    isolated(workload.make_checkpoints, "seq2seq", quick, files)
    for engine in ENGINES:
        if engine.startswith("cpu-"):
            isolated(workload.prepare, engine, "seq2seq", files)
    # the export of optimum-intel reads an end token, which generation does not use
    config = json.loads((files / "transformers/config.json").read_text()) | {"eos_token_id": 0}
    (files / "transformers/config.json").write_text(json.dumps(config))
    vocabulary = workload.fields("seq2seq", quick)["vocab_size"]
    for batch in BATCHES:
        rows = (batch, LENGTH)
        ids = np.random.default_rng(0).integers(workload.FIRST_TOKEN, vocabulary - 1, rows)
        np.save(files / f"batch{batch}.npy", ids)


def compare(files: Path, openvino: str | None, repeats: int) -> None:
    """Measure all engines, and print a line for each batch.

    `openvino` is the interpreter of OpenVINO's engines, which are left out without it.
    """
    from workers import Worker

    pythons = {
        engine: openvino if engine.startswith("openvino") else sys.executable for engine in ENGINES
    }
    workers = {
        engine: Worker([python, __file__, "--worker", engine, "--files", files])
        for engine, python in pythons.items()
        if python
    }
    print(json.dumps({engine: worker.versions for engine, worker in workers.items()}))
    for batch in BATCHES:
        name = f"batch{batch}"
        seconds = {engine: [] for engine in workers}
        for repeat in range(repeats + 1):
            for engine, worker in workers.items():
                took = worker.run(name)
                if repeat:  # the first one warms up
                    seconds[engine].append(took)
        expected = np.load(files / f"{name}-cpu-fp32.npy")
        records = {
            engine: {
                "tokens_per_second": round(batch * NEW_TOKENS / np.median(values), 1),
                "same_rows": float(
                    (np.load(files / f"{name}-{engine}.npy") == expected).all(axis=1).mean()
                ),
            }
            for engine, values in seconds.items()
        }
        print(json.dumps({"batch": batch, **records}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--openvino", metavar="PYTHON", help="interpreter with optimum-intel")
    parser.add_argument("--files", type=Path, help="directory that keeps the models")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to test this script")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.files)
        return
    with tempfile.TemporaryDirectory() as folder:
        files = args.files or Path(folder)
        prepare(files, args.quick)
        compare(files, args.openvino, args.repeats)


if __name__ == "__main__":
    main()
