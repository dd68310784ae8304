"""Models of sentence-transformers over one encoder."""

import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Transformer,
)

TEXTS = [
    "the old man sees a red house",
    "two dogs",
    "a woman reads the book . a woman reads the book . two dogs",
]
PROMPTS = {"query": "the book : ", "document": ""}
LONGEST = 12  # tokens: the last text has more


def embedder(model_files, pooling="mean", rest=("dense", "normalize"), **settings):
    """Return a model of sentence-transformers over the encoder of the fixture `base`."""
    directory, width = model_files
    transformers.set_seed(1)
    modules = [
        Transformer(directory, max_seq_length=LONGEST),
        Pooling(width, pooling_mode=pooling, **settings),
    ]
    modules += {"dense": [Dense(width, 8)], "normalize": []}[
        "dense" if "dense" in rest else "normalize"
    ]
    modules += [Normalize()] if "normalize" in rest else []
    return SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu")
