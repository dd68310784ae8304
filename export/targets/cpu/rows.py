"""The rows of the cpu target that start together. Graphs write in place to caches of a fixed
size."""

from dataclasses import dataclass, field

import numpy as np

from ...inference.config import RELATIVE_POSITIONS, cache_window
from ...inference.inputs import move_padding
from ...inference.rows import (
    INITIAL_CAPACITY,
    GenerationRequest,
    Rows,
    SlotSize,
    check_memory,
    cross_states,
)
from ...inference.session import LoadedExport, Session
from ...specs.caches import cache_tensors
from ...specs.graph_spec import GraphSpec, concrete_shape
from .buffers import BoundGraph, FreeMemory, by_name, ortvalue, ortvalues
from .slots import SlotRows

# initial capacity in tokens of caches of a seq2seq decoder, whose outputs are often short
SEQ2SEQ_CAPACITY = 32
# onnxruntime's matmul of one query sums the values of four keys at a time. A remainder of up to
# three keys is summed in another order.
KEY_GROUP = 4


@dataclass(frozen=True)
class CpuRowsFactory:
    """The `RowsFactory` of one loaded export."""

    export: LoadedExport
    memory: FreeMemory = field(default_factory=FreeMemory)
    supports_empty_prompts = False
    start_search = None  # the graphs have no search of their own

    def open(self, request: GenerationRequest) -> Rows:
        """Encode the source of `request`, if it has one, and return rows for its prompts.

        The prompts are not read yet.

        Raises:
            UsageError: if the request needs more memory than the machine has.
        """
        spec = self.export.specs["decoder"]
        window = bounding_window(self.export.config)
        capacity = request.input_ids.shape[1] + min(
            request.options.max_new_tokens, INITIAL_CAPACITY
        )
        if window is not None:
            capacity = min(capacity, window + INITIAL_CAPACITY)
        rows = len(request.input_ids) * request.options.rows_per_input
        check_memory(
            len(request.input_ids),
            request.options,
            self.export.config["vocab_size"],
            self.export.position_bytes * rows * capacity,
        )
        session = self.export.sessions["decoder"]
        if request.source is None:
            return CpuRows(session, spec, len(request.input_ids), capacity, window)
        ids, mask = request.source
        arrays = {
            name: np.ascontiguousarray(pad_keys(states, 2))
            for name, states in cross_states(self.export.encode(ids, mask)).items()
        }
        arrays["encoder_attention_mask"] = pad_keys(mask, 1).copy()  # the decoder moves its rows
        capacity = min(capacity, SEQ2SEQ_CAPACITY)
        return CpuBeamRows(session, spec, arrays, len(ids), capacity, self.memory)

    def open_slots(self, role: str, size: SlotSize) -> SlotRows:
        """Return rows over the step graph of `role` that may join while others run."""
        return SlotRows(self.export, role, size)


def pad_keys(array: np.ndarray, axis: int) -> np.ndarray:
    """Return `array` with zeros appended on `axis`, up to a multiple of `KEY_GROUP`.

    `axis` is the axis of source tokens. The padding keeps sums in the same order for any length.
    """
    shape = list(array.shape)
    shape[axis] = -shape[axis] % KEY_GROUP
    return np.concatenate([array, np.zeros(shape, array.dtype)], axis) if shape[axis] else array


def bounding_window(config: dict) -> int | None:
    """Return the number of last tokens that the caches must keep, or `None` for all.

    It is that of `cache_window`. It is `None` with relative positions too: their distances are
    counted in cache slots, so no token may move.
    """
    is_relative = config["position_embedding_type"] in RELATIVE_POSITIONS
    return None if is_relative else cache_window(config)


class CpuRows:
    """The `Rows` of one request of a decoder-only model, which may differ in length.

    Args:
        session: the session of the decoder graph.
        spec: the inputs and outputs of that graph.
        rows: the number of prompts.
        capacity: the number of tokens per row for which the caches have room at first.
        window: the number of last tokens to keep, `None` for all. Older ones are dropped when
            caches of `window` + `INITIAL_CAPACITY` tokens are full.
    """

    all_logits = False
    max_step_tokens = 1
    shrinks = True

    def __init__(
        self,
        session: Session,
        spec: GraphSpec,
        rows: int,
        capacity: int,
        window: int | None = None,
    ):
        self.session = session
        self.spec = spec
        self.tensors = cache_tensors(spec)
        self.capacity = capacity
        self.window = window
        self.set_lengths(*np.zeros((2, rows), np.int64))
        self.bind(rows)

    def set_lengths(self, lengths: np.ndarray, dropped: np.ndarray) -> None:
        """Note the number of tokens of each row in the caches, and of those dropped before
        them."""
        self.lengths, self.dropped = lengths, dropped
        self.longest = int(lengths.max())

    def bind(self, rows: int) -> None:
        """Bind a step of so many `rows` to new caches of `capacity`."""
        sizes = {"rows": rows, "max_length": self.capacity}
        shape = concrete_shape(self.tensors[0], sizes)
        self.caches = np.zeros((len(self.tensors), *shape), np.float32)
        self.values = ortvalues(by_name(self.tensors, self.caches))
        self.bound = self.bound_graph(1)

    def bound_graph(self, length: int) -> BoundGraph:
        """Return the graph, bound to the caches and to `length` tokens of each row."""
        sizes = {"rows": self.caches.shape[1], "target_length": length}
        return BoundGraph(self.session, self.spec, self.values, {}, sizes)

    def prefill(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Feed the prompts (rows, P) and return the logits (rows, 1, V) after the last token of
        each.

        Padding, where `attention_mask` is 0, may stand on either side.
        """
        ids, mask = move_padding(input_ids, attention_mask, "right", 0)
        length, lengths = ids.shape[1], mask.sum(axis=1)
        if length > self.capacity:
            return self.prefill_parts(ids, lengths)
        self.set_lengths(lengths, self.dropped)
        prompt = self.bound_graph(length)
        prompt.run(
            input_ids=ids,
            position_ids=np.arange(length),
            last_position=lengths - 1,
            total_length=length,
        )
        return prompt.arrays["logits"][:, None]

    def prefill_parts(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Feed prompts that are longer than the caches, in parts, and return the logits (rows, 1,
        V).

        Rows are read one by one, because several tokens can only continue a single row.

        Args:
            ids: the prompts (rows, P), with padding on the right.
            lengths: the number of tokens of each row (rows,).
        """
        logits, alone = [], []
        for row, length in enumerate(lengths):
            decoder = CpuRows(self.session, self.spec, 1, self.capacity, self.window)
            for start in range(0, length, INITIAL_CAPACITY):
                last = decoder.step(
                    ids[row : row + 1, start : min(start + INITIAL_CAPACITY, length)]
                )
            logits.append(last.copy())  # a copy, because the decoder reuses the array
            alone.append((decoder.lengths[0], decoder.dropped[0]))
            self.caches[:, row] = decoder.caches[:, 0]
        self.set_lengths(*np.array(alone).T)
        return np.concatenate(logits)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Feed `tokens` (rows, T) and return the logits (rows, 1, V) after the last of each row.

        T must be 1 if there are several rows. With a T of 1, the next call overwrites the logits.
        """
        count = tokens.shape[1]
        while self.longest + count > self.capacity:
            self.grow_caches()
        bound = self.bound if count == 1 else self.bound_graph(count)
        self.longest += count
        bound.run(
            input_ids=tokens,
            position_ids=(self.lengths + self.dropped)[:, None] + np.arange(count),
            last_position=self.lengths + (count - 1),
            total_length=self.longest,
        )
        self.lengths = self.lengths + count
        return bound.arrays["logits"][:, None]

    def crop(self, count: int) -> None:
        """Remove the last `count` tokens of each row. The caches behind its length are never
        read."""
        self.set_lengths(self.lengths - count, self.dropped)

    def grow_caches(self) -> None:
        """Double the caches or, at their maximum size, drop the tokens that left the sliding
        window."""
        if self.window is None or self.capacity < self.window + INITIAL_CAPACITY:
            doubled = 2 * self.capacity
            self.capacity = (
                doubled if self.window is None else min(doubled, self.window + INITIAL_CAPACITY)
            )
            self.move(np.arange(len(self.lengths)))
            return
        seen = self.window - 1
        firsts = np.maximum(self.lengths - seen, 0)
        for row, first in enumerate(firsts):
            self.caches[:, row, :, :seen] = self.caches[:, row, :, first : first + seen]
        self.set_lengths(self.lengths - firsts, self.dropped + firsts)

    def select(self, parents: np.ndarray) -> None:
        """Let each row continue the row that `parents` (rows,) names.

        If the number of rows stays, only changed rows and used slots are copied.
        """
        if len(parents) != len(self.lengths):
            self.move(parents)
            return
        moved = np.flatnonzero(parents != np.arange(len(parents)))
        origins, used = parents[moved], self.longest
        for cache in self.caches:
            cache[moved, :, :used] = cache[origins, :, :used]
        self.set_lengths(self.lengths[parents], self.dropped[parents])

    def move(self, parents: np.ndarray) -> None:
        """Copy the rows `parents` to new caches of `capacity`."""
        old = self.caches
        self.set_lengths(self.lengths[parents], self.dropped[parents])
        self.bind(len(parents))
        for cache, old_cache in zip(self.caches, old):
            cache[:, :, : self.longest] = old_cache[parents, :, : self.longest]

    def source_inputs(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return nothing: there is no encoder."""
        return {}

    def close(self) -> None:
        """Do nothing: there are no shared buffers to release."""


class CpuBeamRows:
    """The `Rows` of one request of a seq2seq model, which all have the same length.

    Caches are never reordered: `cache_indirection` names, for each beam and position, the beam
    whose key and value are read.

    Args:
        session: the session of the decoder graph.
        spec: the inputs and outputs of that graph.
        source: the keys and values of the source of each layer, and the mask of the sources.
        rows: the number of inputs.
        capacity: the number of tokens for which the caches have room at first.
        memory: memory for the caches and logits.
    """

    all_logits = False
    max_step_tokens = 1
    shrinks = True

    def __init__(
        self,
        session: Session,
        spec: GraphSpec,
        source: dict[str, np.ndarray],
        rows: int,
        capacity: int,
        memory: FreeMemory,
    ):
        self.session = session
        self.spec = spec
        self.tensors = cache_tensors(spec)
        self.capacity = capacity
        self.memory = memory
        self.rows = rows
        self.source = source
        self.length = 0
        self.bind(1)

    def bind(
        self, beams: int, caches: list[np.ndarray] | None = None, logits: np.ndarray | None = None
    ) -> None:
        """Bind the graph for `beams` rows of each input, to `caches` and `logits` if both are
        passed, else to new ones."""
        sizes = {
            "rows": self.rows * beams,
            "batch_size": self.rows,
            "num_beams": beams,
            "max_length": self.capacity,
        }
        if caches is None or logits is None:
            *caches, logits = (
                self.memory.take(concrete_shape(tensor, sizes), tensor.dtype)
                for tensor in (*self.tensors, self.spec.outputs[0])
            )
        self.caches, self.logits = caches, logits
        values = ortvalues(self.source | by_name(self.tensors, caches))
        written = {"logits": ortvalue(logits)}
        self.bound = BoundGraph(self.session, self.spec, values, written, sizes)
        # of each position of a beam, the beam that wrote its key and value
        self.writers = self.bound.arrays["cache_indirection"]
        self.writers[:] = np.arange(beams)[:, None]
        self.bound.arrays["num_beams"][:] = beams
        self.inputs = np.arange(self.rows).repeat(beams)  # of each row

    def prefill(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Feed the prompts (rows, P) token by token and return the logits (rows, 1, V) after the
        last.

        The prompts must have no padding; `attention_mask` is ignored.
        """
        for place in range(input_ids.shape[1]):
            logits = self.step(input_ids[:, place : place + 1])
        return logits.copy()

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Feed one token per row, `tokens` (rows, 1), and return the logits (rows, 1, V). The next
        call overwrites the logits."""
        if self.length == self.capacity:
            self.grow()
        self.bound.run(input_ids=tokens, past_length=self.length)
        self.length += 1
        return self.logits[:, None]

    def select(self, parents: np.ndarray) -> None:
        """Let each row continue the row that `parents` (rows,) names: of fewer inputs, with more
        beams each, or with their beams in another order. Beams of an input share its source."""
        old = self.writers.shape[1]
        inputs = parents // old
        if len(inputs) != len(self.inputs) or (inputs != self.inputs).any():
            beams = len(inputs) // len(np.unique(inputs))
            if len(inputs) // beams < self.rows:
                self.keep(inputs[::beams])
            if beams != old:
                self.copy_to_new(beams, beams)
                return
            parents = self.inputs * beams + parents % beams
        used = self.writers.reshape(len(parents), -1)[:, : self.length]
        used[:] = used[parents]

    def grow(self) -> None:
        writers = self.writers
        self.capacity *= 2
        self.copy_to_new(writers.shape[1], 1)
        self.writers[:, :, : self.length] = writers

    def copy_to_new(self, beams: int, copies: int) -> None:
        """Bind the graph for `beams` rows of each input to new caches, with the used part of the
        old ones, each row `copies` times."""
        old = [*self.caches, self.logits]
        self.bind(beams)
        for cache, old_cache in zip(self.caches, old):
            used = old_cache[:, :, : self.length]
            cache[:, :, : self.length] = np.repeat(used, copies, axis=0)
        self.memory.give_back(old)

    def keep(self, inputs: np.ndarray) -> None:
        """Move the rows of `inputs` to the front of the caches, and run only these.

        The arrays of the source change too. No input may move to a larger index.
        """
        beams = self.writers.shape[1]
        writers = self.writers[inputs]
        self.rows = len(inputs)
        for name, array in self.source.items():
            move_to_front(array, inputs)
            self.source[name] = array[: self.rows]
        for cache in self.caches:
            by_input = cache.reshape(-1, beams, *cache.shape[1:])
            move_to_front(by_input[:, :, :, : self.length], inputs)
        rows = self.rows * beams
        self.bind(beams, [cache[:rows] for cache in self.caches], self.logits[:rows])
        self.writers[:] = writers

    def source_inputs(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the keys and values and the mask of the sources of `rows` (N,)."""
        return {name: array[self.inputs[rows]] for name, array in self.source.items()}

    def close(self) -> None:
        """Leave the memory of the caches and logits to the next rows of this thread."""
        self.memory.give_back([*self.caches, self.logits])


def move_to_front(array: np.ndarray, rows: np.ndarray) -> None:
    """Copy the `rows` of `array` to its front, in this order and in place. No row may move to a
    larger index."""
    for place in np.flatnonzero(rows != np.arange(len(rows))):
        array[place] = array[rows[place]]
