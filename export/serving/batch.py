"""Continuous batching: rows join and leave the running batch between two steps.

Each row has a slot, its place on the first axis of the caches, so that `cache[:n]` binds the first n without a copy. A step
gives each of them its next token, at its own position and over its own source. No operator of the step looks across rows, so a
row's logits have the same bits whatever runs beside it.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import onnxruntime

from ..runtime.decoder import next_input_name, position_bytes
from ..runtime.runtime import Runtime
from ..targets.spec import TensorSpec, shape_of
from .runs import Run
from .sizing import chunk_length

TOTALS = ("total_length", "total_source_length")  # inputs that are no axis of the rows
ENCODED_TOKENS = 512  # of the sources that are read together between two steps, padding included


class Batch(Protocol):
    """What a lane drives: the runs that it takes part in, each with one row or several."""

    running: list[Run]

    @property
    def unread(self) -> Collection[Run]:
        """Which have joined, and whose prompts are not read yet."""

    @property
    def room(self) -> int:
        """Rows that can join now."""

    def takes(self, run: Run, beside: Sequence[Run]) -> bool:
        """Whether `run` can join now, together with those `beside` it."""

    def join(self, runs: list[Run]) -> None:
        """Reads what they begin with, as far as that goes between two steps."""

    def step(self) -> None:
        """One token more of every run."""

    def leave(self, run: Run) -> None:
        """Frees the rows of a run, whether it has ended or not."""


@dataclass(frozen=True)
class Room:
    """What slots hold: `rows` of them, `source` tokens that are read (0 for a decoder) and `length` tokens that are fed."""

    rows: int
    source: int
    length: int


@dataclass
class Binding:
    """Inputs and outputs of the step, bound once. What they are bound to must live as long."""

    io: onnxruntime.IOBinding
    values: list[onnxruntime.OrtValue] = field(default_factory=list)

    def put(self, tensor: TensorSpec, array: np.ndarray, is_input: bool) -> None:
        value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        self.values.append(value)
        bind = self.io.bind_ortvalue_input if is_input else self.io.bind_ortvalue_output
        bind(tensor.name, value)


class SlotBatch:
    """The `Batch` of an export that has a step. Several share one `runtime`, opened with `continuous=True`."""

    def __init__(self, runtime: Runtime, room: Room):
        assert runtime.step is not None
        self.runtime = runtime
        self.capacity = room.rows
        self.session = runtime.sessions[runtime.step]
        self.spec = runtime.specs[runtime.step]
        self.encodes = "encoder" in runtime.sessions
        self.chunk = chunk_length(runtime.config)
        self.arrays = {tensor.name: np.zeros(slot_shape(tensor, room), tensor.dtype) for tensor in self.spec.inputs}
        self.logits = np.zeros((room.rows, runtime.config["vocab_size"]), np.float32)
        names = [tensor.name for tensor in self.spec.inputs if tensor.name.startswith("past_key_values")]
        self.sources = [self.arrays[name] for name in names if ".encoder." in name]
        self.caches = [self.arrays[name] for name in names if ".encoder." not in name]
        self.lengths = self.arrays["last_position"]  # tokens in the cache before the one that is fed
        self.last_source = self.arrays.get("last_source_position")
        self.rows: list[Run | None] = []  # by slot; `None` where one has left, until another joins or the next step
        self.running: list[Run] = []
        self.unread: deque[Run] = deque()  # whose prompts are to be read; that of the first is in the last slot as far as it is
        self.reserved = 0  # rows that running runs will have after their first step
        self.bindings = [self.bound(count) for count in range(1, room.rows + 1)]

    # --------------------------------------------------------------------------------------------------- joining and leaving

    @property
    def room(self) -> int:
        """As `Batch`."""
        taken = len(self.rows) - self.rows.count(None) + self.reserved + sum(other.job.rows for other in self.unread)
        return self.capacity - taken

    def takes(self, run: Run, beside: Sequence[Run]) -> bool:
        """As `Batch`: there must be slots, and what is read between two steps is limited."""
        if sum(other.job.rows for other in beside) + run.job.rows > self.room:
            return False
        sources = [len(other.job.source or ()) for other in (*beside, run)]
        return not beside or max(sources) * len(sources) <= ENCODED_TOKENS

    def join(self, runs: list[Run]) -> None:
        """As `Batch`."""
        ready = [run for run in runs if not run.reads_prompt]
        states = self.encode(ready) if self.encodes and ready else {}
        for run in ready:
            self.start(run, states)
        self.unread.extend(run for run in runs if run.reads_prompt)
        room = self.chunk
        while self.unread and room > 0:
            room -= self.read_chunk(self.unread[0])

    def encode(self, runs: list[Run]) -> dict[Run, list[np.ndarray]]:
        """What attention over the source of each reads: for each array of `sources` (H, S, d)."""
        sources = [run.job.source or () for run in runs]
        mask = np.zeros((len(runs), max(map(len, sources))), np.int64)
        ids = np.zeros_like(mask)
        for row, source in enumerate(sources):
            ids[row, : len(source)] = source
            mask[row, : len(source)] = 1
        names = [tensor.name for tensor in self.runtime.specs["encoder"].outputs]
        outputs = self.runtime.sessions["encoder"].run(names, {"input_ids": ids, "attention_mask": mask})
        return {
            run: [states[row, :, : len(source)] for states in outputs] for row, (run, source) in enumerate(zip(runs, sources))
        }

    def start(self, run: Run, states: dict[Run, list[np.ndarray]]) -> int:
        """`run` takes part in the next step, in the slot that is returned."""
        slot = self.new_slot(run)
        self.put_source(run, slot, states)
        self.lengths[slot] = run.fed
        self.running.append(run)
        self.reserved += run.job.rows - 1
        run.is_expanded = run.job.rows == 1
        return slot

    def put_source(self, run: Run, slot: int, states: dict[Run, list[np.ndarray]]) -> None:
        if run in states and self.last_source is not None:
            for cache, own in zip(self.sources, states[run]):
                cache[slot, :, : own.shape[1]] = own
                self.last_source[slot] = own.shape[1] - 1

    def new_slot(self, run: Run) -> int:
        slot = self.rows.index(None) if None in self.rows else len(self.rows)
        self.rows[slot : slot + 1] = [run]
        run.slots.append(slot)
        return slot

    def read_chunk(self, run: Run) -> int:
        """The next tokens of a prompt, which are counted. All but its last one are read here, that one is fed in the next step,
        in another slot: the last one, where prompts are read, is free again."""
        slot = self.capacity - 1
        source = [run.job.source] if run.job.source is not None else []
        if not run.fed:
            self.close_gaps()  # the last slot may have a row
            self.put_source(run, slot, self.encode([run]) if source else {})
        # Attention over a source takes no more queries than the source has tokens.
        most = min([self.chunk, *map(len, source)])
        tokens = run.job.prompt[run.fed : min(run.fed + most, len(run.job.prompt) - 1)]
        self.read(slot, run.fed, tokens)
        run.fed += len(tokens)
        self.lengths[slot] = run.fed
        if run.fed == len(run.job.prompt) - 1:
            self.unread.popleft()
            place = self.start(run, {})
            if place != slot:
                self.copy(slot, place, run.fed)
        return len(tokens)

    def read(self, slot: int, done: int, tokens: Sequence[int]) -> None:
        """Feeds `tokens` behind the `done` first ones of one slot."""
        end = done + len(tokens)
        only = slice(slot, slot + 1)
        values = {
            "input_ids": np.array([tokens]),
            "position_ids": np.arange(done, end)[None],
            "last_position": np.array([end - 1], np.int32),
            "total_length": np.array([end], np.int32),
        }
        if self.last_source is not None:
            values["last_source_position"] = self.last_source[only]
            values["total_source_length"] = self.last_source[only] + 1
        self.session.run_bound(self.bind(only, values).io)

    def leave(self, run: Run) -> None:
        """As `Batch`."""
        if run in self.unread:
            self.unread.remove(run)
            return
        self.running.remove(run)
        if not run.is_expanded:
            self.reserved -= run.job.rows - 1
        for slot in run.slots:
            self.rows[slot] = None
        run.slots = []

    def close_gaps(self) -> None:
        """The last rows move into slots that have become free."""
        while None in self.rows:
            if (moved := self.rows.pop()) is not None:
                last = len(self.rows)
                slot = self.rows.index(None)
                self.copy(last, slot, int(self.lengths[last]))
                moved.slots[moved.slots.index(last)] = slot
                self.rows[slot] = moved

    def copy(self, source: int, target: int, used: int) -> None:
        """A row, with `used` tokens in its cache, into another slot."""
        for cache in self.caches:
            cache[target, :, :used] = cache[source, :, :used]
        if self.last_source is not None:
            end = int(self.last_source[source]) + 1
            for cache in self.sources:
                cache[target, :, :end] = cache[source, :, :end]
            self.last_source[target] = self.last_source[source]
        self.lengths[target] = self.lengths[source]

    # ------------------------------------------------------------------------------------------------------------- the step

    def step(self) -> None:
        """As `Batch`."""
        self.close_gaps()
        count = len(self.rows)
        if not count:
            return
        ids = self.arrays["input_ids"]
        tokens = [0] * count
        for run in self.running:
            for slot, token in zip(run.slots, run.next_tokens):
                tokens[slot] = token
        ids[:count, 0] = tokens
        lengths = self.lengths[:count]
        self.arrays["position_ids"][:count, 0] = lengths
        self.arrays["total_length"][0] = lengths.max() + 1
        if self.last_source is not None:
            self.arrays["total_source_length"][0] = self.last_source[:count].max() + 1
        self.session.run_bound(self.bindings[count - 1].io)
        lengths += 1
        logits = self.logits[:count]
        likeliest = logits.argmax(axis=1).tolist()
        for run in list(self.running):
            if run.is_greedy:
                run.take(likeliest[run.slots[0]])
            else:
                self.advance(run, logits)

    def advance(self, run: Run, logits: np.ndarray) -> None:
        """The next tokens of a run that is more than greedy search, and where it becomes several rows, or moves among them."""
        parents = run.advance(logits[run.slots])
        if not run.is_expanded and run.has_begun:
            self.expand(run)
        elif parents is not None:
            self.move(run, parents)

    def move(self, run: Run, parents: list[int]) -> None:
        """Each row of `run` goes on from that of its parent."""
        moved = [(row, parent) for row, parent in enumerate(parents) if row != parent]
        if moved:
            used = int(self.lengths[run.slots[0]])
            targets = [run.slots[row] for row, _ in moved]
            sources = [run.slots[parent] for _, parent in moved]
            for cache in self.caches:
                cache[targets, :, :used] = cache[sources, :, :used]

    def expand(self, run: Run) -> None:
        """The row of `run` becomes those of its beams, or of its samples, which are runs of their own."""
        [first] = run.slots
        run.is_expanded = True
        self.reserved -= run.job.rows - 1
        for other in run.others():
            self.copy(first, self.new_slot(other), int(self.lengths[first]))
            if other is not run:
                self.running.append(other)

    def bound(self, count: int) -> Binding:
        """Of the first `count` slots."""
        totals: dict[str, np.ndarray] = {name: self.arrays[name] for name in TOTALS if name in self.arrays}
        return self.bind(slice(count), totals)

    def bind(self, slots: slice, values: dict[str, np.ndarray]) -> Binding:
        """The caches and logits of `slots`, and `values` of the other inputs."""
        binding = Binding(self.session.io_binding())
        for tensor in self.spec.inputs:
            array = values[tensor.name] if tensor.name in values else self.arrays[tensor.name][slots]
            binding.put(tensor, array, is_input=True)
        binding.put(self.spec.outputs[0], self.logits[slots], is_input=False)
        for tensor in self.spec.outputs[1:]:
            binding.put(tensor, self.arrays[next_input_name(tensor.name)][slots], is_input=False)
        return binding


def slot_shape(tensor: TensorSpec, room: Room) -> list[int]:
    sizes = {"rows": room.rows, "target_length": 1, "max_length": room.length, "max_source": room.source}
    whole = {"batch_size": room.rows, "source_length": room.source, "past_source_length": room.source}  # without a step
    return shape_of(tensor, sizes | whole)


def slot_bytes(runtime: Runtime, room: Room) -> int:
    """Of the caches of one slot."""
    spec = runtime.specs[runtime.step or "decoder"]
    sources = [tensor for tensor in spec.inputs if ".encoder." in tensor.name]
    source = sum(4 * int(np.prod(slot_shape(tensor, Room(1, 1, 1)))) for tensor in sources)
    return room.length * position_bytes(spec) + room.source * source
