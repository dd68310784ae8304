"""Prompt lookup decoding (Saxena 2023).

Candidates are the tokens after an earlier occurrence of the last n-gram. One decoder step checks
all candidates, so copied text takes fewer steps. The generated tokens do not change."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from .decoder import CandidateDecoder, GenerationRequest
from .search import Search

MAX_TOKENS = 256  # maximum tokens per step for a decoder without a limit


class NgramIndex:
    """An index of the n-grams of up to `max_size` tokens in one row of `tokens`.

    It maps each n-gram to the position after its last occurrence. Adding a token takes constant
    time."""

    def __init__(self, max_size: int):
        self.max_size = max_size
        self.tokens: list[int] = []
        # n-grams at the end of the tokens, longest first
        self.last_ngrams: list[tuple[int, ...]] = []
        self.followers: dict[tuple[int, ...], int] = {}  # position after the n-gram

    def add(self, token: int) -> None:
        for ngram in self.last_ngrams:
            self.followers[ngram] = len(self.tokens)
        self.tokens.append(token)
        last = self.tokens[-self.max_size :]
        self.last_ngrams = [tuple(last[start:]) for start in range(len(last))]

    def followers_of_last(self, least_size: int) -> list[int]:
        """Return all tokens after the last earlier occurrence of the n-gram at the end.

        It is the longest n-gram of at least `least_size` tokens that occurred before. The list is
        empty if there is none.
        """
        for ngram in self.last_ngrams:
            if len(ngram) >= least_size and ngram in self.followers:
                return self.tokens[self.followers[ngram] :]
        return []


def prompt_lookup_tokens(
    request: GenerationRequest, decoder: CandidateDecoder, search: Search, logits: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield the tokens (1,) of `search` of one row, beginning with the `logits` (1, V) after its
    prompt.

    Candidates come from the source, unlike in transformers, and from the row so far. They stop
    before an end token. Without candidates, a step is a normal step of greedy search. Wrong
    candidates make a step slower, so an n-gram of one token is only used after a correct candidate.
    `decoder` has read the prompt, and checks several candidates in one step.
    """
    options = request.options
    index = NgramIndex(options.max_matching_ngram_size)
    for token in read_tokens(request):
        index.add(token)
    max_candidates = min(
        options.prompt_lookup_num_tokens or 0, (decoder.max_step_tokens or MAX_TOKENS) - 1
    )
    left = options.max_new_tokens
    candidates: list[int] = []
    is_copying = False
    all_logits = logits[:, None]
    while True:
        for position, candidate in enumerate([*candidates, None]):
            tokens, _ = search.advance(all_logits[:, position])
            yield tokens
            if search.finished:
                return
            index.add(int(tokens[0]))
            left -= 1
            if tokens[0] != candidate:
                break
        if candidates:
            decoder.crop(len(candidates) - position)
            is_copying = position > 0
        followers = index.followers_of_last(1 if is_copying else min(2, index.max_size))
        candidates = until_end(followers[: min(max_candidates, left - 1)], options.eos_token_ids)
        all_logits = decoder.step(np.array([[index.tokens[-1], *candidates]]))


def until_end(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Return the `tokens` before the first end token. An end token as a candidate would save no
    step."""
    return list(itertools.takewhile(lambda token: token not in eos_token_ids, tokens))


def read_tokens(request: GenerationRequest) -> list[int]:
    """Return the tokens of the source, if any, and of the prompt, without padding."""
    read = [] if request.source is None else [request.source]
    return [
        int(token)
        for ids, mask in [*read, (request.input_ids, request.attention_mask)]
        for token in ids[mask == 1]
    ]
