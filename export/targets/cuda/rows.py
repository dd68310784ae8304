"""The rows of the cuda target, the searches on its device, and what opens both.

Graphs use buffers on the device and are replayed as CUDA graphs. In a search nothing is copied
between two steps. The host reads tokens, or whether inputs have ended, only after several steps.
Greedy search is one session, so its steps are queued on the device. The two sessions of beam search
wait for each other.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...errors import SessionError, UsageError
from ...inference.device_thread import in_device_thread
from ...inference.inputs import position_limit
from ...inference.options import EXCLUDED_SCORE, Options
from ...inference.rows import SEARCH_STEPS, GenerationRequest, check_memory, next_input_name
from ...inference.session import LoadedExport
from .buffers import CAPTURE_RUNS, Buffers, DeviceGraph, Pool, Sizes, beam_sizes, num_bytes

MIN_SLOTS = 64
MIN_SOURCE = 32


@dataclass(frozen=True)
class CudaRowsFactory:
    """The `RowsFactory` of one loaded export. Its rows and searches run in the device
    thread."""

    export: LoadedExport
    supports_empty_prompts = False

    @functools.cached_property
    def pool(self) -> Pool:
        """The buffers that requests use one after the other."""
        return Pool(self.export)

    @in_device_thread
    def open(self, request: GenerationRequest) -> "CudaRows":
        """Encode the source of `request`, if it has one, and return rows for its prompts.

        The prompts are not read yet. The caller closes the rows.

        Raises:
            UsageError: if the request needs more memory than the machine has.
            SessionError: if onnxruntime fails, or the GPU has no memory.
        """
        sizes = buffer_sizes(request, self.export.config)
        on_host = self.export.device == "cpu"
        cache_bytes = num_bytes(self.pool.cache_specs, sizes) if on_host else 0
        check_memory(
            len(request.input_ids), request.options, self.export.config["vocab_size"], cache_bytes
        )
        with closed_on_error(CudaRows(take_buffers(self.pool, sizes))) as decoder:
            if request.source is not None:
                decoder.encode(*request.source)
            # capture while the caches are empty
            decoder.buffers.step_graph(request.options.rows_per_input)
        return decoder

    @in_device_thread
    def start_search(self, request: GenerationRequest) -> "CudaSearch | None":
        """Read the prompts and return the search, or `None` if it must run in numpy.

        The caller closes the search.

        Raises:
            UsageError: if the request needs more memory than the machine has.
            SessionError: if onnxruntime fails, or the GPU has no memory.
        """
        if request.options.num_beams > 1 and not self.has_beam_graph(request):
            return None
        with closed_on_error(self.open(request)) as decoder:
            return CudaSearch(decoder, request)

    def has_beam_graph(self, request: GenerationRequest) -> bool:
        """Return True if a graph can run the beam search of `request`.

        It selects the candidates of an input for each beam, and needs a session for its sizes.
        """
        config, options = self.export.config, request.options
        if options.candidates > config["vocab_size"]:
            return False
        return self.pool.can_search(beam_sizes(buffer_sizes(request, config), options))


@contextlib.contextmanager
def closed_on_error(decoder: "CudaRows") -> Iterator["CudaRows"]:
    """Close `decoder` if the block raises."""
    try:
        yield decoder
    except BaseException:
        decoder.close()
        raise


def buffer_sizes(request: GenerationRequest, config: dict) -> Sizes:
    """Return the size of each named axis of the buffers for `request`.

    Sizes are powers of two, so that many requests share captured graphs. Sources are not longer
    than the learned positions of the model, whose config.json is `config`.
    """
    beams = request.options.rows_per_input
    # Caches do not grow, and each beam fills one slot per step.
    slots = request.input_ids.shape[1] + request.options.max_new_tokens * beams
    sizes = {
        "batch_size": power_of_two(len(request.input_ids)),
        "slots": power_of_two(max(slots, CAPTURE_RUNS * beams, MIN_SLOTS)),
    }
    if request.source is not None:
        length = power_of_two(max(request.source[0].shape[1], MIN_SOURCE))
        sizes["source_length"] = min(length, position_limit(config) or length)
    return sizes


def take_buffers(pool: Pool, sizes: Sizes) -> Buffers:
    """Return buffers of `pool` with axes of at least `sizes`.

    Raises:
        UsageError: if this machine has no memory for them.
        SessionError: if the device fails, which is no fault of the request.
    """
    try:
        return pool.take(sizes)
    except Exception as error:  # onnxruntime's errors have no other common class
        reason = " ".join(str(error).split())
        kind = UsageError if isinstance(error, MemoryError) else SessionError
        raise kind(
            f"cannot allocate caches of {sizes['slots']} slots for max_new_tokens: {reason}"
        ) from None


# --------------------------------------------------------------------------------------------- rows


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()


class CudaRows:
    """The `Rows` of one request, with buffers on the device.

    Caches are never reordered: `visible` (B, beams, slots) says which slots of the input's cache
    each beam reads. If there are fewer inputs than rows of the buffers, the first input fills the
    others, whose results are ignored.

    Args:
        buffers: the caches and graphs that it uses; `close` puts them back into their pool.
    """

    all_logits = False
    places = best_tokens = None
    shrinks = False  # captured graphs have a fixed number of rows

    def __init__(self, buffers: Buffers):
        self.buffers = buffers
        self.export = buffers.pool.export
        self.rows, self.slots = buffers.sizes["batch_size"], buffers.sizes["slots"]
        self.source: dict[str, np.ndarray] = {}

    def close(self) -> None:
        """Put the buffers back into the pool, for the next request of their sizes. A second call
        does nothing."""
        if hasattr(self, "buffers"):
            buffers = self.buffers
            del self.buffers  # another batch may use them now
            buffers.pool.give(buffers)

    def encode(self, ids: np.ndarray, mask: np.ndarray) -> None:
        """Compute the keys and values of sources `ids` (B, S) on the device.

        `mask` (B, S) is 0 where they have padding.
        """
        length = self.buffers.sizes["source_length"]
        # pad tokens, which positions derived from ids do not count
        fill = self.export.config.get("pad_token_id") or 0
        ids, mask = (pad(ids, self.rows, length, fill), pad(mask, self.rows, length))
        graph = self.buffers.encoder_graph()
        graph.put(input_ids=ids, attention_mask=mask)
        graph.run()
        self.source = {"encoder_attention_mask": mask}

    @in_device_thread
    def prefill(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Feed the prompts (B, P) and return the logits (B, 1, V) after the last token of each.

        Padding, where `attention_mask` is 0, may stand on either side.
        """
        return self.logits(self.read(input_ids, attention_mask))

    def logits(self, graph: DeviceGraph) -> np.ndarray:
        """Copy the logits (B * beams, 1, V) of the last run of `graph` from the device and return
        them."""
        logits = graph.values["logits"].numpy()[: self.count]
        return logits.reshape(-1, 1, logits.shape[-1]).copy()

    def read(self, ids: np.ndarray, mask: np.ndarray, beams: int = 1) -> DeviceGraph:
        """Feed the prompts `ids` (B, P) and return the graph, whose `logits` follow the last
        tokens.

        The logits are repeated for the number of `beams`. `mask` is 0 for padding. Prompts are
        padded on the right to a power of two, so that graphs run with few lengths. The next steps
        write over that padding.
        """
        self.count, length = ids.shape
        padded = power_of_two(length)
        ids, mask = (pad(array, self.rows, padded) for array in (ids, mask))
        self.visible = np.zeros((self.rows, 1, self.slots), bool)
        self.visible[:, 0, :padded] = mask
        self.used = length
        self.lengths = mask.sum(axis=1)
        earlier = np.arange(self.slots) <= np.arange(padded)[:, None]
        last = padded - 1 - mask[:, ::-1].argmax(axis=1)
        graph = self.buffers.prompt_graph(padded, beams)
        graph.put(
            input_ids=ids,
            position_ids=np.maximum(mask.cumsum(axis=1) - 1, 0),
            first_slot=0,
            count=length,
            visible=self.visible & earlier,
            logit_indices=last[:, None],
            **self.source,
        )
        graph.run()
        return graph

    @in_device_thread
    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Feed one token per beam, `tokens` (B * beams, 1), and return the logits (B * beams, 1,
        V). Raises UsageError if the caches are full."""
        beams = self.visible.shape[1]
        # the graph also writes the next tokens
        if (needed := self.used + 2 * beams) > self.slots:
            raise UsageError(f"{needed} cache slots, expected at most {self.slots} on this target")
        new = np.arange(beams)
        self.visible[:, new, self.used + new] = True
        graph = self.buffers.step_graph(beams)
        graph.put(
            input_ids=pad_batch(tokens.reshape(-1, beams), self.rows),
            position_ids=self.lengths[:, None],
            first_slot=self.used,
            visible=self.visible,
            **self.source,
        )
        graph.run()
        self.used += beams
        self.lengths = self.lengths + 1
        return self.logits(graph)

    def select(self, parents: np.ndarray) -> None:
        """Let each row continue the row that `parents` (B * beams,) names, with more beams of each
        input or with its beams in another order. They share the cache of their input."""
        beams = len(parents) // self.count
        indices = (parents % self.visible.shape[1]).reshape(-1, beams, 1)
        self.visible = np.take_along_axis(self.visible, pad_batch(indices, self.rows), axis=1)

    @in_device_thread
    def source_inputs(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return copies of the keys and values and of the mask of the sources of `rows` (N,)."""
        inputs = rows // self.visible.shape[1]
        states = self.buffers.states
        names = [next_input_name(tensor.name) for tensor in self.export.specs["encoder"].outputs]
        arrays = {name: states[name].numpy() for name in names} | self.source
        return {name: array[inputs] for name, array in arrays.items()}


def pad_batch(array: np.ndarray, rows: int) -> np.ndarray:
    """Return `array` with its first row appended until there are `rows` rows."""
    return np.concatenate([array, np.repeat(array[:1], rows - len(array), axis=0)])


def pad(array: np.ndarray, rows: int, length: int, fill: int = 0) -> np.ndarray:
    """Return `array` (B, T) with `rows` rows of `length`.

    Rows are filled with `fill` on the right, and the first row is repeated.
    """
    missing = length - array.shape[1]
    return pad_batch(np.pad(array, ((0, 0), (0, missing)), constant_values=fill), rows)


# --------------------------------------------------------------------------- searches on the device


class CudaSearch:
    """The `DeviceSearch` that begins with the prompts of `request`: beam search if it has beams,
    else greedy search."""

    def __init__(self, decoder: CudaRows, request: GenerationRequest):
        self.decoder = decoder
        self.options = options = request.options
        self.close = decoder.close
        count, self.prompt = request.input_ids.shape
        self.ended = np.zeros(count, bool)
        self.num_tokens = 0
        # captured while the caches are empty
        self.graph = decoder.buffers.beam_graph(options) if options.num_beams > 1 else None
        # selects the first token of greedy search
        decoder.read(request.input_ids, request.attention_mask, options.num_beams)
        # The prompt has written the inputs of the first step, and each step those of the next.
        step = decoder.buffers.step_graph(options.num_beams)
        step.put(**decoder.source)
        self.run = step.run
        if self.graph is not None:
            self.graph.put(**dict.fromkeys(self.graph.specs, 0) | first_state(options))

    @in_device_thread
    def advance(self, steps: int = SEARCH_STEPS) -> np.ndarray | None:
        """Run `steps` steps, or fewer at `max_new_tokens`. `ended` says which inputs have ended.

        Return the tokens (B, T) of greedy search, which have no meaning after the end token of a
        row. Return `None` for beam search, see `result`.
        """
        start, limit = self.num_tokens, self.options.max_new_tokens
        self.num_tokens = min(start + steps, limit)
        if self.graph is None:
            for number in range(max(start, 1), self.num_tokens):
                self.run(waits=number == self.num_tokens - 1)
            tokens = self.tokens(start)
            self.ended |= np.isin(tokens, self.options.eos_token_ids).any(axis=1)
            self.ended |= self.num_tokens == limit
            return tokens
        for number in range(start, self.num_tokens):
            if number:
                self.run()
            self.graph.run()
        can_improve = self.graph.values["can_improve"].numpy()[: len(self.ended), 0]
        self.ended = ~can_improve | (self.num_tokens == limit)
        return None

    def tokens(self, start: int) -> np.ndarray:
        """Copy the new tokens (B, T) from number `start` on from the device and return them."""
        buffers = self.decoder.buffers
        if self.num_tokens - start == 1:  # the input of the next step is less to copy
            tokens = buffers.step_graph(1).values["input_ids"].numpy()
        else:
            first, end = self.prompt + start, self.prompt + self.num_tokens
            tokens = buffers.states["tokens"].numpy()[:, 0, first:end, 0]
        return tokens[: len(self.ended)].copy()

    @in_device_thread
    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the new tokens (B * N, T) of the best finished hypotheses, and their scores (B *
        N,).

        N is `num_return_sequences`.
        """
        assert self.graph is not None  # it is a beam search
        inputs, count = len(self.ended), self.options.num_return_sequences
        state = {
            name: self.graph.values[f"finished_{name}"].numpy()[:inputs, :count]
            for name in ("visible", "tokens", "lengths", "scores")
        }
        tokens = self.decoder.buffers.states["tokens"].numpy()[:, 0, self.prompt :, 0]
        lengths = state["lengths"].reshape(-1)
        sequences = np.full((len(lengths), lengths.max(initial=1)), self.options.fill_token_id)
        histories = state["visible"].reshape(len(lengths), -1)[:, self.prompt :]
        for row, (history, last) in enumerate(zip(histories, state["tokens"].reshape(-1))):
            before = tokens[row // count][history]
            sequences[row, : len(before) + 1] = [*before, last]
        # on the CPU these are the numbers of the buffers, which the next search writes
        return sequences, state["scores"].reshape(-1).copy()


def first_state(options: Options) -> dict[str, np.ndarray | float]:
    """Return the inputs of the graph of beam search before the first token of a search with
    `options`, of those that are not 0."""
    is_other = np.arange(options.num_beams) > 0
    return {
        # the rows of one input are equal at first, so only the first row counts
        "scores": np.where(is_other, EXCLUDED_SCORE, 0),
        "finished_scores": -np.inf,
        "is_best": np.arange(options.candidates) < options.num_beams,
        "can_improve": True,
        "eos_token_ids": np.array(options.eos_token_ids or -1),
        "max_length": options.max_new_tokens,
        "length": 1,
        "length_penalty": options.length_penalty,
        "stops_early": options.early_stopping is True,
        "never_stops_early": options.early_stopping == "never",
    }
