"""Tests of captured graphs in several threads, and of a server on the stand-ins."""

import itertools
import json
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from dry import EXPORTS, calls, inputs
from exports import Case

from vanilla_transformer_export import Runtime

MODELS = ("VanillaDecoderForCausalLM", "VanillaSeq2SeqForConditionalGeneration")
SEARCHES = (dict(num_beams=1), dict(num_beams=3), dict(do_sample=True, seed=1))
NUM_REQUESTS = 32
SERVE = [sys.executable, "-m", "vanilla_transformer_export", "serve", "--port", "0"]


@pytest.mark.parametrize("architecture", MODELS)
def test_concurrent_threads_capture_no_forbidden_call(architecture):
    case = Case(architecture, "paper", "fp16")
    runtime, arrays = Runtime(EXPORTS / str(case)), inputs(case)

    def generate(number):
        options = SEARCHES[number % 3] | dict(max_new_tokens=8 + 70 * (number % 2))
        return runtime.generate(**arrays, **options, eos_token_id=[])

    with calls() as log, ThreadPoolExecutor(2) as pool:
        results = list(pool.map(generate, range(12)))
    log.check_captures()
    assert all(isinstance(tokens, np.ndarray) for tokens in results)


def test_server_answers_concurrent_requests():
    """Only statuses are checked: the kernels compute nothing, so the tokens are arbitrary."""
    with (
        calls() as log,
        subprocess.Popen([*SERVE, EXPORTS / "card"], stdout=subprocess.PIPE, text=True) as server,
        ThreadPoolExecutor(NUM_REQUESTS) as pool,
    ):
        try:
            address = wait_until_ready(server.stdout)
            statuses = list(pool.map(lambda n: translate(address, n), range(NUM_REQUESTS)))
        finally:
            server.terminate()
    assert statuses == [200] * NUM_REQUESTS
    log.check_captures()
    assert log.starting("replay")


def wait_until_ready(output):
    """Return the address that a server prints before it is ready."""
    lines = list(itertools.takewhile(lambda line: line != "ready\n", output))
    [address] = re.findall(r"http://\S+", "".join(lines))
    return address


def translate(address, number):
    text = f"A dog runs across a field number {number}. " * (1 + number % 3)
    body = json.dumps({"q": text, "source": "en", "target": "de"}).encode()
    request = urllib.request.Request(
        f"{address}/translate", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.status
