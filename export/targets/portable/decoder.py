"""Generating with portable graphs, which return their caches longer than they took them."""

from dataclasses import dataclass

import numpy as np

from ...inference.decoder import (
    INITIAL_ROOM,
    GenerationRequest,
    LoadedExport,
    check_memory,
    next_input_name,
    position_bytes,
)
from ...inference.inputs import move_padding


@dataclass(frozen=True)
class PortableDecoders:
    """The `DecoderFactory` of one loaded export."""

    export: LoadedExport
    takes_empty_prompts = True
    takes_candidates = True

    def start(self, request: GenerationRequest) -> "PortableDecoder":
        """As `DecoderFactory`."""
        cache_bytes = 0
        if self.export.device == "cpu":
            rows = len(request.input_ids) * request.options.rows_per_input
            room = min(request.options.max_new_tokens, INITIAL_ROOM)
            positions = rows * (request.input_ids.shape[1] + room)
            cache_bytes = position_bytes(self.export.specs["decoder"]) * positions
        check_memory(request, self.export.config["vocab_size"], cache_bytes)
        feeds = {}
        if request.source is not None:
            ids, mask = request.source
            feeds["encoder_hidden_states"] = self.export.encode(ids, mask)["last_hidden_state"]
            feeds["encoder_attention_mask"] = mask
        return PortableDecoder(self.export, feeds, len(request.input_ids))

    def generate(self, request: GenerationRequest) -> None:
        """As `DecoderFactory`: the search is on the host."""


class PortableDecoder:
    """The `Decoder` of `rows` prompts. `feeds` are what the graph takes at each step beside tokens
    and caches."""

    all_logits = True
    max_step_tokens = None

    def __init__(self, export: LoadedExport, feeds: dict[str, np.ndarray], rows: int):
        spec = export.specs["decoder"]
        self.session = export.sessions["decoder"]
        self.outputs = [tensor.name for tensor in spec.outputs]
        self.feeds = feeds
        # how many tokens a token sees, itself among them, if the caches may lose what is before
        self.window = None
        # the other decoders count positions by their caches
        if "attention_mask" in {tensor.name for tensor in spec.inputs}:
            self.window = export.config.get("sliding_window")
            self.feeds["attention_mask"] = np.zeros((rows, 0), np.int64)
            # tokens of each row that are in the caches no more
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
        """As `Decoder`; the logits are those of the rows with their padding on the left."""
        ids, mask = move_padding(input_ids, attention_mask, "left", 0)
        length = ids.shape[1] if self.window is None else max(self.window, INITIAL_ROOM)
        parts = [slice(start, start + length) for start in range(0, ids.shape[1], length)]
        return np.concatenate([self.run(ids[:, part], mask[:, part]) for part in parts], axis=1)

    def step(self, tokens: np.ndarray, beam_idx: np.ndarray | None = None) -> np.ndarray:
        """As `Decoder`."""
        if beam_idx is not None:
            self.reorder_cache(beam_idx)
        return self.run(tokens, np.ones_like(tokens), tokens.shape[1] - 1)

    def run(self, tokens: np.ndarray, mask: np.ndarray, to_crop: int = 0) -> np.ndarray:
        """The logits of new tokens (rows, T), whose `mask` is 0 for padding; the last `to_crop` of
        them may be taken back."""
        feeds = {**self.feeds, **self.past, "input_ids": tokens}
        if "attention_mask" in self.feeds:
            mask = self.feeds["attention_mask"] = np.concatenate(
                [self.feeds["attention_mask"], mask], axis=1
            )
            positions = self.dropped + np.maximum(mask.cumsum(axis=1) - 1, 0)
            feeds |= {"attention_mask": mask, "position_ids": positions[:, -tokens.shape[1] :]}
        logits, *present = self.session.run(self.outputs, feeds)
        for name, states in zip(self.outputs[1:], present, strict=True):
            self.past[next_input_name(name)] = states
        if self.window is not None:
            self.drop(self.feeds["attention_mask"].shape[1] - (self.window - 1) - to_crop)
        return logits

    def drop(self, surplus: int) -> None:
        """The first tokens of the caches, if `surplus` is above 0: those that the next one does not
        see."""
        if surplus > 0:
            mask = self.feeds["attention_mask"]
            self.feeds["attention_mask"] = mask[:, surplus:]
            self.dropped = self.dropped + mask[:, :surplus].sum(axis=1, keepdims=True)
            self.past = {name: states[:, :, surplus:] for name, states in self.past.items()}

    def crop(self, count: int) -> None:
        """As `CandidateDecoder`."""
        if not count:
            return
        for name, states in self.past.items():
            if ".encoder." not in name:
                self.past[name] = states[:, :, :-count]
        if "attention_mask" in self.feeds:
            self.feeds["attention_mask"] = self.feeds["attention_mask"][:, :-count]

    def expand(self, expand_size: int) -> None:
        """As `Decoder`."""
        for arrays in (self.feeds, self.past):
            for name, array in arrays.items():
                arrays[name] = np.repeat(array, expand_size, axis=0)
        if "attention_mask" in self.feeds:
            self.dropped = np.repeat(self.dropped, expand_size, axis=0)

    def reorder_cache(self, beam_idx: np.ndarray) -> None:
        """Beams of one input share the encoder's output, so only the decoder's own caches move."""
        for name, states in self.past.items():
            if ".encoder." not in name:
                self.past[name] = states[beam_idx]
        if "attention_mask" in self.feeds:
            self.feeds["attention_mask"] = self.feeds["attention_mask"][beam_idx]
            self.dropped = self.dropped[beam_idx]

    def close(self) -> None:
        """As `Decoder`; nothing outlives it."""
