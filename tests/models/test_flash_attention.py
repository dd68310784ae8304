"""Tests of FlashAttention and flex attention, with stand-ins for their kernels."""

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash_utils
from models import (
    BASE,
    FLASH,
    LENGTH,
    LENGTHS,
    POSITIONS,
    SOURCE_MASK,
    STRONG,
    TARGET_MASK,
    assert_same,
    build,
    inputs,
    is_pair,
    over,
    packed,
    padded,
    tokens,
    use_attention,
)

from vanilla_transformer import (
    VanillaDecoderForCausalLM,
    VanillaDecoderModel,
    VanillaEncoderModel,
    VanillaSeq2SeqModel,
)

# ----------------------------------------------------------------- arguments of attention functions


FLASH_POSITIONS = {name: changes for name, changes in POSITIONS.items() if "relative" not in name}
flash_positions = pytest.mark.parametrize(
    "changes", FLASH_POSITIONS.values(), ids=list(FLASH_POSITIONS)
)


# --------------------------------------------------------------------------- FlashAttention results


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """Compute attention as the documentation of flash-attn 2 describes its kernel. q is (B, T, H,
    d), k and v are (B, S, H, d): "the causal mask is aligned to the bottom right corner", "query at
    position i will only attend to keys between [i + seqlen_k - seqlen_q - window_size[0], i +
    seqlen_k - seqlen_q + window_size[1]] inclusive"."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and dropout_p == 0
    i = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    j = torch.arange(k.shape[1])
    left, right = (length if length >= 0 else k.shape[1] + q.shape[1] for length in window_size)
    seen = (j >= i - left) & (j <= i + right) & ((j <= i) if causal else True)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * softmax_scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("bhts,bshd->bthd", weights, v)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1),
):  # fmt: skip
    """Compute attention of concatenated rows (total, H, d). Row n is from cu_seqlens[n] to
    cu_seqlens[n + 1]."""
    rows = []
    for first_q, last_q, first_k, last_k in zip(
        cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:]
    ):
        q_row, k_row, v_row = q[first_q:last_q], k[first_k:last_k], v[first_k:last_k]
        assert len(q_row) <= max_seqlen_q and len(k_row) <= max_seqlen_k
        rows.append(
            flash_attn_func(
                q_row[None], k_row[None], v_row[None], dropout_p, softmax_scale, causal, window_size
            )[0]
        )
    return torch.cat(rows)


@pytest.fixture
def flash(monkeypatch):
    """Return a function that builds a model with FlashAttention and its copy with eager attention.

    FlashAttention of transformers uses the kernels above.
    """
    kernels = (
        flash_attn_func,
        flash_attn_varlen_func,
        None,
        flash_utils._pad_input,
        flash_utils._unpad_input,
    )
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *_, **__: kernels)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_pad_fn", "_unpad_fn"):
        monkeypatch.setattr(flash_utils, name, None)

    def pair(model_class, **changes):
        model = build(model_class, "eager", **FLASH, **changes)
        return use_attention(build_like(model), "flash_attention_2"), model

    return pair


def build_like(model):
    copy = type(model)(type(model.config)(**model.config.to_dict())).eval()
    copy.load_state_dict(model.state_dict())
    return copy


@pytest.mark.parametrize("padding", [None, "right", "left"])
@flash_positions
@over([VanillaEncoderModel, VanillaDecoderModel])
def test_flash_attention_matches_eager_attention(flash, model_class, changes, padding):
    model, eager = flash(model_class, **changes)
    rows = [tokens(1, length)[0] for length in (LENGTHS if padding else [LENGTH] * 3)]
    ids, mask, position_ids = padded(rows, padding or "right")
    given = dict(attention_mask=mask) if padding else {}
    if padding == "left":
        given |= dict(position_ids=position_ids)
    got, expected = (m(ids, **given).last_hidden_state for m in (model, eager))
    assert_same(got[mask.bool()], expected[mask.bool()])


# the source has 6 tokens
@pytest.mark.parametrize("length", [1, 5, 6], ids=lambda length: f"target of {length}")
@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded source"])
@pytest.mark.parametrize(
    "changes", [{}, POSITIONS["rotary, window"]], ids=["sinusoidal", "rotary, window"]
)
def test_seq2seq_flash_attention_matches_eager_attention(flash, changes, masked, length):
    model, eager = flash(VanillaSeq2SeqModel, **changes)
    given = dict(input_ids=tokens(), decoder_input_ids=tokens(3, length))
    given |= dict(attention_mask=SOURCE_MASK) if masked else {}
    assert_same(model(**given).last_hidden_state, eager(**given).last_hidden_state)


def test_seq2seq_flash_attention_with_padded_target_matches_eager_attention(flash):
    model, eager = flash(VanillaSeq2SeqModel)
    given = dict(
        input_ids=tokens(), decoder_input_ids=tokens(3, 5), decoder_attention_mask=TARGET_MASK
    )
    got, expected = (m(**given).last_hidden_state[TARGET_MASK.bool()] for m in (model, eager))
    assert_same(got, expected)


@flash_positions
def test_flash_attention_keeps_packed_sequences_apart(flash, changes):
    model, eager = flash(VanillaDecoderModel, **changes)
    rows = [tokens(1, length)[0] for length in (5, 1, 7, 2)]
    ids, position_ids = packed(rows)
    got = model(ids, position_ids=position_ids, use_cache=False).last_hidden_state[0]
    assert_same(got, torch.cat([eager(row[None]).last_hidden_state[0] for row in rows]))


@pytest.mark.parametrize("padding", [None, "left"])
@flash_positions
def test_flash_attention_decodes_with_cache(flash, changes, padding):
    model, eager = flash(VanillaDecoderForCausalLM, **changes)
    rows = [tokens(1, length)[0] for length in (LENGTHS if padding else [LENGTH] * 3)]
    ids, mask, position_ids = padded(rows, "left")
    expected = eager(ids, mask, position_ids, use_cache=False).logits
    cache, logits = None, []
    for first, last in ((0, 4), (4, 5), (5, 6)):
        given = (
            dict(attention_mask=mask[:, :last], position_ids=position_ids[:, first:last])
            if padding
            else {}
        )
        outputs = model(ids[:, first:last], past_key_values=cache, use_cache=True, **given)
        cache = outputs.past_key_values
        logits.append(outputs.logits)
    assert_same(torch.cat(logits, 1)[mask.bool()], expected[mask.bool()])


# ----------------------------------------------------------------------------------- flex attention


def flex_and_eager(model_class, changes):
    """Return the hidden states of padded rows with flex attention and with eager attention."""
    model = build(model_class, "eager", **STRONG, **changes)
    given, real = inputs(model) | dict(attention_mask=SOURCE_MASK), SOURCE_MASK.bool()
    if is_pair(model):
        given, real = given | dict(decoder_attention_mask=TARGET_MASK), TARGET_MASK.bool()
    with torch.no_grad():
        expected = model(**given).last_hidden_state[real]
        model.set_attn_implementation("flex_attention")
        assert model.config._attn_implementation == "flex_attention"
        return model(**given).last_hidden_state[real], expected


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@flash_positions
@over(BASE)
def test_uncompiled_flex_attention_matches_eager_attention(model_class, changes):
    """Flex attention runs its torch operators without compilation. Values are wider than keys."""
    with torch.compiler.set_stance("force_eager"):
        assert_same(*flex_and_eager(model_class, changes))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@flash_positions
def test_flex_attention_decodes_with_cache_and_packed_sequences(changes):
    model = build(VanillaDecoderForCausalLM, "eager", **STRONG, **changes)
    ids, rows = tokens(), [tokens(1, length)[0] for length in (5, 1, 7, 2)]
    packed_ids, position_ids = packed(rows)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        expected, apart = model(ids).logits, torch.cat([model(row[None]).logits[0] for row in rows])
        model.set_attn_implementation("flex_attention")
        cache, logits = None, []
        for chunk in ids.split([4, 1, 1], 1):
            outputs = model(chunk, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
            logits.append(outputs.logits)
        assert_same(torch.cat(logits, 1), expected)
        assert_same(model(packed_ids, position_ids=position_ids, use_cache=False).logits[0], apart)


COMPILED = [
    (VanillaEncoderModel, "learned"),
    (VanillaDecoderModel, "rotary, window"),
    (VanillaSeq2SeqModel, "rotary, window"),
]


@pytest.mark.slow
@pytest.mark.parametrize("model_class, name", COMPILED)
def test_compiled_flex_attention_matches_eager_attention(model_class, name):
    torch.compiler.reset()
    assert_same(*flex_and_eager(model_class, POSITIONS[name]))
