"""Scores of logits, and labels in the order of their scores."""

import reprlib
from collections.abc import Callable, Sequence

import numpy as np

from .tasks.task import JsonObject

Scoring = Callable[[np.ndarray], np.ndarray]  # from logits to scores


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the softmax of `logits` over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def identity(logits: np.ndarray) -> np.ndarray:
    return logits


FUNCTIONS: dict[str, Scoring] = {"softmax": softmax, "sigmoid": sigmoid, "none": identity}
# activations by the torch class that sentence-transformers records
ACTIVATIONS: dict[str, Scoring] = {
    "Identity": identity,
    "Sigmoid": sigmoid,
    "Tanh": np.tanh,
    "ReLU": lambda values: np.maximum(values, 0),
}


def probability_function(config: dict) -> str:
    """Return the name of the function from logits to probabilities for a classifier with this
    `config`: the sigmoid for independent labels and for a single label, else the softmax."""
    is_independent = config.get("problem_type") == "multi_label_classification"
    return "sigmoid" if is_independent or len(config["id2label"]) == 1 else "softmax"


def default_function(config: dict) -> str:
    """Return the name of the function from logits to scores that `config.problem_type` selects:
    none for "regression", else that of probabilities."""
    is_regression = config.get("problem_type") == "regression"
    return "none" if is_regression else probability_function(config)


def activation(name: object, setting: str) -> Scoring:
    """Return the function of the torch class `name`, such as "torch.nn.modules.activation.Sigmoid".

    Raises ValueError for another class. `setting` says in the message where the name comes from.
    """
    kind = str(name).rpartition(".")[2]
    if not str(name).startswith("torch.") or kind not in ACTIVATIONS:
        expected = ", ".join(f"torch.nn.{known}" for known in ACTIVATIONS)
        raise ValueError(
            f"{setting} is {reprlib.repr(name)}, which is not supported: expected one of {expected}"
        )
    return ACTIVATIONS[kind]


def rank_labels(
    labels: Sequence[str], scores: np.ndarray, top_k: int | None = None
) -> list[JsonObject]:
    """Return `{"label": str, "score": float}` of the `top_k` best of `labels`, best first; None is
    all. `scores` are (labels,)."""
    best = np.argsort(-scores, kind="stable")[:top_k].tolist()
    return [{"label": labels[label], "score": float(scores[label])} for label in best]
