"""The text of tokens that come one by one, as far as those that come later cannot change it."""

import re
from collections.abc import Collection
from pathlib import Path

from tokenizers import Tokenizer

from .tasks.rows import tokenizer_errors

# What may still change when more tokens come: a character that lacks bytes, and every run of single
# bytes.
REPLACEMENT = "\ufffd"
SINGLE_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
MAX_OPEN = 8  # tokens that lack bytes together; a character has four


class Detokenizer:
    """An incremental detokenizer of one row of tokens. Joined, its pieces are what `tokenizer`
    decodes the whole row to without its `special_ids`. Each token is decoded only with the tokens
    of the piece before, so the work per token does not grow with the text."""

    def __init__(self, tokenizer: Tokenizer, special_ids: Collection[int], path: Path):
        self.tokenizer = tokenizer
        self.special_ids = special_ids
        self.path = path  # path of the tokenizer, for errors
        self.tokens: list[int] = []
        self.known = 0  # number of `tokens` at the start that belong to the piece before
        self.num_returned = 0  # number of characters of their text that were returned

    def add(self, token: int) -> str:
        """Add `token` and return the new text, empty while the text is not certain. Raises
        ValueError if the tokenizer fails."""
        if token in self.special_ids:
            return ""
        self.tokens.append(token)
        if SINGLE_BYTE.fullmatch(self.tokenizer.id_to_token(token) or ""):
            return ""
        text = self.decode(self.tokens)
        is_open = text.endswith(REPLACEMENT)
        if is_open and len(self.tokens) < self.known + MAX_OPEN:
            return ""
        piece = text[self.num_returned : len(text) - is_open]
        if piece:
            del self.tokens[: self.known]
            self.known = len(self.tokens)
            self.num_returned = len(self.decode(self.tokens)) - is_open
        return piece

    def end(self) -> str:
        """Return the text that is left after the last token."""
        rest = self.decode(self.tokens)[self.num_returned :] if self.tokens else ""
        self.num_returned += len(rest)
        return rest

    def decode(self, tokens: list[int]) -> str:
        with tokenizer_errors(self.path):
            return self.tokenizer.decode(tokens, skip_special_tokens=True)


class TokenNames:
    """A table of the names of single tokens. A name is the token's text behind another token. A
    token without a complete text of its own, such as a special token or a part of a character, has
    its name in the vocabulary."""

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
