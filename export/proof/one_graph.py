"""The comparison of the one graph's sequences with those of the runtime, which searches on the
host."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from ..inference.export_info import ExportInfo
from ..runtime import Runtime, padded_sequences
from .reference import Arrays, case_inputs, without_pad

# of the rows: two tokens or a bound that are the same to float32's last bits, in either order
NEAR_TIES = 0.02
STEPS = 12
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"temperature": 0.9, "top_k": 20, "top_p": 0.8},
    "beam": {"num_beams": 3, "length_penalty": 0.8, "early_stopping": False},
}


def compare(export: Path, graph: Path, mode: str, dtype: str, cases: int) -> dict[str, int]:
    """Return {"rows": number of rows, "equal": number of rows with equal sequences} on `cases`
    random batches.

    The sequences are those of the file `graph`, and those of the runtime with the `export`. `mode`
    is "greedy", "sample" or "beam". `dtype` is that of the weights.

    Raises:
        ValueError: if more than 1 + `NEAR_TIES` * rows sequences differ in float32.
    """
    runtime = Runtime(export, dtype=dtype)
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    rows = equal = 0
    for _ in range(cases):
        feeds = random_feeds(rng, runtime.info, mode)
        expected, fill = search(runtime, feeds, mode)
        rows += len(expected)
        equal += num_equal(session.run(["sequences"], feeds)[0], expected, fill)
    if dtype == "fp32" and rows - equal > NEAR_TIES * rows + 1:
        raise ValueError(
            f"the generation graph returns other sequences than the runtime in {rows - equal} "
            f"of {rows} rows, expected none"
        )
    return {"rows": rows, "equal": equal}


def num_equal(sequences: np.ndarray, expected: np.ndarray, fill: int) -> int:
    """Return how many rows of both are equal, up to tokens `fill` at the end."""
    width = min(sequences.shape[1], expected.shape[1])
    is_same = (sequences[:, :width] == expected[:, :width]).all(axis=1)
    for rows in (sequences, expected):
        is_same &= (rows[:, width:] == fill).all(axis=1)
    return int(is_same.sum())


def random_feeds(rng: np.random.Generator, info: ExportInfo, mode: str) -> Arrays:
    """Return random inputs of the one graph by name, with the settings of `mode`."""
    case = case_inputs(info, rng, "right", STEPS)
    ids, mask = without_pad(info, case.inputs["input_ids"]), case.inputs["attention_mask"]
    if "encoder" not in info.specs and rng.integers(2):  # padding of a prompt is on either side
        ids, mask = ids[:, ::-1], mask[:, ::-1]
    shape = rows, steps = case.inputs["tokens"].shape
    feeds = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": np.full((rows, 1), steps)}
    for name, value in SETTINGS[mode].items():
        dtype = np.float32 if isinstance(value, float) else np.int64
        feeds[name] = np.full((rows, 1), value, dtype)
    if mode == "sample":
        feeds["uniforms"] = rng.random(shape, np.float32)
    return feeds


def search(runtime: Runtime, feeds: Arrays, mode: str) -> tuple[np.ndarray, int]:
    """Return the runtime's sequences (B, P + T) for the inputs `feeds` of the one graph, and the
    token that fills ended ones. Sequences begin with their prompts."""
    counts = {"num_beams": 1, "max_new_tokens": int(feeds["max_new_tokens"][0, 0])}
    options = {"do_sample": mode == "sample", **counts, **SETTINGS[mode]}
    rows = runtime.inputs(feeds["input_ids"], feeds["attention_mask"], None, options)
    if "uniforms" in feeds:
        numbers = [iter(of_row).__next__ for of_row in feeds["uniforms"].tolist()]
        rows = [
            dataclasses.replace(row, uniforms=of_row)
            for row, of_row in zip(rows, numbers, strict=True)
        ]
    return padded_sequences(rows, runtime.sequences(rows)), rows[0].options.fill_token_id
