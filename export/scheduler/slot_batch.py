"""Continuous batching: rows join and leave the running batch between two steps.

Each row has a slot, an index on the first axis of the caches, so `cache[:n]` binds the first n
without a copy. A decode step computes one token per row, at its own position and over its own
source. No operator of the step graph mixes rows, so the logits of a row have the same bits in any
batch.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..inference.decoder import next_input_name, position_bytes
from ..inference.export_info import ExportInfo
from ..inference.inputs import bucket_by_length, pad_sequences
from ..inference.top_k import top_k_tokens
from ..model import OnnxModel
from ..specs.graph_spec import TensorSpec, concrete_shape
from .batch import WAIT_PER_PART
from .beam_groups import BeamGroups, assign_slots, group_beams, joined_beams
from .capacity import chunk_length, sources_length
from .sequence_group import SequenceGroup

if TYPE_CHECKING:
    import onnxruntime

TOTALS = ("total_length", "total_source_length")  # inputs without a rows axis


@dataclass(frozen=True)
class SlotSize:
    """The size of a batch: `rows` slots of `source` encoder tokens (0 for a decoder-only model) and
    `length` decoder tokens."""

    rows: int
    source: int
    length: int


@dataclass
class Binding:
    """Inputs and outputs of a graph, bound once. It keeps the bound values alive."""

    io: "onnxruntime.IOBinding"
    values: "list[onnxruntime.OrtValue]" = field(default_factory=list)

    def put(self, tensor: TensorSpec, array: np.ndarray, is_input: bool) -> None:
        import onnxruntime

        value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        self.values.append(value)
        bind = self.io.bind_ortvalue_input if is_input else self.io.bind_ortvalue_output
        bind(tensor.name, value)


class SlotBatch:
    """The `Batch` of an export with a step graph. Several batches share one `model`."""

    def __init__(self, model: OnnxModel, size: SlotSize):
        info, step = model.info, model.info.step
        assert step is not None
        self.model = model
        self.capacity = size.rows
        self.session = model.session(step)
        self.spec = info.specs[step]
        self.encodes = "encoder" in info.specs
        self.chunk = chunk_length(info.config)
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
        """Return all `caches` as one array (caches, rows, H, tokens, d). Each cache is a view, and
        a row of all caches is copied at once."""
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
    def num_free_rows(self) -> int:
        """Number of free slots that are not reserved."""
        used = (
            len(self.slots)
            - self.slots.count(None)
            + self.reserved
            + sum(other.num_rows for other in self.prefilling)
        )
        return self.capacity - used

    def fits(self, group: SequenceGroup, beside: Sequence[SequenceGroup]) -> bool:
        """Return whether slots are free and the sources fit into one encoder batch."""
        if sum(other.num_rows for other in beside) + group.num_rows > self.num_free_rows:
            return False
        sources = [len(other.input.source or ()) for other in (*beside, group)]
        return not beside or max(sources) * len(sources) <= self.sources_length

    def join(self, groups: list[SequenceGroup]) -> None:
        """Encode the sources, or prefill at most `chunk` prompt tokens."""
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
        """Encode sources of similar length together. Decode steps feed the decoder prompts."""
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
        """Return the cross-attention caches (caches, B, H, S, d) of sources (B, S)."""
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
        """Add `group` to the next step and return its slot."""
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
        """Prefill the next chunk of a prompt in the last slot and return its number of tokens.

        The next decode step feeds the prompt's last token. The sequence is then in another slot, so
        the last slot is free for the next prompt."""
        slot = self.capacity - 1
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
        """Prefill `tokens` of one slot after its first `done` tokens."""
        end = done + len(tokens)
        values = {
            "input_ids": np.array([tokens]),
            "position_ids": np.arange(done, end)[None],
            "last_position": np.array([end - 1], np.int32),
            "total_length": np.array([end], np.int32),
        }
        self.session.run_bound(self.bind(slice(slot, slot + 1), values).io)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a sequence. `close_gaps` moves other rows into its slots later."""
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
        """Move the last rows into free slots."""
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
        """Copy the decoder tokens of the first slot of each pair to the second. One by one takes
        half the time of a joint copy."""
        for source, target in pairs:
            used = self.lengths[source]
            self.caches[:, target, :, :used] = self.caches[:, source, :, :used]

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy rows from slots `sources` to other slots `targets`."""
        self.copy_caches(zip(sources, targets))
        if self.encodes:
            for source, target in zip(sources, targets):
                used = self.last_source[source] + 1
                self.sources[:, target, :, :used] = self.sources[:, source, :, :used]
            self.last_source[targets] = self.last_source[sources]
        self.lengths[targets] = self.lengths[sources]

    # ------------------------------------------------------------------------------------- the step

    def step(self) -> list[list[int]]:
        """Run the step graph on the slots in use and select the next tokens."""
        self.close_gaps()
        count = len(self.slots)
        if not count:
            return []
        self.feed_tokens(count)
        lengths = self.lengths[:count]
        self.arrays["position_ids"][:count, 0] = lengths
        self.arrays["total_length"][0] = lengths.max() + 1
        if self.encodes:
            self.arrays["total_source_length"][0] = self.last_source[:count].max() + 1
        self.session.run_bound(self.bindings[count - 1].io)
        lengths += 1
        return self.select(self.logits[:count])

    def feed_tokens(self, count: int) -> None:
        tokens = [0] * count
        for group in self.running:
            for slot, token in zip(group.slots, group.next_tokens):
                tokens[slot] = token
        self.arrays["input_ids"][:count, 0] = tokens

    def select(self, logits: np.ndarray) -> list[list[int]]:
        """Select the next tokens from the logits (slots, V)."""
        starting: list[SequenceGroup] = []  # with plain beams
        top_tokens = logits.argmax(axis=1).tolist()
        for group in list(self.running):
            if group.is_greedy:
                group.append(top_tokens[group.slots[0]])
            elif group.forced or not group.has_plain_beams:
                self.advance(group, logits)
            elif not group.has_started:
                starting.append(group)
        if starting or self.beams:
            self.advance_beams(starting, logits)
        return [tokens for group in self.running for tokens in group.new_tokens]

    def advance_beams(self, starting: list[SequenceGroup], logits: np.ndarray) -> None:
        """Select the next tokens of all plain beams, and the first ones of groups `starting`."""
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
        """Select the next tokens of a group with a search, and expand or reorder its rows."""
        parents = group.advance(logits[group.slots])
        if not group.is_expanded and group.has_started:
            self.expand(group)
        elif parents is not None:
            self.move(group, parents)

    def move(self, group: SequenceGroup, parents: list[int]) -> None:
        """Copy the caches of each row's parent to the row."""
        slots, copies = assign_slots(np.array([group.slots]), np.array([parents]))
        group.slots = slots[0].tolist()
        self.copy_caches(copies.tolist())

    def expand(self, group: SequenceGroup) -> None:
        """Copy the row of `group` for its other beams or samples. Samples become sequences of their
        own."""
        [first] = group.slots
        group.is_expanded = True
        self.reserved -= group.num_rows - 1
        others = group.expanded_rows()
        slots = [self.new_slot(other) for other in others]
        self.copy([first] * len(slots), slots)
        self.running.extend(other for other in others if other is not group)

    def bound(self, count: int) -> Binding:
        """Return the binding of a step of the first `count` slots."""
        totals: dict[str, np.ndarray] = {
            name: self.arrays[name] for name in TOTALS if name in self.arrays
        }
        return self.bind(slice(count), totals)

    def bind(self, slots: slice, values: dict[str, np.ndarray]) -> Binding:
        """Return a binding of `values`, and of the arrays of `slots` for all other tensors."""
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
    """Return the bytes of the caches of one slot."""
    spec = info.specs[info.step or "decoder"]
    sources = [tensor for tensor in spec.inputs if ".encoder." in tensor.name]
    source = sum(4 * int(np.prod(slot_shape(tensor, SlotSize(1, 1, 1)))) for tensor in sources)
    return size.length * position_bytes(spec) + size.source * source
