"""Which way of an int8 product is the fastest on this machine: `export --tune`.

The candidates are `INT8_PRODUCTS`. One counts if this processor has what it needs, if it loses no more of the weights than the
default does, and if no row's result depends on how many rows stand beside it.
"""

import dataclasses
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from .passes import pipeline
from .passes.quantization import DEFAULT, INT8_PRODUCTS, TUNED, holds_quality, quantize_products
from .runtime.devices import processors
from .runtime.processor import Processor, check_processor
from .runtime.session import SPIN_MICROSECONDS

FILE = "tuning.json"
VERSION = 1
GOALS = {"latency": (1, 2, 4, 8), "throughput": (32,)}  # rows of a batch that are timed
KINDS = {"steps": 1, "sequences": 16}  # what a graph reads of a row: a token, or a whole sequence of about so many
COMPANY = 64  # rows of a batch that must have the same bits as each alone
LEAD = 0.95  # of the default's time, which a candidate must stay below
FULL = "row-full"  # the default where the processor can: as fast, and closer to the weights
ROUNDS = 15
COPIES, BYTES = 16, 8_000_000  # of weights that a timed graph reads: so that they come from memory, as a model's do


@dataclass
class Tuning:
    """The ways of products by kind of graph and by shape, "KxN": choices of one machine.

    Args:
        goal: one of `GOALS`.
        processor: where the times were taken, with `threads` threads of `onnxruntime`.
        is_open: whether shapes that are not among `choices` are timed now.
    """

    goal: str
    processor: str
    onnxruntime: str
    threads: int
    choices: dict[str, dict[str, str]]
    is_open: bool = False

    @classmethod
    def start(cls, goal: str) -> "Tuning":
        choices: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
        return cls(goal, Processor.here().name, onnxruntime.__version__, processors(), choices, is_open=True)

    @classmethod
    def read(cls, path: str | os.PathLike) -> "Tuning":
        """What `write` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is not a tuning file, or one of another version.
            OSError: if its choices give wrong numbers on this processor. Another processor or onnxruntime than that of the file
                gets a UserWarning.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no tuning file {path}, expected {', '.join(GOALS)} or a {FILE} that one of them wrote")
        try:
            found = json.loads(Path(path).read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}, expected a {FILE}") from None
        version = found.get("version") if isinstance(found, dict) else None
        if version != VERSION:
            raise ValueError(
                f"{path} is a tuning file of version {version!r}, expected {VERSION}: tune again, nothing is written"
            )
        fields = {name: value for name, value in found.items() if name != "version"}
        check_fields(path, fields)
        tuning = cls(**fields)
        check_processor(path, tuning.needs, tuning.processor)
        if tuning.onnxruntime != onnxruntime.__version__:
            found = f"{path} was tuned with onnxruntime {tuning.onnxruntime}, this one is {onnxruntime.__version__}"
            warnings.warn(f"{found}: its choices are taken as they are, and others may be faster: tune again", stacklevel=2)
        return tuning

    def write(self, directory: Path) -> None:
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name != "is_open"}
        fields["choices"] = {kind: dict(sorted(ways.items())) for kind, ways in self.choices.items()}
        text = json.dumps({"version": VERSION, **fields}, indent=2)
        (directory / FILE).write_text(text + "\n", encoding="utf-8")

    @property
    def needs(self) -> list[str]:
        """Instructions without which a choice gives wrong numbers, each "a or b"."""
        ways = {name for choices in self.choices.values() for name in choices.values()}
        return sorted({" or ".join(needs) for name in ways if (needs := INT8_PRODUCTS[name].needs)})

    def facts(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {"tuned_on": self.processor, "needs": self.needs}

    def chooser(self, role: str) -> Callable[[np.ndarray], str]:
        """A matrix (K, N) of the graph of `role` -> the name of its product's way: the default where that of the shape would
        lose more of these weights. ValueError for a shape that was not timed, unless `is_open`."""
        kind = "sequences" if role == "encoder" else "steps"
        choices = self.choices[kind]

        def choose(matrix: np.ndarray) -> str:
            shape = "x".join(map(str, matrix.shape))
            if shape not in choices and self.is_open:
                choices[shape] = best_way(matrix, KINDS[kind], GOALS[self.goal])
            if shape not in choices:
                known = ", ".join(choices) or "none"
                raise ValueError(f"{FILE} has no product {shape} for {kind}, it has {known}: tune with this model")
            return choices[shape] if holds_quality(choices[shape], matrix) else DEFAULT

        return choose


def check_fields(path: str | os.PathLike, fields: dict[str, Any]) -> None:
    """Raises ValueError unless `fields` are those of a `Tuning`."""
    expected = {"goal": "str", "processor": "str", "onnxruntime": "str", "threads": "int", "choices": "dict"}
    if (found := {name: type(value).__name__ for name, value in fields.items()}) != expected:
        raise ValueError(f"{path} has fields of the types {found}, expected {expected}: tune again")
    if fields["goal"] not in GOALS:
        raise ValueError(f"{path} has the goal {fields['goal']!r:.100}, expected one of {', '.join(GOALS)}: tune again")
    choices = fields["choices"]
    if choices.keys() != KINDS.keys() or not all(isinstance(ways, dict) for ways in choices.values()):
        raise ValueError(f"{path} has choices for {', '.join(choices)}, expected objects for {', '.join(KINDS)}: tune again")
    for name in (name for ways in choices.values() for name in ways.values()):
        if not isinstance(name, str) or name not in INT8_PRODUCTS:
            raise ValueError(f"{path} has the way {name!r:.100}, expected one of {', '.join(INT8_PRODUCTS)}: tune again")


def tuning_of(tune: str | os.PathLike | None) -> Tuning | None:
    """What `tune`, a goal or a file, asks for."""
    if tune is None:
        return None
    return Tuning.start(str(tune)) if tune in GOALS else Tuning.read(tune)


def best_way(matrix: np.ndarray, tokens: int, rows: tuple[int, ...]) -> str:
    """The fastest of those that count for a product with `matrix` (K, N), where a row of a batch has so many `tokens`; the
    default unless the lead, the mean over numbers of `rows`, is large enough."""
    here = Processor.here()
    able = [name for name, way in INT8_PRODUCTS.items() if not way.needs or not here.lacks([" or ".join(way.needs)])]
    ways = [name for name in able if holds_quality(name, matrix)]
    seen_together = min(tokens, 3)
    default = FULL if FULL in ways and keeps_bits(FULL, matrix, seen_together) else DEFAULT
    found = ratios(matrix, default, [name for name in ways if name not in (FULL, DEFAULT)], [count * tokens for count in rows])
    leading = sorted((name for name in found if found[name] <= LEAD), key=found.__getitem__)
    return next((name for name in leading if keeps_bits(name, matrix, seen_together)), default)


def keeps_bits(name: str, matrix: np.ndarray, tokens: int) -> bool:
    """Whether a row of `tokens` gives the same bits alone and among any number of rows up to `COMPANY`, with any threads."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((COMPANY, tokens, len(matrix)), np.float32) * rng.uniform(0.1, 10, (COMPANY, 1, 1)).astype(
        np.float32
    )
    graph = products(matrix, name, 1)
    sessions = [opened(graph, threads) for threads in sorted({1, processors()})]
    alone = np.concatenate([sessions[0].run(None, {"x0": x[row : row + 1]})[0] for row in range(COMPANY)])
    return all(
        np.array_equal(session.run(None, {"x0": x[:count]})[0], alone[:count])
        for count in range(1, COMPANY + 1)
        for session in sessions
    )


def ratios(matrix: np.ndarray, default: str, others: list[str], rows: list[int]) -> dict[str, float]:
    """The time of each of `others` over that of `default`: the geometric mean over numbers of `rows`."""
    if not others:
        return {}
    copies = max(1, min(COPIES, BYTES // matrix.size))
    sessions = {name: opened(products(matrix, name, copies), processors()) for name in (default, *others)}
    found: dict[str, list[float]] = {name: [] for name in others}
    for count in rows:
        x = np.random.default_rng(0).standard_normal((count, 1, len(matrix)), np.float32)
        medians = interleaved(sessions, {f"x{copy}": x for copy in range(copies)})
        for name in others:
            found[name].append(medians[name] / medians[default])
    return {name: statistics.geometric_mean(each) for name, each in found.items()}


def interleaved(sessions: dict[str, onnxruntime.InferenceSession], feeds: dict[str, np.ndarray]) -> dict[str, float]:
    """The median seconds of each session, which take turns; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(1 + ROUNDS):
        for name, session in sessions.items():
            start = time.perf_counter()
            session.run(None, feeds)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def products(matrix: np.ndarray, name: str, copies: int) -> bytes:
    """A graph of so many products of their own inputs (rows, tokens, K) and weights, all `matrix`, in the way `name`."""
    inputs, nodes, weights = [], [], []
    for copy in range(copies):
        inputs.append(ir.val(f"x{copy}", ir.DataType.FLOAT, ["rows", "tokens", len(matrix)]))
        weights.append(ir.val(f"w{copy}", const_value=ir.tensor(matrix, name=f"w{copy}")))
        nodes.append(ir.node("MatMul", [inputs[-1], weights[-1]]))
        nodes[-1].outputs[0].name, nodes[-1].outputs[0].type = f"y{copy}", ir.TensorType(ir.DataType.FLOAT)
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph(inputs, outputs, nodes=nodes, initializers=weights, opset_imports={"": 21}, name="products")
    model = ir.Model(graph, ir_version=10)
    model.meta[TUNED] = lambda matrix: name
    pipeline.apply(model, (quantize_products,))
    return ir.to_proto(model).SerializeToString()


def opened(graph: bytes, threads: int) -> onnxruntime.InferenceSession:
    """As the runtime opens it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN_MICROSECONDS)
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
