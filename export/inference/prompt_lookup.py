"""Prompt lookup decoding (Saxena 2023): what follows an earlier place where the last tokens stand
too is guessed to come next. One step of the decoder checks all guesses, so that tokens which are
copied take fewer steps. The tokens stay the same."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from .decoder import CandidateDecoder, GenerationRequest
from .search import Search

MOST_TOKENS = 256  # of a step, where a decoder takes any number


class NgramIndex:
    """A row of `tokens`, and where each of its n-grams of up to `max_size` tokens is followed by
    another one, for the last time. Nothing is searched for: a token that is added, and one that is
    looked up, take as long in any text."""

    def __init__(self, max_size: int):
        self.max_size = max_size
        self.tokens: list[int] = []
        # those that the tokens end in, the longest first
        self.last_ngrams: list[tuple[int, ...]] = []
        self.followers: dict[tuple[int, ...], int] = {}  # the place after the n-gram

    def add(self, token: int) -> None:
        for ngram in self.last_ngrams:
            self.followers[ngram] = len(self.tokens)
        self.tokens.append(token)
        last = self.tokens[-self.max_size :]
        self.last_ngrams = [tuple(last[start:]) for start in range(len(last))]

    def followers_of_last(self, least_size: int) -> list[int]:
        """All that followed the longest n-gram, of `least_size` or more tokens, that stood
        somewhere before."""
        for ngram in self.last_ngrams:
            if len(ngram) >= least_size and ngram in self.followers:
                return self.tokens[self.followers[ngram] :]
        return []


def tokens_by_lookup(
    request: GenerationRequest, decoder: CandidateDecoder, search: Search, logits: np.ndarray
) -> Iterator[np.ndarray]:
    """Drives `search` of one row, from the `logits` (1, V) after its prompt on: each token, when it
    is known.

    Candidates are looked up in the source, which transformers does not do, and in what the row has
    so far, up to an end token. Where there are none, a step is that of any other greedy search. A
    step with wrong ones takes longer, so a single token is looked up only after candidates of which
    the first was right."""
    options = request.options
    index = NgramIndex(options.max_matching_ngram_size)
    for token in read_tokens(request):
        index.add(token)
    most = min(options.prompt_lookup_num_tokens or 0, (decoder.max_step_tokens or MOST_TOKENS) - 1)
    left = options.max_new_tokens
    candidates: list[int] = []
    is_copying = False
    all_logits = logits[:, None]
    while True:
        for place, candidate in enumerate([*candidates, None]):
            tokens, _ = search.advance(all_logits[:, place])
            yield tokens
            if search.finished:
                return
            index.add(int(tokens[0]))
            left -= 1
            if tokens[0] != candidate:
                break
        if candidates:
            decoder.crop(len(candidates) - place)
            is_copying = place > 0
        found = index.followers_of_last(1 if is_copying else min(2, index.max_size))
        candidates = until_end(found[: min(most, left - 1)], options.eos_token_ids)
        all_logits = decoder.step(np.array([[index.tokens[-1], *candidates]]))


def until_end(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Those before the first end token: to guess that one saves no step."""
    return list(itertools.takewhile(lambda token: token not in eos_token_ids, tokens))


def read_tokens(request: GenerationRequest) -> list[int]:
    """Of the source, if there is one, and then of the prompt, without padding."""
    read = [] if request.source is None else [request.source]
    return [
        int(token)
        for ids, mask in [*read, (request.input_ids, request.attention_mask)]
        for token in ids[mask == 1]
    ]
