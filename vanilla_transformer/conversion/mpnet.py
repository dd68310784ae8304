"""MPNet (Song et al. 2020): BERT's layers with two kinds of positions, RoBERTa's table and T5's
buckets. Padding is token 1 and the buckets are 32 up to a distance of 128, whatever the config
says."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from . import bert, roberta
from .fields import Fields, require
from .tensors import TensorMap, linear, tensor_map

CONFIG = "MPNetConfig"
ARCHITECTURES = {
    theirs.replace("Roberta", "MPNet"): ours for theirs, ours in roberta.ARCHITECTURES.items()
}
PREFIX = "mpnet."
PADDING = 1
BUCKETS = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    require(theirs, relative_attention_num_buckets=32)
    has_pooler = not architecture.endswith("Model") or "pooler.dense.weight" in names
    return bert.encoder_fields(theirs) | {
        "pad_token_id": PADDING,
        "position_embedding_type": "learned_relative",
        "position_ids_from": "ids",
        "max_position_embeddings": theirs.max_position_embeddings - PADDING - 1,
        **BUCKETS,
        "pooler_act": "tanh" if has_pooler else None,
        "lm_transform_act": "gelu",  # whatever the layers have
    }


def to_source_config(ours: VanillaTransformerConfig, architecture: str) -> Fields:
    require(
        ours,
        position_embedding_type="learned_relative",
        position_ids_from="ids",
        pad_token_id=PADDING,
        **BUCKETS,
    )
    require(ours, type_vocab_size=0, classifier_dropout=ours.dropout)
    rows = {"max_position_embeddings": ours.max_position_embeddings + PADDING + 1}
    return bert.source_fields(ours, architecture, "gelu") | rows


def tensor_maps(
    ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
) -> list[TensorMap]:
    tied = theirs.tie_word_embeddings
    also = ("lm_head.decoder.weight",) if tied else ()
    maps = [
        tensor_map(
            "model.embeddings.embed_tokens.weight", "embeddings.word_embeddings.weight", also=also
        ),
        tensor_map(
            "model.relative_positions.bias.weight", "encoder.relative_attention_bias.weight"
        ),
        *linear("model.embeddings.norm", "embeddings.LayerNorm"),
    ]
    for i in range(ours.num_hidden_layers):
        layer = f"model.layers.{i}"
        their_layer = f"encoder.layer.{i}"
        for projection in "qkvo":
            maps += linear(
                f"{layer}.self_attn.{projection}_proj", f"{their_layer}.attention.attn.{projection}"
            )
        maps += linear(f"{layer}.self_attn_norm", f"{their_layer}.attention.LayerNorm")
        maps += linear(f"{layer}.feed_forward.up_proj", f"{their_layer}.intermediate.dense")
        maps += linear(f"{layer}.feed_forward.down_proj", f"{their_layer}.output.dense")
        maps += linear(f"{layer}.feed_forward_norm", f"{their_layer}.output.LayerNorm")
    return maps + roberta.positions(PADDING) + roberta.heads(ours, tied, architecture)
