"""The text of tokens: of tokens that arrive one by one, without text that later tokens can change;
and the spaces that transformers removes if `clean_up_tokenization_spaces` is set."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

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


# -------------------------------------------------------------------------------------- the spaces

# which lose the spaces around them, in the order of transformers, because later ones apply to the
# result of earlier ones
SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
# end of a text that may become the start of a replacement when more text follows; mostly empty
OPEN_END = re.compile(r"(?:(?: n| )? ')*(?: n| )?(?: (?:n'?|'?[vr]?))?$")
# tokenizers that transformers implements in Python; all others keep the spaces of BPE
PYTHON_TOKENIZERS = {"M2M100Tokenizer", "ByT5Tokenizer"}
BPE_TOO = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


def cleans_up(config: dict[str, Any], model_type: str) -> bool:
    """Return True if transformers cleans up spaces. `config` is tokenizer_config.json, and
    `model_type` is the type of the model in tokenizer.json."""
    keeps_bpe = (
        model_type == "BPE"
        and not config.get(BPE_TOO)
        and config.get("tokenizer_class") not in PYTHON_TOKENIZERS
    )
    return bool(config.get("clean_up_tokenization_spaces")) and not keeps_bpe


def clean_up(text: str) -> str:
    """Return `text` without the spaces that transformers removes, such as those before punctuation
    marks."""
    for spaced in SPACED:
        text = text.replace(spaced, spaced.strip())
    return text


class CleaningDetokenizer:
    """An incremental detokenizer for a tokenizer that cleans up spaces. The joined texts equal
    `clean_up` of the decoded row."""

    def __init__(self, detokenizer: Detokenizer):
        self.detokenizer = detokenizer
        self.held = ""

    def add(self, token: int) -> str:
        """Add the token id `token` and return the new text. It is empty while later tokens can
        change it."""
        self.held += self.detokenizer.add(token)
        open_end = OPEN_END.search(self.held)
        settled = self.held[: open_end.start()] if open_end else self.held
        self.held = self.held[len(settled) :]
        return clean_up(settled)

    def end(self) -> str:
        """Return the rest of the text after the last token."""
        rest = clean_up(self.held + self.detokenizer.end())
        self.held = ""
        return rest
