"""Multi-vector embeddings for late interaction: one vector per token of a text, by the head of
BGE-M3."""

from collections.abc import Sequence

import numpy as np

from ...heads import EMBED_MULTI_VECTOR, TEXT
from ..sentence_modules import normalize
from ..text_model import TextModel
from .embedding import prompted_rows
from .rows import require, run_rows
from .task import TaskCall


def embed_multi_vector(
    runtime: TextModel,
    texts: Sequence[str],
    /,
    prompt_name: str | None = None,
    prompt: str | None = None,
) -> list[np.ndarray]:
    """Return the vectors (S - 1, E) of each text, float32 and of length 1, as `colbert_vecs` of
    FlagEmbedding. They belong to its S tokens, special tokens included, without the first.

    The score of a query and a text is the mean over the query's vectors of the largest product with
    a vector of the text: `(query @ text.T).max(axis=1).mean()`.

    `texts`, `prompt_name` and `prompt` are those of `embed`.

    Raises:
        UsageError: if `prompt_name` is unknown, or if both a prompt and a name are set.
        ValueError: if the export is no BGE-M3, or a text is a pair or has no tokens.
    """
    require(runtime, EMBED_MULTI_VECTOR)
    rows, _ = prompted_rows(runtime, texts, prompt_name, prompt)
    vectors = runtime.token_heads.vectors
    return run_rows(
        runtime, rows, lambda row, outputs: normalize(vectors(outputs["last_hidden_state"][1:]))
    )


PIPELINES = {"multi-vector": TaskCall(embed_multi_vector, TEXT)}
