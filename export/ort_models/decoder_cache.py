"""The cache that transformers' `generate` passes around, with a decoder of the export inside."""

import weakref
from typing import Any

import numpy as np
import torch
from transformers import Cache

from .. import requests
from ..inference.decoder import INITIAL_ROOM, GenerationRequest
from ..inference.inputs import (
    check_contiguous,
    check_input,
    check_positions,
    move_padding,
    num_positions,
)
from ..inference.options import Options
from ..runtime import Runtime
from ..specs.sequences import token_inputs

Source = tuple[np.ndarray, np.ndarray]


class DecoderCache(Cache):
    """A cache without layers around a `Decoder`, which the first tokens start.

    Args:
        runtime: the export.
        expand_size: rows that beams or samples make of each prompt.
        max_new_tokens: tokens that the decoder makes room for.
        is_croppable: whether tokens may be removed, for assisted generation.
    """

    # properties of transformers' class, which it derives from layers
    is_compileable = False
    is_linear = (False,)
    is_sliding = (False,)
    is_croppable = False

    def __init__(
        self,
        runtime: Runtime,
        expand_size: int = 1,
        max_new_tokens: int = INITIAL_ROOM,
        is_croppable: bool = False,
    ):
        super().__init__(layers=[])
        self.runtime = runtime
        self.expand_size = expand_size
        self.is_croppable = is_croppable
        self.options = Options(
            max_new_tokens=max_new_tokens,
            num_beams=expand_size,
            prompt_lookup_num_tokens=1 if is_croppable else None,
        )
        self.decoder: Any = None
        self.length = 0
        self.padding = 0  # of the row with the least padding
        self.beam_idx: np.ndarray | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue row `beam_idx` (rows,) in the next step."""
        self.beam_idx = beam_idx.cpu().numpy()

    def crop(self, tokens: int) -> None:
        """Remove the last -`tokens` tokens, or keep the first `tokens`. 0 changes nothing."""
        count = self.length - tokens if tokens > 0 else -tokens
        self.decoder.crop(count)
        self.length -= count

    def read(
        self,
        ids: np.ndarray,
        mask: np.ndarray | None = None,
        source: Source | None = None,
        num_logits: int = 0,
    ) -> np.ndarray:
        """Feed tokens (rows, T) and return the logits after the last `num_logits`, or all for 0.

        Args:
            ids: new tokens.
            mask: (rows, T) for a prompt, 0 for padding on either side. Later steps ignore it.
            source: ids and mask (B, S) for the prompt of a seq2seq model.
            num_logits: number of tokens. Targets without logits of all tokens need 1 for a prompt.

        Raises:
            ValueError: for tokens outside the vocabulary, more tokens than learned positions, a
                mask with holes or an empty row, and for logits that the target does not return.
        """
        ids = check_tokens(self.runtime, ids, is_target=source is not None)
        mask = check_mask(ids, mask) if self.decoder is None else np.ones_like(ids)
        padding = self.padding or int((mask == 0).sum(axis=1).min())
        check_positions(self.length + ids.shape[1] - padding, self.runtime.config)
        if self.decoder is None:
            logits = self._start(ids, mask, source, num_logits)
        else:
            logits = self._feed(ids)
        self.length, self.padding = self.length + ids.shape[1], padding
        return logits[:, -num_logits:]

    def _start(
        self, ids: np.ndarray, mask: np.ndarray, source: Source | None, num_logits: int
    ) -> np.ndarray:
        prompt, prompt_mask = ids[:: self.expand_size], mask[:: self.expand_size]
        check_rows(prompt, source)
        request = GenerationRequest(self.options, prompt, prompt_mask, source)
        self.decoder = self.runtime.model.decoders.start(request)
        weakref.finalize(self, self.decoder.close)
        if self.decoder.all_logits or num_logits == 1 or ids.shape[1] == 1:
            logits = self._prefill(prompt, prompt_mask)
            return logits if num_logits else align_padding(logits, mask)
        if not num_logits:
            raise ValueError(
                f"target {self.runtime.target!r} returns only the logits after the last token: "
                "expected logits_to_keep=1, or an export with the target 'portable'"
            )
        length = ids.shape[1] - num_logits + 1
        first = self._prefill(prompt[:, :length], prompt_mask[:, :length])
        return np.concatenate([first, self._feed(ids[:, length:])], axis=1)

    def _prefill(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        logits = self.decoder.prefill(ids, mask)
        if self.expand_size == 1:
            return logits.copy()
        self.decoder.expand(self.expand_size)
        return np.repeat(logits, self.expand_size, axis=0)

    def _feed(self, ids: np.ndarray) -> np.ndarray:
        """Feed tokens (rows, T) in as many steps as the decoder needs."""
        size = self.decoder.max_step_tokens or ids.shape[1]
        logits = []
        for start in range(0, ids.shape[1], size):
            logits.append(self.decoder.step(ids[:, start : start + size], self.beam_idx).copy())
            self.beam_idx = None
        return np.concatenate(logits, axis=1)


def check_tokens(runtime: Runtime, ids: np.ndarray, is_target: bool) -> np.ndarray:
    """Return token ids (B, T) as integers of the graph. Raise ValueError for ids outside the
    vocabulary."""
    axes = ("batch_size", "target_length")
    tensor = token_inputs(runtime.config, axes, prefix="decoder_" if is_target else "")[0]
    return check_input(tensor, ids, {})


def check_mask(ids: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Return the mask (B, T) of prompts, by default all 1.

    Raises:
        ValueError: for another shape than that of `ids`, a hole and an empty row.
    """
    if mask is None:
        return np.ones_like(ids)
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {mask.shape}, expected {ids.shape}")
    check_contiguous(mask, "attention_mask")
    if not mask.any(axis=1).all():
        row = int(mask.any(axis=1).argmin())
        raise ValueError(f"row {row} has no tokens, expected at least one in every row")
    return mask.astype(np.int64)


def check_source(runtime: Runtime, ids: np.ndarray, mask: np.ndarray | None) -> Source:
    """Return ids and mask (B, S) of a source, padded on the right. Raise as `Runtime.generate`."""
    mask = np.ones_like(ids) if mask is None else mask
    ids, mask = requests.prompts(runtime.info, ids, mask, {})
    check_positions(num_positions(ids, mask, runtime.config), runtime.config)
    return move_padding(ids, mask, "right", runtime.config.get("pad_token_id") or 0)


def check_rows(prompt: np.ndarray, source: Source | None) -> None:
    """Raise ValueError unless there is one prompt for each source."""
    if source is not None and len(prompt) != len(source[0]):
        raise ValueError(
            f"decoder_input_ids has {len(prompt)} rows, expected {len(source[0])}, one per source"
        )


def align_padding(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Move logits (B, T, V) of rows padded on the left to the places of their tokens in `mask`."""
    padding = mask[:, ::-1].argmax(axis=1)  # on the right in `mask`
    if not padding.any():
        return logits
    places = (np.arange(mask.shape[1]) + padding[:, None]) % mask.shape[1]
    return np.take_along_axis(logits, places[:, :, None], axis=1)
