"""The activations of `transformers.activations.ACT2FN`."""

import math
from collections.abc import Callable

import numpy as np
from onnx_ir import Value

from .context import GraphContext

OPERATORS = {
    "relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "hardswish": "HardSwish", "mish": "Mish",
    "leaky_relu": "LeakyRelu",
}  # fmt: skip


def activation(g: GraphContext, x: Value, act: str, name: str) -> Value:
    """Return the activation `act` of x, such as "gelu", written as nodes of the graph.

    If the activation has weights, their names begin with `name`.

    Raises:
        ValueError: if `act` is not a name in the tables of this module.
    """
    if act in OPERATORS:
        return g.op(OPERATORS[act], x)
    if act in WITH_WEIGHTS:
        return WITH_WEIGHTS[act](g, x, name)
    if act not in FUNCTIONS:
        known = sorted([*OPERATORS, *FUNCTIONS, *WITH_WEIGHTS])
        raise ValueError(f"the activation is {act!r}, expected one of {', '.join(known)}")
    return FUNCTIONS[act](g, x)


def gelu(g: GraphContext, x: Value) -> Value:
    """Return x * P(X <= x) for a standard normal X (Hendrycks and Gimpel 2016), written as nodes
    of the graph."""
    if g.opset >= 20:
        return g.op("Gelu", x)
    cumulative = g.op("Add", g.op("Erf", g.op("Mul", x, math.sqrt(0.5))), 1.0)
    return g.op("Mul", g.op("Mul", x, 0.5), cumulative)


def tanh_gelu(g: GraphContext, x: Value) -> Value:
    """Return 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))), written as nodes of the
    graph."""
    op = g.op
    if g.opset >= 20:
        return op("Gelu", x, approximate="tanh")
    cube = op("Mul", op("Mul", x, op("Mul", x, x)), 0.044715)
    tanh = op("Tanh", op("Mul", op("Add", x, cube), math.sqrt(2 / math.pi)))
    return op("Mul", op("Mul", x, 0.5), op("Add", tanh, 1.0))


def silu(g: GraphContext, x: Value, factor: float = 1.0) -> Value:
    """Return x * sigmoid(factor * x), written as nodes of the graph."""
    return g.op("Mul", x, g.op("Sigmoid", x if factor == 1 else g.op("Mul", x, factor)))


def squared_relu(g: GraphContext, x: Value) -> Value:
    positive = g.op("Relu", x)
    return g.op("Mul", positive, positive)


def laplace(g: GraphContext, x: Value) -> Value:
    """Return 0.5 * (1 + erf((x - mu) / (sigma * sqrt(2)))), mu 0.707107, sigma 0.282095 (Ma et al.
    2022, MEGA), written as nodes of the graph."""
    scaled = g.op("Div", g.op("Sub", x, 0.707107), 0.282095 * math.sqrt(2.0))
    return g.op("Mul", g.op("Add", g.op("Erf", scaled), 1.0), 0.5)


def prelu(g: GraphContext, x: Value, name: str) -> Value:
    return g.op("PRelu", x, g.weight(f"{name}.weight"))


def xielu(g: GraphContext, x: Value, name: str) -> Value:
    """Return xIELU of x, written as nodes of the graph.

    It is the integral of ELU with learned slopes for positive and negative inputs (Huang 2024).
    `name` is the prefix of its weights in the checkpoint.
    """
    op = g.op
    names = [f"{name}.{part}" for part in ("alpha_p", "alpha_n", "beta", "eps")]
    positive, negative, beta, epsilon = g.transform_weights(names, xielu_slopes)
    linear = op("Mul", x, beta)
    square = op("Mul", op("Mul", x, x), positive)
    exponential = op("Sub", op("Sub", op("Exp", op("Min", x, epsilon)), 1.0), x)
    branches = op("Where", op("Greater", x, 0.0), square, op("Mul", exponential, negative))
    return op("Add", branches, linear)


def xielu_slopes(
    positive: np.ndarray, negative: np.ndarray, beta: np.ndarray, epsilon: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return softplus(positive), beta + softplus(negative), beta and epsilon."""
    return np.logaddexp(0, positive), beta + np.logaddexp(0, negative), beta, epsilon


FUNCTIONS: dict[str, Callable[[GraphContext, Value], Value]] = {
    **dict.fromkeys(("gelu", "gelu_python"), gelu),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
        tanh_gelu,
    ),
    **dict.fromkeys(("silu", "swish"), silu),
    "quick_gelu": lambda g, x: silu(g, x, 1.702),
    "gelu_10": lambda g, x: g.op("Clip", gelu(g, x), -10.0, 10.0),
    "relu2": squared_relu,
    "relu6": lambda g, x: g.op("Clip", x, 0.0, 6.0),
    "sqrtsoftplus": lambda g, x: g.op("Sqrt", g.op("Softplus", x)),
    "laplace": laplace,
    "linear": lambda g, x: x,
}
WITH_WEIGHTS = {"prelu": prelu, "xielu": xielu}
