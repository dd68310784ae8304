"""The rows of the cpu target that start together. Graphs write in place to caches of a fixed
size."""

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import onnxruntime

from ...inference.config import RELATIVE_POSITIONS, cache_window
from ...inference.inputs import move_padding
from ...inference.options import Options
from ...inference.rows import (
    INITIAL_CAPACITY,
    GenerationRequest,
    LoadedExport,
    Rows,
    SlotSize,
    check_memory,
    cross_states,
    next_input_name,
    position_bytes,
)
from ...inference.session import Session
from ...specs.graph_spec import GraphSpec, TensorSpec, concrete_shape
from .slots import SlotRows

# initial capacity in tokens of caches of a seq2seq decoder, whose outputs are often short
SEQ2SEQ_CAPACITY = 32
# maximum bytes that a thread keeps for its next rows
MAX_KEPT_BYTES = 1 << 28
# onnxruntime's matmul of one query sums the values of four keys at a time. A remainder of up to
# three keys is summed in another order.
KEY_GROUP = 4


class FreeMemory(threading.local):
    """Memory of closed decoders, which the next decoders of the same thread use again.

    The system fills each page of new memory with zeros at the first write. For batches that follow
    each other, that takes a tenth of the time of beam search.
    """

    def __init__(self) -> None:
        self.free: list[np.ndarray] = []  # of bytes

    def take(self, shape: list[int], dtype: str) -> np.ndarray:
        """Return an array of any finite values, from the smallest free memory that holds it, or
        else from new memory."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        fitting = [place for place, memory in enumerate(self.free) if len(memory) >= size]
        if fitting:
            memory = self.free.pop(min(fitting, key=lambda place: len(self.free[place])))
        else:
            memory = np.zeros(size, np.uint8)
        return memory[:size].view(dtype).reshape(shape)

    def give_back(self, arrays: Iterable[np.ndarray]) -> None:
        """Keep the memory of `arrays` from `take`, or of parts of them, up to `MAX_KEPT_BYTES`."""
        kept = sum(map(len, self.free))
        for array in arrays:
            assert array.base is not None
            kept += len(array.base)
            if kept <= MAX_KEPT_BYTES:
                self.free.append(array.base)


@dataclass(frozen=True)
class CpuRowsFactory:
    """The `RowsFactory` of one loaded export."""

    export: LoadedExport
    memory: FreeMemory = field(default_factory=FreeMemory)
    supports_empty_prompts = False

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
            position_bytes(spec) * rows * capacity,
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

    def open_slots(self, role: str, size: SlotSize, max_tokens: int) -> SlotRows:
        """Return rows over the step graph of `role` that may join while others run."""
        return SlotRows(self.export, role, size, max_tokens)

    def search_key(self, options: Options) -> None:
        """Return `None`: the graphs have no search of their own, so searches run in numpy."""

    def start_search(self, request: GenerationRequest) -> None:
        """Return `None`: the graphs have no search of their own, so the caller searches in
        numpy."""


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
        self.capacity = capacity
        self.window = window
        self.lengths = self.dropped = np.zeros(rows, np.int64)
        self.bound = self.bind(rows, 1, {})

    def bind(self, rows: int, length: int, caches: dict) -> "BoundGraph":
        sizes = {"rows": rows, "target_length": length, "max_length": self.capacity}
        return BoundGraph(self.session, self.spec, sizes, caches)

    def prefill(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Feed the prompts (rows, P) and return the logits (rows, 1, V) after the last token of
        each.

        Padding, where `attention_mask` is 0, may stand on either side.
        """
        ids, mask = move_padding(input_ids, attention_mask, "right", 0)
        rows, length = ids.shape
        if length > self.capacity:
            return self.prefill_parts(ids, mask.sum(axis=1))
        self.lengths = mask.sum(axis=1)
        prompt = self.bind(rows, length, self.bound.caches)
        logits = prompt.run(
            input_ids=ids,
            position_ids=np.arange(length),
            last_position=self.lengths - 1,
            total_length=length,
        )
        return logits[:, None].copy()

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
                last = decoder.append(
                    ids[row : row + 1, start : min(start + INITIAL_CAPACITY, length)]
                )
            logits.append(last.copy())  # a copy, because the decoder reuses the array
            alone.append((decoder.lengths[0], decoder.dropped[0]))
            for name, (cache, _) in self.bound.caches.items():
                cache[row] = decoder.bound.caches[name][0][0]
        self.lengths, self.dropped = np.array(alone).T
        return np.stack(logits)

    def append(self, tokens: np.ndarray) -> np.ndarray:
        """Feed `tokens` (rows, T) and return the logits (rows, V) after the last of each row.

        T must be 1 if there are several rows. With a T of 1, the next call overwrites the logits.
        """
        count = tokens.shape[1]
        self.reserve(count)
        places = self.lengths[:, None] + np.arange(count)
        self.lengths = self.lengths + count
        bound = self.bound if count == 1 else self.bind(len(tokens), count, self.bound.caches)
        logits = bound.run(
            input_ids=tokens,
            position_ids=places + self.dropped[:, None],
            last_position=self.lengths - 1,
            total_length=self.lengths.max(),
        )
        return logits if count == 1 else logits.copy()  # a copy, because the binding is freed

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Feed one token per row, `tokens` (rows, 1), and return the logits (rows, 1, V)."""
        return self.append(tokens)[:, None]

    def crop(self, count: int) -> None:
        """Remove the last `count` tokens of each row. The caches behind its length are never
        read."""
        self.lengths = self.lengths - count

    def reserve(self, count: int) -> None:
        """Make room in the caches for `count` further tokens of each row."""
        while self.lengths.max() + count > self.capacity:
            self.grow_caches()

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
        for cache, _ in self.bound.caches.values():
            for row, first in enumerate(firsts):
                cache[row, :, :seen] = cache[row, :, first : first + seen]
        self.lengths = self.lengths - firsts
        self.dropped = self.dropped + firsts

    def select(self, parents: np.ndarray) -> None:
        """Let each row continue the row that `parents` (rows,) names.

        If the number of rows stays, only changed rows and used slots are copied.
        """
        if len(parents) != len(self.lengths):
            self.move(parents)
            return
        moved = np.flatnonzero(parents != np.arange(len(parents)))
        used = self.lengths.max()
        for cache, _ in self.bound.caches.values():
            cache[moved, :, :used] = cache[parents[moved], :, :used]
        self.lengths, self.dropped = self.lengths[parents], self.dropped[parents]

    def move(self, parents: np.ndarray) -> None:
        """Copy the rows `parents` to new caches of `capacity`."""
        old = self.bound.caches
        self.lengths, self.dropped = self.lengths[parents], self.dropped[parents]
        self.bound = self.bind(len(parents), 1, {})
        used = self.lengths.max()
        for name, (cache, _) in self.bound.caches.items():
            cache[:, :, :used] = old[name][0][parents, :, :used]

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
        self.capacity = capacity
        self.memory = memory
        self.rows = rows
        self.source = source
        self.length = 0
        self.bind(1)

    def bind(
        self, beams: int, caches: dict | None = None, logits: np.ndarray | None = None
    ) -> None:
        """Bind the graph for `beams` rows of each input, to `caches` and `logits` if both are
        passed, else to new ones."""
        sizes = {
            "rows": self.rows * beams,
            "batch_size": self.rows,
            "num_beams": beams,
            "max_length": self.capacity,
        }
        source = {name: to_ortvalue(array) for name, array in self.source.items()}
        if caches is None or logits is None:
            caches, logits = self.allocate(sizes)
        self.bound = BoundGraph(self.session, self.spec, sizes, caches, source, logits)
        # of each position of a beam, the beam that wrote its key and value
        self.writers = self.bound.inputs["cache_indirection"]
        self.writers[:] = np.arange(beams)[:, None]
        self.bound.inputs["num_beams"][:] = beams

    def allocate(self, sizes: dict[str, int]) -> tuple[dict, np.ndarray]:
        """Return `{name: (array, OrtValue)}` of the caches of decoder tokens, and the logits."""
        caches = {}
        for tensor in self.spec.inputs:
            if tensor.name.startswith("past_key_values") and tensor.name not in self.source:
                array = self.memory.take(concrete_shape(tensor, sizes), tensor.dtype)
                caches[tensor.name] = array, to_ortvalue(array)
        logits = self.spec.outputs[0]
        return caches, self.memory.take(concrete_shape(logits, sizes), logits.dtype)

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
        logits = self.bound.run(input_ids=tokens, past_length=self.length)
        self.length += 1
        return logits[:, None]

    def select(self, parents: np.ndarray) -> None:
        """Let each row continue the row that `parents` (rows,) names: of fewer inputs, with more
        beams each, or with their beams in another order. Beams of an input share its source."""
        old = self.writers.shape[1]
        beams = len(parents) // len(np.unique(parents // old))
        if len(parents) // beams < self.rows:
            self.keep(parents[::beams] // old)
        if beams != old:
            self.expand(beams)
            return
        used = self.writers[:, :, : self.length]
        used[:] = np.take_along_axis(used, (parents % beams).reshape(-1, beams, 1), axis=1)

    def expand(self, beams: int) -> None:
        """Give each input so many rows, copies of its only one."""
        old = self.bound
        self.bind(beams)
        self.fill(old, beams)

    def grow(self) -> None:
        old = self.bound
        writers = self.writers
        self.capacity *= 2
        self.bind(writers.shape[1])
        self.writers[:, :, : self.length] = writers
        self.fill(old, 1)

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
        caches, rows = {}, self.rows * beams
        for name, (cache, _) in self.bound.caches.items():
            by_input = cache.reshape(-1, beams, *cache.shape[1:])
            move_to_front(by_input[:, :, :, : self.length], inputs)
            caches[name] = cache[:rows], to_ortvalue(cache[:rows])
        self.bind(beams, caches, self.bound.logits[:rows])
        self.writers[:] = writers

    def fill(self, old: "BoundGraph", expand_size: int) -> None:
        """Copy the used part of the caches of `old` into the new ones, each row `expand_size`
        times. Then release `old`."""
        for name, (cache, _) in self.bound.caches.items():
            used = old.caches[name][0][:, :, : self.length]
            cache[:, :, : self.length] = np.repeat(used, expand_size, axis=0)
        self.release(old)

    def release(self, bound: "BoundGraph") -> None:
        """Leave the memory of the caches and logits of `bound` to other bindings of this thread."""
        self.memory.give_back([bound.logits, *(cache for cache, _ in bound.caches.values())])

    def close(self) -> None:
        """Leave the memory of the caches and logits to the next decoder of this thread."""
        self.release(self.bound)


def move_to_front(array: np.ndarray, rows: np.ndarray) -> None:
    """Copy the `rows` of `array` to its front, in this order and in place. No row may move to a
    larger index."""
    for place in np.flatnonzero(rows != np.arange(len(rows))):
        array[place] = array[rows[place]]


class BoundGraph:
    """A decoder graph whose inputs and outputs are bound once, so a step allocates no memory.

    Its attributes are `inputs` (`{name: array}`, written before a run), `caches` and `logits`.

    Args:
        session: the session of the graph.
        spec: its inputs and outputs.
        sizes: the size of each named axis.
        caches: `{name: (array, OrtValue)}` of the same memory; those missing are created as zeros.
        source: `{name: OrtValue}` of the inputs that do not change, if any.
        logits: the array that the graph writes, (rows, V); `None` creates one.
    """

    def __init__(
        self,
        session: Session,
        spec: GraphSpec,
        sizes: dict[str, int],
        caches: dict,
        source: dict | None = None,
        logits: np.ndarray | None = None,
    ):
        source = source or {}
        self.session = session
        self.binding = session.io_binding()
        self.inputs: dict[str, np.ndarray] = {}
        self.caches = dict(caches)
        for tensor in spec.inputs:
            if tensor.name in source:
                bound = source[tensor.name]
            elif tensor.name.startswith("past_key_values"):
                if tensor.name not in self.caches:
                    self.caches[tensor.name] = zeros(tensor, sizes)
                bound = self.caches[tensor.name][1]
            else:
                self.inputs[tensor.name], bound = zeros(tensor, sizes)
            self.binding.bind_ortvalue_input(tensor.name, bound)
        self.logits = zeros(spec.outputs[0], sizes)[0] if logits is None else logits
        self.binding.bind_ortvalue_output("logits", to_ortvalue(self.logits))
        for tensor in spec.outputs[1:]:
            self.binding.bind_ortvalue_output(
                tensor.name, self.caches[next_input_name(tensor.name)][1]
            )

    def run(self, **values: np.ndarray | int) -> np.ndarray:
        """Copy `values` to the inputs of these names, run the graph and return its logits.

        Inputs that are not passed keep their values. Each call returns the same array.
        """
        for name, array in values.items():
            self.inputs[name][...] = array
        self.session.run_bound(self.binding)
        return self.logits


def zeros(tensor: TensorSpec, sizes: dict[str, int]) -> tuple[np.ndarray, onnxruntime.OrtValue]:
    """Return an array of zeros for `tensor`, and an `OrtValue` that uses the same memory.

    `sizes` are the sizes of the named axes of `tensor`.
    """
    array = np.zeros(concrete_shape(tensor, sizes), tensor.dtype)
    return array, to_ortvalue(array)


def to_ortvalue(array: np.ndarray) -> onnxruntime.OrtValue:
    """Return the `OrtValue` of the memory of `array`, or of a copy if it is not contiguous."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
