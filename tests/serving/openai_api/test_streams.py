"""Tests of streamed completions: events, errors, and clients that disconnect."""

import asyncio
import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from checkpoints import EOS, START
from messages import raises
from openai_server import OneByOne, new_tokens, post, serve_engine, with_tokenizer
from opened_engines import text_client
from served_models import loaded_model

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.engine.loop import overloaded
from vanilla_transformer_export.errors import RequestError
from vanilla_transformer_export.serving.protocols import openai_api


def collect_stream(stream):
    """Return the choices of a stream, joined from its chunks, and the usage at its end."""
    choices, usage = {}, None
    for part in stream:
        if part.usage is not None:
            assert part.choices == []
            usage = part.usage
        for choice in part.choices:
            joined = choices.setdefault(
                choice.index, {"text": "", "finish_reason": None, "logprobs": None}
            )
            assert joined["finish_reason"] is None
            joined["text"] += choice.text
            joined["finish_reason"] = choice.finish_reason
            if choice.logprobs is not None:
                columns = joined["logprobs"] or {}
                joined["logprobs"] = {
                    kind: columns.get(kind, []) + column
                    for kind, column in choice.logprobs.to_dict().items()
                }
    return [choices[index] for index in sorted(choices)], usage


STREAMED = [
    dict(),
    dict(prompt=["ab", "é", "g"], stop="b"),
    dict(n=3, stop=["cd", " "]),
    dict(logprobs=2),
    dict(logprobs=0, n=2, stop="a"),
    dict(echo=True),
    dict(echo=True, logprobs=1, prompt=["ab cd", "g"]),
    dict(echo=True, logprobs=1, n=3, prompt=["ab cd", "g"]),
    dict(echo=True, max_tokens=0),
    dict(echo=True, max_tokens=0, logprobs=1),
    dict(prompt=[4, 5, 22, 23], temperature=0),
    dict(temperature=0, extra_body=dict(num_beams=3)),
]


@pytest.mark.parametrize("asked", STREAMED, ids=str)
def test_streamed_chunks_join_to_full_response(client, asked):
    options = dict(model="decoder", prompt="ab cd", seed=2, max_tokens=20) | asked
    whole = client.completions.create(**options)
    parts, usage = collect_stream(
        client.completions.create(**options, stream=True, stream_options=dict(include_usage=True))
    )
    assert usage == whole.usage
    expected = [choice.to_dict() for choice in whole.choices]
    assert parts == [
        {key: choice[key] for key in ("text", "finish_reason", "logprobs")} for choice in expected
    ]
    _, usage = collect_stream(client.completions.create(**options, stream=True))
    assert usage is None


def request_choices(client, asked):
    """Send all requests at once, with and without streaming.

    Return the choices of the full responses and of the streams.
    """
    with ThreadPoolExecutor(2 * len(asked)) as pool:
        result = pool.map(lambda each: client.completions.create(**each), asked)
        streams = pool.map(
            lambda each: collect_stream(client.completions.create(**each, stream=True))[0], asked
        )
        return [[choice.to_dict() for choice in whole.choices] for whole in result], list(streams)


def check_same_choices(choices, expected):
    for choice, other in zip(choices, expected, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (other["text"], other["finish_reason"])
        if other["logprobs"] is not None:
            known, others = choice["logprobs"], other["logprobs"]
            assert (
                known["tokens"] == others["tokens"]
                and known["text_offset"] == others["text_offset"]
            )
            for row, other_row in zip(known["top_logprobs"], others["top_logprobs"], strict=True):
                assert row == pytest.approx(other_row, abs=1e-5)


@pytest.mark.parametrize("batches", ["whole", pytest.param("continuous", marks=pytest.mark.slow)])
def test_concurrent_requests_match_requests_alone(decoder, exported_for, tmp_path, batches):
    """The reference runs the requests one by one and recomputes the whole text at each step."""
    directory = decoder.runtime.info.directory
    if batches == "continuous":
        directory = with_tokenizer(exported_for("causal", "cpu")[1], tmp_path)
    runtime, engine = text_client(directory)
    assert ("static batches" in engine.admission.describe()) == (batches == "whole")
    alone = TextRuntime(directory, threads=1)
    asked = [
        dict(model="decoder", prompt="ab cd", seed=2, max_tokens=20) | each for each in STREAMED
    ]
    with contextlib.ExitStack() as stack:
        actual = []
        for served in (
            loaded_model("decoder", runtime, engine),
            loaded_model("decoder", alone, OneByOne(alone.runtime)),
        ):
            url = stack.enter_context(serve_engine(served))
            client = stack.enter_context(
                openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            )
            actual.append(request_choices(client, asked))
    engine.close()
    (whole, streams), (expected, _) = actual
    for choices, parts, others in zip(whole, streams, expected, strict=True):
        check_same_choices(choices, others)
        check_same_choices(parts, others)


def test_stream_sends_events_and_usage_on_request(url, decoder):
    body = dict(prompt="ab cd", temperature=0, max_tokens=6, suppress_tokens=[EOS], stream=True)
    result = post(url, **body)
    assert result.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert result.headers["cache-control"] == "no-cache"
    *events, done, end = result.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({part["id"] for part in parts}) == 1 and not any("usage" in part for part in parts)
    counted = post(url, **body, stream_options={"include_usage": True}).text.split("\n\n")[:-2]
    usages = [json.loads(event.removeprefix("data: "))["usage"] for event in counted]
    assert usages[:-1] == [None] * (len(usages) - 1) and usages[-1]["completion_tokens"] == 6


def test_text_is_sent_with_the_token_that_completes_it(decoder, engine):
    """Text does not wait for the next token."""
    job = engine.admission.admit(
        [START, 4],
        {"max_new_tokens": 12, "num_beams": 1, "do_sample": False, "suppress_tokens": [EOS]},
    )

    async def steps_and_texts():
        asked = openai_api.Completion(decoder, job, 0, "", [], False)
        async for chunk in asked.chunks(engine):
            yield engine.steps, chunk["text"]

    async def whole():
        return [each async for each in steps_and_texts()]

    tokens = new_tokens(decoder, "a", max_new_tokens=12, suppress_tokens=[EOS])
    for steps, text in asyncio.run(whole())[:-1]:
        assert decoder.decode([tokens[:steps]])[0].rstrip("\ufffd").endswith(text)


def test_error_during_stream_is_sent_as_event(client, url, engine):
    engine.fails_after, engine.error = 2, RequestError(503, "the server is shutting down")
    with raises(openai.APIError, seen="the server is shutting down"):
        collect_stream(
            client.completions.create(model="decoder", prompt="ab", stream=True, temperature=0)
        )
    engine.reset()
    engine.fails_after, engine.error = 2, RequestError(503, "the server is shutting down")
    *_, event, done, _ = post(url, prompt="ab", stream=True, temperature=0).text.split("\n\n")
    expected = {
        "message": "the server is shutting down",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    assert (
        json.loads(event.removeprefix("data: ")) == {"error": expected} and done == "data: [DONE]"
    )
    engine.reset()
    engine.fails_after, engine.error = 2, KeyError("secret")
    with pytest.raises(openai.APIError) as caught:
        collect_stream(
            client.completions.create(model="decoder", prompt="ab", stream=True, temperature=0)
        )
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("prompt", ["ab", ["ab", "g"]])
def test_error_before_first_token_returns_its_status(client, engine, prompt):
    engine.fails_after, engine.error = 0, overloaded(9, 1, 8)
    for more in (dict(), dict(stream=True), dict(stop="z")):
        with raises(openai.RateLimitError, seen=9) as caught:
            client.completions.create(model="decoder", prompt=prompt, **more)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "rate_limit_exceeded"
    engine.error = KeyError("secret")
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="decoder", prompt=prompt, stream=True)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("prompt", ["ab", ["ab", "g"]])
def test_disconnected_client_stops_generation(client, engine, prompt):
    slow = dict(
        model="decoder", prompt=prompt, max_tokens=30, extra_body=dict(suppress_tokens=[EOS])
    )
    engine.pause, streams = 0.1, 1 if prompt == "ab" else 2
    with client.completions.create(**slow, stream=True) as stream:
        next(iter(stream))
    deadline = time.monotonic() + 10
    while engine.closed < streams and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.closed == streams and engine.steps < 30 * streams


def test_echoed_prompt_is_followed_by_each_token(client, decoder):
    """Only log probabilities of the prompt keep a stream waiting until its end."""
    options = dict(model="decoder", prompt="ab cd", temperature=0, max_tokens=8, stream=True)
    with client.completions.create(**options, echo=True) as stream:
        first, *others = [chunk.choices[0].text for chunk in stream]
    assert first == "ab cd" and sum(map(bool, others)) > 2
    assert "".join(others) == decoder.generate(["ab cd"], max_new_tokens=8)[0]
