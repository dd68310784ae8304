"""What generates: a queue of jobs, and lanes that take them from there."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from ..runtime.runtime import Runtime
from .jobs import LENGTH, STOP, Event, Generated, Job


class Engine:
    """STAND-IN: one job after the other, in a thread. The real one has the same methods."""

    def __init__(self, runtime: Runtime, **settings: Any):
        self.runtime = runtime

    def job(
        self,
        input_ids: Sequence[int],
        options: dict[str, Any],
        prefix: Sequence[int] = (),
        top_logprobs: int | None = None,
        scores_prompt: bool = False,
    ) -> Job:
        """What continues `input_ids`, the source of a seq2seq model (whose target begins with `prefix`), or a prompt, with
        `options` as `Runtime.generate` takes them.

        Raises:
            UsageError, ValueError: as `Runtime.generate`.
            TooLong: for more tokens or rows than the slots hold, with both numbers.
        """
        ids = np.array([input_ids])
        start = np.array([prefix]) if prefix else None
        request = self.runtime.request(ids, np.ones_like(ids), start, options)
        source = request.source[0][0].tolist() if request.source else None
        return Job(request.options, request.input_ids[0].tolist(), source, top_logprobs, scores_prompt)

    async def answers(self, jobs: Sequence[Job]) -> list[list[Generated]]:
        """Of each job the `num_return_sequences` answers, best first. Cancelled, it leaves nothing running.

        Raises:
            Refusal: if the queue is full, or the server is shutting down.
        """
        return [await asyncio.to_thread(self._answer, job) for job in jobs]

    async def stream(self, job: Job) -> AsyncIterator[Event]:
        """The tokens of each of the answers, as they come. Closed early, it leaves nothing running. Raises as `answers`, and
        UsageError for beams, before the first."""
        for index, answer in enumerate((await self.answers([job]))[0]):
            for place, token in enumerate(answer.tokens):
                yield Event(index, token, answer.finish_reason if place == len(answer.tokens) - 1 else None)

    def _answer(self, job: Job) -> list[Generated]:
        from ..runtime.decoder import GenerationRequest

        source = None if job.source is None else (np.array([job.source]), np.ones((1, len(job.source)), np.int64))
        prompt = np.array([job.prompt])
        tokens, _ = self.runtime._generated(GenerationRequest(job.options, prompt, np.ones_like(prompt), source))
        answers = []
        for row in tokens[:, prompt.shape[1] :].tolist():
            ends = [place for place, token in enumerate(row) if token in job.options.eos_token_ids]
            answers.append(Generated(row[: ends[0] + 1] if ends else row, STOP if ends else LENGTH))
        return answers
