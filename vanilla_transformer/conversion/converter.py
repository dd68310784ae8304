"""The protocol that the module of a model family implements, and the modules by family name."""

import copy
import importlib
from typing import Protocol, cast

import transformers

from .fields import Fields, Ours, TensorNames, Theirs
from .registry import FAMILIES
from .tensors import TensorMap


class Converter(Protocol):
    """The module of a family: its config, tensor maps and constants.

    `theirs` is a config of the family's own class, `ours` one of this project's. The first of the
    `architectures` of either is the class that is converted. A module that converts back also has
    `to_source_config(ours)`, which returns the fields of their config. It need not check `ours`: a
    field of ours that is another one after the way there and back is an error (see
    `fields.require_kept`). `LOST` names fields that may be.
    """

    ARCHITECTURES: dict[str, str]
    """The names of their model classes in transformers, that of the base model first, each with the
    name of ours."""

    def to_vanilla_config(self, theirs: Theirs, names: TensorNames) -> Fields:
        """Return the fields of our config, except labels and special tokens, which
        `plan_parts.common_fields` copies.

        `names` are those of the source's tensors, without `base_prefix`. Raises ValueError for a
        field that our config cannot represent.
        """

    def tensor_maps(self, ours: Ours, theirs: Theirs) -> list[TensorMap]:
        """Return the maps of all tensors, including those of other heads.

        Maps whose tensors a model lacks are skipped.
        """


def get_converter(model_type: str) -> Converter:
    """Return the module that converts the family `model_type`. Raises KeyError for a family that is
    not in the registry."""
    module = importlib.import_module(f".{FAMILIES[model_type].module}", __package__)
    return cast(Converter, module)


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
