"""Checks what clients ask before it waits for a batch: options, lengths and rows."""

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

MOST_KNOWN = 1024  # different options whose check is remembered
MOST_LENGTH = 512  # tokens that a slot holds where nothing else is said


class Admission:
    """What one export can run at once, in the process that clients ask; no graph is open there.

    Args:
        workers, threads: threads with a batch of their own, and processor threads of each.
        slots: rows that all workers together run at most; by default 64, and no more than fit into
            1 GiB of each worker.
        max_source, max_length: tokens that are read of a source, and of a prompt with its new
            tokens, at most; by default the model's positions, and no more than 512. Learned
            positions are a limit always.
        max_waiting: rows of requests that may wait for a batch.

    Raises:
        UsageError: for fewer slots than workers.
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
        """Tokens of a slot where so many are `given`."""
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
        """Slots of all workers, each for one running row."""
        return self.arrangement.workers * self.room.rows

    def describe(self) -> str:
        """In one line, for who starts it."""
        threads = f"{self.arrangement}, {self.room.rows} rows each"
        if self.info.step is None:
            return (
                "whole batches grouped by length (the export has no step for continuous "
                f"batching), {threads}"
            )
        return f"continuous batching, {threads} of {self.describe_room()} of slots"

    def describe_room(self) -> str:
        """What a slot holds, and what all of them take."""
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
        """What continues `input_ids`, the source of a seq2seq model (whose target begins with
        `prefix`), or a prompt, with `options` as `Runtime.generate` takes them.

        Raises:
            UsageError, ValueError: as `Runtime.generate`; UsageError for probabilities of beams.
            TooLong: for more tokens or rows than the slots hold, with both numbers.
        """
        self.check_lengths(len(input_ids))
        length = 0 if self.room.source else len(input_ids)
        # True is not 1 here
        key = (length, *((name, type(value), value) for name, value in sorted(options.items())))
        known = self.known_prompt(key, input_ids) if not prefix else None
        if known is None:
            known = self.checked(input_ids, options, prefix)
            if not prefix and len(self._known) < MOST_KNOWN:
                with contextlib.suppress(TypeError):  # lists among the options have no hash
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
        """The resolved options, and for seq2seq what the target begins with. Raises as
        `Runtime.generate`."""
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
        """What `checked` gave for the same options, if it would give the same for these tokens:
        checking them anew takes as long as answering a short request otherwise does."""
        config = self.info.config
        fits = 0 < len(input_ids) <= config["max_position_embeddings"]
        if not fits or min(input_ids) < 0 or max(input_ids) >= config["vocab_size"]:
            return None
        try:
            return self._known.get(key)
        except TypeError:
            return None

    def check_queue(self, waiting: int, rows: int) -> None:
        """Raise RequestError if `rows` more would be too many beside `waiting` rows. Where nothing
        waits, a request may have any number."""
        if waiting and waiting + rows > self.max_waiting:
            raise overloaded(waiting, self.max_waiting)

    def check_lengths(self, given: int) -> None:
        """Before anything is made of them."""
        if not self.room.source:
            if given > self.room.length:
                raise TooLong(f"the prompt has {given} tokens, expected at most {self.room.length}")
        elif given > self.room.source:
            raise TooLong(f"the source has {given} tokens, expected at most {self.room.source}")

    def check_room(self, job: Job) -> None:
        fed = len(job.prompt) + job.options.max_new_tokens - 1  # the last one is only read off
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
