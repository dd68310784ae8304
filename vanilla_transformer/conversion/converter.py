"""The protocol that the module of a model family implements, and the modules by family name."""

import importlib
from collections.abc import Collection
from typing import Protocol, cast

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from .fields import Fields
from .registry import FAMILIES
from .tensors import TensorMap


class Converter(Protocol):
    """The module of a family: its config, tensor maps and constants.

    `theirs` is a config of the family's own class, `ours` one of this project's. A module that
    converts back also has `to_source_config(ours, architecture)`, which returns the fields of their
    config. It need not check `ours`: a field of ours that is another one after the way there and
    back is an error (see `fields.require_kept`). `LOST` names fields that may be.
    """

    CONFIG: str
    """The name of their config class in transformers."""
    ARCHITECTURES: dict[str, str]
    """The names of their model classes in transformers, each with the name of ours."""
    PREFIX: str
    """What the names of the base model's tensors begin with in files of a model with a head."""

    def to_vanilla_config(
        self, theirs: PreTrainedConfig, architecture: str, names: Collection[str]
    ) -> Fields:
        """Return the fields of our config, except labels and special tokens, which `planning`
        converts.

        Args:
            theirs: config of the source.
            architecture: name of the source's class, a key of `ARCHITECTURES`.
            names: names of the source's tensors, without `PREFIX`.

        Raises:
            ValueError: for a field that our config cannot represent.
        """

    def tensor_maps(
        self, ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
    ) -> list[TensorMap]:
        """Return the maps of all tensors, including those of other heads.

        Maps whose tensors a model lacks are skipped. `architecture` is the name of the source's
        class, a key of `ARCHITECTURES`.
        """


def get_converter(model_type: str) -> Converter:
    """Return the module that converts the family `model_type`. Raises KeyError for a family that is
    not in the registry."""
    module = importlib.import_module(f".{FAMILIES[model_type].module}", __package__)
    return cast(Converter, module)
