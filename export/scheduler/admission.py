"""Checks of requests before they are queued: options, lengths and rows."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import TooLong, UsageError
from ..inference.export_info import ExportInfo
from ..inference.inputs import position_limit
from ..inference.options import Options
from ..requests import generation_request
from .capacity import Arrangement, rows_of_worker
from .refusals import overloaded
from .request import Job
from .slot_batch import Room, slot_bytes

MOST_KNOWN = 1024  # size of the cache of checked options
MOST_LENGTH = 512  # default tokens per slot


class Admission:
    """The limits of one export, and the checks of requests against them. It opens no graph.

    Args:
        workers, threads: number of workers, each with its own batch, and CPU threads per worker.
        slots: maximum running rows of all workers; by default 64, limited to 1 GiB per worker.
        max_source, max_length: maximum tokens of a source, and of a prompt with its new tokens;
            by default the model's positions, at most 512. Learned positions are always a limit.
        max_waiting: maximum rows in the queue.

    Raises:
        UsageError: if there are fewer slots than workers.
    """

    def __init__(
        self,
        info: ExportInfo,
        workers: int = 1,
        threads: int = 1,
        slots: int | None = None,
        max_source: int | None = None,
        max_length: int | None = None,
        max_waiting: int = 256,
    ):
        self.info = info
        self.arrangement = Arrangement(workers, threads)
        reads = "encoder" in info.specs
        self.room = Room(1, self.longest(max_source) if reads else 0, self.longest(max_length))
        self.room = dataclasses.replace(self.room, rows=self.rows_of_worker(workers, slots))
        self.max_waiting = max_waiting
        self._known: dict[tuple, tuple[Options, list[int]]] = {}

    def longest(self, given: int | None) -> int:
        """Return the tokens per slot: `given`, or by default the model's positions up to 512."""
        found = given or min(self.info.config["max_position_embeddings"], MOST_LENGTH)
        return min(found, position_limit(self.info.config) or found)

    def rows_of_worker(self, workers: int, slots: int | None) -> int:
        if slots is None:
            return rows_of_worker(workers, slot_bytes(self.info, self.room))
        if slots < workers:
            raise UsageError(
                f"{slots} slots are fewer than {workers} workers, expected at least one for each"
            )
        return slots // workers

    @property
    def slots(self) -> int:
        """Number of slots of all workers; each holds one running row."""
        return self.arrangement.workers * self.room.rows

    def describe(self) -> str:
        """Return one line about the batching mode, workers and slots, for the log."""
        threads = f"{self.arrangement}, {self.room.rows} rows each"
        if self.info.step is None:
            return (
                "whole batches grouped by length (the export has no step for continuous "
                f"batching), {threads}"
            )
        return f"continuous batching, {threads} of {self.describe_room()} of slots"

    def describe_room(self) -> str:
        """Return the tokens per slot and the memory of all slots, as text."""
        size = self.slots * slot_bytes(self.info, self.room) / 1e6
        source = f"{self.room.source} source tokens and " if self.room.source else ""
        return f"{source}{self.room.length} tokens, {size:.0f} MB"

    def job(
        self,
        input_ids: Sequence[int],
        options: dict[str, Any],
        prefix: Sequence[int] = (),
        top_logprobs: int | None = None,
        scores_prompt: bool = False,
    ) -> Job:
        """Return the checked job for `input_ids` with the options of `Runtime.generate`.

        Args:
            input_ids: the source of a seq2seq model, or a prompt.
            prefix: tokens that the target of a seq2seq model begins with.

        Raises:
            UsageError, ValueError: as in `Runtime.generate`; UsageError for log probabilities of
                beams.
            TooLong: if there are more tokens or rows than the slots hold.
        """
        self.check_lengths(len(input_ids))
        length = 0 if self.room.source else len(input_ids)
        # with the type, because True == 1
        key = (length, *((name, type(value), value) for name, value in sorted(options.items())))
        known = self.known_prompt(key, input_ids) if not prefix else None
        if known is None:
            known = self.checked(input_ids, options, prefix)
            if not prefix and len(self._known) < MOST_KNOWN:
                with contextlib.suppress(TypeError):  # options that are lists are not hashable
                    self._known[key] = known
        resolved, start = known
        source, prompt = (input_ids, start) if self.room.source else (None, input_ids)
        if top_logprobs is not None and resolved.num_beams > 1:
            raise UsageError(
                f"logprobs do not go with num_beams={resolved.num_beams}, expected num_beams=1",
                "logprobs",
            )
        job = Job(resolved, prompt, source, top_logprobs, scores_prompt)
        self.check_room(job)
        return job

    def checked(
        self, input_ids: Sequence[int], options: dict[str, Any], prefix: Sequence[int]
    ) -> tuple[Options, list[int]]:
        """Return the resolved options and the decoder prompt. Raise as `Runtime.generate` does."""
        ids = np.array([input_ids], np.int64)
        start = np.array([prefix], np.int64) if prefix else None
        if (given := options.get("prompt_lookup_num_tokens")) is not None:
            raise UsageError(
                f"prompt_lookup_num_tokens is {given!r}, expected none: rows that share a batch "
                "take a token each"
            )
        without = {**options, "prompt_lookup_num_tokens": None}
        request = generation_request(self.info, ids, np.ones_like(ids), start, without)
        return request.options, request.input_ids[0].tolist()

    def known_prompt(
        self, key: tuple, input_ids: Sequence[int]
    ) -> tuple[Options, list[int]] | None:
        """Return the cached result of `checked`, or `None` if it is not known or the tokens are
        invalid. Without the cache, the check takes as long as a short request."""
        config = self.info.config
        fits = 0 < len(input_ids) <= config["max_position_embeddings"]
        if not fits or min(input_ids) < 0 or max(input_ids) >= config["vocab_size"]:
            return None
        try:
            return self._known.get(key)
        except TypeError:
            return None

    def check_queue(self, waiting: int, rows: int) -> None:
        """Raise RequestError if `rows` more rows exceed the queue's limit. An empty queue accepts
        any number of rows."""
        if waiting and waiting + rows > self.max_waiting:
            raise overloaded(waiting, self.max_waiting)

    def check_lengths(self, given: int) -> None:
        """Raise TooLong if a source or prompt of `given` tokens does not fit into a slot."""
        if not self.room.source:
            if given > self.room.length:
                raise TooLong(f"the prompt has {given} tokens, expected at most {self.room.length}")
        elif given > self.room.source:
            raise TooLong(f"the source has {given} tokens, expected at most {self.room.source}")

    def check_room(self, job: Job) -> None:
        fed = len(job.prompt) + job.options.max_new_tokens - 1  # the last token is not fed
        if fed > self.room.length:
            found = (
                f"{len(job.prompt)} tokens at the start and "
                f"max_new_tokens={job.options.max_new_tokens} are {fed} to be fed"
            )
            raise TooLong(f"{found}, expected at most {self.room.length}")
        if job.rows > self.room.rows:
            raise TooLong(
                f"{job.rows} beams or sequences, expected at most {self.room.rows}, the slots "
                f"of a worker"
            )
