"""Tests of every variant and switch against the formulas of the papers in NumPy."""

import itertools

import numpy as np
import pytest
import torch
from reference import (
    Paper,
    decoder_lm,
    encoder_lm,
    pooled,
    position_encoding,
    relative_bucket,
    rotation,
    seq2seq_lm,
    stack,
)
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.models.t5.modeling_t5 import T5Attention

from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaDecoderForCausalLM,
    VanillaEncoderConfig,
    VanillaEncoderForMaskedLM,
    VanillaEncoderModel,
    VanillaSeq2SeqConfig,
    VanillaSeq2SeqForConditionalGeneration,
)

VOCABULARY, LENGTH, SOURCE_LENGTH = 23, 7, 5

# Changes to the model of the paper: fields of our config, and the same for the reference.
PRE_NORM = dict(norm_first=True), dict(norm_first=True, final_norm=True)
# Few buckets, so that seven tokens reach the logarithmic buckets and the distances beyond.
RELATIVE = (
    dict(
        position_embedding_type="relative",
        relative_attention_num_buckets=8,
        relative_attention_max_distance=5,
    ),
    dict(positions="relative", buckets=8, max_distance=5),
)
PAPER_BIASES = dict(attention_bias=False, lm_head_bias=False)
CHANGES = {
    "paper": ({}, {}),
    "pre-norm": PRE_NORM,
    "pre-norm without a final norm": (
        dict(norm_first=True, final_norm=False), dict(norm_first=True)
    ),
    "post-norm with a final norm": (dict(final_norm=True), dict(final_norm=True)),
    "learned positions": (
        dict(position_embedding_type="learned", max_position_embeddings=7),
        dict(positions="learned"),
    ),
    "rotary positions": (dict(position_embedding_type="rotary"), dict(positions="rotary")),
    "rotary positions with another base": (
        dict(position_embedding_type="rotary", rope_parameters={"rope_theta": 50}),
        dict(positions="rotary", rope_theta=50.0),
    ),
    "relative positions": RELATIVE,
    "no positions": (dict(position_embedding_type="none"), dict(positions="none")),
    "window of two": (dict(sliding_window=2), dict(window=2)),
    "window of three, rotary": (
        dict(sliding_window=3, position_embedding_type="rotary"), dict(window=3, positions="rotary")
    ),
    "window of three, relative": (
        dict(sliding_window=3, **RELATIVE[0]), dict(window=3, **RELATIVE[1])
    ),
    "learned and relative positions": (
        dict(RELATIVE[0], position_embedding_type="learned_relative", max_position_embeddings=7),
        dict(RELATIVE[1], positions="learned_relative"),
    ),
    "root mean square": (
        dict(norm_type="rms_norm", norm_first=True),
        dict(rms_norm=True, norm_first=True, final_norm=True),
    ),
    "root mean square everywhere": (
        dict(norm_type="rms_norm", embedding_norm=True, layer_norm_eps=0.1),
        dict(rms_norm=True, embedding_norm=True, eps=0.1)
    ),
    "gated": (dict(gated=True, hidden_act="gelu"), dict(gated=True, activation="gelu")),
    "gated without biases": (dict(gated=True, linear_bias=False), dict(gated=True, bias=False)),
    "gelu": (dict(hidden_act="gelu"), dict(activation="gelu")),
    "d_k != d_v != D / h": (dict(head_dim=3, value_head_dim=5), dict(d_k=3, d_v=5)),
    "d_k alone": (dict(head_dim=5), dict(d_k=5, d_v=5)),
    "three heads": (dict(num_attention_heads=3), dict(h=3, d_k=4, d_v=4)),
    "five heads that do not divide D": (
        dict(h=5, head_dim=2, value_head_dim=3), dict(h=5, d_k=2, d_v=3)
    ),
    "embedding norm": (dict(embedding_norm=True), dict(embedding_norm=True)),
    "no embedding scale": (dict(scale_embedding=False), dict(scale_embedding=False)),
    "no biases in the layers": (dict(linear_bias=False), dict(bias=False)),
    "biases of the paper": (PAPER_BIASES, PAPER_BIASES),
    "no bias in the projection": (dict(lm_head_bias=False), dict(lm_head_bias=False)),
    "untied": (dict(tie_word_embeddings=False), dict(tied=False)),
    "large epsilon": (dict(layer_norm_eps=0.1), dict(eps=0.1)),
    "everything": (
        dict(
            norm_first=True, position_embedding_type="learned", max_position_embeddings=9,
            hidden_act="gelu", head_dim=3, value_head_dim=5, num_attention_heads=3,
            embedding_norm=True, scale_embedding=False, lm_head_bias=False,
            tie_word_embeddings=False, linear_bias=False, final_norm=False, sliding_window=4
        ),
        dict(
            norm_first=True, positions="learned", activation="gelu", h=3, d_k=3, d_v=5,
            embedding_norm=True, scale_embedding=False, lm_head_bias=False, tied=False, bias=False,
            window=4
        ),
    ),
    "everything, rotary": (
        dict(
            norm_first=True, position_embedding_type="rotary", head_dim=4, value_head_dim=5,
            num_attention_heads=3, linear_bias=False, sliding_window=3, layer_norm_eps=1e-3
        ),
        dict(
            norm_first=True, final_norm=True, positions="rotary", h=3, d_k=4, d_v=5, bias=False,
            window=3, eps=1e-3
        ),
    ),
    "keys and values of two heads": (
        dict(num_attention_heads=4, num_key_value_heads=2, head_dim=4, value_head_dim=5),
        dict(h=4, key_heads=2, d_k=4, d_v=5),
    ),
    "one head of keys and values, rotary": (
        dict(num_key_value_heads=1, position_embedding_type="rotary", head_dim=4),
        dict(key_heads=1, positions="rotary", d_k=4, d_v=4),
    ),
    "norms of heads": (
        dict(use_qk_norm=True, position_embedding_type="rotary", head_dim=4),
        dict(qk_norm=True, positions="rotary", d_k=4, d_v=4),
    ),
    "norms of outputs": (
        dict(sandwich_norm=True, norm_first=True, norm_type="rms_norm"),
        dict(sandwich=True, norm_first=True, final_norm=True, rms_norm=True),
    ),
    "no first norm": (
        dict(skip_first_prenorm=True, norm_first=True, embedding_norm=True),
        dict(skips_first_norm=True, norm_first=True, final_norm=True, embedding_norm=True),
    ),
    "angles over a factor": (
        dict(
            position_embedding_type="rotary",
            rope_parameters={"rope_type": "linear", "rope_theta": 50, "factor": 2.5},
        ),
        dict(positions="rotary", rope_theta=50.0, rope_factor=2.5),
    ),
    "narrow embeddings": (dict(embedding_size=8), dict(e=8)),
    "narrow embeddings and a norm": (
        dict(embedding_size=8, embedding_norm=True), dict(e=8, embedding_norm=True)
    ),
    "wide embeddings, learned positions, untied": (
        dict(
            embedding_size=14, position_embedding_type="learned", max_position_embeddings=7,
            scale_embedding=False, tie_word_embeddings=False, norm_first=True
        ),
        dict(
            e=14, positions="learned", scale_embedding=False, tied=False, norm_first=True,
            final_norm=True
        ),
    ),
    # Changes of one or two variants only.
    "a window in the first layer": (
        dict(sliding_window=2, layer_types=["sliding_attention", "full_attention"]),
        dict(window=2, wide_layers=(1,)),
    ),
    "a base for each type of layers": (
        dict(
            sliding_window=2, layer_types=["full_attention", "sliding_attention"],
            position_embedding_type="rotary", rope_parameters={
                "full_attention": {"rope_theta": 300.0}, "sliding_attention": {"rope_theta": 50.0}
            },
        ),
        dict(
            window=2, wide_layers=(0,), positions="rotary", rope_theta=50.0, wide_theta=300.0
        ),
    ),
    "disentangled positions": (
        dict(
            position_embedding_type="disentangled", relative_attention_num_buckets=5,
            relative_attention_max_distance=5,
        ),
        dict(positions="disentangled", buckets=5, max_distance=5),
    ),
    "token types": (dict(type_vocab_size=3), {}),
    "token types and a norm": (
        dict(type_vocab_size=3, embedding_norm=True), dict(embedding_norm=True)
    ),
    "transform in front of the projection": (
        dict(lm_transform_act="gelu"), dict(lm_transform="gelu")
    ),
    "narrow embeddings, token types and a transform": (
        dict(embedding_size=8, embedding_norm=True, type_vocab_size=3, lm_transform_act="gelu"),
        dict(e=8, embedding_norm=True, lm_transform="gelu"),
    ),
    "each side its own embeddings": (
        dict(share_encoder_decoder_embeddings=False), dict(shared=False)
    ),
}  # fmt: skip
ENCODER_ONLY = ["token types", "token types and a norm", "transform in front of the projection"]
ENCODER_ONLY += ["narrow embeddings, token types and a transform", "disentangled positions"]
ONE_STACK_ONLY = ["a window in the first layer", "a base for each type of layers"]
SEQ2SEQ_ONLY = ["each side its own embeddings"]
TIED = ["lm_head.weight", "model.decoder.embeddings.embed_tokens.weight"]
VARIANTS = {
    "encoder": (VanillaEncoderConfig, VanillaEncoderForMaskedLM, dict(num_hidden_layers=2)),
    "decoder": (VanillaDecoderConfig, VanillaDecoderForCausalLM, dict(num_hidden_layers=2)),
    "seq2seq": (
        VanillaSeq2SeqConfig,
        VanillaSeq2SeqForConditionalGeneration,
        dict(encoder_layers=2, decoder_layers=2),
    ),
}
ALL = [
    (variant, change)
    for variant in VARIANTS
    for change in CHANGES
    if not (
        change in ENCODER_ONLY
        and variant != "encoder"
        or change in SEQ2SEQ_ONLY
        and variant != "seq2seq"
        or change in ONE_STACK_ONLY
        and variant == "seq2seq"
    )
]
ATTENTIONS = ("eager", "sdpa")
attentions = pytest.mark.parametrize("attention", ATTENTIONS)


def build(variant, change="paper", attention="eager"):
    """Return a float64 model with random parameters, its weights and the settings of the reference.

    Norms and biases are random too. float32 represents all weights exactly.
    """
    config_class, model_class, depth = VARIANTS[variant]
    ours, theirs = CHANGES[change]
    sizes = (
        dict(vocab_size=VOCABULARY, hidden_size=12, intermediate_size=20, num_attention_heads=2)
        | depth
    )
    if "h" in ours:
        del sizes["num_attention_heads"]
    model = model_class(config_class(**sizes | ours)).eval()
    model.set_attn_implementation(attention)
    paper = Paper(**dict(d_model=12, h=2, d_k=6, d_v=6, N=2) | theirs)
    weights = randomize(model)
    model.double()
    if paper.tied:
        tied = TIED if paper.shared else TIED[:1]
        weights = {name: array for name, array in weights.items() if name not in tied}
    return model, weights, paper


def randomize(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.7, 0.7)
    return {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}


def token_rows(length):
    return torch.randint(0, VOCABULARY, (3, length))


# Three rows: one full, one padded on the right, one padded on the left.
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1]])
POSITIONS = (MASK.cumsum(1) - 1).clamp(min=0)
SOURCE_MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])


def assert_close(logits, expected, mask=None):
    """Check that logits are within 1e-10 in float64, or 1e-5 (relative beyond 1) in float32.

    Padded positions are ignored.
    """
    real = np.ones(expected.shape[:2], bool) if mask is None else mask.bool().numpy()
    got, expected = logits.detach().double().numpy()[real], expected[real]
    allowed = 1e-10 if logits.dtype == torch.float64 else 1e-5 * np.maximum(1, np.abs(expected))
    assert np.all(np.abs(got - expected) <= allowed), (
        f"largest difference {np.abs(got - expected).max():.1e}"
    )


def expected_logits(variant, weights, paper, batch):
    """Return the logits of the reference, computed row by row."""
    columns = [batch[name].numpy() for name in ("tokens", "mask", "positions")]
    if variant == "seq2seq":
        rows = zip(batch["source"].numpy(), batch["source_mask"].numpy(), *columns, strict=True)
        return np.stack([seq2seq_lm(weights, paper, *row) for row in rows])
    if "types" in batch:
        columns.append(batch["types"].numpy())
    lm = encoder_lm if variant == "encoder" else decoder_lm
    return np.stack([lm(weights, paper, *row) for row in zip(*columns, strict=True)])


# Without padding the model makes the mask and the positions, which other changes do not read.
BY_PLACE = ("paper", "position", "rotary", "window", "base", "everything")
FULL_OR_PADDED = [
    pytest.param(*case, padded, id="-".join([*case, "padded" if padded else "full"]))
    for case in ALL
    for padded in (False, True)
    if padded or any(part in case[1] for part in BY_PLACE)
]


@pytest.mark.parametrize("variant, change, padded", FULL_OR_PADDED)
def test_logits_match_formulas_in_double_and_single_precision(variant, change, padded):
    model, weights, paper = build(variant, change)
    mask = MASK if padded else torch.ones_like(MASK)
    source_mask = SOURCE_MASK if padded else torch.ones_like(SOURCE_MASK)
    positions = POSITIONS if padded else torch.arange(LENGTH).expand(3, -1)
    batch = dict(tokens=token_rows(LENGTH), mask=mask, positions=positions)
    batch |= dict(source=token_rows(SOURCE_LENGTH), source_mask=source_mask)

    if variant == "seq2seq":
        inputs = dict(input_ids=batch["source"], decoder_input_ids=batch["tokens"])
        if padded:
            inputs |= dict(
                attention_mask=source_mask,
                decoder_attention_mask=mask,
                decoder_position_ids=positions,
            )
    else:
        inputs = dict(input_ids=batch["tokens"])
        if padded:
            inputs |= dict(attention_mask=mask, position_ids=positions)
    if "type_vocab_size" in CHANGES[change][0]:
        batch["types"] = inputs["token_type_ids"] = torch.randint(0, 3, (3, LENGTH))
    expected = expected_logits(variant, weights, paper, batch)
    for dtype, attention in itertools.product((torch.float64, torch.float32), ATTENTIONS):
        model.to(dtype).set_attn_implementation(attention)
        assert_close(model(**inputs).logits, expected, mask)


def test_token_type_defaults_to_0():
    model, weights, paper = build("encoder", "token types")
    batch = dict(
        tokens=token_rows(LENGTH),
        mask=torch.ones_like(MASK),
        positions=torch.arange(LENGTH).expand(3, -1),
    )
    batch |= dict(types=torch.zeros_like(MASK))
    assert_close(model(batch["tokens"]).logits, expected_logits("encoder", weights, paper, batch))


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("act", ["tanh", "gelu"])
def test_pooler_applies_linear_map_and_activation_to_first_state(act, padded):
    config = VanillaEncoderConfig(
        vocab_size=VOCABULARY, d_model=12, d_ff=20, h=2, N=2, pooler_act=act
    )
    model = VanillaEncoderModel(config).eval()
    weights, paper = randomize(model), Paper(d_model=12, h=2, d_k=6, d_v=6, N=2)
    tokens, mask = token_rows(LENGTH), MASK[[0, 1, 1]] if padded else torch.ones_like(MASK)
    outputs = model.double()(tokens, **dict(attention_mask=mask) if padded else {})
    for row, real, states, got in zip(
        tokens, mask, outputs.last_hidden_state, outputs.pooler_output, strict=True
    ):
        table = weights["embeddings.embed_tokens.weight"]
        expected = stack(weights, "", paper, table, row.numpy(), range(LENGTH), real.numpy(), False)
        assert_close(states[None], expected[None], real[None])
        assert_close(got[None, None], pooled(weights, "pooler", act, expected)[None, None])


# ------------------------------------------------------------------------------------------- caches

CACHED = [
    "paper", "everything", "everything, rotary", "d_k != d_v != D / h", "learned positions",
    "rotary positions", "relative positions", "no positions", "window of two",
    "window of three, rotary", "window of three, relative", "narrow embeddings",
]  # fmt: skip


def cache_for(model, kind):
    """Return a static cache with spare positions, or None to let the model make a dynamic cache."""
    if kind == "dynamic":
        return None
    static = StaticCache(config=model.config, max_cache_len=LENGTH + 2)
    return (
        EncoderDecoderCache(static, DynamicCache()) if model.config.is_encoder_decoder else static
    )


# Each pair of a cache, a way to fill it, and an attention.
WAYS = [
    ("dynamic", [1] * 7, "eager"),
    ("dynamic", [3, 1, 3], "sdpa"),
    ("static", [1] * 7, "sdpa"),
    ("static", [3, 1, 3], "eager"),
]


@pytest.mark.parametrize("change", CACHED)
@pytest.mark.parametrize("variant", ["decoder", "seq2seq"])
def test_cached_decoding_matches_full_pass(variant, change):
    model, weights, paper = build(variant, change)
    batch = dict(
        tokens=token_rows(LENGTH),
        mask=torch.ones_like(MASK),
        positions=torch.arange(7).expand(3, -1),
    )
    batch |= dict(source=token_rows(SOURCE_LENGTH), source_mask=SOURCE_MASK)
    source = dict(input_ids=batch["source"], attention_mask=SOURCE_MASK)
    expected = expected_logits(variant, weights, paper, batch)
    for kind, chunks, attention in WAYS:
        model.set_attn_implementation(attention)
        cache, logits = cache_for(model, kind), []
        for chunk in batch["tokens"].split(chunks, dim=1):
            inputs = dict(input_ids=chunk)
            if variant == "seq2seq":
                inputs = source | dict(decoder_input_ids=chunk)
            outputs = model(**inputs, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
            logits.append(outputs.logits)
        cache_class = StaticCache if kind == "static" else DynamicCache
        assert isinstance(cache, EncoderDecoderCache if variant == "seq2seq" else cache_class)
        assert_close(torch.cat(logits, dim=1), expected)


@pytest.mark.parametrize("change", CACHED)
def test_cached_decoding_of_padded_rows_matches_full_pass(change):
    model, weights, paper = build("decoder", change)
    batch = dict(tokens=token_rows(LENGTH), mask=MASK, positions=POSITIONS)
    expected = expected_logits("decoder", weights, paper, batch)
    for kind, chunks, attention in WAYS:
        model.set_attn_implementation(attention)
        cache, logits, seen = cache_for(model, kind), [], 0
        for length in chunks:
            seen += length
            chunk_slice = slice(seen - length, seen)
            outputs = model(
                batch["tokens"][:, chunk_slice],
                MASK[:, :seen],
                POSITIONS[:, chunk_slice],
                past_key_values=cache,
                use_cache=True,
            )
            cache = outputs.past_key_values
            logits.append(outputs.logits)
        assert_close(torch.cat(logits, dim=1), expected, MASK)


# ---------------------------------------------------------------------------------------- positions


@pytest.mark.parametrize("first", [0, 4990, 100_000])
def test_sinusoids_match_formula_at_any_position(first):
    """The first hidden state is the scaled token plus its position."""
    model, weights, _ = build("decoder")
    positions = torch.arange(first, first + 10)
    states = model(
        torch.zeros(1, 10, dtype=int), position_ids=positions[None], output_hidden_states=True
    ).hidden_states
    token = weights["model.embeddings.embed_tokens.weight"][0] * 12**0.5
    expected = np.stack(
        [token + position_encoding(position, 12) for position in range(first, first + 10)]
    )
    assert_close(states[0][0][None], expected[None])


@pytest.mark.parametrize("positions", ["rotary", "relative", "none"])
def test_rotary_relative_or_no_positions_leave_embeddings_unchanged(positions):
    model, weights, _ = build(
        "decoder", {"none": "no positions"}.get(positions, f"{positions} positions")
    )
    tokens = token_rows(LENGTH)
    states = model(tokens, output_hidden_states=True).hidden_states
    assert_close(
        states[0], weights["model.embeddings.embed_tokens.weight"][tokens.numpy()] * 12**0.5
    )


@pytest.mark.parametrize("first", [0, 4990, 100_000])
def test_rotary_positions_depend_on_distances_only_and_have_no_limit(first):
    model, weights, paper = build("decoder", "rotary positions")
    tokens, positions = token_rows(LENGTH), (first + torch.arange(LENGTH)).expand(3, -1)
    batch = dict(tokens=tokens, mask=torch.ones_like(MASK), positions=positions)
    expected = expected_logits("decoder", weights, paper, batch)
    logits = model(tokens, position_ids=positions).logits
    # Beyond 1e-10 float64 itself rounds the angle of position 100,000.
    np.testing.assert_allclose(logits.detach().numpy(), expected, atol=1e-9, rtol=0)
    np.testing.assert_allclose(
        logits.detach().numpy(), model(tokens).logits.detach().numpy(), atol=1e-9, rtol=0
    )


def test_reference_rotation_matches_complex_product_of_equation_12():
    """RoFormer, section 3.2.1: a pair of components is a complex number, times e^(i m theta)."""
    x = np.random.default_rng(0).normal(size=8)
    pairs = (x[0::2] + 1j * x[1::2]) * np.exp(1j * 5 * 10000.0 ** (-np.arange(4) / 4))
    rotated = rotation(5, 8, 10000.0, 1.0) @ x
    np.testing.assert_allclose(rotated[0::2] + 1j * rotated[1::2], pairs)


@pytest.mark.parametrize(
    "buckets, max_distance", [(32, 128), (8, 5), (4, 3), (64, 33), (32, 1000), (10, 17)]
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["both sides", "causal"])
def test_relative_position_buckets_match_definition_and_t5(is_causal, buckets, max_distance):
    model, _, _ = build("decoder" if is_causal else "encoder", "relative positions")
    positions = model.model.relative_positions
    positions.buckets, positions.max_distance = buckets, max_distance
    offsets = torch.arange(-1100, 1101)
    got = positions.bucket(offsets).tolist()
    assert got == [
        relative_bucket(offset, not is_causal, buckets, max_distance) for offset in offsets.tolist()
    ]
    assert (
        got
        == T5Attention._relative_position_bucket(
            offsets, not is_causal, buckets, max_distance
        ).tolist()
    )
