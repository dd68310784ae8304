"""Text embeddings, as configured by the export's sentence-transformers files.

They are one vector per text from the hidden states of its tokens, or sparse: the weights of a
vocabulary for each text. A masked language model whose graph pools its logits has those of
`SparseEncoder` of sentence-transformers with SpladePooling, and a BGE-M3 the `lexical_weights` of
FlagEmbedding. A BGE-M3 also has multi-vector embeddings for late interaction: one vector per token
of a text."""

import reprlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import UsageError, did_you_mean
from ...heads import EMBED, EMBED_MULTI_VECTOR, EMBED_SPARSE, M3_EMBEDDING, TEXT
from ...inference.export_info import ExportInfo
from ...inference.sentence_settings import SentenceSettings
from ..checks import check_choice, check_count, check_strings
from ..sentence_modules import SentenceModules, normalize
from ..text_model import Cut, Outputs, Row, TextModel, plain_row
from ..tokenizer_settings import read_longest
from .task import JsonObject, TaskCall

# tokens without a weight in BGE-M3
WEIGHTLESS = ("cls_token", "eos_token", "pad_token", "unk_token")
# by name, the type of the numbers
PRECISIONS = {
    "float32": "float32",
    "int8": "int8",
    "uint8": "uint8",
    "binary": "int8",
    "ubinary": "uint8",
}


def embed(
    runtime: TextModel,
    texts: Sequence[str],
    /,
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate_dim: int | None = None,
    precision: str = "float32",
    ranges: Any = None,
) -> np.ndarray:
    """Return one vector for each text (B, E), float32, as `SentenceTransformer.encode` does. The
    export's modules.json selects pooling, linear maps and normalization. Without modules.json it is
    the mean over all tokens.

    Args:
        texts: strings; they may be blank. Texts longer than the export's `max_seq_length` are
            truncated, as in sentence-transformers.
        prompt_name: name of a prompt in config_sentence_transformers.json; by default its
            `default_prompt_name`.
        prompt: text that precedes each text, in place of `prompt_name`.
        truncate_dim: number of values of each vector, from its start; by default the `truncate_dim`
            of the export, or all. The vectors are not normalized again, and no file has the layer
            norm that the card of nomic-embed-text applies first, without weights.
        precision: `"float32"`, or as `quantize_embeddings` of sentence-transformers returns it:
            `"int8"` or `"uint8"` (B, E), or the signs, 8 to a byte (B, E / 8), as `"binary"` (int8)
            or `"ubinary"` (uint8).
        ranges: for int8 and uint8, the smallest and the largest value of each dimension (2, E),
            which become the ends of 256 steps. sentence-transformers takes those of the batch by
            default; here they are needed, so that a vector does not depend on other texts.

    Raises:
        UsageError: if `prompt_name` or `precision` is unknown, if both a prompt and a name are set,
            if `truncate_dim` is not a positive integer, or if `ranges` is missing, of another shape
            or set for another precision.
        ValueError: if the export does not return hidden states, a text is a pair or has no tokens,
            or a module is not supported.
    """
    runtime.require(EMBED)
    if truncate_dim is not None:
        check_count("truncate_dim", truncate_dim)
    check_choice("precision", precision, PRECISIONS)
    limits = check_ranges(precision, ranges)
    rows = prompted_rows(runtime, texts, prompt_name, prompt)
    width = truncate_dim or runtime.info.sentence_settings.truncate_dim
    return quantize(vectors(runtime, *rows, width), precision, limits)


def encode_query(
    runtime: TextModel,
    texts: Sequence[str],
    /,
    prompt_name: str | None = None,
    prompt: str | None = None,
    **options: Any,
) -> np.ndarray:
    """Return the vectors of queries, as `SentenceTransformer.encode_query` does.

    The default prompt is "query" of the export, or none. `options` are other options of `embed`,
    which also says what is raised.
    """
    if prompt_name is None and prompt is None:
        prompt = runtime.info.sentence_settings.prompts.get("query") or ""
    return embed(runtime, texts, prompt_name, prompt, **options)


def encode_document(
    runtime: TextModel,
    texts: Sequence[str],
    /,
    prompt_name: str | None = None,
    prompt: str | None = None,
    **options: Any,
) -> np.ndarray:
    """Return the vectors of documents, as `SentenceTransformer.encode_document` does.

    The default prompt is "document" of the export, or none. There is a warning if the export has
    only a prompt "passage" or "corpus", which sentence-transformers does not use here. `options`
    are other options of `embed`, which also says what is raised.
    """
    if prompt_name is None and prompt is None:
        prompts = runtime.info.sentence_settings.prompts
        prompt = prompts.get("document") or ""
        other = next((name for name in ("passage", "corpus") if prompts.get(name)), None)
        if other is not None and not prompt:
            warnings.warn(
                f"{runtime.info.directory} has a prompt {other!r}, expected one with the name "
                "document: documents get none, as in sentence-transformers; see prompt_name",
                stacklevel=2,
            )
    return embed(runtime, texts, prompt_name, prompt, **options)


def prompted_rows(
    runtime: TextModel, texts: Sequence[str], prompt_name: str | None, prompt: str | None
) -> tuple[list[Row], int]:
    """Return what `rows_to_embed` returns for `texts`, cut at the export's `max_seq_length`.

    `prompt_name` and `prompt` are those of `embed`, which also says what is raised.
    """
    selected = select_prompt(runtime.info.sentence_settings, prompt_name, prompt)
    cut = Cut(max_length(runtime.info))
    return rows_to_embed(runtime, check_strings(texts), selected, cut)


def rows_to_embed(
    runtime: TextModel, inputs: Sequence[str | list[int]], prompt: str, cut: Cut
) -> tuple[list[Row], int]:
    """Return the tokens of `prompt` and each text together, and the number of tokens of the prompt,
    0 without one. `cut` truncates or rejects rows.

    Inputs of token ids are used unchanged without a prompt. With one they are decoded and encoded
    again after it.
    """
    if prompt:
        inputs = [
            item if isinstance(item, str) else runtime.decode_row(item, skip_special_tokens=True)
            for item in inputs
        ]
    texts = [prompt + item for item in inputs if isinstance(item, str)]
    encodings = iter(runtime.encode_texts(texts, cut))
    rows = [
        next(encodings) if isinstance(item, str) else plain_row(cut.cut_ids(item))
        for item in inputs
    ]
    if any(len(item) > cut.longest for item in inputs if not isinstance(item, str)):
        runtime.warn_of_cut(cut)
    if not prompt:
        return rows, 0
    [encoding] = runtime.encode_texts([prompt], Cut(cut.longest))
    # with the special tokens before the prompt, not with those after it
    return rows, len(encoding.ids) - (encoding.special_tokens_mask[-1:] == [1])


def vectors(
    runtime: TextModel,
    rows: Sequence[Row],
    prompt_length: int,
    width: int | None,
    modules: SentenceModules | None = None,
) -> np.ndarray:
    """Return one vector for each of `rows` (B, E), float32, as `embed` does for texts.

    The first `prompt_length` tokens of a row are a prompt. `width` is the number of values of each
    vector, None for all. `modules` are by default those of the export.
    """
    modules = modules or runtime.sentence_modules
    results = runtime.run_rows(
        rows,
        lambda row, outputs: modules.embedding(outputs["last_hidden_state"], prompt_length)[:width],
    )
    return np.stack(results).astype(np.float32)


def hidden_states(runtime: TextModel, rows: Sequence[Row]) -> list[np.ndarray]:
    """Return the hidden states (S, D) of each of `rows`."""
    return runtime.run_rows(rows, lambda row, outputs: outputs["last_hidden_state"])


def similarity(runtime: TextModel, first: np.ndarray, second: np.ndarray, /) -> np.ndarray:
    """Return the similarity (A, B), float32, of the vectors `first` (A, E) to the vectors `second`
    (B, E).

    The export's `similarity_fn_name` selects `"cosine"` (the default), `"dot"`, `"euclidean"` or
    `"manhattan"`. Euclidean and Manhattan distances are negated. An array (E,) is one vector.

    Raises:
        ValueError: if they are no numbers, have more than two axes or differ in E.
    """
    name = runtime.info.sentence_settings.similarity_fn_name or "cosine"
    one, other = map(as_vectors, (first, second))
    if one.ndim != 2 or other.ndim != 2 or one.shape[1] != other.shape[1]:
        raise ValueError(
            f"the vectors have shapes {one.shape} and {other.shape}, expected (A, E) and (B, E)"
        )
    if name == "cosine":
        one, other = normalize(one), normalize(other)
    if name in ("cosine", "dot"):
        return one @ other.T
    order = 2 if name == "euclidean" else 1
    return -np.stack([np.linalg.norm(row - other, ord=order, axis=1) for row in one])


def as_vectors(values: Any) -> np.ndarray:
    """Return `values` (A, E) or (E,) as an array (A, E), float32. Raises ValueError if they are no
    numbers."""
    try:
        return np.atleast_2d(np.asarray(values, np.float32))
    except (TypeError, ValueError):
        raise ValueError(
            f"the vectors are {reprlib.repr(values)}, expected numbers, as `embed` returns them"
        ) from None


# ------------------------------------------------------------------------------------ the precision


def check_ranges(precision: str, ranges: Any) -> np.ndarray | None:
    """Return `ranges` as an array (2, E), float32, or None for a precision that needs none.

    Raises UsageError if they are missing, not finite numbers of this shape, or not needed.
    """
    if precision not in ("int8", "uint8"):
        if ranges is not None:
            needed = "expected None, or the precision int8 or uint8"
            raise UsageError(f"ranges is set with precision={precision!r}, {needed}", "ranges")
        return None
    try:
        limits = np.asarray(ranges, np.float32)
    except (TypeError, ValueError):
        limits = np.empty(0, np.float32)
    is_pair = limits.ndim == 2 and len(limits) == 2
    if not is_pair or not np.isfinite(limits).all() or (limits[0] > limits[1]).any():
        raise UsageError(
            f"ranges is {reprlib.repr(ranges)} with precision={precision!r}, expected the smallest "
            "and the largest value of each dimension, (2, E)",
            "ranges",
        )
    return limits


def quantize(vectors: np.ndarray, precision: str, ranges: np.ndarray | None) -> np.ndarray:
    """Return the vectors (B, E) in a `precision` of `PRECISIONS`. `ranges` (2, E) are for int8 and
    uint8. Raises UsageError if they have another E."""
    if precision == "float32":
        return vectors
    if ranges is None:
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits - 128).astype(np.int8)
    if ranges.shape[1] != vectors.shape[1]:
        raise UsageError(
            f"ranges has {ranges.shape[1]} dimensions, expected {vectors.shape[1]}", "ranges"
        )
    start, end = ranges
    steps = (end - start) / 255
    levels = np.clip(np.floor((vectors - start) / np.where(steps == 0, 1, steps)), 0, 255)
    return (levels - 128 * (precision == "int8")).astype(PRECISIONS[precision])


# -------------------------------------------------------------------------------------- the prompts


def select_prompt(settings: SentenceSettings, prompt_name: str | None, prompt: str | None) -> str:
    prompts = settings.prompts
    if prompt is not None:
        if prompt_name is not None:
            raise UsageError(
                f"prompt is {prompt!r:.60} and prompt_name is {prompt_name!r:.60}, expected only "
                "one of them"
            )
        if not isinstance(prompt, str):
            raise UsageError(f"prompt is {prompt!r:.60}, expected a string")
        return prompt
    if prompt_name is None:
        default = settings.default_prompt_name
        return "" if default is None else prompts.get(default) or ""
    if not isinstance(prompt_name, str) or prompt_name not in prompts:
        expected = (
            f"expected one of {', '.join(prompts)}"
            if prompts
            else "expected None: this export has no prompts"
        )
        raise UsageError(
            f"prompt_name is {prompt_name!r:.60}, {expected}"
            f"{did_you_mean(str(prompt_name), prompts)}"
        )
    return prompts[prompt_name] or ""


def max_length(info: ExportInfo) -> int:
    """Return the maximum number of tokens of a text, including special tokens."""
    longest = info.sentence_settings.max_seq_length or read_longest(info.tokenizer_config)
    limit = info.config["max_position_embeddings"]
    return min(longest or limit, limit)


# --------------------------------------------------------------- sparse and multi-vector embeddings


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
    runtime.require(EMBED_SPARSE)
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

    def read(row: Row, outputs: Outputs) -> list[JsonObject]:
        values = term_weights(runtime, row, outputs) if is_m3 else outputs["sentence_embedding"]
        return sparse_vector(values, max_values)

    return runtime.run_rows(rows, read)


def term_weights(runtime: TextModel, row: Row, outputs: Outputs) -> np.ndarray:
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
    runtime.require(EMBED_MULTI_VECTOR)
    rows, _ = prompted_rows(runtime, texts, prompt_name, prompt)
    vectors = runtime.token_heads.vectors
    return runtime.run_rows(
        rows, lambda row, outputs: normalize(vectors(outputs["last_hidden_state"][1:]))
    )


# --------------------------------------------------------------------------------------- as JSON


def token_states(runtime: TextModel, texts: Sequence[str], /) -> list[np.ndarray]:
    """Return the hidden states (S, D) of each text, which is not truncated, without a prompt."""
    runtime.require(EMBED)
    return hidden_states(runtime, runtime.encode_texts(check_strings(texts)))


def compare_sentences(
    runtime: TextModel,
    sources: Sequence[str],
    sentences: Sequence[Sequence[str]],
    /,
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate_dim: int | None = None,
) -> list[np.ndarray]:
    """Return the similarities (N,) of each of `sources` to the sentences of its list. The options
    are those of `embed`."""
    results = []
    for source, others in zip(sources, sentences):
        if not isinstance(others, list) or not others:
            raise UsageError(f"sentences is {reprlib.repr(others)}, expected a list of texts")
        first, *rest = embed(runtime, [source, *others], prompt_name, prompt, truncate_dim)
        results.append(similarity(runtime, first, np.array(rest))[0])
    return results


PIPELINES = {
    "feature-extraction": TaskCall(
        token_states, TEXT, lambda states, row, options: [states.tolist()]
    ),
    "sentence-similarity": TaskCall(compare_sentences, ("source_sentence", "sentences")),
    "multi-vector": TaskCall(embed_multi_vector, TEXT),
}
