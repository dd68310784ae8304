"""Offline inference: the rows of one call of `Runtime.generate`.

With continuous batching the longest rows start first. The next row takes the slot of a finished
one, so a step only costs the running rows. Beams run in static batches of similar length.
"""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..inference.rows import GenerationRequest, SlotSize, memory, position_bytes
from ..inference.export_info import ExportInfo
from ..inference.inputs import batches
from ..inference.options import Options
from ..inference.shrinking import gather_results
from ..model import OnnxModel, main_roles
from .admission import Admission
from .capacity import MAX_OFFLINE_ROWS, MAX_SLOT_BYTES, MIN_OFFLINE_ROWS, slot_bytes
from .client import LocalScheduler
from .request import GenerationInput

# Rows of a static batch of beam search, and the minimum of its inputs. A step of few rows costs
# nearly as much as one of many.
MAX_BEAM_ROWS, MIN_BEAM_INPUTS = 320, 32


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


def generate(model: OnnxModel, request: GenerationRequest, workers: int) -> np.ndarray:
    """Return the new tokens (B, T) of all rows of `request`, padded after the end token.

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
    scheduler = open_scheduler(model, inputs, workers).start()
    try:
        results = scheduler.run([inputs[row] for row in order], are_last=True)
    except RuntimeError as failure:
        raise failure.__cause__ or failure from None
    finally:
        scheduler.close()
    length = max(len(sequence.tokens) for [sequence] in results)
    tokens = np.full((len(inputs), length), request.options.fill_token_id)
    for row, [sequence] in zip(order, results, strict=True):
        tokens[row, : len(sequence.tokens)] = sequence.tokens
    return tokens


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


def generate_in_batches(
    model: OnnxModel, request: GenerationRequest, workers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Run beam search for `request` in batches of inputs of similar length, the longest first.

    `workers` batches run at a time, each with the threads of `model`. Return the new tokens
    (B * N, T), padded after the end token, and the scores (B * N,). N is `num_return_sequences`.
    """
    rows = request.source or (request.input_ids, request.attention_mask)
    size = beam_inputs(model.info, workers, len(request.input_ids), request.options)
    groups = batches(rows_without_padding(*rows), size)[::-1]
    model.open(main_roles(model.info))  # before several threads ask for them

    def search(inputs: list[int]) -> tuple[list[int], np.ndarray, np.ndarray]:
        tokens, scores = model.generate(select_rows(request, inputs))
        assert scores is not None  # beam search returns scores
        return inputs, tokens, scores

    with ThreadPoolExecutor(workers) as pool:
        return gather_results(list(pool.map(search, groups)), request)


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
    )


def split_request(request: GenerationRequest) -> list[GenerationInput]:
    """Return an input of the scheduler for each row of `request`."""
    prompts = rows_without_padding(request.input_ids, request.attention_mask)
    sources = (
        [None] * len(prompts) if request.source is None else rows_without_padding(*request.source)
    )
    paddings = (request.attention_mask == 0).sum(axis=1).tolist()
    return [
        GenerationInput(request.options, prompt, source, padding=padding)
        for prompt, source, padding in zip(prompts, sources, paddings, strict=True)
    ]


def rows_without_padding(ids: np.ndarray, mask: np.ndarray) -> list[list[int]]:
    """Return the tokens of each row without padding."""
    return [row[is_token].tolist() for row, is_token in zip(ids, mask == 1)]


def open_scheduler(model: OnnxModel, inputs: list[GenerationInput], workers: int) -> LocalScheduler:
    """Return a scheduler, not started, whose slots are long enough for each of `inputs`.

    All inputs have the same generation options. Each of `workers` has the same number of slots: its
    share of the inputs, rounded up, or fewer if memory or `MAX_OFFLINE_ROWS` limits them.
    """
    source = max(len(row.source or ()) for row in inputs)
    length = max(len(row.prompt) for row in inputs) + inputs[0].options.max_new_tokens - 1
    max_rows = int(slot_memory(workers) / slot_bytes(model.info, SlotSize(1, source, length)))
    rows = max(1, min(MAX_OFFLINE_ROWS, max_rows, -(-len(inputs) // workers)))
    threads, count = model.threads, len(inputs)
    admission = Admission(model.info, workers, threads, workers * rows, source, length, count)
    return LocalScheduler(admission, model)
