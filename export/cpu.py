"""The cpu target: the modeling code traced into onnxruntime's own attention operators, with caches written in place.

Self-attention of a decoder becomes `GroupQueryAttention` over buffers of fixed size, everything else `MultiHeadAttention`.
The encoder of a seq2seq model ends with the keys and values of cross-attention, computed once for a whole generation; the
rows of the decoder that continue one input (its beams) read them as queries of one batch entry, so they are never copied.
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
    has_decoder = config.model_type != "vanilla-encoder"
    problems = {"position_embedding_type": config.position_embedding_type == "relative"}
    problems["sliding_window"] = config.sliding_window is not None and config.model_type != "vanilla-decoder"
    problems["value_head_dim"] = has_decoder and config.value_head_dim != config.head_dim
    problems["head_dim"] = has_decoder and config.head_dim % 8 != 0
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
        (output,) = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::MultiHeadAttention",
            [queries, *states, None, self.mask],
            attrs=attributes,
            dtypes=[query.dtype],
            shapes=[(*queries.shape[:2], query.shape[1] * value.shape[3])],
            version=1,
        )
        return output

    def self_attention(self, module, query, key, value, attributes):
        attributes |= {"kv_num_heads": attributes["num_heads"], "local_window_size": module.sliding_window or -1}
        past = self.past[module.layer_idx]
        output, *self.present[module.layer_idx] = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            [flat(query), flat(key), flat(value), *past, self.last_position, self.total_length],
            attrs=attributes,
            dtypes=[query.dtype] * 3,
            shapes=[flat(query).shape, *(states.shape for states in past)],
            version=1,
        )
        return output


def flat(states):
    """(B, H, T, d) -> (B, T, H * d)."""
    return states.transpose(1, 2).flatten(2)


class EncoderGraph(OperatorGraph):
    """Tokens, their mask and their types in, all outputs of `model` out."""

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        self.mask = attention_mask.to(torch.int32)
        return self.model(input_ids, token_type_ids=token_type_ids).to_tuple()


class CrossStatesGraph(OperatorGraph):
    """Tokens and their mask in; for each decoder layer, keys and values of cross-attention out."""

    def forward(self, input_ids, attention_mask):
        self.mask = attention_mask.to(torch.int32)
        hidden_states = self.model.get_encoder()(input_ids).last_hidden_state
        attentions = (layer.cross_attn for layer in self.model.get_decoder().layers)
        pairs = (attention.keys_and_values(None, hidden_states, None, None) for attention in attentions)
        return tuple(states for pair in pairs for states in pair)


class NewTokensOnly(DynamicCache):
    """Keys and values of the new tokens pass through: the operator itself puts them into its buffers."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return key_states, value_states

    def get_seq_length(self, layer_idx=0):
        return 0


class StepGraph(OperatorGraph):
    """New tokens and the caches in; logits of each row's last real token and the same caches out."""

    keys_are_cached = True

    def forward(self, input_ids, position_ids, last_position, total_length, *caches):
        self.last_position, self.total_length, self.present = last_position, total_length, {}
        decoder = self.model.get_decoder()
        layers, cache, source = len(decoder.layers), NewTokensOnly(), {}
        if self.model.config.is_encoder_decoder:
            self.mask, caches = caches[0].to(torch.int32), caches[1:]
            cross = caches[2 * layers :]
            cache = EncoderDecoderCache(cache, DynamicCache(list(zip(cross[::2], cross[1::2], strict=True))))
            cache.is_updated = dict.fromkeys(range(layers), True)
            source = {"encoder_hidden_states": cross[0]}  # only that there is a source is read from it
        self.past = list(zip(caches[: 2 * layers : 2], caches[1 : 2 * layers : 2], strict=True))
        outputs = decoder(input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True, **source)
        # A prompt has each row's last token at `last_position`; a later step has one token only.
        last = torch.clamp(last_position.long(), max=input_ids.shape[1] - 1)
        rows = torch.arange(input_ids.shape[0], device=input_ids.device)
        # With an axis of tokens, (rows, 1, D): the exporter makes a `Gemm` of a product of matrices, which has no int8 twin.
        logits = self.model.lm_head(outputs.last_hidden_state[rows, last][:, None])
        return logits[:, 0], *(states for i in range(layers) for states in self.present[i])


def graph_module(model: PreTrainedModel, role: str) -> nn.Module:
    if role == "decoder":
        return StepGraph(model)
    return CrossStatesGraph(model) if model.config.is_encoder_decoder else EncoderGraph(model)
