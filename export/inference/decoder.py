"""What a target gives the runtime to generate with: a `DecoderFactory` of each loaded export, and
of that a `Decoder` of each request. Continuous batching, in which rows join and leave while others
go on, is another Protocol than `Decoder`."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import UsageError
from ..specs.graph_spec import GraphSpec
from .logits import Prompt
from .options import Options, check_seeds
from .session import Session

INITIAL_ROOM = 256  # new tokens that caches which grow have room for at first


@dataclass(frozen=True)
class GenerationRequest:
    """What is to be generated, checked.

    Args:
        options: resolved, see `options.resolve`.
        input_ids: (B, P), the tokens before the first new one; for seq2seq what each target begins
            with.
        attention_mask: (B, P), 0 for padding, which may be on either side.
        source: for seq2seq the ids and the mask (B, S) of what the encoder reads, padded on the
            right.
        is_scored: whether the score of each sequence is wanted.
        seeds: of sampling, one for each input; None draws all rows from `options.seed`.
    """

    options: Options
    input_ids: np.ndarray
    attention_mask: np.ndarray
    source: tuple[np.ndarray, np.ndarray] | None = None
    is_scored: bool = False
    seeds: tuple[int, ...] | None = None

    def with_seeds(self, seeds: Sequence[int] | None) -> "GenerationRequest":
        """Return the request with a seed for each input. Raise UsageError for another number."""
        if seeds is None:
            return self
        check_seeds(seeds, len(self.input_ids))
        return dataclasses.replace(self, seeds=tuple(seeds))

    @property
    def prompt(self) -> Prompt:
        return Prompt(self.input_ids, padding=(self.attention_mask == 0).sum(axis=1))


class Decoder(Protocol):
    """A batch that is being decoded. What it may not do is a property.

    Logits are float32 (rows, T, V), valid until the next step, and may be overwritten: those after
    each of the T tokens that were given, or T = 1, those after the last of them, unless
    `all_logits`.
    """

    @property
    def all_logits(self) -> bool: ...

    @property
    def max_step_tokens(self) -> int | None:
        """Of each row; `None` for any number."""

    def prefill(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Prompts (B, P), as many as the request has and no longer than it is with its new tokens
        -> logits."""

    def step(self, tokens: np.ndarray, beam_idx: np.ndarray | None = None) -> np.ndarray:
        """Tokens (rows, t) that continue the rows `beam_idx` (rows,), each its own if `None` ->
        logits."""

    def expand(self, expand_size: int) -> None:
        """Every row becomes `expand_size` rows that stand together: beams, or sequences of one
        input."""

    def close(self) -> None:
        """Gives back what other requests can use; the decoder is of no use any more."""


class CandidateDecoder(Decoder, Protocol):
    """Of one row, whose step may take several tokens, with the logits after each, and take the last
    of them back."""

    def crop(self, count: int) -> None:
        """The last `count` tokens, 0 or more of the last step, become as if they had not been
        given."""


class DecoderFactory(Protocol):
    """Of one loaded export: keeps what outlives a request."""

    @property
    def takes_empty_prompts(self) -> bool:
        """Whether a row of a prompt may have no tokens."""

    @property
    def takes_candidates(self) -> bool:
        """Whether `start` gives a `CandidateDecoder` where `prompt_lookup_num_tokens` is set."""

    def start(self, request: GenerationRequest) -> Decoder:
        """What decodes `request`, with the encoder's states where there is one and room for
        `max_new_tokens`.

        Raises:
            UsageError: for more than there is memory for.
            ValueError: for what onnxruntime cannot compute.
        """

    def generate(self, request: GenerationRequest) -> tuple[np.ndarray, np.ndarray | None] | None:
        """The whole search, as `Search.result`, where the graphs do it by themselves; `None` where
        `start` is to be used."""


@dataclass(frozen=True)
class LoadedExport:
    """An export whose graphs are open, as a target makes its decoders of it.

    Args:
        config: the checkpoint's.
        sessions: by role.
        make_session: as `Sessions.make`, for graphs whose axes are to be fixed.
        encode: the ids and the mask (B, S) of a source -> what the encoder returns, by name.
    """

    config: dict
    specs: dict[str, GraphSpec]
    sessions: dict[str, Session]
    make_session: Callable[[str, dict[str, int]], Session]
    device: str
    encode: Callable[[np.ndarray, np.ndarray], dict[str, np.ndarray]]


def check_memory(request: GenerationRequest, vocab_size: int, cache_bytes: int) -> None:
    """Two copies of the logits must fit into this machine's memory, beside `cache_bytes`.

    Raises:
        UsageError: saying how much they take, and how much there is.
    """
    options = request.options
    rows = len(request.input_ids) * options.rows_per_input
    needed = 2 * 4 * rows * vocab_size + cache_bytes
    most = memory()
    if needed > most:
        of_each = (
            f"{options.rows_per_input} sequences or beams of each and "
            f"max_new_tokens={options.max_new_tokens}"
        )
        found = f"{len(request.input_ids)} inputs, {of_each}"
        raise UsageError(
            f"{found} take {needed / 1e9:.0f} GB or more, expected at most the {most / 1e9:.0f} "
            f"GB here"
        )


@functools.cache
def memory() -> float:
    """Bytes of memory of this machine, infinite where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf


def position_bytes(spec: GraphSpec) -> int:
    """What one token of one row takes in the caches of a decoder graph."""
    caches = [
        tensor
        for tensor in spec.inputs
        if tensor.name.startswith("past_key_values") and ".encoder." not in tensor.name
    ]
    # All but rows and positions is fixed: the heads and their width.
    sizes = [math.prod(size for size in tensor.shape if isinstance(size, int)) for tensor in caches]
    return sum(
        size * (2 if "16" in tensor.dtype else 4)
        for size, tensor in zip(sizes, caches, strict=True)
    )


def next_input_name(name: str) -> str:
    """The input by which the next step takes the output `name`."""
    return name.removeprefix("next_").replace("present", "past_key_values")


def cross_states(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The encoder's outputs under the names by which the decoder takes them."""
    return {next_input_name(name): states for name, states in outputs.items()}
