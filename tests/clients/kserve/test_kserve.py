"""Tests of the KServe manifest with KServe's classes and client, without a cluster.

The client sends requests to a server with the arguments of the manifest.
"""

import asyncio
import json
import os
import subprocess
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import kserve
import kubernetes
import numpy as np
import pytest
import yaml
from kserve import ApiClient, InferenceRESTClient, InferInput, InferRequest, V1beta1InferenceService
from kserve.inference_client import RESTConfig

ROOT = Path(__file__).parents[3]
PROGRAM = [os.environ["VANILLA_TRANSFORMER_PYTHON"], "-m", "vanilla_transformer_export"]
ENGLISH = "A dog runs across a field."
CARDS = {
    "translator": "vanilla-seq2seq-tiny-multi30k-en-de",
    "opinions": "vanilla-encoder-tiny-sst2",
}


@pytest.fixture(scope="module")
def manifest():
    return yaml.safe_load((ROOT / "examples/serving/kserve.yaml").read_text())


@pytest.fixture(scope="module")
def container(manifest):
    service = read_manifest(manifest)
    [result] = service.spec.predictor.containers
    return result


def read_manifest(manifest):
    # KServe's models refer to these classes, but do not define them
    for name, each in vars(kubernetes.client.models).items():
        vars(kserve.models).setdefault(name, each)
    return ApiClient().deserialize(
        SimpleNamespace(data=json.dumps(manifest)), V1beta1InferenceService
    )


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Return a directory with the exports of `CARDS`."""
    root = tmp_path_factory.mktemp("kserve")
    for name, card in CARDS.items():
        subprocess.run(
            [*PROGRAM, "export", ROOT / "model_cards" / card, root / name],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return root


@pytest.fixture(scope="module")
def translation(exports):
    """Return the translation of `ENGLISH` that the command prints for the same export."""
    command = [*PROGRAM, "generate", exports / "translator", ENGLISH]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def url(container, exports):
    """Start the server with the arguments and variables of the container, and a second model.

    Yield its address, on a free port.
    """
    words = [word.replace("/mnt/models", str(exports / "translator")) for word in container.args]
    variables = {each.name: each.value for each in container.env}
    command = [*PROGRAM, "serve", *words, str(exports / "opinions"), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | variables
    )
    try:
        result = process.stdout.readline().split()[-1]
        assert "ready\n" in iter(process.stdout.readline, "")
        yield result
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_kserve_knows_every_manifest_field(manifest):
    assert ApiClient().sanitize_for_serialization(read_manifest(manifest)) == manifest


def test_container_is_a_predictor_with_protocol_v2(manifest, container):
    variables = {each.name: each.value for each in container.env}
    assert (container.name, variables["PROTOCOL"]) == ("kserve-container", "v2")
    assert variables["VANILLA_TRANSFORMER_PORT"] == str(container.ports[0].container_port)
    assert "translator=/mnt/models" in container.args and "STORAGE_URI" in variables
    # longer than --grace and --drain together
    assert read_manifest(manifest).spec.predictor.termination_grace_period_seconds > 31


def test_container_probes_are_answered(url, container):
    for probe in (container.startup_probe, container.readiness_probe, container.liveness_probe):
        assert probe.http_get.port == container.ports[0].container_port
        with urllib.request.urlopen(url + probe.http_get.path) as answer:
            assert answer.status == 200


def infer(url, model, inputs, **options):
    """Return the answer of the server to `inputs`, through KServe's client."""

    async def ask():
        client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60))
        assert await client.is_server_ready(url) and await client.is_server_live(url)
        assert await client.is_model_ready(url, model)
        request = InferRequest(model, infer_inputs=inputs, **options)
        result = await client.infer(url, request, model_name=model)
        await client.close()
        return result

    return asyncio.run(ask())


@pytest.mark.parametrize("in_binary", [False, True])
def test_kserve_client_gets_translations_and_labels(url, translation, in_binary):
    def texts(*rows):
        result = InferInput("text", [len(rows)], "BYTES")
        result.set_data_from_numpy(np.array(rows, object), binary_data=in_binary)
        return result

    result = infer(url, "translator", [texts(ENGLISH)], request_id="7")
    assert result.outputs[0].as_numpy().tolist() == [translation]
    assert (result.model_name, result.id) == ("translator", "7")
    result = infer(url, "opinions", [texts("a fine film", "a dull film")])
    assert result.get_output_by_name("logits").as_numpy().argmax(axis=1).tolist() == [1, 0]
