"""Comparison of an export with the pipelines of transformers on its checkpoint."""

import numpy as np
from heads import MANY, close
from transformers import pipeline


def both(open_head, name, task, **settings):
    """The pipeline of transformers on the checkpoint, and the runtime."""
    checkpoint, runtime = open_head(name, **settings)
    return pipeline(task, model=checkpoint), runtime


def plain(value):
    """Replace NumPy's numbers in `value` by Python's."""
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
