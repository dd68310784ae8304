"""Prompt lookup decoding (Saxena 2023): what follows an earlier place where the last tokens stand too is guessed to come next.
One step of the decoder checks all guesses, so that tokens which are copied take fewer steps. The tokens stay the same."""

from collections.abc import Iterator

import numpy as np

from .decoder import CandidateDecoder, GenerationRequest
from .search import Search


class NgramIndex:
    """A row of `tokens`, and where each of its n-grams of up to `max_size` tokens is followed by another one, for the last
    time. Nothing is searched for: a token that is added, and one that is looked up, take as long in any text."""

    def __init__(self, max_size: int):
        self.max_size = max_size
        self.tokens: list[int] = []
        self.followers: dict[tuple[int, ...], int] = {}  # the place after the n-gram

    def last_ngrams(self) -> list[tuple[int, ...]]:
        """Those that the tokens end in, the longest first."""
        last = self.tokens[-self.max_size :]
        return [tuple(last[start:]) for start in range(len(last))]

    def add(self, token: int) -> None:
        for ngram in self.last_ngrams():
            self.followers[ngram] = len(self.tokens)
        self.tokens.append(token)

    def candidates(self, most: int) -> list[int]:
        """What followed the longest n-gram that stood somewhere before, `most` tokens of it; none if there is no such."""
        for ngram in self.last_ngrams() if most > 0 else ():
            if (place := self.followers.get(ngram)) is not None:
                return self.tokens[place : place + most]
        return []


def tokens_by_lookup(
    request: GenerationRequest, decoder: CandidateDecoder, search: Search, logits: np.ndarray
) -> Iterator[np.ndarray]:
    """Drives `search` of one row, from the `logits` (1, V) after its prompt on: each token, when it is known.

    Candidates are looked up in the source, of which transformers knows nothing, and in what the row has so far. Where there are
    none, a step is that of any other greedy search."""
    options = request.options
    index = NgramIndex(options.max_matching_ngram_size)
    for token in read_tokens(request):
        index.add(token)
    longest = options.prompt_lookup_num_tokens or 0
    if decoder.max_step_tokens is not None:
        longest = min(longest, decoder.max_step_tokens - 1)
    left = options.max_new_tokens
    candidates: list[int] = []
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
        decoder.crop(len(candidates) - place)
        candidates = index.candidates(min(longest, left - 1))
        all_logits = decoder.step(np.array([[index.tokens[-1], *candidates]]))


def read_tokens(request: GenerationRequest) -> list[int]:
    """Of the source, if there is one, and then of the prompt, without padding."""
    read = [] if request.source is None else [request.source]
    return [int(token) for ids, mask in [*read, (request.input_ids, request.attention_mask)] for token in ids[mask == 1]]
