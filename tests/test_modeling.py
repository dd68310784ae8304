"""What the models promise as Hugging Face models: files, tying, dropout, caches, generation, padding, losses, errors."""

import itertools
import math

import numpy as np
import pytest
import torch
import transformers
from reference import position_encoding
from safetensors import safe_open
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, set_seed

import vanilla_transformer
from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaDecoderForCausalLM,
    VanillaDecoderModel,
    VanillaEncoderForMaskedLM,
    VanillaEncoderForSequenceClassification,
    VanillaEncoderModel,
    VanillaSeq2SeqConfig,
    VanillaSeq2SeqForConditionalGeneration,
    VanillaSeq2SeqModel,
)

V, D, HEADS, D_K, D_V, LAYERS, LENGTH = 30, 16, 2, 6, 10, 2, 6
START = 1

AUTO_CLASSES = [
    ("AutoModel", VanillaEncoderModel),
    ("AutoModelForMaskedLM", VanillaEncoderForMaskedLM),
    ("AutoModelForSequenceClassification", VanillaEncoderForSequenceClassification),
    ("AutoModel", VanillaDecoderModel),
    ("AutoModelForCausalLM", VanillaDecoderForCausalLM),
    ("AutoModel", VanillaSeq2SeqModel),
    ("AutoModelForSeq2SeqLM", VanillaSeq2SeqForConditionalGeneration),
]
ALL = [model_class for _, model_class in AUTO_CLASSES]
BASE = [VanillaEncoderModel, VanillaDecoderModel, VanillaSeq2SeqModel]
LANGUAGE_MODELS = [VanillaEncoderForMaskedLM, VanillaDecoderForCausalLM, VanillaSeq2SeqForConditionalGeneration]
GENERATIVE = LANGUAGE_MODELS[1:]


def name_of(model_class):
    return model_class.__name__.removeprefix("Vanilla")


def over(classes):
    return pytest.mark.parametrize("model_class", classes, ids=name_of)


attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])


def build(model_class, attention="sdpa", **changes):
    """A small model with d_k != d_v whose biases and norms are not the zeros and ones they start as."""
    is_pair = model_class.config_class is VanillaSeq2SeqConfig
    depth = dict(encoder_layers=LAYERS, decoder_layers=LAYERS) if is_pair else dict(num_hidden_layers=LAYERS)
    sizes = dict(vocab_size=V, d_model=D, d_ff=20, h=HEADS, d_k=D_K, d_v=D_V, max_position_embeddings=20) | depth
    sizes |= dict(eos_token_id=None)  # what is generated ends where a test says
    model = model_class(model_class.config_class(**sizes | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.empty_like(parameter).uniform_(-0.3, 0.3)
    model.set_attn_implementation(attention)
    return model.eval()


def is_pair(model):
    return model.config.is_encoder_decoder


def tokens(rows=3, length=LENGTH):
    return torch.randint(3, V, (rows, length))


def inputs(model, rows=3):
    """What `forward` needs at least."""
    given = dict(input_ids=tokens(rows))
    return given | dict(decoder_input_ids=tokens(rows, 5)) if is_pair(model) else given


def result(outputs):
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state


def assert_same(got, expected, tolerance=1e-5):
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


# ----------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("auto_name, model_class", AUTO_CLASSES, ids=[name_of(c) for c in ALL])
def test_auto_classes_load_what_was_saved(auto_name, model_class, tmp_path):
    model = build(model_class)
    given = inputs(model)
    model.save_pretrained(tmp_path)
    loaded = getattr(transformers, auto_name).from_pretrained(tmp_path)
    assert type(loaded) is model_class
    assert torch.equal(result(loaded(**given)), result(model(**given)))


def test_every_model_class_is_covered_here():
    public = [getattr(vanilla_transformer, name) for name in vanilla_transformer.__all__]
    models = {item for item in public if isinstance(item, type) and issubclass(item, nn.Module)}
    assert models - {vanilla_transformer.VanillaPreTrainedModel} == set(ALL)


@pytest.mark.parametrize("head, base", list(zip(LANGUAGE_MODELS, BASE, strict=True)), ids=["encoder", "decoder", "seq2seq"])
def test_a_base_model_loads_from_the_checkpoint_of_a_head(head, base, tmp_path):
    model = build(head)
    given = inputs(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is base
    assert torch.equal(loaded(**given).last_hidden_state, model.model(**given).last_hidden_state)


def test_a_new_head_on_a_loaded_body_starts_as_initialised(tmp_path):
    body = build(VanillaEncoderModel)
    body.save_pretrained(tmp_path)
    classifier = VanillaEncoderForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    given = dict(input_ids=tokens())
    assert torch.equal(classifier.model(**given).last_hidden_state, body(**given).last_hidden_state)
    assert classifier.classifier.weight.abs().max() <= math.sqrt(6 / (D + 3))
    assert classifier.classifier.weight.std() > 0 and not classifier.classifier.bias.any()


# ---------------------------------------------------------------------------------------------------------------- tying


def matrices(model):
    """All that may be tied: token embeddings, and the projection to the vocabulary."""
    found = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return found + ([model.lm_head.weight] if hasattr(model, "lm_head") else [])


def saved_matrices(directory):
    with safe_open(directory / "model.safetensors", "pt") as file:
        return [name for name in file.keys() if list(file.get_slice(name).get_shape()) == [V, D]]  # noqa: SIM118


@over([*LANGUAGE_MODELS, VanillaSeq2SeqModel])
def test_tied_matrices_are_one_parameter_and_one_tensor_in_the_file(model_class, tmp_path):
    model = build(model_class)
    assert len(matrices(model)) > 1 and len({id(matrix) for matrix in matrices(model)}) == 1
    model.save_pretrained(tmp_path)
    assert len(saved_matrices(tmp_path)) == 1
    assert len({id(matrix) for matrix in matrices(model_class.from_pretrained(tmp_path))}) == 1


@over([*LANGUAGE_MODELS, VanillaSeq2SeqModel])
def test_untied_matrices_are_separate_and_come_back_as_they_were(model_class, tmp_path):
    model = build(model_class, tie_word_embeddings=False)
    count = len(matrices(model))
    assert count > 1 and len({id(matrix) for matrix in matrices(model)}) == count
    model.save_pretrained(tmp_path)
    assert len(saved_matrices(tmp_path)) == count
    for loaded, saved in zip(matrices(model_class.from_pretrained(tmp_path)), matrices(model), strict=True):
        assert torch.equal(loaded, saved)
    assert not torch.equal(*matrices(model)[-2:])


# -------------------------------------------------------------------------------------------------------------- dropout

NO_DROPOUT = dict(embedding_dropout=0, dropout=0, attention_dropout=0, activation_dropout=0, classifier_dropout=0)


def fields_of(model_class):
    return [n for n in NO_DROPOUT if n != "classifier_dropout" or "Classification" in model_class.__name__]


@pytest.mark.parametrize(
    "model_class, field", [(c, f) for c in ALL for f in fields_of(c)], ids=lambda x: getattr(x, "__name__", x)
)
@attentions
def test_each_dropout_alone_changes_training_and_never_evaluation(model_class, field, attention):
    plain = build(model_class, attention, **NO_DROPOUT)
    dropping = build(model_class, attention, **NO_DROPOUT | {field: 0.5})
    dropping.load_state_dict(plain.state_dict())
    given = inputs(plain)
    expected = result(plain(**given))
    assert torch.equal(result(dropping(**given)), expected)
    assert_same(result(plain.train()(**given)), expected)
    assert not torch.allclose(result(dropping.train()(**given)), expected, atol=1e-3)


def record(module):
    """What goes in and what comes out, once the model runs."""
    seen = {}

    def keep(_, given, output):
        seen["in"], seen["out"] = given[0].detach(), (output[0] if isinstance(output, tuple) else output).detach()

    module.register_forward_hook(keep)
    return seen


def assert_dropped(got, kept, p=0.5):
    """Every entry is 0, or what it was divided by 1 - p, and there are both."""
    zero, scaled = got.abs() < 1e-6, (got - kept / (1 - p)).abs() < 1e-5
    real = kept.abs() > 1e-4
    assert torch.all(zero | scaled)
    assert (zero & real).any() and (scaled & real).any()


@pytest.mark.parametrize("norm", [False, True], ids=["no norm", "behind the embedding norm"])
def test_embedding_dropout_acts_on_the_sum_of_embeddings_and_positions(norm):
    model = build(VanillaEncoderModel, **NO_DROPOUT | dict(embedding_dropout=0.5, embedding_norm=norm))
    given = inputs(model)
    seen = record(model.embeddings)
    model(**given)
    kept = seen["out"]
    model.train()(**given)
    assert_dropped(seen["out"], kept)


@pytest.mark.parametrize("sublayer", ["self_attn", "cross_attn", "feed_forward"])
def test_dropout_acts_on_the_output_of_each_sublayer_before_the_residual_sum(sublayer):
    model = build(VanillaSeq2SeqModel, **NO_DROPOUT | dict(dropout=0.5))
    layer = model.decoder.layers[0]
    inside, norm = record(getattr(layer, sublayer)), record(getattr(layer, sublayer + "_norm"))
    model.train()(**inputs(model))
    assert_dropped(norm["in"] - inside["in"], inside["out"])


def test_dropout_acts_on_the_output_of_each_sublayer_before_the_residual_sum_of_pre_norm():
    model = build(VanillaSeq2SeqModel, **NO_DROPOUT | dict(dropout=0.5, norm_first=True))
    layer, names = model.decoder.layers[0], ["self_attn", "cross_attn", "feed_forward"]
    inside = [record(getattr(layer, name)) for name in names]
    stream = [record(getattr(layer, name + "_norm")) for name in names]
    whole = record(layer)
    model.train()(**inputs(model))
    states = [norm["in"] for norm in stream] + [whole["out"]]
    for before, after, sublayer in zip(states, states[1:], inside, strict=False):
        assert_dropped(after - before, sublayer["out"])


@pytest.mark.parametrize("kind", ["encoder_attentions", "decoder_attentions", "cross_attentions"])
def test_attention_dropout_acts_on_the_attention_weights(kind):
    model = build(VanillaSeq2SeqModel, "eager", **NO_DROPOUT | dict(attention_dropout=0.5))
    for module in model.modules():  # what an attention sees must not depend on what those in front of it drop
        if type(module).__name__ == "VanillaAttention":
            module.o_proj.weight.data.zero_()
    given = inputs(model) | dict(output_attentions=True)
    kept = model(**given)[kind][0]
    assert_dropped(model.train()(**given)[kind][0], kept)


def test_activation_dropout_acts_on_the_activation():
    model = build(VanillaEncoderModel, **NO_DROPOUT | dict(activation_dropout=0.5))
    up, down = (record(getattr(model.layers[0].feed_forward, name)) for name in ("up_proj", "down_proj"))
    model.train()(**inputs(model))
    assert_dropped(down["in"], up["out"].clamp(min=0))


def test_classifier_dropout_acts_in_front_of_the_classifier():
    model = build(VanillaEncoderForSequenceClassification, **NO_DROPOUT | dict(classifier_dropout=0.5))
    seen = record(model.classifier)
    given = inputs(model)
    first = model.model(**given).last_hidden_state[:, 0]
    model.train()(**given)
    assert_dropped(seen["in"], first)


# --------------------------------------------------------------------------------------------------------------- caches


def layer_shapes(cache):
    return [(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in cache.layers]


def test_a_decoder_caches_keys_of_width_d_k_and_values_of_width_d_v():
    cache = build(VanillaDecoderForCausalLM)(tokens(), use_cache=True).past_key_values
    assert type(cache) is DynamicCache
    assert layer_shapes(cache) == [((3, HEADS, LENGTH, D_K), (3, HEADS, LENGTH, D_V))] * LAYERS


def test_a_pair_of_stacks_caches_the_target_and_the_source():
    model = build(VanillaSeq2SeqForConditionalGeneration, encoder_layers=3)
    source = tokens(length=4)
    cache = model(source, decoder_input_ids=tokens(length=5), use_cache=True).past_key_values
    before = [layer.keys for layer in cache.cross_attention_cache.layers]
    model(source, decoder_input_ids=tokens(length=1), past_key_values=cache, use_cache=True)
    assert type(cache) is EncoderDecoderCache
    assert layer_shapes(cache.self_attention_cache) == [((3, HEADS, 6, D_K), (3, HEADS, 6, D_V))] * LAYERS
    assert layer_shapes(cache.cross_attention_cache) == [((3, HEADS, 4, D_K), (3, HEADS, 4, D_V))] * LAYERS
    for layer, keys in zip(cache.cross_attention_cache.layers, before, strict=True):
        assert layer.keys is keys, "computed once"


def test_a_cache_of_one_kind_does_not_mix_target_and_source():
    model = build(VanillaSeq2SeqForConditionalGeneration)
    given, cache = inputs(model), DynamicCache()
    assert_same(model(**given, past_key_values=cache, use_cache=True).logits, model(**given).logits)


@over(GENERATIVE)
def test_no_cache_unless_asked_for(model_class):
    model = build(model_class, use_cache=False)
    assert model(**inputs(model)).past_key_values is None
    assert model(**inputs(model), use_cache=True).past_key_values is not None


# ----------------------------------------------------------------------------------------------------------- generation


def logits_after(model, prompt, target, **given):
    """Of the next token, without a cache: `target` follows the prompt, or the start token in a pair of stacks."""
    with torch.no_grad():
        if is_pair(model):
            start = torch.full((len(target), 1), START)
            return model(prompt, decoder_input_ids=torch.cat([start, target], 1), use_cache=False, **given).logits[:, -1]
        return model(torch.cat([prompt, target], 1), use_cache=False, **given).logits[:, -1]


def generated(model, prompt, **settings):
    """Only what is new."""
    settings = dict(pad_token_id=0, decoder_start_token_id=START, max_new_tokens=8) | settings
    output = model.generate(prompt, generation_config=GenerationConfig(**settings))
    return output[:, 1 if is_pair(model) else prompt.shape[1] :]


@over(GENERATIVE)
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
@attentions
def test_greedy_generation_takes_the_largest_logit(model_class, use_cache, attention):
    model, prompt = build(model_class, attention), tokens()
    expected = torch.empty(3, 0, dtype=int)
    for _ in range(8):
        expected = torch.cat([expected, logits_after(model, prompt, expected).argmax(-1, keepdim=True)], 1)
    assert generated(model, prompt, do_sample=False, use_cache=use_cache).tolist() == expected.tolist()


@over(GENERATIVE)
@attentions
def test_a_cache_of_fixed_size_generates_the_same(model_class, attention):
    model, prompt = build(model_class, attention), tokens()
    static = generated(model, prompt, do_sample=False, cache_implementation="static", disable_compile=True)
    assert static.tolist() == generated(model, prompt, do_sample=False).tolist()


@over(GENERATIVE)
def test_generation_from_embeddings_is_that_from_their_tokens(model_class):
    model, prompt = build(model_class), tokens()
    settings = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, decoder_start_token_id=START)
    from_embeddings = model.generate(inputs_embeds=model.get_input_embeddings()(prompt), **settings)
    assert from_embeddings[:, -8:].tolist() == generated(model, prompt, do_sample=False).tolist()


@over(GENERATIVE)
def test_beams_that_keep_everything_find_the_most_probable_sequence(model_class):
    model = build(model_class, vocab_size=6)
    prompt = torch.tensor([[3, 4, 5], [5, 3, 3]])
    best = []
    for row in prompt:
        pairs = torch.tensor(list(itertools.product(range(6), repeat=2)))
        rows = row.expand(36, -1)
        first = logits_after(model, rows, pairs[:, :0]).log_softmax(-1).gather(1, pairs[:, :1])
        second = logits_after(model, rows, pairs[:, :1]).log_softmax(-1).gather(1, pairs[:, 1:])
        best.append(pairs[(first + second).argmax()].tolist())
    assert generated(model, prompt, num_beams=6, max_new_tokens=2, do_sample=False).tolist() == best


@over(GENERATIVE)
@attentions
def test_beams_find_the_same_with_and_without_the_cache(model_class, attention):
    model, prompt = build(model_class, attention), tokens()
    with_cache, without = (generated(model, prompt, num_beams=4, use_cache=use, eos_token_id=7) for use in (True, False))
    assert with_cache.tolist() == without.tolist()


@over(GENERATIVE)
def test_sampling_follows_the_seed_and_the_distribution(model_class):
    model, prompt = build(model_class, vocab_size=6), torch.tensor([[3, 4, 5]])
    runs = []
    for seed in (1, 1, 2):
        set_seed(seed)
        runs.append(generated(model, prompt.expand(3000, -1), do_sample=True, max_new_tokens=1, top_k=0)[:, 0])
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    frequencies = torch.bincount(runs[0], minlength=6) / 3000
    probabilities = logits_after(model, prompt, torch.empty(1, 0, dtype=int)).softmax(-1)[0]
    assert_same(frequencies, probabilities, 0.04)  # four standard deviations


# -------------------------------------------------------------------------------------------------------------- padding

LENGTHS = [6, 3, 5]


def padded(rows, side):
    """Ids, mask and positions of rows of different lengths; the padding is a token like any other, so it would show."""
    ids, mask = torch.full((len(rows), LENGTH), 4), torch.zeros(len(rows), LENGTH, dtype=int)
    for i, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(LENGTH - len(row), LENGTH)
        ids[i, where], mask[i, where] = row, 1
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@over([VanillaEncoderForMaskedLM, VanillaDecoderForCausalLM])
@attentions
def test_a_padded_row_equals_the_row_alone(model_class, side, positions, attention):
    model = build(model_class, attention, position_embedding_type=positions)
    rows = [tokens(1, length)[0] for length in LENGTHS]
    ids, mask, position_ids = padded(rows, side)
    logits = model(ids, mask, **dict(position_ids=position_ids) if side == "left" else {}).logits
    for row, got, real in zip(rows, logits, mask.bool(), strict=True):
        assert_same(got[real], model(row[None]).logits[0])


@pytest.mark.parametrize("side", ["left", "right"])
@attentions
def test_a_padded_target_equals_the_target_alone(side, attention):
    model = build(VanillaSeq2SeqForConditionalGeneration, attention)
    sources, targets = ([tokens(1, length)[0] for length in lengths] for lengths in (LENGTHS, LENGTHS[::-1]))
    source, source_mask, _ = padded(sources, "right")
    target, target_mask, positions = padded(targets, side)
    given = dict(decoder_position_ids=positions) if side == "left" else {}
    logits = model(source, source_mask, target, target_mask, **given).logits
    for row, answer, got, real in zip(sources, targets, logits, target_mask.bool(), strict=True):
        assert_same(got[real], model(row[None], decoder_input_ids=answer[None]).logits[0])


@over(GENERATIVE)
def test_generation_from_padded_rows_equals_the_rows_alone(model_class):
    model = build(model_class)
    rows = [tokens(1, length)[0] for length in LENGTHS]
    ids, mask, _ = padded(rows, "right" if is_pair(model) else "left")
    settings = GenerationConfig(pad_token_id=0, decoder_start_token_id=START, max_new_tokens=8, do_sample=False)
    batch = model.generate(ids, attention_mask=mask, generation_config=settings)[:, -8:]
    alone = [model.generate(row[None], generation_config=settings)[0, -8:].tolist() for row in rows]
    assert batch.tolist() == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@over(ALL)
@attentions
def test_a_row_of_padding_is_finite_and_leaves_the_others_alone(model_class, attention, dtype):
    model = build(model_class, attention).to(dtype)
    given = inputs(model)
    mask = torch.ones(3, LENGTH, dtype=int)
    mask[1] = 0
    masks = dict(attention_mask=mask) | (dict(decoder_attention_mask=mask[:, :5]) if is_pair(model) else {})
    got = result(model(**given, **masks))
    others = [0, 2]
    alone = result(model(**{name: value[others] for name, value in (given | masks).items()}))
    assert got.isfinite().all()
    assert_same(got[others], alone, 1e-5 if dtype == torch.float32 else 2e-2)


def test_generation_goes_on_from_left_padded_targets():
    model, source = build(VanillaSeq2SeqForConditionalGeneration), tokens()
    starts = [torch.cat([torch.tensor([START]), tokens(1, length - 1)[0]]) for length in LENGTHS]
    ids, mask, positions = padded(starts, "left")
    settings = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    target = dict(decoder_input_ids=ids, decoder_attention_mask=mask, decoder_position_ids=positions)
    batch = model.generate(source, **target, **settings)[:, -8:]
    alone = [
        model.generate(row[None], decoder_input_ids=start[None], **settings)[0, -8:].tolist()
        for row, start in zip(source, starts, strict=True)
    ]
    assert batch.tolist() == alone


@attentions
def test_a_row_of_padding_with_very_negative_scores_is_finite_in_float16(attention):
    model = build(VanillaEncoderModel, attention)
    for layer in model.layers:
        layer.self_attn.q_proj.bias.data.fill_(8)
        layer.self_attn.k_proj.bias.data.fill_(-8)  # every score is below -16, half the last step of float16
    mask = torch.ones(3, LENGTH, dtype=int)
    mask[1] = 0
    assert model.half()(tokens(), attention_mask=mask).last_hidden_state.isfinite().all()


# ------------------------------------------------------------------------------------------------------------- training


def labels_for(model, given):
    if isinstance(model, VanillaEncoderForSequenceClassification):
        return torch.tensor([0, 1, 0])
    like = given["decoder_input_ids" if is_pair(model) else "input_ids"]
    return tokens(*like.shape)


HEADS_WITH_LOSS = [*LANGUAGE_MODELS, VanillaEncoderForSequenceClassification]


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@over(HEADS_WITH_LOSS)
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(model_class, reentrant):
    model = build(model_class, dropout=0.2, embedding_dropout=0.2, attention_dropout=0.2, activation_dropout=0.2).train()
    given = inputs(model)
    given |= dict(labels=labels_for(model, given))

    def loss_and_gradients():
        set_seed(1)  # the same dropout, which checkpointing has to draw again
        model.zero_grad()
        loss = model(**given).loss
        loss.backward()
        return [loss.detach()] + [parameter.grad.clone() for parameter in model.parameters()]

    calls = []
    for module in model.modules():
        if type(module).__name__ == "VanillaFeedForward":
            module.register_forward_hook(lambda *_: calls.append(1))
    expected = loss_and_gradients()
    layers = len(calls)
    model.activation_checkpointing_enable(dict(use_reentrant=reentrant))
    if reentrant:
        model.enable_input_require_grads()
    for got, wanted in zip(loss_and_gradients(), expected, strict=True):
        assert_same(got, wanted, 1e-6)
    assert len(calls) == 3 * layers, "once without, and with checkpointing once more in the backward pass"


def cross_entropy(logits, labels, divisor=None):
    """-log softmax(logits)[label], summed over the labels that are not -100, over their number or another."""
    total, count = 0.0, 0
    for row, label in zip(
        logits.detach().double().numpy().reshape(-1, logits.shape[-1]), labels.flatten().tolist(), strict=True
    ):
        if label != -100:
            total += np.log(np.exp(row - row.max()).sum()) + row.max() - row[label]
            count += 1
    return total / (count if divisor is None else int(divisor))


LOSS_KWARGS = pytest.mark.parametrize(
    "divisor", [None, 17, torch.tensor(17)], ids=["mean", "num_items_in_batch", "num_items_in_batch as a tensor"]
)


def loss_of(model, divisor, **given):
    return model(**given, **{} if divisor is None else dict(num_items_in_batch=divisor)).loss.item()


@LOSS_KWARGS
def test_masked_language_model_loss_is_the_cross_entropy_of_the_labelled_tokens(divisor):
    model, given = build(VanillaEncoderForMaskedLM), dict(input_ids=tokens())
    labels = tokens().masked_fill(torch.rand(3, LENGTH) < 0.6, -100)
    expected = cross_entropy(model(**given).logits, labels, divisor)
    assert loss_of(model, divisor, **given, labels=labels) == pytest.approx(expected, rel=1e-5)


@LOSS_KWARGS
def test_causal_loss_is_the_cross_entropy_of_the_next_token(divisor):
    model, given = build(VanillaDecoderForCausalLM), dict(input_ids=tokens())
    labels = given["input_ids"].clone()
    labels[1, 3:] = -100
    expected = cross_entropy(model(**given).logits[:, :-1], labels[:, 1:], divisor)
    assert loss_of(model, divisor, **given, labels=labels) == pytest.approx(expected, rel=1e-5)


@LOSS_KWARGS
def test_seq2seq_loss_is_the_cross_entropy_of_the_labels_where_they_stand(divisor):
    model, source, labels = build(VanillaSeq2SeqForConditionalGeneration), tokens(), tokens(3, 4)
    labels[1, 2:] = -100
    shifted = torch.tensor([[START, *row[:-1]] for row in labels.tolist()]).masked_fill(labels.roll(1, 1) == -100, 0)
    shifted[:, 0] = START
    expected = cross_entropy(model(source, decoder_input_ids=shifted).logits, labels, divisor)
    assert loss_of(model, divisor, input_ids=source, labels=labels) == pytest.approx(expected, rel=1e-5)
    given = dict(input_ids=source, decoder_input_ids=shifted, labels=labels)
    assert loss_of(model, divisor, **given) == pytest.approx(expected, rel=1e-5)


@LOSS_KWARGS
def test_classification_loss_is_the_cross_entropy_of_the_class(divisor):
    model, given = build(VanillaEncoderForSequenceClassification, num_labels=3), dict(input_ids=tokens())
    labels = torch.tensor([2, 0, 1])
    expected = cross_entropy(model(**given).logits, labels, divisor)
    assert loss_of(model, divisor, **given, labels=labels) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("divisor", [None, 17], ids=["mean", "num_items_in_batch"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_regression_loss_is_the_mean_square(num_labels, divisor):
    model = build(VanillaEncoderForSequenceClassification, num_labels=num_labels, problem_type="regression")
    given, labels = dict(input_ids=tokens()), torch.randn(3, num_labels)
    logits = model(**given).logits
    assert logits.shape == (3, num_labels)
    expected = np.mean((logits.detach().numpy() - labels.numpy()) ** 2)
    assert loss_of(model, divisor, **given, labels=labels) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("divisor", [None, 17], ids=["mean", "num_items_in_batch"])
def test_multi_label_loss_is_the_mean_binary_cross_entropy(divisor):
    model = build(VanillaEncoderForSequenceClassification, num_labels=3, problem_type="multi_label_classification")
    given, labels = dict(input_ids=tokens()), torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1]])
    p = 1 / (1 + np.exp(-model(**given).logits.detach().double().numpy()))
    expected = -np.mean(np.log(np.where(labels.numpy() == 1, p, 1 - p)))
    assert loss_of(model, divisor, **given, labels=labels) == pytest.approx(expected, rel=1e-5)


def test_labels_become_decoder_inputs_behind_the_start_token_with_padding_for_ignored_ones():
    model = build(VanillaSeq2SeqForConditionalGeneration, pad_token_id=0, decoder_start_token_id=9)
    labels = torch.tensor([[5, 6, 7, 2], [5, 2, -100, -100]])
    assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == [[9, 5, 6, 7], [9, 5, 2, 0]]
    assert labels.tolist() == [[5, 6, 7, 2], [5, 2, -100, -100]], "left as they were"


@pytest.mark.parametrize("missing", ["pad_token_id", "decoder_start_token_id"])
def test_labels_cannot_be_shifted_without_padding_and_start_tokens(missing):
    model = build(VanillaSeq2SeqForConditionalGeneration, **{missing: None})
    with pytest.raises(ValueError, match=f"config.{missing} is None, expected a token id"):
        model.prepare_decoder_input_ids_from_labels(torch.tensor([[5, 6]]))
    with pytest.raises(ValueError, match=missing):
        model(tokens(), labels=tokens())


# --------------------------------------------------------------------------------------------------- inputs and outputs


@over(ALL)
def test_inputs_embeds_stand_in_for_input_ids(model_class):
    model = build(model_class)
    given = inputs(model)
    embedded = {name.replace("input_ids", "inputs_embeds"): model.get_input_embeddings()(v) for name, v in given.items()}
    assert torch.equal(result(model(**embedded)), result(model(**given)))


@over(ALL)
def test_input_ids_and_inputs_embeds_exclude_each_other(model_class):
    model = build(model_class)
    given = inputs(model)
    name = "decoder_input_ids" if is_pair(model) else "input_ids"
    both = {name.replace("input_ids", "inputs_embeds"): torch.zeros(*given[name].shape, D)}
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds must be given, got both"):
        model(**given, **both)
    del given[name]
    with pytest.raises(ValueError, match="one of (decoder_)?input_ids and (decoder_)?inputs_embeds must be given.*got neither"):
        model(**given)


def test_a_pair_of_stacks_needs_a_source():
    with pytest.raises(ValueError, match="one of (decoder_)?input_ids and (decoder_)?inputs_embeds must be given.*got neither"):
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
    assert torch.equal(result(model(**given, encoder_outputs=encoded, attention_mask=mask)), expected)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@over(ALL)
def test_attentions_sum_to_one_and_hidden_states_run_from_the_embeddings_to_the_last(model_class, norm_first):
    model = build(model_class, "eager", norm_first=norm_first)
    base = getattr(model, "model", model)
    given = inputs(model)
    outputs = model(**given, output_attentions=True, output_hidden_states=True)
    if is_pair(model):
        lengths = dict(encoder_attentions=(6, 6), decoder_attentions=(5, 5), cross_attentions=(5, 6))
        stacks = dict(encoder_hidden_states=base.encoder, decoder_hidden_states=base.decoder)
    else:
        lengths, stacks = dict(attentions=(6, 6)), dict(hidden_states=base)
    for name, shape in lengths.items():
        assert [tuple(weights.shape) for weights in outputs[name]] == [(3, HEADS, *shape)] * LAYERS
        for weights in outputs[name]:
            assert_same(weights.sum(-1), torch.ones(3, HEADS, shape[0]))
            assert torch.all(weights >= 0)
    for name, stack in stacks.items():
        ids = given["decoder_input_ids" if stack is getattr(base, "decoder", None) else "input_ids"]
        assert len(outputs[name]) == LAYERS + 1
        assert torch.equal(outputs[name][0], stack.embeddings(ids, None, None))
    last = [states for name in stacks for states in outputs[name]][-1]
    assert torch.equal(last, base(**given).last_hidden_state)


@over(ALL)
def test_outputs_are_a_tuple_when_asked_for(model_class):
    model = build(model_class)
    given = inputs(model)
    assert torch.equal(model(**given, return_dict=False)[0], result(model(**given)))


@over(GENERATIVE)
@pytest.mark.parametrize(
    "keep, kept", [(0, [0, 1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4]), (torch.tensor([1, 4]), [1, 4])], ids=str
)
def test_logits_to_keep(model_class, keep, kept):
    model = build(model_class)
    given = dict(input_ids=tokens(), decoder_input_ids=tokens(3, 5)) if is_pair(model) else dict(input_ids=tokens(3, 5))
    assert_same(model(**given, logits_to_keep=keep).logits, model(**given).logits[:, kept])


# ------------------------------------------------------------------------------------------------------ new vocabularies


@pytest.mark.parametrize("size", [V + 7, V - 7], ids=["larger", "smaller"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@over(LANGUAGE_MODELS)
def test_a_resized_vocabulary_keeps_the_old_logits_and_still_generates(model_class, bias, tied, size, tmp_path):
    model = build(model_class, tie_word_embeddings=tied, lm_head_bias=bias)
    given = {name: ids.clamp(max=V - 8) for name, ids in inputs(model).items()}
    old, common = model(**given).logits, min(size, V)
    model.resize_token_embeddings(size)
    logits = model(**given).logits
    assert logits.shape[-1] == model.config.vocab_size == size
    assert_same(logits[..., :common], old[..., :common])
    assert {len(matrix) for matrix in matrices(model)} == {size}
    assert len({id(matrix) for matrix in matrices(model)}) == (1 if tied else len(matrices(model)))

    with_newest = {name: torch.full_like(ids, size - 1) for name, ids in given.items()}
    labels = with_newest["decoder_input_ids" if is_pair(model) else "input_ids"]
    assert model(**with_newest, labels=labels).loss.isfinite()
    if model.can_generate():
        assert generated(model, given["input_ids"]).shape == (3, 8)
    model.save_pretrained(tmp_path)
    assert torch.equal(model_class.from_pretrained(tmp_path)(**given).logits, logits)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@over(BASE)
def test_a_base_model_with_a_resized_vocabulary(model_class, tied):
    model = build(model_class, tie_word_embeddings=tied)
    given = inputs(model)
    expected = result(model(**given))
    model.resize_token_embeddings(V + 7)
    assert torch.equal(result(model(**given)), expected)
    assert {len(matrix) for matrix in matrices(model)} == {V + 7}
    assert result(model(**{name: torch.full_like(ids, V + 6) for name, ids in given.items()})).isfinite().all()


# ------------------------------------------------------------------------------------------------------------- positions


@over(LANGUAGE_MODELS)
def test_a_position_beyond_a_learned_table_is_an_error_that_names_both(model_class):
    model = build(model_class, position_embedding_type="learned", max_position_embeddings=20)
    short = dict(decoder_input_ids=tokens(1, 2)) if is_pair(model) else {}
    assert model(tokens(1, 20), **short).logits.isfinite().all()
    with pytest.raises(ValueError, match="position 20 .*max_position_embeddings is 20"):
        model(tokens(1, 21), **short)
    if model_class is not VanillaSeq2SeqForConditionalGeneration:
        with pytest.raises(ValueError, match="position 25 .*max_position_embeddings is 20"):
            model(tokens(1, 2), position_ids=torch.tensor([[0, 25]]))


@over(GENERATIVE)
def test_generation_beyond_a_learned_table_is_the_same_error(model_class):
    model = build(model_class, position_embedding_type="learned", max_position_embeddings=10)
    with pytest.raises(ValueError, match="position 10 .*max_position_embeddings is 10"):
        generated(model, tokens(1, 6), max_new_tokens=12)


@pytest.mark.parametrize("dtype, step", [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)], ids=str)
def test_sinusoids_in_half_precision_are_the_formula_rounded(dtype, step):
    model = build(VanillaEncoderModel).to(dtype)  # which itself cannot tell 2049 from 2048
    got = model.embeddings(None, torch.zeros(1, 100, D, dtype=dtype), torch.arange(2000, 2100)[None])[0]
    expected = np.stack([position_encoding(position, D) for position in range(2000, 2100)])
    np.testing.assert_allclose(got.detach().float().numpy(), expected, atol=step + 1e-3)


@over(BASE)
def test_sinusoids_have_no_last_position(model_class):
    model = build(model_class, max_position_embeddings=20)
    stack = model.decoder if is_pair(model) else model
    expected = np.stack([position_encoding(position, D) for position in range(5000)])
    got = stack.embeddings(None, torch.zeros(1, 5000, D), None)[0].detach().numpy()
    np.testing.assert_allclose(got, expected, atol=2e-3)  # float32 knows 5,000 radians to 2.4e-4
    positions = {"decoder_position_ids" if is_pair(model) else "position_ids": torch.arange(4995, 5000)[None]}
    given = dict(input_ids=tokens(1, 5)) | (dict(decoder_input_ids=tokens(1, 5)) if is_pair(model) else {})
    assert result(model(**given, **positions)).isfinite().all()


# ------------------------------------------------------------------------------------------------- depth, precision, init


@pytest.mark.parametrize("depths", [(1, 3), (3, 1)], ids=str)
def test_stacks_of_different_depth_run_save_and_generate(depths, tmp_path):
    model = build(VanillaSeq2SeqForConditionalGeneration, "eager", encoder_layers=depths[0], decoder_layers=depths[1])
    given = inputs(model)
    outputs = model(**given, output_attentions=True, use_cache=True)
    assert (len(outputs.encoder_attentions), len(outputs.decoder_attentions)) == depths
    assert len(outputs.past_key_values.self_attention_cache.layers) == depths[1]
    for beams in (1, 3):
        with_cache, without = (generated(model, given["input_ids"], num_beams=beams, use_cache=c) for c in (True, False))
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
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_weights_start_as_documented(model_class, positions):
    width = dict(d_model=256, d_ff=300, h=4, vocab_size=500, max_position_embeddings=400)
    depth = dict(encoder_layers=1, decoder_layers=1) if model_class.config_class is VanillaSeq2SeqConfig else dict(N=1)
    untied = dict(tie_word_embeddings=False, position_embedding_type=positions, initializer_range=0.05)
    model = model_class(model_class.config_class(**width, **depth, **untied))
    kinds = set()
    for module in model.modules():
        kinds.add(type(module))
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.05, rel=0.1)
            assert abs(module.weight.mean()) < 0.005
            assert module.bias is None or not module.bias.any()
        elif isinstance(module, nn.Embedding):  # uniform within d_model^-0.5
            assert 0.99 / 16 < module.weight.abs().max() <= 1 / 16
            assert module.weight.std().item() == pytest.approx(1 / 16 / math.sqrt(3), rel=0.02)
            assert abs(module.weight.mean()) < 0.001
        elif isinstance(module, nn.LayerNorm):
            assert torch.all(module.weight == 1) and not module.bias.any()
    assert {nn.Linear, nn.Embedding, nn.LayerNorm} < kinds


def test_scaled_tokens_start_about_as_large_as_positions():
    model = VanillaDecoderForCausalLM(VanillaDecoderConfig(vocab_size=500, d_model=256, d_ff=64, h=4, N=1))
    scaled = model.model.embeddings.embed_tokens.weight * 16
    assert scaled.square().mean().item() == pytest.approx(1 / 3, rel=0.02)  # a sinusoid's is 1 / 2
    assert model.eval()(torch.randint(0, 500, (4, 50))).logits.std().item() == pytest.approx(1 / math.sqrt(3), rel=0.2)
