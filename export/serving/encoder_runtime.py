"""Models whose full-sequence runs go through a scheduler."""

from typing import Any

from ..engine.encoder import MAX_WAITING, EncoderScheduler
from ..engine.limits import Arrangement
from ..engine.model import OnnxModel, find_target
from ..inference.export_info import ExportInfo
from ..inference.inputs import max_run_tokens


class BatchedModel:
    """A replacement of `model`, whose full-sequence runs go through `scheduler`, together with
    those of other requests. Tasks pass `max_tokens` tokens at a time."""

    def __init__(self, model: OnnxModel, scheduler: EncoderScheduler):
        self.model = model
        self.outputs = scheduler.run
        self.max_tokens = max_batch_tokens(model.info, scheduler.arrangement)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


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
    model = runtime.runtime.model
    scheduler = EncoderScheduler(model, workers, max_waiting, **options)
    runtime.runtime.model = BatchedModel(model, scheduler)
    return scheduler
