"""The classes of models that read whole sequences or images."""

from transformers import modeling_outputs as outputs

from .. import heads
from .base import ORTModel


class ORTModelForFeatureExtraction(
    ORTModel,
    output_class=outputs.BaseModelOutputWithPooling,
    tasks=[heads.EMBED, heads.EMBED_IMAGES],
):
    """A model that returns states of tokens or images, and a pooled state if it has one."""


class ORTModelForMaskedLM(ORTModel, output_class=outputs.MaskedLMOutput, tasks=[heads.FILL_MASK]):
    """A model that scores the vocabulary at each token, to fill masked ones in."""


class ORTModelForSequenceClassification(
    ORTModel, output_class=outputs.SequenceClassifierOutput, tasks=[heads.CLASSIFY]
):
    """A model that scores the labels of a text or a pair of texts."""


class ORTModelForTokenClassification(
    ORTModel, output_class=outputs.TokenClassifierOutput, tasks=[heads.TAG]
):
    """A model that scores the labels of each token."""


class ORTModelForQuestionAnswering(
    ORTModel, output_class=outputs.QuestionAnsweringModelOutput, tasks=[heads.ANSWER]
):
    """A model that scores where the answer to a question begins and ends in a text."""


class ORTModelForMultipleChoice(
    ORTModel, output_class=outputs.MultipleChoiceModelOutput, tasks=[heads.CHOOSE]
):
    """A model that scores each choice of a question."""


class ORTModelForImageClassification(
    ORTModel, output_class=outputs.ImageClassifierOutput, tasks=[heads.CLASSIFY_IMAGES]
):
    """A model that scores the labels of an image."""
