"""Static batching, for exports without a step graph. Requests of similar length run together. The
next batch starts when all rows of the current batch are finished."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..inference.decoder import Decoder, GenerationRequest
from ..inference.inputs import MAX_PADDING, move_padding, pad_sequences
from ..model import OnnxModel
from .batch import WAIT_PER_PART
from .sequence_group import SequenceGroup


class StaticBatch:
    """The `Batch` of an export without a step graph: at most `rows` rows that start together.

    The next rows start when all have finished.
    """

    def __init__(self, model: OnnxModel, rows: int):
        self.model = model
        self.capacity = rows
        self.running: list[SequenceGroup] = []
        self.prefilling: tuple[SequenceGroup, ...] = ()
        self.rows: list[SequenceGroup] = []  # by row of the batch, finished sequences included
        self.decoder: Decoder | None = None
        self.logits: np.ndarray | None = None  # of the prefill, until the first step
        # the row that each row continues in the next step, `None` if its own
        self.parents: np.ndarray | None = None

    @property
    def join_delay(self) -> float:
        return WAIT_PER_PART * len(self.running)

    @property
    def num_free_rows(self) -> int:
        """The number of rows that can join: none while rows run."""
        return 0 if self.running else self.capacity

    def fits(self, group: SequenceGroup, beside: Sequence[SequenceGroup]) -> bool:
        """Return True if `group` can start together with the groups `beside` it, and no row runs.

        They must have similar lengths and the same number of rows each. The decoder prompts of a
        seq2seq model must be equally long.
        """
        if self.running:
            return False
        groups = [*beside, group]
        if sum(other.num_rows for other in groups) > self.capacity:
            return False
        first = groups[0]
        if group.num_rows != first.num_rows or (
            group.input.source is not None and len(group.first_tokens) != len(first.first_tokens)
        ):
            return False
        lengths = [len(other.input.source or other.first_tokens) for other in groups]
        return sum(lengths) >= (1 - MAX_PADDING) * len(lengths) * max(lengths)

    def join(self, groups: list[SequenceGroup]) -> None:
        """Start a batch of `groups` and read their prompts. Without groups, do nothing."""
        if not groups:
            return
        max_steps = max(group.options.max_new_tokens + len(group.forced) for group in groups)
        options = dataclasses.replace(groups[0].options, max_new_tokens=max_steps)
        fill = options.fill_token_id
        ids, mask = move_padding(
            *pad_sequences([list(group.first_tokens) for group in groups], fill), "left", fill
        )
        sources = [list(group.input.source) for group in groups if group.input.source is not None]
        source = pad_sequences(sources, fill) if sources else None
        self.decoder = self.model.decoders.start(GenerationRequest(options, ids, mask, source))
        self.logits = self.decoder.prefill(ids, mask)[:, -1]
        self.running = list(groups)
        self.rows = list(groups)
        self.parents = None
        for slot, group in enumerate(groups):
            group.slots = [slot]
            group.is_expanded = group.num_rows == 1

    def step(self) -> list[list[int]]:
        """Generate one token of every sequence and return the new tokens of each row.

        The first step uses the logits that `join` computed.
        """
        if self.decoder is None:
            return []
        if self.logits is not None:
            self.start(self.decoder, self.logits)
            self.logits = None
        else:
            self.decode(self.decoder)
        return [tokens for group in self.running for tokens in group.new_tokens]

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
        if not self.running and self.decoder is not None:
            self.decoder.close()
            self.decoder = None
            self.rows = []
