"""The rows of one request in workers, the longest first: one that has ended leaves, and the next
takes its place, so that a step costs what is still running."""

from typing import TYPE_CHECKING

import numpy as np

from ..inference.decoder import GenerationRequest, memory
from ..inference.options import Options
from .capacity import LEAST_ROWS, MOST_BYTES, MOST_ROWS
from .engine import Engine
from .request import Job
from .slot_batch import Room, slot_bytes

if TYPE_CHECKING:
    from ..runtime import Runtime


def is_suited(options: Options, is_scored: bool) -> bool:
    """Whether each row can be searched by itself with the same result, and no more slowly."""
    return not options.do_sample and options.num_beams == 1 and not is_scored


def has_room(runtime: "Runtime", workers: int, new_tokens: int) -> bool:
    """Whether enough slots of so many tokens fit into memory: whole batches, whose caches grow, are
    better than fewer."""
    return LEAST_ROWS * slot_bytes(runtime, Room(1, 0, new_tokens)) <= bytes_of_worker(workers)


def bytes_of_worker(workers: int) -> float:
    """What its slots may take. Only what tokens have been written to is taken from the system."""
    return min(MOST_BYTES, memory() / 4 / workers)


def generate(runtime: "Runtime", request: GenerationRequest, workers: int) -> np.ndarray:
    """The new tokens (B, T) of all rows of `request`, filled up after the end token. `runtime` has
    a step, and the threads of a worker.

    Raises:
        ValueError: for what onnxruntime cannot compute.
    """
    jobs = jobs_of(request)
    order = sorted(
        range(len(jobs)), key=lambda place: -len(jobs[place].source or jobs[place].prompt)
    )
    engine = engine_for(runtime, jobs, workers).start()
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


def engine_for(runtime: "Runtime", jobs: list[Job], workers: int) -> Engine:
    """With slots that each of `jobs` fits into, and no more than there are jobs."""
    source = max(len(job.source or ()) for job in jobs)
    length = max(len(job.prompt) for job in jobs) + jobs[0].options.max_new_tokens - 1
    fitting = int(bytes_of_worker(workers) / slot_bytes(runtime, Room(1, source, length)))
    rows = max(1, min(MOST_ROWS, fitting, -(-len(jobs) // workers)))
    return Engine(runtime, workers, workers * rows, source, length, queue=len(jobs))
