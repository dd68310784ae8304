"""Tests of greedy and beam search, against an exhaustive search."""

import itertools

import numpy as np
import pytest

from vanilla_transformer_export import Options
from vanilla_transformer_export.inference.search import BeamSearch, TokenSearch


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

    def start(self, rows_per_input):
        """Return the logits of the first token, one row per input, and reset the rows of `step`."""
        self.rows = [(table, ()) for table in self.tables for _ in range(rows_per_input)]
        return np.stack([table[()] for table in self.tables])

    def step(self, tokens, beam_idx):
        rows = self.rows if beam_idx is None else [self.rows[index] for index in beam_idx]
        self.rows = [
            (table, (*prefix, int(token)))
            for (table, prefix), token in zip(rows, tokens, strict=True)
        ]
        return np.stack([table[prefix] for table, prefix in self.rows])

    def drive(self, search, rows_per_input=1):
        """Run `search` on the logits of this language, and return its result."""
        logits = self.start(rows_per_input)
        while True:
            following = search.advance(logits)
            if search.finished:
                return search.result()[0]
            logits = self.step(*following)

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
        actual = language.drive(BeamSearch(3, options), options.num_beams)
        expected = [language.best(table, options) for table in language.tables]
        assert actual.shape[1] == max(map(len, expected))
        padded = [
            (*sequence, *eos[:1] * (actual.shape[1] - len(sequence))) for sequence in expected
        ]
        assert actual.tolist() == [list(sequence) for sequence in padded]


def test_greedy_search_takes_best_tokens_and_pads_after_end():
    language = Language(8, 4, 5, seed=1)
    options = Options(max_new_tokens=5, eos_token_id=(2,), pad_token_id=3)
    actual = language.drive(TokenSearch(8, options))
    expected = []
    for table in language.tables:
        sequence = ()
        while len(sequence) < 5 and 2 not in sequence:
            sequence = (*sequence, int(table[sequence].argmax()))
        expected.append([*sequence, *[3] * (5 - len(sequence))])
    assert len({sum(token == 3 for token in row) for row in expected}) > 1
    assert actual.tolist() == expected


def test_beam_search_with_one_beam_matches_greedy_search():
    language = Language(6, 4, 4, seed=2)
    options = Options(max_new_tokens=4, num_beams=1, eos_token_id=())
    beams = language.drive(BeamSearch(6, options))
    np.testing.assert_array_equal(beams, language.drive(TokenSearch(6, options)))


def test_every_beam_can_end_at_first_token():
    language = Language(2, 3, 3, seed=0)
    for table in language.tables:
        table[()] = np.array([-30, 30, -30], np.float32)
    options = Options(max_new_tokens=3, num_beams=2, early_stopping=True, eos_token_id=(1,))
    result = language.drive(BeamSearch(2, options), 2)
    assert result[:, 0].tolist() == [1, 1]
