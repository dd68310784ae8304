"""The tokenizer of M2M100: a SentencePiece model splits text, vocab.json has the ids.

The ids of languages follow those of the pieces.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerBase

from .sentencepiece_model import (
    make_tokenizer,
    missing_notes,
    read_sentencepiece,
    read_vocabulary,
)

MODEL = "sentencepiece.bpe.model"


def make_backend(theirs: PreTrainedTokenizerBase, directory: Path) -> tuple[Tokenizer, list[str]]:
    """Return a tokenizer of the `tokenizers` library with the ids of `theirs`, and notes for users.

    `theirs` is an `M2M100Tokenizer` read from `directory`; its `src_lang` is the language of the
    texts. The notes name pieces without an id.

    Raises:
        FileNotFoundError: if a file is missing.
        ImportError: without the packages that read SentencePiece models.
        ValueError: for a damaged model or vocabulary, and a model with other rules.
    """
    special = [token for token in theirs.all_special_tokens if token not in theirs.lang_token_to_id]
    vocabulary = read_vocabulary(directory / "vocab.json", special)
    model = read_sentencepiece(directory / MODEL)
    tokenizer, missing = make_tokenizer(model, vocabulary, theirs.unk_token, special)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    for token in theirs.lang_token_to_id:  # in the order of their ids
        is_special = token in theirs.all_special_tokens
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        add([AddedToken(token, normalized=False, special=is_special)])
    language, end = theirs.get_lang_token(theirs.src_lang), theirs.eos_token
    ids = {token: theirs.convert_tokens_to_ids(token) for token in (language, end)}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{language} $A {end}",
        pair=f"{language} $A $B {end}",
        special_tokens=list(ids.items()),
    )
    return tokenizer, missing_notes(missing, MODEL)
