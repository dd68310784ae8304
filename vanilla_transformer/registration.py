"""The public classes, registered with the Auto classes and with `transformers.pipeline`."""

import transformers

from . import configuration_vanilla_transformer as _configuration
from . import modeling_vanilla_transformer as _modeling
from .adapters import register_adapters
from .configuration_vanilla_transformer import *
from .modeling_vanilla_transformer import *
from .pipelines import (
    QuestionAnsweringPipeline,
    SummarizationPipeline,
    Text2TextGenerationPipeline,
    TranslationPipeline,
    register_pipelines,
)


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
