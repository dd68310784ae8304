"""BART (Lewis et al. 2020): an encoder-decoder with learned positions that start at 2, a norm after
the embeddings, and post-norm. `BartForCausalLM` is its decoder alone, which still has
cross-attention to an encoder's states."""

from .fields import (
    Fields,
    Ours,
    TensorNames,
    Theirs,
    our_classes,
    read_fields,
    require,
    same_names,
    write_fields,
)
from .tensors import (
    ROW,
    SAME,
    TensorMap,
    drop_rows,
    layers,
    linear,
    modules,
    tensor_map,
    tokens,
    zeros,
)

CLASSES = our_classes(
    "Seq2Seq",
    *("Model", "ForConditionalGeneration"),
    *("ForSequenceClassification", "ForQuestionAnswering"),
) | our_classes("Decoder", "ForCausalLM")
# of relatives without other heads
LM_CLASSES = our_classes("Seq2Seq", "Model", "ForConditionalGeneration")
LM_CLASSES |= our_classes("Decoder", "ForCausalLM")
STACK = {
    "hidden_size": "d_model",
    "hidden_act": "activation_function",
    "initializer_range": "init_std",
    "embedding_dropout": "dropout",
    **same_names(
        *("max_position_embeddings", "scale_embedding"),
        *("dropout", "attention_dropout", "activation_dropout"),
    ),
}
HEADS = {
    "dense": "classification_head.dense",
    "classifier": "classification_head.out_proj",
    "qa_outputs": "qa_outputs",
}
DEPTHS = same_names("encoder_layers", "decoder_layers")
LINEAR = {
    **{f"self_attn.{part}_proj": f"self_attn.{part}_proj" for part in "qkv"},
    "self_attn.o_proj": "self_attn.out_proj",
    "feed_forward.up_proj": "fc1",
    "feed_forward.down_proj": "fc2",
}
NORMS = {"self_attn_norm": "self_attn_layer_norm", "feed_forward_norm": "final_layer_norm"}
LAYER = LINEAR | NORMS
DECODER_LAYER = LAYER | {
    **{f"cross_attn.{part}_proj": f"encoder_attn.{part}_proj" for part in "qkv"},
    "cross_attn.o_proj": "encoder_attn.out_proj",
    "cross_attn_norm": "encoder_attn_layer_norm",
}
FIXED = {"position_embedding_type": "learned", "embedding_norm": True}
UNUSED = r"(encoder|decoder)\.version"


def is_decoder(config: Theirs | Ours) -> bool:
    return config.architectures[0].endswith("CausalLM")


def sides(config: Theirs | Ours) -> dict[str, str]:
    """Return {our stack: the source's name for it}, such as `{"model.decoder": "decoder"}`."""
    return (
        {"model": "decoder"}
        if is_decoder(config)
        else {"model.encoder": "encoder", "model.decoder": "decoder"}
    )


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    """Return the fields of our config, besides `FIXED`, that all relatives of BART share.

    `names` are those of the source's tensors, without the family's prefix: with `final_logits_bias`
    the LM head gets a bias. Raises ValueError if encoder and decoder differ in feed-forward width
    or heads.
    """
    if is_decoder(theirs):
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
        **read_fields(theirs, DEPTHS),
        "lm_head_bias": "final_logits_bias" in names,
        "decoder_start_token_id": getattr(theirs, "decoder_start_token_id", None),
    }


def wrapped_config(theirs: Theirs, names: TensorNames) -> Fields:
    """Return the fields of `to_vanilla_config` of a family whose decoder gets a sequence's last
    token in front of it."""
    wraps = {} if is_decoder(theirs) else {"wrap_last_token": True}
    return to_vanilla_config(theirs, names) | wraps


def stack_fields(theirs: Theirs, side: str = "") -> Fields:
    return read_fields(theirs, STACK) | {
        "intermediate_size": getattr(theirs, f"{side}ffn_dim"),
        "num_attention_heads": getattr(theirs, f"{side}attention_heads"),
        "classifier_dropout": getattr(theirs, "classifier_dropout", 0.0),
    }


def to_source_config(ours: Ours) -> Fields:
    return source_fields(ours) | {"classifier_dropout": ours.classifier_dropout}


def source_fields(ours: Ours) -> Fields:
    """Return the source's config fields that all relatives of BART share."""
    fields = write_fields(ours, STACK) | {"is_encoder_decoder": not is_decoder(ours)}
    if is_decoder(ours):
        fields |= {"decoder_layers": ours.num_hidden_layers, "is_decoder": True}
    else:
        fields |= write_fields(ours, DEPTHS | same_names("decoder_start_token_id"))
    for side in sides(ours).values():
        fields |= {
            f"{side}_ffn_dim": ours.intermediate_size,
            f"{side}_attention_heads": ours.num_attention_heads,
        }
    return fields


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    maps = body(ours, theirs) + positions(theirs, unread=2)
    for stack, side in sides(theirs).items():
        maps += linear(f"{stack}.embeddings.norm", f"{side}.layernorm_embedding")
    return maps


def positions(theirs: Theirs, unread: int = 0) -> list[TensorMap]:
    """Return the tensor map of the learned position table of each stack.

    The first `unread` rows of the source's table, which no token reads, are dropped.
    """
    op = drop_rows(unread) if unread else SAME
    return [
        tensor_map(
            f"{stack}.embeddings.embed_positions.weight", f"{side}.embed_positions.weight", op
        )
        for stack, side in sides(theirs).items()
    ]


def final_norms(theirs: Theirs) -> list[TensorMap]:
    return [
        norm
        for stack, side in sides(theirs).items()
        for norm in linear(f"{stack}.norm", f"{side}.layer_norm")
    ]


def body(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    """Return the tensor maps of token embeddings, layers and heads, which all relatives of BART
    share.

    Positions, the norms after the embeddings and the final norms are not among them.
    """
    if is_decoder(theirs):
        maps = tokens(ours, "decoder.embed_tokens.weight", "lm_head.weight")
    else:
        maps = embeddings(ours, getattr(theirs, "share_encoder_decoder_embeddings", True))
        maps.append(final_logits_bias(ours))
        maps += modules(HEADS)
    for stack, side in sides(theirs).items():
        names = DECODER_LAYER if side == "decoder" else LAYER
        count = getattr(theirs, f"{side}_layers")
        maps += layers(names, f"{stack}.layers", f"{side}.layers", count)
    return maps


def embeddings(ours: Ours, shared: bool) -> list[TensorMap]:
    """Return the tensor maps of the token embeddings and of an LM head that is not tied to them.

    Args:
        shared: encoder and decoder have one embedding matrix. Tied and shared, that matrix has up
            to four names in the source. Untied and shared, `shared.weight` is read only for a stack
            without its own matrix.
    """
    tied = ours.tie_word_embeddings
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


def final_logits_bias(ours: Ours) -> TensorMap:
    if ours.lm_head_bias:
        return tensor_map("lm_head.bias", "final_logits_bias", ROW)
    return TensorMap((), "final_logits_bias", zeros(1, ours.vocab_size))
