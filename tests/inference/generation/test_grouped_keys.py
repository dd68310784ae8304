"""Tests of generation over caches of grouped keys, against transformers' own Qwen3."""

import pytest
import torch
from generation_pairs import EOS, PAD, VOCABULARY, Pair, prompts
from transformers import Qwen3Config, Qwen3ForCausalLM

from vanilla_transformer.conversion import convert
from vanilla_transformer_export import export
from vanilla_transformer_export.specs.caches import cache_specs

# 6 query heads of width 8 share 2 heads of keys; together they are not as wide as the states.
SHAPE = dict(
    vocab_size=VOCABULARY, hidden_size=36, intermediate_size=40, num_attention_heads=6,
    num_key_value_heads=2, head_dim=8, num_hidden_layers=3, max_position_embeddings=512,
    tie_word_embeddings=True, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
)  # fmt: skip
# the second and third layer read 4 tokens
WINDOWS = dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)
KINDS = {"all tokens": {}, "windows": WINDOWS}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return a function from a kind and a target to a `Pair` of transformers' model and an export
    of its conversion."""
    pairs = {}

    def make(kind, target):
        if (kind, target) not in pairs:
            folder = tmp_path_factory.mktemp("qwen3")
            model = qwen3(kind)
            model.save_pretrained(folder / "theirs")
            convert(folder / "theirs", folder / "ours")
            export(folder / "ours", folder / target, target=target)
            pairs[kind, target] = Pair(model, folder / target)
        return pairs[kind, target]

    return make


def qwen3(kind):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, **KINDS[kind])).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.25)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["portable", "cpu"])
@pytest.mark.parametrize("beams", [1, 3])
def test_tokens_are_those_of_transformers(pair, kind, target, beams):
    ids, mask = prompts("causal", lengths=(9, 1, 4, 6))
    options = dict(max_new_tokens=20, num_beams=beams, num_return_sequences=beams)
    pair(kind, target).check(ids, mask, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_caches_that_grow_keep_keys_of_layers_without_a_window(pair, kind, target):
    ids, mask = prompts("causal", lengths=(270, 3))
    options = dict(max_new_tokens=100, eos_token_id=[])
    pair(kind, target).check(ids, mask, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_row_has_the_bits_that_it_has_alone(pair, kind, beams):
    runtime = pair(kind, "cpu").runtime
    ids, mask = prompts("causal", lengths=(9, 2, 5))
    options = dict(max_new_tokens=8, num_beams=beams, eos_token_id=[])
    together, scores = runtime.generate_with_scores(ids, mask, **options)
    for row, (tokens, score) in enumerate(zip(together, scores)):
        [alone], [score_alone] = runtime.generate_with_scores(
            ids[row : row + 1], mask[row : row + 1], **options
        )
        assert alone.tolist() == tokens.tolist() and score_alone == score


def test_caches_have_the_heads_of_keys(pair):
    config = pair("all tokens", "cpu").runtime.config
    shapes = {tensor.shape for tensor in cache_specs(config, "present", "rows", {"": "length"})}
    assert shapes == {("rows", 2, "length", 8)}
