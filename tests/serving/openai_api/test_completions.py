"""Tests of OpenAI's completions with the openai client, against the runtime."""

import time

import pytest
from checkpoints import EOS, START
from openai_server import greedy, new_tokens, post

from vanilla_transformer_export.serving.protocols import openai_requests


def test_greedy_completions_match_runtime(client, decoder):
    texts = ["ab cd", "é日 ab.", "g"]
    ids = [encoding.ids for encoding in decoder.encode(texts, special_tokens=True)]
    expected = decoder.generate(texts, max_new_tokens=16)
    for prompt, count in ((texts[0], 1), (texts, 3), (ids[0], 1), (ids, 3)):
        actual = greedy(client, prompt)
        assert [choice.text for choice in actual.choices] == expected[:count]
        assert [choice.index for choice in actual.choices] == list(range(count))
        assert (
            actual.object == "text_completion"
            and actual.model == "decoder"
            and actual.id.startswith("cmpl-")
        )
        assert abs(actual.created - time.time()) < 60
        assert actual.usage.prompt_tokens == sum(map(len, ids[:count]))
        assert (
            actual.usage.total_tokens == actual.usage.prompt_tokens + actual.usage.completion_tokens
        )
        assert all(choice.logprobs is None for choice in actual.choices)


def test_finish_reason_and_number_of_completion_tokens(client, decoder):
    reasons = set()
    for text in ("ab cd", "g", "a", "é", "cd b"):
        tokens = new_tokens(decoder, text, max_new_tokens=12)
        result = greedy(client, text, max_tokens=12)
        assert result.usage.completion_tokens == len(tokens)
        assert result.choices[0].finish_reason == ("stop" if tokens[-1] == EOS else "length")
        reasons.add(result.choices[0].finish_reason)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize(
    "asked, meant",
    [
        (dict(), dict(top_k=0)),
        (dict(temperature=0.7, top_p=0.8), dict(temperature=0.7, top_p=0.8, top_k=0)),
        (dict(extra_body=dict(top_k=3)), dict(top_k=3)),
        (dict(extra_body=dict(min_p=0.3)), dict(top_k=0, min_p=0.3)),
        (dict(extra_body=dict(repetition_penalty=1.5)), dict(top_k=0, repetition_penalty=1.5)),
        (
            dict(extra_body=dict(suppress_tokens=[EOS, 5], min_new_tokens=3)),
            dict(top_k=0, suppress_tokens=[EOS, 5]),
        ),
        (dict(temperature=1e-6), dict(do_sample=False)),
    ],
)
def test_seeded_sampling_matches_runtime(client, decoder, asked, meant):
    options = dict(do_sample=True, seed=7, max_new_tokens=10) | meant
    result = client.completions.create(
        model="decoder", prompt="ab cd", max_tokens=10, seed=7, **asked
    )
    assert result.choices[0].text == decoder.generate(["ab cd"], **options)[0]


def test_completions_without_seed_differ(client):
    texts = {
        client.completions.create(model="decoder", prompt="ab", max_tokens=20).choices[0].text
        for _ in range(5)
    }
    assert len(texts) > 1


def test_multiple_choices_are_independent_samples_or_beams(client, decoder):
    actual = client.completions.create(
        model="decoder", prompt=["ab", "g"], n=3, seed=5, max_tokens=12
    )
    assert [choice.index for choice in actual.choices] == list(range(6))
    texts = [choice.text for choice in actual.choices]
    assert len(set(texts)) > 3
    options = dict(do_sample=True, top_k=0, seed=5, max_new_tokens=12)
    assert texts == decoder.generate(["ab", "g"], num_return_sequences=3, **options)
    assert texts[::3] == decoder.generate(["ab", "g"], **options)
    streamed = client.completions.create(
        model="decoder", prompt=["ab", "g"], n=3, seed=5, max_tokens=12, stream=True
    )
    pieces = [(chunk.choices[0].index, chunk.choices[0].text) for chunk in streamed]
    assert ["".join(text for index, text in pieces if index == each) for each in range(6)] == texts
    again = client.completions.create(
        model="decoder", prompt=["ab", "g"], n=3, seed=5, max_tokens=12
    )
    assert [choice.text for choice in again.choices] == texts
    beams = client.completions.create(
        model="decoder", prompt="ab", n=2, max_tokens=6, extra_body=dict(num_beams=4)
    )
    expected = decoder.generate(["ab"], num_beams=4, num_return_sequences=2, max_new_tokens=6)
    assert [choice.text for choice in beams.choices] == expected


def test_missing_fields_use_generation_config_then_openai_defaults():
    body = openai_requests.CompletionRequest()
    expected = dict(
        num_beams=1,
        max_new_tokens=16,
        num_return_sequences=1,
        do_sample=True,
        temperature=1.0,
        top_k=0,
    )
    assert openai_requests.parse_options(body, {"num_beams": 4, "max_length": 9}) == expected
    config = {"temperature": 0.5, "top_k": 7}
    assert openai_requests.parse_options(body, config) == expected | config
    assert openai_requests.parse_options(
        openai_requests.CompletionRequest(temperature=2.0, top_k=0), config
    ) == expected | {"temperature": 2.0}
    nulls = openai_requests.CompletionRequest(
        **dict.fromkeys(openai_requests.CompletionRequest.model_fields)
    )
    assert openai_requests.parse_options(nulls, {}) == expected


def test_every_generation_option_is_a_request_field(url, decoder):
    values = dict(
        top_k=5, min_p=0.1, repetition_penalty=1.3, no_repeat_ngram_size=2, bad_words_ids=[[4, 5]],
        min_new_tokens=4, min_length=2, forced_bos_token_id=6, forced_eos_token_id=7,
        suppress_tokens=[8], begin_suppress_tokens=[9], renormalize_logits=True,
        eos_token_id=[EOS, 11], num_beams=1, length_penalty=0.5, early_stopping=True,
    )  # fmt: skip
    assert set(values) == set(openai_requests.OPTIONS)
    for name, value in values.items():
        result = post(url, prompt="ab", seed=1, max_tokens=8, **{name: value}).json()["choices"][0][
            "text"
        ]
        options = dict(do_sample=True, seed=1, top_k=0, max_new_tokens=8) | {name: value}
        assert result == decoder.generate(["ab"], **options)[0], name


def test_echo_returns_prompt_also_without_new_tokens(client, decoder):
    actual = greedy(client, ["ab cd", "é日"], echo=True, max_tokens=5)
    expected = decoder.generate(["ab cd", "é日"], max_new_tokens=5)
    assert [choice.text for choice in actual.choices] == [
        "ab cd" + expected[0],
        "é日" + expected[1],
    ]
    ids = [START, 4, 5, 3, 6]  # special tokens have no text
    actual = greedy(client, ids, echo=True, max_tokens=0)
    assert (actual.choices[0].text, actual.choices[0].finish_reason) == ("abc", "length")
    assert (actual.usage.prompt_tokens, actual.usage.completion_tokens) == (5, 0)


def test_missing_prompt_generates_from_bos_token(url, decoder):
    assert decoder.runtime.config["bos_token_id"] == START
    expected = decoder.decode([new_tokens(decoder, "", max_new_tokens=16)])[0]
    for body in (dict(), dict(prompt=None), dict(prompt=""), dict(prompt=[START])):
        actual = post(url, temperature=0, **body).json()
        assert "choices" in actual and actual["choices"][0]["text"] == expected, (body, actual)
