"""The likeliest tokens by a graph of onnxruntime: a log-softmax and a top-k, which take less than
numpy's, on all threads."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .session import FATAL

if TYPE_CHECKING:
    import onnxruntime

# logits of one run, so that the log-softmax, of which little is kept, takes little memory
CHUNK = 1 << 19
# written by tests/support/top_k_graph.py: exports run without onnx
GRAPH = Path(__file__).with_name("top_k.onnx")


def likeliest_tokens(logits: np.ndarray, count: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """log p and index of the `count` likeliest tokens, both (rows, count), of each row of `logits`
    (rows, V): likeliest first, ties by index.

    Raises:
        ValueError: if a row has numbers that have no log-softmax.
    """
    # Few logits take less time than threads take to wake.
    run, each = session(threads if logits.size > CHUNK else 1).run, max(1, CHUNK // logits.shape[1])
    counts = np.array([count])
    found = [
        run(None, {"logits": logits[row : row + each], "count": counts})
        for row in range(0, len(logits), each)
    ]
    log_p, tokens = (np.concatenate(parts) for parts in zip(*found))
    if np.isnan(log_p).any():
        raise ValueError("some logits are NaN or infinite, expected numbers")
    return log_p, tokens


@functools.cache
def session(threads: int) -> "onnxruntime.InferenceSession":
    """Its threads do not wait awake: between two steps they would take the processors from those of
    the decoder."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = FATAL
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(GRAPH, options, providers=["CPUExecutionProvider"])
