"""What the cpu and cuda targets share: the modeling code traced into onnxruntime's own attention operators.

The encoder of a seq2seq model ends with the keys and values of cross-attention, computed once for a whole generation; the
beams of one input read them as queries of one batch entry, so they are never copied.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from vanilla_transformer.layers_vanilla_transformer import VanillaRelativePositions

NAME = "onnxruntime"


class OperatorGraph(nn.Module):
    """A part of `model` whose attention is `attend`. What that takes beside queries, keys and values, `forward` sets."""

    keys_are_cached = False
    self_attention: Callable[..., torch.Tensor]  # of graphs of a decoder

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        ALL_ATTENTION_FUNCTIONS.register(NAME, self.attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)
        model.set_attn_implementation(NAME)

    def attend(self, module, query, key, value, attention_mask, scaling, position_bias=None, **kwargs):
        """query (B, H, T, d), key and value (B, H, S, d) -> (B, T, H, d). A `position_bias` (1, H, T, S) is of a whole
        sequence: what continues one has its own."""
        attributes = {"num_heads": module.config.num_attention_heads, "scale": float(scaling)}
        if module.is_causal:
            output = self.self_attention(module, query, key, value, attributes)
        else:
            output = self.full_attention(query, key, value, attributes, position_bias)
        return output.reshape(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    def full_attention(self, query, key, value, attributes, position_bias):
        """As in the encoder and in cross-attention; rows that continue one input are queries of one batch entry."""
        queries = flat(query).reshape(key.shape[0], -1, query.shape[1] * query.shape[3])
        states = (key, value) if self.keys_are_cached else (flat(key), flat(value))
        shape = (*queries.shape[:2], query.shape[1] * value.shape[3])
        padding = [] if self.mask is None else [None, self.mask]
        inputs = with_bias([queries, *states, *padding], 5, position_bias)
        return operator("MultiHeadAttention", inputs, attributes, [shape])[0]


def operator(name: str, inputs: list, attributes: dict, shapes: list) -> Sequence[torch.Tensor]:
    """onnxruntime's operator `name`; its outputs have `shapes` and the type of its first input."""
    types = [inputs[0].dtype] * len(shapes)
    return torch.onnx.ops.symbolic_multi_out(
        f"com.microsoft::{name}", inputs, attrs=attributes, dtypes=types, shapes=shapes, version=1
    )


def with_bias(inputs: list, place: int, bias: torch.Tensor | None) -> list:
    """`inputs` of an attention operator with what is added to its scores, if anything, as input number `place`."""
    if bias is None:
        return inputs
    padded = [*inputs, *[None] * (place + 1 - len(inputs))]
    return [*padded[:place], bias, *padded[place + 1 :]]


def flat(states: torch.Tensor) -> torch.Tensor:
    """(B, H, T, d) -> (B, T, H * d)."""
    return states.transpose(1, 2).flatten(2)


class OperatorSequenceGraph(OperatorGraph):
    """Tokens, their mask and their types in, all outputs of `model` out."""

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        self.mask = attention_mask.flatten(0, -2).to(torch.int32)  # of several choices, each is a row
        return self.model(input_ids, attention_mask, token_type_ids).to_tuple()


class OperatorImageGraph(OperatorGraph):
    """Images in, all outputs of `model` out."""

    def forward(self, pixel_values):
        self.mask = None
        return self.model(pixel_values).to_tuple()


def operator_sequence_graph(model: PreTrainedModel) -> OperatorGraph:
    """Of an encoder, of tokens or of images."""
    return (OperatorImageGraph if model.main_input_name == "pixel_values" else OperatorSequenceGraph)(model)


class CrossStatesGraph(OperatorGraph):
    """Tokens and their mask in; for each decoder layer, keys and values of cross-attention out."""

    def forward(self, input_ids, attention_mask):
        self.mask = attention_mask.to(torch.int32)
        hidden_states = self.model.get_encoder()(input_ids, attention_mask).last_hidden_state
        attentions = (layer.cross_attn for layer in self.model.get_decoder().layers)
        both = (attention.keys_and_values(None, hidden_states, None, None) for attention in attentions)
        return tuple(states for pair in both for states in pair)


class DistanceBiases(nn.Module):
    """What relative positions add to the scores of a decoder's self-attention, the same in all layers, as a table over the
    distance between a token and an earlier one. From the largest distance on all are alike. For models that have them."""

    table: torch.Tensor  # (distances, H)

    def __init__(self, positions: "VanillaRelativePositions"):
        super().__init__()
        self.largest: int = positions.max_distance
        distances = torch.arange(self.largest + 1)
        self.register_buffer("table", positions.bias(positions.bucket(-distances)).detach())

    def forward(self, distances: torch.Tensor) -> torch.Tensor:
        """(..., T, S) -> (..., H, T, S)."""
        return nn.functional.embedding(distances.clamp(0, self.largest), self.table).movedim(-1, -3)


def distance_biases(model: PreTrainedModel) -> DistanceBiases | None:
    positions = model.get_decoder().relative_positions
    return None if positions is None else DistanceBiases(positions)


class NewTokensOnly(DynamicCache):
    """Keys and values of the new tokens pass through: the operator itself puts them into its buffers."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return key_states, value_states


def kv_pairs(states: Sequence) -> list[tuple]:
    return list(zip(states[::2], states[1::2], strict=True))


def by_layer(present: dict[int, Sequence]) -> list:
    return [states for layer in sorted(present) for states in present[layer]]


def scatter(cache: torch.Tensor, states: torch.Tensor, first_slot: torch.Tensor) -> torch.Tensor:
    """`states` (B, H, T, d) into `cache` (B, H, slots, d), from `first_slot` (B,) on."""
    [present] = torch.onnx.ops.symbolic_multi_out(
        "TensorScatter",
        [cache, states, first_slot],
        attrs={"axis": -2},
        dtypes=[cache.dtype],
        shapes=[cache.shape],
        version=24,
    )
    return present


def gather(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Those of `states` (B, T, ...) that `tokens` (B, N) name: (B, N, ...)."""
    [gathered] = torch.onnx.ops.symbolic_multi_out(
        "GatherND",
        [states, tokens[..., None]],
        attrs={"batch_dims": 1},
        dtypes=[states.dtype],
        shapes=[(*tokens.shape, *states.shape[2:])],
        version=13,
    )
    return gathered
