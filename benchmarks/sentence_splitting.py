"""Sentence splitters on texts with abbreviations and on captions: accuracy and speed.

`python benchmarks/sentence_splitting.py FILE` joins the captions of FILE in pairs and splits them
again. Other libraries are compared where they are installed: `pip install sentencex pysbd blingfire
sentence-splitter syntok`.
"""

import argparse
import gzip
import importlib.util
import time
from collections.abc import Callable

from sentence_texts import TEXTS, UNSPACED

from vanilla_transformer_export.text.tasks.segments import sentences_and_spaces

Splitter = Callable[[str, str], list[str]]  # a text and the code of its language -> sentences


def ours(text: str, language: str) -> list[str]:
    return [part for part, is_sentence in sentences_and_spaces(text, language) if is_sentence]


def sentencex(text: str, language: str) -> list[str]:
    import sentencex

    return sentencex.segment(language, text)


def pysbd(text: str, language: str) -> list[str]:
    import pysbd

    known = language if language in pysbd.languages.LANGUAGE_CODES else "en"
    return pysbd.Segmenter(language=known, clean=False).segment(text)


def blingfire(text: str, language: str) -> list[str]:
    import blingfire

    return blingfire.text_to_sentences(text).split("\n")


def sentence_splitter(text: str, language: str) -> list[str]:
    import sentence_splitter

    known = language if language in sentence_splitter.supported_languages() else "en"
    return sentence_splitter.SentenceSplitter(known).split(text)


def syntok(text: str, language: str) -> list[str]:
    from syntok import segmenter

    paragraphs = segmenter.analyze(text)
    return [
        "".join(token.spacing + token.value for token in sentence)
        for sentences in paragraphs
        for sentence in sentences
    ]


def right_texts(split: Splitter) -> dict[str, int]:
    """Return {language: number of its `TEXTS` that `split` cuts exactly where they are marked}."""
    return {
        language: sum(is_right(split, text, language) for text in texts)
        for language, texts in TEXTS.items()
    }


def is_right(split: Splitter, text: str, language: str) -> bool:
    sentences = text.split("|")
    joined = ("" if language in UNSPACED else " ").join(sentences)
    return [
        sentence.strip() for sentence in split(joined, language) if sentence.strip()
    ] == sentences


def right_captions(split: Splitter, captions: list[str], language: str) -> tuple[int, int]:
    """Return (how many pairs of captions `split` cuts where they were joined, how many pairs).

    Pairs count if both captions end with a full stop. `language` is the code for `split`.
    """
    pairs = [
        pair
        for pair in zip(captions[::2], captions[1::2], strict=False)
        if all(caption.endswith(".") for caption in pair)
    ]
    return sum(is_right(split, "|".join(pair), language) for pair in pairs), len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("captions", help="text file with one caption per line, plain or gzip")
    parser.add_argument("--language", default="en", help="language of the captions")
    args = parser.parse_args()
    opened = gzip.open if args.captions.endswith(".gz") else open
    with opened(args.captions, "rt", encoding="utf-8") as file:
        captions = [line.strip() for line in file]
    total = sum(map(len, TEXTS.values()))
    for split in (ours, sentencex, pysbd, blingfire, sentence_splitter, syntok):
        if split is not ours and importlib.util.find_spec(split.__name__) is None:
            print(f"{split.__name__}: not installed")
            continue
        right = right_texts(split)
        start = time.perf_counter()
        pairs, count = right_captions(split, captions, args.language)
        speed = sum(map(len, captions)) / (time.perf_counter() - start) / 1e6
        name, texts = split.__name__, sum(right.values())
        print(
            f"{name}: {texts} of {total} texts, {pairs} of {count} pairs of captions, {speed:.2f} "
            f"MB/s; {right}"
        )


if __name__ == "__main__":
    main()
