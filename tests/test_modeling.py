"""What the models promise as Hugging Face models: files, tying, dropout, inputs and outputs, sizes, precision, gradients."""

import math

import numpy as np
import pytest
import torch
import transformers
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
    RELATIVE,
    START,
    D,
    V,
    assert_same,
    attentions,
    build,
    decoder_half,
    generated,
    inputs,
    is_pair,
    name_of,
    over,
    result,
    tokens,
)
from reference import position_encoding
from safetensors import safe_open
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, set_seed

import vanilla_transformer
from vanilla_transformer import (
    VanillaDecoderConfig,
    VanillaDecoderForCausalLM,
    VanillaDecoderForSequenceClassification,
    VanillaDecoderModel,
    VanillaEncoderForPreTraining,
    VanillaEncoderForSequenceClassification,
    VanillaEncoderModel,
    VanillaSeq2SeqConfig,
    VanillaSeq2SeqForConditionalGeneration,
    VanillaSeq2SeqModel,
)

# ----------------------------------------------------------------------------------------------------------------- files


AUTO = [(auto_name, model_class) for classes in AUTO_CLASSES.values() for auto_name, model_class in classes.items()]


@pytest.mark.parametrize("changes", [{}, dict(pooler_act="tanh", lm_transform_act="gelu")], ids=["plain", "pooler, transform"])
@pytest.mark.parametrize("auto_name, model_class", AUTO, ids=[name_of(c) for c in ALL])
def test_auto_classes_load_what_was_saved(auto_name, model_class, changes, tmp_path):
    model = build(model_class, **changes if model_class in ENCODERS else {})
    given = inputs(model)
    model.save_pretrained(tmp_path)
    loaded = getattr(transformers, auto_name).from_pretrained(tmp_path)
    assert type(loaded) is model_class
    expected, got = model.state_dict(), loaded.state_dict()
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)
    # Not bit by bit: where a matrix lies in memory changes the last bit of a product with a vector.
    torch.testing.assert_close(result(loaded(**given)), result(model(**given)), rtol=0, atol=1e-6)


def parts(model):
    """The state dict with the names that all classes of a variant share."""
    return {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("saved", ALL, ids=name_of)
def test_every_auto_class_of_a_variant_loads_every_checkpoint_of_the_variant(saved, tmp_path):
    """What both have comes from the file, and that is the whole body; what only the loaded class has is new."""
    changes = dict(tie_word_embeddings=False)
    if saved in ENCODERS:
        changes |= dict(pooler_act="tanh", lm_transform_act="gelu", token_transform_act="gelu", type_vocab_size=2)
    model = build(saved, **changes)
    model.save_pretrained(tmp_path)
    variant = next(classes for classes in AUTO_CLASSES.values() if saved in classes.values())
    for auto_name, model_class in variant.items():
        loaded = getattr(transformers, auto_name).from_pretrained(tmp_path)
        assert type(loaded) is model_class
        theirs, ours = parts(model), parts(loaded)
        body = {name for name in parts(getattr(loaded, "model", loaded)) if not name.startswith("pooler")}
        assert body <= theirs.keys() & ours.keys()
        for name in theirs.keys() & ours.keys():
            assert torch.equal(ours[name], theirs[name]), (auto_name, name)


@over(ENCODERS)
def test_only_classes_that_read_the_pooler_have_one(model_class):
    uses = {"Model", "ForPreTraining", "ForNextSentencePrediction", "ForSequenceClassification", "ForMultipleChoice"}
    for act in ("tanh", None):
        names = {name for name, _ in build(model_class, pooler_act=act).named_parameters() if "pooler" in name}
        has = act is not None and name_of(model_class).removeprefix("Encoder") in uses
        prefix = "" if model_class is VanillaEncoderModel else "model."
        assert names == ({f"{prefix}pooler.dense.weight", f"{prefix}pooler.dense.bias"} if has else set())


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
    assert classifier.classifier.weight.std().item() == pytest.approx(0.02, rel=0.4)
    assert not classifier.classifier.bias.any()


# ---------------------------------------------------------------------------------------------------------------- tying


def matrices(model):
    """All that may be tied: token embeddings, and the projection to the vocabulary."""
    found = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return found + ([model.lm_head.weight] if hasattr(model, "lm_head") else [])


def saved_matrices(directory):
    with safe_open(directory / "model.safetensors", "pt") as file:
        return [name for name in file.keys() if list(file.get_slice(name).get_shape()) == [V, D]]  # noqa: SIM118


@over([*LANGUAGE_MODELS, VanillaEncoderForPreTraining, VanillaSeq2SeqModel])
def test_tied_matrices_are_one_parameter_and_one_tensor_in_the_file(model_class, tmp_path):
    model = build(model_class)
    assert len(matrices(model)) > 1 and len({id(matrix) for matrix in matrices(model)}) == 1
    model.save_pretrained(tmp_path)
    assert len(saved_matrices(tmp_path)) == 1
    assert len({id(matrix) for matrix in matrices(model_class.from_pretrained(tmp_path))}) == 1


@over([*LANGUAGE_MODELS, VanillaEncoderForPreTraining, VanillaSeq2SeqModel])
def test_untied_matrices_are_separate_and_come_back_as_they_were(model_class, tmp_path):
    model = build(model_class, tie_word_embeddings=False)
    count = len(matrices(model))
    assert count > 1 and len({id(matrix) for matrix in matrices(model)}) == count
    model.save_pretrained(tmp_path)
    assert len(saved_matrices(tmp_path)) == count
    for loaded, saved in zip(matrices(model_class.from_pretrained(tmp_path)), matrices(model), strict=True):
        assert torch.equal(loaded, saved)
    assert not torch.equal(*matrices(model)[-2:])


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "not shared"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@over([VanillaSeq2SeqModel, VanillaSeq2SeqForConditionalGeneration])
def test_which_matrices_of_a_pair_are_one_and_which_are_saved(model_class, tied, shared, tmp_path):
    """Tied, the target's embeddings are the projection's; shared too, they are the source's."""
    model = build(model_class, tie_word_embeddings=tied, share_encoder_decoder_embeddings=shared)
    has_head = model_class is VanillaSeq2SeqForConditionalGeneration
    count = {(True, True): 1, (True, False): 2}.get((tied, shared), 3 if has_head else 2)
    assert len({id(matrix) for matrix in matrices(model)}) == count
    source, target, *head = matrices(model)
    assert (source is target) == (tied and shared)
    assert [matrix is target for matrix in head] == [tied] * has_head
    given = inputs(model)
    model.save_pretrained(tmp_path)
    assert len(saved_matrices(tmp_path)) == count
    loaded = model_class.from_pretrained(tmp_path)
    assert len({id(matrix) for matrix in matrices(loaded)}) == count
    for ours, theirs in zip(matrices(loaded), matrices(model), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(result(loaded(**given)), result(model(**given)))


@pytest.mark.parametrize("size", [V + 7, V - 7], ids=["larger", "smaller"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@over([VanillaSeq2SeqModel, VanillaSeq2SeqForConditionalGeneration])
def test_embeddings_that_are_not_shared_are_resized_on_both_sides(model_class, tied, size, tmp_path):
    model = build(model_class, share_encoder_decoder_embeddings=False, tie_word_embeddings=tied)
    given = {name: ids.clamp(max=V - 8) for name, ids in inputs(model).items()}
    old, before = result(model(**given)), [matrix.clone() for matrix in matrices(model)]
    ones = len({id(matrix) for matrix in matrices(model)})
    model.resize_token_embeddings(size)
    common = min(size, V)
    assert len({id(matrix) for matrix in matrices(model)}) == ones
    for matrix, kept in zip(matrices(model), before, strict=True):
        assert len(matrix) == size and torch.equal(matrix[:common], kept[:common])
    got = result(model(**given))
    width = common if hasattr(model, "lm_head") else D
    assert_same(got[..., :width], old[..., :width])
    newest = {name: torch.full_like(ids, size - 1) for name, ids in given.items()}
    assert result(model(**newest)).isfinite().all()
    model.save_pretrained(tmp_path)
    assert torch.equal(result(model_class.from_pretrained(tmp_path)(**given)), got)


def test_a_source_embedding_learns_from_its_own_side_only_where_it_is_not_shared():
    model = build(VanillaSeq2SeqForConditionalGeneration, share_encoder_decoder_embeddings=False)
    source, labels = torch.full((3, LENGTH), 5), torch.full((3, 4), 7)
    model(source, labels=labels).loss.backward()
    encoder, decoder = (stack.embeddings.embed_tokens.weight.grad for stack in (model.model.encoder, model.model.decoder))
    assert encoder[5].any() and not encoder[[0, 1, 2, 3, 4, *range(6, V)]].any()
    assert decoder[START].any() and decoder[7].any() and decoder is model.lm_head.weight.grad


# -------------------------------------------------------------------------------------------------------------- dropout

NO_DROPOUT = dict(embedding_dropout=0, dropout=0, attention_dropout=0, activation_dropout=0, classifier_dropout=0)


def fields_of(model_class):
    heads = ("EncoderForSequenceClassification", "EncoderForTokenClassification", "EncoderForMultipleChoice")
    return [n for n in NO_DROPOUT if n != "classifier_dropout" or model_class.__name__.endswith(heads)]


@pytest.mark.parametrize(
    "model_class, field", [(c, f) for c in ALL for f in fields_of(c)], ids=lambda x: getattr(x, "__name__", x)
)
@attentions
def test_each_dropout_alone_changes_training_and_never_evaluation(model_class, field, attention):
    plain = build(model_class, attention, initializer_range=0.1, **NO_DROPOUT)
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


def test_no_dropout_acts_on_relative_positions():
    model = build(VanillaEncoderModel, "eager", **RELATIVE | NO_DROPOUT | dict(dropout=0.5, embedding_dropout=0.5))
    seen = record(model.relative_positions)
    model(**inputs(model))
    kept = seen["out"]
    model.train()(**inputs(model))
    assert torch.equal(seen["out"], kept)


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
        rows = given["input_ids"].flatten(0, -2).shape[0]
        assert [tuple(weights.shape) for weights in outputs[name]] == [(rows, HEADS, *shape)] * LAYERS
        for weights in outputs[name]:
            assert_same(weights.sum(-1), torch.ones(rows, HEADS, shape[0]))
            assert torch.all(weights >= 0)
    for name, stack in stacks.items():
        ids = given["decoder_input_ids" if stack is getattr(base, "decoder", None) else "input_ids"]
        assert len(outputs[name]) == LAYERS + 1
        embedded = stack.embeddings.embed_tokens(ids.flatten(0, -2))
        assert torch.equal(outputs[name][0], stack.embeddings(embedded, torch.arange(ids.shape[-1])[None]))
    last = [states for name in stacks for states in outputs[name]][-1]
    assert torch.equal(last, base(**{name: ids.flatten(0, -2) for name, ids in given.items()}).last_hidden_state)


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
    with pytest.raises(ValueError, match="token type 2 does not exist: type_vocab_size is 2"):
        model(**given, token_type_ids=types)
    types[1, 1] = 1
    assert not torch.allclose(result(model(**given, token_type_ids=types)), result(model(**given)), atol=1e-4)


@over(ENCODERS)
def test_a_model_without_token_types_takes_zeros_and_nothing_else(model_class):
    """Tokenizers give zeros to models without types too."""
    model = build(model_class)
    given = inputs(model)
    types = torch.zeros_like(given["input_ids"])
    assert torch.equal(result(model(**given, token_type_ids=types)), result(model(**given)))
    types[1, 1] = 1
    with pytest.raises(ValueError, match="token type 1 does not exist: type_vocab_size is 0"):
        model(**given, token_type_ids=types)


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
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "relative"])
def test_weights_start_as_documented(model_class, positions):
    width = dict(d_model=256, d_ff=300, h=4, vocab_size=500, max_position_embeddings=400)
    depth = dict(encoder_layers=1, decoder_layers=1) if model_class.config_class is VanillaSeq2SeqConfig else dict(N=1)
    untied = dict(tie_word_embeddings=False, position_embedding_type=positions, initializer_range=0.05)
    untied |= dict(relative_attention_num_buckets=500, relative_attention_max_distance=600, final_norm=True)
    if model_class in ENCODERS:
        untied |= dict(type_vocab_size=300, pooler_act="tanh", lm_transform_act="gelu", token_transform_act="gelu")
    model = model_class(model_class.config_class(**width, **depth, **untied))
    kinds = set()
    for module in model.modules():
        kinds.add(type(module))
        if isinstance(module, nn.Linear | nn.Embedding):  # four and a half standard deviations of n numbers' statistics
            n = module.weight.numel()
            normal = isinstance(module, nn.Linear)
            deviation = 0.05 if normal else 1 / 16 / math.sqrt(3)
            assert module.weight.std().item() == pytest.approx(deviation, rel=(3.2 if normal else 2) / math.sqrt(n))
            assert abs(module.weight.mean()) < 4.5 * deviation / math.sqrt(n)
            if normal:
                assert module.bias is None or not module.bias.any()
            else:  # uniform within d_model^-0.5
                assert 0.99 / 16 < module.weight.abs().max() <= 1 / 16
        elif isinstance(module, nn.LayerNorm):
            assert torch.all(module.weight == 1) and not module.bias.any()
    assert {nn.Linear, nn.Embedding, nn.LayerNorm} < kinds


def test_scaled_tokens_start_about_as_large_as_positions():
    model = VanillaDecoderForCausalLM(VanillaDecoderConfig(vocab_size=500, d_model=256, d_ff=64, h=4, N=1))
    scaled = model.model.embeddings.embed_tokens.weight * 16
    assert scaled.square().mean().item() == pytest.approx(1 / 3, rel=0.02)  # a sinusoid's is 1 / 2
    assert model.eval()(torch.randint(0, 500, (4, 50))).logits.std().item() == pytest.approx(1 / math.sqrt(3), rel=0.2)


# --------------------------------------------------------------------------------------------------------- cross-attention


SOURCE_MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
cross_changes = pytest.mark.parametrize("changes", POSITIONS.values(), ids=list(POSITIONS))


@cross_changes
@attentions
def test_a_decoder_with_cross_attention_is_the_decoder_half_of_a_pair(attention, changes):
    pair = build(VanillaSeq2SeqForConditionalGeneration, attention, initializer_range=0.3, encoder_layers=1, **changes)
    decoder = decoder_half(pair, VanillaDecoderForCausalLM, attention)
    source, target = tokens(), tokens(3, 5)
    for mask in (None, SOURCE_MASK):
        states = pair.model.encoder(source, mask).last_hidden_state
        got = decoder(target, encoder_hidden_states=states, encoder_attention_mask=mask).logits
        assert_same(got, pair(source, mask, target).logits)
        assert not torch.allclose(got, decoder(target, encoder_hidden_states=states.flip(0)).logits, atol=1e-3)


@cross_changes
@attentions
def test_a_decoder_with_cross_attention_keeps_the_source_in_its_cache(attention, changes):
    model = build(VanillaDecoderForCausalLM, attention, initializer_range=0.3, add_cross_attention=True, **changes)
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
    outputs = model(tokens(3, 5), encoder_hidden_states=torch.randn(3, 4, D), output_attentions=True)
    assert [tuple(weights.shape) for weights in outputs.cross_attentions] == [(3, HEADS, 5, 4)] * LAYERS
    assert [tuple(weights.shape) for weights in outputs.attentions] == [(3, HEADS, 5, 5)] * LAYERS


def test_a_decoder_with_cross_attention_but_no_source_is_a_decoder():
    model = build(VanillaDecoderForCausalLM, initializer_range=0.3, add_cross_attention=True)
    plain = build(VanillaDecoderForCausalLM)
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if "cross_attn" not in name})
    target = tokens()
    assert_same(model(target).logits, plain(target).logits)
    assert generated(model, target, do_sample=False).tolist() == generated(plain, target, do_sample=False).tolist()


@over([VanillaDecoderModel, VanillaDecoderForCausalLM, VanillaDecoderForSequenceClassification])
def test_a_source_for_a_decoder_without_cross_attention_is_an_error(model_class):
    with pytest.raises(ValueError, match="encoder_hidden_states were given to a decoder without cross-attention"):
        build(model_class)(tokens(), encoder_hidden_states=torch.randn(3, 4, D))


def test_a_decoder_with_cross_attention_is_saved_and_loaded_with_it(tmp_path):
    model = build(VanillaDecoderForCausalLM, initializer_range=0.3, add_cross_attention=True)
    given = dict(input_ids=tokens(), encoder_hidden_states=torch.randn(3, 4, D))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.add_cross_attention
    assert torch.equal(loaded(**given).logits, model(**given).logits)


# -------------------------------------------------------------------------------------------------- gradient checkpointing

DROPPING = dict(dropout=0.2, embedding_dropout=0.2, attention_dropout=0.2, activation_dropout=0.2)


def with_labels(model):
    given = inputs(model)
    if isinstance(model, VanillaEncoderForSequenceClassification):
        return given | dict(labels=torch.tensor([0, 1, 0]))
    like = given["decoder_input_ids" if is_pair(model) else "input_ids"]
    return given | dict(labels=tokens(*like.shape))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("changes", [{}, RELATIVE, POSITIONS["rotary"]], ids=["sinusoidal", "relative", "rotary"])
@over([*LANGUAGE_MODELS, VanillaEncoderForSequenceClassification])
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(model_class, changes, reentrant):
    model = build(model_class, initializer_range=0.3, **changes, **DROPPING).train()
    given = with_labels(model)

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
    tables = [parameter.grad for name, parameter in model.named_parameters() if "relative_positions" in name]
    assert len(tables) == (0 if changes is not RELATIVE else 2 if is_pair(model) else 1)
    assert all(table.abs().max() > 1e-4 for table in tables)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradient_checkpointing_keeps_the_gradients_of_the_source(reentrant):
    model = build(VanillaDecoderForCausalLM, initializer_range=0.3, add_cross_attention=True, **RELATIVE).train()
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    source, ids = torch.randn(3, 4, D, requires_grad=True), tokens()
    (expected,) = torch.autograd.grad(model(ids, encoder_hidden_states=source, labels=ids).loss, source)
    model.activation_checkpointing_enable(dict(use_reentrant=reentrant))
    model(ids, encoder_hidden_states=source, labels=ids).loss.backward()
    assert source.grad.abs().max() > 1e-5
    assert_same(source.grad, expected, 1e-6)
