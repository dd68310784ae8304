"""Tests of incremental detokenization: the joined pieces equal the decoded sequence."""

import functools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import raises
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vanilla_transformer_export.text.detokenizer import (
    MAX_OPEN,
    CleaningDetokenizer,
    Detokenizer,
    clean_up,
)


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["große Vögel 日本語 🙂"], trainer)
    return tokenizer


def byte_level_without_invalid_bytes():
    """Return a tokenizer like ByT5's."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\ufffd", "")])
    return tokenizer


def byte_fallback():
    """Return a tokenizer like Llama's."""
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefgh"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def sentence_pieces():
    letters = ((f"{space}{c}", -2) for space in ("", "▁") for c in "abcdé")
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0), ("▁", -1), ("▁▁▁", -1), *letters], 0))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def stripped_sentence_pieces():
    """Return a tokenizer like Marian's."""
    tokenizer = sentence_pieces()
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Replace(Regex(r"^\s+|\s+$"), "")]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def word_pieces():
    """Return a tokenizer like BERT's."""
    tokens = ["[UNK]", "[SEP]", "do", "n't", ".", "##s", "##", "'", "é", "##é"]
    tokenizer = Tokenizer(
        models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def words_with_end_suffix():
    """Return a tokenizer like the first GPT's."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b</w>": 1, "é</w>": 2, "</s>": 3, "ab</w>": 4}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def words():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2, "b": 3}, "<unk>"))
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


KINDS = [
    byte_level, byte_level_without_invalid_bytes, byte_fallback, sentence_pieces,
    stripped_sentence_pieces, word_pieces, words_with_end_suffix, words,
]  # fmt: skip
all_kinds = pytest.mark.parametrize("made", KINDS, ids=lambda made: made.__name__)
cached_tokenizer = functools.cache(lambda made: made())


def make_detokenizer(tokenizer):
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return Detokenizer(tokenizer, special, Path("tokenizer.json"))


def stream_pieces(tokenizer, ids):
    detokenizer = make_detokenizer(tokenizer)
    return [*map(detokenizer.add, ids), detokenizer.end()]


@all_kinds
@given(data=st.data())
def test_joined_pieces_equal_decoded_text_without_split_characters(made, data):
    tokenizer = cached_tokenizer(made)
    size = tokenizer.get_vocab_size()
    # includes the id after the vocabulary, which has no text
    token_ids = st.lists(st.integers(0, size), max_size=30)
    ids = data.draw(
        token_ids
        | st.text("große Vögel 日本語 🙂 abé.").map(lambda text: tokenizer.encode(text).ids)
    )
    result = [piece for piece in stream_pieces(tokenizer, ids) if piece]
    assert "".join(result) == tokenizer.decode(ids, skip_special_tokens=True)
    if len(ids) < MAX_OPEN:
        assert not any(piece.endswith("\ufffd") for piece in result[:-1])


def test_id_that_tokenizer_lacks_does_not_end_a_run_of_bytes():
    tokenizer = byte_fallback()
    lacking = tokenizer.get_vocab_size()
    zero, last = map(tokenizer.token_to_id, ("<0x00>", "<0x80>"))
    assert tokenizer.decode([zero, lacking, last]) == "\ufffd\ufffd"
    assert "".join(stream_pieces(tokenizer, [zero, lacking, last])) == "\ufffd\ufffd"


class TextDetokenizer:
    """A detokenizer whose tokens are pieces of text."""

    def add(self, text):
        return text

    def end(self):
        return ""


@given(st.lists(st.sampled_from([*" 'nmtsvera.,?!", " '", " n", " ' ", "do", "  "]), max_size=16))
def test_cleaned_pieces_match_transformers_clean_up(texts):
    expected = PreTrainedTokenizerFast.clean_up_tokenization(None, "".join(texts))
    detokenizer = CleaningDetokenizer(TextDetokenizer())
    assert (
        "".join([*map(detokenizer.add, texts), detokenizer.end()])
        == clean_up("".join(texts))
        == expected
    )


def test_cleaned_piece_is_held_back_only_while_it_may_change():
    detokenizer = CleaningDetokenizer(TextDetokenizer())
    result = [
        detokenizer.add(text)
        for text in ["i", " do", " n", " '", " t", " know", " v", "ery", " '", "s", " it", " "]
    ]
    assert result == ["i", " do", "", "", "n't", " know", "", " very", "", "'s", " it", ""]
    assert [detokenizer.end(), detokenizer.end()] == [" ", ""]


@all_kinds
def test_text_is_returned_with_completing_token(made):
    tokenizer = cached_tokenizer(made)
    text = "ab 日本" if made is byte_level else "a b a b"
    ids = [id for id in tokenizer.encode(text, add_special_tokens=False).ids if id] or [2, 2, 4]
    decoded_text = tokenizer.decode(ids)
    detokenizer = make_detokenizer(tokenizer)
    assert (
        "".join(map(detokenizer.add, ids)) == decoded_text
        and detokenizer.end() == "" == detokenizer.end()
    )


class CountingTokenizer:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0
        self.id_to_token, self.get_added_tokens_decoder = (
            tokenizer.id_to_token,
            tokenizer.get_added_tokens_decoder,
        )

    def decode(self, ids, **options):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


@pytest.mark.parametrize(
    "made, ids",
    [
        (byte_level, "große Vögel 日本語 🙂"),
        # a byte that is not part of a character
        (byte_level, [byte_level().token_to_id("Ģ")]),
        (byte_level, [0]),  # a special token
        (byte_fallback, [5]),
        (byte_fallback, "ab c"),
        (sentence_pieces, "a b"),
    ],
)
def test_decoding_cost_per_token_is_constant(made, ids):
    tokenizer = cached_tokenizer(made)
    ids = tokenizer.encode(ids).ids if isinstance(ids, str) else ids
    counts = []
    for times in (100, 1000):
        counting = CountingTokenizer(tokenizer)
        detokenizer = make_detokenizer(counting)
        for token in times * ids:
            detokenizer.add(token)
        counts.append(counting.decoded / times)
    assert counts[1] <= 1.1 * counts[0] <= 20 * len(ids)


def test_failing_tokenizer_raises_and_names_file():
    tokenizer = words()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("a", ""), decoders.Strip(" ", 0, 1)])
    with raises(ValueError, seen="tokenizer.json"):
        make_detokenizer(tokenizer).add(1)  # Rust panics if there is nothing to strip
