"""Sparse embeddings: the weights of a vocabulary for each text, by a masked language model whose
graph pools its logits, as `SparseEncoder` of sentence-transformers does with SpladePooling."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...heads import EMBED_SPARSE
from ..checks import check_count, check_strings
from ..text_model import TextModel
from .classification import sentence_config
from .embedding import length_and_case, rows_to_embed, select_prompt
from .rows import Cut, Row, require, run_rows


def embed_sparse(
    runtime: TextModel,
    texts: Sequence[str],
    /,
    prompt_name: str | None = None,
    prompt: str | None = None,
    max_active_dims: int | None = None,
) -> list[list[dict[str, Any]]]:
    """Return the sparse vector of each text, as `SparseEncoder.encode` does: a list of `{"index":
    int, "value": float}` with the values that are not 0, in the order of their indices.

    An index is the id of a token in the vocabulary.

    Args:
        texts: strings; they may be blank. Texts longer than the export's `max_seq_length` are
            truncated.
        prompt_name: name of a prompt in config_sentence_transformers.json; by default its
            `default_prompt_name`.
        prompt: text that precedes each text, in place of `prompt_name`.
        max_active_dims: number of values to keep, the largest; by default the `max_active_dims` of
            the export, or all.

    Raises:
        UsageError: if `prompt_name` is unknown, if both a prompt and a name are set, or if
            `max_active_dims` is not a positive integer.
        ValueError: if the export returns no sparse embeddings, or a text is a pair or has no
            tokens.
    """
    require(runtime, EMBED_SPARSE)
    config = sentence_config(runtime.info)
    if max_active_dims is None:
        max_active_dims = config.get("max_active_dims")
    if max_active_dims is not None:
        check_count("max_active_dims", max_active_dims)
    selected = select_prompt(config, prompt_name, prompt)
    cut = Cut(length_and_case(runtime.info)[0])
    rows, _ = rows_to_embed(runtime, check_strings(texts), selected, cut)
    return sparse_vectors(runtime, rows, max_active_dims)


def sparse_vectors(
    runtime: TextModel, rows: Sequence[Row], max_values: int | None = None
) -> list[list[dict[str, Any]]]:
    """Return the sparse vector of each of `rows`, as `embed_sparse` does. `max_values` is the
    number of values to keep, None for all."""
    return run_rows(
        runtime, rows, lambda row, outputs: sparse_vector(outputs["sentence_embedding"], max_values)
    )


def sparse_vector(values: np.ndarray, max_values: int | None) -> list[dict[str, Any]]:
    """Return the `max_values` largest of `values` (V,) that are not 0, as `embed_sparse` does."""
    indices = np.flatnonzero(values)
    best = np.argsort(-values[indices], kind="stable")[:max_values]
    indices = np.sort(indices[best])
    pairs = zip(indices.tolist(), values[indices].tolist())
    return [{"index": index, "value": value} for index, value in pairs]
