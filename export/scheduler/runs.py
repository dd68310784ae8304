"""Sequences: jobs during generation."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..inference.logits import Prompt, Sampler, log_sum_exp, top
from ..inference.search import Search, TokenSearch, start_search
from .request import LENGTH, STOP, Event, Generated, Job, TokenLogprobs

if TYPE_CHECKING:
    from .queue import Ticket


class Run:
    """A sequence: job number `place` of the request `ticket` during generation. With several
    samples, only sample number `index`.

    Its rows are in `slots` of a batch. It has one row for the prompt. Beams and samples get rows of
    their own with the first new token, when it `has_begun`.
    """

    def __init__(self, job: Job, ticket: "Ticket", place: int, index: int = 0):
        self.job = job
        self.ticket = ticket
        self.place = place
        self.index = index
        self.slots: list[int] = []
        self.is_expanded = False
        self.has_begun = False
        self.finished = False
        self.fed = 0  # prompt tokens in the cache before the first step
        # the other samples continue from the row of the first
        self.forced = list(job.prompt[1:]) if job.scores_prompt and not index else []
        self.first_tokens = job.prompt[:1] if job.scores_prompt else job.prompt
        self.next_tokens = [self.first_tokens[-1]]
        self.tokens: list[int] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.logprobs: list[TokenLogprobs] = []
        self.samples: list[Run] = []
        self.ends = frozenset(job.options.eos_token_ids)

    @cached_property
    def search(self) -> Search | None:
        """The search that selects tokens, or `None` for plain greedy search. The worker creates it
        on first use."""
        search = search_of(self.job, self.index)
        is_plain = (
            isinstance(search, TokenSearch)
            and search.processors is None
            and not self.job.options.do_sample
        )
        return (
            None
            if is_plain and self.job.top_logprobs is None and not self.job.scores_prompt
            else search
        )

    @property
    def is_greedy(self) -> bool:
        """True if each new token is the argmax of the logits."""
        return self.search is None

    @property
    def reads_prompt(self) -> bool:
        """True if the prompt has tokens to prefill before the first step."""
        return len(self.first_tokens) > 1

    def read_one_by_one(self) -> None:
        """Feed the prompt in decode steps, one token per step."""
        self.forced = [*self.first_tokens[1:], *self.forced]
        self.first_tokens = self.first_tokens[:1]
        self.next_tokens = [*self.first_tokens]

    def others(self) -> "Sequence[Run]":
        """Return the sequence of each further row after expansion: samples, or this one for
        beams."""
        return self.samples or [self] * (self.job.rows - 1)

    def take(self, token: int) -> None:
        """Append the next token of greedy search, or feed the next token of the prompt."""
        if self.forced:
            self.next_tokens[0] = self.forced.pop(0)
            return
        self.has_begun = True
        self.tokens.append(token)
        self.next_tokens[0] = token
        if token in self.ends or len(self.tokens) == self.job.options.max_new_tokens:
            self.finish([Generated(self.tokens, STOP if token in self.ends else LENGTH)])
        if self.ticket.streams:
            self.tell(token, None)

    def advance(self, logits: np.ndarray) -> list[int] | None:
        """Select the next tokens from the logits (rows, V). Return the row that each continues, or
        `None` if each continues its own. A ValueError of the search fails only this request."""
        try:
            if self.forced:
                self.feed(logits)
                return None
            if (
                not self.has_begun
                and self.job.options.do_sample
                and self.job.rows > 1
                and not self.index
            ):
                self.samples = [
                    Run(self.job, self.ticket, self.place, index)
                    for index in range(1, self.job.rows)
                ]
                for sample in self.samples:
                    sample.is_expanded = True
                    sample.choose(logits.copy())
            return self.choose(logits)
        except ValueError as error:
            self.finished = True
            self.ticket.fail(error)
            return None

    def feed(self, logits: np.ndarray) -> None:
        """Make the next token of the prompt the next token, and score it if requested."""
        token = self.forced.pop(0)
        if self.job.scores_prompt:
            self.prompt_logprobs.append(logprobs_of(logits, token, self.job.top_logprobs or 0))
        self.next_tokens = [token]

    def choose(self, logits: np.ndarray) -> list[int] | None:
        assert self.search is not None
        self.has_begun = True
        # a copy, because the search overwrites the logits
        report = None if self.job.top_logprobs is None else logits.copy()
        tokens, parents = self.search.advance(logits)
        self.next_tokens = tokens.tolist()
        if report is not None:
            self.logprobs.append(
                logprobs_of(report, self.next_tokens[0], self.job.top_logprobs or 0)
            )
        if self.search.finished:
            self.finish(self.results())
        if self.ticket.streams:
            self.tell(self.next_tokens[0], self.logprobs[-1] if report is not None else None)
        return None if parents is None else parents.tolist()

    def results(self) -> list[Generated]:
        assert self.search is not None
        rows, scores = self.search.result()
        found = []
        for row, score in zip(
            rows.tolist(), [None] * len(rows) if scores is None else scores.tolist()
        ):
            ended = [place for place, token in enumerate(row) if token in self.ends]
            tokens = row[: ended[0] + 1] if ended else row
            logprobs = None if self.job.top_logprobs is None else self.logprobs
            prompt = self.prompt_logprobs if self.job.scores_prompt else None
            found.append(Generated(tokens, STOP if ended else LENGTH, score, prompt, logprobs))
        return found

    def finish(self, found: list[Generated]) -> None:
        self.finished = True
        self.ticket.answered(self.place, self.index, found)

    def tell(self, token: int, logprobs: TokenLogprobs | None) -> None:
        reason = None
        if self.finished:
            reason = STOP if token in self.ends else LENGTH
        self.ticket.tell(Event(self.index, token, reason, logprobs))


def search_of(job: Job, index: int) -> Search:
    """Return the search of one job, or of its sample number `index`."""
    options = job.options
    padding = [options.fill_token_id] * job.padding
    prompt = Prompt(np.array([[*padding, *job.prompt]]), padding=np.array([job.padding]))
    if not options.do_sample:
        return start_search(options, prompt)
    search = start_search(dataclasses.replace(options, num_return_sequences=1), prompt)
    assert isinstance(search, TokenSearch)  # there are no beams
    search.choose = Sampler(options, index)
    return search


def logprobs_of(logits: np.ndarray, token: int, count: int) -> TokenLogprobs:
    """Return the log probabilities of `token` and of the top `count`, from logits (1, V)."""
    maximum, log_sum = (float(each[0, 0]) for each in log_sum_exp(logits))
    values, tokens = top(logits, count) if count else (np.empty((1, 0)), np.empty((1, 0), np.int64))
    best = [
        (int(each), float(value) - maximum - log_sum) for each, value in zip(tokens[0], values[0])
    ]
    return TokenLogprobs(token, float(logits[0, token]) - maximum - log_sum, best)
