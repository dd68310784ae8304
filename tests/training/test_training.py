"""Tests of trained tokenizers, parallel text, translation scores and batches."""

import gzip
import random
from itertools import chain, islice

import pytest
import sacrebleu
import tokenizers
from datasets import Dataset, DatasetDict, IterableDataset
from messages import raises
from transformers import AutoTokenizer

from vanilla_transformer.errors import UsageError
from vanilla_transformer.training import batches as batches_module
from vanilla_transformer.training.augment import AugmentedDataset
from vanilla_transformer.training.batches import TokenBatches, TokenStream, collate_batches
from vanilla_transformer.training.data import read_files, read_lines
from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.tasks import sequence_classification, translation
from vanilla_transformer.training.tasks.task import Scored
from vanilla_transformer.training.tokenizer import train_tokenizer

TEXT = [
    "Two young, White males are outside near many bushes.",
    "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    "Several men in hard hats are operating a giant pulley system.",
    "Mehrere Männer mit Schutzhelmen bedienen ein Antriebsradsystem.",
    "A little girl climbing into a wooden playhouse.",
    "Ein kleines Mädchen klettert in ein Spielhaus aus Holz.",
    "A man in a blue shirt is standing on a ladder cleaning a window.",
    "Ein Mann in einem blauen Hemd steht auf einer Leiter und putzt ein Fenster.",
    "He says: \"It's 7 o'clock (already)!\"",
    "Über Öl, Äpfel & Übermut: 50 % – schön, nicht?",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT, 200)


# ---------------------------------------------------------------------------------------- tokenizer


@pytest.mark.parametrize(
    "text", [*TEXT, "ein Mann", "A", "a – b", '(in) "Öl"?!', "Männer,die,klettern", "7 : 50 %"]
)
def test_decoding_restores_text(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("text", [TEXT[0], TEXT[1], "a"])
def test_sequence_ends_with_end_token_and_has_no_other_special_token(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] == 2
    assert min(ids[:-1]) > 3


def test_special_token_ids_match_configs(tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<s>", "</s>", "<unk>"]) == [0, 1, 2, 3]
    assert (
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
    ) == (0, 1, 2, 3)


def test_vocabulary_has_requested_size(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 200
    assert len(train_tokenizer(TEXT, 150)) == 150


def test_vocabulary_of_short_text_is_smaller_than_its_maximum():
    size = len(train_tokenizer(TEXT, 5000))
    assert 200 < size < 5000
    assert train_tokenizer(TEXT, size).get_vocab() == train_tokenizer(TEXT, 5000).get_vocab()


def test_vocabulary_smaller_than_alphabet_error_states_size_of_alphabet():
    special_tokens, characters = 4, set("".join(TEXT))
    size = special_tokens + len(characters)
    with raises(ValueError, seen=(size, "tokenizer.vocab_size"), expected=20):
        train_tokenizer(TEXT, 20)
    assert len(train_tokenizer(TEXT, size)) == size


def test_punctuation_is_always_its_own_token(tokenizer):
    tokens = tokenizer.tokenize("Männer, Büsche.")
    assert "," in tokens
    assert "." in tokens
    assert all(token in (",", ".") or not set(token) & set(",.") for token in tokens)


def test_unknown_characters_become_unknown_token(tokenizer):
    assert 3 in tokenizer("漢")["input_ids"]


def test_composed_and_decomposed_umlauts_have_same_ids(tokenizer):
    assert tokenizer("Ma\u0308nner")["input_ids"] == tokenizer("M\u00e4nner")["input_ids"]


def test_lowercase_tokenizer_ignores_case():
    tokenizer = train_tokenizer(TEXT, 180, lowercase=True)
    for text in TEXT:
        ids = tokenizer(text)["input_ids"]
        assert (
            ids
            == tokenizer(text.lower())["input_ids"]
            == tokenizer(text.upper().replace("SS", "ß"))["input_ids"]
        )
        assert tokenizer.decode(ids, skip_special_tokens=True) == text.lower()
    with raises(ValueError, seen="character", expected=("lowercase", "bpe", "word")):
        train_tokenizer(TEXT, kind="character", lowercase=True)


def test_word_tokenizer_contains_most_frequent_words():
    """Count by hand: "dog" 4 times, "the" 3 times, "cat" and "." twice, four others once."""
    lines = ["The dog sees the cat.", "the dog, a dog", "no cat . dog"]
    tokenizer = train_tokenizer(lines, 4 + 4, kind="word", lowercase=True)
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)[4:]
    assert words[:2] == ["dog", "the"] and sorted(words[2:]) == [".", "cat"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("A dog, the Cat.")["input_ids"]) == [
        "<unk>", "dog", "<unk>", "the", "cat", ".", "</s>"
    ]  # fmt: skip
    assert tokenizer.decode([5, 4, 2], skip_special_tokens=True) == "the dog"
    assert len(train_tokenizer(lines, 13, kind="word", lowercase=True)) == 12


def test_encoder_tokenizer_adds_boundary_tokens_and_token_types():
    tokenizer = train_tokenizer(TEXT, 200, variant="encoder", token_types=True)
    alone, [first, second] = (
        tokenizer(TEXT[0])["input_ids"],
        [tokenizer(text)["input_ids"] for text in TEXT[:2]],
    )
    assert (alone[0], alone[-1], tokenizer.mask_token_id) == (1, 2, 4)
    assert (tokenizer.cls_token, tokenizer.sep_token) == ("<s>", "</s>")
    pair = tokenizer(TEXT[0], TEXT[1])
    assert pair["input_ids"] == first + second[1:]
    assert pair["token_type_ids"] == [0] * len(first) + [1] * (len(second) - 1)
    assert tokenizer.decode(alone, skip_special_tokens=True) == TEXT[0]
    without = train_tokenizer(TEXT, 200, variant="encoder")
    assert without(TEXT[0], TEXT[1]) == {
        name: pair[name] for name in ("input_ids", "attention_mask")
    }
    assert without(TEXT[0], TEXT[1], return_token_type_ids=True)["token_type_ids"] == [0] * len(
        pair["input_ids"]
    )


def test_saved_tokenizer_loads_in_transformers_and_tokenizers(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    fast, alone = (
        AutoTokenizer.from_pretrained(tmp_path),
        tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
    )
    assert fast.is_fast
    assert (fast.pad_token, fast.eos_token, fast.bos_token, fast.unk_token) == (
        "<pad>",
        "</s>",
        "<s>",
        "<unk>",
    )
    for text in TEXT:
        assert fast(text)["input_ids"] == alone.encode(text).ids == tokenizer(text)["input_ids"]
        assert (
            alone.decode(alone.encode(text).ids)
            == fast.decode(fast(text)["input_ids"], skip_special_tokens=True)
            == text
        )
    assert set(fast(TEXT[0])) == {"input_ids", "attention_mask"}


# --------------------------------------------------------------------------------------------- data


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("text", ["Öl\nzwei\n", "Öl\nzwei", "Öl\r\nzwei\r\n"], ids=repr)
def test_plain_and_compressed_files_have_same_lines(tmp_path, text):
    plain, packed = (
        write(tmp_path / "a.de", text),
        write(tmp_path / "a.de.gz", gzip.compress(text.encode())),
    )
    assert read_lines(plain) == read_lines(packed) == read_lines(str(plain)) == ["Öl", "zwei"]


def test_only_line_feed_ends_line(tmp_path):
    assert read_lines(write(tmp_path / "a", "one\u2028still one\u0085and one\ntwo\n")) == [
        "one\u2028still one\u0085and one",
        "two",
    ]


def test_parallel_files_are_paired_by_line(tmp_path):
    source, target = (
        write(tmp_path / "a.en", "one\ntwo\n"),
        write(tmp_path / "a.de", "eins\nzwei\n"),
    )
    assert read_files([source, target]) == [["one", "two"], ["eins", "zwei"]]


def test_parallel_files_of_different_lengths_raise(tmp_path):
    source, target = (
        write(tmp_path / "a.en", "one\ntwo\nthree\n"),
        write(tmp_path / "a.de", "eins\nzwei\n"),
    )
    with raises(ValueError, seen=("a.en", 3, "a.de", 2)):
        read_files([source, target])


@pytest.mark.parametrize(
    "text, seen",
    [
        ("one\n\nthree\n", (2,)),
        ("one\n \t\n", (2,)),
        ("one\ntwo\n\n", (3,)),
        ("", (1,)),
        (b"one\n\xff\xfe\n", ()),
        ("Öl\n".encode("latin-1"), ()),
    ],
)
def test_file_with_empty_lines_or_invalid_utf8_raises(tmp_path, text, seen):
    with raises(ValueError, seen=("some.text", *seen)):
        read_lines(write(tmp_path / "some.text", text))


@pytest.mark.parametrize("name", ["nowhere.en", "nowhere.en.gz"])
def test_missing_file_raises(tmp_path, name):
    with raises(FileNotFoundError, seen=name):
        read_lines(tmp_path / name)


PACKED = gzip.compress(b"one\n" * 1000, mtime=0)


@pytest.mark.parametrize(
    "data", [b"plain text", PACKED[:30], PACKED[:-8] + b"0" * 8], ids=["plain", "cut", "changed"]
)
def test_damaged_gz_file_raises(tmp_path, data):
    with raises((OSError, ValueError), seen="some.gz"):
        read_lines(write(tmp_path / "some.gz", data))


def test_dataset_on_disk_is_read_by_column_names(tmp_path):
    rows = [
        {"id": 1, "translation": {"en": "one", "de": "eins"}},
        {"id": 2, "translation": {"en": "two", "de": "zwei"}},
    ]
    DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(tmp_path / "set")
    data = {"dataset": str(tmp_path / "set"), "columns": ["translation.de", "translation.en"]}
    assert translation.read(data, "train").to_dict() == {
        "source": ["eins", "zwei"],
        "target": ["one", "two"],
    }
    assert translation.read(data, "test") is None
    stream = translation.read(data | {"streaming": True}, "train")
    assert isinstance(stream, IterableDataset)
    assert list(stream) == [
        {"source": "eins", "target": "one"},
        {"source": "zwei", "target": "two"},
    ]
    with raises(ValueError, seen="text", expected=("id", "translation")):
        translation.read(data | {"columns": ["text", "translation.en"]}, "train")


def test_dataset_rows_without_text_raise_or_are_skipped(tmp_path, capsys):
    pairs = [{"en": "one", "de": "eins"}, None, {"en": "two", "de": None}]
    rows = Dataset.from_dict({"translation": pairs, "title": ["a", "b", "c"]})
    DatasetDict(train=rows).save_to_disk(tmp_path / "saved")
    data = {"dataset": str(tmp_path / "saved"), "columns": ["translation.en", "translation.de"]}
    with raises(ValueError, seen=("row", 1, "source")):
        translation.read(data, "train")
    kept = translation.read(data | {"skip_bad_rows": True}, "train")
    assert kept.to_dict() == {"source": ["one"], "target": ["eins"]}
    with raises(UsageError, seen=("data.columns", "translation.en"), expected=("source", "target")):
        translation.read(data | {"columns": ["translation.en"]}, "train")
    for column, seen in (("translation.fr", "eins"), ("title.fr", "a")):
        with raises(ValueError, seen=(column.partition(".")[0], seen), expected="fr"):
            translation.read(data | {"columns": ["translation.en", column]}, "train")


def test_blank_text_of_data_set_is_a_bad_row_also_in_a_stream(tmp_path, capsys):
    pairs = [{"en": "one", "de": "eins"}, {"en": " ", "de": "zwei"}, {"en": "two", "de": ""}]
    DatasetDict(train=Dataset.from_dict({"translation": pairs})).save_to_disk(tmp_path / "saved")
    data = {"dataset": str(tmp_path / "saved"), "columns": ["translation.en", "translation.de"]}
    with raises(ValueError, seen=("row", 1, "source")):
        translation.read(data, "train")
    stream = translation.read(data | {"streaming": True}, "train")
    with raises(ValueError, seen=("row", 1, "source")):
        list(stream)
    kept = translation.read(data | {"skip_bad_rows": True}, "train")
    assert kept.to_dict() == {"source": ["one"], "target": ["eins"]}
    assert "2 of 3 rows" in capsys.readouterr().out


def long_pairs(tmp_path):
    """Write 60 pairs of sentences, of which pair 42 is long, and return their recipe."""
    for name, word in (("train.en", "dog"), ("train.de", "hund")):
        lines = [f"a {word} {number} ." for number in range(60)]
        lines[41] = f"{word} " * 90
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    data = {"directory": str(tmp_path), "train": ["train.en", "train.de"]}
    sizes = dict(encoder_layers=1, decoder_layers=1, num_attention_heads=2, hidden_size=16)
    training = {"tokens_per_update": 64}
    tokenizer = {"kind": "character"}
    return Recipe("translation", data, tokenizer, sizes | {"intermediate_size": 16}, training)


def test_row_longer_than_an_update_is_named_or_skipped(tmp_path, capsys):
    recipe = long_pairs(tmp_path)
    path = tmp_path / "train.de"  # whose line is the longest
    with raises(ValueError, seen=(path, "line 42"), expected=(64, "tokens of a batch")):
        prepare(recipe)
    recipe.data["skip_bad_rows"] = True
    assert len(prepare(recipe)[2]["train"]) == 59
    assert f"1 of 60 rows of the training text are bad ({path}: line 42" in capsys.readouterr().out


def test_row_of_a_stream_longer_than_an_update_is_named(tmp_path):
    recipe = long_pairs(tmp_path)
    columns = {name: (tmp_path / f"train.{name}").read_text().splitlines() for name in ("en", "de")}
    DatasetDict(train=Dataset.from_dict(columns)).save_to_disk(tmp_path / "saved")
    recipe.data.clear()
    recipe.data.update(dataset=str(tmp_path / "saved"), columns=["en", "de"], streaming=True)
    rows = prepare(recipe)[2]["train"]
    with raises(ValueError, seen=("row", 41), expected=(64, "tokens of a batch")):
        list(rows)


def test_tab_or_space_separates_label_and_text(tmp_path):
    (tmp_path / "a.tsv").write_text("pos\ta good film\nneg a bad film\npos\tone\ttwo\n")
    rows = sequence_classification.read({"train": str(tmp_path / "a.tsv")}, "train")
    assert rows.to_dict() == {
        "label": ["pos", "neg", "pos"],
        "text": ["a good film", "a bad film", "one\ttwo"],
    }
    for line in ("World News\ta text", "pos\t", "pos", "\ta text"):
        (tmp_path / "a.tsv").write_text(f"neg\ta text\n{line}\n")
        with raises(ValueError, seen=("a.tsv", "line 2", repr(line)), expected="label"):
            sequence_classification.read({"train": str(tmp_path / "a.tsv")}, "train")


def test_streaming_of_files_raises():
    with raises(ValueError, seen="data.streaming", expected="data.dataset"):
        Recipe("translation", {"train": ["a.en", "a.de"], "streaming": True})


def test_split_without_file_for_each_column_raises(tmp_path):
    with raises(ValueError, seen=("data.train", "a.en")):
        translation.read({"train": "a.en"}, "train")


def test_source_and_target_ids_match_tokenizer(tokenizer):
    rows = translation.encode({"source": TEXT[::2], "target": TEXT[1::2]}, tokenizer, {})
    assert rows["input_ids"] == tokenizer(TEXT[::2])["input_ids"]
    assert rows["labels"] == tokenizer(TEXT[1::2])["input_ids"]


def test_bleu_is_100_for_reference_low_for_other_text_and_ignores_padding(tokenizer):
    labels = tokenizer(TEXT[:4], padding=True, return_tensors="np")["input_ids"]
    masked = labels.copy()
    masked[labels == 0] = -100
    scored = Scored(None, tokenizer, None, {})
    result = translation.metrics((labels, masked), scored)
    assert (result["bleu"], result["chrf"]) == pytest.approx((100, 100))
    others = tokenizer(TEXT[4:8], padding=True, return_tensors="np")["input_ids"]
    assert translation.metrics((others, masked), scored)["bleu"] < 10


def test_bleu_uses_selected_tokenization(tokenizer):
    """Read "a," as one token with `none` and as two tokens with `13a`."""
    outputs, labels = (
        tokenizer([text], return_tensors="np")["input_ids"]
        for text in ("a , b c d e f", "a, b c d e f")
    )
    scores = {}
    for kind in ("none", "13a"):
        scored = Scored(None, tokenizer, None, {"bleu_tokenize": kind})
        scores[kind] = translation.metrics((outputs, labels), scored)["bleu"]
    assert scores["13a"] == pytest.approx(100)
    assert (
        scores["none"]
        == sacrebleu.corpus_bleu(["a , b c d e f"], [["a, b c d e f"]], tokenize="none").score
        < 90
    )


# ------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("limit", [60, 100, 1000])
def test_batches_contain_every_row_once_within_token_limit(limit):
    rng = random.Random(0)
    sizes = [rng.randint(5, 50) for _ in range(500)]
    rows = Dataset.from_list(
        [
            {"labels": [i] * n, "input_ids": [i] * (n + rng.randint(-4, 4))}
            for i, n in enumerate(sizes)
        ]
    )
    lengths = [(len(row["labels"]), len(row["input_ids"])) for row in rows]
    batches = TokenBatches(rows, lengths, limit)
    result = [batches[index] for index in range(len(batches))]
    assert sorted(row["labels"][0] for batch in result for row in batch) == list(range(500))
    padded = [
        len(batch) * max(len(side) for row in batch for side in row.values()) for batch in result
    ]
    assert max(padded) <= limit
    assert sum(max(pair) for pair in lengths) / sum(padded) > 0.75


def test_row_longer_than_token_limit_raises():
    rows = Dataset.from_list([{"labels": [1] * 9, "input_ids": [1] * 5}])
    with raises(ValueError, seen=9, expected=8):
        TokenBatches(rows, [(9, 5)], 8)


def test_batches_are_augmented_differently_in_each_epoch():
    rows = Dataset.from_dict({"labels": range(10, 20)})
    rows = AugmentedDataset(rows, lambda row, random: ((row["labels"], random.random()),), seed=0)
    batches = TokenBatches(rows, [(1,)] * 10, limit=4)
    first = [batches[index] for index in range(3)]
    assert [[row for row, _ in batch] for batch in first] == [
        [10, 11, 12, 13],
        [14, 15, 16, 17],
        [18, 19],
    ]
    assert len(set(chain(*first))) == 10
    batches.set_epoch(1)
    assert not {*chain(*first)} & {*batches[0]}
    batches.set_epoch(0)
    assert batches[1] == first[1]


def test_second_views_of_rows_follow_all_first_views():
    rows = Dataset.from_dict({"labels": [[number] for number in range(10, 14)]})

    def augmentation(row, random):
        return row["labels"][0], -row["labels"][0]

    assert TokenBatches(AugmentedDataset(rows, augmentation, seed=0), [(1,)] * 4, limit=2)[1] == [
        12,
        13,
        -12,
        -13,
    ]
    [*stream] = islice(
        TokenStream(rows.to_iterable_dataset(), limit=2, seed=0, augmentation=augmentation), 2
    )
    assert sorted(row for batch in stream for row in batch) == [-13, -12, -11, -10, 10, 11, 12, 13]
    assert all(
        first == [-row for row in second]
        for first, second in ((batch[:2], batch[2:]) for batch in stream)
    )


def test_stream_yields_every_row_once_per_epoch_in_new_order(monkeypatch):
    monkeypatch.setattr(batches_module, "BUFFER", 40)
    rng = random.Random(0)
    rows = Dataset.from_list(
        [{"labels": [i], "input_ids": [i] * rng.randint(1, 9)} for i in range(100)]
    )
    stream = TokenStream(rows.to_iterable_dataset(), limit=12, seed=0)
    order = [row["labels"][0] for batch in islice(stream, 150) for row in batch]
    assert [sorted(order[start : start + 100]) for start in (0, 100)] == 2 * [list(range(100))]
    assert order[:100] != order[100:200]
    first = list(islice(stream, 40))
    sizes = [[len(row["input_ids"]) for row in batch] for batch in first]
    assert max(len(batch) * max(batch) for batch in sizes) <= 12
    assert sum(map(sum, sizes)) / sum(len(batch) * max(batch) for batch in sizes) > 0.75
    assert list(islice(stream, 40)) == first
    augmented = TokenStream(
        rows.to_iterable_dataset(), 12, 0, lambda row, random: ({**row, "value": random.random()},)
    )
    values = [row["value"] for batch in islice(augmented, 100) for row in batch]
    assert len({*values}) == len(values) > 150 and values == [
        row["value"] for batch in islice(augmented, 100) for row in batch
    ]


def test_collator_accepts_batches_or_single_rows():
    collate = collate_batches(list)
    assert collate([[{"a": 1}, {"a": 2}]]) == collate([{"a": 1}, {"a": 2}]) == [{"a": 1}, {"a": 2}]


def test_rows_of_a_stream_have_other_neighbours_in_each_epoch():
    """Rows of one length are cut into batches in the order in which they were shuffled."""
    rows = Dataset.from_list([{"labels": [place], "input_ids": [0]} for place in range(12)])
    stream = islice(TokenStream(rows.to_iterable_dataset(), limit=3, seed=0), 8)
    batches = [frozenset(row["labels"][0] for row in batch) for batch in stream]
    assert {*batches[:4]} != {*batches[4:]}
