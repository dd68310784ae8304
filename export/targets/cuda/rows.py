"""The rows of the cuda target. Its graphs use buffers on the device and are replayed as CUDA
graphs."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ...errors import SessionError, UsageError
from ...inference.device_thread import in_device_thread
from ...inference.inputs import position_limit
from ...inference.logits import LogitsProcessors
from ...inference.options import Options
from ...inference.rows import GenerationRequest, LoadedExport, check_memory, next_input_name
from .buffers import CAPTURE_RUNS, Buffers, DeviceGraph, Pool, Sizes, beam_sizes, num_bytes
from .search import BeamSearch, GreedySearch

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
        with closed_on_error(CudaRows(take_buffers(self.pool, sizes), self.export)) as decoder:
            if request.source is not None:
                decoder.encode(*request.source)
            # capture while the caches are empty
            decoder.buffers.step_graph(request.options.rows_per_input)
        return decoder

    def search_key(self, options: Options) -> Options | str | None:
        """Return `"greedy"` for greedy search and `options` for beam search.

        The result is `None` for sampling. It is also `None` for more candidates than the vocabulary
        has, because the graph selects that many per beam.
        """
        if options.do_sample:
            return None
        if options.num_beams == 1:
            return "greedy"
        return options if options.candidates <= self.export.config["vocab_size"] else None

    @in_device_thread
    def start_search(self, request: GenerationRequest) -> GreedySearch | BeamSearch | None:
        """Read the prompts and return the search, or `None` if it must run in numpy.

        The caller closes the search.

        Raises:
            UsageError: if the request needs more memory than the machine has.
            SessionError: if onnxruntime fails, or the GPU has no memory.
        """
        if not self.can_search(request):
            return None
        with closed_on_error(self.open(request)) as decoder:
            return (BeamSearch if request.options.num_beams > 1 else GreedySearch)(decoder, request)

    def can_search(self, request: GenerationRequest) -> bool:
        """Return True if graphs can run the search of `request`.

        They have no logits processors and no scores of greedy search, and beam search needs a
        session for its sizes.
        """
        options = request.options
        if self.search_key(options) is None or LogitsProcessors(options, request.prompt):
            return False
        if options.num_beams == 1:
            return not request.is_scored
        return self.pool.can_search(beam_sizes(buffer_sizes(request, self.export.config), options))


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


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()


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


class CudaRows:
    """The `Rows` of one request, with buffers on the device.

    Caches are never reordered: `visible` (B, beams, slots) says which slots of the input's cache
    each beam reads. If there are fewer inputs than rows of the buffers, the first input fills the
    others, whose results are ignored.

    Args:
        buffers: the caches and graphs that it uses; `close` puts them back into their pool.
        export: the open graphs and the config.
    """

    all_logits = False
    max_step_tokens = 1
    shrinks = False  # captured graphs have a fixed number of rows

    def __init__(self, buffers: Buffers, export: LoadedExport):
        self.buffers = buffers
        self.export = export
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
        encoder = self.export.sessions["encoder"]
        binding = encoder.io_binding()
        for name, array in (("input_ids", ids), ("attention_mask", mask)):
            binding.bind_cpu_input(name, array)
        for tensor in self.export.specs["encoder"].outputs:
            state = self.buffers.states[next_input_name(tensor.name)]
            binding.bind_ortvalue_output(tensor.name, state)
        encoder.run_bound(binding)
        self.source = {"encoder_attention_mask": mask}

    @in_device_thread
    def prefill(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Feed the prompts (B, P) and return the logits (B, 1, V) after the last token of each.

        Padding, where `attention_mask` is 0, may stand on either side.
        """
        return self.read(input_ids, attention_mask).logits.numpy()[: len(input_ids), :1].copy()

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
            first_slot=np.zeros(self.rows, np.int64),
            count=np.full(self.rows, length),
            visible=self.visible & earlier,
            logit_indices=np.repeat(last[:, None], beams, axis=1),
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
            position_ids=np.repeat(self.lengths[:, None], beams, axis=1),
            first_slot=np.full(self.rows, self.used),
            visible=self.visible,
            **self.step_inputs(beams),
        )
        graph.run()
        self.used += beams
        self.lengths = self.lengths + 1
        return graph.logits.numpy()[: self.count].reshape(self.count * beams, 1, -1).copy()

    def select(self, parents: np.ndarray) -> None:
        """Let each row continue the row that `parents` (B * beams,) names, with more beams of each
        input or with its beams in another order. They share the cache of their input."""
        beams = len(parents) // self.count
        indices = (parents % self.visible.shape[1]).reshape(-1, beams, 1)
        self.visible = np.take_along_axis(self.visible, pad_batch(indices, self.rows), axis=1)

    def step_runner(self, beams: int) -> Callable[..., None]:
        """Return the function `run(waits=True)`, which runs a step whose inputs are on the device.

        The step before it, or the prompt, has written these inputs. With `waits=False` it may
        return before the step ends. `beams` is the number of beams of each input.
        """
        graph = self.buffers.step_graph(beams)
        graph.put(**self.step_inputs(beams))
        return graph.run

    def step_inputs(self, beams: int) -> dict[str, np.ndarray]:
        """Return `{input: array}` of the inputs that are equal in all steps with `beams`.

        `beams` is the number of beams of each input.
        """
        indices = np.tile(np.arange(beams), (self.rows, 1))
        return {"count": np.full(self.rows, beams), "logit_indices": indices, **self.source}


def pad_batch(array: np.ndarray, rows: int) -> np.ndarray:
    """Return `array` with its first row appended until there are `rows` rows."""
    return np.concatenate([array, np.repeat(array[:1], rows - len(array), axis=0)])


def pad(array: np.ndarray, rows: int, length: int, fill: int = 0) -> np.ndarray:
    """Return `array` (B, T) with `rows` rows of `length`.

    Rows are filled with `fill` on the right, and the first row is repeated.
    """
    missing = length - array.shape[1]
    return pad_batch(np.pad(array, ((0, 0), (0, missing)), constant_values=fill), rows)
