"""The device of the stand-ins, what they log, and the exports that run on it."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
from exports import Case

from vanilla_transformer_export.heads import HEADS, READS_CHOICES, READS_IMAGES, READS_TARGETS

EXPORTS = Path(os.environ["CUDA_DRY_EXPORTS"])
LOG = Path(os.environ["CUDA_DRY_LOG"])
CAPABILITY = int(os.environ["CUDA_DRY_CAPABILITY"])
CUDA = "CUDAExecutionProvider"
TO_DEVICE, TO_HOST = "copy 1 ", "copy 2 "


class Calls(list):
    """The lines of the log of some calls. Its words are those of `stand_ins/cudart.cpp`."""

    def starting(self, *words: str) -> list[str]:
        return [line for line in self if line.startswith(words)]

    @property
    def captured(self) -> "Calls":
        """Calls during captures of graphs."""
        return Calls(line.removeprefix("captured ") for line in self.starting("captured "))

    def check_attention(self, case: Case) -> None:
        """Check that attention is one kernel if the heads allow it, and that no kernel stores
        scores in half precision."""
        text, fields = "\n".join(self), config(case)
        assert "attention_softmax_cuda" not in text  # of MultiHeadAttention, in the graph's dtype
        is_grouped = fields["num_key_value_heads"] != fields["num_attention_heads"]
        is_fused = fields["head_dim"] % 8 == fields["value_head_dim"] % 8 == 0
        is_fused &= not (is_grouped and case.dtype == "fp32")
        assert not is_fused or "UnfusedSoftmax" not in text  # reads scores in float32

    def check_captures(self) -> None:
        """Check that captures have no call that CUDA forbids, and no copy from or to the host: a
        replay would copy whatever was there."""
        assert self.captured.starting("forbidden", TO_DEVICE, TO_HOST) == []


@contextlib.contextmanager
def calls() -> Iterator[Calls]:
    """Return a list that has the calls of the body when the body ends."""
    lines, start = Calls(), LOG.stat().st_size if LOG.exists() else 0
    yield lines
    with open(LOG, encoding="utf-8") as log:
        log.seek(start)
        lines += log.read().splitlines()


@contextlib.contextmanager
def sessions() -> Iterator[list[onnxruntime.InferenceSession]]:
    """Return a list of the sessions that the body opens. They know where their nodes run."""
    opened, make = [], onnxruntime.InferenceSession

    def record(graph, options, **arguments):
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        opened.append(make(graph, options, **arguments))
        return opened[-1]

    onnxruntime.InferenceSession = record
    try:
        yield opened
    finally:
        onnxruntime.InferenceSession = make


def nodes_elsewhere(session: onnxruntime.InferenceSession) -> list[str]:
    """Return the operators of the nodes that do not run on CUDA."""
    parts = session.get_provider_graph_assignment_info()
    return [node.op_type for part in parts if part.ep_name != CUDA for node in part.get_nodes()]


def config(case: Case) -> dict:
    return json.loads((EXPORTS / str(case) / "config.json").read_text(encoding="utf-8"))


def inputs(case: Case, length: int = 12) -> dict[str, np.ndarray]:
    """Return 3 rows of at most `length` tokens, the second half as long, or 3 images."""
    head, rng = HEADS[case.architecture], np.random.default_rng(0)
    if head.reads == READS_IMAGES:
        sides = np.broadcast_to(config(case)["image_size"], 2)
        shape = (3, config(case)["num_channels"], *sides)
        return {"pixel_values": rng.normal(size=shape).astype(np.float32)}
    ids, mask = rng.integers(4, 48, (3, length)), np.ones((3, length), np.int64)
    is_left = case.generates and "Seq2Seq" not in case.architecture
    mask[1, : length // 2] = 0
    mask = mask if is_left else mask[:, ::-1].copy()
    if head.needs_end_token:
        ids[np.arange(3), mask.sum(axis=1) - 1] = 2
    tokens = {"input_ids": ids, "attention_mask": mask}
    if head.reads == READS_CHOICES:
        tokens = {name: np.stack([array, array], axis=1) for name, array in tokens.items()}
    return tokens | ({"decoder_input_ids": ids[:, :5]} if head.reads == READS_TARGETS else {})
