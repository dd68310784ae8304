"""The languages of an export's tokenizer and the positions of their tokens. The runtime needs both
to choose other languages."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from ..shared.files import read_object
from .repository_files import single_template


class Names(NamedTuple):
    """The convention by which a class of tokenizers names its languages. `token` matches the tokens
    and their names. With `is_start` the target language is the start token of the decoder,
    otherwise the first token after it."""

    token: re.Pattern
    is_start: bool = False


# NLLB Team et al. 2022; Fan et al. 2020; Liu et al. 2020; Tang et al. 2020.
CLASSES = {
    "NllbTokenizer": Names(re.compile(r"([a-z]{3}_[A-Z][a-z]{3})")),
    "M2M100Tokenizer": Names(re.compile(r"__([a-z]+)__")),
    "MBartTokenizer": Names(re.compile(r"([a-z]{2}_[A-Z]{2})"), is_start=True),
    "MBart50Tokenizer": Names(re.compile(r"([a-z]{2}_[A-Z]{2})")),
}
OF_MARIAN = re.compile(r">>[^<>]*<<")


def read_languages(directory: Path, start: int | None) -> dict[str, Any] | None:
    """Return the languages for the manifest, from the tokenizer's files in the export `directory`,
    or None without any.

    If the language is a word of the text, as in Marian, the result has these `words`. Otherwise it
    has `tokens` (ids by language), `source` (the language of tokenizer.json), `before` and `after`
    (ids around a text, None for the language), and `target` (the generation option that selects the
    target language). It is None if tokenizer.json does not add the token of exactly one language.
    `start` is the `decoder_start_token_id` of the model.
    """
    content = read_object(directory / "tokenizer.json")
    added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    words = [token for token in added if OF_MARIAN.fullmatch(token)]
    if words:
        return {"words": words}
    name = str(read_object(directory / "tokenizer_config.json").get("tokenizer_class"))
    names = CLASSES.get(name.removesuffix("Fast"))  # transformers 4 had two classes of most
    matches = [(names.token.fullmatch(token), id) for token, id in added.items()] if names else []
    tokens = {match[1]: id for match, id in matches if match}
    template = [part.get("SpecialToken", {}).get("id") for part in single_template(content)]
    ids = [added.get(token) for token in template]
    sources = [name for name, id in tokens.items() if id in ids]
    if names is None or len(sources) != 1:
        return None
    text_position = template.index(None)  # position of the text
    around = [None if id == tokens[sources[0]] else id for id in ids]
    is_start = names.is_start and (start is None or start in tokens.values())
    return {
        "tokens": tokens,
        "source": sources[0],
        "before": around[:text_position],
        "after": around[text_position + 1 :],
        "target": "decoder_start_token_id" if is_start else "forced_bos_token_id",
    }
