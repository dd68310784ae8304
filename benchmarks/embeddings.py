"""Texts in a second that become embeddings: `python benchmarks/embeddings.py CHECKPOINT --texts
FILE`, where CHECKPOINT is a directory of sentence-transformers and FILE has a text on each line,
.gz or plain.

sentence-transformers with torch, its module over our exports, and `TextRuntime.embed` take turns,
each in a process of its own, from texts to vectors. `--openvino PYTHON` adds its OpenVINO backend:
the interpreter of an environment with sentence-transformers and optimum-intel[openvino]. Writes
benchmarks/results/embeddings.json and prints its table.
"""

import argparse
import datetime
import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

RESULT = Path(__file__).parent / "results/embeddings.json"
BATCH = 32  # texts
DTYPES = ("fp32", "int8")
# engine -> its name in the table
ENGINES = {
    "torch": "sentence-transformers, torch fp32",
    "openvino-fp32": "sentence-transformers, OpenVINO fp32",
    "openvino": "sentence-transformers, OpenVINO in its default precision",
    **{f"module-{dtype}": f"sentence-transformers over our {dtype}" for dtype in DTYPES},
    "portable-int8": "`TextRuntime.embed`, int8 in standard ONNX operators",
    **{f"runtime-{dtype}": f"`TextRuntime.embed`, {dtype}" for dtype in DTYPES},
}
PACKAGES = ("sentence-transformers", "transformers", "torch")
FP32 = {"INFERENCE_PRECISION_HINT": "f32"}  # OpenVINO's default is bf16 on CPUs that have it


# ------------------------------------------------------------------------------------------ engines


def open_engine(engine: str, files: Path, checkpoint: str, threads: int):
    """Return a function that embeds a list of texts, and the packages of the engine.

    `files` has the exports, in folders named by their dtypes.
    """
    name, _, dtype = engine.partition("-")
    if name in ("runtime", "portable"):
        from vanilla_transformer_export import TextRuntime

        folder = files / (engine if name == "portable" else dtype)
        return TextRuntime(folder, threads=threads).embed, ("onnxruntime",)
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    options, packages = {}, PACKAGES
    if name == "openvino":
        config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
        config |= FP32 if dtype else {}
        options = {"backend": "openvino", "model_kwargs": {"export": True, "ov_config": config}}
        packages = (*PACKAGES, "optimum-intel", "openvino")
    model = SentenceTransformer(checkpoint, device="cpu", **options)
    if name == "module":
        modules = [open_module(files / dtype, threads), *list(model)[1:]]
        model, packages = (
            SentenceTransformer(modules=modules, device="cpu"),
            (*PACKAGES, "onnxruntime"),
        )
    return lambda texts: model.encode(texts, batch_size=BATCH), packages


def open_module(export: Path, threads: int):
    """Return the module of sentence-transformers over `export`."""
    import onnxruntime

    from vanilla_transformer_export.ort_models import OrtTransformer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return OrtTransformer(str(export), model_kwargs={"session_options": options})


def work(engine: str, files: Path, checkpoint: str, threads: int) -> None:
    """Embed the texts in `files` once for each line of standard input, and print the seconds.

    The first time, which is not printed, writes the vectors to files, those of the texts together
    and alone, and prints versions.
    """
    texts = json.loads((files / "texts.json").read_text())
    embed, packages = open_engine(engine, files, checkpoint, threads)
    np.save(files / f"{engine}.npy", embed(texts))
    np.save(files / f"{engine}-alone.npy", np.concatenate([embed([text]) for text in texts]))
    print(json.dumps({name: version(name) for name in packages}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        embed(texts)
        print(time.perf_counter() - start, flush=True)


# --------------------------------------------------------------------------------------- comparison


def compare(files: Path, args: argparse.Namespace) -> dict:
    """Return {engine: record} of all engines that are there, which take turns."""
    from measure import spread
    from workers import Worker

    pythons = {
        engine: args.openvino if engine.startswith("openvino") else sys.executable
        for engine in ENGINES
    }
    settings = [args.checkpoint, "--texts", files, "--threads", args.threads]
    workers = {
        engine: Worker([python, __file__, *settings, "--worker", engine])
        for engine, python in pythons.items()
        if python
    }
    seconds = {engine: [] for engine in workers}
    for _ in range(args.repeats):
        for engine, worker in workers.items():
            seconds[engine].append(worker.run())
    vectors = {engine: np.load(files / f"{engine}.npy") for engine in workers}
    alone = {engine: np.load(files / f"{engine}-alone.npy") for engine in workers}
    expected = vectors["torch"]
    return {
        engine: {
            "seconds": spread(seconds[engine]),
            "per_second": len(expected) / spread(seconds[engine])["median"],
            "max_difference": float(np.abs(vectors[engine] - expected).max()),
            "min_cosine": float(cosines(vectors[engine], expected).min()),
            "max_change_by_batch": float(np.abs(vectors[engine] - alone[engine]).max()),
            "versions": worker.versions,
        }
        for engine, worker in workers.items()
    }


def cosines(vectors: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the cosine of each of `vectors` (B, E) and its counterpart in `others`."""
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(others, axis=1)
    return (vectors * others).sum(axis=1) / lengths


def measure(args: argparse.Namespace) -> dict:
    """Export the checkpoint, measure all engines, and return the result."""
    from measure import command_line, hardware, read_texts

    from vanilla_transformer_export import export

    texts = read_texts(args.texts, args.lines)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        (files / "texts.json").write_text(json.dumps(texts))
        export(args.checkpoint, files / "portable-int8", dtype="int8")
        for dtype in DTYPES:
            export(args.checkpoint, files / dtype, target="cpu", dtype=dtype)
        return {
            "command": command_line("embeddings.py"),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "options": {"threads": args.threads, "repeats": args.repeats, "batch": BATCH},
            "texts": len(texts),
            "hardware": hardware(),
            "engines": compare(files, args),
        }


def table(result: dict) -> str:
    """Return the speeds of `result` and the distances from torch as a table."""
    import report

    base = result["engines"]["torch"]["per_second"]
    rows = [
        [
            ENGINES[engine],
            report.number(record["per_second"]),
            f"{record['per_second'] / base:.2f}",
            f"{record['max_difference']:.1e}",
            f"{record['min_cosine']:.4f}",
            f"{record['max_change_by_batch']:.1e}",
        ]
        for engine, record in result["engines"].items()
    ]
    header = ["engine", "texts/s", "over torch", "largest difference from torch", "lowest cosine"]
    return report.table([*header, "largest change of a value by the batch"], rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="directory of a model of sentence-transformers")
    parser.add_argument("--texts", type=Path, required=True, help="a text on each line")
    parser.add_argument("--lines", type=int, default=512, help="maximum number of texts")
    parser.add_argument("--openvino", metavar="PYTHON", help="interpreter with optimum-intel")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        work(args.worker, args.texts, args.checkpoint, args.threads)
        return
    result = measure(args)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
