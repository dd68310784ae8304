"""Names of model classes in config.json: old names, names of other frameworks, and the model_type
that a class belongs to."""

from collections.abc import Collection

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from .configuration_vanilla_transformer import CONFIGS

FRAMEWORKS = ("TF", "Flax")
# heads of classes before transformers 3.0, by the end of the class name
OLD_HEADS = {
    "WithLMHeadModel": "ForConditionalGeneration",
    "ForMaskedLM": "ForConditionalGeneration",
}


def find_model_type(architecture: str) -> str | None:
    """Return the model_type of the class `architecture`, or None if transformers and this package
    have no such family."""
    for model_type, config_class in CONFIGS.items():
        if architecture in config_class.auto_classes().values():
            return model_type
    config_class = f"{family_prefix(architecture)}Config"
    return (
        getattr(transformers, config_class).model_type
        if config_class in CONFIG_MAPPING_NAMES.values()
        else None
    )


def family_prefix(architecture: str) -> str:
    """Return the family in the name of a class, such as "Bert" of "BertForMaskedLM", or an empty
    string."""
    name = without_framework(architecture)
    families = {config.removesuffix("Config") for config in CONFIG_MAPPING_NAMES.values()}
    return max(
        (family for family in families if family and name.startswith(family)), key=len, default=""
    )


def without_framework(architecture: str) -> str:
    return next(
        (architecture.removeprefix(name) for name in FRAMEWORKS if architecture.startswith(name)),
        architecture,
    )


def current_class(architecture: str, known: Collection[str], config_class: str) -> str | None:
    """Return the name in `known` for the class `architecture` of a config.json, or None if there is
    none.

    Names of other frameworks ("TF...") and of old heads are understood. Like transformers, only the
    head is read from the name; the family is that of `config_class`, such as "BertConfig".
    """
    head = without_framework(architecture).removeprefix(family_prefix(architecture))
    family = config_class.removesuffix("Config")
    names = (architecture, f"{family}{head}", f"{family}{OLD_HEADS.get(head)}")
    return next((name for name in names if name in known), None)
