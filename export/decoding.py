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


class FixedCaches:
    """A batch being decoded by a graph of the cpu target: caches of `capacity` positions that the graph writes in place, bound
    once, as are all inputs and outputs. `rows` of them, `feeds` of the source (seq2seq) for fewer where rows are beams."""

    def __init__(self, session, spec, feeds, rows, capacity):
        self.session, self.spec, self.capacity = session, spec, capacity
        self.source = {name: value(array) for name, array in feeds.items()}
        self.own = [tensor for tensor in spec.outputs if tensor.name.startswith("present")]
        self.allocate(rows)

    def allocate(self, rows):
        shapes = {tensor.name: [rows, tensor.shape[1], self.capacity, tensor.shape[3]] for tensor in self.own}
        self.caches = {name: value(np.zeros(shape, np.float32)) for name, shape in shapes.items()}
        self.lengths = np.zeros(rows, np.int64)  # tokens of each row in its caches
        self.bind(1)

    def bind(self, length):
        """Everything the graph reads and writes with `length` tokens at once."""
        rows, vocabulary = len(self.lengths), self.spec.outputs[0].shape[1]
        self.fed = {
            "input_ids": value(np.zeros((rows, length), np.int64)),
            "position_ids": value(np.zeros((rows, length), np.int64)),
            "last_position": value(np.zeros(rows, np.int32)),
            "total_length": value(np.zeros(1, np.int32)),
        }
        self.logits = value(np.zeros((rows, vocabulary), np.float32))
        self.binding = self.session.io_binding()
        for name, bound in {**self.fed, **self.source}.items():
            self.binding.bind_ortvalue_input(name, bound)
        self.binding.bind_ortvalue_output("logits", self.logits)
        for name, bound in self.caches.items():
            self.binding.bind_ortvalue_input(name.replace("present", "past_key_values"), bound)
            self.binding.bind_ortvalue_output(name, bound)

    def start(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """The first tokens (rows, T), padded on the right, and their mask -> the logits (rows, V) behind them."""
        self.lengths = mask.sum(axis=1)
        self.bind(ids.shape[1])
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        logits = self.run(ids, positions, self.lengths - 1, ids.shape[1]).copy()
        self.bind(1)
        return logits

    def next(self, tokens: np.ndarray, taken_from: np.ndarray | None) -> np.ndarray:
        """One token (rows,) for each row, continuing the rows `taken_from` (all, in order) -> the logits (rows, V) behind it,
        valid until the next step."""
        if taken_from is not None:
            self.reorder(taken_from)
        self.lengths = self.lengths + 1
        places = self.lengths - 1
        return self.run(tokens[:, None], places[:, None], places, self.lengths.max())

    def run(self, ids, positions, last_position, total_length):
        for name, array in (
            ("input_ids", ids),
            ("position_ids", positions),
            ("last_position", last_position.astype(np.int32)),
            ("total_length", np.array([total_length], np.int32)),
        ):
            self.fed[name].update_inplace(np.ascontiguousarray(array))
        self.session.run_with_iobinding(self.binding)
        return self.logits.numpy()

    def repeat(self, count):
        """Every row `count` times in a row. The source stays as it is: its rows are shared."""
        old, lengths = self.caches, np.repeat(self.lengths, count)
        self.allocate(len(lengths))
        self.lengths = lengths
        used = lengths.max()
        for name, bound in self.caches.items():
            bound.numpy()[:, :, :used] = np.repeat(old[name].numpy()[:, :, :used], count, axis=0)

    def reorder(self, rows):
        """Only rows that change, and only what is in use, moves."""
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        if len(moved):
            used = self.lengths.max()
            for bound in self.caches.values():
                cache = bound.numpy()
                cache[moved, :, :used] = cache[rows[moved], :, :used]
            self.lengths = self.lengths[rows]


def value(array):
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def cross_states(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The encoder's outputs under the names the decoder takes them by."""
    return {name.replace("present", "past_key_values"): states for name, states in outputs.items()}
