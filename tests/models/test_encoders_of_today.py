"""Parts of newer encoders that formulas of one sentence do not show: long texts, angles of far
positions, caches, attention functions, training."""

import pytest
import torch
import transformers
from messages import raises
from torch import nn
from transformers import StaticCache
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaDecoderForCausalLM,
    VanillaEncoderConfig,
    VanillaEncoderForMaskedLM,
    VanillaEncoderForMultipleChoice,
    VanillaEncoderForQuestionAnswering,
    VanillaEncoderForSequenceClassification,
    VanillaEncoderForTokenClassification,
    VanillaEncoderModel,
)
from vanilla_transformer.layers_vanilla_transformer import (
    VanillaDisentangledPositions,
    position_angles,
)

SMALL = dict(vocab_size=60, d_model=24, d_ff=40, h=4, N=3)
TYPES = ["full_attention", "sliding_attention", "sliding_attention"]
ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
    "sliding_attention": {"rope_theta": 300.0},
}
MODERN = dict(
    position_embedding_type="rotary", rope_parameters=ROPE, layer_types=TYPES, sliding_window=3,
    norm_first=True, skip_first_prenorm=True, embedding_norm=True, gated=True,
    num_key_value_heads=2, use_qk_norm=True, sandwich_norm=True,
)  # fmt: skip
DISENTANGLED = dict(
    position_embedding_type="disentangled", relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
)  # fmt: skip
KINDS = pytest.mark.parametrize("fields", [MODERN, DISENTANGLED], ids=["modern", "disentangled"])


@pytest.mark.parametrize("rope_type, factor", [("default", 1.0), ("linear", 2.5)])
@pytest.mark.parametrize("base", [1000.0, 1e4, 1.6e5, 1e6])
def test_angles_equal_those_of_transformers_up_to_position_8191(base, rope_type, factor):
    rope = {"rope_type": rope_type, "rope_theta": base}
    rope |= {"factor": factor} if rope_type == "linear" else {}
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=8192, rope_parameters=rope
    )
    positions = torch.arange(8192)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    angles = position_angles(positions, 64, base, torch.float32, factor)
    assert torch.equal(angles.cos(), cos[..., :32]) and torch.equal(angles.sin(), sin[..., :32])


@pytest.mark.parametrize("buckets, distance", [(256, 512), (7, 9), (8, 512), (32, 40), (4, 4)])
def test_disentangled_buckets_equal_those_of_transformers(buckets, distance):
    config = VanillaEncoderConfig(
        **SMALL, position_embedding_type="disentangled", relative_attention_num_buckets=buckets,
        relative_attention_max_distance=distance,
    )  # fmt: skip
    _, rows = VanillaDisentangledPositions(config)(torch.arange(1500))
    states = torch.zeros(1, 1500, 1)
    expected = build_relative_position(states, states, buckets, distance)[0]
    assert torch.equal(rows, (expected + buckets).clamp(0, 2 * buckets - 1))


@KINDS
def test_padding_on_both_sides_does_not_change_1000_tokens(fields):
    transformers.set_seed(0)
    model = VanillaEncoderModel(VanillaEncoderConfig(**SMALL, **fields)).eval()
    ids = torch.randint(3, 60, (1, 990))
    with torch.no_grad():
        alone = model(ids).last_hidden_state
        for left in (0, 3, 10):
            padded = nn.functional.pad(ids, (left, 10 - left))
            mask = nn.functional.pad(torch.ones_like(ids), (left, 10 - left))
            states = model(padded, attention_mask=mask).last_hidden_state[:, left:][:, :990]
            torch.testing.assert_close(states, alone, atol=2e-4, rtol=0)


@KINDS
def test_attention_functions_agree_or_are_rejected(fields):
    transformers.set_seed(0)
    config = VanillaEncoderConfig(**SMALL, **fields)
    model = VanillaEncoderModel(config).eval()
    ids = torch.randint(3, 60, (2, 30))
    mask = (torch.arange(30) < torch.tensor([[30], [7]])).long()
    outputs = []
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            outputs.append(model(ids, attention_mask=mask).last_hidden_state[mask.bool()])
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
    if fields is DISENTANGLED:
        config._attn_implementation = "flex_attention"
        with raises(ValueError, seen="flex_attention", expected="sdpa or eager"):
            model(ids)


@pytest.mark.parametrize("fields", [{}, MODERN], ids=["plain", "modern"])
@pytest.mark.parametrize("window", [None, 3])
def test_static_cache_generates_same_tokens(fields, window):
    transformers.set_seed(0)
    fields = fields | {"sliding_window": window}
    if window is None:
        fields |= {"layer_types": None}
    model = VanillaDecoderForCausalLM(VanillaDecoderConfig(**SMALL, **fields)).eval()
    model.generation_config.update(eos_token_id=None, max_new_tokens=8, do_sample=False)
    ids = torch.randint(3, 60, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    expected = model.generate(ids, attention_mask=mask)
    cache = StaticCache(config=model.config, max_cache_len=17)
    got = model.generate(ids, attention_mask=mask, past_key_values=cache)
    assert got.tolist() == expected.tolist() and len(got.unique()) > 4
    kinds = [type(layer).__name__ for layer in cache.layers]
    is_windowed = [layer == "StaticSlidingWindowLayer" for layer in kinds]
    assert is_windowed == [t == "sliding_attention" for t in model.config.types_of_layers(3)]


@pytest.mark.parametrize("checkpointing", [False, True])
@KINDS
def test_training_lowers_loss_and_reaches_every_parameter(fields, checkpointing):
    transformers.set_seed(0)
    dropouts = dict(dropout=0.0, embedding_dropout=0.0)
    model = VanillaEncoderForMaskedLM(VanillaEncoderConfig(**SMALL, **fields, **dropouts)).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    ids = torch.randint(3, 60, (8, 20))
    mask = (torch.arange(20) < torch.tensor([20, 7] * 4)[:, None]).long()
    labels = ids.where(mask.bool(), -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = model(ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        optimizer.step()
        losses.append(loss.item())
    # softmax is the same for keys that all move together
    assert [name for name in idle if "k_proj.bias" not in name] == []
    assert all(torch.tensor(losses).isfinite()) and losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize(
    "head",
    [
        VanillaEncoderForSequenceClassification,
        VanillaEncoderForTokenClassification,
        VanillaEncoderForQuestionAnswering,
        VanillaEncoderForMultipleChoice,
    ],
)
def test_classifier_act_is_linear_map_activation_and_norm(head, pooling):
    transformers.set_seed(0)
    config = VanillaEncoderConfig(**SMALL, classifier_act="gelu", classifier_pooling=pooling)
    model = head(config).eval()
    ids = torch.randint(3, 60, (2, 2, 9) if "Choice" in head.__name__ else (2, 9))
    with torch.no_grad():
        states = model.model(ids.flatten(0, -2)).last_hidden_state
        if head.__name__.endswith(("SequenceClassification", "MultipleChoice")):
            states = states.mean(1) if pooling == "mean" else states[:, 0]
        dense = model.transform.dense
        inner = nn.functional.gelu(states @ dense.weight.T + dense.bias)
        last = [m for m in model.children() if isinstance(m, nn.Linear)][0]
        expected = last(nn.functional.layer_norm(inner, (24,), eps=config.layer_norm_eps))
        got = model(ids)[0]
    expected = expected[..., 0] if "Question" in head.__name__ else expected
    torch.testing.assert_close(got.reshape(expected.shape), expected)


def test_classifier_and_token_transform_exclude_each_other():
    with raises(ValueError, seen=("classifier_act='gelu'", "token_transform_act='relu'")):
        VanillaEncoderConfig(classifier_act="gelu", token_transform_act="relu")
