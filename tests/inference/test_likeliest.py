"""Tests of the top-k candidates of beam search, against torch's log-softmax and a full sort."""

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from top_k_graph import top_k_graph

from vanilla_transformer_export import Options
from vanilla_transformer_export.engine import search as likeliest
from vanilla_transformer_export.engine.search import BeamSearch, StepLogits, top_k_tokens


@pytest.mark.parametrize("width", [1, 3, 16, 17, 48, 40_001])  # groups have 16 tokens
@pytest.mark.parametrize("threads", [1, 2])
def test_top_k_matches_full_sort_and_torch_log_softmax(width, threads, monkeypatch):
    monkeypatch.setattr(likeliest, "CHUNK", 3 * width)  # seven rows are several chunks
    monkeypatch.setattr(likeliest, "MIN_SHARED_LOGITS", 0)
    rng = np.random.default_rng(0)
    for logits in (
        20 * rng.standard_normal((7, width)),
        rng.integers(0, 40, (7, width)),
        np.zeros((7, width)),
    ):
        logits = logits.astype(np.float32)
        logits[1, 2:] = -np.inf
        logits[2, :-1] = -np.inf  # of all tokens but the last
        count = min(8, width)
        log_p, tokens = top_k_tokens(logits, count, threads)
        expected = np.argsort(-logits, axis=1, kind="stable")[:, :count]
        assert tokens.tolist() == expected.tolist()
        exact = torch.from_numpy(logits).double().log_softmax(dim=-1).numpy()
        np.testing.assert_allclose(log_p, np.take_along_axis(exact, expected, axis=1), atol=1e-5)


def test_logits_view_is_accepted_and_unchanged():
    logits = np.random.default_rng(0).standard_normal((4, 3, 50), dtype=np.float32)
    before = logits.copy()
    result = top_k_tokens(logits[:, -1], 5, 1)
    alone = [top_k_tokens(row[None].copy(), 5, 1) for row in logits[:, -1]]
    for both in zip(result, zip(*alone)):
        np.testing.assert_array_equal(both[0], np.concatenate(both[1]))
    np.testing.assert_array_equal(logits, before)


@settings(max_examples=300)
@given(rows=st.integers(1, 3), width=st.integers(1, 70), levels=st.integers(1, 6), data=st.data())
def test_equal_logits_are_sorted_by_token(rows, width, levels, data):
    values = st.sampled_from([*range(levels), -np.inf])
    numbers = data.draw(st.lists(values, min_size=rows * width, max_size=rows * width))
    count = data.draw(st.integers(1, width))
    logits = np.array(numbers, np.float32).reshape(rows, width)
    logits[:, data.draw(st.integers(0, width - 1))] = 0  # a row needs a finite logit
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    assert top_k_tokens(logits, count, 1)[1].tolist() == expected.tolist()


@pytest.mark.parametrize("rows", [1, 321])
def test_rows_have_the_same_bits_alone_and_together(rows):
    logits = np.random.default_rng(1).standard_normal((rows, 6001), dtype=np.float32)
    together = top_k_tokens(logits, 10, 1)
    assert StepLogits(logits).most_likely(slice(rows)).tolist() == together[1][:, 0].tolist()
    for row in {0, rows // 2, rows - 1}:
        alone = top_k_tokens(logits[row : row + 1].copy(), 10, 1)
        for values, of_row in zip(together, alone, strict=True):
            np.testing.assert_array_equal(values[row : row + 1], of_row)


def test_more_candidates_than_tokens_are_all_tokens():
    step = StepLogits(np.array([[0, 3, 1]], np.float32))
    log_p, tokens = step.best(slice(0, 1), 10)
    assert tokens.tolist() == [[1, 2, 0]]
    np.testing.assert_allclose(np.exp(log_p).sum(), 1, atol=1e-6)


def test_packaged_graph_matches_its_script():
    graph = onnx.load(likeliest.GRAPH)
    onnx.checker.check_model(graph, full_check=True)
    assert graph == top_k_graph()


@pytest.mark.parametrize("width", [9, 50])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_nan_and_infinite_logits_are_invalid_in_beam_search(number, width):
    logits = np.zeros((2, width), np.float32)
    logits[1, 3] = number
    log_p, tokens = top_k_tokens(logits, 4, 1)
    is_nan = np.isnan(log_p)
    assert not is_nan[0].any() and is_nan[1].any()
    assert tokens.min() >= 0 and tokens.max() < width
    search = BeamSearch(2, Options(num_beams=2))
    search.advance_best(*top_k_tokens(logits, search.candidates, 1))
    assert search.is_invalid.tolist() == [False, True]
