"""The cpu target: the modeling code traced into onnxruntime's own attention operators, with caches written in place.

Self-attention over buffers of fixed size is `GroupQueryAttention` in a decoder, whose prompts differ in length, and
`DecoderMaskedMultiHeadAttention` in a seq2seq model, whose rows are all as long and may read what other beams wrote. Everything
else is `MultiHeadAttention`. The encoder of a seq2seq model ends with the keys and values of cross-attention, computed once
for a whole generation; the beams of one input read them as queries of one batch entry, so they are never copied.
"""

import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "onnxruntime_cpu"


def refuse(config) -> None:
    """What these operators cannot hold, or not as they are used here.

    Raises:
        ValueError: naming the field, its value and what fits.
    """
    is_decoder = config.model_type == "vanilla-decoder"  # which `GroupQueryAttention` is for
    problems = {"position_embedding_type": config.position_embedding_type == "relative"}
    problems["sliding_window"] = config.sliding_window is not None and not is_decoder
    problems["value_head_dim"] = config.model_type != "vanilla-encoder" and config.value_head_dim != config.head_dim
    problems["head_dim"] = is_decoder and config.head_dim % 8 != 0
    expected = {
        "position_embedding_type": "anything but 'relative'",
        "sliding_window": "None",
        "value_head_dim": f"head_dim, {config.head_dim}",
        "head_dim": "a multiple of 8",
    }
    for name in [name for name, is_problem in problems.items() if is_problem]:
        found = getattr(config, name)
        raise ValueError(f"{name}={found!r} does not fit the cpu target, expected {expected[name]}: use --target portable")


class OperatorGraph(nn.Module):
    """A part of `model` whose attention is `attend`. What that takes beside queries, keys and values, `forward` sets."""

    keys_are_cached = False

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        ALL_ATTENTION_FUNCTIONS.register(NAME, self.attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)
        model.set_attn_implementation(NAME)

    def attend(self, module, query, key, value, attention_mask, scaling, **kwargs):
        """query (B, H, T, d), key and value (B, H, S, d) -> (B, T, H, d)."""
        attributes = {"num_heads": module.config.num_attention_heads, "scale": float(scaling)}
        attend = self.self_attention if module.is_causal else self.full_attention
        output = attend(module, query, key, value, attributes)
        return output.reshape(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    def full_attention(self, module, query, key, value, attributes):
        """As in the encoder and in cross-attention; rows that continue one input are queries of one batch entry."""
        queries = flat(query).reshape(key.shape[0], -1, query.shape[1] * query.shape[3])
        states = (key, value) if self.keys_are_cached else (flat(key), flat(value))
        shape = (*queries.shape[:2], query.shape[1] * value.shape[3])
        return operator("MultiHeadAttention", [queries, *states, None, self.mask], attributes, [shape])[0]


def operator(name, inputs, attributes, shapes):
    """onnxruntime's operator `name`; its outputs are float32 of `shapes`."""
    types = [torch.float32] * len(shapes)
    return torch.onnx.ops.symbolic_multi_out(
        f"com.microsoft::{name}", inputs, attrs=attributes, dtypes=types, shapes=shapes, version=1
    )


def flat(states):
    """(B, H, T, d) -> (B, T, H * d)."""
    return states.transpose(1, 2).flatten(2)


class EncoderGraph(OperatorGraph):
    """Tokens, their mask and their types in, all outputs of `model` out."""

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        self.mask = attention_mask.flatten(0, -2).to(torch.int32)  # of several choices, each is a row
        return self.model(input_ids, token_type_ids=token_type_ids).to_tuple()


class CrossStatesGraph(OperatorGraph):
    """Tokens and their mask in; for each decoder layer, keys and values of cross-attention out."""

    def forward(self, input_ids, attention_mask):
        self.mask = attention_mask.to(torch.int32)
        hidden_states = self.model.get_encoder()(input_ids).last_hidden_state
        attentions = (layer.cross_attn for layer in self.model.get_decoder().layers)
        both = (attention.keys_and_values(None, hidden_states, None, None) for attention in attentions)
        return tuple(states for pair in both for states in pair)


class NewTokensOnly(DynamicCache):
    """Keys and values of the new tokens pass through: the operator itself puts them into its buffers."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return key_states, value_states

    def get_seq_length(self, layer_idx=0):
        return 0


class DecoderStepGraph(OperatorGraph):
    """New tokens, their positions and the caches in; logits of each row's last real token and the same caches out."""

    def self_attention(self, module, query, key, value, attributes):
        past, states = self.past[module.layer_idx], [flat(query), flat(key), flat(value)]
        attributes |= {"kv_num_heads": attributes["num_heads"], "local_window_size": module.sliding_window or -1}
        inputs, shapes = [*states, *past, *self.lengths], [states[2].shape, *(buffer.shape for buffer in past)]
        output, *self.present[module.layer_idx] = operator("GroupQueryAttention", inputs, attributes, shapes)
        return output

    def forward(self, input_ids, position_ids, last_position, total_length, *caches):
        self.lengths, self.past, self.present = (last_position, total_length), pairs(caches), {}
        decoder = self.model.get_decoder()
        outputs = decoder(input_ids, position_ids=position_ids, past_key_values=NewTokensOnly(), use_cache=True)
        # A prompt has each row's last token at `last_position`; a later step has one token only.
        last = torch.clamp(last_position.long(), max=input_ids.shape[1] - 1)
        rows = torch.arange(input_ids.shape[0], device=input_ids.device)
        return next_logits(self.model, outputs.last_hidden_state[rows, last][:, None]), *in_order(self.present)


class Seq2SeqStepGraph(OperatorGraph):
    """One token of each row and the caches in; logits and the same caches out. The rows of an input are its beams:
    `cache_indirection` (B, beams, L) says whose key and value each reads at each position before `past_length`."""

    keys_are_cached = True

    def self_attention(self, module, query, key, value, attributes):
        past, states = self.past[module.layer_idx], [flat(query), flat(key), flat(value)]
        inputs = [*states, None, None, *past, *self.beams]
        shapes = [states[2].shape, *(buffer.shape for buffer in past)]
        attributes |= {"past_present_share_buffer": 1}
        output, *self.present[module.layer_idx] = operator("DecoderMaskedMultiHeadAttention", inputs, attributes, shapes)
        return output

    def forward(self, input_ids, past_length, num_beams, cache_indirection, encoder_attention_mask, *caches):
        self.beams, self.mask = (past_length, num_beams, cache_indirection), encoder_attention_mask.to(torch.int32)
        own, cross = pairs(caches[: len(caches) // 2]), pairs(caches[len(caches) // 2 :])
        self.past, self.present = own, {}
        cache = EncoderDecoderCache(NewTokensOnly(), DynamicCache(cross))
        cache.is_updated = dict.fromkeys(range(len(cross)), True)
        outputs = self.model.get_decoder()(
            input_ids,
            position_ids=past_length.long()[None],
            past_key_values=cache,
            encoder_hidden_states=cross[0][0],  # only that there is a source is read from it
            use_cache=True,
        )
        return next_logits(self.model, outputs.last_hidden_state), *in_order(self.present)


def next_logits(model, last_hidden_state):
    """(rows, 1, D) -> (rows, V). With the axis of tokens, because the exporter makes a `Gemm` of a product of two matrices,
    which has no int8 twin."""
    return model.lm_head(last_hidden_state)[:, 0]


def pairs(states):
    return list(zip(states[::2], states[1::2], strict=True))


def in_order(present):
    return [states for layer in sorted(present) for states in present[layer]]


def graph_module(model: PreTrainedModel, role: str) -> nn.Module:
    if model.config.is_encoder_decoder:
        return Seq2SeqStepGraph(model) if role == "decoder" else CrossStatesGraph(model)
    return DecoderStepGraph(model) if role == "decoder" else EncoderGraph(model)
