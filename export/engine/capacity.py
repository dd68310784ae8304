"""The batches of an engine: how many there are, and how many rows each of them holds."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import cast

from ..errors import UsageError
from ..inference.devices import level2_cache
from ..inference.export_info import ExportInfo
from ..inference.options import Options
from ..inference.rows import JoiningRowsFactory, SlotSize, memory, position_bytes
from .batch import GenerationBatch
from .inputs import GenerationInput
from .limits import MAX_SLOT_BYTES, Admission, Pace, slot_bytes, spare_rows, token_cost
from .model import OnnxModel, main_roles, worker_roles
from .queue import Batch


def open_batches(admission: Admission, model: OnnxModel) -> list[Batch]:
    """Return an empty batch for each worker of `admission`, which all run `model`.

    Raises:
        UsageError: if the slots do not fit into memory.
    """
    try:
        return [open_batch(admission, model) for _ in range(admission.arrangement.workers)]
    except MemoryError:
        raise UsageError(
            f"no memory for {admission.slots} slots of {admission.describe_slots()}: expected "
            "fewer slots, or a smaller max_source or max_length"
        ) from None


def open_batch(admission: Admission, model: OnnxModel) -> GenerationBatch:
    """Return an empty batch of `model` with the rows of one worker.

    They may join while others run if the export has a step graph. Raises MemoryError if there is no
    memory for their slots.
    """
    capacity, config, step = admission.slot_size.rows, model.info.config, model.info.step
    model.open(worker_roles(model.info))
    if step is None:
        return GenerationBatch(model, capacity)
    if admission.slot_bytes > sys.maxsize:  # for which numpy raises a ValueError
        raise MemoryError
    pace = Pace.of(config)
    size = dataclasses.replace(admission.slot_size, rows=capacity + spare_rows(capacity))
    factory = cast(JoiningRowsFactory, model.factory)
    rows = factory.open_slots(step, size)
    return GenerationBatch(model, capacity, rows, pace)


# Inputs of a call from which on each worker has slots: a row joins once another one has ended, so
# a step only costs the rows that run. Fewer inputs start together.
MIN_JOINING = 24
MAX_JOINING = 64  # slots of a worker
# Multiplications per token up to which half as many slots are faster if their logits then stay in
# the level 2 cache of a core. Measured with 1 MB: 1.13 times as fast at 1.4 million
# multiplications, and 0.95 at 45 million, where more rows share the reading of weights.
CACHED_COST = 8e6
# Inputs of a batch whose rows start together: without beams on CPUs, and on a GPU
MAX_INPUTS, MAX_GPU_INPUTS = 64, 512
# Rows of a batch of beam search, and the inputs from which on several workers share a call. A step
# of few rows costs nearly as much as one of many, and a batch takes as long as its longest row.
MAX_BEAM_ROWS, MIN_BEAM_INPUTS = 320, 32


def call_batches(
    model: OnnxModel,
    worker_model: Callable[[], OnnxModel],
    workers: int,
    inputs: Sequence[GenerationInput],
) -> list[Batch]:
    """Return empty batches for one call. They limit how many of its `inputs` run at once.

    Args:
        model: runs a single batch.
        worker_model: returns the model with the threads of one worker, for several batches.
        workers: the number of batches that run at a time.
        inputs: the checked rows, at least one. They have the same options and, for a seq2seq model,
            decoder prompts of one length.

    Raises:
        UsageError: if the slots do not fit into memory.
        ValueError: if the model is closed.
    """
    if can_join(model.info, workers, inputs):
        return open_batches(call_limits(worker_model(), inputs, workers), worker_model())
    options = inputs[0].options
    size = inputs_together(model, workers, options)
    has_beams = options.num_beams > 1 and model.device == "cpu"
    if len(inputs) <= (MIN_BEAM_INPUTS if has_beams else size):
        return [batch_together(model, inputs)]
    opened = worker_model().open(main_roles(model.info))
    size = min(size, -(-len(inputs) // workers))
    return [batch_together(opened, inputs[:size]) for _ in range(workers)]


def batch_together(model: OnnxModel, inputs: Sequence[GenerationInput]) -> GenerationBatch:
    """Return an empty batch for `inputs`, or as many others, whose rows start together."""
    rows = sum(row.num_rows for row in inputs)
    return GenerationBatch(model, rows, mixes_lengths=True)


def can_join(info: ExportInfo, workers: int, inputs: Sequence[GenerationInput]) -> bool:
    """Return True if slots of `workers` run `inputs` with the same result, and no more slowly.

    Each row is then searched by itself: there are no samples, beams or scores, and enough rows. No
    token of a source may be masked, which the step graph cannot express.
    """
    options = inputs[0].options
    if info.step is None or len(inputs) < MIN_JOINING * workers:
        return False
    if options.do_sample or options.num_beams > 1 or inputs[0].is_scored:
        return False
    # With fewer slots in memory, rows that start together, with growing caches, are faster.
    size = slot_bytes(info, SlotSize(1, 0, options.max_new_tokens))
    if MIN_JOINING * size > slot_memory(workers):
        return False
    return all(row.source_mask is None for row in inputs)


def call_limits(model: OnnxModel, inputs: Sequence[GenerationInput], workers: int) -> Admission:
    """Return the limits of an engine whose slots are long enough for each of `inputs`.

    Each of `workers` has the same number of slots: its share of the inputs, rounded up, or fewer if
    memory or `max_joining` limits them.
    """
    source = max(len(row.source or ()) for row in inputs)
    length = max(len(row.prompt) for row in inputs) + inputs[0].options.max_new_tokens - 1
    max_rows = int(slot_memory(workers) / slot_bytes(model.info, SlotSize(1, source, length)))
    rows = max(1, min(max_joining(model.info.config), max_rows, -(-len(inputs) // workers)))
    return Admission(model.info, workers, model.threads, workers * rows, source, length)


def max_joining(config: dict) -> int:
    """Return the maximum number of slots of a worker: half of `MAX_JOINING` for a small model whose
    logits would not fit into the level 2 cache. `config` are the fields of config.json."""
    fills_cache = 4 * config["vocab_size"] * MAX_JOINING > level2_cache()
    return MAX_JOINING // 2 if fills_cache and token_cost(config) <= CACHED_COST else MAX_JOINING


def inputs_together(model: OnnxModel, workers: int, options: Options) -> int:
    """Return how many inputs with these `options` may start together.

    Memory limits beams, but not below `MIN_BEAM_INPUTS`.
    """
    if model.device != "cpu":
        return MAX_GPU_INPUTS
    if options.num_beams == 1:
        return MAX_INPUTS
    row_bytes = position_bytes(model.info.specs["decoder"]) * options.max_new_tokens
    max_rows = min(MAX_BEAM_ROWS, slot_memory(workers) / row_bytes)
    return max(MIN_BEAM_INPUTS, int(max_rows / options.num_beams))


def slot_memory(workers: int) -> float:
    """Return the bytes that the caches of each of `workers` may take.

    The system only provides the memory that is used.
    """
    return min(MAX_SLOT_BYTES, memory() / 4 / workers)
