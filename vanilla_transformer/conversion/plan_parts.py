"""Parts of the plans of both directions: the opened source, its config, and its other files."""

import re
from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..checkpoint import CONFIG, limit_generation
from ..checkpoint_config import CONFIGS, build_config
from ..checkpoint_files import GENERATION_CONFIG, read_json, readers_errors
from ..companions import companions
from ..generation_settings import DEFAULT_LENGTH, drop_unused_settings, forget_default_length
from ..linked_copies import errors_name
from ..source import Source
from ..variants import has_weights, linked_variant
from .conversion_plan import ConversionPlan
from .converter import Converter, get_converter
from .fields import Fields, Ours, TensorNames, Theirs, read_fields
from .registry import ALIASES, FAMILIES
from .rejected import check_supported
from .tensors import TensorFiles
from .tokenizers import find_tokenizer

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
# files that transformers reads with the weights, and that a converted checkpoint cannot keep
ADAPTERS = re.compile(
    r"adapter_config\.json|adapter_model\.(safetensors|bin)|custom_generate/generate\.py"
)


def plan_variant(
    name: str | PathLike, variant: str | None, make_plan: Callable[[Source], ConversionPlan]
) -> ConversionPlan:
    """Return `make_plan(source)` for the checkpoint `name`, downloaded if it is a Hub id.

    For a `variant` such as "fp16", the source is a temporary copy in which
    model.fp16.safetensors is called model.safetensors.
    """
    source = download(name, variant)
    if variant is None:
        return make_plan(source)
    return plan_copy(source, linked_variant(source.directory, variant), make_plan)


def plan_copy(
    source: Source, copy: TemporaryDirectory, make_plan: Callable[[Source], ConversionPlan]
) -> ConversionPlan:
    """Return `make_plan` of the files in `copy`, a copy of those of `source`.

    The plan keeps the copy alive. Errors name the directory of `source` in place of the copy.
    """
    path = Path(copy.name)
    with errors_name(source.directory, path):
        plan = make_plan(source.at(path))
    plan.temporaries.append(copy)
    return plan


def download(name: str | PathLike, variant: str | None = None) -> Source:
    """Return the open checkpoint `name`, downloaded if it is a Hub id.

    Pickled weights are downloaded only if there are no safetensors of `variant`. Raises
    NotADirectoryError for a file.
    """
    try:
        source = Source.open(name)
    except NotADirectoryError as error:
        example = "examples/convert_torch_transformer.py"
        raise NotADirectoryError(
            f"{error}; for the state dict of a torch.nn.Transformer see {example}"
        ) from None
    if not has_weights(source.download(), variant):
        source.download(("pytorch_model*.bin",))
    return source


def read_known_config(source: Source) -> PreTrainedConfig:
    """Return the config of `source`, a checkpoint of a family in the registry or of ours.

    Raises:
        ValueError: for another family.
    """
    path, content = source.directory, hub_names(source.content)
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
    return get_converter(content["model_type"]).rename_fields(content)


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


def vanilla_config(
    theirs: Theirs, converter: Converter, names: TensorNames, config_class: type[Ours]
) -> Ours:
    """Return `theirs`, the config of the source, as a `config_class`.

    `names` are those of the source's tensors. Raises ValueError for a field that our config cannot
    represent.
    """
    fields = common_fields(theirs) | read_fields(theirs, converter.FIELDS) | converter.FIXED
    return config_class(**fields | converter.to_vanilla_config(theirs, names))


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


class MissingTensors(ValueError):
    """Tensors that a class needs and a source lacks."""


def check_missing(names: list[str], architecture: str, files: TensorFiles) -> None:
    if names:
        raise MissingTensors(
            f"{files.path} lacks tensors that {architecture} needs: {', '.join(names)}"
        )


def attach_other_files(plan: ConversionPlan, source: Source) -> ConversionPlan:
    """Add the other files of the checkpoint `source` to `plan`, and return it.

    These are the generation config, the tokenizer, and the files of image processors and
    sentence-transformers. Raises ValueError for an invalid file.
    """
    path = source.directory
    plan.companions = companions(path)
    if not source.is_ours:  # the code beside our own weights is what is converted
        plan.left_out += omitted_files(source)
    if plan.model.can_generate():
        plan.generation_config = read_generation_config(path)
        plan.remarks += drop_unused_settings(plan.generation_config)
        set_default_length(plan.generation_config, plan.model.config)
        with readers_errors(path / GENERATION_CONFIG):
            plan.generation_config.validate(strict=True)
    plan.tokenizer = find_tokenizer(path)
    if plan.tokenizer and not plan.model.can_generate():
        types = source.content["model_type"], plan.model.config.model_type
        check_token_types(source, types, plan.tokenizer.tokenizer.model_input_names)
    return plan


def check_token_types(source: Source, model_types: Iterable[str], inputs: Iterable[str]) -> None:
    """Raise ValueError if the tokenizer gives a GPT-2 token types among its `inputs`: it adds the
    embeddings of the tokens 0 and 1 for them, where other models ignore them or have a table.

    `model_types` are those of `source` and of what it becomes. `generate` passes no token types.
    """
    if "gpt2" in model_types and "token_type_ids" in inputs:
        raise ValueError(
            f"{source} has a tokenizer that returns token_type_ids, for which GPT-2 adds the "
            "embeddings of the tokens 0 and 1: expected model_input_names without it in "
            "tokenizer_config.json"
        )


def omitted_files(source: Source) -> list[str]:
    """Return the names of files in `source` that change its results and are not converted.

    These are adapters, and the code that config.json names in `auto_map`.
    """
    references = source.content.get("auto_map")
    references = references.values() if isinstance(references, dict) else ()
    code = {
        f"{reference.partition('.')[0]}.py"
        for reference in references
        if isinstance(reference, str) and "--" not in reference
    }
    return [name for name in source.file_names() if ADAPTERS.fullmatch(name) or name in code]


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
