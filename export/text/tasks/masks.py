"""Prediction of masked tokens, like transformers' pipeline "fill-mask"."""

import reprlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Encoding

from ...errors import UsageError
from ...heads import FILL_MASK, TEXT
from ...inference.export_info import TOKENIZER_CONFIG
from ..checks import check_count, check_texts, is_strings, with_names
from ..scores import softmax
from ..text_model import Outputs, TextModel
from .task import JsonObject, TaskCall


def fill_mask(
    runtime: TextModel,
    texts: Sequence[str],
    /,
    top_k: int = 5,
    targets: str | Sequence[str] | None = None,
) -> list[list[Any]]:
    """Return the best tokens for the mask in each text, as the pipeline "fill-mask" does. Each is
    `{"score": float, "token": int, "token_str": str, "sequence": str}`. A text with several masks
    has a list for each mask. The best token is first.

    Args:
        texts: strings with the tokenizer's mask token. They are not truncated.
        top_k: maximum number of tokens to return for each mask.
        targets: the only tokens to choose from. A target that is several tokens is replaced by its
            first token, with a warning.

    Raises:
        UsageError: if `top_k` is not between 1 and the size of the vocabulary, or if `targets` has
            no token.
        ValueError: if the export is not a masked language model, the tokenizer has no mask token,
            or a text is blank, is a pair, has no mask or has too many tokens.
    """
    runtime.require(FILL_MASK)
    check_count("top_k", top_k, max_value=runtime.info.config["vocab_size"])
    mask = mask_token(runtime)
    candidates = None if targets is None else target_ids(runtime, targets)
    rows = runtime.encode_texts(check_texts(texts))
    for row, name in with_names(rows):
        if mask not in row.ids:
            raise ValueError(
                f"{name} has no mask, expected {runtime.tokenizer.id_to_token(mask)} in the text"
            )

    def fill(row: Encoding, outputs: Outputs) -> list[Any]:
        positions = [position for position, token in enumerate(row.ids) if token == mask]
        is_only = len(positions) == 1
        logits = next(iter(outputs.values()))  # a pretraining head has other outputs too
        filled = [
            fillings(runtime, row.ids, position, logits[position], top_k, candidates, is_only)
            for position in positions
        ]
        return filled[0] if is_only else filled

    return runtime.run_rows(rows, fill)


def mask_token(runtime: TextModel) -> int:
    """Return the id of the mask token. Raises ValueError if the tokenizer has none."""
    mask = runtime.tokenizer_settings.special_tokens["mask_token"]
    if mask is None:
        raise ValueError(
            f"the tokenizer of {runtime.path.parent} has no mask token, expected mask_token in "
            f"{TOKENIZER_CONFIG}"
        )
    return mask


def fillings(
    runtime: TextModel,
    ids: list[int],
    position: int,
    logits: np.ndarray,
    top_k: int,
    targets: list[int] | None,
    is_only: bool,
) -> list[JsonObject]:
    """Return the `top_k` best tokens for the mask at `position` of `ids`, best first: {"score",
    "token", "token_str", "sequence"}.

    `logits` (V,) are those of the position, and `targets` the only tokens to choose from, if any.
    `sequence` has special tokens unless the mask `is_only`.
    """
    scores = softmax(logits)
    tokens = np.arange(len(scores)) if targets is None else np.array(targets)
    best = tokens[np.argsort(-scores[tokens], kind="stable")[:top_k]].tolist()
    pad = runtime.info.config.get("pad_token_id")
    results = []
    for token in best:
        filled = [*ids[:position], token, *ids[position + 1 :]]
        sequence = runtime.decode_row(
            [id for id in filled if id != pad], skip_special_tokens=is_only
        )
        text = runtime.decode_row([token], skip_special_tokens=False)
        results.append(
            {"score": float(scores[token]), "token": token, "token_str": text, "sequence": sequence}
        )
    return results


def target_ids(runtime: TextModel, targets: object) -> list[int]:
    names = [targets] if isinstance(targets, str) else targets
    if not is_strings(names):
        raise UsageError(
            f"targets is {reprlib.repr(targets)}, expected a string or a list of strings"
        )
    ids: list[int] = []
    for name in names:
        token = runtime.tokenizer.token_to_id(name)
        if token is None:
            [encoding] = runtime.encode([name], special_tokens=False)
            token = encoding.ids[0] if encoding.ids else None
            action = "it is ignored" if token is None else f"{encoding.tokens[0]!r} is used instead"
            warnings.warn(
                f"the target {name!r} is not a token of the model: {action}",
                UserWarning,
                stacklevel=3,
            )
        if token is not None:
            ids.append(token)
    if not ids:
        raise UsageError(f"targets is {reprlib.repr(targets)}, expected at least one token")
    return list(dict.fromkeys(ids))


PIPELINES = {"fill-mask": TaskCall(fill_mask, TEXT)}
