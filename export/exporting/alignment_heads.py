"""The heads that align words best, chosen on parallel text.

Sets of heads are compared with what both directions of IBM model 1 say about the same text (Brown
et al. 1993), so nothing but the text is needed. The agreement of a head's own two directions is no
criterion: a head that looks at the diagonal agrees with itself.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, product

import numpy as np

from vanilla_transformer.training.data import read_all_lines

from ..engine.alignments import head_weights
from ..engine.inputs import start_tokens
from ..specs.alignment import SHIFTS, AlignmentHead
from ..text.alignments import align_words, mutual_best, source_spans
from ..text_runtime import TextRuntime

MIN_LINES, MAX_LINES = 100, 500  # of parallel text
CHUNK = 32  # lines whose weights of all heads are in memory together
MAX_HEADS = 4
MIN_GAIN = 0.002  # of F1 by another head
ROUNDS = 8  # of expectation maximization
NEIGHBORS = (-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)
DIAGONAL = 4.0  # how much the diagonal is preferred

Pair = tuple[list[str], list[str]]  # words of a source and of its translation
Links = set[tuple[int, int]]  # numbers of a source word and of a target word
Table = dict[tuple[str | None, str], float]  # P(target word | source word); None is the empty word


def all_heads(config: dict) -> list[AlignmentHead]:
    """Return all heads of the decoder of `config`, layer by layer, with the shift "made"."""
    numbers = product(range(config["decoder_layers"]), range(config["num_attention_heads"]))
    return [AlignmentHead(layer, head, "made") for layer, head in numbers]


def choose_heads(
    runtime: TextRuntime, pairs: list[tuple[str, str]]
) -> tuple[list[AlignmentHead], dict[str, float]]:
    """Return up to `MAX_HEADS` heads that align `pairs` of a source and its translation best, and
    {"pairs": the number of pairs, "f1": the agreement with IBM model 1}.

    The alignment graph of `runtime` returns `all_heads`. Heads are added one after the other, as
    long as F1 grows by `MIN_GAIN`. Of heads that differ by less, the one of the first layer is
    added: the alignment graph ends with the last layer of its heads.
    """
    heads = all_heads(runtime.info.config)
    shifted = [head._replace(shift=shift) for shift in SHIFTS for head in heads]
    weights, words_of_pairs = zip(*weights_and_words(runtime, pairs))
    gold = model_1_links(words_of_pairs)
    best: list[int] = []  # indices of `shifted`
    f1 = 0.0
    while len(best) < MAX_HEADS:
        scores = {
            index: f1_of_heads(weights, [*best, index], gold)
            for index in range(len(shifted))
            if index not in best
        }
        highest = max(scores.values(), default=0.0)
        if best and highest < f1 + MIN_GAIN:
            break
        alike = [index for index in scores if scores[index] > highest - MIN_GAIN]
        best.append(min(alike, key=lambda index: (shifted[index].layer, -scores[index])))
        f1 = scores[best[-1]]
    return [shifted[index] for index in best], {"pairs": len(pairs), "f1": round(f1, 4)}


def read_pairs(text: str | os.PathLike) -> list[tuple[str, str]]:
    """Return the first `MAX_LINES` pairs of `text`, whose lines are a source, a tab and its
    translation. Blank lines are skipped.

    Raises:
        FileNotFoundError: without the file.
        ValueError: for a line without one tab between two texts, and for less than `MIN_LINES`.
    """
    pairs = []
    for number, line in enumerate(read_all_lines([os.fspath(text)], fault=None), 1):
        if not line.strip():
            continue
        source, *targets = line.split("\t")
        if len(targets) != 1 or not source.strip() or not targets[0].strip():
            raise ValueError(
                f"line {number} of {text} is {line!r:.100}, expected a source, one tab and its "
                "translation"
            )
        pairs.append((source, targets[0]))
    if len(pairs) < MIN_LINES:
        raise ValueError(
            f"{text} has {len(pairs)} lines of parallel text, expected at least {MIN_LINES}"
        )
    return pairs[:MAX_LINES]


# ----------------------------------------------------------------------------- weights of all heads


def weights_and_words(
    runtime: TextRuntime, pairs: Sequence[tuple[str, str]]
) -> Iterator[tuple[np.ndarray, Pair]]:
    """Yield the weights of words (shifts * heads, T, S) of all heads for each of `pairs`, and the
    words of both in lower case."""
    sources, targets = (list(texts) for texts in zip(*pairs))
    rows, [options, *_] = runtime.checked_rows(sources, None, None, {})
    encodings = (
        runtime.encode(sources, False),
        runtime.encode(targets, False, runtime.target_tokenizer),
    )
    [[start]] = start_tokens(runtime.info, 1, None, options).tolist()
    first = [start, *runtime.languages.first_tokens(options)]
    target_rows = [first + encoding.ids for encoding in encodings[1]]
    weights = chain.from_iterable(
        head_weights(runtime.runtime.model, rows[i : i + CHUNK], target_rows[i : i + CHUNK])
        for i in range(0, len(pairs), CHUNK)
    )
    for texts, row, source, target, steps in zip(pairs, rows, *encodings, weights, strict=True):
        steps = steps[:, len(first) - 1 :]  # from the step that makes the first token
        shifts = np.concatenate([steps[:, :-1], steps[:, 1:]])
        aligned = align_words(texts, (source_spans(row, source), target.offsets), shifts)
        lowered = [
            [text[start:end].lower() for start, end in spans]
            for text, spans in zip(texts, (aligned.source, aligned.target))
        ]
        yield aligned.weights, (lowered[0], lowered[1])


def f1_of_heads(
    weights: Sequence[np.ndarray], heads: Sequence[int], gold: Sequence[Links]
) -> float:
    """Return F1 of the mean of `heads`, indices, against the links `gold` of all pairs.

    `weights` (shifts * heads, T, S) are those of the words of each pair.
    """
    both = size = 0
    for of_pair, expected in zip(weights, gold, strict=True):
        links = mutual_best(of_pair[heads].mean(axis=0))
        both += len(expected.intersection(links))
        size += len(expected) + len(links)
    return 2 * both / max(size, 1)


# -------------------------------------------------------------------------------------- IBM model 1


def model_1_links(pairs: Sequence[Pair]) -> list[Links]:
    """Return the links of each of `pairs` from both directions of IBM model 1."""
    forward, backward = model_1(pairs), model_1([(target, source) for source, target in pairs])
    return [
        symmetrized(
            best_sources(forward, source, target),
            {(word, other) for other, word in best_sources(backward, target, source)},
        )
        for source, target in pairs
    ]


def symmetrized(forward: Links, backward: Links) -> Links:
    """Return the links of two directions by grow-diag-final-and (Koehn et al. 2005).

    The links that both have grow by neighbors that one has, if one of the words is not linked yet.
    Then links of one direction follow whose words are both not linked.
    """
    links, either = forward & backward, forward | backward
    before = None
    while links != before:
        before = set(links)
        for source, target in sorted(before):
            for step in NEIGHBORS:
                link = source + step[0], target + step[1]
                if link in either and num_linked(link, links) < 2:
                    links.add(link)
    for link in [*sorted(forward), *sorted(backward)]:
        if num_linked(link, links) == 0:
            links.add(link)
    return links


def num_linked(link: tuple[int, int], links: Links) -> int:
    """Return how many of the two words of `link` are in `links`."""
    return sum(any(other[side] == link[side] for other in links) for side in (0, 1))


def model_1(pairs: Sequence[Pair]) -> Table:
    """Return P(target word | source word) of IBM model 1 for `pairs` of words, by `ROUNDS` of
    expectation maximization."""
    table: Table = defaultdict(lambda: 1.0)
    for _ in range(ROUNDS):
        counts: Table = defaultdict(float)
        totals: dict[str | None, float] = defaultdict(float)
        for source, target in pairs:
            for word in target:
                scores = [table[other, word] for other in (None, *source)]
                total = sum(scores)
                for other, score in zip((None, *source), scores):
                    counts[other, word] += score / total
                    totals[other] += score / total
        table = {key: count / totals[key[0]] for key, count in counts.items()}
    return table


def best_sources(table: Table, source: list[str], target: list[str]) -> Links:
    """Return the link of each target word to its best source word by `table`. Words near the
    diagonal are preferred."""
    rows, columns = (np.arange(len(side)) / max(len(side), 1) for side in (target, source))
    near = np.exp(-DIAGONAL * abs(rows[:, None] - columns))
    scores = np.array([[table.get((other, word), 0.0) for other in source] for word in target])
    if not scores.size:
        return set()
    return {(int(other), word) for word, other in enumerate((scores * near).argmax(axis=1))}
