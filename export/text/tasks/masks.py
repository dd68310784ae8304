"""The tokens that fill a mask, as transformers' pipeline "fill-mask" predicts them."""

import reprlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import UsageError
from ...heads import FILL_MASK
from .rows import check_count, decode, encode_texts, require, run, single_texts, softmax, with_names

if TYPE_CHECKING:
    from ...text_runtime import TextRuntime


def fill_mask(
    runtime: "TextRuntime",
    texts: Sequence[str],
    /,
    top_k: int = 5,
    targets: str | Sequence[str] | None = None,
) -> list[list[Any]]:
    """Return the best tokens for the mask in each text, as the pipeline "fill-mask" does. Each is
    `{"score": float, "token": int, "token_str": str, "sequence": str}`. A text with several masks
    has a list for each mask.

    Args:
        texts: strings with the tokenizer's mask token. They are not cut.
        top_k: so many tokens.
        targets: the only tokens to choose from; of one that is none the first that the tokenizer
            makes of it, with a warning.

    Raises:
        UsageError: for a `top_k` that is no number from 1 to the size of the vocabulary, and for
            targets without any token.
        ValueError: for an export without a masked language model, a text that is empty, is a pair,
            has no mask or more tokens than the model has positions, and a tokenizer without a mask
            token.
    """
    require(runtime, FILL_MASK)
    check_count("top_k", top_k, max_value=runtime.info.config["vocab_size"])
    mask = mask_token(runtime)
    candidates = None if targets is None else target_ids(runtime, targets)
    rows = encode_texts(runtime, single_texts(texts))
    for row, name in with_names(rows):
        if mask not in row.ids:
            raise ValueError(
                f"{name} has no mask, expected {runtime.tokenizer.id_to_token(mask)} in it"
            )
    results: list[list[Any]] = [[] for _ in rows]
    for index, outputs in run(runtime, rows):
        ids = rows[index].ids
        places = [place for place, token in enumerate(ids) if token == mask]
        logits = next(iter(outputs.values()))  # pretraining has others too
        filled = [
            fillings(runtime, ids, place, logits[place], top_k, candidates, len(places) == 1)
            for place in places
        ]
        results[index] = filled[0] if len(places) == 1 else filled
    return results


def mask_token(runtime: "TextRuntime") -> int:
    """Return the id of the mask token. Raises ValueError if the tokenizer has none."""
    mask = runtime.tokenizer_settings.special_tokens["mask_token"]
    if mask is None:
        raise ValueError(
            f"{runtime.path.parent} has a tokenizer without a mask token, which a masked language "
            "model reads"
        )
    return mask


def fillings(
    runtime: "TextRuntime",
    ids: list[int],
    place: int,
    logits: np.ndarray,
    top_k: int,
    targets: list[int] | None,
    is_only: bool,
) -> list[dict[str, Any]]:
    """Return the best tokens at `place`. Sequences omit special tokens unless the text has other
    masks."""
    scores = softmax(logits)
    tokens = np.arange(len(scores)) if targets is None else np.array(targets)
    best = tokens[np.argsort(-scores[tokens], kind="stable")[:top_k]].tolist()
    pad = runtime.info.config.get("pad_token_id")
    results = []
    for token in best:
        filled = [*ids[:place], token, *ids[place + 1 :]]
        sequence = decode(runtime, [id for id in filled if id != pad], skip_special_tokens=is_only)
        text = decode(runtime, [token], skip_special_tokens=False)
        results.append(
            {"score": float(scores[token]), "token": token, "token_str": text, "sequence": sequence}
        )
    return results


def target_ids(runtime: "TextRuntime", targets: object) -> list[int]:
    names = [targets] if isinstance(targets, str) else targets
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"targets must be strings, got {reprlib.repr(targets)}")
    ids: list[int] = []
    for name in names:
        token = runtime.tokenizer.token_to_id(name)
        if token is None:
            [encoding] = runtime.encode([name], special_tokens=False)
            token = encoding.ids[0] if encoding.ids else None
            instead = "is left out" if token is None else f"{encoding.tokens[0]!r} stands for it"
            warnings.warn(f"the target {name!r} is no token: {instead}", UserWarning, stacklevel=3)
        if token is not None:
            ids.append(token)
    if not ids:
        raise UsageError(f"targets are {reprlib.repr(targets)}, expected at least one token")
    return list(dict.fromkeys(ids))
