"""A model of open graphs, which runs one batch at a time."""

import dataclasses
import functools
import os
import threading
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..errors import UsageError
from ..heads import HEADS
from ..inference.config import check_config
from ..inference.devices import require, require_onnxruntime
from ..inference.export_info import ExportInfo, open_export_info
from ..inference.rows import RowsFactory
from ..inference.session import LoadedExport, Session
from ..shared.options import is_int64
from ..specs.alignment import ROLE as ALIGNMENT
from ..targets.registry import get_target, known_targets
from ..targets.target import Target
from .inputs import check_generates

if find_spec("onnxruntime") is None:  # it is imported when graphs are loaded
    raise ImportError(
        "onnxruntime is not installed: pip install 'vanilla-transformer[cpu]', or [gpu] for "
        "onnxruntime-gpu"
    )

MAX_THREADS = 1024
CANDIDATES = "candidates"
# roles of the graphs that are opened when they are first needed; an export may lack them
ON_FIRST_USE = ("step", CANDIDATES, ALIGNMENT)


def open_export(
    directory: str | os.PathLike, dtype: str | None = None, hashes: bool = True
) -> ExportInfo:
    """Return the facts of the export in `directory`, with the specs of its graphs for `dtype`.

    Without `dtype`, it is the default dtype of the export. No graph is opened. Threads still check
    the hashes of graphs and weights. `check_unchanged` of the result waits for them. Without
    `hashes`, only their sizes are checked, for callers that open no graph.

    Raises:
        FileNotFoundError: if the directory, its manifest or a listed file is missing.
        NotADirectoryError: if `directory` is a file.
        ValueError: for an invalid manifest or config, an unknown target, an export written with
            `--generate`, a config that was changed, and a graph of another size than listed.
        UsageError: for a dtype that the export does not have.
    """
    info = open_export_info(directory, hashes)
    if (mode := info.manifest.get("generate")) is not None:
        problem = f"{info.directory} was exported with --generate {mode}"
        raise ValueError(f"{problem}: run its graph in onnxruntime, or export without --generate")
    if info.architecture not in HEADS:
        problem = f"{info.directory} has the architecture {info.architecture!r}"
        raise ValueError(f"{problem}, expected one of {', '.join(HEADS)}")
    target = find_target(info)
    if dtype is not None and dtype not in info.dtypes:
        raise UsageError(f"{directory} has no dtype {dtype!r}, expected one of {info.dtypes}")
    check_config(info.config, info.directory / "config.json")
    opened = dataclasses.replace(info, dtype=dtype or info.dtypes[0])
    activations = info.manifest["activations"]
    specs = target.graph_specs(info.config, info.architecture, opened.dtype, activations)
    specs = {
        role: spec
        for role, spec in specs.items()
        if role not in ON_FIRST_USE or spec.file in info.manifest["files"]
    }
    opened = dataclasses.replace(opened, specs=specs)
    _ = opened.defaults  # which raises for values that generation_config.json cannot have
    return opened


def find_target(info: ExportInfo) -> Target:
    """Return the target of an export. Raises ValueError for one that is not registered, or that
    lacks a dtype of the export."""
    name = info.manifest["target"]
    try:
        target = get_target(name)
    except ValueError as error:
        raise ValueError(f"{info.directory} is for the target {name!r}: {error}") from None
    for dtype in info.dtypes:
        if dtype not in target.dtypes:
            problem = f"{info.directory} is for the target {name!r} with dtype {dtype!r}"
            raise ValueError(f"{problem}, expected one of: {known_targets()}")
    return target


def check_threads(threads: Any) -> None:
    """Raise UsageError unless `threads` is None or a whole number from 1 to 1024."""
    if threads is not None and not (is_int64(threads) and 1 <= threads <= MAX_THREADS):
        raise UsageError(f"threads must be a whole number from 1 to {MAX_THREADS}, got {threads!r}")


def main_roles(info: ExportInfo) -> list[str]:
    """Return the roles of all graphs but those that are opened when they are first needed."""
    return [role for role in info.specs if role not in ON_FIRST_USE]


def worker_roles(info: ExportInfo) -> list[str]:
    """Return the roles of the graphs that workers run: the encoder and the graph of continuous
    batching, or without it all main graphs."""
    if info.step is None:
        return main_roles(info)
    return [role for role in info.specs if role in ("encoder", info.step)]


def weight_bytes(info: ExportInfo) -> int:
    """Return the size of the graphs that workers run, and of their weights."""
    run = {info.specs[role].file for role in worker_roles(info)}
    variants = info.manifest["variants"].values()
    graphs = {graph for variant in variants for graph in variant["graphs"].values()}
    # a graph that is not run may have weights of its own, whose names begin with its name
    others = tuple(graphs - run)
    return sum(
        facts["bytes"]
        for name, facts in info.manifest["files"].items()
        if ".onnx" in name and not name.startswith(others)
    )


def open_for_workers(info: ExportInfo, threads: int) -> "OnnxModel":
    """Open the graphs that workers run, each with this number of `threads`, and return the model.

    Raises:
        ImportError: if onnxruntime is too old.
        UsageError: for a number of threads other than 1 to 1024.
        FileNotFoundError, ValueError: for a file that is missing or changed, and for a graph that
            onnxruntime cannot load or that does not fit the config.
        OSError: if the target's device is a GPU that this machine lacks or cannot use.
    """
    require_onnxruntime()
    check_threads(threads)
    device = find_target(info).default_device
    if device != "cpu":
        require(device, info.manifest["activations"])
    return OnnxModel(info, threads, device=device).open(worker_roles(info))


class OnnxModel:
    """The graphs of an export, which are opened by role: by `open`, or when they are first needed.

    Args:
        info: see `open_export`.
        threads: CPU threads per operator.
        settings: other settings of `LoadedExport` by name, such as `device`.
    """

    def __init__(self, info: ExportInfo, threads: int, **settings: Any):
        self.info = info
        self.threads = threads
        self.settings = settings
        # without a method of this model, as references in a circle would keep its memory
        target_options = find_target(info).provider_options
        self.loaded = LoadedExport(info, threads, target_options, **settings)
        self.opening = threading.Lock()
        self.is_closed = False

    @property
    def device(self) -> str:
        return self.loaded.device

    @property
    def max_tokens(self) -> int:
        """Maximum tokens in one run of a full-sequence graph."""
        return self.loaded.max_tokens

    def open(self, roles: Iterable[str]) -> "OnnxModel":
        """Open those graphs of `roles` that are not open yet, and return this model.

        Weights are compared with their hashes while onnxruntime loads them. Of a graph whose
        sessions are made on demand, only the file is read.

        Raises:
            FileNotFoundError, ValueError: for a file that is missing or changed, and for a graph
                that onnxruntime cannot load or that does not fit the config.
            OSError: if the graphs do not run on the device of this model.
        """
        self.check_open()
        self._check_listed()
        done = self.loaded.sessions.keys() | self.loaded.contents.keys()
        if not (missing := sorted(set(roles) - done)):
            return self
        on_demand = [role for role in missing if self.info.specs[role].is_on_demand]
        try:
            self.info.check_listed()
            self.info.check_hashes(".onnx")
            self.loaded.contents.update((role, self._content(role)) for role in on_demand)
            self.loaded.open([role for role in missing if role not in on_demand])
        finally:  # before an error that only follows from other weights
            self.info.check_unchanged()
        return self

    def close(self) -> None:
        """Free the memory of the graphs, once no batch runs them any more. Calling it again changes
        nothing."""
        self.is_closed = True
        # batches that run have the other ones
        self.loaded = dataclasses.replace(self.loaded, sessions={}, contents={})
        vars(self).pop("factory", None)

    def check_open(self) -> None:
        """Raise ValueError if this model is closed."""
        if self.is_closed:
            raise ValueError(
                f"the runtime of {self.info.directory} is closed, expected an open one"
            )

    def _check_listed(self) -> None:
        info = self.info
        for role, spec in info.specs.items():
            if role not in ON_FIRST_USE and spec.file not in info.manifest["files"]:
                raise ValueError(
                    f"{info.directory}/manifest.json does not list {spec.file}: export again"
                )

    def _content(self, role: str) -> bytes:
        content = self.info.read(self.info.specs[role].file)
        assert content is not None  # the manifest lists it
        return content

    def session(self, role: str) -> Session:
        """Return the session of the graph of `role`, which is opened if it is not yet."""
        with self.opening:  # several batches may need it at the same time
            if role not in self.loaded.sessions:
                self.open([role])
        return self.loaded.sessions[role]

    def open_candidates(self) -> None:
        """Open the graph that returns the best tokens of beams, if the export has one. Beam search
        then uses it.

        A batch that still runs when the model is closed goes on with logits.
        """
        if CANDIDATES in self.info.specs and not self.is_closed:
            self.session(CANDIDATES)

    def with_threads(self, threads: int) -> "OnnxModel":
        """Return a model of the same export whose graphs use this number of CPU `threads`, or this
        model if it uses that number already.

        The new model has no open graphs. Call `open` before several threads use it: otherwise
        graphs are opened on first use. This model stays as it is.
        """
        self.check_open()
        return self if threads == self.threads else OnnxModel(self.info, threads, **self.settings)

    def outputs(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs of the encoder by name, for inputs `feeds` by name that are checked
        already."""
        self.session("encoder")
        return self.loaded.outputs(feeds)

    @functools.cached_property
    def factory(self) -> RowsFactory:
        """The factory of rows to generate. The graphs that it runs must be open.

        A model that does not generate raises ValueError.
        """
        self.check_open()
        check_generates(self.info)
        return find_target(self.info).open(self.loaded)
