"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017), in reading order.

    positions -> attention -> feed-forward -> layer -> encoder, decoder, encoder-decoder -> heads

Shapes: B batch, T target length (queries), S source length (keys and values), H heads, D hidden_size, V vocab_size.
"""

import math

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaEncoderConfig,
    VanillaSeq2SeqConfig,
    VanillaTransformerConfig,
)

# ---------------------------------------------------------------------------------------------- embeddings and positions


def sinusoidal_positions(position_ids: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(the same angle).

    Computed for the positions asked for, so there is no table to run out of. `position_ids` (B, T) -> (B, T, width).
    """
    # float32 at least: half precision cannot tell position 2049 from 2048.
    precise = torch.promote_types(dtype, torch.float32)
    two_i = torch.arange(0, width, 2, device=position_ids.device, dtype=precise)
    angles = position_ids[..., None].to(precise) * torch.exp(two_i * (-math.log(10000.0) / width))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(dtype)


class VanillaEmbeddings(nn.Module):
    """Sections 3.4 and 3.5: token embeddings times sqrt(d_model), plus positions, then dropout."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = None
        if config.position_embedding_type == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, input_ids, inputs_embeds, position_ids, past_length=0):
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"exactly one of input_ids and inputs_embeds must be given, got {given}")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = past_length + torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        hidden_states = inputs_embeds * self.scale + self.positions(position_ids, inputs_embeds)
        return self.dropout(self.norm(hidden_states))

    def positions(self, position_ids, like):
        if self.embed_positions is None:
            return sinusoidal_positions(position_ids, like.shape[-1], like.dtype)
        rows = self.embed_positions.num_embeddings
        # A look-up beyond the table dies inside a kernel; tracing, compiling and meta tensors have no values to look at.
        has_values = not is_tracing(position_ids) and not position_ids.is_meta and position_ids.numel()
        if has_values and position_ids.max() >= rows:
            raise ValueError(
                f"position {position_ids.max().item()} is beyond the learned position table: "
                f"max_position_embeddings is {rows}, so a sequence has at most {rows} tokens"
            )
        return self.embed_positions(position_ids)


# ------------------------------------------------------------------------------------------------------------- attention


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Equation 1: Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V.

    query (B, H, T, d_k), key (B, H, S, d_k), value (B, H, S, d_v) -> output (B, T, H, d_v), weights (B, H, T, S).
    `attention_mask` is added to the scores: 0 where a query may look, the dtype's minimum where not.
    """
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        # Clamped, because a low score plus the minimum of float16 is -inf, and softmax makes NaN of a row of those.
        scores = (scores + attention_mask).clamp(min=torch.finfo(scores.dtype).min)
    weights = nn.functional.dropout(scores.softmax(dim=-1), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class VanillaAttention(nn.Module):
    """Section 3.2.2: MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W^Q_i, K W^K_i, V W^V_i).

    Self-attention, unless `key_value_states` (the encoder's output) is given: then cross-attention, whose keys and
    values are computed once and stay in the cache.
    """

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int, is_causal: bool):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.head_dim = config.head_dim
        self.value_head_dim = config.value_head_dim
        self.scaling = config.head_dim**-0.5
        heads = config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, heads * config.head_dim)
        self.k_proj = nn.Linear(config.hidden_size, heads * config.head_dim)
        self.v_proj = nn.Linear(config.hidden_size, heads * config.value_head_dim)
        self.o_proj = nn.Linear(heads * config.value_head_dim, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query = split_heads(self.q_proj(hidden_states), self.head_dim)
        key, value = self.keys_and_values(hidden_states, key_value_states, past_key_values)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.config.attention_dropout if self.training else 0.0,
            **kwargs,
        )
        return self.o_proj(output.flatten(2)), weights  # (B, T, H, d_v) -> (B, T, H * d_v) -> (B, T, D)

    def keys_and_values(self, hidden_states, key_value_states, past_key_values):
        is_cross_attention = key_value_states is not None
        cache = past_key_values
        if isinstance(past_key_values, EncoderDecoderCache):
            if is_cross_attention and past_key_values.is_updated.get(self.layer_idx):
                layer = past_key_values.cross_attention_cache.layers[self.layer_idx]
                return layer.keys, layer.values
            cache = past_key_values.cross_attention_cache if is_cross_attention else past_key_values.self_attention_cache
        source = key_value_states if is_cross_attention else hidden_states
        key = split_heads(self.k_proj(source), self.head_dim)
        value = split_heads(self.v_proj(source), self.value_head_dim)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
            if is_cross_attention and isinstance(past_key_values, EncoderDecoderCache):
                past_key_values.is_updated[self.layer_idx] = True
        return key, value


def split_heads(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    """(B, T, H * head_dim) -> (B, H, T, head_dim)."""
    return states.view(*states.shape[:2], -1, head_dim).transpose(1, 2)


# ------------------------------------------------------------------------------------------------ feed-forward and layer


class VanillaFeedForward(nn.Module):
    """Section 3.3, equation 2: FFN(x) = max(0, x W_1 + b_1) W_2 + b_2."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.activation_dropout)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states):
        return self.down_proj(self.dropout(self.activation(self.up_proj(hidden_states))))


class VanillaLayer(GradientCheckpointingLayer):
    """Section 3.1, one of the N blocks of Figure 1: self-attention, cross-attention (in a decoder that has an encoder),
    feed-forward, each with a residual connection and layer normalisation around it."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int, is_causal: bool, has_cross_attention: bool):
        super().__init__()
        self.norm_first = config.norm_first
        self.dropout = nn.Dropout(config.dropout)
        self.self_attn = VanillaAttention(config, layer_idx, is_causal)
        self.self_attn_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        if has_cross_attention:
            self.cross_attn = VanillaAttention(config, layer_idx, is_causal=False)
            self.cross_attn_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.feed_forward = VanillaFeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        def self_attention(x):
            return self.self_attn(x, attention_mask=attention_mask, past_key_values=past_key_values, **kwargs)[0]

        def cross_attention(x):
            return self.cross_attn(x, encoder_hidden_states, encoder_attention_mask, past_key_values, **kwargs)[0]

        hidden_states = self.residual(hidden_states, self_attention, self.self_attn_norm)
        if encoder_hidden_states is not None:
            hidden_states = self.residual(hidden_states, cross_attention, self.cross_attn_norm)
        return self.residual(hidden_states, self.feed_forward, self.feed_forward_norm)

    def residual(self, x, sublayer, norm):
        """Post-norm, the paper's: LayerNorm(x + Dropout(Sublayer(x))). Pre-norm: x + Dropout(Sublayer(LayerNorm(x)))."""
        if self.norm_first:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))


# ----------------------------------------------------------------------------------------------------------- the models


class VanillaPreTrainedModel(PreTrainedModel):
    """Initialisation, and what transformers needs to know of all our models."""

    config_class = VanillaTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VanillaLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module):
        """The paper does not say. Linear: normal with deviation `initializer_range`, bias 0. Embeddings: uniform within
        d_model^-0.5, so that tokens times sqrt(d_model) are as large as sinusoids. LayerNorm: the identity."""
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            bound = self.config.hidden_size**-0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)


class VanillaEncoderModel(VanillaPreTrainedModel):
    """The left half of Figure 1: embeddings and N layers, every position looking at every real token."""

    config_class = VanillaEncoderConfig
    _can_record_outputs = {"hidden_states": VanillaLayer, "attentions": VanillaAttention}

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        depth = config.encoder_layers if config.is_encoder_decoder else config.num_hidden_layers
        self.embeddings = VanillaEmbeddings(config)
        self.layers = nn.ModuleList(VanillaLayer(config, i, is_causal=False, has_cross_attention=False) for i in range(depth))
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if config.norm_first else nn.Identity()
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """`input_ids` (B, S), or `inputs_embeds` (B, S, D) in their place; `attention_mask` (B, S), 1 for real tokens, 0
        for padding (all 1 by default); `position_ids` (B, S), 0 to S-1 by default -> `last_hidden_state` (B, S, D)."""
        hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids)
        attention_mask = create_bidirectional_mask(self.config, hidden_states, attention_mask)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


class VanillaDecoderModel(VanillaPreTrainedModel):
    """The right half of Figure 1: embeddings and N layers, each position looking at itself and what is before it, and,
    in an encoder-decoder, at the encoder's output."""

    config_class = VanillaDecoderConfig
    _can_record_outputs = {
        "hidden_states": VanillaLayer,
        "attentions": OutputRecorder(VanillaAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VanillaAttention, index=1, layer_name="cross_attn"),
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        depth = config.decoder_layers if config.is_encoder_decoder else config.num_hidden_layers
        self.embeddings = VanillaEmbeddings(config)
        self.layers = nn.ModuleList(
            VanillaLayer(config, i, is_causal=True, has_cross_attention=config.is_encoder_decoder) for i in range(depth)
        )
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if config.norm_first else nn.Identity()
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """`input_ids` (B, T), the tokens that are not in the cache yet; `attention_mask` (B, past + T);
        `position_ids` (B, T), counted on from the cache by default: give them for left-padded rows (without mask and
        cache, positions that do not go up by 1 mean packed sequences, which do not see each other);
        `encoder_hidden_states` (B, S, D) with `encoder_attention_mask` (B, S) -> `last_hidden_state` (B, T, D)."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        is_pair = isinstance(past_key_values, EncoderDecoderCache)
        if self.config.is_encoder_decoder and past_key_values is not None and not is_pair:
            # Self- and cross-attention in one cache would mix the target's keys with the source's.
            past_key_values, is_pair = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config)), True
        self_attention_cache = past_key_values.self_attention_cache if is_pair else past_key_values
        past_length = self_attention_cache.get_seq_length() if self_attention_cache is not None else 0

        hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids, past_length)
        attention_mask = create_causal_mask(
            self.config, hidden_states, attention_mask, self_attention_cache, position_ids=position_ids
        )
        if encoder_hidden_states is not None:
            if not self.config.is_encoder_decoder:
                raise ValueError("encoder_hidden_states were given to a decoder without cross-attention")
            encoder_attention_mask = create_bidirectional_mask(
                self.config, hidden_states, encoder_attention_mask, encoder_hidden_states=encoder_hidden_states
            )
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask,
                encoder_hidden_states,  # positional, as gradient checkpointing needs it
                encoder_attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values
        )


class VanillaSeq2SeqModel(VanillaPreTrainedModel):
    """Figure 1: the encoder, and the decoder that looks at its output."""

    config_class = VanillaSeq2SeqConfig
    _tied_weights_keys = {"decoder.embeddings.embed_tokens.weight": "encoder.embeddings.embed_tokens.weight"}

    def __init__(self, config: VanillaSeq2SeqConfig):
        super().__init__(config)
        self.encoder = VanillaEncoderModel(config)
        self.decoder = VanillaDecoderModel(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.encoder.embeddings.embed_tokens

    def set_input_embeddings(self, value):
        old = self.decoder.embeddings.embed_tokens
        self.encoder.embeddings.embed_tokens = value
        if self.config.tie_word_embeddings:
            self.decoder.embeddings.embed_tokens = value
        elif old.num_embeddings != value.num_embeddings:  # the vocabulary is resized, and there is one of it
            self.decoder.embeddings.embed_tokens = self._get_resized_embeddings(old, value.num_embeddings)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """`input_ids` and `attention_mask` (B, S), or `encoder_outputs` computed before; `decoder_input_ids` (B, T),
        starting with `decoder_start_token_id` -> `last_hidden_state` (B, T, D)."""
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "one of decoder_input_ids and decoder_inputs_embeds must be given (or labels, to a head), got neither"
            )
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        decoder_outputs = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            position_ids=decoder_position_ids,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


# ------------------------------------------------------------------------------------------------------------- the heads


class VanillaEncoderForMaskedLM(VanillaPreTrainedModel):
    """Encoder with a projection to the vocabulary; `labels` (B, S), -100 where nothing is to be predicted."""

    config_class = VanillaEncoderConfig
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.embed_tokens.weight"}

    def __init__(self, config: VanillaEncoderConfig):
        super().__init__(config)
        self.model = VanillaEncoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """As `VanillaEncoderModel.forward` -> `logits` (B, S, V), and the mean cross-entropy where `labels` are given."""
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class VanillaEncoderForSequenceClassification(VanillaPreTrainedModel):
    """Encoder with a linear classifier on the state of the first token; `labels` (B,), or as `problem_type` says."""

    config_class = VanillaEncoderConfig

    def __init__(self, config: VanillaEncoderConfig):
        super().__init__(config)
        self.model = VanillaEncoderModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """As `VanillaEncoderModel.forward` -> `logits` (B, num_labels), and the loss where `labels` are given."""
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state[:, 0]))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class VanillaDecoderForCausalLM(VanillaPreTrainedModel, GenerationMixin):
    """Decoder with a projection to the vocabulary: the language model p(x_t | x_<t)."""

    config_class = VanillaDecoderConfig
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.embed_tokens.weight"}

    def __init__(self, config: VanillaDecoderConfig):
        super().__init__(config)
        self.model = VanillaDecoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """As `VanillaDecoderModel.forward` -> `logits` (B, T, V), of the last `logits_to_keep` positions if not 0. `labels`
        (B, T) are `input_ids` with -100 where nothing is to be predicted; the shift by one happens in the loss."""
        outputs = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache=use_cache, **kwargs
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states, outputs.attentions)


class VanillaSeq2SeqForConditionalGeneration(VanillaPreTrainedModel, GenerationMixin):
    """Encoder-decoder with a projection to the vocabulary: p(y_t | y_<t, x), the paper's translation model."""

    config_class = VanillaSeq2SeqConfig
    _tied_weights_keys = {"lm_head.weight": "model.encoder.embeddings.embed_tokens.weight"}

    def __init__(self, config: VanillaSeq2SeqConfig):
        super().__init__(config)
        self.model = VanillaSeq2SeqModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    def prepare_decoder_input_ids_from_labels(self, labels: torch.LongTensor) -> torch.LongTensor:
        """Teacher forcing: `labels` (B, T) shifted right by one behind the start token, -100 replaced by padding."""
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(self.config, name) is None:
                raise ValueError(f"config.{name} is None, expected a token id: labels cannot be shifted without it")
        start = torch.full_like(labels[:, :1], self.config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """As `VanillaSeq2SeqModel.forward` -> `logits` (B, T, V). With `labels` (B, T), -100 where nothing is to be
        predicted, `decoder_input_ids` default to the labels shifted right, and the loss is the mean cross-entropy."""
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            decoder_position_ids,
            encoder_outputs,
            past_key_values,
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache=False if labels is not None else use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            # The labels already stand where they are predicted, so the loss must not shift them again.
            kwargs["shift_labels"] = labels
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )


__all__ = [
    "VanillaDecoderForCausalLM",
    "VanillaDecoderModel",
    "VanillaEncoderForMaskedLM",
    "VanillaEncoderForSequenceClassification",
    "VanillaEncoderModel",
    "VanillaPreTrainedModel",
    "VanillaSeq2SeqForConditionalGeneration",
    "VanillaSeq2SeqModel",
]
