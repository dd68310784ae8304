"""Tests of the Ray Serve application without Ray. tests/clients/ray runs it on a cluster."""

import asyncio
import json

import httpx
import pytest
from messages import raises
from served import PROTOCOL

from vanilla_transformer_export import ray
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.serving.service import Service
from vanilla_transformer_export.serving.settings import Settings


def test_application_serves_below_root_path_without_own_request_id():
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
    assert (right.json(), health.json()) == ({"q": "a", "n": 1}, {"status": "ok", "models": {}})
    assert wrong.status_code == 422 and wrong.json()["stub"]["message"].startswith("q ")
    assert "x-request-id" not in right.headers  # Ray's proxy adds it


def test_arguments_set_serve_settings_and_exports(tmp_path, monkeypatch):
    directory = tmp_path / "export"
    directory.mkdir()
    (directory / "manifest.json").write_text(
        json.dumps({"architecture": "VanillaSeq2SeqForConditionalGeneration"})
    )
    monkeypatch.chdir(tmp_path)
    args = {
        "exports": "export,b=export",
        "max_batch": 5,
        "languages": "b:en-de b:de-en",
        "cpus": "2",
    }
    settings = ray.settings_from(args, {"VANILLA_TRANSFORMER_QUEUE": "7"})
    assert (settings.max_batch, settings.queue, settings.languages) == (
        5,
        7,
        (("b", "en", "de"), ("b", "de", "en")),
    )
    result = ray.parse_exports(args, settings)
    assert [(export.name, export.directory) for export in result] == [
        ("export", directory),
        ("b", directory),
    ]
    assert result[1].languages == [("en", "de"), ("de", "en")]
    assert ray.settings_from({"token_file": "token"}, {}).token_file == tmp_path / "token"


def test_replica_resources_include_requested_gpus():
    assert ray.resources({}, 2) == {"num_cpus": 2}
    assert ray.resources({"gpus": "1"}, 2) == {"num_cpus": 2, "num_gpus": 1}


def test_replicas_are_fixed_or_autoscaled():
    assert ray.scale("3", 1) == {"num_replicas": 3}
    expected = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 32}
    assert ray.scale("1-4", 2) == {"autoscaling_config": expected}


@pytest.mark.parametrize(
    "call, seen, expected",
    [
        (lambda: ray.settings_from({"max_bach": "1"}, {}), "max_bach", "max_batch"),
        (lambda: ray.settings_from({"port": "1"}, {}), "port", ()),
        (lambda: ray.settings_from({"max_batch": "x"}, {}), "max_batch", ()),
        (lambda: ray.parse_exports({}, Settings()), (), ("exports", "PATH")),
        (lambda: ray.scale("0", 1), 0, (1, "1-4")),
        (lambda: ray.scale("4-1", 1), "4-1", ()),
        (lambda: ray.positive_number("cpus", "0.5"), ("cpus", 0.5), 1),
        (lambda: ray.resources({"gpus": "all"}, 1), ("gpus", "all"), 1),
    ],
)
def test_invalid_arguments_raise_usage_error(call, seen, expected):
    with raises(UsageError, seen=seen, expected=expected):
        call()
