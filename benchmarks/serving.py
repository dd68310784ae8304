"""Serving, measured: `python benchmarks/serving.py --captions FILE` writes
benchmarks/results/serving.json and reports it.

Our server, CTranslate2 behind our own front, FastAPI with `generate` of transformers, and
`transformers serve`, each in a process of its own, with a client in another one over loopback, on
the same cores. They take turns, round by round. FILE has a sentence on each line, as text or gzip.
Parts that the file of results has already are replaced, the others stay: one part after the other
can be run. Models are made once, in `--root`. Nothing is downloaded.
"""

import argparse
import datetime
import json
import os
import sys
from pathlib import Path

import serving_models
import serving_report
from measure import command_line, hardware, isolated, read_texts, versions
from serving_parts import MODELS, PARTS, Run

HERE = Path(__file__).parent
CARDS = HERE.parent / "model_cards"
TRANSLATOR, DECODER = (
    CARDS / "vanilla-seq2seq-tiny-multi30k-en-de",
    CARDS / "vanilla-decoder-tiny-shakespeare",
)
PACKAGES = (
    "vanilla-transformer",
    "onnxruntime",
    "fastapi",
    "uvicorn",
    "ctranslate2",
    "torch",
    "transformers",
    "tokenizers",
)


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--captions",
        type=Path,
        required=True,
        metavar="FILE",
        help="text file to translate, one sentence per line",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=", ".join(PARTS),
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=MODELS,
        metavar="MODEL",
        help=", ".join(MODELS),
    )
    parser.add_argument(
        "--servers", nargs="+", metavar="NAME", help="servers of the part saturation (all)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of rounds (5)")
    parser.add_argument("--seconds", type=float, default=8, help="seconds per round and server (8)")
    parser.add_argument(
        "--minutes", type=float, default=9, help="minutes of the parts memory and overload (9)"
    )
    parser.add_argument(
        "--sentences", type=int, default=1000, help="number of sentences of FILE (1000)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny base model, to test the benchmark itself"
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=HERE.parent / "build/serving",
        help="folder that keeps the models",
    )
    parser.add_argument(
        "--out", type=Path, default=HERE / "results/serving.json", help="output file, JSON"
    )
    return parser.parse_args(arguments)


def measure(options, part: str, model: str) -> dict:
    run = Run(
        options.root, read_texts(options.captions, options.sentences), options.seconds,
        options.repeats, options.minutes, options.servers,
    )  # fmt: skip
    print(f"{datetime.datetime.now():%H:%M:%S}  {part} {model}", file=sys.stderr)
    if model == "decoder":
        isolated(serving_models.prepare_decoder, DECODER, options.root)
        return PARTS[part][0](run, DECODER)
    isolated(serving_models.prepare, model, TRANSLATOR, options.root, run.captions, options.quick)
    return PARTS[part][0](run, model)


def main(arguments=None):
    options = parse(arguments)
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    os.environ.pop("OMP_NUM_THREADS", None)  # each server gets its number of threads as a flag
    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    for part in options.parts:
        for model in PARTS[part][1]:
            if model != "decoder" and model not in options.models:
                continue
            results = measure(options, part, model)
            result.setdefault(part, {})[model] = {
                "command": command_line("serving.py"),
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "quick": options.quick,
                "hardware": hardware(),
                "versions": versions(PACKAGES),
                "found": results,
            }
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    serving_report.main(options.out)


if __name__ == "__main__":
    main()
