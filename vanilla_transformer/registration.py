"""The public classes, registered with the Auto classes, with `transformers.pipeline` and with
PEFT."""

import re
import sys

import transformers

from . import configuration_vanilla_transformer as _configuration
from . import modeling_vanilla_transformer as _modeling
from .configuration_vanilla_transformer import *
from .modeling_vanilla_transformer import *
from .pipelines import (
    QuestionAnsweringPipeline,
    SummarizationPipeline,
    Text2TextGenerationPipeline,
    TranslationPipeline,
    register_pipelines,
)

# PEFT has a dictionary by model type for each of its methods, of the modules that it adapts
DICTIONARY = re.compile(r"TRANSFORMERS_MODELS_TO_(\w+)_MODULES_MAPPING")
QUERIES_AND_VALUES = ["q_proj", "v_proj"]  # Hu et al. 2021, LoRA, section 7.1
TARGET_MODULES = {
    "IA3_TARGET": ["k_proj", "v_proj", "down_proj"],  # Liu et al. 2022, section 3.3
    "IA3_FEEDFORWARD": ["down_proj"],  # those of them whose input is scaled
    "LNTUNING_TARGET": ["self_attn_norm", "cross_attn_norm", "feed_forward_norm"],
}


def register_auto_classes():
    """Register all configs and models for their Auto classes, by each config's
    `default_auto_map`."""
    for config_class in _configuration.CONFIGS.values():
        config_class.register_for_auto_class()
        transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        register_adapters(config_class.model_type)
        for auto_name, model_name in config_class.auto_classes().items():
            model_class = getattr(_modeling, model_name)
            # Saving a class that is registered for an Auto class copies its code beside the
            # weights.
            model_class.register_for_auto_class(auto_name)
            getattr(transformers, auto_name).register(config_class, model_class, exist_ok=True)


def register_adapters(model_type: str) -> None:
    """Add `model_type` to PEFT's dictionaries of target modules, if PEFT has been imported.

    Existing entries stay.
    """
    constants = sys.modules.get("peft.utils.constants")
    for name, dictionary in vars(constants).items() if constants else ():
        if match := DICTIONARY.fullmatch(name):
            dictionary.setdefault(
                model_type, list(TARGET_MODULES.get(match[1], QUERIES_AND_VALUES))
            )


register_auto_classes()
register_pipelines()

__all__ = [
    *_configuration.__all__,
    *_modeling.__all__,
    "QuestionAnsweringPipeline",
    "SummarizationPipeline",
    "Text2TextGenerationPipeline",
    "TranslationPipeline",
]
