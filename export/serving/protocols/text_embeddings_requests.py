"""The requests of text-embeddings-inference: their fields, and how inputs are checked and
parsed."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from ...errors import RequestError, TooLong, UsageError
from ...text.checks import Pair, check_string
from ...text.text_model import Cut
from .protocol import STRICT, Items, ModelName, json_schema, parse_inputs, short_repr

INPUTS = json_schema(str | list[str | list[int]] | list[int])
PROMPT_NAME = "name of a prompt of the export, which precedes each text"
TEXTS = json_schema(str | list[str])
IDS = json_schema(list[int] | list[list[int]])
ONE_OR_TWO = Annotated[list[str], Field(max_length=2)]
SEQUENCES = json_schema(str | ONE_OR_TWO | list[ONE_OR_TWO])


class TEIRequest(BaseModel):
    """A request of text-embeddings-inference. Unknown fields are rejected."""

    model_config = STRICT

    model: ModelName = None


class Truncation(TEIRequest):
    """The options of truncation."""

    truncate: bool | None = Field(
        None,
        description=(
            "true cuts texts and token ids that are too long; false rejects them; by default the "
            "server's --auto-truncate"
        ),
    )
    truncation_direction: Literal["left", "right", "Left", "Right"] = Field(
        "right", description="side at which texts are cut"
    )

    def cut(self, longest: int, truncates: bool) -> Cut:
        """Return the truncation to `longest` tokens. `truncates` is the server's default."""
        truncate = truncates if self.truncate is None else self.truncate
        return Cut(longest, side=self.truncation_direction.lower(), rejects=not truncate)


class EmbedAllRequest(Truncation):
    """Texts or token ids to embed, token by token."""

    inputs: Annotated[Any, INPUTS] = Field(
        description="text, token ids, or list of these", examples=["a dog"]
    )
    prompt_name: str | None = Field(None, description=PROMPT_NAME)


class EmbedSparseRequest(EmbedAllRequest):
    """Texts or token ids to embed as sparse vectors."""


class EmbedRequest(EmbedAllRequest):
    """Texts or token ids to embed."""

    normalize: bool = Field(True, description="scale each vector to length 1")
    dimensions: int | None = Field(
        None, ge=1, description="number of values of each vector, from its start"
    )


class PredictRequest(Truncation):
    """Texts or pairs of texts to classify."""

    inputs: Annotated[Any, SEQUENCES] = Field(
        description="text, pair of texts, or list of lists of one or two texts",
        examples=["a fine film"],
    )
    raw_scores: bool = Field(False, description="return logits instead of probabilities")


class RerankRequest(Truncation):
    """A query and texts to rank."""

    query: str = Field(description="query that the texts are compared with")
    texts: Items[str] = Field(description="texts to rank")
    raw_scores: bool = Field(False, description="return logits instead of probabilities")
    return_text: bool = Field(False, description="include the text of each rank in the response")


class Sentences(TEIRequest):
    """A sentence, and sentences to compare it with."""

    source_sentence: str = Field(description="sentence to compare")
    sentences: Items[str] = Field(description="sentences to compare it with")


class SimilarityParameters(Truncation):
    """The options of a request to /similarity."""

    prompt_name: str | None = Field(None, description=PROMPT_NAME)


class SimilarityRequest(TEIRequest):
    """Sentences to compare."""

    inputs: Sentences = Field(description="sentences to compare")
    parameters: SimilarityParameters | None = Field(None, description="options")


class TokenizeRequest(TEIRequest):
    """Texts to tokenize."""

    inputs: Annotated[Any, TEXTS] = Field(description="text or list of texts", examples=["a dog"])
    add_special_tokens: bool = Field(True, description="include special tokens")
    prompt_name: str | None = Field(None, description=PROMPT_NAME)


class DecodeRequest(TEIRequest):
    """Token ids to decode."""

    ids: Annotated[Any, IDS] = Field(
        description="token ids, or list of lists of token ids", examples=[[1, 2]]
    )
    skip_special_tokens: bool = Field(True, description="omit special tokens from the text")


def empty_error(name: str) -> RequestError:
    return RequestError(400, f"{name} is empty, expected at least one text")


def check_number(name: str, inputs: Sequence[Any], max_items: int) -> None:
    if not inputs:
        raise empty_error(name)
    if len(inputs) > max_items:
        raise TooLong(f"{name} has {len(inputs)} items, expected at most {max_items}")


def check_input(text: str, name: str) -> str:
    """Return `text`. Raises UsageError if it is empty, and ValueError if it is not valid Unicode.

    `name` is for the message. White space is accepted, as in text-embeddings-inference.
    """
    if not text:
        raise UsageError(f"{name} is '', expected at least one character", name)
    return check_string(text, name)


def parse_texts(name: str, value: Any, max_items: int, vocab_size: int) -> list[str | list[int]]:
    """Return the list of texts and rows of token ids in `value`, the field `name` of a request.

    Raises UsageError for invalid values, RequestError for none, and TooLong for more than
    `max_items`.
    """
    inputs = parse_inputs(name, value, vocab_size)
    check_number(name, inputs, max_items)
    for index, item in enumerate(inputs):
        if isinstance(item, str):
            check_input(item, f"{name} {index} of {len(inputs)}")
    return inputs


def parse_sequences(value: Any) -> tuple[list[str | Pair], bool]:
    """Return a list of texts and pairs of texts, and True if the request has a list of them.

    `value` is a text, a list of one or two strings (a text or a pair), or a list of such lists.
    Raises UsageError for other values.
    """
    if isinstance(value, str):
        return [check_input(value, "inputs")], False
    if isinstance(value, list) and all(isinstance(item, list) for item in value):
        return [
            parse_sequence(item, f"inputs {index} of {len(value)}")
            for index, item in enumerate(value)
        ], True
    return [parse_sequence(value, "inputs")], False


def parse_sequence(value: Any, name: str) -> str | Pair:
    if (
        not isinstance(value, list)
        or len(value) not in (1, 2)
        or not all(isinstance(part, str) for part in value)
    ):
        raise UsageError(
            f"{name} is {short_repr(value)}, expected a text, or a list of one or two texts"
        )
    parts = [check_input(part, name) for part in value]
    return parts[0] if len(parts) == 1 else (parts[0], parts[1])
