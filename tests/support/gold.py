"""Gold links of words: see gold_alignments.txt. The captions are not in this repository, because of
their license. The variable MULTI30K names the directory of the data set, with `raw` and `tok`."""

import gzip
import os
import zlib
from itertools import islice
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("gold_alignments.txt")
COUNT = 1000
PAIRS = ("en-de", "en-fr")
needs_captions = pytest.mark.skipif(
    "MULTI30K" not in os.environ, reason="needs Multi30k, at MULTI30K"
)


def gold_parts():
    """Return {name of a part: its lines}."""
    lines = (line for line in FILE.read_text().splitlines() if not line.startswith("#"))
    return {name: list(islice(lines, COUNT)) for name in lines}


def gold_links(pair, translations=None):
    """Return the links of each caption of `pair` with its reference, sets of (source word, target
    word); or with its translation. None are those of a translation that is another one."""
    lines = gold_parts()[f"{pair} {'references' if translations is None else 'translations'}"]
    if translations is None:
        return [parsed(line) for line in lines]
    return [
        parsed(line[8:]) if line[:8] == f"{zlib.crc32(text.encode()):08x}" else None
        for line, text in zip(lines, translations, strict=True)
    ]


def parsed(line):
    return {tuple(map(int, link.split("-"))) for link in line.split()}


def captions(pair, text="test_2016_flickr"):
    """Return the captions of a text in both languages of `pair`, as the card reads them."""
    folder = Path(os.environ["MULTI30K"])
    form = f"raw/{text}" if pair == "en-de" else f"tok/{text}.lc.norm.tok"
    return [
        gzip.decompress((folder / f"{form}.{language}.gz").read_bytes()).decode().split("\n")[:-1]
        for language in pair.split("-")
    ]


def f1(found, gold):
    """Return F1 of the links `found` against `gold`, without pairs whose gold is None."""
    pairs = [(set(one), other) for one, other in zip(found, gold, strict=True) if other is not None]
    both = sum(len(one & other) for one, other in pairs)
    return 2 * both / sum(len(one) + len(other) for one, other in pairs)
