"""Examples of what models output for text outside their domain.

`python benchmarks/outside.py` writes them into the cards of model_cards/. A card has a table of
such texts under "Outside its domain". The output beside each is a translation with the default
settings of `generate`, 40 tokens of greedy continuation, or the top label and its probability.
"""

import argparse
import re
from pathlib import Path

import torch
import transformers
import yaml
from transformers import AutoTokenizer

import vanilla_transformer  # noqa: F401  registers the models

CARDS = Path(__file__).parents[1] / "model_cards"
AUTO = {
    "translation": transformers.AutoModelForSeq2SeqLM,
    "text-generation": transformers.AutoModelForCausalLM,
    "text-classification": transformers.AutoModelForSequenceClassification,
}
NEW_TOKENS = 40
SECTION = re.compile(r"^## Outside its domain\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `([^`]+)` \|.*\|$", re.MULTILINE)


def filled(text: str, card: Path) -> str:
    """Return the card `text` with the output of the model in `card` in each row of its table."""
    answer = answers(card)
    return SECTION.sub(
        lambda section: ROW.sub(lambda row: f"| `{row[1]}` | `{answer(row[1])}` |", section[0]),
        text,
    )


def answers(card: Path):
    """Return a function from a text to what the model in `card` outputs for it, as in the table."""
    task = yaml.safe_load((card / "README.md").read_text(encoding="utf-8").split("---")[1])[
        "pipeline_tag"
    ]
    model, tokenizer = AUTO[task].from_pretrained(card), AutoTokenizer.from_pretrained(card)
    settings = {"max_new_tokens": NEW_TOKENS} if task == "text-generation" else {}

    @torch.no_grad()
    def answer(text):
        inputs = tokenizer(text, add_special_tokens=task != "text-generation", return_tensors="pt")
        if task == "text-classification":
            probability, label = model(**inputs).logits[0].softmax(dim=-1).max(dim=-1)
            return f"{model.config.id2label[int(label)]}, {probability:.2f}"
        start = inputs["input_ids"].shape[1] if task == "text-generation" else 0
        [ids] = model.generate(**inputs, **settings)
        return tokenizer.decode(ids[start:], skip_special_tokens=True).replace("\n", "\\n")

    return answer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "cards", nargs="*", type=Path, help="directories of model_cards/; by default all"
    )
    options = parser.parse_args()
    for card in options.cards or sorted(path.parent for path in CARDS.glob("*/README.md")):
        path = card / "README.md"
        text = filled(path.read_text(encoding="utf-8"), card)
        path.write_text(text, encoding="utf-8")
        print(card, *(section[0] for section in SECTION.finditer(text)), sep="\n\n")


if __name__ == "__main__":
    main()
