"""`make demo`: export the shipped translator, compare the export with torch, and translate with
both, side by side.

Arguments are more English sentences to translate. The export stays in build/demo.
"""

import itertools
import statistics
import sys
import textwrap
import time
from pathlib import Path

import onnxruntime
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

import vanilla_transformer
from vanilla_transformer_export import TextRuntime, export, verify

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "model_cards" / "vanilla-seq2seq-tiny-multi30k-en-de"
EXPORT = ROOT / "build" / "demo"
REPEATS = 5
HEADER = ("English", "our German, beam 5", "reference", "torch ms", "onnx ms")
WIDTHS = (34, 34, 34, 9, 9)
PARTS, CASES = 6, 10  # of the comparison: batches with a seed of their own


def milliseconds(function, *args):
    """Call `function(*args)` `REPEATS` times, and return its result and the median milliseconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = function(*args)
        times.append(1000 * (time.perf_counter() - start))
    return result, statistics.median(times)


def main(texts):
    logging.disable_progress_bar()
    start = time.perf_counter()
    versions = {
        package.__name__: package.__version__
        for package in (vanilla_transformer, torch, onnxruntime)
    }
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(CHECKPOINT),
        AutoTokenizer.from_pretrained(CHECKPOINT),
    )
    print(f"{CHECKPOINT.name}: {type(model).__name__}, {model.num_parameters():,} parameters")
    examples = [line.split("\t") for line in (CHECKPOINT / "examples.tsv").read_text().splitlines()]
    examples += [[text, ""] for text in texts]

    def torch_translate(text):
        inputs = tokenizer(text, return_tensors="pt")
        return tokenizer.decode(model.generate(**inputs)[0], skip_special_tokens=True)

    print("Exporting to ONNX, with a first comparison", flush=True)
    EXPORT.parent.mkdir(exist_ok=True)
    files = export(CHECKPOINT, EXPORT, force=True)["files"]
    size = sum(facts["bytes"] for name, facts in files.items() if name.endswith(".onnx"))
    print(f"Exported: {size / 1e6:.1f} MB of ONNX graphs in {EXPORT.relative_to(ROOT)}")
    for seed in range(PARTS):
        report = verify(EXPORT, model, CASES, seed)
        print(f"Compared with torch, part {seed + 1} of {PARTS}: {report}", flush=True)
        if report.failures:
            sys.exit("\n".join(report.failures))
    runtime = TextRuntime(EXPORT)
    print_row(HEADER)
    rows = []
    for english, reference in examples:
        ours, torch_ms = milliseconds(torch_translate, english)
        (onnx,), onnx_ms = milliseconds(runtime.generate, [english])
        rows.append((ours, onnx))
        german = ours if ours == onnx else f"torch: {ours} / onnxruntime: {onnx}"
        print_row((english, german, reference, f"{torch_ms:.0f}", f"{onnx_ms:.0f}"))
    same = sum(ours == onnx for ours, onnx in rows)
    print(
        f"{same} of {len(rows)} translations are the same in torch and onnxruntime; "
        f"{time.perf_counter() - start:.0f} s in all"
    )
    command = Path(sys.executable).with_name("vanilla-transformer")
    print(f'Next: {command} predict {EXPORT} "A dog runs." --task translate')


def print_row(cells):
    """Print a row of the table, with a line below."""
    columns = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, WIDTHS)]
    for parts in itertools.zip_longest(*columns, fillvalue=""):
        print("  ".join(map(str.ljust, parts, WIDTHS)).rstrip())
    print("-" * (sum(WIDTHS) + 2 * len(WIDTHS)), flush=True)


if __name__ == "__main__":
    for text in sys.argv[1:]:
        if not text.strip():
            sys.exit("demo: TEXT is empty, expected a sentence")
    main(sys.argv[1:])
