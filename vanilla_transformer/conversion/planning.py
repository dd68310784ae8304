"""The choice of a conversion, from a checkpoint's config and the names and shapes of its
tensors."""

import copy
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.utils import logging

import vanilla_transformer

from ..checkpoint import CONFIG, limit_generation
from ..checkpoint_config import CONFIGS, build_config, check_depth, read_raw_config
from ..checkpoint_files import GENERATION_CONFIG, checkpoint_directory, read_json, readers_errors
from ..companions import companions, omitted_files, read_modules
from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UsageError
from ..files import MODULES, VERSION_KEY, write_json
from ..generation_settings import DEFAULT_LENGTH, drop_unused_settings, forget_default_length
from ..linked_copies import errors_name, linked_copy
from ..variants import has_weights, linked_variant
from .architectures import (
    MissingTensors,
    PlanAs,
    fitting_classes,
    plan_or_base,
    settle_architecture,
)
from .conversion_plan import ConversionPlan, TensorStep
from .converter import Converter, get_converter
from .fields import Fields, require
from .overrides import Overrides
from .registry import ALIASES, FAMILIES
from .rejected import check_supported
from .reranker import classifier_files, read_reranker
from .sinusoids import check_table
from .tensors import TensorFiles
from .tokenizers import find_tokenizer
from .unknown_tensors import check_foreign_prefix, further_heads

logger = logging.get_logger(__name__)

# fields about labels and tokens, which mean the same in all configs
SPECIAL_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
TOKEN_FIELDS = (
    *SPECIAL_TOKEN_IDS,
    "sep_token_id",
    "vocab_size",
    "tie_word_embeddings",
    "use_cache",
)
COMMON_FIELDS = ("id2label", "label2id", "problem_type", "task_specific_params")
# the activation on the score of a cross-encoder
COMMON_FIELDS += ("sentence_transformers", "sbert_ce_default_activation_function")
COMMON_FIELDS += ("reranker",)  # the prompt of a cross-encoder, see `reranker`
# fields that act in training only and have no counterpart (Fan et al. 2020, LayerDrop)
TRAINING_FIELDS = ("encoder_layerdrop", "decoder_layerdrop", "layerdrop")

STATE_DICTS = "state dicts of torch.nn.Transformer: see examples/convert_torch_transformer.py"
COMPUTED_TOLERANCE = 2e-4  # machines differ by 6e-5 at position 1024 in float32


def plan_conversion(
    source: str | PathLike,
    to: str | None = None,
    config: Mapping[str, Any] | None = None,
    leave_out: Iterable[str] = (),
    variant: str | None = None,
) -> ConversionPlan:
    """Return the checked plan of what `convert` would do, without writing to `out`.

    Args:
        source: a directory or Hub id.
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
    overrides = Overrides(config or {}, tuple(leave_out), variant)
    if to is None:
        return plan_to_vanilla(source, overrides)
    if overrides:
        raise UsageError(
            "config and leave_out are for checkpoints of another family, expected none with "
            f"to={to!r}"
        )
    families = [name for name, family in FAMILIES.items() if family.converts_back]
    if to not in families:
        raise ValueError(f"checkpoints can be converted to {', '.join(families)}, got {to!r}")
    return plan_variant(source, variant, lambda directory: plan_family(source, directory, to))


# --------------------------------------------------------------------------------------------- ours


def plan_to_vanilla(
    source: str | PathLike,
    overrides: Overrides = Overrides(),  # noqa: B008, it is frozen
) -> ConversionPlan:
    """Return the plan to convert the checkpoint `source` of another project into ours, without
    converting it.

    `source` is a directory or Hub id. `overrides` are changes to it: config fields, tensors to
    leave out, and the variant of weights.

    Raises FileNotFoundError and ValueError as `plan_conversion` does.
    """
    return plan_variant(
        source, overrides.variant, lambda directory: plan_overridden(source, directory, overrides)
    )


def plan_variant(
    source: str | PathLike, variant: str | None, plan_as: Callable[[Path], ConversionPlan]
) -> ConversionPlan:
    """Return `plan_as(directory)` for the directory of `source`, downloaded if it is a Hub id.

    For a `variant` such as "fp16", the directory is a temporary copy in which
    model.fp16.safetensors is called model.safetensors.
    """
    directory = download(source, variant)
    return (
        plan_as(directory)
        if variant is None
        else plan_copy(directory, linked_variant(directory, variant), plan_as)
    )


def plan_copy(
    directory: Path, copy: TemporaryDirectory, plan_as: Callable[[Path], ConversionPlan]
) -> ConversionPlan:
    """Return `plan_as(copy)` for a `copy` of `directory`. The plan keeps the copy alive.

    Errors name `directory` in place of the copy.
    """
    with errors_name(directory, Path(copy.name)):
        plan = plan_as(Path(copy.name))
    plan.temporaries.append(copy)
    return plan


def plan_overridden(
    source: str | PathLike, directory: Path, overrides: Overrides
) -> ConversionPlan:
    """Return the plan for the checkpoint in `directory`, with the config fields of `overrides`.

    A missing `model_type` is found by the tensors. `source` is what the user calls the checkpoint.
    """
    before, _ = read_raw_config(directory)
    content = overrides.apply(before)
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
        plan = plan_copy(directory, linked, lambda path: plan_directory(source, path, overrides))
    else:
        plan = plan_directory(source, directory, overrides)
    plan.remarks = remarks + plan.remarks
    return plan


def plan_directory(source: str | PathLike, path: Path, overrides: Overrides) -> ConversionPlan:
    """Return the plan for the checkpoint in `path`, whose config.json is complete.

    `source` is what the user calls the checkpoint; errors name it. `overrides` are changes to it:
    config fields, tensors to leave out, and the variant of weights.
    """
    theirs = read_known_config(source, path)
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
    plan = attach_other_files(plan, source, path)
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
    """Return a function from the name of an architecture to its conversion plan. Each call gets a
    copy of the config.

    `theirs` is the config of the source, and `files` are its tensors.
    """
    return lambda architecture: plan_by_values(
        copy.deepcopy(theirs), converter, architecture, files
    )


def plan_by_values(
    theirs: PreTrainedConfig, converter: Converter, architecture: str, files: TensorFiles
) -> ConversionPlan:
    """Return the plan for the class `architecture` of the source.

    If tensors that the config ties have different values, the plan is made without tying, and
    `theirs` is changed. Raises ValueError if tensors still differ that must be equal. `files` are
    the tensors of the source.
    """
    plan = plan_by_config(theirs, converter, architecture, files)
    unequal = plan.unequal()
    # transformers does not tie unequal tensors, whatever the config says
    if unequal and getattr(theirs, "tie_word_embeddings", False):
        theirs.tie_word_embeddings = False
        plan = plan_by_config(theirs, converter, architecture, files)
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
    alias = getattr(converter, "HUB_PREFIX", converter.PREFIX)
    files.rename(lambda name: re.sub(f"^{re.escape(alias)}", converter.PREFIX, name))
    files.strip(converter.PREFIX)
    overrides.remove_tensors(files, converter.PREFIX)
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
    theirs: PreTrainedConfig, converter: Converter, architecture: str, files: TensorFiles
) -> ConversionPlan:
    model_class = our_class(theirs, converter, architecture)
    if theirs.is_encoder_decoder and getattr(theirs, "decoder_start_token_id", None) is None:
        theirs.decoder_start_token_id = read_generation_config(files.path).decoder_start_token_id
    with readers_errors(files.path / CONFIG):
        fields = common_fields(theirs) | converter.to_vanilla_config(
            theirs, architecture, files.shapes
        )
        config = model_class.config_class(**fields)
    if not getattr(converter, "SHARES_LAYERS", False):
        check_depth(config, files.shapes, files.path)
    if hasattr(converter, "check_tensors"):
        converter.check_tensors(files, theirs)
    model = empty_model(model_class, config, files, theirs)
    steps, unused, foreign = steps_to_vanilla(model, converter, theirs, architecture, files)
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


def our_class(
    theirs: PreTrainedConfig, converter: Converter, architecture: str
) -> type[PreTrainedModel]:
    """Return our class for the class `architecture` of the source.

    A decoder with `is_causal=False` is an encoder, as in transformers. Raises ValueError if no
    encoder has its head.
    """
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
    model: PreTrainedModel,
    converter: Converter,
    theirs: PreTrainedConfig,
    architecture: str,
    files: TensorFiles,
) -> tuple[list[TensorStep], list[str], list[str]]:
    """Return (steps, unused, foreign) of a conversion of `files` into `model`.

    `steps` make all tensors of `model`. `unused` are the names of tensors that are left out, and
    `foreign` those of them that no class of the family has. Raises ValueError if tensors are
    missing, or unknown ones stand inside a module that is converted. `architecture` is the source's
    class, and `theirs` its config.
    """
    is_base = not hasattr(model, "model")
    parameters = model.state_dict().keys()
    steps = []
    missing = []
    for entry in converter.tensor_maps(model.config, theirs, architecture):
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
        for entry in converter.tensor_maps(model.config, theirs, other)
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


# ------------------------------------------------------------------------------------------- theirs


def plan_family(source: str | PathLike, path: Path, to: str) -> ConversionPlan:
    """Return the plan for our checkpoint in `path` as a checkpoint of the family `to`.

    `source` is what the user calls the checkpoint. Raises ValueError if the checkpoint is not ours,
    or the family cannot represent it.
    """
    ours = read_known_config(source, path)
    if ours.model_type not in CONFIGS:
        raise ValueError(
            f"{source} has model_type {ours.model_type}, expected one of {', '.join(CONFIGS)}"
        )
    converter = get_converter(to)
    names = {our_name: name for name, our_name in converter.ARCHITECTURES.items()}
    architecture = names[check_architecture(ours, names)]
    config_class = getattr(transformers, converter.CONFIG)
    require_classic_fields(ours, config_class)
    # the names of the field of ALBERT and OPT
    is_narrow = any(
        hasattr(config_class, name) for name in ("embedding_size", "word_embed_proj_dim")
    )
    if hasattr(ours, "embedding_size") and not is_narrow:
        require(ours, embedding_size=ours.hidden_size)
    require(ours, value_head_dim=ours.head_dim)
    mark = {VERSION_KEY: vanilla_transformer.__version__}  # this package may replace it
    config = config_class(
        **common_fields(ours), **converter.to_source_config(ours, architecture), **mark
    )
    files = TensorFiles(path)
    check_depth(ours, files.shapes, path)
    if not any(name.startswith("model.") for name in files.shapes):
        files.rename(lambda name: f"model.{name}")
    model = empty_model(getattr(transformers, architecture), config, files, ours)
    is_untied = getattr(ours, "tie_word_embeddings", None) is False
    if is_untied:
        # a head that the class ties, as T5's does, is written beside the embeddings
        tied = model._tied_weights_keys or {}
        model._tied_weights_keys = {
            name: source for name, source in tied.items() if name != "lm_head.weight"
        }
    steps, unused = steps_to_source(model, converter, ours, architecture, files)
    plan = attach_other_files(ConversionPlan(model, files, steps, unused), source, path)
    if is_untied:
        config.tie_word_embeddings = False  # T5's class always sets this to true
    return plan


def require_classic_fields(
    ours: VanillaTransformerConfig, config_class: type[PreTrainedConfig]
) -> None:
    """Raise ValueError for a field of `ours` that families without rotary positions cannot
    represent. Converters of families with them check these fields themselves."""
    names = {field.name for field in dataclasses.fields(config_class)}
    if names & {"rope_parameters", "rope_theta"}:
        return
    require(
        ours,
        num_key_value_heads=ours.num_attention_heads,
        use_qk_norm=False,
        sandwich_norm=False,
    )
    if "head_dim" not in config_class.attribute_map:  # as it is T5's d_kv
        require(
            ours,
            head_dim=ours.hidden_size // ours.num_attention_heads,
            norm_type="layer_norm",
            gated=False,
        )
    for name, value in {"skip_first_prenorm": False, "classifier_act": None}.items():
        if hasattr(ours, name):
            require(ours, **{name: value})


def steps_to_source(
    model: PreTrainedModel,
    converter: Converter,
    ours: VanillaTransformerConfig,
    architecture: str,
    files: TensorFiles,
) -> tuple[list[TensorStep], list[str]]:
    """Return (steps, unused) of a conversion of our `files` into `model`, a class of the family.

    `steps` make the tensors of `model`. `unused` are names of our tensors that belong to other
    heads. `architecture` is the class of the family, and `ours` our config. Raises ValueError if
    tensors are missing, differ from those that the family computes, or have no place in it.
    """
    parameters = model.state_dict().keys()
    maps = converter.tensor_maps(ours, model.config, architecture)
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


# --------------------------------------------------------------------------------------------- both


def download(source: str | PathLike, variant: str | None = None) -> Path:
    """Return the directory of `source`, downloaded if `source` is a Hub id.

    Pickled weights are downloaded only if there are no safetensors of `variant`. Raises
    NotADirectoryError for a file.
    """
    try:
        path = checkpoint_directory(source)
    except NotADirectoryError as error:
        raise NotADirectoryError(f"{error}; {STATE_DICTS}") from None
    if not Path(source).is_dir() and not has_weights(path, variant):
        # pickles only if there are no safetensors
        path = checkpoint_directory(source, ("pytorch_model*.bin",))
    return path


def read_known_config(source: str | PathLike, path: Path) -> PreTrainedConfig:
    """Return the config in the directory `path`, of a family in the registry or of ours.

    Raises:
        ValueError: for another family. The message calls the checkpoint `source`.
    """
    content, _ = read_raw_config(path)
    content = hub_names(content)
    model_type = content["model_type"]
    check_supported(content, source)
    if model_type is None:
        raise ValueError(f"{path / CONFIG} has the model_type None, expected a name")
    if model_type not in (*FAMILIES, *CONFIGS):
        raise ValueError(
            f"{source} has model_type {model_type}, expected one of {', '.join(FAMILIES)}"
        )
    config = build_config(CONFIGS.get(model_type) or CONFIG_MAPPING[model_type], content, path)
    check_supported(config.to_dict(), source)  # with the defaults of the class
    return config


def hub_names(content: dict) -> dict:
    """Return the `content` of a config.json with the names that transformers has for a family whose
    code was on the Hub first."""
    if content["model_type"] in ALIASES:
        old, new = ALIASES[content["model_type"]]
        names = [re.sub(f"^{old}", new, name) for name in content.get("architectures") or ()]
        content = content | {"model_type": new.lower(), "architectures": names}
    if content["model_type"] not in FAMILIES:
        return content
    converter = get_converter(content["model_type"])
    return converter.rename_fields(content) if hasattr(converter, "rename_fields") else content


def check_architecture(config: PreTrainedConfig, known: Collection[str]) -> str:
    name = (config.architectures or ["none"])[0]
    if name not in known:
        raise ValueError(
            f"architectures={config.architectures!r} cannot be converted, expected one of "
            f"{', '.join(known)}"
        )
    return name


def common_fields(config: PreTrainedConfig) -> Fields:
    # images have no tokens
    names = (*COMMON_FIELDS, *(TOKEN_FIELDS if hasattr(config, "vocab_size") else ()))
    fields = {name: getattr(config, name, None) for name in names}
    fields = {
        name: value
        for name, value in fields.items()
        if value is not None or name in SPECIAL_TOKEN_IDS
    }
    for name in fields.keys() & {*SPECIAL_TOKEN_IDS, "sep_token_id"}:
        tokens = fields[name] if isinstance(fields[name], list) else [fields[name]]
        if any(token is not None and not 0 <= token < config.vocab_size for token in tokens):
            logger.warning(
                f"{name}={fields[name]!r} is outside the vocabulary of {config.vocab_size}: set "
                f"to None"
            )
            fields[name] = None
    return fields


def empty_model(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    files: TensorFiles,
    source_config: PreTrainedConfig,
) -> PreTrainedModel:
    """Return a `model_class` on the meta device (shapes without values).

    `config.dtype` is set to that of `source_config`, or else of the first floating-point tensor in
    `files`, and `config.architectures` to the class. Raises ValueError if no tensor is floating
    point.
    """
    floats = [dtype for _, dtype in files.shapes.values() if dtype.is_floating_point]
    if not floats:
        raise ValueError(
            f"{files.path} has no floating-point tensors, found {sorted(files.shapes)[:5]}"
        )
    config.dtype = source_config.dtype or floats[0]
    config.architectures = [model_class.__name__]
    with torch.device("meta"):
        return model_class(config)


def check_missing(names: list[str], architecture: str, files: TensorFiles) -> None:
    if names:
        raise MissingTensors(
            f"{files.path} lacks tensors that {architecture} needs: {', '.join(names)}"
        )


def attach_other_files(plan: ConversionPlan, source: str | PathLike, path: Path) -> ConversionPlan:
    """Add the other files of the checkpoint to `plan`, and return it.

    These are the generation config, the tokenizer, and the files of image processors and
    sentence-transformers. `source` is the directory or Hub id, `path` its local directory. Raises
    ValueError for an invalid file.
    """
    plan.companions = companions(source, (path / MODULES).is_file())
    content, _ = read_raw_config(path)
    if content["model_type"] not in CONFIGS:  # the code beside our own weights is what is converted
        plan.left_out += omitted_files(source, content)
    if plan.model.can_generate():
        plan.generation_config = read_generation_config(path)
        plan.remarks += drop_unused_settings(plan.generation_config)
        set_default_length(plan.generation_config, plan.model.config)
        with readers_errors(path / GENERATION_CONFIG):
            plan.generation_config.validate(strict=True)
    plan.tokenizer = find_tokenizer(path)
    return plan


def set_default_length(generation: GenerationConfig, config: PreTrainedConfig) -> None:
    """Set a `max_length` that the source lacks, see `limit_generation`, and note that it was added.

    Without the note, nobody could tell it from a length that the source has. transformers would
    leave the note out of a generation config that it takes for a copy of fields of the model.
    """
    forget_default_length(vars(generation))
    before = generation.max_length
    limit_generation(generation, config)
    if generation.max_length != before:
        setattr(generation, DEFAULT_LENGTH, generation.max_length)
        generation._from_model_config = None


def read_generation_config(path: Path) -> GenerationConfig:
    """Return the generation config of the checkpoint in `path`.

    Without generation_config.json the fields come from config.json, where old checkpoints have
    them.
    """
    has_file = (path / GENERATION_CONFIG).is_file()
    file = path / (GENERATION_CONFIG if has_file else CONFIG)
    read_json(file)
    options = {} if has_file else {"config_file_name": CONFIG, "_from_model_config": True}
    with readers_errors(file):
        return GenerationConfig.from_pretrained(path, **options)
