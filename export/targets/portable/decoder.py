"""Generating with portable graphs, which return their caches longer than they took them."""

from dataclasses import dataclass

import numpy as np

from ...runtime.decoder import GenerationRequest, LoadedExport, check_memory, first_positions, next_input_name, position_bytes
from ...runtime.inputs import move_padding


@dataclass(frozen=True)
class PortableDecoders:
    """The `DecoderFactory` of one loaded export."""

    export: LoadedExport
    takes_empty_prompts = True

    def start(self, request: GenerationRequest) -> "PortableDecoder":
        """As `DecoderFactory`."""
        cache_bytes = 0
        if self.export.device == "cpu":
            cache_bytes = position_bytes(self.export.specs["decoder"]) * first_positions(request)
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
    """The `Decoder` of `rows` prompts. `feeds` are what the graph takes at each step beside tokens and caches."""

    all_logits = True
    max_step_tokens = None

    def __init__(self, export: LoadedExport, feeds: dict[str, np.ndarray], rows: int):
        spec = export.specs["decoder"]
        self.session = export.sessions["decoder"]
        self.outputs = [tensor.name for tensor in spec.outputs]
        self.feeds = feeds
        self.takes_mask = "attention_mask" in {tensor.name for tensor in spec.inputs}
        # Every cache starts with length 0.
        self.past = {
            tensor.name: np.zeros((rows, *(0 if isinstance(size, str) else size for size in tensor.shape[1:])), np.float32)
            for tensor in spec.inputs
            if tensor.name.startswith("past_key_values")
        }

    def prefill(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """As `Decoder`; the logits are those of the rows with their padding on the left."""
        ids, mask = move_padding(input_ids, attention_mask, "left", 0)
        if self.takes_mask:
            self.feeds["attention_mask"] = mask
        return self.run(ids)

    def step(self, tokens: np.ndarray, beam_idx: np.ndarray | None = None) -> np.ndarray:
        """As `Decoder`."""
        if beam_idx is not None:
            self.reorder_cache(beam_idx)
        return self.run(tokens)

    def run(self, tokens: np.ndarray) -> np.ndarray:
        feeds = {**self.feeds, **self.past, "input_ids": tokens}
        if self.takes_mask:
            feeds |= self.grow_mask(tokens.shape[1])
        logits, *present = self.session.run(self.outputs, feeds)
        for name, states in zip(self.outputs[1:], present, strict=True):
            self.past[next_input_name(name)] = states
        return logits

    def grow_mask(self, length: int) -> dict[str, np.ndarray]:
        """The first step has the mask of the prompt; each later one appends tokens that are not padding."""
        mask = self.feeds["attention_mask"]
        past = self.past["past_key_values.0.key"].shape[2]
        if past:
            mask = np.concatenate([mask, np.ones((len(mask), past + length - mask.shape[1]), np.int64)], axis=1)
            self.feeds["attention_mask"] = mask
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, past:]
        return {"attention_mask": mask, "position_ids": positions}

    def expand(self, expand_size: int) -> None:
        """As `Decoder`."""
        for arrays in (self.feeds, self.past):
            for name, array in arrays.items():
                arrays[name] = np.repeat(array, expand_size, axis=0)

    def reorder_cache(self, beam_idx: np.ndarray) -> None:
        """Beams of one input share the encoder's output, so only the decoder's own caches move."""
        for name, states in self.past.items():
            if ".encoder." not in name:
                self.past[name] = states[beam_idx]
        if "attention_mask" in self.feeds:
            self.feeds["attention_mask"] = self.feeds["attention_mask"][beam_idx]

    def close(self) -> None:
        """As `Decoder`; nothing outlives it."""
