"""Fixtures: the shipped models, and what they give for ids that are put together by hand."""

from pathlib import Path

import peft  # noqa: F401 - before our package, which fills its dictionaries
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import vanilla_transformer  # noqa: F401 - registers the models

CARDS = Path(__file__).parents[3] / "model_cards"


class Decoder:
    """A shipped decoder of characters."""

    def __init__(self):
        self.path = str(CARDS / "vanilla-decoder-tiny-shakespeare")
        self.model = AutoModelForCausalLM.from_pretrained(self.path).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)

    def ids(self, text: str) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids(character) for character in text]

    @torch.no_grad()
    def log_probability(self, context: list[int], rest: list[int]) -> float:
        """Return the log probability of `rest` after `context`."""
        logits = self.model(torch.tensor([context + rest])).logits[0].double().log_softmax(-1)
        return sum(
            logits[len(context) - 1 + place, token].item() for place, token in enumerate(rest)
        )

    @torch.no_grad()
    def greedy(self, text: str, count: int) -> str:
        ids = torch.tensor([self.ids(text)])
        for _ in range(count):
            ids = torch.cat([ids, self.model(ids).logits[:, -1:].argmax(-1)], dim=1)
        return self.tokenizer.decode(ids[0, len(text) :])


@pytest.fixture(scope="session")
def decoder():
    return Decoder()
