"""What prompt lookup decoding saves and costs: `python benchmarks/lookup.py --data DIR`, where DIR holds Multi30k's raw files.

Two models, one row at a time, with the option and without, in turns:

- corrections: a text of three captions with letters exchanged in two words -> the text. No shipped model copies, so the
  shipped translator is trained on for this, for `--steps` updates; most of what it then writes stands in what it reads.
- translation: the shipped translator and captions, where hardly anything can be copied.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import vanilla_transformer  # noqa: F401  registers the models
from vanilla_transformer.training.data import read_lines
from vanilla_transformer_export import TextRuntime, export

CARD = Path(__file__).parents[1] / "model_cards" / "vanilla-seq2seq-tiny-multi30k-en-de"
TEXTS, ROUNDS, BATCH, CAPTIONS, ERRORS = 50, 5, 32, 3, 2
GREEDY = {"num_beams": 1, "max_new_tokens": 120}


def with_errors(text: str, rng: random.Random) -> str:
    """Two neighbouring letters are exchanged in `ERRORS` words."""
    words = text.split(" ")
    long = [place for place, word in enumerate(words) if len(word) > 3]
    for place in rng.sample(long, min(ERRORS, len(long))):
        first = rng.randrange(1, len(words[place]) - 2)
        word = words[place]
        words[place] = word[:first] + word[first + 1] + word[first] + word[first + 2 :]
    return " ".join(words)


def corrections(captions: list[str], count: int, seed: int) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    texts = [" ".join(rng.sample(captions, CAPTIONS)) for _ in range(count)]
    return [(with_errors(text, rng), text) for text in texts]


def train_corrector(captions: list[str], steps: int, directory: Path) -> None:
    """The card's model, trained on to correct, in `directory`."""
    torch.manual_seed(0)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(CARD), AutoTokenizer.from_pretrained(CARD)
    pairs = corrections(captions, steps * BATCH, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    model.train()
    for step in range(steps):
        sources, targets = zip(*pairs[step * BATCH : (step + 1) * BATCH])
        batch = tokenizer(list(sources), padding=True, return_tensors="pt")
        labels = tokenizer(list(targets), padding=True, return_tensors="pt")
        labels = labels.input_ids.masked_fill(labels.attention_mask == 0, -100)
        loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval().save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def seconds(runtime: TextRuntime, texts: list[str], **options) -> tuple[float, list[str]]:
    start = time.perf_counter()
    outputs = [runtime.generate([text], **GREEDY, **options)[0] for text in texts]
    return time.perf_counter() - start, outputs


def measure(task: str, checkpoint: Path, texts: list[str], candidates: int, dtype: str) -> dict:
    """The time with candidates divided by that without: the median of `ROUNDS`, and all of them."""
    with tempfile.TemporaryDirectory() as directory:
        export(checkpoint, Path(directory) / "export", target="cpu", dtype=dtype, cases=1)
        runtime = TextRuntime(Path(directory) / "export")
        seconds(runtime, texts[:5])
        seconds(runtime, texts[:5], prompt_lookup_num_tokens=candidates)
        ratios, alike = [], []
        for _ in range(ROUNDS):
            without, expected = seconds(runtime, texts)
            with_them, found = seconds(runtime, texts, prompt_lookup_num_tokens=candidates)
            ratios.append(with_them / without)
            alike.append(sum(map(str.__eq__, found, expected)))
    copied = sum(source == output for source, output in zip(texts, expected))
    result = {"task": task, "dtype": dtype, "candidates": candidates, "texts": len(texts), "same outputs": min(alike)}
    return result | {"copied as they are": copied, "ratio": round(statistics.median(ratios), 3), "ratios": sorted(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="directory of Multi30k's raw files")
    parser.add_argument("--steps", type=int, default=600, help="updates of the model that corrects")
    parser.add_argument("--candidates", type=int, default=10, help="prompt_lookup_num_tokens")
    parser.add_argument("--dtype", default="fp32", help="of the weights of the export")
    options = parser.parse_args()
    captions = read_lines(options.data / "test_2016_flickr.en.gz")
    with tempfile.TemporaryDirectory() as corrector:
        train_corrector(read_lines(options.data / "train.en.gz"), options.steps, Path(corrector))
        pairs = corrections(captions, TEXTS, seed=1)
        given = [source for source, _ in pairs]
        print(json.dumps(measure("corrections", Path(corrector), given, options.candidates, options.dtype)))
    print(json.dumps(measure("translation", CARD, captions[:TEXTS], options.candidates, options.dtype)))


if __name__ == "__main__":
    main()
