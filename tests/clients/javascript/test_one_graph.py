"""Tests of examples/one_graph in Node and in a browser, against the runtime."""

import functools
import json
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from vanilla_transformer_export import TextRuntime, export

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples/one_graph"
CARD = HERE.parents[2] / "model_cards/vanilla-seq2seq-tiny-multi30k-en-de"
TEXTS = ["A man sleeps.", "A woman is reading a book in the park."]


class Handler(SimpleHTTPRequestHandler):
    extensions_map = {
        ".html": "text/html",
        ".mjs": "text/javascript",
        ".js": "text/javascript",
        ".wasm": "application/wasm",
    }

    def log_message(self, *args):
        pass  # would print a line for each request


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write the examples, the npm packages and the export `translator` into one folder."""
    folder = tmp_path_factory.mktemp("one") / "graph"
    shutil.copytree(EXAMPLES, folder)
    (folder / "node_modules").symlink_to(HERE / "node_modules")
    export(CARD, folder / "translator", cases=2, generate="greedy")
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    out = tmp_path_factory.mktemp("runtime") / "export"
    export(CARD, out, cases=1)
    return TextRuntime(out).generate(TEXTS, num_beams=1, max_new_tokens=64)


def test_node_texts_match_runtime(folder, expected):
    done = subprocess.run(
        ["node", "node.mjs", "translator", *TEXTS],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines() == expected, done.stderr[-2000:]


def test_browser_texts_match_runtime(folder, expected):
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    assert chromium, "expected Chromium"
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        command = [
            "node",
            "browser.mjs",
            chromium,
            f"http://127.0.0.1:{server.server_port}/page.html",
        ]
        done = subprocess.run(
            command,
            input=json.dumps([TEXTS]),
            cwd=HERE,
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        server.shutdown()
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [expected]
