"""The choice of a conversion, from a checkpoint's config and the names and shapes of its
tensors.

The functions that make a plan call each other in this order:

    plan_conversion     checks the arguments
    plan_variant        downloads the files, and renames those of a variant
    plan_overridden     applies `--set` and `--leave-out` to config.json
    plan_complete       opens the tensors and selects the class
    plan_or_base        makes the plan for that class, or for the base class without a head
    plan_as             makes the plan for one class
    plan_by_config      does so for one config, whose ties the tensors may contradict

From one of our checkpoints, `plan_variant` calls `plan_family` instead.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from ..checkpoint import CONFIG, vocabulary_files
from ..checkpoint_config import CONFIGS, build_config
from ..checkpoint_files import read_json
from ..companions import read_modules, rival_weights
from ..errors import UsageError
from ..files import MODULES, write_json
from ..linked_copies import linked_copy
from ..source import Source
from .architectures import fitting_classes, plan_or_base, settle_architecture
from .conversion_plan import ConversionPlan
from .converter import Converter, ForeignCheckpoint, base_prefix, get_converter
from .overrides import Overrides
from .plan_parts import attach_other_files, plan_copy, plan_variant, read_known_config
from .registry import FAMILIES
from .reranker import classifier_files, read_reranker
from .tensors import TensorFiles, unequal_weights
from .to_source import plan_family

# fields that act in training only and have no counterpart (Fan et al. 2020, LayerDrop)
TRAINING_FIELDS = ("encoder_layerdrop", "decoder_layerdrop", "layerdrop")


def plan_conversion(
    source: str | PathLike,
    to: str | None = None,
    config: Mapping[str, Any] | None = None,
    leave_out: Iterable[str] = (),
    variant: str | None = None,
) -> ConversionPlan:
    """Return the checked plan of what `convert` would do, without writing to `out`.

    Args:
        source: a directory, a Hub id or an open checkpoint.
        to: the name of a family that one of our checkpoints is converted to; by default another
            project's checkpoint becomes ours.
        config: fields that replace those in the config.json of `source`.
        leave_out: patterns of names of tensors that are not converted.
        variant: "fp16" reads the weights in model.fp16.safetensors.

    Raises:
        UsageError: for `config` or `leave_out` with `to`.
        FileNotFoundError: if there is no config.json, no weights or none of `variant`.
        ValueError: for a family or architecture that is not known, a field that cannot be
            represented, and unknown, missing or misshapen tensors.
    """
    overrides = Overrides(config or {}, tuple(leave_out))
    if to is None:
        return plan_variant(source, variant, partial(plan_overridden, overrides=overrides))
    if overrides:
        raise UsageError(
            "config and leave_out are for checkpoints of another family, expected none with "
            f"to={to!r}"
        )
    families = [name for name, family in FAMILIES.items() if family.converts_back]
    if to not in families:
        raise ValueError(f"checkpoints can be converted to {', '.join(families)}, got {to!r}")
    return plan_variant(source, variant, partial(plan_family, to=to))


def plan_overridden(source: Source, overrides: Overrides) -> ConversionPlan:
    """Return the plan for the checkpoint `source`, with the config fields of `overrides`.

    A missing `model_type` is found by the tensors.
    """
    directory, content = source.directory, overrides.apply(source.content)
    remarks = []
    if content["model_type"] is None:
        content["model_type"] = find_family(directory, content, overrides)
        remarks.append(
            f"config.json names no model_type: it is {content['model_type']} by its tensors"
        )
    changed = {MODULES} & {*overrides.leave_out}
    changed |= set() if content == read_json(directory / CONFIG) else {CONFIG}
    if changed:
        linked = linked_copy(directory, changed)
        if CONFIG in changed:
            write_json(Path(linked.name, CONFIG), content)
        plan = plan_copy(source, linked, partial(plan_complete, overrides=overrides))
    else:
        plan = plan_complete(source, overrides)
    plan.remarks = remarks + plan.remarks
    return plan


def plan_complete(source: Source, overrides: Overrides) -> ConversionPlan:
    """Return the plan for the checkpoint `source`, whose config.json is complete.

    `overrides` are changes to it: config fields, and tensors to leave out.
    """
    path, theirs = source.directory, read_known_config(source)
    if theirs.model_type in CONFIGS:
        raise ValueError(
            f"{source} has model_type {theirs.model_type} already, expected a family to "
            f"convert it to"
        )
    converter = get_converter(theirs.model_type)
    notes = read_reranker(theirs, path)
    foreign = ForeignCheckpoint(theirs, converter, open_tensors(path, converter, overrides))
    architecture, remarks = settle_architecture(foreign)
    if "architectures" not in overrides.config:
        architecture, more = without_head(architecture, converter, path)
        remarks += more
    plan, more = plan_or_base(foreign, architecture)
    plan.remarks += notes + remarks + more
    values = {name: getattr(theirs, name, 0) for name in TRAINING_FIELDS}
    plan.left_out += [f"{name}={value}" for name, value in values.items() if value]
    plan = attach_other_files(plan, source)
    plan.remarks += unequal_weights(source, rival_weights(path, plan.companions.modules))
    if hasattr(theirs, "score_tokens"):
        plan.temporaries.append(directory := TemporaryDirectory())
        plan.companions = classifier_files(plan.companions, Path(directory.name))
    return plan


def without_head(architecture: str, converter: Converter, path: Path) -> tuple[str, list[str]]:
    """Return the base class of `architecture` if modules.json in `path` pools its states, with a
    note. sentence-transformers loads such a checkpoint without its head."""
    pools = any(module.kind == "Pooling" for module in read_modules(path / MODULES))
    base, ours = next(iter(converter.ARCHITECTURES.items()))
    has_head = not converter.ARCHITECTURES[architecture].endswith("Model")
    if not (pools and has_head and ours in ("VanillaEncoderModel", "VanillaDecoderModel")):
        return architecture, []
    return base, [f"{MODULES} pools states, so {base} is converted without the head"]


def open_tensors(path: Path, converter: Converter, overrides: Overrides) -> TensorFiles:
    """Return the tensors in `path` under the base model's names, without those that `overrides`
    leave out."""
    files = TensorFiles(path)
    # as TensorFlow calls the parameters of LayerNorm
    files.rename(lambda name: re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name)))
    prefix = base_prefix(converter)
    alias = converter.HUB_PREFIX or prefix
    files.rename(lambda name: re.sub(f"^{re.escape(alias)}", prefix, name))
    files.strip(prefix)
    overrides.remove_tensors(files, prefix)
    return files


def find_family(directory: Path, content: dict, overrides: Overrides) -> str:
    """Return the `model_type` of the only family whose classes fit the tensors in `directory`.

    If several fit, it is the only one whose vocabulary file is there. `content` is the config.json
    without a `model_type`. `overrides` say which tensors are left out.

    Raises:
        ValueError: if no family or several remain.
    """
    families = [
        name
        for name in FAMILIES
        if fits_family(directory, content | {"model_type": name}, overrides)
    ]
    families = [name for name in families if has_vocabulary(directory, name)] or families
    if len(families) != 1:
        problem = f"{directory / CONFIG} has the model_type None, expected a name"
        raise ValueError(
            f"{problem}: its tensors fit {' and '.join(families) or 'no family'}; name the family "
            "with --set model_type=NAME"
        )
    return families[0]


def has_vocabulary(directory: Path, model_type: str) -> bool:
    """Return True if `directory` has a vocabulary file of the tokenizer of `model_type`."""
    tokenizer_class = getattr(transformers, TOKENIZER_MAPPING_NAMES.get(model_type) or "", None)
    return any((directory / name).is_file() for name in vocabulary_files(tokenizer_class))


def fits_family(directory: Path, content: dict, overrides: Overrides) -> bool:
    """Return True if the tensors in `directory` are exactly those of a class of the family.

    `content` is the config.json with the family's `model_type`. Tensors unknown to the family and
    poolers may remain. `overrides` say which tensors are left out.
    """
    converter = get_converter(content["model_type"])
    try:
        theirs = build_config(CONFIG_MAPPING[content["model_type"]], content, directory)
        files = open_tensors(directory, converter, overrides)
        names = [name for name in theirs.architectures or () if name in converter.ARCHITECTURES]
        names = names or list(converter.ARCHITECTURES)
        foreign = ForeignCheckpoint(theirs, converter, files)
        return 0 in fitting_classes(foreign, names).values()
    except (ValueError, KeyError):
        return False
