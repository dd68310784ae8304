"""The rows of one request in lanes, the longest first: one that has ended leaves, and the next takes its place, so that a step
costs what is still running."""

from typing import TYPE_CHECKING

import numpy as np

from ..runtime.decoder import GenerationRequest
from ..runtime.options import Options
from .batch import Room, slot_bytes
from .engine import Engine
from .jobs import Generated, Job
from .sizing import MOST_BYTES, rows_of_lane

if TYPE_CHECKING:
    from ..runtime.runtime import Runtime

LEAST_SLOTS = 16  # for which there must be memory: whole batches, whose caches grow, are better than fewer


def is_suited(options: Options, is_scored: bool) -> bool:
    """Whether each row can be searched by itself with the same result, and no more slowly."""
    return not options.do_sample and not is_scored


def has_room(runtime: "Runtime", new_tokens: int) -> bool:
    """Whether enough slots of so many tokens fit into memory."""
    return LEAST_SLOTS * slot_bytes(runtime, Room(1, 0, new_tokens)) <= MOST_BYTES


def generate(runtime: "Runtime", request: GenerationRequest, lanes: int) -> tuple[np.ndarray, np.ndarray | None]:
    """As `Search.result`, of all rows of `request`. `runtime` has a step, and the threads of a lane.

    Raises:
        ValueError: for what onnxruntime cannot compute.
    """
    jobs = jobs_of(request)
    order = sorted(range(len(jobs)), key=lambda place: -len(jobs[place].source or jobs[place].prompt))
    found: list[list[Generated]] = [[]] * len(jobs)
    engine = engine_for(runtime, jobs, lanes).start()
    try:
        for place, answers in zip(order, engine.generate([jobs[place] for place in order]), strict=True):
            found[place] = answers
    except RuntimeError as failure:
        raise failure.__cause__ or failure from None
    finally:
        engine.close()
    return as_arrays([answer for answers in found for answer in answers], request.options.fill_token_id)


def jobs_of(request: GenerationRequest) -> list[Job]:
    prompts = rows_of(request.input_ids, request.attention_mask)
    sources = [None] * len(prompts) if request.source is None else rows_of(*request.source)
    return [Job(request.options, prompt, source) for prompt, source in zip(prompts, sources)]


def rows_of(ids: np.ndarray, mask: np.ndarray) -> list[list[int]]:
    """The tokens of each row, without its padding."""
    return [row[is_token].tolist() for row, is_token in zip(ids, mask == 1)]


def engine_for(runtime: "Runtime", jobs: list[Job], lanes: int) -> Engine:
    """With slots that each of `jobs` fits into, and no more than they have rows."""
    source = max(len(job.source or ()) for job in jobs)
    length = max(len(job.prompt) for job in jobs) + jobs[0].options.max_new_tokens - 1
    fitting = rows_of_lane(lanes, slot_bytes(runtime, Room(1, source, length)))
    rows = max(jobs[0].rows, min(fitting, -(-len(jobs) * jobs[0].rows // lanes)))
    return Engine(runtime, lanes, lanes * rows, source, length, queue=len(jobs) * jobs[0].rows)


def as_arrays(answers: list[Generated], fill_token_id: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The tokens, filled up to the longest, and the scores, if there are any."""
    tokens = np.full((len(answers), max(len(answer.tokens) for answer in answers)), fill_token_id)
    for row, answer in zip(tokens, answers):
        row[: len(answer.tokens)] = answer.tokens
    scores = [answer.score for answer in answers if answer.score is not None]
    return tokens, np.array(scores, np.float32) if scores else None
