"""Tokenizers of one vocabulary, trained on text with the `tokenizers` library."""

from collections.abc import Iterable
from typing import Literal

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

# ids 0 to 3
SPECIAL_TOKENS = {
    "pad_token": "<pad>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}
ENCODER_TOKENS = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
# Unicode's and byte order marks; JavaScript's \s has no U+0085, Oniguruma's no U+FEFF
WHITE_SPACE = r"[\s\u0085\uFEFF]+"


def train_tokenizer(
    lines: Iterable[str],
    vocab_size: int | None = None,
    kind: Literal["bpe", "word", "byte-bpe", "character"] = "bpe",
    variant: Literal["encoder", "decoder", "seq2seq"] = "seq2seq",
    token_types: bool = False,
    lowercase: bool = False,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer with one vocabulary for all `lines`, source and target together.

    Args:
        lines: the text.
        vocab_size: maximum number of entries of the vocabulary, with the four special tokens. A
            short text gives fewer. With kind `"character"` it may be `None`.
        kind: `"bpe"` is byte-pair encoding (section 5.1 of the paper, Sennrich et al. 2016) of
            words that keep the space in front of them as "▁"; punctuation is always its own token.
            Decoding gives back the text, in composed Unicode characters and without a space in
            front. A character that `lines` do not have is `<unk>`. `"word"` has the most frequent
            words and punctuation marks, without the spaces; any other is `<unk>`. `"byte-bpe"` is
            byte-pair encoding of UTF-8 bytes (Radford et al. 2019): nothing is `<unk>`, and
            decoding gives back every string exactly. `"character"` has one entry for each character
            of `lines`, spaces and line breaks too; decoding gives back exactly every string of
            those, and any other character is `<unk>`. `"bpe"` and `"word"` read each run of white
            space as one space, and none at the ends of a text. The names of the special tokens
            stand for these tokens wherever they are in a text, for all kinds.
        variant: variant of the model. With `"seq2seq"` an encoded sequence ends with `</s>`. With
            `"encoder"` it also begins with `<s>`, and the vocabulary has `<mask>`. With `"decoder"`
            nothing is added, because a decoder would continue after it.
        token_types: whether the tokenizer returns `token_type_ids`, 1 for the second of two
            sequences.
        lowercase: whether text is lowercased, for `"bpe"` and `"word"`. Decoded text then has no
            capitals.

    Raises:
        ValueError: for an unknown `variant` or `kind`, for `lowercase` with kinds of bytes or
            characters, if `vocab_size` is missing, and if the characters of `lines` need more than
            `vocab_size` entries.
    """
    if variant not in ("encoder", "decoder", "seq2seq"):
        raise ValueError(f'variant must be "encoder", "decoder" or "seq2seq", got {variant!r}')
    if kind not in ("bpe", "word", "byte-bpe", "character"):
        raise ValueError(f'kind must be "bpe", "word", "byte-bpe" or "character", got {kind!r}')
    if vocab_size is None and kind != "character":
        raise ValueError(f"a tokenizer of kind {kind!r} needs a vocab_size, got None")
    if lowercase and kind not in ("bpe", "word"):
        raise ValueError(f"kind is {kind!r}, expected 'bpe' or 'word' with lowercase=True")
    special = SPECIAL_TOKENS | (ENCODER_TOKENS if variant == "encoder" else {})
    tokenizer = new_tokenizer(kind, lowercase)
    trainer = tokenizer.model.get_trainer()
    # 2**21: more than Unicode has
    trainer.vocab_size = 2**21 if kind == "character" else vocab_size
    # Spaces are in the subwords of "bpe". They are cut from the ends of a whole text, not of its
    # parts around special tokens.
    names = dict.fromkeys(special.values())
    trainer.special_tokens = [
        AddedToken(name, special=True, normalized=kind == "bpe") for name in names
    ]
    trainer.show_progress = False
    if kind == "byte-bpe":
        trainer.initial_alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(lines, trainer)
    size = tokenizer.get_vocab_size()
    if vocab_size is not None and size > vocab_size:
        raise ValueError(
            f"the characters of the text need a vocabulary of {size} entries, expected at most "
            f"{vocab_size}: set a larger tokenizer.vocab_size"
        )
    added = template(tokenizer, variant, token_types)
    # A word of bytes includes its space; the offsets are those of the word alone.
    tokenizer.post_processor = (
        processors.Sequence([processors.ByteLevel(), added]) if kind == "byte-bpe" else added
    )
    inputs = ["input_ids", *(["token_type_ids"] if token_types else []), "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **special)


def template(
    tokenizer: Tokenizer, variant: str, token_types: bool
) -> processors.TemplateProcessing:
    """Return the post-processor that puts special tokens around one sequence and around a pair.

    `variant` is "encoder", "decoder" or "seq2seq". With `token_types` the second sequence is of
    type 1.
    """
    bos, eos = SPECIAL_TOKENS["bos_token"], SPECIAL_TOKENS["eos_token"]
    first = {"encoder": f"{bos} $A {eos}", "decoder": "$A", "seq2seq": f"$A {eos}"}[variant]
    type_id = int(token_types)
    second = f"$B:{type_id}" if variant == "decoder" else f"$B:{type_id} {eos}:{type_id}"
    ids = [(token, tokenizer.token_to_id(token)) for token in (bos, eos)]
    return processors.TemplateProcessing(single=first, pair=f"{first} {second}", special_tokens=ids)


def new_tokenizer(kind: str, lowercase: bool) -> Tokenizer:
    """Return a tokenizer of `kind` with an empty vocabulary, which splits text and joins its tokens
    again.

    The kinds are "bpe", "word", "byte-bpe" and "character". With `lowercase` the kinds "bpe" and
    "word" lowercase text.
    """
    unk = SPECIAL_TOKENS["unk_token"]
    if kind == "character":
        tokenizer = Tokenizer(models.WordLevel(unk_token=unk))
        # "." would not match line breaks
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        return tokenizer
    if kind == "byte-bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token=unk))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()]
        )
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokenizer = Tokenizer(models.WordLevel(unk_token=unk))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    spaces = [normalizers.Replace(Regex(WHITE_SPACE), " "), normalizers.Strip()]
    letters = [normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else [])]
    tokenizer.normalizer = normalizers.Sequence(spaces + letters)
    return tokenizer
