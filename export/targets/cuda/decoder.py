"""The decoders of the cuda target. Its graphs use buffers on the device and are replayed as CUDA
graphs."""

import collections
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnxruntime

from ...errors import UsageError
from ...inference.decoder import (
    GenerationRequest,
    LoadedExport,
    check_memory,
    next_input_name,
    position_bytes,
)
from ...inference.options import EXCLUDED_SCORE, Options
from ...inference.search import LogitsProcessors
from ...inference.session import Session
from ...specs.graph_spec import GraphSpec, TensorSpec, concrete_shape

BFLOAT16 = 16  # ONNX's number of the type
SYNC_EVERY = 16  # steps of a search on the device between two checks for its end
# Cache sizes are multiples of these, so that batches share captured graphs. 1, 2 and 4 rows are
# sizes as well.
SLOTS = 64
SOURCE = 32
ROWS = 8


@dataclass(frozen=True)
class CudaDecoders:
    """The `DecoderFactory` of one loaded export: makes a decoder per request."""

    export: LoadedExport
    pool: "Pool" = field(init=False)
    supports_empty_prompts = False
    supports_candidates = False

    def __post_init__(self) -> None:
        export = self.export
        object.__setattr__(
            self, "pool", Pool(export.sessions["decoder"], export.specs["decoder"], export.device)
        )

    def start(self, request: GenerationRequest) -> "CudaDecoder":
        """Encode the source of `request`, if it has one, and return the decoder of its prompts.

        Raises:
            UsageError: if the request needs more memory than the machine or the GPU has.
        """
        options = request.options
        ids = request.input_ids
        # Caches do not grow, and each beam fills one slot per step.
        new_tokens = options.max_new_tokens * options.rows_per_input
        cache_bytes = 0
        if self.export.device == "cpu":
            cache_bytes = (
                len(ids)
                * (ids.shape[1] + new_tokens)
                * position_bytes(self.export.specs["decoder"])
            )
        check_memory(request, self.export.config["vocab_size"], cache_bytes)
        sizes = {
            "batch_size": bucket_size(len(ids)),
            "slots": round_up(ids.shape[1] + new_tokens, SLOTS),
        }
        window = self.export.config.get("sliding_window")
        if request.source is None:
            return CudaDecoder(self.buffers(sizes), self.pool, None, window, options.rows_per_input)
        buffers, mask = self.encode(*request.source, sizes)
        return CudaDecoder(buffers, self.pool, mask, window, options.rows_per_input)

    def encode(
        self, ids: np.ndarray, mask: np.ndarray, sizes: dict[str, int]
    ) -> tuple["Buffers", np.ndarray]:
        """Return buffers with the keys and values of the source, and the padded `mask` (B, S).

        Args:
            ids: the tokens of the sources (B, S).
            mask: 0 where they have padding.
            sizes: the batch size and the number of slots of the buffers.
        """
        added = -ids.shape[1] % SOURCE
        # pad tokens, which positions derived from ids do not count
        fills = (self.export.config.get("pad_token_id") or 0, 0)
        padded = [
            pad_batch(
                np.pad(array, ((0, 0), (0, added)), constant_values=fill), sizes["batch_size"]
            )
            for array, fill in zip((ids, mask), fills, strict=True)
        ]
        buffers = self.buffers({**sizes, "source_length": padded[0].shape[1]})
        encoder = self.export.sessions["encoder"]
        binding = encoder.io_binding()
        for name, array in zip(("input_ids", "attention_mask"), padded, strict=True):
            binding.bind_cpu_input(name, array)
        for tensor in self.export.specs["encoder"].outputs:
            binding.bind_ortvalue_output(tensor.name, buffers.states[next_input_name(tensor.name)])
        encoder.run_bound(binding)
        return buffers, padded[1]

    def buffers(self, sizes: dict[str, int]) -> "Buffers":
        try:
            return self.pool.take(sizes)
        except Exception as error:  # onnxruntime's errors have no other common class
            raise UsageError(
                f"cannot allocate caches of {sizes['slots']} slots for max_new_tokens: {error}"
            ) from None

    def generate(self, request: GenerationRequest) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Run greedy or beam search on the device.

        Returns:
            The new tokens (B * N, T), and the scores (B * N,) of beam search, else `None`. N is the
                number of sequences per input. The whole result is `None` if the search must run in
                numpy: for sampling, logits processors, scores of greedy search, models with a
                sliding window, and more candidates than the vocabulary has.
        """
        options = request.options
        is_beam_search = options.num_beams > 1
        if (
            options.do_sample
            or (request.is_scored and not is_beam_search)
            or LogitsProcessors(options, request.prompt)
        ):
            return None
        if self.export.config.get("sliding_window") is not None:
            return None
        # the graph selects that many candidates per beam
        if is_beam_search and options.candidates > self.export.config["vocab_size"]:
            return None
        decoder = self.start(request)
        try:
            if is_beam_search:
                return decoder.beam_search(
                    request.input_ids, request.attention_mask, options, self.beam_session
                )
            return decoder.greedy(request.input_ids, request.attention_mask, options), None
        finally:
            decoder.close()

    def beam_session(self, sizes: dict[str, int]) -> tuple[Session, GraphSpec]:
        """Return a session of the graph of beam search with named axes fixed to `sizes`, and its
        spec."""
        return self.export.make_session("beams", sizes), self.export.specs["beams"]


def bucket_size(rows: int) -> int:
    """Return the number of rows of the buffers for `rows` inputs.

    It is `rows` rounded up to a power of two, or above `ROWS` to a multiple of `ROWS`.
    """
    return round_up(rows, ROWS) if rows > ROWS else 1 << (rows - 1).bit_length()


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class CudaDecoder:
    """The `Decoder` of one request, with buffers on the device.

    Caches are never reordered: `visible` (B, beams, slots) says which slots of the input's cache
    each beam reads. If there are fewer inputs than rows of the buffers, the first input fills the
    others, whose results are ignored.

    Args:
        buffers: the caches and graphs that it uses.
        pool: where `close` puts the buffers back.
        source_mask: the padded mask of the sources, `None` for a decoder-only model.
        window: the sliding window in tokens, or `None`.
        beams: the number of beams, for which the step is captured.
    """

    all_logits = False
    max_step_tokens = 1

    def __init__(
        self,
        buffers: "Buffers",
        pool: "Pool",
        source_mask: np.ndarray | None,
        window: int | None,
        beams: int,
    ):
        self.buffers = buffers
        self.pool = pool
        self.window = window
        self.source = {} if source_mask is None else {"encoder_attention_mask": source_mask}
        buffers.step_graph(beams)  # capture while the caches are empty

    def close(self) -> None:
        """Put the buffers back into the pool, for the next request of their sizes."""
        if hasattr(self, "buffers"):
            self.pool.free.append(self.buffers)
            del self.buffers  # another batch may use them now

    def prefill(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Feed the prompts (B, P) and return the logits (B, 1, V) after the last token of each.

        Padding, where `attention_mask` is 0, may stand on either side.
        """
        return self.read(input_ids, attention_mask).logits.numpy()[: len(input_ids), :1].copy()

    def read(self, ids: np.ndarray, mask: np.ndarray, beams: int = 1) -> "DeviceGraph":
        """Feed the prompts `ids` (B, P) and return the graph, whose `logits` follow the last
        tokens.

        The logits are repeated for the number of `beams`. `mask` is 0 for padding.
        """
        rows = self.buffers.sizes["batch_size"]
        slots = self.buffers.sizes["slots"]
        self.count = len(ids)
        ids = pad_batch(ids, rows)
        mask = pad_batch(mask, rows)
        length = ids.shape[1]
        self.positions = np.zeros((rows, slots), np.int64)
        self.visible = np.zeros((rows, 1, slots), bool)
        self.positions[:, :length] = np.maximum(mask.cumsum(axis=1) - 1, 0)
        self.visible[:, 0, :length] = mask
        self.used = length
        self.lengths = mask.sum(axis=1)
        earlier = np.arange(slots) <= np.arange(length)[:, None]
        last = length - 1 - mask[:, ::-1].argmax(axis=1)
        graph = self.buffers.prompt_graph(length, beams)
        self.put(
            graph,
            ids,
            self.positions[:, :length],
            0,
            self.visible & earlier,
            np.repeat(last[:, None], beams, axis=1),
        )
        graph.run()
        return graph

    def step(self, tokens: np.ndarray, beam_idx: np.ndarray | None = None) -> np.ndarray:
        """Feed one token per beam, `tokens` (B * beams, 1), and return the logits (B * beams, 1,
        V).

        `beam_idx` (B * beams,), if set, is the row that each row continues.
        """
        rows, beams, slots = self.visible.shape
        if beam_idx is not None:
            parents = pad_batch((beam_idx % beams).reshape(-1, beams, 1), rows)
            self.visible = np.take_along_axis(self.visible, parents, axis=1)
        new = np.arange(beams)
        self.visible[:, new, self.used + new] = True
        positions = np.repeat(self.lengths[:, None], beams, axis=1)
        self.positions[:, self.used + new] = positions
        graph = self.buffers.step_graph(beams)
        ids = pad_batch(tokens.reshape(-1, beams), rows)
        self.put(graph, ids, positions, self.used, self.visible, np.tile(new, (rows, 1)))
        graph.run()
        self.used += beams
        self.lengths = self.lengths + 1
        return graph.logits.numpy()[: self.count].reshape(self.count * beams, 1, -1).copy()

    def expand(self, expand_size: int) -> None:
        """Continue each input with `expand_size` beams, which share the cache of their input."""
        self.visible = np.repeat(self.visible, expand_size, axis=1)

    def greedy(self, ids: np.ndarray, mask: np.ndarray, options: Options) -> np.ndarray:
        """Return the new tokens (B, T) of greedy search, with the fill token after each end token.

        Nothing is copied between two steps. Every `SYNC_EVERY` steps the host checks whether all
        rows have ended.

        Args:
            ids: the prompts (B, P).
            mask: 0 where they have padding.
            options: the generation options.
        """
        self.read(ids, mask)
        step = self.buffers.step_graph(1)
        length = ids.shape[1]
        rows = self.buffers.sizes["batch_size"]
        step.put(
            count=np.ones(rows, np.int64),
            logit_indices=np.zeros((rows, 1), np.int64),
            **self.source,
        )
        generated = 1
        while generated < options.max_new_tokens:
            step.run()
            generated += 1
            if (
                generated % SYNC_EVERY == 1
                and has_ended(self.generated(length, generated), options)[:, -1].all()
            ):
                break
        tokens = self.generated(length, generated)
        ended = has_ended(tokens, options)
        is_after_end = np.pad(ended, ((0, 0), (1, 0)))[:, :-1]
        return np.where(is_after_end, options.fill_token_id, tokens)[
            :, : 1 + (~ended).sum(axis=1).max()
        ]

    def beam_search(
        self, ids: np.ndarray, mask: np.ndarray, options: Options, make_session: Callable
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the new tokens (B * N, T) of beam search and their scores (B * N,).

        Nothing is copied between two steps. Every `SYNC_EVERY` steps the host checks whether any
        input can still improve.

        Args:
            ids: the prompts (B, P).
            mask: 0 where they have padding.
            options: the generation options; N is `num_return_sequences`.
            make_session: returns the session and spec of the graph of beam search for sizes of
                axes.
        """
        rows = self.buffers.sizes["batch_size"]
        beams = options.num_beams
        step = self.buffers.step_graph(beams)
        search = self.buffers.beam_search(options, make_session)
        self.read(ids, mask, beams)
        step.put(
            count=np.full(rows, beams),
            logit_indices=np.tile(np.arange(beams), (rows, 1)),
            **self.source,
        )
        search.begin(options)
        for generated in range(1, options.max_new_tokens + 1):
            search.run()
            is_seen = generated % SYNC_EVERY == 0
            if generated == options.max_new_tokens or (
                is_seen and not search.state["can_improve"].numpy().any()
            ):
                break
            step.run()
        return self.best(search, ids.shape[1], options)

    def best(
        self, search: "BeamSearchState", prompt: int, options: Options
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the new tokens (B * N, T) of the best finished hypotheses, and their scores (B *
        N,).

        Args:
            search: the graph of beam search after its last step.
            prompt: the length of the prompts with padding.
            options: the generation options; N is `num_return_sequences`.
        """
        count = options.num_return_sequences
        names = ("visible", "tokens", "lengths", "scores")
        state = {
            name: search.state[f"finished_{name}"].numpy()[: self.count, :count] for name in names
        }
        tokens = self.buffers.states["tokens"].numpy()[:, 0, prompt:, 0]
        lengths = state["lengths"].reshape(-1)
        sequences = np.full((len(lengths), lengths.max()), options.fill_token_id)
        histories = state["visible"].reshape(len(lengths), -1)
        for row, (history, last) in enumerate(zip(histories, state["tokens"].reshape(-1))):
            before = tokens[row // count][history[prompt:]]
            sequences[row, : len(before) + 1] = [*before, last]
        return sequences, state["scores"].reshape(-1)

    def generated(self, prompt: int, count: int) -> np.ndarray:
        """Copy the first `count` new tokens (B, count) from the device and return them.

        `prompt` is the length of the prompts with padding.
        """
        return (
            self.buffers.states["tokens"]
            .numpy()[: self.count, 0, prompt : prompt + count, 0]
            .copy()
        )

    def put(
        self,
        graph: "DeviceGraph",
        ids: np.ndarray,
        positions: np.ndarray,
        first_slot: int,
        visible: np.ndarray,
        logit_indices: np.ndarray,
    ) -> None:
        if self.window is not None:
            visible = visible & (self.positions[:, None] > positions[:, :, None] - self.window)
        rows, count = ids.shape
        inputs = dict(
            input_ids=ids,
            position_ids=positions,
            visible=visible,
            logit_indices=logit_indices,
            **self.source,
        )
        graph.put(**inputs, count=np.full(rows, count), first_slot=np.full(rows, first_slot))


def has_ended(tokens: np.ndarray, options: Options) -> np.ndarray:
    """Return flags (B, T): True if the row has an end token at or before each of `tokens` (B, T).

    `options` has the end tokens.
    """
    return np.isin(tokens, options.eos_token_ids).cumsum(axis=1) > 0


def pad_batch(array: np.ndarray, rows: int) -> np.ndarray:
    """Return `array` with its first row appended until there are `rows` rows."""
    return np.concatenate([array, np.repeat(array[:1], rows - len(array), axis=0)])


class Buffers:
    """Caches on the device, and the decoder graphs that are bound to them.

    One request at a time uses them, and `Pool` keeps them for the next: a captured CUDA graph can
    only read and write the buffers that it was captured with.

    Args:
        session: the session of the decoder graph.
        spec: the inputs and outputs of that graph.
        sizes: the size of each named axis, such as `{"batch_size": 4, "slots": 128}`.
        device: where the caches are, for example `"cuda"`.
    """

    numbers = itertools.count(1)  # of captured graphs

    def __init__(self, session: Session, spec: GraphSpec, sizes: dict[str, int], device: str):
        self.session = session
        self.spec = spec
        self.sizes = sizes
        self.device = device
        caches = [
            tensor
            for tensor in spec.inputs
            if tensor.name.startswith(("past_key_values", "tokens"))
        ]
        self.states = {tensor.name: device_zeros(tensor, sizes, device) for tensor in caches}
        self.steps: dict[int, DeviceGraph] = {}
        self.searches: dict[tuple[int, int], BeamSearchState] = {}

    def prompt_graph(self, length: int, beams: int) -> "DeviceGraph":
        """Return the graph that reads prompts of `length` tokens.

        It writes the logits after the last tokens, repeated for `beams`, and the inputs of the next
        step to the step graph.
        """
        return DeviceGraph(
            self, {"target_length": length, "logits": beams}, self.step_graph(beams), number=-1
        )

    def step_graph(self, beams: int) -> "DeviceGraph":
        """Return the graph of a step of one token for each of `beams`, which it keeps for later
        calls.

        It writes the inputs of the next step to its own inputs.
        """
        if beams not in self.steps:
            sizes = {"target_length": beams, "logits": beams}
            self.steps[beams] = DeviceGraph(self, sizes, None, next(self.numbers))
        return self.steps[beams]

    def beam_search(self, options: Options, make_session: Callable) -> "BeamSearchState":
        key = options.num_beams, options.candidates
        if key not in self.searches:
            self.searches[key] = BeamSearchState(make_session, self, key, next(self.numbers))
        return self.searches[key]


class Pool:
    """The buffers that no request uses now, at most `size` of them, the oldest dropped first."""

    def __init__(self, session: Session, spec: GraphSpec, device: str, size: int = 4):
        self.make = lambda sizes: Buffers(session, spec, sizes, device)
        self.free: collections.deque[Buffers] = collections.deque(maxlen=size)

    def take(self, sizes: dict[str, int]) -> Buffers:
        for buffers in self.free:
            if buffers.sizes == sizes:
                self.free.remove(buffers)
                return buffers
        return self.make(sizes)


class DeviceGraph:
    """A decoder graph with inputs and outputs on the device, bound once; `run` runs it.

    Args:
        buffers: the caches that it reads and writes.
        sizes: the size of each named axis that `buffers` does not set.
        following: the graph to whose inputs it writes the inputs of the next step; `None` for
            itself.
        number: of the CUDA graph that is captured and replayed, or -1 to capture none.
    """

    def __init__(
        self, buffers: Buffers, sizes: dict[str, int], following: "DeviceGraph | None", number: int
    ):
        spec = buffers.spec
        sizes = {**buffers.sizes, **sizes}
        device = buffers.device
        new = [tensor for tensor in spec.inputs if tensor.name not in buffers.states]
        self.inputs = {tensor.name: device_zeros(tensor, sizes, device) for tensor in new}
        self.put(slot_numbers=np.arange(sizes["slots"]))
        self.logits: onnxruntime.OrtValue = (
            following.logits if following else device_zeros(spec.outputs[0], sizes, device)
        )
        outputs = {**(following or self).inputs, **buffers.states, "logits": self.logits}
        # Computes `logits` (B, N, V) on the device, and the inputs of the next step.
        inputs = self.inputs | buffers.states
        self.run: Callable[[], None] = bind_and_capture(
            buffers.session, spec, inputs, outputs, number
        )

    def put(self, **values: np.ndarray) -> None:
        """Copy `values` to the inputs of these names."""
        for name, array in values.items():
            self.inputs[name].update_inplace(np.ascontiguousarray(array))


class BeamSearchState:
    """The graph of beam search, bound to the step graph's logits and inputs and to its own `state`.

    `state` is `{input: value on the device}`, and `run` runs the graph.

    Args:
        make_session: returns the session and spec of the graph for sizes of axes.
        buffers: the caches of the step graph.
        key: the number of beams, and the number of candidates that are looked at in each step.
        number: of the CUDA graph that is captured and replayed.
    """

    def __init__(self, make_session: Callable, buffers: Buffers, key: tuple[int, int], number: int):
        sizes = {
            **buffers.sizes,
            "num_beams": key[0],
            "candidates": key[1],
            "num_ends": max(1, key[1] // key[0] - 1),
        }
        session, spec = make_session(sizes)
        step = buffers.step_graph(key[0])
        shared = {**step.inputs, "tokens": buffers.states["tokens"], "logits": step.logits}
        new = [tensor for tensor in spec.inputs if tensor.name not in shared]
        self.state = {tensor.name: device_zeros(tensor, sizes, buffers.device) for tensor in new}
        self.zeros = {name: value.numpy().copy() for name, value in self.state.items()}
        self.run = bind_and_capture(session, spec, shared | self.state, shared | self.state, number)

    def begin(self, options: Options) -> None:
        """Set the state to that before the first token of a search with `options`."""
        fresh = {name: values.copy() for name, values in self.zeros.items()}
        # the rows of one input are equal at first, so only the first row counts
        fresh["scores"][:, 1:] = EXCLUDED_SCORE
        fresh["finished_scores"][:] = -np.inf
        fresh["is_best"][: options.num_beams] = fresh["can_improve"][:] = True
        fresh["eos_token_ids"][:] = options.eos_token_ids or -1
        fresh["max_length"][:] = options.max_new_tokens
        fresh["length"][:] = 1
        fresh["length_penalty"][:] = options.length_penalty
        fresh["stops_early"][:] = options.early_stopping is True
        fresh["never_stops_early"][:] = options.early_stopping == "never"
        for name, values in fresh.items():
            self.state[name].update_inplace(values)


def bind_and_capture(
    session: Session, spec: GraphSpec, inputs: dict, outputs: dict, number: int
) -> Callable[[], None]:
    """Return a function that runs `session` with bound inputs and outputs.

    Args:
        session: the session of the graph.
        spec: the inputs and outputs of the graph.
        inputs: `{input: value}` of all inputs.
        outputs: `{input of the next step: value}`, to which the outputs are written.
        number: of the CUDA graph that is captured here and replayed, or -1 to capture none.
    """
    binding = session.io_binding()
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    for tensor in spec.inputs:
        binding.bind_ortvalue_input(tensor.name, inputs[tensor.name])
    for tensor in spec.outputs:
        binding.bind_ortvalue_output(tensor.name, outputs[next_input_name(tensor.name)])

    def run() -> None:
        session.run_bound(binding, options)

    if number > 0:
        run()  # the capture takes several runs, with empty caches
    return run


def device_zeros(tensor: TensorSpec, sizes: dict[str, int], device: str) -> onnxruntime.OrtValue:
    """Return an `OrtValue` of zeros for `tensor` on `device`.

    `sizes` are the sizes of its named axes. The values must be finite, because attention multiplies
    masked ones by 0.
    """
    shape = concrete_shape(tensor, sizes)
    if tensor.dtype == "bfloat16":  # numpy has no bfloat16
        value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, BFLOAT16, device)
        value.update_inplace(
            onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
                np.zeros(shape, np.uint16), BFLOAT16
            )
        )
        return value
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, tensor.dtype), device)
