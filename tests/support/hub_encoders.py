"""Fields of config.json of popular encoders on the Hub, that decide what the model computes.

They were written down from model cards, papers, issues and other programs' tests; no repository was
read. The published number of parameters, in millions, checks the sizes.
"""

from typing import NamedTuple

MODERNBERT = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "sep_token_id": 50282,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 50368,
}
NOMIC = {
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    "bos_token_id": None,
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "eos_token_id": None,
    "fused_bias_fc": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 12,
    "n_positions": 8192,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_weights": True,
    "summary_type": "cls_index",
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "use_cache": True,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "vocab_size": 30528,
}
NEW = {
    "architectures": ["NewModel"],
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    "classifier_dropout": None,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 8192,
    "model_type": "new",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pack_qkv": True,
    "pad_token_id": 0,
    "position_embedding_type": "rope",
    "rope_scaling": None,
    "rope_theta": 500000,
    "torch_dtype": "float32",
    "type_vocab_size": 0,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "vocab_size": 30528,
}
DEBERTA = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-07,
    "max_position_embeddings": 512,
    "max_relative_positions": -1,
    "model_type": "deberta-v2",
    "norm_rel_ebd": "layer_norm",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "position_buckets": 256,
    "relative_attention": True,
    "share_att_key": True,
    "type_vocab_size": 0,
    "vocab_size": 128100,
}
ALBERT = {
    "architectures": ["AlbertForMaskedLM"],
    "attention_probs_dropout_prob": 0,
    "bos_token_id": 2,
    "classifier_dropout_prob": 0.1,
    "down_scale_factor": 1,
    "embedding_size": 128,
    "eos_token_id": 3,
    "gap_size": 0,
    "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "inner_group_num": 1,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "albert",
    "net_structure_type": 0,
    "num_attention_heads": 12,
    "num_hidden_groups": 1,
    "num_hidden_layers": 12,
    "num_memory_blocks": 0,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": 30000,
}


class HubEncoder(NamedTuple):
    """A checkpoint: its config.json, the class of transformers with its tensors, what the names of
    its base model begin with, the published millions of parameters and fields of ours."""

    content: dict
    architecture: str
    prefix: str
    millions: float
    expected: dict


def modernbert(millions, theta=160000.0, local=10000.0, architecture="MaskedLM", **fields):
    architecture = f"ModernBert{'' if architecture == 'Model' else 'For'}{architecture}"
    bases = {"global_rope_theta": theta, "local_rope_theta": local}
    content = MODERNBERT | {"architectures": [architecture]} | bases | fields
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    expected = {"sliding_window": 64, "rope_parameters": rope, "skip_first_prenorm": True}
    prefix = "" if architecture == "ModernBertModel" else "model."
    return HubEncoder(content, architecture, prefix, millions, expected)


def gte(millions, theta, factor, architecture="Model", **fields):
    name = "Model" if architecture == "Model" else f"For{architecture}"
    content = NEW | {"architectures": [f"New{name}"]} | fields
    rope = {"rope_type": "default", "rope_theta": theta}
    if factor:
        rope = {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    prefix = "" if architecture == "Model" else "new."
    return HubEncoder(content, f"Gte{name}", prefix, millions, {"rope_parameters": rope})


def deberta(millions, architecture="Model", **fields):
    buckets = {"relative_attention_num_buckets": 256, "relative_attention_max_distance": 512}
    prefix = "" if architecture == "Model" else "deberta."
    name = f"DebertaV2{architecture}"
    names = {} if architecture == "Model" else {"architectures": [name]}
    return HubEncoder(DEBERTA | names | fields, name, prefix, millions, buckets)


LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
LARGE |= {"num_hidden_layers": 24}
MULTILINGUAL = {"vocab_size": 250048, "type_vocab_size": 1, "pad_token_id": 1}
ROPE_1000 = {"rope_type": "default", "rope_theta": 1000}
HUB_ENCODERS = {
    "answerdotai/ModernBERT-base": modernbert(149),
    "answerdotai/ModernBERT-large": modernbert(
        395, hidden_size=1024, intermediate_size=2624, num_hidden_layers=28, num_attention_heads=16
    ),
    "Alibaba-NLP/gte-modernbert-base": modernbert(149, architecture="Model"),
    "Alibaba-NLP/gte-reranker-modernbert-base": modernbert(
        149, architecture="SequenceClassification", id2label={"0": "LABEL_0"}
    ),
    "ibm-granite/granite-embedding-small-english-r2": modernbert(
        47, 80000.0, architecture="Model", hidden_size=384, intermediate_size=1536,
        num_hidden_layers=12, hidden_activation="silu",
    ),
    "jhu-clsp/ettin-encoder-17m": modernbert(
        17, local=160000.0, hidden_size=256, intermediate_size=384, num_hidden_layers=7,
        num_attention_heads=4,
    ),
    "jhu-clsp/mmBERT-base": modernbert(
        307, local=160000.0, vocab_size=256000, pad_token_id=0, bos_token_id=2, eos_token_id=1,
        cls_token_id=1, sep_token_id=1,
    ),
    "nomic-ai/nomic-embed-text-v1": HubEncoder(
        NOMIC, "NomicBertModel", "", 137, {"rope_parameters": ROPE_1000, "gated": True}
    ),
    "nomic-ai/nomic-embed-text-v1.5": HubEncoder(
        NOMIC | {"max_position_embeddings": 2048, "rope_parameters": ROPE_1000}, "NomicBertModel",
        "", 137, {"rope_parameters": ROPE_1000, "max_position_embeddings": 8192},
    ),
    "Alibaba-NLP/gte-base-en-v1.5": gte(137, 500000, None),
    "Alibaba-NLP/gte-large-en-v1.5": gte(
        434, 320000.0, 2 ** (2 / 64), **LARGE, type_vocab_size=2, rope_theta=160000,
        rope_scaling={"factor": 2.0, "type": "ntk"},
    ),
    "Alibaba-NLP/gte-multilingual-reranker-base": gte(
        306, 160000.0, 8 ** (2 / 64), "SequenceClassification", **MULTILINGUAL, rope_theta=20000,
        rope_scaling={"factor": 8.0, "type": "ntk"}, id2label={"0": "LABEL_0"},
    ),
    "Snowflake/snowflake-arctic-embed-m-v2.0": gte(
        305, 160000, None, **MULTILINGUAL, model_type="gte", rope_theta=160000,
        architectures=["GteModel"],
    ),
    "microsoft/deberta-v3-base": deberta(184),
    "microsoft/mdeberta-v3-base": deberta(278, vocab_size=251000),
    "mixedbread-ai/mxbai-rerank-large-v1": deberta(
        435, "ForSequenceClassification", **LARGE, id2label={"0": "LABEL_0"},
        pos_att_type=["p2c", "c2p"], pooler_hidden_size=1024, pooler_hidden_act="gelu",
    ),
    "albert/albert-base-v2": HubEncoder(
        ALBERT, "AlbertForMaskedLM", "albert.", 90, {"embedding_size": 128, "norm_first": False}
    ),
}  # fmt: skip
