"""The batch of a model that generates: groups over the rows of a target."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np

from ..inference.inputs import MAX_PADDING, move_padding, pad_sequences
from ..inference.rows import (
    SEARCH_STEPS,
    DeviceSearch,
    GenerationRequest,
    JoiningRows,
    Rows,
    RowsFactory,
)
from .alignments import align
from .groups import Cohort, Group, alike
from .limits import Pace, spare_rows
from .model import OnnxModel
from .queue import WAIT_PER_PART
from .search import StepLogits

# Finished inputs leave rows that started together once they are this share of them and have so many
# rows: each time costs as much as a fraction of a step, of small models as much as a step.
MIN_SHARE, MIN_ROWS = 1 / 8, 4
# Rows of beams from which on the graph that returns their best tokens is opened. With fewer rows,
# its copy of the weights takes more memory than the logits of a step.
MIN_CANDIDATE_ROWS = 160


class GenerationBatch:
    """The `Batch` of groups, which join, get a token for each row in a step, and leave.

    The rows of the target are numbered, and a cohort has the number of the row that each of its
    next tokens continues. If these are not 0, 1, 2 and so on over all cohorts, the batch is not
    settled: `settle` selects them before the next step. That is so after beams were reordered,
    after samples got rows of their own, and after groups joined or left. Rows of groups that have
    left are gaps. `drop_rows` drops them, or they stand still until other groups take their places.

    Args:
        model: opens rows that start together, and searches that run on the device.
        capacity: the number of rows.
        joining: rows that may join while others run, instead of those that `model` opens.
        pace: how much may join between two steps, with `joining` rows.
        mixes_lengths: True if rows of any lengths may start together.
    """

    def __init__(
        self,
        model: OnnxModel,
        capacity: int,
        joining: JoiningRows | None = None,
        pace: Pace | None = None,
        mixes_lengths: bool = False,
    ):
        self.model = model
        self.factory: RowsFactory = model.factory
        self.capacity = capacity
        self.joining = joining
        self.pace = pace or Pace()
        self.mixes_lengths = mixes_lengths
        self.rows: Rows | None = joining
        self.num_spare_rows = spare_rows(capacity) if joining else 0
        self.count = 0  # of rows of the last step, and added since then
        self.cohorts: list[Cohort] = []
        self.is_settled = True  # the rows are those that the next tokens continue
        self.has_gaps = False  # groups have left whose rows are still there
        self.prefilling: deque[Group] = deque()  # the first is being read
        self.logits: np.ndarray | None = None  # after prompts, which no step has used yet
        self.search: DeviceSearch | None = None  # of the only cohort
        self.has_ended = False  # True after a step in which groups finished or failed

    @property
    def running(self) -> list[Group]:
        if len(self.cohorts) == 1:
            return self.cohorts[0].running
        return [group for cohort in self.cohorts for group in cohort.running]

    @property
    def num_rows(self) -> int:
        if len(self.cohorts) == 1:
            return self.cohorts[0].num_rows
        return sum(cohort.num_rows for cohort in self.cohorts)

    # -------------------------------------------------------------------------- joining and leaving

    @property
    def join_delay(self) -> float:
        return WAIT_PER_PART * len(self.running)

    @property
    def should_grow(self) -> bool:
        if self.joining is None:
            return False  # nothing joins running rows
        num_rows = self.capacity - self.num_free_rows
        return num_rows < min(self.pace.preferred_rows, self.capacity)

    @property
    def num_free_rows(self) -> int:
        """The number of rows that can join. It is negative while spare rows run."""
        if self.joining is None:
            return 0 if self.running else self.capacity
        reserved = sum([cohort.num_reserved for cohort in self.cohorts])
        return self.capacity - reserved - sum([group.num_rows for group in self.prefilling])

    def fits(self, group: Group, beside: Sequence[Group]) -> bool:
        """Return True if rows are free for `group`, and it can join together with the groups
        `beside` it.

        Their sources must be short enough to be encoded together. Of rows that start together, none
        may run. Their groups must have similar lengths, the same number of rows each and the same
        `search_key`. Decoder prompts of a seq2seq model, and prompts that the steps read, must be
        equally long.
        """
        if self.mixes_lengths:
            return not self.running
        groups = [*beside, group]
        if self.joining is not None:
            num_rows = sum([other.num_rows for other in groups])
            if num_rows > self.num_free_rows + self.num_spare_rows:
                return False
            longest = max([len(other.input.source or ()) for other in groups])
            return not beside or longest * len(groups) <= self.pace.max_source_tokens
        if self.running or sum([other.num_rows for other in groups]) > self.capacity:
            return False
        first = groups[0]
        if group.num_rows != first.num_rows or self.search_key(group) != self.search_key(first):
            return False
        prompts = [len(other.input.prompt) for other in (first, group)]
        is_fixed = group.input.source is not None or any(g.input.scores_prompt for g in groups)
        if is_fixed and prompts[0] != prompts[1]:
            return False
        lengths = [len(other.input.source or other.first_tokens) for other in groups]
        return sum(lengths) >= (1 - MAX_PADDING) * len(lengths) * max(lengths)

    def search_key(self, group: Group) -> Hashable | None:
        """Return what groups must have in common to be searched together on the device.

        The result is `None` if `group` is searched in numpy.
        """
        return group.kind if self.factory.start_search and group.is_plain else None

    def join(self, groups: list[Group]) -> None:
        """Add `groups` and read their prompts, as much of them as one pause between two steps
        allows."""
        if self.joining is None:
            if groups:
                self.start(groups)
            return
        is_long = [len(g.first_tokens) > 1 and not self.joining.encodes for g in groups]
        self.prefilling.extend(itertools.compress(groups, is_long))
        at_once = [group for group, waits in zip(groups, is_long) if not waits]
        if at_once:
            sources = [group.input.source or () for group in at_once]
            rows = self.new_rows(len(at_once))
            self.joining.add(sources if self.joining.encodes else None, rows)
            self.add(at_once, rows)
        if self.prefilling:
            self.settle()  # prompts are read in the last slot
            self.read_prompts(self.joining)

    def new_rows(self, count: int) -> np.ndarray:
        """Return the numbers of `count` new rows: those that nothing continues, and the next
        ones."""
        is_free = np.ones(self.count, bool)
        for cohort in self.cohorts:
            is_free[cohort.continued] = False
        free = np.flatnonzero(is_free)[:count]
        return np.concatenate([free, np.arange(self.count, self.count + count - len(free))])

    def read_prompts(self, rows: JoiningRows) -> None:
        """Read waiting prompts without their last tokens, part by part, until `pace.chunk` tokens
        or more are read."""
        budget = self.pace.chunk
        while self.prefilling and budget > 0:
            group = self.prefilling[0]
            end = len(group.input.prompt) - 1
            tokens = group.input.prompt[group.num_read : end][: self.pace.chunk]
            rows.read(tokens, group.num_read)
            group.num_read += len(tokens)
            budget -= len(tokens)
            if group.num_read == end:
                rows.add_read()
                self.add([self.prefilling.popleft()], self.new_rows(1))

    def add(self, groups: list[Group], rows: np.ndarray) -> None:
        """Start the search of `groups`, which `rows` hold. The steps feed what is not read of their
        prompts."""
        self.count = max(self.count, int(rows[-1]) + 1)
        self.is_settled = False
        for places in alike(groups):
            cohort = Cohort([groups[place] for place in places], rows[places])
            if self.joining is not None:
                cohort.read_on()
            self.insert(cohort)

    def insert(self, cohort: Cohort) -> None:
        """Add `cohort`, to another one if one search can advance the groups of both. They take the
        places of those that have left."""
        same = next((other for other in self.cohorts if other.joins(cohort)), None)
        if same is None:
            self.cohorts.append(cohort)
        else:
            is_left = np.concatenate([same.is_finished, cohort.is_finished])
            fills_gaps = self.has_gaps and self.joining is not None
            same.keep(without_gaps(is_left) if fills_gaps else np.arange(len(is_left)), cohort)
            self.is_settled = False

    def start(self, groups: list[Group]) -> None:
        """Start `groups` together and read their prompts. Their search runs on the device if the
        target can do that."""
        for group in groups:
            group.num_read = len(group.first_tokens)
        groups = [groups[place] for places in alike(groups) for place in places]
        request = batch_request(groups)
        if self.factory.start_search is not None and groups[0].is_plain:
            self.search = self.factory.start_search(request)
        if self.search is None:
            self.logits = self.prefill(request)
        self.add(groups, np.arange(len(groups)))
        self.settle()

    def prefill(self, request: GenerationRequest) -> np.ndarray:
        """Open rows for `request` and return the logits (B, V) after its prompts, or log p (B, C)
        of their best tokens."""
        rows = len(request.input_ids) * request.options.rows_per_input
        if request.candidates and rows >= MIN_CANDIDATE_ROWS:
            self.model.open_candidates()
        self.rows = self.factory.open(request)
        try:
            return self.rows.prefill(request.input_ids, request.attention_mask)[:, -1]
        except BaseException:
            self.close()  # no group is there yet whose removal would do it
            raise

    def remove(self, groups: Sequence[Group]) -> None:
        """Remove `groups`, and those that are finished. Groups that join take their rows."""
        gone = set(map(id, groups))
        self.prefilling = deque(group for group in self.prefilling if id(group) not in gone)
        for cohort in self.cohorts:
            cohort.leave(gone)
        if self.running or self.prefilling:
            self.has_gaps, self.is_settled = True, False
        else:
            self.close()

    def drop_rows(self) -> None:
        """Go on without the rows of groups that have left, if that is worth it."""
        self.has_gaps = False
        if self.joining is None and not (self.rows is not None and self.rows.shrinks):
            return
        self.cohorts = [cohort for cohort in self.cohorts if cohort.running]
        for cohort in self.cohorts:
            samples = 1 if self.joining else cohort.samples
            is_left = np.asarray(cohort.is_finished.reshape(-1, samples).all(axis=1))
            num_left = np.count_nonzero(is_left)
            has_many = num_left * samples * cohort.width >= MIN_ROWS
            is_worth_it = has_many and num_left >= MIN_SHARE * len(is_left)
            if is_worth_it or (self.joining and num_left):
                kept = without_gaps(is_left)[:, None] * samples + np.arange(samples)
                cohort.keep(kept.ravel())

    def close(self) -> None:
        """Let all groups leave. Rows that started together are released."""
        self.cohorts, self.logits, self.count = [], None, 0
        self.is_settled, self.has_gaps = True, False
        for started in (self.search, self.rows):
            if started is not None:
                started.close()
        self.search, self.rows = None, self.joining

    # ------------------------------------------------------------------------------------- the step

    def step(self) -> int:
        """Select the next token of each row, or several on the device, and return the number of
        new tokens."""
        if self.search is not None:
            return self.run_search(self.search)
        if not self.cohorts or self.rows is None:
            return 0
        values, rows = self.next_logits(self.rows), self.rows
        logits = StepLogits(values, rows.places, self.model.threads, rows.best_tokens)
        num_tokens, self.has_ended = 0, False
        for cohort in self.cohorts:
            num_tokens += cohort.advance(logits)
            if cohort.search.ended:
                self.has_ended = True
            if cohort.parents is not None:
                self.is_settled = False
        if self.has_ended:
            self.align_ended(rows)
        if len(self.cohorts) > 1:
            self.join_cohorts()
        return num_tokens

    def next_logits(self, rows: Rows) -> np.ndarray:
        """Return the logits (rows, V) after the tokens of all cohorts, or after the prompts, or log
        p of the best tokens."""
        if self.logits is not None:
            values, self.logits = self.logits, None
            return values
        if not self.is_settled:
            self.settle()
        parts = [cohort.tokens for cohort in self.cohorts]
        tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return rows.step(tokens[:, None])[:, -1]

    def settle(self) -> None:
        """Let the rows of the batch be those that the next tokens continue, or few that stand still
        until others join."""
        if self.pause_ended():
            return
        if self.has_gaps and self.logits is None:  # which are those of all rows
            self.drop_rows()
        of_cohorts = [cohort.all_parents for cohort in self.cohorts]
        parents = np.concatenate([np.arange(0), *of_cohorts])
        if len(parents) != self.count or (parents != np.arange(self.count)).any():
            assert self.rows is not None  # a search on the device has its own
            self.rows.select(parents)
            self.count = len(parents)
        first = 0
        for cohort, rows in zip(self.cohorts, of_cohorts):
            cohort.rows, cohort.parents = slice(first, first + len(rows)), None
            first += len(rows)
        self.is_settled = True

    def pause_ended(self) -> bool:
        """If only few groups have left and nothing else has changed, let their rows stand still.
        Return True if they do."""
        if self.joining is None or not self.has_gaps or self.prefilling or len(self.cohorts) > 1:
            return False
        [cohort] = self.cohorts
        num_ended = self.count - cohort.num_rows
        if cohort.parents is not None or num_ended > min(self.pace.max_gaps, cohort.num_rows // 2):
            return False
        self.joining.pause(np.flatnonzero(cohort.is_finished))  # each group has one row
        self.is_settled = True
        return True

    def join_cohorts(self) -> None:
        """Let one search advance the groups of all cohorts that it can."""
        cohorts, self.cohorts = self.cohorts, []
        for cohort in cohorts:
            self.insert(cohort)

    def run_search(self, search: DeviceSearch) -> int:
        """Run one step if a group streams its tokens, else several, and return the number of new
        tokens.

        Beams have their tokens when they end.
        """
        [cohort] = self.cohorts
        self.has_ended = True  # groups may have
        is_streamed = any(group.request.streams for group in cohort.running)
        tokens = search.advance(1 if is_streamed else SEARCH_STEPS)
        if tokens is None:
            num_tokens = cohort.finish_searched(search)
        else:
            num_tokens = sum(cohort.append(column) for column in tokens.T)
        self.align_ended(search.decoder)
        return num_tokens

    def align_ended(self, rows: Rows) -> None:
        """Finish the groups that have ended and report alignments, while `rows` have their
        sources."""
        ended = [pair for cohort in self.cohorts for pair in cohort.unaligned]
        if not ended:
            return
        for cohort in self.cohorts:
            cohort.unaligned = []
        align(self.model, rows, *zip(*ended))


def without_gaps(is_left: np.ndarray) -> np.ndarray:
    """Return the indices of those that have not left. The first ones stay at their places, and the
    last ones take the places of those that have left."""
    running = np.flatnonzero(~is_left)
    count = len(running)
    kept = np.arange(count)
    kept[is_left[:count]] = running[running >= count]
    return kept


def batch_request(groups: list[Group]) -> GenerationRequest:
    """Return the request of `groups` that start together, with the options of the first and the
    largest number of steps as `max_new_tokens`. Steps that read a prompt count."""
    inputs = [group.input for group in groups]
    steps = [
        group.options.max_new_tokens + len(group.input.prompt) - len(group.first_tokens)
        for group in groups
    ]
    options = groups[0].options
    if options.max_new_tokens != max(steps):
        options = dataclasses.replace(options, max_new_tokens=max(steps))
    fill = options.fill_token_id
    prompts = pad_sequences([list(group.first_tokens) for group in groups], fill)
    prompts = move_padding(*prompts, "left", fill)
    if inputs[0].source is None:
        return GenerationRequest(options, *prompts)
    finds_best = all(group.is_plain and group.options.num_beams > 1 for group in groups)
    candidates = max(group.options.candidates for group in groups) if finds_best else 0
    ids, mask = pad_sequences([list(row.source or ()) for row in inputs], fill)
    for of_row, row in zip(mask, inputs):
        if row.source_mask is not None:
            of_row[: len(row.source_mask)] = row.source_mask
    return GenerationRequest(options, *prompts, (ids, mask), candidates)
