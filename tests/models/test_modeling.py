"""Tests of the models as Hugging Face models: inputs, outputs, positions, sizes and precision."""

import math

import numpy as np
import pytest
import torch
import transformers
from messages import raises
from models import (
    ALL,
    AUTO_CLASSES,
    BASE,
    D_K,
    ENCODERS,
    GENERATIVE,
    HEADS,
    LANGUAGE_MODELS,
    LAYERS,
    LENGTH,
    POSITIONS,
    READS_TWICE,
    D,
    assert_same,
    attentions,
    build,
    decoder_half,
    generated,
    inputs,
    is_pair,
    over,
    result,
    tokens,
)
from reference import position_encoding
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache

from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaDecoderForCausalLM,
    VanillaDecoderModel,
    VanillaEncoderForMaskedLM,
    VanillaEncoderForPreTraining,
    VanillaEncoderModel,
    VanillaSeq2SeqConfig,
    VanillaSeq2SeqForConditionalGeneration,
    VanillaSeq2SeqForSequenceClassification,
    VanillaSeq2SeqModel,
)

# ------------------------------------------------------------------------------- inputs and outputs


# VanillaSeq2SeqForSequenceClassification needs input_ids to find end tokens.
@over([c for c in ALL if c is not VanillaSeq2SeqForSequenceClassification])
def test_inputs_embeds_match_input_ids(model_class):
    model = build(model_class)
    kwargs = inputs(model)
    embedded = {
        name.replace("input_ids", "inputs_embeds"): model.get_input_embeddings()(v)
        for name, v in kwargs.items()
    }
    assert torch.equal(result(model(**embedded)), result(model(**kwargs)))


@over(ALL)
def test_exactly_one_of_input_ids_and_inputs_embeds_is_required(model_class):
    model = build(model_class)
    kwargs = inputs(model)
    name = "decoder_input_ids" if is_pair(model) else "input_ids"
    if isinstance(model, READS_TWICE):
        name = "input_ids"
    both = {name.replace("input_ids", "inputs_embeds"): torch.zeros(*kwargs[name].shape, D)}
    with raises(ValueError, seen="input_ids", expected="inputs_embeds"):
        model(**kwargs, **both)
    del kwargs[name]
    if model_class is VanillaSeq2SeqForSequenceClassification:
        return
    with raises(ValueError, expected=(name, name.replace("input_ids", "inputs_embeds"))):
        model(**kwargs)


def test_seq2seq_model_without_source_raises():
    with raises(ValueError, seen="input_ids", expected="inputs_embeds"):
        build(VanillaSeq2SeqModel)(decoder_input_ids=tokens())


@over([VanillaSeq2SeqModel, VanillaSeq2SeqForConditionalGeneration])
@pytest.mark.parametrize("kind", ["output", "tuple"])
def test_encoder_outputs_replace_source(model_class, kind):
    model = build(model_class)
    kwargs = inputs(model)
    mask = torch.tensor([[1] * LENGTH, [1] * 3 + [0] * 3, [1] * LENGTH])
    expected = result(model(**kwargs, attention_mask=mask))
    encoded = model.get_encoder()(kwargs.pop("input_ids"), mask)
    encoded = encoded if kind == "output" else encoded.to_tuple()
    assert torch.equal(
        result(model(**kwargs, encoder_outputs=encoded, attention_mask=mask)), expected
    )


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@over(ALL)
def test_attentions_sum_to_one_and_hidden_states_run_from_embeddings_to_output(
    model_class, norm_first
):
    model = build(model_class, "eager", norm_first=norm_first)
    base = getattr(model, "model", model)
    kwargs = inputs(model)
    outputs = model(**kwargs, output_attentions=True, output_hidden_states=True)
    if is_pair(model):
        length = kwargs["decoder_input_ids"].shape[1]
        lengths = dict(
            encoder_attentions=(6, 6),
            decoder_attentions=(length, length),
            cross_attentions=(length, 6),
        )
        stacks = dict(encoder_hidden_states=base.encoder, decoder_hidden_states=base.decoder)
    else:
        lengths, stacks = dict(attentions=(6, 6)), dict(hidden_states=base)
    for name, shape in lengths.items():
        rows = kwargs["input_ids"].flatten(0, -2).shape[0]
        assert [tuple(weights.shape) for weights in outputs[name]] == [
            (rows, HEADS, *shape)
        ] * LAYERS
        for weights in outputs[name]:
            assert_same(weights.sum(-1), torch.ones(rows, HEADS, shape[0]))
            assert torch.all(weights >= 0)
    for name, stack in stacks.items():
        ids = kwargs[
            "decoder_input_ids" if stack is getattr(base, "decoder", None) else "input_ids"
        ]
        assert len(outputs[name]) == LAYERS + 1
        embedded = stack.embeddings.embed_tokens(ids.flatten(0, -2))
        assert torch.equal(
            outputs[name][0], stack.embeddings(embedded, torch.arange(ids.shape[-1])[None])
        )
    last = [states for name in stacks for states in outputs[name]][-1]
    assert torch.equal(
        last, base(**{name: ids.flatten(0, -2) for name, ids in kwargs.items()}).last_hidden_state
    )


@over(ALL)
def test_return_dict_false_returns_tuple(model_class):
    model = build(model_class)
    kwargs = inputs(model)
    as_tuple, outputs = model(**kwargs, return_dict=False), model(**kwargs)
    assert type(as_tuple) is tuple and len(as_tuple) == len(outputs)
    assert torch.equal(as_tuple[0], outputs[0])


@over(ENCODERS)
def test_token_type_beyond_type_vocab_size_raises_and_error_names_both(model_class):
    model = build(model_class, initializer_range=0.1, type_vocab_size=2)
    kwargs = inputs(model)
    types = torch.zeros_like(kwargs["input_ids"])
    types[1, 1] = 2
    with raises(ValueError, seen=(2, "type_vocab_size")):
        model(**kwargs, token_type_ids=types)
    types[1, 1] = 1
    assert not torch.allclose(
        result(model(**kwargs, token_type_ids=types)), result(model(**kwargs)), atol=1e-4
    )


@over(ENCODERS)
def test_model_without_token_types_accepts_only_zeros(model_class):
    """Tokenizers return zeros also for models without token types."""
    model = build(model_class)
    kwargs = inputs(model)
    types = torch.zeros_like(kwargs["input_ids"])
    assert torch.equal(result(model(**kwargs, token_type_ids=types)), result(model(**kwargs)))
    types[1, 1] = 1
    with raises(ValueError, seen=(1, "type_vocab_size", 0)):
        model(**kwargs, token_type_ids=types)


@over(GENERATIVE)
@pytest.mark.parametrize(
    "keep, kept",
    [(0, [0, 1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4]), (torch.tensor([1, 4]), [1, 4])],
    ids=str,
)
def test_logits_to_keep(model_class, keep, kept):
    model = build(model_class)
    kwargs = (
        dict(input_ids=tokens(), decoder_input_ids=tokens(3, 5))
        if is_pair(model)
        else dict(input_ids=tokens(3, 5))
    )
    assert_same(model(**kwargs, logits_to_keep=keep).logits, model(**kwargs).logits[:, kept])


@pytest.mark.parametrize("model_class", [VanillaEncoderForMaskedLM, VanillaEncoderForPreTraining])
def test_logits_to_keep_accepts_mask_of_masked_positions(model_class):
    model, ids = build(model_class), tokens(3, 5)
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) < 0.3
    labels = ids.masked_fill(~mask, -100)
    all_outputs, masked_outputs = (
        model(ids, labels=labels),
        model(ids, labels=labels, logits_to_keep=mask),
    )
    name = "logits" if "logits" in masked_outputs else "prediction_logits"
    assert 0 < len(masked_outputs[name]) < 15
    assert_same(masked_outputs[name], all_outputs[name][mask])
    assert_same(masked_outputs.loss, all_outputs.loss)
    assert_same(model(ids, logits_to_keep=mask)[name], masked_outputs[name])


# ---------------------------------------------------------------------------------------- positions


@over(LANGUAGE_MODELS)
def test_position_beyond_learned_table_raises_and_error_names_both(model_class):
    model = build(model_class, position_embedding_type="learned", max_position_embeddings=20)
    short = dict(decoder_input_ids=tokens(1, 2)) if is_pair(model) else {}
    assert model(tokens(1, 20), **short).logits.isfinite().all()
    with raises(ValueError, seen=(20, "max_position_embeddings")):
        model(tokens(1, 21), **short)
    if model_class is not VanillaSeq2SeqForConditionalGeneration:
        with raises(ValueError, seen=(25, "max_position_embeddings", 20)):
            model(tokens(1, 2), position_ids=torch.tensor([[0, 25]]))


@over(GENERATIVE)
def test_generation_beyond_learned_table_raises(model_class):
    model = build(model_class, position_embedding_type="learned", max_position_embeddings=10)
    with raises(ValueError, seen=(10, "max_position_embeddings")):
        generated(model, tokens(1, 6), max_new_tokens=12)


@pytest.mark.parametrize("dtype, step", [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)], ids=str)
def test_sinusoids_in_half_precision_are_rounded_formula(dtype, step):
    model = build(VanillaEncoderModel).to(dtype)  # half precision cannot tell 2049 from 2048
    got = model.embeddings(torch.zeros(1, 100, D, dtype=dtype), torch.arange(2000, 2100)[None])[0]
    expected = np.stack([position_encoding(position, D) for position in range(2000, 2100)])
    np.testing.assert_allclose(got.detach().float().numpy(), expected, atol=step + 1e-3)


@over(BASE)
def test_sinusoids_have_no_maximum_position(model_class):
    model = build(model_class, max_position_embeddings=20)
    stack = model.decoder if is_pair(model) else model
    expected = np.stack([position_encoding(position, D) for position in range(5000)])
    got = stack.embeddings(torch.zeros(1, 5000, D), torch.arange(5000)[None])[0].detach().numpy()
    np.testing.assert_allclose(got, expected, atol=2e-3)  # float32 resolves 5,000 to 2.4e-4
    positions = {
        "decoder_position_ids" if is_pair(model) else "position_ids": torch.arange(4995, 5000)[None]
    }
    kwargs = dict(input_ids=tokens(1, 5)) | (
        dict(decoder_input_ids=tokens(1, 5)) if is_pair(model) else {}
    )
    assert result(model(**kwargs, **positions)).isfinite().all()


# --------------------------------------------------------------------------- depth, precision, init


@pytest.mark.parametrize("depths", [(1, 3), (3, 1)], ids=str)
def test_stacks_of_different_depth_run_save_and_generate(depths, tmp_path):
    model = build(
        VanillaSeq2SeqForConditionalGeneration,
        "eager",
        encoder_layers=depths[0],
        decoder_layers=depths[1],
    )
    kwargs = inputs(model)
    outputs = model(**kwargs, output_attentions=True, use_cache=True)
    assert (len(outputs.encoder_attentions), len(outputs.decoder_attentions)) == depths
    assert len(outputs.past_key_values.self_attention_cache.layers) == depths[1]
    for beams in (1, 3):
        with_cache, without = (
            generated(model, kwargs["input_ids"], num_beams=beams, use_cache=c)
            for c in (True, False)
        )
        assert with_cache.tolist() == without.tolist()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert_same(loaded(**kwargs).logits, outputs.logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@over(ALL)
@attentions
def test_half_precision_is_close_to_single_precision(model_class, dtype, attention):
    model = build(model_class, attention)
    kwargs = inputs(model)
    expected = result(model(**kwargs))
    got = result(model.to(dtype)(**kwargs))
    assert got.dtype == dtype
    assert_same(got.float(), expected, 0.15 if dtype == torch.bfloat16 else 0.02)


@over(ALL)
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "relative"])
def test_initial_weights_have_documented_distribution(model_class, positions):
    width = dict(d_model=256, d_ff=300, h=4, vocab_size=500, max_position_embeddings=400)
    depth = (
        dict(encoder_layers=1, decoder_layers=1)
        if model_class.config_class is VanillaSeq2SeqConfig
        else dict(N=1)
    )
    untied = dict(
        tie_word_embeddings=False, position_embedding_type=positions, initializer_range=0.05
    )
    untied |= dict(
        relative_attention_num_buckets=500, relative_attention_max_distance=600, final_norm=True
    )
    if model_class in ENCODERS:
        untied |= dict(
            type_vocab_size=300,
            pooler_act="tanh",
            lm_transform_act="gelu",
            token_transform_act="gelu",
        )
    model = model_class(model_class.config_class(**width, **depth, **untied))
    kinds = set()
    for module in model.modules():
        kinds.add(type(module))
        # tolerances are 4.5 standard deviations of the statistics of n numbers
        if isinstance(module, nn.Linear | nn.Embedding):
            n = module.weight.numel()
            normal = isinstance(module, nn.Linear)
            deviation = 0.05 if normal else 1 / 16 / math.sqrt(3)
            assert module.weight.std().item() == pytest.approx(
                deviation, rel=(3.2 if normal else 2) / math.sqrt(n)
            )
            assert abs(module.weight.mean()) < 4.5 * deviation / math.sqrt(n)
            if normal:
                assert module.bias is None or not module.bias.any()
            else:  # uniform within d_model^-0.5
                assert 0.99 / 16 < module.weight.abs().max() <= 1 / 16
        elif isinstance(module, nn.LayerNorm):
            assert torch.all(module.weight == 1) and not module.bias.any()
    assert {nn.Linear, nn.Embedding, nn.LayerNorm} < kinds


def test_rms_norms_start_with_weight_one():
    model = VanillaSeq2SeqModel(
        VanillaSeq2SeqConfig(
            vocab_size=9, d_model=8, d_ff=9, h=2, N=LAYERS, norm_type="rms_norm", final_norm=True
        )
    )
    norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
    assert len(norms) == (2 + 3) * LAYERS + 2 and all(torch.all(norm.weight == 1) for norm in norms)
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())


def test_scaled_token_embeddings_start_about_as_large_as_positions():
    model = VanillaDecoderForCausalLM(
        VanillaDecoderConfig(vocab_size=500, d_model=256, d_ff=64, h=4, N=1)
    )
    scaled = model.model.embeddings.embed_tokens.weight * 16
    assert scaled.square().mean().item() == pytest.approx(1 / 3, rel=0.02)  # sinusoids have 1 / 2
    assert model.eval()(torch.randint(0, 500, (4, 50))).logits.std().item() == pytest.approx(
        1 / math.sqrt(3), rel=0.2
    )


# ---------------------------------------------------------------------------------- cross-attention


SOURCE_MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
cross_changes = pytest.mark.parametrize("changes", POSITIONS.values(), ids=list(POSITIONS))


@cross_changes
@attentions
def test_decoder_with_cross_attention_matches_decoder_of_seq2seq_model(attention, changes):
    pair = build(
        VanillaSeq2SeqForConditionalGeneration,
        attention,
        initializer_range=0.3,
        encoder_layers=1,
        **changes,
    )
    decoder = decoder_half(pair, VanillaDecoderForCausalLM, attention)
    source, target = tokens(), tokens(3, 5)
    for mask in (None, SOURCE_MASK):
        states = pair.model.encoder(source, mask).last_hidden_state
        got = decoder(target, encoder_hidden_states=states, encoder_attention_mask=mask).logits
        assert_same(got, pair(source, mask, target).logits)
        assert not torch.allclose(
            got, decoder(target, encoder_hidden_states=states.flip(0)).logits, atol=1e-3
        )


@cross_changes
@attentions
def test_decoder_with_cross_attention_caches_source(attention, changes):
    model = build(
        VanillaDecoderForCausalLM,
        attention,
        initializer_range=0.3,
        add_cross_attention=True,
        **changes,
    )
    target, source = tokens(3, 7), torch.randn(3, 4, D)
    kwargs = dict(encoder_hidden_states=source, encoder_attention_mask=SOURCE_MASK[:, :4])
    expected = model(target, **kwargs, use_cache=False).logits
    for first in (None, DynamicCache()):  # a DynamicCache becomes an EncoderDecoderCache
        cache, logits = first, []
        for chunk in target.split([3, 1, 2, 1], 1):
            outputs = model(chunk, past_key_values=cache, use_cache=True, **kwargs)
            cache = outputs.past_key_values
            logits.append(outputs.logits)
        assert type(cache) is EncoderDecoderCache
        assert_same(torch.cat(logits, 1), expected)
        widths = [layer.keys.shape for layer in cache.cross_attention_cache.layers]
        assert widths == [(3, HEADS, 4, D_K)] * LAYERS


def test_decoder_returns_cross_attentions():
    model = build(VanillaDecoderModel, "eager", add_cross_attention=True)
    outputs = model(
        tokens(3, 5), encoder_hidden_states=torch.randn(3, 4, D), output_attentions=True
    )
    assert [tuple(weights.shape) for weights in outputs.cross_attentions] == [
        (3, HEADS, 5, 4)
    ] * LAYERS
    assert [tuple(weights.shape) for weights in outputs.attentions] == [(3, HEADS, 5, 5)] * LAYERS


def test_decoder_with_cross_attention_but_no_source_matches_plain_decoder():
    model = build(VanillaDecoderForCausalLM, initializer_range=0.3, add_cross_attention=True)
    plain = build(VanillaDecoderForCausalLM)
    plain.load_state_dict(
        {name: tensor for name, tensor in model.state_dict().items() if "cross_attn" not in name}
    )
    target = tokens()
    assert_same(model(target).logits, plain(target).logits)
    assert (
        generated(model, target, do_sample=False).tolist()
        == generated(plain, target, do_sample=False).tolist()
    )


@over(list(AUTO_CLASSES["decoder"].values()))
def test_source_for_decoder_without_cross_attention_raises(model_class):
    with raises(ValueError, seen=("encoder_hidden_states", "decoder")):
        build(model_class)(tokens(), encoder_hidden_states=torch.randn(3, 4, D))


def test_decoder_with_cross_attention_saves_and_loads(tmp_path):
    model = build(VanillaDecoderForCausalLM, initializer_range=0.3, add_cross_attention=True)
    kwargs = dict(input_ids=tokens(), encoder_hidden_states=torch.randn(3, 4, D))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.add_cross_attention
    assert torch.equal(loaded(**kwargs).logits, model(**kwargs).logits)
