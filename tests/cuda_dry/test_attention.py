"""Tests of the kernel that onnxruntime chooses for each form of attention, as docs/targets.md
lists them."""

import numpy as np
import onnx
import onnxruntime
import pytest
from dry import CAPABILITY, CUDA, calls
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info

FLOAT, FLOAT16, BFLOAT16 = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)
NUMPY = {FLOAT: np.float32, FLOAT16: np.float16, BFLOAT16: np.uint16}
KERNELS = {"flash_fwd": "flash", "attention_kernel_batched": "cutlass", "UnfusedSoftmax": "unfused"}
DTYPES = [FLOAT, FLOAT16, *[BFLOAT16] * (CAPABILITY >= 80)]
HEADS = 4


def kernel(dtype, query, keys, width, value_width, has_bias, key_heads=HEADS):
    """Return the kind of kernel that runs attention of `query` tokens to `keys` tokens."""
    shapes = {
        "query": (2, query, HEADS * width),
        "keys": (2, keys, key_heads * width),
        "values": (2, keys, key_heads * value_width),
        **({"bias": (2, 1, query, keys)} if has_bias else {}),
    }
    node = make_node("Attention", list(shapes), ["y"], q_num_heads=HEADS, kv_num_heads=key_heads)
    inputs = [make_tensor_value_info(name, dtype, shape) for name, shape in shapes.items()]
    graph = make_graph([node], "g", inputs, [make_tensor_value_info("y", dtype, None)])
    model = make_model(graph, opset_imports=[make_opsetid("", 24)], ir_version=10)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=[(CUDA, {"sdpa_kernel": "19"})]
    )
    binding = session.io_binding()
    for name, shape in shapes.items():
        array = np.zeros(shape, NUMPY[dtype])
        value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, dtype)
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y", "cuda")
    with calls() as log:
        session.run_with_iobinding(binding)
    [kind] = {kind for name, kind in KERNELS.items() for line in log if name in line}
    return kind


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_without_a_bias_is_one_kernel(dtype):
    is_flash = dtype != FLOAT and CAPABILITY >= 80
    assert kernel(dtype, 17, 17, 64, 64, has_bias=False) == ("flash" if is_flash else "cutlass")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query", [1, 3, 64])
def test_attention_with_a_bias_is_one_kernel_for_keys_in_multiples_of_4(dtype, query):
    assert kernel(dtype, query, 64, 64, 64, has_bias=True) == "cutlass"
    assert kernel(dtype, query, 64, 24, 40, has_bias=True) == "cutlass"
    assert kernel(dtype, query, 66, 64, 64, has_bias=True) == "unfused"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query", [1, 3, 64])
def test_attention_of_grouped_keys_is_one_kernel_in_half_precision(dtype, query):
    expected = "unfused" if dtype == FLOAT else "cutlass"
    assert kernel(dtype, query, 64, 64, 64, has_bias=True, key_heads=2) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_head_size_not_multiple_of_8_is_unfused(dtype):
    assert kernel(dtype, 1, 64, 20, 20, has_bias=True) == "unfused"
