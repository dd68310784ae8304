"""Losses of each dtype of an export against torch: `python benchmarks/dtypes.py CHECKPOINT
--inputs FILE --work DIR`, where FILE has a text on each line, .gz or plain, or is an array of
images (N, 3, H, W) in .npy.

The vectors are those of sentence-transformers, or the first state of each image. `--calibrate
FILE` adds int8 with calibrated activations. A call that was interrupted goes on with the files in
DIR. The result of the checkpoint joins benchmarks/results/dtypes.json, whose table is printed.
"""

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

RESULT = Path(__file__).parent / "results/dtypes.json"
DTYPES = ("fp32", "int8", "int8 calibrated", "int4")
NEIGHBOURS = 10
BATCH = 32  # inputs
TIMED = 64  # inputs of a round
HEADER = [
    *("checkpoint", "dtype", "cosine, mean", "cosine, lowest", "neighbours kept"),
    *("Spearman of all", "Spearman of neighbours", "time over fp32", "one at a time", "MB"),
]


# ------------------------------------------------------------------------------------- the vectors


def read_inputs(path: Path, count: int) -> list:
    """Return the first `count` texts, or images as arrays (3, H, W) float32."""
    if path.suffix == ".npy":
        return [*np.load(path)[:count].astype(np.float32)]
    from measure import read_texts

    return read_texts(path, count)


def torch_vectors(folder: Path, checkpoint: Path, inputs: list) -> dict:
    """Write the vectors that torch computes in float32 to `folder`. Return the packages."""
    folder.mkdir(parents=True)
    np.save(folder / "vectors.npy", open_torch(checkpoint, inputs)(inputs))
    return {name: version(name) for name in ("torch", "transformers", "sentence-transformers")}


def open_torch(checkpoint: Path, inputs: list):
    import torch

    if isinstance(inputs[0], str):
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(checkpoint), device="cpu").encode
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoint).eval()

    def first_states(images: list) -> np.ndarray:
        with torch.no_grad():
            batches = [torch.from_numpy(batch) for batch in in_batches(images)]
            return np.concatenate([model(batch)[0][:, 0].numpy() for batch in batches])

    return first_states


def in_batches(images: list) -> list[np.ndarray]:
    return [np.stack(images[start : start + BATCH]) for start in range(0, len(images), BATCH)]


def export_vectors(
    folder: Path, checkpoint: Path, inputs: list, dtype: str, calibrate: Path | None
) -> dict:
    """Write an export in `dtype` and its vectors to `folder`. Return its size in megabytes."""
    from vanilla_transformer_export import export

    name, _, is_calibrated = dtype.partition(" ")
    options = {"calibrate": calibrate} if is_calibrated else {}
    folder.mkdir(parents=True)
    report = export(checkpoint, folder / "export", target="cpu", dtype=name, cases=2, **options)
    np.save(folder / "vectors.npy", open_export(folder, inputs)(inputs))
    files = report["files"].items()
    size = sum(facts["bytes"] for name, facts in files if ".onnx" in name)
    return {"megabytes": size / 1e6}


def open_export(folder: Path, inputs: list):
    """Return a function that makes vectors of inputs with the export in `folder`, in one thread."""
    from vanilla_transformer_export import Runtime, TextRuntime

    if isinstance(inputs[0], str):
        return TextRuntime(folder / "export", threads=1).embed
    runtime = Runtime(folder / "export", threads=1)

    def first_states(images: list) -> np.ndarray:
        outputs = [runtime.outputs(pixel_values=batch) for batch in in_batches(images)]
        return np.concatenate([values["last_hidden_state"][:, 0] for values in outputs])

    return first_states


def time_exports(folders: dict[str, Path], inputs: list, repeats: int) -> dict:
    """Return {dtype: seconds} of `TIMED` inputs together and of one, medians of `repeats` rounds in
    which all dtypes take turns."""
    opened = {dtype: open_export(path, inputs) for dtype, path in folders.items()}
    together, alone = ({dtype: [] for dtype in opened} for _ in range(2))
    for number in range(repeats + 1):
        for dtype, run in opened.items():
            for seconds, batch in ((together, inputs[:TIMED]), (alone, [inputs[number]])):
                start = time.perf_counter()
                run(batch)
                seconds[dtype].append(time.perf_counter() - start)
    # the first round warms up
    return {
        dtype: {"together": np.median(together[dtype][1:]), "alone": np.median(alone[dtype][1:])}
        for dtype in opened
    }


# --------------------------------------------------------------------------------------- comparison


def compare(vectors: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Return how well `vectors` (N, E) agree with those of torch, which are `expected`.

    The numbers are the mean and the lowest cosine; of the 10 nearest neighbours of each vector, the
    share that is kept; and Spearman's correlation of the similarities to all others and to the 10
    neighbours, means over all vectors.
    """
    vectors, expected = normalize(vectors), normalize(expected)
    cosines = (vectors * expected).sum(axis=1)
    seen, reference = others(vectors @ vectors.T), others(expected @ expected.T)
    nearest = np.argsort(-reference, axis=1)[:, :NEIGHBOURS]
    kept = [
        np.isin(row, best).mean()
        for row, best in zip(np.argsort(-seen, axis=1)[:, :NEIGHBOURS], nearest)
    ]
    near = (np.take_along_axis(values, nearest, axis=1) for values in (seen, reference))
    return {
        "mean": float(cosines.mean()),
        "lowest": float(cosines.min()),
        "kept": float(np.mean(kept)),
        "spearman": spearman(seen, reference),
        "spearman_near": spearman(*near),
    }


def normalize(vectors: np.ndarray) -> np.ndarray:
    vectors = vectors.astype(np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def others(similarities: np.ndarray) -> np.ndarray:
    """Return (N, N - 1) of (N, N): the similarities of each vector to all others."""
    size = len(similarities)
    return similarities[~np.eye(size, dtype=bool)].reshape(size, size - 1)


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Return the mean over rows of Spearman's rank correlation of two arrays (N, M)."""
    ranks = [np.argsort(np.argsort(values, axis=1), axis=1) for values in (first, second)]
    size = first.shape[1]
    squares = np.square(ranks[0] - ranks[1]).sum(axis=1)
    return float((1 - 6 * squares / (size * (size**2 - 1))).mean())


def measure(args: argparse.Namespace) -> dict:
    """Return the record of the checkpoint."""
    from measure import command_line, hardware, once

    inputs = read_inputs(args.inputs, args.lines)
    work, checkpoint = args.work / args.checkpoint.name, args.checkpoint
    work.mkdir(parents=True, exist_ok=True)
    versions = once(work / "torch", torch_vectors, work / "torch", checkpoint, inputs)
    expected = np.load(work / "torch/vectors.npy")
    records, folders = {}, {}
    for dtype in DTYPES:
        if dtype == "int8 calibrated" and args.calibrate is None:
            continue
        folders[dtype] = folder = work / dtype.replace(" ", "-")
        facts = once(folder, export_vectors, folder, checkpoint, inputs, dtype, args.calibrate)
        records[dtype] = facts | compare(np.load(folder / "vectors.npy"), expected)
    times = once(work / "times", time_exports, folders, inputs, args.repeats)
    return {
        "command": command_line("dtypes.py"),
        "inputs": len(inputs),
        "versions": versions,
        "hardware": hardware(),
        "dtypes": {dtype: record | times[dtype] for dtype, record in records.items()},
    }


def table(results: dict) -> str:
    """Return the results as a table. `results` are {checkpoint: record}."""
    import report

    rows = []
    for checkpoint, result in results.items():
        base = result["dtypes"]["fp32"]
        for dtype, record in result["dtypes"].items():
            numbers = [f"{record[name]:.4f}" for name in ("mean", "lowest")]
            numbers += [f"{record[name]:.3f}" for name in ("kept", "spearman", "spearman_near")]
            numbers += [f"{record[name] / base[name]:.2f}" for name in ("together", "alone")]
            rows.append([checkpoint, dtype, *numbers, f"{record['megabytes']:.0f}"])
    return report.table(HEADER, rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="directory of a checkpoint")
    parser.add_argument("--inputs", type=Path, required=True, help="texts or images")
    parser.add_argument("--work", type=Path, required=True, help="directory of exports and vectors")
    parser.add_argument("--calibrate", type=Path, help="texts that int8 is calibrated on")
    parser.add_argument("--lines", type=int, default=2000, help="maximum number of inputs")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of the times")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    results[args.checkpoint.name] = measure(args)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
