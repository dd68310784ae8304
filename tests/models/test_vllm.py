"""Tests of the contract of vLLM's Transformers backend (its page "Supported models", and its
base.py).

The backend registers an attention function and passes all requests as one row of tokens, whose
positions restart with each request. The function gets attention objects of vLLM and returns
(tokens, heads * width), without a batch dimension.
"""

import json
import re

import pytest
import torch
from messages import raises
from models import BASE, GENERATIVE, HEADS, build, short_name, tokens
from torch import nn
from transformers import AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vanilla_transformer import VanillaDecoderModel, VanillaEncoderModel

LENGTHS = (5, 1, 7)
MODELS = [VanillaEncoderModel, VanillaDecoderModel]
every_model = pytest.mark.parametrize("model_class", MODELS, ids=short_name)


class Instance:
    """A stand-in for vLLM's attention of one layer.

    Each request attends only to itself, and only to earlier tokens if `is_causal`.
    """

    def __init__(self, is_causal):
        self.is_causal = is_causal

    def forward(self, query, key, value, scale):
        parts = [
            tensor.unflatten(-1, (HEADS, -1)).transpose(0, 1).split(LENGTHS, 1)
            for tensor in (query, key, value)
        ]
        attend = nn.functional.scaled_dot_product_attention
        result = [
            attend(*part, is_causal=self.is_causal, scale=scale)
            for part in zip(*parts, strict=True)
        ]
        return torch.cat(result, 1).transpose(0, 1).flatten(1)


def attention(
    module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs
):
    flat = (tensor.transpose(1, 2).reshape(query.shape[-2], -1) for tensor in (query, key, value))
    return attention_instances[module.layer_idx].forward(*flat, scaling), None


@pytest.fixture
def vllm():
    ALL_ATTENTION_FUNCTIONS.register("vllm", attention)
    yield
    del ALL_ATTENTION_FUNCTIONS._global_mapping["vllm"]


@every_model
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "none"])
@torch.no_grad()
def test_requests_in_one_row_match_separate_requests(vllm, model_class, positions):
    # vLLM pads values to the width of keys
    model = build(model_class, position_embedding_type=positions, d_v=4)
    requests = [tokens(1, length) for length in LENGTHS]
    expected = torch.cat([model(ids)[0] for ids in requests], 1)
    model.set_attn_implementation("vllm")
    actual = model(
        input_ids=torch.cat(requests, 1),
        inputs_embeds=None,
        use_cache=False,
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
        attention_instances={
            i: Instance(model_class is VanillaDecoderModel) for i in range(len(model.layers))
        },
        return_dict=False,
    )
    torch.testing.assert_close(actual[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes, seen",
    [
        ({"position_embedding_type": "relative", "d_v": 4}, ("relative",)),
        ({"d_k": 4, "d_v": 6}, ("value_head_dim", 6)),
    ],
    ids=["bias", "wide values"],
)
@every_model
def test_model_features_that_vllm_ignores_raise(vllm, model_class, changes, seen):
    model = build(model_class, **changes)
    model.set_attn_implementation("vllm")
    with raises(ValueError, seen=("vllm", *seen)):
        model(tokens(1))


@pytest.mark.parametrize("model_class", [*BASE[:2], *GENERATIVE], ids=short_name)
def test_checkpoint_names_base_model_and_supports_attention_backend(model_class, tmp_path):
    build(model_class).save_pretrained(tmp_path)
    assert "AutoModel" in json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert type(AutoModel.from_pretrained(tmp_path)).is_backend_compatible()


def test_is_causal_distinguishes_encoder_from_decoder():
    """vLLM treats a model as an encoder if `is_causal` of any module is False."""
    result = {
        short_name(kind): {getattr(module, "is_causal", True) for module in build(kind).modules()}
        for kind in MODELS
    }
    assert False in result["EncoderModel"] and result["DecoderModel"] == {True}


def test_encoder_sliding_window_raises(vllm):
    model = build(VanillaEncoderModel, sliding_window=3, d_v=4)
    model.set_attn_implementation("vllm")
    with raises(ValueError, seen=("sliding_window", 3), expected="vllm"):
        model(tokens(1))


@every_model
def test_embeddings_are_replaceable_and_tp_plan_shards_every_linear_layer(model_class):
    model = build(model_class)
    assert model.get_decoder() is model  # vLLM compiles this module
    model.set_input_embeddings(
        new := nn.Embedding(model.config.vocab_size, model.config.hidden_size)
    )
    assert model.get_input_embeddings() is new
    styles = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            styles[name] = next(
                (style for plan, style in model.tp_plan.items() if re.match(plan, name)), None
            )
    into = ("q_proj", "k_proj", "v_proj", "up_proj")
    assert (
        styles == {name: "colwise" if name.endswith(into) else "rowwise" for name in styles}
        and len(styles) == 12
    )
