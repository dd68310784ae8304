"""The rows of the cpu target that start together. Graphs write in place to caches of a fixed
size."""

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...inference.config import RELATIVE_POSITIONS, cache_window
from ...inference.rows import (
    INITIAL_CAPACITY,
    GenerationRequest,
    Rows,
    SlotSize,
    check_memory,
    cross_states,
)
from ...inference.session import LoadedExport
from ...specs.caches import cache_tensors
from ...specs.graph_spec import concrete_shape
from .slots import BoundGraph, SlotRows, by_name, ortvalues

# initial capacity in tokens of caches of a seq2seq decoder, whose outputs are often short
SEQ2SEQ_CAPACITY = 32
# onnxruntime's matmul of one query sums the values of four keys at a time. A remainder of up to
# three keys is summed in another order.
KEY_GROUP = 4
# maximum bytes that a thread keeps for its next rows
MAX_KEPT_BYTES = 1 << 28


class FreeMemory(threading.local):
    """Memory of closed rows, which the next rows of the same thread use again.

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
    start_search = None  # the graphs have no search of their own

    def open(self, request: GenerationRequest) -> Rows:
        """Encode the source of `request`, if it has one, and return rows for its prompts.

        The prompts are not read yet.

        Raises:
            UsageError: if the request needs more memory than the machine has.
        """
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
        if request.source is None:
            return SlotRows(self.export, "decoder", SlotSize(rows, 0, capacity), window)
        ids, mask = map(pad_keys, request.source)
        arrays = cross_states(self.export.encode(ids, mask))
        arrays["encoder_attention_mask"] = mask
        has_graph = request.candidates > 0 and "candidates" in self.export.sessions
        role = "candidates" if has_graph else "decoder"
        count = min(request.candidates, self.export.config["vocab_size"])
        capacity = min(capacity, SEQ2SEQ_CAPACITY)
        return CpuBeamRows(self.export, role, arrays, capacity, count, self.memory)

    def open_slots(self, role: str, size: SlotSize) -> SlotRows:
        """Return rows over the step graph of `role` that may join while others run."""
        return SlotRows(self.export, role, size)


def pad_keys(array: np.ndarray) -> np.ndarray:
    """Return a copy of `array` (B, S), ids or mask of sources, with zeros up to a multiple of
    `KEY_GROUP` tokens. They keep sums in the same order for any length."""
    length = array.shape[1]
    padded = np.zeros((len(array), length + -length % KEY_GROUP), array.dtype)
    padded[:, :length] = array
    return padded


def bounding_window(config: dict) -> int | None:
    """Return the number of last tokens that the caches must keep, or `None` for all.

    It is that of `cache_window`. It is `None` with relative positions too: their distances are
    counted in cache slots, so no token may move.
    """
    is_relative = config["position_embedding_type"] in RELATIVE_POSITIONS
    return None if is_relative else cache_window(config)


class CpuBeamRows:
    """The `Rows` of one request of a seq2seq model, which all have the same length.

    Caches are never reordered: `cache_indirection` names, for each beam and position, the beam
    whose key and value are read.

    Args:
        export: the loaded export.
        role: the role of the graph, "decoder" or "candidates".
        source: the keys and values of the source of each layer, and the mask of the sources.
        capacity: the number of tokens for which the caches have room at first.
        count: the number of best tokens of a row that the graph "candidates" returns.
        memory: memory for the caches and the other outputs.
    """

    all_logits = False
    places = None
    shrinks = True

    def __init__(
        self,
        export: LoadedExport,
        role: str,
        source: dict[str, np.ndarray],
        capacity: int,
        count: int,
        memory: FreeMemory,
    ):
        self.session, self.spec = export.sessions[role], export.specs[role]
        self.tensors = cache_tensors(self.spec)
        self.results = self.spec.outputs[: -len(self.tensors)]  # without caches
        self.capacity = capacity
        self.count = count
        self.memory = memory
        self.rows = len(source["encoder_attention_mask"])  # inputs
        self.source = source
        self.length = 0
        self.bind(1)

    def bind(self, beams: int, arrays: Sequence[np.ndarray] = ()) -> None:
        """Bind the graph for `beams` rows of each input, to `arrays` for its caches and results if
        they are passed, else to new ones."""
        sizes = {
            "rows": self.rows * beams,
            "batch_size": self.rows,
            "num_beams": beams,
            "max_length": self.capacity,
            "count": self.count,
        }
        self.arrays = arrays or [
            self.memory.take(concrete_shape(tensor, sizes), tensor.dtype)
            for tensor in (*self.tensors, *self.results)
        ]
        self.caches = self.arrays[: len(self.tensors)]
        self.scores, *tokens = self.arrays[len(self.tensors) :]
        self.best_tokens = tokens[0] if tokens else None
        values = ortvalues(self.source | by_name(self.tensors, self.caches))
        written = ortvalues(by_name(self.results, [self.scores, *tokens]))
        self.bound = BoundGraph(self.session, self.spec, values, written, sizes)
        if tokens:
            self.bound.arrays["count"][:] = self.count
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
        return logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Feed one token per row, `tokens` (rows, 1), and return the logits (rows, 1, V), or log p
        (rows, 1, count) of the best tokens. The next call overwrites them."""
        if self.length == self.capacity:
            self.grow()
        self.bound.run(input_ids=tokens, past_length=self.length)
        self.length += 1
        return self.scores[:, None]

    def select(self, parents: np.ndarray) -> None:
        """Let each row continue the row that `parents` (rows,) names: of fewer inputs, with more
        beams each, or with their beams in another order. Beams of an input share its source."""
        old = self.writers.shape[1]
        inputs = parents // old
        if len(inputs) != len(self.inputs) or (inputs != self.inputs).any():
            # np.unique would import numpy.ma, which takes as long as opening a small graph
            beams = len(inputs) // (1 + int(np.count_nonzero(np.diff(inputs))))
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
        old = self.arrays
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
        caches = [cache.reshape(-1, beams, *cache.shape[1:]) for cache in self.caches]
        used = [cache[:, :, :, : self.length] for cache in caches]
        self.rows = len(inputs)
        moved = np.flatnonzero(inputs != np.arange(self.rows))
        for array in (*self.source.values(), *used):
            array[moved] = array[inputs[moved]]
        self.source = {name: array[: self.rows] for name, array in self.source.items()}
        self.bind(beams, [array[: self.rows * beams] for array in self.arrays])
        self.writers[:] = writers

    def source_inputs(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the keys and values and the mask of the sources of `rows` (N,)."""
        return {name: array[self.inputs[rows]] for name, array in self.source.items()}

    def close(self) -> None:
        """Leave the memory of the caches and results to the next rows of this thread."""
        self.memory.give_back(self.arrays)
