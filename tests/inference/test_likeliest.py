"""Tests of the top-k candidates of beam search, against torch's log-softmax and a full sort."""

import numpy as np
import onnx
import pytest
import torch
from top_k_graph import top_k_graph

from vanilla_transformer_export import Options
from vanilla_transformer_export.engine import search as likeliest
from vanilla_transformer_export.engine.search import BeamSearch, top_k_tokens


@pytest.mark.parametrize("width", [3, 48, 40_001])
@pytest.mark.parametrize("threads", [1, 2])
def test_top_k_matches_full_sort_and_torch_log_softmax(width, threads, monkeypatch):
    monkeypatch.setattr(likeliest, "CHUNK", 3 * width)  # seven rows are three chunks
    rng = np.random.default_rng(0)
    for logits in (
        20 * rng.standard_normal((7, width)),
        rng.integers(0, 40, (7, width)),
        np.zeros((7, width)),
    ):
        logits = logits.astype(np.float32)
        logits[1, 2:] = -np.inf
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


def test_packaged_graph_matches_its_script():
    graph = onnx.load(likeliest.GRAPH)
    onnx.checker.check_model(graph, full_check=True)
    assert graph == top_k_graph()


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_nan_and_infinite_logits_are_invalid_in_beam_search(number):
    logits = np.zeros((2, 9), np.float32)
    logits[1, 3] = number
    is_nan = np.isnan(top_k_tokens(logits, 2, 1)[0])
    assert not is_nan[0].any() and is_nan[1].any()
    search = BeamSearch(2, Options(num_beams=2))
    search.advance_best(*top_k_tokens(logits, search.num_best, 1))
    assert search.is_invalid.tolist() == [False, True]
