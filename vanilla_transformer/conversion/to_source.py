"""The plan of a checkpoint of ours as one of another family."""

from collections.abc import Collection

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

import vanilla_transformer

from ..checkpoint_config import CONFIGS, check_depth
from ..files import VERSION_KEY
from ..source import Source
from .conversion_plan import ConversionPlan, TensorStep
from .converter import get_converter
from .fields import require_kept, write_fields
from .plan_parts import (
    attach_other_files,
    check_missing,
    common_fields,
    empty_model,
    read_known_config,
    vanilla_config,
)
from .sinusoids import check_table
from .tensors import TensorFiles, TensorMap

COMPUTED_TOLERANCE = 2e-4  # machines differ by 6e-5 at position 1024 in float32


def plan_family(source: Source, to: str) -> ConversionPlan:
    """Return the plan for our checkpoint `source` as a checkpoint of the family `to`.

    Raises ValueError if the checkpoint is not ours, or the family cannot represent it.
    """
    ours = read_known_config(source)
    if ours.model_type not in CONFIGS:
        raise ValueError(
            f"{source} has model_type {ours.model_type}, expected one of {', '.join(CONFIGS)}"
        )
    converter = get_converter(to)
    classes = {our_name: name for name, our_name in converter.ARCHITECTURES.items()}
    architecture = classes[check_architecture(ours, classes)]
    mark = {VERSION_KEY: vanilla_transformer.__version__}  # this package may replace it
    fields = write_fields(ours, converter.FIELDS) | converter.to_source_config(ours)
    config = CONFIG_MAPPING[to](**common_fields(ours) | fields | mark)
    files = TensorFiles(source.directory)
    check_depth(ours, files.shapes, source.directory)
    if not any(name.startswith("model.") for name in files.shapes):
        files.rename(lambda name: f"model.{name}")
    model = empty_model(getattr(transformers, architecture), config, files, ours)
    maps = converter.tensor_maps(ours, config)
    back = vanilla_config(config, converter, kept_names(model, maps), type(ours))
    require_kept(ours, back, ours.architectures[0], converter.LOST)
    is_untied = getattr(ours, "tie_word_embeddings", None) is False
    if is_untied:
        # a head that the class ties, as T5's does, is written beside the embeddings
        tied = model._tied_weights_keys or {}
        model._tied_weights_keys = {
            name: source for name, source in tied.items() if name != "lm_head.weight"
        }
    steps, unused = steps_to_source(model, maps, architecture, files)
    plan = attach_other_files(ConversionPlan(model, files, steps, unused), source)
    if is_untied:
        config.tie_word_embeddings = False  # T5's class always sets this to true
    return plan


def kept_names(model: PreTrainedModel, maps: list[TensorMap]) -> set[str]:
    """Return the names of the tensors of `model`, a class of another family, that `maps` do not
    make from nothing. They have no prefix of a base model."""
    prefix = f"{model.base_model_prefix}."
    constants = {entry.theirs for entry in maps if not entry.ours}
    return {name.removeprefix(prefix) for name in model.state_dict()} - constants


def steps_to_source(
    model: PreTrainedModel, maps: list[TensorMap], architecture: str, files: TensorFiles
) -> tuple[list[TensorStep], list[str]]:
    """Return (steps, unused) of a conversion of our `files` into `model`, a class of the family.

    `steps` make the tensors of `model` by the `maps` of the family. `unused` are names of our
    tensors that belong to other heads. `architecture` is the class of the family. Raises ValueError
    if tensors are missing, differ from those that the family computes, or have no place in it.
    """
    parameters = model.state_dict().keys()
    steps = []
    missing = []
    used = set()
    for entry in maps:
        if not entry.theirs:
            [name], [table] = entry.ours, entry.op.to_ours()
            check_table(files, name, lambda rows, table=table: table, COMPUTED_TOLERANCE)
            used.add(name)
            continue
        prefix = f"{model.base_model_prefix}."  # that of Llama depends on the head
        theirs = entry.theirs if entry.theirs in parameters else prefix + entry.theirs
        if theirs not in parameters:
            continue
        missing += [name for name in entry.ours if name not in files.shapes]
        to_theirs = entry.op.to_theirs
        stored = theirs.removesuffix(entry.theirs) + (entry.stored or entry.theirs)
        steps.append(
            TensorStep(
                entry.ours,
                (theirs,),
                lambda *parts, f=to_theirs: (f(*parts),),
                entry.op.name,
                stored=(stored,),
            )
        )
    check_missing(missing, architecture, files)
    used.update(name for step in steps for name in step.reads)
    known = (name for entry in maps for name in entry.ours)
    unused = sorted(set(files.shapes) - used)
    unknown = sorted(set(unused).difference(known))
    if unknown:
        raise ValueError(
            f"{files.path} has tensors that {architecture} cannot hold: {', '.join(unknown)}"
        )
    return steps, unused


def check_architecture(config: PreTrainedConfig, known: Collection[str]) -> str:
    name = (config.architectures or ["none"])[0]
    if name not in known:
        raise ValueError(
            f"architectures={config.architectures!r} cannot be converted, expected one of "
            f"{', '.join(known)}"
        )
    return name
