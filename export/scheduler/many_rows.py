"""The rows of one request in workers, the longest first: one that has ended leaves, and the next
takes its place, so that a step costs what is still running."""

import numpy as np

from ..inference.decoder import GenerationRequest, memory
from ..inference.export_info import ExportInfo
from ..inference.options import Options
from ..model import OnnxModel
from .admission import Admission
from .capacity import LEAST_ROWS, MOST_BYTES, MOST_ROWS
from .engine import Engine
from .request import Job
from .slot_batch import Room, slot_bytes


def is_suited(info: ExportInfo, workers: int, rows: int, options: Options, is_scored: bool) -> bool:
    """Return whether `rows` rows run in workers: each row can be searched by itself with the same
    result, and no more slowly."""
    if info.step is None or rows < LEAST_ROWS * workers:
        return False
    if options.do_sample or options.num_beams > 1 or is_scored:
        return False
    # enough slots must fit into memory: whole batches, whose caches grow, are better than fewer
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
    """What its slots may take. Only what tokens have been written to is taken from the system."""
    return min(MOST_BYTES, memory() / 4 / workers)


def generate(model: OnnxModel, request: GenerationRequest, workers: int) -> np.ndarray:
    """The new tokens (B, T) of all rows of `request`, filled up after the end token. `model` has
    a step, and the threads of a worker.

    Raises:
        ValueError: for what onnxruntime cannot compute.
    """
    jobs = jobs_of(request)
    order = sorted(
        range(len(jobs)), key=lambda place: -len(jobs[place].source or jobs[place].prompt)
    )
    engine = engine_for(model, jobs, workers).start()
    try:
        found = engine.generate([jobs[place] for place in order], are_last=True)
    except RuntimeError as failure:
        raise failure.__cause__ or failure from None
    finally:
        engine.close()
    tokens = np.full(
        (len(jobs), max(len(answer.tokens) for [answer] in found)), request.options.fill_token_id
    )
    for place, [answer] in zip(order, found, strict=True):
        tokens[place, : len(answer.tokens)] = answer.tokens
    return tokens


def jobs_of(request: GenerationRequest) -> list[Job]:
    prompts = rows_of(request.input_ids, request.attention_mask)
    sources = [None] * len(prompts) if request.source is None else rows_of(*request.source)
    paddings = (request.attention_mask == 0).sum(axis=1).tolist()
    return [
        Job(request.options, prompt, source, padding=padding)
        for prompt, source, padding in zip(prompts, sources, paddings, strict=True)
    ]


def rows_of(ids: np.ndarray, mask: np.ndarray) -> list[list[int]]:
    """The tokens of each row, without its padding."""
    return [row[is_token].tolist() for row, is_token in zip(ids, mask == 1)]


def engine_for(model: OnnxModel, jobs: list[Job], workers: int) -> Engine:
    """With slots that each of `jobs` fits into, and no more than there are jobs."""
    source = max(len(job.source or ()) for job in jobs)
    length = max(len(job.prompt) for job in jobs) + jobs[0].options.max_new_tokens - 1
    fitting = int(bytes_of_worker(workers) / slot_bytes(model.info, Room(1, source, length)))
    rows = max(1, min(MOST_ROWS, fitting, -(-len(jobs) // workers)))
    admission = Admission(model.info, workers, model.threads, workers * rows, source, length)
    return Engine.of(admission, model, len(jobs))
