"""The options of configs that graphs are compared with torch for, by name."""

from vanilla_transformer_export.heads import GENERATORS, HEADS, model_class

SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
RELATIVE = {
    "position_embedding_type": "relative",
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 5,
}
LEARNED = {"position_embedding_type": "learned", "max_position_embeddings": 60}
ROTARY = {"position_embedding_type": "rotary"}
T5 = {
    **RELATIVE, "norm_type": "rms_norm", "norm_first": True, "gated": True,
    "hidden_act": "gelu_new", "linear_bias": False, "scale_embedding": False, "lm_head_bias": False,
}  # fmt: skip
DISENTANGLED = {
    "position_embedding_type": "disentangled",
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 9,
}
MODERNBERT = {
    **ROTARY, "num_hidden_layers": 3, "sliding_window": 4, "norm_first": True,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 160.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
    },
    "skip_first_prenorm": True, "embedding_norm": True, "scale_embedding": False,
    "linear_bias": False, "gated": True, "hidden_act": "gelu", "lm_transform_act": "gelu",
    "classifier_act": "gelu", "classifier_pooling": "mean",
}  # fmt: skip
# As Qwen3 and EuroBERT, with heads that are not as wide together as the states.
QWEN3 = {
    **ROTARY, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "use_qk_norm": True, "norm_type": "rms_norm", "norm_first": True, "gated": True,
    "hidden_act": "silu", "linear_bias": False, "scale_embedding": False, "lm_head_bias": False,
}  # fmt: skip
# As EmbeddingGemma, and Gemma 3 as a decoder.
GEMMA = {
    **QWEN3, "sandwich_norm": True, "hidden_act": "gelu_pytorch_tanh", "scale_embedding": True,
    "num_hidden_layers": 3, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_theta": 50.0}, "full_attention": {"rope_theta": 500.0},
    },
}  # fmt: skip
COMMON = {
    "paper": {},
    "biases of the paper": {"attention_bias": False, "lm_head_bias": False},
    "pre-norm": {**LEARNED, "norm_first": True, "linear_bias": False},
    "pre-norm without final norm": {"norm_first": True, "final_norm": False},
    "post-norm with final norm": {
        "final_norm": True,
        "scale_embedding": False,
        "hidden_act": "gelu",
    },
    "embedding norm": {"embedding_norm": True, "layer_norm_eps": 1e-3},
    "rotary": {
        **ROTARY,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0},
    },
    "relative": RELATIVE,
    "many buckets": {"position_embedding_type": "relative"},
    "learned relative": {**RELATIVE, **LEARNED, "position_embedding_type": "learned_relative"},
    "no positions": {"position_embedding_type": "none"},
    "positions from ids": {**LEARNED, "position_ids_from": "ids"},
    "positions from mask": {**LEARNED, "position_ids_from": "mask"},
    "sinusoids from ids": {"position_ids_from": "ids"},
    "sinusoids from mask": {"position_ids_from": "mask"},
    "gated rms norm": {"norm_type": "rms_norm", "gated": True, "hidden_act": "silu"},
    "t5": T5,
    "wide heads": {"head_dim": 24, "value_head_dim": 24},
    "other values": {"head_dim": 8, "value_head_dim": 12},
    "odd heads": {"head_dim": 6, "value_head_dim": 10},
    "untied": {"tie_word_embeddings": False, "hidden_act": "gelu_new"},
    "narrow embeddings": {"embedding_size": 20},
    "narrow embeddings with norm": {
        "embedding_size": 20,
        "embedding_norm": True,
        "lm_transform_act": "gelu",
    },
    "window": {"sliding_window": 5},
    "rotary window": {"sliding_window": 5, **ROTARY},
    "relative window": {"sliding_window": 5, **RELATIVE},
    "grouped keys": {"num_key_value_heads": 2},
    "one key": {"num_key_value_heads": 1, "linear_bias": False, **RELATIVE},
    "grouped window": {"num_key_value_heads": 2, "sliding_window": 5, **ROTARY},
    "grouped other values": {"num_key_value_heads": 2, "head_dim": 8, "value_head_dim": 12},
    "head norms": {"use_qk_norm": True},
    "sandwich": {"norm_first": True, "sandwich_norm": True},
    "qwen3": QWEN3,
}
SHORTLIST = {"shortlist": {"shortlist": [0, 1, 2, 5, 30, 47]}}  # for models that generate
DECODER = {
    "several layers": {**RELATIVE, "num_hidden_layers": 3},
    "gemma": GEMMA,
    "relative layer types": {
        **RELATIVE,
        "num_hidden_layers": 2,
        "sliding_window": 3,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}
ENCODER = {
    **DECODER,
    "bert": {
        **LEARNED,
        "type_vocab_size": 2,
        "pooler_act": "tanh",
        "lm_transform_act": "gelu",
        "embedding_norm": True,
    },
    "electra": {"token_transform_act": "gelu"},
    "modernbert": MODERNBERT,
    "other classifiers": {"classifier_act": "silu", "pooler_act": "tanh"},
    "nomic": {
        **ROTARY,
        "type_vocab_size": 2,
        "embedding_norm": True,
        "scale_embedding": False,
        "gated": True,
        "hidden_act": "silu",
        "linear_bias": False,
    },
    "gte": {
        **ROTARY,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 80.0, "factor": 1.5},
        "embedding_norm": True,
        "gated": True,
        "hidden_act": "gelu",
        "pooler_act": "tanh",
    },
    "deberta": {
        **DISENTANGLED,
        "num_hidden_layers": 2,
        "embedding_norm": True,
        "scale_embedding": False,
        "hidden_act": "gelu",
        "lm_transform_act": "gelu",
        "pooler_act": "gelu",
    },
    "odd buckets": {**DISENTANGLED, "relative_attention_num_buckets": 5, "norm_first": True},
    "disentangled rms norm": {
        **DISENTANGLED,
        "norm_type": "rms_norm",
        "linear_bias": False,
        "head_dim": 6,
        "value_head_dim": 10,
    },
    "disentangled window": {**DISENTANGLED, "sliding_window": 4, "type_vocab_size": 3},
    "rotary odd heads": {
        **ROTARY,
        "head_dim": 6,
        "value_head_dim": 10,
        "position_ids_from": "mask",
    },
    "mean": {"classifier_pooling": "mean"},
}
SEQ2SEQ = {
    "tables of each stack": {"share_encoder_decoder_embeddings": False},
    "wrapped": {"wrap_last_token": True},
    "several layers": {**RELATIVE, "encoder_layers": 3, "decoder_layers": 2},
}
VISION = {
    "vit": {},
    "odd images": {"image_size": [13, 22], "patch_size": [4, 5], "num_first_tokens": 2},
    "pooled": {"pooler_act": "tanh"},
    "interpolated": {"interpolate_pos_encoding": True},
    "post-norm with final norm": {
        "norm_first": False,
        "final_norm": True,
        "linear_bias": False,
        "num_channels": 1,
    },
    **{
        name: COMMON[name] for name in ("gated rms norm", "wide heads", "other values", "odd heads")
    },
}


def variants(architecture):
    if "Vision" in architecture:
        return VISION
    kind = (
        ENCODER if "Encoder" in architecture else SEQ2SEQ if "Seq2Seq" in architecture else DECODER
    )
    return COMMON | kind | (SHORTLIST if architecture in GENERATORS else {})


SHARE = 12  # of the variants of bodies that a head is compared for


def variants_of_head(architecture):
    """Return the variants that set a field that this head reads, and every twelfth of the others.

    They are others for the next class: a body is compared for many classes.
    """
    from vanilla_transformer.conversion.fields import READ_BY  # needs transformers

    name, turn = model_class(architecture), [*HEADS].index(architecture)
    read = {field for field, ends in READ_BY.items() if name.endswith(ends)}
    if "lm_head_bias" in read:  # a head that may be the embeddings
        read |= {"embedding_size", "tie_word_embeddings"}
    return {
        name: fields
        for place, (name, fields) in enumerate(variants(architecture).items())
        if (place + turn) % SHARE == 0 or not read.isdisjoint(fields)
    }


def sizes(architecture):
    if "Vision" in architecture:
        others = {name: size for name, size in SIZES.items() if name != "vocab_size"}
        return {**others, "num_hidden_layers": 1, "image_size": 12, "patch_size": 4}
    return {
        **SIZES,
        **(
            {"encoder_layers": 1, "decoder_layers": 1}
            if "Seq2Seq" in architecture
            else {"num_hidden_layers": 1}
        ),
    }
