"""Tests of heads: logits against float64 computations by hand."""

import numpy as np
import pytest
import torch
from messages import raises
from models import (
    END,
    LAYERS,
    LENGTH,
    LENGTHS,
    QA_MODELS,
    START,
    STRONG,
    D,
    V,
    build,
    inputs,
    list_weights,
    numpy,
    over,
    padded,
    tokens,
    tokens_with_ends,
)
from reference import Paper, activation, linear, lm_transform, pooled

from vanilla_transformer import (
    VanillaDecoderForSequenceClassification,
    VanillaDecoderForTokenClassification,
    VanillaEncoderForMultipleChoice,
    VanillaEncoderForNextSentencePrediction,
    VanillaEncoderForPreTraining,
    VanillaEncoderForSequenceClassification,
    VanillaEncoderForTokenClassification,
    VanillaSeq2SeqForSequenceClassification,
)

PAPER = Paper(d_model=D, h=2, d_k=6, d_v=10, N=LAYERS, lm_transform="gelu")
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
poolers = pytest.mark.parametrize("act", [None, "tanh", "gelu"])


def build_double(model_class, **changes):
    model = build(model_class, **STRONG | changes).double()
    return model, list_weights(model)


def assert_close(actual, expected):
    np.testing.assert_allclose(numpy(actual), expected, atol=1e-10, rtol=0)


# ------------------------------------------------------------------------------------------- logits


def sentence_states(model, weights, act, **given):
    """Return the first state of each row, through the pooler if there is one."""
    states = numpy(model.model(**given).last_hidden_state)
    return np.stack(
        [pooled(weights, "model.pooler", act, row) if act else row[0] for row in states]
    )


@poolers
@over([VanillaEncoderForNextSentencePrediction, VanillaEncoderForSequenceClassification])
def test_sentence_head_is_linear_map_of_first_state_or_pooler(model_class, act):
    labels = {} if model_class is VanillaEncoderForNextSentencePrediction else dict(num_labels=3)
    model, weights = build_double(model_class, pooler_act=act, type_vocab_size=2, **labels)
    given = dict(
        input_ids=tokens(), attention_mask=MASK, token_type_ids=torch.randint(0, 2, (3, LENGTH))
    )
    name = "classifier" if labels else "next_sentence"
    logits = model(**given).logits
    assert logits.shape == (3, 3 if labels else 2)
    assert_close(logits, linear(weights, name, sentence_states(model, weights, act, **given)))


@poolers
def test_mean_pooling_classifier_averages_real_tokens(act):
    model, weights = build_double(
        VanillaEncoderForSequenceClassification,
        pooler_act=act,
        num_labels=3,
        classifier_pooling="mean",
    )
    assert not [name for name in weights if "pooler" in name]
    for mask in (MASK, None):
        given = dict(input_ids=tokens(), attention_mask=mask)
        states = numpy(model.model(**given).last_hidden_state)
        seen = np.ones((3, LENGTH)) if mask is None else mask.numpy()
        means = np.stack([row[real == 1].mean(0) for row, real in zip(states, seen, strict=True)])
        assert_close(model(**given).logits, linear(weights, "classifier", means))


@poolers
def test_multiple_choice_scores_each_choice_separately(act):
    model, weights = build_double(
        VanillaEncoderForMultipleChoice, pooler_act=act, type_vocab_size=2
    )
    ids, types, mask = (
        torch.randint(low, high, (3, 4, LENGTH)) for low, high in ((3, V), (0, 2), (0, 2))
    )
    mask[..., 0] = 1
    logits = model(ids, attention_mask=mask, token_type_ids=types).logits
    assert logits.shape == (3, 4)
    for choice in range(4):
        given = dict(
            input_ids=ids[:, choice],
            attention_mask=mask[:, choice],
            token_type_ids=types[:, choice],
        )
        (name,) = {name.removesuffix(".weight") for name, w in weights.items() if w.shape == (1, D)}
        assert_close(
            logits[:, choice],
            linear(weights, name, sentence_states(model, weights, act, **given))[:, 0],
        )


def test_multiple_choice_accepts_embeddings_and_positions():
    model = build(VanillaEncoderForMultipleChoice, **STRONG)
    ids, positions = inputs(model)["input_ids"], torch.arange(2, 2 + LENGTH).expand(3, 2, -1)
    expected = model(ids, position_ids=positions).logits
    assert torch.equal(
        model(inputs_embeds=model.get_input_embeddings()(ids), position_ids=positions).logits,
        expected,
    )
    assert not torch.allclose(model(ids).logits, expected, atol=1e-3)


@pytest.mark.parametrize("transform", [None, "gelu"])
@poolers
def test_pretraining_model_has_masked_lm_and_next_sentence_logits(act, transform):
    model, weights = build_double(
        VanillaEncoderForPreTraining, pooler_act=act, lm_transform_act=transform
    )
    given = dict(input_ids=tokens(), attention_mask=MASK)
    outputs = model(**given)
    assert_close(
        outputs.seq_relationship_logits,
        linear(weights, "next_sentence", sentence_states(model, weights, act, **given)),
    )
    states = numpy(model.model(**given).last_hidden_state)
    if transform:
        states = lm_transform(weights, "transform", PAPER, states)
    table = weights["model.embeddings.embed_tokens.weight"]
    assert_close(outputs.prediction_logits, states @ table.T + weights["lm_head.bias"])
    assert outputs.loss is None


@pytest.mark.parametrize("transform", [None, "gelu"])
def test_encoder_token_classification_is_linear_map_of_each_state(transform):
    model, weights = build_double(
        VanillaEncoderForTokenClassification, token_transform_act=transform, num_labels=3
    )
    given = dict(input_ids=tokens(), attention_mask=MASK)
    states = numpy(model.model(**given).last_hidden_state)
    if transform:
        states = activation(transform, linear(weights, "transform.0", states))
    assert_close(model(**given).logits, linear(weights, "classifier", states))


def test_decoder_token_classification_is_linear_map_of_each_state():
    model, weights = build_double(VanillaDecoderForTokenClassification, num_labels=3)
    given = dict(input_ids=tokens(), attention_mask=MASK)
    assert_close(
        model(**given).logits,
        linear(weights, "classifier", numpy(model.model(**given).last_hidden_state)),
    )


@over(QA_MODELS)
def test_question_answering_scores_each_token_as_start_and_end(model_class):
    model, weights = build_double(model_class)
    given = dict(input_ids=tokens(), attention_mask=MASK)
    read = given | (
        dict(decoder_input_ids=shift_right(given["input_ids"]))
        if "Seq2Seq" in model_class.__name__
        else {}
    )
    expected = linear(weights, "qa_outputs", numpy(model.model(**read).last_hidden_state))
    outputs = model(**given)
    assert_close(outputs.start_logits, expected[..., 0])
    assert_close(outputs.end_logits, expected[..., 1])


def shift_right(ids):
    return torch.cat([torch.full((len(ids), 1), START), ids[:, :-1]], 1)


# --------------------------------------------------------------------------- seq2seq classification


@pytest.mark.parametrize("mask", [None, MASK], ids=["no mask", "mask"])
def test_seq2seq_model_classifies_by_decoder_state_at_last_end_token(mask):
    """The decoder input is the source shifted right: this state has not seen the end token."""
    model, weights = build_double(VanillaSeq2SeqForSequenceClassification, num_labels=3)
    ids, last = tokens_with_ends([5], [1, 3], [0, 1, 4]), [5, 3, 1 if mask is not None else 4]
    states = numpy(model.model(ids, mask, shift_right(ids)).last_hidden_state)[range(3), last]
    expected = linear(weights, "classifier", np.tanh(linear(weights, "dense", states)))
    assert_close(model(ids, mask).logits, expected)
    assert_close(model(ids, mask, decoder_input_ids=shift_right(ids)).logits, expected)


def test_seq2seq_classification_of_padded_batch_matches_single_rows():
    model, _ = build_double(VanillaSeq2SeqForSequenceClassification, num_labels=3)
    rows = [torch.cat([row, torch.tensor([END])]) for row in random_rows([5, 2, 4])]
    ids, mask, _ = padded(rows, "right")
    assert_close(
        model(ids, mask).logits, np.concatenate([numpy(model(row[None]).logits) for row in rows])
    )


def test_seq2seq_classification_accepts_several_end_tokens():
    model, _ = build_double(VanillaSeq2SeqForSequenceClassification, num_labels=3)
    ids = tokens_with_ends([5], [4], [3])
    expected = numpy(model(ids).logits)
    model.config.eos_token_id = [END, V + 5]
    assert_close(model(ids).logits, expected)


@pytest.mark.parametrize(
    "given, changes, seen, expected",
    [
        (dict(input_ids=tokens_with_ends([5], [], [1])), {}, (1, "input_ids"), 2),
        (
            dict(input_ids=tokens_with_ends([5], [5], [3]), attention_mask=MASK),
            {},
            (1, "input_ids"),
            (),
        ),
        (dict(inputs_embeds=torch.zeros(1, 3, D)), {}, ("input_ids", None), ()),
        (dict(input_ids=tokens()), dict(eos_token_id=None), ("eos_token_id", None), ()),
    ],
)
def test_seq2seq_classification_without_end_token_raises(given, changes, seen, expected):
    with raises(ValueError, seen=seen, expected=expected):
        build(VanillaSeq2SeqForSequenceClassification, **changes)(**given)


# --------------------------------------------------------------------------- decoder classification


def build_classifier(**changes):
    """Return a model and a function that computes the expected logits of rows without padding.

    Expected logits are a linear map of the last state of each row.
    """
    model, weights = build_double(VanillaDecoderForSequenceClassification, num_labels=3, **changes)

    def expected(rows):
        last = [numpy(model.model(row[None]).last_hidden_state)[0, -1] for row in rows]
        return linear(weights, "score", np.stack(last), bias=False)

    return model, expected


def random_rows(lengths=LENGTHS):
    return [tokens(1, length)[0] for length in lengths]


@pytest.mark.parametrize("side", ["right", "left"])
def test_decoder_classifies_padded_rows_by_last_real_token(side):
    model, expected = build_classifier()
    rows = random_rows()
    ids, mask, positions = padded(rows, side)
    assert_close(
        model(ids, mask, **dict(position_ids=positions) if side == "left" else {}).logits,
        expected(rows),
    )


def test_decoder_classification_without_mask_finds_padding_by_id():
    model, expected = build_classifier(pad_token_id=0)
    rows = random_rows()
    ids, mask, _ = padded(rows, "right")
    assert_close(model(ids.masked_fill(mask == 0, 0)).logits, expected(rows))


@pytest.mark.parametrize("pad", [None, 0])
def test_decoder_classifies_unpadded_rows_by_last_token(pad):
    model, expected = build_classifier(pad_token_id=pad)
    ids = tokens()
    ids[:, 2] = 0  # a token like any other, or padding that is not at the end
    assert_close(model(ids).logits, expected(ids))
    if pad is None:
        ids[:, -1] = 0
        assert_close(model(ids).logits, expected(ids))


@pytest.mark.parametrize("side", ["right", "left"])
def test_decoder_classifies_embeddings_by_mask(side):
    model, expected = build_classifier()
    rows = random_rows()
    ids, mask, positions = padded(rows, side)
    given = dict(attention_mask=mask, **dict(position_ids=positions) if side == "left" else {})
    assert_close(
        model(inputs_embeds=model.get_input_embeddings()(ids), **given).logits, expected(rows)
    )
    ids = tokens()
    assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, expected(ids))


def test_decoder_classification_of_padding_only_row_is_finite():
    model, expected = build_classifier()
    ids = torch.cat([tokens(2), torch.zeros(1, LENGTH, dtype=int)])
    logits = model(ids).logits
    assert_close(logits[:2], expected(ids[:2]))
    assert logits.isfinite().all()


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
def test_decoder_classifies_by_new_tokens_after_cache(masked):
    model, expected = build_classifier()
    ids = tokens()
    first = model(ids[:, :3], use_cache=True)
    mask = dict(attention_mask=torch.ones(3, LENGTH, dtype=int)) if masked else {}
    assert_close(
        model(ids[:, 3:], **mask, past_key_values=first.past_key_values).logits, expected(ids)
    )
