"""Incremental detokenization: the text of tokens that arrive one by one, without text that later
tokens can change."""

import re
from collections.abc import Collection
from pathlib import Path

from tokenizers import Tokenizer

from .checks import TokenizerErrors

# Later tokens can change an incomplete character and a run of single bytes.
REPLACEMENT = "\ufffd"  # decoded in place of an incomplete character
SINGLE_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
MAX_OPEN = 8  # tokens of an incomplete character; a character has at most four bytes


class Detokenizer:
    """An incremental detokenizer of one row of tokens. The joined texts equal the text that
    `tokenizer` decodes from the complete row without `special_ids`.

    Each token is decoded with the tokens of the text before only, so the work per token does not
    grow with the text."""

    def __init__(self, tokenizer: Tokenizer, special_ids: Collection[int], path: Path):
        self.tokenizer = tokenizer
        self.special_ids = special_ids
        self.errors = TokenizerErrors(path)
        self.tokens: list[int] = []
        self.num_context = 0  # the first `tokens`, whose text was returned; context of the others
        self.num_returned = 0  # number of characters of the text of `tokens` that were returned

    def add(self, token: int) -> str:
        """Add the token id `token` and return the new text. It is empty for a special token, for an
        id that the tokenizer lacks, and while later tokens can change it.

        Raises TokenizerError if the tokenizer fails.
        """
        name = self.tokenizer.id_to_token(token)
        # the model may have more tokens than the tokenizer, which leaves them out of the text
        if token in self.special_ids or name is None:
            return ""
        self.tokens.append(token)
        if SINGLE_BYTE.fullmatch(name):
            return ""
        text = self.decode(self.tokens)
        is_open = text.endswith(REPLACEMENT)
        if is_open and len(self.tokens) < self.num_context + MAX_OPEN:
            return ""
        piece = text[self.num_returned : len(text) - is_open]
        if piece:
            del self.tokens[: self.num_context]
            self.num_context = len(self.tokens)
            self.num_returned = len(self.decode(self.tokens)) - is_open
        return piece

    def end(self) -> str:
        """Return the remaining text after the last token."""
        rest = self.decode(self.tokens)[self.num_returned :] if self.tokens else ""
        self.num_returned += len(rest)
        return rest

    def decode(self, tokens: list[int]) -> str:
        with self.errors:
            return self.tokenizer.decode(tokens, skip_special_tokens=False)


class TokenNames:
    """A function from token ids to names. A name is the text that a token adds after a
    word. Special tokens and parts of characters have their names in the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, special_ids: Collection[int], path: Path):
        self.arguments = tokenizer, special_ids, path
        self.names: dict[int, str] = {}
        detokenizer = Detokenizer(*self.arguments)
        self.before = next(
            (
                id
                for id in range(tokenizer.get_vocab_size())
                if detokenizer.add(id).strip().isalnum()
            ),
            None,
        )

    def __call__(self, token: int) -> str:
        if token not in self.names:
            self.names[token] = self._name(token)
        return self.names[token]

    def _name(self, token: int) -> str:
        detokenizer = Detokenizer(*self.arguments)
        name = detokenizer.tokenizer.id_to_token(token)
        if name is None:  # the model has more tokens than the tokenizer
            return f"token_id:{token}"
        if self.before is not None:
            detokenizer.add(self.before)
        text = detokenizer.add(token)
        return name if not text or REPLACEMENT in text else text
