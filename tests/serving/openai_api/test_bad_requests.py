"""Tests of rejected requests, and of fields that have no effect."""

import threading
import time

import httpx
import openai
import pytest
from checkpoints import VOCABULARY
from messages import check_message, raises
from openai_server import greedy, post


@pytest.mark.parametrize(
    "body, param, seen, expected",
    [
        (dict(prompt=5), "prompt", ("prompt", 5), ()),
        (dict(prompt=[]), "prompt", ("prompt", "[]"), ()),
        (dict(prompt={}), "prompt", ("prompt", "{}"), ()),
        (dict(prompt=["ab", 5]), "prompt", ("prompt", 5), ()),
        (dict(prompt=[5, "ab"]), "prompt", ("prompt", 5), ()),
        (dict(prompt=[5, True]), "prompt", ("prompt", 5), ()),
        (dict(prompt=[[]]), "prompt", ("prompt", "[]"), ()),
        (dict(prompt=[[5], [[6]]]), "prompt", ("prompt", 6), ()),
        (dict(prompt=[5, 1.5]), "prompt", ("prompt", 5), ()),
        (dict(prompt=[5, 48]), "prompt", ("prompt", 48), (0, 47)),
        (dict(prompt=[[5], [-1]]), "prompt", ("prompt", -1), ()),
        (dict(prompt=[2**70]), "prompt", ("prompt", 1180591620717411303424), ()),
        (dict(prompt=["a"] * 7), "prompt", ("prompt", 7), 6),
        (dict(max_tokens=-1), "max_tokens", ("max_tokens", -1), 0),
        (
            dict(max_tokens=10**30),
            "max_tokens",
            ("max_tokens", 1000000000000000000000000000000),
            (),
        ),
        (dict(max_tokens="16"), "max_tokens", ("max_tokens", 16), ()),
        (dict(max_tokens=1.5), "max_tokens", ("max_tokens", 1.5), ()),
        (dict(max_tokens=True), "max_tokens", ("max_tokens", True), ()),
        (dict(max_tokens=0), "max_tokens", ("max_tokens", 0), 1),
        (dict(temperature=-1), "temperature", ("temperature", -1), 0),
        (dict(temperature=3), "temperature", ("temperature", 3), 2),
        (dict(temperature="hot"), "temperature", ("temperature", "hot"), ()),
        (dict(top_p=1.1), "top_p", ("top_p", 1.1), 1),
        (dict(n=0), "n", 0, 1),
        (dict(n=129), "n", 129, 128),
        (dict(n=9), None, 9, 8),
        (dict(n=2, temperature=0), "n", (2, "temperature", 0), 1),
        (dict(n=4, num_beams=3), "n", (4, 0), ("num_beams", 3)),
        (
            dict(num_beams=3, temperature=0.5),
            "temperature",
            ("temperature", 0.5, "num_beams", 3),
            0,
        ),
        (dict(num_beams=3, logprobs=1), "logprobs", ("logprobs", "num_beams", 3), ()),
        (dict(num_beams="3"), "num_beams", ("num_beams", 3), 1),
        (dict(num_beams=40), None, 40, 8),
        (dict(top_k=-1), "top_k", ("top_k", -1), 0),
        (dict(min_p=2), "min_p", ("min_p", 2), (0, 1)),
        (
            dict(repetition_penalty=0),
            "repetition_penalty",
            ("repetition_penalty", 0),
            ("float32", 0),
        ),
        (dict(bad_words_ids=[[48]]), "bad_words_ids", ("bad_words_ids", 48), (0, 47)),
        (dict(suppress_tokens=list(range(VOCABULARY))), None, (), ()),
        (dict(seed=-1), "seed", ("seed", -1), 0),
        (dict(seed=1.5), "seed", ("seed", 1.5), ()),
        (dict(stop=5), "stop", ("stop", 5), 4),
        (dict(stop=""), "stop", ("stop", "''"), ()),
        (dict(stop=["a", ""]), "stop", ("stop", "a", "''"), ()),
        (dict(stop=["a", 5]), "stop", ("stop", "a", 5), ()),
        (dict(stop=list("abcde")), "stop", ("stop", "a", "b", "c", "d", "e"), 4),
        (dict(logprobs=6), "logprobs", ("logprobs", 6), 5),
        (dict(logprobs=True), "logprobs", ("logprobs", True), ()),
        (dict(echo="yes"), "echo", ("echo", "yes"), ()),
        (dict(stream=1), "stream", ("stream", 1), ()),
        (
            dict(stream=None, stream_options={}),
            "stream_options",
            ("stream_options", "stream"),
            "stream",
        ),
        (
            dict(stream=True, stream_options={"usage": 1}),
            "stream_options",
            ("stream_options.usage", 1),
            (),
        ),
        (dict(suppress_tokens=[5] * 70_000), "suppress_tokens", ("suppress_tokens", 70000), 65536),
        (
            dict(bad_words_ids=[[5, 6] * 10] * 4_000),
            "bad_words_ids",
            ("bad_words_ids", 80000),
            65536,
        ),
        (dict(best_of=2), "best_of", ("best_of", 2), 1),
        (dict(suffix="a"), "suffix", ("suffix", "a"), ()),
        (dict(logit_bias={"5": 1}), "logit_bias", ("logit_bias", 5, 1), "{}"),
        (dict(presence_penalty=0.5), "presence_penalty", ("presence_penalty", 0.5), 0),
        (dict(frequency_penalty=-1), "frequency_penalty", ("frequency_penalty", -1), 0),
        (dict(max_new_tokens=5), None, ("max_new_tokens", 5), ()),
        (dict(topp=0.5), None, ("topp", 0.5), ()),
        (dict(model="encoder"), None, ("encoder", "VanillaEncoderModel"), ()),
        (dict(model=5), "model", 5, ()),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_invalid_field_returns_400_and_names_value(url, body, param, seen, expected):
    for streams in (False, True):
        actual = post(url, **{"prompt": "ab", "stream": streams, **body})
        assert actual.status_code == 400, actual.text
        error = actual.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["code"] is None
        check_message(error["message"], seen=seen, expected=expected)


@pytest.mark.parametrize(
    "body, seen, expected",
    [
        (dict(prompt=[4] * 41), 41, 40),
        (dict(prompt=[4] * 30), (30, "max_tokens", 16), 41),
        (dict(max_tokens=2**31), 2**31, 41),
    ],
)
def test_too_long_context_returns_context_length_exceeded(url, body, seen, expected):
    for streams in (False, True):
        actual = post(url, **{"prompt": "ab", "stream": streams, **body})
        error = actual.json()["error"]
        assert (actual.status_code, error["type"]) == (400, "invalid_request_error")
        assert (error["param"], error["code"]) == (None, "context_length_exceeded")
        check_message(error["message"], seen=seen, expected=expected)


def test_empty_prompt_is_rejected_without_bos_token(url, decoder, monkeypatch):
    for config in (decoder.runtime.config, decoder.runtime.info.generation_config):
        monkeypatch.setitem(config, "bos_token_id", None)
    for body in (dict(prompt=["ab", ""]), dict(prompt=""), dict()):
        error = post(url, **body).json()["error"]
        check_message(error["message"], seen=("prompt", "''"))


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
def test_invalid_json_returns_400(url, body):
    for path in ("/v1/completions", "/v1/embeddings"):
        result = httpx.post(url + path, content=body, headers={"Content-Type": "application/json"})
        assert (
            result.status_code == 400 and result.json()["error"]["type"] == "invalid_request_error"
        )


def test_openai_client_raises_its_error_classes(client):
    with raises(openai.NotFoundError, seen="davinci", expected="decoder") as caught:
        client.completions.create(model="davinci", prompt="ab")
    assert caught.value.code == "model_not_found"
    with raises(openai.BadRequestError, seen=("best_of", 3)) as caught:
        client.completions.create(model="decoder", prompt="ab", best_of=3)
    assert (caught.value.param, caught.value.type) == ("best_of", "invalid_request_error")


def test_default_values_of_unsupported_fields_have_no_effect(client):
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


def test_long_text_is_tokenized_outside_event_loop(url, decoder, monkeypatch):
    error = post(url, prompt="a" * 100_000).json()["error"]
    check_message(error["message"], seen=100_000, expected=40 * 16)  # 16 characters per token
    encode = decoder.encode
    monkeypatch.setattr(decoder, "encode", lambda *args: (time.sleep(0.5), encode(*args))[1])
    pending = threading.Thread(target=post, args=(url,), kwargs=dict(prompt=["a" * 600] * 9))
    pending.start()
    time.sleep(0.1)
    start = time.monotonic()
    assert httpx.get(f"{url}/v1/models").status_code == 200 and time.monotonic() - start < 0.3
    pending.join()


@pytest.mark.parametrize(
    "path, seen", [("chat/completions", "/v1/completions"), ("responses", "/openapi.json")]
)
def test_path_without_endpoint_is_no_missing_model(client, path, seen):
    with pytest.raises(openai.NotFoundError) as raised:
        client.post(f"/{path}", body={"messages": []}, cast_to=object)
    assert raised.value.code == "unknown_url"
    check_message(str(raised.value), seen=(), expected=seen)
