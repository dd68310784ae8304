"""What the stacks are built of (Vaswani et al. 2017, sections 3.1 to 3.5), in reading order.

    positions -> embeddings -> attention -> feed-forward -> layer

Shapes: B batch, T target length (queries), S source length (keys and values), H heads, D hidden_size.
"""

import math

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.import_utils import is_tracing

from .configuration_vanilla_transformer import VanillaTransformerConfig

# ---------------------------------------------------------------------------------------------- embeddings and positions


def counted_positions(config, input_ids, attention_mask, order):
    """Where tokens stand by what `config.position_ids_from` counts: (B, T), or (1, T) where that is places, which are `order`
    (T,). Without ids or a mask of the shape (B, past + T), nothing is padding."""
    if config.position_ids_from == "mask" and attention_mask is not None and attention_mask.ndim == 2:
        real, before = attention_mask != 0, 0
    elif config.position_ids_from == "ids" and input_ids is not None:
        real, before = input_ids != config.pad_token_id, order[0]
    else:
        return order[None]
    return ((real.long().cumsum(1) + before) * real - 1)[:, -order.shape[0] :]


def position_angles(position_ids: torch.Tensor, width: int, base: float, dtype: torch.dtype) -> torch.Tensor:
    """pos / base^(2i / width) for i = 0 ... width / 2 - 1: (B, T) -> (B, T, width / 2)."""
    # float32 at least: half precision cannot tell position 2049 from 2048.
    precise = torch.promote_types(dtype, torch.float32)
    two_i = torch.arange(0, width, 2, device=position_ids.device, dtype=precise)
    return position_ids[..., None].to(precise) * torch.exp(two_i * (-math.log(base) / width))


def sinusoidal_positions(position_ids: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(the same angle).

    Computed for the positions asked for, so there is no table to run out of. `position_ids` (B, T) -> (B, T, width).
    """
    angles = position_angles(position_ids, width, 10000.0, dtype)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021, RoFormer, equation 34): components 2i and 2i+1 of a query or key are a point in the
    plane, turned by the angle of its position. states (B, H, T, d_k); cos, sin (B, T, d_k / 2)."""
    x, y = states[..., 0::2], states[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([x * cos - y * sin, x * sin + y * cos], dim=-1).flatten(-2)


def rotary_positions(config, position_ids, dtype):
    """Cosines and sines (B, T, d_k / 2) for `rotate`, or None where positions are of another kind."""
    if config.position_embedding_type != "rotary":
        return None
    angles = position_angles(position_ids, config.head_dim, config.rope_theta, dtype)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class VanillaRelativePositions(nn.Module):
    """Relative positions (Raffel et al. 2020, T5, section 2.1): a learned number for each head and distance between key and
    query, added to the scores of self-attention in every layer of a stack. Half of the buckets hold one distance each, the
    others grow logarithmically; an encoder has such buckets for keys before the query and behind it."""

    def __init__(self, config: VanillaTransformerConfig, is_causal: bool):
        super().__init__()
        self.is_causal = is_causal
        self.buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.bias = nn.Embedding(self.buckets, config.num_attention_heads)

    def forward(self, queries, keys):
        """Where queries (T,) and keys (S,) stand in the sequence -> what is added to the scores, (1, H, T, S)."""
        return self.bias(self.bucket(keys - queries[:, None])).permute(2, 0, 1)[None]

    def bucket(self, offset):
        count = self.buckets if self.is_causal else self.buckets // 2
        distance = (-offset).clamp(min=0) if self.is_causal else offset.abs()
        exact = count // 2
        growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (growth * (count - exact)).long()).clamp(max=count - 1)
        bucket = torch.where(distance < exact, distance, far)
        return bucket if self.is_causal else bucket + (offset > 0) * count


def has_values(tensor: torch.Tensor) -> bool:
    """Tracing, compiling and meta tensors have no values to look at."""
    return not is_tracing(tensor) and not tensor.is_meta and tensor.numel() > 0


class VanillaEmbeddings(nn.Module):
    """Sections 3.4 and 3.5: token embeddings times sqrt(d_model), plus positions (and token types), then dropout."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.position_embedding_type == "learned":
            self.first_row = int(config.position_ids_from != "place")  # of position 0: padding, which is at -1, has row 0
            self.embed_positions = nn.Embedding(self.first_row + config.max_position_embeddings, config.hidden_size)
        if types := getattr(config, "type_vocab_size", 0):  # only encoders have them
            self.embed_token_types = nn.Embedding(types, config.hidden_size)
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.embedding_dropout)

    def tokens(self, input_ids, inputs_embeds):
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"exactly one of input_ids and inputs_embeds must be given, got {given}")
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    def forward(self, inputs_embeds, position_ids, token_type_ids=None):
        hidden_states = inputs_embeds * self.scale
        if self.config.position_embedding_type == "sinusoidal":
            hidden_states = hidden_states + sinusoidal_positions(position_ids, inputs_embeds.shape[-1], inputs_embeds.dtype)
        elif self.config.position_embedding_type == "learned":
            hidden_states = hidden_states + self.learned_positions(position_ids)
        hidden_states = hidden_states + self.token_types(token_type_ids)
        return self.dropout(self.norm(hidden_states))

    def learned_positions(self, position_ids):
        rows = self.embed_positions.num_embeddings - self.first_row
        # A look-up beyond the table dies inside a kernel.
        if has_values(position_ids) and position_ids.max() >= rows:
            raise ValueError(
                f"position {position_ids.max().item()} is beyond the learned position table: "
                f"max_position_embeddings is {rows}, so a sequence has at most {rows} tokens"
            )
        return self.embed_positions(position_ids + self.first_row)

    def token_types(self, token_type_ids):
        """All tokens are of type 0 by default. Tokenizers give zeros to models without types too."""
        types = getattr(self.config, "type_vocab_size", 0)
        if token_type_ids is not None and has_values(token_type_ids) and (largest := token_type_ids.max()) >= max(types, 1):
            raise ValueError(f"token type {largest.item()} does not exist: type_vocab_size is {types}")
        if not types:
            return 0.0
        return self.embed_token_types.weight[0] if token_type_ids is None else self.embed_token_types(token_type_ids)


# ------------------------------------------------------------------------------------------------------------- attention


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, position_bias=None, **kwargs):
    """Equation 1: Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V.

    query (B, H, T, d_k), key (B, H, S, d_k), value (B, H, S, d_v) -> output (B, T, H, d_v), weights (B, H, T, S).
    `attention_mask` is added to the scores: 0 where a query may look, the dtype's minimum where not. So is
    `position_bias` (1, H, T, S), where positions are relative.
    """
    scores = query @ key.transpose(2, 3) * scaling
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        # Clamped, because a low score plus the minimum of float16 is -inf, and softmax makes NaN of a row of those.
        scores = (scores + attention_mask).clamp(min=torch.finfo(scores.dtype).min)
    weights = nn.functional.dropout(scores.softmax(dim=-1), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class VanillaAttention(nn.Module):
    """Section 3.2.2: MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W^Q_i, K W^K_i, V W^V_i).

    Self-attention, unless `key_value_states` (the encoder's output) is given: then cross-attention, whose keys and
    values are computed once and stay in the cache. `sliding_window` is counted as attention functions do, one more than
    the keys a query may look back at.
    """

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int, is_causal: bool, sliding_window: int | None = None):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.sliding_window = sliding_window
        self.head_dim = config.head_dim
        self.value_head_dim = config.value_head_dim
        self.scaling = config.head_dim**-0.5
        heads = config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, heads * config.head_dim, bias=config.linear_bias)
        self.k_proj = nn.Linear(config.hidden_size, heads * config.head_dim, bias=config.linear_bias)
        self.v_proj = nn.Linear(config.hidden_size, heads * config.value_head_dim, bias=config.linear_bias)
        self.o_proj = nn.Linear(heads * config.value_head_dim, config.hidden_size, bias=config.linear_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query = split_heads(self.q_proj(hidden_states), self.head_dim)
        if position_embeddings is not None:
            query = rotate(query, *position_embeddings)
        key, value = self.keys_and_values(hidden_states, key_value_states, past_key_values, position_embeddings)
        implementation = self.config._attn_implementation or "eager"
        if "flash" in implementation and key_value_states is not None and attention_mask is not None:
            # By the mask of the keys transformers would drop queries too, which here are other tokens.
            implementation, attention_mask = "sdpa", attention_mask[:, None, None].bool()
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.config.attention_dropout if self.training else 0.0,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        output = output.reshape(*hidden_states.shape[:2], -1)  # (B, T, H, d_v), vLLM's (T, H * d_v) -> (B, T, H * d_v)
        return self.o_proj(output), weights

    def keys_and_values(self, hidden_states, key_value_states, past_key_values, position_embeddings):
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
        if position_embeddings is not None:
            key = rotate(key, *position_embeddings)
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
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.linear_bias)
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.activation_dropout)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.linear_bias)

    def forward(self, hidden_states):
        return self.down_proj(self.dropout(self.activation(self.up_proj(hidden_states))))


class VanillaLayer(GradientCheckpointingLayer):
    """Section 3.1, one of the N blocks of Figure 1: self-attention, cross-attention (in a decoder that has an encoder),
    feed-forward, each with a residual connection and layer normalisation around it."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int, is_causal: bool, has_cross_attention: bool):
        super().__init__()
        self.norm_first = config.norm_first
        self.dropout = nn.Dropout(config.dropout)
        window = config.sliding_window
        if window is not None and not is_causal:
            window += 1  # an encoder's token looks at `sliding_window` tokens beside itself
        self.self_attn = VanillaAttention(config, layer_idx, is_causal, window)
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
        position_bias: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        position_ids: torch.LongTensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        positions = {"position_ids": position_ids, "position_embeddings": position_embeddings}
        if position_bias is not None:
            positions["position_bias"] = position_bias

        def self_attention(x):
            return self.self_attn(x, None, attention_mask, past_key_values, **positions, **kwargs)[0]

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
