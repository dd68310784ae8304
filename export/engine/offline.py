"""Generation from all rows of one call.

Rows without beams join slots where the export has a step graph: the longest start first, and the
next one takes the slot of a finished one, so a step only costs the running rows. Other rows start
together, in batches of similar length.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np

from ..inference.export_info import ExportInfo
from ..inference.inputs import batches
from ..inference.options import Options
from ..inference.rows import SlotSize, memory, position_bytes
from .batch import GenerationBatch
from .client import Client
from .groups import Group, start_request
from .inputs import Generated, GenerationInput
from .limits import MAX_OFFLINE_ROWS, MAX_SLOT_BYTES, MIN_OFFLINE_ROWS, Admission, slot_bytes
from .loop import Engine
from .model import OnnxModel, main_roles
from .queue import ClientRequest

# Rows of a batch of beam search, and the minimum of its inputs. A step of few rows costs nearly as
# much as one of many.
MAX_BEAM_ROWS, MIN_BEAM_INPUTS = 320, 32
MAX_INPUTS, MAX_GPU_INPUTS = 64, 512  # of a batch without beams on CPUs, and on a GPU


def run(
    model: OnnxModel,
    worker_model: Callable[[], OnnxModel],
    workers: int,
    inputs: list[GenerationInput],
) -> list[list[Generated]]:
    """Return the sequences of each of `inputs`, which have the same options and, for a seq2seq
    model, decoder prompts of one length.

    Args:
        model: runs a single batch, in the thread of the caller.
        worker_model: returns the model with the threads of one worker, for several batches.
        workers: the number of batches that run at a time.
        inputs: the checked rows, at least one.

    Raises:
        UsageError: if a batch does not fit into memory.
        ValueError: if onnxruntime cannot compute the model, or logits decide no token.
    """
    if fits_slots(model.info, workers, inputs):
        return generate_in_slots(worker_model(), inputs, workers)
    options, count = inputs[0].options, len(inputs)
    if count <= max_inputs(model, options):
        return generate(model, inputs)
    size = min(-(-count // workers), batch_inputs(model, workers, options))
    return generate_in_batches(worker_model(), inputs, workers, size)


def fits_slots(info: ExportInfo, workers: int, inputs: list[GenerationInput]) -> bool:
    """Return True if slots of `workers` run `inputs` with the same result, and no more slowly.

    Each row is then searched by itself: there are no samples, beams or scores, and enough rows. No
    token of a source may be masked, which the step graph cannot express.
    """
    options = inputs[0].options
    if info.step is None or len(inputs) < MIN_OFFLINE_ROWS * workers:
        return False
    if options.do_sample or options.num_beams > 1 or inputs[0].is_scored:
        return False
    # With fewer slots in memory, rows that start together, with growing caches, are faster.
    size = slot_bytes(info, SlotSize(1, 0, options.max_new_tokens))
    if MIN_OFFLINE_ROWS * size > slot_memory(workers):
        return False
    return all(row.source_mask is None for row in inputs)


def slot_memory(workers: int) -> float:
    """Return the bytes that the slots of each of `workers` may take.

    The system only provides the memory that is used.
    """
    return min(MAX_SLOT_BYTES, memory() / 4 / workers)


def generate(model: OnnxModel, inputs: list[GenerationInput]) -> list[list[Generated]]:
    """Return the sequences of each of `inputs`, which start together, in the thread of the caller.

    Raises:
        UsageError: if the inputs do not fit into memory.
        ValueError: if onnxruntime cannot compute the model, or logits that decide no token.
    """
    request = start_request(inputs)
    for _ in steps(model, [request]):
        pass  # the results are read at the end
    return request.take_update().read_results()


def stream(model: OnnxModel, inputs: list[GenerationInput]) -> Iterator[np.ndarray]:
    """Yield the new token of each row, (rows,), after each step of greedy search or sampling.

    Rows that have ended get the fill token. Raises ValueError if the model was closed before the
    last token.
    """
    options = inputs[0].options
    requests = [start_request([row], streams=True) for row in inputs]
    for _ in steps(model, requests):
        tokens = np.full((len(requests), options.num_return_sequences), options.fill_token_id)
        for row, request in zip(tokens, requests, strict=True):
            for event in request.take_update().events:
                row[event.index] = event.token
        yield tokens.ravel()
        if not all(request.is_finished for request in requests):
            model.check_open()


def steps(model: OnnxModel, requests: Sequence[ClientRequest[Group]]) -> Iterator[None]:
    """Compute `requests`, whose groups start together, and yield after each step."""
    groups = [group for request in requests for group in request.parts]
    with closing(GenerationBatch(model.factory, len(groups), model.threads)) as batch:
        batch.start(groups)
        while groups:
            batch.step()
            for request in requests:
                if request.error is not None:
                    raise request.error
            groups = batch.running
            if finished := [group for group in groups if group.is_finished]:
                batch.remove(finished)
                groups = batch.running
            yield


def generate_in_slots(
    model: OnnxModel, inputs: list[GenerationInput], workers: int
) -> list[list[Generated]]:
    """Return the sequences of each of `inputs`. A row joins as soon as another one has ended, the
    longest first.

    Args:
        model: a model with a step graph, with the threads of one worker.
        inputs: the checked rows.
        workers: number of workers.

    Raises:
        ValueError: if onnxruntime cannot compute the model.
    """
    order = sorted(
        range(len(inputs)), key=lambda row: -len(inputs[row].source or inputs[row].prompt)
    )
    with closing(open_client(model, inputs, workers).start()) as client:
        results = client.run([inputs[row] for row in order], are_last=True)
    by_row = dict(zip(order, results, strict=True))
    return [by_row[row] for row in range(len(inputs))]


def max_inputs(model: OnnxModel, options: Options) -> int:
    """Return how many inputs with these `options` one batch may have.

    Several batches are faster for beams of many inputs on CPUs, where a batch takes as long as its
    longest row. Other batches are limited by memory only.
    """
    if model.device != "cpu":
        return MAX_GPU_INPUTS
    return MIN_BEAM_INPUTS if options.num_beams > 1 else MAX_INPUTS


def batch_inputs(model: OnnxModel, workers: int, options: Options) -> int:
    """Return how many inputs a batch has if there are several.

    Memory limits it, but not below `MIN_BEAM_INPUTS`.
    """
    if options.num_beams == 1 or model.device != "cpu":
        return max_inputs(model, options)
    row_bytes = position_bytes(model.info.specs["decoder"]) * options.max_new_tokens
    max_rows = min(MAX_BEAM_ROWS, slot_memory(workers) / row_bytes)
    return max(MIN_BEAM_INPUTS, int(max_rows / options.num_beams))


def generate_in_batches(
    model: OnnxModel, inputs: list[GenerationInput], workers: int, size: int
) -> list[list[Generated]]:
    """Return the sequences of each of `inputs`, in batches of `size` inputs of similar length, the
    longest first.

    `workers` batches run at a time, each with the threads of `model`.
    """
    model.open(main_roles(model.info))
    parts = batches([row.source or row.prompt for row in inputs], size)[::-1]
    results: dict[int, list[Generated]] = {}
    with ThreadPoolExecutor(workers) as pool:
        of_parts = pool.map(lambda rows: generate(model, [inputs[row] for row in rows]), parts)
        for rows, sequences in zip(parts, of_parts, strict=True):
            results |= zip(rows, sequences, strict=True)
    return [results[row] for row in range(len(inputs))]


def open_client(model: OnnxModel, inputs: list[GenerationInput], workers: int) -> Client:
    """Return the client of a new engine, not started, whose slots are long enough for each of
    `inputs`.

    All inputs have the same generation options. Each of `workers` has the same number of slots: its
    share of the inputs, rounded up, or fewer if memory or `MAX_OFFLINE_ROWS` limits them.
    """
    source = max(len(row.source or ()) for row in inputs)
    length = max(len(row.prompt) for row in inputs) + inputs[0].options.max_new_tokens - 1
    max_rows = int(slot_memory(workers) / slot_bytes(model.info, SlotSize(1, source, length)))
    rows = max(1, min(MAX_OFFLINE_ROWS, max_rows, -(-len(inputs) // workers)))
    threads, count = model.threads, len(inputs)
    admission = Admission(model.info, workers, threads, workers * rows, source, length, count)
    return Client(admission, Engine.open(admission, model))
