"""The plan of an export: its graphs, their dtypes and the weights. All are decided before anything
is written."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..graphs.config import Config
from ..graphs.input_scales import Calibration
from ..graphs.layers import LM_HEAD
from ..heads import HEADS
from ..proof.compare import TOLERANCES, Report
from ..specs.alignment import ROLE as ALIGNMENT
from ..specs.alignment import AlignmentHead, alignment_heads
from ..specs.graph_spec import GraphSpec
from ..targets.registry import default_target, get_target
from ..targets.target import Target
from .checkpoint import Checkpoint
from .graphs import GraphFormat, GraphSource, write_graphs
from .options import ExportOptions
from .shortlist import shortlist_from_text, with_special_tokens
from .triton import instance_kind, write_triton_model


@dataclass(frozen=True)
class Graphs:
    """The graphs of an export for `target`, in each of `dtypes`: the specs by role.

    `alignment_facts` are fields of the manifest about the choice of alignment heads.
    """

    source: GraphSource
    target: Target
    dtypes: list[str]
    activations: str
    opset: int
    specs: dict[str, dict[str, GraphSpec]]
    alignment_facts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def plan(cls, checkpoint: Checkpoint, options: ExportOptions) -> "Graphs":
        """Return the graphs to write for `checkpoint`, by the target and dtypes in `options`.

        Raises:
            ValueError: for a model that the target does not support, and for an invalid shortlist
                or text of `options`.
            FileNotFoundError: for a text that is missing.
        """
        target = get_target(options.target)
        if uses_target(checkpoint.config):
            check_fields(checkpoint.config, target)
        activations = target.activations(checkpoint.model, options.dtypes[0])
        dtypes = [dtype or activations for dtype in options.dtypes]
        config, architecture = checkpoint.config_json, checkpoint.architecture
        specs = {
            dtype: target.graph_specs(config, architecture, dtype, activations) for dtype in dtypes
        }
        # one graph returns no alignments, and elsewhere the graph has copies of the weights
        if options.generate is not None or not (target.shares_weights or options.alignments):
            for by_role in specs.values():
                by_role.pop(ALIGNMENT, None)
        source = graph_source(checkpoint, options, ALIGNMENT in specs[dtypes[0]])
        return cls(source, target, dtypes, activations, options.opset or target.opsets[0], specs)

    def with_alignment(
        self, heads: list[AlignmentHead], facts: dict[str, float] | None = None
    ) -> "Graphs":
        """Return the same graphs with other heads of the alignment graph, and `facts` about
        them."""
        return replace(
            self, source=replace(self.source, alignment=heads), alignment_facts=facts or {}
        )

    def write(self, directory: Path) -> None:
        """Write the ONNX files of all graphs with their weights to the export `directory`."""
        for dtype, specs in self.specs.items():
            form = GraphFormat(self.target, dtype, self.activations, self.opset)
            write_graphs(self.source, form, specs, directory)

    def save_for_triton(self, export: Path, directory: Path) -> None:
        """Write the graph of the first dtype to `directory` as a Triton model.

        The dtype has one graph only, which is in the directory `export`. `directory` is the folder
        of the model, not the repository of models. It must exist, without a folder "1".
        """
        specs = self.specs[self.dtypes[0]]
        [spec] = specs.values()
        kind = instance_kind(self.target, specs, self.dtypes[0])
        write_triton_model(spec, export, directory, kind)

    @property
    def files(self) -> dict[str, str]:
        """{role: file} of the graphs of the first dtype."""
        return {role: spec.file for role, spec in self.specs[self.dtypes[0]].items()}

    def facts(self, reports: Mapping[str, Report | None]) -> dict[str, Any]:
        """Return the fields `default_dtype` and `variants` of the manifest.

        `variants` has an entry for each dtype of weights, with the files of its graphs and the
        tolerance of its errors. `reports` are those of the comparison with torch, by dtype, None if
        it was not possible. A dtype that is missing there gets no field `parity` in its entry."""
        variants: dict[str, dict[str, Any]] = {}
        for dtype in self.dtypes:
            report = reports.get(dtype)
            variants[dtype] = {
                "graphs": {role: spec.file for role, spec in self.specs[dtype].items()},
                "tolerance": (report.tolerance if report else TOLERANCES[dtype])._asdict(),
            }
            if dtype in reports:
                variants[dtype]["parity"] = report and report.summary()
        return {"default_dtype": self.dtypes[0], "variants": variants}


def uses_target(config: Config) -> bool:
    """Return True if the graphs of a model have the attention operators of their target.

    These are encoders, vision models and all models that generate. Other models with a decoder,
    such as classifiers, have standard operators on every target.
    """
    return HEADS[config.architecture].generates or config.model_type in (
        "vanilla-encoder",
        "vanilla-vision",
    )


def check_fields(config: Config, target: Target) -> None:
    for name, expected in target.unsupported_fields(config).items():
        problem = f"{name}={getattr(config, name)!r} is not supported by the {target.name} target"
        raise ValueError(f"{problem}, expected {expected}: use --target {default_target()}")


def graph_source(
    checkpoint: Checkpoint, options: ExportOptions, has_alignment: bool
) -> GraphSource:
    """Return the config and the weights of the graphs, the tokens of the shortlist and the
    calibration, by `options`. With `has_alignment` also the heads of the alignment graph."""
    tokens = shortlist_tokens(checkpoint, options.shortlist)
    rows = {} if tokens is None else {f"{LM_HEAD}.{part}": tokens for part in ("weight", "bias")}
    calibration = None
    if options.calibrate is not None:
        calibration = calibrate_inputs(checkpoint, tokens, options.calibrate)
    weights = checkpoint.weights.with_rows(rows)
    heads = alignment_heads(checkpoint.config_json) if has_alignment else []
    return GraphSource(checkpoint.config, weights, tokens, calibration, heads)


def shortlist_tokens(
    checkpoint: Checkpoint, shortlist: Iterable[int] | str | os.PathLike | None
) -> list[int] | None:
    if shortlist is None:
        return None
    if isinstance(shortlist, str | os.PathLike):
        shortlist = shortlist_from_text(shortlist, checkpoint.source.directory)
    return with_special_tokens(shortlist, checkpoint.config, checkpoint.generation)


def calibrate_inputs(
    checkpoint: Checkpoint, tokens: list[int] | None, text: str | os.PathLike
) -> Calibration:
    from vanilla_transformer.checkpoint import load_tokenizer

    from ..proof.torch import torch_model
    from .calibration import calibrate

    assert checkpoint.model is not None  # see `options.check_calibrate`
    with torch_model(checkpoint.model, tokens):
        return calibrate(checkpoint.model, load_tokenizer(checkpoint.source.directory), text)
