"""T5 (Raffel et al. 2020), T5 v1.1 and Flan-T5 (gated feed-forward networks), ByT5 (bytes): RMSNorm
before each sub-layer, no biases, and positions that are added to the scores of self-attention.

T5 does not divide the scores by sqrt(d_kv): our queries are larger by that. Where its head is tied
to the embeddings it divides the decoder's last states by sqrt(d_model): here the last norm does.
"""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from .fields import Fields, require
from .tensors import SAME, Op, TensorMap, equal, linear, scaled, tensor_map

CONFIG = "T5Config"
ARCHITECTURES = {
    "T5Model": "VanillaSeq2SeqModel",
    "T5ForConditionalGeneration": "VanillaSeq2SeqForConditionalGeneration",
    "T5ForSequenceClassification": "VanillaSeq2SeqForSequenceClassification",
    "T5ForQuestionAnswering": "VanillaSeq2SeqForQuestionAnswering",
    "T5EncoderModel": "VanillaEncoderModel",
    "T5ForTokenClassification": "VanillaEncoderForTokenClassification",
}
PREFIX = "transformer."
# in old files, of no effect
UNUSED = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
ENCODERS = ("EncoderModel", "ForTokenClassification")
# fields that all models of the family share
FIXED = {
    "position_embedding_type": "relative",
    "norm_type": "rms_norm",
    "norm_first": True,
    "final_norm": True,
    "scale_embedding": False,
    "embedding_norm": False,
    "linear_bias": False,
    "attention_bias": False,
}


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    require(theirs, is_decoder=False)
    dropouts = ("embedding_dropout", "dropout", "attention_dropout", "activation_dropout")
    fields = FIXED | {
        "hidden_size": theirs.d_model,
        "intermediate_size": theirs.d_ff,
        "num_attention_heads": theirs.num_heads,
        "head_dim": theirs.d_kv,
        "hidden_act": theirs.dense_act_fn,
        "gated": theirs.is_gated_act,
        "relative_attention_num_buckets": theirs.relative_attention_num_buckets,
        "relative_attention_max_distance": theirs.relative_attention_max_distance,
        "layer_norm_eps": theirs.layer_norm_epsilon,
        **dict.fromkeys(dropouts, theirs.dropout_rate),
        "classifier_dropout": theirs.classifier_dropout,
    }
    if is_encoder(architecture):
        return fields | {"num_hidden_layers": theirs.num_layers}
    require(theirs, is_encoder_decoder=True)
    start = getattr(theirs, "decoder_start_token_id", None)
    if start is None and not architecture.endswith("Model"):
        raise ValueError(
            "decoder_start_token_id=None cannot be converted, expected a token id, such as 0 "
            "in published checkpoints"
        )
    depths = {"encoder_layers": theirs.num_layers, "decoder_layers": theirs.num_decoder_layers}
    return fields | depths | {"lm_head_bias": False, "decoder_start_token_id": start}


def is_encoder(architecture: str) -> bool:
    return architecture.endswith(ENCODERS)


def to_source_config(ours: VanillaTransformerConfig, architecture: str) -> Fields:
    require(ours, **FIXED, sliding_window=None)
    fields = {
        "d_model": ours.hidden_size,
        "d_ff": ours.intermediate_size,
        "num_heads": ours.num_attention_heads,
        "d_kv": ours.head_dim,
        "feed_forward_proj": feed_forward_proj(ours),
        "relative_attention_num_buckets": ours.relative_attention_num_buckets,
        "relative_attention_max_distance": ours.relative_attention_max_distance,
        "layer_norm_epsilon": ours.layer_norm_eps,
        "dropout_rate": ours.dropout,
        "classifier_dropout": ours.classifier_dropout,
    }
    if is_encoder(architecture):
        return fields | {"num_layers": ours.num_hidden_layers, "is_encoder_decoder": False}
    require(ours, wrap_last_token=False)
    if ours.tie_word_embeddings:
        require(ours, share_encoder_decoder_embeddings=True)
    if architecture.endswith("ForConditionalGeneration"):
        require(ours, lm_head_bias=False)
    depths = {"num_layers": ours.encoder_layers, "num_decoder_layers": ours.decoder_layers}
    return fields | depths | {"decoder_start_token_id": ours.decoder_start_token_id}


def feed_forward_proj(ours: VanillaTransformerConfig) -> str:
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


def tensor_maps(
    ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
) -> list[TensorMap]:
    if is_encoder(architecture):
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
    maps = embeddings(ours.tie_word_embeddings)
    maps += stack("model.encoder", "encoder", theirs.num_layers, theirs)
    # T5, and not mT5, which lacks the field, may scale what its head reads, and only that
    is_scaled = architecture.endswith("ForConditionalGeneration") and getattr(
        theirs, "scale_decoder_outputs", False
    )
    last_norm = scaled(theirs.d_model**-0.5) if is_scaled else SAME
    maps += stack("model.decoder", "decoder", theirs.num_decoder_layers, theirs, last_norm)
    maps += linear("dense", "classification_head.dense") + linear(
        "classifier", "classification_head.out_proj"
    )
    return maps + linear("qa_outputs", "qa_outputs")


def embeddings(is_tied: bool) -> list[TensorMap]:
    """Return the tensor maps of the token embeddings and, unless `is_tied`, of the LM head.

    T5 has one embedding matrix. With an untied head our model has a copy of it in each stack.
    """
    encoder, decoder = (
        f"model.{side}.embeddings.embed_tokens.weight" for side in ("encoder", "decoder")
    )
    also = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    if is_tied:
        return [tensor_map(encoder, "shared.weight", also=(*also, "lm_head.weight"))]
    return [
        TensorMap((encoder, decoder), "shared.weight", equal(2), also),
        tensor_map("lm_head.weight", "lm_head.weight"),
    ]


def stack(
    ours: str, side: str, count: int, theirs: PreTrainedConfig, last: Op = SAME
) -> list[TensorMap]:
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
    attentions = {"self_attn": "SelfAttention"} | (
        {"cross_attn": "EncDecAttention"} if side == "decoder" else {}
    )
    inner = {"gate_proj": "wi_0", "up_proj": "wi_1"} if theirs.is_gated_act else {"up_proj": "wi"}
    for i in range(count):
        layer = f"{ours}.layers.{i}"
        sublayers = [f"{side}.block.{i}.layer.{number}" for number in range(len(attentions) + 1)]
        for (attention, name), sublayer in zip(attentions.items(), sublayers):
            for part in "qkvo":
                op = scaled(theirs.d_kv**0.5) if part == "q" else SAME
                maps.append(
                    tensor_map(
                        f"{layer}.{attention}.{part}_proj.weight",
                        f"{sublayer}.{name}.{part}.weight",
                        op,
                    )
                )
            maps.append(
                tensor_map(f"{layer}.{attention}_norm.weight", f"{sublayer}.layer_norm.weight")
            )
        for name, their_name in {**inner, "down_proj": "wo"}.items():
            theirs_at = f"{sublayers[-1]}.DenseReluDense.{their_name}.weight"
            maps.append(tensor_map(f"{layer}.feed_forward.{name}.weight", theirs_at))
        maps.append(
            tensor_map(f"{layer}.feed_forward_norm.weight", f"{sublayers[-1]}.layer_norm.weight")
        )
    return [*maps, tensor_map(f"{ours}.norm.weight", f"{side}.final_layer_norm.weight", last)]
