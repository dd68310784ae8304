"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017, section 3), in reading
order.

    positions -> embeddings -> attention -> feed-forward -> layer -> encoder, decoder,
    encoder-decoder (Figure 1) -> images

Shapes: B batch, T target length (queries), S source length (keys and values), H heads, D
hidden_size, E embedding_size.
"""

import math
import re

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPooling,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaEncoderConfig,
    VanillaSeq2SeqConfig,
    VanillaTextConfig,
    VanillaTransformerConfig,
    VanillaVisionConfig,
    pair,
)

# ------------------------------------------------------------------------- embeddings and positions


def counted_positions(config, input_ids, attention_mask, order):
    """Return the position of each token, counted by `config.position_ids_from`: (B, T) or (1, T).

    `order` (T,) are the places of the tokens in the sequence, from the number of cached tokens on.
    They are the result for "place". The others count tokens that are not padding; padding is at -1.
    Without `input_ids` or a mask (B, past + T) to count by, the places are the result too.
    """
    if (
        config.position_ids_from == "mask"
        and isinstance(attention_mask, torch.Tensor)
        and attention_mask.ndim == 2
    ):
        not_padding = attention_mask != 0
        before = 0
    elif config.position_ids_from == "ids" and input_ids is not None:
        not_padding = input_ids != config.pad_token_id
        before = order[0]
    else:
        return order[None]
    return ((not_padding.long().cumsum(1) + before) * not_padding - 1)[:, -order.shape[0] :]


def position_angles(
    position_ids: torch.Tensor, width: int, base: float, dtype: torch.dtype, factor: float = 1.0
) -> torch.Tensor:
    """Return pos / base^(2i / width) / factor for i = 0 ... width / 2 - 1: (B, T) -> (B, T, width /
    2).

    The result has `dtype`, or float32 if `dtype` is less precise.
    """
    # float32 at least: half precision cannot tell position 2049 from 2048.
    precise = torch.promote_types(dtype, torch.float32)
    two_i = torch.arange(0, width, 2, device=position_ids.device, dtype=precise)
    # rounded as in transformers: at position 8191 another formula differs by 5e-4
    steps = 1.0 / base ** (two_i / width) / factor
    return position_ids[..., None].to(precise) * steps


def sinusoidal_positions(
    position_ids: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return PE(pos, 2i) = sin(angle), PE(pos, 2i+1) = cos(angle), angle = pos /
    10000^(2i/d_model).

    This is section 3.5. `position_ids` (B, T) -> (B, T, width) of `dtype`. The values are computed
    for each call, so there is no table that limits positions.
    """
    angles = position_angles(position_ids, width, 10000.0, dtype)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys by their positions (Su et al. 2021, RoFormer, equation 34).

    Components 2i and 2i+1 are a point in the plane, which turns by the angle of its position.
    states (B, H, T, d_k); cos, sin (B, T, d_k / 2).
    """
    x, y = states[..., 0::2], states[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([x * cos - y * sin, x * sin + y * cos], dim=-1).flatten(-2)


def rotary_positions(config, position_ids, dtype, layer_types):
    """Return {layer type: cosines and sines (B, T, d_k / 2) for `rotate`}, with None instead if
    positions are not rotary."""
    if config.position_embedding_type != "rotary":
        return dict.fromkeys(layer_types)
    rotations = {}
    for layer_type in layer_types:
        base, factor = config.rope(layer_type)
        angles = position_angles(position_ids, config.head_dim, base, dtype, factor)
        rotations[layer_type] = angles.cos().to(dtype), angles.sin().to(dtype)
    return rotations


class VanillaRelativePositions(nn.Module):
    """Relative positions (Raffel et al. 2020, T5, section 2.1).

    A learned number for each head and distance between key and query is added to the scores of
    self-attention. Every layer of a stack uses the same numbers. Half of the buckets hold one
    distance each, the others grow logarithmically. An encoder has such buckets for keys before the
    query and for keys after it.
    """

    def __init__(self, config: VanillaTextConfig, is_causal: bool):
        super().__init__()
        self.is_causal = is_causal
        self.buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.bias = nn.Embedding(self.buckets, config.num_attention_heads)

    def forward(self, queries, keys):
        """Return the bias of the attention scores, (1, H, T, S), for positions of queries (T,) and
        keys (S,)."""
        return self.bias(self.bucket(keys - queries[:, None])).permute(2, 0, 1)[None]

    def bucket(self, offset):
        count = self.buckets if self.is_causal else self.buckets // 2
        distance = (-offset).clamp(min=0) if self.is_causal else offset.abs()
        exact = count // 2
        growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(
            self.max_distance / exact
        )
        far = (exact + (growth * (count - exact)).long()).clamp(max=count - 1)
        bucket = torch.where(distance < exact, distance, far)
        return bucket if self.is_causal else bucket + (offset > 0) * count


class VanillaDisentangledPositions(nn.Module):
    """Disentangled positions (He et al. 2021, DeBERTa, section 3.2).

    A learned vector for each bucket of distances from a query to a key. Every layer maps the
    vectors to queries and keys of its own and adds two products to the scores: of the query and the
    distance's key, and of the key and the distance's query. Half of the buckets hold one distance
    each, the others grow logarithmically.
    """

    def __init__(self, config: VanillaEncoderConfig):
        super().__init__()
        self.buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.embed = nn.Embedding(2 * self.buckets, config.hidden_size)
        self.norm = new_norm(config)

    def forward(self, order):
        """Return the vectors (1, N, D) of all buckets, and the bucket of each pair of tokens, (T,
        T).

        It is that of the distance from query to key; `order` (T,) are the positions of both.
        """
        offset = order[:, None] - order
        exact = self.buckets // 2
        largest = torch.tensor((self.max_distance - 1) / exact)
        growth = torch.log(offset.abs().clamp(min=exact) / exact) / torch.log(largest)
        far = (torch.ceil(growth * (exact - 1)).long() + exact) * offset.sign()
        bucket = torch.where(offset.abs() <= exact, offset, far) + self.buckets
        return self.norm(self.embed.weight)[None], bucket.clamp(0, 2 * self.buckets - 1)


def new_norm(
    config: VanillaTransformerConfig, size: int | None = None
) -> nn.LayerNorm | nn.RMSNorm:
    """Return LayerNorm (Ba et al. 2016), or RMSNorm: x / sqrt(mean(x^2) + eps) * weight.

    Both compute in float32 if x is half precision. `size` is the width of x, by default
    `config.hidden_size`.
    """
    kind = nn.RMSNorm if config.norm_type == "rms_norm" else nn.LayerNorm
    return kind(size or config.hidden_size, config.layer_norm_eps)


def optional_norm(
    exists: bool, config: VanillaTransformerConfig, size: int | None = None
) -> nn.LayerNorm | nn.RMSNorm | nn.Identity:
    """Return `new_norm(config, size)`, or the identity if `exists` is False."""
    return new_norm(config, size) if exists else nn.Identity()


def new_projection(in_size: int, out_size: int, bias: bool = False) -> nn.Linear | nn.Identity:
    """Return a linear map from `in_size` to `out_size`, the widths of embeddings and states, or the
    identity for equal widths."""
    return nn.Identity() if in_size == out_size else nn.Linear(in_size, out_size, bias)


def has_values(tensor: torch.Tensor) -> bool:
    """Return False for tensors without readable values: empty, on the meta device, or being
    traced."""
    return not is_tracing(tensor) and not tensor.is_meta and tensor.numel() > 0


class VanillaEmbeddings(nn.Module):
    """Sections 3.4 and 3.5: token embeddings times sqrt(d_model), plus positions (and token types),
    then dropout.

    A projection to the width of the layers follows the norm, as in ELECTRA. Without a norm it
    follows the tokens, as in OPT."""

    def __init__(self, config: VanillaTextConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size)
        if config.has_learned_positions:
            # of position 0: padding, which is at -1, has row 0
            self.first_row = int(config.position_ids_from != "place")
            self.embed_positions = nn.Embedding(
                self.first_row + config.max_position_embeddings, config.position_size
            )
        if types := getattr(config, "type_vocab_size", 0):  # only encoders have them
            self.embed_token_types = nn.Embedding(types, config.position_size)
        self.scale = math.sqrt(config.embedding_size) if config.scale_embedding else 1.0
        self.norm = (
            new_norm(config, config.position_size) if config.embedding_norm else nn.Identity()
        )
        self.projection = new_projection(
            config.embedding_size, config.hidden_size, bias=config.embedding_norm
        )
        self.dropout = nn.Dropout(config.embedding_dropout)

    def tokens(self, input_ids, inputs_embeds):
        if (input_ids is None) == (inputs_embeds is None):
            got = "neither" if input_ids is None else "both"
            raise ValueError(f"exactly one of input_ids and inputs_embeds must be given, got {got}")
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    def forward(self, inputs_embeds, position_ids, token_type_ids=None):
        """Token embeddings (B, T, E) -> (B, T, D), with positions, token types, norm and dropout.

        `position_ids` and `token_type_ids` are (B, T); positions may be (1, T), and types None.
        Raises ValueError for a position or type beyond its table.
        """
        hidden_states = inputs_embeds * self.scale
        if not self.config.embedding_norm:
            hidden_states = self.projection(hidden_states)
        if self.config.position_embedding_type == "sinusoidal":
            hidden_states = hidden_states + sinusoidal_positions(
                position_ids, hidden_states.shape[-1], inputs_embeds.dtype
            )
        elif self.config.has_learned_positions:
            hidden_states = hidden_states + self.learned_positions(position_ids)
        hidden_states = hidden_states + self.token_types(token_type_ids)
        hidden_states = self.dropout(self.norm(hidden_states))
        return self.projection(hidden_states) if self.config.embedding_norm else hidden_states

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
        """Return the embeddings of `token_type_ids` (B, T); without ids that of type 0 for all
        tokens.

        A model without types returns 0.0. It accepts ids of 0, because tokenizers may return them.
        Raises ValueError for a type that does not exist.
        """
        types = getattr(self.config, "type_vocab_size", 0)
        if (
            token_type_ids is not None
            and has_values(token_type_ids)
            and (largest := token_type_ids.max()) >= max(types, 1)
        ):
            raise ValueError(
                f"token type {largest.item()} does not exist: type_vocab_size is {types}"
            )
        if not types:
            return 0.0
        return (
            self.embed_token_types.weight[0]
            if token_type_ids is None
            else self.embed_token_types(token_type_ids)
        )


class VanillaPatchEmbeddings(nn.Module):
    """Dosovitskiy et al. 2021 (ViT), equation 1: [x_first; x_1 E; ...; x_N E] + E_pos. The x_i are
    the patches of an image, row by row, each flattened; E and its bias are learned, as are the
    first tokens and the positions."""

    def __init__(self, config: VanillaVisionConfig):
        super().__init__()
        self.config = config
        width, count = config.hidden_size, config.num_first_tokens
        self.embed_patches = nn.Linear(config.num_channels * math.prod(config.patch_shape), width)
        self.first_tokens = nn.Parameter(torch.empty(count, width))
        self.positions = nn.Parameter(torch.empty(count + math.prod(config.grid_shape), width))
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, pixel_values, interpolates):
        """Images (B, C, H, W) -> (B, first tokens and patches, D).

        `interpolates` is True to accept images of any size, with interpolated positions. Raises
        ValueError for another size without it, and another number of channels.
        """
        batch, channels, *size = pixel_values.shape
        if channels != self.config.num_channels:
            raise ValueError(
                f"pixel_values have {channels} channels, expected {self.config.num_channels}, the "
                "num_channels of config.json"
            )
        if not interpolates and tuple(size) != pair(self.config.image_size):
            expected = f"{pair(self.config.image_size)}, or interpolate_pos_encoding=True"
            raise ValueError(
                f"pixel_values have the height and width {tuple(size)}, expected image_size, "
                f"{expected}"
            )
        height, width = self.config.patch_shape
        rows, columns = size[0] // height, size[1] // width
        cropped = pixel_values[:, :, : rows * height, : columns * width].to(
            self.embed_patches.weight.dtype
        )
        patches = cropped.reshape(batch, channels, rows, height, columns, width).permute(
            0, 2, 4, 1, 3, 5
        )
        embedded = self.embed_patches(
            patches.reshape(batch, rows * columns, channels * height * width)
        )
        tokens = torch.cat([self.first_tokens.expand(batch, -1, -1), embedded], dim=1)
        return self.dropout(
            tokens
            + (self.interpolated_positions(rows, columns) if interpolates else self.positions)
        )

    def interpolated_positions(self, rows, columns):
        """Return E_pos (first tokens and patches, D) for an image of `rows` times `columns`
        patches.

        First tokens keep their positions; those of patches are interpolated (bicubic).
        """
        first, grid = self.positions.tensor_split([self.config.num_first_tokens])
        grid = grid.T.unflatten(1, self.config.grid_shape)[None]
        grid = nn.functional.interpolate(grid, (rows, columns), mode="bicubic", align_corners=False)
        return torch.cat([first, grid[0].flatten(1).T])


# ---------------------------------------------------------------------------------------- attention


def eager_attention_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, position_bias=None, **kwargs
):
    """Equation 1: Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V. Returns output and weights.

    query (B, H, T, d_k), key (B, H, S, d_k), value (B, H, S, d_v) -> output (B, T, H, d_v), weights
    (B, H, T, S). Keys and values may have fewer heads, each for a group of query heads. `scaling`
    is 1 / sqrt(d_k). `attention_mask` is added to the scores: 0 where a query may look, the dtype's
    minimum where not. So is `position_bias` (1 or B, H, T, S), where positions are relative.
    `dropout` of the weights applies if `module` is in training mode.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = query @ key.transpose(2, 3) * scaling
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        # Clamped, because a low score plus the minimum of float16 is -inf, and softmax makes NaN of
        # a row of those.
        scores = (scores + attention_mask).clamp(min=torch.finfo(scores.dtype).min)
    weights = nn.functional.dropout(scores.softmax(dim=-1), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class VanillaAttention(nn.Module):
    """Section 3.2.2: MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q
    W^Q_i, K W^K_i, V W^V_i).

    Self-attention, unless `key_value_states` (the encoder's output) is given: then cross-attention,
    whose keys and values are computed once and stay in the cache. `sliding_window` is counted as
    attention functions do, one more than the keys a query may look back at.
    """

    def __init__(
        self,
        config: VanillaTransformerConfig,
        layer_idx: int,
        is_causal: bool,
        sliding_window: int | None = None,
    ):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.sliding_window = sliding_window
        self.head_dim = config.head_dim
        self.value_head_dim = config.value_head_dim
        self.scaling = config.head_dim**-0.5
        bias, width = config.attention_bias, config.hidden_size
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.num_key_value_groups = heads // groups
        self.q_proj = nn.Linear(width, heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, groups * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, groups * config.value_head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * config.value_head_dim, width, bias=bias)
        self.q_norm = optional_norm(config.use_qk_norm, config, config.head_dim)
        self.k_norm = optional_norm(config.use_qk_norm, config, config.head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        position_bias: torch.Tensor | None = None,
        buckets: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query = self.q_norm(split_heads(self.q_proj(hidden_states), self.head_dim))
        if position_embeddings is not None:
            query = rotate(query, *position_embeddings)
        key, value = self.keys_and_values(
            hidden_states, key_value_states, past_key_values, position_embeddings
        )
        if buckets is not None:
            position_bias = self.disentangled_bias(query, key, position_bias, buckets)
        if position_bias is not None:  # a sliding window keeps the last keys only
            kwargs["position_bias"] = position_bias[..., -key.shape[-2] :]
        implementation = self.config._attn_implementation or "eager"
        if (
            "flash" in implementation
            and key_value_states is not None
            and attention_mask is not None
        ):
            # By the mask of the keys transformers would drop queries too, which here are other
            # tokens.
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
        # (B, T, H, d_v), vLLM's (T, H * d_v) -> (B, T, H * d_v)
        output = output.reshape(*hidden_states.shape[:2], -1)
        return self.o_proj(output), weights

    def keys_and_values(
        self, hidden_states, key_value_states, past_key_values, position_embeddings
    ):
        is_cross_attention = key_value_states is not None
        cache = past_key_values
        if isinstance(past_key_values, EncoderDecoderCache):
            if is_cross_attention and past_key_values.is_updated.get(self.layer_idx):
                layer = past_key_values.cross_attention_cache.layers[self.layer_idx]
                return layer.keys, layer.values
            cache = (
                past_key_values.cross_attention_cache
                if is_cross_attention
                else past_key_values.self_attention_cache
            )
        source = key_value_states if is_cross_attention else hidden_states
        key = self.k_norm(split_heads(self.k_proj(source), self.head_dim))
        value = split_heads(self.v_proj(source), self.value_head_dim)
        if position_embeddings is not None:
            key = rotate(key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
            if is_cross_attention and isinstance(past_key_values, EncoderDecoderCache):
                past_key_values.is_updated[self.layer_idx] = True
        return key, value

    def disentangled_bias(self, query, key, vectors, buckets):
        """Return what distances add to the scores, (B, H, T, T).

        `vectors` (1, N, D) are those of all buckets, `buckets` (T, T) the bucket of each pair.
        """
        keys = split_heads(self.k_proj(vectors), self.head_dim)
        queries = split_heads(self.q_proj(vectors), self.head_dim)
        shape = (*query.shape[:2], -1, -1)
        of_query = (query @ keys.mT).gather(-1, buckets.expand(shape))
        of_key = (key @ queries.mT).gather(-1, buckets.T.expand(shape)).mT
        return (of_query + of_key) * self.scaling


def split_heads(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return `states` (B, T, H * head_dim) as (B, H, T, head_dim)."""
    return states.view(*states.shape[:2], -1, head_dim).transpose(1, 2)


# --------------------------------------------------------------------------- feed-forward and layer


class VanillaFeedForward(nn.Module):
    """Section 3.3, equation 2: FFN(x) = max(0, x W_1 + b_1) W_2 + b_2. Gated (Shazeer 2020): (act(x
    W_g) * x W_1) W_2."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        if config.gated:
            self.gate_proj = nn.Linear(
                config.hidden_size, config.intermediate_size, bias=config.linear_bias
            )
        self.is_gated = config.gated
        self.up_proj = nn.Linear(
            config.hidden_size, config.intermediate_size, bias=config.linear_bias
        )
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.activation_dropout)
        self.down_proj = nn.Linear(
            config.intermediate_size, config.hidden_size, bias=config.linear_bias
        )

    def forward(self, hidden_states):
        inner = self.up_proj(hidden_states)
        inner = (
            self.activation(self.gate_proj(hidden_states)) * inner
            if self.is_gated
            else self.activation(inner)
        )
        return self.down_proj(self.dropout(inner))


class VanillaLayer(GradientCheckpointingLayer):
    """Section 3.1, one of the N blocks of Figure 1: self-attention, cross-attention (in a decoder
    that has an encoder), feed-forward, each with a residual connection and layer normalization
    around it."""

    def __init__(
        self,
        config: VanillaTransformerConfig,
        layer_idx: int,
        is_causal: bool,
        has_cross_attention: bool,
        layer_type: str = "full_attention",
    ):
        super().__init__()
        self.norm_first = config.norm_first
        self.dropout = nn.Dropout(config.dropout)
        window = None
        if layer_type == "sliding_attention":
            # an encoder's token looks at `sliding_window` tokens beside itself
            window = config.sliding_window + (not is_causal)
        self.self_attn = VanillaAttention(config, layer_idx, is_causal, window)
        has_prenorm = layer_idx > 0 or not config.skip_first_prenorm
        self.self_attn_norm = optional_norm(has_prenorm, config)
        self.self_attn_output_norm = optional_norm(config.sandwich_norm, config)
        if has_cross_attention:
            self.cross_attn = VanillaAttention(config, layer_idx, is_causal=False)
            self.cross_attn_norm = new_norm(config)
        self.feed_forward = VanillaFeedForward(config)
        self.feed_forward_norm = new_norm(config)
        self.feed_forward_output_norm = optional_norm(config.sandwich_norm, config)

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
        positions = {
            "position_ids": position_ids,
            "position_embeddings": position_embeddings,
            "position_bias": position_bias,
        }

        def self_attention(x):
            options = {**positions, **kwargs}
            output, _ = self.self_attn(x, None, attention_mask, past_key_values, **options)
            return self.self_attn_output_norm(output)

        def cross_attention(x):
            return self.cross_attn(
                x, encoder_hidden_states, encoder_attention_mask, past_key_values, **kwargs
            )[0]

        def feed_forward(x):
            return self.feed_forward_output_norm(self.feed_forward(x))

        hidden_states = self.residual(hidden_states, self_attention, self.self_attn_norm)
        if encoder_hidden_states is not None:
            hidden_states = self.residual(hidden_states, cross_attention, self.cross_attn_norm)
        return self.residual(hidden_states, feed_forward, self.feed_forward_norm)

    def residual(self, x, sublayer, norm):
        """Return the states `x` (B, T, D) with the output of the function `sublayer` added.

        Post-norm, the paper's: LayerNorm(x + Dropout(Sublayer(x))). Pre-norm: x +
        Dropout(Sublayer(LayerNorm(x))).
        """
        if self.norm_first:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))


# ------------------------------------------------------------------------------------------- stacks


class VanillaPreTrainedModel(PreTrainedModel):
    """The base of all our models: initialization, and the attributes that transformers needs."""

    config_class = VanillaTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VanillaLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # those that run once for a sequence, not for each token
    sequence_modules = frozenset({"pooler"})

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("torch."):
            # FSDP2 makes a subclass of what it shards; a checkpoint has to name our class, and to
            # carry our code.
            cls.__name__, cls.__module__ = cls.__bases__[-1].__name__, cls.__bases__[-1].__module__

    @torch.no_grad()
    def _init_weights(self, module):
        """Initialize the parameters of a module; the paper gives no values.

        Linear: normal with deviation `initializer_range`, bias 0. Embeddings: uniform within
        embedding_size^-0.5, so that tokens times its root are as large as sinusoids. Norms: the
        identity. First tokens and positions of images: like Linear.
        """
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            bound = self.config.embedding_size**-0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            init.ones_(module.weight)
            if isinstance(module, nn.LayerNorm):
                init.zeros_(module.bias)
        elif isinstance(module, VanillaPatchEmbeddings):
            init.normal_(module.first_tokens, std=self.config.initializer_range)
            init.normal_(module.positions, std=self.config.initializer_range)

    def init_parallel_plans(self):
        """Keep the entries of the config's tensor-parallel and FSDP plans that this model has
        modules for.

        With relative positions each process holds all heads of self-attention, because the bias of
        all heads cannot be added to some of them.
        """
        super().init_parallel_plans()
        names = {re.sub(r"\d+", "*", name) for name, _ in self.named_modules()}
        if self.config.has_position_bias:
            names = {name for name in names if ".self_attn." not in name}
        self._tp_plan = {name: style for name, style in self._tp_plan.items() if name in names}
        self._fsdp_plan = {name: style for name, style in self._fsdp_plan.items() if name in names}

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
        size = distributed_config.tp_size
        for name in ("num_attention_heads", "num_key_value_heads"):
            if (heads := getattr(model.config, name)) % size:
                raise ValueError(f"{name} is {heads}, expected a multiple of tp_size, {size}")
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)


def check_attention_implementation(config: VanillaTransformerConfig):
    """Raise ValueError if the attention implementation in `config` does not support the model.

    FlashAttention and vLLM would silently compute something else. Flex attention would fail inside
    torch.
    """
    name = config._attn_implementation or ""
    unequal = "flash" in name and config.head_dim != config.value_head_dim
    if unequal or (name == "vllm" and config.head_dim < config.value_head_dim):
        raise ValueError(
            f"{name} needs values as wide as keys, got head_dim {config.head_dim} and "
            f"value_head_dim "
            f"{config.value_head_dim}: use sdpa, flex_attention or eager"
        )
    if any(kernel in name for kernel in ("flash", "flex", "vllm")) and config.has_position_bias:
        positions = config.position_embedding_type
        raise ValueError(
            f"{name} cannot add a bias to the scores, which position_embedding_type={positions!r} "
            "needs: use sdpa or eager"
        )
    if (
        name == "vllm"
        and config.model_type == "vanilla-encoder"
        and config.sliding_window is not None
    ):
        raise ValueError(
            f"vllm counts an encoder's window in another way, got "
            f"sliding_window={config.sliding_window}"
        )


def final_norm(config):
    return new_norm(config) if config.final_norm else nn.Identity()


class VanillaPooler(nn.Module):
    """Devlin et al. 2019 (BERT): a linear map and an activation on the first token's state, (B, S,
    D) -> (B, D)."""

    def __init__(self, config: VanillaEncoderConfig | VanillaVisionConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.pooler_act]

    def forward(self, hidden_states):
        return self.activation(self.dense(hidden_states[:, 0]))


# of an encoder, of a decoder
MASKS = {
    "full_attention": (create_bidirectional_mask, create_causal_mask),
    "sliding_attention": (
        create_bidirectional_sliding_window_mask,
        create_sliding_window_causal_mask,
    ),
}


def masks_by_type(types, is_causal, config, inputs_embeds, attention_mask, **kwargs):
    """Return {layer type: mask of self-attention} for the layer types `types`.

    `attention_mask` (B, S) is 0 for padding, or already the result: `generate` makes it if it
    compiles. Other arguments are those of `transformers.masking_utils`.
    """
    if isinstance(attention_mask, dict):
        return attention_mask
    return {
        name: MASKS[name][is_causal](config, inputs_embeds, attention_mask, **kwargs)
        for name in set(types)
    }


def relative_positions(config, is_causal):
    """Return the module of the numbers or vectors for distances of a stack, or None."""
    if config.position_embedding_type == "disentangled":
        return VanillaDisentangledPositions(config)
    return VanillaRelativePositions(config, is_causal) if config.has_relative_positions else None


class VanillaEncoderModel(VanillaPreTrainedModel):
    """The left half of Figure 1: embeddings and N layers, every position looking at every token
    that is not padding."""

    config_class = VanillaEncoderConfig
    _can_record_outputs = {"hidden_states": VanillaLayer, "attentions": VanillaAttention}

    def __init__(self, config: VanillaTextConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        depth = config.encoder_layers if config.is_encoder_decoder else config.num_hidden_layers
        self.layer_types = config.types_of_layers(depth)
        self.embeddings = VanillaEmbeddings(config)
        self.relative_positions = relative_positions(config, is_causal=False)
        self.layers = nn.ModuleList(
            VanillaLayer(config, i, False, False, layer_type)
            for i, layer_type in enumerate(self.layer_types)
        )
        self.norm = final_norm(config)
        self.pooler = VanillaPooler(config) if add_pooling_layer and config.pooler_act else None
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Encode the tokens and return `last_hidden_state` (B, S, D).

        `input_ids` are (B, S); `inputs_embeds` (B, S, E) may replace them. `attention_mask` (B, S)
        is 1 for tokens and 0 for padding, by default all 1. `token_type_ids` (B, S) are 0 by
        default. `position_ids` (B, S) start at 0 and are counted by `config.position_ids_from` by
        default. `pooler_output` (B, D) is returned if `config.pooler_act` is set.
        """
        check_attention_implementation(self.config)
        if kwargs.get("past_key_values") is not None:
            raise ValueError(
                "an encoder has no key-value cache: expected past_key_values None, got "
                "prefixes as of prefix tuning"
            )
        inputs_embeds = self.embeddings.tokens(input_ids, inputs_embeds)
        order = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
        if position_ids is None:
            position_ids = counted_positions(self.config, input_ids, attention_mask, order)
        hidden_states = self.embeddings(inputs_embeds, position_ids, token_type_ids)
        types = set(self.layer_types)
        masks = masks_by_type(types, False, self.config, hidden_states, attention_mask)
        rotations = rotary_positions(self.config, position_ids, hidden_states.dtype, types)
        position_bias, buckets = self.position_bias(order)
        for layer, layer_type in zip(self.layers, self.layer_types):
            hidden_states = layer(
                hidden_states,
                masks[layer_type],
                None,
                position_bias,  # positional, as gradient checkpointing needs it
                position_embeddings=rotations[layer_type],
                buckets=buckets,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        pooled = None if self.pooler is None else self.pooler(hidden_states)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def position_bias(self, order):
        """Return what positions `order` (T,) add to the scores and None, or with disentangled
        positions the vectors and buckets of `VanillaDisentangledPositions`."""
        if self.relative_positions is None:
            return None, None
        if self.config.position_embedding_type == "disentangled":
            return self.relative_positions(order)
        return self.relative_positions(order, order), None


class VanillaDecoderModel(VanillaPreTrainedModel):
    """The right half of Figure 1: embeddings and N layers. A position attends to itself and earlier
    positions and, in an encoder-decoder, to the encoder's output."""

    config_class = VanillaDecoderConfig
    _can_record_outputs = {
        "hidden_states": VanillaLayer,
        "attentions": OutputRecorder(VanillaAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VanillaAttention, index=1, layer_name="cross_attn"),
    }

    def __init__(self, config: VanillaTextConfig):
        super().__init__(config)
        depth = config.decoder_layers if config.is_encoder_decoder else config.num_hidden_layers
        self.has_cross_attention = config.is_encoder_decoder or config.add_cross_attention
        self.layer_types = config.types_of_layers(depth)
        self.embeddings = VanillaEmbeddings(config)
        self.relative_positions = relative_positions(config, is_causal=True)
        self.layers = nn.ModuleList(
            VanillaLayer(config, i, True, self.has_cross_attention, layer_type)
            for i, layer_type in enumerate(self.layer_types)
        )
        self.norm = final_norm(config)
        self.output_projection = new_projection(config.hidden_size, config.embedding_size)
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
        """Decode the tokens and return `last_hidden_state` (B, T, E).

        `input_ids` (B, T) are the tokens that are not yet in the cache. `attention_mask` (B, past +
        T) is 0 for padding. `position_ids` (B, T) start at 0 and are counted by
        `config.position_ids_from` by default; left-padded rows need them if that is `"place"`.
        With `use_cache=False` and no mask, positions that do not go up by 1 begin another packed
        sequence, and sequences do not see each other. `encoder_hidden_states` (B, S, D) come with
        `encoder_attention_mask` (B, S).
        The cache `past_key_values` is extended in place. With `use_cache`, by default
        `config.use_cache`, a missing cache is created. The output has the cache.
        """
        check_attention_implementation(self.config)
        if encoder_hidden_states is not None and not self.has_cross_attention:
            raise ValueError(
                "encoder_hidden_states were given to a decoder without cross-attention"
            )
        # its name from 5.24 on
        past_key_values = self.prepare_cache(kwargs.pop("cache", past_key_values), use_cache)
        has_cross_attention_cache = isinstance(past_key_values, EncoderDecoderCache)
        cache = (
            past_key_values.self_attention_cache if has_cross_attention_cache else past_key_values
        )
        past_length = cache.get_seq_length() if cache is not None else 0

        inputs_embeds = self.embeddings.tokens(input_ids, inputs_embeds)
        order = past_length + torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
        positions = position_ids
        if position_ids is None:
            positions = counted_positions(self.config, input_ids, attention_mask, order)
        hidden_states = self.embeddings(inputs_embeds, positions)
        types = set(self.layer_types)
        new = {"past_key_values": cache, "position_ids": position_ids}
        masks = masks_by_type(types, True, self.config, hidden_states, attention_mask, **new)
        rotations = rotary_positions(self.config, positions, hidden_states.dtype, types)
        if encoder_hidden_states is not None:
            encoder_attention_mask = create_bidirectional_mask(
                self.config,
                hidden_states,
                encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
            )
        position_bias = self.position_bias(order, cache)
        for layer, layer_type in zip(self.layers, self.layer_types):
            hidden_states = layer(
                hidden_states,
                masks[layer_type],
                encoder_hidden_states,  # positional, as gradient checkpointing needs it
                position_bias,
                encoder_attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                position_ids=positions,
                position_embeddings=rotations[layer_type],
                **kwargs,
            )
        hidden_states = self.output_projection(self.norm(hidden_states))
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values
        )

    def prepare_cache(self, past_key_values, use_cache):
        """Return the cache `past_key_values`, a new one with `use_cache`, or None.

        A decoder with cross-attention gets an `EncoderDecoderCache`. In a single cache the target's
        keys would mix with the source's.
        """
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is None or not self.has_cross_attention:
            return past_key_values
        if not isinstance(past_key_values, EncoderDecoderCache):
            return EncoderDecoderCache(past_key_values, DynamicCache())
        if any(past_key_values.cross_attention_cache.is_sliding):
            # `generate` makes both by `config.sliding_window`, which is not for the source.
            past_key_values.cross_attention_cache = DynamicCache()
        return past_key_values

    def position_bias(self, order, cache):
        if self.relative_positions is None:
            return None
        length, first = (
            (order.shape[0], 0) if cache is None else cache.get_mask_sizes(order.shape[0], 0)
        )
        return self.relative_positions(order, first + torch.arange(length, device=order.device))


class VanillaSeq2SeqModel(VanillaPreTrainedModel):
    """Figure 1: the encoder, and the decoder that looks at its output."""

    config_class = VanillaSeq2SeqConfig

    def __init__(self, config: VanillaSeq2SeqConfig):
        super().__init__(config)
        self.encoder = VanillaEncoderModel(config, add_pooling_layer=False)
        self.decoder = VanillaDecoderModel(config)
        if config.share_encoder_decoder_embeddings:
            self._tied_weights_keys = {
                "decoder.embeddings.embed_tokens.weight": "encoder.embeddings.embed_tokens.weight"
            }
        self.post_init()

    def get_input_embeddings(self):
        return self.encoder.embeddings.embed_tokens

    def set_input_embeddings(self, value):
        old = self.decoder.embeddings.embed_tokens
        self.encoder.embeddings.embed_tokens = value
        if self.config.tie_word_embeddings and self.config.share_encoder_decoder_embeddings:
            self.decoder.embeddings.embed_tokens = value
        elif old.num_embeddings != value.num_embeddings:
            # the vocabulary is resized, and there is one of it
            self.decoder.embeddings.embed_tokens = self._get_resized_embeddings(
                old, value.num_embeddings
            )

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
        """Run both stacks and return `last_hidden_state` (B, T, E) of the decoder.

        `input_ids` and `attention_mask` (0 for padding) are (B, S). `encoder_outputs` computed
        earlier may replace `input_ids`, not the mask, which cross-attention reads too.
        `decoder_input_ids` (B, T) are the tokens that are not yet in the cache; the first of all is
        `decoder_start_token_id`. `decoder_attention_mask` is (B, past + T).
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "one of decoder_input_ids and decoder_inputs_embeds must be given (or labels, to a "
                "head), got neither"
            )
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        elif isinstance(encoder_outputs, tuple | list):
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


class VanillaVisionModel(VanillaPreTrainedModel):
    """Dosovitskiy et al. 2021 (ViT): the left half of Figure 1 over the patches of an image."""

    config_class = VanillaVisionConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _input_embed_layer = "embed_patches"
    _no_split_modules = ["VanillaPatchEmbeddings", "VanillaLayer"]
    _can_record_outputs = {"hidden_states": VanillaLayer, "attentions": VanillaAttention}

    def __init__(self, config: VanillaVisionConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        depth = config.num_hidden_layers
        self.embeddings = VanillaPatchEmbeddings(config)
        self.layers = nn.ModuleList(
            VanillaLayer(config, i, is_causal=False, has_cross_attention=False)
            for i in range(depth)
        )
        self.norm = final_norm(config)
        self.pooler = VanillaPooler(config) if add_pooling_layer and config.pooler_act else None
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        pixel_values: torch.FloatTensor,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Encode the images and return `last_hidden_state` (B, S, D) of the first tokens and the
        patches.

        `pixel_values` (B, C, H, W) have `config.image_size`, or any size with
        `interpolate_pos_encoding` (by default `config.interpolate_pos_encoding`). Patches are in
        row order. `pooler_output` (B, D) is returned if `config.pooler_act` is set.

        Raises:
            ValueError: for images of another size or number of channels.
        """
        check_attention_implementation(self.config)
        if interpolate_pos_encoding is None:
            interpolate_pos_encoding = self.config.interpolate_pos_encoding
        hidden_states = self.embeddings(pixel_values, interpolate_pos_encoding)
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)
        hidden_states = self.norm(hidden_states)
        pooled = None if self.pooler is None else self.pooler(hidden_states)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)
