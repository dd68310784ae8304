"""BART (Lewis et al. 2020): an encoder-decoder with learned positions that start at 2, a norm after
the embeddings, and post-norm. `BartForCausalLM` is its decoder alone, which still has
cross-attention to an encoder's states."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from .fields import Fields, require
from .tensors import ROW, SAME, TensorMap, drop_rows, linear, tensor_map, tokens, zeros

CONFIG = "BartConfig"
ARCHITECTURES = {
    "BartModel": "VanillaSeq2SeqModel",
    "BartForConditionalGeneration": "VanillaSeq2SeqForConditionalGeneration",
    "BartForSequenceClassification": "VanillaSeq2SeqForSequenceClassification",
    "BartForQuestionAnswering": "VanillaSeq2SeqForQuestionAnswering",
    "BartForCausalLM": "VanillaDecoderForCausalLM",
}
PREFIX = "model."
UNUSED = r"(encoder|decoder)\.version"


def to_vanilla_config(
    theirs: PreTrainedConfig, architecture: str, names: Collection[str]
) -> Fields:
    return vanilla_fields(theirs, architecture, names) | {
        "position_embedding_type": "learned",
        "embedding_norm": True,
    }


def is_decoder(architecture: str) -> bool:
    return architecture.endswith("CausalLM")


def sides(architecture: str) -> dict[str, str]:
    """Return {our stack: the source's name for it}, such as `{"model.decoder": "decoder"}`.

    `architecture` is the name of the source's class.
    """
    return (
        {"model": "decoder"}
        if is_decoder(architecture)
        else {"model.encoder": "encoder", "model.decoder": "decoder"}
    )


def vanilla_fields(theirs: PreTrainedConfig, architecture: str, names: Collection[str]) -> Fields:
    """Return the fields of our config that all relatives of BART share.

    `architecture` is the source's class. `names` are its tensors, without the family's prefix: with
    `final_logits_bias` the LM head gets a bias. Raises ValueError if encoder and decoder differ in
    feed-forward width or heads.
    """
    if is_decoder(architecture):
        fields = stack_fields(theirs, "decoder_")
        return fields | {
            "num_hidden_layers": theirs.decoder_layers,
            "add_cross_attention": True,
            "lm_head_bias": False,
        }
    require(
        theirs,
        is_encoder_decoder=True,
        decoder_ffn_dim=theirs.encoder_ffn_dim,
        decoder_attention_heads=theirs.encoder_attention_heads,
    )
    return stack_fields(theirs, "encoder_") | {
        "encoder_layers": theirs.encoder_layers,
        "decoder_layers": theirs.decoder_layers,
        "lm_head_bias": "final_logits_bias" in names,
        "decoder_start_token_id": getattr(theirs, "decoder_start_token_id", None),
    }


def stack_fields(theirs: PreTrainedConfig, side: str = "") -> Fields:
    return {
        "hidden_size": theirs.d_model,
        "intermediate_size": getattr(theirs, f"{side}ffn_dim"),
        "num_attention_heads": getattr(theirs, f"{side}attention_heads"),
        "hidden_act": theirs.activation_function,
        "max_position_embeddings": theirs.max_position_embeddings,
        "scale_embedding": theirs.scale_embedding,
        "initializer_range": theirs.init_std,
        "embedding_dropout": theirs.dropout,
        "dropout": theirs.dropout,
        "attention_dropout": theirs.attention_dropout,
        "activation_dropout": theirs.activation_dropout,
        "classifier_dropout": getattr(theirs, "classifier_dropout", 0.0),
    }


def to_source_config(
    ours: VanillaTransformerConfig, architecture: str, norm_first: bool = False
) -> Fields:
    """Return the config fields of BART, or of mBART with `norm_first`.

    Raises ValueError for a field of ours that the family cannot represent. `architecture` is the
    source's class.
    """
    require(ours, position_embedding_type="learned", position_ids_from="place")
    require(ours, embedding_norm=True, norm_first=norm_first, final_norm=norm_first)
    return source_fields(ours, architecture, wraps=norm_first) | {
        "classifier_dropout": ours.classifier_dropout
    }


def source_fields(ours: VanillaTransformerConfig, architecture: str, wraps: bool = False) -> Fields:
    """Return the source's config fields that all relatives of BART share.

    `architecture` is the source's class. `wraps` is True for families such as mBART, whose decoder
    input starts with the sequence's last token. Raises ValueError for a field of ours that these
    families cannot represent.
    """
    require(
        ours,
        linear_bias=True,
        attention_bias=True,
        sliding_window=None,
        layer_norm_eps=1e-5,
        embedding_dropout=ours.dropout,
    )
    if is_decoder(architecture):
        require(ours, add_cross_attention=True, lm_head_bias=False)
        fields = {
            "decoder_layers": ours.num_hidden_layers,
            "is_decoder": True,
            "is_encoder_decoder": False,
        }
    else:
        require(ours, wrap_last_token=wraps)
        if ours.tie_word_embeddings:
            require(ours, share_encoder_decoder_embeddings=True)
        fields = {
            "encoder_layers": ours.encoder_layers,
            "decoder_layers": ours.decoder_layers,
            "decoder_start_token_id": ours.decoder_start_token_id,
            "is_encoder_decoder": True,
        }
    for side in sides(architecture).values():
        fields |= {
            f"{side}_ffn_dim": ours.intermediate_size,
            f"{side}_attention_heads": ours.num_attention_heads,
        }
    return fields | {
        "d_model": ours.hidden_size,
        "activation_function": ours.hidden_act,
        "max_position_embeddings": ours.max_position_embeddings,
        "scale_embedding": ours.scale_embedding,
        "init_std": ours.initializer_range,
        "dropout": ours.dropout,
        "attention_dropout": ours.attention_dropout,
        "activation_dropout": ours.activation_dropout,
    }


def tensor_maps(
    ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
) -> list[TensorMap]:
    maps = body(ours, theirs, architecture) + positions(architecture, unread=2)
    for stack, side in sides(architecture).items():
        maps += linear(f"{stack}.embeddings.norm", f"{side}.layernorm_embedding")
    return maps


def positions(architecture: str, unread: int = 0) -> list[TensorMap]:
    """Return the tensor map of the learned position table of each stack.

    The first `unread` rows of the source's table, which no token reads, are dropped. `architecture`
    is the source's class.
    """
    op = drop_rows(unread) if unread else SAME
    return [
        tensor_map(
            f"{stack}.embeddings.embed_positions.weight", f"{side}.embed_positions.weight", op
        )
        for stack, side in sides(architecture).items()
    ]


def final_norms(architecture: str) -> list[TensorMap]:
    return [
        norm
        for stack, side in sides(architecture).items()
        for norm in linear(f"{stack}.norm", f"{side}.layer_norm")
    ]


def body(
    ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str
) -> list[TensorMap]:
    """Return the tensor maps of token embeddings, layers and heads, which all relatives of BART
    share.

    Positions, the norms after the embeddings and the final norms are not among them. `ours` and
    `theirs` are the configs of both models, `architecture` is the source's class.
    """
    if is_decoder(architecture):
        maps = tokens("decoder.embed_tokens.weight", "lm_head.weight", theirs.tie_word_embeddings)
    else:
        maps = embeddings(
            ours,
            theirs.tie_word_embeddings,
            getattr(theirs, "share_encoder_decoder_embeddings", True),
        )
        maps.append(final_logits_bias(ours))
        maps += linear("dense", "classification_head.dense") + linear(
            "classifier", "classification_head.out_proj"
        )
        maps += linear("qa_outputs", "qa_outputs")
    for stack, side in sides(architecture).items():
        maps += layers(
            f"{stack}.layers",
            f"{side}.layers",
            getattr(theirs, f"{side}_layers"),
            side == "decoder",
        )
    return maps


def embeddings(ours: VanillaTransformerConfig, tied: bool, shared: bool = True) -> list[TensorMap]:
    """Return the tensor maps of the token embeddings and, if not `tied`, of the LM head.

    Args:
        tied: the LM head is the embedding matrix.
        shared: encoder and decoder have one embedding matrix. Tied and shared, that matrix has up
            to four names in the source. Untied and shared, `shared.weight` is read only for a stack
            without its own matrix.
    """
    encoder, decoder = (
        f"model.{side}.embeddings.embed_tokens.weight" for side in ("encoder", "decoder")
    )
    if tied and shared:
        also = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
        return [tensor_map(encoder, "shared.weight", also=also)]
    # before transformers 5, only the projection was not tied
    otherwise = ("shared.weight",) if shared else ()
    maps = [
        tensor_map(encoder, "encoder.embed_tokens.weight", otherwise=otherwise),
        tensor_map(
            decoder,
            "decoder.embed_tokens.weight",
            also=("lm_head.weight",) if tied else (),
            otherwise=otherwise,
        ),
    ]
    if not tied:
        maps.append(tensor_map("lm_head.weight", "lm_head.weight"))
    return (
        [*maps, TensorMap((), "shared.weight", zeros(ours.vocab_size, ours.hidden_size))]
        if shared
        else maps
    )


def final_logits_bias(ours: VanillaTransformerConfig) -> TensorMap:
    if ours.lm_head_bias:
        return tensor_map("lm_head.bias", "final_logits_bias", ROW)
    return TensorMap((), "final_logits_bias", zeros(1, ours.vocab_size))


def layers(
    ours: str, theirs: str, count: int, has_cross_attention: bool = False
) -> list[TensorMap]:
    maps = []
    attentions = {"self_attn": "self_attn"} | (
        {"cross_attn": "encoder_attn"} if has_cross_attention else {}
    )
    for i in range(count):
        layer = f"{ours}.{i}"
        their_layer = f"{theirs}.{i}"
        for attention, name in attentions.items():
            for projection, their_projection in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out")):
                maps += linear(
                    f"{layer}.{attention}.{projection}_proj",
                    f"{their_layer}.{name}.{their_projection}_proj",
                )
            maps += linear(f"{layer}.{attention}_norm", f"{their_layer}.{name}_layer_norm")
        maps += linear(f"{layer}.feed_forward.up_proj", f"{their_layer}.fc1")
        maps += linear(f"{layer}.feed_forward.down_proj", f"{their_layer}.fc2")
        maps += linear(f"{layer}.feed_forward_norm", f"{their_layer}.final_layer_norm")
    return maps
