"""Tests of the child process that runs the workers of a server: metrics, errors and shutdown."""

import contextlib
import json
import os
import re
import signal
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path

import numpy as np
import pytest
from messages import check_message, raises
from serving_load import (
    TEXTS,
    assert_no_harm,
    body,
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

from vanilla_transformer_export import TextRuntime

pytestmark = pytest.mark.filterwarnings("ignore:.*was cut after")


@pytest.fixture(scope="module")
def export(exported_for, tmp_path_factory):
    return with_words(exported_for("seq2seq", "cpu")[1], tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def load(export):
    return run_load(export)


@pytest.fixture(scope="module")
def shared(export, tmp_path_factory):
    """A server for tests that leave it as it was."""
    with serving(export, tmp_path_factory.mktemp("shared") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def small(export, tmp_path_factory):
    """The same with two slots and room for three rows that wait."""
    flags = ("--slots", "2", "--workers", "1", "--queue", "3")
    with serving(export, tmp_path_factory.mktemp("small") / "log", *flags) as server:
        yield server


def start_patched(code: str, export: Path, log: Path, *flags: str) -> Server:
    """Return a server whose process runs `code` first."""
    main = "from vanilla_transformer_export.cli.main import main\nmain(sys.argv[1:])"
    start = f"import sys\n{code}\n{main}"
    command = [
        sys.executable,
        "-c",
        start,
        "serve",
        str(export),
        "--languages",
        "en-de",
        "--log-level",
        "error",
        *flags,
    ]
    return Server(Plan(command), log)


def rejection(server: Server) -> tuple[int, str]:
    """Return the status and the error of a rejected translation."""
    with pytest.raises(urllib.error.HTTPError) as error:
        server.post("/translate", json.loads(body("w5")))
    return error.value.code, json.load(error.value)["error"]


# ------------------------------------------------------------------------------------ two processes


def test_workers_run_in_child_process_and_server_loads_no_onnxruntime(export, load, tmp_path):
    with serving(export, tmp_path / "log") as server:
        front, child = server.processes
        assert_no_harm(server.load(**load, connections=8, seconds=0.5))
        is_there = [
            "onnxruntime" in Path(f"/proc/{pid}/maps").read_text() for pid in (front, child)
        ]
        assert is_there == [False, True]
        threads = [len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in (front, child)]
        assert (
            threads[0] < 6 and threads[1] > 1
        )  # one thread reads messages, at least one is a worker
        assert metric(server, "engine_process_resident_memory_bytes") > 1e7
    assert not Path(f"/proc/{child}").exists()


def test_child_metrics_are_reported_by_server(export, shared):
    """The request has one row, so each token is one step."""
    runtime = TextRuntime(export, threads=1)
    # without the start token
    tokens = runtime.runtime.generate(np.array(runtime.rows(["w5 w6"]))).shape[1] - 1

    def measured():
        names = (
            "tokens_total",
            "batch_rows_sum",
            "queue_seconds_count",
            "first_token_seconds_count",
            "rows_running",
        )
        return [metric(shared, f"vanilla_transformer_{name}") for name in names]

    before = measured()
    shared.post("/translate", json.loads(body("w5 w6")))
    expected = [tokens, tokens, 1, 1, 0]
    wait_until(lambda: [after - first for after, first in zip(measured(), before)] == expected)


def test_slots_used_ratio_is_1_under_load_and_0_when_idle(small, load):
    def share():
        return metric(small, "vanilla_transformer_slots_used_ratio")

    with ThreadPoolExecutor(1) as pool:
        assert share() == 0
        loading = pool.submit(small.load, **load, connections=8, seconds=1.0)
        wait_until(lambda: share() == 1)
        assert_no_harm(loading.result())
        wait_until(lambda: share() == 0)


def test_full_queue_returns_429_and_vanished_clients_leave_no_rows(small, load):
    result = small.load(**load, connections=40, seconds=1.0)
    assert_no_harm(result)
    assert result["statuses"]["429"] > 0 and result["statuses"]["200"] > 20
    gone = [connect(small, request(text)) for text in TEXTS]
    for connection in gone:
        vanish(connection)
    wait_until(lambda: not metric(small, "vanilla_transformer_rows_waiting"))
    wait_until(lambda: not metric(small, "vanilla_transformer_rows_running"))
    assert small.post("/translate", json.loads(body("w5")))["translatedText"]


def test_reduced_connection_limit_is_logged_and_max_length_1_is_served(export, tmp_path):
    log = tmp_path / "log"
    command = [
        "sh",
        "-c",
        'ulimit -n 300; exec "$@"',
        "sh",
        *OURS,
        str(export),
        "--log-level",
        "warning",
        "--max-length",
        "1",
    ]
    server = Server(Plan(command), log)
    assert server.stop() == 0
    [warning] = [line for line in log.read_text().splitlines() if "warning" in line]
    check_message(json.loads(warning)["message"], seen=172, expected=(4096, "--connections"))


# ----------------------------------------------------------------------------- the end of a process


def test_killed_child_ends_server_and_error_names_signal(export, load, tmp_path):
    log = tmp_path / "log"
    with serving(export, log, "--grace", "0.5") as server:
        client = server.start_load(**load, connections=8, seconds=1.5)
        wait_until(lambda: metric(server, "vanilla_transformer_tokens_total") > 50)
        os.kill(server.processes[1], signal.SIGKILL)
        wait_until(lambda: server.status("/health/ready") == 503)
        assert rejection(server)[0] == 503
        result = outcome(client)
        assert server.process.wait(10) == 1
    # connections that fail after the server has ended
    lost = {status for status in result["statuses"] if not status.isdigit()}
    assert_no_harm(result, *lost)
    assert result["statuses"]["200"] > 0
    last = log.read_text().splitlines()[-1]
    check_message(last, seen="SIGKILL")


# a parent process may ignore SIGCHLD, and its children inherit that
IGNORES_CHILDREN = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"


@pytest.mark.parametrize(
    "code, number, end", [(IGNORES_CHILDREN, signal.SIGKILL, "SIGKILL"), ("", 36, "signal 36")]
)
def test_signal_that_killed_child_is_logged_at_once(export, tmp_path, code, number, end):
    log = tmp_path / "log"
    server = start_patched(code, export, log, "--grace", "3")  # a busy machine may take one second
    os.kill(server.processes[1], number)
    error = re.compile(rf'"level": "error", "message": "[^"]*\b{end}\b')
    wait_until(lambda: error.search(log.read_text()))
    assert server.process.poll() is None and server.status("/health/ready") == 503
    assert server.process.wait(10) == 1
    last = log.read_text().splitlines()[-1]
    assert last.startswith("vanilla-transformer: ")
    check_message(last, seen=end)


def test_server_stops_cleanly_when_sigchld_is_ignored(export, tmp_path):
    server = start_patched(IGNORES_CHILDREN, export, tmp_path / "log", "--grace", "0.1")
    assert server.stop() == 0, (tmp_path / "log").read_text()


def test_worker_that_cannot_send_results_ends_child_and_server(export, tmp_path):
    """The child may run out of memory. Without its worker no request would be answered."""
    code = """
from vanilla_transformer_export.engine import process
frame = process.frame
def without_memory(message):
    if len(message) == 4 and any(update.results for _, update in message[-1]):
        raise MemoryError
    return frame(message)
process.frame = without_memory
"""
    log = tmp_path / "log"
    # the first results are those of the warm-up
    with raises(RuntimeError, seen="copy"):
        start_patched(code, export, log, "--grace", "0.1")
    log_lines = log.read_text().splitlines()
    assert "MemoryError" in log_lines
    check_message(log_lines[-1], seen="code 1")


def test_stopped_child_adds_to_first_token_seconds_and_ends_with_server(export, tmp_path):
    server = start_patched("", export, tmp_path / "log")
    child = server.processes[1]
    os.kill(child, signal.SIGSTOP)
    client_thread = threading.Thread(
        target=server.post, args=("/translate", json.loads(body("w5 w6")))
    )
    client_thread.start()
    wait_until(lambda: metric(server, "vanilla_transformer_rows_waiting") == 1)
    time.sleep(0.3)
    before = metric(server, "vanilla_transformer_first_token_seconds_sum")
    os.kill(child, signal.SIGCONT)
    client_thread.join()
    wait_until(lambda: metric(server, "vanilla_transformer_first_token_seconds_sum") - before > 0.3)
    os.kill(child, signal.SIGSTOP)
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not is_running(child))


def is_ready(server: Server, path: str) -> bool:
    try:
        with urllib.request.urlopen(server.url(path), timeout=10) as answer:
            return answer.status == 200
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return False


def test_server_is_not_ready_while_child_is_stopped(shared):
    child, paths = shared.processes[1], ("/health/ready", "/v2/health/ready")
    assert all(is_ready(shared, path) for path in paths)
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: not any(is_ready(shared, path) for path in paths))
    assert shared.status("/health/live") == 200
    os.kill(child, signal.SIGCONT)
    wait_until(lambda: all(is_ready(shared, path) for path in paths))


def count_wakeups(server: Server) -> int:
    """Return how often the threads of the server and its child have waited so far."""
    paths = [path for pid in server.processes for path in Path(f"/proc/{pid}/task").iterdir()]
    texts = [(path / "status").read_text() for path in paths]
    return sum(
        int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.M)[1]) for text in texts
    )


def test_idle_server_sleeps_and_knows_the_time(shared):
    before = shared.post("/translate", json.loads(body("w5 w6")))
    time.sleep(1.5)  # for the checks after the connection was closed
    wakeups = count_wakeups(shared)
    time.sleep(2)
    assert count_wakeups(shared) - wakeups <= 4  # ten times a second would be 20 and more
    with urllib.request.urlopen(shared.url("/health/live"), timeout=10) as answer:
        date = parsedate_to_datetime(answer.headers["Date"])
    assert abs(date.timestamp() - time.time()) < 1.5
    assert shared.post("/translate", json.loads(body("w5 w6"))) == before


# --------------------------------------------------------------------------------------- fair turns


WAITING = "vanilla_transformer_rows_waiting"


def ask(server: Server, texts: str | list[str]) -> object:
    """Return the translations of `texts`, or the status of the error."""
    try:
        fields = {"q": texts, "source": "en", "target": "de"}
        return server.post("/translate", fields)["translatedText"]
    except urllib.error.HTTPError as error:
        return error.code


def test_new_request_overtakes_lists_of_texts(export, tmp_path):
    """60 lists have had a turn, and wait for their second. Then the process stops until one more
    request is there."""
    slow = tmp_path / "slow"  # while this file exists, so that answers come one by one
    code = f"""
        import os, time
        from vanilla_transformer_export.engine import batch, queue
        queue.MAX_OVERTAKEN = 1000.0
        step = batch.GenerationBatch.step
        def slow_step(self):
            time.sleep(0.05 if os.path.exists({str(slow)!r}) else 0)
            return step(self)
        batch.GenerationBatch.step = slow_step
        """
    server = start_patched(
        textwrap.dedent(code), export, tmp_path / "log", "--slots", "1", "--workers", "1"
    )
    child, order = server.processes[1], []
    os.kill(child, signal.SIGSTOP)
    with ThreadPoolExecutor(61) as pool:

        def answer(texts):
            pool.submit(lambda: (ask(server, texts), order.append(texts)))

        for _ in range(60):
            answer(["w5 w6", "w7 w8 w9"])
        wait_until(lambda: metric(server, WAITING) == 120)
        os.kill(child, signal.SIGCONT)
        wait_until(lambda: metric(server, WAITING) < 58, pause=0.001)
        os.kill(child, signal.SIGSTOP)
        num_before = None
        while num_before != len(order):  # answers on their way, which a busy machine delays
            num_before = len(order)
            time.sleep(0.3)
        num_waiting = metric(server, WAITING)
        assert num_waiting > 20
        answer("w5")
        wait_until(lambda: metric(server, WAITING) == num_waiting + 1)
        slow.touch()
        os.kill(child, signal.SIGCONT)
        wait_until(lambda: "w5" in order, seconds=60)
        slow.unlink()
    assert order.index("w5") - num_before <= 3
    assert server.stop() == 0


def test_short_request_does_not_wait_for_many_samples(export, tmp_path):
    """8 requests of 8 samples each want 64 of 8 slots, and all that wait are overdue."""
    code = "from vanilla_transformer_export.engine import queue\nqueue.MAX_OVERTAKEN = 0.0"
    server = start_patched(code, export, tmp_path / "log", "--slots", "8", "--workers", "1")
    child, order = server.processes[1], []
    samples = {"do_sample": True, "num_return_sequences": 8, "seed": 0, "min_new_tokens": 30}

    def ask_for(texts, **parameters):
        fields = {"inputs": texts, "parameters": {"max_new_tokens": 30, **parameters}}
        server.post("/predict/text2text-generation", fields)
        order.append(texts)

    os.kill(child, signal.SIGSTOP)
    with ThreadPoolExecutor(9) as pool:
        requests = [pool.submit(ask_for, "w5 w6", **samples) for _ in range(8)]
        wait_until(lambda: metric(server, WAITING) == 64)
        requests.append(pool.submit(ask_for, "w7"))
        wait_until(lambda: metric(server, WAITING) == 65)
        os.kill(child, signal.SIGCONT)
        assert [request.result() for request in requests] == [None] * 9
    assert order.index("w7") <= 1
    assert server.stop() == 0


def test_queue_full_of_one_request_accepts_small_ones(export, tmp_path):
    with serving(
        export, tmp_path / "log", "--slots", "1", "--workers", "1", "--queue", "16"
    ) as server:
        child = server.processes[1]
        os.kill(child, signal.SIGSTOP)
        with ThreadPoolExecutor(3) as pool:
            requests = []
            for texts, num_waiting in ((["w5"] * 40, 40), ("w6", 41), ("w7", 42)):
                requests.append(pool.submit(ask, server, texts))
                wait_until(lambda: metric(server, WAITING) == num_waiting)  # noqa: B023
            assert [ask(server, ["w8"] * 17), ask(server, "w8")] == [429, 429]
            os.kill(child, signal.SIGCONT)
        assert all(not isinstance(request.result(), int) for request in requests)


def test_unreadable_message_ends_child_and_server(export, tmp_path):
    """The server must not wait for a child that still runs."""
    code = """
from vanilla_transformer_export.engine.process import ProcessEngine
def received(self, *_):
    raise LookupError("a mistake")
ProcessEngine.received = received
"""
    log = tmp_path / "log"
    with raises(RuntimeError, seen="copy"):
        start_patched(code, export, log, "--grace", "0.1")
    check_message(log.read_text().splitlines()[-1], seen="LookupError")


def test_killed_server_leaves_no_child(export, load, tmp_path):
    server = start_patched("", export, tmp_path / "log")
    child = server.processes[1]
    client = server.start_load(**load, connections=8, seconds=0.5)
    wait_until(lambda: metric(server, "vanilla_transformer_tokens_total") > 50)
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not is_running(child))
    outcome(client)
    assert "Traceback" not in (tmp_path / "log").read_text()


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_both_processes_is_handled_by_server_only(export, load, tmp_path, number):
    """Ctrl-C and service managers send the signal to both processes.

    The server still answers accepted requests.
    """
    server = start_patched("import os; os.setsid()", export, tmp_path / "log", "--grace", "0.3")
    client = server.start_load(**load, connections=8, seconds=1.0)
    wait_until(lambda: metric(server, "vanilla_transformer_tokens_total") > 50)
    os.killpg(server.process.pid, number)
    assert server.process.wait(10) == 0, (tmp_path / "log").read_text()
    result = outcome(client)
    lost = {status for status in result["statuses"] if not status.isdigit()}
    assert_no_harm(result, *lost)
    assert result["statuses"]["200"] > 0 and not any("after a part" in status for status in lost)


def test_worker_error_fails_only_its_request(export, load, tmp_path):
    """Encoding raises for sources that begin with w7."""
    code = """
from vanilla_transformer_export.targets.cpu.slots import SlotRows
add = SlotRows.add
def add_unless_w7(self, sources, count):
    if any(source[0] == 7 for source in sources):
        raise ValueError("no memory")
    add(self, sources, count)
SlotRows.add = add_unless_w7
"""
    server = start_patched(code, export, tmp_path / "log")
    try:
        with pytest.raises(urllib.error.HTTPError) as error:
            server.post("/translate", json.loads(body("w7")))
        assert error.value.code == 500
        assert_no_harm(
            result := server.load(**exclude_texts(load, "w7"), connections=4, seconds=0.3)
        )
        assert set(result["statuses"]) == {"200"}
    finally:
        assert server.stop() == 0
    assert "no memory" in (tmp_path / "log").read_text()


def exclude_texts(load: dict, first: str) -> dict:
    """Return `load` without the texts that begin with the word `first`."""
    pairs = [
        (request_body, answer)
        for request_body, answer in zip(load["bodies"], load["expected"])
        if json.loads(request_body)["q"].split()[0] != first
    ]
    assert 0 < len(pairs) < len(load["bodies"])
    return {
        **load,
        "bodies": [request_body for request_body, _ in pairs],
        "expected": [answer for _, answer in pairs],
    }
