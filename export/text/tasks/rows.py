"""Helpers of all tasks: check and tokenize texts, and run rows of similar length together."""

import contextlib
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tokenizers import Encoding

from ...errors import TokenizerError, UsageError, did_you_mean
from ...heads import HEADS, READS_CHOICES, Task, has_task
from ...inference.export_info import json_object
from ...inference.inputs import (
    bucket_by_length,
    check_positions,
    num_positions,
    pad_sequences,
)
from ...inference.options import is_integer
from ..tokenization_spaces import clean_up, cleans_up

if TYPE_CHECKING:
    from ...text_runtime import TextRuntime

TOKENIZER_CONFIG = "tokenizer_config.json"
NO_LIMIT = 10**9  # tokens; transformers writes 10**30 for a tokenizer without a limit
# Special tokens of the tokenizer classes, for an old tokenizer_config.json without special tokens.
CONVENTIONS = {
    "mask_token": ("[MASK]", "<mask>"),
    "cls_token": ("[CLS]", "<s>"),
    "unk_token": ("[UNK]", "<unk>"),
}

Pair = tuple[str, str]


# ------------------------------------------------------------------------------------ the tokenizer


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings that tokenizer_config.json adds to tokenizer.json, as transformers reads them.
    `longest` is the maximum number of tokens if a task truncates texts. `special_tokens` are ids by
    name. `has_types` is True if the tokens of a pair have token types."""

    longest: int | None
    special_tokens: dict[str, int | None]
    has_types: bool
    cleans_up: bool
    truncation_side: str
    padding_side: str


@contextlib.contextmanager
def tokenizer_errors(path: Path) -> Iterator[None]:
    """Convert all errors of `tokenizers` in the block to TokenizerError. `path` is the tokenizer,
    for the message.

    A panic of its Rust code is not an `Exception`. It happens for regular expressions that never
    end.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"the tokenizer of {path} failed: {error}") from None


def tokenizer_settings(runtime: "TextRuntime") -> TokenizerSettings:
    """Return the tokenizer settings of `runtime`'s export."""
    info = runtime.info
    config = json_object(info.directory / TOKENIZER_CONFIG, info.read(TOKENIZER_CONFIG) or b"{}")
    is_silent = not any(name.endswith("_token") for name in config)
    tokens = {
        name: token_id(runtime, config.get(name), names if is_silent else ())
        for name, names in CONVENTIONS.items()
    }
    longest = config.get("model_max_length")
    is_number = isinstance(longest, int | float) and not isinstance(longest, bool)
    is_limit = is_number and 0 < longest < NO_LIMIT
    types = config.get("model_input_names", ["token_type_ids"])
    return TokenizerSettings(
        int(longest) if is_limit else None,
        tokens,
        (runtime.info.config.get("type_vocab_size") or 0) > 1 and "token_type_ids" in types,
        cleans_up(config, type(runtime.tokenizer.model).__name__),
        config.get("truncation_side", "right"),
        config.get("padding_side", "right"),
    )


def token_id(runtime: "TextRuntime", token: Any, otherwise: Iterable[str]) -> int | None:
    """Return the id of `token`, a string or a dict with the key "content".

    If it is neither, return the id of the first of the tokens `otherwise` that exists. Return None
    if there is none.
    """
    content = token.get("content") if isinstance(token, dict) else token
    names = [content] if isinstance(content, str) else otherwise
    ids = map(runtime.tokenizer.token_to_id, names)
    return next((id for id in ids if id is not None), None)


def decode(runtime: "TextRuntime", ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Return the text of the token ids `ids`, the same as `AutoTokenizer.decode`.
    `skip_special_tokens` leaves out tokens such as the end token."""
    [text] = decode_batch(runtime, [list(ids)], skip_special_tokens)
    return text


def decode_batch(
    runtime: "TextRuntime", rows: list[list[int]], skip_special_tokens: bool
) -> list[str]:
    """Return the text of each row of token ids, the same as `AutoTokenizer.batch_decode`.
    `skip_special_tokens` leaves out tokens such as the end token."""
    with tokenizer_errors(runtime.path):
        texts = runtime.tokenizer.decode_batch(rows, skip_special_tokens=skip_special_tokens)
    return [clean_up(text) for text in texts] if runtime.tokenizer_settings.cleans_up else texts


def join(runtime: "TextRuntime", tokens: Sequence[str]) -> str:
    """Return the text of `tokens`, which are strings, joined by the tokenizer's decoder."""
    decoder = runtime.tokenizer.decoder
    return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))


# ---------------------------------------------------------------------------------------- the texts


def require(runtime: "TextRuntime", task: Task) -> None:
    """Raise ValueError if the head of the export does not support `task`."""
    if not has_task(runtime.info.architecture, task):
        seen = f"{task.method} does not support this export, a {runtime.info.architecture}"
        expected = [name for name, head in HEADS.items() if task in head.tasks]
        raise ValueError(f"{seen}, expected one of {', '.join(expected)}")


def check_list(texts: object, expected: str) -> Sequence[Any]:
    """Return `texts`. Raises ValueError unless it is a list or tuple that is not empty. `expected`
    names its items in the message."""
    if not isinstance(texts, list | tuple):
        raise ValueError(f"texts is {reprlib.repr(texts)}, expected a list of {expected}")
    if not texts:
        raise ValueError("texts is empty, expected at least one text")
    return texts


def check_text(text: object, name: str) -> str:
    """Return `text`. Raises ValueError unless it is a string that is not blank. `name` is what the
    message calls it."""
    checked = check_string(text, name)
    if not checked.strip():
        raise ValueError(f"{name} is {text!r:.40}, expected a text that is not blank")
    return checked


def check_string(text: object, name: str) -> str:
    """Return `text`. Raises ValueError unless it is a string of valid Unicode; it may be blank.
    `name` is what the message calls it."""
    if isinstance(text, dict) or (isinstance(text, list | tuple) and len(text) == 2):
        raise ValueError(
            f"{name} is the pair {reprlib.repr(text)}, expected one text: this head does not read "
            f"pairs"
        )
    if not isinstance(text, str):
        raise ValueError(f"{name} is {reprlib.repr(text)}, expected a string")
    check_unicode(text, name)
    return text


def check_unicode(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode: {error}") from None


def check_texts(texts: object) -> list[str]:
    """Return `texts` as a list. Raises ValueError unless they are a list of strings that are not
    blank, and for an empty list."""
    return [check_text(text, name) for text, name in with_names(check_list(texts, "strings"))]


def check_strings(texts: object) -> list[str]:
    """Return `texts` as a list. Raises ValueError unless they are a list of strings, which may be
    blank, and for an empty list."""
    return [check_string(text, name) for text, name in with_names(check_list(texts, "strings"))]


def check_texts_or_pairs(texts: object) -> list[str | Pair]:
    """Return strings unchanged and pairs as tuples. Raises ValueError for other items, an empty
    list, or no list.

    A pair is two strings in a list, or a dict `{"text": ..., "text_pair": ...}`. Texts may be
    blank.
    """
    items = with_names(check_list(texts, "strings or pairs"))
    return [
        check_string(text, name) if isinstance(text, str) else parse_pair(text, name)
        for text, name in items
    ]


def with_names(texts: Sequence[Any]) -> list[tuple[Any, str]]:
    """Return (text, name) for each text, with a name for errors such as "text 0 of 3"."""
    return [(text, f"text {index} of {len(texts)}") for index, text in enumerate(texts)]


def parse_pair(value: object, name: str) -> Pair:
    """Return a pair of strings as a tuple.

    `value` is a list of two strings, or a dict `{"text": ..., "text_pair": ...}` as in
    transformers' pipeline. Raises ValueError for another value. `name` is what the message calls
    it.
    """
    parts: Any = value
    if isinstance(value, dict):
        if value.keys() != {"text", "text_pair"}:
            raise ValueError(
                f"{name} has the keys {reprlib.repr(list(value))}, expected 'text' and 'text_pair'"
            )
        parts = value["text"], value["text_pair"]
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise ValueError(f"{name} is {reprlib.repr(value)}, expected two texts, (text, text_pair)")
    return check_string(parts[0], f"the first part of {name}"), check_string(
        parts[1], f"the second part of {name}"
    )


def check_choice(name: str, value: object, known: Iterable[object]) -> None:
    if value not in known:
        seen = f"{name} is {value!r:.60}, expected one of {', '.join(map(repr, known))}"
        raise UsageError(f"{seen}{did_you_mean(str(value), map(str, known))}", name)


def check_count(name: str, value: object, min_value: int = 1, max_value: int | None = None) -> None:
    if not is_integer(value) or value < min_value or (max_value is not None and value > max_value):
        upper = "" if max_value is None else f" and at most {max_value}"
        raise UsageError(
            f"{name} is {value!r:.60}, expected an integer of at least {min_value}{upper}", name
        )


# ----------------------------------------------------------------------------------------- the rows


class Cut(NamedTuple):
    """The truncation of texts to `longest` tokens. `strategy` selects the part of a pair that is
    cut. `stride` is the number of tokens that windows of one text share. `side` is the tokenizer's
    by default."""

    longest: int
    strategy: str = "longest_first"
    stride: int = 0
    side: str | None = None


class TokenRow(NamedTuple):
    """Token ids from a request, and the token type of each. It replaces an `Encoding`."""

    ids: list[int]
    type_ids: list[int]


def encode_texts(
    runtime: "TextRuntime", texts: Sequence[str | Pair], cut: Cut | None = None
) -> list[Encoding]:
    """Return the encoding of each text, with special tokens. With `cut`, it is the first window;
    `overflowing` has the others."""
    tokenizer = runtime.tokenizer
    with runtime.lock, tokenizer_errors(runtime.path):
        if cut is None:
            return tokenizer.encode_batch(list(texts))
        side = cut.side or runtime.tokenizer_settings.truncation_side
        tokenizer.enable_truncation(
            cut.longest, strategy=cut.strategy, stride=cut.stride, direction=side
        )
        try:
            return tokenizer.encode_batch(list(texts))
        finally:
            tokenizer.no_truncation()


def run(
    runtime: "TextRuntime", rows: Sequence[Encoding | TokenRow], names: Sequence[str] | None = None
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Run the model and yield the index and the outputs of each row, by name. Outputs have the
    shape (S, ...) per token, without padding, or (...) per row.

    Rows of similar length run together, so the order differs. `names` are the names of rows in
    errors.

    Raises:
        ValueError: if a row has no tokens or too many, before the model runs; or as
            `Runtime.outputs`.
    """
    model, info = runtime.runtime, runtime.info
    all_ids = [row.ids for row in rows]
    for position, row_ids in enumerate(all_ids):
        check_row(
            row_ids, names[position] if names else f"text {position} of {len(rows)}", info.config
        )
    ids, mask = pad_sequences(all_ids, info.config.get("pad_token_id"))
    types = (
        pad_sequences([row.type_ids for row in rows], 0)[0]
        if runtime.tokenizer_settings.has_types
        else None
    )
    spec = info.specs["encoder"]
    per_token = {tensor.name for tensor in spec.outputs if tensor.shape[1:2] == ("source_length",)}
    for indices, length in bucket_by_length(mask, model.max_tokens):
        arrays = [
            None if array is None else array[indices, :length] for array in (ids, mask, types)
        ]
        if HEADS[info.architecture].reads == READS_CHOICES:
            arrays = [None if array is None else array[:, None] for array in arrays]
        outputs = model.outputs(*arrays)
        for position, index in enumerate(indices.tolist()):
            row_outputs = {name: values[position] for name, values in outputs.items()}
            size = len(all_ids[index])
            yield (
                index,
                {
                    name: values[:size] if name in per_token else values
                    for name, values in row_outputs.items()
                },
            )


def check_row(ids: list[int], name: str, config: dict) -> None:
    if not ids:
        raise ValueError(f"{name} has no tokens, expected words that the tokenizer knows")
    if len(ids) <= config["max_position_embeddings"]:
        return
    row = np.array([ids])
    try:
        check_positions(num_positions(row, np.ones_like(row), config), config)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the softmax of `logits` over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def label_names(runtime: "TextRuntime") -> list[str]:
    """Return the names of the labels in the order of the scores.

    Raises:
        ValueError: if `id2label` lacks a label.
    """
    names = runtime.info.config["id2label"]
    missing = [number for number in range(len(names)) if str(number) not in names]
    if missing:
        seen = (
            f"{runtime.info.directory / 'config.json'} has the id2label keys "
            f"{reprlib.repr(list(names))}"
        )
        raise ValueError(
            f"{seen}, expected all numbers from 0 to {len(names) - 1}: {missing[0]} is missing"
        )
    return [str(names[str(number)]) for number in range(len(names))]
