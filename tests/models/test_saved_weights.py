"""Tests of saved weights: tied and untied tensors, older pickles, and resized vocabularies."""

import pickle
import re

import pytest
import torch
import transformers
from models import (
    ALL,
    AUTO_CLASSES,
    BASE,
    ENCODERS,
    LANGUAGE_MODELS,
    LENGTH,
    START,
    D,
    V,
    assert_same,
    build,
    generated,
    inputs,
    is_pair,
    over,
    result,
    short_name,
    tokens,
)
from safetensors import safe_open
from torch import nn

import vanilla_transformer
from vanilla_transformer import (
    VanillaEncoderForPreTraining,
    VanillaEncoderForSequenceClassification,
    VanillaEncoderModel,
    VanillaSeq2SeqForConditionalGeneration,
    VanillaSeq2SeqModel,
)

# -------------------------------------------------------------------------------------------- files


AUTO = [
    (auto_name, model_class)
    for classes in AUTO_CLASSES.values()
    for auto_name, model_class in classes.items()
]


NARROW = dict(embedding_size=10)


PARTS = {
    "plain": {},
    "pooler, transform": dict(pooler_act="tanh", lm_transform_act="gelu"),
    "narrow": NARROW,
    "narrow, norm": dict(embedding_norm=True, **NARROW),
}


# Base models and language models have all parts, other heads half of them in turn.
@pytest.mark.parametrize(
    "auto_name, model_class, changes",
    [
        pytest.param(auto_name, model_class, changes, id=f"{short_name(model_class)}-{name}")
        for place, (auto_name, model_class) in enumerate(AUTO)
        for turn, (name, changes) in enumerate(PARTS.items())
        if model_class in ENCODERS or name != "pooler, transform"
        if model_class in (*BASE, *LANGUAGE_MODELS) or (place + turn) % 2
    ],
)
def test_auto_classes_load_saved_model(auto_name, model_class, changes, tmp_path):
    model = build(model_class, **changes)
    model_inputs = inputs(model)
    model.save_pretrained(tmp_path)
    loaded = getattr(transformers, auto_name).from_pretrained(tmp_path)
    assert type(loaded) is model_class
    expected, got = model.state_dict(), loaded.state_dict()
    assert got.keys() == expected.keys() and all(
        torch.equal(got[name], expected[name]) for name in expected
    )
    # Not bit by bit: the memory address of a matrix changes the last bit of a product.
    torch.testing.assert_close(
        result(loaded(**model_inputs)), result(model(**model_inputs)), rtol=0, atol=1e-6
    )


# The classes of each module in the versions whose models may have been pickled.
PICKLED = {
    "configuration": ("Vanilla(Encoder|Decoder|Seq2Seq)Config",),
    "layers": (
        "VanillaAttention",
        "VanillaEmbeddings",
        "VanillaFeedForward",
        "VanillaLayer",
        "VanillaRelativePositions",
    ),
    "modeling": (
        "Vanilla(Encoder|Decoder|Seq2Seq)(Model|For[A-Za-z]+)",
        "VanillaPooler",
        "VanillaTransform",
    ),
}
EVERYTHING = dict(position_embedding_type="relative", pooler_act="tanh", lm_transform_act="gelu")


@over(ALL)
def test_model_pickled_by_earlier_version_loads(model_class):
    model = build(
        model_class,
        **EVERYTHING if model_class in ENCODERS else dict(position_embedding_type="relative"),
    )
    model_inputs = inputs(model)
    # protocol 2 names a class in text: "c", module, line feed, name, line feed
    stream = pickle.dumps(model, protocol=2)
    ours = rb"c(vanilla_transformer\.\w+\n)"
    actual = len(re.findall(ours, stream))
    replaced = 0
    for part, names in PICKLED.items():
        address = f"cvanilla_transformer.{part}_vanilla_transformer\n\\2\n".encode()
        stream, count = re.subn(ours + f"({'|'.join(names)})\n".encode(), address, stream)
        replaced += count
    assert replaced == actual > 4
    torch.testing.assert_close(
        result(pickle.loads(stream)(**model_inputs)), result(model(**model_inputs)), rtol=0, atol=0
    )


def parts(model):
    """Return the state dict with the names that all classes of a variant share."""
    return {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("saved", ALL, ids=short_name)
def test_every_auto_class_loads_every_checkpoint_of_its_variant(saved, tmp_path):
    """Tensors of both classes come from the file, which has the whole body.

    Tensors of the loaded class alone are newly initialized.
    """
    changes = dict(tie_word_embeddings=False)
    if saved in ENCODERS:
        changes |= dict(
            pooler_act="tanh",
            lm_transform_act="gelu",
            token_transform_act="gelu",
            type_vocab_size=2,
        )
    model = build(saved, **changes)
    model.save_pretrained(tmp_path)
    variant = next(classes for classes in AUTO_CLASSES.values() if saved in classes.values())
    for auto_name, model_class in variant.items():
        loaded = getattr(transformers, auto_name).from_pretrained(tmp_path)
        assert type(loaded) is model_class
        theirs, ours = parts(model), parts(loaded)
        body = {
            name
            for name in parts(getattr(loaded, "model", loaded))
            if not name.startswith("pooler")
        }
        assert body <= theirs.keys() & ours.keys()
        for name in theirs.keys() & ours.keys():
            assert torch.equal(ours[name], theirs[name]), (auto_name, name)


@over(ENCODERS)
def test_only_classes_that_use_pooler_have_pooler_weights(model_class):
    uses = {
        "Model",
        "ForPreTraining",
        "ForNextSentencePrediction",
        "ForSequenceClassification",
        "ForMultipleChoice",
    }
    for act in ("tanh", None):
        names = {
            name
            for name, _ in build(model_class, pooler_act=act).named_parameters()
            if "pooler" in name
        }
        has_pooler = act is not None and short_name(model_class).removeprefix("Encoder") in uses
        prefix = "" if model_class is VanillaEncoderModel else "model."
        assert names == (
            {f"{prefix}pooler.dense.weight", f"{prefix}pooler.dense.bias"} if has_pooler else set()
        )


def test_list_of_model_classes_is_complete():
    public = [getattr(vanilla_transformer, name) for name in vanilla_transformer.__all__]
    models = {item for item in public if isinstance(item, type) and issubclass(item, nn.Module)}
    # tested in the folder vision
    vision_models = {model for model in models if model.__name__.startswith("VanillaVision")}
    assert models - {vanilla_transformer.VanillaPreTrainedModel} - vision_models == set(ALL)


@pytest.mark.parametrize(
    "head, base",
    list(zip(LANGUAGE_MODELS, BASE, strict=True)),
    ids=["encoder", "decoder", "seq2seq"],
)
def test_base_model_loads_from_checkpoint_with_head(head, base, tmp_path):
    model = build(head)
    model_inputs = inputs(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is base
    assert torch.equal(
        loaded(**model_inputs).last_hidden_state, model.model(**model_inputs).last_hidden_state
    )


def test_new_head_on_loaded_body_is_initialized(tmp_path):
    body = build(VanillaEncoderModel)
    body.save_pretrained(tmp_path)
    classifier = VanillaEncoderForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    model_inputs = dict(input_ids=tokens())
    assert torch.equal(
        classifier.model(**model_inputs).last_hidden_state, body(**model_inputs).last_hidden_state
    )
    assert classifier.classifier.weight.std().item() == pytest.approx(0.02, rel=0.4)
    assert not classifier.classifier.bias.any()


# -------------------------------------------------------------------------------------------- tying


def matrices(model):
    """Return the matrices that may be tied: token embeddings and the output projection."""
    result = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return result + ([model.lm_head.weight] if hasattr(model, "lm_head") else [])


def saved_matrices(directory):
    with safe_open(directory / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return [name for name, shape in shapes.items() if list(shape) == [V, D]]


@over([*LANGUAGE_MODELS, VanillaEncoderForPreTraining, VanillaSeq2SeqModel])
def test_tied_matrices_are_one_parameter_and_one_saved_tensor(model_class, tmp_path):
    model = build(model_class)
    assert len(matrices(model)) > 1 and len({id(matrix) for matrix in matrices(model)}) == 1
    model.save_pretrained(tmp_path)
    assert len(saved_matrices(tmp_path)) == 1
    assert len({id(matrix) for matrix in matrices(model_class.from_pretrained(tmp_path))}) == 1


@over([*LANGUAGE_MODELS, VanillaEncoderForPreTraining, VanillaSeq2SeqModel])
def test_untied_matrices_are_separate_and_restored(model_class, tmp_path):
    model = build(model_class, tie_word_embeddings=False)
    count = len(matrices(model))
    assert count > 1 and len({id(matrix) for matrix in matrices(model)}) == count
    model.save_pretrained(tmp_path)
    assert len(saved_matrices(tmp_path)) == count
    for loaded, saved in zip(
        matrices(model_class.from_pretrained(tmp_path)), matrices(model), strict=True
    ):
        assert torch.equal(loaded, saved)
    assert not torch.equal(*matrices(model)[-2:])


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "not shared"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@over([VanillaSeq2SeqModel, VanillaSeq2SeqForConditionalGeneration])
def test_seq2seq_matrices_are_tied_and_saved_as_configured(model_class, tied, shared, tmp_path):
    """If tied, the projection is the target embedding; if shared too, the source embedding."""
    model = build(model_class, tie_word_embeddings=tied, share_encoder_decoder_embeddings=shared)
    has_head = model_class is VanillaSeq2SeqForConditionalGeneration
    count = {(True, True): 1, (True, False): 2}.get((tied, shared), 3 if has_head else 2)
    assert len({id(matrix) for matrix in matrices(model)}) == count
    source, target, *head = matrices(model)
    assert (source is target) == (tied and shared)
    assert [matrix is target for matrix in head] == [tied] * has_head
    model_inputs = inputs(model)
    model.save_pretrained(tmp_path)
    assert len(saved_matrices(tmp_path)) == count
    loaded = model_class.from_pretrained(tmp_path)
    assert len({id(matrix) for matrix in matrices(loaded)}) == count
    for ours, theirs in zip(matrices(loaded), matrices(model), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(result(loaded(**model_inputs)), result(model(**model_inputs)))


@pytest.mark.parametrize("size", [V + 7, V - 7], ids=["larger", "smaller"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@over([VanillaSeq2SeqModel, VanillaSeq2SeqForConditionalGeneration])
def test_unshared_embeddings_are_resized_on_both_sides(model_class, tied, size, tmp_path):
    model = build(model_class, share_encoder_decoder_embeddings=False, tie_word_embeddings=tied)
    model_inputs = {name: ids.clamp(max=V - 8) for name, ids in inputs(model).items()}
    old, before = result(model(**model_inputs)), [matrix.clone() for matrix in matrices(model)]
    num_matrices = len({id(matrix) for matrix in matrices(model)})
    model.resize_token_embeddings(size)
    common = min(size, V)
    assert len({id(matrix) for matrix in matrices(model)}) == num_matrices
    for matrix, kept in zip(matrices(model), before, strict=True):
        assert len(matrix) == size and torch.equal(matrix[:common], kept[:common])
    got = result(model(**model_inputs))
    width = common if hasattr(model, "lm_head") else D
    assert_same(got[..., :width], old[..., :width])
    newest = {name: torch.full_like(ids, size - 1) for name, ids in model_inputs.items()}
    assert result(model(**newest)).isfinite().all()
    model.save_pretrained(tmp_path)
    assert torch.equal(result(model_class.from_pretrained(tmp_path)(**model_inputs)), got)


def test_unshared_source_embedding_gets_gradients_from_source_only():
    model = build(VanillaSeq2SeqForConditionalGeneration, share_encoder_decoder_embeddings=False)
    source, labels = torch.full((3, LENGTH), 5), torch.full((3, 4), 7)
    model(source, labels=labels).loss.backward()
    encoder, decoder = (
        stack.embeddings.embed_tokens.weight.grad
        for stack in (model.model.encoder, model.model.decoder)
    )
    assert encoder[5].any() and not encoder[[0, 1, 2, 3, 4, *range(6, V)]].any()
    assert decoder[START].any() and decoder[7].any() and decoder is model.lm_head.weight.grad


# --------------------------------------------------------------------------------- new vocabularies


# Each two of these for each class: whether embeddings are narrow, a bias, and whether weights are
# tied. Each two of these and the size for all classes together.
RESIZED = [
    pytest.param(
        model_class,
        changes,
        bias,
        tied,
        V - 7 if is_narrow ^ bias ^ (place > 1) else V + 7,
        id=f"{short_name(model_class)}-{'narrow' if is_narrow else 'wide'}-{bias}-{tied}",
    )
    for place, model_class in enumerate(LANGUAGE_MODELS)
    for is_narrow, changes in enumerate([{}, NARROW])
    for bias in (True, False)
    for tied in (True, False)
    if is_narrow ^ bias ^ tied ^ (place % 2)
]


@pytest.mark.parametrize("model_class, changes, bias, tied, size", RESIZED)
def test_resized_vocabulary_keeps_old_logits_and_generates(
    model_class, changes, bias, tied, size, tmp_path
):
    model = build(model_class, tie_word_embeddings=tied, lm_head_bias=bias, **changes)
    model_inputs = {name: ids.clamp(max=V - 8) for name, ids in inputs(model).items()}
    old, common = model(**model_inputs).logits, min(size, V)
    model.resize_token_embeddings(size)
    logits = model(**model_inputs).logits
    assert logits.shape[-1] == model.config.vocab_size == size
    assert_same(logits[..., :common], old[..., :common])
    assert {len(matrix) for matrix in matrices(model)} == {size}
    assert len({id(matrix) for matrix in matrices(model)}) == (1 if tied else len(matrices(model)))

    with_newest = {name: torch.full_like(ids, size - 1) for name, ids in model_inputs.items()}
    labels = with_newest["decoder_input_ids" if is_pair(model) else "input_ids"]
    assert model(**with_newest, labels=labels).loss.isfinite()
    if model.can_generate():
        assert generated(model, model_inputs["input_ids"]).shape == (3, 8)
    model.save_pretrained(tmp_path)
    assert torch.equal(model_class.from_pretrained(tmp_path)(**model_inputs).logits, logits)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("changes", [{}, NARROW], ids=["", "narrow"])
@over(BASE)
def test_base_model_with_resized_vocabulary_keeps_outputs(model_class, changes, tied):
    model = build(model_class, tie_word_embeddings=tied, **changes)
    model_inputs = inputs(model)
    expected = result(model(**model_inputs))
    model.resize_token_embeddings(V + 7)
    assert torch.equal(result(model(**model_inputs)), expected)
    assert {len(matrix) for matrix in matrices(model)} == {V + 7}
    assert (
        result(model(**{name: torch.full_like(ids, V + 6) for name, ids in model_inputs.items()}))
        .isfinite()
        .all()
    )
