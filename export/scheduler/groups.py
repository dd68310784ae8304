"""The rows of one input during generation: their tokens, probabilities and results."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ..inference.logits import Prompt, log_sum_exp, top
from ..inference.options import Options
from ..inference.search import LogitsProcessors
from .client_request import ClientRequest
from .request import LENGTH, STOP, Event, Generated, GenerationInput, TokenLogprobs


class Group:
    """The rows of one input in a batch, one for each of its beams. Each sample has a group of its
    own.

    Args:
        generation_input: the input.
        sample: the number of its sample, 0 if there is only one.
        results: the results of all samples of the input, to which this group writes its own.
    """

    request: ClientRequest

    def __init__(
        self,
        generation_input: GenerationInput,
        sample: int = 0,
        results: list[Generated | None] | None = None,
    ):
        self.input = generation_input
        self.options: Options = generation_input.options
        self.sample = sample
        self.results: list[Generated | None] = results or [None] * self.options.num_return_sequences
        self.has_started = False
        self.is_finished = False
        self.num_read = 0  # tokens of the prompt that were read before the first step
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.logprobs: list[TokenLogprobs] = []

    @property
    def num_rows(self) -> int:
        """The number of rows that the whole input takes after its prompt: its beams or samples."""
        return self.input.num_rows

    @property
    def first_tokens(self) -> Sequence[int]:
        """The tokens of the prompt that are read together. Where the log probabilities of the
        prompt are reported, the steps read the others, one token each."""
        return self.input.prompt[:1] if self.input.scores_prompt else self.input.prompt

    @cached_property
    def processors(self) -> LogitsProcessors:
        return LogitsProcessors(self.options, self.prompt)

    @property
    def prompt(self) -> Prompt:
        """The tokens before the first new one, with the padding before them."""
        padding = [self.options.pad_token_id or 0] * self.input.padding
        ids = np.array([[*padding, *self.input.prompt]])
        return Prompt(ids, padding=np.array([self.input.padding]))

    @cached_property
    def is_plain(self) -> bool:
        """True if the largest logits alone decide the tokens, and no probability is reported."""
        return not (self.is_reported or self.options.do_sample or self.processors)

    @property
    def is_reported(self) -> bool:
        """True if scores or log probabilities are reported, besides the scores of beam search."""
        is_scored = self.input.is_scored and self.options.num_beams == 1
        return is_scored or self.input.scores_prompt or self.input.top_logprobs is not None

    @cached_property
    def kind(self) -> tuple:
        """The facts that groups of one search have in common.

        For greedy search they are only the tokens that end and fill sequences.
        """
        options, is_scored = self.options, self.input.is_scored
        is_searched = options.do_sample or options.num_beams > 1 or is_scored
        if not (is_searched or self.processors):
            return options.eos_token_ids, options.fill_token_id
        # processors count the tokens of the prompt
        length = len(self.input.prompt) + self.input.padding if self.processors else None
        return options, is_scored, length

    @property
    def num_tokens(self) -> int:
        """The number of new tokens of a finished group."""
        return sum(len(result.tokens) for result in self.results if result is not None)

    def samples(self) -> "list[Group]":
        """Return this group and those of the other samples of its input."""
        others = [
            Group(self.input, sample, self.results)
            for sample in range(1, self.options.num_return_sequences)
        ]
        for other in others:
            other.request = self.request
            other.has_started = self.has_started
            other.prompt_logprobs = self.prompt_logprobs
        return [self, *others]

    # ------------------------------------------------------------------------------------ results

    def finish(self, tokens: list[list[int]], scores: list[float] | None) -> None:
        """Store the `tokens` of its sequences, with their `scores` if there are any."""
        known: Sequence[float | None] = scores or [None] * len(tokens)
        results = [self.result(row, score) for row, score in zip(tokens, known, strict=True)]
        self.is_finished = True
        self.results[self.sample : self.sample + len(results)] = results
        self.request.finish_result()

    def result(self, row: list[int], score: float | None) -> Generated:
        ends = [place for place, token in enumerate(row) if token in self.options.eos_token_ids]
        tokens = row[: ends[0] + 1] if ends else row
        logprobs = None if self.input.top_logprobs is None else self.logprobs
        prompt = self.prompt_logprobs if self.input.scores_prompt else None
        return Generated(tokens, STOP if ends else LENGTH, score, prompt, logprobs)

    def fail(self, error: Exception) -> None:
        self.is_finished = True
        self.request.fail(error)

    def add_event(self, token: int) -> None:
        """Report a new token of a request that streams."""
        reason = None
        if self.is_finished:
            reason = STOP if token in self.options.eos_token_ids else LENGTH
        logprobs = self.logprobs[-1] if self.logprobs else None
        self.request.add_event(Event(self.sample, token, reason, logprobs))

    # -------------------------------------------------------------------------- log probabilities

    def score_prompt(self, logits: np.ndarray, token: int) -> None:
        """Store the log probability of a `token` of the prompt, from the `logits` (1, V) before
        it."""
        count = self.input.top_logprobs or 0
        self.prompt_logprobs.append(token_logprobs(logits, token, count))

    def score(self, logits: np.ndarray, token: int) -> None:
        """Store the log probability of a new `token`, from the `logits` (1, V) before it."""
        self.logprobs.append(token_logprobs(logits, token, self.input.top_logprobs or 0))


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
    streams: bool = False,
    number: int = 0,
    arrived_at: float = 0.0,
) -> "ClientRequest[Group]":
    """Return a request that generates from the checked `inputs`. The other arguments are those of
    `ClientRequest`."""
    num_results = sum(row.num_independent_results for row in inputs)
    return ClientRequest(map(Group, inputs), number, streams, num_results, arrived_at)
