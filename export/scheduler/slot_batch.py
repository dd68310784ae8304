"""Continuous batching: rows join and leave the running batch between two steps.

Each row has a slot, an index on the first axis of the caches, so `cache[:n]` binds the first n
without a copy. A decode step computes one token per row, at its own position and over its own
source. No operator of the step graph mixes rows, so the logits of a row have the same bits in any
batch.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..inference.rows import next_input_name, position_bytes
from ..inference.export_info import ExportInfo
from ..inference.inputs import bucket_by_length, pad_sequences
from ..inference.top_k import top_k_tokens
from ..model import OnnxModel
from ..specs.graph_spec import TensorSpec, concrete_shape
from .batch import WAIT_PER_PART
from .beam_groups import BeamGroups, assign_slots, group_beams, joined_beams
from .capacity import chunk_length, preferred_rows, sources_length
from .sequence_group import SequenceGroup

if TYPE_CHECKING:
    import onnxruntime

# Slots besides those of the setting: a part per four, at most 8. A new request need not wait for a
# slot while long lists of texts have all others.
SPARE_SHARE, MAX_SPARE = 4, 8
TOTALS = ("total_length", "total_source_length")  # inputs without a rows axis


@dataclass(frozen=True)
class SlotSize:
    """The size of a batch with slots.

    Args:
        rows: the number of slots.
        source: the maximum number of source tokens of a slot, 0 for a decoder-only model.
        length: the maximum number of decoder tokens of a slot.
    """

    rows: int
    source: int
    length: int


@dataclass
class Binding:
    """Inputs and outputs of a graph, bound once by onnxruntime's `io`; `values` keeps them
    alive."""

    io: "onnxruntime.IOBinding"
    values: "list[onnxruntime.OrtValue]" = field(default_factory=list)

    def put(self, tensor: TensorSpec, array: np.ndarray, is_input: bool) -> None:
        import onnxruntime

        value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        self.values.append(value)
        bind = self.io.bind_ortvalue_input if is_input else self.io.bind_ortvalue_output
        bind(tensor.name, value)


class SlotBatch:
    """The `Batch` of an export with a step graph: rows join and leave between any two steps.

    Several batches share one `model`. `size` are the slots of this one.
    """

    def __init__(self, model: OnnxModel, size: SlotSize):
        info, step = model.info, model.info.step
        assert step is not None
        self.model = model
        self.capacity = size.rows
        self.num_spare_rows = min(MAX_SPARE, size.rows // SPARE_SHARE)
        size = dataclasses.replace(size, rows=size.rows + self.num_spare_rows)
        self.session = model.session(step)
        self.spec = info.specs[step]
        self.encodes = "encoder" in info.specs
        self.chunk = chunk_length(info.config)
        self.preferred_rows = preferred_rows(info.config)
        self.sources_length = sources_length(info.config)
        caches = [
            tensor for tensor in self.spec.inputs if tensor.name.startswith("past_key_values")
        ]
        others = [tensor for tensor in self.spec.inputs if tensor not in caches]
        self.arrays = {
            tensor.name: np.zeros(slot_shape(tensor, size), tensor.dtype) for tensor in others
        }
        self.logits = np.zeros((size.rows, info.config["vocab_size"]), np.float32)
        self.caches = self.stacked(
            [tensor for tensor in caches if ".encoder." not in tensor.name], size
        )
        self.sources = self.stacked(
            [tensor for tensor in caches if ".encoder." in tensor.name], size
        )
        # tokens in the cache before the current one
        self.lengths = self.arrays["last_position"]
        # empty for a decoder-only model
        self.last_source = self.arrays.get("last_source_position", self.lengths[:0])
        # by slot; `None` is a free slot, until a sequence joins or the next step
        self.slots: list[SequenceGroup | None] = []
        self.running: list[SequenceGroup] = []
        # sequences to prefill; the first is being prefilled in the last slot
        self.prefilling: deque[SequenceGroup] = deque()
        self.beams: list[BeamGroups] = []
        self.reserved = 0  # further rows that running sequences get with their first new token
        self.bindings = [self.bound(count) for count in range(1, size.rows + 1)]

    def stacked(self, caches: list[TensorSpec], size: SlotSize) -> np.ndarray:
        """Allocate the inputs `caches` as one array (caches, rows, H, tokens, d) and return it.

        Each cache is a part of it, so a row of all caches can be copied at once.
        """
        array = np.zeros(
            [len(caches), *(slot_shape(caches[0], size) if caches else [])], np.float32
        )
        self.arrays |= {tensor.name: cache for tensor, cache in zip(caches, array)}
        return array

    # -------------------------------------------------------------------------- joining and leaving

    @property
    def join_delay(self) -> float:
        return WAIT_PER_PART * len(self.running)

    @property
    def should_grow(self) -> bool:
        num_rows = self.capacity - self.num_free_rows
        return num_rows < min(self.preferred_rows, self.capacity)

    @property
    def num_free_rows(self) -> int:
        """The number of slots that are free and not reserved for beams or samples. It is negative
        while spare rows run."""
        used = (
            len(self.slots)
            - self.slots.count(None)
            + self.reserved
            + sum(other.num_rows for other in self.prefilling)
        )
        return self.capacity - used

    def fits(self, group: SequenceGroup, beside: Sequence[SequenceGroup]) -> bool:
        """Return True if slots, spare ones too, are free for `group` and the groups `beside` it.

        The sources of several groups must also be short enough to be encoded together.
        """
        num_rows = sum(other.num_rows for other in (*beside, group))
        if num_rows > self.num_free_rows + self.num_spare_rows:
            return False
        sources = [len(other.input.source or ()) for other in (*beside, group)]
        return not beside or max(sources) * len(sources) <= self.sources_length

    def join(self, groups: list[SequenceGroup]) -> None:
        """Add `groups`. Encode their sources, or else read waiting prompts, part by part, until
        `chunk` tokens or more are read."""
        if self.encodes and groups:
            self.encode_sources(groups)
            return
        for group in groups:
            if group.has_prompt_to_read:
                self.prefilling.append(group)
            else:
                self.start(group)
        budget = self.chunk
        while self.prefilling and budget > 0:
            budget -= self.prefill_chunk(self.prefilling[0])

    def encode_sources(self, groups: list[SequenceGroup]) -> None:
        """Add `groups` of a seq2seq model and encode their sources, those of similar length
        together.

        The next steps read their decoder prompts.
        """
        ids, mask = pad_sequences([list(group.input.source or ()) for group in groups], 0)
        buckets = bucket_by_length(mask, self.sources_length)
        states = [self.encode(ids[rows, :length], mask[rows, :length]) for rows, length in buckets]
        for group in groups:
            group.read_one_by_one()
        slots = np.array([self.start(group) for group in groups])
        for (rows, length), values in zip(buckets, states):
            self.sources[:, slots[rows], :, :length] = values
        self.last_source[slots] = mask.sum(axis=1) - 1

    def encode(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return the keys and values of sources for cross-attention, as (caches, B, H, S, d).

        `ids` (B, S) are their tokens, and `mask` is 0 for padding.
        """
        session, spec = self.model.session("encoder"), self.model.info.specs["encoder"]
        states = np.empty(
            [
                len(self.sources),
                len(ids),
                self.sources.shape[2],
                ids.shape[1],
                self.sources.shape[4],
            ],
            np.float32,
        )
        inputs = {"input_ids": ids, "attention_mask": mask}
        binding = Binding(session.io_binding())
        for tensor in spec.inputs:
            binding.put(tensor, inputs[tensor.name], is_input=True)
        for tensor, array in zip(spec.outputs, states):
            binding.put(tensor, array, is_input=False)
        session.run_bound(binding.io)
        return states

    def start(self, group: SequenceGroup) -> int:
        """Give `group` a slot, from the next step on, and return the number of the slot."""
        slot = self.new_slot(group)
        self.lengths[slot] = group.num_prefilled
        self.running.append(group)
        self.reserved += group.num_rows - 1
        group.is_expanded = group.num_rows == 1
        return slot

    def new_slot(self, group: SequenceGroup) -> int:
        slot = self.slots.index(None) if None in self.slots else len(self.slots)
        self.slots[slot : slot + 1] = [group]
        group.slots.append(slot)
        return slot

    def prefill_chunk(self, group: SequenceGroup) -> int:
        """Read the next part of the prompt of `group` and return its number of tokens.

        It is read in the last slot. When only the last token is left, which the next step feeds,
        the sequence gets the first free slot, so the last one is free for the next prompt.
        """
        slot = len(self.bindings) - 1
        if not group.num_prefilled:
            self.close_gaps()  # the last slot may be in use
        end = len(group.input.prompt) - 1
        tokens = group.input.prompt[group.num_prefilled : end][: self.chunk]
        self.prefill(slot, group.num_prefilled, tokens)
        group.num_prefilled += len(tokens)
        self.lengths[slot] = group.num_prefilled
        if group.num_prefilled == end:
            self.prefilling.popleft()
            place = self.start(group)
            if place != slot:
                self.copy([slot], [place])
        return len(tokens)

    def prefill(self, slot: int, done: int, tokens: Sequence[int]) -> None:
        """Read prompt `tokens` in slot number `slot`, whose cache has `done` tokens already."""
        end = done + len(tokens)
        values = {
            "input_ids": np.array([tokens]),
            "position_ids": np.arange(done, end)[None],
            "last_position": np.array([end - 1], np.int32),
            "total_length": np.array([end], np.int32),
        }
        self.session.run_bound(self.bind(slice(slot, slot + 1), values).io)

    def remove(self, group: SequenceGroup) -> None:
        """Remove `group`. The next step moves other rows into its slots."""
        if group in self.prefilling:
            self.prefilling.remove(group)
            return
        self.running.remove(group)
        if not group.is_expanded:
            self.reserved -= group.num_rows - 1
        for beams in self.beams:
            if group in beams.groups:  # it was cancelled
                beams.remove([group])
        for slot in group.slots:
            self.slots[slot] = None
        group.slots = []

    def close_gaps(self) -> None:
        """Move the last rows into free slots, so that the slots in use are the first ones."""
        sources, targets = [], []
        while None in self.slots:
            if (moved := self.slots.pop()) is not None:
                sources.append(len(self.slots))
                targets.append(self.slots.index(None))
                moved.slots[moved.slots.index(sources[-1])] = targets[-1]
                self.slots[targets[-1]] = moved
        if sources:
            self.copy(sources, targets)

    def copy_caches(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy the caches of decoder tokens from the first slot of each pair to the second.

        One by one takes half the time of a joint copy.
        """
        for source, target in pairs:
            used = self.lengths[source]
            self.caches[:, target, :, :used] = self.caches[:, source, :, :used]

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy the caches of each slot of `sources` to the slot of `targets` at the same place."""
        self.copy_caches(zip(sources, targets))
        if self.encodes:
            for source, target in zip(sources, targets):
                used = self.last_source[source] + 1
                self.sources[:, target, :, :used] = self.sources[:, source, :, :used]
            self.last_source[targets] = self.last_source[sources]
        self.lengths[targets] = self.lengths[sources]

    # ------------------------------------------------------------------------------------- the step

    def step(self) -> int:
        """Run the step graph on the slots in use, select the next tokens and return their
        number."""
        self.close_gaps()
        count = len(self.slots)
        if not count:
            return 0
        self.feed_tokens(count)
        lengths = self.lengths[:count]
        self.arrays["position_ids"][:count, 0] = lengths
        self.arrays["total_length"][0] = lengths.max() + 1
        if self.encodes:
            self.arrays["total_source_length"][0] = self.last_source[:count].max() + 1
        self.session.run_bound(self.bindings[count - 1].io)
        lengths += 1
        self.select(self.logits[:count])
        return sum(group.num_new_tokens for group in self.running)

    def feed_tokens(self, count: int) -> None:
        tokens = [0] * count
        for group in self.running:
            for slot, token in zip(group.slots, group.next_tokens):
                tokens[slot] = token
        self.arrays["input_ids"][:count, 0] = tokens

    def select(self, logits: np.ndarray) -> None:
        """Select the next tokens of all groups from the `logits` (slots, V)."""
        starting: list[SequenceGroup] = []  # with plain beams
        greedy = [group for group in self.running if group.is_greedy]
        others = [group for group in self.running if not group.is_greedy]
        top_tokens = logits.argmax(axis=1).tolist() if greedy else []
        for group in greedy:
            group.append(top_tokens[group.slots[0]])
        for group in others:
            if group.forced or not group.has_plain_beams:
                self.advance(group, logits)
            elif not group.has_started:
                starting.append(group)
        if starting or self.beams:
            self.advance_beams(starting, logits)

    def advance_beams(self, starting: list[SequenceGroup], logits: np.ndarray) -> None:
        """Select the next tokens of all plain beams from the `logits` (slots, V).

        Plain beams need only the largest logits. Groups in `starting` have one slot each. They get
        their first tokens, and slots for their other beams.
        """
        started = group_beams(starting)
        both = [beams for beams in (*self.beams, *started) if beams.groups]
        count = min(max(beams.options.candidates for beams in both), logits.shape[1])
        top = top_k_tokens(logits, count, self.model.threads)
        copies = [beams.advance(*top) for beams in both]
        self.copy_caches(np.concatenate(copies).tolist())
        for group in starting:
            if not group.is_finished:
                self.expand(group)
        self.beams = joined_beams(both)

    def advance(self, group: SequenceGroup, logits: np.ndarray) -> None:
        """Select the next tokens of a `group` that is not greedy, from the `logits` (slots, V).

        Then make rows for its beams or samples, or let its rows continue others.
        """
        parents = group.advance(logits[group.slots])
        if not group.is_expanded and group.has_started:
            self.expand(group)
        elif parents is not None:
            self.move(group, parents)

    def move(self, group: SequenceGroup, parents: list[int]) -> None:
        """Copy caches within `group`, so that each row continues its parent.

        `parents` has the row, from 0 to K - 1, that each of its K rows continues.
        """
        slots, copies = assign_slots(np.array([group.slots]), np.array([parents]))
        group.slots = slots[0].tolist()
        self.copy_caches(copies.tolist())

    def expand(self, group: SequenceGroup) -> None:
        """Give the other beams or samples of `group` slots, and copy its row to them.

        Samples become groups of their own.
        """
        [first] = group.slots
        group.is_expanded = True
        self.reserved -= group.num_rows - 1
        others = group.expanded_rows()
        slots = [self.new_slot(other) for other in others]
        self.copy([first] * len(slots), slots)
        self.running.extend(other for other in others if other is not group)

    def bound(self, count: int) -> Binding:
        """Return the binding of a step over the first `count` slots."""
        totals: dict[str, np.ndarray] = {
            name: self.arrays[name] for name in TOTALS if name in self.arrays
        }
        return self.bind(slice(count), totals)

    def bind(self, slots: slice, values: dict[str, np.ndarray]) -> Binding:
        """Bind the inputs and outputs of the step graph and return the binding.

        Args:
            slots: which slots of this batch's arrays are bound.
            values: `{input: array}` of inputs that get other arrays.
        """
        binding = Binding(self.session.io_binding())
        for tensor in self.spec.inputs:
            array = (
                values[tensor.name] if tensor.name in values else self.arrays[tensor.name][slots]
            )
            binding.put(tensor, array, is_input=True)
        binding.put(self.spec.outputs[0], self.logits[slots], is_input=False)
        for tensor in self.spec.outputs[1:]:
            binding.put(tensor, self.arrays[next_input_name(tensor.name)][slots], is_input=False)
        return binding


def slot_shape(tensor: TensorSpec, size: SlotSize) -> list[int]:
    sizes = {
        "rows": size.rows,
        "target_length": 1,
        "max_length": size.length,
        "max_source": size.source,
    }
    # names in graphs without a step
    full_sequences = {
        "batch_size": size.rows,
        "source_length": size.source,
        "past_source_length": size.source,
    }
    return concrete_shape(tensor, sizes | full_sequences)


def slot_bytes(info: ExportInfo, size: SlotSize) -> int:
    """Return the bytes that the caches of one slot take. `size.rows` is ignored."""
    spec = info.specs[info.step or "decoder"]
    sources = [tensor for tensor in spec.inputs if ".encoder." in tensor.name]
    source = sum(4 * int(np.prod(slot_shape(tensor, SlotSize(1, 1, 1)))) for tensor in sources)
    return size.length * position_bytes(spec) + size.source * source
