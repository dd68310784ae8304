"""MPNet (Song et al. 2020): BERT's layers with two kinds of positions, RoBERTa's table and T5's
buckets. Padding is token 1 and the buckets are 32 up to a distance of 128, whatever the config
says."""

from . import bert, roberta
from .fields import Fields, Ours, TensorNames, Theirs, our_classes, require, write_fields
from .tensors import TensorMap, layers, linear, tensor_map, tokens

CLASSES = our_classes("Encoder", *bert.HEADS)
PADDING = 1
BUCKETS = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
LAYER = {
    **{f"self_attn.{part}_proj": f"attention.attn.{part}" for part in "qkvo"},
    "self_attn_norm": "attention.LayerNorm",
    "feed_forward.up_proj": "intermediate.dense",
    "feed_forward.down_proj": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    require(theirs, relative_attention_num_buckets=32)
    return bert.encoder_fields(theirs) | {
        "pad_token_id": PADDING,
        "position_embedding_type": "learned_relative",
        "position_ids_from": "ids",
        "max_position_embeddings": theirs.max_position_embeddings - PADDING - 1,
        **BUCKETS,
        "pooler_act": bert.pooler_act(theirs, names),
        "lm_transform_act": "gelu",  # whatever the layers have
    }


def to_source_config(ours: Ours) -> Fields:
    rows = ours.max_position_embeddings + PADDING + 1
    return write_fields(ours, bert.ENCODER) | {"max_position_embeddings": rows}


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    return [
        *tokens(ours, "embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
        tensor_map(
            "model.relative_positions.bias.weight", "encoder.relative_attention_bias.weight"
        ),
        *linear("model.embeddings.norm", "embeddings.LayerNorm"),
        *layers(LAYER, "model.layers", "encoder.layer", ours.num_hidden_layers),
        *roberta.positions(PADDING),
        *roberta.heads(ours, theirs),
    ]
