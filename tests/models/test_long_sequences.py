"""Encoders of the cpu target over long rows: what they give is what torch gives, the same bits
beside other rows, and attention takes memory as the length, not as its square."""

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
    """The model, and its export."""
    directory = tmp_path_factory.mktemp("long")
    model = perturbed(
        "VanillaEncoderModel", SIZES | dict(num_hidden_layers=2, max_position_embeddings=LONGEST)
    )
    model.save_pretrained(directory / "model")
    export(directory / "model", directory / "export", target="cpu", cases=1)
    return model, directory / "export"


def test_each_attention_is_in_both_branches_of_one_flag(encoder):
    _, directory = encoder
    result = onnx.load(directory / "onnx/model.onnx").graph.node
    choices = [node for node in result if node.op_type == "If"]
    assert len(choices) == 2 and len({node.input[0] for node in choices}) == 1
    inputs = [
        [len(each.g.node[0].input) for each in sorted(node.attribute, key=lambda one: one.name)]
        for node in choices
    ]
    # with the mask otherwise, without it where there is no padding
    assert inputs == [[5, 3], [5, 3]]


def test_long_rows_are_those_of_torch_and_the_same_bits_beside_others(encoder):
    """Just below and from `LONG` on, with what stands between tokens masked, and padded for no
    reason."""
    model, directory = encoder
    lengths = np.array([LONG + 90, LONG + 90, LONG, LONG, LONG - 1, 20])
    ids = np.random.default_rng(0).integers(4, 48, (len(lengths), lengths.max() + 3))
    mask = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
    mask[1, 100] = mask[3, 7] = 0
    for threads in (1, 8):  # of which the second lets many rows run together
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


def test_a_long_row_is_a_group_of_its_own():
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
def test_memory_is_that_of_the_length_where_nothing_is_padding(encoder):
    """A mask costs the scores of all pairs of tokens."""
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
