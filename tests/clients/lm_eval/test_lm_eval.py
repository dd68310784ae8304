"""Tests of lm-eval over HTTP with `vanilla-transformer serve`, against the checkpoint in torch."""

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
CARD = str(HERE.parents[2] / "model_cards/vanilla-decoder-tiny-shakespeare")
# of the environment with this project
PYTHON = os.environ.get("VANILLA_TRANSFORMER_PYTHON", HERE.parents[2] / ".venv/bin/python")
COMMAND = [PYTHON, "-m", "vanilla_transformer_export"]
DOCS = [json.loads(line) for line in (HERE / "endings.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    export = tmp_path_factory.mktemp("served") / "shakespeare"
    subprocess.run([*COMMAND, "export", CARD, export], check=True, stdout=subprocess.DEVNULL)
    command = [*COMMAND, "serve", export, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            found = None
            for line in server.stdout:
                found = re.search(r"listening on (http://\S+)", line) or found
                if line.strip().endswith("ready"):
                    break
            yield f"{found[1]}/v1/completions"
        finally:
            server.terminate()


class Offline:
    """The checkpoint in torch."""

    def __init__(self):
        self.model = AutoModelForCausalLM.from_pretrained(CARD, trust_remote_code=True).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(CARD)

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    @torch.no_grad()
    def likelihood(self, read, ids):
        """Return log p of `ids` after the tokens `read`, in float64."""
        log_p = self.model(torch.tensor([read + ids])).logits[0].double().log_softmax(-1)
        return sum(log_p[len(read) - 1 + place, token].item() for place, token in enumerate(ids))

    @torch.no_grad()
    def greedy(self, text, count):
        row = torch.tensor([self.ids(text)])
        for _ in range(count):
            row = torch.cat([row, self.model(row).logits[:, -1:].argmax(-1)], dim=1)
        return self.tokenizer.decode(row[0, len(self.ids(text)) :])


@pytest.fixture(scope="module")
def offline():
    return Offline()


def make_client(url, **more):
    """Return the model that lm-eval's command builds for `--model local-completions`."""
    options = dict(
        model="shakespeare",
        base_url=url,
        tokenizer=CARD,
        tokenizer_backend="huggingface",
        max_length=64,
    )
    return LocalCompletionsAPI(**options | more)


@pytest.mark.parametrize(
    "more", [dict(batch_size=1), dict(batch_size=3), dict(num_concurrent=4)], ids=str
)
def test_task_score_matches_offline_score(url, offline, more, tmp_path):
    task = yaml.safe_load((HERE / "endings.yaml").read_text())
    task["dataset_kwargs"]["data_files"]["test"] = str(HERE / "endings.jsonl")
    (tmp_path / "endings.yaml").write_text(yaml.safe_dump(task))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = simple_evaluate(
        make_client(url, **more),
        tasks=["endings"],
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
    )
    ids = offline.ids
    likelihoods = [
        [offline.likelihood(ids(doc["line"]), ids(ending)) for ending in doc["endings"]]
        for doc in DOCS
    ]
    samples = sorted(found["samples"]["endings"], key=lambda sample: sample["doc_id"])
    for sample, expected in zip(samples, likelihoods, strict=True):
        assert [score for score, _ in sample["filtered_resps"]] == pytest.approx(expected, abs=1e-4)
    best = np.array([doc["best"] for doc in DOCS])
    expected = np.mean(
        [np.argmax(scores) == best_index for scores, best_index in zip(likelihoods, best)]
    )
    per_letter = [
        np.array(scores) / [len(ending) for ending in doc["endings"]]
        for scores, doc in zip(likelihoods, DOCS)
    ]
    expected_norm = np.mean(
        [np.argmax(scores) == best_index for scores, best_index in zip(per_letter, best)]
    )
    result = found["results"]["endings"]
    assert (result["acc,none"], result["acc_norm,none"]) == (expected, expected_norm)
    assert 0 < expected < 1


def test_loglikelihood_reports_is_greedy(url, offline):
    line = "ROMEO:\nI "
    ending = offline.greedy(line, 4)
    requests = [
        Instance("loglikelihood", {}, (line, text), number)
        for number, text in enumerate((ending, "xxxx"))
    ]
    assert [
        is_greedy for _, is_greedy in make_client(url).loglikelihood(requests, disable_tqdm=True)
    ] == [
        True,
        False,
    ]


def test_text_longer_than_positions_is_scored_in_windows(url, offline):
    text = (
        "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 2
    )
    harness = make_client(url)
    [found] = harness.loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True
    )
    ids, size = offline.ids(text), harness.max_length - 1
    expected = offline.likelihood([harness.prefix_token_id], ids[:size])
    # each window is full; the last one begins with tokens of the window before
    for begin in range(size, len(ids), size):
        end = min(begin + size, len(ids))
        expected += offline.likelihood(ids[end - size - 1 : begin], ids[begin:end])
    assert len(ids) > 2 * size and found == pytest.approx(expected, abs=1e-3)


def test_generated_text_is_greedy(url, offline):
    for tokenized in (True, False):
        harness = make_client(url, tokenized_requests=tokenized)
        options = {"until": ["~"], "max_gen_toks": 12, "do_sample": False}
        [found] = harness.generate_until(
            [Instance("generate_until", {}, ("ROMEO:", options), 0)], disable_tqdm=True
        )
        assert found == offline.greedy("ROMEO:", 12)
