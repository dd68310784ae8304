"""Conversion of tokenizers of other families: ids and texts are equal to those of the transformers
class."""

import json
import pickle
import random
import sys

import pytest
import sentencepiece
from messages import raises
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer
from transformers import AutoTokenizer, MarianTokenizer

from vanilla_transformer.checkpoint import load_tokenizer
from vanilla_transformer.conversion.tokenizers import find_tokenizer
from vanilla_transformer.training.tasks import translation
from vanilla_transformer_export.exporting.shortlist import shortlist_from_text
from vanilla_transformer_export.text.detokenizer import clean_up, cleans_up

# Words of sentences: subjects, verbs, things, places.
SCRIPTS = {
    "ru": [
        "собака кошка мальчик птица",
        "видит ищет любит",
        "мяч книгу дом",
        "в парке. на улице! у реки,",
    ],
    "el": [
        "ο σκύλος η γάτα το αγόρι",
        "βλέπει θέλει βρίσκει",
        "το βιβλίο τη μπάλα",
        "στο πάρκο. στο σπίτι!",
    ],
    "ar": [
        "الكلب القطة الولد الطائر",
        "يرى يريد يجد",
        "الكتاب الكرة البيت",
        "في الحديقة. في الشارع؟",
    ],
    "hi": [
        "कुत्ता बिल्ली लड़का चिड़िया",
        "देखता चाहता पाता",
        "किताब गेंद घर",
        "बाग़ में। सड़क पर!",
    ],
    "te": ["కుక్క పిల్లి పైలట్ శైలి", "చూస్తుంది కోరుతుంది", "పుస్తకం బంతి ఫైల్", "తోటలో. వీధిలో!"],
    "zh": ["狗 猫 男孩 小鸟", "看见了 想要 找到了", "书 球 房子", "在公园里。 在家！"],
    "en": [
        "the dog a cat some boys",
        "sees wants finds",
        "a book the red ball",
        "in the park. at home!",
    ],
    "de": [
        "der Hund die Katze ein Bub",
        "sieht möchte findet",
        "das Buch den großen Ball",
        "im Park. zu Hause!",
    ],
}
SOURCES, TARGET = ["ru", "el", "ar", "hi", "te", "zh"], "de"
ODD = [
    "", " ", "   ", "\t\n", "a", "  two  spaces ", "ｗｉｄｅ", "ﬁ ①½", "e\u0301 a\u0308",
    "\u3000собака", "ꙮ", "𓀀𓀁 ok", "a\u00a0b", "собака </s> кошка", "<unk>", "\u200b",
    "\u0c2a\u0c46\u0c56\u0c32", "Wörter, die nur das Ziel hat", "großen", "собакаBallкошка", "Hund",
    "собака Hund кошка", "99 %", "‘…’",
]  # fmt: skip


def sentences(languages, count):
    rng = random.Random(0)
    rows = [SCRIPTS[rng.choice(languages)] for _ in range(count)]
    return [" ".join(rng.choice(words.split()) for words in row) for row in rows]


@pytest.fixture(scope="session")
def train(tmp_path_factory):
    """Return a cached function that trains a SentencePiece model on sentences in `languages`."""
    directory, cache = tmp_path_factory.mktemp("models"), {}

    def model(languages, **settings):
        key = str((languages, settings))
        if key not in cache:
            text, prefix = directory / f"{len(cache)}.txt", directory / str(len(cache))
            text.write_text("\n".join(sentences(languages, 900)), encoding="utf-8")
            settings = dict(vocab_size=170, hard_vocab_limit=False, minloglevel=2) | settings
            sentencepiece.SentencePieceTrainer.train(
                input=str(text), model_prefix=str(prefix), **settings
            )
            cache[key] = prefix.with_suffix(".model").read_bytes()
        return cache[key]

    return model


def list_pieces(model):
    return [piece.piece for piece in parse_model(model).pieces if piece.type == 1]


def parse_model(model):
    return sentencepiece_model_pb2.ModelProto.FromString(model)


def edit_model(model, change):
    proto = parse_model(model)
    change(proto)
    return proto.SerializeToString()


def write_marian(directory, source, target, missing=(), languages=(">>deu<<", ">>nld<<")):
    """Write a tokenizer like OPUS-MT's: one vocabulary with the pieces of both models, without the
    `missing` pieces."""
    directory.mkdir(exist_ok=True)
    (directory / "source.spm").write_bytes(source)
    (directory / "target.spm").write_bytes(target)
    pieces = dict.fromkeys([*list_pieces(target)[::2], *list_pieces(source), *list_pieces(target)])
    names = [
        "</s>",
        "<unk>",
        *languages,
        *(piece for piece in pieces if piece not in missing),
        "<pad>",
    ]
    (directory / "vocab.json").write_text(
        json.dumps({name: id for id, name in enumerate(names)}), encoding="utf-8"
    )
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"source_lang": "mul", "target_lang": "de"})
    )
    (directory / "config.json").write_text(json.dumps({"model_type": "marian"}))
    return directory


@pytest.fixture
def marian(train, tmp_path):
    return write_marian(tmp_path / "marian", train(SOURCES), train([TARGET]))


def test_marian_ids_and_texts_match_marian_tokenizer_in_six_scripts(marian, tmp_path):
    find_tokenizer(marian).save(tmp_path / "saved")
    ours, theirs = (
        AutoTokenizer.from_pretrained(tmp_path / "saved"),
        MarianTokenizer.from_pretrained(marian),
    )
    assert (
        not list((tmp_path / "saved").glob("*.spm"))
        and ours.model_max_length == theirs.model_max_length
    )
    lines = [*sentences(SOURCES, 400), *sentences([*SOURCES, TARGET, "en"], 100), *ODD]
    expected = theirs(lines)["input_ids"]
    assert ours(lines)["input_ids"] == expected
    assert theirs.unk_token_id in sum(expected, []) and theirs.convert_tokens_to_ids(
        "▁Hund"
    ) not in sum(expected[:400], [])
    generated = [
        [random.Random(seed).randrange(len(ours)) for _ in range(9)] for seed in range(100)
    ]
    for ids in [*expected, *generated]:
        if not any(token.startswith(">>") for token in theirs.convert_ids_to_tokens(ids)):
            assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(
                ids, skip_special_tokens=True
            )


def test_marian_target_text_is_tokenized_by_target_model(marian, tmp_path):
    actual = find_tokenizer(marian)
    actual.save(tmp_path / "saved")
    # as training does
    load_tokenizer(tmp_path / "saved").save_pretrained(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    theirs = MarianTokenizer.from_pretrained(marian)
    lines = [*sentences([TARGET], 100), *sentences(SOURCES, 50), *ODD]
    expected, source = theirs(text_target=lines)["input_ids"], theirs(lines)["input_ids"]
    alone = Tokenizer.from_file(str(tmp_path / "saved" / "target_tokenizer.json"))
    assert [encoding.ids for encoding in alone.encode_batch(lines)] == expected != source
    for ours in (actual.tokenizer, again, pickle.loads(pickle.dumps(again))):
        assert (
            ours(text_target=lines)["input_ids"] == expected and ours(lines)["input_ids"] == source
        )
        both = ours(lines, text_target=lines)
        assert both["input_ids"] == source and both["labels"] == expected
    (tmp_path / "text").write_text("\n".join(lines[:100]), encoding="utf-8")
    assert set(sum(expected[:100], [])) <= set(
        shortlist_from_text(tmp_path / "text", tmp_path / "saved")
    )
    columns = translation.encode({"source": lines, "target": lines}, again, {})
    assert columns == {"input_ids": source, "labels": expected}


def test_marian_language_codes_are_tokens_at_start_of_text(marian):
    ours, theirs = find_tokenizer(marian).tokenizer, MarianTokenizer.from_pretrained(marian)
    texts = [">>deu<< собака видит", ">>nld<<кошка", ">>deu<<", ">>nld<<   книгу"]
    assert ours(texts)["input_ids"] == theirs(texts)["input_ids"]
    ids = ours(texts[0])["input_ids"]
    assert ours.convert_ids_to_tokens(ids[0]) == ">>deu<<"
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(
        ids, skip_special_tokens=True
    )


def test_user_defined_symbols_are_never_split(train, tmp_path):
    model = train(SOURCES, user_defined_symbols=["ОБАКА", "как"])
    directory = write_marian(
        tmp_path / "marian", edit_model(model, lambda proto: None), train([TARGET])
    )
    vocabulary = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    (directory / "vocab.json").write_text(
        json.dumps(vocabulary | {"ОБАКА": len(vocabulary), "как": len(vocabulary) + 1})
    )
    ours, theirs = find_tokenizer(directory).tokenizer, MarianTokenizer.from_pretrained(directory)
    lines = ["ОБАКА видит", "какой", "сОБАКАми как", *sentences(SOURCES, 100)]
    assert ours(lines)["input_ids"] == theirs(lines)["input_ids"]
    assert (
        vocabulary.keys().isdisjoint(["ОБАКА"]) and len(vocabulary) in ours(lines[2])["input_ids"]
    )


def test_note_counts_pieces_missing_from_vocabulary(train, tmp_path):
    source = train(SOURCES)
    missing = [piece for piece in list_pieces(source) if len(piece) > 2][:3]
    result = find_tokenizer(write_marian(tmp_path / "marian", source, train([TARGET]), missing))
    few = ", ".join(sorted(missing))
    assert result.notes == [
        f"vocab.json lacks 3 of the pieces of source.spm, {few}: text is cut without them"
    ]
    assert find_tokenizer(write_marian(tmp_path / "whole", source, train([TARGET]))).notes == []


def as_suffix(proto):
    proto.trainer_spec.treat_whitespace_as_suffix = True


def without_prefix(proto):
    proto.normalizer_spec.add_dummy_prefix = False


def with_all_spaces(proto):
    proto.normalizer_spec.remove_extra_whitespaces = False


UNSUPPORTED_MODELS = {
    "bpe": (dict(model_type="bpe"), None, ("BPE",), "unigram"),
    "word": (dict(model_type="word"), None, ("word",), "unigram"),
    "bytes": (dict(byte_fallback=True, vocab_size=420), None, ("byte_fallback", True), False),
    "suffix": ({}, as_suffix, ("treat_whitespace_as_suffix", True), False),
    "no prefix": ({}, without_prefix, ("add_dummy_prefix", False), True),
    "all spaces": ({}, with_all_spaces, ("remove_extra_whitespaces", False), True),
}


@pytest.mark.parametrize("name", ["source.spm", "target.spm"])
@pytest.mark.parametrize("wrong", UNSUPPORTED_MODELS)
def test_unsupported_sentencepiece_settings_are_rejected(marian, train, wrong, name):
    settings, change, seen, expected = UNSUPPORTED_MODELS[wrong]
    model = train([TARGET], **settings)
    (marian / name).write_bytes(edit_model(model, change) if change else model)
    with raises(ValueError, seen=(marian / name, *seen), expected=expected):
        find_tokenizer(marian)


DAMAGES = {
    "truncated": lambda content: content[: len(content) // 2],
    "without its end": lambda content: content[:-40],
    "empty": lambda content: b"",
    "text": lambda content: b"not a model",
    "json": lambda content: b'{"a": 0}',
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_error_names_damaged_marian_model(marian, damage):
    path = marian / "source.spm"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with raises(ValueError, seen=(path, "SentencePiece"), expected=path.stat().st_size):
        find_tokenizer(marian)


@pytest.mark.parametrize("name", ["source.spm", "target.spm", "vocab.json"])
def test_error_names_missing_marian_file(marian, name):
    (marian / name).unlink()
    with raises(FileNotFoundError, seen=marian / name):
        find_tokenizer(marian)


VOCABULARIES = {
    "a gap": (
        '{"</s>": 0, "<unk>": 1, "<pad>": 3}',
        ("3 ids", "0 to 3", "3 different", "3 pieces"),
        (),
    ),
    "a double": (
        '{"</s>": 0, "<unk>": 1, "<pad>": 1}',
        ("3 ids", "0 to 1", "2 different", "3 pieces"),
        (),
    ),
    "a piece twice": (
        '{"</s>": 0, "<unk>": 1, "</s>": 2}',
        ("3 ids", "0 to 2", "3 different", "2 pieces"),
        (),
    ),
    "no special token": ('{"</s>": 0, "<unk>": 1}', ("<pad>",), 2),
    "truncated": ('{"</s>": 0, "<un', ("JSON",), ()),
    "a list": ('["</s>", "<unk>"]', ("['</s>', '<unk>']",), "JSON"),
    "no ids": ('{"</s>": "a"}', ("(('</s>', 'a'),)",), "JSON"),
    "nothing": ("{}", ("()",), "JSON"),
}


@pytest.mark.parametrize("wrong", VOCABULARIES)
def test_invalid_vocabulary_is_rejected(marian, wrong):
    content, seen, expected = VOCABULARIES[wrong]
    (marian / "vocab.json").write_text(content)
    with raises(ValueError, seen=(marian / "vocab.json", *seen), expected=expected):
        find_tokenizer(marian)


def test_separate_vocabularies_are_rejected(marian):
    (marian / "tokenizer_config.json").write_text(json.dumps({"separate_vocabs": True}))
    with raises(ValueError, seen=(marian, "separate_vocabs"), expected="vocab.json"):
        find_tokenizer(marian)


def test_error_names_extra_if_sentencepiece_is_not_installed(marian, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    extra = "vanilla-transformer[sentencepiece]"
    with raises(ImportError, seen=("source.spm", "sentencepiece", "protobuf", extra)):
        find_tokenizer(marian)


# ----------------------------------------------------------------------------------- other families

STANDARD = dict(unk_id=0, bos_id=1, eos_id=2)
T5_IDS = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
# The file, how its model is trained, the model type, and the tokenizer class if it is not the
# default of the type.
MODELS = {
    "t5": ("spiece.model", T5_IDS, "t5", None),
    "mt5": ("spiece.model", T5_IDS, "mt5", None),
    "pegasus": ("spiece.model", T5_IDS, "pegasus", None),
    "xlm-roberta": ("sentencepiece.bpe.model", STANDARD, "xlm-roberta", None),
    "camembert": ("sentencepiece.bpe.model", STANDARD, "camembert", None),
    "mbart": ("sentencepiece.bpe.model", STANDARD, "mbart", None),
    "mbart50": ("sentencepiece.bpe.model", STANDARD, "mbart", "MBart50Tokenizer"),
    "m2m_100": ("sentencepiece.bpe.model", STANDARD | dict(model_type="bpe"), "m2m_100", None),
    "m2m_100 unigram": ("sentencepiece.bpe.model", STANDARD, "m2m_100", None),
    "byt5": (None, {}, "t5", "ByT5Tokenizer"),
}


def write_source(family, train, source):
    """Write the tokenizer files of `family`, without tokenizer.json."""
    file, settings, model_type, tokenizer_class = MODELS[family]
    fields = {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": model_type, **fields}))
    if file:
        model = train([*SOURCES, "en"], **settings)
        (source / file).write_bytes(model)
        (source / "tokenizer_config.json").write_text(json.dumps(fields)) if fields else None
        names = ["<s>", "<pad>", "</s>", "<unk>", *list_pieces(model)]
        if model_type == "m2m_100":
            (source / "vocab.json").write_text(
                json.dumps({name: id for id, name in enumerate(names)})
            )
    return source


@pytest.mark.parametrize("family", MODELS)
def test_created_tokenizer_json_gives_same_ids_and_texts(family, train, tmp_path):
    source = write_source(family, train, tmp_path / "source")
    theirs = AutoTokenizer.from_pretrained(source)
    find_tokenizer(source).save(tmp_path / "saved")
    again, alone = (
        AutoTokenizer.from_pretrained(tmp_path / "saved"),
        Tokenizer.from_file(str(tmp_path / "saved/tokenizer.json")),
    )
    lines = [*sentences(list(SCRIPTS), 200), *ODD, "<extra_id_0> a <extra_id_1>", "A <mask> b"]
    expected = theirs(lines)["input_ids"]
    assert again(lines)["input_ids"] == expected
    assert [encoding.ids for encoding in alone.encode_batch(lines)] == expected
    generated = [
        [random.Random(seed).randrange(len(theirs)) for _ in range(9)] for seed in range(100)
    ]
    for ids in [*expected, *generated]:
        text = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert alone.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("family", ["marian", "t5", "mbart", "m2m_100", "byt5"])
def test_space_cleanup_matches_family_tokenizer(family, train, tmp_path):
    source = tmp_path / "source"
    if family == "marian":
        write_marian(source, train([*SOURCES, "en"]), train([*SOURCES, "en"]))
    else:
        write_source(family, train, source)
    path = source / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(settings | {"clean_up_tokenization_spaces": True}))
    theirs = AutoTokenizer.from_pretrained(source)
    find_tokenizer(source).save(tmp_path / "saved")
    alone = Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    settings = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert cleans_up(settings, type(alone.model).__name__)
    rows = theirs(
        ["the dog .", "the dog , a cat ! some boys ' red ball", "at home", "собака . книгу"]
    )["input_ids"]
    decoded = alone.decode_batch(rows, skip_special_tokens=True)
    expected = theirs.batch_decode(rows, skip_special_tokens=True)
    assert decoded != expected == [clean_up(text) for text in decoded]


def test_error_names_damaged_t5_model(train, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    (tmp_path / "spiece.model").write_bytes(train(["en"], **T5_IDS)[:500])
    with raises(ValueError, seen=("spiece.model", "SentencePiece"), expected=500):
        find_tokenizer(tmp_path)


def test_note_names_tokenizer_that_cannot_be_converted(tmp_path):
    (tmp_path / "vocab.json").write_text(
        json.dumps({"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3, "a</w>": 4})
    )
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "CTRLTokenizer"})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    remedy = "its exports take and return only token ids, unless you add a tokenizer.json"
    assert find_tokenizer(tmp_path).notes == [
        f"a CTRLTokenizer cannot be converted to tokenizer.json: {remedy}"
    ]
