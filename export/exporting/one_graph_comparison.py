"""The comparison of the one graph's sequences with those of the runtime, which searches on the
host."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from ..runtime import Runtime, padded_sequences

# of the rows: two tokens or a bound that are the same to float32's last bits, in either order
NEAR_TIES = 0.02
STEPS, LONGEST, MAX_ROWS = 12, 33, 6
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
        feeds = random_feeds(rng, runtime.config, mode)
        expected = expected_sequences(runtime, feeds, mode)
        sequences = session.run(["sequences"], feeds)[0]
        rows += len(expected)
        width = max(sequences.shape[1], expected.shape[1])
        fill = runtime.check_options(host_options(mode)).fill_token_id
        both = [
            np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=fill)
            for ids in (sequences, expected)
        ]
        equal += int((both[0] == both[1]).all(axis=1).sum())
    if dtype == "fp32" and rows - equal > NEAR_TIES * rows + 1:
        raise ValueError(
            f"the generation graph returns other sequences than the runtime in {rows - equal} "
            f"of {rows} rows, expected none"
        )
    return {"rows": rows, "equal": equal}


def random_feeds(
    rng: np.random.Generator, config: dict[str, Any], mode: str
) -> dict[str, np.ndarray]:
    is_decoder = config["model_type"] == "vanilla-decoder"
    size, positions = config["vocab_size"], config["max_position_embeddings"]
    steps = min(STEPS, positions // 2 if is_decoder else positions)
    longest = max(min(LONGEST, positions - (steps if is_decoder else 2)), 1)
    rows, length = rng.integers(1, MAX_ROWS), rng.integers(1, longest + 1)
    ids = rng.integers(0, size, (rows, length))
    pad = config.get("pad_token_id")
    if pad is not None:  # only padding may have the pad token
        ids[ids == pad] = (pad + 1) % size
    mask = (np.arange(length) < rng.integers(1, length + 1, (rows, 1))).astype(np.int64)
    if is_decoder and rng.random() < 0.5:  # padding of a prompt may stand on either side
        ids, mask = ids[:, ::-1], mask[:, ::-1]
    feeds = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": np.full((rows, 1), steps)}
    for name, value in SETTINGS[mode].items():
        dtype = np.float32 if isinstance(value, float) else np.int64
        feeds[name] = np.full((rows, 1), value, dtype)
    if mode == "sample":
        feeds["uniforms"] = rng.random((rows, steps), np.float32)
    return feeds


def host_options(mode: str) -> dict[str, Any]:
    return {
        "num_beams": 1,
        "do_sample": mode == "sample",
        "max_new_tokens": STEPS,
        **SETTINGS[mode],
    }


def expected_sequences(runtime: Runtime, feeds: dict[str, np.ndarray], mode: str) -> np.ndarray:
    """Return the sequences (B, P + T) that the runtime's search finds for the graph inputs `feeds`,
    prompts included.

    `mode` is "greedy", "sample" or "beam".
    """
    options = host_options(mode) | {"max_new_tokens": int(feeds["max_new_tokens"][0, 0])}
    inputs = runtime.inputs(feeds["input_ids"], feeds["attention_mask"], None, options)
    if "uniforms" in feeds:
        numbers = [iter(row).__next__ for row in feeds["uniforms"].tolist()]
        inputs = [
            dataclasses.replace(row, uniforms=of_row)
            for row, of_row in zip(inputs, numbers, strict=True)
        ]
    return padded_sequences(inputs, runtime.sequences(inputs))
