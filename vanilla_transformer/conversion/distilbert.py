"""DistilBERT (Sanh et al. 2019): BERT without token types and pooler; its sentence heads have a
linear map and a ReLU."""

from . import bert
from .fields import Fields, Ours, TensorNames, Theirs, our_classes, same_names
from .tensors import TensorMap, layers, modules, tensor_map, tokens

CLASSES = our_classes("Encoder", *bert.HEADS)
FIELDS = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_act": "activation",
    "lm_transform_act": "activation",
    "embedding_dropout": "dropout",
    "classifier_dropout": "seq_classif_dropout",
    **same_names(*("max_position_embeddings", "initializer_range", "dropout", "attention_dropout")),
}
LAYER = {
    **{f"self_attn.{part}_proj": f"attention.{part}_lin" for part in "qkv"},
    "self_attn.o_proj": "attention.out_lin",
    "self_attn_norm": "sa_layer_norm",
    "feed_forward.up_proj": "ffn.lin1",
    "feed_forward.down_proj": "ffn.lin2",
    "feed_forward_norm": "output_layer_norm",
}


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    return {
        "position_embedding_type": "learned",  # sinusoids too are stored as a table
        "scale_embedding": False,
        "embedding_norm": True,
        "layer_norm_eps": 1e-12,
        "pooler_act": None if theirs.architectures[0] == "DistilBertModel" else "relu",
    }


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    words, head = "embeddings.word_embeddings.weight", "vocab_projector"
    return [
        *tokens(ours, words, f"{head}.weight"),
        tensor_map("lm_head.bias", f"{head}.bias"),
        bert.POSITIONS,
        *layers(LAYER, "model.layers", "transformer.layer", ours.num_hidden_layers),
        *modules(
            {
                "model.embeddings.norm": "embeddings.LayerNorm",
                "transform.dense": "vocab_transform",
                "transform.norm": "vocab_layer_norm",
                "model.pooler.dense": "pre_classifier",
                bert.classifier_name(theirs): "classifier",
                "qa_outputs": "qa_outputs",
            }
        ),
    ]
