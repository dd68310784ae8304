"""The results of benchmarks/speed.py as data: what was measured, and the ratios of engines."""

from pathlib import Path

LABELS = {
    "transformers": "transformers, eager",
    "transformers-compile": "transformers, torch.compile",
    "ctranslate2-float32": "CTranslate2 fp32",
    "ctranslate2-int8": "CTranslate2 int8",
    "openvino-fp32": "OpenVINO fp32",
    "openvino-int8": "OpenVINO int8 weights",
    "openvino-ptq": "OpenVINO int8, calibrated",
    "openvino-int4": "OpenVINO int4 weights",
    "llamacpp-f32": "llama.cpp fp32",
    "llamacpp-q8": "llama.cpp Q8_0",
    "llamacpp-q4": "llama.cpp Q4_0",
    "vanilla": "ours, torch",
    "portable-fp32": "ours, portable fp32",
    "cpu-fp32": "ours, cpu fp32",
    "cpu-int8": "ours, cpu int8",
    "cpu-calibrated": "ours, cpu int8, calibrated",
    "cpu-int4": "ours, cpu int4",
    "cuda-fp32": "ours, cuda fp32",
    "cuda-fp16": "ours, cuda fp16",
    "cuda-bf16": "ours, cuda bf16",
    "torch-graph": "bound: ours, torch, a CUDA graph",
}
# precision: (exports of ours, engines of others)
PRECISIONS = {
    "fp32": (
        ("portable-fp32", "cpu-fp32"),
        (
            "transformers",
            "transformers-compile",
            "ctranslate2-float32",
            "openvino-fp32",
            "llamacpp-f32",
        ),
    ),
    "int8": (
        ("cpu-int8", "cpu-calibrated"),
        ("ctranslate2-int8", "openvino-int8", "openvino-ptq", "llamacpp-q8"),
    ),
    "int4": (("cpu-int4",), ("openvino-int4", "llamacpp-q4")),
}
# (shape, beams): (name, what is counted in a second)
SPEEDS = {
    ("seq2seq", 1): ("seq2seq, greedy", "target tokens/s"),
    ("seq2seq", 4): ("seq2seq, beam 4", "target tokens/s"),
    ("gpt2", 1): ("GPT-2, greedy", "new tokens/s"),
    ("bert", 1): ("BERT", "sequences/s"),
    ("mixed", 1): ("BERT, mixed lengths", "sequences/s"),
    ("bart", 1): ("BART-large-CNN's shape, greedy", "new tokens/s"),
    ("t5", 1): ("Flan-T5-XL's shape, greedy", "new tokens/s"),
    ("modernbert", 1): ("ModernBERT, 128 tokens", "sequences/s"),
    ("modernbert-512", 1): ("ModernBERT, 512 tokens", "sequences/s"),
    ("captions", 1): ("captions, greedy", "sentences/s"),
    ("captions", 5): ("captions, beam 5", "sentences/s"),
}
# descriptions of the work of growing shapes
WORKS = {
    "length": "seq2seq, greedy, {new_tokens} new tokens",
    "encoder-length": "BERT, {length} tokens",
    "batch": "seq2seq, greedy",
}
# shape: (title, what grows)
GROWTH = {
    "length": ("seq2seq, greedy, batch 1, seconds by new tokens", "new_tokens"),
    "encoder-length": ("BERT, batch 1, seconds by length", "length"),
    "batch": ("seq2seq, greedy, target tokens/s by batch", "batch"),
}
# (what, field, shape, beams, engine, the engine it is divided by)
RATIOS = [
    ("tokens/s: seq2seq greedy", "per_second", "seq2seq", 1, "cpu-fp32", "ctranslate2-float32"),
    ("tokens/s: seq2seq greedy", "per_second", "seq2seq", 1, "cpu-int8", "ctranslate2-int8"),
    ("tokens/s: seq2seq greedy", "per_second", "seq2seq", 1, "cpu-int8", "transformers"),
    ("tokens/s: seq2seq beam 4", "per_second", "seq2seq", 4, "cpu-int8", "ctranslate2-int8"),
    ("tokens/s: GPT-2 greedy", "per_second", "gpt2", 1, "cpu-int8", "ctranslate2-int8"),
    ("sequences/s: BERT", "per_second", "bert", 1, "cpu-int8", "ctranslate2-int8"),
    ("memory: seq2seq greedy", "peak_memory", "seq2seq", 1, "cpu-fp32", "ctranslate2-float32"),
    ("memory: seq2seq greedy", "peak_memory", "seq2seq", 1, "cpu-int8", "ctranslate2-int8"),
    ("memory: GPT-2 greedy", "peak_memory", "gpt2", 1, "cpu-int8", "ctranslate2-int8"),
    ("memory: BERT", "peak_memory", "bert", 1, "cpu-int8", "ctranslate2-int8"),
    ("tokens/s: seq2seq greedy", "per_second", "seq2seq", 1, "cuda-fp16", "transformers"),
    ("tokens/s: seq2seq greedy", "per_second", "seq2seq", 1, "cuda-fp16", "transformers-compile"),
    ("tokens/s: seq2seq greedy", "per_second", "seq2seq", 1, "cuda-fp16", "torch-graph"),
    ("tokens/s: seq2seq beam 4", "per_second", "seq2seq", 4, "cuda-fp16", "transformers"),
    ("tokens/s: GPT-2 greedy", "per_second", "gpt2", 1, "cuda-fp16", "transformers"),
    ("tokens/s: GPT-2 greedy", "per_second", "gpt2", 1, "cuda-fp16", "torch-graph"),
    ("sequences/s: BERT", "per_second", "bert", 1, "cuda-fp16", "transformers"),
]
VNNI = {"avx512_vnni", "avx_vnni"}
AMX = "amx_int8"
RESULTS = Path(__file__).parent / "results"


def processor(instructions: list[str]) -> str:
    """Return the kind of a CPU by its `instructions`: "amx" with 8-bit products of tiles, "vnni"
    with 8-bit dot products, else "avx2"."""
    if AMX in instructions:
        return "amx"
    return "vnni" if VNNI & {*instructions} else "avx2"


def records(result, shape, beams=1):
    return [
        record
        for record in result["cells"]
        if record["shape"] == shape and record["beams"] == beams
    ]


def by_engine(cells, field):
    """Return {engine: {value of `field`: record}} of the records `cells`, as they were measured."""
    engines = {record["engine"]: {} for record in cells}
    for record in cells:
        engines[record["engine"]][record[field]] = record
    return engines


def growth(result, shape):
    """Return the records of a growing `shape` in `result`, without engines that were not measured.

    Its small batches are those of seq2seq.
    """
    cells = records(result, shape)
    engines = {record["engine"] for record in cells if "missing" not in record}
    smaller = records(result, "seq2seq") if cells and shape == "batch" else []
    return [record for record in smaller + cells if record["engine"] in engines]


def work(record: dict) -> str:
    """Return a description of what a `record` measures, without its number of rows."""
    shape = record["shape"]
    return WORKS[shape].format(**record) if shape in WORKS else SPEEDS[shape, record["beams"]][0]


def leads(result: dict) -> dict[tuple[str, str], dict[int, tuple[dict, dict]]]:
    """Return {(work, export of ours): {batch: (its record, the record of the fastest other
    engine)}}.

    Both engines have the same precision. For captions, "any" compares the fastest of each side at
    any precision. `result` is the JSON of a benchmark.
    """
    cells = {}
    for record in result["cells"]:
        if "per_second" in record:
            cells.setdefault((work(record), record["batch"]), {})[record["engine"]] = record
    result_leads = {}
    for (what, batch), engines in cells.items():
        pairs = {name: others for ours, others in PRECISIONS.values() for name in ours}
        for name, others in pairs.items():
            if name in engines and (other := fastest(engines, others)):
                result_leads.setdefault((what, name), {})[batch] = engines[name], other
        best = (
            fastest(engines, pairs),
            fastest(engines, [name for others in pairs.values() for name in others]),
        )
        if what.startswith("captions") and all(best):
            result_leads.setdefault((what, "any"), {})[batch] = best
    return result_leads


def fastest(engines: dict, names) -> dict | None:
    return max(
        (engines[name] for name in names if name in engines),
        key=lambda record: record["per_second"],
        default=None,
    )


def ratios(result: dict) -> list[dict]:
    """Return the ratios that have targets: speed (more is better) and memory (less is better).

    Each has what, engine, divided_by and batches, {batch: ratio}. A ratio is `None` if one side was
    not measured.
    """
    result_ratios = []
    for what, field, shape, beams, engine, other in RATIOS:
        engines = by_engine(records(result, shape, beams), "batch")
        batches = {}
        for batch, record in engines.get(engine, {}).items():
            divisor = engines.get(other, {}).get(batch, {}).get(field)
            batches[batch] = (
                record[field] / divisor if divisor is not None and field in record else None
            )
        result_ratios.append(
            {"what": what, "engine": engine, "divided_by": other, "batches": batches}
        )
    return result_ratios
