"""Text classification with an export, using only numpy, tokenizers and onnxruntime.

vanilla-transformer export model_cards/vanilla-encoder-tiny-trec questions
python examples/classify.py questions "Who wrote Hamlet ?"
"""

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from vanilla_transformer_export import Runtime


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export", type=Path, help="directory of the export")
    parser.add_argument("text", nargs="+")
    args = parser.parse_args(argv)

    config = json.loads((args.export / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(args.export / "tokenizer.json"))
    tokenizer.enable_padding(pad_id=config["pad_token_id"])
    encodings = tokenizer.encode_batch(args.text)
    input_ids = np.array([encoding.ids for encoding in encodings])
    attention_mask = np.array([encoding.attention_mask for encoding in encodings])

    logits = Runtime(args.export).outputs(input_ids, attention_mask)["logits"]  # (texts, labels)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    for text, row in zip(args.text, probabilities, strict=True):
        print(f"{config['id2label'][str(row.argmax())]} {row.max():.2f} {text}")


if __name__ == "__main__":
    main()
