"""`vanilla-transformer serve` in a process of its own, with a model behind it, and load on it;
clients that behave badly."""

import contextlib
import json
import random
import re
import socket
import struct
import time
import urllib.request
from pathlib import Path

from checkpoints import EOS, copy_folder, edit_json, list_file, seal
from serving_servers import OURS, Plan, Server
from tokenizers import Tokenizer, models, pre_tokenizers

from vanilla_transformer_export import TextRuntime

SIZE = 48  # size of the vocabulary
NEW_TOKENS = 20
TEXTS = [
    " ".join(
        f"w{number}" for number in random.Random(seed).choices(range(4, SIZE), k=1 + seed % 12)
    )
    for seed in range(60)
]


def with_words(directory: Path, parent: Path) -> Path:
    """Return a copy in `parent` of the export `directory`, with a tokenizer of the words w0 to w47.

    It is one of the models of targets.py. If it generates, it gets a limit of new tokens.
    """
    copy = copy_folder(directory, parent)
    words = {f"w{number}": number for number in range(SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["w0", "w1", f"w{EOS}"])
    tokenizer.save(str(copy / "tokenizer.json"))
    list_file(copy, "tokenizer.json")
    if (copy / "generation_config.json").exists():
        edit_json(
            copy / "generation_config.json", max_new_tokens=NEW_TOKENS, no_repeat_ngram_size=1
        )
    seal(copy)
    return copy


@contextlib.contextmanager
def serving(export: Path, log: Path, *flags: str):
    """Yield a server of `export`, which must stop without errors if the test does not stop it.

    It has `server.url` and the attributes of serving_servers.py. Its output goes to the file `log`,
    and `flags` are further arguments of `serve`.
    """
    server = Server(
        Plan([*OURS, str(export), "--languages", "en-de", "--log-level", "error", *flags]), log
    )
    try:
        yield server
        if server.process.poll() is None:
            assert server.stop() == 0, log.read_text()
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def body(text: str) -> str:
    return json.dumps({"q": text, "source": "en", "target": "de"})


def translations(texts: list[str], expected: list[str]) -> dict:
    """Return a load of serving_client.py that translates `texts`, with the `expected` answers."""
    answers = [
        json.dumps({"translatedText": text}, ensure_ascii=False, separators=(",", ":"))
        for text in expected
    ]
    return {"path": "/translate", "bodies": [body(text) for text in texts], "expected": answers}


def run_load(export: Path) -> dict:
    """Return a load of `TEXTS`, which expects what `export` translates each text to alone."""
    runtime = TextRuntime(export, threads=1)
    expected = [runtime.translate([text])[0] for text in TEXTS]
    assert len(set(expected)) > len(TEXTS) / 2
    return translations(TEXTS, expected)


def assert_no_harm(load: dict, *others: str) -> None:
    """Check an outcome of serving_client.py.

    It may have only correct answers, rejections with Retry-After, and the statuses or errors
    `others`.
    """
    assert load["wrong"] == load["unpromised"] == 0, load
    assert set(load["statuses"]) <= {"200", "429", "503", *others}, load["statuses"]


def metric(server: Server, name: str) -> float:
    """Return the sum over all labels of the metric `name` of `server`."""
    with urllib.request.urlopen(server.url("/metrics"), timeout=10) as answer:
        lines = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", answer.read().decode(), re.MULTILINE)
    assert lines, name
    return sum(map(float, lines))


def connect(server: Server, content: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(content)
    return connection


def wait_until(holds, seconds=10.0, pause=0.02):
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, "nothing happened"
        time.sleep(pause)


def request(text: str, **more) -> bytes:
    content = json.dumps({**json.loads(body(text)), **more}).encode()
    head = (
        f"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: "
        f"application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def vanish(connection: socket.socket) -> None:
    """Close `connection` with a reset, as a client that crashed does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
