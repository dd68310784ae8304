"""Configurations of the four variants: encoder, decoder and encoder-decoder (seq2seq) of text, and
encoder of images (vision).

The defaults of text are the base model of Vaswani et al. 2017, "Attention Is All You Need",
Table 3. Every field has its Hugging Face name; the paper's symbols reach the same fields:
`d_model`, `d_ff`, `h`, `d_k`, `d_v`, and `N`, which is the depth of both stacks where there are
two.
"""

import copy
import difflib
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import transformers
from huggingface_hub.dataclasses import strict
from packaging.version import Version
from transformers.activations import ACT2FN
from transformers.utils import cached_file, logging

# before names are looked up that others do not have
if Version(transformers.__version__) < Version("5.23"):
    raise ImportError(
        f"vanilla-transformer needs transformers >= 5.23, found {transformers.__version__}"
    )

logger = logging.get_logger(__name__)

PAPER_SYMBOLS = {
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "h": "num_attention_heads",
    "d_k": "head_dim",
    "d_v": "value_head_dim",
}
CODE = "modeling_vanilla_transformer."
DEPTHS = ("encoder_layers", "decoder_layers")
# Of all variants: where a config has no such field, nothing is checked.
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "value_head_dim")
SIZES += (
    "num_key_value_heads",
    "vocab_size",
    "embedding_size",
    "max_position_embeddings",
    "num_channels",
    "num_first_tokens",
)
LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_TYPES = ("default", "linear")
LARGEST = 2**28  # torch can still count the bytes of a matrix with two such sizes
# What `transformers.pipeline` reads of a task that it does not have: where its code is beside the
# weights.
PIPELINES = "pipelines_vanilla_transformer"
TRANSLATION = {
    "translation": {
        "impl": f"{PIPELINES}.TranslationPipeline",
        "pt": ["AutoModelForSeq2SeqLM"],
        "type": "text",
    }
}


@strict
class VanillaTransformerConfig(transformers.PreTrainedConfig):
    """The base of the four configs, with the fields that they share. Use one of the subclasses.

    Args:
        hidden_size (`int`, defaults to 512): width of the residual stream, the paper's d_model.
        intermediate_size (`int`, defaults to 2048): inner width of the feed-forward network, d_ff.
        num_attention_heads (`int`, defaults to 8): h.
        head_dim (`int`, defaults to `hidden_size / num_attention_heads`): width of one query and
            key, d_k.
        value_head_dim (`int`, defaults to `head_dim`): width of one value, d_v.
        hidden_act (`str`, defaults to `"relu"`): feed-forward activation, a key of
            `transformers.activations.ACT2FN`.
        norm_first (`bool`, defaults to `False`): `False` is LayerNorm(x + Sublayer(x)), section
            3.1; `True` is x + Sublayer(LayerNorm(x)) (GPT-2).
        final_norm (`bool`, defaults to `norm_first`): one more LayerNorm after the last layer of a
            stack.
        norm_type (`str`, defaults to `"layer_norm"`): or `"rms_norm"`, which neither centers nor
            shifts (Zhang and Sennrich 2019).
        layer_norm_eps (`float`, defaults to 1e-5): of either.
        gated (`bool`, defaults to `False`): the feed-forward network multiplies its activation by a
            second map of the same input (Shazeer 2020, GLU Variants).
        linear_bias (`bool`, defaults to `True`): biases of the feed-forward network, and
            by default of attention.
        attention_bias (`bool`, defaults to `linear_bias`): biases of the linear maps of attention,
            which the paper's equations do not have (sections 3.2.1 and 3.2.2).
        num_key_value_heads (`int`, defaults to `num_attention_heads`): number of heads of keys and
            values, each shared by a group of query heads (Ainslie et al. 2023, GQA).
        use_qk_norm (`bool`, defaults to `False`): normalize the query and the key of each head,
            before rotary positions (Henry et al. 2020; Qwen3).
        sandwich_norm (`bool`, defaults to `False`): with `norm_first`, normalize the output of
            self-attention and of the feed-forward network too (Ding et al. 2021, CogView).
        skip_first_prenorm (`bool`, defaults to `False`): with `norm_first`, no norm before the
            first self-attention (Warner et al. 2024, ModernBERT).
        initializer_range (`float`, defaults to 0.02): standard deviation of new linear weights.
        embedding_dropout, dropout, attention_dropout, activation_dropout (`float`): on the sum of
            embeddings and positions (after its LayerNorm, if there is one) and on each sub-layer's
            output, the paper's P_drop (0.1 both); on the attention weights and on the feed-forward
            activation (0.0 both).
        classifier_dropout (`float`, defaults to 0.1): in front of a classification head.

    Raises:
        ValueError: for sizes below 1 or above 2**28, heads that do not divide the width when
            `head_dim` is `None`, key heads that do not divide the query heads, an unknown
            activation, a dropout outside [0, 1), or norms that need `norm_first`.
        huggingface_hub.errors.StrictDataclassError: for a value of the wrong type.
    """

    # Of each stack; what it has no such module for does not apply (Shoeybi et al. 2019,
    # Megatron-LM, section 3).
    base_model_tp_plan = {
        "embeddings.embed_tokens": "embedding_rowwise",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.cross_attn.q_proj": "colwise",
        "layers.*.cross_attn.k_proj": "colwise",
        "layers.*.cross_attn.v_proj": "colwise",
        "layers.*.cross_attn.o_proj": "rowwise",
        "layers.*.feed_forward.gate_proj": "colwise",
        "layers.*.feed_forward.up_proj": "colwise",
        "layers.*.feed_forward.down_proj": "rowwise",
    }
    # All else is one group, as tied matrices have to be.
    base_model_fsdp_plan = {"layers.*": "free_full_weight"}

    hidden_size: int = 512
    intermediate_size: int = 2048
    num_attention_heads: int = 8
    head_dim: int | None = None
    value_head_dim: int | None = None
    hidden_act: str = "relu"
    norm_first: bool = False
    final_norm: bool | None = None
    norm_type: Literal["layer_norm", "rms_norm"] = "layer_norm"
    layer_norm_eps: float = 1e-5
    gated: bool = False
    linear_bias: bool = True
    attention_bias: bool | None = None
    num_key_value_heads: int | None = None
    use_qk_norm: bool = False
    sandwich_norm: bool = False
    skip_first_prenorm: bool = False
    initializer_range: float = 0.02
    embedding_dropout: float | int = 0.1
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    classifier_dropout: float | int = 0.1
    auto_map: dict[str, str] | None = None

    def __post_init__(self, **kwargs):
        self._warn_near_misses(kwargs)
        for name, field in self.attribute_map.items():
            if name in kwargs:
                # under its own name, by which `@strict` checks the type
                setattr(self, field, kwargs.pop(name))
        super().__post_init__(**kwargs)
        self._check_values()  # before `@strict` does, whose errors are no ValueErrors
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    "hidden_size must be a multiple of num_attention_heads unless head_dim is "
                    "given: got hidden_size="
                    f"{self.hidden_size} and num_attention_heads={self.num_attention_heads}"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.value_head_dim is None:
            self.value_head_dim = self.head_dim
        if self.final_norm is None:
            self.final_norm = self.norm_first
        if self.attention_bias is None:
            self.attention_bias = self.linear_bias
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.auto_map is None:
            self.auto_map = dict(self.default_auto_map)

    def _warn_near_misses(self, unknown):
        """Log a warning for each name in `unknown` that is similar to a field.

        transformers keeps unknown names, so a misspelled field would silently have no effect.
        """
        names = self.field_names()
        for name in unknown:
            is_known = name in names or hasattr(type(self), name)
            if not is_known and (close := difflib.get_close_matches(name, names, n=1, cutoff=0.8)):
                logger.warning(
                    f"{type(self).__name__} has no field {name!r}; did you mean {close[0]!r}?"
                )

    @classmethod
    def auto_classes(cls) -> dict[str, str]:
        """Return {Auto class: our model class} of this variant, such as "AutoModel":
        "VanillaEncoderModel"."""
        return {
            name: code.removeprefix(CODE)
            for name, code in cls.default_auto_map.items()
            if name != "AutoConfig"
        }

    @classmethod
    def field_names(cls) -> list[str]:
        """Return every name that the constructor knows: the fields, and the paper's symbols for
        them."""
        return [field.name for field in fields(cls)] + list(cls.attribute_map)

    def validate_architecture(self):
        """Raise ValueError for values out of range; `@strict` calls this when the config is built
        and when it is saved."""
        super().validate_architecture()
        self._check_values()

    def _check_values(self):
        for name in [*SIZES, *DEPTHS, "num_hidden_layers", "sliding_window"]:
            value = getattr(self, name, None)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in [*SIZES, "type_vocab_size", "relative_attention_num_buckets"]:
            if (getattr(self, name, None) or 0) > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST}, got {getattr(self, name)}")
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads, {self.num_attention_heads}, "
                f"got {self.num_key_value_heads}"
            )
        for name in ["sandwich_norm", "skip_first_prenorm"]:
            if getattr(self, name) and not self.norm_first:
                raise ValueError(f"{name}=True needs norm_first=True, got norm_first=False")
        for name in ["head_dim", "value_head_dim"]:
            if self.num_attention_heads * (getattr(self, name) or 1) > LARGEST:
                got = (
                    f"num_attention_heads={self.num_attention_heads} and "
                    f"{name}={getattr(self, name)}"
                )
                raise ValueError(
                    f"num_attention_heads times {name} must be at most {LARGEST}, got {got}"
                )
        for name in [field.name for field in fields(self) if field.name.endswith("_act")]:
            value = getattr(self, name)
            if value is not None and value not in ACT2FN:
                raise ValueError(
                    f"{name} must be one of {', '.join(sorted(ACT2FN))}, got {value!r}"
                )
        for name in ["layer_norm_eps", "initializer_range"]:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
        for name in [
            "embedding_dropout",
            "dropout",
            "attention_dropout",
            "activation_dropout",
            "classifier_dropout",
        ]:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")


@strict
class VanillaTextConfig(VanillaTransformerConfig):
    """The base of the three configs of text models. Use one of the subclasses.

    Args in addition to those of `VanillaTransformerConfig`:
        vocab_size (`int`, defaults to 37000): number of token types.
        embedding_size (`int`, defaults to `hidden_size`): width of the token embeddings and of the
            states that the projection to the vocabulary reads. Another width than `hidden_size`
            adds a linear map on both sides. With `embedding_norm` the input map has a bias and
            follows the norm, and positions and token types have this width too (Clark et al. 2020,
            ELECTRA). Without, it has no bias and follows the token embeddings (Zhang et al. 2022,
            OPT). The output map ends a decoder, which then returns states of this width. In an
            encoder it belongs to the language model head.
        position_embedding_type (`str`, defaults to `"sinusoidal"`): `"sinusoidal"` (section 3.5),
            `"learned"` (Table 3 row (E)), `"rotary"` (Su et al. 2021, RoFormer), `"relative"`
            (Raffel et al. 2020, T5), `"learned_relative"`, both at once (Song et al. 2020, MPNet),
            `"disentangled"`, in encoders (He et al. 2021, DeBERTa), or `"none"`. Rotary, relative
            and disentangled positions act in self-attention; they and `"none"` add nothing to the
            embeddings.
        max_position_embeddings (`int`, defaults to 512): rows of the learned position table, so the
            maximum length with learned positions. Other positions have no limit.
        position_ids_from (`str`, defaults to `"place"`): how positions are counted without
            `position_ids`: by the `"place"` in the row (BERT, GPT-2), by the earlier tokens that
            the attention `"mask"` does not hide (OPT), or by the earlier `"ids"` other than
            `pad_token_id` (RoBERTa). Padding that is not counted is at position -1, which is the
            first row of the learned table.
        rope_parameters (`dict`, *optional*): for rotary positions, with the keys `rope_theta`, the
            base of the angles (10000), and `rope_type`, `"default"` or `"linear"`, which divides
            the angles by the key `factor`. Or {layer type: such a dict}, see `layer_types`.
        relative_attention_num_buckets (`int`, defaults to 32): number of distances with a relative
            position of their own.
        relative_attention_max_distance (`int`, defaults to 128): distances from here on share one
            bucket.
        sliding_window (`int`, *optional*): in self-attention, a decoder's token attends to this
            many tokens, itself included, an encoder's to this many before and after it (Beltagy et
            al. 2020, section 3.1); by default to all. At least 2 with a decoder.
        layer_types (`list[str]`, *optional*; not of an encoder-decoder): `"sliding_attention"` for
            each layer with the window, `"full_attention"` for each without. By default all layers
            have the window, if there is one.
        scale_embedding (`bool`, defaults to `True`): multiply token embeddings by
            sqrt(embedding_size), section 3.4.
        embedding_norm (`bool`, defaults to `False`): LayerNorm after the sum of embeddings and
            positions (BERT, BART).
        lm_head_bias (`bool`, defaults to `True`): bias of the projection to the vocabulary.
        tie_word_embeddings (`bool`, defaults to `True`): one matrix for the token embeddings and
            the projection to the vocabulary, section 3.4.
        pad_token_id, bos_token_id, eos_token_id, sep_token_id: 0, 1, 2 and `None`.

    Raises:
        ValueError: also for an odd width of sinusoidal positions or an odd `head_dim` with rotary
            ones, positions from ids without a `pad_token_id`, another rope type, layer types of
            another number than the layers, or a special token outside the vocabulary.
    """

    vocab_size: int = 37000
    embedding_size: int | None = None
    position_embedding_type: Literal[
        "sinusoidal", "learned", "rotary", "relative", "learned_relative", "disentangled", "none"
    ] = "sinusoidal"
    max_position_embeddings: int = 512
    position_ids_from: Literal["place", "mask", "ids"] = "place"
    rope_parameters: dict[str, Any] | None = None
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    sliding_window: int | None = None
    scale_embedding: bool = True
    embedding_norm: bool = False
    lm_head_bias: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    sep_token_id: int | None = None
    layer_types = None  # no field of an encoder-decoder
    _rope_type_labels = LAYER_TYPES  # transformers': keys of `rope_parameters` that hold such dicts

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size

    def convert_rope_params_to_dict(self, **kwargs):
        """Fill in `rope_parameters` if positions are rotary, and return the other `kwargs`.

        transformers calls this. It reads `rope_theta`, the name of the base in older files, too.
        """
        is_rotary = self.position_embedding_type == "rotary"
        return super().convert_rope_params_to_dict(**kwargs) if is_rotary else kwargs

    def rope(self, layer_type: str) -> tuple[float, float]:
        """Return (base, factor) of the rotary angles in layers of `layer_type`: an angle is
        position / base^(2i / head_dim) / factor."""
        parameters = self.rope_parameters.get(layer_type, self.rope_parameters)
        is_linear = parameters["rope_type"] == "linear"
        return parameters["rope_theta"], parameters["factor"] if is_linear else 1.0

    def types_of_layers(self, depth: int) -> list[str]:
        """Return the type of each layer of a stack of `depth` layers, one of `LAYER_TYPES`."""
        default = "full_attention" if self.sliding_window is None else "sliding_attention"
        return self.layer_types or [default] * depth

    @property
    def position_size(self) -> int:
        """Width of the positions and token types, and of the embedding norm."""
        return (self.embedding_size if self.embedding_norm else None) or self.hidden_size

    @property
    def has_learned_positions(self) -> bool:
        """True if positions are rows of a learned table that are added to the embeddings. The table
        limits the length."""
        return self.position_embedding_type in ("learned", "learned_relative")

    @property
    def has_relative_positions(self) -> bool:
        """True if learned numbers for the distance of two tokens are added to the scores of
        self-attention."""
        return self.position_embedding_type in ("relative", "learned_relative")

    @property
    def has_position_bias(self) -> bool:
        """True if positions add to the scores of self-attention."""
        return self.has_relative_positions or self.position_embedding_type == "disentangled"

    def _check_values(self):
        super()._check_values()
        if self.sliding_window == 1 and self.model_type != "vanilla-encoder":
            raise ValueError(
                "sliding_window must be at least 2, got 1: the caches of transformers cannot hold "
                "a window of 1"
            )
        if getattr(self, "type_vocab_size", 0) < 0:
            raise ValueError(f"type_vocab_size must be at least 0, got {self.type_vocab_size}")
        self._check_layer_types()
        self._check_positions()
        for name in [field.name for field in fields(self) if field.name.endswith("_token_id")]:
            value = getattr(self, name)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and not 0 <= token < self.vocab_size:
                    raise ValueError(
                        f"{name} must be in the vocabulary, 0 to {self.vocab_size - 1}, got {token}"
                    )

    def _check_layer_types(self):
        if self.layer_types is None:
            return
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types must have one type for each of {self.num_hidden_layers} layers, got "
                f"{len(self.layer_types)}"
            )
        if unknown := sorted(set(self.layer_types).difference(LAYER_TYPES)):
            raise ValueError(f"layer_types must be of {' and '.join(LAYER_TYPES)}, got {unknown}")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention, which needs a sliding_window")

    def _check_rope(self, layer_type):
        parameters = self.rope_parameters
        if not parameters.keys().isdisjoint(LAYER_TYPES):
            parameters = parameters.get(layer_type) or {}
        rope_type = parameters.get("rope_type")
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type of {layer_type} must be {' or '.join(ROPE_TYPES)}, got {rope_type!r}"
            )
        known = ["rope_type", "rope_theta", "factor"]
        if unknown := sorted(parameters.keys() - {*known, "type"}):
            raise ValueError(f"rope_parameters must have the keys {known}, got {unknown}")
        for name in known[1:] if rope_type == "linear" else known[1:2]:
            value = parameters.get(name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {value!r}")

    def _check_disentangled(self):
        if self.model_type != "vanilla-encoder":
            raise ValueError(f"disentangled positions need an encoder, got {self.model_type}")
        if self.use_qk_norm or self.num_key_value_heads not in (None, self.num_attention_heads):
            raise ValueError(
                "disentangled positions need use_qk_norm=False and as many key heads as query "
                f"heads, {self.num_attention_heads}: got use_qk_norm={self.use_qk_norm} and "
                f"num_key_value_heads={self.num_key_value_heads}"
            )

    def _check_positions(self):
        if self.position_embedding_type == "sinusoidal" and self.position_size % 2:
            name = "hidden_size" if self.position_size == self.hidden_size else "embedding_size"
            raise ValueError(f"sinusoidal positions need an even {name}, got {self.position_size}")
        if self.position_embedding_type == "rotary" and (self.head_dim or 0) % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {self.head_dim}")
        if self.position_ids_from == "ids" and self.pad_token_id is None:
            raise ValueError("position_ids_from='ids' needs a pad_token_id, got None")
        if self.position_embedding_type == "rotary":
            for layer_type in sorted(set(self.types_of_layers(1))):
                self._check_rope(layer_type)
        is_disentangled = self.position_embedding_type == "disentangled"
        if is_disentangled:
            self._check_disentangled()
        buckets, distance = (
            self.relative_attention_num_buckets,
            self.relative_attention_max_distance,
        )
        if buckets < 4 or (buckets % 2 and not is_disentangled):
            kind = "at least 4" if is_disentangled else "even and at least 4"
            raise ValueError(f"relative_attention_num_buckets must be {kind}, got {buckets}")
        # DeBERTa's last distance is 1 less
        if distance - is_disentangled <= buckets // 2:
            raise ValueError(
                f"relative_attention_max_distance must be above half of "
                f"relative_attention_num_buckets, {buckets // 2 + is_disentangled}, "
                f"got {distance}"
            )


@strict
class VanillaEncoderConfig(VanillaTextConfig):
    """A stack of `num_hidden_layers` (6, the paper's N) encoder layers: bidirectional attention, as
    in BERT.

    Args in addition to those of `VanillaTextConfig`:
        type_vocab_size (`int`, defaults to 0): number of token types (`token_type_ids`) with an
            embedding.
        pooler_act (`str`, *optional*): the first token's state passes a linear map and this
            activation to become `pooler_output`, which the sentence heads then read (`"tanh"` in
            BERT); by default they read the state itself.
        lm_transform_act (`str`, *optional*): a linear map, this activation and a LayerNorm stand in
            front of the projection to the vocabulary (BERT's masked-LM transform).
        token_transform_act (`str`, *optional*): a linear map and this activation stand in front of
            the classifier of single tokens (ELECTRA's discriminator).
        classifier_pooling (`str`, defaults to `"cls"`): what the classifier of whole sequences
            reads: the first token's state, through the pooler if `pooler_act` is set, or with
            `"mean"` the mean of the states of all tokens that are not padding (as in ModernBERT),
            without a pooler.
        classifier_act (`str`, *optional*): a linear map, this activation and a norm stand in front
            of the classifiers of sequences and tokens and of the scores of answers (ModernBERT).
    """

    model_type = "vanilla-encoder"
    attribute_map = {**PAPER_SYMBOLS, "N": "num_hidden_layers"}
    default_auto_map = {
        "AutoConfig": "configuration_vanilla_transformer.VanillaEncoderConfig",
        "AutoModel": CODE + "VanillaEncoderModel",
        "AutoModelForMaskedLM": CODE + "VanillaEncoderForMaskedLM",
        "AutoModelForPreTraining": CODE + "VanillaEncoderForPreTraining",
        "AutoModelForNextSentencePrediction": CODE + "VanillaEncoderForNextSentencePrediction",
        "AutoModelForSequenceClassification": CODE + "VanillaEncoderForSequenceClassification",
        "AutoModelForTokenClassification": CODE + "VanillaEncoderForTokenClassification",
        "AutoModelForQuestionAnswering": CODE + "VanillaEncoderForQuestionAnswering",
        "AutoModelForMultipleChoice": CODE + "VanillaEncoderForMultipleChoice",
    }

    num_hidden_layers: int = 6
    layer_types: list[str] | None = None
    type_vocab_size: int = 0
    pooler_act: str | None = None
    lm_transform_act: str | None = None
    token_transform_act: str | None = None
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_act: str | None = None

    # no fields: what transformers sets of the decoder of an `EncoderDecoderModel`
    is_decoder = add_cross_attention = False

    def _check_values(self):
        super()._check_values()
        if self.classifier_act and self.token_transform_act:
            raise ValueError(
                f"classifier_act={self.classifier_act!r} and token_transform_act="
                f"{self.token_transform_act!r} stand in one place, expected one of them"
            )

    def __setattr__(self, name, value):
        if name in ("is_decoder", "add_cross_attention") and value:
            raise ValueError(
                f"{name} is {value} for a {type(self).__name__}, whose attention is neither "
                "causal nor to another encoder: "
                "expected the config or checkpoint of a VanillaDecoderForCausalLM"
            )
        super().__setattr__(name, value)


@strict
class VanillaDecoderConfig(VanillaTextConfig):
    """A stack of `num_hidden_layers` (6) layers with causal attention, as in GPT-2.

    `add_cross_attention` (`bool`, defaults to `False`) gives each layer attention to
    `encoder_hidden_states`, as the right half of Figure 1 has: a decoder for an encoder that is a
    model of its own.
    """

    model_type = "vanilla-decoder"
    attribute_map = {**PAPER_SYMBOLS, "N": "num_hidden_layers"}
    keys_to_ignore_at_inference = ["past_key_values"]
    default_auto_map = {
        "AutoConfig": "configuration_vanilla_transformer.VanillaDecoderConfig",
        "AutoModel": CODE + "VanillaDecoderModel",
        "AutoModelForCausalLM": CODE + "VanillaDecoderForCausalLM",
        "AutoModelForSequenceClassification": CODE + "VanillaDecoderForSequenceClassification",
        "AutoModelForTokenClassification": CODE + "VanillaDecoderForTokenClassification",
        "AutoModelForQuestionAnswering": CODE + "VanillaDecoderForQuestionAnswering",
    }

    num_hidden_layers: int = 6
    layer_types: list[str] | None = None
    use_cache: bool = True
    add_cross_attention: bool = False


@strict
class VanillaSeq2SeqConfig(VanillaTextConfig):
    """The paper's encoder-decoder, Figure 1. The argument `N` or `num_hidden_layers` of the
    constructor sets the depth of both stacks.

    Args in addition to those of `VanillaTextConfig`:
        encoder_layers, decoder_layers (`int`, defaults to 6): depth of each stack.
        decoder_start_token_id (`int`, defaults to 1, as `bos_token_id`): the first decoder input in
            generation. It also precedes a sequence that is shifted right: the labels in training,
            and the source in some heads.
        wrap_last_token (`bool`, defaults to `False`): shift right with the last token of the
            sequence in front instead, such as mBART's language code.
        share_encoder_decoder_embeddings (`bool`, defaults to `True`): with `tie_word_embeddings`,
            source and target have one embedding matrix. `False` ties only the target's matrix with
            the projection to the vocabulary.
    """

    model_type = "vanilla-seq2seq"
    # `num_hidden_layers` is what transformers asks of every config; generic code that means the
    # decoder asks `get_text_config(decoder=True)`, which puts `decoder_layers` there.
    attribute_map = {**PAPER_SYMBOLS, "num_hidden_layers": "encoder_layers"}
    keys_to_ignore_at_inference = ["past_key_values"]
    default_auto_map = {
        "AutoConfig": "configuration_vanilla_transformer.VanillaSeq2SeqConfig",
        "AutoModel": CODE + "VanillaSeq2SeqModel",
        "AutoModelForSeq2SeqLM": CODE + "VanillaSeq2SeqForConditionalGeneration",
        "AutoModelForSequenceClassification": CODE + "VanillaSeq2SeqForSequenceClassification",
        "AutoModelForQuestionAnswering": CODE + "VanillaSeq2SeqForQuestionAnswering",
    }

    encoder_layers: int | None = None
    decoder_layers: int | None = None
    use_cache: bool = True
    is_encoder_decoder: bool = True
    decoder_start_token_id: int | None = 1
    wrap_last_token: bool = False
    share_encoder_decoder_embeddings: bool = True

    def __post_init__(self, **kwargs):
        depths = {name: kwargs.pop(name, None) for name in ("N", "num_hidden_layers")}
        both = {name: value for name, value in depths.items() if value is not None}
        stacks = {stack: getattr(self, stack) for stack in DEPTHS}
        explicit = both | {stack: value for stack, value in stacks.items() if value is not None}
        depth = next(iter(both.values()), 6)
        if both and any(value != depth for value in explicit.values()):
            got = ", ".join(f"{name}={value!r}" for name, value in explicit.items())
            raise ValueError(
                f"{' and '.join(both)} set the depth of both stacks, expected no other depth, "
                f"got {got}: leave out {' and '.join(both)} to set a depth for each stack"
            )
        for stack in DEPTHS:
            setattr(self, stack, explicit.get(stack, depth))
        self._translates = kwargs.get("custom_pipelines") == TRANSLATION
        if self._translates and not __name__.startswith("transformers_modules."):
            # The package has this pipeline itself; a config that names code for it makes every task
            # ask for its trust.
            del kwargs["custom_pipelines"]
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs) -> "VanillaSeq2SeqConfig":
        """Build the config from the fields of a file, which has both depths.

        An `N` beside both depths comes from a version in which it had no effect, and is ignored.
        """
        if config_dict.keys() >= set(DEPTHS):
            config_dict = {name: value for name, value in config_dict.items() if name != "N"}
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict:
        """Return the fields. `custom_pipelines` names the translation pipeline if the loaded file
        did.

        `transformers.pipeline` replaces that name with classes, which JSON cannot hold.
        """
        content = super().to_dict()
        return content | (
            {"custom_pipelines": copy.deepcopy(TRANSLATION)}
            if content.pop("_translates", False)
            else {}
        )

    def save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs):
        """Save the config in `save_directory`.

        If the loaded config named the translation pipeline, its code is saved too. The code is
        taken from beside this file, or from where the config was loaded.
        """
        if self._translates:
            file = Path(__file__).with_name(f"{PIPELINES}.py")
            if not file.is_file():
                quietly = (
                    "_raise_exceptions_for_missing_entries",
                    "_raise_exceptions_for_connection_errors",
                )
                file = cached_file(self.name_or_path, file.name, **dict.fromkeys(quietly, False))
            self._translates = file is not None
            if self._translates:
                os.makedirs(save_directory, exist_ok=True)
                Path(save_directory, f"{PIPELINES}.py").write_bytes(Path(file).read_bytes())
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def field_names(cls) -> list[str]:
        return [*super().field_names(), "N"]

    @classmethod
    def preset(cls, name: str, **overrides) -> "VanillaSeq2SeqConfig":
        """Return the config of a model of Table 3, `"base"` or `"big"`, or of `"tiny"`.

        `"tiny"` is the shape of Wu et al. 2021 for Multi30k. `overrides` are fields that replace
        those of the preset. Raises ValueError for another name.
        """
        presets = {
            "base": {},
            "big": dict(
                hidden_size=1024, intermediate_size=4096, num_attention_heads=16, dropout=0.3,
                embedding_dropout=0.3
            ),
            "tiny": dict(
                vocab_size=9700, hidden_size=128, intermediate_size=256, num_attention_heads=4,
                encoder_layers=4, decoder_layers=4, dropout=0.3, embedding_dropout=0.3,
            ),
        }  # fmt: skip
        if name not in presets:
            raise ValueError(f"no preset {name!r}, expected one of {sorted(presets)}")
        of_both = overrides.keys() & {"N", "num_hidden_layers"}
        shape = {
            field: value
            for field, value in presets[name].items()
            if not (of_both and field in DEPTHS)
        }
        return cls(**shape | overrides)


@strict
class VanillaVisionConfig(VanillaTransformerConfig):
    """An encoder of images (Dosovitskiy et al. 2021, ViT): `num_hidden_layers` (12) layers that
    read the patches of an image and, before them, learned tokens. The defaults are their ViT-B/16
    (Table 1): other than above, `hidden_size` 768, `intermediate_size` 3072, 12 heads, `"gelu"`,
    `norm_first` and no dropout.

    Args in addition to those of `VanillaTransformerConfig`:
        image_size (`int` or a pair, defaults to 224): height and width of an image in pixels.
        patch_size (`int` or a pair, defaults to 16): height and width of a patch. Pixels beyond the
            last full patch are not read.
        num_channels (`int`, defaults to 3): values per pixel.
        num_first_tokens (`int`, defaults to 1): learned tokens before the patches; 2 are a class
            and a distillation token (Touvron et al. 2021, DeiT). The classifier reads their states.
        interpolate_pos_encoding (`bool`, defaults to `False`): whether images of any size are read,
            with the positions of `image_size` interpolated. The argument of `forward` with this
            name takes precedence.
        pooler_act (`str`, *optional*): as in `VanillaEncoderConfig`.

    Raises:
        ValueError: also for an image that is smaller than a patch.
    """

    model_type = "vanilla-vision"
    attribute_map = {**PAPER_SYMBOLS, "N": "num_hidden_layers"}
    default_auto_map = {
        "AutoConfig": "configuration_vanilla_transformer.VanillaVisionConfig",
        "AutoModel": CODE + "VanillaVisionModel",
        "AutoModelForImageClassification": CODE + "VanillaVisionForImageClassification",
    }
    # No fields: what layers ask of every config.
    sliding_window = None
    has_relative_positions = has_position_bias = False

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_attention_heads: int = 12
    num_hidden_layers: int = 12
    hidden_act: str = "gelu"
    norm_first: bool = True
    embedding_dropout: float | int = 0.0
    dropout: float | int = 0.0
    classifier_dropout: float | int = 0.0
    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    num_first_tokens: int = 1
    interpolate_pos_encoding: bool = False
    pooler_act: str | None = None

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Height and width of a patch."""
        return pair(self.patch_size)

    @property
    def grid_shape(self) -> tuple[int, int]:
        """Rows and columns of patches in an image of `image_size`."""
        height, width = (
            image // patch for image, patch in zip(pair(self.image_size), self.patch_shape)
        )
        return height, width

    def _check_values(self):
        super()._check_values()
        for name in ("image_size", "patch_size"):
            sides = pair(getattr(self, name))
            if len(sides) != 2 or not all(1 <= side <= LARGEST for side in sides):
                raise ValueError(
                    f"{name} must be one or two numbers from 1 to {LARGEST}, got "
                    f"{getattr(self, name)}"
                )
        if min(self.grid_shape) < 1:
            raise ValueError(
                f"image_size must be at least patch_size, {self.patch_size}, got {self.image_size}"
            )
        count = math.prod(self.grid_shape)
        if count > LARGEST:
            raise ValueError(
                f"image_size={self.image_size} with patch_size={self.patch_size} has {count} "
                f"patches, expected at most {LARGEST}"
            )


def pair(size: int | list[int] | tuple[int, int]) -> tuple[int, ...]:
    """Return (height, width) of `size`; one number stands for both."""
    return (size, size) if isinstance(size, int) else tuple(size)


CONFIGS = {
    config.model_type: config
    for config in (
        VanillaEncoderConfig,
        VanillaDecoderConfig,
        VanillaSeq2SeqConfig,
        VanillaVisionConfig,
    )
}

__all__ = [
    "VanillaDecoderConfig",
    "VanillaEncoderConfig",
    "VanillaSeq2SeqConfig",
    "VanillaTextConfig",
    "VanillaTransformerConfig",
    "VanillaVisionConfig",
]
