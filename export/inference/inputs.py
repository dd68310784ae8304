"""Checks of inputs against the spec of a graph, padding, and runs of rows of similar length."""

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..specs.graph_spec import LONG, GraphSpec, TensorSpec, concrete_shape
from ..specs.sequences import pair
from .config import LEARNED_POSITIONS

# Tokens in one run of a full-sequence graph: per thread on CPUs, and on a GPU
MAX_TOKENS, MAX_GPU_TOKENS = 256, 16384

# One run of a full-sequence graph: maximum share of padding, and minimum number of tokens.
MAX_PADDING = 0.15
MIN_TOKENS = 128


def check_inputs(
    tensors: Sequence[TensorSpec], inputs: dict[str, np.ndarray | None], model: str
) -> dict[str, np.ndarray]:
    """Return {name: array} of the inputs `tensors`, converted to their dtypes. Inputs that are None
    get their defaults.

    onnxruntime does not check them: it may crash on an empty batch, and reads out of bounds.

    Args:
        tensors: specs of the inputs.
        inputs: inputs of the caller by name.
        model: the model or graph, for errors.

    Raises:
        ValueError: for a missing or unknown input, and for a wrong dtype, shape or range; for an
            empty input, and for a number that is not finite.
    """
    names = [tensor.name for tensor in tensors]
    for name, values in inputs.items():
        if values is not None and name not in names:
            raise ValueError(f"{model} has no input {name}, expected {' and '.join(names)}")
    sizes: dict[str, int] = {}
    checked = {}
    for tensor in tensors:
        values = inputs.get(tensor.name)
        if values is None and tensor.default is None:
            raise ValueError(f"{model} needs the input {tensor.name}, got None")
        if values is None:
            checked[tensor.name] = np.full(
                concrete_shape(tensor, sizes), tensor.default, tensor.dtype
            )
        else:
            checked[tensor.name] = check_input(tensor, values, sizes)
    return checked


def check_sequence_inputs(
    tensors: Sequence[TensorSpec], inputs: dict[str, np.ndarray | None], model: str
) -> dict[str, np.ndarray]:
    """Check the inputs of a full-sequence graph, as `check_inputs` does.

    Token types are dropped if all are 0 and the graph has no such input: tokenizers return them for
    models without types.
    """
    has_types = any(tensor.name == "token_type_ids" for tensor in tensors)
    if not has_types and not as_array("token_type_ids", inputs.get("token_type_ids")).any():
        inputs = {**inputs, "token_type_ids": None}
    return check_inputs(tensors, inputs, model)


def as_array(name: str, values: Any) -> np.ndarray:
    """Return `values` as an array. Raises ValueError for lists of several lengths; `name` is for
    the message."""
    try:
        return np.asarray(values)
    except ValueError:
        seen = reprlib.repr(values)
        raise ValueError(f"{name} must have rows of one length, got {seen}") from None


def check_input(tensor: TensorSpec, values: Any, sizes: dict[str, int]) -> np.ndarray:
    """Return `values` in the dtype of `tensor`, after a check of dtype, shape and range.

    `sizes` are the sizes of named axes so far, to which axes of this tensor are added in place.
    Raises ValueError.
    """
    values = as_array(tensor.name, values)
    is_flag = tensor.name.endswith("mask")
    is_float = "float" in tensor.dtype
    kinds = "biuf" if is_flag else "iuf" if is_float else "iu"
    if values.dtype.kind not in kinds:
        kind = "0s and 1s" if is_flag else "numbers" if is_float else "integers"
        raise ValueError(
            f"{tensor.name} must be {kind}, got {values.dtype} of shape {values.shape}"
        )
    expected = [sizes.get(size, size) if isinstance(size, str) else size for size in tensor.shape]
    fits = len(expected) == values.ndim and all(
        isinstance(size, str) or size == actual for size, actual in zip(expected, values.shape)
    )
    if not fits or values.size == 0:
        minimum = "" if values.size else ", all at least 1"
        axes = ", ".join(map(str, expected))
        raise ValueError(
            f"{tensor.name} must have shape ({axes}){minimum}, got shape {values.shape}"
        )
    sizes |= {
        axis: actual for axis, actual in zip(tensor.shape, values.shape) if isinstance(axis, str)
    }
    if is_flag and not ((values == 0) | (values == 1)).all():
        raise ValueError(f"{tensor.name} must be 0s and 1s, got {np.unique(values).tolist()}")
    if tensor.range is not None and (
        values.min() < tensor.range[0] or values.max() > tensor.range[1]
    ):
        lowest, highest = tensor.range
        raise ValueError(
            f"{tensor.name} must be in [{lowest}, {highest}], got {values.min()} to {values.max()}"
        )
    if is_float and not np.isfinite(values).all():
        raise ValueError(
            f"{tensor.name} must be finite numbers, got {values[~np.isfinite(values)][0]}"
        )
    return values.astype(tensor.dtype)


def check_contiguous(mask: np.ndarray, name: str) -> None:
    """Raise ValueError if a row of `mask` (B, T) has a zero between ones.

    A decoder counts positions by the ones of the mask. `name` is that of the mask in the error."""
    begins = mask[:, 1:] > mask[:, :-1]
    if (begins.sum(axis=1) + mask[:, 0]).max() > 1:
        row, position = next(
            (row, position + 1)
            for row, position in np.argwhere(begins)
            if mask[row, : position + 1].any()
        )
        raise ValueError(
            f"row {row} of {name} has ones again at position {position}, after zeros: expected "
            "its ones in one block"
        )


def check_ends(ids: np.ndarray, mask: np.ndarray, eos_token_ids: Sequence[int]) -> None:
    """Raise ValueError for a row of `ids` (B, S) that has tokens but no end token.

    `mask` (B, S) is 0 for padding, and `eos_token_ids` are the end tokens.
    """
    endless = mask.any(axis=1) & ~(np.isin(ids, eos_token_ids) & (mask == 1)).any(axis=1)
    if endless.any():
        raise ValueError(
            f"row {int(endless.argmax())} of input_ids has no end token, expected one of "
            f"{eos_token_ids} in it"
        )


def position_limit(config: dict) -> int | None:
    """Return the number of rows of the learned position table, or None for other positions and
    images."""
    is_learned = config.get("position_embedding_type") in LEARNED_POSITIONS
    return config.get("max_position_embeddings") if is_learned else None


def check_positions(length: int, config: dict) -> None:
    """Raise ValueError if `length` tokens are more than the learned position table has rows."""
    rows = position_limit(config)
    if rows is not None and length > rows:
        counted = (
            "" if config.get("model_type") == "vanilla-encoder" else " of prompt and new tokens"
        )
        raise ValueError(
            f"{length} tokens{counted}, expected at most {rows}, the learned positions"
        )


def check_row_positions(ids: Sequence[int], config: dict) -> None:
    """Do what `check_positions` does, for a row of token `ids` without padding."""
    row = np.array([ids])
    check_positions(num_positions(row, np.ones_like(row), config), config)


def check_patches(pixel_values: np.ndarray, config: dict) -> None:
    """Raise ValueError for images (B, C, H, W) that are smaller than a patch."""
    patch = pair(config["patch_size"])
    if any(side < minimum for side, minimum in zip(pixel_values.shape[2:], patch)):
        got = "x".join(map(str, pixel_values.shape[2:]))
        raise ValueError(
            f"the images are {got}, expected at least {'x'.join(map(str, patch))}, the patch size"
        )


def num_positions(ids: np.ndarray, mask: np.ndarray, config: dict) -> int:
    """Return the number of positions of the longest row of `ids` and `mask` (B, S), counted by the
    config's `position_ids_from`. By `"place"`, the default, padding counts too."""
    counts = config.get("position_ids_from") or "place"
    if counts == "place":
        return ids.shape[-1]
    is_counted = mask == 1 if counts == "mask" else ids != config["pad_token_id"]
    return int(is_counted.sum(axis=-1).max())


def pad_sequences(rows: list[list[int]], pad_token_id: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return `input_ids` and `attention_mask` (B, S) of `rows` of token ids.

    Rows are padded on the right with `pad_token_id`, or 0 if that is None.
    """
    lengths = np.array([len(row) for row in rows])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    ids = np.full(mask.shape, pad_token_id or 0)
    ids[mask == 1] = np.concatenate(rows)
    return ids, mask


def move_padding(
    ids: np.ndarray, mask: np.ndarray, side: str, pad_token_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask (B, S) with the padding of each row moved to `side`, "left" or "right".

    Padding gets `pad_token_id`. Masked tokens between other tokens get it too, and stay between
    them. Without padding, ids and mask are returned unchanged.
    """
    if mask.all():
        return ids, mask
    first = mask.argmax(axis=1) if side == "right" else -mask[:, ::-1].argmax(axis=1)
    indices = (np.arange(mask.shape[1]) + first[:, None]) % mask.shape[1]
    moved = np.take_along_axis(mask, indices, axis=1)
    return np.where(moved == 1, np.take_along_axis(ids, indices, axis=1), pad_token_id), moved


def max_run_tokens(device: str, threads: int) -> int:
    """Return the maximum tokens in one run of a full-sequence graph on `device`."""
    return MAX_TOKENS * threads if device == "cpu" else MAX_GPU_TOKENS


def run_by_length(
    run: Callable[[list[str], dict[str, np.ndarray]], list[np.ndarray]],
    spec: GraphSpec,
    feeds: dict[str, np.ndarray],
    max_tokens: int,
) -> dict[str, np.ndarray]:
    """Run a graph in batches of similar length and return the outputs of `spec` by name.

    Without a mask, all rows run at once. Outputs that no run computes are 0.

    Args:
        run: runs the graph, see `Session.run`.
        spec: spec of the graph.
        feeds: checked inputs by name.
        max_tokens: maximum tokens per run. More would only take memory.
    """
    names = [tensor.name for tensor in spec.outputs]
    groups = (
        bucket_by_length(feeds["attention_mask"], max_tokens) if "attention_mask" in feeds else []
    )
    source_length = feeds["attention_mask"].shape[-1] if groups else 0
    if not groups or (len(groups) == 1 and groups[0][1] == source_length):
        return dict(zip(names, run(names, feeds), strict=True))
    trimmed = [tensor.name for tensor in spec.inputs if tensor.shape[-1] == "source_length"]
    sizes = {"batch_size": len(feeds["attention_mask"]), "source_length": source_length}
    results: dict[str, np.ndarray] = {}
    for rows, longest in groups:
        batch = {name: array[rows] for name, array in feeds.items()}
        batch |= {name: batch[name][..., :longest] for name in trimmed}
        for tensor, values in zip(spec.outputs, run(names, batch), strict=True):
            store_rows(results, tensor, sizes, rows, values)
    return results


def store_rows(
    results: dict[str, np.ndarray],
    tensor: TensorSpec,
    sizes: dict[str, int],
    rows: np.ndarray | slice,
    values: np.ndarray,
) -> None:
    """Copy the `values` of some `rows` of the output `tensor` to its array in `results`, which the
    first call makes of zeros.

    Named axes of the array have `sizes`, others those of `values`. What is longer is cut off.
    """
    if tensor.name not in results:
        axes = zip(tensor.shape, values.shape)
        shape = [sizes.get(str(axis), size) for axis, size in axes]
        # another thread may do the same at once: the first array counts
        results.setdefault(tensor.name, np.zeros(shape, values.dtype))
    result = results[tensor.name]
    covered = list(map(slice, np.minimum(values.shape[1:], result.shape[1:])))
    result[(rows, *covered)] = values[(slice(None), *covered)]


def bucket_by_length(mask: np.ndarray, max_tokens: int) -> list[tuple[np.ndarray, int]]:
    """Return groups (row numbers, length) of rows of `mask` (B, ..., S), longest first.

    A group has at most `max_tokens`, padding included, unless it is one longer row. From
    `MIN_TOKENS` on, the share of its padding is at most `MAX_PADDING`. A row of `LONG` tokens or
    more is a group of its own.
    """
    lengths = last_lengths(mask)
    groups: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        size = (len(groups[-1]) + 1) * lengths[groups[-1][0]] if groups else 0
        is_padded = tokens >= MIN_TOKENS and size - tokens - lengths[row] > MAX_PADDING * size
        if not groups or size > max_tokens or is_padded or lengths[groups[-1][0]] >= LONG:
            groups.append([])
            tokens = 0
        groups[-1].append(row)
        tokens += lengths[row]
    return [(np.array(rows), lengths[rows[0]]) for rows in groups]


def last_lengths(mask: np.ndarray) -> list[int]:
    """Return the length of each row of `mask` (B, ..., S) up to its last 1, at least 1.

    With several sequences per row, the longest counts.
    """
    ends = mask * np.arange(1, mask.shape[-1] + 1)
    return np.maximum(ends.reshape(len(mask), -1).max(axis=1), 1).tolist()
