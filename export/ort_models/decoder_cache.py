"""The cache that transformers' `generate` passes around, with a decoder of the export inside."""

import weakref
from typing import Any

import numpy as np
import torch
from transformers import Cache

from .. import requests
from ..inference import inputs
from ..inference.decoder import INITIAL_CAPACITY, GenerationRequest
from ..inference.options import Options
from ..runtime import Runtime
from ..specs.sequences import token_inputs

Source = tuple[np.ndarray, np.ndarray]


class DecoderCache(Cache):
    """A cache of transformers whose content is a `Decoder` of the export.

    The decoder starts with the first tokens that are read.

    Args:
        runtime: the export.
        expand_size: the number of rows that beams or samples make of each prompt.
        max_new_tokens: the number of tokens that the decoder makes room for.
        is_croppable: True if tokens may be removed, for assisted generation.
    """

    # transformers derives them from layers
    is_compileable = False
    is_linear = [False]
    is_croppable = False

    def __init__(
        self,
        runtime: Runtime,
        expand_size: int = 1,
        max_new_tokens: int = INITIAL_CAPACITY,
        is_croppable: bool = False,
    ):
        super().__init__(layers=[])
        self.runtime, self.expand_size, self.is_croppable = runtime, expand_size, is_croppable
        lookup = 1 if is_croppable else None
        self.options = Options(max_new_tokens, None, expand_size, prompt_lookup_num_tokens=lookup)
        self.decoder: Any = None
        self.length = self.padding = 0  # padding of the row that has least
        self.beam_idx: np.ndarray | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each row continue, in the next step, the row that `beam_idx` (rows,) names."""
        self.beam_idx = beam_idx.cpu().numpy()

    def crop(self, tokens: int) -> None:
        """Remove tokens from the end: keep the first `tokens`, or remove -`tokens` if it is
        negative.

        0 changes nothing.
        """
        count = self.length - tokens if tokens > 0 else -tokens
        self.decoder.crop(count)
        self.length -= count

    def read(self, ids: np.ndarray, mask: Any, source: Source | None, kept: int) -> np.ndarray:
        """Feed new tokens and return the logits (rows, `kept`, V) after the last ones.

        Args:
            ids: the new tokens (rows, T), at first the prompts.
            mask: (rows, T) of a prompt, 0 for padding; ignored in later steps.
            source: tokens and mask (B, S) for a seq2seq model, whose prompts may only have padding
                on the right.
            kept: the number of last tokens whose logits are returned, 0 for all. Most targets only
                support 1 for a prompt.

        Raises:
            ValueError: for ids outside the vocabulary, more tokens than learned positions, a mask
                with holes or an empty row, and logits that the target does not return.
        """
        config = self.runtime.config
        mask = mask if self.decoder is None else None
        ids, mask = check_tokens(self.runtime, ids, mask, "" if source is None else "decoder_")
        if self.decoder is None:
            self.padding = int((mask == 0).sum(axis=1).min())
        inputs.check_positions(self.length + ids.shape[1] - self.padding, config)
        is_first = self.decoder is None
        logits = self._start(ids, mask, source, kept) if is_first else self._feed(ids)
        self.length += ids.shape[1]
        return logits[:, -kept:]

    def _start(self, ids: np.ndarray, mask: np.ndarray, source: Any, kept: int) -> np.ndarray:
        prompt, prompt_mask = ids[:: self.expand_size], mask[:: self.expand_size]
        if source is not None and len(prompt) != len(source[0]):
            raise ValueError(f"decoder_input_ids has {len(prompt)} rows, expected {len(source[0])}")
        request = GenerationRequest(self.options, prompt, prompt_mask, source)
        self.decoder = self.runtime.model.decoders.start(request)
        weakref.finalize(self, self.decoder.close)
        has_kept = self.decoder.all_logits or kept == 1 or ids.shape[1] == 1
        if not has_kept and not kept:
            raise ValueError(
                f"target {self.runtime.target!r} returns only the logits after the last token: "
                "expected logits_to_keep=1, or an export with the target 'portable'"
            )
        length = ids.shape[1] if has_kept else ids.shape[1] - kept + 1
        logits = self.decoder.prefill(prompt[:, :length], prompt_mask[:, :length]).copy()
        if self.expand_size > 1:
            self.decoder.expand(self.expand_size)
            logits = np.repeat(logits, self.expand_size, axis=0)
        if length < ids.shape[1]:
            return np.concatenate([logits, self._feed(ids[:, length:])], axis=1)
        return logits if kept or source else align_padding(logits, mask)

    def _feed(self, ids: np.ndarray) -> np.ndarray:
        """Feed tokens `ids` (rows, T) in as many steps as the decoder needs.

        Return the logits (rows, T, V) after each.
        """
        size = self.decoder.max_step_tokens or ids.shape[1]
        logits = []
        for start in range(0, ids.shape[1], size):
            logits.append(self.decoder.step(ids[:, start : start + size], self.beam_idx).copy())
            self.beam_idx = None
        return np.concatenate(logits, axis=1)


def check_tokens(runtime: Runtime, ids: np.ndarray, mask: Any, prefix: str) -> Source:
    """Check new tokens and return `(ids, mask)`, both (B, T).

    Args:
        runtime: the export.
        ids: the tokens.
        mask: 0 for padding, `None` for none. For a seq2seq model it is checked only, and all ones
            are returned: padding on the right changes no other logits.
        prefix: `"decoder_"` for the prompts of a seq2seq model, else `""`.

    Raises:
        ValueError: for ids outside the vocabulary, a mask with holes, and a row without tokens.
    """
    tensors = token_inputs(runtime.config, ("batch_size", "target_length"), prefix=prefix)
    arrays = dict(zip([tensor.name for tensor in tensors], (ids, mask)))
    ids, mask = inputs.check_inputs(tensors, arrays, runtime.architecture).values()
    inputs.check_contiguous(mask, tensors[1].name)
    has_tokens = (mask[:, 0] if prefix else mask.any(axis=1)) == 1
    if not has_tokens.all():
        expected = "padding on the right" if prefix else "one token or more"
        raise ValueError(
            f"{tensors[1].name} of row {has_tokens.argmin()} begins with 0, expected {expected}"
        )
    return ids, np.ones_like(ids) if prefix else mask


def check_source(runtime: Runtime, ids: np.ndarray, mask: Any = None) -> Source:
    """Check source tokens and return `(ids, mask)`, both (B, S), with padding on the right.

    `mask` is 0 for padding, `None` for none.

    Raises:
        ValueError: for ids outside the vocabulary, wrong masks, and more tokens than positions.
    """
    mask = np.ones_like(ids) if mask is None else mask
    ids, mask = requests.prompts(runtime.info, ids, mask, {})
    inputs.check_positions(inputs.num_positions(ids, mask, runtime.config), runtime.config)
    return inputs.move_padding(ids, mask, "right", runtime.config.get("pad_token_id") or 0)


def align_padding(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return logits (B, T, V) of rows padded on the left, moved to the places of their tokens.

    `mask` (B, T) is 1 at these places.
    """
    padding = mask[:, ::-1].argmax(axis=1)
    places = (np.arange(mask.shape[1]) + padding[:, None]) % mask.shape[1]
    return np.take_along_axis(logits, places[:, :, None], axis=1) if padding.any() else logits
