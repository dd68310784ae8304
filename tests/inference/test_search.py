"""Tests of greedy and beam search, against an exhaustive search."""

import itertools

import numpy as np
import pytest

from vanilla_transformer_export import Options
from vanilla_transformer_export.engine.search import BeamSearch, StepLogits, TokenSearch


class Language:
    """A toy language model: one table per input with the logits after every prefix."""

    def __init__(self, inputs, vocabulary, length, seed):
        rng = np.random.default_rng(seed)
        self.vocabulary, self.length = vocabulary, length
        self.tables = [
            {
                prefix: rng.normal(scale=2, size=vocabulary).astype(np.float32)
                for prefix in self.prefixes()
            }
            for _ in range(inputs)
        ]

    def prefixes(self):
        return itertools.chain.from_iterable(
            itertools.product(range(self.vocabulary), repeat=length)
            for length in range(self.length)
        )

    def start(self):
        """Return the logits of the first token, one row per input, and reset the rows of `step`."""
        self.rows = [(table, ()) for table in self.tables]
        return np.stack([table[()] for table in self.tables])

    def step(self, tokens, parents):
        """Append a token to the rows `parents`, and return the logits after them."""
        rows = [self.rows[parent] for parent in parents]
        self.rows = [
            (table, (*prefix, int(token)))
            for (table, prefix), token in zip(rows, tokens, strict=True)
        ]
        # those of ended rows have no meaning
        return np.stack([table.get(prefix, table[()]) for table, prefix in self.rows])

    def drive(self, search):
        """Run `search` on the logits of this language, and return the best sequence of each
        input."""
        logits = self.start()
        while not search.is_finished.all():
            tokens, parents = search.advance(StepLogits(logits), slice(0, len(logits)))
            if len(self.rows) == len(self.tables):  # the beams of an input are equal at first
                parents = np.arange(len(tokens)) // (len(tokens) // len(self.tables))
            logits = self.step(tokens, parents)
        return [tuple(search.result(row)[0][0]) for row in range(len(self.tables))]

    def best(self, table, options):
        """Return the sequence with the largest sum(log p) / length^penalty by exhaustive search."""
        scores = {}
        for sequence in itertools.product(range(self.vocabulary), repeat=self.length):
            ends = [
                index + 1 for index, token in enumerate(sequence) if token in options.eos_token_ids
            ]
            sequence = sequence[: min(ends, default=self.length)]
            log_p = 0.0
            for index, token in enumerate(sequence):
                logits = table[sequence[:index]].astype(np.float64)
                log_p += logits[token] - np.log(np.exp(logits).sum())
            scores[sequence] = log_p / len(sequence) ** options.length_penalty
        return max(scores, key=scores.get)


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize(
    "vocabulary, length, eos",
    [(4, 3, (2,)), (4, 4, (2,)), (3, 4, (0,)), (4, 3, (1, 2)), (3, 3, ())],
)
def test_wide_beam_search_finds_best_of_all_sequences(vocabulary, length, eos, length_penalty):
    options = Options(
        max_new_tokens=length,
        num_beams=64,
        length_penalty=length_penalty,
        early_stopping="never",
        eos_token_id=eos,
    )
    for seed in range(5):
        language = Language(3, vocabulary, length, seed)
        actual = language.drive(BeamSearch(3, options))
        assert actual == [language.best(table, options) for table in language.tables]


def test_greedy_search_takes_best_tokens_until_the_end_or_the_limit():
    language = Language(8, 4, 5, seed=1)
    options = Options(max_new_tokens=5, eos_token_id=(2,), pad_token_id=3)
    limits = np.array([5, 5, 5, 5, 5, 5, 2, 1])
    actual = language.drive(TokenSearch(options, limits))
    expected = []
    for table, limit in zip(language.tables, limits):
        sequence = ()
        while len(sequence) < limit and 2 not in sequence:
            sequence = (*sequence, int(table[sequence].argmax()))
        expected.append(sequence)
    assert len(set(map(len, expected))) > 2
    assert actual == expected


def test_beam_search_with_one_beam_matches_greedy_search():
    language = Language(6, 4, 4, seed=2)
    options = Options(max_new_tokens=4, num_beams=1, eos_token_id=())
    beams = language.drive(BeamSearch(6, options))
    assert beams == language.drive(TokenSearch(options, np.full(6, 4)))


def test_every_beam_can_end_at_first_token():
    language = Language(2, 3, 3, seed=0)
    for table in language.tables:
        table[()] = np.array([-30, 30, -30], np.float32)
    options = Options(max_new_tokens=3, num_beams=2, early_stopping=True, eos_token_id=(1,))
    assert language.drive(BeamSearch(2, options)) == [(1,), (1,)]


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_row_without_a_finite_largest_logit_is_invalid_in_greedy_search(number):
    """Other rows take the lowest of their most likely tokens, also the only one above -infinity."""
    logits = np.zeros((4, 6), np.float32)
    logits[1] = -np.inf
    logits[1, 4] = -3
    logits[2, 2:4] = 5
    logits[3] = number
    options = Options(max_new_tokens=2, pad_token_id=1)
    for is_scored in (False, True):
        search = TokenSearch(options, np.full(4, 2), is_scored=is_scored)
        tokens, _ = search.advance(StepLogits(logits.copy()), slice(0, 4))
        assert tokens.tolist() == [0, 4, 2, 1]
        assert search.is_invalid.tolist() == [False, False, False, True] and search.ended == [3]
