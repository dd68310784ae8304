"""The rows of the portable target, whose graphs return extended copies of their caches."""

from dataclasses import dataclass

import numpy as np

from ...inference.config import cache_window
from ...inference.inputs import move_padding
from ...inference.rows import (
    INITIAL_CAPACITY,
    GenerationRequest,
    check_memory,
    cross_states,
)
from ...inference.session import LoadedExport


@dataclass(frozen=True)
class PortableRowsFactory:
    """The `RowsFactory` of one loaded export."""

    export: LoadedExport
    supports_empty_prompts = True
    start_search = None  # the graphs have no search of their own

    def open(self, request: GenerationRequest) -> "PortableRows":
        """Encode the source of `request`, if it has one, and return rows for its prompts.

        The prompts are not read yet.

        Raises:
            UsageError: if the request needs more memory than the machine has.
        """
        cache_bytes = 0
        if self.export.device == "cpu":
            rows = len(request.input_ids) * request.options.rows_per_input
            new_tokens = min(request.options.max_new_tokens, INITIAL_CAPACITY)
            positions = rows * (request.input_ids.shape[1] + new_tokens)
            cache_bytes = self.export.position_bytes * positions
        check_memory(
            len(request.input_ids), request.options, self.export.config["vocab_size"], cache_bytes
        )
        source = {}
        if request.source is not None:
            ids, mask = request.source
            source = cross_states(self.export.encode(ids, mask)) | {"encoder_attention_mask": mask}
        return PortableRows(self.export, source, len(request.input_ids))


class PortableRows:
    """The `Rows` of one request, which replace their caches by the longer ones of each step.

    Args:
        export: the loaded export.
        source: the encoder's output and the mask of the sources; empty for a decoder-only model.
        rows: the number of prompts.
    """

    all_logits = True
    places = best_tokens = None
    shrinks = True

    def __init__(self, export: LoadedExport, source: dict[str, np.ndarray], rows: int):
        spec = export.specs["decoder"]
        self.session = export.sessions["decoder"]
        self.outputs = [tensor.name for tensor in spec.outputs]
        self.source = source
        self.inputs = np.arange(rows)  # the number of the input of each row
        # other graphs derive positions from the length of the caches
        self.reads_mask = "attention_mask" in {tensor.name for tensor in spec.inputs}
        # sliding window in tokens, `None` if the caches must keep all tokens
        self.window = cache_window(export.config) if self.reads_mask else None
        self.mask = np.zeros((rows, 0), np.int64)  # of the tokens in the caches
        # tokens of each row that were dropped from the caches
        self.dropped = np.zeros((rows, 1), np.int64)
        # Every cache starts with length 0.
        self.past = {
            tensor.name: np.zeros(
                (rows, *(0 if isinstance(size, str) else size for size in tensor.shape[1:])),
                np.float32,
            )
            for tensor in spec.inputs
            if tensor.name.startswith("past_key_values")
        }

    def prefill(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Feed the prompts (rows, P) and return the logits (rows, P, V) after each token.

        Padding, where `attention_mask` is 0, may stand on either side. It is moved to the left, in
        the logits too.
        """
        ids, mask = move_padding(input_ids, attention_mask, "left", 0)
        length = ids.shape[1] if self.window is None else max(self.window, INITIAL_CAPACITY)
        parts = [slice(start, start + length) for start in range(0, ids.shape[1], length)]
        return np.concatenate([self.run(ids[:, part], mask[:, part]) for part in parts], axis=1)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Feed `tokens` (rows, T) and return the logits (rows, T, V) after each."""
        return self.run(tokens, np.ones_like(tokens), tokens.shape[1] - 1)

    def run(self, tokens: np.ndarray, mask: np.ndarray, to_crop: int = 0) -> np.ndarray:
        """Feed `tokens` (rows, T) and return the logits (rows, T, V) after each.

        Args:
            tokens: the next tokens of each row.
            mask: 0 where `tokens` has padding, else 1.
            to_crop: the number of last tokens that `crop` may remove next. With a sliding window,
                that many more tokens are kept.
        """
        self.mask = np.concatenate([self.mask, mask], axis=1)
        feeds = {**self.source, **self.past, "input_ids": tokens}
        if self.reads_mask:
            positions = self.dropped + np.maximum(self.mask.cumsum(axis=1) - 1, 0)
            feeds["attention_mask"] = self.mask
            feeds["position_ids"] = positions[:, -tokens.shape[1] :]
        logits, *present = self.session.run(self.outputs, feeds)
        self.past = dict(zip(self.past, present, strict=True))  # which are in the same order
        if self.window is not None:
            surplus = max(self.mask.shape[1] - (self.window - 1) - to_crop, 0)
            self.dropped = self.dropped + self.mask[:, :surplus].sum(axis=1, keepdims=True)
            self.keep(slice(surplus, None))
        return logits

    def keep(self, tokens: slice) -> None:
        """Remove all but these `tokens` of each row from the caches."""
        self.mask = self.mask[:, tokens]
        for name, states in self.past.items():
            if ".encoder." not in name:
                self.past[name] = states[:, :, tokens]

    def crop(self, count: int) -> None:
        """Remove the last `count` tokens of each row from the caches."""
        self.keep(slice(self.mask.shape[1] - count))

    def select(self, parents: np.ndarray) -> None:
        """Let each row continue the row that `parents` (rows,) names.

        Keys and values of the source stay if only beams of one input change places, because these
        share the source.
        """
        inputs = self.inputs[parents]
        keeps_sources = np.array_equal(inputs, self.inputs)
        for arrays in (self.source, self.past):
            for name, array in arrays.items():
                if not (keeps_sources and "encoder" in name):
                    arrays[name] = array[parents]
        self.inputs, self.mask = inputs, self.mask[parents]
        self.dropped = self.dropped[parents]

    def source_inputs(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the encoder's states and the mask of the sources of `rows` (N,)."""
        return {name: array[rows] for name, array in self.source.items()}

    def close(self) -> None:
        """Do nothing: there are no shared buffers to release."""
