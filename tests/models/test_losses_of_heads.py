"""Tests of the losses of heads, by formulas."""

import numpy as np
import pytest
import torch
from messages import raises
from models import (
    LENGTH,
    QA_MODELS,
    START,
    STRONG,
    build,
    cross_entropy,
    inputs,
    over,
    tokens,
    tokens_with_ends,
)

from vanilla_transformer import (
    VanillaDecoderForCausalLM,
    VanillaDecoderForSequenceClassification,
    VanillaDecoderForTokenClassification,
    VanillaEncoderForMaskedLM,
    VanillaEncoderForMultipleChoice,
    VanillaEncoderForNextSentencePrediction,
    VanillaEncoderForPreTraining,
    VanillaEncoderForSequenceClassification,
    VanillaEncoderForTokenClassification,
    VanillaSeq2SeqForConditionalGeneration,
    VanillaSeq2SeqForSequenceClassification,
)

TOKEN_CLASSIFIERS = [VanillaEncoderForTokenClassification, VanillaDecoderForTokenClassification]
CLASSIFIERS = [
    VanillaEncoderForSequenceClassification,
    VanillaDecoderForSequenceClassification,
    VanillaSeq2SeqForSequenceClassification,
]
LOSS_KWARGS = pytest.mark.parametrize(
    "divisor",
    [None, 17, torch.tensor(17)],
    ids=["mean", "num_items_in_batch", "num_items_in_batch as a tensor"],
)


def compute_loss(model, divisor, **given):
    return model(**given, **{} if divisor is None else dict(num_items_in_batch=divisor)).loss.item()


@LOSS_KWARGS
def test_masked_lm_loss_is_cross_entropy_of_labelled_tokens(divisor):
    model, given = build(VanillaEncoderForMaskedLM), dict(input_ids=tokens())
    labels = tokens().masked_fill(torch.rand(3, LENGTH) < 0.6, -100)
    expected = cross_entropy(model(**given).logits, labels, divisor)
    assert compute_loss(model, divisor, **given, labels=labels) == pytest.approx(expected, rel=1e-5)


@LOSS_KWARGS
def test_causal_lm_loss_is_cross_entropy_of_next_token(divisor):
    model, given = build(VanillaDecoderForCausalLM), dict(input_ids=tokens())
    labels = given["input_ids"].clone()
    labels[1, 3:] = -100
    expected = cross_entropy(model(**given).logits[:, :-1], labels[:, 1:], divisor)
    assert compute_loss(model, divisor, **given, labels=labels) == pytest.approx(expected, rel=1e-5)


@LOSS_KWARGS
def test_seq2seq_loss_is_cross_entropy_of_unshifted_labels(divisor):
    model, source, labels = build(VanillaSeq2SeqForConditionalGeneration), tokens(), tokens(3, 4)
    labels[1, 2:] = -100
    shifted = torch.tensor([[START, *row[:-1]] for row in labels.tolist()]).masked_fill(
        labels.roll(1, 1) == -100, 0
    )
    shifted[:, 0] = START
    expected = cross_entropy(model(source, decoder_input_ids=shifted).logits, labels, divisor)
    assert compute_loss(model, divisor, input_ids=source, labels=labels) == pytest.approx(
        expected, rel=1e-5
    )
    given = dict(input_ids=source, decoder_input_ids=shifted, labels=labels)
    assert compute_loss(model, divisor, **given) == pytest.approx(expected, rel=1e-5)


@LOSS_KWARGS
@over(CLASSIFIERS)
def test_classification_loss_is_cross_entropy_of_class(model_class, divisor):
    model, given = (
        build(model_class, **STRONG, num_labels=3),
        dict(input_ids=tokens_with_ends([5], [3], [4])),
    )
    labels = torch.tensor([2, 0, 1])
    expected = cross_entropy(model(**given).logits, labels, divisor)
    assert compute_loss(model, divisor, **given, labels=labels) == pytest.approx(expected, rel=1e-5)


@LOSS_KWARGS
@over(CLASSIFIERS)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_regression_loss_is_mean_squared_error(model_class, num_labels, divisor):
    model = build(model_class, **STRONG, num_labels=num_labels, problem_type="regression")
    given, labels = dict(input_ids=tokens_with_ends([5], [3], [4])), torch.randn(3, num_labels)
    logits = model(**given).logits
    assert logits.shape == (3, num_labels)
    errors = (logits.detach().numpy() - labels.numpy()) ** 2
    expected = np.sum(errors) / (errors.size if divisor is None else 17)
    assert compute_loss(model, divisor, **given, labels=labels) == pytest.approx(expected, rel=1e-5)


@LOSS_KWARGS
@over(CLASSIFIERS)
def test_multi_label_loss_is_mean_binary_cross_entropy(model_class, divisor):
    model = build(model_class, **STRONG, num_labels=3, problem_type="multi_label_classification")
    given, labels = (
        dict(input_ids=tokens_with_ends([5], [3], [4])),
        torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1]]),
    )
    p = 1 / (1 + np.exp(-model(**given).logits.detach().double().numpy()))
    expected = -np.sum(np.log(np.where(labels.numpy() == 1, p, 1 - p)))
    expected /= labels.numel() if divisor is None else 17
    assert compute_loss(model, divisor, **given, labels=labels) == pytest.approx(expected, rel=1e-5)


def test_labels_are_shifted_behind_start_token_and_ignored_labels_become_padding():
    model = build(VanillaSeq2SeqForConditionalGeneration, pad_token_id=0, decoder_start_token_id=9)
    labels = torch.tensor([[5, 6, 7, 2], [5, 2, -100, -100]])
    assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == [
        [9, 5, 6, 7],
        [9, 5, 2, 0],
    ]
    assert labels.tolist() == [[5, 6, 7, 2], [5, 2, -100, -100]], "left as they were"


def test_wrap_last_token_shifts_labels_behind_their_last_token():
    changes = dict(wrap_last_token=True, decoder_start_token_id=None, pad_token_id=0)
    model = build(VanillaSeq2SeqForConditionalGeneration, **changes)
    labels = torch.tensor([[5, 6, 2, 9], [5, 2, 8, -100], [-100, -100, -100, -100]])
    assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == [
        [9, 5, 6, 2],
        [8, 5, 2, 8],
        [0, 0, 0, 0],
    ]


@pytest.mark.parametrize("missing", ["pad_token_id", "decoder_start_token_id"])
def test_shifting_labels_without_pad_or_start_token_raises(missing):
    model = build(VanillaSeq2SeqForConditionalGeneration, **{missing: None})
    with raises(ValueError, seen=(f"config.{missing}", None)):
        model.prepare_decoder_input_ids_from_labels(torch.tensor([[5, 6]]))
    with raises(ValueError, seen=missing):
        model(tokens(), labels=tokens())


@LOSS_KWARGS
@over(TOKEN_CLASSIFIERS)
def test_token_classification_loss_is_cross_entropy_of_labelled_tokens(model_class, divisor):
    model, given = build(model_class, **STRONG, num_labels=3), dict(input_ids=tokens())
    labels = torch.randint(0, 3, (3, LENGTH)).masked_fill(torch.rand(3, LENGTH) < 0.4, -100)
    expected = cross_entropy(model(**given).logits, labels, divisor)
    assert compute_loss(model, divisor, **given, labels=labels) == pytest.approx(expected, rel=1e-5)


@LOSS_KWARGS
def test_next_sentence_loss_is_cross_entropy_of_sentence_label(divisor):
    model, given = (
        build(VanillaEncoderForNextSentencePrediction, **STRONG),
        dict(input_ids=tokens()),
    )
    for labels in (torch.tensor([0, 1, 1]), torch.tensor([[0], [1], [1]])):
        expected = cross_entropy(model(**given).logits, labels, divisor)
        assert compute_loss(model, divisor, **given, labels=labels) == pytest.approx(
            expected, rel=1e-5
        )


@LOSS_KWARGS
def test_multiple_choice_loss_is_cross_entropy_of_right_choice(divisor):
    model = build(VanillaEncoderForMultipleChoice, **STRONG)
    given, labels = inputs(model), torch.tensor([0, 1, 1])
    expected = cross_entropy(model(**given).logits, labels, divisor)
    assert compute_loss(model, divisor, **given, labels=labels) == pytest.approx(expected, rel=1e-5)


@LOSS_KWARGS
@pytest.mark.parametrize("parts", ["both", "masked tokens", "next sentence"])
def test_pretraining_loss_is_sum_of_cross_entropies(parts, divisor):
    """`num_items_in_batch` counts masked tokens.

    The next sentence loss is weighted by the share of masked tokens in this batch.
    """
    model, given = build(VanillaEncoderForPreTraining, **STRONG), dict(input_ids=tokens())
    outputs, expected, labels = model(**given), 0.0, {}
    if parts != "next sentence":
        labels["labels"] = tokens().masked_fill(torch.rand(3, LENGTH) < 0.6, -100)
        expected += cross_entropy(outputs.prediction_logits, labels["labels"], divisor)
    if parts != "masked tokens":
        labels["next_sentence_label"] = torch.tensor([0, 1, 1])
        share = (
            1.0
            if divisor is None or parts != "both"
            else labels["labels"].ne(-100).sum().item() / int(divisor)
        )
        expected += share * cross_entropy(
            outputs.seq_relationship_logits, labels["next_sentence_label"]
        )
    assert compute_loss(model, divisor, **given, **labels) == pytest.approx(expected, rel=1e-5)


@LOSS_KWARGS
@over(QA_MODELS)
def test_question_answering_loss_is_mean_of_start_and_end(model_class, divisor):
    model, given = build(model_class, **STRONG), dict(input_ids=tokens())
    outputs, starts, ends = model(**given), torch.tensor([0, 2, 5]), torch.tensor([1, 2, 5])
    expected = cross_entropy(outputs.start_logits, starts, divisor) + cross_entropy(
        outputs.end_logits, ends, divisor
    )
    for shape in ((3,), (3, 1)):
        labels = dict(start_positions=starts.view(shape), end_positions=ends.view(shape))
        assert compute_loss(model, divisor, **given, **labels) == pytest.approx(
            expected / 2, rel=1e-5
        )


@LOSS_KWARGS
@over(QA_MODELS)
def test_question_answering_loss_ignores_answers_beyond_sequence(model_class, divisor):
    model, given = build(model_class, **STRONG), dict(input_ids=tokens())
    outputs = model(**given)
    starts, ends = torch.tensor([LENGTH, 2, 5]), torch.tensor([40, 2, LENGTH])
    in_starts, in_ends = (
        positions.masked_fill(positions >= LENGTH, -100) for positions in (starts, ends)
    )
    expected = cross_entropy(outputs.start_logits, in_starts, divisor) + cross_entropy(
        outputs.end_logits, in_ends, divisor
    )
    assert compute_loss(
        model, divisor, **given, start_positions=starts, end_positions=ends
    ) == pytest.approx(expected / 2, rel=1e-5)


@pytest.mark.parametrize("given", ["start_positions", "end_positions"])
@over(QA_MODELS)
def test_question_answering_with_only_start_or_end_has_no_loss(model_class, given):
    model = build(model_class)
    assert model(tokens(), **{given: torch.tensor([0, 1, 2])}).loss is None


@over(CLASSIFIERS)
def test_problem_type_is_inferred_from_labels(model_class):
    """Transformers has the same rule.

    A single label is regression, integers are classes, and several floats are multi-label.
    """
    kinds = {
        "single_label_classification": (3, torch.tensor([2, 0, 1])),
        "multi_label_classification": (3, torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1]])),
        "regression": (1, torch.tensor([0.3, -1.0, 2.0])),
    }
    for kind, (num_labels, labels) in kinds.items():
        model, given = (
            build(model_class, num_labels=num_labels),
            dict(input_ids=tokens_with_ends([5], [3], [4]), labels=labels),
        )
        loss = model(**given).loss
        stated = build(model_class, num_labels=num_labels, problem_type=kind)
        stated.load_state_dict(model.state_dict())
        assert torch.equal(stated(**given).loss, loss) and model.config.problem_type == kind
