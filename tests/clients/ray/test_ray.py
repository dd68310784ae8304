"""Tests of Ray Serve replicas on a cluster of two nodes on one machine.

Replicas scale and stream, and one node is killed under load. The tests need about 2 GB of memory
and two minutes.
"""

import collections
import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# otherwise the only proxy sends all requests to its own node
os.environ["RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING"] = "0"

import ray
from ray import serve
from ray.cluster_utils import Cluster

from vanilla_transformer_export.ray import app

PORT, CLIENTS, STREAMS, PATIENCE = 18473, 40, 4, 120
STREAM = {"model": "poet", "prompt": "The king", "stream": True}
SIZES = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
HTTP_OPTIONS = {"host": "127.0.0.1", "port": PORT}
Load = collections.namedtuple("Load", "counts wrong stopping threads")


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    root = tmp_path_factory.mktemp("exports")
    subprocess.run(
        [os.environ["VANILLA_TRANSFORMER_PYTHON"], Path(__file__).with_name("make.py"), root],
        check=True,
    )
    return root


@pytest.fixture(scope="module")
def translations(exports):
    return list(json.loads((exports / "expected.json").read_text()).items())


@pytest.fixture(scope="module")
def cluster(exports, tmp_path_factory):
    """Start a cluster whose only node, the head, has the proxy and one replica."""
    paths = ",".join(str(exports / name) for name in ("translator", "poet"))
    built = app(
        {"exports": paths, "languages": "translator:en-de", "replicas": "1-2", "log_level": "error"}
    )
    cluster = Cluster(initialize_head=True, head_node_args={**SIZES, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options=HTTP_OPTIONS)
        serve.run(built, route_prefix="/")
        yield cluster
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def post(connection, path, body):
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def connect():
    return http.client.HTTPConnection("127.0.0.1", PORT, timeout=PATIENCE)


def replicas():
    """Return the number of running replicas."""
    return (
        serve.status()
        .applications["default"]
        .deployments["exports"]
        .replica_states.get("RUNNING", 0)
    )


def wait_for(condition, seconds=PATIENCE):
    limit = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < limit
        time.sleep(0.2)
    return result


def start_clients(translations):
    """Start clients that each send one request after the other on one connection.

    An answer that came twice would count as the answer of the next request. Successive texts
    differ, so it would be wrong.
    """
    load = Load(collections.Counter(), [], threading.Event(), [])

    def ask(first):
        connection = connect()
        for text, expected in itertools.islice(itertools.cycle(translations), first, None):
            if load.stopping.is_set():
                break
            answer = post(connection, "/translate", {"q": text, "source": "en", "target": "de"})
            content = answer.read()
            load.counts[answer.status] += 1
            if answer.status == 200 and json.loads(content) != {"translatedText": expected}:
                load.wrong.append((answer.status, text, content))
        connection.close()

    def stream():
        while not load.stopping.is_set():
            connection = connect()
            answer = post(connection, "/v1/completions", {**STREAM, "max_tokens": 50})
            if answer.status != 200:
                load.counts[answer.status] += 1
                continue
            try:
                is_whole = answer.read().endswith(b"data: [DONE]\n\n")
                load.counts["stream" if is_whole else "quiet end"] += 1
            except http.client.IncompleteRead:
                load.counts["cut stream"] += 1
            connection.close()

    for target, *args in [*((ask, number) for number in range(CLIENTS)), *[(stream,)] * STREAMS]:
        load.threads.append(threading.Thread(target=target, args=args, daemon=True))
        load.threads[-1].start()
    return load


def test_example_serves_two_models_at_two_paths(exports, translations, tmp_path):
    """Run `serve run` on examples/serving/ray.yaml, with a free port and our exports."""
    text = (Path(__file__).parents[3] / "examples/serving/ray.yaml").read_text()
    config = tmp_path / "ray.yaml"
    config.write_text(
        text.replace("0.0.0.0", "127.0.0.1")
        .replace("8000", str(PORT))
        .replace("/exports/", f"{exports}/")
    )
    command = [Path(sys.executable).with_name("serve"), "run", config]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            wait_for(
                lambda: all(
                    get_status(f"/{name}/health/ready") == 200 for name in ("translator", "poet")
                )
            )
            connection, (text, expected) = connect(), translations[0]
            answer = post(
                connection, "/translator/translate", {"q": text, "source": "en", "target": "de"}
            )
            assert json.load(answer) == {"translatedText": expected}
            answer = post(
                connection, "/poet/v1/completions", {"prompt": "The king", "max_tokens": 4}
            )
            assert answer.status == 200 and json.load(answer)["model"] == "poet"
            assert (
                post(
                    connection, "/poet/translate", {"q": text, "source": "en", "target": "de"}
                ).status
                == 400
            )
        finally:
            process.send_signal(signal.SIGINT)  # as Ctrl-C
            process.wait(PATIENCE)


def get_status(path):
    """Return the status of a GET request of `path`, or None while nothing listens."""
    try:
        connection = connect()
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return None


def test_endpoints_answer_and_stream(cluster, translations):
    connection = connect()
    text, expected = translations[0]
    answer = post(connection, "/translate", {"q": text, "source": "en", "target": "de"})
    assert (
        json.load(answer) == {"translatedText": expected}
        and len(answer.headers.get_all("x-request-id")) == 1
    )
    start = time.perf_counter()
    answer = post(connection, "/v1/completions", {**STREAM, "max_tokens": 200})
    assert answer.status == 200, answer.read()
    times, lines = [], []
    for line in iter(answer.readline, b""):
        times.append(time.perf_counter())
        lines.append(line)
    assert lines[-2] == b"data: [DONE]\n" and len(lines) > 200
    # the events did not arrive all at once: the first came in the first half of the time
    assert times[0] - start < (times[-1] - start) / 2
    wrong = post(connection, "/translate", {"q": 5})
    assert wrong.status == 400 and "q is 5, expected" in json.load(wrong)["error"]


def test_second_replica_starts_under_load_and_service_survives_node_failure(cluster, translations):
    """Requests at the dead replica get 500. Its streams may break, but not end without an error."""
    node = cluster.add_node(**SIZES)
    load = start_clients(translations)
    wait_for(lambda: replicas() == 2)
    time.sleep(3)  # time for both replicas to answer
    assert set(load.counts) <= {200, "stream"}
    cluster.remove_node(node, allow_graceful=False)
    before = load.counts[200]
    wait_for(lambda: load.counts[200] > before + 10 * CLIENTS)
    load.stopping.set()
    for thread in load.threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in load.threads)
    print("answers", dict(load.counts))
    assert load.wrong == [] and {200, "stream"} <= set(load.counts) <= {
        200,
        500,
        "stream",
        "cut stream",
    }
    # each client had at most one request at the dead replica
    assert load.counts[500] <= CLIENTS + STREAMS
