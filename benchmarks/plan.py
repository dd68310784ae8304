"""The benchmarks of each kind of device: cells, engines, and what is left out."""

from collections.abc import Callable
from dataclasses import dataclass, replace

# engines that run the checkpoints themselves
CHECKPOINTS = ("transformers", "transformers-compile", "vanilla", "torch-graph")


@dataclass(frozen=True)
class Cell:
    """One thing to measure: `batch` rows of `length` tokens, or of `shortest` to `length` tokens if
    that is not 0.

    `new_tokens` are generated with `beams`; 0 is for an encoder. `shape` names the group of cells,
    and `kind` the model.
    """

    shape: str
    kind: str
    batch: int
    length: int
    new_tokens: int
    beams: int = 1
    shortest: int = 0

    def __str__(self):
        lengths = f"{self.shortest} to {self.length}" if self.shortest else self.length
        return (
            f"{self.shape}: batch {self.batch}, length {lengths}, new tokens {self.new_tokens}, "
            f"beams {self.beams}"
        )


@dataclass(frozen=True)
class Arrangement:
    """A division of threads: `workers` share the rows of a batch, with `threads` CPU threads
    each."""

    workers: int
    threads: int

    def __str__(self):
        return f"{self.workers} x {self.threads}"


@dataclass(frozen=True)
class Plan:
    """The benchmarks of one kind of device.

    The tokens of the first engine that is not `rounded` are the reference. Other engines that are
    not rounded must agree in a share of at least `agreement`. `pause` is the seconds before each
    run, in which the threads of the previous engine stop spinning. After `minutes` nothing more is
    started.
    """

    engines: tuple[str, ...]
    rounded: tuple[str, ...]
    shapes: dict[str, list[Cell]]
    left_out: Callable[[str, Cell], str | None]
    threads: int
    agreement: float
    pause: float
    minutes: float | None


# --------------------------------------------------------------------------------------------- CPUs

QUANTIZED = (
    "ctranslate2-int8",
    "openvino-int8",
    "openvino-ptq",
    "openvino-int4",
    "llamacpp-q8",
    "llamacpp-q4",
    "cpu-int8",
    "cpu-calibrated",
    "cpu-int4",
)
GROWTH = ("length", "encoder-length", "batch")
LARGE_ENGINES = ("transformers", "ctranslate2-int8", "openvino-ptq", "cpu-int8", "cpu-calibrated")
GROWTH_ENGINES = (*LARGE_ENGINES, "ctranslate2-float32", "cpu-fp32")
# engines with a queue
CAPTIONS_ENGINES = (
    "ctranslate2-float32",
    "ctranslate2-int8",
    "cpu-fp32",
    "cpu-int8",
    "cpu-calibrated",
)
# In the order of their size, since the most memory a process ever had is what is reported.
CPU_SHAPES = {
    "seq2seq": [
        *(
            Cell("seq2seq", "seq2seq", batch, 32, 64, beams)
            for batch in (1, 8, 32)
            for beams in (1, 4)
        ),
        Cell("seq2seq", "seq2seq", 128, 32, 64, 4),
    ],
    "gpt2": [Cell("gpt2", "gpt2", batch, 32, 64) for batch in (1, 8)],
    "bert": [Cell("bert", "bert", batch, 128, 0) for batch in (1, 8)],
    "length": [Cell("length", "seq2seq", 1, 32, new_tokens) for new_tokens in (128, 512, 2048)],
    "modernbert": [Cell("modernbert", "modernbert", batch, 128, 0) for batch in (1, 8)],
    "modernbert-512": [Cell("modernbert-512", "modernbert", batch, 512, 0) for batch in (1, 8)],
    "encoder-length": [Cell("encoder-length", "bert", 1, length, 0) for length in (128, 512, 2048)],
    "batch": [Cell("batch", "seq2seq", 128, 32, 64)],  # besides those of seq2seq
    # rows of different lengths that end by themselves
    "captions": [Cell("captions", "captions", 1000, 0, 0, beams) for beams in (1, 5)],
    "load": [Cell("load", "seq2seq", 1, 32, 1)],
}


def arrangements_on_cpu(engine: str, cell: Cell, threads: int) -> list[Arrangement]:
    """Return the arrangements of `threads` in which `engine` is tried for `cell`.

    torch has one arrangement: it is fastest with all threads.
    """
    arrangements = [Arrangement(1, threads)]
    if engine in CHECKPOINTS or threads == 1:
        return arrangements
    arrangements.append(Arrangement(1, 1))
    if cell.batch > 1 and not engine.startswith(("llamacpp-", "portable-")):
        arrangements.append(Arrangement(threads, 1))
    return arrangements


def left_out_on_cpu(engine: str, cell: Cell) -> str | None:
    """Return why `engine` is not measured on `cell`, or `None` if it is.

    Reasons are what an engine cannot do, and a limit of some hours for all cells.
    """
    rows = cell.batch * cell.beams
    if cell.shape == "captions":
        return (
            None
            if engine in CAPTIONS_ENGINES
            else "left out: many sentences are measured for engines with a queue"
        )
    if engine.startswith("ctranslate2-") and cell.kind == "modernbert":
        return "left out: it has no converter for ModernBERT"
    if engine == "openvino-ptq" and cell.kind not in ("bert", "modernbert"):
        return "left out: activations of 8 bits are for encoders"
    if engine.startswith("openvino-") and cell.beams > 1:
        return "left out: the graphs of this benchmark have no beam search"
    if engine.startswith("llamacpp-") and cell.kind != "gpt2":
        return "left out: it is measured for GPT-2"
    if cell.shape in GROWTH and engine not in GROWTH_ENGINES:
        return "left out: growth is measured for fewer engines"
    if (rows > 32 or cell.length > 512) and engine not in LARGE_ENGINES:
        return "left out: more than 32 rows, or 512 tokens, are measured for fewer engines"
    if cell.new_tokens > 512 and engine not in QUANTIZED:
        return "left out: more than 512 new tokens are measured with 8 bits"
    if engine == "transformers-compile" and (rows > 8 or cell.beams > 1 or cell.shape == "load"):
        return (
            "left out: it compiles again for every batch, measured for greedy search of up "
            "to 8 rows"
        )
    return None


# --------------------------------------------------------------------------------------------- CUDA

# What has a figure to reach comes first, should time run out.
CUDA_SHAPES = {
    "seq2seq": [
        Cell("seq2seq", "seq2seq", batch, 32, 64, beams)
        for batch in (1, 32, 128, 8, 256)
        for beams in (1, 4)
    ],
    "bert": [Cell("bert", "bert", batch, 128, 0) for batch in (1, 8, 32, 128)],
    "gpt2": [Cell("gpt2", "gpt2", batch, 32, 64) for batch in (1, 32, 128)],
    # texts of mixed length, as encoders of embeddings get them
    "mixed": [Cell("mixed", "bert", 256, 128, 0, shortest=8)],
    # what TensorRT-LLM's figures of encoder-decoder models are measured with: the shapes of
    # BART-large-CNN and of Flan-T5-XL, which takes minutes to make
    **{
        shape: [Cell(shape, shape, batch, 440, 128, shortest=260) for batch in (32, 64, 128)]
        for shape in ("bart", "t5")
    },
}
OF_OTHERS = ("bart", "t5")  # shapes that are measured in bf16, beside one engine


def left_out_on_cuda(engine: str, cell: Cell) -> str | None:
    """Return why `engine` is not measured on `cell`, or `None` if it is.

    All cells but those of `OF_OTHERS` take less than ten minutes together.
    """
    if cell.shape in OF_OTHERS and engine not in ("transformers", "cuda-bf16"):
        return "left out: the figures to compare with are in bf16"
    if cell.shape == "mixed" and engine in ("transformers-compile", "vanilla", "torch-graph"):
        return "left out: rows of mixed length are measured for fewer engines"
    if engine == "torch-graph" and (cell.beams > 1 or not cell.new_tokens):
        return "left out: it is a bound for greedy search"
    if engine == "transformers-compile" and (cell.beams > 1 or cell.batch not in (1, 128)):
        return (
            "left out: it compiles again for every batch, measured for 1 and 128 rows without beams"
        )
    return None


PLANS = {
    "cpu": Plan(
        engines=(
            "transformers",
            "transformers-compile",
            "ctranslate2-float32",
            "ctranslate2-int8",
            "openvino-fp32",
            "openvino-int8",
            "openvino-ptq",
            "openvino-int4",
            "llamacpp-f32",
            "llamacpp-q8",
            "llamacpp-q4",
            "vanilla",
            "portable-fp32",
            "cpu-fp32",
            "cpu-int8",
            "cpu-calibrated",
            "cpu-int4",
        ),
        rounded=QUANTIZED,
        shapes=CPU_SHAPES,
        left_out=left_out_on_cpu,
        threads=2,
        agreement=1.0,
        pause=0.1,
        minutes=None,
    ),
    "cuda": Plan(
        engines=(
            "cuda-fp32",
            "transformers",
            "transformers-compile",
            "vanilla",
            "torch-graph",
            "cuda-fp16",
            "cuda-bf16",
        ),
        rounded=(
            "transformers",
            "transformers-compile",
            "vanilla",
            "torch-graph",
            "cuda-fp16",
            "cuda-bf16",
        ),
        shapes=CUDA_SHAPES,
        left_out=left_out_on_cuda,
        threads=4,
        agreement=0.99,
        pause=0.0,
        minutes=9.0,
    ),
}


def list_cells(plan: Plan, shape: str, quick: bool) -> list[Cell]:
    if not quick:
        return plan.shapes[shape]
    small = [
        replace(
            cell,
            batch=min(cell.batch, 2),
            length=min(cell.length, 8),
            new_tokens=min(cell.new_tokens, 4),
            shortest=min(cell.shortest, 4),
        )
        for cell in plan.shapes[shape]
    ]
    return list(dict.fromkeys(small))
