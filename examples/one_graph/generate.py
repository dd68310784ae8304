"""Translation of texts with one call of onnxruntime, without code for the search.

vanilla-transformer export CHECKPOINT translator --generate greedy
python examples/one_graph/generate.py translator "A man sleeps." "A dog runs."
"""

import sys

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

MAX_NEW_TOKENS = 64


def main(directory: str, texts: list[str]) -> None:
    tokenizer = Tokenizer.from_file(f"{directory}/tokenizer.json")
    tokenizer.enable_padding()
    rows = tokenizer.encode_batch(texts)
    session = onnxruntime.InferenceSession(f"{directory}/onnx/generate.onnx")
    feeds = {
        "input_ids": np.array([row.ids for row in rows]),
        "attention_mask": np.array([row.attention_mask for row in rows]),
        "max_new_tokens": np.full((len(rows), 1), MAX_NEW_TOKENS),
    }
    [sequences] = session.run(["sequences"], feeds)
    for text in tokenizer.decode_batch(sequences):
        print(text)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
