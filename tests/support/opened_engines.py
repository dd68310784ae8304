"""Schedulers over exports, in threads of the tests."""

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.model import open_export, open_for_workers
from vanilla_transformer_export.scheduler.admission import Admission
from vanilla_transformer_export.scheduler.client import LocalScheduler


def open_engine(directory, workers=1, slots=None, threads=1, **sizes):
    """Return a scheduler of the export `directory`, which is not started.

    `sizes` and the other arguments are those of `Admission`.
    """
    sizes = {"max_waiting": 10_000, **sizes}
    info = open_export(directory)
    admission = Admission(info, workers, threads, slots, **sizes)
    return LocalScheduler(admission, open_for_workers(info, threads))


def first_batch(engine):
    """Return the batch of the first worker, for engines that are not started."""
    return engine.scheduler.workers[0].batch


def text_engine(directory, **sizes):
    """Return (the text side of the export `directory`, as `serve` has it, its started scheduler).

    `sizes` are arguments of `open_engine`.
    """
    engine = open_engine(directory, **sizes).start()
    return TextRuntime.around(engine.admission), engine
