"""BLEU of an English-German model on the captions of Multi30k: `python benchmarks/captions.py CARD
--data DIR`, where DIR has the data set's files, raw and `*.lc.norm.tok.*`.

Prints a line of JSON for each text of DIR and each form, with a 95% interval (intervals.py):

- cased: the translations as they are.
- lower-cased: most papers score this form. sacremoses normalizes, tokenizes and lower-cases the
  translations like the data set's `*.lc.norm.tok.*` files. `alike` counts the raw references that
  become the line of such a file; most of them do.

Further lines are for `val` with noise in every source, one for each kind (training/noise.py).
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

from intervals import corpus_interval
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from transformers import pipeline

import vanilla_transformer  # noqa: F401  registers the models and the translation pipeline
from vanilla_transformer.training.data import read_files, read_lines
from vanilla_transformer.training.metrics import bleu_metric
from vanilla_transformer.training.noise import NOISE

TEXTS = ("val", "test_2016_flickr", "test_2017_flickr")
BATCH = 64

Translate = Callable[[list[str]], list[str]]


def lowercased(lines: list[str]) -> list[str]:
    """Normalize, tokenize and lowercase German lines like the scripts of Moses."""
    normalizer, tokenizer = MosesPunctNormalizer("de"), MosesTokenizer("de")
    return [
        tokenizer.tokenize(normalizer.normalize(line), return_str=True).lower() for line in lines
    ]


def score(outputs: list[str], references: list[str], tokenize: str) -> dict:
    metric = bleu_metric(tokenize)
    value, signature = metric.corpus_score(outputs, [references]).score, str(metric.get_signature())
    interval = [round(bound, 2) for bound in corpus_interval(metric, outputs, references)]
    return {
        "bleu": round(value, 2),
        "interval": interval,
        "signature": signature,
        "lines": len(references),
    }


def text_scores(translate: Translate, data: Path, text: str) -> list[dict]:
    """Return the scores of both forms of a text."""
    sources, targets = read_files([data / f"{text}.{side}.gz" for side in ("en", "de")])
    tokens = read_lines(data / f"{text}.lc.norm.tok.de.gz")
    outputs = translate(sources)
    alike = sum(map(str.__eq__, lowercased(targets), tokens))
    return [
        {"text": text, "form": "cased", **score(outputs, targets, "13a")},
        {
            "text": text,
            "form": "lower-cased",
            **score(lowercased(outputs), tokens, "none"),
            "alike": alike,
        },
    ]


def noise_scores(translate: Translate, data: Path) -> list[dict]:
    """Return the score of `val` with each kind of noise in its sources."""
    sources, targets = read_files([data / "val.en.gz", data / "val.de.gz"])
    results = []
    for name, change in NOISE.items():
        outputs = translate([change(source, Random(source)) for source in sources])
        results.append({"text": f"val, {name}", **score(outputs, targets, "13a")})
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("card", help="directory of a translation model")
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="directory of Multi30k's files, raw and *.lc.norm.tok.*",
    )
    parser.add_argument(
        "--texts", nargs="+", choices=TEXTS, help="by default those of which DIR has the files"
    )
    options = parser.parse_args()
    translator = pipeline("translation", model=options.card)

    def translate(sources: list[str]) -> list[str]:
        return [row["translation_text"] for row in translator(sources, batch_size=BATCH)]

    texts = [text for text in TEXTS if (options.data / f"{text}.en.gz").is_file()]
    for text in options.texts or texts:
        for result in text_scores(translate, options.data, text):
            print(json.dumps(result), flush=True)
    for result in noise_scores(translate, options.data):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
