"""Tests of offline inference of many rows in workers, against transformers."""

import json
import signal
import threading
import time

import numpy as np
import onnxruntime
import pytest
import sacrebleu
import torch
from checkpoints import EOS, PAD, START
from command_line import main
from messages import raises
from random_prompts import pad_rows
from serving_load import with_words
from targets import SIZES

from vanilla_transformer_export import Runtime, TextRuntime, evaluate
from vanilla_transformer_export.engine import capacity
from vanilla_transformer_export.engine.batch import GenerationBatch
from vanilla_transformer_export.engine.capacity import MIN_JOINING
from vanilla_transformer_export.errors import SessionError, UsageError
from vanilla_transformer_export.inference.devices import level2_cache

SEQ2SEQ, DECODER = "seq2seq", "causal"
COUNT = 2 * MIN_JOINING + 12
OPTIONS = [
    dict(),
    dict(repetition_penalty=1.4, no_repeat_ngram_size=2, min_new_tokens=4),
    dict(
        forced_bos_token_id=13,
        forced_eos_token_id=2,
        bad_words_ids=[[7], [8, 9]],
        begin_suppress_tokens=[12],
    ),
]


def inputs(name, count=COUNT, seed=0):
    """Return (ids, mask) of rows of 1 to 17 tokens: right-padded sources, left-padded prompts."""
    rng = np.random.default_rng(seed)
    rows = [
        rng.integers(4, SIZES["vocab_size"], rng.integers(1, 18)).tolist() for _ in range(count)
    ]
    return pad_rows(rows, "right" if name == SEQ2SEQ else "left")


def generate_with_transformers(model, ids, mask, prefixes=None, **options):
    more = {} if prefixes is None else {"decoder_input_ids": torch.tensor(prefixes)}
    return model.generate(
        torch.tensor(ids), attention_mask=torch.tensor(mask), **more, **options
    ).numpy()


@pytest.fixture
def steps(monkeypatch):
    """(Thread, number of running rows) of each step of rows that may join, in order.

    The first step of a thread is slow: on a busy machine the other thread may start late.
    """
    result = []
    step = GenerationBatch.step

    def note_and_step(batch):
        if batch.joining is not None:
            thread = threading.current_thread()
            if all(other is not thread for other, _ in result):
                time.sleep(0.05)
            result.append((thread, len(batch.running)))
        return step(batch)

    monkeypatch.setattr(GenerationBatch, "step", note_and_step)
    return result


def count_threads(steps):
    return len({thread for thread, _ in steps})


@pytest.mark.parametrize("name", [SEQ2SEQ, DECODER])
def test_many_rows_run_in_workers_and_match_transformers(exported_for, steps, name):
    model, directory = exported_for(name, "cpu")
    ids, mask = inputs(name)
    for threads, workers in ((2, 2), (2, 1), (1, None)):
        runtime = Runtime(directory, threads=threads, workers=workers)
        for options in OPTIONS:
            steps.clear()
            result = runtime.generate(ids, mask, max_new_tokens=9, **options)
            np.testing.assert_array_equal(
                result, generate_with_transformers(model, ids, mask, max_new_tokens=9, **options)
            )
            assert count_threads(steps) == (workers or 1)
            steps.clear()
            few = MIN_JOINING * (workers or 1) - 1
            runtime.generate(ids[:few], mask[:few], max_new_tokens=9, **options)
            assert not steps


def test_decoder_prefixes_run_in_workers_and_match_transformers(exported_for, steps):
    model, directory = exported_for(SEQ2SEQ, "cpu")
    ids, mask = inputs(SEQ2SEQ)
    prefixes = np.random.default_rng(1).integers(4, 40, (COUNT, 3))
    result = Runtime(directory, threads=2, workers=2).generate(
        ids, mask, prefixes, max_new_tokens=6
    )
    starts = np.concatenate([np.full((COUNT, 1), START), prefixes], axis=1)
    np.testing.assert_array_equal(
        result, generate_with_transformers(model, ids, mask, starts, max_new_tokens=6)
    )
    assert count_threads(steps) == 2


def test_finished_rows_take_part_in_no_step(exported_for, steps):
    """The numbers of rows of all steps sum to the number of new tokens."""
    model, directory = exported_for(SEQ2SEQ, "cpu")
    ids, mask = inputs(SEQ2SEQ)
    Runtime(directory, threads=2, workers=1).generate(ids, mask, max_new_tokens=20)
    new = generate_with_transformers(model, ids, mask, max_new_tokens=20)[:, 1:]
    lengths = [row.index(EOS) + 1 if EOS in row else len(row) for row in new.tolist()]
    assert len(set(lengths)) > 2 and sum(rows for _, rows in steps) == sum(lengths)


@pytest.mark.parametrize("name", [SEQ2SEQ, DECODER])
def test_sampling_scores_and_missing_slots_use_static_batches(
    exported_for, steps, monkeypatch, name
):
    _, directory = exported_for(name, "cpu")
    ids, mask = inputs(name)
    runtime = Runtime(directory, threads=2)
    options = dict(do_sample=True, seed=3, max_new_tokens=9)
    sampled = runtime.generate(ids, mask, **options)
    scored = runtime.generate_with_scores(ids, mask, max_new_tokens=9)
    monkeypatch.setattr(capacity, "MAX_SLOT_BYTES", 1)  # no room for slots
    greedy = runtime.generate(ids, mask, max_new_tokens=9)
    assert not steps
    monkeypatch.undo()
    np.testing.assert_array_equal(greedy, scored[0])
    np.testing.assert_array_equal(sampled, runtime.generate(ids, mask, **options))


@pytest.mark.parametrize("target", ["cpu", "portable"])
@pytest.mark.parametrize("name", [SEQ2SEQ, DECODER])
def test_beam_search_splits_rows_into_batches_of_similar_length_with_same_results(
    exported_for, monkeypatch, name, target
):
    _, directory = exported_for(name, target)
    ids, mask = inputs(name)
    options = dict(num_beams=3, num_return_sequences=2, max_new_tokens=7)
    runtime = Runtime(directory, threads=2)
    groups, start = [], GenerationBatch.start

    def note_lengths_and_start(batch, parts):
        groups.append(sorted(len(part.input.source or part.input.prompt) for part in parts))
        start(batch, parts)

    monkeypatch.setattr(GenerationBatch, "start", note_lengths_and_start)
    expected = runtime.generate_with_scores(ids, mask, **options)
    assert [*map(len, groups)] == [COUNT // runtime.workers] * runtime.workers
    groups.clear()
    monkeypatch.setattr(capacity, "MAX_BEAM_ROWS", 1)
    monkeypatch.setattr(capacity, "MIN_BEAM_INPUTS", 8)
    actual = runtime.generate_with_scores(ids, mask, **options)
    assert max(map(len, groups)) == 8
    assert sum(sorted(groups), []) == sorted(mask.sum(axis=1))  # no batch overlaps another
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-6)


def test_source_mask_with_holes_matches_transformers_without_workers(exported_for, steps):
    model, directory = exported_for(SEQ2SEQ, "cpu")
    ids, mask = np.full((COUNT, 3), 7), np.ones((COUNT, 3), np.int64)
    mask[0, 1] = 0
    result = Runtime(directory, threads=2).generate(ids, mask, max_new_tokens=5)
    np.testing.assert_array_equal(
        result, generate_with_transformers(model, ids, mask, max_new_tokens=5)
    )
    assert not steps


def test_onnxruntime_error_in_worker_names_graph_and_no_thread_remains(exported_for, monkeypatch):
    runtime = Runtime(exported_for(DECODER, "cpu")[1], threads=2)

    def fail(*args):
        raise Exception("no memory")  # the class of onnxruntime's errors

    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", fail)
    before = threading.active_count()
    with raises(SessionError, seen=("onnxruntime", "model.onnx", "no memory")):
        runtime.generate(*inputs(DECODER))
    assert threading.active_count() == before


def test_interrupted_call_ends_its_threads_before_it_raises(exported_for, monkeypatch):
    runtime = Runtime(exported_for(DECODER, "cpu")[1], threads=2)
    main, step, steps = threading.main_thread().ident, GenerationBatch.step, []

    def step_slowly(batch):
        if threading.current_thread() is not threading.main_thread() and not steps:
            steps.append("begun")
            time.sleep(0.2)  # until the caller waits
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.5)
            steps.append("ended")
        return step(batch)

    monkeypatch.setattr(GenerationBatch, "step", step_slowly)
    threads, before = threading.active_count(), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            runtime.generate(*inputs(DECODER))
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps == ["begun", "ended"]
    assert threading.active_count() == threads


def test_invalid_number_of_workers_raises_usage_error(exported_for):
    _, directory = exported_for(DECODER, "cpu")
    for workers in (0, 3, True, "2"):
        with raises(UsageError, expected=("workers", 1, 2, "threads")):
            Runtime(directory, threads=2, workers=workers)
    with raises(UsageError, seen=("workers", 1, "portable"), expected=None):
        Runtime(exported_for(DECODER, "portable")[1], workers=1)


# -------------------------------------------------------------------------------------------- texts


@pytest.fixture(scope="module")
def translator(exported_for, tmp_path_factory):
    """An export with a tokenizer of the words w0 to w47, texts, and their translations by
    transformers."""
    model, directory = exported_for(SEQ2SEQ, "cpu")
    ids, mask = inputs(SEQ2SEQ)
    ids[(ids >= 10) & (ids < 30)] = 7  # w10 to w29 begin with the special tokens w1 and w2
    texts = [
        " ".join(f"w{token}" for token in row[is_token]) for row, is_token in zip(ids, mask == 1)
    ]
    rows = generate_with_transformers(model, ids, mask, max_new_tokens=9).tolist()
    expected = [
        " ".join(f"w{token}" for token in row if token not in (PAD, START, EOS)) for row in rows
    ]
    return with_words(directory, tmp_path_factory.mktemp("workers")), texts, expected


def test_files_translations_and_evaluations_run_in_workers(translator, steps, tmp_path, capsys):
    export, texts, reference = translator
    options = dict(max_new_tokens=9, no_repeat_ngram_size=0)
    source, references = tmp_path / "in", tmp_path / "references"
    source.write_text("\n".join(["", *texts]) + "\n")
    runtime = TextRuntime(export, threads=2, workers=2)
    with pytest.warns(UserWarning, match=" 9 tokens"):
        assert runtime.translate(texts, split=False, **options) == reference
    assert count_threads(steps) == 2
    steps.clear()
    command = ["generate", str(export), "--input", str(source), "--threads", "2"]
    command += ["--max-new-tokens", "9", "--no-repeat-ngram-size", "0", "--batch-size", "8"]
    main([*command, "--workers", "2", "--output", str(tmp_path / "out")])
    assert (tmp_path / "out").read_text().split("\n") == ["", *reference, ""]
    assert count_threads(steps) == 2
    steps.clear()
    capsys.readouterr()
    main([*command, "--workers", "1"])
    assert capsys.readouterr().out.split("\n") == ["", *reference, ""]
    assert count_threads(steps) == 1
    steps.clear()
    source.write_text("\n".join(texts) + "\n")
    references.write_text("\n".join(text[::-1] for text in reference[:-1]) + "\nw5 w6 w7 w8\n")
    expected = sacrebleu.corpus_bleu(reference, [references.read_text().split("\n")[:-1]]).score
    actual = evaluate(export, source, references, batch_size=8, workers=1, **options)
    assert actual["bleu"] == round(expected, 2) and count_threads(steps) == 1
    flags = [
        "--source",
        str(source),
        "--references",
        str(references),
        "--workers",
        "1",
        "--max-new-tokens",
        "9",
    ]
    main(["evaluate", str(export), *flags, "--no-repeat-ngram-size", "0"])
    assert json.loads(capsys.readouterr().out) == actual


def test_evaluate_rejects_workers_for_checkpoints(tmp_path):
    with raises(UsageError, seen=("workers", 2)):
        evaluate(tmp_path, tmp_path, tmp_path, workers=2)


@pytest.mark.parametrize(
    ("vocab_size", "layers", "cache", "slots"),
    [
        (4_000, 4, 2**20, 64),  # 64 rows of logits have 1.02 MB
        (6_000, 4, 2**20, 32),
        (6_000, 4, 2**21, 64),
        (6_000, 100, 2**20, 64),  # more multiplications
        (6_000, 4, float("inf"), 64),
    ],
)
def test_small_model_has_as_many_slots_as_its_logits_stay_in_the_cache(
    vocab_size, layers, cache, slots, monkeypatch
):
    config = dict(vocab_size=vocab_size, decoder_layers=layers, hidden_size=128)
    config |= dict(num_attention_heads=4, head_dim=32, intermediate_size=256)
    monkeypatch.setattr(capacity, "level2_cache", lambda: cache)
    assert capacity.max_joining(config) == slots


def test_level_2_cache_is_read_from_the_system(tmp_path):
    file = tmp_path / "sys/devices/system/cpu/cpu0/cache/index2/size"
    assert level2_cache(tmp_path / "none") == float("inf")
    file.parent.mkdir(parents=True)
    file.write_text("1024K\n")
    assert level2_cache(tmp_path) == 2**20
