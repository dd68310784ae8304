"""Sentences in the style of captions whose words have one translation each, for the shipped
translator from English to German."""

import itertools
from pathlib import Path


def card(pair):
    """Return the directory of the card of a pair of languages, such as "en-de"."""
    name = f"vanilla-seq2seq-tiny-multi30k-{pair}"
    return Path(__file__).parents[2] / "model_cards" / name


CARD = card("en-de")
WHO = {"dog": "hund", "man": "mann", "woman": "frau", "girl": "mädchen", "boy": "junge"}
WHAT = {"sitting": "sitzt", "sleeping": "schläft", "standing": "steht", "playing": "spielt"}
WHERE = {"beach": "strand", "street": "straße", "bench": "bank", "grass": "gras", "snow": "schnee"}
DICTIONARY = WHO | WHAT | WHERE
SENTENCES = [
    f"A {who} is {what} in the {where}." for who, what, where in itertools.product(WHO, WHAT, WHERE)
] + [
    f"A {one} and a {other} are {what}."
    for one, other in itertools.permutations(WHO, 2)
    for what in WHAT
]


def dictionary_scores(sources, translations):
    """Return (right, found): how many aligned source words of `DICTIONARY` have the translation
    that it gives, and how many were aligned, of those whose translation occurs."""
    right = found = 0
    for source, translation in zip(sources, translations, strict=True):
        text = translation.text.lower()
        pairs = {
            source[start:end].lower(): text[first:last]
            for (start, end), (first, last) in translation.alignments
        }
        for word, translated in DICTIONARY.items():
            if word in source.lower() and translated in text:
                found += 1
                right += pairs.get(word) == translated
    return right, found
