"""How a model runs where nothing else is said: by what a token costs."""

import math
from dataclasses import dataclass

# Multiplications of one token, up to which workers of one thread are the default: the products of
# larger models are worth sharing. Measured with two cores and 64 rows, two workers of one thread
# over one worker of two: 1.4 million, twice as many tokens in a second; 45 million, 1.4 times as
# many, where a single request takes longer.
SMALL = 100e6
# What one reading of a prompt may cost beside the running rows: a few hundredths of a second of one
# core.
CHUNK_COST = 2e9
READ_COST = 5e9  # as much of sources, whose tokens are read side by side
SOURCES = (64, 512)  # tokens of sources that are read at a time, the least and the most
CHUNKS = (16, 256)  # tokens of a prompt that are read at a time, the least and the most
ROWS = 64  # of all workers together
# Of one request, for each worker: from so many rows on they run in workers, and so many run at once
# at most.
LEAST_ROWS, MOST_ROWS = 24, 32
MOST_BYTES = 2**30  # of the slots of a worker, where their number is not given


@dataclass(frozen=True)
class Arrangement:
    """`workers`, each with `threads` processor threads."""

    workers: int
    threads: int

    def __str__(self) -> str:
        return (
            f"{self.workers} worker{'s' * (self.workers > 1)} of {self.threads} "
            f"thread{'s' * (self.threads > 1)}"
        )


def cost_of_token(config: dict) -> float:
    """Multiplications by weights for one more token that is generated or read, by the model's
    config.json."""
    layers = config.get("decoder_layers") or config["num_hidden_layers"]
    width = config["hidden_size"]
    attention = (
        width
        * config["num_attention_heads"]
        * config["head_dim"]
        * (6 if "decoder_layers" in config else 4)
    )
    feed_forward = width * config["intermediate_size"] * (3 if config.get("gated") else 2)
    embeddings = config.get("embedding_size") or width
    between = 0 if embeddings == width else 2 * width * embeddings
    return layers * (attention + feed_forward) + between + embeddings * config.get("vocab_size", 0)


def arrangement(
    config: dict, cores: int, workers: int | None = None, threads: int | None = None
) -> Arrangement:
    """For a model with this config.json; `workers` and `threads` as they are given."""
    if workers is None:
        is_small = cost_of_token(config) <= SMALL
        workers = max(1, cores // (threads or 1)) if is_small or threads else 1
    return Arrangement(workers, threads or max(1, cores // workers))


def workers_of_many_rows(config: dict, threads: int) -> int:
    """For a model with a step: one for each thread. Decoders too large to share one graph run it
    with all threads: the sessions of workers with fewer threads would hold its weights a second
    time."""
    shares = "decoder_layers" not in config and cost_of_token(config) > SMALL
    return 1 if shares else threads


def chunk_length(config: dict) -> int:
    """Tokens of a prompt that are read at a time: a power of two, fewer for larger models. It
    depends on the model alone, never on the load: other chunks give other bits."""
    least, most = CHUNKS
    fitting = CHUNK_COST / cost_of_token(config)
    return min(most, max(least, 2 ** int(math.log2(max(fitting, 1)))))


def sources_length(config: dict) -> int:
    """Tokens of sources that are read together between two steps, padding included."""
    least, most = SOURCES
    return min(most, max(least, int(READ_COST / cost_of_token(config))))


def rows_of_worker(workers: int, slot_bytes: int) -> int:
    """Slots of each of `workers`, as many as memory for each allows."""
    return max(1, min(ROWS // workers, MOST_BYTES // slot_bytes))
