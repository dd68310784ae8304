"""The settings of tokenizer_config.json, which are not in tokenizer.json."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, normalizers

from ..inference.export_info import TOKENIZERS, ExportInfo
from .checks import TokenizerErrors
from .detokenizer import cleans_up

NO_LIMIT = 10**9  # tokens; transformers writes 10**30 for a tokenizer without a limit
# Special tokens of the tokenizer classes, for an old tokenizer_config.json without special tokens.
CONVENTIONS = {
    "mask_token": ("[MASK]", "<mask>"),
    "cls_token": ("[CLS]", "<s>"),
    "eos_token": ("</s>",),
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
}


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings that tokenizer_config.json adds to tokenizer.json, as transformers reads them.
    `longest` is the maximum number of tokens if a task truncates texts. `special_tokens` are ids by
    name. `has_types` is True if the tokens of a pair have token types."""

    longest: int | None
    special_tokens: dict[str, int | None]
    has_types: bool
    cleans_up: bool
    truncation_side: str
    padding_side: str


def read_tokenizer(info: ExportInfo, name: str = TOKENIZERS[0]) -> Tokenizer | None:
    """Return the tokenizer in the file `name` of an export, without padding and truncation, or None
    without the file. It lowercases if `do_lower_case` of sentence-transformers is set.

    Raises TokenizerError if it is damaged, see also `ExportInfo.read`.
    """
    if (content := info.read(name)) is None:
        return None
    with TokenizerErrors(info.directory / name):
        tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if info.sentence_settings.do_lower_case:
        lowercase(tokenizer)
    return tokenizer


def lowercase(tokenizer: Tokenizer) -> None:
    """Let `tokenizer` lowercase texts before its normalizer, unless that has a Lowercase, as
    sentence-transformers does. Added tokens in a text, such as "[MASK]", stay as they are."""
    current = tokenizer.normalizer
    steps: Any = current if isinstance(current, normalizers.Sequence) else [current]
    if not any(isinstance(step, normalizers.Lowercase) for step in steps):
        first = normalizers.Lowercase()
        tokenizer.normalizer = normalizers.Sequence([first, *filter(None, steps)])


def read_tokenizer_settings(info: ExportInfo, tokenizer: Tokenizer) -> TokenizerSettings:
    """Return the settings of `tokenizer`, that of the export `info`."""
    config = info.tokenizer_config
    is_silent = not any(name.endswith("_token") for name in config)
    tokens = {
        name: token_id(tokenizer, config.get(name), names if is_silent else ())
        for name, names in CONVENTIONS.items()
    }
    types = config.get("model_input_names", ["token_type_ids"])
    return TokenizerSettings(
        read_longest(config),
        tokens,
        (info.config.get("type_vocab_size") or 0) > 1 and "token_type_ids" in types,
        cleans_up(config, type(tokenizer.model).__name__),
        config.get("truncation_side", "right"),
        config.get("padding_side", "right"),
    )


def read_longest(config: dict) -> int | None:
    """Return the maximum number of tokens in `config`, that of a tokenizer, or None without one."""
    longest = config.get("model_max_length")
    if not isinstance(longest, int | float) or isinstance(longest, bool):
        return None
    return int(longest) if 0 < longest < NO_LIMIT else None


def token_id(tokenizer: Tokenizer, token: Any, otherwise: Iterable[str]) -> int | None:
    """Return the id of `token`, a string or a dict with the key "content".

    If it is neither, return the id of the first of the tokens `otherwise` that exists. Return None
    if there is none.
    """
    content = token.get("content") if isinstance(token, dict) else token
    names = [content] if isinstance(content, str) else otherwise
    ids = map(tokenizer.token_to_id, names)
    return next((id for id in ids if id is not None), None)
