"""BLEU of an English-German model of cased text as most papers on Multi30k have it:
`python benchmarks/lowercased.py CARD --data DIR`, where DIR holds the data set's files.

The translations of the raw text are normalised, tokenised and lower-cased as the data set's
`*.lc.norm.tok.*` files were, by sacremoses, and compared with those; BLEU has a 95% interval
(intervals.py). How many of their lines the raw references give the same way shows whether it is
done so.
"""

import argparse
import json
from pathlib import Path

import sacrebleu
from intervals import corpus_interval
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from transformers import pipeline

import vanilla_transformer  # noqa: F401  registers the models and the translation pipeline
from vanilla_transformer.training.data import read_lines, read_parallel

SPLITS = ("test_2016_flickr", "val")
BATCH = 64


def lowercased(lines: list[str]) -> list[str]:
    """Return German lines, normalized, tokenized and lowercased as by the scripts of Moses."""
    normalizer, tokenizer = MosesPunctNormalizer("de"), MosesTokenizer("de")
    return [
        tokenizer.tokenize(normalizer.normalize(line), return_str=True).lower() for line in lines
    ]


def score(translate, data: Path, split: str) -> dict:
    sources, targets = zip(*read_parallel(data / f"{split}.en.gz", data / f"{split}.de.gz"))
    references = read_lines(data / f"{split}.lc.norm.tok.de.gz")
    outputs = [row["translation_text"] for row in translate(list(sources), batch_size=BATCH)]
    metric, outputs = sacrebleu.metrics.BLEU(tokenize="none"), lowercased(outputs)
    value, signature = metric.corpus_score(outputs, [references]).score, str(metric.get_signature())
    interval = [round(bound, 2) for bound in corpus_interval(metric, outputs, references)]
    alike = sum(map(str.__eq__, lowercased(targets), references))
    return dict(
        text=split,
        bleu=round(value, 2),
        interval=interval,
        signature=signature,
        lines=len(references),
        alike=alike,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("card", help="directory of a translation model")
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="directory of Multi30k's files, raw and *.lc.norm.tok.*",
    )
    options = parser.parse_args()
    translate = pipeline("translation", model=options.card)
    for split in SPLITS:
        print(json.dumps(score(translate, options.data, split)))


if __name__ == "__main__":
    main()
