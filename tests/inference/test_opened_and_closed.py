"""Tests of runtimes that are pickled, copied, closed and dropped."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from heads import LABELLED, export_for_images, save_head, word_pieces
from messages import raises

from vanilla_transformer_export import ImageRuntime, Runtime, TextRuntime, export
from vanilla_transformer_export.engine.batch import GenerationBatch

IDS = np.array([[5, 6, 7]])
EXPORTS = [("seq2seq", "portable"), ("causal", "cpu"), ("seq2seq", "cpu")]


def run(runtime):
    return runtime.generate(IDS, max_new_tokens=3)


@pytest.fixture(params=EXPORTS, ids="-".join)
def directory(exported_for, request):
    return exported_for(*request.param)[1]


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
def test_copy_has_same_arguments_and_tokens(exported_for, again):
    runtime = Runtime(exported_for("seq2seq", "cpu")[1], threads=2, arena=False, workers=1)
    other = again(runtime)
    assert other is not runtime and other.arguments == runtime.arguments
    assert (other.threads, other.arena, other.workers) == (2, False, 1)
    np.testing.assert_array_equal(run(other), run(runtime))


def test_spawned_process_gets_same_tokens(exported_for):
    runtime = Runtime(exported_for("causal", "cpu")[1], threads=1)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        tokens = pool.submit(runtime.generate, IDS, max_new_tokens=3).result()
    assert tokens.tolist() == run(runtime).tolist()


def test_batch_that_has_begun_ends_after_close(directory, monkeypatch):
    runtime = Runtime(directory, threads=1)
    expected, start = run(runtime), GenerationBatch.start

    def close_and_start(batch, groups):
        runtime.close()  # as another thread may
        start(batch, groups)

    monkeypatch.setattr(GenerationBatch, "start", close_and_start)
    np.testing.assert_array_equal(run(runtime), expected)
    with raises(ValueError, seen="closed"):
        run(runtime)


@pytest.fixture
def readers(tmp_path):
    """A runtime of texts and one of images, each with a call of it."""
    architecture = "VanillaEncoderForSequenceClassification"
    save_head(architecture, word_pieces(), tmp_path / "model", **LABELLED)
    export(tmp_path / "model", tmp_path / "texts", cases=1)
    export_for_images(tmp_path / "images")
    return [
        (TextRuntime(tmp_path / "texts", threads=1), ["a red house"]),
        (ImageRuntime(tmp_path / "images/export", threads=1), [np.zeros((8, 8, 3), np.uint8)]),
    ]


def test_text_and_image_runtimes_are_copied_and_close(readers):
    for runtime, inputs in readers:
        with pickle.loads(pickle.dumps(runtime)) as again:
            assert again.runtime.threads == 1
            assert again.classify(inputs) == runtime.classify(inputs)
        with raises(ValueError, seen="closed"):
            again.classify(inputs)


def test_closed_runtime_raises_and_frees_its_sessions(directory):
    with Runtime(directory, threads=2) as runtime:
        expected = run(runtime)
        sessions = [weakref.ref(session) for session in runtime.model.loaded.sessions.values()]
    assert [session() for session in sessions] == [None] * len(sessions)
    for many in (IDS, IDS.repeat(80, axis=0)):  # batches of workers too
        with raises(ValueError, seen=(str(directory), "closed"), expected="open"):
            runtime.generate(many, max_new_tokens=3)
    runtime.close()
    np.testing.assert_array_equal(run(Runtime(directory)), expected)


def test_stream_ends_with_an_error_after_close(directory):
    runtime = Runtime(directory)
    stream = runtime.stream(IDS, max_new_tokens=3, eos_token_id=None)
    next(stream)
    runtime.close()
    with raises(ValueError, seen="closed"):
        next(stream)
    with Runtime(directory) as runtime:
        for number, _ in enumerate(runtime.stream(IDS, max_new_tokens=3, eos_token_id=None)):
            if number == 2:  # the last token ends the stream, closed or not
                runtime.close()
    assert number == 2


def test_dropped_runtime_is_freed_without_garbage_collection(directory):
    """A circle of references would keep the graphs in memory until Python looks for circles."""
    gc.collect()
    gc.disable()
    try:
        runtime = Runtime(directory, threads=1)
        run(runtime)
        runtime.generate(IDS.repeat(40, axis=0), num_beams=2, max_new_tokens=3)
        next(runtime.stream(IDS, max_new_tokens=3))
        model = weakref.ref(runtime.model)
        del runtime
        assert model() is None
    finally:
        gc.enable()
