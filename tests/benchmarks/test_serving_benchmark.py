"""Tests of benchmarks/serving.py: the client, a short run against a server, tables and figures."""

import asyncio
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

import pytest
import serving_report
from measure import hardware, versions
from serving_client import Client, quantiles, request
from serving_load import with_words
from serving_parts import Run, saturation
from serving_servers import BEST

ROOT = Path(__file__).parents[2]


class Handler(BaseHTTPRequestHandler):
    """A handler with each status, body length and end of a connection that a client meets."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if content == "gone":
            self.close_connection = True
            return
        self.send_response(429 if content.startswith("busy") else 200)
        if content == "busy, later":
            self.send_header("Retry-After", "1")
        if content == "chunks":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for chunk in (b"4\r\nab\r\n\r\n", b"3\r\nend\r\n", b"0\r\n\r\n"):
                self.wfile.write(chunk)
            return
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *_):
        """Log nothing."""


@pytest.fixture(scope="module")
def port():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


def send_requests(port, bodies, expected=None):
    async def ask():
        client = Client(port, [request("/", body) for body in bodies], expected)
        client.end = float("inf")
        for _ in bodies:
            await client.ask(asyncio.get_running_loop().time())
        return client.outcome

    return asyncio.run(ask())


def test_client_counts_statuses_and_lost_connections(port):
    measured = send_requests(
        port, ["a", "busy", "busy, later", "chunks", "gone", "a longer one", "a"]
    )
    assert measured.statuses == {200: 4, 429: 2, "ConnectionResetError lost": 1}
    assert (measured.unpromised, len(measured.latencies)) == (1, 4)


def test_client_counts_unexpected_answers_as_wrong(port):
    assert send_requests(port, ["a", "b"], [b"a", b"c"]).wrong == 1


def test_quantiles_are_nearest_ranks():
    assert quantiles([4, 1, 3, 2]) == {"p50": 2, "p95": 4, "p99": 4, "max": 4}
    assert quantiles(range(1, 201)) == {"p50": 100, "p95": 190, "p99": 198, "max": 200}
    assert quantiles([]) is None


def test_saturation_run_fills_report_tables(exported_for, tmp_path):
    (tmp_path / "tiny").mkdir()
    with_words(exported_for("seq2seq", "cpu")[1], tmp_path).rename(tmp_path / "tiny/int8")
    run = Run(
        tmp_path, ["w5 w6 w7", "w8"], seconds=0.5, repeats=1, minutes=0.01, servers=["ours-int8"]
    )
    measured = saturation(run, "tiny")["ours-int8"]
    [load] = measured["rounds"]
    assert (
        load["statuses"].keys() == {"200"}
        and load["per_second"] > 10
        and measured["ready_seconds"] > 0.1
    )
    assert (
        0 < load["latency"]["p50"] <= load["latency"]["p99"]
        and load["cpu_per_request"]["server"] > 0
    )
    entry = {"hardware": hardware(), "versions": versions(["numpy"]), "quick": True, "found": {}}
    part = {"tiny": entry | {"found": {"ours-calibrated": measured, "transformers-2x1": measured}}}
    text = serving_report.tables({"saturation": part})
    speed = serving_report.number(load["per_second"])
    assert f"| tiny, ours-calibrated | {speed} ({speed} - {speed}) |" in text
    assert "| over HTTP / transformers, tiny int8 | 1 | at least 50 | no |" in text
    assert "tiny models, which measure nothing" in text and "Of saturation tiny." not in text
    other = {
        "tiny": entry
        | {
            "hardware": {**hardware(), "cpu": "Another"},
            "found": {"seconds": {"median": 1, "min": 1, "max": 1}},
        }
    }
    text = serving_report.tables({"saturation": part, "start": other})
    assert "Of saturation tiny." in text and "Another, " in text and "Of start tiny." in text


def test_figures_of_scaling_page_follow_from_results():
    """Compute each figure of docs/scaling.md with the formula beside it."""
    results = json.loads((ROOT / "benchmarks/results/serving.json").read_text())
    figures = {}
    for model in ("tiny", "base"):
        measured = results["saturation"][model]["found"][BEST]
        rate = measured["per_second"]["median"]
        offline = results["offline"][model]["found"]["calibrated"]
        at_once = offline["workers 2 1 64"]["per_second"]["median"]  # the default of `predict`
        cpu, memory = (
            median(pick(run) for run in measured["rounds"])
            for pick in (server_cpu_per_request, memory_megabytes)
        )
        hours = 1e6 / 3600
        figures[model] = [
            *(
                f"{value:,.0f}"
                for value in (1 / cpu, rate, 8 * rate, 10 * rate, at_once, memory, 4 * memory)
            ),
            *(
                f"{value:.2f}"
                for value in (hours / rate, hours / at_once, 2 * hours / rate, 2 * hours / at_once)
            ),
        ]
    rows = re.findall(
        r"^\|.*?\| ([\d,.]+) [md] \| ([\d,.]+) [md] \|",
        (ROOT / "docs/scaling.md").read_text(),
        re.MULTILINE,
    )
    assert [list(column) for column in zip(*rows)] == [figures["tiny"], figures["base"]]


def server_cpu_per_request(run):
    return run["cpu_per_request"]["server"]


def memory_megabytes(run):
    return run["memory"] / 1e6
