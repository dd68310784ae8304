"""Configurations of the three variants: encoder, decoder and encoder-decoder (seq2seq).

The defaults are the base model of Vaswani et al. 2017, "Attention Is All You Need", Table 3. Every field has its Hugging
Face name; the paper's symbols reach the same fields: `d_model`, `d_ff`, `h`, `d_k`, `d_v`, and `N` where one stack is meant.
"""

import difflib
from dataclasses import fields
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import logging

logger = logging.get_logger(__name__)

PAPER_SYMBOLS = {
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "h": "num_attention_heads",
    "d_k": "head_dim",
    "d_v": "value_head_dim",
}
CODE = "modeling_vanilla_transformer."


@strict
class VanillaTransformerConfig(PreTrainedConfig):
    """What the three variants share. Use one of the subclasses.

    Args:
        vocab_size (`int`, defaults to 37000): number of token types.
        hidden_size (`int`, defaults to 512): width of the residual stream, the paper's d_model.
        intermediate_size (`int`, defaults to 2048): inner width of the feed-forward network, d_ff.
        num_attention_heads (`int`, defaults to 8): h.
        head_dim (`int`, defaults to `hidden_size / num_attention_heads`): width of one query and key, d_k.
        value_head_dim (`int`, defaults to `head_dim`): width of one value, d_v.
        hidden_act (`str`, defaults to `"relu"`): feed-forward activation, a key of `transformers.activations.ACT2FN`.
        position_embedding_type (`"sinusoidal"` or `"learned"`): section 3.5 and Table 3 row (E).
        max_position_embeddings (`int`, defaults to 512): rows of the learned position table; sinusoids have no limit.
        scale_embedding (`bool`, defaults to `True`): multiply token embeddings by sqrt(hidden_size), section 3.4.
        embedding_norm (`bool`, defaults to `False`): LayerNorm after the sum of embeddings and positions (BERT, BART).
        norm_first (`bool`, defaults to `False`): `False` is LayerNorm(x + Sublayer(x)), section 3.1; `True` is
            x + Sublayer(LayerNorm(x)) with one more LayerNorm behind the last layer (GPT-2).
        layer_norm_eps (`float`, defaults to 1e-5).
        initializer_range (`float`, defaults to 0.02): standard deviation of new linear weights.
        lm_head_bias (`bool`, defaults to `True`): bias of the projection to the vocabulary.
        embedding_dropout, dropout, attention_dropout, activation_dropout (`float`): on the sum of embeddings and
            positions (behind its LayerNorm, if there is one) and on each sub-layer's output, the paper's P_drop (0.1
            both); on the attention weights and on the feed-forward activation (0.0 both).
        classifier_dropout (`float`, defaults to 0.1): in front of a classification head.
        tie_word_embeddings (`bool`, defaults to `True`): one matrix for all embeddings and the projection to the
            vocabulary, section 3.4.
        pad_token_id, bos_token_id, eos_token_id, sep_token_id: 0, 1, 2 and `None`.

    Raises:
        ValueError: for sizes below 1, heads that do not divide the width when `head_dim` is not given, an odd width
            with sinusoidal positions, an unknown activation, a dropout outside [0, 1), or a special token outside
            the vocabulary.
        huggingface_hub.errors.StrictDataclassError: for a value of the wrong type.
    """

    vocab_size: int = 37000
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_attention_heads: int = 8
    head_dim: int | None = None
    value_head_dim: int | None = None
    hidden_act: str = "relu"
    position_embedding_type: Literal["sinusoidal", "learned"] = "sinusoidal"
    max_position_embeddings: int = 512
    scale_embedding: bool = True
    embedding_norm: bool = False
    norm_first: bool = False
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    lm_head_bias: bool = True
    embedding_dropout: float | int = 0.1
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    classifier_dropout: float | int = 0.1
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    sep_token_id: int | None = None
    auto_map: dict[str, str] | None = None

    def __post_init__(self, **kwargs):
        self._warn_near_misses(kwargs)
        super().__post_init__(**kwargs)
        self._check_values()  # before `@strict` does, whose errors are no ValueErrors
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size must be a multiple of num_attention_heads unless head_dim is given: got hidden_size="
                    f"{self.hidden_size} and num_attention_heads={self.num_attention_heads}"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.value_head_dim is None:
            self.value_head_dim = self.head_dim
        if self.auto_map is None:
            self.auto_map = dict(self.default_auto_map)

    def _warn_near_misses(self, unknown):
        """A name that is no field is kept, as everywhere in transformers, so a misspelt field would have no effect."""
        names = self.field_names()
        for name in unknown:
            is_known = name in names or hasattr(type(self), name)
            if not is_known and (close := difflib.get_close_matches(name, names, n=1, cutoff=0.8)):
                logger.warning(f"{type(self).__name__} has no field {name!r}; did you mean {close[0]!r}?")

    @classmethod
    def field_names(cls) -> list[str]:
        """Every name the constructor knows: the fields, and the paper's symbols for them."""
        return [field.name for field in fields(cls)] + list(cls.attribute_map)

    def validate_architecture(self):
        """Called by `@strict` when the config is built and when it is saved."""
        super().validate_architecture()
        self._check_values()

    def _check_values(self):
        sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "value_head_dim"]
        depths = ["encoder_layers", "decoder_layers", "num_hidden_layers"]
        for name in [*sizes, *depths, "max_position_embeddings"]:
            if (value := getattr(self, name, None)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.position_embedding_type == "sinusoidal" and self.hidden_size % 2:
            raise ValueError(f"sinusoidal positions need an even hidden_size, got {self.hidden_size}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act must be one of {', '.join(sorted(ACT2FN))}, got {self.hidden_act!r}")
        for name in ["embedding_dropout", "dropout", "attention_dropout", "activation_dropout", "classifier_dropout"]:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        for name in [field.name for field in fields(self) if field.name.endswith("_token_id")]:
            value = getattr(self, name)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and not 0 <= token < self.vocab_size:
                    raise ValueError(f"{name} must be in the vocabulary, 0 to {self.vocab_size - 1}, got {token}")


@strict
class VanillaEncoderConfig(VanillaTransformerConfig):
    """A stack of `num_hidden_layers` (6, the paper's N) encoder layers: bidirectional attention, as in BERT."""

    model_type = "vanilla-encoder"
    attribute_map = {**PAPER_SYMBOLS, "N": "num_hidden_layers"}
    default_auto_map = {
        "AutoConfig": "configuration_vanilla_transformer.VanillaEncoderConfig",
        "AutoModel": CODE + "VanillaEncoderModel",
        "AutoModelForMaskedLM": CODE + "VanillaEncoderForMaskedLM",
        "AutoModelForSequenceClassification": CODE + "VanillaEncoderForSequenceClassification",
    }

    num_hidden_layers: int = 6


@strict
class VanillaDecoderConfig(VanillaTransformerConfig):
    """A stack of `num_hidden_layers` (6) layers with causal attention and no cross-attention, as in GPT-2."""

    model_type = "vanilla-decoder"
    attribute_map = {**PAPER_SYMBOLS, "N": "num_hidden_layers"}
    keys_to_ignore_at_inference = ["past_key_values"]
    default_auto_map = {
        "AutoConfig": "configuration_vanilla_transformer.VanillaDecoderConfig",
        "AutoModel": CODE + "VanillaDecoderModel",
        "AutoModelForCausalLM": CODE + "VanillaDecoderForCausalLM",
    }

    num_hidden_layers: int = 6
    use_cache: bool = True


@strict
class VanillaSeq2SeqConfig(VanillaTransformerConfig):
    """The paper's encoder-decoder: `encoder_layers` (6) and `decoder_layers` (6), Figure 1.

    `decoder_start_token_id` (defaults to 1, the token `bos_token_id` names) is what generation starts from.
    """

    model_type = "vanilla-seq2seq"
    # `num_hidden_layers` is what transformers asks of every config; generic code that means the decoder asks
    # `get_text_config(decoder=True)`, which puts `decoder_layers` there.
    attribute_map = {**PAPER_SYMBOLS, "num_hidden_layers": "encoder_layers"}
    keys_to_ignore_at_inference = ["past_key_values"]
    default_auto_map = {
        "AutoConfig": "configuration_vanilla_transformer.VanillaSeq2SeqConfig",
        "AutoModel": CODE + "VanillaSeq2SeqModel",
        "AutoModelForSeq2SeqLM": CODE + "VanillaSeq2SeqForConditionalGeneration",
    }

    encoder_layers: int = 6
    decoder_layers: int = 6
    use_cache: bool = True
    is_encoder_decoder: bool = True
    decoder_start_token_id: int | None = 1

    @classmethod
    def preset(cls, name: str, **overrides) -> "VanillaSeq2SeqConfig":
        """The models of Table 3, `"base"` and `"big"`, and `"tiny"`, the shape of Wu et al. 2021 for Multi30k."""
        presets = {
            "base": {},
            "big": dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, dropout=0.3, embedding_dropout=0.3),
            "tiny": dict(
                vocab_size=9700, hidden_size=128, intermediate_size=256, num_attention_heads=4, encoder_layers=4,
                decoder_layers=4, dropout=0.3, embedding_dropout=0.3,
            ),
        }  # fmt: skip
        if name not in presets:
            raise ValueError(f"no preset {name!r}, expected one of {sorted(presets)}")
        return cls(**{**presets[name], **overrides})


__all__ = ["VanillaDecoderConfig", "VanillaEncoderConfig", "VanillaSeq2SeqConfig", "VanillaTransformerConfig"]
