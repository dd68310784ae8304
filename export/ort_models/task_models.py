"""The classes of models that read whole sequences or images."""

from transformers import modeling_outputs as outputs

from .. import heads
from .base import ORTModel


class ORTModelForFeatureExtraction(ORTModel):
    """A model that returns `last_hidden_state`, and `pooler_output` if it has a pooler."""

    tasks = (heads.EMBED, heads.EMBED_IMAGES)
    output_class = outputs.BaseModelOutputWithPooling


class ORTModelForMaskedLM(ORTModel):
    """A masked language model."""

    tasks = (heads.FILL_MASK,)
    output_class = outputs.MaskedLMOutput


class ORTModelForSequenceClassification(ORTModel):
    """A classifier of texts or pairs of texts."""

    tasks = (heads.CLASSIFY,)
    output_class = outputs.SequenceClassifierOutput


class ORTModelForTokenClassification(ORTModel):
    """A classifier of tokens."""

    tasks = (heads.TAG,)
    output_class = outputs.TokenClassifierOutput


class ORTModelForQuestionAnswering(ORTModel):
    """A model that marks the span of an answer."""

    tasks = (heads.ANSWER,)
    output_class = outputs.QuestionAnsweringModelOutput


class ORTModelForMultipleChoice(ORTModel):
    """A model that scores choices."""

    tasks = (heads.CHOOSE,)
    output_class = outputs.MultipleChoiceModelOutput


class ORTModelForImageClassification(ORTModel):
    """A classifier of images."""

    tasks = (heads.CLASSIFY_IMAGES,)
    output_class = outputs.ImageClassifierOutput
