"""python make.py OUT: exports of a translator and a decoder, and OUT/expected.json: texts and their
translations.

It runs with the project's Python: there is no torch where Ray is."""

import json
import sys
from pathlib import Path

from vanilla_transformer_export import TextRuntime, export

CARDS = Path(__file__).parents[3] / "model_cards"
SERVED = {
    "translator": "vanilla-seq2seq-tiny-multi30k-en-de",
    "poet": "vanilla-decoder-tiny-shakespeare-gpu-shape",
}
WORDS = (
    ("a dog", "two men", "a girl in red", "the old woman", "three children", "a white cat"),
    (
        "runs across a field",
        "looks at the sea",
        "plays with a ball in the park near the river",
        "is sitting on a bench",
    ),
)

out = Path(sys.argv[1])
for name, card in SERVED.items():
    export(CARDS / card, out / name, cases=1, target="cpu")
texts = [f"{who} {what}." for who in WORDS[0] for what in WORDS[1]]
(out / "expected.json").write_text(
    json.dumps(dict(zip(texts, TextRuntime(out / "translator").translate(texts))))
)
