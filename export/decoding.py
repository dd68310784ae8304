"""A batch being decoded: a decoder graph and its caches, for each target. numpy and onnxruntime only.

`start` takes the first tokens of every row, `next` one token more of each, `repeat` makes several rows (beams) of each.
"""

import collections
import itertools

import numpy as np
import onnxruntime

from .search import NEVER

BFLOAT16 = 16  # among ONNX's types
LOOK = 16  # steps of `SlotCaches.greedy` between two looks at the tokens


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
            self.past[read_again(name)] = states
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
    """A batch of prompts being continued by a decoder of the cpu target, each at its own length; at first there is room for
    `capacity` tokens of each."""

    def __init__(self, session, spec, rows, capacity):
        self.session, self.spec, self.capacity = session, spec, capacity
        self.bound = self.graph(rows, 1, {})

    def graph(self, rows, length, caches):
        sizes = {"rows": rows, "target_length": length, "max_length": self.capacity}
        return BoundGraph(self.session, self.spec, sizes, caches)

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
        used = self.lengths.max()
        if used == self.capacity:
            self.capacity *= 2
            self.repeat(1)
        places, self.lengths = self.lengths, self.lengths + 1
        return self.bound.run(
            input_ids=tokens[:, None], position_ids=places[:, None], last_position=places, total_length=used + 1
        )

    def repeat(self, count):
        """Every row `count` times in a row, in new caches."""
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
    """A batch being decoded by a seq2seq model of the cpu target; at first there is room for `capacity` tokens. Nothing moves:
    a table says whose key and value each beam reads at each position."""

    def __init__(self, session, spec, feeds, rows, capacity):
        self.session, self.spec, self.capacity, self.rows = session, spec, capacity, rows
        self.source = {name: value(array) for name, array in feeds.items()}
        self.length = 0
        self.bind(beams=1)

    def bind(self, beams):
        sizes = {"rows": self.rows * beams, "batch_size": self.rows, "num_beams": beams, "max_length": self.capacity}
        self.bound = BoundGraph(self.session, self.spec, sizes, {}, self.source)
        self.writers = self.bound.inputs["cache_indirection"]
        self.writers[:] = np.arange(beams)[:, None]
        self.bound.inputs["num_beams"][:] = beams

    def start(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """The first tokens of each row (rows, T) -> the logits (rows, V) behind them. The graph takes one at a time."""
        for tokens in ids.T:
            logits = self.next(tokens, None)
        return logits.copy()

    def next(self, tokens: np.ndarray, taken_from: np.ndarray | None) -> np.ndarray:
        """As `RaggedCaches.next`."""
        if taken_from is not None:
            beams = self.writers.shape[1]
            parents = (taken_from % beams).reshape(-1, beams, 1)
            used = self.writers[:, :, : self.length]
            used[:] = np.take_along_axis(used, parents, axis=1)
        if self.length == self.capacity:
            self.grow()
        logits = self.bound.run(input_ids=tokens[:, None], past_length=self.length)
        self.length += 1
        return logits

    def repeat(self, count):
        """Every row `count` times in a row. The source stays as it is: its rows are shared."""
        old = self.bound.caches
        self.bind(count)
        self.fill(old, count)

    def grow(self):
        old, writers = self.bound.caches, self.writers.copy()  # it is a view of what `bind` frees
        self.capacity *= 2
        self.bind(writers.shape[1])
        self.writers[:, :, : self.length] = writers
        self.fill(old, 1)

    def fill(self, old, count):
        """The caches with what is used of the `old`, every row `count` times in a row."""
        for name, (cache, _) in self.bound.caches.items():
            cache[:, :, : self.length] = np.repeat(old[name][0][:, :, : self.length], count, axis=0)


class SlotCaches:
    """A batch being decoded by a graph of the cuda target, in `buffers` of its own. Nothing moves: `visible` (B, beams, slots)
    says which slots of its input's cache each beam reads. Where the batch is smaller than the buffers, its first row is in the
    others too, which end when it does, and nobody sees."""

    def __init__(self, buffers, source_mask, window, beams):
        self.buffers, self.window = buffers, window
        self.source = {} if source_mask is None else {"encoder_attention_mask": source_mask}
        buffers.step_graph(beams)  # captured before there is anything in the caches

    def start(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """The prompts (B, T), padded on either side, and their mask -> the logits (B, V) behind them."""
        return self.read(ids, mask).logits.numpy()[: len(ids), 0].copy()

    def read(self, ids, mask, beams=1):
        """The graph that has read the prompts, with the logits behind each for each of the `beams`."""
        self.count, rows, slots = len(ids), self.buffers.sizes["batch_size"], self.buffers.sizes["slots"]
        ids, mask = filled(ids, rows), filled(mask, rows)
        length = ids.shape[1]
        self.positions, self.visible = np.zeros((rows, slots), np.int64), np.zeros((rows, 1, slots), bool)
        self.positions[:, :length] = np.maximum(mask.cumsum(axis=1) - 1, 0)
        self.visible[:, 0, :length] = mask
        self.used, self.lengths = length, mask.sum(axis=1)
        earlier = np.arange(slots) <= np.arange(length)[:, None]
        last = length - 1 - mask[:, ::-1].argmax(axis=1)
        graph = self.buffers.prompt_graph(length, beams)
        self.put(graph, ids, self.positions[:, :length], 0, self.visible & earlier, np.repeat(last[:, None], beams, axis=1))
        graph.run()
        return graph

    def next(self, tokens: np.ndarray, taken_from: np.ndarray | None) -> np.ndarray:
        """As `RaggedCaches.next`; the logits are the caller's."""
        rows, beams, slots = self.visible.shape
        if taken_from is not None:
            taken_from = filled((taken_from % beams).reshape(-1, beams, 1), rows)
            self.visible = np.take_along_axis(self.visible, taken_from, axis=1)
        new = np.arange(beams)
        self.visible[:, new, self.used + new] = True
        positions = np.repeat(self.lengths[:, None], beams, axis=1)
        self.positions[:, self.used + new] = positions
        graph = self.buffers.step_graph(beams)
        self.put(graph, filled(tokens.reshape(-1, beams), rows), positions, self.used, self.visible, np.tile(new, (rows, 1)))
        graph.run()
        self.used, self.lengths = self.used + beams, self.lengths + 1
        return graph.logits.numpy()[: self.count].reshape(self.count * beams, -1).copy()

    def repeat(self, count):
        """Every row `count` times in a row, all with one cache."""
        self.visible = np.repeat(self.visible, count, axis=1)

    def greedy(self, ids: np.ndarray, mask: np.ndarray, new_tokens: int, have_ended) -> np.ndarray:
        """The likeliest tokens (B, up to new_tokens) behind prompts as of `start`, with no copy to or from the device between
        two steps. `have_ended`, a function of the tokens so far, is asked after `LOOK` steps and their multiples."""
        self.read(ids, mask)
        step, length, rows = self.buffers.step_graph(1), ids.shape[1], self.buffers.sizes["batch_size"]
        step.put(count=np.ones(rows, np.int64), logits_of=np.zeros((rows, 1), np.int64), **self.source)
        for made in range(1, new_tokens):
            step.run()
            if made % LOOK == 0 and have_ended(self.made(length, made + 1)):
                return self.made(length, made + 1)
        return self.made(length, new_tokens)

    def beam_search(self, ids: np.ndarray, mask: np.ndarray, options, searches) -> tuple[np.ndarray, np.ndarray]:
        """As `search.beam_search`, with nothing copied between two steps but, after `LOOK` of them, whether any input can still
        improve. `searches` makes the session of the beams' graph."""
        rows, length, beams = self.buffers.sizes["batch_size"], ids.shape[1], options.num_beams
        step, search = self.buffers.step_graph(beams), self.buffers.beam_search(options, searches)
        self.read(ids, mask, beams)
        step.put(count=np.full(rows, beams), logits_of=np.tile(np.arange(beams), (rows, 1)), **self.source)
        search.begin(options)
        for made in range(1, options.max_new_tokens + 1):
            search.run()
            if made == options.max_new_tokens or (made % LOOK == 0 and not search.state["can_improve"].numpy().any()):
                break
            step.run()
        return self.best(search, length, options)

    def best(self, search, prompt, options):
        """The new tokens of the best finished hypotheses (B * N, up to the longest), and their scores (B * N,)."""
        count = options.num_return_sequences
        names = ("visible", "tokens", "lengths", "scores")
        state = {name: search.state[f"finished_{name}"].numpy()[: self.count, :count] for name in names}
        tokens, lengths = self.buffers.states["tokens"].numpy()[:, 0, prompt:, 0], state["lengths"].reshape(-1)
        found = np.full((len(lengths), lengths.max()), options.beam_fill_token_id)
        for row, (history, last) in enumerate(zip(state["visible"].reshape(len(lengths), -1), state["tokens"].reshape(-1))):
            made = tokens[row // count][history[prompt:]]
            found[row, : len(made) + 1] = [*made, last]
        return found, state["scores"].reshape(-1)

    def made(self, prompt, count):
        return self.buffers.states["tokens"].numpy()[: self.count, 0, prompt : prompt + count, 0].copy()

    def put(self, graph, ids, positions, first_slot, visible, logits_of):
        if self.window is not None:
            visible = visible & (self.positions[:, None] > positions[:, :, None] - self.window)
        rows, count = ids.shape
        given = dict(input_ids=ids, position_ids=positions, visible=visible, logits_of=logits_of, **self.source)
        graph.put(**given, count=np.full(rows, count), first_slot=np.full(rows, first_slot))


def filled(array: np.ndarray, rows: int) -> np.ndarray:
    """`array` with its first row behind its last, as often as it takes to have `rows`."""
    return np.concatenate([array, np.repeat(array[:1], rows - len(array), axis=0)])


class Buffers:
    """Caches of `sizes` on `device`, for a decoder graph of the cuda target, and that graph with all bound to it. One batch at
    a time has them: `Pool` keeps them for the next, since a CUDA graph, once captured, reads and writes these alone."""

    numbers = itertools.count(1)  # of captured graphs

    def __init__(self, session, spec, sizes, device):
        self.session, self.spec, self.sizes, self.device = session, spec, sizes, device
        caches = [tensor for tensor in spec.inputs if tensor.name.startswith(("past_key_values", "tokens"))]
        self.states = {tensor.name: device_zeros(tensor, sizes, device) for tensor in caches}
        self.steps, self.searches = {}, {}

    def prompt_graph(self, length, beams):
        """For prompts of `length`, with the logits behind the last token for each of the `beams`; what their next step takes is
        put into its inputs, the logits where its own will be."""
        return DeviceGraph(self, {"target_length": length, "logits": beams}, self.step_graph(beams), number=-1)

    def step_graph(self, beams):
        """For one token of each beam, with the logits of all; what the next step takes is put into the inputs."""
        if beams not in self.steps:
            sizes = {"target_length": beams, "logits": beams}
            self.steps[beams] = DeviceGraph(self, sizes, None, next(self.numbers))
        return self.steps[beams]

    def beam_search(self, options, searches):
        key = options.num_beams, options.candidates
        if key not in self.searches:
            self.searches[key] = BeamSearch(searches, self, key, next(self.numbers))
        return self.searches[key]


class Pool:
    """Buffers that no batch has at the moment, `size` at most."""

    def __init__(self, session, spec, device, size=4):
        self.make = lambda sizes: Buffers(session, spec, sizes, device)
        self.free = collections.deque(maxlen=size)

    def take(self, sizes: dict[str, int]) -> Buffers:
        for buffers in self.free:
            if buffers.sizes == sizes:
                self.free.remove(buffers)
                return buffers
        return self.make(sizes)


class DeviceGraph:
    """A decoder graph of the cuda target with inputs and outputs on the device, bound once; replayed as CUDA graph `number`, or
    not captured if that is -1. What the next step takes is put into the inputs of `following`, or into its own."""

    def __init__(self, buffers, sizes, following, number):
        spec, sizes, device = buffers.spec, {**buffers.sizes, **sizes}, buffers.device
        new = [tensor for tensor in spec.inputs if tensor.name not in buffers.states]
        self.inputs = {tensor.name: device_zeros(tensor, sizes, device) for tensor in new}
        self.put(slot_numbers=np.arange(sizes["slots"]))
        self.logits = following.logits if following else device_zeros(spec.outputs[0], sizes, device)
        taken = {**(following or self).inputs, **buffers.states, "logits": self.logits}
        # Computes `logits` (B, N, V), on the device, and what the next step takes.
        self.run = replayed(buffers.session, spec, self.inputs | buffers.states, taken, number)

    def put(self, **values: np.ndarray) -> None:
        """`values` into the inputs."""
        for name, array in values.items():
            self.inputs[name].update_inplace(np.ascontiguousarray(array))


class BeamSearch:
    """The beams' graph, bound to the logits and inputs of their steps, and to a `state` of its own on the device."""

    def __init__(self, searches, buffers, key, number):
        sizes = {**buffers.sizes, "num_beams": key[0], "candidates": key[1], "num_ends": max(1, key[1] // key[0] - 1)}
        session, spec = searches(sizes)
        step = buffers.step_graph(key[0])
        shared = {**step.inputs, "tokens": buffers.states["tokens"], "logits": step.logits}
        new = [tensor for tensor in spec.inputs if tensor.name not in shared]
        self.state = {tensor.name: device_zeros(tensor, sizes, buffers.device) for tensor in new}
        self.zeros = {name: value.numpy().copy() for name, value in self.state.items()}
        self.run = replayed(session, spec, shared | self.state, shared | self.state, number)

    def begin(self, options) -> None:
        """The state before the first token, for `options` (a `search.Options`)."""
        fresh = {name: values.copy() for name, values in self.zeros.items()}
        fresh["scores"][:, 1:] = NEVER  # rows of one input are equal at first: only the first of them counts
        fresh["finished_scores"][:] = -np.inf
        fresh["is_best"][: options.num_beams] = fresh["can_improve"][:] = True
        fresh["eos_token_ids"][:] = options.eos_token_ids or -1
        fresh["max_length"][:], fresh["length"][:] = options.max_new_tokens, 1
        fresh["length_penalty"][:] = options.length_penalty
        fresh["stops_early"][:] = options.early_stopping is True
        fresh["never_stops_early"][:] = options.early_stopping == "never"
        for name, values in fresh.items():
            self.state[name].update_inplace(values)


def replayed(session, spec, inputs, outputs, number):
    """A function that runs `session`, its inputs bound to the values `inputs`, its outputs to those of `outputs` that the next
    step takes: as CUDA graph `number`, captured here, or uncaptured if that is -1."""
    binding, options = session.io_binding(), onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    for tensor in spec.inputs:
        binding.bind_ortvalue_input(tensor.name, inputs[tensor.name])
    for tensor in spec.outputs:
        binding.bind_ortvalue_output(tensor.name, outputs[read_again(tensor.name)])

    def run():
        session.run_bound(binding, options)

    if number > 0:
        run()  # capturing takes several steps, here of nothing
    return run


def device_zeros(tensor, sizes, device):
    """An `OrtValue` of zeros on `device`. What an attention does not read is multiplied by 0, so it must be a number."""
    shape = [sizes.get(size, size) for size in tensor.shape]
    if tensor.dtype == "bfloat16":  # which numpy does not have
        found = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, BFLOAT16, device)
        found.update_inplace(onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(shape, np.uint16), BFLOAT16))
        return found
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, tensor.dtype), device)


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
            self.binding.bind_ortvalue_output(tensor.name, self.caches[read_again(tensor.name)][1])

    def run(self, **values: np.ndarray | int) -> np.ndarray:
        """The logits (rows, V) with `values` put into the inputs; the array is the same at each call."""
        for name, array in values.items():
            self.inputs[name][...] = array
        self.session.run_bound(self.binding)
        return self.logits


def position_bytes(spec) -> int:
    """What one token of one row takes in the caches of a decoder graph."""
    caches = [tensor for tensor in spec.inputs if tensor.name.startswith("past_key_values") and ".encoder." not in tensor.name]
    return sum(tensor.shape[1] * tensor.shape[3] * (2 if "16" in tensor.dtype else 4) for tensor in caches)


def zeros(tensor, sizes):
    """An array of zeros as `tensor` says, and the `OrtValue` that has its memory."""
    bound = value(np.zeros([sizes.get(size, size) for size in tensor.shape], tensor.dtype))
    return bound.numpy(), bound


def value(array):
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def cross_states(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The encoder's outputs under the names the decoder takes them by."""
    return {read_again(name): states for name, states in outputs.items()}


def read_again(name: str) -> str:
    """The input by which the next step takes the output `name`."""
    return name.removeprefix("next_").replace("present", "past_key_values")
