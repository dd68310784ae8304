"""The spaces that transformers removes from decoded text if `clean_up_tokenization_spaces` is
set."""

import re
from typing import Any

from .detokenizer import Detokenizer

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
