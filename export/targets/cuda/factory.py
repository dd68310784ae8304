"""Opens the rows and searches of the cuda target."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import SessionError, UsageError
from ...inference.device_thread import in_device_thread
from ...inference.inputs import position_limit
from ...inference.rows import GenerationRequest, check_memory
from ...inference.session import LoadedExport
from .buffers import CAPTURE_RUNS, Buffers, Pool, Sizes, beam_sizes, num_bytes
from .rows import CudaRows, power_of_two
from .search import CudaSearch

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
    def start_search(self, request: GenerationRequest) -> CudaSearch | None:
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
