"""Tests of a server process under load and with misbehaving clients.

Answers match those of requests alone, other requests get errors, and nothing is left behind.
"""

import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from checkpoints import copy_folder
from messages import raises
from serving_load import (
    TEXTS,
    assert_no_harm,
    connect,
    metric,
    request,
    run_load,
    serving,
    vanish,
    wait_until,
    with_words,
)
from serving_servers import OURS, Plan, Server, outcome

pytestmark = pytest.mark.filterwarnings("ignore:.*was cut after")
MINUTES = float(os.environ.get("RELIABILITY_MINUTES", "0.5"))  # duration of the slow overload test
MEMORY = 10 * 2**20  # maximum growth of the server in bytes


@pytest.fixture(scope="module")
def export(exported_for, tmp_path_factory):
    return with_words(exported_for("seq2seq", "cpu")[1], tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def load(export):
    return run_load(export)


@pytest.fixture(scope="module")
def server(export, tmp_path_factory):
    """A server for all tests that leave it running, with so few slots that it is full at once."""
    with serving(
        export, tmp_path_factory.mktemp("log") / "log", "--slots", "4", "--queue", "8"
    ) as result:
        yield result


def is_idle(server):
    """Return True if no request is in flight and no row runs or waits.

    Requests of metrics do not count.
    """
    names = ("requests_in_flight", "rows_running", "rows_waiting")
    return not any(metric(server, f"vanilla_transformer_{name}") for name in names)


def test_full_server_answers_correctly_or_returns_429(server, load):
    result = server.load(**load, connections=96, seconds=1.5)
    assert_no_harm(result)
    assert result["statuses"]["200"] > 50 and result["statuses"]["429"] > 0


def test_vanished_clients_leave_no_requests(server, load):
    for _ in range(3):
        gone = [connect(server, request(text)) for text in TEXTS[:30]]
        for connection in gone:
            vanish(connection)
    wait_until(lambda: is_idle(server))
    assert_no_harm(result := server.load(**load, connections=4, seconds=0.5))
    assert set(result["statuses"]) == {"200"}


def test_stop_under_load_answers_all_accepted_requests(export, load, tmp_path):
    with serving(export, tmp_path / "log", "--log-level", "info", "--grace", "0.3") as server:
        client = server.start_load(**load, connections=16, seconds=2.0)
        wait_until(lambda: metric(server, "vanilla_transformer_tokens_total") > 200)
        assert server.stop() == 0
        result = outcome(client)
    lost = {status for status in result["statuses"] if not status.isdigit()}
    assert_no_harm(result, *lost)
    assert not any("after a part" in status for status in lost)
    lines = [
        json.loads(line)
        for line in (tmp_path / "log").read_text().splitlines()
        if line.startswith("{")
    ]
    accepted = [line["status"] for line in lines if line.get("path") == "/translate"]
    assert accepted.count(200) == result["statuses"]["200"] > 20
    assert len(accepted) == sum(
        count for status, count in result["statuses"].items() if status not in lost
    )


def test_log_on_full_disk_does_not_stop_server(export, load):
    """Neither the output at startup nor the lines of requests can be written."""
    server = Server(
        Plan([*OURS, str(export), "--languages", "en-de", "--log-level", "debug"]),
        log=Path("/dev/full"),
    )
    result = server.load(**load, connections=8, seconds=0.5)
    assert_no_harm(result)
    assert result["statuses"]["200"] > 20 and server.stop() == 0


# --------------------------------------------------------------------------------------------- slow


@pytest.mark.slow
def test_overload_returns_correct_answers_or_429_without_memory_growth(server, load):
    rate = server.load(**load, connections=32, seconds=5)["per_second"]
    client = server.start_load(**load, rate=2 * rate, seconds=60 * MINUTES)
    samples = []
    while client.poll() is None:
        samples.append(server.memory)
        time.sleep(1)
    result = outcome(client)
    assert_no_harm(result)
    assert result["statuses"]["429"] > 0 and result["per_second"] > rate / 3
    early, late = (
        sorted(samples[len(samples) // 4 : len(samples) // 2]),
        sorted(samples[-len(samples) // 4 :]),
    )
    assert late[len(late) // 2] - early[len(early) // 2] < MEMORY


@pytest.mark.slow
def test_two_thousand_idle_connections_do_not_delay_requests(server, load):
    """Half of the connections have sent nothing, half of them part of a header."""
    import resource

    file_limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (file_limits[1], file_limits[1]))
    waiting = [
        connect(server, (b"", b"POST /translate HTTP/1.1\r\nHost")[number % 2])
        for number in range(2000)
    ]
    client, slowest = server.start_load(**load, connections=4, seconds=4.0), 0.0
    while client.poll() is None:
        for path in ("/health/ready", "/metrics"):
            start = time.perf_counter()
            assert server.status(path) == 200
            slowest = max(slowest, time.perf_counter() - start)
    assert_no_harm(result := outcome(client))
    assert set(result["statuses"]) == {"200"} and slowest < 2.0
    for connection in waiting:
        connection.close()


@pytest.mark.slow
def test_one_byte_per_second_times_out_and_does_not_affect_others(export, load, tmp_path):
    with serving(
        export, tmp_path / "log", "--header-timeout", "3", "--body-timeout", "3"
    ) as server:
        whole = request("w5 w6 w7")
        headers = [connect(server) for _ in range(20)]
        bodies = [connect(server, whole[: whole.index(b"\r\n\r\n") + 4]) for _ in range(20)]
        client = server.start_load(**load, connections=4, seconds=6.0)
        for second in range(6):
            for connection, content in [
                *((each, whole) for each in headers),
                *((each, b"{" * 9) for each in bodies),
            ]:
                with contextlib.suppress(OSError):  # closed by the server
                    connection.sendall(content[second : second + 1])
            time.sleep(1)
        assert_no_harm(result := outcome(client))
        assert set(result["statuses"]) == {"200"}
        assert [connection.recv(100)[:12] for connection in bodies] == [b"HTTP/1.1 408"] * 20
        assert all(is_closed(connection) for connection in headers)
        wait_until(lambda: is_idle(server))


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.slow
def test_slow_readers_do_not_delay_others(server, load):
    slow = []
    for text in TEXTS[:40]:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.connect(("127.0.0.1", server.port))
        connection.settimeout(60)
        connection.sendall(request(text))
        slow.append(connection)
    client = server.start_load(**load, connections=4, seconds=3.0)
    read = {connection: connection.recv(1) for connection in slow}
    for _ in range(20):
        for connection in slow:
            read[connection] += connection.recv(1)
        time.sleep(0.1)
    assert_no_harm(result := outcome(client))
    assert result["statuses"]["200"] > 20
    assert {answer[:12] for answer in read.values()} <= {b"HTTP/1.1 200", b"HTTP/1.1 429"}
    for connection in slow:
        vanish(connection)
    wait_until(lambda: is_idle(server))


@pytest.mark.slow
def test_server_resumes_after_sigstop_and_sigcont(server, load):
    client = server.start_load(**load, connections=16, seconds=8.0)
    time.sleep(2)
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    server.process.send_signal(signal.SIGCONT)
    assert_no_harm(result := outcome(client))
    assert result["statuses"]["200"] > 100 and result["latency"]["max"] > 2.5
    wait_until(lambda: is_idle(server))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize(
    "file",
    ["onnx/encoder_model.onnx", "onnx/decoder_model_merged.onnx", "tokenizer.json", "config.json"],
)
def test_corrupt_export_is_rejected_at_startup(export, tmp_path, file, damage):
    copy = copy_folder(export, tmp_path)
    damage(copy / file)
    with raises(RuntimeError, seen="copy") as failed:
        Server(Plan([*OURS, str(copy), "--log-level", "error"]), tmp_path / "log")
    log_text = (tmp_path / "log").read_text()
    assert file.split("/")[-1] in log_text and "Traceback" not in log_text, failed.value
