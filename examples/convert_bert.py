"""Conversion of a BERT checkpoint, with a comparison of the outputs of both models.

    python examples/convert_bert.py google-bert/bert-base-uncased --output encoder

Without a checkpoint it makes a tiny one with random weights, so that it runs offline.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModel, BertConfig, BertModel

from vanilla_transformer.conversion import convert

TOLERANCE = 1e-4


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "checkpoint",
        nargs="?",
        help="directory or Hub id of a BERT; a tiny random one if not given",
    )
    parser.add_argument("--output", type=Path, required=True, help="checkpoint to write")
    args = parser.parse_args(argv)

    checkpoint = args.checkpoint or tiny_bert(args.output.with_name(f"{args.output.name}-source"))
    facts = convert(checkpoint, args.output)
    print(f"{checkpoint} is now a {facts['architecture']} in {args.output}")

    theirs, ours = (
        AutoModel.from_pretrained(checkpoint).eval(),
        AutoModel.from_pretrained(args.output).eval(),
    )
    input_ids = torch.randint(5, ours.config.vocab_size, (2, 16))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, 10:] = 0  # the second row is shorter
    with torch.no_grad():
        expected = theirs(input_ids, attention_mask).last_hidden_state
        actual = ours(input_ids, attention_mask).last_hidden_state
    difference = (actual - expected)[attention_mask.bool()].abs().max().item()
    print(f"largest difference of the last hidden states: {difference:.1e}")
    if difference > TOLERANCE:
        sys.exit(f"the difference is {difference:.1e}, expected at most {TOLERANCE:.0e}")


def tiny_bert(path: Path) -> Path:
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    BertModel(BertConfig(vocab_size=1000, **sizes)).save_pretrained(path)
    return path


if __name__ == "__main__":
    main()
