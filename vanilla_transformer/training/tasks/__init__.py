"""Training tasks by name: one module per task, each with its `TASK`."""

from importlib import import_module

from .task import Task

NAMES = (  # the module of "causal-lm" is causal_lm.py
    "translation",
    "causal-lm",
    "masked-lm",
    "pretraining",
    "sequence-classification",
    "token-classification",
    "question-answering",
    "image-classification",
)
TASKS: dict[str, Task] = {
    name: import_module(f".{name.replace('-', '_')}", __name__).TASK for name in NAMES
}
