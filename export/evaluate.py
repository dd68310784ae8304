"""BLEU of a translation model on parallel text, run by torch from a checkpoint or by onnxruntime from its export."""

import os
from collections.abc import Callable
from pathlib import Path

import sacrebleu

from vanilla_transformer.training.data import read_parallel

from .artifact import MANIFEST

Translate = Callable[[list[str]], list[str]]


def evaluate(directory: str | os.PathLike, source: Path, target: Path, batch_size: int = 32, **options) -> dict:
    """sacreBLEU (13a, cased) of the translations of `source` against `target`, with the generation settings of the
    checkpoint and `options` (`num_beams`, `max_new_tokens`, `length_penalty`) over them.

    Returns `bleu`, `signature`, `sentences` and `engine`.

    Raises:
        ValueError: for parallel files that do not fit each other.
    """
    pairs = read_parallel(source, target)
    is_export = (Path(directory) / MANIFEST).is_file()
    translate = onnxruntime_translator(directory, options) if is_export else torch_translator(directory, options)
    metric = sacrebleu.metrics.BLEU()
    score = metric.corpus_score(in_batches(translate, [pair[0] for pair in pairs], batch_size), [[pair[1] for pair in pairs]])
    return {
        "bleu": round(score.score, 2),
        "signature": str(metric.get_signature()),
        "sentences": len(pairs),
        "engine": "onnxruntime" if is_export else "torch",
    }


def in_batches(translate: Translate, texts: list[str], batch_size: int) -> list[str]:
    """`translate` over batches of texts of similar length, in the order given."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    results = [""] * len(texts)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        for index, result in zip(chosen, translate([texts[index] for index in chosen])):
            results[index] = result
    return results


def onnxruntime_translator(export: str | os.PathLike, options: dict) -> Translate:
    from .text import TextRuntime

    runtime = TextRuntime(export)
    return lambda texts: runtime.generate(texts, **options)


def torch_translator(checkpoint: str | os.PathLike, options: dict) -> Translate:
    from transformers import AutoTokenizer

    from .build import load_checkpoint

    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), load_checkpoint(checkpoint)

    def translate(texts):
        inputs = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        return tokenizer.batch_decode(model.generate(**inputs, **options), skip_special_tokens=True)

    return translate
