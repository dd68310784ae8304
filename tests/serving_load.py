"""`vanilla-transformer serve` in a process of its own, with a model behind it, and load on it; clients that behave badly."""

import contextlib
import json
import re
import socket
import urllib.request
from pathlib import Path

from checkpoints import EOS, copy_of, edit_json, list_file, seal
from serving_servers import OURS, Plan, Server
from tokenizers import Tokenizer, models, pre_tokenizers

SIZE = 48  # of the vocabulary
NEW_TOKENS = 20


def with_words(directory: Path, parent: Path) -> Path:
    """A copy of an export of the models of tests/targets.py, with a tokenizer of the words w0 to w47."""
    found = copy_of(directory, parent)
    words = {f"w{number}": number for number in range(SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["w0", "w1", f"w{EOS}"])
    tokenizer.save(str(found / "tokenizer.json"))
    list_file(found, "tokenizer.json")
    if (found / "generation_config.json").exists():
        edit_json(found / "generation_config.json", max_new_tokens=NEW_TOKENS, no_repeat_ngram_size=1)
    seal(found)
    return found


@contextlib.contextmanager
def serving(export: Path, log: Path, *flags: str):
    """`server.url`, and what serving_servers.py has; one that was not stopped in the test has to end well."""
    server = Server(Plan([*OURS, str(export), "--languages", "en-de", "--log-level", "error", *flags]), log)
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
    """A load of serving_client.py, with the answers that are right."""
    answers = [json.dumps({"translatedText": text}, ensure_ascii=False, separators=(",", ":")) for text in expected]
    return {"path": "/translate", "bodies": [body(text) for text in texts], "expected": answers}


def assert_no_harm(found: dict, *others: str) -> None:
    """Of an outcome of serving_client.py: right answers, refusals that say when to come again, `others`, and nothing else."""
    assert found["wrong"] == found["unpromised"] == 0, found
    assert set(found["statuses"]) <= {"200", "429", "503", *others}, found["statuses"]


def metric(server: Server, name: str) -> float:
    """The sum over its labels."""
    with urllib.request.urlopen(server.url("/metrics"), timeout=10) as answer:
        lines = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", answer.read().decode(), re.MULTILINE)
    assert lines, name
    return sum(map(float, lines))


def connect(server: Server, content: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(content)
    return connection
