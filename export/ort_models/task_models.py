"""The classes of models that read whole sequences or images."""

from typing import Any

from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from .. import heads
from .base import ORTModel, build_output, to_numpy, warn_of_ignored

# outputs of graphs that transformers' outputs name otherwise
OUTPUT_NAMES = {"prediction_logits": "logits"}


class ORTModelForTask(ORTModel):
    """A model whose graph reads whole sequences or images. Its subclasses name the outputs."""

    output_class: Any = None

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        pixel_values: Any = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the outputs of the graph, as torch tensors on the device of the input, or as
        arrays for arrays.

        Args:
            input_ids: (B, S), for multiple choice (B, C, S).
            attention_mask: shape of `input_ids`, by default all 1.
            token_type_ids: shape of `input_ids`, by default all 0.
            pixel_values: (B, C, H, W), for a model that reads images.
            return_dict: whether the output is an object with names, by default True.
            kwargs: inputs of other models, which are ignored with a warning.

        Raises:
            ValueError: as `Runtime.outputs`.
        """
        warn_of_ignored(self, kwargs)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "pixel_values": pixel_values,
        }
        outputs = self.runtime.outputs(**to_numpy(inputs))
        named = {OUTPUT_NAMES.get(name, name): array for name, array in outputs.items()}
        like = pixel_values if input_ids is None else input_ids
        return build_output(self.output_class, named, like, return_dict)


class ORTModelForFeatureExtraction(ORTModelForTask):
    """A model that returns states: `last_hidden_state`, and `pooler_output` if it has a pooler."""

    tasks = (heads.EMBED, heads.EMBED_IMAGES)
    auto_class = AutoModel
    output_class = BaseModelOutputWithPooling


class ORTModelForMaskedLM(ORTModelForTask):
    """A masked language model."""

    tasks = (heads.FILL_MASK,)
    auto_class = AutoModelForMaskedLM
    output_class = MaskedLMOutput


class ORTModelForSequenceClassification(ORTModelForTask):
    """A classifier of texts or pairs of texts."""

    tasks = (heads.CLASSIFY,)
    auto_class = AutoModelForSequenceClassification
    output_class = SequenceClassifierOutput


class ORTModelForTokenClassification(ORTModelForTask):
    """A classifier of tokens."""

    tasks = (heads.TAG,)
    auto_class = AutoModelForTokenClassification
    output_class = TokenClassifierOutput


class ORTModelForQuestionAnswering(ORTModelForTask):
    """A model that marks the span of an answer."""

    tasks = (heads.ANSWER,)
    auto_class = AutoModelForQuestionAnswering
    output_class = QuestionAnsweringModelOutput


class ORTModelForMultipleChoice(ORTModelForTask):
    """A model that scores choices."""

    tasks = (heads.CHOOSE,)
    auto_class = AutoModelForMultipleChoice
    output_class = MultipleChoiceModelOutput


class ORTModelForImageClassification(ORTModelForTask):
    """A classifier of images."""

    tasks = (heads.CLASSIFY_IMAGES,)
    auto_class = AutoModelForImageClassification
    output_class = ImageClassifierOutput
