"""Tests of the changes with which `certify` finds causes: nothing is captured, or all attention is
one kind of kernel."""

import pytest
from dry import CAPABILITY, EXPORTS, calls, inputs, sessions
from exports import Case, cases
from test_attention import KERNELS
from test_exports import BEAMS, GREEDY, is_replayed

from vanilla_transformer_export import Runtime
from vanilla_transformer_export.inference.session import SessionChanges

CASE = Case("VanillaSeq2SeqForConditionalGeneration", "paper", "fp16")
IMAGES = next(case for case in cases() if "Vision" in case.architecture and case.dtype == "fp16")


@pytest.mark.parametrize("parts", [("capture",), ("fusions",)])
def test_nothing_is_captured_without_capture_or_fusions(parts):
    with sessions() as opened, calls() as log:
        runtime = Runtime(EXPORTS / str(CASE), changes=SessionChanges(parts))
        for options in (GREEDY, BEAMS):
            assert len(runtime.generate(**inputs(CASE), **options)) == 3
    assert log.starting("kernel") and not log.starting("begin", "replay")
    assert len(opened) == 3 and not any(map(is_replayed, opened))


@pytest.mark.parametrize(
    "name, images, tokens",  # masks of tokens are biases, which FlashAttention does not take
    [
        ("flash", "flash", "unfused"),
        ("efficient", "cutlass", "cutlass"),
        ("math", "unfused", "unfused"),
    ],
)
def test_attention_is_the_kernel_that_is_asked_for(name, images, tokens):
    is_flash = images == "flash" and CAPABILITY >= 80
    expected = {IMAGES: "unfused" if images == "flash" and not is_flash else images, CASE: tokens}
    for case, kernel in expected.items():
        with calls() as log:
            runtime = Runtime(EXPORTS / str(case), changes=SessionChanges(attention=name))
            run = runtime.generate if case.generates else runtime.outputs
            run(**inputs(case), **(GREEDY if case.generates else {}))
        kinds = {kind for text, kind in KERNELS.items() for line in log if text in line}
        assert kinds == {kernel}
