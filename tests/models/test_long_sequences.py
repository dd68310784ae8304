"""Tests of encoders exported for the cpu target, with long rows.

Outputs match torch and do not depend on the other rows of a batch. The memory of attention does not
grow with the square of the length.
"""

import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from checkpoints import SIZES, perturbed

from vanilla_transformer_export import Runtime, export
from vanilla_transformer_export.inference.inputs import bucket_by_length
from vanilla_transformer_export.specs.graph_spec import LONG

HEADS = SIZES["num_attention_heads"]
LONGEST = 4096


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """The model and the directory of its export."""
    directory = tmp_path_factory.mktemp("long")
    model = perturbed(
        "VanillaEncoderModel", SIZES | dict(num_hidden_layers=2, max_position_embeddings=LONGEST)
    )
    model.save_pretrained(directory / "model")
    export(directory / "model", directory / "export", target="cpu", cases=1)
    return model, directory / "export"


def test_every_attention_has_branch_with_and_without_mask(encoder):
    _, directory = encoder
    nodes = onnx.load(directory / "onnx/model.onnx").graph.node
    if_nodes = [node for node in nodes if node.op_type == "If"]
    assert len(if_nodes) == 2 and len({node.input[0] for node in if_nodes}) == 1
    inputs = [
        [
            len(branch.g.node[0].input)
            for branch in sorted(node.attribute, key=lambda attribute: attribute.name)
        ]
        for node in if_nodes
    ]
    # else_branch with the mask, then_branch without it for rows without padding
    assert inputs == [[4, 3], [4, 3]]


def test_long_rows_match_torch_and_are_bitwise_equal_in_any_batch(encoder):
    """Row lengths are around `LONG`, with masked tokens inside and extra padding."""
    model, directory = encoder
    lengths = np.array([LONG + 90, LONG + 90, LONG, LONG, LONG - 1, 20])
    ids = np.random.default_rng(0).integers(4, 48, (len(lengths), lengths.max() + 3))
    mask = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
    mask[1, 100] = mask[3, 7] = 0
    for threads in (1, 8):  # 8 threads compute several rows at once
        runtime = Runtime(directory, threads=threads)
        together = runtime.encode(ids, mask)
        with torch.no_grad():
            expected = model(
                torch.from_numpy(ids), torch.from_numpy(mask)
            ).last_hidden_state.numpy()
        np.testing.assert_allclose(together[mask == 1], expected[mask == 1], atol=5e-5)
        for row, length in enumerate(lengths):
            for width in (length, ids.shape[1]):
                alone = runtime.encode(ids[row : row + 1, :width], mask[row : row + 1, :width])[0]
                np.testing.assert_array_equal(alone[:length], together[row, :length])


def test_bucket_by_length_puts_each_long_row_in_its_own_group():
    mask = (np.arange(LONG) < np.array([[LONG], [LONG - 1], [LONG], [LONG - 2]])).astype(np.int64)
    groups = [(rows.tolist(), length) for rows, length in bucket_by_length(mask, 10 * LONG)]
    assert groups == [([0], LONG), ([2], LONG), ([1, 3], LONG - 1)]


GROWTH = """
import sys, numpy as np, onnxruntime
def most():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
ids = np.full((1, int(sys.argv[2])), 5)
mask = np.ones_like(ids)
mask[:, int(sys.argv[3]):] = 0
before = most()
session.run(None, {"input_ids": ids, "attention_mask": mask})
print(most() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="the most memory that a process had is read from /proc"
)
def test_attention_memory_without_padding_is_not_quadratic(encoder):
    """A mask makes the graph store the scores of all pairs of tokens."""
    _, directory = encoder
    growth = {}
    for real in (LONGEST, LONGEST - 1):
        command = [
            sys.executable,
            "-c",
            GROWTH,
            str(directory / "onnx/model.onnx"),
            str(LONGEST),
            str(real),
        ]
        growth[real] = int(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )
    scores = HEADS * LONGEST**2 * 4
    assert growth[LONGEST - 1] > scores
    assert growth[LONGEST] < scores / 4
