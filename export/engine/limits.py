"""The numbers of workers, threads, slots and tokens that the size of a model gives."""

import math
from dataclasses import dataclass

from ..errors import RequestError, UsageError
from ..inference.export_info import ExportInfo
from ..inference.rows import SlotSize, position_bytes, slot_shape
from ..specs.caches import cache_tensors, key_heads

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
SOURCE_LENGTHS = (64, 512)  # minimum and maximum source tokens that are encoded at a time
CHUNK_LENGTHS = (16, 256)  # minimum and maximum prompt tokens per prefill chunk
MAX_SLOTS = 64  # of all workers together
MAX_SLOT_BYTES = 2**30  # memory for the slots of a worker if their number is not set


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
    """

    chunk: int = 0
    max_source_tokens: int = 0
    preferred_rows: int = 0

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
