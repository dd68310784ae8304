"""A server of one model for each head, and a browser."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
import transformers
from playwright.sync_api import sync_playwright

import vanilla_transformer as vanilla
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer_export import export

CARDS = Path(__file__).parents[3] / "model_cards"
LINES = [
    "the film wins and the cast shines, but the plot bores.",
    "who sees the old man? the big dog finds a red bird.",
    "a boy wants naïve cafés; Äpfel sind 1234 oder 3.5.",
    "this text is about sport, or about politics.",
] * 4
NAMES = {
    "id2label": dict(enumerate(["O", "B-PER", "B-LOC"])),
    "label2id": {"O": 0, "B-PER": 1, "B-LOC": 2},
}
SHIPPED = {
    "translator-en-de": "vanilla-seq2seq-tiny-multi30k-en-de",
    "poet": "vanilla-decoder-tiny-shakespeare",
    "opinions": "vanilla-encoder-tiny-sst2",
}
RANDOM = {
    "names": ("VanillaEncoderForTokenClassification", dict(**NAMES)),
    "answers": ("VanillaEncoderForQuestionAnswering", dict(type_vocab_size=2)),
    "masks": ("VanillaEncoderForMaskedLM", dict(position_embedding_type="learned")),
    "vectors": ("VanillaEncoderModel", dict(norm_first=True)),
}
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
)


def random_checkpoint(name: str, path: Path) -> None:
    """Save a random model, whose weights are large enough for outputs that differ."""
    architecture, fields = RANDOM[name]
    transformers.set_seed(0)
    tokenizer = train_tokenizer(
        LINES, 44, "word", "encoder", token_types=fields.get("type_vocab_size", 0) > 1
    )
    model_class = getattr(vanilla, architecture)
    sizes = dict(
        vocab_size=len(tokenizer),
        hidden_size=24,
        intermediate_size=32,
        num_attention_heads=3,
        num_hidden_layers=2,
    )
    model = model_class(model_class.config_class(**sizes, **fields))
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


@pytest.fixture(scope="session")
def exports(tmp_path_factory) -> dict[str, Path]:
    root, found = tmp_path_factory.mktemp("page"), {}
    for name in (*SHIPPED, *RANDOM):
        checkpoint = CARDS / SHIPPED[name] if name in SHIPPED else root / "checkpoints" / name
        if name in RANDOM:
            random_checkpoint(name, checkpoint)
        found[name] = root / name
        export(checkpoint, found[name], cases=1, target="cpu")
    return found


class Server:
    """`vanilla-transformer serve` of some exports, in a process."""

    def __init__(self, exports, log: Path, *flags: str, **environment: str):
        command = [
            sys.executable,
            "-m",
            "vanilla_transformer_export",
            "serve",
            *map(str, exports),
            "--port",
            "0",
            *flags,
        ]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env={**os.environ, **environment}
            )
        limit = time.monotonic() + 120
        while "\nready" not in (said := log.read_text()):
            assert self.process.poll() is None and time.monotonic() < limit, said
            time.sleep(0.05)
        self.url = next(word for word in said.split() if word.startswith("http://"))

    def post(self, path: str, **body):
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def stop(self):
        self.process.terminate()
        assert self.process.wait(60) == 0


@pytest.fixture(scope="session")
def start_server():
    return Server


@pytest.fixture(scope="session")
def server(exports, tmp_path_factory):
    found = Server(
        exports.values(),
        tmp_path_factory.mktemp("server") / "log",
        "--languages",
        "translator-en-de:en-de",
    )
    yield found
    found.stop()


@pytest.fixture(scope="session")
def chromium():
    path = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    assert path, "expected Chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def shots(tmp_path_factory) -> Path:
    """The directory of screenshots: that of the variable SCREENSHOTS, or a temporary one."""
    found = Path(os.environ.get("SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    found.mkdir(parents=True, exist_ok=True)
    return found
