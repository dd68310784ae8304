"""Offline inference: the rows of one call of `Runtime.generate`.

With continuous batching the longest rows start first. The next row takes the slot of a finished
one, so a step only costs the running rows. Beams run in static batches of similar length.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np

from ..inference.export_info import ExportInfo
from ..inference.inputs import batches
from ..inference.logits import row_seeds
from ..inference.options import Options
from ..inference.rows import GenerationRequest, SlotSize, memory, position_bytes
from ..model import OnnxModel, main_roles
from .admission import Admission
from .capacity import MAX_OFFLINE_ROWS, MAX_SLOT_BYTES, MIN_OFFLINE_ROWS, slot_bytes
from .client import Client
from .client_request import ClientRequest
from .engine import Engine
from .generation_batch import GenerationBatch
from .groups import Group, start_request
from .request import Generated, GenerationInput

# Rows of a static batch of beam search, and the minimum of its inputs. A step of few rows costs
# nearly as much as one of many.
MAX_BEAM_ROWS, MIN_BEAM_INPUTS = 320, 32
# new tokens (rows, T), and the score of each row if scores are asked for
Sequences = tuple[np.ndarray, np.ndarray | None]


def fits_options(
    info: ExportInfo, workers: int, rows: int, options: Options, is_scored: bool
) -> bool:
    """Return True if workers give the same result for these rows, and no more slowly.

    Each row is then searched by itself: there are no samples, beams or scores, and enough rows.

    Args:
        info: the export.
        workers: the number of workers.
        rows: the number of rows.
        options: the generation options.
        is_scored: True if scores of the sequences are asked for.
    """
    if info.step is None or rows < MIN_OFFLINE_ROWS * workers:
        return False
    if options.do_sample or options.num_beams > 1 or is_scored:
        return False
    # With fewer slots in memory, static batches with growing caches are faster.
    size = slot_bytes(info, SlotSize(1, 0, options.max_new_tokens))
    return MIN_OFFLINE_ROWS * size <= slot_memory(workers)


def fits_workers(info: ExportInfo, workers: int, request: GenerationRequest) -> bool:
    """Return True if workers can run `request` with the same result, and no more slowly.

    The options must allow it, there must be enough rows, and no mask of a source may have a one
    after a zero, which the step graph cannot express.
    """
    rows = len(request.input_ids)
    if not fits_options(info, workers, rows, request.options, request.is_scored):
        return False
    return request.source is None or bool((np.diff(request.source[1]) <= 0).all())


def slot_memory(workers: int) -> float:
    """Return the bytes that the slots of each of `workers` may take.

    The system only provides the memory that is used.
    """
    return min(MAX_SLOT_BYTES, memory() / 4 / workers)


def generate(
    model: OnnxModel,
    request: GenerationRequest,
    uniforms: Sequence[Callable[[], float]] | None = None,
) -> Sequences:
    """Generate from all rows of `request`, which start together, in the thread of the caller.

    `uniforms` returns the random numbers of each row in place of those of its seed.

    Raises:
        UsageError: if the request does not fit into memory.
        ValueError: if onnxruntime cannot compute the model, or logits that decide no token.
    """
    results = sequences(model, request, split_request(request, uniforms))
    return joined(results, request.options.fill_token_id)


def sequences(
    model: OnnxModel, request: GenerationRequest, inputs: Sequence[GenerationInput]
) -> list[list[Generated]]:
    """Return the sequences of each of `inputs`, the rows of `request`, which start together."""
    client = start_request(inputs)
    for _ in steps(model, request, [client]):
        pass
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
    """Return the tokens (B * N, T) of the N sequences of each of B inputs, padded with the fill
    token, and their scores (B * N,), or None without scores."""
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


def fits_static_batches(device: str, rows: int, options: Options) -> bool:
    """Return True if `options` ask for beam search that is faster in several batches.

    `rows` is the number of inputs, not of beams. Several batches are faster for many inputs on
    CPUs, where a batch takes as long as its longest row.
    """
    return device == "cpu" and options.num_beams > 1 and rows > MIN_BEAM_INPUTS


def beam_inputs(info: ExportInfo, workers: int, rows: int, options: Options) -> int:
    """Return how many of `rows` inputs a static batch of beam search has.

    It is at most the share of one of the `workers`. Memory limits it too, but not below
    `MIN_BEAM_INPUTS`.
    """
    row_bytes = position_bytes(info.specs["decoder"]) * options.max_new_tokens
    max_rows = min(MAX_BEAM_ROWS, slot_memory(workers) / row_bytes)
    return min(-(-rows // workers), max(MIN_BEAM_INPUTS, int(max_rows / options.num_beams)))


def generate_in_batches(model: OnnxModel, request: GenerationRequest, workers: int) -> Sequences:
    """Generate from the rows of `request` in batches of similar length, the longest first.

    `workers` batches run at a time, each with the threads of `model`.
    """
    rows = request.source or (request.input_ids, request.attention_mask)
    size = beam_inputs(model.info, workers, len(request.input_ids), request.options)
    groups = batches(rows_without_padding(*rows), size)[::-1]
    model.open(main_roles(model.info))  # before several threads ask for them

    def search(inputs: list[int]) -> list[list[Generated]]:
        selected = select_rows(request, inputs)
        return sequences(model, selected, split_request(selected))

    results: list[list[Generated]] = [[]] * len(request.input_ids)
    with ThreadPoolExecutor(workers) as pool:
        for inputs, found in zip(groups, pool.map(search, groups), strict=True):
            for row, best in zip(inputs, found, strict=True):
                results[row] = best
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
    )


def split_request(
    request: GenerationRequest, uniforms: Sequence[Callable[[], float]] | None = None
) -> list[GenerationInput]:
    """Return an input of the scheduler for each row of `request`.

    `uniforms` returns the random numbers of each row in place of those of its seed.
    """
    options, count = request.options, len(request.input_ids)
    prompts = rows_without_padding(request.input_ids, request.attention_mask)
    sources = rows_without_padding(*request.source) if request.source else [None] * count
    seeds = request.seeds or row_seeds(options.seed, count) or [None] * count
    paddings = (request.attention_mask == 0).sum(axis=1).tolist()
    facts = zip(prompts, sources, paddings, seeds, uniforms or [None] * count, strict=True)
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
