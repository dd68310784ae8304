"""Log-softmax and top-k in an onnxruntime graph, which is multithreaded and faster than numpy."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .session import FATAL

if TYPE_CHECKING:
    import onnxruntime

# logits per run, which limits the memory of the log-softmax
CHUNK = 1 << 19
NOT_FINITE = "some logits are NaN or infinite, expected numbers"
# written by tests/support/top_k_graph.py, because the runtime works without onnx
GRAPH = Path(__file__).with_name("top_k.onnx")


def top_k_tokens(logits: np.ndarray, count: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Return log p and index of the top `count` tokens of each row, both (rows, count).

    `logits` are (rows, V). The best token comes first, ties are sorted by index. All log p of a row
    are NaN if the row has NaN or infinity, or only -infinity. `threads` is the number of CPU
    threads.
    """
    # Few logits take less time than the threads take to wake up.
    run, chunk = (
        session(threads if logits.size > CHUNK else 1).run,
        max(1, CHUNK // logits.shape[1]),
    )
    counts = np.array([count])
    results = [
        run(None, {"logits": logits[row : row + chunk], "count": counts})
        for row in range(0, len(logits), chunk)
    ]
    log_p, tokens = (np.concatenate(parts) for parts in zip(*results))
    return log_p, tokens


@functools.cache
def session(threads: int) -> "onnxruntime.InferenceSession":
    """Return the session of the graph for top-k with this number of `threads`, one for each number.

    The threads do not spin between two steps, because they would compete with the decoder's threads
    for CPUs.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = FATAL
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(GRAPH, options, providers=["CPUExecutionProvider"])
