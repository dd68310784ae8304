"""The likeliest tokens by a graph of onnxruntime: a log-softmax and a top-k, which take less than numpy's, on all threads."""

import functools
from typing import TYPE_CHECKING

import numpy as np

from .session import FATAL

if TYPE_CHECKING:
    import onnxruntime

CHUNK = 1 << 19  # logits of one run, so that the log-softmax, of which little is kept, takes little memory
FLOAT, INT64 = 1, 7  # the types of ONNX
OPSET, IR_VERSION = 21, 10


def likeliest_tokens(logits: np.ndarray, count: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """log p and index of the `count` likeliest tokens, both (rows, count), of each row of `logits` (rows, V): likeliest first,
    ties by index.

    Raises:
        ValueError: if a row has numbers that have no log-softmax.
    """
    # Few logits take less time than threads take to wake.
    run, each = session(threads if logits.size > CHUNK else 1).run, max(1, CHUNK // logits.shape[1])
    counts = np.array([count])
    found = [run(None, {"logits": logits[row : row + each], "count": counts}) for row in range(0, len(logits), each)]
    log_p, tokens = (np.concatenate(parts) for parts in zip(*found))
    if np.isnan(log_p).any():
        raise ValueError("some logits are NaN or infinite, expected numbers")
    return log_p, tokens


@functools.cache
def session(threads: int) -> "onnxruntime.InferenceSession":
    """Its threads do not wait awake: between two steps they would take the processors from those of the decoder."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = FATAL
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(graph(), options, providers=["CPUExecutionProvider"])


def graph() -> bytes:
    """The file of the graph, whose protobuf is written by hand: where exports run there is no onnx."""
    nodes = (
        node("TopK", ["logits", "count"], ["values", "tokens"]),
        node("LogSoftmax", ["logits"], ["all"]),
        node("GatherElements", ["all", "tokens"], ["log_p"], axis=1),
    )
    inputs = tensor("logits", FLOAT, 2), tensor("count", INT64, 1)
    outputs = tensor("log_p", FLOAT, 2), tensor("tokens", INT64, 2)
    named = (2, "likeliest")
    parts = message(*((1, each) for each in nodes), named, *((11, each) for each in inputs), *((12, each) for each in outputs))
    return message((1, IR_VERSION), (7, parts), (8, message((2, OPSET))))


def node(kind: str, inputs: list[str], outputs: list[str], **attributes: int) -> bytes:
    integer = 2  # the type of an attribute
    made = (message((1, name), (3, value), (20, integer)) for name, value in attributes.items())
    return message(*((1, name) for name in inputs), *((2, name) for name in outputs), (4, kind), *((5, each) for each in made))


def tensor(name: str, kind: int, rank: int) -> bytes:
    """Of any sizes."""
    shape = message(*[(1, b"")] * rank)
    return message((1, name), (2, message((1, message((1, kind), (2, shape))))))


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """The `fields` by their numbers: integers, or texts and other messages with their length before them."""
    content = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            content += varint(number << 3) + varint(value)
        else:
            value = value.encode() if isinstance(value, str) else value
            content += varint(number << 3 | 2) + varint(len(value)) + value
    return bytes(content)


def varint(value: int) -> bytes:
    """Seven bits in a byte, the lowest first; the eighth says that more follow."""
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)
