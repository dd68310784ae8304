"""GPT-2 (Radford et al. 2019): a pre-norm decoder with learned positions, its linear maps stored
transposed and queries, keys and values as one."""

from .fields import Fields, Ours, TensorNames, Theirs, our_classes, require
from .tensors import (
    SAME,
    THIRDS,
    THIRDS_TRANSPOSED,
    TRANSPOSED,
    Op,
    TensorMap,
    joined,
    modules,
    scaled,
    tensor_map,
    tokens,
)

CLASSES = {
    "Model": "VanillaDecoderModel",
    "LMHeadModel": "VanillaDecoderForCausalLM",
} | our_classes(
    "Decoder", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"
)
FIELDS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_act": "activation_function",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "initializer_range": "initializer_range",
    "embedding_dropout": "embd_pdrop",
    "dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
}
LINEAR = {
    "self_attn.o_proj": "attn.c_proj",
    "feed_forward.up_proj": "mlp.c_fc",
    "feed_forward.down_proj": "mlp.c_proj",
}
NORMS = {"self_attn_norm": "ln_1", "feed_forward_norm": "ln_2"}
UNUSED = r"h\.\d+\.attn\.(bias|masked_bias)"  # stored causal masks


def to_vanilla_config(theirs: Theirs, names: TensorNames) -> Fields:
    require(theirs, add_cross_attention=False)
    dropouts = (getattr(theirs, name, None) for name in ("classifier_dropout", "hidden_dropout"))
    return {
        "intermediate_size": theirs.n_inner or 4 * theirs.n_embd,
        "position_embedding_type": "learned",
        "scale_embedding": False,
        "norm_first": True,
        "lm_head_bias": False,
        "classifier_dropout": next((dropout for dropout in dropouts if dropout is not None), 0.1),
    }


def to_source_config(ours: Ours) -> Fields:
    return {"classifier_dropout": ours.classifier_dropout}


def tensor_maps(ours: Ours, theirs: Theirs) -> list[TensorMap]:
    maps = [
        *tokens(ours, "wte.weight", "lm_head.weight"),
        tensor_map("model.embeddings.embed_positions.weight", "wpe.weight"),
        tensor_map("score.weight", "score.weight"),
        *modules({"model.norm": "ln_f", "classifier": "classifier", "qa_outputs": "qa_outputs"}),
    ]
    for i in range(ours.num_hidden_layers):
        layer = f"model.layers.{i}"
        their_layer = f"h.{i}"
        # the queries make up for another division of the scores than by sqrt(d_k)
        query_scale = 1.0 if theirs.scale_attn_weights else ours.head_dim**0.5
        if theirs.scale_attn_by_inverse_layer_idx:
            query_scale /= i + 1
        projections = [f"{layer}.self_attn.{projection}_proj" for projection in "qkv"]
        for part, op in (("weight", THIRDS_TRANSPOSED), ("bias", THIRDS)):
            op = first_scaled(op, query_scale)
            maps += joined(projections, f"{their_layer}.attn.c_attn", op, [part])
        maps += modules(LINEAR, f"{layer}.", f"{their_layer}.", op=TRANSPOSED)
        maps += modules(NORMS, f"{layer}.", f"{their_layer}.")
    return maps


def first_scaled(op: Op, factor: float) -> Op:
    if factor == 1:
        return op
    scale = scaled(factor)
    return Op(
        f"{op.name}, queries {scale.name}",
        lambda t: tuple(
            (scale if i == 0 else SAME).to_ours(part)[0] for i, part in enumerate(op.to_ours(t))
        ),
        lambda query, *others: op.to_theirs(scale.to_theirs(query), *others),
    )
