"""python make.py OUT: exports of two encoders, OUT/bpe and OUT/word, and OUT/expected.json: torch's
means of the states of `TEXTS`. It runs with the project's Python; this folder's has an older
transformers, which optimum-onnx needs."""

import json
import sys
from pathlib import Path

import torch
import transformers

from vanilla_transformer import VanillaEncoderConfig, VanillaEncoderModel
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer_export import export

TEXTS = ["the film wins", "who sees the old man and the big dog, but a red bird?", "a naïve café"]
KINDS = {"bpe": (60, 0), "word": (20, 2)}  # entries of the vocabulary, token types

out, expected = Path(sys.argv[1]), {}
for kind, (size, types) in KINDS.items():
    transformers.set_seed(0)
    tokenizer = train_tokenizer(TEXTS * 4, size, kind, "encoder", token_types=types > 0)
    config = VanillaEncoderConfig(
        vocab_size=size, d_model=24, d_ff=32, h=2, N=2, d_k=10, d_v=14, type_vocab_size=types
    )
    model = VanillaEncoderModel(config).eval()
    model.save_pretrained(out / f"{kind}-checkpoint")
    tokenizer.save_pretrained(out / f"{kind}-checkpoint")
    export(out / f"{kind}-checkpoint", out / kind, cases=2)
    with torch.no_grad():
        expected[kind] = [
            model(**tokenizer(text, return_tensors="pt"))[0][0].mean(0).tolist() for text in TEXTS
        ]
(out / "expected.json").write_text(json.dumps([TEXTS, expected]))
