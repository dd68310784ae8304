"""One graph that generates, and prompts for it."""

import json

import numpy as np
import onnxruntime
from checkpoints import PAD, VOCABULARY, default_graphs

BEAMS = dict(num_beams=3, length_penalty=0.7, early_stopping=False)


def source(rows, seed=0, length=9):
    """Return ids and mask of rows of different lengths, padded on the right."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, VOCABULARY, (rows, length))
    mask = (np.arange(length) < rng.integers(2, length + 1, (rows, 1))).astype(np.int64)
    return np.where(mask, ids, PAD), mask


def prompts(rows, seed=0, length=7):
    """Return ids and mask of decoder prompts of different lengths, padded on the left."""
    ids, mask = source(rows, seed, length)
    return np.take_along_axis(ids, np.argsort(mask, axis=1, kind="stable"), axis=1), np.sort(
        mask, axis=1
    )


class Generator:
    """A graph that generates, and the usual export of the same checkpoint for the runtime."""

    def __init__(self, directory, parts, mode):
        self.directory = directory
        manifest = json.loads((directory / "manifest.json").read_text())
        [file] = default_graphs(manifest).values()
        self.session = onnxruntime.InferenceSession(
            directory / file, providers=["CPUExecutionProvider"]
        )
        self.parts = parts
        self.mode = mode

    def run(self, ids, mask, **inputs):
        """Run the graph. A single number in `inputs` applies to all rows."""
        feeds = {"input_ids": ids, "attention_mask": mask}
        for each in self.session.get_inputs()[2:]:
            value = np.asarray(inputs[each.name], np.float32 if "float" in each.type else np.int64)
            feeds[each.name] = np.broadcast_to(value, (len(ids), 1)) if value.ndim < 2 else value
        return self.session.run(None, feeds)
