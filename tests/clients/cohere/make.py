"""python make.py OUT: the export of a cross-encoder, OUT/reranker, and OUT/expected.json: `QUERY`,
`TEXTS` and their scores by sentence-transformers. It runs with the project's Python."""

import json
import sys
from pathlib import Path

import transformers
from sentence_transformers import CrossEncoder

from vanilla_transformer import VanillaEncoderConfig, VanillaEncoderForSequenceClassification
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer_export import export

QUERY = "who sees the film?"
TEXTS = ["the film wins", "the old man and the big dog see the film, but a red bird?", "a café"]

out = Path(sys.argv[1])
transformers.set_seed(0)
tokenizer = train_tokenizer([QUERY, *TEXTS] * 4, 60, "bpe", "encoder")
config = VanillaEncoderConfig(
    vocab_size=len(tokenizer), d_model=24, d_ff=32, h=2, N=2, num_labels=1, initializer_range=0.5
)
VanillaEncoderForSequenceClassification(config).save_pretrained(out / "checkpoint")
tokenizer.save_pretrained(out / "checkpoint")
export(out / "checkpoint", out / "reranker", cases=2)
scores = CrossEncoder(str(out / "checkpoint"), device="cpu").predict([(QUERY, t) for t in TEXTS])
(out / "expected.json").write_text(json.dumps([QUERY, TEXTS, scores.tolist()]))
