"""The checkpoint of an export: its files, config, settings and weights, opened and checked once."""

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from vanilla_transformer import HAS_TORCH
from vanilla_transformer.checkpoint_files import (
    check_tokenizer_files,
    has_tokenizer,
    read_json,
    readers_errors,
)
from vanilla_transformer.companions import SPLADE, Companions, companions, rival_weights
from vanilla_transformer.errors import torch_missing
from vanilla_transformer.files import TOKEN_HEADS
from vanilla_transformer.generation_settings import read_generation_settings
from vanilla_transformer.source import Source

from ..errors import UsageError
from ..graphs.config import Config
from ..graphs.weights import CheckpointWeights, load_checked_weights
from ..heads import (
    CLASSIFY,
    ENCODER,
    HEADS,
    M3_EMBEDDING,
    MASKED_LM,
    READS_IMAGES,
    SPARSE_EMBEDDING,
    has_task,
)
from ..inference.export_info import CARD, TOKENIZER_FILES, default_options
from ..inference.options import PROMPT_LOOKUP
from ..inference.sentence_settings import SETTINGS_FILES, parse_settings
from ..text.checks import check_choice
from ..text.problems import field_problems
from ..text.tasks.classification import default_scoring

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from vanilla_transformer.conversion.tokenizers import FoundTokenizer

# fields of the module SpladePooling with their known values, the first of which is the default
SPLADE_FIELDS = {
    "pooling_strategy": ("max", "sum"),
    "activation_function": ("relu", "log1p_relu"),
}
LEFT_OUT = ("auto_map", "custom_pipelines", "_name_or_path")  # not in an export's config.json


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is exported.

    Args:
        source: its files; those of the converted checkpoint if it is of another family.
        generation: the content of generation_config.json; nothing for a model that does not
            generate.
        model: in torch, to compare with; `None` where torch is not installed.
        tokenizer: the tokenizer, if the checkpoint has no tokenizer.json.
        companions: the files of image processors and sentence-transformers.
    """

    source: Source
    config: Config
    weights: CheckpointWeights
    generation: dict[str, Any]
    model: "PreTrainedModel | None" = None
    tokenizer: "FoundTokenizer | None" = None
    companions: Companions = field(default_factory=Companions)

    @classmethod
    def open(cls, source: Source, image_size: str | None = None) -> "Checkpoint":
        """Return the checkpoint `source`, one of ours, after a check of its files.

        `image_size` is the option of `export`: "trained", "free" or None.

        Raises:
            FileNotFoundError, OSError: if files are missing or cannot be read.
            ImportError: if torch or the tokenizer's packages are missing and needed.
            UsageError: for an `image_size` of a model that reads text.
            ValueError: for files that are damaged, or a model that no target exports.
        """
        directory = source.directory
        tokenizer = tokenizer_to_write(directory)
        config = Config(exportable_config(source), source.architecture)
        if image_size is not None:
            set_image_size(source, config, image_size)
        files = companions(directory)
        set_sparse_head(source, config, files)
        set_token_heads(source, config, files)
        check_sentence_settings(directory, config, files)
        model = load_torch_model(source, files) if HAS_TORCH else None
        weights = (load_checked_weights if model is None else CheckpointWeights)(directory, config)
        generation = generation_settings(directory, config, model)
        default_options(generation, directory)
        return cls(source, config, weights, generation, model, tokenizer, files)

    @property
    def architecture(self) -> str:
        return self.config.architecture

    @property
    def generates(self) -> bool:
        return HEADS[self.architecture].generates

    @property
    def card(self) -> Path:
        """Path of README.md in the checkpoint that the user named. The file may be missing."""
        return self.source.root / CARD

    @property
    def pipeline(self) -> str | None:
        """The pipeline that the checkpoint carries, such as "translation", or None."""
        return next(iter(self.config.to_dict().get("custom_pipelines") or {}), None)

    @property
    def config_json(self) -> dict[str, Any]:
        """Content of the export's config.json: without references to code, and without the
        checkpoint's place."""
        content = self.config.to_dict() | {"dtype": "float32"}
        if "splade" in content:  # last, as the order depends on whether torch is installed
            content["splade"] = content.pop("splade")
        return {name: value for name, value in content.items() if name not in LEFT_OUT}


def exportable_config(source: Source) -> Any:
    """Return the config of `source`, one of ours. Raise ValueError if it is damaged, or no target
    can export the model."""
    config = source.config()
    if source.architecture not in HEADS:
        raise ValueError(f"{source} is a {source.architecture}, expected one of {', '.join(HEADS)}")
    if getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"{source} has add_cross_attention=True, which exports do not support: expected False"
        )
    return config


def set_image_size(source: Source, config: Config, image_size: str) -> None:
    """Set in `config` whether the graphs read images of any size: `image_size` "free", or "trained"
    for only one size.

    Raises UsageError for a model that does not read images.
    """
    if HEADS[config.architecture].reads != READS_IMAGES:
        raise UsageError(
            f"image_size={image_size!r} is not supported for {source}, a {config.architecture}: "
            "expected a vision model"
        )
    config.values.interpolate_pos_encoding = image_size == "free"


def set_sparse_head(source: Source, config: Config, companions: Companions) -> None:
    """Give `config` the head of sparse embeddings if the modules of the checkpoint pool its
    logits by SpladePooling.

    Raises ValueError for other modules besides it, another class than a masked language model, and
    a setting of the module that is unknown.
    """
    facts = companions.facts()
    kinds = [module["type"] for module in facts]
    if SPLADE not in kinds:
        return
    if len(facts) > 1 or config.architecture != MASKED_LM:
        raise ValueError(
            f"{source} is a {config.architecture} with the modules {', '.join(kinds)}, expected a "
            f"{MASKED_LM} with {SPLADE}"
        )
    splade = {key: facts[0].get(key, known[0]) for key, known in SPLADE_FIELDS.items()}
    for key, value in splade.items():
        check_choice(f"{key} of {SPLADE}", value, SPLADE_FIELDS[key])
    config.values.splade = splade
    config.architecture = SPARSE_EMBEDDING


def set_token_heads(source: Source, config: Config, companions: Companions) -> None:
    """Give `config` the heads of BGE-M3 if the checkpoint has their weights.

    Raises ValueError for another class than an encoder without a head.
    """
    if not companions.has_token_heads:
        return
    if config.architecture != ENCODER:
        raise ValueError(
            f"{source} is a {config.architecture} with {' and '.join(TOKEN_HEADS)} of BGE-M3, "
            f"expected a {ENCODER}"
        )
    config.architecture = M3_EMBEDDING


def check_sentence_settings(directory: Path, config: Config, companions: Companions) -> None:
    """Check the settings of sentence-transformers in `directory`, those of `companions`.

    Raises ValueError for an invalid value, a field of the module Transformer that would change
    vectors and is not applied, and an activation of a cross-encoder that is not supported.
    """
    contents = {
        name: read_json(file) for name, file in companions.files.items() if name in SETTINGS_FILES
    }
    settings = parse_settings(directory, contents)
    values = config.to_dict()
    for problem in field_problems(directory, settings, config.architecture, values):
        raise ValueError(problem)
    if has_task(config.architecture, CLASSIFY):
        default_scoring(directory, values, settings)


def load_torch_model(source: Source, companions: Companions) -> "PreTrainedModel":
    from vanilla_transformer.checkpoint import load_model

    if rivals := rival_weights(source.directory, companions.modules):
        # takes 0.1 s to import
        from vanilla_transformer.conversion.tensors import unequal_weights

        for note in unequal_weights(source, rivals):
            warnings.warn(note, stacklevel=2)
    return load_model(source)


def tokenizer_to_write(directory: Path) -> "FoundTokenizer | None":
    """Return the tokenizer in `directory` if tokenizer.json is missing and must be made from it,
    else None.

    Raises:
        ValueError: for a tokenizer file that is damaged.
        ImportError: where the tokenizer needs torch and torch is not installed.
    """
    check_tokenizer_files(directory)
    for name in TOKENIZER_FILES:
        if (directory / name).is_file():
            (read_json if name == "tokenizer_config.json" else open_tokenizer)(directory / name)
    if (directory / "tokenizer.json").is_file() or not has_tokenizer(directory):
        return None
    if not HAS_TORCH:
        raise torch_missing(
            f"{directory} has no tokenizer.json, and building it from the other files"
        )
    from vanilla_transformer.conversion.tokenizers import find_tokenizer

    return find_tokenizer(directory)


def open_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json. Raise ValueError if the file is damaged."""
    read_json(path)
    with readers_errors(path):
        return Tokenizer.from_file(str(path))


def generation_settings(
    directory: Path, config: Config, model: "PreTrainedModel | None"
) -> dict[str, Any]:
    """Return the content of generation_config.json without settings that have no effect; empty for
    a model that does not generate.

    Without `model`, it is read and checked here. There is a warning for each setting that is left
    out here, also for prompt lookup.
    """
    if not HEADS[config.architecture].generates:
        return {}
    notes: list[str] = []
    if model is not None:  # its settings were checked when it was loaded
        settings = json.loads(model.generation_config.to_json_string())
    else:
        settings, notes = read_generation_settings(directory, config.to_dict())
    for name in PROMPT_LOOKUP:
        if (value := settings.pop(name, None)) is not None:
            notes.append(f"generation_config: {name}={value!r} is left out: no export can use it")
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return settings
