"""The rows of one input during generation, and cohorts: groups that one search advances."""

import copy
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from ..inference.logits import (
    PROCESSOR_NAMES,
    LogitsProcessors,
    Prompt,
    log_sum_exp,
    row_uniforms,
    top,
)
from ..inference.options import Options
from ..inference.rows import DeviceSearch
from .inputs import LENGTH, STOP, Event, Generated, GenerationInput, TokenLogprobs, Update
from .queue import ClientRequest, ignore_update
from .search import BeamSearch, Search, StepLogits, TokenSearch, keep


class Group:
    """The rows of one input in a batch, one for each of its beams. Each sample has a group of its
    own.

    Args:
        generation_input: the input.
        first: the number of the first sequence of the input in its request.
    """

    request: ClientRequest

    def __init__(self, generation_input: GenerationInput, first: int = 0):
        self.input = generation_input
        self.options: Options = generation_input.options
        self.first = first
        self.sample = 0  # its number, 0 if there is only one
        # of all samples of the input, to which this group writes its own
        self.results: list[Generated | None] = [None] * self.options.num_return_sequences
        self.has_started = False
        self.num_rows = generation_input.num_rows  # of the whole input after its prompt
        self.num_read = 0  # tokens of the prompt that were read before the first step
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.logprobs: list[TokenLogprobs] = []

    @property
    def first_tokens(self) -> Sequence[int]:
        """The tokens of the prompt that are read together. Where the log probabilities of the
        prompt are reported, the steps read the others, one token each."""
        return self.input.prompt[:1] if self.input.scores_prompt else self.input.prompt

    @cached_property
    def processors(self) -> LogitsProcessors | None:
        """The logits processors of the options, `None` if there are none."""
        if self.options.changed.isdisjoint(PROCESSOR_NAMES):
            return None
        return LogitsProcessors(self.options, self.prompt) or None

    @property
    def prompt(self) -> Prompt:
        """The tokens before the first new one, with the padding before them."""
        padding = [self.options.pad_token_id or 0] * self.input.padding
        ids = np.array([[*padding, *self.input.prompt]])
        return Prompt(ids, padding=np.array([self.input.padding]))

    @cached_property
    def is_plain(self) -> bool:
        """True if the largest logits alone decide the tokens, and no probability is reported,
        besides the scores of beam search."""
        is_scored = self.input.is_scored and self.options.num_beams == 1
        is_reported = self.input.scores_prompt or self.input.top_logprobs is not None
        return not (is_scored or is_reported or self.options.do_sample or self.processors)

    @cached_property
    def is_observed(self) -> bool:
        """True if it reports each token, or log probabilities."""
        is_scored = self.input.scores_prompt or self.input.top_logprobs is not None
        return self.request.streams or is_scored

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
        others = [copy.copy(self) for _ in self.results[1:]]
        for sample, other in enumerate(others, start=1):
            other.sample, other.logprobs = sample, []
        return [self, *others]

    # ------------------------------------------------------------------------------------ results

    def finish(self, tokens: list[list[int]], scores: list[float] | None) -> None:
        """Store the `tokens` of its sequences, with their `scores` if there are any."""
        known: Sequence[float | None] = scores or [None] * len(tokens)
        results = [self.result(row, score) for row, score in zip(tokens, known, strict=True)]
        self.results[self.sample : self.sample + len(results)] = results
        if not self.is_aligned:
            self.request.finish_result()

    @property
    def is_aligned(self) -> bool:
        """True if its finished sequences report alignments: if the input asks for them, or the
        prompt or a sequence has the unknown token."""
        unknown = self.input.unknown_token
        if self.input.is_aligned or unknown is None:
            return self.input.is_aligned
        rows = (sequence.tokens for sequence in self.sequences)
        return any(unknown in row for row in (self.input.prompt, *rows))

    @property
    def sequences(self) -> list[Generated]:
        """The sequences of this group once it is finished."""
        count = len(self.results) // self.input.num_independent_results
        results = self.results[self.sample : self.sample + count]
        return [result for result in results if result is not None]

    def align(self, weights: Sequence[np.ndarray]) -> None:
        """Finish the sequences of this group with their alignments, `weights`."""
        for number, (result, of_tokens) in enumerate(zip(self.sequences, weights, strict=True)):
            aligned = dataclasses.replace(result, alignment=of_tokens)
            self.results[self.sample + number] = aligned
        self.request.finish_result()

    def result(self, row: list[int], score: float | None) -> Generated:
        end_tokens = self.options.eos_token_ids
        ends = [place for place, token in enumerate(row) if token in end_tokens]
        tokens = row[: ends[0] + 1] if ends else row
        logprobs = None if self.input.top_logprobs is None else self.logprobs
        prompt = self.prompt_logprobs if self.input.scores_prompt else None
        return Generated(tokens, STOP if ends else LENGTH, score, prompt, logprobs)

    def add_event(self, token: int, is_last: bool) -> None:
        """Report a new token of a request that streams."""
        reason = None
        if is_last:
            reason = STOP if token in self.options.eos_token_ids else LENGTH
        logprobs = self.logprobs[-1] if self.logprobs else None
        self.request.add_event(Event(self.first + self.sample, token, reason, logprobs))

    # -------------------------------------------------------------------------- log probabilities

    def score(self, logits: np.ndarray, token: int) -> None:
        """Store the log probability of a new `token`, or of one of the prompt, from the `logits`
        (1, V) before it."""
        scored = self.logprobs if self.has_started else self.prompt_logprobs
        scored.append(token_logprobs(logits, token, self.input.top_logprobs or 0))


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
    receive: Callable[[Update], object] = ignore_update,
    streams: bool = False,
    arrived_at: float = 0.0,
) -> ClientRequest:
    """Return a request that generates from the checked `inputs`. The other arguments are those of
    `ClientRequest`."""
    num_results = sum(row.num_independent_results for row in inputs)
    counts = [row.options.num_return_sequences for row in inputs]
    parts = map(Group, inputs, itertools.accumulate(counts, initial=0))
    return ClientRequest(parts, receive, streams, num_results, arrived_at)


class Cohort:
    """Groups of one kind that one search advances together, with the same number of rows each.

    Args:
        groups: the groups, which are `alike`. The steps feed what is not read of their prompts.
        rows: the rows (G,) of the batch that hold them.
    """

    def __init__(self, groups: list[Group], rows: np.ndarray):
        self.groups = groups
        self.search = start_search(groups)
        self.rows = slice(0, 0)  # of the current step
        # rows of each group, and groups of each input once each sample has its own
        self.width = self.samples = 1
        self.has_started = False
        # the row that each of `tokens` continues, None if it is in `rows` at the same place
        self.parents: np.ndarray | None = rows
        fed = [group.input.prompt[group.num_read :] for group in groups]
        self.prompts = deque(np.array(fed, np.int64).reshape(len(groups), -1).T)
        self.tokens = rows[:0]  # that the next step feeds
        # finished groups that lack only their alignments, each with a row of its source
        self.unaligned: list[tuple[Group, int]] = []
        self.note_groups()

    def leave(self, gone: set[int]) -> None:
        """Let the groups leave that are finished, or whose `id` is in `gone`. Their rows stay until
        `keep`."""
        is_gone = np.array([id(group) in gone for group in self.groups]) & ~self.is_finished
        if is_gone.any():
            self.search.end(is_gone.repeat(len(self.search.is_finished) // len(is_gone)))
            self.search.ended = []
        self.note_groups()

    @property
    def is_finished(self) -> np.ndarray:
        """(G,), True for groups that are finished or have left."""
        return self.search.is_finished.reshape(len(self.groups), -1)[:, 0]

    def note_groups(self) -> None:
        """Note which groups run, and the places of those of them that report each token, or log
        probabilities."""
        is_finished = self.is_finished.tolist()
        self.running = [group for group, ended in zip(self.groups, is_finished) if not ended]
        self.observed = [
            place
            for place, (group, ended) in enumerate(zip(self.groups, is_finished))
            if group.is_observed and not ended
        ]

    @property
    def all_parents(self) -> np.ndarray:
        """The row that each of the next tokens continues."""
        return np.arange(self.rows.start, self.rows.stop) if self.parents is None else self.parents

    @property
    def continued(self) -> np.ndarray:
        """The rows that running groups continue."""
        return self.all_parents.reshape(len(self.groups), -1)[~self.is_finished].ravel()

    @property
    def num_rows(self) -> int:
        """The number of rows of running groups."""
        return self.width * len(self.running)

    @property
    def num_reserved(self) -> int:
        """The number of rows that running groups take, or will take once their prompts are
        read."""
        return self.num_rows if self.has_started else sum(group.num_rows for group in self.running)

    def advance(self, logits: StepLogits) -> int:
        """Select the next tokens from the `logits` after the last ones, and return their number.

        Groups that end are finished, and those whose logits decide no token fail.
        """
        if self.prompts:
            self.read_on(logits)
            return 0
        scored = self.scored_logits(logits) if self.observed else {}
        is_first = not self.has_started
        if is_first:
            scored = self.begin(scored)
        self.tokens, parents = self.search.advance(logits, self.rows)
        if parents is not None and not is_first:
            self.parents = parents + self.rows.start
        if self.observed or self.search.ended:
            self.report(scored)
        return self.num_rows  # groups that had ended before have no new tokens

    def begin(self, scored: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Give each beam or sample a row, and return the logits `scored` by the places of the
        samples."""
        rows, count = self.rows, self.groups[0].num_rows
        if count > 1:
            self.parents = np.arange(rows.start, rows.stop).repeat(count)
        samples = len(self.search.is_finished) // len(self.groups)
        self.start(samples)
        self.width = count // samples
        return {
            place * samples + sample: logits
            for place, logits in scored.items()
            for sample in range(samples)
        }

    def scored_logits(self, logits: StepLogits) -> dict[int, np.ndarray]:
        """Return copies of the logits (1, V) of groups that report log probabilities, by place."""
        return {
            place: self.row_logits(logits, place)
            for place in self.observed
            if self.groups[place].input.top_logprobs is not None
        }

    def row_logits(self, logits: StepLogits, place: int) -> np.ndarray:
        """Return a copy of the logits (1, V) of the group at `place`, which has one row."""
        row = self.rows.start + place
        return logits.of(slice(row, row + 1)).copy()

    def read_on(self, logits: StepLogits | None = None) -> None:
        """Make the next token of each prompt the next one to feed. Its log probability follows from
        the `logits` before it."""
        self.tokens = self.prompts.popleft()
        for place in self.observed:
            group = self.groups[place]
            if group.input.scores_prompt and logits is not None:
                group.score(self.row_logits(logits, place), int(self.tokens[place]))
        if not self.prompts and self.groups[0].num_rows == 1:
            self.start(1)

    def append(self, tokens: np.ndarray) -> int:
        """Append the `tokens` (G,) of greedy search on the device, and return how many count."""
        assert isinstance(self.search, TokenSearch)
        count = len(tokens) - int(self.search.is_finished.sum())
        self.tokens = self.search.append(tokens)
        self.start(1)
        self.report({})
        return count

    def finish_searched(self, search: DeviceSearch) -> int:
        """Finish the groups whose beams have ended in `search`, and return the number of tokens of
        their sequences."""
        self.start(1)
        self.search.ended = []
        self.search.end(search.ended)
        if not (ended := self.search.ended):
            return 0
        rows, scores = search.result()
        sequences = np.split(rows, len(self.groups)), np.split(scores, len(self.groups))
        for place in ended:
            tokens, group_scores = (values[place].tolist() for values in sequences)
            self.finish(place, tokens, group_scores)
        return sum(self.groups[place].num_tokens for place in ended)

    def start(self, samples: int) -> None:
        """Note that the groups have tokens now, and give each of `samples` a group of its own."""
        self.has_started, self.samples = True, samples
        for group in self.groups:
            group.has_started = True
        if samples > 1:
            self.groups = [sample for group in self.groups for sample in group.samples()]
            self.note_groups()

    def report(self, scored: dict[int, np.ndarray]) -> None:
        """Finish groups that end in this step, and report the new tokens of observed ones.

        `scored` has the logits of each group that reports log probabilities, by its place.
        """
        search, tokens = self.search, self.tokens[:: self.width].tolist()
        for place, logits in scored.items():
            self.groups[place].score(logits, tokens[place])
        for place in search.ended:
            if search.is_invalid[place]:
                self.groups[place].request.fail(ValueError(search.problem))
            else:
                self.finish(place, *search.result(place))
        for place in self.observed:
            if self.groups[place].request.streams:
                self.groups[place].add_event(tokens[place], place in search.ended)

    def finish(self, place: int, tokens: list[list[int]], scores: list[float] | None) -> None:
        """Finish the group at `place`, see `Group.finish`."""
        group, count = self.groups[place], self.rows.stop - self.rows.start
        group.finish(tokens, scores)
        if group.is_aligned:
            self.unaligned.append((group, self.rows.start + place * count // len(self.groups)))

    def joins(self, other: "Cohort") -> bool:
        """Return True if one search can advance the groups of both from now on."""
        both = self, other
        if any(cohort.prompts or not cohort.has_started for cohort in both):
            return False
        return not self.groups[0].processors and self.groups[0].kind == other.groups[0].kind

    def keep(self, kept: np.ndarray, other: "Cohort | None" = None) -> None:
        """Go on with the groups at the places `kept` only, in this order.

        After its own groups the places count those of `other`, which this one `joins`.
        """
        cohorts = [self] if other is None else [self, other]
        groups = [group for cohort in cohorts for group in cohort.groups]
        searches = [cohort.search for cohort in cohorts]
        rows = (
            np.concatenate([cohort.all_parents for cohort in cohorts]),
            np.concatenate([cohort.tokens for cohort in cohorts]),
            np.arange(sum(len(search.is_finished) for search in searches)),
        )
        self.parents, self.tokens, samples = (
            values.reshape(len(groups), -1)[kept].ravel() for values in rows
        )
        keep(self.search, samples, *searches[1:])
        self.groups = [groups[place] for place in kept]
        self.prompts = deque(tokens[kept] for tokens in self.prompts)
        self.note_groups()


def start_search(groups: list[Group]) -> Search:
    """Return the search of `groups` of one kind, whose rows are those of their prompts."""
    options = groups[0].options
    if options.num_beams > 1:
        return BeamSearch(len(groups), options, joined_processors(groups, 1))
    samples = range(options.num_return_sequences)
    limits = np.array([group.options.max_new_tokens for group in groups for _ in samples])
    uniforms = None
    if options.do_sample:
        uniforms = [
            group.input.uniforms or row_uniforms(group.input.seed, sample)
            for group in groups
            for sample in samples
        ]
    processors = joined_processors(groups, len(samples))
    return TokenSearch(options, limits, processors, uniforms, groups[0].input.is_scored)


def joined_processors(groups: list[Group], samples: int) -> LogitsProcessors | None:
    """Return the processors of `groups` of one kind, each with so many `samples`, or None."""
    if not groups[0].processors:
        return None
    prompts = [group.prompt for group in groups]
    ids, padding = (
        np.concatenate([getattr(prompt, name) for prompt in prompts]).repeat(samples, axis=0)
        for name in ("ids", "padding")
    )
    return LogitsProcessors(groups[0].options, Prompt(ids, padding))


def alike(groups: Sequence[Group]) -> list[list[int]]:
    """Return the places of `groups` in lists that one search can advance: of one kind, with the
    same number of tokens of their prompts left to read."""
    keys = [(len(group.input.prompt) - group.num_read, *group.kind) for group in groups]
    lists: list[list[int]] = []
    for place, key in enumerate(keys):
        same = next((places for places in lists if keys[places[0]] == key), None)
        if same is None:
            lists.append([place])
        else:
            same.append(place)
    return lists
