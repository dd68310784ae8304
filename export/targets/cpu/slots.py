"""Rows of the cpu target that join and leave between two steps.

Each row has a slot, an index on the first axis of the caches, so `cache[:n]` binds the first n
without a copy. A step computes one token per row, at its own position and over its own source. No
operator of the step graph mixes rows, so the logits of a row have the same bits in any batch.
"""

from collections.abc import Sequence

import numpy as np

from ...inference.inputs import pad_sequences
from ...inference.rows import SlotSize, slot_shape
from ...inference.session import LoadedExport
from ...specs.caches import cache_tensors
from ...specs.graph_spec import TensorSpec
from .buffers import BoundGraph, by_name, ortvalue, ortvalues

TOTALS = ("total_length", "total_source_length")  # inputs without a rows axis


class SlotRows:
    """The `JoiningRows` over the step graph of one export.

    Args:
        export: the loaded export.
        role: the role of the step graph.
        size: the number of slots, and the tokens of each.
    """

    all_logits = False
    max_step_tokens = 1
    shrinks = True

    def __init__(self, export: LoadedExport, role: str, size: SlotSize):
        self.export = export
        self.session = export.sessions[role]
        self.spec = export.specs[role]
        self.encodes = "encoder" in export.specs
        caches, sources = (cache_tensors(self.spec, is_source) for is_source in (False, True))
        others = [tensor for tensor in self.spec.inputs if tensor not in (*caches, *sources)]
        self.arrays = {
            tensor.name: np.zeros(slot_shape(tensor, size), tensor.dtype) for tensor in others
        }
        self.logits = np.zeros((size.rows, export.config["vocab_size"]), np.float32)
        self.caches, self.sources = self.stacked(caches, size), self.stacked(sources, size)
        # tokens in the cache before the current one
        self.lengths = self.arrays["last_position"]
        # empty for a decoder-only model
        self.last_source = self.arrays.get("last_source_position", self.lengths[:0])
        self.places = np.arange(0)  # the slot of each row; together they are the first ones
        self.inputs = np.full(size.rows, -1)  # the number of the input in each slot
        self.num_inputs = 0
        # of a step over the first slots
        self.bindings: list[BoundGraph | None] = [None] * size.rows

    def stacked(self, caches: list[TensorSpec], size: SlotSize) -> np.ndarray:
        """Allocate the inputs `caches` as one array (caches, rows, H, tokens, d) and return it.

        Each cache is a part of it, so a row of all caches can be copied at once.
        """
        array = np.zeros(
            [len(caches), *(slot_shape(caches[0], size) if caches else [])], np.float32
        )
        self.arrays |= by_name(caches, array)
        return array

    def add(self, sources: Sequence[Sequence[int]] | None, count: int) -> None:
        """Add `count` rows without tokens after the others, over `sources` that are encoded."""
        slots = np.arange(len(self.places), len(self.places) + count)
        if sources is not None:  # first, because it may fail
            ids, mask = pad_sequences([list(source) for source in sources], 0)
            encoded = self.export.encode(ids, mask).values()
            for cache, states in zip(self.sources, encoded, strict=True):
                cache[slots, :, : ids.shape[1]] = states
            self.last_source[slots] = mask.sum(axis=1) - 1
        self.places = np.concatenate([self.places, slots])
        self.lengths[slots] = 0
        self.inputs[slots] = np.arange(self.num_inputs, self.num_inputs + count)
        self.num_inputs += count

    def read(self, tokens: Sequence[int], start: int) -> None:
        """Read `tokens` of a prompt, after `start` others, in the last slot."""
        slot, end = len(self.bindings) - 1, start + len(tokens)
        values = {
            "input_ids": np.array([tokens]),
            "position_ids": np.arange(start, end)[None],
            "last_position": np.array([end - 1], np.int32),
            "total_length": np.array([end], np.int32),
        }
        self.bind(slice(slot, slot + 1), values).run()
        self.lengths[slot] = end

    def add_read(self) -> None:
        """Add a row with the tokens that were read in the last slot, which is then free again."""
        last, slot = len(self.bindings) - 1, len(self.places)
        length = self.lengths[last]
        self.add(None, 1)
        self.lengths[last] = length
        if slot != last:
            self.copy([last], [slot])

    def select(self, parents: np.ndarray) -> None:
        """Let row i continue row `parents[i]` from now on. Rows that none continues are dropped.

        The first row that continues a slot of those still in use keeps it. The others get copies.
        """
        slots = self.places[parents]
        keeps = np.zeros(len(slots), bool)
        keeps[np.unique(slots, return_index=True)[1]] = True
        keeps &= slots < len(slots)
        free = np.ones(len(slots), bool)
        free[slots[keeps]] = False
        self.places = slots.copy()
        self.places[~keeps] = np.flatnonzero(free)
        self.copy(slots[~keeps].tolist(), self.places[~keeps].tolist())

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy the caches of each slot of `sources` to the slot of `targets` at the same place.

        One by one takes half the time of a joint copy. Beams share their source.
        """
        for source, target in zip(sources, targets):
            used = self.lengths[source]
            self.caches[:, target, :, :used] = self.caches[:, source, :, :used]
            if self.encodes and self.inputs[source] != self.inputs[target]:
                used = self.last_source[source] + 1
                self.sources[:, target, :, :used] = self.sources[:, source, :, :used]
        if self.encodes:
            self.last_source[targets] = self.last_source[sources]
        self.lengths[targets] = self.lengths[sources]
        self.inputs[targets] = self.inputs[sources]

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Feed one token per row, `tokens` (rows, 1), and return the logits (rows, 1, V) by slot.

        Row i has slot `places[i]`. The next call overwrites the logits.
        """
        count = len(tokens)
        self.arrays["input_ids"][self.places] = tokens
        lengths = self.lengths[:count]
        self.arrays["position_ids"][:count, 0] = lengths
        self.arrays["total_length"][0] = lengths.max() + 1
        if self.encodes:
            self.arrays["total_source_length"][0] = self.last_source[:count].max() + 1
        self.bound(count).run()
        lengths += 1
        return self.logits[:count, None]

    def source_inputs(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the keys and values and the mask of the sources of `rows` (N,)."""
        slots = self.places[rows]
        last = self.last_source[slots]
        length = last.max(initial=0) + 1
        caches = cache_tensors(self.spec, is_source=True)
        arrays = by_name(caches, self.sources[:, slots, :, :length])
        mask = np.arange(length) <= last[:, None]
        return arrays | {"encoder_attention_mask": mask.astype(np.int64)}

    def close(self) -> None:
        """Drop all rows."""
        self.places = self.places[:0]

    def bound(self, count: int) -> BoundGraph:
        """Return the binding of a step over the first `count` slots, made at its first use."""
        binding = self.bindings[count - 1]
        if binding is None:
            totals = {name: self.arrays[name] for name in TOTALS if name in self.arrays}
            binding = self.bindings[count - 1] = self.bind(slice(count), totals)
        return binding

    def bind(self, slots: slice, values: dict[str, np.ndarray]) -> BoundGraph:
        """Bind the inputs and outputs of the step graph and return it.

        Args:
            slots: which slots are bound.
            values: `{input: array}` of inputs that get other arrays.
        """
        arrays = {name: array[slots] for name, array in self.arrays.items() if name not in values}
        written = {"logits": ortvalue(self.logits[slots])}
        return BoundGraph(self.session, self.spec, ortvalues(arrays | values), written, {})
