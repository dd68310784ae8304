"""A run whose shards are computed on a Ray cluster by Ray Data. The calling process reads and
writes the files.

A reader on the node of that process yields the shards in order. Each worker opens the export and
returns the results. Ray Data places the workers, keeps the order, and retries the shards of a
worker that died.
"""

import contextlib
import logging
import pickle
import socket
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError
from ..text_runtime import open_runtime
from .predictions import Predictions
from .progress_bar import Progress
from .results import Results, compute
from .rows import Row
from .shards import Input, Shard, absolute

try:
    import pyarrow
    import ray
    import ray.data
except ImportError:
    ray = None

LOG_LEVELS = {  # of Ray Data's loggers; its errors are raised, so they need no log line
    "ray.data": logging.WARNING,
    "ray.data.exceptions": logging.CRITICAL,
    "ray.data._internal.execution.streaming_executor_state": logging.CRITICAL,
    "ray.data._internal.progress": logging.ERROR,
}
PATIENCE = 10  # seconds to connect to an address
TRIES = 3  # retries of a shard whose worker died
AHEAD = 2  # shards per worker in flight, so that a worker does not wait for the next


class ShardId(NamedTuple):
    """The number of a file, the number of a shard in it, and the digest of the shard."""

    file: int
    number: int
    digest: str


@dataclass(frozen=True)
class Recipe:
    """The arguments from which a worker makes the `Predictions` of a run. `settings` are all their
    fields but the runtime. The facts of the predictions must be `facts`."""

    directory: Path
    arguments: dict[str, Any]
    settings: dict[str, Any]
    facts: dict

    def make(self) -> Predictions:
        """Return the predictions, with the export opened on the node of a worker.

        Raises:
            FileNotFoundError: if the export is not there.
            ValueError: if the export, or a setting or version on this node, differs from `facts`.
        """
        node = socket.gethostname()
        if not self.directory.is_dir():
            raise FileNotFoundError(
                f"{self.directory} is not on the node {node}, expected the export on every node"
            )
        runtime = open_runtime(self.directory, **self.arguments)
        predictions = Predictions(runtime, **self.settings)
        for name, value in predictions.facts().items():
            if value != self.facts[name]:
                expected = f"expected {self.facts[name]!r} as here"
                raise ValueError(
                    f"{self.directory} on the node {node} has {name} {value!r}, {expected}"
                )
        return predictions


class PredictionWorker:
    """A process of Ray Data that computes shards."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.predictions: Predictions | None = None

    def __call__(self, table: "pyarrow.Table") -> "pyarrow.Table":
        shard_id, first, rows = unpack(table)
        result: Results | Exception
        try:
            # not before, as Ray tries again what fails while a worker starts
            if self.predictions is None:
                self.predictions = self.recipe.make()
            result = compute(self.predictions, rows, first)
        except (OSError, ValueError, MemoryError, ImportError) as error:
            result = error
        return pack((shard_id, result))


@dataclass
class Cluster:
    """The `Work` of a run on a cluster. Callers request shards in order and skip finished ones. The
    results of skipped shards are dropped."""

    inputs: Sequence[Input]
    shard_lines: int
    recipe: Recipe
    after: int = 0  # the number of the shard that comes next in the file
    pairs: Generator[tuple[ShardId, Results | Exception], None, None] | None = None

    def __call__(self, file: int, shard: Shard, rows: list[Row], bar: Progress) -> Results:
        """Return the results of `shard` of the file with the number `file`, computed by a worker.

        `rows` are the rows of the shard as the caller read them. `bar` advances by their number.

        Raises:
            OSError: for errors of Ray.
            ValueError: if the file changed between the caller's read and the read for the workers.
            Exception: the error of the worker, such as ValueError or MemoryError.
        """
        shard_id = ShardId(file, shard.number, shard.digest)
        if self.pairs is None or shard_id.number not in (0, self.after):
            self.close()
            self.pairs = self.results(shard_id[:2])
        self.after = shard_id.number + 1
        try:
            pair = next((pair for pair in self.pairs if pair[0][:2] >= shard_id[:2]), None)
        except (ray.exceptions.RayError, ray.data.exceptions.SystemException) as error:
            raise OSError(f"the Ray cluster could not compute a shard: {error}") from error
        if pair is None or pair[0] != shard_id:
            raise ValueError(
                f"{self.inputs[file].path} changed while it was read, expected an unchanged file"
            )
        result = pair[1]
        if isinstance(result, Exception):
            raise result
        bar.update(len(rows))
        return result

    def close(self) -> None:
        if self.pairs is not None:
            self.pairs.close()

    def results(
        self, start: tuple[int, int]
    ) -> Generator[tuple[ShardId, Results | Exception], None, None]:
        """Yield (id, results or error) of the shards from `start` on, in order. `start` has the
        numbers of a file and of a shard."""
        with warnings.catch_warnings(), ray.data.DataContext.current(settings()):
            # of max_task_retries, which has no other place yet
            warnings.simplefilter("ignore", DeprecationWarning)
            shards = ray.data.from_items([0]).map_batches(
                read,
                fn_args=[self.inputs, self.shard_lines, start],
                batch_format="pyarrow",
                num_cpus=0,
                label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
            )
            results = shards.map_batches(
                PredictionWorker,
                batch_size=1,
                batch_format="pyarrow",
                fn_constructor_args=[self.recipe],
                compute=ray.data.ActorPoolStrategy(max_tasks_in_flight_per_actor=AHEAD),
                max_task_retries=TRIES,
                **resources(self.recipe.arguments),
            )
        for table in results.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield unpack(table)


def read(
    _: "pyarrow.Table", inputs: Sequence[Input], shard_lines: int, start: tuple[int, int]
) -> Iterator["pyarrow.Table"]:
    """Yield the shards of the files `inputs`, each packed into a table with one row: its id, the
    number of its first line, and its rows.

    Ray Data calls this once, on this node, and consumes shards as workers need them. The first
    argument is not used. The shards begin at `start`, the numbers of a file and of a shard in it.
    Rows have no records, which only the calling process needs. Shards after the damage in a file
    are left out, and the next file follows: the calling process reads the file too and reports the
    error.
    """
    for file, source in enumerate(inputs[start[0] :], start[0]):
        with contextlib.suppress(ValueError, OSError):
            for shard in source.shards(shard_lines):
                if (file, shard.number) >= start:
                    rows = [row._replace(record=None) for row in shard.rows()]
                    yield pack((ShardId(file, shard.number, shard.digest), shard.first, rows))


def settings() -> Any:
    """Return a copy of Ray Data's settings: each shard is a block, blocks stay in order, and Ray
    shows no progress bars."""
    context = ray.data.DataContext.get_current().copy()
    context.target_max_block_size = 1
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    return context


def resources(arguments: dict[str, Any]) -> dict[str, int]:
    """Return the CPUs and GPUs that Ray reserves for a worker whose runtime has these
    `arguments`."""
    return {"num_cpus": arguments["threads"], "num_gpus": 0 if arguments["device"] == "cpu" else 1}


def pack(value: object) -> "pyarrow.Table":
    return pyarrow.table({"pickled": pyarrow.array([pickle.dumps(value)], pyarrow.large_binary())})


def unpack(table: "pyarrow.Table") -> Any:
    [value] = table["pickled"].to_pylist()
    return pickle.loads(value)


@contextlib.contextmanager
def cluster(
    address: str, predictions: Predictions, inputs: Sequence[Input], shard_lines: int
) -> Iterator[Cluster]:
    """Yield a function that computes shards of `inputs` on the Ray cluster at `address`.

    `predictions` is what the workers compute, and a shard has at most `shard_lines` lines. The
    address is "auto", "local" (a new cluster on this machine), or HOST:PORT of a cluster of which
    this machine is a node. At the end of the block the process leaves the cluster.

    Raises:
        ImportError: without Ray Data.
        ConnectionError: where no cluster answers.
        UsageError: for an address of Ray Client, and for more threads than any node has CPUs.
    """
    if ray is None:
        raise ImportError("Ray Data is not installed: pip install 'vanilla-transformer[cpu,ray]'")
    if "://" in address:
        raise UsageError(
            f"ray is {address!r}, expected auto, local or HOST:PORT: run this on a node of the "
            "cluster"
        )
    for name, level in LOG_LEVELS.items():
        logging.getLogger(name).setLevel(level)
    try:
        if address not in ("auto", "local"):  # as Ray asks for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address!r}, expected auto, local or HOST:PORT: {error}"
        ) from None
    try:
        check_cpus(predictions.runtime.runtime.threads)
        runtime = predictions.runtime.runtime
        settings = {**vars(predictions)}
        del settings["runtime"]
        recipe = Recipe(runtime.info.directory, runtime.arguments, settings, predictions.facts())
        with contextlib.closing(Cluster([*map(absolute, inputs)], shard_lines, recipe)) as work:
            yield work
    finally:
        ray.shutdown()


def check_cpus(threads: int) -> None:
    """Raise UsageError if no node has as many CPUs as a worker has `threads`: the worker would wait
    forever."""
    max_threads = max(int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])
    if threads > max_threads:
        raise UsageError(
            f"threads is {threads}, expected at most {max_threads}, the CPUs of the cluster's "
            "largest node"
        )
