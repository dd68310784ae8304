"""Text in, text out: a `Runtime` and the tokenizer that came with the checkpoint, without transformers."""

import os
import re
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer

from .graphs import stacked
from .runtime import Runtime

# What may still change when more tokens come: a character that lacks bytes, and every run of single bytes.
LACKS_BYTES, SINGLE_BYTE = "\ufffd", re.compile(r"<0x[0-9A-F]{2}>")


class TextRuntime:
    """An export directory with its tokenizer.json, loaded; `options` as `Runtime`.

    Raises:
        FileNotFoundError: if the export has no tokenizer, and as `Runtime`.
    """

    def __init__(self, directory: str | os.PathLike, threads: int | None = None, **options):
        self.runtime = Runtime(directory, threads, **options)
        path = self.runtime.artifact.directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the checkpoint had no tokenizer, so this export takes only ids")
        self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def generate(self, texts: list[str], **options) -> list[str]:
        """One text for each of `texts`, or `num_return_sequences` of them: the translation, or for a decoder the
        continuation. `options` as `Runtime.generate`.

        Raises:
            ValueError: for no texts, an empty one, and as `Runtime.generate`.
        """
        ids, mask = self.tokenize(texts)
        outputs = self.runtime.generate(ids, mask, **options)
        start = ids.shape[1] if "encoder" not in self.runtime.sessions else 1
        return self.tokenizer.decode_batch(outputs[:, start:].tolist(), skip_special_tokens=True)

    def stream(self, text: str, **options) -> Iterator[str]:
        """Pieces of the one text that `generate` gives for `text`, each as soon as its tokens are there. `options` as
        `Runtime.stream`.

        Raises:
            ValueError: for an empty text, more than one sequence, and as `Runtime.stream`.
        """
        if options.get("num_return_sequences", 1) != 1:
            raise ValueError(f"num_return_sequences must be 1 to stream, got {options['num_return_sequences']!r}")
        return self.pieces(self.runtime.stream(*self.tokenize([text]), **{**options, "num_return_sequences": 1}))

    def pieces(self, steps: Iterator[np.ndarray]) -> Iterator[str]:
        """The text of the tokens of one row, which come in arrays of one."""
        ids, text, sent = [], "", 0  # of `text` the first `sent` characters have been given
        for [token] in steps:
            ids.append(int(token))
            before, text = text, self.tokenizer.decode(ids, skip_special_tokens=True)
            is_open = text.endswith(LACKS_BYTES) or SINGLE_BYTE.fullmatch(self.tokenizer.id_to_token(ids[-1]) or "")
            if text != before and not is_open and len(text) > sent:
                yield text[sent:]
                sent = len(text)
        if len(text) > sent:
            yield text[sent:]

    def tokenize(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask (B, S), padded on the right. A decoder's prompt gets no end token."""
        if not texts:
            raise ValueError("no texts, expected at least one")
        for index, text in enumerate(texts):
            if not text.strip():
                raise ValueError(f"text {index} of {len(texts)} is empty, expected words")
        has_encoder = "encoder" in self.runtime.sessions
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=has_encoder)]
        return stacked(rows, self.runtime.config["pad_token_id"])
