"""The rows of an input during generation: their search, tokens and results."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from ..inference.logits import Prompt, Sampler, log_sum_exp, row_uniforms, top
from ..inference.search import LogitsProcessors, Search, TokenSearch, start_search
from .client_request import ClientRequest
from .request import LENGTH, STOP, Event, Generated, GenerationInput, TokenLogprobs


class SequenceGroup:
    """The sequences generated from one input while they are in a batch: their search and tokens.

    Its rows are in `slots` of the batch. It has one row for the prompt. Beams and samples get rows
    of their own with the first new token.

    Args:
        generation_input: the input.
        index: the number of its sample, 0 if there is only one.
        results: the list of all samples of the input, to which results are written.
    """

    request: ClientRequest

    def __init__(
        self,
        generation_input: GenerationInput,
        index: int = 0,
        results: list[Generated | None] | None = None,
    ):
        self.input = generation_input
        self.options = generation_input.options
        self.index = index
        # all samples of the input share this list
        self.results: list[Generated | None] = results or [None] * self.options.num_return_sequences
        self.slots: list[int] = []
        self.is_expanded = False
        self.has_started = False
        self.is_finished = False
        self.num_prefilled = 0  # prompt tokens in the cache before the first step
        # the other samples continue from the row of the first
        prompt, scores_prompt = generation_input.prompt, generation_input.scores_prompt
        self.forced = list(prompt[1:]) if scores_prompt and not index else []
        self.first_tokens = prompt[:1] if scores_prompt else prompt
        self.next_tokens = [self.first_tokens[-1]]
        self.tokens: list[int] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.logprobs: list[TokenLogprobs] = []
        self.samples: list[SequenceGroup] = []
        self.end_tokens = frozenset(self.options.eos_token_ids)

    @property
    def num_rows(self) -> int:
        """The number of rows that the whole input takes after its prompt: its beams or samples."""
        return self.input.num_rows

    @cached_property
    def search(self) -> Search:
        """The search that selects tokens.

        Only the worker thread reads it: the first access creates the search.
        """
        return start_row_search(self.input, self.index)

    @cached_property
    def is_plain(self) -> bool:
        """True if the largest logits alone decide the tokens, and no probability is reported.

        So there is no sampling and no logits processor, but there may be beams.
        """
        is_reported = self.input.top_logprobs is not None or self.input.scores_prompt
        if is_reported or self.options.do_sample:
            return False
        return not LogitsProcessors(self.options, read_prompt(self.input))

    @cached_property
    def is_greedy(self) -> bool:
        """True if each new token is simply the one with the largest logit."""
        return self.is_plain and self.options.num_beams == 1

    @cached_property
    def has_plain_beams(self) -> bool:
        """True for beam search without logits processors and reported probabilities.

        One search can advance such groups with equal options together.
        """
        return self.is_plain and self.options.num_beams > 1

    @property
    def has_prompt_to_read(self) -> bool:
        """True if tokens of the prompt are read before the first step: all but its last.

        A prompt whose log probabilities are reported is read by the steps, one token each.
        """
        return len(self.first_tokens) > 1

    def read_one_by_one(self) -> None:
        """Let the steps read the prompt, one token per step, instead of reading it before the
        first."""
        self.forced = [*self.first_tokens[1:], *self.forced]
        self.first_tokens = self.first_tokens[:1]
        self.next_tokens = [*self.first_tokens]

    @property
    def num_new_tokens(self) -> int:
        """The number of new tokens in the last step: one for each row, none while the prompt is
        read."""
        return len(self.next_tokens) if self.has_started else 0

    def expanded_rows(self) -> "Sequence[SequenceGroup]":
        """Return the owner of each row that is added after the prompt.

        These are the groups of the other samples, or this group once for each further beam.
        """
        return self.samples or [self] * (self.num_rows - 1)

    # --------------------------------------------------------------------------------- new tokens

    def append(self, token: int) -> None:
        """Append `token`, which greedy search selected, and finish if the sequence ends with it.

        While the prompt is read in steps, ignore it and take the next token of the prompt.
        """
        if self.forced:
            self.next_tokens[0] = self.forced.pop(0)
            return
        self.has_started = True
        self.tokens.append(token)
        self.next_tokens[0] = token
        if token in self.end_tokens:
            self.finish([Generated(self.tokens, STOP)])
        elif len(self.tokens) == self.options.max_new_tokens:
            self.finish([Generated(self.tokens, LENGTH)])
        if self.request.streams:
            self.add_event(token, None)

    def append_all(self, tokens: list[int]) -> int:
        """Append new `tokens` of greedy search until the sequence ends, and return how many were
        appended."""
        start = len(self.tokens)
        for token in tokens:
            if not self.is_finished:
                self.append(token)
        return len(self.tokens) - start

    def advance(self, logits: np.ndarray) -> list[int] | None:
        """Select the next tokens from the `logits` (rows, V) of this group after the last ones.

        Return `[row that row 0 continues, …]`, or `None` if each row continues itself. A ValueError
        of the search is not raised: it fails only this request.
        """
        try:
            if self.forced:
                self.feed(logits)
                return None
            has_samples = self.options.do_sample and self.num_rows > 1 and not self.index
            if has_samples and not self.has_started:
                self.start_samples(logits)
            return self.select(logits)
        except ValueError as error:
            self.fail(error)
            return None

    def start_samples(self, logits: np.ndarray) -> None:
        """Make the groups of the other samples and select their first tokens.

        `logits` (1, V) are those after the prompt.
        """
        for index in range(1, self.num_rows):
            sample = SequenceGroup(self.input, index, self.results)
            sample.request = self.request
            sample.is_expanded = True
            self.samples.append(sample)
            sample.select(logits.copy())

    def feed(self, logits: np.ndarray) -> None:
        """Make the next token of the prompt the next token to feed.

        Its log probability is computed from `logits` (1, V), those before it, if requested.
        """
        token = self.forced.pop(0)
        if self.input.scores_prompt:
            self.prompt_logprobs.append(token_logprobs(logits, token, self.input.top_logprobs or 0))
        self.next_tokens = [token]

    def select(self, logits: np.ndarray) -> list[int] | None:
        """Let the search select the next tokens from `logits` (rows, V).

        Return `[row that row 0 continues, …]`, or `None` if each row continues itself.
        """
        self.has_started = True
        # a copy, because the search overwrites the logits
        scored = None if self.input.top_logprobs is None else logits.copy()
        tokens, parents = self.search.advance(logits)
        self.next_tokens = tokens.tolist()
        logprobs = None
        if scored is not None:
            logprobs = token_logprobs(scored, self.next_tokens[0], self.input.top_logprobs or 0)
            self.logprobs.append(logprobs)
        if self.search.finished:
            self.finish(self.make_results(*self.search.result()))
        if self.request.streams:
            self.add_event(self.next_tokens[0], logprobs)
        return None if parents is None else parents.tolist()

    # ----------------------------------------------------------------------------------- results

    def make_results(self, rows: np.ndarray, scores: np.ndarray | None) -> list[Generated]:
        """Return the sequences of a finished search, from its tokens `rows` (N, T) and `scores`
        (N,), in their order."""
        all_scores = [None] * len(rows) if scores is None else scores.tolist()
        return [self.make_result(row, score) for row, score in zip(rows.tolist(), all_scores)]

    def make_result(self, row: list[int], score: float | None) -> Generated:
        ends = [place for place, token in enumerate(row) if token in self.end_tokens]
        tokens = row[: ends[0] + 1] if ends else row
        logprobs = None if self.input.top_logprobs is None else self.logprobs
        prompt = self.prompt_logprobs if self.input.scores_prompt else None
        return Generated(tokens, STOP if ends else LENGTH, score, prompt, logprobs)

    def finish(self, results: list[Generated]) -> None:
        self.is_finished = True
        self.results[self.index : self.index + len(results)] = results
        self.request.finish_result()

    def fail(self, error: ValueError) -> None:
        self.is_finished = True
        self.request.fail(error)

    def add_event(self, token: int, logprobs: TokenLogprobs | None) -> None:
        reason = None
        if self.is_finished:
            reason = STOP if token in self.end_tokens else LENGTH
        self.request.add_event(Event(self.index, token, reason, logprobs))


def start_row_search(generation_input: GenerationInput, index: int) -> Search:
    """Return the search of one input, or of its sample number `index`."""
    options, prompt = generation_input.options, read_prompt(generation_input)
    if not options.do_sample:
        return start_search(options, prompt)
    search = start_search(dataclasses.replace(options, num_return_sequences=1), prompt)
    assert isinstance(search, TokenSearch)  # there are no beams
    search.choose = Sampler(options, [row_uniforms(generation_input.seed, index)])
    return search


def read_prompt(generation_input: GenerationInput) -> Prompt:
    """Return the tokens before the first new one, with the padding before them."""
    padding = [generation_input.options.fill_token_id] * generation_input.padding
    ids = np.array([[*padding, *generation_input.prompt]])
    return Prompt(ids, padding=np.array([generation_input.padding]))


def token_logprobs(logits: np.ndarray, token: int, count: int) -> TokenLogprobs:
    """Return the log probabilities of `token` and of the `count` best tokens, from `logits` (1,
    V)."""
    maximum, log_sum = (float(values[0, 0]) for values in log_sum_exp(logits))
    values, tokens = top(logits, count) if count else (np.empty((1, 0)), np.empty((1, 0), np.int64))
    best = [
        (int(top_token), float(value) - maximum - log_sum)
        for top_token, value in zip(tokens[0], values[0])
    ]
    return TokenLogprobs(token, float(logits[0, token]) - maximum - log_sum, best)


def start_request(
    inputs: Sequence[GenerationInput],
    receive: Callable[[list[Event], bool], None],
    streams: bool = False,
) -> "ClientRequest[SequenceGroup]":
    """Return a request that generates from `inputs`, for `put` of a scheduler.

    Args:
        inputs: the checked inputs.
        receive: called with the new events, and True if the request is finished.
        streams: True to call `receive` after each step, False to call it once at the end.
    """
    num_results = sum(row.num_independent_results for row in inputs)
    return ClientRequest(map(SequenceGroup, inputs), receive, streams, num_results)


def read_results(request: "ClientRequest[SequenceGroup]") -> list[list[Generated]]:
    """Return the sequences of each input of a finished `request`.

    Those of beam search are sorted, best first. Samples are in the order of their numbers.
    """
    return [group.results for group in request.parts]  # type: ignore[misc]  # all are there
