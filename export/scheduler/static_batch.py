"""Static batching, for exports without a step graph. Requests of similar length run together. The
next batch starts when all rows of the current batch are finished.

The graphs of some targets can run greedy and beam search themselves. Such a batch runs several
steps at a time, and only tokens are copied to the host.
"""

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from ..inference.rows import SEARCH_STEPS, Decoder, GenerationRequest, DeviceSearch
from ..inference.inputs import MAX_PADDING, move_padding, pad_sequences
from ..model import OnnxModel
from .batch import WAIT_PER_PART
from .sequence_group import SequenceGroup


class StaticBatch:
    """The `Batch` of an export without a step graph: at most `rows` rows that start together.

    The next rows start when all have finished.
    """

    should_grow = False  # nothing joins running rows

    def __init__(self, model: OnnxModel, rows: int):
        self.model = model
        self.capacity = rows
        self.running: list[SequenceGroup] = []
        self.prefilling: tuple[SequenceGroup, ...] = ()
        self.rows: list[SequenceGroup] = []  # by row of the batch, finished sequences included
        self.search: DeviceSearch | None = None
        self.decoder: Decoder | None = None  # if there is no `search`
        self.logits: np.ndarray | None = None  # of the prefill, until the first step
        # the row that each row continues in the next step, `None` if its own
        self.parents: np.ndarray | None = None

    @property
    def join_delay(self) -> float:
        return WAIT_PER_PART * len(self.running)

    num_spare_rows = 0

    @property
    def num_free_rows(self) -> int:
        """The number of rows that can join: none while rows run."""
        return 0 if self.running else self.capacity

    def fits(self, group: SequenceGroup, beside: Sequence[SequenceGroup]) -> bool:
        """Return True if `group` can start together with the groups `beside` it, and no row runs.

        All rows must fit into the batch. Groups must have similar lengths, the same number of rows
        each and the same `search_key`. Decoder prompts of a seq2seq model must be equally long.
        """
        if self.running:
            return False
        groups = [*beside, group]
        if sum(other.num_rows for other in groups) > self.capacity:
            return False
        first = groups[0]
        if group.num_rows != first.num_rows or self.search_key(group) != self.search_key(first):
            return False
        if group.input.source is not None and len(group.first_tokens) != len(first.first_tokens):
            return False
        lengths = [len(other.input.source or other.first_tokens) for other in groups]
        return sum(lengths) >= (1 - MAX_PADDING) * len(lengths) * max(lengths)

    def search_key(self, group: SequenceGroup) -> Hashable | None:
        """Return what groups must have in common to be searched together in graphs.

        The result is `None` if `group` is searched in numpy.
        """
        key = self.model.factory.search_key(group.options)
        return key if key is not None and group.is_plain else None

    def join(self, groups: list[SequenceGroup]) -> None:
        """Start a batch of `groups` and read their prompts. Without groups, do nothing."""
        if not groups:
            return
        request = batch_request(groups)
        self.running = list(groups)
        if self.search_key(groups[0]) is not None:
            self.search = self.model.factory.start_search(request)
        if self.search is None:
            self.prefill(request)
        else:
            rows = groups[0].num_rows
            for index, group in enumerate(groups):
                group.slots = list(range(index * rows, (index + 1) * rows))

    def prefill(self, request: GenerationRequest) -> None:
        """Start a decoder, and keep the logits after the prompts for the first step."""
        self.decoder = self.model.factory.open(request)
        self.logits = self.decoder.prefill(request.input_ids, request.attention_mask)[:, -1]
        self.rows = list(self.running)
        self.parents = None
        for slot, group in enumerate(self.rows):
            group.slots = [slot]
            group.is_expanded = group.num_rows == 1

    def step(self) -> int:
        """Generate one token of every sequence, or several in graphs, and return the number of new
        tokens.

        The first step uses the logits that `join` computed.
        """
        if self.search is not None:
            return self.run_search(self.search)
        if self.decoder is None:
            return 0
        if self.logits is not None:
            self.start(self.decoder, self.logits)
            self.logits = None
        else:
            self.decode(self.decoder)
        return sum(group.num_new_tokens for group in self.running)

    def run_search(self, search: DeviceSearch) -> int:
        """Run one step if a group streams its tokens, else several, and return the number of new
        tokens.

        Beams have their tokens when they end.
        """
        streams = any(group.request.streams for group in self.running)
        tokens = search.advance(1 if streams else SEARCH_STEPS)
        if tokens is None:
            return finish_beams(self.running, search)
        return sum(group.append_all(tokens[group.slots[0]].tolist()) for group in self.running)

    def decode(self, decoder: Decoder) -> None:
        tokens = np.array([[group.options.fill_token_id] for group in self.rows])
        for group in self.running:
            tokens[group.slots, 0] = group.next_tokens
        logits = decoder.step(tokens, self.parents)[:, -1]
        self.parents = None
        self.advance(logits)

    def start(self, decoder: Decoder, logits: np.ndarray) -> None:
        """Select the first tokens from `logits` (rows, V), then make rows for beams or samples."""
        self.advance(logits)
        if (copies := self.running[0].num_rows) == 1:
            return
        decoder.expand(copies)
        self.rows = [other for group in self.rows for other in (group, *group.expanded_rows())]
        self.running = list(dict.fromkeys(self.rows))
        for group in self.running:
            group.slots = [slot for slot, other in enumerate(self.rows) if other is group]
            group.is_expanded = True

    def advance(self, logits: np.ndarray) -> None:
        for group in list(self.running):
            if group.is_greedy:
                group.append(int(logits[group.slots[0]].argmax()))
                continue
            reads = not group.has_started  # before the first new token all its rows are equal
            parents = group.advance(logits[group.slots[:1] if reads else group.slots])
            if reads and group.samples and group.is_expanded:
                self.share_rows(group)
            elif parents is not None and group.is_expanded:
                if self.parents is None:
                    self.parents = np.arange(len(self.rows))
                self.parents[group.slots] = np.array(group.slots)[parents]

    def share_rows(self, group: SequenceGroup) -> None:
        """Give each sample of `group` one of its rows, after a prompt that was read in steps."""
        first, *others = group.slots
        group.slots = [first]
        for sample, slot in zip(group.samples, others, strict=True):
            sample.slots = [slot]
            self.rows[slot] = sample
        self.running.extend(group.samples)

    def remove(self, group: SequenceGroup) -> None:
        """Remove `group`. Its rows are still computed until the whole batch is finished."""
        self.running.remove(group)
        if self.running:
            return
        for batch in (self.search, self.decoder):
            if batch is not None:
                batch.close()
        self.search = self.decoder = None
        self.rows = []


def batch_request(groups: list[SequenceGroup]) -> GenerationRequest:
    """Return the request of a batch of `groups`, with the options of the first and the largest
    number of steps as `max_new_tokens`. Steps that read a prompt count."""
    max_steps = max(group.options.max_new_tokens + len(group.forced) for group in groups)
    options = dataclasses.replace(groups[0].options, max_new_tokens=max_steps)
    fill = options.fill_token_id
    prompts = pad_sequences([list(group.first_tokens) for group in groups], fill)
    sources = [list(group.input.source) for group in groups if group.input.source is not None]
    source = pad_sequences(sources, fill) if sources else None
    return GenerationRequest(options, *move_padding(*prompts, "left", fill), source)


def finish_beams(groups: list[SequenceGroup], search: DeviceSearch) -> int:
    """Finish those of `groups` whose beams have ended in `search`, and return the number of tokens
    of their sequences."""
    for group in groups:
        group.has_started = True
    ended = [group for group in groups if search.ended[group.slots[0] // group.num_rows]]
    if not ended:
        return 0
    rows, scores = search.result()
    for group in ended:
        count = group.options.num_return_sequences
        first = group.slots[0] // group.num_rows * count
        these = slice(first, first + count)
        group.finish(group.make_results(rows[these], None if scores is None else scores[these]))
    results = [result for group in ended for result in group.results if result is not None]
    return sum(len(result.tokens) for result in results)
