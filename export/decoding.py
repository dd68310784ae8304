"""A batch being decoded: a decoder graph and its caches, for each target. numpy and onnxruntime only.

`start` takes the first tokens of every row, `next` one token more of each, `repeat` makes several rows (beams) of each.
"""

import numpy as np
import onnxruntime


class GrowingCaches:
    """A batch being decoded by a portable graph, which returns its caches longer than it took them.

    `feeds` are `encoder_hidden_states` and `encoder_attention_mask` for seq2seq; a decoder has none.
    """

    def __init__(self, session, spec, feeds, rows):
        self.session = session
        self.outputs = [tensor.name for tensor in spec.outputs]
        self.feeds = dict(feeds)
        self.takes_mask = "attention_mask" in {tensor.name for tensor in spec.inputs}
        # Every cache starts with length 0.
        self.past = {
            tensor.name: np.zeros((rows, *(0 if isinstance(size, str) else size for size in tensor.shape[1:])), np.float32)
            for tensor in spec.inputs
            if tensor.name.startswith("past_key_values")
        }

    def start(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """The first tokens (rows, T), padded on the left, and their mask -> the logits (rows, V) behind them."""
        return self.read(ids, mask)[:, -1]

    def read(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """As `start` -> the logits (rows, T, V) behind each token."""
        if self.takes_mask:
            self.feeds["attention_mask"] = mask
        return self.step(ids, None)

    def step(self, tokens: np.ndarray, taken_from: np.ndarray | None) -> np.ndarray:
        """`tokens` (rows, T), continuing the rows `taken_from` of the caches (all, in order) -> logits (rows, T, V)."""
        if taken_from is not None:
            self.reorder(taken_from)
        feeds = {**self.feeds, **self.past, "input_ids": tokens}
        if self.takes_mask:
            feeds |= self.grow_mask(tokens.shape[1])
        logits, *present = self.session.run(self.outputs, feeds)
        for name, states in zip(self.outputs[1:], present, strict=True):
            self.past[name.replace("present", "past_key_values")] = states
        return logits

    def next(self, tokens: np.ndarray, taken_from: np.ndarray | None) -> np.ndarray:
        """One token (rows,) for each row -> the logits (rows, V) of the one after it."""
        return self.step(tokens[:, None], taken_from)[:, -1]

    def grow_mask(self, length):
        """The first step has the mask of the prompt; each later one appends real tokens."""
        mask = self.feeds["attention_mask"]
        past = self.past["past_key_values.0.key"].shape[2]
        if past:
            mask = np.concatenate([mask, np.ones((len(mask), past + length - mask.shape[1]), np.int64)], axis=1)
            self.feeds["attention_mask"] = mask
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, past:]
        return {"attention_mask": mask, "position_ids": positions}

    def repeat(self, count):
        """Every row `count` times in a row."""
        for arrays in (self.feeds, self.past):
            for name, array in arrays.items():
                arrays[name] = np.repeat(array, count, axis=0)

    def reorder(self, rows):
        """Beams of one input share the encoder's output, so only the decoder's own caches move."""
        for name, states in self.past.items():
            if ".encoder." not in name:
                self.past[name] = states[rows]
        if "attention_mask" in self.feeds:
            self.feeds["attention_mask"] = self.feeds["attention_mask"][rows]


class RaggedCaches:
    """A batch of prompts being continued by a decoder of the cpu target, each at its own length."""

    def __init__(self, session, spec, rows, capacity):
        self.graph = lambda rows, length, caches: BoundGraph(
            session, spec, {"rows": rows, "target_length": length, "max_length": capacity}, caches
        )
        self.bound = self.graph(rows, 1, {})

    def start(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """The prompts (rows, T), padded on the right, and their mask -> the logits (rows, V) behind them."""
        self.lengths, (rows, length) = mask.sum(axis=1), ids.shape
        prompt = self.graph(rows, length, self.bound.caches)
        return prompt.run(
            input_ids=ids, position_ids=np.arange(length), last_position=self.lengths - 1, total_length=length
        ).copy()

    def next(self, tokens: np.ndarray, taken_from: np.ndarray | None) -> np.ndarray:
        """One token (rows,) for each row, continuing the rows `taken_from` (all, in order) -> the logits (rows, V) behind it,
        valid until the next step."""
        if taken_from is not None:
            self.reorder(taken_from)
        places, self.lengths = self.lengths, self.lengths + 1
        return self.bound.run(
            input_ids=tokens[:, None], position_ids=places[:, None], last_position=places, total_length=self.lengths.max()
        )

    def repeat(self, count):
        """Every row `count` times in a row."""
        old, self.lengths = self.bound.caches, np.repeat(self.lengths, count)
        self.bound, used = self.graph(len(self.lengths), 1, {}), self.lengths.max()
        for name, (cache, _) in self.bound.caches.items():
            cache[:, :, :used] = np.repeat(old[name][0][:, :, :used], count, axis=0)

    def reorder(self, rows):
        """Only rows that change, and only what is in use, moves."""
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        if len(moved):
            used = self.lengths.max()
            for cache, _ in self.bound.caches.values():
                cache[moved, :, :used] = cache[rows[moved], :, :used]
            self.lengths = self.lengths[rows]


class BeamCaches:
    """A batch being decoded by a seq2seq model of the cpu target. Nothing moves: a table says whose key and value each beam
    reads at each position."""

    def __init__(self, session, spec, feeds, rows, capacity):
        self.session, self.spec, self.capacity, self.rows = session, spec, capacity, rows
        self.source = {name: value(array) for name, array in feeds.items()}
        self.bind(beams=1)

    def bind(self, beams):
        sizes = {"rows": self.rows * beams, "batch_size": self.rows, "num_beams": beams, "max_length": self.capacity}
        self.bound = BoundGraph(self.session, self.spec, sizes, {}, self.source)
        self.writers = self.bound.inputs["cache_indirection"]
        self.writers[:] = np.arange(beams)[:, None]
        self.bound.inputs["num_beams"][:] = beams
        self.length = 0

    def start(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """The first token of each row (rows, 1) -> the logits (rows, V) behind it."""
        return self.next(ids[:, 0], None).copy()

    def next(self, tokens: np.ndarray, taken_from: np.ndarray | None) -> np.ndarray:
        """As `RaggedCaches.next`."""
        if taken_from is not None:
            beams = self.writers.shape[1]
            parents = (taken_from % beams).reshape(-1, beams, 1)
            used = self.writers[:, :, : self.length]
            used[:] = np.take_along_axis(used, parents, axis=1)
        logits = self.bound.run(input_ids=tokens[:, None], past_length=self.length)
        self.length += 1
        return logits

    def repeat(self, count):
        """Every row `count` times in a row. The source stays as it is: its rows are shared."""
        old, length = self.bound.caches, self.length
        self.bind(count)
        self.length = length
        for name, (cache, _) in self.bound.caches.items():
            cache[:, :, :length] = np.repeat(old[name][0][:, :, :length], count, axis=0)


class BoundGraph:
    """A decoder graph of the cpu target with all its inputs and outputs bound once, to `inputs` and `caches` by name, so that
    a step allocates nothing. `caches` are taken over from another one, or made; each is an array and its `OrtValue`."""

    def __init__(self, session, spec, sizes, caches, source=None):
        self.session, self.binding = session, session.io_binding()
        self.inputs, self.caches = {}, dict(caches)
        for tensor in spec.inputs:
            if tensor.name in (source or {}):
                bound = source[tensor.name]
            elif tensor.name.startswith("past_key_values"):
                bound = self.caches.setdefault(tensor.name, zeros(tensor, sizes))[1]
            else:
                self.inputs[tensor.name], bound = zeros(tensor, sizes)
            self.binding.bind_ortvalue_input(tensor.name, bound)
        self.logits, bound = zeros(spec.outputs[0], sizes)
        self.binding.bind_ortvalue_output("logits", bound)
        for tensor in spec.outputs[1:]:
            self.binding.bind_ortvalue_output(tensor.name, self.caches[tensor.name.replace("present", "past_key_values")][1])

    def run(self, **values: np.ndarray | int) -> np.ndarray:
        """The logits (rows, V) with `values` put into the inputs; the array is the same at each call."""
        for name, array in values.items():
            self.inputs[name][...] = array
        self.session.run_with_iobinding(self.binding)
        return self.logits


def zeros(tensor, sizes):
    """An array of zeros as `tensor` says, and the `OrtValue` that has its memory."""
    bound = value(np.zeros([sizes.get(size, size) for size in tensor.shape], tensor.dtype))
    return bound.numpy(), bound


def value(array):
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def cross_states(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The encoder's outputs under the names the decoder takes them by."""
    return {name.replace("present", "past_key_values"): states for name, states in outputs.items()}
