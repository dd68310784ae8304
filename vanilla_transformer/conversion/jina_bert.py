"""JinaBERT v2 (Günther et al. 2023): BERT with gated feed-forward networks, and ALiBi (Press et al.
2022) in both directions: a score loses a slope of its head times the distance of the two tokens.
Its config.json has BERT's `model_type`, and only its code on the Hub has a class.

ALiBi becomes a table of relative positions. Each distance below `max_position_embeddings` has a
bucket of its own, so the table is exact for all texts that the checkpoint reads.
"""

import re

import torch

from .fields import Fields, Ours, TensorNames, Theirs, require
from .rotary import HALVES, no_bias
from .tensors import TensorMap, constant, joined, linear

TABLE = "model.relative_positions.bias.weight"


def has_alibi(content: Fields) -> bool:
    return content.get("position_embedding_type") == "alibi"


def rename_fields(content: Fields) -> Fields:
    """Return the `content` of a config.json with the names of BERT's classes for JinaBERT's."""
    if not has_alibi(content):
        return content
    names = [re.sub("^Jina", "", name) for name in content.get("architectures") or ()]
    return content | {"architectures": names}


def fields(theirs: Theirs, names: TensorNames) -> Fields:
    """Return the fields of our config that differ from BERT's. `names` are those of the tensors.

    Raises ValueError for another network, and for norms of queries and keys, as in
    jina-embeddings-v2-base-code.
    """
    require(theirs, feed_forward_type="geglu")
    if norms := sorted(name for name in names if "layer_norm_q" in name):
        raise ValueError(
            f"{norms[0]} cannot be converted, expected no norm of the queries of all heads: use "
            "jinaai/jina-embeddings-v2-base-en"
        )
    buckets = 4 * theirs.max_position_embeddings
    return {
        "position_embedding_type": "relative",
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": buckets,
        "gated": True,
        "hidden_act": "gelu",
        "activation_dropout": theirs.hidden_dropout_prob,
    }


def tensor_maps(ours: Ours) -> list[TensorMap]:
    """Return the maps of what BERT does not have: the table, and the feed-forward networks."""
    maps = [TensorMap((TABLE,), "", constant("ALiBi", lambda: alibi_table(ours)))]
    for i in range(ours.num_hidden_layers):
        network, theirs = f"model.layers.{i}.feed_forward", f"encoder.layer.{i}.mlp"
        halves = f"{network}.gate_proj", f"{network}.up_proj"
        maps += joined(halves, f"{theirs}.gated_layers", HALVES, ["weight"])
        maps += [no_bias(name, ours.intermediate_size) for name in halves]
        maps += linear(f"{network}.down_proj", f"{theirs}.wo")
        maps += linear(f"{network}_norm", f"{theirs}.layernorm")
    return maps


def alibi_table(ours: Ours) -> torch.Tensor:
    """Return the biases of the scores, (buckets, H), float32: a distance times minus a slope.

    The buckets are those of `VanillaRelativePositions`: for each direction, distances below a
    quarter of their number, then as many that grow up to four times as far. For these it is the
    least distance of the bucket.
    """
    exact = ours.relative_attention_num_buckets // 4
    near = torch.arange(exact, dtype=torch.double)
    distances = torch.cat([near, exact * 4 ** (near / exact)]).repeat(2)
    return (-distances[:, None] * slopes(ours.num_attention_heads)).float()


def slopes(heads: int) -> torch.Tensor:
    """Return the slope of each head, (H,), float64.

    They are 2^(-8i / n) for i = 1 ... n, where n is a power of two. Other numbers of heads have the
    slopes of the largest power of two below, then slopes between these from the first on.
    """
    power = 2 ** (heads.bit_length() - 1)
    between = torch.arange(heads - power, dtype=torch.double) + 0.5
    exponents = torch.cat([torch.arange(1, power + 1, dtype=torch.double), between])
    return 2 ** (-8 * exponents / power)
