"""Generation from all rows of one call.

Rows without beams join slots where the export has a step graph: the longest start first, and the
next one takes the slot of a finished one, so a step only costs the running rows. Other rows start
together, in batches of similar length.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np

from ..inference.export_info import ExportInfo
from ..inference.inputs import batches
from ..inference.logits import row_seeds
from ..inference.options import Options
from ..inference.rows import GenerationRequest, SlotSize, memory, position_bytes
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
# new tokens (rows, T), and the score of each row if scores are asked for
Sequences = tuple[np.ndarray, np.ndarray | None]


def run(
    model: OnnxModel,
    worker_model: Callable[[], OnnxModel],
    workers: int,
    request: GenerationRequest,
) -> Sequences:
    """Return the new tokens (B * N, T) of all rows of `request`, and the scores (B * N,).

    N is `num_return_sequences`. Tokens are padded after the end token. The scores are None if they
    were not requested.

    Args:
        model: runs a single batch, in the thread of the caller.
        worker_model: returns the model with the threads of one worker, for several batches.
        workers: the number of batches that run at a time.
        request: the prompts or sources, and the options.

    Raises:
        UsageError: if a batch does not fit into memory.
        ValueError: if onnxruntime cannot compute the model, or logits decide no token.
    """
    if fits_slots(model.info, workers, request):
        return generate_in_slots(worker_model(), request, workers)
    rows, limit = len(request.input_ids), max_inputs(model, request.options)
    if rows <= limit:
        return generate(model, request)
    size = min(-(-rows // workers), batch_inputs(model, workers, request.options))
    return generate_in_batches(worker_model(), request, workers, size)


def fits_slots(info: ExportInfo, workers: int, request: GenerationRequest) -> bool:
    """Return True if slots of `workers` run `request` with the same result, and no more slowly.

    Each row is then searched by itself: there are no samples, beams or scores, and enough rows. No
    mask of a source may have a one after a zero, which the step graph cannot express.
    """
    options = request.options
    if info.step is None or len(request.input_ids) < MIN_OFFLINE_ROWS * workers:
        return False
    if options.do_sample or options.num_beams > 1 or request.is_scored:
        return False
    # With fewer slots in memory, rows that start together, with growing caches, are faster.
    size = slot_bytes(info, SlotSize(1, 0, options.max_new_tokens))
    if MIN_OFFLINE_ROWS * size > slot_memory(workers):
        return False
    return request.source is None or bool((np.diff(request.source[1]) <= 0).all())


def slot_memory(workers: int) -> float:
    """Return the bytes that the slots of each of `workers` may take.

    The system only provides the memory that is used.
    """
    return min(MAX_SLOT_BYTES, memory() / 4 / workers)


def generate(model: OnnxModel, request: GenerationRequest) -> Sequences:
    """Generate from all rows of `request`, which start together, in the thread of the caller.

    Raises:
        UsageError: if the request does not fit into memory.
        ValueError: if onnxruntime cannot compute the model, or logits that decide no token.
    """
    return joined(sequences(model, request), request.options.fill_token_id)


def sequences(model: OnnxModel, request: GenerationRequest) -> list[list[Generated]]:
    """Return the sequences of each row of `request`, which start together."""
    client = start_request(split_request(request))
    for _ in steps(model, request, [client]):
        pass  # the results are read at the end
    return client.take_update().read_results()


def stream(model: OnnxModel, request: GenerationRequest) -> Iterator[np.ndarray]:
    """Yield the new token of each row, (rows,), after each step of greedy search or sampling.

    Rows that have ended get the fill token.
    """
    inputs = split_request(request)
    clients = [start_request([row], streams=True) for row in inputs]
    copies, fill = request.options.num_return_sequences, request.options.fill_token_id
    for _ in steps(model, request, clients):
        tokens = np.full((len(clients), copies), fill)
        for row, client in zip(tokens, clients, strict=True):
            for event in client.take_update().events:
                row[event.index] = event.token
        yield tokens.ravel()


def steps(
    model: OnnxModel, request: GenerationRequest, clients: Sequence[ClientRequest[Group]]
) -> Iterator[None]:
    """Compute the `clients`, whose groups are the rows of `request`, and yield after each step."""
    groups = [group for client in clients for group in client.parts]
    with closing(GenerationBatch(model.factory, len(groups), model.threads)) as batch:
        batch.start(groups, request)
        while batch.running:
            batch.step()
            for client in clients:
                if client.error is not None:
                    raise client.error
            if finished := [group for group in batch.running if group.is_finished]:
                batch.remove(finished)
            yield


def joined(results: list[list[Generated]], fill_token_id: int) -> Sequences:
    """Return the tokens (B * N, T) of the N sequences of each of B inputs, and their scores
    (B * N,).

    Tokens are padded with the fill token. The scores are None if the sequences have none.
    """
    rows = [sequence for group in results for sequence in group]
    length = max(len(sequence.tokens) for sequence in rows)
    tokens = np.full((len(rows), length), fill_token_id)
    for row, sequence in zip(tokens, rows, strict=True):
        row[: len(sequence.tokens)] = sequence.tokens
    if rows[0].score is None:
        return tokens, None
    return tokens, np.array([sequence.score for sequence in rows], np.float32)


def generate_in_slots(model: OnnxModel, request: GenerationRequest, workers: int) -> Sequences:
    """Generate from all rows of `request`. A row joins as soon as another one has ended.

    Args:
        model: a model with a step graph, with the threads of one worker.
        request: the prompts or sources, and the options.
        workers: number of workers.

    Raises:
        ValueError: if onnxruntime cannot compute the model.
    """
    inputs = split_request(request)
    order = sorted(
        range(len(inputs)), key=lambda row: -len(inputs[row].source or inputs[row].prompt)
    )
    with closing(open_client(model, inputs, workers).start()) as client:
        results = client.run([inputs[row] for row in order], are_last=True)
    by_row = dict(zip(order, results, strict=True))
    return joined([by_row[row] for row in range(len(inputs))], request.options.fill_token_id)


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
    model: OnnxModel, request: GenerationRequest, workers: int, size: int
) -> Sequences:
    """Generate from the rows of `request` in batches of `size` inputs of similar length, the
    longest first.

    `workers` batches run at a time, each with the threads of `model`.
    """
    rows = request.source or (request.input_ids, request.attention_mask)
    groups = batches(rows_without_padding(*rows), size)[::-1]
    model.open(main_roles(model.info))  # before several threads ask for them

    def search(inputs: list[int]) -> list[list[Generated]]:
        return sequences(model, select_rows(request, inputs))

    results: list[list[Generated]] = [[]] * len(request.input_ids)
    with ThreadPoolExecutor(workers) as pool:
        for inputs, of_inputs in zip(groups, pool.map(search, groups), strict=True):
            for row, of_row in zip(inputs, of_inputs, strict=True):
                results[row] = of_row
    return joined(results, request.options.fill_token_id)


def select_rows(request: GenerationRequest, rows: list[int]) -> GenerationRequest:
    """Return `request` with only these `rows`. Their sources are cut to the longest of them."""
    source = request.source
    if source is not None:
        ids, mask = source[0][rows], source[1][rows]
        length = int(np.flatnonzero(mask.any(axis=0))[-1]) + 1
        source = ids[:, :length], mask[:, :length]
    return dataclasses.replace(
        request,
        input_ids=request.input_ids[rows],
        attention_mask=request.attention_mask[rows],
        source=source,
        seeds=request.seeds and tuple(request.seeds[row] for row in rows),
        uniforms=request.uniforms and [request.uniforms[row] for row in rows],
    )


def split_request(request: GenerationRequest) -> list[GenerationInput]:
    """Return an input of the engine for each row of `request`."""
    options, count = request.options, len(request.input_ids)
    prompts = rows_without_padding(request.input_ids, request.attention_mask)
    sources = rows_without_padding(*request.source) if request.source else [None] * count
    none: list[Any] = [None] * count
    seeds = request.seeds or row_seeds(options.seed, count) or none
    paddings = (request.attention_mask == 0).sum(axis=1).tolist()
    facts = zip(prompts, sources, paddings, seeds, request.uniforms or none, strict=True)
    return [
        GenerationInput(
            options,
            prompt,
            source,
            padding=padding,
            seed=seed,
            is_scored=request.is_scored,
            uniforms=numbers,
        )
        for prompt, source, padding, seed, numbers in facts
    ]


def rows_without_padding(ids: np.ndarray, mask: np.ndarray) -> list[list[int]]:
    """Return the tokens of each row without padding."""
    return [row[is_token].tolist() for row, is_token in zip(ids, mask == 1)]


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
