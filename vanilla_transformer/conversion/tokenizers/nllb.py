"""The tokenizer of an NLLB checkpoint with nothing but a SentencePiece model.

transformers 5.23 gives such a tokenizer no languages.
"""

from pathlib import Path

from transformers import AddedToken, NllbTokenizer
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

from ...checkpoint_config import read_raw_config
from ...checkpoint_files import read_json, readers_errors

MASK = AddedToken("<mask>", lstrip=True, special=True)


def is_bare(directory: Path) -> bool:
    """Return True if `directory` has an NLLB tokenizer that lists no added tokens.

    The directory has a SentencePiece model and no tokenizer.json.
    """
    if (directory / "vocab.json").is_file():  # an M2M100 tokenizer; NLLB has the same model type
        return False
    path = directory / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    if "tokenizer_class" not in settings:
        return read_raw_config(directory)[0]["model_type"] == "m2m_100"
    is_nllb = str(settings["tokenizer_class"]).startswith("NllbTokenizer")
    return is_nllb and not settings.keys() & {
        "added_tokens_decoder",
        "additional_special_tokens",
        "extra_special_tokens",
    }


def make_tokenizer(directory: Path) -> NllbTokenizer:
    """Return the tokenizer in `directory` with the ids of languages after those of the pieces, and
    `<mask>` last."""
    with readers_errors(directory):
        tokenizer = NllbTokenizer.from_pretrained(
            directory, extra_special_tokens=[*FAIRSEQ_LANGUAGE_CODES, MASK], mask_token=None
        )
    tokenizer.mask_token = str(MASK)
    return tokenizer
