"""Buffers on the device, and the graphs of the cuda target that are bound to them.

A captured CUDA graph reads and writes only the buffers that it was captured with, and onnxruntime
frees it only with its session. So buffers and their graphs are kept together, for all batches of
equal sizes. All functions here run in the device thread.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np
import onnxruntime

from ...inference.options import EXCLUDED_SCORE, Options
from ...inference.rows import next_input_name
from ...inference.session import LoadedExport, Session
from ...specs.graph_spec import GraphSpec, TensorSpec, concrete_shape

BFLOAT16 = 16  # ONNX's number of the type
ITEM_SIZES = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "int64": 8}  # bytes
UNCAPTURED = -1  # onnxruntime's number of a graph that is not captured
CAPTURE_RUNS = 3  # runs of a graph with a new number: two and a replay
MAX_KEPT_BYTES = 4 * 2**30  # bytes of kept buffers
MAX_GRAPHS = 512  # captured graphs
MAX_BEAM_SESSIONS = 64
Sizes = dict[str, int]  # sizes of axes, by name


class Pool:
    """The buffers of an export that no request uses now, and the numbers of captured graphs.

    `MAX_KEPT_BYTES` and `MAX_GRAPHS` bound them. Beyond these, buffers are freed after a request
    and nothing is captured.
    """

    def __init__(self, export: LoadedExport):
        self.export = export
        self.cache_specs = [tensor for tensor in export.specs["decoder"].inputs if is_cache(tensor)]
        self.free: list[Buffers] = []
        self.num_bytes = 0  # of kept buffers
        self.num_graphs = 0
        self.beam_sessions: dict[tuple, Session] = {}

    def take(self, sizes: Sizes) -> "Buffers":
        """Return unused buffers whose axes have `sizes`, or new ones.

        If no more buffers can be kept, return unused larger ones, or new ones for one request.
        """
        fitting = [buffers for buffers in self.free if buffers.fits(sizes)]
        best = min(fitting, key=lambda buffers: buffers.num_bytes, default=None)
        size = num_bytes(self.cache_specs, sizes)
        if best is not None and (best.sizes == sizes or self.num_bytes + size > MAX_KEPT_BYTES):
            self.free.remove(best)
            return best
        return Buffers(self, sizes, size)

    def give(self, buffers: "Buffers") -> None:
        """Keep `buffers` for the next request of their sizes, if the pool has room for them.

        Other threads may call this too.
        """
        if buffers.is_kept:
            buffers.drop_uncaptured()
            self.free.append(buffers)

    def reserve(self, num_bytes: int) -> bool:
        """Count `num_bytes` as kept and return True, or return False if the pool has no room for
        them."""
        fits = self.num_bytes + num_bytes <= MAX_KEPT_BYTES
        self.num_bytes += num_bytes * fits
        return fits

    def graph_number(self, num_bytes: int) -> int:
        """Reserve `num_bytes` and return the number of a new captured graph.

        It is `UNCAPTURED` if there is no room for the graph, and if the export captures none.
        `num_bytes` is the size of its inputs and outputs.
        """
        if not self.export.captures or self.num_graphs >= MAX_GRAPHS or not self.reserve(num_bytes):
            return UNCAPTURED
        self.num_graphs += 1
        return self.num_graphs

    def can_search(self, sizes: Sizes) -> bool:
        """Return True if a session of the graph of beam search for `sizes` exists or can be
        opened."""
        return beam_key(sizes) in self.beam_sessions or len(self.beam_sessions) < MAX_BEAM_SESSIONS

    def beam_session(self, sizes: Sizes) -> Session:
        """Return the session of the graph of beam search with named axes fixed to `sizes`."""
        key = beam_key(sizes)
        if key not in self.beam_sessions:
            self.beam_sessions[key] = self.export.make_session("beams", dict(key))
        return self.beam_sessions[key]


def beam_key(sizes: Sizes) -> tuple[tuple[str, int], ...]:
    """Return `((axis, size), …)` of the graph of beam search, which reads no source."""
    return tuple((name, size) for name, size in sizes.items() if name != "source_length")


def beam_sizes(sizes: Sizes, options: Options) -> Sizes:
    """Return `{axis: size}` of the graph of beam search with `options` on buffers of `sizes`."""
    beams, candidates = options.num_beams, options.candidates
    num_ends = max(1, candidates // beams - 1)
    return {**sizes, "num_beams": beams, "candidates": candidates, "num_ends": num_ends}


class Buffers:
    """Caches on the device, and the graphs that are bound to them. One request at a time uses them.

    Args:
        pool: where `give` puts them back.
        sizes: the size of each named axis, such as `{"batch_size": 4, "slots": 128}`.
        num_bytes: the size of the caches.
    """

    def __init__(self, pool: Pool, sizes: Sizes, num_bytes: int):
        self.pool = pool
        self.sizes = sizes
        self.num_bytes = num_bytes
        self.spec, self.device = pool.export.specs["decoder"], pool.export.device
        self.states = {
            tensor.name: device_zeros(tensor, sizes, self.device) for tensor in pool.cache_specs
        }
        self.is_kept = pool.reserve(num_bytes)
        self.steps: dict[int, DeviceGraph] = {}
        self.searches: dict[tuple, BeamGraph] = {}

    def fits(self, sizes: Sizes) -> bool:
        return all(self.sizes[axis] >= size for axis, size in sizes.items())

    def prompt_graph(self, length: int, beams: int) -> "DeviceGraph":
        """Return a new graph that reads prompts of `length` tokens.

        It writes the logits after the last tokens, repeated for `beams`, and the inputs of the next
        step to the step graph.
        """
        sizes = {"target_length": length, "logits": beams}
        return DeviceGraph(self, sizes, self.step_graph(beams), UNCAPTURED)

    def step_graph(self, beams: int) -> "DeviceGraph":
        """Return the graph of a step of one token for each of `beams`, which it keeps for later
        calls.

        It writes the inputs of the next step to its own inputs.
        """
        if beams not in self.steps:
            sizes = {"target_length": beams, "logits": beams}
            tensors = [tensor for tensor in self.spec.inputs if not is_cache(tensor)]
            number = self.graph_number([*tensors, self.spec.outputs[0]], {**self.sizes, **sizes})
            self.steps[beams] = DeviceGraph(self, sizes, None, number)
        return self.steps[beams]

    def beam_graph(self, options: Options) -> "BeamGraph":
        """Return the graph of beam search with `options`, which it keeps for later calls."""
        sizes = beam_sizes(self.sizes, options)
        if (key := beam_key(sizes)) not in self.searches:
            self.searches[key] = BeamGraph(self, sizes)
        return self.searches[key]

    def graph_number(self, tensors: Iterable[TensorSpec], sizes: Sizes) -> int:
        return self.pool.graph_number(num_bytes(tensors, sizes)) if self.is_kept else UNCAPTURED

    def drop_uncaptured(self) -> None:
        self.steps = {key: graph for key, graph in self.steps.items() if graph.number > 0}
        self.searches = {key: graph for key, graph in self.searches.items() if graph.number > 0}


class DeviceGraph:
    """A decoder graph with inputs and outputs on the device, bound once; `run` runs it.

    Args:
        buffers: the caches that it reads and writes.
        sizes: the size of each named axis that `buffers` does not set.
        following: the graph to whose inputs it writes the inputs of the next step; `None` for
            itself.
        number: of the CUDA graph that is captured and replayed, or `UNCAPTURED`.
    """

    def __init__(
        self, buffers: Buffers, sizes: Sizes, following: "DeviceGraph | None", number: int
    ):
        spec, device = buffers.spec, buffers.device
        sizes = {**buffers.sizes, **sizes}
        new = [tensor for tensor in spec.inputs if tensor.name not in buffers.states]
        self.number = number
        self.inputs = {tensor.name: device_zeros(tensor, sizes, device) for tensor in new}
        self.put(slot_numbers=np.arange(sizes["slots"]))
        self.logits: onnxruntime.OrtValue = (
            following.logits if following else device_zeros(spec.outputs[0], sizes, device)
        )
        outputs = {**(following or self).inputs, **buffers.states, "logits": self.logits}
        session = buffers.pool.export.sessions["decoder"]
        # Computes `logits` (B, N, V) on the device, and the inputs of the next step.
        inputs = self.inputs | buffers.states
        self.run = bind_and_capture(session, spec, inputs, outputs, number)
        if number != UNCAPTURED:  # each run of the capture has advanced the slot
            self.put(first_slot=np.zeros(sizes["batch_size"], np.int64))

    def put(self, **values: np.ndarray) -> None:
        """Copy `values` to the inputs of these names."""
        for name, array in values.items():
            self.inputs[name].update_inplace(np.ascontiguousarray(array))


class BeamGraph:
    """The graph of beam search, bound to the step graph's logits and inputs and to its own `state`.

    `state` is `{input: value on the device}`, and `run` runs the graph.

    Args:
        buffers: the caches of the step graph.
        sizes: the size of each named axis, see `beam_sizes`.
    """

    def __init__(self, buffers: Buffers, sizes: Sizes):
        session = buffers.pool.beam_session(sizes)
        spec = buffers.pool.export.specs["beams"]
        step = buffers.step_graph(sizes["num_beams"])
        shared = {**step.inputs, "tokens": buffers.states["tokens"], "logits": step.logits}
        new = [tensor for tensor in spec.inputs if tensor.name not in shared]
        self.number = buffers.graph_number(new, sizes)
        self.state = {tensor.name: device_zeros(tensor, sizes, buffers.device) for tensor in new}
        self.zeros = {name: value.numpy().copy() for name, value in self.state.items()}
        values = shared | self.state
        self.run = bind_and_capture(session, spec, values, values, self.number)

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
) -> Callable[..., None]:
    """Return a function that runs `session` with bound inputs and outputs.

    With `waits=False` the function returns before a replay ends. The next run of the same session
    is after it, but other sessions and copies are not.

    Args:
        session: the session of the graph.
        spec: the inputs and outputs of the graph.
        inputs: `{input: value}` of all inputs.
        outputs: `{input of the next step: value}`, to which the outputs are written.
        number: of the CUDA graph that is captured here, in `CAPTURE_RUNS` runs, and replayed, or
            `UNCAPTURED`.
    """
    binding = session.io_binding()
    waiting, queued = run_options(number, waits=True), run_options(number, waits=False)
    for tensor in spec.inputs:
        binding.bind_ortvalue_input(tensor.name, inputs[tensor.name])
    for tensor in spec.outputs:
        binding.bind_ortvalue_output(tensor.name, outputs[next_input_name(tensor.name)])

    def run(waits: bool = True) -> None:
        session.run_bound(binding, waiting if waits or number == UNCAPTURED else queued)

    if number != UNCAPTURED:
        run()
    return run


def run_options(number: int, waits: bool) -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    options.add_run_config_entry("disable_synchronize_execution_providers", str(int(not waits)))
    return options


def is_cache(tensor: TensorSpec) -> bool:
    """Return True if `tensor` is an input that all graphs of a request share."""
    return tensor.name.startswith(("past_key_values", "tokens"))


def num_bytes(tensors: Iterable[TensorSpec], sizes: Sizes) -> int:
    return sum(
        math.prod(concrete_shape(tensor, sizes)) * ITEM_SIZES[tensor.dtype] for tensor in tensors
    )


def device_zeros(tensor: TensorSpec, sizes: Sizes, device: str) -> onnxruntime.OrtValue:
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
