"""Sparse embeddings: the weights of a vocabulary for each text. A masked language model whose graph
pools its logits has those of `SparseEncoder` of sentence-transformers with SpladePooling, and a
BGE-M3 the `lexical_weights` of FlagEmbedding."""

from collections.abc import Sequence

import numpy as np

from ...heads import EMBED_SPARSE, M3_EMBEDDING
from ..checks import check_count
from ..text_model import TextModel
from .embedding import prompted_rows
from .rows import Row, require, run_rows
from .task import JsonObject

# tokens without a weight in BGE-M3
WEIGHTLESS = ("cls_token", "eos_token", "pad_token", "unk_token")


def embed_sparse(
    runtime: TextModel,
    texts: Sequence[str],
    /,
    prompt_name: str | None = None,
    prompt: str | None = None,
    max_active_dims: int | None = None,
) -> list[list[JsonObject]]:
    """Return the sparse vector of each text, as `SparseEncoder.encode` does, or for BGE-M3 as
    `lexical_weights` of FlagEmbedding: a list of `{"index": int, "value": float}` with the values
    that are not 0, in the order of their indices.

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
    if max_active_dims is None:
        max_active_dims = runtime.info.sentence_settings.max_active_dims
    if max_active_dims is not None:
        check_count("max_active_dims", max_active_dims)
    rows, _ = prompted_rows(runtime, texts, prompt_name, prompt)
    return sparse_vectors(runtime, rows, max_active_dims)


def sparse_vectors(
    runtime: TextModel, rows: Sequence[Row], max_values: int | None = None
) -> list[list[JsonObject]]:
    """Return the sparse vector of each of `rows`, as `embed_sparse` does. `max_values` is the
    number of values to keep, None for all."""
    is_m3 = runtime.info.architecture == M3_EMBEDDING

    def read(row: Row, outputs: dict[str, np.ndarray]) -> list[JsonObject]:
        values = term_weights(runtime, row, outputs) if is_m3 else outputs["sentence_embedding"]
        return sparse_vector(values, max_values)

    return run_rows(runtime, rows, read)


def term_weights(runtime: TextModel, row: Row, outputs: dict[str, np.ndarray]) -> np.ndarray:
    """Return the weight of each entry of the vocabulary (V,) in a row of BGE-M3: the largest of its
    tokens, or 0. Special tokens have none."""
    weights = np.zeros(runtime.info.config["vocab_size"], np.float32)
    of_tokens = runtime.token_heads.weights(outputs["last_hidden_state"])
    np.maximum.at(weights, row.ids, of_tokens[:, 0])
    special = map(runtime.tokenizer_settings.special_tokens.get, WEIGHTLESS)
    weights[[id for id in special if id is not None]] = 0
    return weights


def sparse_vector(values: np.ndarray, max_values: int | None) -> list[JsonObject]:
    """Return the `max_values` largest of `values` (V,) that are not 0, as `embed_sparse` does."""
    indices = np.flatnonzero(values)
    best = np.argsort(-values[indices], kind="stable")[:max_values]
    indices = np.sort(indices[best])
    pairs = zip(indices.tolist(), values[indices].tolist())
    return [{"index": index, "value": value} for index, value in pairs]
