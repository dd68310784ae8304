"""Noise of text that people type: capitals, a missing full stop, doubled spaces, typing errors."""

import string
from collections.abc import Callable
from random import Random

from datasets import Dataset

PASSES = 5  # copies of the training text, each with other noise
CHARACTERS_PER_ERROR = 40
# two adjacent characters -> what is typed instead: swapped, one left out, one doubled, one wrong
ERRORS: tuple[Callable[[str, Random], str], ...] = (
    lambda pair, random: pair[::-1],
    lambda pair, random: pair[1:],
    lambda pair, random: pair[:1] + pair,
    lambda pair, random: random.choice(string.ascii_lowercase) + pair[1:],
)


def add_typing_errors(text: str, random: Random) -> str:
    """Return `text` with one typing error, and one more for every `CHARACTERS_PER_ERROR`
    characters."""
    for _ in range(1 + len(text) // CHARACTERS_PER_ERROR):
        start = random.randrange(max(1, len(text)))
        mistype = random.choice(ERRORS)
        text = text[:start] + mistype(text[start : start + 2], random) + text[start + 2 :]
    return text


NOISE: dict[str, Callable[[str, Random], str]] = {
    "all capitals": lambda text, random: text.upper(),
    "no capitals": lambda text, random: text.lower(),
    "no final stop": lambda text, random: text.removesuffix("."),
    "doubled spaces": lambda text, random: text.replace(" ", "  "),
    "typing errors": add_typing_errors,
}


def add_noise(rows: Dataset, share: float) -> Dataset:
    """Return `PASSES` copies of translated rows with noise in a `share` of the sources.

    The kinds of `NOISE` are equally likely. The targets stay as they are.
    """
    random = Random(0)
    sources = [
        random.choice([*NOISE.values()])(text, random) if random.random() < share else text
        for _ in range(PASSES)
        for text in rows["source"]
    ]
    return Dataset.from_dict({"source": sources, "target": [*rows["target"]] * PASSES})
