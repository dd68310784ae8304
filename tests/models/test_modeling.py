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


# which reads where the ids have an end token
@over([c for c in ALL if c is not VanillaSeq2SeqForSequenceClassification])
def test_inputs_embeds_stand_in_for_input_ids(model_class):
    model = build(model_class)
    given = inputs(model)
    embedded = {
        name.replace("input_ids", "inputs_embeds"): model.get_input_embeddings()(v)
        for name, v in given.items()
    }
    assert torch.equal(result(model(**embedded)), result(model(**given)))


@over(ALL)
def test_input_ids_and_inputs_embeds_exclude_each_other(model_class):
    model = build(model_class)
    given = inputs(model)
    name = "decoder_input_ids" if is_pair(model) else "input_ids"
    if isinstance(model, READS_TWICE):
        name = "input_ids"
    both = {name.replace("input_ids", "inputs_embeds"): torch.zeros(*given[name].shape, D)}
    with raises(ValueError, seen="input_ids", expected="inputs_embeds"):
        model(**given, **both)
    del given[name]
    if model_class is VanillaSeq2SeqForSequenceClassification:
        return
    with raises(ValueError, expected=(name, name.replace("input_ids", "inputs_embeds"))):
        model(**given)


def test_a_pair_of_stacks_needs_a_source():
    with raises(ValueError, seen="input_ids", expected="inputs_embeds"):
        build(VanillaSeq2SeqModel)(decoder_input_ids=tokens())


@over([VanillaSeq2SeqModel, VanillaSeq2SeqForConditionalGeneration])
@pytest.mark.parametrize("kind", ["output", "tuple"])
def test_encoder_outputs_stand_in_for_the_source(model_class, kind):
    model = build(model_class)
    given = inputs(model)
    mask = torch.tensor([[1] * LENGTH, [1] * 3 + [0] * 3, [1] * LENGTH])
    expected = result(model(**given, attention_mask=mask))
    encoded = model.get_encoder()(given.pop("input_ids"), mask)
    encoded = encoded if kind == "output" else encoded.to_tuple()
    assert torch.equal(
        result(model(**given, encoder_outputs=encoded, attention_mask=mask)), expected
    )


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@over(ALL)
def test_attentions_sum_to_one_and_hidden_states_run_from_the_embeddings_to_the_last(
    model_class, norm_first
):
    model = build(model_class, "eager", norm_first=norm_first)
    base = getattr(model, "model", model)
    given = inputs(model)
    outputs = model(**given, output_attentions=True, output_hidden_states=True)
    if is_pair(model):
        length = given["decoder_input_ids"].shape[1]
        lengths = dict(
            encoder_attentions=(6, 6),
            decoder_attentions=(length, length),
            cross_attentions=(length, 6),
        )
        stacks = dict(encoder_hidden_states=base.encoder, decoder_hidden_states=base.decoder)
    else:
        lengths, stacks = dict(attentions=(6, 6)), dict(hidden_states=base)
    for name, shape in lengths.items():
        rows = given["input_ids"].flatten(0, -2).shape[0]
        assert [tuple(weights.shape) for weights in outputs[name]] == [
            (rows, HEADS, *shape)
        ] * LAYERS
        for weights in outputs[name]:
            assert_same(weights.sum(-1), torch.ones(rows, HEADS, shape[0]))
            assert torch.all(weights >= 0)
    for name, stack in stacks.items():
        ids = given["decoder_input_ids" if stack is getattr(base, "decoder", None) else "input_ids"]
        assert len(outputs[name]) == LAYERS + 1
        embedded = stack.embeddings.embed_tokens(ids.flatten(0, -2))
        assert torch.equal(
            outputs[name][0], stack.embeddings(embedded, torch.arange(ids.shape[-1])[None])
        )
    last = [states for name in stacks for states in outputs[name]][-1]
    assert torch.equal(
        last, base(**{name: ids.flatten(0, -2) for name, ids in given.items()}).last_hidden_state
    )


@over(ALL)
def test_outputs_are_a_tuple_when_asked_for(model_class):
    model = build(model_class)
    given = inputs(model)
    as_tuple, outputs = model(**given, return_dict=False), model(**given)
    assert type(as_tuple) is tuple and len(as_tuple) == len(outputs)
    assert torch.equal(as_tuple[0], outputs[0])


@over(ENCODERS)
def test_a_token_type_beyond_the_table_is_an_error_that_names_both(model_class):
    model = build(model_class, initializer_range=0.1, type_vocab_size=2)
    given = inputs(model)
    types = torch.zeros_like(given["input_ids"])
    types[1, 1] = 2
    with raises(ValueError, seen=(2, "type_vocab_size")):
        model(**given, token_type_ids=types)
    types[1, 1] = 1
    assert not torch.allclose(
        result(model(**given, token_type_ids=types)), result(model(**given)), atol=1e-4
    )


@over(ENCODERS)
def test_a_model_without_token_types_takes_zeros_and_nothing_else(model_class):
    """Tokenizers give zeros to models without types too."""
    model = build(model_class)
    given = inputs(model)
    types = torch.zeros_like(given["input_ids"])
    assert torch.equal(result(model(**given, token_type_ids=types)), result(model(**given)))
    types[1, 1] = 1
    with raises(ValueError, seen=(1, "type_vocab_size", 0)):
        model(**given, token_type_ids=types)


@over(GENERATIVE)
@pytest.mark.parametrize(
    "keep, kept",
    [(0, [0, 1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4]), (torch.tensor([1, 4]), [1, 4])],
    ids=str,
)
def test_logits_to_keep(model_class, keep, kept):
    model = build(model_class)
    given = (
        dict(input_ids=tokens(), decoder_input_ids=tokens(3, 5))
        if is_pair(model)
        else dict(input_ids=tokens(3, 5))
    )
    assert_same(model(**given, logits_to_keep=keep).logits, model(**given).logits[:, kept])


@pytest.mark.parametrize("model_class", [VanillaEncoderForMaskedLM, VanillaEncoderForPreTraining])
def test_logits_and_loss_of_masked_positions_only(model_class):
    model, ids = build(model_class), tokens(3, 5)
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) < 0.3
    labels = ids.masked_fill(~mask, -100)
    every, some = model(ids, labels=labels), model(ids, labels=labels, logits_to_keep=mask)
    name = "logits" if "logits" in some else "prediction_logits"
    assert 0 < len(some[name]) < 15
    assert_same(some[name], every[name][mask])
    assert_same(some.loss, every.loss)
    assert_same(model(ids, logits_to_keep=mask)[name], some[name])


# ---------------------------------------------------------------------------------------- positions


@over(LANGUAGE_MODELS)
def test_a_position_beyond_a_learned_table_is_an_error_that_names_both(model_class):
    model = build(model_class, position_embedding_type="learned", max_position_embeddings=20)
    short = dict(decoder_input_ids=tokens(1, 2)) if is_pair(model) else {}
    assert model(tokens(1, 20), **short).logits.isfinite().all()
    with raises(ValueError, seen=(20, "max_position_embeddings")):
        model(tokens(1, 21), **short)
    if model_class is not VanillaSeq2SeqForConditionalGeneration:
        with raises(ValueError, seen=(25, "max_position_embeddings", 20)):
            model(tokens(1, 2), position_ids=torch.tensor([[0, 25]]))


@over(GENERATIVE)
def test_generation_beyond_a_learned_table_is_the_same_error(model_class):
    model = build(model_class, position_embedding_type="learned", max_position_embeddings=10)
    with raises(ValueError, seen=(10, "max_position_embeddings")):
        generated(model, tokens(1, 6), max_new_tokens=12)


@pytest.mark.parametrize("dtype, step", [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)], ids=str)
def test_sinusoids_in_half_precision_are_the_formula_rounded(dtype, step):
    model = build(VanillaEncoderModel).to(dtype)  # which itself cannot tell 2049 from 2048
    got = model.embeddings(torch.zeros(1, 100, D, dtype=dtype), torch.arange(2000, 2100)[None])[0]
    expected = np.stack([position_encoding(position, D) for position in range(2000, 2100)])
    np.testing.assert_allclose(got.detach().float().numpy(), expected, atol=step + 1e-3)


@over(BASE)
def test_sinusoids_have_no_last_position(model_class):
    model = build(model_class, max_position_embeddings=20)
    stack = model.decoder if is_pair(model) else model
    expected = np.stack([position_encoding(position, D) for position in range(5000)])
    got = stack.embeddings(torch.zeros(1, 5000, D), torch.arange(5000)[None])[0].detach().numpy()
    np.testing.assert_allclose(got, expected, atol=2e-3)  # float32 knows 5,000 radians to 2.4e-4
    positions = {
        "decoder_position_ids" if is_pair(model) else "position_ids": torch.arange(4995, 5000)[None]
    }
    given = dict(input_ids=tokens(1, 5)) | (
        dict(decoder_input_ids=tokens(1, 5)) if is_pair(model) else {}
    )
    assert result(model(**given, **positions)).isfinite().all()


# --------------------------------------------------------------------------- depth, precision, init


@pytest.mark.parametrize("depths", [(1, 3), (3, 1)], ids=str)
def test_stacks_of_different_depth_run_save_and_generate(depths, tmp_path):
    model = build(
        VanillaSeq2SeqForConditionalGeneration,
        "eager",
        encoder_layers=depths[0],
        decoder_layers=depths[1],
    )
    given = inputs(model)
    outputs = model(**given, output_attentions=True, use_cache=True)
    assert (len(outputs.encoder_attentions), len(outputs.decoder_attentions)) == depths
    assert len(outputs.past_key_values.self_attention_cache.layers) == depths[1]
    for beams in (1, 3):
        with_cache, without = (
            generated(model, given["input_ids"], num_beams=beams, use_cache=c)
            for c in (True, False)
        )
        assert with_cache.tolist() == without.tolist()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert_same(loaded(**given).logits, outputs.logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@over(ALL)
@attentions
def test_half_precision_stays_near_single(model_class, dtype, attention):
    model = build(model_class, attention)
    given = inputs(model)
    expected = result(model(**given))
    got = result(model.to(dtype)(**given))
    assert got.dtype == dtype
    assert_same(got.float(), expected, 0.15 if dtype == torch.bfloat16 else 0.02)


@over(ALL)
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "relative"])
def test_weights_start_as_documented(model_class, positions):
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
        # four and a half standard deviations of n numbers' statistics
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


def test_norms_of_root_mean_squares_start_as_the_identity():
    model = VanillaSeq2SeqModel(
        VanillaSeq2SeqConfig(
            vocab_size=9, d_model=8, d_ff=9, h=2, N=LAYERS, norm_type="rms_norm", final_norm=True
        )
    )
    norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
    assert len(norms) == (2 + 3) * LAYERS + 2 and all(torch.all(norm.weight == 1) for norm in norms)
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())


def test_scaled_tokens_start_about_as_large_as_positions():
    model = VanillaDecoderForCausalLM(
        VanillaDecoderConfig(vocab_size=500, d_model=256, d_ff=64, h=4, N=1)
    )
    scaled = model.model.embeddings.embed_tokens.weight * 16
    assert scaled.square().mean().item() == pytest.approx(1 / 3, rel=0.02)  # a sinusoid's is 1 / 2
    assert model.eval()(torch.randint(0, 500, (4, 50))).logits.std().item() == pytest.approx(
        1 / math.sqrt(3), rel=0.2
    )


# ---------------------------------------------------------------------------------- cross-attention


SOURCE_MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
cross_changes = pytest.mark.parametrize("changes", POSITIONS.values(), ids=list(POSITIONS))


@cross_changes
@attentions
def test_a_decoder_with_cross_attention_is_the_decoder_half_of_a_pair(attention, changes):
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
def test_a_decoder_with_cross_attention_keeps_the_source_in_its_cache(attention, changes):
    model = build(
        VanillaDecoderForCausalLM,
        attention,
        initializer_range=0.3,
        add_cross_attention=True,
        **changes,
    )
    target, source = tokens(3, 7), torch.randn(3, 4, D)
    given = dict(encoder_hidden_states=source, encoder_attention_mask=SOURCE_MASK[:, :4])
    expected = model(target, **given, use_cache=False).logits
    for first in (None, DynamicCache()):  # one for the target alone becomes a pair
        cache, logits = first, []
        for chunk in target.split([3, 1, 2, 1], 1):
            outputs = model(chunk, past_key_values=cache, use_cache=True, **given)
            cache = outputs.past_key_values
            logits.append(outputs.logits)
        assert type(cache) is EncoderDecoderCache
        assert_same(torch.cat(logits, 1), expected)
        widths = [layer.keys.shape for layer in cache.cross_attention_cache.layers]
        assert widths == [(3, HEADS, 4, D_K)] * LAYERS


def test_the_attention_to_the_source_can_be_looked_at():
    model = build(VanillaDecoderModel, "eager", add_cross_attention=True)
    outputs = model(
        tokens(3, 5), encoder_hidden_states=torch.randn(3, 4, D), output_attentions=True
    )
    assert [tuple(weights.shape) for weights in outputs.cross_attentions] == [
        (3, HEADS, 5, 4)
    ] * LAYERS
    assert [tuple(weights.shape) for weights in outputs.attentions] == [(3, HEADS, 5, 5)] * LAYERS


def test_a_decoder_with_cross_attention_but_no_source_is_a_decoder():
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
def test_a_source_for_a_decoder_without_cross_attention_is_an_error(model_class):
    with raises(ValueError, seen=("encoder_hidden_states", "decoder")):
        build(model_class)(tokens(), encoder_hidden_states=torch.randn(3, 4, D))


def test_a_decoder_with_cross_attention_is_saved_and_loaded_with_it(tmp_path):
    model = build(VanillaDecoderForCausalLM, initializer_range=0.3, add_cross_attention=True)
    given = dict(input_ids=tokens(), encoder_hidden_states=torch.randn(3, 4, D))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.add_cross_attention
    assert torch.equal(loaded(**given).logits, model(**given).logits)
