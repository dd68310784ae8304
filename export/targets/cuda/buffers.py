"""Buffers on the device, and the graphs of the cuda target that are bound to them.

A captured CUDA graph reads and writes only the buffers that it was captured with, and onnxruntime
frees it only with its session. So buffers and their graphs are kept together, for all batches of
equal sizes. All functions here run in the device thread.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np
import onnxruntime

from ...inference.options import Options
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
Values = dict[str, onnxruntime.OrtValue]  # on the device, by name


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
        """Return True if a session of the graph of beam search for the `beam_sizes` exists or can
        be opened."""
        is_open = tuple(sizes.items()) in self.beam_sessions
        return is_open or len(self.beam_sessions) < MAX_BEAM_SESSIONS

    def beam_session(self, sizes: Sizes) -> Session:
        """Return the session of the graph of beam search with axes fixed to the `beam_sizes`."""
        key = tuple(sizes.items())
        if key not in self.beam_sessions:
            self.beam_sessions[key] = self.export.make_session("beams", sizes)
        return self.beam_sessions[key]


def beam_sizes(sizes: Sizes, options: Options) -> Sizes:
    """Return `{axis: size}` of the graph of beam search with `options` on buffers of `sizes`. It
    reads no source."""
    beams, candidates = options.num_beams, options.candidates
    return {
        **{name: sizes[name] for name in ("batch_size", "slots")},
        "num_beams": beams,
        "candidates": candidates,
        "num_ends": max(1, candidates // beams - 1),
    }


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
        self.states = {
            tensor.name: device_zeros(tensor, sizes, pool.export.device)
            for tensor in pool.cache_specs
        }
        self.states["slot_numbers"].update_inplace(np.arange(sizes["slots"]))
        self.session = pool.export.sessions["decoder"]
        self.is_kept = pool.reserve(num_bytes)
        self.steps: dict[int, DeviceGraph] = {}
        self.searches: dict[tuple, DeviceGraph] = {}

    def fits(self, sizes: Sizes) -> bool:
        return all(self.sizes[axis] >= size for axis, size in sizes.items())

    def encoder_graph(self) -> "DeviceGraph":
        """Return a new graph that writes the keys and values of sources to the caches."""
        encoder = self.pool.export.sessions["encoder"]
        return DeviceGraph(self, "encoder", encoder, {}, self.states, self.states)

    def prompt_graph(self, length: int, beams: int) -> "DeviceGraph":
        """Return a new graph that reads prompts of `length` tokens.

        It writes the logits after the last tokens, repeated for `beams`, and the inputs of the next
        step to the step graph.
        """
        step, sizes = self.step_graph(beams), {"target_length": length, "logits": beams}
        shared = {**self.states, "logits": step.values["logits"]}
        return DeviceGraph(self, "decoder", self.session, sizes, shared, step.values)

    def step_graph(self, beams: int) -> "DeviceGraph":
        """Return the graph of a step of one token for each of `beams`, which it keeps for later
        calls.

        It writes the inputs of the next step to its own inputs.
        """
        if beams not in self.steps:
            sizes = {"target_length": beams, "logits": beams}
            graph = DeviceGraph(self, "decoder", self.session, sizes, self.states)
            # each run of the capture has advanced the slot
            graph.put(first_slot=0, count=beams, logit_indices=np.arange(beams))
            self.steps[beams] = graph
        return self.steps[beams]

    def beam_graph(self, options: Options) -> "DeviceGraph":
        """Return the graph of beam search with `options`, which it keeps for later calls. It reads
        the step graph's logits, and writes its inputs."""
        sizes = beam_sizes(self.sizes, options)
        if (key := tuple(sizes.items())) not in self.searches:
            shared = self.step_graph(options.num_beams).values
            session = self.pool.beam_session(sizes)
            self.searches[key] = DeviceGraph(self, "beams", session, sizes, shared)
        return self.searches[key]

    def graph_number(self, tensors: Iterable[TensorSpec], sizes: Sizes) -> int:
        return self.pool.graph_number(num_bytes(tensors, sizes)) if self.is_kept else UNCAPTURED

    def drop_uncaptured(self) -> None:
        self.steps = {key: graph for key, graph in self.steps.items() if graph.number > 0}
        self.searches = {key: graph for key, graph in self.searches.items() if graph.number > 0}


class DeviceGraph:
    """A graph with inputs and outputs on the device, bound once; `run` runs it. `values` are its
    inputs and its logits, by name, and `specs` are those of the values that no other graph has.

    Args:
        buffers: the caches that it reads and writes.
        role: "encoder", "decoder" or "beams".
        session: the session of the graph.
        sizes: the size of each named axis that `buffers` does not set.
        shared: `{name: value}` of the inputs and logits that other graphs have too.
        following: the values to which it writes the inputs of the next step. Without them it writes
            to its own, and is captured and replayed if there is room.
    """

    def __init__(
        self,
        buffers: Buffers,
        role: str,
        session: Session,
        sizes: Sizes,
        shared: Values,
        following: Values | None = None,
    ):
        spec, sizes = buffers.pool.export.specs[role], {**buffers.sizes, **sizes}
        tensors = (*spec.inputs, spec.outputs[0])
        self.specs = {
            tensor.name: tensor for tensor in tensors if next_input_name(tensor.name) not in shared
        }
        self.number = UNCAPTURED if following else buffers.graph_number(self.specs.values(), sizes)
        self.values = dict(shared)
        for name, tensor in self.specs.items():
            self.values[name] = device_zeros(tensor, sizes, buffers.pool.export.device)
        outputs = following or self.values
        self.run = bind_and_capture(session, spec, self.values, outputs, self.number)

    def put(self, **values: np.ndarray | float) -> None:
        """Copy `values`, which are broadcast, to the graph's own inputs of these names."""
        for name, value in values.items():
            target = self.values[name]
            array = np.broadcast_to(np.asarray(value, self.specs[name].dtype), target.shape())
            target.update_inplace(np.ascontiguousarray(array))


def bind_and_capture(
    session: Session, spec: GraphSpec, inputs: Values, outputs: Values, number: int
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
    return tensor.name.startswith(("past_key_values", "tokens", "slot_numbers"))


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
