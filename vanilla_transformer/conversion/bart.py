"""BART (Lewis et al. 2020): an encoder-decoder with learned positions that start at 2, a norm after the embeddings, and
post-norm. `BartForCausalLM` is its decoder alone, which still has cross-attention to an encoder's states."""

from collections.abc import Collection

from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from .fields import Fields, require
from .tensors import ROW, TensorMap, drop_rows, linear, tensor_map, zeros

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


def to_vanilla_config(theirs: PreTrainedConfig, architecture: str, names: Collection[str]) -> Fields:
    fields = decoder_fields(theirs) if is_decoder(architecture) else seq2seq_fields(theirs, names)
    return fields | {"position_embedding_type": "learned", "embedding_norm": True}


def is_decoder(architecture: str) -> bool:
    return architecture.endswith("CausalLM")


def decoder_fields(theirs: PreTrainedConfig) -> Fields:
    """The config fields of the decoder alone, ours from theirs."""
    require(theirs, decoder_layerdrop=0)
    fields = stack_fields(theirs, "decoder")
    return fields | {"num_hidden_layers": theirs.decoder_layers, "add_cross_attention": True, "lm_head_bias": False}


def seq2seq_fields(theirs: PreTrainedConfig, names: Collection[str]) -> Fields:
    """The config fields that BART, mBART and Marian share, ours from theirs."""
    require(
        theirs,
        is_encoder_decoder=True,
        decoder_ffn_dim=theirs.encoder_ffn_dim,
        decoder_attention_heads=theirs.encoder_attention_heads,
        encoder_layerdrop=0,
        decoder_layerdrop=0,
    )
    return stack_fields(theirs, "encoder") | {
        "encoder_layers": theirs.encoder_layers,
        "decoder_layers": theirs.decoder_layers,
        "lm_head_bias": "final_logits_bias" in names,
        "decoder_start_token_id": theirs.decoder_start_token_id,
    }


def stack_fields(theirs: PreTrainedConfig, side: str) -> Fields:
    return {
        "hidden_size": theirs.d_model,
        "intermediate_size": getattr(theirs, f"{side}_ffn_dim"),
        "num_attention_heads": getattr(theirs, f"{side}_attention_heads"),
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


def to_source_config(ours: VanillaTransformerConfig, architecture: str, norm_first: bool = False) -> Fields:
    """The fields of BART, or with `norm_first` of mBART."""
    require(ours, position_embedding_type="learned", embedding_norm=True, norm_first=norm_first, final_norm=norm_first)
    if is_decoder(architecture):
        return source_decoder_fields(ours) | {"classifier_dropout": ours.classifier_dropout}
    require(ours, wrap_last_token=norm_first)
    return source_seq2seq_fields(ours) | {"classifier_dropout": ours.classifier_dropout}


def source_decoder_fields(ours: VanillaTransformerConfig) -> Fields:
    require(ours, add_cross_attention=True, lm_head_bias=False)
    fields = source_stack_fields(ours, ("decoder",))
    return fields | {"decoder_layers": ours.num_hidden_layers, "is_decoder": True, "is_encoder_decoder": False}


def source_seq2seq_fields(ours: VanillaTransformerConfig) -> Fields:
    if ours.tie_word_embeddings:
        require(ours, share_encoder_decoder_embeddings=True)
    return source_stack_fields(ours, ("encoder", "decoder")) | {
        "encoder_layers": ours.encoder_layers,
        "decoder_layers": ours.decoder_layers,
        "decoder_start_token_id": ours.decoder_start_token_id,
        "is_encoder_decoder": True,
    }


def source_stack_fields(ours: VanillaTransformerConfig, sides: tuple[str, ...]) -> Fields:
    require(
        ours,
        position_ids_from="place",
        linear_bias=True,
        sliding_window=None,
        layer_norm_eps=1e-5,
        embedding_dropout=ours.dropout,
    )
    return {
        "d_model": ours.hidden_size,
        **{f"{side}_ffn_dim": ours.intermediate_size for side in sides},
        **{f"{side}_attention_heads": ours.num_attention_heads for side in sides},
        "activation_function": ours.hidden_act,
        "max_position_embeddings": ours.max_position_embeddings,
        "scale_embedding": ours.scale_embedding,
        "init_std": ours.initializer_range,
        "dropout": ours.dropout,
        "attention_dropout": ours.attention_dropout,
        "activation_dropout": ours.activation_dropout,
    }


def tensor_maps(ours: VanillaTransformerConfig, theirs: PreTrainedConfig, architecture: str) -> list[TensorMap]:
    if is_decoder(architecture):
        return decoder_tensor_maps(theirs)
    maps = embeddings(ours, theirs.tie_word_embeddings) + stacks(theirs) + [final_logits_bias(ours)]
    for side in ("encoder", "decoder"):
        maps += positions(f"model.{side}", side)
    maps += linear("dense", "classification_head.dense") + linear("classifier", "classification_head.out_proj")
    return maps + linear("qa_outputs", "qa_outputs")


def decoder_tensor_maps(theirs: PreTrainedConfig) -> list[TensorMap]:
    tied = theirs.tie_word_embeddings
    also = ("lm_head.weight",) if tied else ()
    maps = [tensor_map("model.embeddings.embed_tokens.weight", "decoder.embed_tokens.weight", also=also)]
    if not tied:
        maps.append(tensor_map("lm_head.weight", "lm_head.weight"))
    return maps + positions("model", "decoder") + stack("model", "decoder", theirs.decoder_layers)


def positions(ours: str, side: str) -> list[TensorMap]:
    name = f"{ours}.embeddings"
    table = tensor_map(f"{name}.embed_positions.weight", f"{side}.embed_positions.weight", drop_rows(2))
    return [table, *linear(f"{name}.norm", f"{side}.layernorm_embedding")]


def embeddings(ours: VanillaTransformerConfig, tied: bool, shared: bool = True) -> list[TensorMap]:
    """The matrices of tokens. Tied and shared, one matrix has up to four names. Otherwise `shared.weight` is not used."""
    encoder, decoder = (f"model.{side}.embeddings.embed_tokens.weight" for side in ("encoder", "decoder"))
    if tied and shared:
        also = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
        return [tensor_map(encoder, "shared.weight", also=also)]
    maps = [
        tensor_map(encoder, "encoder.embed_tokens.weight"),
        tensor_map(decoder, "decoder.embed_tokens.weight", also=("lm_head.weight",) if tied else ()),
    ]
    if not tied:
        maps.append(tensor_map("lm_head.weight", "lm_head.weight"))
    return [*maps, TensorMap((), "shared.weight", zeros(ours.vocab_size, ours.hidden_size))] if shared else maps


def final_logits_bias(ours: VanillaTransformerConfig) -> TensorMap:
    if ours.lm_head_bias:
        return tensor_map("lm_head.bias", "final_logits_bias", ROW)
    return TensorMap((), "final_logits_bias", zeros(1, ours.vocab_size))


def stacks(theirs: PreTrainedConfig) -> list[TensorMap]:
    both = {"encoder": theirs.encoder_layers, "decoder": theirs.decoder_layers}
    return [entry for side, count in both.items() for entry in stack(f"model.{side}", side, count)]


def stack(ours: str, side: str, count: int) -> list[TensorMap]:
    maps = []
    attentions = {"self_attn": "self_attn"} | ({"cross_attn": "encoder_attn"} if side == "decoder" else {})
    for i in range(count):
        layer = f"{ours}.layers.{i}"
        their_layer = f"{side}.layers.{i}"
        for attention, name in attentions.items():
            for projection, their_projection in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out")):
                maps += linear(f"{layer}.{attention}.{projection}_proj", f"{their_layer}.{name}.{their_projection}_proj")
            maps += linear(f"{layer}.{attention}_norm", f"{their_layer}.{name}_layer_norm")
        maps += linear(f"{layer}.feed_forward.up_proj", f"{their_layer}.fc1")
        maps += linear(f"{layer}.feed_forward.down_proj", f"{their_layer}.fc2")
        maps += linear(f"{layer}.feed_forward_norm", f"{their_layer}.final_layer_norm")
    return maps
