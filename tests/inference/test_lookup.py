"""Tests of prompt lookup decoding: tokens, number of steps, logits and errors."""

import json

import numpy as np
import pytest
import torch
from checkpoints import EOS, PAD, copy_folder, edit_json
from messages import raises
from opened_engines import open_engine

from vanilla_transformer_export import Options, Runtime
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.inference.decoder import GenerationRequest
from vanilla_transformer_export.inference.prompt_lookup import (
    NgramIndex,
    prompt_lookup_tokens,
    until_end,
)
from vanilla_transformer_export.inference.search import start_search
from vanilla_transformer_export.targets.cpu import decoder as cpu
from vanilla_transformer_export.targets.portable import decoder as portable

LOOKUP = dict(prompt_lookup_num_tokens=4)
NEW_TOKENS = 40
CASES = [
    ("seq2seq", "cpu"),
    ("causal-window", "cpu"),
    ("causal-grouped", "cpu"),
    pytest.param("causal", "cpu", marks=pytest.mark.slow),
    pytest.param("causal-relative", "cpu", marks=pytest.mark.slow),
    ("causal-relative", "portable"),
    pytest.param("seq2seq-t5", "portable", marks=pytest.mark.slow),
]
each_export = pytest.mark.parametrize("name, target", CASES)


@pytest.fixture
def load_pair(exported, exported_for):
    """Return a function that returns a model in torch and the runtime of its export."""

    def load(name, target):
        model, directory = exported_for(name, target)
        return model, Runtime(directory, threads=1)

    return load


def prompt(seed=0, length=12):
    """Return a prompt (1, length) that repeats tokens, as greedy search of these models does."""
    return np.random.default_rng(seed).integers(4, 9, (1, length))


@pytest.fixture
def step_sizes(monkeypatch):
    """Return a list that collects the number of tokens of each step of prompt lookup."""
    sizes = []
    for module, name in ((cpu.LookupGraph, "run"), (portable.PortableDecoder, "run")):
        original = getattr(module, name)

        def counted(self, *args, original=original):
            tokens = next(argument for argument in args if isinstance(argument, np.ndarray))
            sizes.append(tokens.shape[1])
            return original(self, *args)

        monkeypatch.setattr(module, name, counted)
    return sizes


# ------------------------------------------------------------------------------------------- tokens

SETTINGS = [
    dict(),
    dict(max_new_tokens=9),
    dict(min_new_tokens=17),
    dict(repetition_penalty=1.3),
    dict(no_repeat_ngram_size=3, min_new_tokens=NEW_TOKENS),
    dict(bad_words_ids=[[5], [6, 7]], min_new_tokens=10),
    dict(eos_token_id=[EOS, 6]),
    dict(forced_eos_token_id=EOS, max_new_tokens=11, min_new_tokens=11),
    dict(max_matching_ngram_size=1),
    dict(max_matching_ngram_size=3, prompt_lookup_num_tokens=300),
]


@each_export
def test_tokens_match_greedy_search_in_torch(load_pair, name, target, step_sizes):
    model, runtime = load_pair(name, target)
    for settings in SETTINGS:
        options = dict(max_new_tokens=NEW_TOKENS, eos_token_id=EOS, pad_token_id=PAD) | settings
        greedy = {
            key: value
            for key, value in options.items()
            if "lookup" not in key and "matching" not in key
        }
        for seed in range(2):
            ids = prompt(seed)
            expected = model.generate(torch.from_numpy(ids), do_sample=False, **greedy).tolist()
            assert runtime.generate(ids, **LOOKUP | options).tolist() == expected, (settings, seed)
            streamed = [int(token[0]) for token in runtime.stream(ids, **LOOKUP | options)]
            assert streamed == expected[0][-len(streamed) :]
    assert max(step_sizes) > 4  # some steps check several candidates


@pytest.mark.parametrize(
    "name, target", [("causal-relative", "portable"), ("causal-window", "cpu")]
)
def test_tokens_match_prompt_lookup_in_transformers(load_pair, name, target):
    model, runtime = load_pair(name, target)
    ids = prompt(length=9)
    options = dict(
        **LOOKUP,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        min_new_tokens=NEW_TOKENS,
    )
    expected = model.generate(torch.from_numpy(ids), do_sample=False, **options)
    assert runtime.generate(ids, **options).tolist() == expected.tolist()


class KnownText:
    """A `CandidateDecoder` that predicts the next token of `text` after a prefix of it, else 0."""

    max_step_tokens = None

    def __init__(self, text):
        self.text = text
        self.given = []
        self.steps = []

    def after(self, count):
        """Return the logits (1, count, V) after each of the last `count` tokens."""
        logits = np.zeros((1, count, 30), np.float32)
        for place, length in enumerate(range(len(self.given) - count + 1, len(self.given) + 1)):
            is_right = self.given[:length] == self.text[:length]
            logits[0, place, self.text[length] if is_right else 0] = 1
        return logits

    def step(self, tokens):
        self.steps.append(tokens[0].tolist())
        self.given += self.steps[-1]
        return self.after(tokens.shape[1])

    def crop(self, count):
        assert 0 <= count <= len(self.steps[-1])
        self.given = self.given[: len(self.given) - count]


def run_prompt_lookup(source, text, **options):
    """Return the tokens and the steps of prompt lookup for a row that reads `source` and writes
    `text`."""
    options = Options(
        **{"prompt_lookup_num_tokens": 4, "eos_token_id": 2, "max_new_tokens": 50} | options
    )
    start, ids = np.array([[1]]), np.array([source])
    request = GenerationRequest(options, start, np.ones_like(start), (ids, np.ones_like(ids)))
    decoder, search = KnownText(text), start_search(options, request.prompt)
    first = np.eye(30, dtype=np.float32)[None, text[0]]
    result = [int(token[0]) for token in prompt_lookup_tokens(request, decoder, search, first)]
    assert search.result()[0].tolist() == [result]
    return result, decoder.steps


def test_copy_with_one_difference_takes_few_steps():
    source, text = [*range(10, 22), 2], [*range(10, 16), 25, *range(17, 22), 2]
    result, steps = run_prompt_lookup(source, text)
    assert result == text
    # 11 needs the bigram (10, 11). 17 is looked up alone, because earlier candidates were correct.
    assert steps == [[10], [11, 12, 13, 14, 15], [25], [17, 18, 19, 20, 21]]


def test_without_a_match_each_step_reads_one_token():
    source, text = [10, 11, 12, 2], [13, 10, 14, 12, 15, 11, 2]
    result, steps = run_prompt_lookup(source, text)
    assert result == text and steps == [[token] for token in text[:-1]]


@pytest.mark.parametrize("most", range(1, 13))
def test_max_new_tokens_ends_a_copy(most):
    source = [*range(10, 22), 2]
    result, steps = run_prompt_lookup(source, source, max_new_tokens=most)
    assert result == source[:most] and sum(map(len, steps)) <= most


def test_end_token_ends_a_copy():
    """21 and 14 are end tokens too. No step checks an end token or the tokens after it."""
    source = [*range(10, 20), 21, 11, 2]
    result, steps = run_prompt_lookup(source, source, eos_token_id=[2, 21])
    assert result == source[:11] and {2, 21}.isdisjoint(token for step in steps for token in step)
    assert run_prompt_lookup(source, source, eos_token_id=[2, 14])[0] == source[:5]


def test_index_returns_followers_of_last_longest_ngram():
    index = NgramIndex(3)
    assert index.followers_of_last(1) == []
    for token in (5, 6, 7, 8, 5, 6, 9, 7, 5, 6):
        index.add(token)
    assert index.followers_of_last(1) == index.followers_of_last(2) == [9, 7, 5, 6]
    assert index.followers_of_last(3) == []
    index.add(7)
    assert index.followers_of_last(3) == [8, 5, 6, 9, 7, 5, 6, 7]
    index.add(1)
    assert index.followers_of_last(1) == []
    assert until_end([5, 6, 2, 7], (2, 3)) == [5, 6]


# ------------------------------------------------------------------------------------------- logits


@each_export
@torch.no_grad()
def test_logits_after_cropped_tokens_match_torch(load_pair, name, target, monkeypatch):
    """Caches start small, so that they grow, or drop tokens before the window."""
    for module in (cpu, portable):
        monkeypatch.setattr(module, "INITIAL_CAPACITY", 8)
    model, runtime = load_pair(name, target)
    ids, rng = prompt(), np.random.default_rng(0)
    request = runtime.request(
        ids, None, None, LOOKUP | dict(max_new_tokens=45, eos_token_id=EOS, pad_token_id=PAD)
    )
    decoder = runtime.model.decoders.start(request)
    decoder.prefill(request.input_ids, request.attention_mask)
    history = request.input_ids
    for count, wrong in [
        (1, 0),
        (5, 3),
        (4, 3),
        (7, 0),
        (6, 2),
        (1, 0),
        (5, 1),
        (8, 0),
        (3, 2),
        (6, 5),
        (7, 1),
    ]:
        tokens = rng.integers(4, 48, (1, count))
        logits = decoder.step(tokens).copy()
        all_tokens = torch.from_numpy(np.concatenate([history, tokens], axis=1))
        decoder_inputs = {"decoder_input_ids": all_tokens} if request.source else {}
        expected = model(
            torch.from_numpy(ids) if request.source else all_tokens, **decoder_inputs
        ).logits[:, -count:]
        np.testing.assert_allclose(logits, expected, atol=1e-5)
        decoder.crop(wrong)
        history = all_tokens.numpy()[:, : all_tokens.shape[1] - wrong]


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", ["prompt_lookup_num_tokens", "max_matching_ngram_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_invalid_lookup_settings_are_rejected(name, value):
    with raises(UsageError, seen=(name, value), expected=1):
        Options(**{name: value})


def test_prompt_lookup_with_sampling_or_beams_is_rejected():
    with raises(UsageError, seen=("prompt_lookup_num_tokens", 4, "num_beams", 2), expected=1):
        Options(**LOOKUP, num_beams=2)
    with raises(
        UsageError, seen=("prompt_lookup_num_tokens", 4, "do_sample", True), expected=False
    ):
        Options(**LOOKUP, do_sample=True)


def test_prompt_lookup_is_rejected_for_batches_and_servers(load_pair, tmp_path):
    """Prompt lookup needs a single row, and its graph must be in the export."""
    _, runtime = load_pair("seq2seq", "cpu")
    with raises(UsageError, seen=("prompt_lookup_num_tokens", 2), expected=4):
        runtime.generate(np.array([[5, 6], [7, 8]]), **LOOKUP)
    assert runtime.rows_together(100, 16, LOOKUP) == 1
    directory = runtime.info.directory
    engine = open_engine(directory)
    with raises(UsageError, seen=("prompt_lookup_num_tokens", 4)):
        engine.admission.admit([5, 6], LOOKUP)
    assert (
        engine.admission.admit(
            [5, 6], {"prompt_lookup_num_tokens": None}
        ).options.prompt_lookup_num_tokens
        is None
    )
    copy = copy_folder(directory, tmp_path)
    file = "onnx/decoder_lookup_model.onnx"
    (copy / file).unlink()
    files = json.loads((copy / "manifest.json").read_text())["files"]
    edit_json(
        copy / "manifest.json", files={name: facts for name, facts in files.items() if name != file}
    )
    with raises(ValueError, seen=("manifest.json", file)):
        Runtime(copy)
