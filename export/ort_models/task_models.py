"""The classes of models that read whole sequences or images."""

from transformers import modeling_outputs as outputs

from .. import heads
from .base import ORTModel


class ORTModelForFeatureExtraction(ORTModel):
    """A model that returns states of tokens, `last_hidden_state`, and `pooler_output` if it has
    any."""

    tasks = (heads.EMBED, heads.EMBED_IMAGES)
    output_class = outputs.BaseModelOutputWithPooling


class ORTModelForMaskedLM(ORTModel):
    """A model that scores the vocabulary at each token, to fill masked ones in."""

    tasks = (heads.FILL_MASK,)
    output_class = outputs.MaskedLMOutput


class ORTModelForSequenceClassification(ORTModel):
    """A model that scores the labels of a text or a pair of texts."""

    tasks = (heads.CLASSIFY,)
    output_class = outputs.SequenceClassifierOutput


class ORTModelForTokenClassification(ORTModel):
    """A model that scores the labels of each token."""

    tasks = (heads.TAG,)
    output_class = outputs.TokenClassifierOutput


class ORTModelForQuestionAnswering(ORTModel):
    """A model that scores where the answer to a question begins and ends in a text."""

    tasks = (heads.ANSWER,)
    output_class = outputs.QuestionAnsweringModelOutput


class ORTModelForMultipleChoice(ORTModel):
    """A model that scores each choice of a question."""

    tasks = (heads.CHOOSE,)
    output_class = outputs.MultipleChoiceModelOutput


class ORTModelForImageClassification(ORTModel):
    """A model that scores the labels of an image."""

    tasks = (heads.CLASSIFY_IMAGES,)
    output_class = outputs.ImageClassifierOutput
