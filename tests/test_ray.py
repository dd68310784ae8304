"""What a replica of Ray and Ray's proxy do with our application, without Ray: tests/clients/ray has the cluster."""

import asyncio
import json

import httpx
import pytest
from served import PROTOCOL

from vanilla_transformer_export import ray
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.serving.sent_again import MOST, REFUSAL, SentAgain
from vanilla_transformer_export.serving.service import Service
from vanilla_transformer_export.serving.settings import Settings


class Proxy:
    """An application that reads the body, and then does what `ends` has next: "dies", "answers", "begins" and never ends."""

    def __init__(self, *ends):
        self.ends = list(ends)
        self.bodies = []

    async def __call__(self, scope, receive, send):
        assert scope["path"] == "/predict"
        scope["path"] = "/changed"
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        if (end := self.ends.pop(0)) == "dies":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": end == "begins"})


def asked(proxy, pieces=(b"1", b"23"), is_gone=False):
    """What the client gets for a request whose body comes in `pieces`."""
    messages = [{"type": "http.request", "body": each, "more_body": True} for each in pieces]
    messages[-1] = {"type": "http.disconnect"} if is_gone else messages[-1] | {"more_body": False}
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": []}
    asyncio.run(SentAgain(proxy)(scope, receive, send))
    return sent


@pytest.mark.parametrize("deaths", [0, 1, 2])
def test_a_request_whose_replica_died_is_sent_again_with_its_whole_body_and_answered_once(deaths):
    proxy = Proxy(*["dies"] * deaths, "answers")
    start, body = asked(proxy)
    assert (start["status"], body["body"]) == (200, b"x")
    assert proxy.bodies == [b"123"] * (deaths + 1)


def test_a_request_that_ends_every_replica_is_refused_in_the_end():
    proxy = Proxy(*["dies"] * 5)
    start, body = asked(proxy)
    assert (start["status"], json.loads(body["body"])) == (503, REFUSAL)
    assert dict(start["headers"])[b"retry-after"] == b"1"
    assert len(proxy.bodies) == 3


def test_an_answer_that_has_begun_is_not_begun_again():
    """The server then closes the connection, as the answer has no end."""
    proxy = Proxy("begins", "answers")
    assert [message.get("more_body") for message in asked(proxy)] == [None, True]
    assert len(proxy.bodies) == 1


def test_a_body_that_is_too_large_to_be_kept_is_not_sent_again():
    proxy = Proxy("dies", "answers")
    start, _ = asked(proxy, [b"x" * (MOST - 1), b"xy", b"z"])
    assert start["status"] == 503 and [len(body) for body in proxy.bodies] == [MOST + 2]


def test_a_client_that_is_gone_is_not_asked_for_again():
    class Leaving(Proxy):
        async def __call__(self, scope, receive, send):
            self.bodies.append([(await receive())["type"] for _ in range(2)])

    proxy = Leaving()
    assert asked(proxy, is_gone=True) == [] and proxy.bodies == [["http.request", "http.disconnect"]]


def test_the_application_answers_below_any_path_with_one_request_id():
    async def ask():
        service = Service([], Settings(log_level="error"), None, print, (PROTOCOL,))
        await service.start()
        transport = httpx.ASGITransport(ray.BehindProxy(service.app), root_path="/below")
        async with httpx.AsyncClient(transport=transport, base_url="http://ray") as client:
            right = await client.post("/below/stub", json={"q": "a"})
            wrong = await client.post("/below/stub", json={})
            health = await client.get("/below/health/ready")
        service.close()
        return right, wrong, health

    right, wrong, health = asyncio.run(ask())
    assert (right.json(), health.json()) == ({"q": "a", "n": 1}, {"status": "ok"})
    assert wrong.status_code == 422 and wrong.json()["stub"]["message"].startswith("q is missing")
    assert "x-request-id" not in right.headers  # Ray's proxy adds it


def test_arguments_are_the_settings_of_serve_and_a_few_more(tmp_path, monkeypatch):
    directory = tmp_path / "export"
    directory.mkdir()
    (directory / "manifest.json").write_text(json.dumps({"architecture": "VanillaSeq2SeqForConditionalGeneration"}))
    monkeypatch.chdir(tmp_path)
    args = {"exports": "export,b=export", "max_batch": 5, "languages": "b:en-de b:de-en", "cpus": "2"}
    settings = ray.settings_from(args, {"VANILLA_TRANSFORMER_QUEUE": "7"})
    assert (settings.max_batch, settings.queue, settings.languages) == (5, 7, (("b", "en", "de"), ("b", "de", "en")))
    found = ray.exports_of(args, settings)
    assert [(each.name, each.directory) for each in found] == [("export", directory), ("b", directory)]
    assert found[1].languages == [("en", "de"), ("de", "en")]
    assert ray.settings_from({"token_file": "token"}, {}).token_file == tmp_path / "token"


def test_replicas_are_a_number_or_scale_with_requests():
    assert ray.scale("3", 1) == {"num_replicas": 3}
    expected = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 32}
    assert ray.scale("1-4", 2) == {"autoscaling_config": expected}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ray.settings_from({"max_bach": "1"}, {}), "no argument 'max_bach', expected .*; did you mean 'max_batch'"),
        (
            lambda: ray.settings_from({"port": "1"}, {}),
            "no argument 'port', expected some of exports, replicas, cpus",
        ),
        (lambda: ray.settings_from({"max_batch": "x"}, {}), "^max_batch: expected"),
        (lambda: ray.exports_of({}, Settings()), "exports is missing, expected exports=PATH"),
        (lambda: ray.scale("0", 1), "replicas is '0', expected a number from 1, or two as 1-4"),
        (lambda: ray.scale("4-1", 1), "replicas is 4-1, expected the smaller number first"),
        (lambda: ray.whole("cpus", "0.5"), "cpus is '0.5', expected a number from 1"),
    ],
)
def test_a_wrong_argument_is_an_error_before_anything_starts(call, message):
    with pytest.raises(UsageError, match=message):
        call()
