"""Tests of training mode: dropout, gradient checkpointing and torch.compile."""

import pytest
import torch
from models import (
    ALL,
    LANGUAGE_MODELS,
    POSITIONS,
    RELATIVE,
    D,
    assert_same,
    build,
    inputs,
    is_pair,
    over,
    result,
    tokens,
)
from torch import nn
from transformers import set_seed

from vanilla_transformer import (
    VanillaDecoderForCausalLM,
    VanillaEncoderForSequenceClassification,
    VanillaEncoderModel,
    VanillaSeq2SeqModel,
)

# ------------------------------------------------------------------------------------------ dropout

NO_DROPOUT = dict(
    embedding_dropout=0, dropout=0, attention_dropout=0, activation_dropout=0, classifier_dropout=0
)


def dropout_fields(model_class):
    heads = (
        "EncoderForSequenceClassification",
        "ForTokenClassification",
        "EncoderForMultipleChoice",
    )
    heads += ("Seq2SeqForSequenceClassification",)
    return [
        n for n in NO_DROPOUT if n != "classifier_dropout" or model_class.__name__.endswith(heads)
    ]


# Only the dropout of attention depends on the implementation of attention.
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@over(ALL)
def test_each_dropout_changes_training_but_not_evaluation(model_class, attention):
    plain = build(model_class, attention, initializer_range=0.1, **NO_DROPOUT)
    arguments = inputs(plain)
    expected = result(plain(**arguments))
    assert_same(result(plain.train()(**arguments)), expected)
    for field in dropout_fields(model_class) if attention == "sdpa" else ["attention_dropout"]:
        dropping = build(model_class, attention, **NO_DROPOUT | {field: 0.5})
        dropping.load_state_dict(plain.state_dict())
        assert torch.equal(result(dropping(**arguments)), expected), field
        assert not torch.allclose(result(dropping.train()(**arguments)), expected, atol=1e-3), field


def record(module):
    """Return a dictionary that gets the input ("in") and the output ("out") of `module` when it
    runs."""
    seen = {}

    def keep(_, arguments, output):
        seen["in"], seen["out"] = (
            arguments[0].detach(),
            (output[0] if isinstance(output, tuple) else output).detach(),
        )

    module.register_forward_hook(keep)
    return seen


def assert_dropped(got, kept, p=0.5):
    """Check that entries of `got` are 0 or `kept` / (1 - p), and that both occur."""
    zero, scaled = got.abs() < 1e-6, (got - kept / (1 - p)).abs() < 1e-5
    real = kept.abs() > 1e-4
    assert torch.all(zero | scaled)
    assert (zero & real).any() and (scaled & real).any()


@pytest.mark.parametrize("norm", [False, True], ids=["no norm", "behind the embedding norm"])
def test_embedding_dropout_applies_to_sum_of_embeddings_and_positions(norm):
    model = build(
        VanillaEncoderModel, **NO_DROPOUT | dict(embedding_dropout=0.5, embedding_norm=norm)
    )
    arguments = inputs(model)
    seen = record(model.embeddings)
    model(**arguments)
    kept = seen["out"]
    model.train()(**arguments)
    assert_dropped(seen["out"], kept)


@pytest.mark.parametrize("sublayer", ["self_attn", "cross_attn", "feed_forward"])
def test_dropout_applies_to_sublayer_outputs_before_residual_sum(sublayer):
    model = build(VanillaSeq2SeqModel, **NO_DROPOUT | dict(dropout=0.5))
    layer = model.decoder.layers[0]
    inside, norm = record(getattr(layer, sublayer)), record(getattr(layer, sublayer + "_norm"))
    model.train()(**inputs(model))
    assert_dropped(norm["in"] - inside["in"], inside["out"])


def test_pre_norm_dropout_applies_to_sublayer_outputs_before_residual_sum():
    model = build(VanillaSeq2SeqModel, **NO_DROPOUT | dict(dropout=0.5, norm_first=True))
    layer, names = model.decoder.layers[0], ["self_attn", "cross_attn", "feed_forward"]
    inside = [record(getattr(layer, name)) for name in names]
    stream = [record(getattr(layer, name + "_norm")) for name in names]
    layer_record = record(layer)
    model.train()(**inputs(model))
    states = [norm["in"] for norm in stream] + [layer_record["out"]]
    for before, after, sublayer in zip(states, states[1:], inside, strict=False):
        assert_dropped(after - before, sublayer["out"])


@pytest.mark.parametrize("kind", ["encoder_attentions", "decoder_attentions", "cross_attentions"])
def test_attention_dropout_applies_to_attention_weights(kind):
    model = build(VanillaSeq2SeqModel, "eager", **NO_DROPOUT | dict(attention_dropout=0.5))
    # the input of an attention must not depend on dropout in earlier attentions
    for module in model.modules():
        if type(module).__name__ == "VanillaAttention":
            module.o_proj.weight.data.zero_()
    arguments = inputs(model) | dict(output_attentions=True)
    kept = model(**arguments)[kind][0]
    assert_dropped(model.train()(**arguments)[kind][0], kept)


def test_activation_dropout_applies_to_activation():
    model = build(VanillaEncoderModel, **NO_DROPOUT | dict(activation_dropout=0.5))
    up, down = (
        record(getattr(model.layers[0].feed_forward, name)) for name in ("up_proj", "down_proj")
    )
    model.train()(**inputs(model))
    assert_dropped(down["in"], up["out"].clamp(min=0))


def test_classifier_dropout_applies_before_classifier():
    model = build(
        VanillaEncoderForSequenceClassification, **NO_DROPOUT | dict(classifier_dropout=0.5)
    )
    seen = record(model.classifier)
    arguments = inputs(model)
    first = model.model(**arguments).last_hidden_state[:, 0]
    model.train()(**arguments)
    assert_dropped(seen["in"], first)


def test_dropout_does_not_apply_to_relative_positions():
    model = build(
        VanillaEncoderModel,
        "eager",
        **RELATIVE | NO_DROPOUT | dict(dropout=0.5, embedding_dropout=0.5),
    )
    seen = record(model.relative_positions)
    model(**inputs(model))
    kept = seen["out"]
    model.train()(**inputs(model))
    assert torch.equal(seen["out"], kept)


# --------------------------------------------------------------------------- gradient checkpointing

DROPPING = dict(dropout=0.2, embedding_dropout=0.2, attention_dropout=0.2, activation_dropout=0.2)


def with_labels(model):
    arguments = inputs(model)
    if isinstance(model, VanillaEncoderForSequenceClassification):
        return arguments | dict(labels=torch.tensor([0, 1, 0]))
    like = arguments["decoder_input_ids" if is_pair(model) else "input_ids"]
    return arguments | dict(labels=tokens(*like.shape))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize(
    "changes", [{}, RELATIVE, POSITIONS["rotary"]], ids=["sinusoidal", "relative", "rotary"]
)
@over([*LANGUAGE_MODELS, VanillaEncoderForSequenceClassification])
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(model_class, changes, reentrant):
    model = build(model_class, initializer_range=0.3, **changes, **DROPPING).train()
    arguments = with_labels(model)

    def loss_and_gradients():
        set_seed(1)  # checkpointing must draw the same dropout again
        model.zero_grad()
        loss = model(**arguments).loss
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
    for got, reference in zip(loss_and_gradients(), expected, strict=True):
        assert_same(got, reference, 1e-6)
    assert len(calls) == 3 * layers, (
        "once without, and with checkpointing once more in the backward pass"
    )
    tables = [
        parameter.grad
        for name, parameter in model.named_parameters()
        if "relative_positions" in name
    ]
    assert len(tables) == (0 if changes is not RELATIVE else 2 if is_pair(model) else 1)
    assert all(table.abs().max() > 1e-4 for table in tables)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradient_checkpointing_keeps_source_gradients(reentrant):
    model = build(
        VanillaDecoderForCausalLM, initializer_range=0.3, add_cross_attention=True, **RELATIVE
    ).train()
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    source, ids = torch.randn(3, 4, D, requires_grad=True), tokens()
    (expected,) = torch.autograd.grad(
        model(ids, encoder_hidden_states=source, labels=ids).loss, source
    )
    model.activation_checkpointing_enable(dict(use_reentrant=reentrant))
    model(ids, encoder_hidden_states=source, labels=ids).loss.backward()
    assert source.grad.abs().max() > 1e-5
    assert_same(source.grad, expected, 1e-6)


# ------------------------------------------------------------------------------------ torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("model_class", LANGUAGE_MODELS, ids=lambda x: x.__name__)
def test_torch_compile_needs_only_two_full_graphs_for_all_shapes(model_class):
    """Batches by token count have many shapes. Only the second shape may compile again."""
    model, graphs = build(model_class).train(), []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=keep, fullgraph=True)
    for rows, length in ((4, 5), (6, 3), (2, 8), (7, 7), (3, 6)):
        ids = torch.randint(4, model.config.vocab_size, (rows, length))
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        compiled(
            input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)
        ).loss.backward()
    assert len(graphs) == 2
