"""The tokens of a vocabulary shortlist: a model generates these only, and computes no logits of the
others."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vanilla_transformer.files import TARGET_TOKENIZER
from vanilla_transformer.training.data import read_all_lines

from ..graphs.config import Config
from ..heads import HEADS
from .checkpoint import open_tokenizer

# Settings of a model that name tokens it must be able to generate.
SPECIAL_TOKENS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)


def with_special_tokens(
    tokens: Iterable[int], config: Config, generation: dict[str, Any]
) -> list[int]:
    """Return the distinct `tokens`, sorted, with the special tokens of `generation`, the content of
    generation_config.json.

    Raises:
        ValueError: for a model that does not generate, no tokens, or one outside the vocabulary.
    """
    if not HEADS[config.architecture].generates:
        raise ValueError(
            f"shortlist is not supported by a {config.architecture}, which does not generate: "
            "expected None"
        )
    known = {int(token) for token in tokens}
    size = config.vocab_size
    if not known or min(known) < 0 or max(known) >= size:
        got = f"{min(known)} to {max(known)}" if known else "none"
        raise ValueError(
            f"the tokens of a shortlist must be in [0, {size - 1}], the vocabulary, got {got}"
        )
    for name in SPECIAL_TOKENS:
        value = generation.get(name)
        known.update([] if value is None else value if isinstance(value, list) else [value])
    return sorted(known)


def shortlist_from_text(text: str | os.PathLike, directory: Path) -> list[int]:
    """Return the sorted tokens of the lines of the file `text`, and all special tokens.

    The tokenizer is that of the checkpoint in `directory`, for target text if it has one.

    Raises:
        FileNotFoundError: if the text or the tokenizer is missing.
        ValueError: for a tokenizer that is damaged, and for a line that is not UTF-8 text or is too
            long.
    """
    has_target = (directory / TARGET_TOKENIZER).is_file()
    path = directory / (TARGET_TOKENIZER if has_target else "tokenizer.json")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing, expected the tokenizer of the shortlist {text}"
        )
    tokenizer = open_tokenizer(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special = {
        token for token, facts in tokenizer.get_added_tokens_decoder().items() if facts.special
    }
    lines = read_all_lines([os.fspath(text)], fault=None)
    return sorted(special.union(*(encoding.ids for encoding in tokenizer.encode_batch(lines))))
