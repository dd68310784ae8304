"""Models of ours with the fields of a family, so that they convert to it."""

import random
import re

import torch
import transformers
from families import LLAMAS, T5
from torch import nn
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding

import vanilla_transformer
from vanilla_transformer.conversion import FAMILIES, convert

# Fields of the config of each family, and of those like it, besides sizes, activations, biases and
# tying.
AFTER_PADDING = dict(
    position_ids_from="ids", scale_embedding=False, embedding_norm=True, pad_token_id=1
)
FIXED = {
    "bert": dict(position_embedding_type="learned", scale_embedding=False, embedding_norm=True),
    "roberta": dict(position_embedding_type="learned", **AFTER_PADDING),
    "mpnet": dict(position_embedding_type="learned_relative", **AFTER_PADDING),
    "gpt2": dict(
        position_embedding_type="learned",
        scale_embedding=False,
        norm_first=True,
        lm_head_bias=False,
    ),
    "opt": dict(
        position_embedding_type="learned", position_ids_from="mask", scale_embedding=False,
        norm_first=True, lm_head_bias=False, embedding_dropout=0.0,
    ),
    "bart": dict(position_embedding_type="learned", embedding_norm=True),
    "mbart": dict(
        position_embedding_type="learned",
        embedding_norm=True,
        norm_first=True,
        wrap_last_token=True,
    ),
    "marian": dict(),
    "m2m_100": dict(
        position_embedding_type="learned", position_ids_from="ids", norm_first=True,
        lm_head_bias=False, pad_token_id=1,
    ),
    "pegasus": dict(norm_first=True),
    "vit": dict(),
}  # fmt: skip
FIXED["t5"] = dict(
    position_embedding_type="relative", relative_attention_num_buckets=8,
    relative_attention_max_distance=6, gated=True, norm_type="rms_norm", norm_first=True,
    linear_bias=False, lm_head_bias=False, scale_embedding=False, head_dim=16,
    hidden_act="gelu_new",
)  # fmt: skip
ROTARY = dict(
    position_embedding_type="rotary", gated=True, norm_type="rms_norm", norm_first=True,
    linear_bias=False, lm_head_bias=False, scale_embedding=False, head_dim=6, dropout=0.0,
    embedding_dropout=0.0, max_position_embeddings=64,
)  # fmt: skip
FIXED["llama"] = FIXED["mistral"] = FIXED["eurobert"] = ROTARY
FIXED["qwen2"] = ROTARY | dict(attention_bias=True, head_dim=None)
FIXED["qwen3"] = ROTARY | dict(use_qk_norm=True)
FIXED["gemma3_text"] = ROTARY | dict(use_qk_norm=True, sandwich_norm=True, scale_embedding=True)
ROTARY_BERT = dict(
    position_embedding_type="rotary", gated=True, scale_embedding=False, embedding_norm=True,
    rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 77.0},
)  # fmt: skip
FIXED["nomic_bert"] = ROTARY_BERT | dict(linear_bias=False, tie_word_embeddings=True)
FIXED["gte"] = ROTARY_BERT | dict(activation_dropout=0.1)
FIXED["albert"] = FIXED["bert"] | dict(embedding_size=5)
FIXED["deberta-v2"] = dict(
    position_embedding_type="disentangled", scale_embedding=False, embedding_norm=True,
    relative_attention_num_buckets=8, relative_attention_max_distance=6,
)  # fmt: skip
FIXED["modernbert"] = dict(
    position_embedding_type="rotary", gated=True, scale_embedding=False, embedding_norm=True,
    norm_first=True, skip_first_prenorm=True, dropout=0.0, sliding_window=2, pooler_act=None,
    hidden_size=20, num_attention_heads=5, num_hidden_layers=3,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters={
        "full_attention": {"rope_theta": 300.0, "rope_type": "linear", "factor": 2.0},
        "sliding_attention": {"rope_theta": 77.0},
    },
    classifier_act="silu", classifier_pooling="mean", linear_bias=False, type_vocab_size=0,
)  # fmt: skip
FIXED |= {name: FIXED[family.like] for name, family in FAMILIES.items() if family.like}
TEXT_FIELDS = ("vocab_size", "max_position_embeddings", "tie_word_embeddings")


def our_model(family, architecture, seed, dtype=torch.float32, **changes):
    """Return a random model of ours that `family` can represent."""
    rng = random.Random(f"{family} {architecture} {seed}")
    heads = rng.choice([1, 3, 5])
    activation = rng.choice(["relu", "gelu", "silu"])
    fields = dict(
        vocab_size=rng.randint(30, 60), hidden_size=heads * rng.choice([4, 6]),
        num_attention_heads=heads, intermediate_size=rng.randint(10, 30), hidden_act=activation,
        max_position_embeddings=rng.randint(24, 40), tie_word_embeddings=seed % 2 == 0,
        num_labels=2 if architecture.endswith(("QuestionAnswering", "PreTraining")) else 3,
    )  # fmt: skip
    if "Seq2Seq" in architecture:
        fields |= dict(
            encoder_layers=rng.randint(1, 3),
            decoder_layers=rng.randint(1, 3),
            scale_embedding=rng.random() < 0.5,
        )
        fields |= dict(lm_head_bias=rng.random() < 0.5)
    else:
        fields |= dict(num_hidden_layers=rng.randint(1, 3))
    if family in LLAMAS:
        rope = dict(rope_theta=rng.choice([500.0, 1e6]), rope_type="linear", factor=2.0)
        fields |= dict(num_attention_heads=2 * heads, num_key_value_heads=heads)
        fields |= dict(rope_parameters=rope, hidden_size=heads * rng.choice([4, 8]))
    if family == "opt":
        fields |= dict(embedding_size=[7, None][seed % 2])
    if family in ("bert", "albert", "nomic_bert", "deberta-v2"):
        fields |= dict(
            pooler_act="tanh", lm_transform_act=activation, type_vocab_size=rng.choice([0, 2])
        )
    elif family == "eurobert":
        is_classifier = architecture == "VanillaEncoderForSequenceClassification"
        fields |= dict(pooler_act="gelu" if is_classifier else None, classifier_dropout=0.0)
    elif FAMILIES[family].variant == "encoder" and family not in LLAMAS:
        types = 0 if family == "mpnet" else rng.choice([0, 2])
        fields |= dict(pooler_act="tanh", lm_transform_act="gelu", type_vocab_size=types)
    if architecture == "VanillaEncoderModel" and family in ("deberta-v2", "nomic_bert", "gte"):
        fields |= dict(pooler_act=None)
    if family == "vit":
        fields = {name: value for name, value in fields.items() if name not in TEXT_FIELDS}
        fields |= dict(
            image_size=rng.choice([13, [8, 15]]),
            patch_size=rng.choice([4, [4, 5]]),
            num_channels=rng.choice([1, 3]),
        )
        fields |= dict(
            pooler_act=rng.choice(["tanh", "relu"])
            if architecture == "VanillaVisionModel"
            else None
        )
    model_class = getattr(vanilla_transformer, architecture)
    fixed = dict(FIXED[family])
    if family not in ("gpt2", "opt", *LLAMAS) and architecture == "VanillaDecoderForCausalLM":
        fixed |= dict(add_cross_attention=True, lm_head_bias=False)
        fixed.pop("wrap_last_token", None)
    config = model_class.config_class(**fields | fixed | changes)
    transformers.set_seed(0)
    model = model_class(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.4, 0.4)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.weight += 1
        # these families have one embedding matrix for encoder and decoder
        if family in T5 and "Seq2Seq" in architecture:
            model.get_decoder().embeddings.embed_tokens.weight.copy_(
                model.get_encoder().embeddings.embed_tokens.weight
            )
        for name, parameter in model.named_parameters():
            if family == "gte" and name.endswith(("gate_proj.bias", "up_proj.bias")):
                parameter.zero_()
            if family == "albert" and "layers." in name:  # all layers have the weights of one
                first = re.sub(r"layers\.\d+", "layers.0", name)
                parameter.copy_(model.get_parameter(first))
            if family == "qwen2" and name.endswith("o_proj.bias"):
                parameter.zero_()
            if (
                family == "m2m_100"
                and config.position_ids_from == "ids"
                and "embed_positions" in name
            ):
                parameter.copy_(fairseq_table(config))
    return model


def fairseq_table(config):
    """Return the position table that transformers computes, from the row of padding on."""
    rows = config.pad_token_id + 1 + config.max_position_embeddings
    table = M2M100SinusoidalPositionalEmbedding.get_embedding(
        rows, config.hidden_size, config.pad_token_id
    )
    return table[config.pad_token_id :]


def converted_back(model, family, tmp_path):
    model.save_pretrained(tmp_path / "ours")
    result = convert(tmp_path / "ours", tmp_path / "theirs", to=family)
    return getattr(transformers, result["architecture"]).from_pretrained(tmp_path / "theirs").eval()


HEAD = {
    "modernbert": "VanillaEncoderForMaskedLM",
    "nomic_bert": "VanillaEncoderForMaskedLM",
    "gte": "VanillaEncoderForMaskedLM",
    "albert": "VanillaEncoderForMaskedLM",
    "deberta-v2": "VanillaEncoderForMaskedLM",
    "bert": "VanillaEncoderForPreTraining",
    "xlm-roberta": "VanillaEncoderForMaskedLM",
    "mpnet": "VanillaEncoderForMaskedLM",
    "gpt2": "VanillaDecoderForCausalLM",
    "opt": "VanillaDecoderForCausalLM",
    "llama": "VanillaDecoderForCausalLM",
    "qwen2": "VanillaDecoderForCausalLM",
    "qwen3": "VanillaDecoderForCausalLM",
    "mistral": "VanillaDecoderForCausalLM",
    "eurobert": "VanillaEncoderForSequenceClassification",
    "gemma3_text": "VanillaEncoderModel",
    "bart": "VanillaSeq2SeqForConditionalGeneration",
    "mbart": "VanillaSeq2SeqForConditionalGeneration",
    "marian": "VanillaSeq2SeqForConditionalGeneration",
    "m2m_100": "VanillaSeq2SeqForConditionalGeneration",
    "pegasus": "VanillaSeq2SeqForConditionalGeneration",
    "t5": "VanillaSeq2SeqForConditionalGeneration",
    "vit": "VanillaVisionForImageClassification",
}
