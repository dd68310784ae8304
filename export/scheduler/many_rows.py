"""Offline inference: the rows of one call of `Runtime.generate`.

With continuous batching the longest rows start first. The next row takes the slot of a finished
one, so a step only costs the running rows. Beams run in static batches of similar length.
"""

import dataclasses

import numpy as np

from ..inference.decoder import GenerationRequest, memory
from ..inference.export_info import ExportInfo
from ..inference.inputs import batches
from ..inference.options import Options
from ..model import OnnxModel
from .admission import Admission
from .capacity import LEAST_ROWS, MOST_BYTES, MOST_ROWS
from .client import LocalScheduler
from .request import Job
from .slot_batch import Room, slot_bytes

BATCH_SIZE = 32  # inputs per static batch of beam search, as for files of lines


def is_suited(info: ExportInfo, workers: int, rows: int, options: Options, is_scored: bool) -> bool:
    """Return whether `rows` rows run in workers: each row can be searched by itself with the same
    result, and no more slowly."""
    if info.step is None or rows < LEAST_ROWS * workers:
        return False
    if options.do_sample or options.num_beams > 1 or is_scored:
        return False
    # With fewer slots in memory, static batches with growing caches are faster.
    size = slot_bytes(info, Room(1, 0, options.max_new_tokens))
    return LEAST_ROWS * size <= bytes_of_worker(workers)


def suits_request(info: ExportInfo, workers: int, request: GenerationRequest) -> bool:
    """Like `is_suited`, but False if a source mask has holes, which the step graph cannot
    express."""
    rows = len(request.input_ids)
    if not is_suited(info, workers, rows, request.options, request.is_scored):
        return False
    return request.source is None or bool((np.diff(request.source[1]) <= 0).all())


def bytes_of_worker(workers: int) -> float:
    """Return the memory for the slots of a worker. The system provides pages on first use."""
    return min(MOST_BYTES, memory() / 4 / workers)


def generate(model: OnnxModel, request: GenerationRequest, workers: int) -> np.ndarray:
    """Return the new tokens (B, T) of all rows of `request`, padded after the end token.

    Args:
        model: a model with a step graph, with the threads of one worker.
        request: the prompts or sources, and the options.
        workers: number of workers.

    Raises:
        ValueError: if onnxruntime cannot compute the model.
    """
    jobs = jobs_of(request)
    order = sorted(
        range(len(jobs)), key=lambda place: -len(jobs[place].source or jobs[place].prompt)
    )
    scheduler = scheduler_for(model, jobs, workers).start()
    try:
        found = scheduler.run([jobs[place] for place in order], are_last=True)
    except RuntimeError as failure:
        raise failure.__cause__ or failure from None
    finally:
        scheduler.close()
    tokens = np.full(
        (len(jobs), max(len(answer.tokens) for [answer] in found)), request.options.fill_token_id
    )
    for place, [answer] in zip(order, found, strict=True):
        tokens[place, : len(answer.tokens)] = answer.tokens
    return tokens


def suits_batches(model: OnnxModel, request: GenerationRequest) -> bool:
    """Return whether beam search of many rows is faster in several batches: on CPUs, where a batch
    costs what its longest row does."""
    is_many = len(request.input_ids) > BATCH_SIZE
    return is_many and request.options.num_beams > 1 and model.device == "cpu"


def generate_in_batches(
    model: OnnxModel, request: GenerationRequest
) -> tuple[np.ndarray, np.ndarray]:
    """Return the new tokens and the scores of all rows by beam search, in batches of similar
    length."""
    copies = request.options.num_return_sequences
    rows = request.source or (request.input_ids, request.attention_mask)
    found = []
    for places in batches(rows_of(*rows), BATCH_SIZE):
        tokens, scores = model.generate(part_of(request, places))
        assert scores is not None  # beam search returns scores
        found.append(
            (np.add.outer(np.array(places) * copies, range(copies)).ravel(), tokens, scores)
        )
    count, longest = len(request.input_ids) * copies, max(tokens.shape[1] for _, tokens, _ in found)
    all_tokens = np.full((count, longest), request.options.fill_token_id)
    all_scores = np.empty(count, np.float32)
    for places, tokens, scores in found:
        all_tokens[places, : tokens.shape[1]] = tokens
        all_scores[places] = scores
    return all_tokens, all_scores


def part_of(request: GenerationRequest, places: list[int]) -> GenerationRequest:
    """Return a request with the rows `places` of `request`. Sources are cut to the longest of these
    rows."""
    source = request.source
    if source is not None:
        ids, mask = source[0][places], source[1][places]
        length = int(np.flatnonzero(mask.any(axis=0))[-1]) + 1
        source = ids[:, :length], mask[:, :length]
    return dataclasses.replace(
        request,
        input_ids=request.input_ids[places],
        attention_mask=request.attention_mask[places],
        source=source,
    )


def jobs_of(request: GenerationRequest) -> list[Job]:
    prompts = rows_of(request.input_ids, request.attention_mask)
    sources = [None] * len(prompts) if request.source is None else rows_of(*request.source)
    paddings = (request.attention_mask == 0).sum(axis=1).tolist()
    return [
        Job(request.options, prompt, source, padding=padding)
        for prompt, source, padding in zip(prompts, sources, paddings, strict=True)
    ]


def rows_of(ids: np.ndarray, mask: np.ndarray) -> list[list[int]]:
    """Return the tokens of each row without padding."""
    return [row[is_token].tolist() for row, is_token in zip(ids, mask == 1)]


def scheduler_for(model: OnnxModel, jobs: list[Job], workers: int) -> LocalScheduler:
    """Return a scheduler whose slots fit each of `jobs`, with at most one slot per job."""
    source = max(len(job.source or ()) for job in jobs)
    length = max(len(job.prompt) for job in jobs) + jobs[0].options.max_new_tokens - 1
    fitting = int(bytes_of_worker(workers) / slot_bytes(model.info, Room(1, source, length)))
    rows = max(1, min(MOST_ROWS, fitting, -(-len(jobs) // workers)))
    threads, count = model.threads, len(jobs)
    admission = Admission(model.info, workers, threads, workers * rows, source, length, count)
    return LocalScheduler(admission, model)
