"""The cache that transformers' `generate` passes around, with a decoder of the export inside."""

import weakref
from functools import partialmethod
from typing import Any, NoReturn

import numpy as np
import torch
from transformers import Cache

from ..inference import inputs
from ..inference.options import Options
from ..inference.rows import INITIAL_CAPACITY, GenerationRequest
from ..shared.options import is_integer
from ..specs.sequences import token_inputs
from .base import to_numpy


class DecoderCache(Cache):
    """A cache of transformers around a `Decoder`, which starts with the first tokens it reads.

    `options` have the maximum of new tokens and the rows per prompt. `is_croppable` is True for
    assisted generation, which checks several tokens per step and removes the wrong ones. `runtime`
    is a `Runtime`.
    """

    # transformers derives them from layers
    is_compileable, is_linear, is_croppable = False, [False], False
    _is_user_defined = False  # transformers' name: the caller of `generate` passed the cache

    def __init__(self, runtime: Any, options: Options, is_croppable: bool = False):
        super().__init__(layers=[])
        self.runtime, self.options, self.expand_size = runtime, options, options.rows_per_input
        self.is_croppable = is_croppable
        self.decoder: Any = None
        self.length, self.padding = 0, np.zeros(1, int)  # tokens and padding (rows,) so far
        self.step_length = 1  # tokens of the last step
        self.window: int | None = None  # tokens that the decoder keeps, `None` for all
        self.beam_idx: np.ndarray | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each row continue, in the next step, the row that `beam_idx` (rows,) names."""
        rows = beam_idx.cpu().numpy()
        self.beam_idx = rows if self.beam_idx is None else self.beam_idx[rows]
        self.padding = self.padding[rows]

    def crop(self, tokens: int) -> None:
        """Remove -`tokens` tokens from the end.

        Raises ValueError for more tokens than the decoder can remove. Once its sliding window is
        full, these are fewer tokens than the last step had.
        """
        is_full = self.window is not None and self.length >= self.window
        limit = self.step_length - 1 if is_full else self.length
        if not hasattr(self.decoder, "crop"):
            limit = 0
        if not -limit <= tokens <= 0:
            raise ValueError(f"crop has {tokens}, expected {-limit} to 0, tokens to remove")
        if tokens:
            self.decoder.crop(-tokens)
            self.length, self.step_length = self.length + tokens, self.step_length + tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # as a `DynamicCache`, which grows

    # the decoder keeps its caches in onnxruntime, where these methods of `Cache` cannot change them
    def _reject(self, method: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{method} of a DecoderCache, expected a cache of torch tensors")

    reset = partialmethod(_reject, "reset")
    batch_select_indices = partialmethod(_reject, "batch_select_indices")
    batch_repeat_interleave = partialmethod(_reject, "batch_repeat_interleave")
    __reduce_ex__ = partialmethod(_reject, "copy")

    def read(
        self, ids: Any, kept: int, mask: Any = None, source: Any = None, positions: Any = None
    ) -> np.ndarray:
        """Feed new tokens and return the logits (rows, `kept`, V) after the last ones.

        Args:
            ids: the new tokens (rows, T), at first the prompts.
            kept: the number of last tokens whose logits are returned, 0 for all.
            mask: (rows, T), 0 for padding of prompts; later of all tokens or of the new ones.
            source: ids and mask (B, S) for a seq2seq model.
            positions: positions of the new tokens, by default those that the decoder counts.

        Raises ValueError for wrong tokens, masks and positions, more tokens than learned positions,
        and logits that the target does not return.
        """
        ids, mask, positions = to_numpy(ids), to_numpy(mask), to_numpy(positions)
        is_first, prefix = self.decoder is None, "decoder_" if source else ""
        if not is_integer(kept) or kept < 0:
            raise ValueError(f"logits_to_keep is {kept}, expected a number of tokens, 0 for all")
        ids, new_mask = check_tokens(self.runtime, ids, mask if is_first else None, prefix)
        if not is_first:
            self._check_later(ids, mask)
        self._check_positions(new_mask, positions)
        kept = min(kept, ids.shape[1])
        logits = self._start(ids, new_mask, source, kept) if is_first else self._feed(ids)
        self.padding = self.padding + (new_mask == 0).sum(axis=1)
        self.length += ids.shape[1]
        return logits[:, -kept:]

    def _check_later(self, ids: np.ndarray, mask: Any) -> None:
        """Raise ValueError unless `ids` have the rows of the prompts and `mask` their padding.

        The mask is of all tokens or of the new ones.
        """
        rows = len(self.padding)
        if len(ids) != rows:
            raise ValueError(f"{len(ids)} rows of new tokens, expected {rows}, those of the cache")
        if mask is not None:
            shape = (rows, self.length + ids.shape[1])
            if mask.shape not in (shape, ids.shape):
                expected = f"{shape}, or {ids.shape} for the new tokens"
                raise ValueError(f"attention_mask has the shape {mask.shape}, expected {expected}")
            zeros = (mask == 0).sum(axis=1).tolist()
            padding = (self.padding * (mask.shape == shape)).tolist()
            if zeros != padding:
                counts = f"{zeros} zeros by row, expected {padding}"
                raise ValueError(f"attention_mask has {counts}, the padding of the prompts")

    def _check_positions(self, mask: np.ndarray, positions: Any) -> None:
        """Raise ValueError for a `mask` (rows, T) of new tokens with zeros between ones, too many
        tokens, or `positions` that do not count the ones."""
        inputs.check_contiguous(mask, "attention_mask")
        counted = self.length - self.padding[:, None] + mask.cumsum(axis=1) - 1
        inputs.check_positions(int(counted.max()) + 1, self.runtime.config)
        if positions is not None and ((positions != counted) & (mask == 1)).any():
            raise ValueError(f"position_ids are {positions.tolist()}, expected {counted.tolist()}")

    def _start(self, ids: np.ndarray, mask: np.ndarray, source: Any, kept: int) -> np.ndarray:
        """Start the decoder with the prompts, and return logits (rows, T, V), at least `kept`."""
        prompt, prompt_mask = ids[:: self.expand_size], mask[:: self.expand_size]
        source = source and check_source(self.runtime, source, len(prompt))
        request = GenerationRequest(self.options, prompt, prompt_mask, source)
        self.decoder = self.runtime.model.factory.open(request)
        self.window = getattr(self.decoder, "window", None)
        weakref.finalize(self, self.decoder.close)
        if self.is_croppable and not self.decoder.all_logits:
            raise ValueError(
                f"target {self.runtime.target!r} returns only the logits after the last token: "
                "expected no assistant_model and no prompt_lookup_num_tokens, or an export with "
                "the target 'portable'"
            )
        length = self._prefill_length(mask, kept)
        logits = self.decoder.prefill(prompt[:, :length], prompt_mask[:, :length]).copy()
        if self.expand_size > 1:
            self.decoder.select(np.arange(len(prompt)).repeat(self.expand_size))
            logits = np.repeat(logits, self.expand_size, axis=0)
        if length < ids.shape[1]:
            logits = np.concatenate([logits, self._feed(ids[:, length:])], axis=1)
            self.step_length = kept
            return logits
        return logits if kept == 1 else align_padding(logits, mask)

    def _prefill_length(self, mask: np.ndarray, kept: int) -> int:
        """Return how many tokens of the prompts are fed at once.

        The other `kept` tokens follow in steps if the decoder returns only the last logits, or
        could not remove them otherwise, because of its window. Raises ValueError if that is
        impossible: for all logits, and for padding among `kept`.
        """
        length, all_logits = mask.shape[1], self.decoder.all_logits
        is_cropped = self.is_croppable and self.window is not None
        if length == 1 or kept == 1 or (all_logits and not is_cropped):
            return length
        if not kept or not mask[:, -kept:].all():
            raise ValueError(
                f"target {self.runtime.target!r} returns only the logits after the last token: "
                "expected logits_to_keep=1, or an export with the target 'portable'"
            )
        return max(length - kept, 1) if all_logits else length - kept + 1

    def _feed(self, ids: np.ndarray) -> np.ndarray:
        """Feed tokens (rows, T) in as many steps as needed, and return the logits (rows, T, V)."""
        size = ids.shape[1] if self.decoder.all_logits else 1
        logits = []
        for start in range(0, ids.shape[1], size):
            tokens = ids[:, start : start + size]
            if self.beam_idx is not None:
                self.decoder.select(self.beam_idx)
            values, places = self.decoder.step(tokens), self.decoder.places
            logits.append(values.copy() if places is None else values[places])
            self.beam_idx, self.step_length = None, tokens.shape[1]
        return np.concatenate(logits, axis=1)


def check_cache(cache: Any, runtime: Any) -> DecoderCache:
    """Return `cache`, by default a new one. Raises ValueError unless it is of `runtime`."""
    if cache is None:
        return DecoderCache(runtime, Options(INITIAL_CAPACITY))
    if not isinstance(cache, DecoderCache):
        raise ValueError(f"the cache is a {type(cache).__name__}, expected one of this model")
    if cache.runtime is not runtime:
        owner, directory = cache.runtime.info.directory, runtime.info.directory
        raise ValueError(f"the cache is of {owner}, expected one of this model, {directory}")
    return cache


def check_tokens(runtime: Any, ids: Any, mask: Any, prefix: str = "") -> Any:
    """Return checked ids and mask (B, T). The mask is by default all ones.

    Raises ValueError for ids outside the vocabulary, wrong masks, and a row without tokens. Errors
    name both with `prefix`.
    """
    tensors = token_inputs(runtime.config, ("batch_size", "length"), prefix=prefix)
    arrays = dict(zip([tensor.name for tensor in tensors], (ids, mask)))
    ids, mask = inputs.check_inputs(tensors, arrays, runtime.architecture).values()
    if not (has_tokens := mask.any(axis=1)).all():
        raise ValueError(f"attention_mask of row {has_tokens.argmin()} is 0, expected a token")
    return ids, mask


def check_source(runtime: Any, source: tuple[Any, Any], rows: int) -> Any:
    """Return ids and mask (`rows`, S) of a source, padded on the right.

    Raises ValueError for wrong tokens or masks, more tokens than positions, and other rows.
    """
    ids, mask = check_tokens(runtime, *source)
    if len(ids) != rows:
        raise ValueError(f"decoder_input_ids has {rows} rows, expected {len(ids)}")
    inputs.check_positions(inputs.num_positions(ids, mask, runtime.config), runtime.config)
    return inputs.move_padding(ids, mask, "right", runtime.config.get("pad_token_id") or 0)


def align_padding(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return logits (B, T, V) of rows padded on the left at the places that `mask` (B, T) has."""
    padding = mask[:, ::-1].argmax(axis=1)
    places = (np.arange(mask.shape[1]) + padding[:, None]) % mask.shape[1]
    return np.take_along_axis(logits, places[:, :, None], axis=1) if padding.any() else logits
