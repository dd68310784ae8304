"""The numbers of workers, threads, slots and tokens that the size of a model gives, and the checks
of requests against them."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError, TooLong, UsageError
from ..inference.export_info import ExportInfo
from ..inference.inputs import position_limit
from ..inference.logits import row_seed
from ..inference.options import Options
from ..inference.rows import SlotSize, position_bytes, slot_shape
from ..specs.caches import cache_tensors, key_heads
from .inputs import GenerationInput, check_options, check_row

# Multiplications per token up to which workers have one thread by default. Matrix multiplications
# of larger models are worth several threads.
# Measured with two cores and 64 rows, two workers of one thread against one worker of two threads:
# twice the tokens per second at 1.4 million multiplications, and 1.4 times at 45 million. A single
# request takes longer at 45 million.
SMALL_COST = 100e6
# multiplications per prefill chunk between two steps: a few hundredths of a second on one core
CHUNK_COST = 2e9
ENCODE_COST = 5e9  # multiplications per batch of sources, which are encoded in parallel
# Multiplications per step up to which one batch is better than two half as large. Measured with two
# workers at half of the highest load: at 1.4 million multiplications per token the 95th percentile
# of latencies is a third lower, at 45 million one batch would make it a third higher.
STEP_COST = 35e6
# Multiplications per step that ended rows may cost which wait for others in their place. Closing a
# gap costs as much as a step of several rows of a small model. Measured at 1.4 million
# multiplications per token: 1.03 to 1.08 times the texts per second of a call, and 1.02 to 1.07
# times the requests per second of a server.
GAP_COST = 12e6
SOURCE_LENGTHS = (64, 512)  # minimum and maximum source tokens that are encoded at a time
CHUNK_LENGTHS = (16, 256)  # minimum and maximum prompt tokens per prefill chunk
MAX_SLOTS = 64  # of all workers together
MAX_SLOT_BYTES = 2**30  # memory for the slots of a worker if their number is not set
DEFAULT_LENGTH = 512  # tokens per slot, at most


# Slots besides those of the setting: a part per four, at most 8. Only requests that fit into them
# use them, so these never wait for larger ones.
SPARE_SHARE, MAX_SPARE = 4, 8


@dataclass(frozen=True)
class Pace:
    """The amounts of new inputs that are read between two steps of rows that run.

    Args:
        chunk: the number of tokens of a prompt.
        max_source_tokens: the maximum number of tokens of sources, padding included.
        preferred_rows: the number of rows from which on other batches start beside this one.
        max_gaps: the number of ended rows that may wait for others to take their places.
    """

    chunk: int = 0
    max_source_tokens: int = 0
    preferred_rows: int = 0
    max_gaps: int = 0

    @classmethod
    def of(cls, config: dict) -> "Pace":
        """Return the pace of a model with the fields `config` of config.json: less for larger
        models, whatever the load, because other lengths give other bits.

        A chunk is a power of two. Decoder-only models have no preferred rows, as several workers
        read prompts faster.
        """
        cost = token_cost(config)
        chunk = 2 ** int(math.log2(max(CHUNK_COST / cost, 1)))
        return cls(
            between(CHUNK_LENGTHS, chunk),
            between(SOURCE_LENGTHS, int(ENCODE_COST / cost)),
            int(STEP_COST / cost) if "decoder_layers" in config else 0,
            int(GAP_COST / cost),
        )


def between(limits: tuple[int, int], number: int) -> int:
    """Return `number`, or the nearer one of `limits`, its minimum and maximum."""
    minimum, maximum = limits
    return min(maximum, max(minimum, number))


def spare_rows(rows: int) -> int:
    """Return the number of slots besides `rows`."""
    return min(MAX_SPARE, rows // SPARE_SHARE)


@dataclass(frozen=True)
class Arrangement:
    """The number of `workers` that serve a model, and the CPU `threads` of each."""

    workers: int
    threads: int

    def __str__(self) -> str:
        return (
            f"{self.workers} worker{'s' * (self.workers > 1)} of {self.threads} "
            f"thread{'s' * (self.threads > 1)}"
        )


def token_cost(config: dict) -> float:
    """Return the number of multiplications per token by weights of the decoder, or of an encoder.

    `config` are the fields of the model's config.json.
    """
    layers = config.get("decoder_layers") or config["num_hidden_layers"]
    width = config["hidden_size"]
    # of queries and outputs, also in cross-attention, and of keys and values of a new token
    heads = config["num_attention_heads"] * (4 if "decoder_layers" in config else 2)
    attention = width * config["head_dim"] * (heads + 2 * key_heads(config))
    feed_forward = width * config["intermediate_size"] * (3 if config.get("gated") else 2)
    embeddings = config.get("embedding_size") or width
    projections = 0 if embeddings == width else 2 * width * embeddings
    return (
        layers * (attention + feed_forward) + projections + embeddings * config.get("vocab_size", 0)
    )


def arrange_workers(config: dict, threads: int, workers: int | None = None) -> Arrangement:
    """Return the number of workers that share these CPU `threads`, and of the threads of each.

    By default a large model gets one worker with all threads, and a small one a worker for each
    thread. `config` are the fields of config.json.

    Raises:
        UsageError: if there are more workers than threads.
    """
    if workers is None:
        workers = threads if token_cost(config) <= SMALL_COST else 1
    if workers > threads:
        raise UsageError(
            f"workers is {workers}, expected at most {threads}, the number of threads", "workers"
        )
    return Arrangement(workers, threads // workers)


def offline_workers(config: dict, threads: int) -> int:
    """Return the number of workers for one call of `generate` of a model with a step graph.

    Small models and seq2seq models get a worker for each of `threads`. A large decoder-only model
    gets one worker with all threads: sessions with fewer threads would load its weights a second
    time. `config` are the fields of config.json.
    """
    is_large_decoder = "decoder_layers" not in config and token_cost(config) > SMALL_COST
    return 1 if is_large_decoder else threads


def slot_bytes(info: ExportInfo, size: SlotSize) -> int:
    """Return the bytes that the caches of one slot take. `size.rows` is ignored."""
    spec = info.specs[info.step or "decoder"]
    sources = cache_tensors(spec, is_source=True)
    source = sum(4 * math.prod(slot_shape(tensor, SlotSize(1, 1, 1))) for tensor in sources)
    return size.length * position_bytes(spec) + size.source * source


def slots_per_worker(workers: int, slot_bytes: int) -> int:
    """Return the default number of slots of each of `workers`: 64 together, at most 1 GiB per
    worker, but at least one.

    `slot_bytes` is the memory of one slot.
    """
    return max(1, min(MAX_SLOTS // workers, MAX_SLOT_BYTES // slot_bytes))


def shutting_down() -> RequestError:
    """Return the error, status 503, of a request to a server that is shutting down."""
    return RequestError(503, "the server is shutting down: ask another one", retry_after=5)


class Admission:
    """The limits of one export, and the checks of requests against them. It opens no graph.

    Args:
        info: the export.
        workers: the number of workers, each with its own batch.
        threads: CPU threads per worker.
        slots: the number of rows that all workers run at once, rounded down to a multiple of
            `workers`. By default 64, or fewer if a worker's slots would take more than 1 GiB.
        max_source: the maximum number of tokens of a source.
        max_length: the maximum number of tokens of a prompt with its new tokens. The default of
            both is the number of positions of the model, at most 512. Learned positions are always
            a limit.
        max_waiting: the maximum number of rows in the queue.

    Raises:
        UsageError: if there are fewer slots than workers.
    """

    def __init__(
        self,
        info: ExportInfo,
        workers: int = 1,
        threads: int = 1,
        slots: int | None = None,
        max_source: int | None = None,
        max_length: int | None = None,
        max_waiting: int = 256,
    ):
        self.info = info
        self.arrangement = Arrangement(workers, threads)
        source = self.slot_length(max_source) if "encoder" in info.specs else 0
        size = SlotSize(1, source, self.slot_length(max_length))
        if slots is None:
            slots = workers * slots_per_worker(workers, slot_bytes(info, size))
        if slots < workers:
            raise UsageError(
                f"{slots} slots are fewer than {workers} workers, expected at least one for each"
            )
        self.slot_size = dataclasses.replace(size, rows=slots // workers)
        self.max_waiting = max_waiting

    def slot_length(self, length: int | None) -> int:
        """Return the number of tokens of a slot: `length`, or by default the model's positions up
        to 512.

        Learned positions are always a limit.
        """
        length = length or min(self.info.config["max_position_embeddings"], DEFAULT_LENGTH)
        return min(length, position_limit(self.info.config) or length)

    @property
    def slots(self) -> int:
        """Number of slots of all workers; each holds one running row."""
        return self.arrangement.workers * self.slot_size.rows

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots of all workers, spare ones too, once rows have used all of them."""
        rows = self.slot_size.rows
        rows += spare_rows(rows) if self.info.step else 0
        return self.arrangement.workers * rows * slot_bytes(self.info, self.slot_size)

    def describe(self) -> str:
        """Return one line about the batching mode, workers and slots, for the log."""
        threads = f"{self.arrangement}, {self.slot_size.rows} rows each{self.beams_note()}"
        if self.info.step is None:
            return (
                "static batches grouped by length (the export has no step for continuous "
                f"batching), {threads}"
            )
        return f"continuous batching, {threads} of {self.describe_slots()} of slots"

    def beams_note(self) -> str:
        """Return text for the log if the default beams do not fit into the slots of a worker, else
        `""`."""
        num_beams = self.info.defaults.get("num_beams") or 1
        if num_beams <= self.slot_size.rows:
            return ""
        return f" (too few for the {num_beams} beams of generation_config.json)"

    def describe_slots(self) -> str:
        """Return the tokens per slot and the memory of all slots, as text."""
        size = self.slot_bytes / 1e6
        source = f"{self.slot_size.source} source tokens and " if self.slot_size.source else ""
        return f"{source}{self.slot_size.length} tokens, {size:.0f} MB"

    def admit(
        self,
        input_ids: Sequence[int],
        options: dict[str, Any] | Options,
        top_logprobs: int | None = None,
        scores_prompt: bool = False,
        place: Sequence[int] = (),
    ) -> GenerationInput:
        """Check one input against the limits of the export and return it, ready for an engine.

        Args:
            input_ids: the source of a seq2seq model, or a prompt.
            options: options of `Runtime.generate` by name, or the checked ones of the call.
            top_logprobs: the number of best tokens reported with their log probabilities at each
                position, `None` for no log probabilities.
            scores_prompt: True to report the log probabilities of the prompt's tokens too.
            place: the place of the input in its call, see `logits.row_seed`; by default the first.

        Raises:
            UsageError: for an unknown option, a wrong value, options that cannot be combined, and
                log probabilities with beams.
            ValueError: for no tokens, tokens that the model does not have, and more tokens than
                it has learned positions.
            TooLong: if there are more tokens or rows than the slots hold.
        """
        self.check_lengths(len(input_ids))
        checked = check_options(self.info, options)
        resolved, prompt, source = check_row(self.info, input_ids, checked)
        if top_logprobs is not None and resolved.num_beams > 1:
            raise UsageError(
                f"logprobs do not go with num_beams={resolved.num_beams}, expected num_beams=1",
                "logprobs",
            )
        seed = None if resolved.seed is None else row_seed(resolved.seed, *place)
        admitted = GenerationInput(resolved, prompt, source, top_logprobs, scores_prompt, seed=seed)
        self.check_slot(admitted)
        return admitted

    def admit_all(
        self, rows: Sequence[Sequence[int]], options: Sequence[Options]
    ) -> list[GenerationInput]:
        """Check all `rows` of a call, as `admit` does, each with its checked `options`."""
        return [
            self.admit(row, checked, place=[place])
            for place, (row, checked) in enumerate(zip(rows, options, strict=True))
        ]

    def check_lengths(self, length: int) -> None:
        """Check that `length` tokens of a source, or of a prompt without an encoder, fit into a
        slot.

        Raises:
            TooLong: if they do not.
        """
        is_source = self.slot_size.source > 0
        limit = self.slot_size.source if is_source else self.slot_size.length
        if length > limit:
            name = "source" if is_source else "prompt"
            raise TooLong(f"the {name} has {length} tokens, expected at most {limit}")

    def check_slot(self, admitted: GenerationInput) -> None:
        """Check that the prompt with its new tokens fits into a slot, and its rows into a worker's
        slots.

        Raises:
            TooLong: if they do not.
        """
        size, max_new_tokens = self.slot_size, admitted.options.max_new_tokens
        length = len(admitted.prompt) + max_new_tokens - 1  # the last token is not fed
        if length > size.length:
            raise TooLong(
                f"{len(admitted.prompt)} tokens at the start and max_new_tokens={max_new_tokens} "
                f"need {length} positions, expected at most {size.length}"
            )
        if admitted.num_rows > size.rows:
            raise TooLong(
                f"one input needs {admitted.num_rows} rows, the larger of num_beams and "
                f"num_return_sequences, expected at most {size.rows}, the slots of a worker"
            )
