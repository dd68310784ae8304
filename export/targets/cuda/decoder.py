"""Generating with the cuda target's graphs, in buffers on the device that are replayed as CUDA
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
from ...inference.search import Processors
from ...inference.session import Session
from ...specs.graph_spec import GraphSpec, TensorSpec, shape_of

BFLOAT16 = 16  # among ONNX's types
SYNC_EVERY = 16  # steps of a search on the device between two looks at the tokens
# Sizes of caches are multiples of these, so that other batches find the same captured graphs: 1, 2,
# 4 rows and multiples of 8 as well.
SLOTS = 64
SOURCE = 32
ROWS = 8


@dataclass(frozen=True)
class CudaDecoders:
    """The `DecoderFactory` of one loaded export."""

    export: LoadedExport
    pool: "Pool" = field(init=False)
    takes_empty_prompts = False
    takes_candidates = False

    def __post_init__(self) -> None:
        export = self.export
        object.__setattr__(
            self, "pool", Pool(export.sessions["decoder"], export.specs["decoder"], export.device)
        )

    def start(self, request: GenerationRequest) -> "CudaDecoder":
        """As `DecoderFactory`."""
        options = request.options
        ids = request.input_ids
        # Caches do not grow: each beam fills a slot at each step.
        room = options.max_new_tokens * options.rows_per_input
        cache_bytes = 0
        if self.export.device == "cpu":
            cache_bytes = (
                len(ids) * (ids.shape[1] + room) * position_bytes(self.export.specs["decoder"])
            )
        check_memory(request, self.export.config["vocab_size"], cache_bytes)
        sizes = {"batch_size": bucket_of(len(ids)), "slots": round_up(ids.shape[1] + room, SLOTS)}
        window = self.export.config.get("sliding_window")
        if request.source is None:
            return CudaDecoder(self.buffers(sizes), self.pool, None, window, options.rows_per_input)
        buffers, mask = self.encode(*request.source, sizes)
        return CudaDecoder(buffers, self.pool, mask, window, options.rows_per_input)

    def encode(
        self, ids: np.ndarray, mask: np.ndarray, sizes: dict[str, int]
    ) -> tuple["Buffers", np.ndarray]:
        """Buffers with the keys and values of the source, which stay on the device; and its mask as
        they have it."""
        added = -ids.shape[1] % SOURCE
        # positions that count ids do not count padding
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
        except Exception as error:  # onnxruntime's own have no other class in common
            raise UsageError(
                f"caches of {sizes['slots']} slots, which hold max_new_tokens, cannot be made: "
                f"{error}"
            ) from None

    def generate(self, request: GenerationRequest) -> tuple[np.ndarray, np.ndarray | None] | None:
        """As `DecoderFactory`: greedy and beam search, where nothing changes logits, are on the
        device as a whole."""
        options = request.options
        is_beam_search = options.num_beams > 1
        if (
            options.do_sample
            or (request.is_scored and not is_beam_search)
            or Processors(options, request.prompt)
        ):
            return None
        if self.export.config.get("sliding_window") is not None:
            return None
        # the graph takes as many of each beam
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
        """A session of the beams' graph whose axes have these `sizes`, and its spec: no shape is
        left to compute."""
        return self.export.make_session("beams", sizes), self.export.specs["beams"]


def bucket_of(rows: int) -> int:
    """The next power of two, or from `ROWS` on the next multiple of that."""
    return round_up(rows, ROWS) if rows > ROWS else 1 << (rows - 1).bit_length()


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class CudaDecoder:
    """The `Decoder` of a batch, in `buffers` of its own. Nothing moves: `visible` (B, beams, slots)
    says which slots of its input's cache each beam reads. Where the batch is smaller than the
    buffers, its first row is in the others too, which end when it does, and nobody sees."""

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
        buffers.step_graph(beams)  # captured before there is anything in the caches

    def close(self) -> None:
        """As `Decoder`: the next batch of these sizes has the buffers."""
        if hasattr(self, "buffers"):
            self.pool.free.append(self.buffers)
            del self.buffers  # which are another batch's from here on

    def prefill(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """As `Decoder`; the prompts may be padded on either side."""
        return self.read(input_ids, attention_mask).logits.numpy()[: len(input_ids), :1].copy()

    def read(self, ids: np.ndarray, mask: np.ndarray, beams: int = 1) -> "DeviceGraph":
        """The graph that has read the prompts, with the logits after each for each of the
        `beams`."""
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
        """As `Decoder`."""
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
        """As `Decoder`: all have one cache."""
        self.visible = np.repeat(self.visible, expand_size, axis=1)

    def greedy(self, ids: np.ndarray, mask: np.ndarray, options: Options) -> np.ndarray:
        """As `search.TokenSearch`: the likeliest tokens, with no copy to or from the device between
        two steps. Whether all rows have ended is seen after `SYNC_EVERY` steps and their
        multiples."""
        self.read(ids, mask)
        step = self.buffers.step_graph(1)
        length = ids.shape[1]
        rows = self.buffers.sizes["batch_size"]
        step.put(
            count=np.ones(rows, np.int64), logits_of=np.zeros((rows, 1), np.int64), **self.source
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
        """As `search.BeamSearch`, with nothing copied between two steps but, after `SYNC_EVERY` of
        them, whether any input can still improve. `make_session` makes the session of the beams'
        graph."""
        rows = self.buffers.sizes["batch_size"]
        beams = options.num_beams
        step = self.buffers.step_graph(beams)
        search = self.buffers.beam_search(options, make_session)
        self.read(ids, mask, beams)
        step.put(
            count=np.full(rows, beams),
            logits_of=np.tile(np.arange(beams), (rows, 1)),
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
        """The new tokens of the best finished hypotheses (B * N, up to the longest), and their
        scores (B * N,)."""
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
        """The tokens (B, count) after a prompt of this length, copied from the device."""
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
        logits_of: np.ndarray,
    ) -> None:
        if self.window is not None:
            visible = visible & (self.positions[:, None] > positions[:, :, None] - self.window)
        rows, count = ids.shape
        given = dict(
            input_ids=ids,
            position_ids=positions,
            visible=visible,
            logits_of=logits_of,
            **self.source,
        )
        graph.put(**given, count=np.full(rows, count), first_slot=np.full(rows, first_slot))


def has_ended(tokens: np.ndarray, options: Options) -> np.ndarray:
    """(B, t): whether the row has ended at or before each of its `tokens`."""
    return np.isin(tokens, options.eos_token_ids).cumsum(axis=1) > 0


def pad_batch(array: np.ndarray, rows: int) -> np.ndarray:
    """`array` with its first row after its last, as often as it takes to have `rows`."""
    return np.concatenate([array, np.repeat(array[:1], rows - len(array), axis=0)])


class Buffers:
    """Caches of `sizes` on `device`, for a decoder graph of the cuda target, and that graph with
    all bound to it. One batch at a time has them: `Pool` keeps them for the next, since a CUDA
    graph, once captured, reads and writes these alone."""

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
        """For prompts of `length`, with the logits after the last token for each of the `beams`;
        what their next step takes is put into its inputs, the logits where its own will be."""
        return DeviceGraph(
            self, {"target_length": length, "logits": beams}, self.step_graph(beams), number=-1
        )

    def step_graph(self, beams: int) -> "DeviceGraph":
        """For one token of each beam, with the logits of all; what the next step takes is put into
        the inputs."""
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
    """Buffers that no batch has at the moment, `size` at most."""

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
    """A decoder graph of the cuda target with inputs and outputs on the device, bound once;
    replayed as CUDA graph `number`, or not captured if that is -1. What the next step takes is put
    into the inputs of `following`, or into its own."""

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
        taken = {**(following or self).inputs, **buffers.states, "logits": self.logits}
        # Computes `logits` (B, N, V), on the device, and what the next step takes.
        inputs = self.inputs | buffers.states
        self.run: Callable[[], None] = bind_and_capture(
            buffers.session, spec, inputs, taken, number
        )

    def put(self, **values: np.ndarray) -> None:
        """`values` into the inputs."""
        for name, array in values.items():
            self.inputs[name].update_inplace(np.ascontiguousarray(array))


class BeamSearchState:
    """The beams' graph, bound to the logits and inputs of their steps, and to a `state` of its own
    on the device."""

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
        """The state before the first token, for `options`."""
        fresh = {name: values.copy() for name, values in self.zeros.items()}
        # rows of one input are equal at first: only the first of them counts
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
    """A function that runs `session`, its inputs bound to the values `inputs`, its outputs to those
    of `outputs` that the next step takes: as CUDA graph `number`, captured here, or uncaptured if
    that is -1."""
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
        run()  # capturing takes several steps, here of nothing
    return run


def device_zeros(tensor: TensorSpec, sizes: dict[str, int], device: str) -> onnxruntime.OrtValue:
    """An `OrtValue` of zeros on `device`. What an attention does not read is multiplied by 0, so it
    must be a number."""
    shape = shape_of(tensor, sizes)
    if tensor.dtype == "bfloat16":  # which numpy does not have
        value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, BFLOAT16, device)
        value.update_inplace(
            onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
                np.zeros(shape, np.uint16), BFLOAT16
            )
        )
        return value
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, tensor.dtype), device)
