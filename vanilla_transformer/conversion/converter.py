"""The parts of a model family's conversion, read from the module of the family."""

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from .fields import Fields, Names, Ours, TensorNames, Theirs
from .registry import FAMILIES
from .tensors import TensorFiles, TensorMap


@dataclass(frozen=True)
class Converter:
    """The parts of a family's module: its classes, its config, its tensor maps and constants.

    `theirs` is a config of the family's own class, `ours` one of this project's. The first of the
    `architectures` of either is the class that is converted.

    Attributes:
        ARCHITECTURES: the names of their model classes in transformers, such as "BertForMaskedLM",
            each with the name of ours. That of the base model is the first. In the module they are
            `CLASSES`, without the name of the family.
        to_vanilla_config: (theirs, names) -> the fields of our config, except `FIELDS`, `FIXED`,
            labels and special tokens. `names` are those of the source's tensors, without
            `base_prefix`. Raises ValueError for a field that our config cannot represent.
        tensor_maps: (ours, theirs) -> the maps of all tensors, including those of other heads. Maps
            whose tensors a model lacks are skipped.
        to_source_config: (ours) -> the fields of their config except `FIELDS`, if the family
            converts back. It need not check `ours`: a field of ours that is another one after the
            way there and back is an error (see `fields.require_kept`).
        rename_fields: the content of a config.json -> the same with the names in transformers.
        check_tensors: (files, theirs) raises ValueError for tensors that are not converted and
            would be missed.
        FIELDS: fields of ours, each with the field of theirs of the same meaning, for both ways.
        FIXED: fields of ours that have the same value for all checkpoints.
        LOST: fields of ours that may change on the way there and back.
        UNUSED: a pattern of names of tensors that the class does not read.
        HUB_PREFIX: what stands for `base_prefix` in files of the Hub.
        IMAGE_PROCESSOR: the class that reads a preprocessor_config.json without a class name.
        SHARES_LAYERS: True if all layers have the weights of one.
        TRANSLATES: True if all checkpoints with a language model head translate.
    """

    ARCHITECTURES: dict[str, str]
    to_vanilla_config: Callable[[Theirs, TensorNames], Fields]
    tensor_maps: Callable[[Ours, Theirs], list[TensorMap]]
    to_source_config: Callable[[Ours], Fields] | None = None
    rename_fields: Callable[[Fields], Fields] = lambda content: content
    check_tensors: Callable[[TensorFiles, Theirs], None] = lambda files, theirs: None
    FIELDS: Names = field(default_factory=dict)
    FIXED: Fields = field(default_factory=dict)
    LOST: tuple[str, ...] = ()
    UNUSED: str = "$^"
    HUB_PREFIX: str | None = None
    IMAGE_PROCESSOR: str | None = None
    SHARES_LAYERS: bool = False
    TRANSLATES: bool = False


class ForeignCheckpoint(NamedTuple):
    """A checkpoint of another family.

    Attributes:
        theirs: its config, whose first architecture is the class that is converted.
        converter: the module of its family.
        files: its tensors, under the names of the base model.
    """

    theirs: Theirs
    converter: Converter
    files: TensorFiles


def get_converter(model_type: str) -> Converter:
    """Return what converts the family `model_type`, from its module.

    Raises KeyError for a family that is not in the registry.
    """
    module = importlib.import_module(f".{FAMILIES[model_type].module}", __package__)
    name = CONFIG_MAPPING_NAMES[model_type].removesuffix("Config")
    classes = {f"{name}{end}": ours for end, ours in module.CLASSES.items()}
    parts = vars(module).keys() & Converter.__dataclass_fields__.keys()
    return Converter(classes, **{part: getattr(module, part) for part in parts})


def base_prefix(converter: Converter) -> str:
    """Return what the names of the base model's tensors begin with in files of a model with a head,
    such as "bert."."""
    base_model = getattr(transformers, next(iter(converter.ARCHITECTURES)))
    return f"{base_model.base_model_prefix}."


def as_class(theirs: Theirs, architecture: str) -> Theirs:
    """Return a copy of `theirs` for the class `architecture`, the first of its `architectures`."""
    theirs = copy.deepcopy(theirs)
    theirs.architectures = [architecture, *(theirs.architectures or ())]
    return theirs
