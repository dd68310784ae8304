"""Rows of the cpu target that may differ in length, and that join and leave between two steps.

Each row has a slot, an index on the first axis of the caches, so `cache[:n]` binds the first n
without a copy. A step computes one token per row, at its own position and over its own source. No
operator of the step graph mixes rows, so the logits of a row have the same bits in any batch.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import onnxruntime

from ...inference.inputs import move_padding, pad_sequences
from ...inference.rows import INITIAL_CAPACITY, SlotSize, next_input_name, slot_shape
from ...inference.session import LoadedExport, Session
from ...specs.caches import cache_tensors
from ...specs.graph_spec import GraphSpec, TensorSpec, concrete_shape

TOTALS = ("total_length", "total_source_length")  # inputs without a rows axis
FED = ("input_ids", "position_ids", "last_position", "total_length")  # inputs of a decoder


class SlotRows:
    """The `JoiningRows` over the step graph of one export. Those of a decoder-only model may also
    start together.

    Args:
        export: the loaded export.
        role: the role of the step graph.
        size: the number of slots, and the tokens of each. Slots grow if a row has more tokens.
        window: the number of last tokens to keep, `None` for all. Older ones are dropped when slots
            of `window` + `INITIAL_CAPACITY` tokens are full.
    """

    all_logits = False
    best_tokens = None
    shrinks = True

    def __init__(self, export: LoadedExport, role: str, size: SlotSize, window: int | None = None):
        self.export = export
        self.session = export.sessions[role]
        self.spec = export.specs[role]
        self.encodes = "encoder" in export.specs
        self.size, self.window = size, window
        caches, sources = (cache_tensors(self.spec, is_source) for is_source in (False, True))
        others = [tensor for tensor in self.spec.inputs if tensor not in (*caches, *sources)]
        self.arrays = {
            tensor.name: np.zeros(slot_shape(tensor, size), tensor.dtype) for tensor in others
        }
        self.logits = np.zeros((size.rows, export.config["vocab_size"]), np.float32)
        self.caches, self.sources = self.stacked(caches, size), self.stacked(sources, size)
        # tokens in the cache before the current one, and with those that were dropped
        self.lengths = self.arrays["last_position"]
        self.positions = self.arrays["position_ids"][:, 0]
        # empty for a decoder-only model
        self.last_source = self.arrays.get("last_source_position", self.lengths[:0])
        self.places = np.arange(0)  # the slot of each row; together they are the first ones
        self.advances = np.ones(size.rows, np.int64)  # tokens that a step adds, 0 if it is paused
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

    # ------------------------------------------------------------------------------------ prompts

    def prefill(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Feed the prompts (rows, P) of the first rows, and return the logits (rows, 1, V) after
        the last token of each.

        Padding, where `attention_mask` is 0, may stand on either side. Prompts that are longer than
        the slots are read in parts and one by one, because several tokens can only continue a
        single row.
        """
        ids, mask = move_padding(input_ids, attention_mask, "right", 0)
        counts = mask.sum(axis=1)
        self.add(None, np.arange(len(ids)))
        if ids.shape[1] <= self.size.length:
            self.feed(slice(len(ids)), ids, counts)
        else:
            for slot, row in enumerate(ids):
                tokens = row[: counts[slot]]
                for start in range(0, len(tokens), INITIAL_CAPACITY):
                    self.read_part(slot, tokens[start : start + INITIAL_CAPACITY])
        return self.logits[: len(ids), None]

    def add(self, sources: Sequence[Sequence[int]] | None, rows: np.ndarray) -> None:
        """Let `rows` (N,) begin without tokens, over `sources` that are encoded."""
        places = np.arange(max(len(self.places), rows[-1] + 1))
        places[: len(self.places)] = self.places
        slots = places[rows]
        if sources is not None:  # first, because it may fail
            ids, mask = pad_sequences([list(source) for source in sources], 0)
            encoded = self.export.encode(ids, mask).values()
            for cache, states in zip(self.sources, encoded, strict=True):
                cache[slots, :, : ids.shape[1]] = states
            self.last_source[slots] = mask.sum(axis=1) - 1
        self.places = places
        self.lengths[slots] = self.positions[slots] = 0
        self.advances[slots] = 1
        self.inputs[slots] = np.arange(self.num_inputs, self.num_inputs + len(rows))
        self.num_inputs += len(rows)

    def pause(self, rows: np.ndarray) -> None:
        """Let `rows` (N,) stand still without tokens until others begin in their places."""
        slots = self.places[rows]
        self.lengths[slots] = self.positions[slots] = self.advances[slots] = 0

    def read(self, tokens: Sequence[int], start: int) -> None:
        """Read `tokens` of a prompt, after `start` others, in the last slot."""
        slot = len(self.bindings) - 1
        self.lengths[slot] = self.positions[slot] = start
        self.advances[slot] = 1
        self.read_part(slot, tokens)

    def read_part(self, slot: int, tokens: Sequence[int] | np.ndarray) -> None:
        """Feed `tokens` to the row in this `slot`, after those that it has."""
        self.feed(slice(slot, slot + 1), np.array([tokens]), np.array([len(tokens)]))

    def feed(self, slots: slice, ids: np.ndarray, counts: np.ndarray) -> None:
        """Feed the first `counts` (rows,) of `ids` (rows, T) to the rows in `slots`, of which
        several have no tokens yet."""
        length = ids.shape[1]
        while self.lengths[slots].max() + length > self.size.length:
            self.grow()
        before = self.lengths[slots]
        values = {name: array for name, array in self.arrays.items() if name not in FED}
        prompt = self.bind(slots, values, {"rows": len(ids), "target_length": length})
        prompt.run(
            input_ids=ids,
            position_ids=self.positions[slots, None] + np.arange(length),
            last_position=before + counts - 1,
            total_length=before.max() + length,
        )
        self.lengths[slots] += counts
        self.positions[slots] += counts

    def add_read(self) -> None:
        """Add a row with the tokens that were read in the last slot, which is then free again."""
        last, slot = len(self.bindings) - 1, len(self.places)
        length = self.lengths[last]
        self.add(None, np.array([slot]))
        self.lengths[last] = self.positions[last] = length
        if slot != last:
            self.copy([last], [slot])

    # -------------------------------------------------------------------------------------- steps

    def select(self, parents: np.ndarray) -> None:
        """Let row i continue row `parents[i]` from now on. Rows that none continues are dropped.

        The first row that continues a slot of those still in use keeps it. The others get copies.
        """
        slots, rows = self.places[parents], np.arange(len(parents))
        first = np.empty(self.size.rows, np.int64)  # row that continues each slot
        first[slots[::-1]] = rows[::-1]
        keeps = (first[slots] == rows) & (slots < len(slots))
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
        for array in (self.lengths, self.positions, self.advances, self.inputs):
            array[targets] = array[sources]

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Feed one token per row, `tokens` (rows, 1), and return the logits (rows, 1, V) by slot.

        Row i has slot `places[i]`. The next call overwrites the logits.
        """
        count = len(tokens)
        lengths = self.lengths[:count]
        if (longest := lengths.max()) == self.size.length:
            self.grow()
            longest = lengths.max()
        self.arrays["input_ids"][self.places] = tokens
        self.arrays["total_length"][0] = longest + 1
        if self.encodes:
            self.arrays["total_source_length"][0] = self.last_source[:count].max() + 1
        self.bound(count).run()
        lengths += self.advances[:count]
        self.positions[:count] += self.advances[:count]
        return self.logits[:count, None]

    def crop(self, count: int) -> None:
        """Remove the last `count` tokens of each row. The caches behind its length are never
        read."""
        rows = slice(len(self.places))
        self.lengths[rows] -= count
        self.positions[rows] -= count

    def grow(self) -> None:
        """Double the slots or, at their maximum size, drop the tokens that left the sliding
        window."""
        length, rows = self.size.length, range(len(self.places))
        if self.window is None or length < self.window + INITIAL_CAPACITY:
            doubled = 2 * length
            if self.window is not None:
                doubled = min(doubled, self.window + INITIAL_CAPACITY)
            self.size = dataclasses.replace(self.size, length=doubled)
            old, self.caches = self.caches, self.stacked(cache_tensors(self.spec), self.size)
            self.caches[:, : len(rows), :, :length] = old[:, : len(rows)]
            self.bindings = [None] * self.size.rows
            return
        seen = self.window - 1
        for slot in rows:
            first = max(self.lengths[slot] - seen, 0)
            self.caches[:, slot, :, :seen] = self.caches[:, slot, :, first : first + seen]
            self.lengths[slot] -= first

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

    def bound(self, count: int) -> "BoundGraph":
        """Return the binding of a step over the first `count` slots, made at its first use."""
        binding = self.bindings[count - 1]
        if binding is None:
            binding = self.bindings[count - 1] = self.bind(slice(count), self.arrays, {})
        return binding

    def bind(
        self, slots: slice, arrays: dict[str, np.ndarray], sizes: dict[str, int]
    ) -> "BoundGraph":
        """Bind the step graph and return it.

        Args:
            slots: which slots are bound.
            arrays: `{input: array}` of inputs with the arrays of these rows. The other inputs get
                new arrays.
            sizes: the size of each named axis of new arrays.
        """
        parts = {name: array if name in TOTALS else array[slots] for name, array in arrays.items()}
        written = {"logits": ortvalue(self.logits[slots])}
        return BoundGraph(self.session, self.spec, ortvalues(parts), written, sizes)


def ortvalues(arrays: dict[str, np.ndarray]) -> dict[str, onnxruntime.OrtValue]:
    """Return values, by name, that use the memory of `arrays`, which must be contiguous."""
    return {name: ortvalue(array) for name, array in arrays.items()}


def ortvalue(array: np.ndarray) -> onnxruntime.OrtValue:
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def by_name(tensors: Iterable[TensorSpec], arrays: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Return {name: array} of `tensors`, whose `arrays` may be parts of one."""
    return {tensor.name: array for tensor, array in zip(tensors, arrays)}


class BoundGraph:
    """A graph whose inputs and outputs are bound once, so that a run allocates no memory.

    Args:
        session: the session of the graph.
        spec: its inputs and outputs.
        values: what the inputs read, by name. The missing ones read new `arrays` of zeros.
        written: what outputs write, by name. The missing ones write the inputs that read them in
            the next step.
        sizes: the size of each named axis of new arrays.
    """

    def __init__(
        self,
        session: Session,
        spec: GraphSpec,
        values: dict[str, onnxruntime.OrtValue],
        written: dict[str, onnxruntime.OrtValue],
        sizes: dict[str, int],
    ):
        self.session = session
        self.binding = session.io_binding()
        self.arrays: dict[str, np.ndarray] = {}
        self.values = dict(values)  # which keeps their memory
        for tensor in spec.inputs:
            if tensor.name not in values:
                self.arrays[tensor.name] = zeros(tensor, sizes)
                self.values[tensor.name] = ortvalue(self.arrays[tensor.name])
            self.binding.bind_ortvalue_input(tensor.name, self.values[tensor.name])
        for tensor in spec.outputs:
            value = written.get(tensor.name) or self.values[next_input_name(tensor.name)]
            self.binding.bind_ortvalue_output(tensor.name, value)

    def run(self, **values: np.ndarray | int) -> None:
        """Copy `values` to the new arrays of these inputs, and run the graph.

        Inputs that are not passed keep their values.
        """
        for name, array in values.items():
            self.arrays[name][...] = array
        self.session.run_bound(self.binding)


def zeros(tensor: TensorSpec, sizes: dict[str, int]) -> np.ndarray:
    return np.zeros(concrete_shape(tensor, sizes), tensor.dtype)
