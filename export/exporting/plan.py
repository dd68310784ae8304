"""The plan of an export: its graphs, their dtypes and the weights. All are decided before anything
is written."""

import os
from collections.abc import Iterable

from ..graphs.config import Config
from ..graphs.input_scales import Calibration
from ..graphs.layers import LM_HEAD
from ..heads import HEADS
from ..shared.errors import torch_missing
from ..specs.alignment import ROLE as ALIGNMENT
from ..specs.alignment import alignment_heads
from ..targets.registry import default_target, get_target
from ..targets.target import Target
from .checkpoint import Checkpoint
from .graphs import Graphs
from .options import ExportOptions
from .shortlist import shortlist_from_text, with_special_tokens


def plan_graphs(checkpoint: Checkpoint, options: ExportOptions) -> Graphs:
    """Return the graphs to write for `checkpoint`, by `options`.

    Raises:
        ValueError: for a model that the target does not support, and for an invalid shortlist or
            text of `options`.
        FileNotFoundError: for a text that is missing.
        ImportError: for `calibrate` where torch is not installed.
    """
    target, config = get_target(options.target), checkpoint.config
    if uses_target(config):
        check_fields(config, target)
    activations = target.activations(checkpoint.model, options.dtypes[0])
    dtypes = [dtype or activations for dtype in options.dtypes]
    content = checkpoint.config_json
    specs = {
        dtype: target.graph_specs(content, config.architecture, dtype, activations)
        for dtype in dtypes
    }
    # one graph returns no alignments, and elsewhere the graph has copies of the weights
    if options.generate is not None or not (target.shares_weights or options.alignments):
        for by_role in specs.values():
            by_role.pop(ALIGNMENT, None)
    tokens = shortlist_tokens(checkpoint, options.shortlist)
    rows = {} if tokens is None else {f"{LM_HEAD}.{part}": tokens for part in ("weight", "bias")}
    return Graphs(
        config,
        checkpoint.weights.with_rows(rows),
        target,
        activations,
        options.opset or target.opsets[0],
        specs,
        tokens,
        calibrate_inputs(checkpoint, tokens, options.calibrate),
        alignment_heads(content) if ALIGNMENT in specs[dtypes[0]] else [],
    )


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


def shortlist_tokens(
    checkpoint: Checkpoint, shortlist: Iterable[int] | str | os.PathLike | None
) -> list[int] | None:
    if shortlist is None:
        return None
    if isinstance(shortlist, str | os.PathLike):
        shortlist = shortlist_from_text(shortlist, checkpoint.source.directory)
    return with_special_tokens(shortlist, checkpoint.config, checkpoint.generation)


def calibrate_inputs(
    checkpoint: Checkpoint, tokens: list[int] | None, text: str | os.PathLike | None
) -> Calibration | None:
    if text is None:
        return None
    if checkpoint.model is None:
        raise torch_missing("calibrate runs the model, which")
    from vanilla_transformer.checkpoint import load_tokenizer

    from ..proof.torch import torch_model
    from .calibration import calibrate

    with torch_model(checkpoint.model, tokens):
        return calibrate(checkpoint.model, load_tokenizer(checkpoint.source.directory), text)
