"""Tests of rejected requests, and of fields that have no effect."""

import re
import threading
import time

import httpx
import openai
import pytest
from checkpoints import VOCABULARY
from messages import raises
from openai_server import greedy, post


@pytest.mark.parametrize(
    "body, param, message",
    [
        (
            dict(prompt=5),
            "prompt",
            "prompt is 5, expected a text, a list of texts, a list of token ids or a list of "
            "such lists",
        ),
        (dict(prompt=[]), "prompt", r"prompt is \[\], expected"),
        (dict(prompt={}), "prompt", "prompt is {}, expected"),
        (dict(prompt=["ab", 5]), "prompt", "prompt has 'ab', expected"),
        (dict(prompt=[5, "ab"]), "prompt", "prompt has 5, expected"),
        (dict(prompt=[5, True]), "prompt", "prompt has 5, expected"),
        (dict(prompt=[[]]), "prompt", r"prompt has \[\], expected"),
        (dict(prompt=[[5], [[6]]]), "prompt", r"prompt has \[\[6\]\], expected"),
        (dict(prompt=[5, 1.5]), "prompt", "prompt has 5, expected"),
        (
            dict(prompt=[5, 48]),
            "prompt",
            r"prompt has the token 48, expected ids in \[0, 47\], the vocabulary",
        ),
        (dict(prompt=[[5], [-1]]), "prompt", "prompt has the token -1, expected"),
        (dict(prompt=[2**70]), "prompt", "prompt has the token 1180591620717411303424, expected"),
        (dict(prompt=["a"] * 7), "prompt", "prompt has 7 items, expected at most 6"),
        (
            dict(prompt=[4] * 41),
            None,
            "the context is too long: prompt has 41 tokens, expected at most 40",
        ),
        (
            dict(prompt=[4] * 30),
            None,
            "the context is too long: 30 tokens of the prompt and max_tokens 16, expected at most "
            "41 together",
        ),
        (dict(max_tokens=2**31), None, "the context is too long: "),
        (
            dict(max_tokens=-1),
            "max_tokens",
            "max_tokens is -1, expected .*greater than or equal to 0",
        ),
        (
            dict(max_tokens=10**30),
            "max_tokens",
            "max_tokens is 1000000000000000000000000000000, expected",
        ),
        (dict(max_tokens="16"), "max_tokens", "max_tokens is '16', expected a valid integer"),
        (dict(max_tokens=1.5), "max_tokens", "max_tokens is 1.5, expected a valid integer"),
        (dict(max_tokens=True), "max_tokens", "max_tokens is True, expected a valid integer"),
        (dict(max_tokens=0), "max_tokens", "max_tokens is 0 without echo, expected at least 1"),
        (
            dict(temperature=-1),
            "temperature",
            "temperature is -1, expected .*greater than or equal to 0",
        ),
        (
            dict(temperature=3),
            "temperature",
            "temperature is 3, expected .*less than or equal to 2",
        ),
        (dict(temperature="hot"), "temperature", "temperature is 'hot', expected a valid number"),
        (dict(top_p=1.1), "top_p", "top_p is 1.1, expected .*less than or equal to 1"),
        (dict(n=0), "n", "n is 0, expected .*greater than or equal to 1"),
        (dict(n=129), "n", "n is 129, expected .*less than or equal to 128"),
        (dict(n=9), None, "9 beams or sequences, expected at most 8"),
        (
            dict(n=2, temperature=0),
            "n",
            "n is 2 with temperature 0, expected 1 where nothing is sampled",
        ),
        (
            dict(n=4, num_beams=3),
            "n",
            "n is 4 with temperature 0, expected at most num_beams, 3, where nothing is sampled",
        ),
        (
            dict(num_beams=3, temperature=0.5),
            "temperature",
            "temperature is 0.5 with num_beams 3, expected temperature 0",
        ),
        (dict(num_beams=3, logprobs=1), "logprobs", "logprobs do not go with num_beams=3"),
        (
            dict(num_beams="3"),
            "num_beams",
            "num_beams must be a whole number from 1 to .*, got '3'",
        ),
        (dict(num_beams=40), None, "40 beams or sequences, expected at most 8"),
        (dict(top_k=-1), "top_k", "top_k must be a whole number from 0 .*, got -1"),
        (dict(min_p=2), "min_p", "min_p must be a number from 0 to 1, got 2"),
        (
            dict(repetition_penalty=0),
            "repetition_penalty",
            "repetition_penalty must be a float32 number above 0, got 0",
        ),
        (
            dict(bad_words_ids=[[48]]),
            "bad_words_ids",
            r"bad_words_ids must be in \[0, 47\], the vocabulary, got 48",
        ),
        (dict(suppress_tokens=list(range(VOCABULARY))), None, "no token may follow"),
        (dict(seed=-1), "seed", "seed is -1, expected .*greater than or equal to 0"),
        (dict(seed=1.5), "seed", "seed is 1.5, expected a valid integer"),
        (dict(stop=5), "stop", "stop is 5, expected a text or up to 4, none of them empty"),
        (dict(stop=""), "stop", "stop is '', expected"),
        (dict(stop=["a", ""]), "stop", r"stop is \['a', ''\], expected"),
        (dict(stop=["a", 5]), "stop", r"stop is \['a', 5\], expected"),
        (
            dict(stop=list("abcde")),
            "stop",
            r"stop is \['a', 'b', 'c', 'd', 'e'\], expected a text or up to 4",
        ),
        (dict(logprobs=6), "logprobs", "logprobs is 6, expected .*less than or equal to 5"),
        (dict(logprobs=True), "logprobs", "logprobs is True, expected a valid integer"),
        (dict(echo="yes"), "echo", "echo is 'yes', expected a valid boolean"),
        (dict(stream=1), "stream", "stream is 1, expected a valid boolean"),
        (
            dict(stream=None, stream_options={}),
            "stream_options",
            "stream_options is given without stream, expected stream to be true",
        ),
        (
            dict(stream=True, stream_options={"usage": 1}),
            "stream_options",
            "stream_options.usage is 1, expected no such field",
        ),
        (
            dict(suppress_tokens=[5] * 70_000),
            "suppress_tokens",
            "suppress_tokens has 70000 token ids, expected at most 65536",
        ),
        (
            dict(bad_words_ids=[[5, 6]] * 40_000),
            "bad_words_ids",
            "bad_words_ids has 80000 token ids, expected at most 65536",
        ),
        (dict(best_of=2), "best_of", "best_of is 2, expected null or 1: it is not supported here"),
        (dict(suffix="a"), "suffix", "suffix is 'a', expected null or "),
        (dict(logit_bias={"5": 1}), "logit_bias", "logit_bias is {'5': 1.*}, expected null or {}"),
        (
            dict(presence_penalty=0.5),
            "presence_penalty",
            "presence_penalty is 0.5, expected null or 0",
        ),
        (
            dict(frequency_penalty=-1),
            "frequency_penalty",
            "frequency_penalty is -1.*, expected null or 0",
        ),
        (dict(max_new_tokens=5), None, "max_new_tokens is 5, expected no such field"),
        (dict(topp=0.5), None, "topp is 0.5, expected no such field"),
        (
            dict(model="encoder"),
            None,
            "the model encoder is a VanillaEncoderModel, which does not complete texts",
        ),
        (dict(model=5), "model", "model is 5, expected a valid string"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_is_refused(url, body, param, message):
    for streams in (False, True):
        found = post(url, **{"prompt": "ab", "stream": streams, **body})
        assert found.status_code == 400, found.text
        error = found.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["code"] == ("context_length_exceeded" if "too long" in message else None)
        assert re.match(message, error["message"]), error["message"]


def test_an_empty_prompt_of_a_model_without_a_first_token_is_refused(url, decoder, monkeypatch):
    for config in (decoder.runtime.config, decoder.runtime.info.generation_config):
        monkeypatch.setitem(config, "bos_token_id", None)
    for body in (dict(prompt=["ab", ""]), dict(prompt=""), dict()):
        error = post(url, **body).json()["error"]
        assert re.match(
            "prompt [01] of [12] is '', which has no tokens: expected words", error["message"]
        )


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "ab", "temperature": NaN}',
        b'{"prompt": "ab", "top_p": Infinity}',
        b"{",
        b"[1]",
        b"",
    ],
)
def test_what_is_no_json_is_refused(url, body):
    for path in ("/v1/completions", "/v1/embeddings"):
        found = httpx.post(url + path, content=body, headers={"Content-Type": "application/json"})
        assert found.status_code == 400 and found.json()["error"]["type"] == "invalid_request_error"


def test_the_client_knows_its_errors(client):
    with raises(openai.NotFoundError, seen="davinci", expected="decoder") as caught:
        client.completions.create(model="davinci", prompt="ab")
    assert caught.value.code == "model_not_found"
    with raises(openai.BadRequestError, seen=("best_of", 3)) as caught:
        client.completions.create(model="decoder", prompt="ab", best_of=3)
    assert (caught.value.param, caught.value.type) == ("best_of", "invalid_request_error")


def test_the_default_values_of_what_is_not_supported_are_no_matter(client):
    neutral = dict(
        best_of=1,
        suffix="",
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0.0,
        user="someone",
    )
    nulls = dict.fromkeys(
        (
            "best_of",
            "suffix",
            "logit_bias",
            "presence_penalty",
            "frequency_penalty",
            "stop",
            "logprobs",
        )
    )
    texts = [greedy(client, "ab", **more).choices[0].text for more in ({}, neutral, nulls)]
    assert texts == texts[:1] * 3


def test_a_long_text_is_cut_into_tokens_beside_the_event_loop(url, decoder, monkeypatch):
    assert (
        post(url, prompt="a" * 100_000)
        .json()["error"]["message"]
        .startswith("the context is too long: 100001 tokens of the prompt")
    )
    encode = decoder.encode
    monkeypatch.setattr(decoder, "encode", lambda *given: (time.sleep(0.5), encode(*given))[1])
    pending = threading.Thread(target=post, args=(url,), kwargs=dict(prompt="a" * 100_000))
    pending.start()
    time.sleep(0.1)
    began = time.monotonic()
    assert httpx.get(f"{url}/v1/models").status_code == 200 and time.monotonic() - began < 0.3
    pending.join()
