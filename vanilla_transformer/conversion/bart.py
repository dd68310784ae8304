"""BART (Lewis et al. 2020): an encoder-decoder with learned positions that start at 2, a norm behind the embeddings, and
post-norm."""

from .fields import require
from .tensors import ROW, Pair, linear, pair, without_rows, zeros

CONFIG = "BartConfig"
ARCHITECTURES = {
    "BartModel": "VanillaSeq2SeqModel",
    "BartForConditionalGeneration": "VanillaSeq2SeqForConditionalGeneration",
}
PREFIX = "model."
UNUSED = r"(encoder|decoder)\.version"


def config(theirs, architecture, names):
    return seq2seq_fields(theirs, names) | {"position_embedding_type": "learned", "embedding_norm": True}


def seq2seq_fields(theirs, names):
    """The config fields that BART, mBART and Marian share, ours from theirs."""
    require(
        theirs,
        decoder_ffn_dim=theirs.encoder_ffn_dim,
        decoder_attention_heads=theirs.encoder_attention_heads,
        encoder_layerdrop=0,
        decoder_layerdrop=0,
    )
    return {
        "hidden_size": theirs.d_model,
        "intermediate_size": theirs.encoder_ffn_dim,
        "num_attention_heads": theirs.encoder_attention_heads,
        "encoder_layers": theirs.encoder_layers,
        "decoder_layers": theirs.decoder_layers,
        "hidden_act": theirs.activation_function,
        "max_position_embeddings": theirs.max_position_embeddings,
        "scale_embedding": theirs.scale_embedding,
        "initializer_range": theirs.init_std,
        "lm_head_bias": "final_logits_bias" in names,
        "embedding_dropout": theirs.dropout,
        "dropout": theirs.dropout,
        "attention_dropout": theirs.attention_dropout,
        "activation_dropout": theirs.activation_dropout,
        "classifier_dropout": getattr(theirs, "classifier_dropout", 0.0),
        "decoder_start_token_id": theirs.decoder_start_token_id,
    }


def config_back(ours, architecture):
    require(ours, position_embedding_type="learned", embedding_norm=True)
    return seq2seq_fields_back(ours) | {"classifier_dropout": ours.classifier_dropout}


def seq2seq_fields_back(ours):
    require(
        ours,
        position_ids_from="place",
        wrap_last_token=False,
        norm_first=False,
        final_norm=False,
        linear_bias=True,
        sliding_window=None,
        layer_norm_eps=1e-5,
        embedding_dropout=ours.dropout,
    )
    if ours.tie_word_embeddings:
        require(ours, share_encoder_decoder_embeddings=True)
    return {
        "d_model": ours.hidden_size,
        "encoder_ffn_dim": ours.intermediate_size,
        "decoder_ffn_dim": ours.intermediate_size,
        "encoder_attention_heads": ours.num_attention_heads,
        "decoder_attention_heads": ours.num_attention_heads,
        "encoder_layers": ours.encoder_layers,
        "decoder_layers": ours.decoder_layers,
        "activation_function": ours.hidden_act,
        "max_position_embeddings": ours.max_position_embeddings,
        "scale_embedding": ours.scale_embedding,
        "init_std": ours.initializer_range,
        "dropout": ours.dropout,
        "attention_dropout": ours.attention_dropout,
        "activation_dropout": ours.activation_dropout,
        "decoder_start_token_id": ours.decoder_start_token_id,
        "is_encoder_decoder": True,
    }


def pairs(ours, theirs, architecture) -> list[Pair]:
    found = embeddings(ours, theirs.tie_word_embeddings) + stacks(ours) + [final_logits_bias(ours)]
    for side in ("encoder", "decoder"):
        name = f"model.{side}.embeddings"
        found.append(pair(f"{name}.embed_positions.weight", f"{side}.embed_positions.weight", without_rows(2)))
        found += linear(f"{name}.norm", f"{side}.layernorm_embedding")
    return found


def embeddings(ours, tied, shared=True) -> list[Pair]:
    """Tied and shared, one matrix has up to four names. If only one of both, the matrix of the whole model is unused."""
    encoder, decoder = (f"model.{side}.embeddings.embed_tokens.weight" for side in ("encoder", "decoder"))
    if tied and shared:
        also = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
        return [pair(encoder, "shared.weight", also=also)]
    found = [
        pair(encoder, "encoder.embed_tokens.weight"),
        pair(decoder, "decoder.embed_tokens.weight", also=("lm_head.weight",) if tied else ()),
    ]
    if not tied:
        found.append(pair("lm_head.weight", "lm_head.weight"))
    return [*found, Pair((), "shared.weight", zeros(ours.vocab_size, ours.hidden_size))] if shared else found


def final_logits_bias(ours):
    if ours.lm_head_bias:
        return pair("lm_head.bias", "final_logits_bias", ROW)
    return Pair((), "final_logits_bias", zeros(1, ours.vocab_size))


def stacks(ours) -> list[Pair]:
    found = []
    for side, count in (("encoder", ours.encoder_layers), ("decoder", ours.decoder_layers)):
        attentions = {"self_attn": "self_attn"} | ({"cross_attn": "encoder_attn"} if side == "decoder" else {})
        for i in range(count):
            layer, their_layer = f"model.{side}.layers.{i}", f"{side}.layers.{i}"
            for attention, name in attentions.items():
                for projection, their_projection in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out")):
                    found += linear(f"{layer}.{attention}.{projection}_proj", f"{their_layer}.{name}.{their_projection}_proj")
                found += linear(f"{layer}.{attention}_norm", f"{their_layer}.{name}_layer_norm")
            found += linear(f"{layer}.feed_forward.up_proj", f"{their_layer}.fc1")
            found += linear(f"{layer}.feed_forward.down_proj", f"{their_layer}.fc2")
            found += linear(f"{layer}.feed_forward_norm", f"{their_layer}.final_layer_norm")
    return found
