"""The cuda target: caches of fixed size that stay on the device, and shapes that never change from one step to the next, so
that a step is replayed as one CUDA graph.

The cache of each input has slots. A prompt fills the first of them, read by all beams; then each step fills one for each
beam. `visible` says which slots a token reads: those of its own history. Choosing other beams changes that table only.
"""

import copy

import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.activations import FastGELUActivation, NewGELUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vanilla_transformer.layers_vanilla_transformer import eager_attention_forward

from ...runtime.options import as_list
from ..operators import (
    CrossStatesGraph,
    NewTokensOnly,
    OperatorGraph,
    by_layer,
    distance_biases,
    flat,
    gather,
    kv_pairs,
    operator,
    operator_sequence_graph,
    scatter,
)
from ..sequences import READS_AT_END, READS_CHOICES, READS_IMAGES, pair
from .beams import BeamSearchGraph

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FLOAT16_MAX = torch.finfo(torch.float16).max
NUM_STEP_INPUTS = 8  # what a step takes before the encoder's mask and the caches
MASK_VALUE = -30000.0  # added to the scores of slots that are not read: half of what float16 holds, so no sum overflows


class SlotStepGraph(OperatorGraph):
    """Tokens of each input and the caches in; the logits after some of the tokens, the same caches, and all that the next step
    reads if each of these is followed by its likeliest token.

    input_ids, position_ids (B, T); count (B,), which is T; first_slot (B,), where the keys and values of the first of them go,
    the others after it; visible (B, T, slots); logits_of (B, N), whose logits are returned; slot_numbers (slots,), 0 and on;
    tokens (B, 1, slots, 1), what each slot was computed from; caches (B, H, slots, d).

    What is returned may lie where it was read from: each of it follows from the likeliest tokens, so comes after all reading.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.biases = distance_biases(model)

    def self_attention(self, module, query, key, value, attributes):
        past = self.past[module.layer_idx]
        present = [scatter(*pair, self.first_slot) for pair in zip(past, (key, value), strict=True)]
        self.present[module.layer_idx] = present
        inputs = [flat(query), *present, None, None, self.bias]
        shape = (query.shape[0], query.shape[2], query.shape[1] * value.shape[3])
        return operator("MultiHeadAttention", inputs, attributes, [shape])[0]

    def step(self, new, caches, **source):
        input_ids, position_ids, count, self.first_slot, visible, logits_of, slot_numbers, tokens = new
        self.past = kv_pairs(caches)
        self.present = {}
        self.bias = self.scores_bias(visible, caches[0].dtype)
        outputs = self.model.get_decoder()(input_ids, position_ids=position_ids, use_cache=True, **source)
        logits = self.model.lm_head(gather(outputs.last_hidden_state, logits_of)).float()

        best = logits.argmax(dim=-1)
        ones = (best >= 0).long()
        slot = self.first_slot + count - 1 + ones[:, 0]
        slots = slot[:, None] + ones.cumsum(dim=1) - 1  # of the likeliest tokens
        following = (
            best,
            gather(position_ids, logits_of) + ones,
            slot,
            gather(visible, logits_of) | (slot_numbers == slots[..., None]),
            scatter(tokens, best[:, None, :, None], slot),
        )
        return logits, *following, *by_layer(self.present)

    def scores_bias(self, visible, dtype):
        """What is added to the scores, (B, 1 or H, T, slots). The slots of a token's history are in its order."""
        if self.biases is None:
            return torch.where(visible[:, None], 0.0, MASK_VALUE).to(dtype)
        return torch.where(visible[:, None], self.biases(count_later(visible)), MASK_VALUE)


class DecoderGraph(SlotStepGraph):
    def forward(self, *inputs):
        return self.step(inputs[:NUM_STEP_INPUTS], inputs[NUM_STEP_INPUTS:], past_key_values=NewTokensOnly())


class Seq2SeqDecoderGraph(SlotStepGraph):
    """With the encoder's mask (B, S), and after the caches the keys and values of cross-attention (B, H, S, d)."""

    keys_are_cached = True

    def forward(self, *inputs):
        new = inputs[:NUM_STEP_INPUTS]
        self.mask = inputs[NUM_STEP_INPUTS].to(torch.int32)
        caches = inputs[NUM_STEP_INPUTS + 1 :]
        own = caches[: len(caches) // 2]
        cross = kv_pairs(caches[len(caches) // 2 :])
        cache = EncoderDecoderCache(NewTokensOnly(), DynamicCache(cross))
        cache.is_updated = dict.fromkeys(range(len(cross)), True)
        # That there is a source is all that is read of its states.
        return self.step(new, own, past_key_values=cache, encoder_hidden_states=cross[0][0])


def count_later(visible: torch.Tensor) -> torch.Tensor:
    """For each slot how many after it are visible, (..., slots): how far before the token that reads them it stands."""
    [later] = torch.onnx.ops.symbolic_multi_out(
        "CumSum",
        [visible.long(), torch.tensor(-1)],
        attrs={"reverse": 1, "exclusive": 1},
        dtypes=[torch.int64],
        shapes=[visible.shape],
        version=14,
    )
    return later


@torch.no_grad()
def overflow(model: PreTrainedModel) -> str | None:
    """Where `model`, in float32, makes a number of random tokens or images that float16 cannot hold; `None` if nowhere. Looked
    at are what each module returns and the scores of attention, before the softmax."""
    problems = []

    def check(name, states):
        if isinstance(states, torch.Tensor) and states.is_floating_point():
            largest = states.abs().max().item()
            if not largest <= FLOAT16_MAX / 2:  # as far from it again, for tokens that were not tried
                problems.append(f"{name or 'the model'} reaches {largest:.3g}")

    def scores(module, query, key, value, mask, scaling, **kwargs):
        check(f"{names[module]}, scores", query @ key.transpose(2, 3) * scaling)
        return eager_attention_forward(module, query, key, value, mask, scaling, **kwargs)

    names = {module: name for name, module in model.named_modules()}
    hooks = [module.register_forward_hook(lambda module, inputs, output: check(names[module], output)) for module in names]
    ALL_ATTENTION_FUNCTIONS.register("measured", scores)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("measured")
    model(**random_inputs(model))
    model.set_attn_implementation(implementation)
    for hook in hooks:
        hook.remove()
    return problems[0] if problems else None


def random_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    name, config = type(model).__name__, model.config
    if name in READS_IMAGES:
        return {"pixel_values": torch.randn(4, config.num_channels, *pair(config.image_size), generator=generator)}
    ids = torch.randint(config.vocab_size, (4, min(64, config.max_position_embeddings)), generator=generator)
    ids = ids[:, None].expand(-1, 2, -1) if name == READS_CHOICES else ids
    if name == READS_AT_END:  # which reads the state at an end token
        ids[:, -1] = as_list(config.eos_token_id)[0]
    return {"input_ids": ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}


def cast_for_export(model: PreTrainedModel, activations: str) -> PreTrainedModel:
    """A copy of `model` in the type of `activations`, to be traced. Where it writes out GELU's approximation by a tanh, the
    copy has torch's own, which is one operator; the written one takes a `Pow`, which the CUDA provider lacks in bfloat16."""
    model = copy.deepcopy(model).to(DTYPES[activations])
    for module in model.modules():
        for name, activation in module.named_children():
            if isinstance(activation, NewGELUActivation | FastGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))
    return model


def trace_module(model: PreTrainedModel, role: str) -> nn.Module:
    if role == "beams":
        return BeamSearchGraph()
    if model.config.is_encoder_decoder:
        return Seq2SeqDecoderGraph(model) if role == "decoder" else CrossStatesGraph(model)
    return DecoderGraph(model) if role == "decoder" else operator_sequence_graph(model)
