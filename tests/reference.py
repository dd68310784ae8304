"""The Transformer of "Attention Is All You Need" in numpy and float64, written from the paper's formulas.

Slow on purpose: one sentence, one head, one position at a time, and nothing shared with the package under test. A model is
a dict of float64 arrays under the names of its state dict, and a `Paper`, the numbers the arrays alone do not tell.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Paper:
    """The paper's symbols, and the switches of the family that came after it."""

    d_model: int
    h: int
    d_k: int
    d_v: int
    N: int
    learned_positions: bool = False
    scale_embedding: bool = True
    embedding_norm: bool = False
    norm_first: bool = False
    activation: str = "relu"
    lm_head_bias: bool = True
    tied: bool = True
    eps: float = 1e-5


def position_encoding(position: int, d_model: int) -> np.ndarray:
    """Section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos(pos / 10000^(2i / d_model))."""
    row = np.zeros(d_model)
    for i in range(d_model // 2):
        row[2 * i] = math.sin(position / 10000 ** (2 * i / d_model))
        row[2 * i + 1] = math.cos(position / 10000 ** (2 * i / d_model))
    return row


def linear(weights, name, x):
    return x @ weights[name + ".weight"].T + weights.get(name + ".bias", 0.0)


def layer_norm(weights, name, x, eps):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * weights[name + ".weight"] + weights[name + ".bias"]


def softmax(scores):
    exponentials = np.exp(scores - scores.max())
    return exponentials / exponentials.sum()


def activation(name, x):
    if name == "relu":
        return np.maximum(0.0, x)
    if name == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    raise ValueError(f"no activation {name!r} in the reference")


def attention(q, k, v, visible):
    """Equation 1, softmax(Q K^T / sqrt(d_k)) V, query by query; `visible[t, s]` says whether query t may look at key s."""
    output = np.zeros((len(q), v.shape[1]))
    for t in range(len(q)):
        seen = np.flatnonzero(visible[t])
        if len(seen):  # a padded query that sees nothing stays 0, and nobody looks at it
            output[t] = softmax(k[seen] @ q[t] / math.sqrt(q.shape[1])) @ v[seen]
    return output


def multi_head(weights, name, paper, x, source, visible):
    """Section 3.2.2: Concat(head_1, ..., head_h) W^O, head_i = Attention(x W^Q_i, source W^K_i, source W^V_i)."""
    q, k, v = (linear(weights, f"{name}.{p}_proj", s) for p, s in (("q", x), ("k", source), ("v", source)))
    assert q.shape[1] == k.shape[1] == paper.h * paper.d_k and v.shape[1] == paper.h * paper.d_v
    heads = []
    for i in range(paper.h):
        keys, values = slice(i * paper.d_k, (i + 1) * paper.d_k), slice(i * paper.d_v, (i + 1) * paper.d_v)
        heads.append(attention(q[:, keys], k[:, keys], v[:, values], visible))
    return linear(weights, name + ".o_proj", np.concatenate(heads, axis=1))


def feed_forward(weights, name, paper, x):
    """Equation 2: max(0, x W_1 + b_1) W_2 + b_2."""
    return linear(weights, name + ".down_proj", activation(paper.activation, linear(weights, name + ".up_proj", x)))


def embed(weights, name, paper, table, tokens, positions):
    """Section 3.4: token embeddings times sqrt(d_model), plus positions."""
    x = np.zeros((len(tokens), paper.d_model))
    for t, (token, position) in enumerate(zip(tokens, positions, strict=True)):
        x[t] = table[token] * (math.sqrt(paper.d_model) if paper.scale_embedding else 1.0)
        if paper.learned_positions:
            x[t] += weights[name + ".embed_positions.weight"][position]
        else:
            x[t] += position_encoding(position, paper.d_model)
    return layer_norm(weights, name + ".norm", x, paper.eps) if paper.embedding_norm else x


def stack(weights, name, paper, table, tokens, positions, visible, memory=None, memory_visible=None):
    """One side of Figure 1 for one sentence; `memory` is the encoder's output, for the side that looks at it."""
    x = embed(weights, name + "embeddings", paper, table, tokens, positions)

    def residual(x, norm, sublayer):
        if paper.norm_first:
            return x + sublayer(layer_norm(weights, norm, x, paper.eps))
        return layer_norm(weights, norm, x + sublayer(x), paper.eps)

    for n in range(paper.N):
        layer = f"{name}layers.{n}."
        x = residual(x, layer + "self_attn_norm", lambda y, n=layer: multi_head(weights, n + "self_attn", paper, y, y, visible))
        if memory is not None:
            x = residual(
                x,
                layer + "cross_attn_norm",
                lambda y, n=layer: multi_head(weights, n + "cross_attn", paper, y, memory, memory_visible),
            )
        x = residual(x, layer + "feed_forward_norm", lambda y, n=layer: feed_forward(weights, n + "feed_forward", paper, y))
    return layer_norm(weights, name + "norm", x, paper.eps) if paper.norm_first else x


def project(weights, paper, table, x):
    """Section 3.4: with tying, the projection to the vocabulary is the embedding matrix."""
    return x @ (table if paper.tied else weights["lm_head.weight"]).T + (weights["lm_head.bias"] if paper.lm_head_bias else 0.0)


def everyone(queries, mask):
    """Every query sees every real token."""
    return np.tile(np.asarray(mask, bool), (queries, 1))


def causal(mask):
    """Query t sees the real tokens s <= t."""
    visible = everyone(len(mask), mask)
    for t in range(len(mask)):
        visible[t, t + 1 :] = False
    return visible


def encoder_lm(weights, paper, tokens, mask, positions):
    """Masked language model: logits (T, V) of one sentence."""
    table = weights["model.embeddings.embed_tokens.weight"]
    x = stack(weights, "model.", paper, table, tokens, positions, everyone(len(tokens), mask))
    return project(weights, paper, table, x)


def decoder_lm(weights, paper, tokens, mask, positions):
    """Causal language model: logits (T, V) of one sentence."""
    table = weights["model.embeddings.embed_tokens.weight"]
    x = stack(weights, "model.", paper, table, tokens, positions, causal(mask))
    return project(weights, paper, table, x)


def seq2seq_lm(weights, paper, source, source_mask, target, target_mask, target_positions):
    """Figure 1: logits (T, V) of one pair of sentences; tied, one matrix serves both sides and the projection."""
    source_table = weights["model.encoder.embeddings.embed_tokens.weight"]
    target_table = source_table if paper.tied else weights["model.decoder.embeddings.embed_tokens.weight"]
    memory = stack(
        weights, "model.encoder.", paper, source_table, source, range(len(source)), everyone(len(source), source_mask)
    )
    seen = everyone(len(target), source_mask)
    x = stack(weights, "model.decoder.", paper, target_table, target, target_positions, causal(target_mask), memory, seen)
    return project(weights, paper, target_table, x)
