"""Tests of streamed tokens and texts."""

import numpy as np
import pytest
from checkpoints import list_file
from command_line import main
from generation_pairs import CPU_MODELS, EOS, PAD, VOCABULARY, each_model, prompts
from messages import check_message, raises
from tokenizers import Tokenizer, models, pre_tokenizers

from vanilla_transformer_export import TextRuntime

pytestmark = pytest.mark.filterwarnings(
    "ignore:Unfeasible length", "ignore:Using the model-agnostic default"
)


@each_model
@pytest.mark.parametrize(
    "options",
    [{}, dict(do_sample=True, seed=3, num_return_sequences=2), dict(no_repeat_ngram_size=2)],
)
def test_stream_gives_tokens_of_generate(pair, name, options):
    ids, mask = prompts(name)
    options = dict(max_new_tokens=9, **options)
    steps = list(pair.runtime.stream(ids, mask, **options))
    generated = pair.runtime.generate(ids, mask, **options)
    assert np.stack(steps, axis=1).tolist() == generated[:, -len(steps) :].tolist()


class CountingRows:
    """Two rows that record their input tokens and predict the next token id.

    It is its own factory.
    """

    all_logits = False
    places = best_tokens = None
    shrinks = False
    start_search = None

    def __init__(self):
        self.steps = []
        self.is_closed = False

    def open(self, request):
        return self

    def prefill(self, input_ids, attention_mask):
        return np.eye(VOCABULARY, dtype=np.float32)[:2, None]

    def step(self, tokens):
        self.steps.append(tokens)
        return np.eye(VOCABULARY, dtype=np.float32)[tokens + 1]

    def close(self):
        self.is_closed = True


def test_stream_yields_before_next_step_and_closes_abandoned_decoder(pairs, monkeypatch):
    runtime, decoder = pairs("causal-cpu").runtime, CountingRows()
    monkeypatch.setattr(runtime.model, "factory", decoder)
    prompt = np.full((2, 3), 7)
    tokens = runtime.stream(prompt, max_new_tokens=3, eos_token_id=2, pad_token_id=3)
    assert [next(tokens).tolist(), len(decoder.steps)] == [[0, 1], 0]
    assert [next(tokens).tolist(), len(decoder.steps)] == [[1, 2], 1]
    assert [next(tokens).tolist(), len(decoder.steps)] == [[2, 3], 2]
    assert list(tokens) == [] and len(decoder.steps) == 2 and decoder.is_closed
    decoder.is_closed = False
    abandoned = runtime.stream(prompt, max_new_tokens=3)
    next(abandoned)
    assert not decoder.is_closed
    abandoned.close()
    assert decoder.is_closed


def test_invalid_stream_request_raises_before_first_token(pairs):
    ids, mask = prompts("causal-cpu")
    with raises(ValueError, seen=("num_beams", 2), expected=("num_beams", 1)):
        pairs("causal-cpu").runtime.stream(ids, mask, num_beams=2)
    with raises(ValueError, expected=(0, 47)):
        pairs("causal-cpu").runtime.stream(ids + 48, mask)


@pytest.fixture(scope="module")
def with_words(pairs):
    """Return a function that returns the export of a model with a tokenizer of 48 words."""
    words = ["<pad0>", "<s>", "</s>", "<pad>", *(f"w{number}" for number in range(4, VOCABULARY))]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad0>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(words[:4])
    for name in CPU_MODELS:
        tokenizer.save(str(pairs(name).directory / "tokenizer.json"))
        list_file(pairs(name).directory, "tokenizer.json")
    return lambda name: pairs(name).directory


@pytest.mark.parametrize("name", CPU_MODELS)
def test_streamed_text_equals_generated_text(with_words, name):
    runtime = TextRuntime(with_words(name))
    for sampling in ({}, dict(do_sample=True, seed=1)):
        options = dict(max_new_tokens=8, suppress_tokens=[0, 1, EOS, PAD], **sampling)
        pieces = list(runtime.stream("w5 w6 w9", **options))
        assert len(pieces) == 8 and "".join(pieces) == runtime.generate(["w5 w6 w9"], **options)[0]
    for options, seen, expected in (
        (dict(num_return_sequences=2), "num_return_sequences", 1),
        (dict(num_beams=2), "num_beams", ()),
    ):
        with raises(ValueError, seen=seen, expected=expected):
            runtime.stream("w5", **options)


def test_generate_command_streams_and_accepts_any_setting(with_words, capsys):
    start = ["generate", str(with_words("causal-cpu")), "w5 w6", "w7", "--max-new-tokens", "6"]
    command = [*start, "--set", "do_sample=true", "--set", "seed=4", "--set", "suppress_tokens=[2]"]
    main([*command, "--stream"])
    streamed = capsys.readouterr().out.splitlines()
    runtime = TextRuntime(with_words("causal-cpu"))
    settings = dict(max_new_tokens=6, do_sample=True, seed=4, suppress_tokens=[2])
    assert streamed == [runtime.generate([text], **settings)[0] for text in ("w5 w6", "w7")]
    for same in (command, [*start, "--do-sample", "--seed", "4", "--suppress-tokens", "[2]"]):
        main(same)
        assert capsys.readouterr().out.splitlines() == runtime.generate(["w5 w6", "w7"], **settings)
    for change, seen, expected in (
        ("top_p=2", ("top_p", 2), (0, 1)),
        ("input_ids=1", "input_ids", ()),
        ("attention_mask=1", "attention_mask", ()),
        ("texts=1", "texts", ()),
        ("text=1", "text", ()),
        ("self=1", "self", ()),
    ):
        for more in ([], ["--stream"]):
            with pytest.raises(SystemExit) as caught:
                main([*command, "--set", change, *more])
            assert caught.value.code == 2
            actual = capsys.readouterr().err
            check_message(actual, seen=seen, expected=expected)
            assert actual.count("\n") == 1
