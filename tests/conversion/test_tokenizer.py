"""Training of tokenizers: rules for all kinds, white space, bytes, characters and BPE dropout."""

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
def byte_tokenizer():
    return train_tokenizer(LINES, 290, kind="byte-bpe")


@pytest.fixture(scope="module")
def character_tokenizer():
    return train_tokenizer(LINES, kind="character")


def round_trip(tokenizer, text):
    return tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)


# ---------------------------------------------------------------------------------------- all kinds


def test_special_tokens_have_config_ids(tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<s>", "</s>", "<unk>"]) == [0, 1, 2, 3]
    assert (
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
    ) == (0, 1, 2, 3)


def test_sequences_end_with_eos_and_have_no_other_special_token(tokenizer):
    first, second = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("Two men", "are")
    )
    assert min(first + second) > 3
    assert tokenizer("Two men")["input_ids"] == [*first, 2]
    assert tokenizer("Two men", "are")["input_ids"] == [*first, 2, *second, 2]
    assert list(tokenizer("Two men")) == ["input_ids", "attention_mask"]


def test_decoder_tokenizer_adds_no_special_tokens(kind, tmp_path):
    trained = train_tokenizer(LINES, SIZES[kind], kind=kind, variant="decoder")
    first, second = (
        trained(text, add_special_tokens=False)["input_ids"] for text in ("Two men", "are")
    )
    trained.save_pretrained(tmp_path)
    fast, alone = (
        AutoTokenizer.from_pretrained(tmp_path),
        tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
    )
    assert (
        trained("Two men")["input_ids"]
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
        and trained.get_vocab() == train_tokenizer(LINES, SIZES[kind], kind=kind).get_vocab()
    )
    if kind == "byte-bpe":
        assert trained("a man", return_offsets_mapping=True)["offset_mapping"][-1][1] == 5
        assert not any(
            "a man"[start] == " "
            for start, _ in trained("a man", return_offsets_mapping=True)["offset_mapping"]
        )


def test_unknown_variant_is_rejected():
    with raises(ValueError, seen="causal", expected=("variant", "encoder", "decoder", "seq2seq")):
        train_tokenizer(LINES, 88, variant="causal")


def test_saved_tokenizer_loads_in_transformers_and_tokenizers(tokenizer, kind, tmp_path):
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
            == round_trip(tokenizer, text)
        )


def test_rows_are_padded_on_the_right_with_a_mask(tokenizer):
    batch = tokenizer(["Two young men", "a"], padding=True)
    lengths = [len(tokenizer(text)["input_ids"]) for text in ("Two young men", "a")]
    assert batch["attention_mask"] == [
        [1] * lengths[0],
        [1] * lengths[1] + [0] * (lengths[0] - lengths[1]),
    ]
    assert batch["input_ids"][1][lengths[1] :] == [0] * (lengths[0] - lengths[1])


def test_default_kind_is_bpe():
    assert (
        train_tokenizer(LINES, 88).get_vocab() == train_tokenizer(LINES, 88, kind="bpe").get_vocab()
    )
    assert "\u2581men" in train_tokenizer(LINES, 88).get_vocab()


def test_unknown_kind_is_rejected():
    with raises(
        ValueError, seen="unigram", expected=("kind", "bpe", "word", "byte-bpe", "character")
    ):
        train_tokenizer(LINES, 90, kind="unigram")


@pytest.mark.parametrize("kind", ["bpe", "word", "byte-bpe"])
def test_missing_vocab_size_is_rejected(kind):
    with raises(ValueError, seen=None, expected=("kind", kind, "vocab_size")):
        train_tokenizer(LINES, kind=kind)


# -------------------------------------------------------------------------------------- white space

# Unicode White_Space characters, and the byte order mark.
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


def train_encoder_tokenizer(kind, lowercase=False):
    return train_tokenizer(
        LINES, {"bpe": 80, "word": 20}[kind], kind, variant="encoder", lowercase=lowercase
    )


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_white_space_is_stripped_and_collapsed(kind, lowercase, tmp_path):
    trained = train_encoder_tokenizer(kind, lowercase)
    trained.save_pretrained(tmp_path)
    fast, alone = (
        AutoTokenizer.from_pretrained(tmp_path),
        tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
    )
    expected = trained(CLEAN)["input_ids"]
    for text in DIRTY:
        assert (
            trained(text)["input_ids"]
            == fast(text)["input_ids"]
            == alone.encode(text).ids
            == expected
        ), text
        if kind == "bpe":
            assert BpeDropout(trained, 0.0)([text], Random(0)) == BpeDropout(trained, 0.0)(
                [CLEAN], Random(0)
            )
    assert trained(" \r\n\ufeff")["input_ids"] == trained("")["input_ids"]


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_only_unicode_white_space_and_byte_order_mark_become_spaces(kind):
    normalizer = new_tokenizer(kind, lowercase=False).normalizer
    others = [chr(code) for code in (0x1C, 0x200B, 0x180E, 0x2060, 0x2581, 0xFEFE)]
    assert [normalizer.normalize_str(f"a{space}b") for space in SPACES] == ["a b"] * len(SPACES)
    assert [normalizer.normalize_str(f"a{other}b") for other in others] == [
        f"a{other}b" for other in others
    ]


def test_white_space_normalizer_keeps_ids_and_offsets_of_clean_text():
    trained = train_encoder_tokenizer("bpe")
    pieces = trained.convert_ids_to_tokens(trained(CLEAN)["input_ids"])
    assert [pieces[pieces.index(token) - 1] for token in ("<mask>", "</s>")] == ["▁", "▁"]
    # Without the white space normalizer, special tokens are matched in the original text.
    facts = json.loads(trained.backend_tokenizer.to_str())
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
        assert trained(text)["input_ids"] == before.encode(text).ids, text
        assert (
            trained(text, return_offsets_mapping=True)["offset_mapping"]
            == before.encode(text).offsets
        ), text
    assert trained(DIRTY[0])["input_ids"] != before.encode(DIRTY[0]).ids


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_offsets_refer_to_original_text(kind):
    trained = train_encoder_tokenizer(kind)
    for text in DIRTY:
        encoded = trained(text, return_offsets_mapping=True)
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
def test_byte_and_character_tokenizers_keep_white_space(kind):
    trained = train_tokenizer([*LINES, *DIRTY], SIZES[kind], kind=kind)
    for text in DIRTY:
        assert trained.decode(trained(text, add_special_tokens=False)["input_ids"]) == text


CARDS = Path(__file__).parents[2] / "model_cards"
KINDS = {
    "vanilla-seq2seq-tiny-multi30k-en-de": ("bpe", False),
    "vanilla-seq2seq-tiny-multi30k-en-fr": ("bpe", False),
    "vanilla-encoder-tiny-sst2": ("word", True),
    "vanilla-encoder-tiny-trec": ("word", False),
}


@pytest.mark.parametrize("name", KINDS)
def test_model_card_tokenizers_normalize_white_space(name):
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
def test_byte_tokenizer_round_trips_every_string(byte_tokenizer, text):
    assert round_trip(byte_tokenizer, text) == text
    assert byte_tokenizer.unk_token_id not in byte_tokenizer(text)["input_ids"]


def test_byte_tokenizer_has_requested_vocab_size(byte_tokenizer):
    assert len(byte_tokenizer) == byte_tokenizer.vocab_size == 290
    assert len(train_tokenizer(LINES, 260, kind="byte-bpe")) == 260
    assert len(byte_tokenizer("Männer")["input_ids"]) < len("Männer".encode()) + 1
    assert (
        len(train_tokenizer(LINES, 260, kind="byte-bpe")("Männer")["input_ids"])
        == len("Männer".encode()) + 1
    )


def test_byte_vocab_size_is_a_maximum_of_at_least_all_bytes():
    with raises(ValueError, seen=4 + 256, expected=259):
        train_tokenizer(LINES, 259, kind="byte-bpe")
    size = len(train_tokenizer(LINES, 5000, kind="byte-bpe"))
    assert 290 < size < 5000 and len(train_tokenizer(LINES, size, kind="byte-bpe")) == size


def test_byte_tokenizer_offsets_exclude_leading_space(byte_tokenizer):
    text = "young men are"
    offsets = byte_tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    assert not any(text[start:end].startswith(" ") for start, end in offsets)
    assert "".join(text[start:end] for start, end in offsets) == "youngmenare"


# --------------------------------------------------------------------------------------- characters


@pytest.mark.parametrize("text", [*LINES, "\n\n  \t", "Männer\r\n are (no) # f(x)", "", "   "])
def test_character_tokenizer_round_trips_known_characters(character_tokenizer, text):
    assert round_trip(character_tokenizer, text) == text
    ids = character_tokenizer(text)["input_ids"]
    assert len(ids) == len(text) + 1
    assert character_tokenizer.unk_token_id not in ids


def test_character_vocabulary_is_characters_of_training_text(character_tokenizer):
    assert (
        sorted(set(character_tokenizer.get_vocab()) - {"<pad>", "<s>", "</s>", "<unk>"})
        == CHARACTERS
    )
    assert len(character_tokenizer) == character_tokenizer.vocab_size == len(CHARACTERS) + 4


def test_unseen_characters_are_unknown_tokens(character_tokenizer):
    assert [index == 3 for index in character_tokenizer("Q漢a😀\u0301")["input_ids"]] == [
        True,
        True,
        False,
        True,
        True,
        False,
    ]


def test_exact_character_vocab_size_is_accepted():
    assert len(train_tokenizer(LINES, len(CHARACTERS) + 4, kind="character")) == len(CHARACTERS) + 4


def test_character_vocab_size_is_a_maximum():
    size = len(CHARACTERS) + 4
    assert len(train_tokenizer(LINES, size + 1, kind="character")) == size
    with raises(ValueError, seen=size, expected=size - 1):
        train_tokenizer(LINES, size - 1, kind="character")


def test_character_vocabulary_keeps_thousands_of_characters():
    text = "".join(chr(0x4E00 + index) for index in range(20000)) + "".join(
        chr(0xAC00 + index) for index in range(11000)
    )
    assert len(train_tokenizer([text], kind="character")) == 31004


# -------------------------------------------------------------------------------------- bpe-dropout


@pytest.fixture(scope="module")
def bpe_tokenizer():
    return train_tokenizer(LINES, SIZES["bpe"])


def test_zero_bpe_dropout_gives_tokenizer_ids(bpe_tokenizer):
    for lines in (LINES, ANYTHING):
        assert (
            BpeDropout(bpe_tokenizer, 0.0)(lines, Random(0))["input_ids"]
            == bpe_tokenizer(lines)["input_ids"]
        )
    encoder = train_tokenizer(LINES, SIZES["bpe"] + 1, variant="encoder")
    assert BpeDropout(encoder, 0.0)(LINES, Random(0))["input_ids"] == encoder(LINES)["input_ids"]


def test_bpe_dropout_distribution_matches_tokenizers_library(bpe_tokenizer):
    count, random, word = 4000, Random(0), "outside"
    theirs = tokenizers.Tokenizer.from_str(bpe_tokenizer.backend_tokenizer.to_str())
    theirs.model.dropout = 0.3
    expected = Counter(tuple(theirs.encode(word).ids) for _ in range(count))
    pieces = BpeDropout(bpe_tokenizer, 0.3)
    actual = Counter(tuple(pieces([word], random)["input_ids"][0]) for _ in range(count))
    assert len(expected) > 5
    for ids in expected | actual:
        assert actual[ids] == pytest.approx(
            expected[ids], abs=5 * (1 + max(actual[ids], expected[ids])) ** 0.5
        )
        assert bpe_tokenizer.decode(ids, skip_special_tokens=True) == word


@pytest.mark.parametrize("kind", ["byte-bpe", "character"])
def test_bpe_dropout_of_other_kinds_is_rejected(kind):
    with raises(ValueError, seen="tokenizer.bpe_dropout", expected=(0.1, "kind", "bpe")):
        BpeDropout(train_tokenizer(LINES, SIZES[kind], kind=kind), 0.1)
