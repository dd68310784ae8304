"""Continuous batching: rows join and leave the running batch between two steps.

Each row has a slot, an index on the first axis of the caches, so `cache[:n]` binds the first n
without a copy. A decode step computes one token per row, at its own position and over its own
source. No operator of the step graph mixes rows, so the logits of a row have the same bits in any
batch.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..inference.decoder import next_input_name, position_bytes
from ..inference.export_info import ExportInfo
from ..inference.inputs import bucket_by_length, pad_sequences
from ..model import OnnxModel
from ..specs.graph_spec import TensorSpec, concrete_shape
from .capacity import chunk_length, sources_length
from .runs import Run

if TYPE_CHECKING:
    import onnxruntime

TOTALS = ("total_length", "total_source_length")  # inputs without a rows axis


class Batch(Protocol):
    """A batch of sequences that a worker steps. Each sequence has one or several rows."""

    running: list[Run]

    @property
    def unread(self) -> Collection[Run]:
        """Sequences that have joined and whose prompts are not prefilled yet."""

    @property
    def room(self) -> int:
        """Number of rows that can join now."""

    def takes(self, run: Run, beside: Sequence[Run]) -> bool:
        """Return whether `run` can join now together with the sequences `beside` it."""

    def join(self, runs: list[Run]) -> None:
        """Add sequences and prefill their prompts, as far as allowed between two steps."""

    def step(self) -> None:
        """Generate one token of every sequence."""

    def leave(self, run: Run) -> None:
        """Remove a sequence and free its rows, whether it is finished or not."""


@dataclass(frozen=True)
class Room:
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

    def __init__(self, model: OnnxModel, room: Room):
        info, step = model.info, model.info.step
        assert step is not None
        self.model = model
        self.capacity = room.rows
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
            tensor.name: np.zeros(slot_shape(tensor, room), tensor.dtype) for tensor in others
        }
        self.logits = np.zeros((room.rows, info.config["vocab_size"]), np.float32)
        self.caches = self.stacked(
            [tensor for tensor in caches if ".encoder." not in tensor.name], room
        )
        self.sources = self.stacked(
            [tensor for tensor in caches if ".encoder." in tensor.name], room
        )
        # tokens in the cache before the current one
        self.lengths = self.arrays["last_position"]
        # empty for a decoder-only model
        self.last_source = self.arrays.get("last_source_position", self.lengths[:0])
        # by slot; `None` is a free slot, until a sequence joins or the next step
        self.rows: list[Run | None] = []
        self.running: list[Run] = []
        # sequences to prefill; the first is being prefilled in the last slot
        self.unread: deque[Run] = deque()
        self.reserved = 0  # further rows that running sequences get with their first new token
        self.bindings = [self.bound(count) for count in range(1, room.rows + 1)]

    def stacked(self, caches: list[TensorSpec], room: Room) -> np.ndarray:
        """Return all `caches` as one array (caches, rows, H, tokens, d). Each cache is a view, and
        a row of all caches is copied at once."""
        array = np.zeros(
            [len(caches), *(slot_shape(caches[0], room) if caches else [])], np.float32
        )
        self.arrays |= {tensor.name: cache for tensor, cache in zip(caches, array)}
        return array

    # -------------------------------------------------------------------------- joining and leaving

    @property
    def room(self) -> int:
        """Number of free slots that are not reserved."""
        taken = (
            len(self.rows)
            - self.rows.count(None)
            + self.reserved
            + sum(other.job.rows for other in self.unread)
        )
        return self.capacity - taken

    def takes(self, run: Run, beside: Sequence[Run]) -> bool:
        """Return whether slots are free and the sources fit into one encoder batch."""
        if sum(other.job.rows for other in beside) + run.job.rows > self.room:
            return False
        sources = [len(other.job.source or ()) for other in (*beside, run)]
        return not beside or max(sources) * len(sources) <= self.sources_length

    def join(self, runs: list[Run]) -> None:
        """Encode the sources, or prefill at most `chunk` prompt tokens."""
        if self.encodes and runs:
            self.read_sources(runs)
            return
        for run in runs:
            if run.reads_prompt:
                self.unread.append(run)
            else:
                self.start(run)
        room = self.chunk
        while self.unread and room > 0:
            room -= self.read_chunk(self.unread[0])

    def read_sources(self, runs: list[Run]) -> None:
        """Encode sources of similar length together. Decode steps feed the decoder prompts."""
        ids, mask = pad_sequences([list(run.job.source or ()) for run in runs], 0)
        groups = bucket_by_length(mask, self.sources_length)
        states = [self.encode(ids[rows, :length], mask[rows, :length]) for rows, length in groups]
        for run in runs:
            run.read_one_by_one()
        slots = np.array([self.start(run) for run in runs])
        for (rows, length), each in zip(groups, states):
            self.sources[:, slots[rows], :, :length] = each
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
        given = {"input_ids": ids, "attention_mask": mask}
        binding = Binding(session.io_binding())
        for tensor in spec.inputs:
            binding.put(tensor, given[tensor.name], is_input=True)
        for tensor, array in zip(spec.outputs, states):
            binding.put(tensor, array, is_input=False)
        session.run_bound(binding.io)
        return states

    def start(self, run: Run) -> int:
        """Add `run` to the next step and return its slot."""
        slot = self.new_slot(run)
        self.lengths[slot] = run.fed
        self.running.append(run)
        self.reserved += run.job.rows - 1
        run.is_expanded = run.job.rows == 1
        return slot

    def new_slot(self, run: Run) -> int:
        slot = self.rows.index(None) if None in self.rows else len(self.rows)
        self.rows[slot : slot + 1] = [run]
        run.slots.append(slot)
        return slot

    def read_chunk(self, run: Run) -> int:
        """Prefill the next chunk of a prompt in the last slot and return its number of tokens.

        The next decode step feeds the prompt's last token. The sequence is then in another slot, so
        the last slot is free for the next prompt."""
        slot = self.capacity - 1
        if not run.fed:
            self.close_gaps()  # the last slot may be in use
        tokens = run.job.prompt[run.fed : min(run.fed + self.chunk, len(run.job.prompt) - 1)]
        self.read(slot, run.fed, tokens)
        run.fed += len(tokens)
        self.lengths[slot] = run.fed
        if run.fed == len(run.job.prompt) - 1:
            self.unread.popleft()
            place = self.start(run)
            if place != slot:
                self.copy([slot], [place])
        return len(tokens)

    def read(self, slot: int, done: int, tokens: Sequence[int]) -> None:
        """Prefill `tokens` of one slot after its first `done` tokens."""
        end = done + len(tokens)
        values = {
            "input_ids": np.array([tokens]),
            "position_ids": np.arange(done, end)[None],
            "last_position": np.array([end - 1], np.int32),
            "total_length": np.array([end], np.int32),
        }
        self.session.run_bound(self.bind(slice(slot, slot + 1), values).io)

    def leave(self, run: Run) -> None:
        """Remove a sequence. `close_gaps` moves other rows into its slots later."""
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
        """Move the last rows into free slots."""
        sources, targets = [], []
        while None in self.rows:
            if (moved := self.rows.pop()) is not None:
                sources.append(len(self.rows))
                targets.append(self.rows.index(None))
                moved.slots[moved.slots.index(sources[-1])] = targets[-1]
                self.rows[targets[-1]] = moved
        if sources:
            self.copy(sources, targets)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy rows from slots `sources` to other slots `targets`. One by one takes half the time
        of a joint copy."""
        for source, target in zip(sources, targets):
            used = self.lengths[source]
            self.caches[:, target, :, :used] = self.caches[:, source, :, :used]
            if self.encodes:
                used = self.last_source[source] + 1
                self.sources[:, target, :, :used] = self.sources[:, source, :, :used]
        if self.encodes:
            self.last_source[targets] = self.last_source[sources]
        self.lengths[targets] = self.lengths[sources]

    # ------------------------------------------------------------------------------------- the step

    def step(self) -> None:
        """Run the step graph on the slots in use and select the next tokens."""
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
        if self.encodes:
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
        """Select the next tokens of a sequence with a search, and expand or reorder its rows."""
        parents = run.advance(logits[run.slots])
        if not run.is_expanded and run.has_begun:
            self.expand(run)
        elif parents is not None:
            self.move(run, parents)

    def move(self, run: Run, parents: list[int]) -> None:
        """Copy the caches of each row's parent to the row."""
        moved = [(row, parent) for row, parent in enumerate(parents) if row != parent]
        if moved:
            used = int(self.lengths[run.slots[0]])
            targets = [run.slots[row] for row, _ in moved]
            sources = [run.slots[parent] for _, parent in moved]
            self.caches[:, targets, :, :used] = self.caches[:, sources, :, :used]

    def expand(self, run: Run) -> None:
        """Copy the row of `run` for its other beams or samples. Samples become sequences of their
        own."""
        [first] = run.slots
        run.is_expanded = True
        self.reserved -= run.job.rows - 1
        others = run.others()
        slots = [self.new_slot(other) for other in others]
        self.copy([first] * len(slots), slots)
        self.running.extend(other for other in others if other is not run)

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


def slot_shape(tensor: TensorSpec, room: Room) -> list[int]:
    sizes = {
        "rows": room.rows,
        "target_length": 1,
        "max_length": room.length,
        "max_source": room.source,
    }
    # names in graphs without a step
    whole = {
        "batch_size": room.rows,
        "source_length": room.source,
        "past_source_length": room.source,
    }
    return concrete_shape(tensor, sizes | whole)


def slot_bytes(info: ExportInfo, room: Room) -> int:
    """Return the bytes of the caches of one slot."""
    spec = info.specs[info.step or "decoder"]
    sources = [tensor for tensor in spec.inputs if ".encoder." in tensor.name]
    source = sum(4 * int(np.prod(slot_shape(tensor, Room(1, 1, 1)))) for tensor in sources)
    return room.length * position_bytes(spec) + room.source * source
