"""The Transformer of "Attention Is All You Need" in numpy and float64, written from the papers'
formulas.

Slow on purpose: one sentence, one head, one position at a time, and nothing shared with the package
under test. A model is a dict of float64 arrays under the names of its state dict, and a `Paper`,
the numbers the arrays alone do not tell.
"""

import math
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Paper:
    """The paper's symbols of one model, and the switches of the family that came after it."""

    d_model: int
    h: int
    d_k: int
    d_v: int
    N: int
    # width of the embeddings if it is not d_model (Lan et al. 2020, ALBERT, section 3.1)
    e: int | None = None
    positions: str = "sinusoidal"
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    buckets: int = 32
    max_distance: int = 128
    window: int | None = None
    # numbers of the layers without a window, and the base of their angles if it is another
    wide_layers: tuple[int, ...] = ()
    wide_theta: float | None = None
    key_heads: int | None = None  # as `h` by default
    qk_norm: bool = False
    sandwich: bool = False
    skips_first_norm: bool = False
    scale_embedding: bool = True
    embedding_norm: bool = False
    norm_first: bool = False
    final_norm: bool = False
    activation: str = "relu"
    rms_norm: bool = False
    gated: bool = False
    bias: bool = True
    attention_bias: bool | None = None  # as `bias` by default
    lm_head_bias: bool = True
    lm_transform: str | None = None
    tied: bool = True
    shared: bool = True
    eps: float = 1e-5


# ---------------------------------------------------------------------------------------- positions


def position_encoding(position: int, d_model: int) -> np.ndarray:
    """Return the encoding (d_model,) of `position` by section 3.5.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), and PE(pos, 2i + 1) is the cosine.
    """
    row = np.zeros(d_model)
    for i in range(d_model // 2):
        row[2 * i] = math.sin(position / 10000 ** (2 * i / d_model))
        row[2 * i + 1] = math.cos(position / 10000 ** (2 * i / d_model))
    return row


def rotation(position: int, d: int, theta: float, factor: float) -> np.ndarray:
    """Return the rotation matrix (d, d) of `position` (Su et al. 2021, equations 15 and 34).

    It turns the i-th pair of components by m theta_i = m * theta^(-2 (i - 1) / d), i = 1 ... d / 2,
    divided by `factor`.
    """
    matrix = np.zeros((d, d))
    for i in range(1, d // 2 + 1):
        angle = position * theta ** (-2 * (i - 1) / d) / factor
        pair = slice(2 * (i - 1), 2 * i)
        matrix[pair, pair] = [
            [math.cos(angle), -math.sin(angle)],
            [math.sin(angle), math.cos(angle)],
        ]
    return matrix


def relative_bucket(offset: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """Return the bucket of `offset` = key - query (Raffel et al. 2020, section 2.1).

    Half of the buckets are one distance each. The ranges of the others grow logarithmically up to
    `max_distance`, and everything beyond is in the last. With keys on both sides, each side has
    half of all buckets. The computation is in whole numbers, so nothing is rounded: the j-th of n
    ranges starts at the first distance d with d / exact >= (max_distance / exact)^(j / n).
    """
    if bidirectional:
        buckets //= 2
    distance = abs(offset) if bidirectional else max(-offset, 0)
    exact = buckets // 2
    side = buckets if bidirectional and offset > 0 else 0
    if distance < exact:
        return side + distance
    n, j = buckets - exact, 0
    while j + 1 < n and distance**n * exact ** (j + 1) >= max_distance ** (j + 1) * exact**n:
        j += 1
    return side + exact + j


def distance_bucket(offset: int, buckets: int, max_distance: int) -> int:
    """Return the row of `offset` = query - key in DeBERTa's table of 2 * `buckets` vectors.

    Distances up to m = `buckets` / 2 have rows of their own (He et al. 2021, equation 3). From
    there on the row is m + ceil(ln(distance / m) / ln((max_distance - 1) / m) * (m - 1)), as in
    DeBERTaV3's code.
    """
    middle, distance = buckets // 2, abs(offset)
    if distance > middle:
        growth = math.log(distance / middle) / math.log((max_distance - 1) / middle)
        distance = middle + math.ceil(growth * (middle - 1))
    row = buckets + (distance if offset > 0 else -distance)
    return min(max(row, 0), 2 * buckets - 1)


# --------------------------------------------------------------------------------------- the layers


def linear(weights, name, x, bias=True):
    assert (name + ".bias" in weights) == bias, name
    return x @ weights[name + ".weight"].T + (weights[name + ".bias"] if bias else 0.0)


def layer_norm(weights, name, x, paper):
    """Return the layer norm `name` of `x` (Ba et al. 2016, equation 3).

    Without mean and bias it is Zhang and Sennrich 2019, equation 4.
    """
    if paper.rms_norm:
        assert name + ".bias" not in weights
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + paper.eps) * weights[name + ".weight"]
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + paper.eps) * weights[name + ".weight"] + weights[
        name + ".bias"
    ]


def softmax(scores):
    exponentials = np.exp(scores - scores.max())
    return exponentials / exponentials.sum()


def activation(name, x):
    if name == "relu":
        return np.maximum(0.0, x)
    if name == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    if name == "tanh":
        return np.tanh(x)
    raise ValueError(f"the reference has no activation {name!r}")


def attention(q, k, v, visible, bias=None):
    """Return equation 1, softmax(Q K^T / sqrt(d_k)) V, computed query by query.

    `visible[t, s]` is True if query t may look at key s. `bias[t, s]`, if there is one, is added to
    the scores.
    """
    output = np.zeros((len(q), v.shape[1]))
    for t in range(len(q)):
        seen = np.flatnonzero(visible[t])
        if len(seen):  # a padded query that sees nothing stays 0, and its state is never read
            scores = k[seen] @ q[t] / math.sqrt(q.shape[1])
            output[t] = softmax(scores if bias is None else scores + bias[t, seen]) @ v[seen]
    return output


def multi_head(weights, name, paper, x, source, visible, rotations=None, biases=None, vectors=None):
    """Return section 3.2.2 for the module `name`: Concat(head_1, ..., head_h) W^O.

    head_i = Attention(x W^Q_i, source W^K_i, source W^V_i). `visible` says which positions of
    `source` each of `x` may look at. `rotations` has one matrix for each position, which turns its
    query and its key; `biases` has one for each head. `vectors` are those of DeBERTa's distances,
    and for each query and key the row of theirs.
    """
    has_bias = paper.bias if paper.attention_bias is None else paper.attention_bias
    q, k, v = (
        linear(weights, f"{name}.{p}_proj", s, has_bias)
        for p, s in (("q", x), ("k", source), ("v", source))
    )
    key_heads = paper.key_heads or paper.h
    assert q.shape[1] == paper.h * paper.d_k
    assert k.shape[1] == key_heads * paper.d_k and v.shape[1] == key_heads * paper.d_v
    heads = []
    for i in range(paper.h):
        j = i // (paper.h // key_heads)
        columns, key_columns, values = (
            slice(i * paper.d_k, (i + 1) * paper.d_k),
            slice(j * paper.d_k, (j + 1) * paper.d_k),
            slice(j * paper.d_v, (j + 1) * paper.d_v),
        )
        queries, keys = q[:, columns], k[:, key_columns]
        if paper.qk_norm:
            queries = layer_norm(weights, f"{name}.q_norm", queries, paper)
            keys = layer_norm(weights, f"{name}.k_norm", keys, paper)
        if rotations is not None:
            queries, keys = (
                np.stack([r @ row for r, row in zip(rotations, rows)]) for rows in (queries, keys)
            )
        bias = None if biases is None else biases[i]
        if vectors is not None:
            bias = disentangled_bias(weights, name, columns, queries, keys, *vectors)
        heads.append(attention(queries, keys, v[:, values], visible, bias))
    return linear(weights, name + ".o_proj", np.concatenate(heads, axis=1), has_bias)


def disentangled_bias(weights, name, columns, queries, keys, vectors, rows):
    """Return the two terms of He et al. 2021, equation 4, that have distances, over sqrt(d_k): of
    one head, (T, T)."""
    of_keys = linear(weights, f"{name}.k_proj", vectors)[:, columns]
    of_queries = linear(weights, f"{name}.q_proj", vectors)[:, columns]
    bias = np.zeros((len(queries), len(keys)))
    for t, s in np.ndindex(bias.shape):
        bias[t, s] = queries[t] @ of_keys[rows[t, s]] + keys[s] @ of_queries[rows[t, s]]
    return bias / math.sqrt(queries.shape[1])


def feed_forward(weights, name, paper, x):
    """Return equation 2 for the module `name`: max(0, x W_1 + b_1) W_2 + b_2.

    The gated form is Shazeer 2020, equation 6: (act(x W) * x V) W_2.
    """
    inner = linear(weights, name + ".up_proj", x, paper.bias)
    if paper.gated:
        inner = (
            activation(paper.activation, linear(weights, name + ".gate_proj", x, paper.bias))
            * inner
        )
    else:
        inner = activation(paper.activation, inner)
    return linear(weights, name + ".down_proj", inner, paper.bias)


def embed(weights, name, paper, table, tokens, positions, types=None):
    """Return token embeddings times sqrt(d_model) plus positions (section 3.4), as (T, d_model).

    BERT adds token `types`. `table` has the embeddings. Embeddings of another width `e` pass W to
    the layers. With a norm this is W LayerNorm(tokens + positions) + b (ELECTRA), else W tokens +
    positions (OPT).
    """
    assert (name + ".projection.weight" in weights) == (paper.e is not None)
    e = paper.e or paper.d_model
    x = np.zeros((len(tokens), e if paper.embedding_norm else paper.d_model))
    for t, (token, position) in enumerate(zip(tokens, positions, strict=True)):
        scaled = table[token] * (math.sqrt(e) if paper.scale_embedding else 1.0)
        if paper.e and not paper.embedding_norm:
            scaled = linear(weights, name + ".projection", scaled, bias=False)
        x[t] = scaled
        if paper.positions.startswith("learned"):
            x[t] += weights[name + ".embed_positions.weight"][position]
        if paper.positions == "sinusoidal":
            x[t] += position_encoding(position, x.shape[1])
        if types is not None:
            x[t] += weights[name + ".embed_token_types.weight"][types[t]]
    if not paper.embedding_norm:
        return x
    x = layer_norm(weights, name + ".norm", x, paper)
    return linear(weights, name + ".projection", x) if paper.e else x


# --------------------------------------------------------------------------------------- the stacks


def everyone(queries, mask):
    """Return a mask (queries, S) in which every query sees every real token.

    `mask` (S,) is 0 for padding.
    """
    return np.tile(np.asarray(mask, bool), (queries, 1))


def visible_in(paper, mask, is_causal):
    """Return a mask (T, T): True where token t sees token s in self-attention.

    In a decoder, query t sees the real tokens s <= t; in an encoder, all real tokens. A window
    (Beltagy et al. 2020, section 3.1) leaves the last `window` tokens including t in a decoder, and
    `window` tokens on each side of t in an encoder.
    """
    visible = everyone(len(mask), mask)
    for t in range(len(mask)):
        for s in range(len(mask)):
            near = paper.window is None or (
                t - s < paper.window if is_causal else abs(t - s) <= paper.window
            )
            visible[t, s] &= near and (s <= t or not is_causal)
    return visible


def stack(
    weights,
    name,
    paper,
    table,
    tokens,
    positions,
    mask,
    is_causal,
    types=None,
    memory=None,
    memory_mask=None,
):
    """Return the states (T, d_model) of one side of Figure 1 for one sentence.

    Args:
        weights: all weights of the model by name.
        name: what the names of this side begin with.
        paper: the model's numbers and switches.
        table: the token embeddings (V, width).
        tokens, positions, types: those of the sentence.
        mask: 0 for padding.
        is_causal: True for a decoder.
        memory: the encoder's output, for cross-attention.
        memory_mask: 0 for padding of the source.
    """
    x = embed(weights, name + "embeddings", paper, table, tokens, positions, types)
    biases, vectors = None, None
    seen = None if memory is None else everyone(len(tokens), memory_mask)

    def seen_and_rotations(n):
        """Return which tokens see which in layer n, and the rotation of each."""
        is_wide = n in paper.wide_layers
        visible = visible_in(replace(paper, window=None) if is_wide else paper, mask, is_causal)
        if paper.positions != "rotary":
            return visible, None
        theta = (paper.wide_theta if is_wide else None) or paper.rope_theta
        return visible, [rotation(p, paper.d_k, theta, paper.rope_factor) for p in positions]

    if paper.positions == "disentangled":
        table = weights[name + "relative_positions.embed.weight"]
        numbers = (paper.buckets, paper.max_distance)
        rows = np.array(
            [[distance_bucket(int(t - s), *numbers) for s in positions] for t in positions]
        )
        vectors = layer_norm(weights, name + "relative_positions.norm", table, paper), rows
    if paper.positions.endswith("relative"):
        learned = weights[name + "relative_positions.bias.weight"]
        numbers = (not is_causal, paper.buckets, paper.max_distance)
        biases = np.array(
            [[learned[relative_bucket(int(s - t), *numbers)] for s in positions] for t in positions]
        )
        biases = biases.transpose(2, 0, 1)

    def residual(x, norm, sublayer, output_norm=None):
        if paper.norm_first:
            is_skipped = paper.skips_first_norm and norm == name + "layers.0.self_attn_norm"
            assert is_skipped == (norm + ".weight" not in weights)
            y = sublayer(x if is_skipped else layer_norm(weights, norm, x, paper))
            return x + (layer_norm(weights, output_norm, y, paper) if output_norm else y)
        return layer_norm(weights, norm, x + sublayer(x), paper)

    for n in range(paper.N):
        layer, inputs = f"{name}layers.{n}.", seen_and_rotations(n)
        x = residual(
            x,
            layer + "self_attn_norm",
            lambda y, n=layer, inputs=inputs: multi_head(
                weights, n + "self_attn", paper, y, y, *inputs, biases, vectors
            ),
            layer + "self_attn_output_norm" if paper.sandwich else None,
        )
        if memory is not None:
            x = residual(
                x,
                layer + "cross_attn_norm",
                lambda y, n=layer: multi_head(weights, n + "cross_attn", paper, y, memory, seen),
            )
        x = residual(
            x,
            layer + "feed_forward_norm",
            lambda y, n=layer: feed_forward(weights, n + "feed_forward", paper, y),
            layer + "feed_forward_output_norm" if paper.sandwich else None,
        )
    assert (name + "norm.weight" in weights) == paper.final_norm
    return layer_norm(weights, name + "norm", x, paper) if paper.final_norm else x


# ------------------------------------------------------------------------------------------ outputs


def pooled(weights, name, act, x):
    """Return the first of the states `x` after a linear map and an activation (Devlin et al. 2019).

    `name` is the module and `act` the activation.
    """
    return activation(act, linear(weights, name + ".dense", x[0]))


def lm_transform(weights, name, paper, x):
    """Return the states `x` as BERT transforms them before its projection to the vocabulary.

    The transform is the module `name` (Devlin et al. 2019).
    """
    return layer_norm(
        weights,
        name + ".norm",
        activation(paper.lm_transform, linear(weights, name + ".dense", x)),
        paper,
    )


def project(weights, paper, table, x, narrow=None):
    """Return the logits (T, V) of states `x`; with tying, by the embedding matrix (section 3.4).

    `table` is that matrix. `narrow` is the linear map without bias from the states to the width of
    embeddings.
    """
    if paper.e and narrow:
        x = linear(weights, narrow, x, bias=False)
    return x @ (table if paper.tied else weights["lm_head.weight"]).T + (
        weights["lm_head.bias"] if paper.lm_head_bias else 0.0
    )


def encoder_lm(weights, paper, tokens, mask, positions, types=None):
    """Return the logits (T, V) of a masked language model for one sentence.

    `mask` is 0 for padding; `types` are its token types, if the model has any.
    """
    table = weights["model.embeddings.embed_tokens.weight"]
    x = stack(weights, "model.", paper, table, tokens, positions, mask, False, types)
    if paper.lm_transform:
        x = lm_transform(weights, "transform", paper, x)
    return project(weights, paper, table, x, None if paper.lm_transform else "transform")


def decoder_lm(weights, paper, tokens, mask, positions):
    """Return the logits (T, V) of a causal language model for one sentence.

    `mask` is 0 for padding.
    """
    table = weights["model.embeddings.embed_tokens.weight"]
    x = stack(weights, "model.", paper, table, tokens, positions, mask, True)
    return project(weights, paper, table, x, "model.output_projection")


def seq2seq_lm(weights, paper, source, source_mask, target, target_mask, target_positions):
    """Return the logits (T, V) of Figure 1 for one pair of sentences, `source` and `target`.

    Masks are 0 for padding. Tied, one matrix serves both sides and the projection. If the sides do
    not share it, the target's serves the projection.
    """
    source_table = weights["model.encoder.embeddings.embed_tokens.weight"]
    one_table = paper.tied and paper.shared
    target_table = (
        source_table if one_table else weights["model.decoder.embeddings.embed_tokens.weight"]
    )
    memory = stack(
        weights,
        "model.encoder.",
        paper,
        source_table,
        source,
        range(len(source)),
        source_mask,
        False,
    )
    x = stack(
        weights,
        "model.decoder.",
        paper,
        target_table,
        target,
        target_positions,
        target_mask,
        True,
        None,
        memory,
        source_mask,
    )
    return project(weights, paper, target_table, x, "model.decoder.output_projection")
