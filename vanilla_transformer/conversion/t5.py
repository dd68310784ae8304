"""T5 (Raffel et al. 2020), T5 v1.1, Flan-T5 and mT5 (Xue et al. 2021; gated feed-forward networks),
ByT5 (bytes): RMSNorm before each sub-layer, no biases, and positions that are added to the scores
of self-attention.

T5 does not divide the scores by sqrt(d_kv): our queries are larger by that. Where its head is tied
to the embeddings, T5, and not mT5, divides the decoder's last states by sqrt(d_model): here the
last norm does.
"""

from . import bart
from .fields import Fields, Ours, TensorNames, Theirs, our_classes, require, same_names
from .tensors import SAME, Op, TensorMap, equal, linear, modules, scaled, tensor_map

CLASSES = our_classes(
    "Seq2Seq",
    *("Model", "ForConditionalGeneration"),
    *("ForSequenceClassification", "ForQuestionAnswering"),
) | {
    "EncoderModel": "VanillaEncoderModel",
    "ForTokenClassification": "VanillaEncoderForTokenClassification",
}
# in old files, of no effect
UNUSED = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
ENCODERS = ("EncoderModel", "ForTokenClassification")
FIXED = {
    "position_embedding_type": "relative",
    "norm_type": "rms_norm",
    "norm_first": True,
    "scale_embedding": False,
    "linear_bias": False,
}
DROPOUTS = ("embedding_dropout", "attention_dropout", "activation_dropout")
LOST = DROPOUTS  # all are that of the layers
FIELDS = {
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_attention_heads": "num_heads",
    "head_dim": "d_kv",
    "layer_norm_eps": "layer_norm_epsilon",
    **dict.fromkeys((*DROPOUTS, "dropout"), "dropout_rate"),
    **same_names(
        *("relative_attention_num_buckets", "relative_attention_max_distance"),
        "classifier_dropout",
    ),
}


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    require(theirs, is_decoder=False)
    fields = {"hidden_act": theirs.dense_act_fn, "gated": theirs.is_gated_act}
    if is_encoder(theirs):
        return fields | {"num_hidden_layers": theirs.num_layers}
    require(theirs, is_encoder_decoder=True)
    start = getattr(theirs, "decoder_start_token_id", None)
    if start is None and not theirs.architectures[0].endswith("Model"):
        raise ValueError(
            "decoder_start_token_id=None cannot be converted, expected a token id, such as 0 "
            "in published checkpoints"
        )
    depths = {"encoder_layers": theirs.num_layers, "decoder_layers": theirs.num_decoder_layers}
    return fields | depths | {"lm_head_bias": False, "decoder_start_token_id": start}


def is_encoder(config: Theirs | Ours) -> bool:
    return config.architectures[0].endswith(ENCODERS)


def to_source_config(ours: Ours) -> Fields:
    fields = {"feed_forward_proj": feed_forward_proj(ours)}
    if is_encoder(ours):
        return fields | {"num_layers": ours.num_hidden_layers, "is_encoder_decoder": False}
    depths = {"num_layers": ours.encoder_layers, "num_decoder_layers": ours.decoder_layers}
    return fields | depths | {"decoder_start_token_id": ours.decoder_start_token_id}


def feed_forward_proj(ours: Ours) -> str:
    """Return the value of T5's field `feed_forward_proj`, such as "relu" or "gated-gelu".

    In T5 "gated-gelu" means `gelu_new`, so a gated `gelu` raises ValueError.
    """
    if not ours.gated:
        return ours.hidden_act
    if ours.hidden_act == "gelu":
        raise ValueError(
            "hidden_act='gelu' cannot be converted, expected another activation with gated=True, "
            "such as 'gelu_new'"
        )
    return "gated-" + ("gelu" if ours.hidden_act == "gelu_new" else ours.hidden_act)


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    if is_encoder(theirs):
        maps = [
            tensor_map(
                "model.embeddings.embed_tokens.weight",
                "shared.weight",
                also=("encoder.embed_tokens.weight",),
            )
        ]
        return (
            maps
            + stack("model", "encoder", theirs.num_layers, theirs)
            + linear("classifier", "classifier")
        )
    maps = embeddings(ours)
    maps += stack("model.encoder", "encoder", theirs.num_layers, theirs)
    # T5, and not mT5, which lacks the field, may scale what its head reads, and only that
    is_scaled = theirs.architectures[0].endswith("ForConditionalGeneration") and getattr(
        theirs, "scale_decoder_outputs", False
    )
    last_norm = scaled(theirs.d_model**-0.5) if is_scaled else SAME
    maps += stack("model.decoder", "decoder", theirs.num_decoder_layers, theirs, last_norm)
    return maps + modules(bart.HEADS)


def embeddings(ours: Ours) -> list[TensorMap]:
    """Return the tensor maps of the token embeddings and of an LM head that is not tied to them.

    T5 has one embedding matrix. With an untied head our model has a copy of it in each stack.
    """
    encoder, decoder = (
        f"model.{side}.embeddings.embed_tokens.weight" for side in ("encoder", "decoder")
    )
    also = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    if ours.tie_word_embeddings:
        return [tensor_map(encoder, "shared.weight", also=(*also, "lm_head.weight"))]
    return [
        TensorMap((encoder, decoder), "shared.weight", equal(2), also),
        tensor_map("lm_head.weight", "lm_head.weight"),
    ]


def stack(ours: str, side: str, count: int, theirs: Theirs, last: Op = SAME) -> list[TensorMap]:
    """Return the tensor maps of a stack's layers, its last norm, and its table of relative
    positions.

    Args:
        ours: our name of the stack, such as "model.encoder".
        side: the source's name, "encoder" or "decoder".
        count: number of layers.
        last: operation on the weight of the last norm.
    """
    table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    maps = [tensor_map(f"{ours}.relative_positions.bias.weight", table)]
    attentions = {"self_attn": "SelfAttention", "cross_attn": "EncDecAttention"}
    if side == "encoder":
        del attentions["cross_attn"]
    up = {"gate_proj": "wi_0", "up_proj": "wi_1"} if theirs.is_gated_act else {"up_proj": "wi"}
    inner = {
        f"feed_forward.{name}": f"DenseReluDense.{their_name}"
        for name, their_name in {**up, "down_proj": "wo"}.items()
    }
    for i in range(count):
        layer, block = f"{ours}.layers.{i}.", f"{side}.block.{i}.layer."
        for number, (attention, name) in enumerate(attentions.items()):
            sublayer = f"{block}{number}."
            queries = {f"{attention}.q_proj": f"{name}.q"}
            others = {f"{attention}.{part}_proj": f"{name}.{part}" for part in "kvo"}
            others[f"{attention}_norm"] = "layer_norm"
            maps += modules(queries, layer, sublayer, bias=False, op=scaled(theirs.d_kv**0.5))
            maps += modules(others, layer, sublayer, bias=False)
        inner_block = f"{block}{len(attentions)}."
        maps += modules(inner | {"feed_forward_norm": "layer_norm"}, layer, inner_block, bias=False)
    return [*maps, tensor_map(f"{ours}.norm.weight", f"{side}.final_layer_norm.weight", last)]
