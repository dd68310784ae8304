"""The tokenizer of a Marian checkpoint (OPUS-MT).

source.spm or target.spm splits the text, one vocab.json has the ids.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from ...checkpoint import give_target
from ...checkpoint_files import read_json
from . import sentencepiece_model
from .sentencepiece_model import missing_notes, read_sentencepiece, read_vocabulary

MAX_LENGTH = 512  # default of `MarianTokenizer` without model_max_length
SPECIAL_TOKENS = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def make_tokenizer(directory: Path) -> tuple[PreTrainedTokenizerFast, list[str]]:
    """Return a fast tokenizer with the ids of `MarianTokenizer`, and notes for users.

    It reads the files in `directory`. It decodes as `MarianTokenizer` does, and encodes targets by
    `text_target`. The notes name pieces without an id.

    Raises:
        FileNotFoundError: if a file is missing.
        ImportError: without the packages that read SentencePiece models.
        ValueError: for damaged files, separate vocabularies, and models that are not unigram.
    """
    path = directory / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    if settings.get("separate_vocabs") or (directory / "target_vocab.json").is_file():
        raise ValueError(
            f"{directory} has separate_vocabs, one for each language, expected one vocab.json "
            f"for both"
        )
    special_tokens = {
        name: settings.get(name) or default for name, default in SPECIAL_TOKENS.items()
    }
    tokens = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in special_tokens.items()
    }
    vocabulary = read_vocabulary(directory / "vocab.json", tokens.values())
    source, missing = of_one_language(directory / "source.spm", vocabulary, **tokens)
    target, _ = of_one_language(directory / "target.spm", vocabulary, **tokens)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=source,
        model_max_length=settings.get("model_max_length") or MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=bool(settings.get("clean_up_tokenization_spaces")),
        **tokens,
    )
    give_target(tokenizer, target)
    return tokenizer, missing_notes(missing, "source.spm")


def of_one_language(
    spm: Path, vocabulary: dict[str, int], eos_token: str, unk_token: str, pad_token: str
) -> tuple[Tokenizer, list[str]]:
    special = [eos_token, unk_token, pad_token]
    # target languages, which stand at the start of a text, as `>>fra<<`
    languages = [piece for piece in vocabulary if piece.startswith(">>") and piece.endswith("<<")]
    model = read_sentencepiece(spm, ["unigram"])
    tokenizer, missing = sentencepiece_model.make_tokenizer(
        model, vocabulary, unk_token, [*special, *languages]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos_token}",
        pair=f"$A $B {eos_token}",
        special_tokens=[(eos_token, vocabulary[eos_token])],
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    # not special: decoding keeps them
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in languages])
    return tokenizer, missing
