"""Exports for the cuda target, of models with random weights: python exports.py OUTPUT

No torch is needed. Directories that exist are kept.
"""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from graph_variants import sizes, variants
from safetensors.numpy import save_file

from vanilla_transformer.checkpoint_config import CONFIGS
from vanilla_transformer.checkpoint_files import bare
from vanilla_transformer.source import Source
from vanilla_transformer.standins import weight_shapes
from vanilla_transformer_export import export
from vanilla_transformer_export.graphs.config import Config
from vanilla_transformer_export.graphs.weights import tied_names
from vanilla_transformer_export.heads import (
    GENERATORS,
    HEADS,
    M3_EMBEDDING,
    SPARSE_EMBEDDING,
    model_class,
)

DTYPES = ("fp32", "fp16", "bf16", "int8", "int4")
# models whose config options are all exported; of others only the first config, and mean pooling
WITH_VARIANTS = {*GENERATORS, "VanillaEncoderForMaskedLM", "VanillaVisionForImageClassification"}
CARD = Path(__file__).parents[2] / "model_cards" / "vanilla-seq2seq-tiny-multi30k-en-de"


class Case(NamedTuple):
    """An export: an architecture of `HEADS`, a config of `graph_variants`, and a dtype."""

    architecture: str
    variant: str
    dtype: str

    @property
    def generates(self) -> bool:
        return self.architecture in GENERATORS

    @property
    def is_aligned(self) -> bool:
        return "Seq2SeqForConditional" in self.architecture and self.dtype != "bf16"

    def __str__(self) -> str:
        return f"{self.architecture}-{self.variant.replace(' ', '_')}-{self.dtype}"


def cases() -> Iterator[Case]:
    for architecture in HEADS:
        if architecture == M3_EMBEDDING:  # has the graph of VanillaEncoderModel
            continue
        names = [name for name in variants(architecture) if name != "shortlist"]
        if architecture not in WITH_VARIANTS:
            names = names[:1] + ["mean"] * architecture.endswith("EncoderForSequenceClassification")
        for variant in names:
            for dtype in DTYPES:
                yield Case(architecture, variant, dtype)


def write_checkpoint(case: Case, folder: Path) -> None:
    """Write config.json, and weights from a normal distribution."""
    names = {name: kind.auto_classes().values() for name, kind in CONFIGS.items()}
    class_name = model_class(case.architecture)
    [model_type] = [name for name, classes in names.items() if class_name in classes]
    fields = sizes(case.architecture) | variants(case.architecture)[case.variant]
    content = {"model_type": model_type, "architectures": [class_name], **fields}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    if case.architecture == SPARSE_EMBEDDING:
        write_splade(folder)
    source, rng = Source.open(folder), np.random.default_rng(0)
    config = Config(source.config(), source.architecture)
    shapes = weight_shapes(class_name, config.values)
    names = {bare(name): name for name in shapes}
    tied = [names[name] for name in tied_names(config) if name in names]
    for name in sorted(tied, key=lambda name: "lm_head" in name)[1:]:
        del shapes[name]  # one tensor for all: the embeddings that torch stores
    weights = {name: rng.normal(0, 0.2, shape) for name, shape in shapes.items()}
    save_file(
        {name: array.astype(np.float32) for name, array in weights.items()},
        folder / "model.safetensors",
    )


def write_splade(folder: Path) -> None:
    """Write modules.json and the config of SpladePooling with its defaults."""
    types = {"": "Transformer", "1_SpladePooling": "SpladePooling"}
    modules = [{"path": path, "type": kind} for path, kind in types.items()]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_SpladePooling").mkdir(exist_ok=True)
    (folder / "1_SpladePooling/config.json").write_text("{}", encoding="utf-8")


def write(output: Path, case: Case) -> None:
    if (output / str(case)).exists():
        return
    checkpoint = output / "checkpoints" / str(case)
    write_checkpoint(case, checkpoint)
    options = {"dtype": case.dtype, "alignments": case.is_aligned}
    export(checkpoint, output / str(case), target="cuda", **options)


def main(output: Path) -> None:
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(write, output), cases()))
    if not (output / "card").exists():
        export(CARD, output / "card", target="cuda", dtype="fp16")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
