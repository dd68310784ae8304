"""Tests of the outputs of exports in half precision and with integer weights, on the CPU of this
onnxruntime-gpu."""

import numpy as np
import pytest
from dry import CAPABILITY, EXPORTS, inputs
from exports import cases

from vanilla_transformer_export import Runtime

# largest error, relative to the largest number; the weights are random
TOLERANCES = {"fp16": 0.01, "int8": 0.1, "int4": 0.8}
COMPARED = [case for case in cases() if case.dtype in TOLERANCES]

pytestmark = pytest.mark.skipif(CAPABILITY != 90, reason="the CPU is the same for all devices")


def compute_outputs(case):
    """Return the outputs of tokens that are not padding, or the scores of the most likely first
    tokens and the weights of alignments."""
    runtime, arrays = Runtime(EXPORTS / str(case), device="cpu"), inputs(case)
    if case.generates:
        pairs = ([5, 6, 7, 2], [8, 2]), ([1, 9, 10, 11], [1, 12])
        weights = runtime.alignments(*pairs) if case.is_aligned else []
        return [runtime.generate_with_scores(**arrays, max_new_tokens=1)[1], *weights]
    mask = arrays.get("attention_mask", np.ones(0)).astype(bool)
    outputs = runtime.outputs(**arrays).values()
    return [output[mask] if output.shape[:2] == mask.shape else output for output in outputs]


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_outputs_are_close_to_float32(case):
    for actual, expected in zip(
        compute_outputs(case), compute_outputs(case._replace(dtype="fp32")), strict=True
    ):
        error = np.abs(actual - expected).max() / np.abs(expected).max()
        assert 0 < error < TOLERANCES[case.dtype]
