"""`make demo`: loads the shipped model, exports it, verifies the export, and translates with both,
side by side.

Arguments are more English sentences to translate.
"""

import statistics
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import onnxruntime
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

import vanilla_transformer
from vanilla_transformer_export import TextRuntime, export, verify

CHECKPOINT = Path(__file__).parents[1] / "model_cards" / "vanilla-seq2seq-tiny-multi30k-en-de"
REPEATS = 5


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

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "onnx"
        files = export(CHECKPOINT, out)["files"]
        size = sum(facts["bytes"] for name, facts in files.items() if name.endswith(".onnx"))
        print(f"exported to ONNX: {size / 1e6:.1f} MB")
        report = verify(out, model)
        print(f"verified: {report}")
        if report.failures:
            sys.exit("\n".join(report.failures))
        runtime = TextRuntime(out)
        rows = []
        for english, reference in examples:
            ours, torch_ms = milliseconds(torch_translate, english)
            (onnx,), onnx_ms = milliseconds(runtime.generate, [english])
            rows.append((english, ours, onnx, reference, f"{torch_ms:.0f}", f"{onnx_ms:.0f}"))
    print_table(rows)
    same = sum(row[1] == row[2] for row in rows)
    print(
        f"{same} of {len(rows)} translations are the same in torch and onnxruntime; "
        f"{time.perf_counter() - start:.0f} s in all"
    )


def print_table(rows):
    """Print English, German and reference in columns; both translations if the engines differ.

    A row is (English, German of torch, German of onnxruntime, reference, torch ms, onnxruntime ms).
    """
    widths = (34, 34, 34, 9, 9)
    line = "-" * (sum(widths) + 2 * len(widths))
    print_row(("English", "our German, beam 5", "reference", "torch ms", "onnx ms"), widths)
    print(line)
    for english, ours, onnx, reference, torch_ms, onnx_ms in rows:
        german = ours if ours == onnx else f"torch: {ours} / onnxruntime: {onnx}"
        print_row((english, german, reference, torch_ms, onnx_ms), widths)
        print(line)


def print_row(cells, widths):
    columns = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, widths)]
    for index in range(max(map(len, columns))):
        parts = (
            (column[index] if index < len(column) else "").ljust(width)
            for column, width in zip(columns, widths)
        )
        print("  ".join(parts).rstrip())


if __name__ == "__main__":
    for text in sys.argv[1:]:
        if not text.strip():
            sys.exit("demo: TEXT is empty, expected a sentence")
    main(sys.argv[1:])
