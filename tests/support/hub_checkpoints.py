"""Checkpoints as on the Hub, at a small width and with random weights: the names of their tensors,
their config.json, their module files and their tokenizers' settings."""

import json

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = ["What is the capital of China?", "Gravity {pulls} bodies", "the " * 30, "no"]
SENTENCE = "sentence_transformers.models"
NARROW = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
POOLING = {
    "word_embedding_dimension": 24,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
    "pooling_mode_weightedmean_tokens": False,
    "pooling_mode_lasttoken": False,
    "include_prompt": True,
}
LAST = ("Pooling", POOLING | {"pooling_mode_lasttoken": True})
MEAN = ("Pooling", POOLING | {"pooling_mode_mean_tokens": True})
WIDE, BACK = (
    {
        "in_features": sizes[0],
        "out_features": sizes[1],
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    for sizes in ((24, 36), (36, 24))
)
NORMALIZE = ("Normalize", None)
QWEN3 = NARROW | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_sliding_window": False,
}
QWEN2 = NARROW | {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoModel": "modeling_qwen.Qwen2Model",
        "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
    },
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_sliding_window": False,
}
MISTRAL = NARROW | {
    "architectures": ["MistralModel"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
GEMMA = NARROW | {
    "_sliding_window_pattern": 6,
    "architectures": ["Gemma3TextModel"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "dtype": "float32",
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 2048,
    "model_type": "gemma3_text",
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 8,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 6,
    "use_bidirectional_attention": True,
}
EUROBERT = NARROW | {
    "architectures": ["EuroBertForMaskedLM"],
    "attention_bias": False,
    "auto_map": {"AutoModel": "modeling_eurobert.EuroBertModel"},
    "bos_token": "<bos>",
    "bos_token_id": 2,
    "clf_pooling": "late",
    "eos_token_id": 1,
    "head_dim": 6,
    "hidden_act": "silu",
    "hidden_dropout": 0.0,
    "mask_token_id": 3,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "eurobert",
    "pad_token_id": 1,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 250000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
SMOLLM = NARROW | {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
DEBERTA = {
    "architectures": ["DebertaV2ForSequenceClassification"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 24,
    "id2label": {"0": "entailment", "1": "neutral", "2": "contradiction"},
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "label2id": {"contradiction": 2, "entailment": 0, "neutral": 1},
    "layer_norm_eps": 1e-07,
    "max_position_embeddings": 512,
    "max_relative_positions": -1,
    "model_type": "deberta-v2",
    "norm_rel_ebd": "layer_norm",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "pooler_dropout": 0,
    "pooler_hidden_act": "gelu",
    "pooler_hidden_size": 24,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "position_buckets": 8,
    "relative_attention": True,
    "share_att_key": True,
    "torch_dtype": "float32",
    "type_vocab_size": 0,
}
PROMPTS = {"query": "Instruct: Given a question, retrieve passages\nQuery:", "document": ""}
# name on the Hub: config.json, class, whether names of tensors lack "model.", modules, end token
EMBEDDERS = {
    "Qwen/Qwen3-Embedding-0.6B": (QWEN3, "Qwen3Model", True, [LAST, NORMALIZE], True),
    "Alibaba-NLP/gte-Qwen2-1.5B-instruct": (
        QWEN2,
        "Qwen2ForCausalLM",
        False,
        [LAST, NORMALIZE],
        True,
    ),
    "Salesforce/SFR-Embedding-2_R": (MISTRAL, "MistralModel", True, [LAST, NORMALIZE], True),
    "google/embeddinggemma-300m": (
        GEMMA,
        "Gemma3TextModel",
        True,
        [MEAN, ("Dense", WIDE), ("Dense", BACK), NORMALIZE],
        True,
    ),
}


def make_tokenizer(has_end: bool = False, side: str = "left") -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and some words with the special tokens of a chat, that adds the
    end token if `has_end`."""
    special = ["<|endoftext|>", "<eos>", "<bos>", "<mask>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["yes", "no", *TEXTS, *PROMPTS.values()] * 9, trainer)
    if has_end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        mask_token="<mask>",
        padding_side=side,
        model_max_length=512,
    )


def make_pair_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of `make_tokenizer` with the special tokens of DeBERTa around a pair."""
    tokenizer = make_tokenizer(side="right")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        pair="<bos> $A <eos> $B <eos>",
        special_tokens=[("<bos>", 2), ("<eos>", 1)],
    )
    return tokenizer


def save_checkpoint(directory, content, architecture, is_bare=False, tokenizer=None, seed=0):
    """Save a checkpoint with random weights to `directory`, and return the model.

    `content` is its config.json, and `architecture` the class of transformers whose tensors it has.
    Their names lack "model." if `is_bare`.
    """
    tokenizer = tokenizer or make_tokenizer()
    content = content | {"vocab_size": len(tokenizer)}
    config = transformers.CONFIG_MAPPING[content["model_type"]].from_dict(dict(content))
    transformers.set_seed(seed)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape) * 0.2
    tied = {"lm_head.weight"} if content.get("tie_word_embeddings") else set()
    tensors = {
        name.removeprefix("model.") if is_bare else name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    write_json(directory / "config.json", content)
    tokenizer.save_pretrained(directory)
    return model


def save_embedder(name, directory, side="left"):
    """Save the embedder of `EMBEDDERS` called `name` to `directory`."""
    content, architecture, is_bare, modules, has_end = EMBEDDERS[name]
    save_checkpoint(directory, content, architecture, is_bare, make_tokenizer(has_end, side))
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{SENTENCE}.Transformer"}]
    for number, (kind, config) in enumerate(modules, 1):
        folder = f"{number}_{kind}"
        entries.append(
            {"idx": number, "name": str(number), "path": folder, "type": f"{SENTENCE}.{kind}"}
        )
        (directory / folder).mkdir()
        if config is not None:
            write_json(directory / folder / "config.json", config)
        if kind == "Dense":
            generator = torch.Generator().manual_seed(number)
            weight = torch.randn(config["out_features"], config["in_features"], generator=generator)
            save_file({"linear.weight": weight}, directory / folder / "model.safetensors")
    write_json(directory / "modules.json", entries)
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": 40})
    write_json(
        directory / "config_sentence_transformers.json",
        {"prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2))
