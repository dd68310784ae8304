"""Text in, text out: a `Runtime` and the tokenizer that came with the checkpoint, without transformers."""

import os

import numpy as np
from tokenizers import Tokenizer

from .runtime import Runtime


class TextRuntime:
    """An export directory with its tokenizer.json, loaded.

    Raises:
        FileNotFoundError: if the export has no tokenizer, and as `Runtime`.
    """

    def __init__(self, directory: str | os.PathLike, threads: int | None = None):
        self.runtime = Runtime(directory, threads)
        path = self.runtime.artifact.directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the checkpoint had no tokenizer, so this export takes only ids")
        self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def generate(self, texts: list[str], **options) -> list[str]:
        """One text for each of `texts`: the translation, or for a decoder the continuation. `options` as
        `Runtime.generate`.

        Raises:
            ValueError: for no texts, an empty one, and as `Runtime.generate`.
        """
        ids, mask = self.tokenize(texts)
        outputs = self.runtime.generate(ids, mask, **options)
        start = ids.shape[1] if "encoder" not in self.runtime.sessions else 1
        return self.tokenizer.decode_batch(outputs[:, start:].tolist(), skip_special_tokens=True)

    def tokenize(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask (B, S), padded on the right. A decoder's prompt gets no end token."""
        if not texts:
            raise ValueError("no texts, expected at least one")
        for index, text in enumerate(texts):
            if not text.strip():
                raise ValueError(f"text {index} of {len(texts)} is empty, expected words")
        has_encoder = "encoder" in self.runtime.sessions
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=has_encoder)]
        lengths = np.array([len(row) for row in rows])
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        ids = np.full(mask.shape, self.runtime.config["pad_token_id"] or 0)
        ids[mask == 1] = np.concatenate(rows)
        return ids, mask
