"""The cpu target: the modeling code traced into onnxruntime's own attention operators, with caches written in place.

Self-attention over buffers of fixed size is `GroupQueryAttention` in a decoder, whose prompts differ in length, and
`DecoderMaskedMultiHeadAttention` in a seq2seq model, whose rows are all as long and may read what other beams wrote. In the
step of a seq2seq model, whose rows and sources differ in length, all attention is `GroupQueryAttention`. Everything else is
`MultiHeadAttention`.
"""

import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from ..operators import (
    CrossStatesGraph,
    DistanceBiases,
    NewTokensOnly,
    OperatorGraph,
    by_layer,
    distance_biases,
    flat,
    kv_pairs,
    operator,
    operator_sequence_graph,
    with_bias,
)


class DecoderStepGraph(OperatorGraph):
    """New tokens, their positions and the caches in; the logits after each row's last token, or with `all_logits` after each
    token, and the same caches out."""

    def __init__(self, model: PreTrainedModel, all_logits: bool = False):
        super().__init__(model)
        self.biases = distance_biases(model)
        self.all_logits = all_logits

    def self_attention(self, module, query, key, value, attributes):
        return grouped_attention(self, module, [flat(query), flat(key), flat(value)], attributes)

    def forward(self, input_ids, position_ids, last_position, total_length, *caches):
        self.lengths = (last_position, total_length)
        self.past = kv_pairs(caches)
        self.present = {}
        self.bias = place_biases(self.biases, position_ids, total_length, caches[0])
        decoder = self.model.get_decoder()
        outputs = decoder(input_ids, position_ids=position_ids, past_key_values=NewTokensOnly(), use_cache=True)
        if self.all_logits:
            return self.model.lm_head(outputs.last_hidden_state), *by_layer(self.present)
        states = last_states(outputs.last_hidden_state, last_position)
        return next_logits(self.model, states), *by_layer(self.present)


class LookupGraph(OperatorGraph):
    """As `DecoderStepGraph` with `all_logits`, of a seq2seq model: several tokens of each row, over the caches of
    `Seq2SeqStepGraph` and the source of that."""

    keys_are_cached = True

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.biases = distance_biases(model)

    def self_attention(self, module, query, key, value, attributes):
        return grouped_attention(self, module, [flat(query), flat(key), flat(value)], attributes)

    def forward(self, input_ids, position_ids, last_position, total_length, encoder_attention_mask, *caches):
        self.lengths = (last_position, total_length)
        self.mask = encoder_attention_mask.to(torch.int32)
        self.past = kv_pairs(caches[: len(caches) // 2])
        cross = kv_pairs(caches[len(caches) // 2 :])
        self.present = {}
        self.bias = place_biases(self.biases, position_ids, total_length, caches[0])
        outputs = decode(self.model, input_ids, position_ids, cross)
        return self.model.lm_head(outputs.last_hidden_state), *by_layer(self.present)


class RowStepGraph(OperatorGraph):
    """As `DecoderStepGraph`, of a seq2seq model, and for one token of each row: each has a source of its own length, whose keys
    and values are in caches too. Their attention gets no new keys, so that they pass through."""

    keys_are_cached = True

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.biases = distance_biases(model)

    def self_attention(self, module, query, key, value, attributes):
        return grouped_attention(self, module, [flat(query), flat(key), flat(value)], attributes)

    def full_attention(self, query, key, value, attributes, position_bias):
        none = flat(query)[:, :0] if self.no_keys is None else self.no_keys
        self.no_keys = none
        # The one query may see all keys of its source, so causal attention is the same; onnxruntime is faster with it.
        attributes |= {"kv_num_heads": attributes["num_heads"]}
        inputs = [flat(query), none, none, key, value, *self.source_lengths]
        shapes = [flat(query).shape, key.shape, value.shape]
        output, *states = operator("GroupQueryAttention", inputs, attributes, shapes)
        self.source_states += states
        return output

    def forward(
        self,
        input_ids,
        position_ids,
        last_position,
        total_length,
        last_source_position,
        total_source_length,
        *caches,
    ):
        self.lengths = (last_position, total_length)
        self.source_lengths = (last_source_position, total_source_length)
        self.past = kv_pairs(caches[: len(caches) // 2])
        cross = kv_pairs(caches[len(caches) // 2 :])
        self.present = {}
        self.source_states = []
        self.no_keys = None
        self.bias = place_biases(self.biases, position_ids, total_length, caches[0])
        outputs = decode(self.model, input_ids, position_ids, cross)
        return next_logits(self.model, outputs.last_hidden_state), *by_layer(self.present), *self.source_states


class Seq2SeqStepGraph(OperatorGraph):
    """One token of each row and the caches in; logits and the same caches out. The rows of an input are its beams:
    `cache_indirection` (B, beams, L) says whose key and value each reads at each position before `past_length`."""

    keys_are_cached = True

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.biases = distance_biases(model)

    def self_attention(self, module, query, key, value, attributes):
        past = self.past[module.layer_idx]
        states = [flat(query), flat(key), flat(value)]
        inputs = [*states, None, self.bias, *past, *self.beams]
        shapes = [states[2].shape, *(buffer.shape for buffer in past)]
        attributes |= {"past_present_share_buffer": 1}
        output, *self.present[module.layer_idx] = operator("DecoderMaskedMultiHeadAttention", inputs, attributes, shapes)
        return output

    def forward(self, input_ids, past_length, num_beams, cache_indirection, encoder_attention_mask, *caches):
        self.beams = (past_length, num_beams, cache_indirection)
        self.mask = encoder_attention_mask.to(torch.int32)
        self.past = kv_pairs(caches[: len(caches) // 2])
        cross = kv_pairs(caches[len(caches) // 2 :])
        self.present = {}
        self.bias = None
        if self.biases is not None:  # the token's place is the last
            places = first_places(past_length + 1, caches[0])
            self.bias = self.biases((past_length.long() - places)[None, None])
        outputs = decode(self.model, input_ids, past_length.long()[None], cross)
        return next_logits(self.model, outputs.last_hidden_state), *by_layer(self.present)


def decode(model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor, cross: list[tuple]):
    """What the decoder of a seq2seq model returns, with the keys and values of the source in `cross`."""
    cache = EncoderDecoderCache(NewTokensOnly(), DynamicCache(cross))
    cache.is_updated = dict.fromkeys(range(len(cross)), True)
    return model.get_decoder()(
        input_ids,
        position_ids=position_ids,
        past_key_values=cache,
        encoder_hidden_states=cross[0][0],  # only that there is a source is read from it
        use_cache=True,
    )


def grouped_attention(graph: OperatorGraph, module: nn.Module, states: list[torch.Tensor], attributes: dict) -> torch.Tensor:
    """Of `states`, the queries, keys and values of new tokens, over the caches of `graph`, each row from its own length on."""
    past = graph.past[module.layer_idx]
    attributes |= {"kv_num_heads": attributes["num_heads"], "local_window_size": module.sliding_window or -1}
    inputs = with_bias([*states, *past, *graph.lengths], 10, graph.bias)
    shapes = [states[2].shape, *(buffer.shape for buffer in past)]
    output, *graph.present[module.layer_idx] = operator("GroupQueryAttention", inputs, attributes, shapes)
    return output


def place_biases(biases: DistanceBiases | None, position_ids, total_length, cache) -> torch.Tensor | None:
    """What is added to the scores of tokens at `position_ids` (rows, T) for each place up to `total_length`, if anything."""
    return None if biases is None else biases(position_ids[..., None] - first_places(total_length, cache))


def last_states(states: torch.Tensor, last_position: torch.Tensor) -> torch.Tensor:
    """(rows, T, D) -> (rows, 1, D). A prompt has each row's last token at `last_position`; a later step has one token only."""
    last = torch.clamp(last_position.long(), max=states.shape[1] - 1)
    rows = torch.arange(states.shape[0], device=states.device)
    return states[rows, last][:, None]


def first_places(count: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """0 up to `count` (1,), which is no more than the length of a `cache` (rows, H, L, d). Tracing takes it to be L."""
    ends = [torch.zeros((), dtype=torch.int64), count[0].long(), torch.ones((), dtype=torch.int64)]
    [places] = torch.onnx.ops.symbolic_multi_out(
        "Range", ends, attrs={}, dtypes=[torch.int64], shapes=[cache.shape[2:3]], version=11
    )
    return places


def next_logits(model: PreTrainedModel, last_hidden_state: torch.Tensor) -> torch.Tensor:
    """(rows, 1, D) -> (rows, V). With the axis of tokens, because the exporter makes a `Gemm` of a product of two matrices,
    which has no int8 twin."""
    return model.lm_head(last_hidden_state)[:, 0]


def trace_module(model: PreTrainedModel, role: str) -> nn.Module:
    if model.config.is_encoder_decoder:
        graphs = {"encoder": CrossStatesGraph, "decoder": Seq2SeqStepGraph, "step": RowStepGraph, "lookup": LookupGraph}
        return graphs[role](model)
    if role in ("decoder", "lookup"):
        return DecoderStepGraph(model, all_logits=role == "lookup")
    return operator_sequence_graph(model)
