"""Comparison of an export with the pipelines of transformers on its checkpoint."""

import numpy as np
from heads import MANY, close
from transformers import pipeline


def both(open_head, name, task, **settings):
    """Return (the pipeline of transformers for `task`, the runtime) of the checkpoint `name`.

    `open_head` is the fixture that makes it, with `settings`.
    """
    checkpoint, runtime = open_head(name, **settings)
    return pipeline(task, model=checkpoint), runtime


def plain(value):
    """Return `value` with Python's numbers in place of NumPy's."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def same(actual, expected):
    close(actual, plain(expected), absolute=1e-5)


QUESTIONS = ["who sees the red house ?", "two dogs", "the woman reads"]
CONTEXTS = [MANY[0], MANY[5], MANY[4]]
WINDOWS = {"max_seq_len": 40, "doc_stride": 6}
