"""The Protocols by which a target generates: a `RowsFactory` per loaded export, which opens `Rows`.

Rows hold the caches of sequences. They know no search: the engine selects the tokens.
"""

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import UsageError
from ..specs.caches import cache_tensors
from ..specs.graph_spec import GraphSpec, TensorSpec, concrete_shape
from .options import Options

INITIAL_CAPACITY = 256  # initial capacity of growing caches, in new tokens
SEARCH_STEPS = 8  # steps of a `DeviceSearch` between two looks at its tokens


@dataclass(frozen=True)
class GenerationRequest:
    """A request for rows that start together.

    Args:
        options: resolved options, see `options.resolve`.
        input_ids: prompts (B, P); for seq2seq the decoder prompts.
        attention_mask: (B, P), 0 for padding, which may be on either side.
        source: ids and mask (B, S) of the encoder input of seq2seq models, padded on the right.
        candidates: the number of best tokens of each row that the caller needs, instead of all
            logits. 0 if it needs the logits.
    """

    options: Options
    input_ids: np.ndarray
    attention_mask: np.ndarray
    source: tuple[np.ndarray, np.ndarray] | None = None
    candidates: int = 0


class Rows(Protocol):
    """Rows of a batch that start together, with the caches of their tokens.
    `targets/NAME/rows.py` implements it for each target.

    Logits are float32 (rows, T, V), valid until the next step, and callers may overwrite them. With
    `all_logits` they are those after each of the T input tokens. Otherwise T is 1, and they are
    those after the last token.
    """

    @property
    def all_logits(self) -> bool: ...

    @property
    def places(self) -> np.ndarray | None:
        """(rows,), the place of each row in the logits that `step` returns. `None` if these have
        the order of the rows."""

    @property
    def best_tokens(self) -> np.ndarray | None:
        """(rows, C), the best tokens of each row after the last step, best first, for a request
        with C `candidates`. `prefill` and `step` then return their log p (rows, 1, C). `None` if
        these return logits, as all rows may do."""

    @property
    def shrinks(self) -> bool:
        """True if `select` can drop inputs, so that a step only costs the others."""

    def prefill(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Feed the prompts (B, P) and return the logits (B, T, V).

        They follow each token, T = P, with `all_logits`, else only the last, T = 1. B is the number
        of inputs of the request. Padding is where `attention_mask` is 0. They are valid until the
        next step.
        """

    def select(self, parents: np.ndarray) -> None:
        """Let row i continue row `parents[i]` from now on.

        After the prompts, each input is repeated for its beams or samples: 0, 0, 1, 1. Later
        `parents` reorders the rows of each input, or drops inputs if the rows shrink. Rows of one
        input stay adjacent, and all inputs have the same number of them. An input may only move to
        a smaller place.
        """

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Feed `tokens` (rows, t) and return the logits (rows, T, V).

        With `all_logits` they follow each of any number t of tokens, T = t. Otherwise t and T are
        1. They are valid until the next step.
        """

    def source_inputs(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return what the decoder reads of the sources of `rows` (N,), by the names of its inputs:
        states or keys and values, and `encoder_attention_mask` (N, S). Empty without an encoder."""

    def close(self) -> None:
        """Release memory for other requests. The rows must not be used again."""


class JoiningRows(Rows, Protocol):
    """Rows that may join while others run."""

    @property
    def encodes(self) -> bool:
        """True if each row has a source."""

    def add(self, sources: Sequence[Sequence[int]] | None, rows: np.ndarray) -> None:
        """Let `rows` (N,) begin without tokens, with these `sources` if the model reads any.

        Nothing continues the rows before, or they are new ones after the others. N is not 0.
        """

    def pause(self, rows: np.ndarray) -> None:
        """Let `rows` (N,) stand still without tokens until others begin in their places."""

    def read(self, tokens: Sequence[int], start: int) -> None:
        """Read a part of a prompt that no row has yet, after its first `start` tokens."""

    def add_read(self) -> None:
        """Add a row after the others, with the tokens of the prompt that was read."""


@dataclass(frozen=True)
class SlotSize:
    """The size of rows that may join while others run. Each has a slot in the caches.

    Args:
        rows: the number of slots.
        source: the maximum number of source tokens of a slot, 0 for a decoder-only model.
        length: the maximum number of decoder tokens of a slot.
    """

    rows: int
    source: int
    length: int


class RowsFactory(Protocol):
    """Opens the rows of one loaded export. It keeps the state that is shared by requests."""

    @property
    def supports_empty_prompts(self) -> bool:
        """True if a row of prompts may be all padding."""

    def open(self, request: GenerationRequest) -> Rows:
        """Encode the sources of `request`, if it has any, and return rows for its prompts.

        The prompts are not read yet. The caller closes the rows.

        Raises:
            UsageError: if the request does not fit into memory.
            ValueError: if onnxruntime cannot compute the graphs.
        """

    @property
    def start_search(self) -> "Callable[[GenerationRequest], DeviceSearch | None] | None":
        """A function that reads the prompts of a request and returns a search that runs in graphs,
        which the caller closes. `None` if all searches of the target run in numpy.

        The request has greedy or beam search without logits processors and scores of greedy search.
        The function returns `None` if graphs cannot search it. The caller then uses `open`.

        Raises:
            UsageError: if the request does not fit into memory.
            ValueError: if onnxruntime cannot compute the graphs.
        """


class JoiningRowsFactory(RowsFactory, Protocol):
    """The `RowsFactory` of an export with a step graph, see `Target.step_role`."""

    def open_slots(self, role: str, size: SlotSize) -> JoiningRows:
        """Return rows of `size` over the step graph of `role`. Raises MemoryError if there is no
        memory for the slots."""


class DeviceSearch(Protocol):
    """A greedy or beam search of B inputs that runs in the graphs of a target. The logits stay on
    the device."""

    ended: np.ndarray  # (B,), True for inputs that further steps do not change

    @property
    def decoder(self) -> Rows:
        """The rows of its inputs, one each."""

    def advance(self, steps: int = SEARCH_STEPS) -> np.ndarray | None:
        """Run `steps` steps, or fewer if `max_new_tokens` is reached.

        Greedy search returns the new tokens (B, T). Tokens of a row after its end token have no
        meaning. Beam search returns `None`, because tokens of beams are only known at the end.
        After the call `ended` is also True for inputs that ended in it. All inputs end at
        `max_new_tokens`.
        """

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the new tokens (B * N, T) and the scores (B * N,) of beam search.

        N is `num_return_sequences`. Only the rows of ended inputs are complete.
        """

    def close(self) -> None:
        """Release memory for other requests. The search must not be used again."""


def check_memory(inputs: int, options: Options, vocab_size: int, cache_bytes: int = 0) -> None:
    """Raise UsageError unless `cache_bytes` and two copies of the logits of this number of `inputs`
    fit into this machine's memory.

    The message has the memory that is needed and the memory of this machine. `vocab_size` is the
    number of logits of a row, and `cache_bytes` the size of all caches.
    """
    rows = inputs * options.rows_per_input
    needed = 2 * 4 * rows * vocab_size + cache_bytes
    available = memory()
    if needed > available:
        sequences = (
            f"{options.rows_per_input} sequences or beams of each and "
            f"max_new_tokens={options.max_new_tokens}"
        )
        request_size = f"{inputs} inputs, {sequences}"
        raise UsageError(
            f"{request_size} need at least {needed / 1e9:.0f} GB, expected at most "
            f"{available / 1e9:.0f} GB, the memory of this machine"
        )


@functools.cache
def memory() -> float:
    """Return the bytes of memory of this machine, or infinity if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf


def position_bytes(spec: GraphSpec) -> int:
    """Return the bytes that one token of one row takes in the self-attention caches of the decoder
    graph `spec`, in all layers together."""
    caches = cache_tensors(spec)
    # Only the number of heads and their width are fixed sizes, not rows and positions.
    sizes = [math.prod(size for size in tensor.shape if isinstance(size, int)) for tensor in caches]
    return sum(
        size * (2 if "16" in tensor.dtype else 4)
        for size, tensor in zip(sizes, caches, strict=True)
    )


def slot_shape(tensor: TensorSpec, size: SlotSize) -> list[int]:
    """Return the shape of the input `tensor` of a step graph for slots of `size`."""
    sizes = {
        "rows": size.rows,
        "target_length": 1,
        "max_length": size.length,
        "max_source": size.source,
    }
    # names in graphs without a step
    full_sequences = {
        "batch_size": size.rows,
        "source_length": size.source,
        "past_source_length": size.source,
    }
    return concrete_shape(tensor, sizes | full_sequences)


def next_input_name(name: str) -> str:
    """Return the name of the decoder's input that takes the output `name` in the next step.

    It is "past_key_values.0.key" for "present.0.key", and "input_ids" for "next_input_ids". That of
    the encoder's states is "encoder_hidden_states".
    """
    if name == "last_hidden_state":
        return "encoder_hidden_states"
    return name.removeprefix("next_").replace("present", "past_key_values")


def cross_states(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the encoder's `outputs` under the names of the decoder's inputs that take them."""
    return {next_input_name(name): states for name, states in outputs.items()}
