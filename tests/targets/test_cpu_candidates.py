"""Tests of the graph of the cpu target that returns the best tokens of each beam, against numpy in
float64 and `transformers.generate`."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from checkpoints import copy_folder
from targets import prompts
from written import operators, run, write

from vanilla_transformer import VanillaSeq2SeqConfig
from vanilla_transformer_export import Options, Runtime
from vanilla_transformer_export.engine.batch import MIN_CANDIDATE_ROWS, batch_request
from vanilla_transformer_export.engine.groups import Group
from vanilla_transformer_export.engine.model import OnnxModel
from vanilla_transformer_export.engine.search import BeamSearch, StepLogits
from vanilla_transformer_export.inference.session import LoadedExport
from vanilla_transformer_export.targets.cpu.graphs import BLOCK, best_tokens
from vanilla_transformer_export.targets.registry import get_target

ARCHITECTURE = "VanillaSeq2SeqForConditionalGeneration"
FILE = "onnx/decoder_candidates_model.onnx"
BEAMS = 5
MANY = MIN_CANDIDATE_ROWS // BEAMS  # inputs from which on the graph is opened


# ---------------------------------------------------------------------------- the part of the graph


def find_best(states, matrix, bias, count, dtype="fp32"):
    """Return log p and ids of the `count` best tokens after `states` (R, D), from the graph. The
    matrix of the logits is (V, D)."""

    def part(g, x, number):
        log_p, tokens = best_tokens(g, x, number)
        return log_p, g.op.cast(tokens, "float32")

    inputs = {"x": states, "count": np.array([count])}
    weights = {"lm_head.weight": matrix, "lm_head.bias": bias}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    model = write(part, weights, inputs, dtype=dtype, vocab_size=len(bias), **special)
    assert operators(model).count("Loop") == 1
    log_p, tokens = run(model, inputs)
    return log_p, tokens.astype(np.int64)


def check_best(states, matrix, bias, count):
    """Check the best tokens of `states`, whose logits are the same numbers in float32 and
    float64."""
    log_p, tokens = find_best(states, matrix, bias, count)
    with np.errstate(invalid="ignore"):
        logits = states.astype(np.float64) @ matrix.T.astype(np.float64) + bias
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    assert tokens.tolist() == expected.tolist()
    exact = logits - logits.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(log_p, np.take_along_axis(exact, expected, axis=1), atol=1e-5)


def integers(rng, *shape):
    return rng.integers(-2, 3, shape).astype(np.float32)


@pytest.mark.parametrize("vocabulary", [1, 5, 16, 48, 53])  # a group has 16 tokens
@pytest.mark.parametrize("rows", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 1])
def test_best_tokens_of_any_number_of_rows_equal_those_of_a_full_sort(rows, vocabulary):
    """Integers give many equal logits, of which the lowest token comes first."""
    rng = np.random.default_rng(rows)
    states, matrix = integers(rng, rows, 8), integers(rng, vocabulary, 8)
    check_best(states, matrix, integers(rng, vocabulary), min(10, vocabulary))
    check_best(states, matrix, integers(rng, vocabulary), vocabulary)


def test_equal_and_excluded_tokens_are_sorted_by_number():
    states, matrix = np.ones((BLOCK + 6, 4), np.float32), np.zeros((40, 4), np.float32)
    check_best(states, matrix, np.zeros(40, np.float32), 10)
    bias = np.full(40, -np.inf, np.float32)
    bias[33] = 2  # the only token that is possible
    check_best(states, matrix, bias, 10)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_row_that_is_not_finite_fails_and_others_do_not(number):
    rng = np.random.default_rng(0)
    states, matrix = integers(rng, 2 * BLOCK, 8), integers(rng, 48, 8)
    bias = np.zeros(48, np.float32)
    expected = find_best(states, matrix, bias, 4)
    row = BLOCK + 3
    states[row, 2] = number
    log_p, tokens = find_best(states, matrix, bias, 4)
    others = np.arange(2 * BLOCK) != row
    assert np.isnan(log_p[row]).all() and tokens.min() >= 0 and tokens.max() < 48
    np.testing.assert_array_equal(log_p[others], expected[0][others])
    np.testing.assert_array_equal(tokens[others], expected[1][others])
    search = BeamSearch(2 * BLOCK, Options(num_beams=2))
    search.advance(StepLogits(log_p, tokens=tokens), slice(0, 2 * BLOCK))
    assert np.flatnonzero(search.is_invalid).tolist() == [row]


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_rows_have_the_same_bits_alone_and_together(dtype):
    rng = np.random.default_rng(1)
    states = rng.standard_normal((BLOCK + 1, 64), np.float32)
    matrix, bias = rng.standard_normal((200, 64), np.float32), np.zeros(200, np.float32)
    together = find_best(states, matrix, bias, 10, dtype)
    for row in (0, 1, BLOCK - 1, BLOCK):
        alone = find_best(states[row : row + 1], matrix, bias, 10, dtype)
        for values, of_row in zip(together, alone, strict=True):
            np.testing.assert_array_equal(values[row : row + 1], of_row)


@pytest.mark.parametrize("dtype, has_graph", [("fp32", False), ("int8", True)])
def test_only_small_projections_have_the_graph(dtype, has_graph):
    """2 million weights fit in int8."""
    config = VanillaSeq2SeqConfig.preset("base", vocab_size=4000).to_dict()
    specs = get_target("cpu").graph_specs(config, ARCHITECTURE, dtype, "fp32")
    assert ("candidates" in specs) == has_graph


# -------------------------------------------------------------------------------------- beam search


def many_prompts():
    """Return ids and mask of `MANY` sources."""
    parts = zip(*(prompts("seq2seq", seed) for seed in range(-(-MANY // 4))), strict=True)
    return tuple(np.concatenate(arrays)[:MANY] for arrays in parts)


def uses_graph(runtime):
    return "candidates" in runtime.model.loaded.sessions


def check_tokens(runtime, model, ids, mask, **settings):
    with torch.no_grad():
        inputs = {"attention_mask": torch.from_numpy(mask), "do_sample": False}
        expected = model.generate(torch.from_numpy(ids), **inputs, **settings).numpy()
    np.testing.assert_array_equal(runtime.generate(ids, mask, **settings), expected)


@pytest.mark.parametrize("name", ["seq2seq", pytest.param("seq2seq-t5", marks=pytest.mark.slow)])
def test_many_beams_open_the_graph_and_get_tokens_of_transformers(exported_for, name):
    model, directory = exported_for(name, "cpu")
    runtime = Runtime(directory, threads=1)
    ids, mask = many_prompts()
    settings = {"max_new_tokens": 40, "num_beams": BEAMS}  # more than the first capacity
    check_tokens(runtime, model, ids[1:], mask[1:], **settings)
    assert not uses_graph(runtime)
    check_tokens(runtime, model, ids, mask, **settings)
    assert uses_graph(runtime)
    for rows in (1, 3):
        check_tokens(runtime, model, ids[:rows], mask[:rows], **settings)
    check_tokens(runtime, model, ids, mask, **settings | {"num_return_sequences": 3})
    # 5 beams have 60 candidates for 48 tokens
    many_ends = settings | {"eos_token_id": [2, *range(38, 48)]}
    check_tokens(runtime, model, ids, mask, **many_ends)


OTHER_SEARCHES = [
    {"num_beams": BEAMS, "no_repeat_ngram_size": 2},
    {"num_beams": BEAMS, "min_new_tokens": 3},
    {"num_beams": BEAMS, "suppress_tokens": [5]},
    {"num_beams": 1},
]


@pytest.mark.parametrize("settings", OTHER_SEARCHES)
def test_searches_that_need_all_logits_get_them(exported_for, settings):
    model, directory = exported_for("seq2seq", "cpu")
    runtime = Runtime(directory, threads=1)
    ids, mask = many_prompts()
    check_tokens(runtime, model, ids, mask, max_new_tokens=8, **settings)
    assert not uses_graph(runtime)
    runtime.model.open_candidates()
    assert uses_graph(runtime)
    check_tokens(runtime, model, ids, mask, max_new_tokens=8, **settings)


def test_batch_with_one_group_that_needs_logits_gets_them(exported_for):
    runtime = Runtime(exported_for("seq2seq", "cpu")[1])
    settings = {"num_beams": BEAMS, "max_new_tokens": 4}
    plain, penalized = (
        [Group(row) for row in runtime.inputs(np.array([[5, 6]]), None, None, settings | more)]
        for more in ({}, {"repetition_penalty": 2.0})
    )
    assert batch_request(plain).candidates == 2 * BEAMS
    assert batch_request([*plain, *penalized]).candidates == 0


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_sequences_and_scores_equal_those_of_an_export_without_the_graph(
    exported_for, tmp_path, dtype
):
    directory = exported_for("seq2seq", "cpu", dtype)[1]
    old = copy_folder(directory, tmp_path)
    (old / FILE).unlink()
    manifest = json.loads((old / "manifest.json").read_text())
    del manifest["files"][FILE]
    (old / "manifest.json").write_text(json.dumps(manifest))
    results = []
    for path, has_graph in ((directory, True), (old, False)):
        runtime = Runtime(path, threads=1)
        ids, mask = many_prompts()
        results.append(runtime.generate(ids, mask, num_beams=BEAMS, max_new_tokens=20))
        assert uses_graph(runtime) == has_graph
    np.testing.assert_array_equal(*results)


def test_threads_open_the_graph_once(exported_for, monkeypatch):
    model = Runtime(exported_for("seq2seq", "cpu")[1], threads=1).model
    opened, make_session = [], LoadedExport.make_session

    def note_and_make(export, role, *sizes):
        opened.append(role)
        return make_session(export, role, *sizes)

    monkeypatch.setattr(LoadedExport, "make_session", note_and_make)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(OnnxModel.open_candidates, [model] * 4))
    assert opened == ["candidates"]
