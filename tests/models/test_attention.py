"""Tests of attention: padding, packed sequences, and the arguments of attention functions."""

import pytest
import torch
from messages import raises
from models import (
    ALL,
    BASE,
    D_K,
    D_V,
    FLASH,
    HEADS,
    LAYERS,
    LENGTH,
    LENGTHS,
    POSITIONS,
    RELATIVE,
    SOURCE_MASK,
    STRONG,
    TARGET_MASK,
    D,
    assert_same,
    attentions,
    build,
    inputs,
    is_pair,
    over,
    packed,
    padded,
    positions,
    result,
    tokens,
    use_attention,
)
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vanilla_transformer import (
    VanillaDecoderForCausalLM,
    VanillaDecoderModel,
    VanillaEncoderForMaskedLM,
    VanillaEncoderModel,
    VanillaSeq2SeqForConditionalGeneration,
    VanillaSeq2SeqModel,
)

# test_reference.py tests each kind of positions. These two act in different places.
FEW = ["learned", "relative, window"]
few_positions = pytest.mark.parametrize("changes", [POSITIONS[name] for name in FEW], ids=FEW)


# ------------------------------------------------------------------------------------------ padding


@pytest.mark.parametrize("side", ["left", "right"])
@few_positions
@over([VanillaEncoderForMaskedLM, VanillaDecoderForCausalLM])
@attentions
def test_padded_row_equals_row_alone(model_class, side, changes, attention):
    model = build(model_class, attention, **STRONG, **changes)
    rows = [tokens(1, length)[0] for length in LENGTHS]
    ids, mask, position_ids = padded(rows, side)
    logits = model(ids, mask, **dict(position_ids=position_ids) if side == "left" else {}).logits
    for row, got, real in zip(rows, logits, mask.bool(), strict=True):
        assert_same(got[real], model(row[None]).logits[0])


@pytest.mark.parametrize("side", ["left", "right"])
@few_positions
@attentions
def test_padded_target_equals_target_alone(side, changes, attention):
    model = build(VanillaSeq2SeqForConditionalGeneration, attention, **STRONG, **changes)
    sources, targets = (
        [tokens(1, length)[0] for length in lengths] for lengths in (LENGTHS, LENGTHS[::-1])
    )
    source, source_mask, _ = padded(sources, "right")
    target, target_mask, positions = padded(targets, side)
    given = dict(decoder_position_ids=positions) if side == "left" else {}
    logits = model(source, source_mask, target, target_mask, **given).logits
    for row, answer, got, real in zip(sources, targets, logits, target_mask.bool(), strict=True):
        assert_same(got[real], model(row[None], decoder_input_ids=answer[None]).logits[0])


@pytest.mark.parametrize(
    "model_class, dtype",
    [(model_class, torch.float32) for model_class in ALL]
    + [(model_class, dtype) for model_class in BASE for dtype in (torch.float16, torch.bfloat16)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@attentions
def test_row_of_padding_is_finite_and_does_not_affect_other_rows(model_class, attention, dtype):
    model = build(model_class, attention).to(dtype)
    given = inputs(model)
    mask = torch.ones_like(given["input_ids"])
    mask[1] = 0
    masks = dict(attention_mask=mask)
    if is_pair(model):
        masks["decoder_attention_mask"] = mask[:, : given["decoder_input_ids"].shape[1]]
    got = result(model(**given, **masks))
    others = [0, 2]
    alone = result(model(**{name: value[others] for name, value in (given | masks).items()}))
    assert got.isfinite().all()
    assert_same(got[others], alone, 1e-5 if dtype == torch.float32 else 2e-2)


@few_positions
@over(BASE)
@attentions
def test_row_of_padding_is_finite_in_float16(model_class, attention, changes):
    model = build(model_class, attention, **STRONG, **changes).half()
    mask = torch.ones(3, LENGTH, dtype=int)
    mask[1] = 0
    masks = dict(attention_mask=mask) | (
        dict(decoder_attention_mask=mask[:, :5]) if is_pair(model) else {}
    )
    assert result(model(**inputs(model), **masks)).isfinite().all()


@attentions
def test_row_of_padding_with_very_negative_scores_is_finite_in_float16(attention):
    model = build(VanillaEncoderModel, attention)
    for layer in model.layers:
        layer.self_attn.q_proj.bias.data.fill_(8)
        # every score is below -16, half the last step of float16
        layer.self_attn.k_proj.bias.data.fill_(-8)
    mask = torch.ones(3, LENGTH, dtype=int)
    mask[1] = 0
    assert model.half()(tokens(), attention_mask=mask).last_hidden_state.isfinite().all()


# --------------------------------------------------------------------------------- packed sequences


@pytest.mark.parametrize("add_cross_attention", [False, True], ids=["decoder", "with a source"])
@positions
@attentions
def test_packed_sequences_equal_sequences_alone(attention, changes, add_cross_attention):
    model = build(
        VanillaDecoderForCausalLM,
        attention,
        **STRONG,
        **changes,
        add_cross_attention=add_cross_attention,
    )
    rows = [tokens(1, length)[0] for length in (5, 1, 7, 2)]
    source = dict(encoder_hidden_states=torch.randn(1, 4, D)) if add_cross_attention else {}
    ids, position_ids = packed(rows)
    for given in (ids, ids.expand(2, -1)):  # one row, or a batch of such rows
        expanded = {name: states.expand(len(given), -1, -1) for name, states in source.items()}
        logits = model(
            given, position_ids=position_ids.expand(len(given), -1), use_cache=False, **expanded
        ).logits
        for got in logits:
            alone = [model(row[None], use_cache=False, **source).logits[0] for row in rows]
            assert_same(got, torch.cat(alone))


@positions
def test_packed_targets_equal_targets_alone(changes):
    model = build(VanillaSeq2SeqForConditionalGeneration, **STRONG, **changes)
    source, rows = tokens(1), [tokens(1, length)[0] for length in (5, 1, 7, 2)]
    ids, position_ids = packed(rows)
    got = model(
        source, decoder_input_ids=ids, decoder_position_ids=position_ids, use_cache=False
    ).logits[0]
    assert_same(
        got, torch.cat([model(source, decoder_input_ids=row[None]).logits[0] for row in rows])
    )


# ----------------------------------------------------------------- arguments of attention functions


@pytest.fixture
def spy(monkeypatch):
    """Return a function that replaces an attention function and returns the list of its calls."""

    def replace_function(name):
        seen = []

        def attend(module, query, key, value, attention_mask, **given):
            seen.append(
                dict(module=module, query=query, key=key, value=value, mask=attention_mask, **given)
            )
            return query.new_zeros(
                *query.shape[:1], query.shape[2], query.shape[1], value.shape[-1]
            ), None

        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, attend)
        return seen

    # flex attention masks are not compiled here
    with torch.compiler.set_stance("force_eager"):
        yield replace_function


def shapes(call):
    return [tuple(call[name].shape) for name in ("query", "key", "value")]


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(
    "name, d_v", [("flash_attention_2", D_K), ("flash_attention_3", D_K), ("sdpa", D_V)]
)
def test_attention_function_receives_heads_scale_dropout_and_window(spy, name, d_v, window):
    """Shapes are (B, H, T, d_k), the scale is that of equation 1, and evaluation has no dropout.

    These functions count a window as one more than the keys before the query.
    """
    model = use_attention(
        build(VanillaSeq2SeqModel, d_v=d_v, attention_dropout=0.25, sliding_window=window), name
    )
    seen = spy(name)
    model(tokens(), decoder_input_ids=tokens(3, 5))
    encoder, decoder, cross = seen[:LAYERS], seen[LAYERS::2], seen[LAYERS + 1 :: 2]
    assert len(encoder) == len(decoder) == len(cross) == LAYERS
    for calls, queries, keys, is_causal, size in (
        (encoder, 6, 6, False, None if window is None else window + 1),
        (decoder, 5, 5, True, window),
        (cross, 5, 6, False, None),
    ):
        for call in calls:
            assert shapes(call) == [
                (3, HEADS, queries, D_K),
                (3, HEADS, keys, D_K),
                (3, HEADS, keys, d_v),
            ]
            assert call["module"].is_causal is is_causal and call.get("is_causal") is None
            assert call["scaling"] == pytest.approx(D_K**-0.5) and call["dropout"] == 0.0
            assert call["sliding_window"] == size
            assert "position_bias" not in call
    seen.clear()
    model.train()(tokens(), decoder_input_ids=tokens(3, 5))
    assert {call["dropout"] for call in seen} == {0.25}


def test_flash_attention_receives_2d_mask_or_none_without_padding(spy):
    model = use_attention(build(VanillaSeq2SeqModel, **FLASH), "flash_attention_2")
    seen = spy("flash_attention_2")
    source, target = tokens(), tokens(3, 5)
    sdpa_calls = spy("sdpa")
    model(source, SOURCE_MASK, target, TARGET_MASK)
    masks = [call["mask"].tolist() for call in seen]
    assert masks[:LAYERS] == [SOURCE_MASK.bool().tolist()] * LAYERS
    assert masks[LAYERS:] == [TARGET_MASK.bool().tolist()] * LAYERS
    # transformers drops queries by the mask of the keys, so cross-attention with a mask uses sdpa.
    assert [call["mask"].tolist() for call in sdpa_calls] == [
        SOURCE_MASK[:, None, None].bool().tolist()
    ] * LAYERS
    seen.clear()
    model(source, torch.ones_like(SOURCE_MASK), target)
    assert [call["mask"] for call in seen] == [None] * 3 * LAYERS


@pytest.mark.parametrize("name", ["flash_attention_2", "sdpa"])
def test_only_decoder_self_attention_receives_position_ids(spy, name):
    """Position ids mark the start of packed sequences, which a source does not have."""
    model = use_attention(build(VanillaSeq2SeqModel, **FLASH), name)
    seen = spy(name)
    where = torch.tensor([[0, 1, 2, 0, 1]])
    model(tokens(1), decoder_input_ids=tokens(1, 5), decoder_position_ids=where, use_cache=False)
    encoder, decoder, cross = seen[:LAYERS], seen[LAYERS::2], seen[LAYERS + 1 :: 2]
    assert all(torch.equal(call["position_ids"], where) for call in decoder)
    assert all(call.get("position_ids") is None for call in [*encoder, *cross])


@pytest.mark.parametrize("name", ["flash_attention_2", "sdpa"])
@pytest.mark.parametrize("window", [None, 3])
def test_cached_step_receives_one_query_and_visible_keys(spy, name, window):
    model = use_attention(build(VanillaDecoderModel, **FLASH, sliding_window=window), name)
    seen = spy(name)
    cache = model(tokens(3, 5), use_cache=True).past_key_values
    seen.clear()
    model(tokens(3, 1), past_key_values=cache, use_cache=True)
    assert [shapes(call)[:2] for call in seen] == [
        [(3, HEADS, 1, D_K), (3, HEADS, window or 6, D_K)]
    ] * LAYERS
    assert {call["position_ids"].tolist()[0][0] for call in seen} == {5}


@over(BASE)
def test_only_self_attention_with_relative_positions_receives_position_bias(spy, model_class):
    name = "sdpa"
    seen = spy(name)
    for changes in (RELATIVE, POSITIONS["rotary"]):
        model = use_attention(build(model_class, **changes), name)
        seen.clear()
        model(**inputs(model))
        cross = [
            call
            for call in seen
            if call["module"].is_causal is False and model_class is VanillaSeq2SeqModel
        ][LAYERS:]
        assert len(cross) == (LAYERS if model_class is VanillaSeq2SeqModel else 0)
        for call in seen:
            has_bias = changes is RELATIVE and not any(call is other for other in cross)
            assert ("position_bias" in call) == has_bias
            if has_bias:
                queries, keys = call["query"].shape[2], call["key"].shape[2]
                assert call["position_bias"].shape[1:] == (HEADS, queries, keys)
                assert call["position_bias"].shape[0] in (1, 3)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 2])
def test_flex_attention_receives_block_masks(spy, window, padded):
    model = use_attention(build(VanillaSeq2SeqModel, sliding_window=window), "flex_attention")
    seen = spy("flex_attention")
    masks = dict(attention_mask=SOURCE_MASK, decoder_attention_mask=TARGET_MASK) if padded else {}
    model(tokens(), decoder_input_ids=tokens(3, 5), **masks)
    assert len(seen) == 3 * LAYERS
    for call in seen:
        assert isinstance(call["mask"], BlockMask)
        assert call["mask"].shape == (3, 1, call["query"].shape[2], call["key"].shape[2])


FLASH_NAMES = [
    "flash_attention_2",
    "flash_attention_3",
    "paged|flash_attention_2",
    "kernels-community/flash-attn2",
]


@pytest.mark.parametrize("name", FLASH_NAMES)
@over(BASE)
def test_flash_attention_rejects_values_wider_than_keys(model_class, name):
    model = use_attention(build(model_class), name)
    with raises(ValueError, seen=("head_dim", D_K, "value_head_dim", D_V)) as error:
        model(**inputs(model))
    assert str(error.value).startswith(name)


@pytest.mark.parametrize("name", [*FLASH_NAMES, "flex_attention"])
@over(BASE)
def test_flash_and_flex_attention_reject_relative_positions(model_class, name):
    model = use_attention(build(model_class, **FLASH, **RELATIVE), name)
    with raises(ValueError, seen=("position_embedding_type", "relative")) as error:
        model(**inputs(model))
    assert str(error.value).startswith(name)
