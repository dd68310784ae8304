"""Tests of `export --generate`: sequences of the runtime and of torch, and float64 samples."""

import numpy as np
import pytest
import torch
from checkpoints import EOS, PAD, START, VOCABULARY
from one_graphs import BEAMS, prompts, source

from vanilla_transformer_export import Runtime

BEFORE_1 = np.nextafter(np.float32(1), np.float32(0))


# ---------------------------------------------------------------------------------------- sequences


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_greedy_sequences_match_runtime_and_torch(generator, exported, rows):
    greedy, (ids, mask) = generator("greedy"), source(rows)
    [actual] = greedy.run(ids, mask, max_new_tokens=12)
    np.testing.assert_array_equal(
        actual, Runtime(greedy.parts).generate(ids, mask, max_new_tokens=12, num_beams=1)
    )
    expected = exported("seq2seq").model.generate(
        torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), max_new_tokens=12
    )
    np.testing.assert_array_equal(actual, expected)
    assert (actual[:, 0] == START).all() and (
        rows == 1 or len(set((actual == EOS).argmax(axis=1))) > 1
    )


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_decoder_continuations_match_runtime_and_torch(generator, exported, rows):
    """Prompts may be padded on either side."""
    greedy, (ids, mask) = generator("greedy", name="causal"), prompts(rows)
    [actual] = greedy.run(ids, mask, max_new_tokens=12)
    np.testing.assert_array_equal(
        actual, Runtime(greedy.parts).generate(ids, mask, max_new_tokens=12, num_beams=1)
    )
    torch_inputs = torch.from_numpy(ids), torch.from_numpy(mask)
    expected = exported("causal").model.generate(
        torch_inputs[0], attention_mask=torch_inputs[1], max_new_tokens=12
    )
    np.testing.assert_array_equal(actual, expected)
    ends = (actual[:, ids.shape[1] :] == EOS).argmax(axis=1)
    assert (actual[:, : ids.shape[1]] == ids).all() and (rows < 32 or len(set(ends)) > 1)
    right_padded = source(rows, length=7)
    assert (right_padded[1] == mask[:, ::-1]).all() and greedy.run(
        *right_padded, max_new_tokens=12
    )[0].tolist() == actual.tolist()


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_decoder_beams_and_scores_match_runtime(generator, rows):
    beam, (ids, mask) = generator("beam", name="causal"), prompts(rows)
    actual, scores = beam.run(ids, mask, **BEAMS, max_new_tokens=9)
    expected, expected_scores = Runtime(beam.parts).generate_with_scores(
        ids, mask, **BEAMS, max_new_tokens=9
    )
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(scores[:, 0], expected_scores, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.3])
def test_beams_and_scores_match_runtime(generator, early_stopping, length_penalty):
    beam, (ids, mask) = generator("beam"), source(8)
    options = dict(num_beams=4, length_penalty=length_penalty, max_new_tokens=9)
    number = {False: 0, True: 1, "never": 2}[early_stopping]
    actual, scores = beam.run(ids, mask, **options, early_stopping=number)
    expected, expected_scores = Runtime(beam.parts).generate_with_scores(
        ids, mask, **options, early_stopping=early_stopping
    )
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(scores[:, 0], expected_scores, rtol=1e-4, atol=1e-5)


def test_each_row_may_have_its_own_options(generator):
    """The runtime runs each row alone with its options, in greedy and in beam search."""
    ids, mask = source(5)
    steps = np.array([[12], [1], [0], [-3], [5]])
    [actual] = generator("greedy").run(ids, mask, max_new_tokens=steps)
    runtime = Runtime(generator("greedy").parts)
    for row, count in enumerate(steps[:, 0]):
        expected = [START]
        if count > 0:
            one = slice(row, row + 1)
            expected = runtime.generate(
                ids[one], mask[one], max_new_tokens=int(count), num_beams=1
            )[0].tolist()
        assert actual[row].tolist() == expected + [PAD] * (actual.shape[1] - len(expected))
    beams, penalties, early = (
        np.array([[1], [5], [2], [3], [4]]),
        np.array([[1.0], [0.0], [2.0], [-1.0], [0.5]]),
        [0, 1, 2, 0, 1],
    )
    steps = np.array([[8], [6], [9], [1], [7]])
    inputs = dict(
        num_beams=beams,
        length_penalty=penalties,
        early_stopping=np.array(early)[:, None],
        max_new_tokens=steps,
    )
    actual, scores = generator("beam").run(ids, mask, **inputs)
    for row in range(5):
        # with one beam the runtime searches greedily and fills rows with the pad token
        if beams[row, 0] == 1:
            continue
        one = slice(row, row + 1)
        options = {name: value[row, 0].item() for name, value in inputs.items()}
        options["early_stopping"] = (False, True, "never")[early[row]]
        expected, score = runtime.generate_with_scores(ids[one], mask[one], **options)
        width = expected.shape[1]
        assert actual[row, :width].tolist() == expected[0].tolist() and set(
            actual[row, width:]
        ) <= {EOS}
        np.testing.assert_allclose(scores[row], score, rtol=1e-4)


# ----------------------------------------------------------------------------------------- sampling


def sample_token(logits, temperature, top_k, top_p, uniform):
    """Return a token of `logits` (V,), sampled in float64 with transformers' filters in order."""
    scores = logits.astype(np.float64) / temperature
    order = np.argsort(-scores, kind="stable")
    kept = order[: top_k or None]
    p = np.exp(scores[kept] - scores[kept[0]])
    p /= p.sum()
    before = np.concatenate([[0], np.cumsum(p)[:-1]])
    kept, p = kept[before < top_p], p[before < top_p]
    kept = kept if len(kept) else order[:1]
    cumulative = np.cumsum(p / p.sum())
    return kept[min((cumulative <= np.float64(uniform)).sum(), len(kept) - 1)]


@pytest.mark.parametrize("top_k, top_p", [(50, 1.0), (0, 0.9), (5, 0.7), (1, 1.0), (0, 0.0)])
def test_samples_match_float64_reference(generator, exported, top_k, top_p):
    sample, (ids, mask) = generator("sample"), source(6)
    uniforms = np.random.default_rng(1).random((6, 8), np.float32)
    uniforms[0], uniforms[1] = 0, BEFORE_1
    inputs = dict(temperature=0.8, top_k=top_k, top_p=top_p, uniforms=uniforms, max_new_tokens=8)
    [actual] = sample.run(ids, mask, **inputs)
    torch_inputs = dict(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
    with torch.no_grad():
        logits = (
            exported("seq2seq")
            .model(**torch_inputs, decoder_input_ids=torch.from_numpy(actual[:, :-1]))
            .logits.numpy()
        )
    for row, tokens in enumerate(actual):
        for place, token in enumerate(tokens[1:]):
            ended = EOS in tokens[1 : 1 + place]
            expected = (
                PAD
                if ended
                else sample_token(logits[row, place], 0.8, top_k, top_p, uniforms[row, place])
            )
            assert token == expected, (row, place)
    [again] = sample.run(ids, mask, **inputs)
    np.testing.assert_array_equal(actual, again)


@pytest.mark.parametrize("top_k, top_p", [(50, 1.0), (5, 0.7)])
def test_decoder_samples_match_float64_reference(generator, exported, top_k, top_p):
    sample, (ids, mask) = generator("sample", name="causal"), prompts(6)
    uniforms = np.random.default_rng(1).random((6, 8), np.float32)
    uniforms[0], uniforms[1] = 0, BEFORE_1
    inputs = dict(temperature=0.8, top_k=top_k, top_p=top_p, uniforms=uniforms, max_new_tokens=8)
    [actual] = sample.run(ids, mask, **inputs)
    for row, tokens in enumerate(actual):
        # without padding, as the model reads the row alone
        tokens = tokens[ids.shape[1] - mask[row].sum() :]
        with torch.no_grad():
            logits = exported("causal").model(torch.from_numpy(tokens[None, :-1])).logits[0].numpy()
        for place, token in enumerate(tokens[mask[row].sum() :]):
            before = tokens[mask[row].sum() :][:place]
            expected = sample_token(
                logits[mask[row].sum() - 1 + place], 0.8, top_k, top_p, uniforms[row, place]
            )
            assert token == (PAD if EOS in before else expected), (row, place)
    [again] = sample.run(ids, mask, **inputs)
    np.testing.assert_array_equal(actual, again)


def test_unusual_inputs_of_decoder_have_defined_results(generator):
    """Run without steps or uniform numbers, with steps per row, with holes in the mask, with rows
    of padding, and with too many beams."""
    greedy, (ids, mask) = generator("greedy", name="causal"), prompts(4)
    runtime = Runtime(greedy.parts)
    for count in (0, -2):
        assert greedy.run(ids, mask, max_new_tokens=count)[0].tolist() == ids.tolist()
    [actual] = greedy.run(ids, mask, max_new_tokens=np.array([[2], [7], [0], [4]]))
    for row, count in ((0, 2), (1, 7), (3, 4)):
        one = slice(row, row + 1)
        expected = runtime.generate(ids[one], mask[one], max_new_tokens=count, num_beams=1)[
            0
        ].tolist()
        assert actual[row].tolist() == expected + [PAD] * (actual.shape[1] - len(expected))
    assert set(actual[2, ids.shape[1] :]) == {PAD}
    # A hole is skipped, and a row of padding only is read as its last token.
    holes = mask.copy()
    holes[1, -2], holes[2] = 0, 0
    [actual] = greedy.run(ids, holes, max_new_tokens=5)
    without = np.where(holes[1] == 1)[0]
    for row, prompt in ((1, ids[1:2, without]), (2, ids[2:3, -1:])):
        expected = runtime.generate(prompt, np.ones_like(prompt), max_new_tokens=5, num_beams=1)[
            0
        ].tolist()
        padded = [PAD] * (ids.shape[1] - prompt.shape[1]) + expected
        assert actual[row].tolist() == padded + [PAD] * (actual.shape[1] - len(padded))
    settings = dict(length_penalty=1.0, early_stopping=0, max_new_tokens=3)
    beam = generator("beam", name="causal")
    at_limit, above_limit = (
        beam.run(ids, mask, num_beams=count, **settings) for count in (VOCABULARY, VOCABULARY + 9)
    )
    one, none = (beam.run(ids, mask, num_beams=count, **settings) for count in (1, -1))
    for other, expected in ((above_limit, at_limit), (none, one)):
        assert [each.tolist() for each in other] == [each.tolist() for each in expected]
    uniforms = np.zeros((4, 0), np.float32)
    settings = dict(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=8)
    sample = generator("sample", name="causal")
    assert sample.run(ids, mask, **settings, uniforms=uniforms)[0].tolist() == ids.tolist()
    [actual] = sample.run(
        ids, mask, **settings | dict(temperature=0), uniforms=np.full((4, 3), 0.5)
    )
    assert actual.tolist() == greedy.run(ids, mask, max_new_tokens=3)[0].tolist()
    with pytest.raises(Exception, match="(?i)invalid|bounds|index|dimension"):
        greedy.run(ids[:, :0], mask[:, :0], max_new_tokens=3)


def test_unusual_sampling_inputs_have_defined_results(generator):
    sample, (ids, mask) = generator("sample"), source(3)
    settings = dict(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=8)
    uniforms = np.random.default_rng(2).random((3, 4), np.float32)
    [result] = sample.run(ids, mask, **settings, uniforms=uniforms)
    assert result.shape[1] <= 5  # no more tokens than uniform numbers
    [none] = sample.run(ids, mask, **settings, uniforms=uniforms[:, :0])
    assert none.tolist() == [[START]] * 3
    greedy = generator("greedy").run(ids, mask, max_new_tokens=4)[0]
    # Temperature 0, top_k 1, top_p 0 and negative uniform numbers select the most likely token.
    for changed in (dict(temperature=0), dict(top_k=1), dict(top_p=0.0)):
        assert (
            sample.run(ids, mask, **settings | changed, uniforms=uniforms)[0].tolist()
            == greedy.tolist()
        )
    assert sample.run(ids, mask, **settings, uniforms=uniforms - 2)[0].tolist() == greedy.tolist()
    above = sample.run(ids, mask, **settings | dict(top_k=3), uniforms=uniforms + 2)[0]
    last = sample.run(ids, mask, **settings | dict(top_k=3), uniforms=np.full((3, 4), BEFORE_1))[0]
    assert above.tolist() == last.tolist()


def test_row_without_tokens_does_not_affect_other_rows(generator):
    ids, mask = source(4)
    whole = generator("greedy").run(ids, mask, max_new_tokens=6)[0]
    mask[2] = 0
    result = generator("greedy").run(ids, mask, max_new_tokens=6)[0]
    rows = [0, 1, 3]
    width = min(whole.shape[1], result.shape[1])
    assert result[rows, :width].tolist() == whole[rows, :width].tolist()
    assert ((result >= 0) & (result < VOCABULARY)).all()
    assert np.isfinite(generator("beam").run(ids, mask, **BEAMS, max_new_tokens=6)[1]).all()


def test_num_beams_is_clamped_to_1_and_vocabulary_size(generator):
    ids, mask = source(2)
    settings = dict(length_penalty=1.0, early_stopping=0, max_new_tokens=3)
    at_limit, above_limit = (
        generator("beam").run(ids, mask, num_beams=count, **settings)
        for count in (VOCABULARY, VOCABULARY + 9)
    )
    one, none = (generator("beam").run(ids, mask, num_beams=count, **settings) for count in (1, -1))
    for actual, expected in ((above_limit, at_limit), (none, one)):
        assert [each.tolist() for each in actual] == [each.tolist() for each in expected]
    assert (
        generator("beam")
        .run(ids, mask, **settings | dict(num_beams=2, max_new_tokens=0))[0]
        .tolist()
        == [[START]] * 2
    )
