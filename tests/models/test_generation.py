"""Tests of caches, generation, and decoding in a compiled graph."""

import itertools

import pytest
import torch
from models import (
    BASE,
    D_K,
    D_V,
    GENERATIVE,
    HEADS,
    LAYERS,
    LENGTH,
    LENGTHS,
    PADDING,
    POSITIONS,
    START,
    assert_same,
    build,
    decoder_half,
    generated,
    inputs,
    is_pair,
    logits_after,
    over,
    padded,
    positions,
    tokens,
)
from torch._dynamo.utils import counters
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    EncoderDecoderModel,
    GenerationConfig,
    StaticCache,
    set_seed,
)

from vanilla_transformer import (
    VanillaDecoderForCausalLM,
    VanillaDecoderModel,
    VanillaEncoderModel,
    VanillaSeq2SeqForConditionalGeneration,
    VanillaSeq2SeqModel,
)

# ------------------------------------------------------------------------------------------- caches


def layer_shapes(cache):
    return [(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in cache.layers]


def test_decoder_caches_keys_of_width_d_k_and_values_of_width_d_v():
    cache = build(VanillaDecoderForCausalLM)(tokens(), use_cache=True).past_key_values
    assert type(cache) is DynamicCache
    assert layer_shapes(cache) == [((3, HEADS, LENGTH, D_K), (3, HEADS, LENGTH, D_V))] * LAYERS


def test_seq2seq_model_caches_target_and_source():
    model = build(VanillaSeq2SeqForConditionalGeneration, encoder_layers=3)
    source = tokens(length=4)
    cache = model(source, decoder_input_ids=tokens(length=5), use_cache=True).past_key_values
    before = [layer.keys for layer in cache.cross_attention_cache.layers]
    model(source, decoder_input_ids=tokens(length=1), past_key_values=cache, use_cache=True)
    assert type(cache) is EncoderDecoderCache
    assert (
        layer_shapes(cache.self_attention_cache)
        == [((3, HEADS, 6, D_K), (3, HEADS, 6, D_V))] * LAYERS
    )
    assert (
        layer_shapes(cache.cross_attention_cache)
        == [((3, HEADS, 4, D_K), (3, HEADS, 4, D_V))] * LAYERS
    )
    for layer, keys in zip(cache.cross_attention_cache.layers, before, strict=True):
        assert layer.keys is keys, "computed once"


def test_dynamic_cache_does_not_mix_target_and_source():
    model = build(VanillaSeq2SeqForConditionalGeneration)
    kwargs, cache = inputs(model), DynamicCache()
    assert_same(
        model(**kwargs, past_key_values=cache, use_cache=True).logits, model(**kwargs).logits
    )


@over(GENERATIVE)
def test_forward_accepts_cache_argument_of_transformers_5_24(model_class):
    model = build(model_class)
    name = "decoder_input_ids" if "decoder_input_ids" in inputs(model) else "input_ids"
    kwargs = inputs(model)
    expected = model(**kwargs).logits[:, -1:]
    cache = model(**kwargs | {name: kwargs[name][:, :-1]}, use_cache=True).past_key_values
    assert_same(
        model(**kwargs | {name: kwargs[name][:, -1:]}, cache=cache, use_cache=True).logits, expected
    )


@over(GENERATIVE)
def test_no_cache_without_use_cache(model_class):
    model = build(model_class, use_cache=False)
    assert model(**inputs(model)).past_key_values is None
    assert model(**inputs(model), use_cache=True).past_key_values is not None


# --------------------------------------------------------------------------------------- generation


CACHES = {
    "growing": dict(use_cache=True),
    "of fixed size": dict(cache_implementation="static", disable_compile=True),
    "none": dict(use_cache=False),
}


@over(GENERATIVE)
@positions
def test_greedy_generation_picks_largest_logit_with_any_cache(model_class, changes):
    model, prompt = build(model_class, initializer_range=0.3, **changes), tokens()
    expected, logits = torch.empty(3, 0, dtype=int), []
    seen = torch.full((3, 1), START) if is_pair(model) else prompt
    for _ in range(8):
        logits.append(logits_after(model, prompt, expected))
        best = (
            logits[-1]
            .scatter(1, torch.cat([seen, expected], 1), -torch.inf)
            .argmax(-1, keepdim=True)
        )
        expected = torch.cat([expected, best], 1)
    common = dict(
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        no_repeat_ngram_size=1,
        decoder_start_token_id=START,
    )
    for kind, settings in CACHES.items():
        outputs = model.generate(
            prompt, **common, **settings, output_logits=True, return_dict_in_generate=True
        )
        assert outputs.sequences[:, -8:].tolist() == expected.tolist(), kind
        assert_same(torch.stack(outputs.logits), torch.stack(logits))


@over(GENERATIVE)
def test_generation_from_embeddings_matches_generation_from_tokens(model_class):
    model, prompt = build(model_class), tokens()
    settings = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, decoder_start_token_id=START)
    settings |= dict(output_logits=True, return_dict_in_generate=True)
    from_tokens = model.generate(prompt, **settings)
    from_embeddings = model.generate(inputs_embeds=model.get_input_embeddings()(prompt), **settings)
    assert from_embeddings.sequences[:, -8:].tolist() == from_tokens.sequences[:, -8:].tolist()
    assert_same(torch.stack(from_embeddings.logits), torch.stack(from_tokens.logits))


@over(GENERATIVE)
def test_exhaustive_beam_search_finds_most_probable_sequence(model_class):
    model = build(model_class, vocab_size=6)
    prompt = torch.tensor([[3, 4, 5], [5, 3, 3]])
    best = []
    for row in prompt:
        pairs = torch.tensor(list(itertools.product(range(6), repeat=2)))
        rows = row.expand(36, -1)
        first = logits_after(model, rows, pairs[:, :0]).log_softmax(-1).gather(1, pairs[:, :1])
        second = logits_after(model, rows, pairs[:, :1]).log_softmax(-1).gather(1, pairs[:, 1:])
        best.append(pairs[(first + second).argmax()].tolist())
    assert (
        generated(
            model, prompt, num_beams=6, max_new_tokens=2, do_sample=False, no_repeat_ngram_size=0
        ).tolist()
        == best
    )


@over(GENERATIVE)
@positions
def test_beam_search_is_equal_with_any_cache(model_class, changes):
    model, prompt = build(model_class, initializer_range=0.3, **changes), tokens()
    result = [
        generated(model, prompt, num_beams=4, eos_token_id=7, **settings).tolist()
        for settings in CACHES.values()
    ]
    assert result[0] == result[1] == result[2]


@over(GENERATIVE)
def test_sampling_follows_seed_and_distribution(model_class):
    model, prompt = build(model_class, vocab_size=6), torch.tensor([[3, 4, 5]])
    runs = []
    for seed in (1, 1, 2):
        set_seed(seed)
        settings = dict(do_sample=True, max_new_tokens=1, top_k=0, no_repeat_ngram_size=0)
        runs.append(generated(model, prompt.expand(3000, -1), **settings)[:, 0])
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    frequencies = torch.bincount(runs[0], minlength=6) / 3000
    probabilities = logits_after(model, prompt, torch.empty(1, 0, dtype=int)).softmax(-1)[0]
    assert_same(frequencies, probabilities, 0.04)  # four standard deviations


# Without this a random model repeats one token, which proves little. The padding token is banned
# because some rows contain it and others do not.
NO_REPETITION = dict(no_repeat_ngram_size=1, bad_words_ids=[[PADDING]])


@over(GENERATIVE)
@positions
@pytest.mark.parametrize(
    "implementation", [None, "static"], ids=["growing cache", "cache of fixed size"]
)
def test_generation_from_padded_batch_matches_single_rows(model_class, changes, implementation):
    model = build(model_class, initializer_range=0.3, **changes)
    rows = [tokens(1, length)[0] for length in LENGTHS]
    ids, mask, _ = padded(rows, "right" if is_pair(model) else "left")
    settings = GenerationConfig(
        pad_token_id=0,
        decoder_start_token_id=START,
        max_new_tokens=8,
        do_sample=False,
        **NO_REPETITION,
    )
    kwargs = dict(attention_mask=mask, cache_implementation=implementation, disable_compile=True)
    batch = model.generate(ids, generation_config=settings, **kwargs)[:, -8:]
    alone = [model.generate(row[None], generation_config=settings)[0, -8:].tolist() for row in rows]
    assert batch.tolist() == alone


@pytest.mark.parametrize("beams", [1, 3])
def test_decoder_with_cross_attention_generates_from_encoder_states(beams):
    """An encoder-decoder model with the same weights generates the expected tokens."""
    pair = build(VanillaSeq2SeqForConditionalGeneration, initializer_range=0.3)
    decoder = decoder_half(pair, VanillaDecoderForCausalLM)
    source, mask = tokens(), torch.tensor([[1] * LENGTH, [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
    states = pair.model.encoder(source, mask).last_hidden_state
    settings = dict(
        num_beams=beams, max_new_tokens=8, do_sample=False, pad_token_id=0, no_repeat_ngram_size=1
    )
    expected = pair.generate(source, attention_mask=mask, decoder_start_token_id=START, **settings)
    start = torch.full((3, 1), START)
    actual = decoder.generate(
        start, encoder_hidden_states=states, encoder_attention_mask=mask, **settings
    )
    assert actual.tolist() == expected.tolist()
    assert (
        actual.tolist()
        != decoder.generate(start, encoder_hidden_states=states.flip(0), **settings).tolist()
    )


def test_encoder_decoder_model_matches_seq2seq_model():
    """Decoders with cross-attention exist for transformers' `EncoderDecoderModel`."""
    pair = build(VanillaSeq2SeqForConditionalGeneration, initializer_range=0.3)
    encoder = build(VanillaEncoderModel)
    encoder.load_state_dict(pair.model.encoder.state_dict())
    model = EncoderDecoderModel(
        encoder=encoder, decoder=decoder_half(pair, VanillaDecoderForCausalLM)
    ).eval()
    source, target, mask = (
        tokens(),
        tokens(3, 5),
        torch.tensor([[1] * LENGTH, [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]),
    )
    expected = pair(source, mask, target).logits
    assert_same(
        model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits, expected
    )
    settings = dict(
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        decoder_start_token_id=START,
        no_repeat_ngram_size=1,
    )
    actual, expected = (
        m.generate(source, attention_mask=mask, **settings).tolist() for m in (model, pair)
    )
    assert actual == expected


@positions
def test_generation_continues_left_padded_targets(changes):
    model, source = (
        build(VanillaSeq2SeqForConditionalGeneration, initializer_range=0.3, **changes),
        tokens(),
    )
    starts = [torch.cat([torch.tensor([START]), tokens(1, length - 1)[0]]) for length in LENGTHS]
    ids, mask, positions = padded(starts, "left")
    settings = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, **NO_REPETITION)
    target = dict(
        decoder_input_ids=ids, decoder_attention_mask=mask, decoder_position_ids=positions
    )
    batch = model.generate(source, **target, **settings)[:, -8:]
    alone = [
        model.generate(row[None], decoder_input_ids=start[None], **settings)[0, -8:].tolist()
        for row, start in zip(source, starts, strict=True)
    ]
    assert batch.tolist() == alone


# ---------------------------------------------------------------------------------------- compiling

# Unmarked cases trace one graph and run it eagerly. Slow cases cover more models, or compile to
# kernels.
slow = pytest.mark.slow
ALL_CASES = [(model_class, name) for model_class in BASE for name in POSITIONS]
FORWARD = [(VanillaEncoderModel, "relative"), (VanillaSeq2SeqModel, "sinusoidal")]
FORWARD_KERNELS = [*FORWARD, (VanillaDecoderModel, "rotary, window")]
DECODING = [(VanillaDecoderModel, "rotary")]
DECODING_KERNELS = [(VanillaDecoderModel, "rotary"), (VanillaSeq2SeqModel, "relative")]


def parametrize_backends(quick, every, kernels):
    """Parametrize a test by model class, positions and backend.

    Only eager cases in `quick` are not slow. Compiling to kernels takes longer than tracing.
    """
    cases = [pytest.param(*case, "eager", marks=[] if case in quick else slow) for case in every]
    cases += [pytest.param(*case, "inductor", marks=slow) for case in kernels]
    return pytest.mark.parametrize("model_class, name, backend", cases)


@pytest.fixture
def compiling():
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


@parametrize_backends(FORWARD, ALL_CASES, FORWARD_KERNELS)
def test_forward_compiles_into_one_graph(compiling, model_class, name, backend):
    model = build(model_class, initializer_range=0.3, **POSITIONS[name])
    kwargs = inputs(model)
    mask = torch.tensor([[1] * LENGTH, [1, 1, 1, 0, 0, 0], [1] * LENGTH])
    kwargs |= (
        dict(attention_mask=mask) if is_pair(model) or model_class is VanillaEncoderModel else {}
    )
    expected = model(**kwargs).last_hidden_state
    actual = torch.compile(model, fullgraph=True, backend=backend)(**kwargs).last_hidden_state
    assert_same(actual, expected)


@parametrize_backends(
    DECODING, [case for case in ALL_CASES if case[0] is not VanillaEncoderModel], DECODING_KERNELS
)
def test_decoding_with_static_cache_compiles_once(compiling, model_class, name, backend):
    model = build(model_class, initializer_range=0.3, **POSITIONS[name])
    source = dict(encoder_outputs=model.get_encoder()(tokens())) if is_pair(model) else {}
    ids_name, ids = "decoder_input_ids" if source else "input_ids", tokens(3, 9)
    expected = model(**source, **{ids_name: ids}, use_cache=False).last_hidden_state

    cache = StaticCache(config=model.config, max_cache_len=12)
    cache = EncoderDecoderCache(cache, DynamicCache()) if source else cache
    states = [model(**source, **{ids_name: ids[:, :3]}, past_key_values=cache).last_hidden_state]
    step, graphs = torch.compile(model, fullgraph=True, backend=backend), []
    counters.clear()
    for t in range(3, 9):
        states.append(
            step(
                **source, **{ids_name: ids[:, t : t + 1]}, past_key_values=cache
            ).last_hidden_state.clone()
        )
        graphs.append(counters["stats"]["unique_graphs"])
    assert_same(torch.cat(states, 1), expected)
    # Transformers counts the tokens of a window in a Python int, so the second step recompiles.
    assert graphs == ([1] + [2] * 5 if "window" in name else [1] * 6)
