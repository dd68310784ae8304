"""Runtimes whose full-sequence runs go through a scheduler."""

from typing import Any

import numpy as np

from ..engine.encoder import MAX_WAITING, EncoderScheduler
from ..engine.inputs import encoder_feeds
from ..engine.limits import Arrangement
from ..engine.model import find_target
from ..inference.export_info import ExportInfo
from ..inference.inputs import max_run_tokens
from ..runtime import Runtime


class BatchingRuntime:
    """A replacement of `runtime`, a `Runtime`, for tasks that read full sequences. Its runs go
    through `scheduler`."""

    def __init__(self, runtime: Runtime, scheduler: EncoderScheduler):
        self.runtime = runtime
        self.scheduler = scheduler
        self.max_tokens = max_batch_tokens(runtime.info, scheduler.arrangement)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def outputs(
        self,
        input_ids: np.ndarray | None = None,
        attention_mask: np.ndarray | None = None,
        token_type_ids: np.ndarray | None = None,
        **inputs: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """Return {output: array} of the encoder graph, computed together with other requests.

        `input_ids`, `attention_mask` (0 for padding, by default all 1) and `token_type_ids` (by
        default all 0) are (B, S). `inputs` are other inputs of the graph by name. The calling
        thread waits for the outputs.

        Raises:
            ValueError: for inputs that are missing, unknown, or of a wrong shape or range.
            TooLong: for a row with more tokens than the scheduler accepts.
            RequestError: if the server is shutting down.
            Disconnected: if the request of this thread was cancelled.
            RuntimeError: if the engine failed.
        """
        arguments = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            **inputs,
        }
        return self.scheduler.run(encoder_feeds(self.runtime.info, arguments))


def max_batch_tokens(info: ExportInfo, arrangement: Arrangement) -> int:
    """Return how many tokens tasks pass at once: as many as keep all workers busy, with rows of
    several lengths."""
    device = find_target(info).default_device
    return 2 * arrangement.workers * max_run_tokens(device, arrangement.threads)


def batched(
    runtime: Any, workers: int = 1, max_waiting: int = MAX_WAITING, **options: Any
) -> EncoderScheduler:
    """Make `runtime` run its model through a new `EncoderScheduler`, and return the scheduler.

    The scheduler is started; the caller closes it. `runtime` is a `TextRuntime` or an
    `ImageRuntime` opened with the threads of one worker. `workers` is the number of worker threads,
    and `max_waiting` the number of rows that may wait. `options` are `max_source`, `observe` and
    `max_calls` of `EncoderScheduler`.
    """
    scheduler = EncoderScheduler(runtime.runtime.model, workers, max_waiting, **options)
    runtime.runtime = BatchingRuntime(runtime.runtime, scheduler)
    return scheduler
