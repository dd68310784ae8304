"""Greedy search and beam search on the device.

Nothing is copied between two steps. The host reads tokens, or whether inputs have ended, only after
several steps. Greedy search is one session, so its steps are queued on the device. The two sessions
of beam search wait for each other.
"""

import numpy as np

from ...inference.device_thread import in_device_thread
from ...inference.options import EXCLUDED_SCORE, Options
from ...inference.rows import SEARCH_STEPS, GenerationRequest
from .rows import CudaRows


class CudaSearch:
    """The `DeviceSearch` that begins with the prompts of `request`: beam search if it has beams,
    else greedy search."""

    def __init__(self, decoder: CudaRows, request: GenerationRequest):
        self.decoder = decoder
        self.options = options = request.options
        self.close = decoder.close
        count, self.prompt = request.input_ids.shape
        self.ended = np.zeros(count, bool)
        self.num_tokens = 0
        # captured while the caches are empty
        self.graph = decoder.buffers.beam_graph(options) if options.num_beams > 1 else None
        # selects the first token of greedy search
        decoder.read(request.input_ids, request.attention_mask, options.num_beams)
        self.run = decoder.step_runner(options.num_beams)
        if self.graph is not None:
            self.graph.put(**dict.fromkeys(self.graph.own, 0) | first_state(options))

    @in_device_thread
    def advance(self, steps: int = SEARCH_STEPS) -> np.ndarray | None:
        """Run `steps` steps, or fewer at `max_new_tokens`. `ended` says which inputs have ended.

        Return the tokens (B, T) of greedy search, which have no meaning after the end token of a
        row. Return `None` for beam search, see `result`.
        """
        start, limit = self.num_tokens, self.options.max_new_tokens
        self.num_tokens = min(start + steps, limit)
        if self.graph is None:
            for number in range(max(start, 1), self.num_tokens):
                self.run(waits=number == self.num_tokens - 1)
            tokens = self.tokens(start)
            self.ended |= np.isin(tokens, self.options.eos_token_ids).any(axis=1)
            self.ended |= self.num_tokens == limit
            return tokens
        for number in range(start, self.num_tokens):
            if number:
                self.run()
            self.graph.run()
        can_improve = self.graph.values["can_improve"].numpy()[: len(self.ended), 0]
        self.ended = ~can_improve | (self.num_tokens == limit)
        return None

    def tokens(self, start: int) -> np.ndarray:
        """Copy the new tokens (B, T) from number `start` on from the device and return them."""
        buffers = self.decoder.buffers
        if self.num_tokens - start == 1:  # the input of the next step is less to copy
            tokens = buffers.step_graph(1).values["input_ids"].numpy()
        else:
            first, end = self.prompt + start, self.prompt + self.num_tokens
            tokens = buffers.states["tokens"].numpy()[:, 0, first:end, 0]
        return tokens[: len(self.ended)].copy()

    @in_device_thread
    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the new tokens (B * N, T) of the best finished hypotheses, and their scores (B *
        N,).

        N is `num_return_sequences`.
        """
        assert self.graph is not None  # it is a beam search
        inputs, count = len(self.ended), self.options.num_return_sequences
        state = {
            name: self.graph.values[f"finished_{name}"].numpy()[:inputs, :count]
            for name in ("visible", "tokens", "lengths", "scores")
        }
        tokens = self.decoder.buffers.states["tokens"].numpy()[:, 0, self.prompt :, 0]
        lengths = state["lengths"].reshape(-1)
        sequences = np.full((len(lengths), lengths.max(initial=1)), self.options.fill_token_id)
        histories = state["visible"].reshape(len(lengths), -1)[:, self.prompt :]
        for row, (history, last) in enumerate(zip(histories, state["tokens"].reshape(-1))):
            before = tokens[row // count][history]
            sequences[row, : len(before) + 1] = [*before, last]
        # on the CPU these are the numbers of the buffers, which the next search writes
        return sequences, state["scores"].reshape(-1).copy()


def first_state(options: Options) -> dict[str, np.ndarray | float]:
    """Return the inputs of the graph of beam search before the first token of a search with
    `options`, of those that are not 0."""
    is_other = np.arange(options.num_beams) > 0
    return {
        # the rows of one input are equal at first, so only the first row counts
        "scores": np.where(is_other, EXCLUDED_SCORE, 0),
        "finished_scores": -np.inf,
        "is_best": np.arange(options.candidates) < options.num_beams,
        "can_improve": True,
        "eos_token_ids": np.array(options.eos_token_ids or -1),
        "max_length": options.max_new_tokens,
        "length": 1,
        "length_penalty": options.length_penalty,
        "stops_early": options.early_stopping is True,
        "never_stops_early": options.early_stopping == "never",
    }
