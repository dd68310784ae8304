"""Checks of requests before they are queued: options, lengths and rows."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import TooLong, UsageError
from ..inference.export_info import ExportInfo
from ..inference.inputs import position_limit
from ..inference.logits import row_seed
from ..inference.options import Options
from ..inference.rows import SlotSize
from ..requests import generation_request
from .capacity import Arrangement, slot_bytes, slots_per_worker
from .request import GenerationInput

MAX_CACHED_OPTIONS = 1024
DEFAULT_LENGTH = 512  # tokens per slot, at most


class Admission:
    """The limits of one export, and the checks of requests against them. It opens no graph.

    Args:
        info: the export.
        workers: the number of workers, each with its own batch.
        threads: CPU threads per worker.
        slots: the number of rows that all workers run at once, rounded down to a multiple of
            `workers`. By default 64, or fewer if a worker's slots would take more than 1 GiB.
        max_source: the maximum number of tokens of a source.
        max_length: the maximum number of tokens of a prompt with its new tokens. The default of
            both is the number of positions of the model, at most 512. Learned positions are always
            a limit.
        max_waiting: the maximum number of rows in the queue.

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
        source = self.slot_length(max_source) if "encoder" in info.specs else 0
        self.slot_size = SlotSize(1, source, self.slot_length(max_length))
        rows = self.slots_per_worker(workers, slots)
        self.slot_size = dataclasses.replace(self.slot_size, rows=rows)
        self.max_waiting = max_waiting
        self._checked: dict[tuple, tuple[Options, list[int]]] = {}  # a cache

    def slot_length(self, length: int | None) -> int:
        """Return the number of tokens of a slot: `length`, or by default the model's positions up
        to 512.

        Learned positions are always a limit.
        """
        length = length or min(self.info.config["max_position_embeddings"], DEFAULT_LENGTH)
        return min(length, position_limit(self.info.config) or length)

    def slots_per_worker(self, workers: int, slots: int | None) -> int:
        if slots is None:
            return slots_per_worker(workers, slot_bytes(self.info, self.slot_size))
        if slots < workers:
            raise UsageError(
                f"{slots} slots are fewer than {workers} workers, expected at least one for each"
            )
        return slots // workers

    @property
    def slots(self) -> int:
        """Number of slots of all workers; each holds one running row."""
        return self.arrangement.workers * self.slot_size.rows

    def describe(self) -> str:
        """Return one line about the batching mode, workers and slots, for the log."""
        threads = f"{self.arrangement}, {self.slot_size.rows} rows each{self.beams_note()}"
        if self.info.step is None:
            return (
                "static batches grouped by length (the export has no step for continuous "
                f"batching), {threads}"
            )
        return f"continuous batching, {threads} of {self.describe_slots()} of slots"

    def beams_note(self) -> str:
        """Return text for the log if the default beams do not fit into the slots of a worker, else
        `""`."""
        num_beams = (self.info.generation_config | self.info.defaults).get("num_beams") or 1
        if num_beams <= self.slot_size.rows:
            return ""
        return f" (too few for the {num_beams} beams of generation_config.json)"

    def describe_slots(self) -> str:
        """Return the tokens per slot and the memory of all slots, as text."""
        size = self.slots * slot_bytes(self.info, self.slot_size) / 1e6
        source = f"{self.slot_size.source} source tokens and " if self.slot_size.source else ""
        return f"{source}{self.slot_size.length} tokens, {size:.0f} MB"

    def admit(
        self,
        input_ids: Sequence[int],
        options: dict[str, Any],
        prefix: Sequence[int] = (),
        top_logprobs: int | None = None,
        scores_prompt: bool = False,
        place: Sequence[int] = (),
    ) -> GenerationInput:
        """Check one input against the limits of the export and return it, ready for the scheduler.

        Args:
            input_ids: the source of a seq2seq model, or a prompt.
            options: options of `Runtime.generate` by name.
            prefix: tokens that the target of a seq2seq model begins with, empty for other models.
            top_logprobs: the number of best tokens reported with their log probabilities at each
                position, `None` for no log probabilities.
            scores_prompt: True to report the log probabilities of the prompt's tokens too.
            place: the place of the input in its call, see `logits.row_seed`; by default the first.

        Raises:
            UsageError: for an unknown option, a wrong value, options that cannot be combined, and
                log probabilities with beams.
            ValueError: for no tokens, tokens that the model does not have, and more tokens than
                it has learned positions.
            TooLong: if there are more tokens or rows than the slots hold.
        """
        self.check_lengths(len(input_ids))
        resolved, start = self.check_options(input_ids, options, prefix)
        has_source = self.slot_size.source > 0
        source, prompt = (input_ids, start) if has_source else (None, input_ids)
        if top_logprobs is not None and resolved.num_beams > 1:
            raise UsageError(
                f"logprobs do not go with num_beams={resolved.num_beams}, expected num_beams=1",
                "logprobs",
            )
        seed = None if resolved.seed is None else row_seed(resolved.seed, *place)
        admitted = GenerationInput(resolved, prompt, source, top_logprobs, scores_prompt, seed=seed)
        self.check_slot(admitted)
        return admitted

    def check_options(
        self, input_ids: Sequence[int], options: dict[str, Any], prefix: Sequence[int]
    ) -> tuple[Options, list[int]]:
        """Return the resolved options, and the decoder prompt of a seq2seq model.

        Results are cached, because a check takes as long as a short request. For other models the
        cache ignores which tokens a prompt has, so use only the options.

        Args:
            input_ids: the source of a seq2seq model, or a prompt.
            options: options of `Runtime.generate` by name.
            prefix: tokens that the target of a seq2seq model begins with.

        Raises:
            UsageError, ValueError: for wrong options or tokens, see `admit`.
        """
        if prefix:
            return self.resolve(input_ids, options, prefix)
        length = 0 if self.slot_size.source else len(input_ids)
        # with the type, because True == 1
        key = (length, *((name, type(value), value) for name, value in sorted(options.items())))
        if self.has_valid_tokens(input_ids):
            with contextlib.suppress(TypeError, KeyError):  # lists are not hashable
                return self._checked[key]
        result = self.resolve(input_ids, options, prefix)
        if len(self._checked) < MAX_CACHED_OPTIONS:
            with contextlib.suppress(TypeError):
                self._checked[key] = result
        return result

    def resolve(
        self, input_ids: Sequence[int], options: dict[str, Any], prefix: Sequence[int]
    ) -> tuple[Options, list[int]]:
        """Return the resolved options, and the tokens before the first new one: the decoder prompt,
        or `input_ids` without an encoder.

        `input_ids` are a source or a prompt, `prefix` the tokens that a target begins with.

        Raises:
            UsageError, ValueError: for wrong options or tokens, see `admit`.
        """
        ids = np.array([input_ids], np.int64)
        start = np.array([prefix], np.int64) if prefix else None
        request = generation_request(self.info, ids, np.ones_like(ids), start, options)
        return request.options, request.input_ids[0].tolist()

    def has_valid_tokens(self, input_ids: Sequence[int]) -> bool:
        """Return True if there are tokens, the model has positions for all, and each is in the
        vocabulary."""
        config = self.info.config
        fits = 0 < len(input_ids) <= config["max_position_embeddings"]
        return fits and min(input_ids) >= 0 and max(input_ids) < config["vocab_size"]

    def check_lengths(self, length: int) -> None:
        """Check that `length` tokens of a source, or of a prompt without an encoder, fit into a
        slot.

        Raises:
            TooLong: if they do not.
        """
        is_source = self.slot_size.source > 0
        limit = self.slot_size.source if is_source else self.slot_size.length
        if length > limit:
            name = "source" if is_source else "prompt"
            raise TooLong(f"the {name} has {length} tokens, expected at most {limit}")

    def check_slot(self, admitted: GenerationInput) -> None:
        """Check that the prompt with its new tokens fits into a slot, and its rows into a worker's
        slots.

        Raises:
            TooLong: if they do not.
        """
        size, max_new_tokens = self.slot_size, admitted.options.max_new_tokens
        length = len(admitted.prompt) + max_new_tokens - 1  # the last token is not fed
        if length > size.length:
            raise TooLong(
                f"{len(admitted.prompt)} tokens at the start and max_new_tokens={max_new_tokens} "
                f"need {length} positions, expected at most {size.length}"
            )
        if admitted.num_rows > size.rows:
            raise TooLong(
                f"one input needs {admitted.num_rows} rows, the larger of num_beams and "
                f"num_return_sequences, expected at most {size.rows}, the slots of a worker"
            )
