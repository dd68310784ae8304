"""Tests of the server with schemathesis, which sends valid and invalid requests.

SCHEMATHESIS_CASES is the minimum number of requests, 1,000 by default.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vanilla_transformer_export import export

CARDS = Path(__file__).parents[3] / "model_cards"
SERVED = {
    "translator-en-de": "vanilla-seq2seq-tiny-multi30k-en-de",
    "poet": "vanilla-decoder-tiny-shakespeare",
    "opinions": "vanilla-encoder-tiny-sst2",
}
CASES = int(os.environ.get("SCHEMATHESIS_CASES", "1000"))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    for name, card in SERVED.items():
        export(CARDS / card, root / name, cases=1, target="cpu")
    exports = [str(root / name) for name in SERVED]
    command = [sys.executable, "-m", "vanilla_transformer_export", "serve", *exports, "--port", "0"]
    log = root / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--languages", "translator-en-de:en-de"], stdout=out, stderr=out
        )
    limit = time.monotonic() + 120
    while "\nready" not in (log_text := log.read_text()):
        assert process.poll() is None and time.monotonic() < limit, log_text
        time.sleep(0.05)
    yield next(word for word in log_text.split() if word.startswith("http://"))
    process.terminate()
    assert process.wait(60) == 0
    assert '"error": "Traceback' not in log.read_text()


def test_no_request_causes_a_server_error(url, tmp_path):
    program = shutil.which("schemathesis", path=Path(sys.executable).parent)
    limits = [
        "--checks",
        "not_a_server_error",
        "--phases",
        "coverage,fuzzing",
        "--suppress-health-check",
        "all",
    ]
    count, seed = 0, 0
    while count < CASES:
        settings = [
            "--max-examples",
            str(min(200, 1 + CASES // 100)),
            "--seed",
            str(seed),
            "--request-timeout",
            "60",
        ]
        done = subprocess.run(
            [program, "run", f"{url}/openapi.json", *limits, *settings, "--continue-on-failure"],
            capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"},
        )  # fmt: skip
        assert "Server error" not in done.stdout and "Network Error" not in done.stdout, (
            done.stdout[-5000:]
        )
        totals = re.search(r"([\d,]+) generated, ([\d,]+) passed", done.stdout)
        assert totals and totals[1] == totals[2], done.stdout[-5000:]
        count, seed = count + int(totals[1].replace(",", "")), seed + 1
