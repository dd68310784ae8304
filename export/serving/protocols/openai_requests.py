"""The requests of OpenAI's API: their fields, and how these are checked and parsed."""

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, create_model

from ...errors import RequestError, TooLong, UsageError
from ...inference.options import special_token
from ...shared.generation_options import FIELDS
from ...shared.options import COUNT, check_option, without_none
from ...text.text_model import TextModel, prompt
from ..generation import call_off_loop, check_characters
from .protocol import (
    EXPECTED,
    STRICT,
    ModelName,
    check_names_and_sizes,
    json_schema,
    parse_inputs,
    short_repr,
)

GREEDY = 1e-5  # lower temperatures mean greedy search, as in vLLM
TOO_LONG = "context_length_exceeded"
INPUTS = json_schema(str | list[str] | list[int] | list[list[int]])
STOPS = json_schema(str | Annotated[list[str], Field(max_length=4)] | None)
# Most options of `Runtime.generate` are fields of a request. These have another name at OpenAI.
RENAMED = {
    "max_new_tokens",
    "max_length",
    "num_return_sequences",
    "do_sample",
    "temperature",
    "top_p",
    "seed",
}
NO_FIELDS = {*RENAMED, "pad_token_id", "decoder_start_token_id"}
OPTIONS = [name for name in FIELDS if name not in NO_FIELDS]
# fields that are not supported, with the only value that is accepted
NEUTRAL = {
    "best_of": 1,
    "suffix": "",
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
}


class StreamOptions(BaseModel):
    """The options of a stream."""

    model_config = STRICT

    include_usage: bool | None = Field(
        None, description="add a last part with the number of tokens"
    )
    include_obfuscation: bool | None = Field(None, description="has no effect")


class OpenAIRequest(BaseModel):
    """A request of the API of OpenAI. A field that is null counts as absent; unknown fields are
    rejected."""

    model_config = {**STRICT, "allow_inf_nan": False}

    model: ModelName = None
    user: str | None = Field(None, description="has no effect")


class CompletionFields(OpenAIRequest):
    """A request for completions. A field that is null counts as absent; unknown fields are
    rejected."""

    prompt: Annotated[Any, INPUTS] = Field(
        None,
        description=(f"prompts to continue: {EXPECTED}; by default the model's start token"),
        examples=["ROMEO:"],
    )
    max_tokens: int | None = Field(
        16, ge=0, le=2**31, description="maximum number of new tokens; 0 is for echo only"
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        description=(
            "sampling temperature; 0 is greedy search; by default the temperature of "
            "generation_config.json, or 1"
        ),
    )
    top_p: float | None = Field(None, ge=0, le=1, description=FIELDS["top_p"].metadata["help"])
    n: int | None = Field(
        1,
        ge=1,
        le=128,
        description="number of completions per prompt; more than 1 needs sampling or num_beams",
    )
    stop: Annotated[Any, STOPS] = Field(
        None, description="text, or list of up to 4 texts, that ends a completion"
    )
    seed: int | None = Field(
        None, ge=0, description="seed of sampling, for reproducible completions"
    )
    echo: bool | None = Field(False, description="begin the completion with the prompt")
    logprobs: int | None = Field(
        None, ge=0, le=5, description="number of top tokens with log probabilities per position"
    )
    stream: bool | None = Field(
        False, description="send the completion in parts, as server-sent events"
    )
    stream_options: StreamOptions | None = Field(None, description="options of stream")
    best_of: int | None = Field(None, description="not supported except for 1")
    suffix: str | None = Field(None, description="not supported")
    logit_bias: dict[str, float] | None = Field(None, description="not supported")
    presence_penalty: float | None = Field(0, description="not supported except for 0")
    frequency_penalty: float | None = Field(0, description="not supported except for 0")


class EmbeddingRequest(OpenAIRequest):
    """A request for embeddings. A field that is null counts as absent; unknown fields are
    rejected."""

    input: Annotated[Any, INPUTS] = Field(
        description=f"inputs to embed: {EXPECTED}", examples=["a dog"]
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        "float",
        description="list of numbers, or base64 of the vector as little-endian float32",
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        description=(
            "length of the vectors: their first values, normalized; by default the length of the "
            "model's vectors"
        ),
    )


if TYPE_CHECKING:
    CompletionRequest = CompletionFields
else:
    option_fields = {
        name: (Any, Field(None, description=FIELDS[name].metadata["help"])) for name in OPTIONS
    }
    CompletionRequest = create_model(
        "CompletionRequest",
        __base__=CompletionFields,
        __doc__=CompletionFields.__doc__,
        **option_fields,
    )


def too_long(message: str) -> RequestError:
    return RequestError(400, f"the input is too long: {message}", code=TOO_LONG)


class CompletionPrompt(NamedTuple):
    ids: list[int]
    text: str | None = None  # None if the request has token ids


def check_fields(body: CompletionFields) -> None:
    """Raise UsageError if a field is not supported, or two fields contradict each other."""
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name)
        if value not in (None, neutral):
            expected = f"null or {json.dumps(neutral)}"
            raise UsageError(
                f"{name} is {short_repr(value)}, expected {expected}: nothing else is supported",
                name,
            )
    if body.stream_options is not None and not body.stream:
        raise UsageError(
            "stream_options is set without stream, expected stream=true", "stream_options"
        )
    if body.max_tokens == 0 and not body.echo:
        raise UsageError("max_tokens is 0 without echo=true, expected at least 1", "max_tokens")


def parse_stops(stop: Any) -> list[str]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > 4
        or not all(isinstance(text, str) and text for text in stops)
    ):
        raise UsageError(
            f"stop is {short_repr(stop)}, expected a text or a list of up to 4 texts, not empty",
            "stop",
        )
    return stops


def parse_options(body: CompletionFields, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `Runtime.generate` for a request.

    Fields missing in the request come from `defaults`, those of generation_config.json, as in vLLM.
    Otherwise OpenAI's defaults apply: one completion of at most 16 tokens, sampled from all tokens.
    The defaults of `n`, `max_tokens` and `num_beams` are always 1, 16 and 1. With beams the default
    temperature is 0. At temperature 0 the other fields of sampling have no effect.

    Raises:
        UsageError: if a value is invalid, or if two values contradict each other.
    """
    values = {name: getattr(body, name) for name in OPTIONS}
    options = {"num_beams": 1, **without_none(values)}
    check_names_and_sizes(options)
    check_option("num_beams", options["num_beams"], COUNT)
    beams, n = options["num_beams"], body.n or 1
    temperature = body.temperature
    if temperature is None:
        temperature = 0 if beams > 1 else defaults.get("temperature", 1.0)
    is_sampled = temperature >= GREEDY
    if is_sampled and beams > 1:
        seen = f"temperature is {temperature:g} with num_beams {beams}"
        raise UsageError(f"{seen}, expected 0, because beam search does not sample", "temperature")
    if not is_sampled and n > beams:
        expected = f"at most num_beams, {beams}," if beams > 1 else "1"
        raise UsageError(
            f"n is {n} with temperature {temperature:g}, expected {expected}: more completions "
            f"need sampling",
            "n",
        )
    options |= {
        "max_new_tokens": 16 if body.max_tokens is None else max(1, body.max_tokens),
        "num_return_sequences": n,
    }
    options["do_sample"] = is_sampled
    if is_sampled:
        sampling = {"temperature": temperature, "top_p": body.top_p, "seed": body.seed}
        options |= without_none(sampling)
        options.setdefault("top_k", defaults.get("top_k", 0))
    return options


async def parse_prompts(value: Any, runtime: TextModel, max_items: int) -> list[CompletionPrompt]:
    """Return the prompts in `value`, with their token ids. A missing or empty prompt becomes the
    model's start token.

    `value` is a text, a row of token ids, or a list of either; None is a missing prompt.

    Raises:
        UsageError: for invalid prompts, for more than `max_items`, and for an empty prompt if the
            model has no start token.
        RequestError: for a row of more token ids than `max_position_embeddings`, and for a text of
            more characters than such a row can have.
    """
    longest, vocab_size = (
        runtime.info.config[name] for name in ("max_position_embeddings", "vocab_size")
    )
    text_or_ids = "" if value is None else value
    inputs = parse_prompts_or_inputs("prompt", text_or_ids, max_items, vocab_size)
    if not isinstance(inputs[0], str):
        if (size := max(map(len, inputs))) > longest:
            seen = f"prompt has {size} tokens"
            raise too_long(f"{seen}, expected at most {longest}, the model's maximum")
        return [CompletionPrompt(ids) for ids in inputs]
    try:
        check_characters("prompt", map(len, inputs), longest)
    except TooLong as error:
        raise too_long(str(error)) from None
    encodings = await call_off_loop(sum(map(len, inputs)), runtime.encode, inputs, True)
    rows: list[list[int]] = [prompt(encoding) for encoding in encodings]
    first = special_token("bos_token_id", runtime.info.generation_config, runtime.info.config)
    for index, ids in enumerate(rows):
        if not ids and first is None:
            seen = (
                f"prompt {index} of {len(rows)} is {short_repr(inputs[index])}, which has no tokens"
            )
            raise UsageError(
                f"{seen}, expected words: the model has no bos_token_id to start with", "prompt"
            )
    return [CompletionPrompt(ids or [first], text) for ids, text in zip(rows, inputs, strict=True)]


def parse_prompts_or_inputs(name: str, value: Any, max_items: int, vocab_size: int) -> list[Any]:
    """Return the list of texts, or of rows of token ids, in `value`, the field `name` of a request.
    One text or row becomes a list.

    Raises:
        UsageError: for other values, for more than `max_items` and for ids outside the vocabulary.
            Lengths are not checked.
    """
    inputs = parse_inputs(name, value, vocab_size)
    if len({type(item) for item in inputs}) != 1:
        raise UsageError(f"{name} is {short_repr(value)}, expected {EXPECTED}", name)
    if len(inputs) > max_items:
        raise UsageError(f"{name} has {len(inputs)} items, expected at most {max_items}", name)
    return inputs
