"""Tokenizers of each kind, what all have in common, and what white space they read."""

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import tokenizers
from messages import raises
from transformers import AutoTokenizer

from vanilla_transformer.training.augment import BpeDropout
from vanilla_transformer.training.tokenizer import new_tokenizer, train_tokenizer

LINES = [
    "Two young men are outside.",
    "Zwei junge Männer sind im Freien.\n",
    '  he said:\t"no"\r\n',
    "x = f(y) # 1",
] * 3
CHARACTERS = sorted(set("".join(LINES)))
SIZES = {"bpe": 88, "byte-bpe": 290, "character": None}
ANYTHING = [
    "",
    " ",
    "   three spaces in front",
    "spaces  within\n\nand lines\r\n\tand tabs behind  \n",
    "emoji 😀👩‍👩‍👧 and 漢字, ﬁ, e\u0301 and é",
    "a , b . c ! n 't ' s",
    "\0\x7f\ufeff\U0010ffff",
]


@pytest.fixture(scope="module", params=list(SIZES))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(kind):
    return train_tokenizer(LINES, SIZES[kind], kind=kind)


@pytest.fixture(scope="module")
def of_bytes():
    return train_tokenizer(LINES, 290, kind="byte-bpe")


@pytest.fixture(scope="module")
def of_characters():
    return train_tokenizer(LINES, kind="character")


def decoded(tokenizer, text):
    return tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)


# ------------------------------------------------------------------------------------ what all have


def test_the_special_tokens_have_the_ids_of_the_configs(tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<s>", "</s>", "<unk>"]) == [0, 1, 2, 3]
    assert (
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
    ) == (0, 1, 2, 3)


def test_each_sequence_ends_with_the_end_token_and_has_no_other_special_token(tokenizer):
    first, second = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("Two men", "are")
    )
    assert min(first + second) > 3
    assert tokenizer("Two men")["input_ids"] == [*first, 2]
    assert tokenizer("Two men", "are")["input_ids"] == [*first, 2, *second, 2]
    assert list(tokenizer("Two men")) == ["input_ids", "attention_mask"]


def test_a_decoder_s_tokenizer_adds_nothing_to_a_prompt_for_any_client(kind, tmp_path):
    made = train_tokenizer(LINES, SIZES[kind], kind=kind, variant="decoder")
    first, second = (
        made(text, add_special_tokens=False)["input_ids"] for text in ("Two men", "are")
    )
    made.save_pretrained(tmp_path)
    fast, alone = (
        AutoTokenizer.from_pretrained(tmp_path),
        tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
    )
    assert (
        made("Two men")["input_ids"]
        == fast("Two men")["input_ids"]
        == alone.encode("Two men").ids
        == first
    )
    assert (
        fast("Two men", "are")["input_ids"] == alone.encode("Two men", "are").ids == first + second
    )
    assert fast.num_special_tokens_to_add() == fast.num_special_tokens_to_add(pair=True) == 0
    assert (
        fast.eos_token_id == 2
        and made.get_vocab() == train_tokenizer(LINES, SIZES[kind], kind=kind).get_vocab()
    )
    if kind == "byte-bpe":
        assert made("a man", return_offsets_mapping=True)["offset_mapping"][-1][1] == 5
        assert not any(
            "a man"[start] == " "
            for start, _ in made("a man", return_offsets_mapping=True)["offset_mapping"]
        )


def test_an_unknown_variant_is_refused():
    with raises(ValueError, seen="causal", expected=("variant", "encoder", "decoder", "seq2seq")):
        train_tokenizer(LINES, 88, variant="causal")


def test_a_saved_tokenizer_loads_in_transformers_and_alone(tokenizer, kind, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    fast, alone = (
        AutoTokenizer.from_pretrained(tmp_path),
        tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
    )
    assert fast.is_fast
    assert fast.get_vocab() == tokenizer.get_vocab()
    assert (fast.pad_token, fast.eos_token, fast.bos_token, fast.unk_token) == (
        "<pad>",
        "</s>",
        "<s>",
        "<unk>",
    )
    for text in [*LINES, *ANYTHING]:
        ids = tokenizer(text)["input_ids"]
        assert fast(text)["input_ids"] == alone.encode(text).ids == ids
        assert (
            alone.decode(ids)
            == fast.decode(ids, skip_special_tokens=True)
            == decoded(tokenizer, text)
        )


def test_rows_are_padded_on_the_right_with_a_mask(tokenizer):
    batch = tokenizer(["Two young men", "a"], padding=True)
    lengths = [len(tokenizer(text)["input_ids"]) for text in ("Two young men", "a")]
    assert batch["attention_mask"] == [
        [1] * lengths[0],
        [1] * lengths[1] + [0] * (lengths[0] - lengths[1]),
    ]
    assert batch["input_ids"][1][lengths[1] :] == [0] * (lengths[0] - lengths[1])


def test_the_default_is_pair_encoding_of_words():
    assert (
        train_tokenizer(LINES, 88).get_vocab() == train_tokenizer(LINES, 88, kind="bpe").get_vocab()
    )
    assert "\u2581men" in train_tokenizer(LINES, 88).get_vocab()


def test_an_unknown_kind_is_refused():
    with raises(
        ValueError, seen="unigram", expected=("kind", "bpe", "word", "byte-bpe", "character")
    ):
        train_tokenizer(LINES, 90, kind="unigram")


@pytest.mark.parametrize("kind", ["bpe", "word", "byte-bpe"])
def test_all_but_characters_need_a_size(kind):
    with raises(ValueError, seen=None, expected=("kind", kind, "vocab_size")):
        train_tokenizer(LINES, kind=kind)


# -------------------------------------------------------------------------------------- white space

# What Unicode says is White_Space, and the byte order mark.
SPACES = [
    *map(
        chr,
        [
            *range(9, 14),
            0x20,
            0x85,
            0xA0,
            0x1680,
            *range(0x2000, 0x200B),
            0x2028,
            0x2029,
            0x202F,
            0x205F,
            0x3000,
        ],
    )
]
SPACES += ["\ufeff"]
CLEAN = "Two young <mask> are </s> outside."
DIRTY = [
    f"{CLEAN}\r\n",
    f"\ufeff{CLEAN}",
    f" {CLEAN} ",
    CLEAN.replace(" ", "\t"),
    CLEAN.replace(" ", "\u00a0"),
    CLEAN.replace(" ", " \n\n "),
    f"\ufeff\ufeff\u3000{CLEAN.replace(' ', '  ')}\u2028",
]


def of_words(kind, lowercase=False):
    return train_tokenizer(
        LINES, {"bpe": 80, "word": 20}[kind], kind, variant="encoder", lowercase=lowercase
    )


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_white_space_between_words_is_one_space_and_none_at_the_ends_for_every_client(
    kind, lowercase, tmp_path
):
    made = of_words(kind, lowercase)
    made.save_pretrained(tmp_path)
    fast, alone = (
        AutoTokenizer.from_pretrained(tmp_path),
        tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
    )
    expected = made(CLEAN)["input_ids"]
    for text in DIRTY:
        assert (
            made(text)["input_ids"] == fast(text)["input_ids"] == alone.encode(text).ids == expected
        ), text
        if kind == "bpe":
            assert BpeDropout(made, 0.0)([text], Random(0)) == BpeDropout(made, 0.0)(
                [CLEAN], Random(0)
            )
    assert made(" \r\n\ufeff")["input_ids"] == made("")["input_ids"]


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_just_what_unicode_calls_white_space_and_the_byte_order_mark_is_that(kind):
    normalizer = new_tokenizer(kind, lowercase=False).normalizer
    others = [chr(code) for code in (0x1C, 0x200B, 0x180E, 0x2060, 0x2581, 0xFEFE)]
    assert [normalizer.normalize_str(f"a{space}b") for space in SPACES] == ["a b"] * len(SPACES)
    assert [normalizer.normalize_str(f"a{other}b") for other in others] == [
        f"a{other}b" for other in others
    ]


def test_clean_text_has_the_pieces_it_had_beside_special_tokens_too():
    made = of_words("bpe")
    pieces = made.convert_ids_to_tokens(made(CLEAN)["input_ids"])
    assert [pieces[pieces.index(token) - 1] for token in ("<mask>", "</s>")] == ["▁", "▁"]
    # Without what changes white space: the names of special tokens are then found in the text as it
    # stands.
    facts = json.loads(made.backend_tokenizer.to_str())
    facts["normalizer"]["normalizers"] = [{"type": "NFC"}]
    facts["added_tokens"] = [{**token, "normalized": False} for token in facts["added_tokens"]]
    before = tokenizers.Tokenizer.from_str(json.dumps(facts))
    for text in (
        CLEAN,
        "<mask> are",
        "are <mask>",
        "<mask>",
        "a<mask>b",
        "e\u0301</s>é",
        "Zwei junge Männer, im Freien!",
        "",
    ):
        assert made(text)["input_ids"] == before.encode(text).ids, text
        assert (
            made(text, return_offsets_mapping=True)["offset_mapping"] == before.encode(text).offsets
        ), text
    assert made(DIRTY[0])["input_ids"] != before.encode(DIRTY[0]).ids


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_offsets_are_places_in_the_text_as_it_was_given(kind):
    made = of_words(kind)
    for text in DIRTY:
        encoded = made(text, return_offsets_mapping=True)
        words = {}
        for word, (start, end) in zip(encoded.word_ids(), encoded["offset_mapping"], strict=True):
            if word is not None:
                words[word] = words.get(word, "") + text[start:end].strip("".join(SPACES))
        assert [word for word in words.values() if word] == [
            "Two",
            "young",
            "<mask>",
            "are",
            "</s>",
            "outside",
            ".",
        ], text


@pytest.mark.parametrize("kind", ["byte-bpe", "character"])
def test_kinds_of_bytes_and_characters_keep_all_white_space(kind):
    made = train_tokenizer([*LINES, *DIRTY], SIZES[kind], kind=kind)
    for text in DIRTY:
        assert made.decode(made(text, add_special_tokens=False)["input_ids"]) == text


CARDS = Path(__file__).parents[2] / "model_cards"
KINDS = {
    "vanilla-seq2seq-tiny-multi30k-en-de": ("bpe", False),
    "vanilla-seq2seq-tiny-multi30k-en-fr": ("bpe", False),
    "vanilla-encoder-tiny-sst2": ("word", True),
    "vanilla-encoder-tiny-trec": ("word", False),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_tokenizers_of_the_cards_read_white_space_as_new_ones_do(name):
    file, (kind, lowercase) = CARDS / name / "tokenizer.json", KINDS[name]
    facts = json.loads(file.read_text(encoding="utf-8"))
    assert facts["normalizer"] == json.loads(new_tokenizer(kind, lowercase).to_str())["normalizer"]
    assert {token["normalized"] for token in facts["added_tokens"]} == {kind == "bpe"}
    fast, alone = (
        AutoTokenizer.from_pretrained(file.parent),
        tokenizers.Tokenizer.from_file(str(file)),
    )
    clean = "A man is </s> running ."
    for text in [
        f"{clean}\r\n",
        f"\ufeff{clean}",
        *(clean.replace(" ", space * 2) for space in SPACES),
    ]:
        assert fast(text)["input_ids"] == alone.encode(text).ids == alone.encode(clean).ids


# -------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("text", [*LINES, *ANYTHING])
def test_every_string_comes_back_from_bytes(of_bytes, text):
    assert decoded(of_bytes, text) == text
    assert of_bytes.unk_token_id not in of_bytes(text)["input_ids"]


def test_bytes_are_merged_to_the_size_asked_for(of_bytes):
    assert len(of_bytes) == of_bytes.vocab_size == 290
    assert len(train_tokenizer(LINES, 260, kind="byte-bpe")) == 260
    assert len(of_bytes("Männer")["input_ids"]) < len("Männer".encode()) + 1
    assert (
        len(train_tokenizer(LINES, 260, kind="byte-bpe")("Männer")["input_ids"])
        == len("Männer".encode()) + 1
    )


@pytest.mark.parametrize("vocab_size, remedy", [(259, "more"), (5000, "fewer")])
def test_a_size_that_bytes_cannot_give_is_refused_with_both_sizes(vocab_size, remedy):
    with raises(ValueError, expected=(vocab_size, remedy)):
        train_tokenizer(LINES, vocab_size, kind="byte-bpe")


def test_the_offsets_of_a_word_of_bytes_leave_out_its_space(of_bytes):
    text = "young men are"
    offsets = of_bytes(text, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    assert not any(text[start:end].startswith(" ") for start, end in offsets)
    assert "".join(text[start:end] for start, end in offsets) == "youngmenare"


# --------------------------------------------------------------------------------------- characters


@pytest.mark.parametrize("text", [*LINES, "\n\n  \t", "Männer\r\n are (no) # f(x)", "", "   "])
def test_every_string_of_characters_that_were_seen_comes_back(of_characters, text):
    assert decoded(of_characters, text) == text
    ids = of_characters(text)["input_ids"]
    assert len(ids) == len(text) + 1
    assert of_characters.unk_token_id not in ids


def test_the_vocabulary_is_the_characters_of_the_text(of_characters):
    assert sorted(set(of_characters.get_vocab()) - {"<pad>", "<s>", "</s>", "<unk>"}) == CHARACTERS
    assert len(of_characters) == of_characters.vocab_size == len(CHARACTERS) + 4


def test_other_characters_are_unknown(of_characters):
    assert [index == 3 for index in of_characters("Q漢a😀\u0301")["input_ids"]] == [
        True,
        True,
        False,
        True,
        True,
        False,
    ]


def test_the_number_of_characters_may_be_given():
    assert len(train_tokenizer(LINES, len(CHARACTERS) + 4, kind="character")) == len(CHARACTERS) + 4


@pytest.mark.parametrize("difference, remedy", [(-1, "more"), (1, "fewer")])
def test_another_number_of_characters_is_refused_with_both(difference, remedy):
    wrong = len(CHARACTERS) + 4 + difference
    with raises(ValueError, seen=len(CHARACTERS) + 4, expected=(wrong, remedy)):
        train_tokenizer(LINES, wrong, kind="character")


def test_thousands_of_characters_are_all_kept():
    text = "".join(chr(0x4E00 + index) for index in range(20000)) + "".join(
        chr(0xAC00 + index) for index in range(11000)
    )
    assert len(train_tokenizer([text], kind="character")) == 31004


# -------------------------------------------------------------------------------------- bpe-dropout


@pytest.fixture(scope="module")
def of_pairs():
    return train_tokenizer(LINES, SIZES["bpe"])


def test_without_dropout_the_pieces_are_those_of_the_tokenizer(of_pairs):
    for lines in (LINES, ANYTHING):
        assert (
            BpeDropout(of_pairs, 0.0)(lines, Random(0))["input_ids"] == of_pairs(lines)["input_ids"]
        )
    encoder = train_tokenizer(LINES, SIZES["bpe"] + 1, variant="encoder")
    assert BpeDropout(encoder, 0.0)(LINES, Random(0))["input_ids"] == encoder(LINES)["input_ids"]


def test_pieces_are_as_likely_as_in_the_tokenizers_library(of_pairs):
    count, random, word = 4000, Random(0), "outside"
    theirs = tokenizers.Tokenizer.from_str(of_pairs.backend_tokenizer.to_str())
    theirs.model.dropout = 0.3
    expected = Counter(tuple(theirs.encode(word).ids) for _ in range(count))
    pieces = BpeDropout(of_pairs, 0.3)
    actual = Counter(tuple(pieces([word], random)["input_ids"][0]) for _ in range(count))
    assert len(expected) > 5
    for ids in expected | actual:
        assert actual[ids] == pytest.approx(
            expected[ids], abs=5 * (1 + max(actual[ids], expected[ids])) ** 0.5
        )
        assert of_pairs.decode(ids, skip_special_tokens=True) == word


@pytest.mark.parametrize("kind", ["byte-bpe", "character"])
def test_other_kinds_have_no_dropout(kind):
    with raises(ValueError, seen="tokenizer.bpe_dropout", expected=(0.1, "kind", "bpe")):
        BpeDropout(train_tokenizer(LINES, SIZES[kind], kind=kind), 0.1)


def test_a_dropout_that_is_no_probability_is_refused(of_pairs):
    with raises(ValueError, seen=("tokenizer.bpe_dropout", 1.5), expected=(0, 1)):
        BpeDropout(of_pairs, 1.5)
