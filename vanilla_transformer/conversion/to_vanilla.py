"""The plan of a checkpoint of another family as one of ours."""

import re
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

import vanilla_transformer

from ..checkpoint import CONFIG
from ..checkpoint_config import CONFIGS, build_config, check_depth
from ..checkpoint_files import read_json, readers_errors
from ..companions import read_modules, rival_weights
from ..files import MODULES, write_json
from ..linked_copies import linked_copy
from ..source import Source
from .architectures import (
    PlanAs,
    fitting_classes,
    plan_or_base,
    settle_architecture,
)
from .conversion_plan import ConversionPlan, TensorStep
from .converter import Converter, as_class, base_prefix, get_converter
from .fields import require
from .overrides import Overrides
from .plan_parts import (
    attach_other_files,
    check_missing,
    empty_model,
    plan_copy,
    read_generation_config,
    read_known_config,
    vanilla_config,
)
from .registry import FAMILIES
from .reranker import classifier_files, read_reranker
from .tensors import TensorFiles, unequal_weights
from .unknown_tensors import check_foreign_prefix, further_heads

# fields that act in training only and have no counterpart (Fan et al. 2020, LayerDrop)
TRAINING_FIELDS = ("encoder_layerdrop", "decoder_layerdrop", "layerdrop")


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

    `overrides` are changes to it: config fields, tensors to leave out, and the variant of weights.
    """
    path, theirs = source.directory, read_known_config(source)
    if theirs.model_type in CONFIGS:
        raise ValueError(
            f"{source} has model_type {theirs.model_type} already, expected a family to "
            f"convert it to"
        )
    converter = get_converter(theirs.model_type)
    notes = read_reranker(theirs, path)
    files = open_tensors(path, converter, overrides)
    architecture, remarks = settle_architecture(
        theirs, converter, files, planner(theirs, converter, files)
    )
    if "architectures" not in overrides.config:
        architecture, more = without_head(architecture, converter, path)
        remarks += more
    plan, more = plan_or_base(architecture, converter, planner(theirs, converter, files))
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


def planner(theirs: PreTrainedConfig, converter: Converter, files: TensorFiles) -> PlanAs:
    """Return a function from the name of an architecture to its conversion plan.

    `theirs` is the config of the source, and `files` are its tensors.
    """
    return lambda architecture: plan_by_values(as_class(theirs, architecture), converter, files)


def plan_by_values(
    theirs: PreTrainedConfig, converter: Converter, files: TensorFiles
) -> ConversionPlan:
    """Return the plan for the source with the config `theirs` and the tensors `files`.

    If tensors that the config ties have different values, the plan is made without tying, and
    `theirs` is changed. Raises ValueError if tensors still differ that must be equal.
    """
    plan = plan_by_config(theirs, converter, files)
    unequal = plan.unequal()
    # transformers does not tie unequal tensors, whatever the config says
    if unequal and getattr(theirs, "tie_word_embeddings", False):
        theirs.tie_word_embeddings = False
        plan = plan_by_config(theirs, converter, files)
        unequal = plan.unequal()
    if unequal:
        raise ValueError(
            f"{files.path}: {' and '.join(unequal[0])} differ, expected one tensor under both names"
        )
    return plan


def open_tensors(path: Path, converter: Converter, overrides: Overrides) -> TensorFiles:
    """Return the tensors in `path` under the base model's names, without those that `overrides`
    leave out."""
    files = TensorFiles(path)
    files.rename(modern_name)
    prefix = base_prefix(converter)
    alias = getattr(converter, "HUB_PREFIX", prefix)
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
    """Return True if `directory` has a vocabulary file of the tokenizer of `model_type`, such as
    vocab.txt. tokenizer.json does not count: all families may have it."""
    tokenizer_class = getattr(transformers, TOKENIZER_MAPPING_NAMES.get(model_type) or "", None)
    names = {*getattr(tokenizer_class, "vocab_files_names", {}).values()} - {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    return any((directory / name).is_file() for name in names)


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
        return 0 in fitting_classes(names, planner(theirs, converter, files)).values()
    except (ValueError, KeyError):
        return False


def plan_by_config(
    theirs: PreTrainedConfig, converter: Converter, files: TensorFiles
) -> ConversionPlan:
    model_class = our_class(theirs, converter)
    if theirs.is_encoder_decoder and getattr(theirs, "decoder_start_token_id", None) is None:
        theirs.decoder_start_token_id = read_generation_config(files.path).decoder_start_token_id
    with readers_errors(files.path / CONFIG):
        config = vanilla_config(theirs, converter, files.shapes, model_class.config_class)
    if not getattr(converter, "SHARES_LAYERS", False):
        check_depth(config, files.shapes, files.path)
    if hasattr(converter, "check_tensors"):
        converter.check_tensors(files, theirs)
    model = empty_model(model_class, config, files, theirs)
    steps, unused, foreign = steps_to_vanilla(model, converter, theirs, files)
    plan = ConversionPlan(
        model,
        files,
        steps,
        unused,
        image_processor=getattr(converter, "IMAGE_PROCESSOR", None),
        translates=getattr(converter, "TRANSLATES", False) and model.can_generate(),
    )
    plan.foreign = foreign
    if foreign:
        plan.remarks.append(
            f"left out tensors that no class of {theirs.model_type} has: {', '.join(foreign)}"
        )
    return plan


def our_class(theirs: PreTrainedConfig, converter: Converter) -> type[PreTrainedModel]:
    """Return our class for that of the source.

    A decoder with `is_causal=False` is an encoder, as in transformers. Raises ValueError if no
    encoder has its head.
    """
    architecture = theirs.architectures[0]
    name = converter.ARCHITECTURES[architecture]
    if "Decoder" in name and getattr(theirs, "is_causal", None) is False:
        require(theirs, sliding_window=None)
        if name.endswith(("ForCausalLM", "ForSequenceClassification")):
            raise ValueError(
                f"is_causal=False cannot be converted for {architecture}, expected True, or a "
                "class without this head: --set architectures=NAME"
            )
        name = name.replace("Decoder", "Encoder")
    return getattr(vanilla_transformer, name)


def steps_to_vanilla(
    model: PreTrainedModel, converter: Converter, theirs: PreTrainedConfig, files: TensorFiles
) -> tuple[list[TensorStep], list[str], list[str]]:
    """Return (steps, unused, foreign) of a conversion of `files` into `model`.

    `steps` make all tensors of `model`. `unused` are the names of tensors that are left out, and
    `foreign` those of them that no class of the family has. Raises ValueError if tensors are
    missing, or unknown ones stand inside a module that is converted. `theirs` is the config of the
    source.
    """
    architecture = theirs.architectures[0]
    is_base = not hasattr(model, "model")
    parameters = model.state_dict().keys()
    steps = []
    missing = []
    for entry in converter.tensor_maps(model.config, theirs):
        ours = tuple(name.removeprefix("model.") if is_base else name for name in entry.ours)
        if not parameters >= set(ours) or not ours:
            continue
        lacking = [name for name in entry.extra_inputs if name not in files.shapes]
        stored = [name for name in entry.names if name in files.shapes]  # several are equal
        stored = stored or [name for name in entry.otherwise if name in files.shapes][:1]
        if not entry.theirs:
            steps.append(TensorStep((), ours, entry.op.to_ours, entry.op.name))
        elif stored and not lacking:
            steps.append(
                TensorStep(
                    (stored[0], *entry.extra_inputs),
                    ours,
                    entry.op.to_ours,
                    entry.op.name,
                    tuple(stored[1:]),
                )
            )
        else:
            missing += [(ours, name) for name in (lacking if stored else [entry.theirs, *lacking])]
    known = {
        name
        for other in converter.ARCHITECTURES
        for entry in converter.tensor_maps(model.config, as_class(theirs, other))
        for name in entry.all_theirs
    }
    check_foreign_prefix(files, known)
    # of a tensor that files have in one or several parts, one map is enough
    written = {name for step in steps for name in step.writes}
    check_missing([name for ours, name in missing if not written >= set(ours)], architecture, files)
    used = {name for step in steps for name in (*step.reads, *step.same)}
    no_weights = re.compile(getattr(converter, "UNUSED", "$^"))
    rest = {
        name
        for name in files.shapes
        if not no_weights.fullmatch(name) and "position_ids" not in name
    } - used
    foreign = further_heads(
        rest, known, files, f"{files.path} has tensors that {architecture} does not know"
    )
    return steps, sorted([*rest, *files.removed]), foreign


def modern_name(name: str) -> str:
    """Return `name` with .gamma and .beta, as TensorFlow calls LayerNorm parameters, as .weight and
    .bias."""
    return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
