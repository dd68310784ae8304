"""Tokenizer, parallel text, and training runs that learn, stop and go on."""

import gzip
import json
from functools import partial

import pytest
import tokenizers
import torch
from checkpoints import toy_corpus, write_corpus
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Seq2SeqTrainer, TrainerCallback

from vanilla_transformer.training import translation
from vanilla_transformer.training.data import encode_pairs, read_lines, read_parallel
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer.training.translation import TranslationRun, bleu_of_ids, train_translation

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


# --------------------------------------------------------------------------------------------------------------- tokenizer


@pytest.mark.parametrize("text", [*TEXT, "ein Mann", "A", "a – b", '(in) "Öl"?!', "Männer,die,klettern", "7 : 50 %"])
def test_decoding_gives_back_the_text(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("text", [TEXT[0], TEXT[1], "a"])
def test_a_sequence_ends_with_the_end_token_and_has_no_other_special_token(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] == 2
    assert min(ids[:-1]) > 3


def test_the_special_tokens_have_the_ids_of_the_configs(tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<s>", "</s>", "<unk>"]) == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2, 3)


def test_the_vocabulary_has_the_size_asked_for(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 200
    assert len(train_tokenizer(TEXT, 150)) == 150


@pytest.mark.parametrize("vocab_size", [5000, 20])
def test_a_vocabulary_size_the_text_cannot_give_is_refused_with_both_sizes(vocab_size):
    with pytest.raises(ValueError, match=f"vocabulary of [0-9]+ entries, expected {vocab_size}"):
        train_tokenizer(TEXT, vocab_size)


def test_a_vocabulary_smaller_than_the_alphabet_is_told_to_be_larger():
    with pytest.raises(ValueError, match="ask for more"):
        train_tokenizer(TEXT, 20)


def test_punctuation_is_always_its_own_token(tokenizer):
    tokens = tokenizer.tokenize("Männer, Büsche.")
    assert "," in tokens
    assert "." in tokens
    assert all(token in (",", ".") or not set(token) & set(",.") for token in tokens)


def test_unknown_characters_become_the_unknown_token(tokenizer):
    assert 3 in tokenizer("漢")["input_ids"]


def test_composed_and_decomposed_umlauts_are_the_same(tokenizer):
    assert tokenizer("Ma\u0308nner")["input_ids"] == tokenizer("M\u00e4nner")["input_ids"]


def test_a_saved_tokenizer_loads_in_transformers_and_alone(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    fast, alone = AutoTokenizer.from_pretrained(tmp_path), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert fast.is_fast
    assert (fast.pad_token, fast.eos_token, fast.bos_token, fast.unk_token) == ("<pad>", "</s>", "<s>", "<unk>")
    for text in TEXT:
        assert fast(text)["input_ids"] == alone.encode(text).ids == tokenizer(text)["input_ids"]
        assert alone.decode(alone.encode(text).ids) == fast.decode(fast(text)["input_ids"], skip_special_tokens=True) == text
    assert set(fast(TEXT[0])) == {"input_ids", "attention_mask"}


# -------------------------------------------------------------------------------------------------------------------- data


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("text", ["Öl\nzwei\n", "Öl\nzwei", "Öl\r\nzwei\r\n"], ids=repr)
def test_lines_are_the_same_plain_and_compressed(tmp_path, text):
    plain, packed = write(tmp_path / "a.de", text), write(tmp_path / "a.de.gz", gzip.compress(text.encode()))
    assert read_lines(plain) == read_lines(packed) == read_lines(str(plain)) == ["Öl", "zwei"]


def test_only_a_line_feed_ends_a_line(tmp_path):
    assert read_lines(write(tmp_path / "a", "one\u2028still one\u0085and one\ntwo\n")) == [
        "one\u2028still one\u0085and one",
        "two",
    ]


def test_pairs_are_line_by_line(tmp_path):
    source, target = write(tmp_path / "a.en", "one\ntwo\n"), write(tmp_path / "a.de", "eins\nzwei\n")
    assert read_parallel(source, target) == [("one", "eins"), ("two", "zwei")]


def test_files_of_different_lengths_are_refused_with_both_names_and_lengths(tmp_path):
    source, target = write(tmp_path / "a.en", "one\ntwo\nthree\n"), write(tmp_path / "a.de", "eins\nzwei\n")
    with pytest.raises(ValueError, match="a.en has 3, .*a.de has 2"):
        read_parallel(source, target)


@pytest.mark.parametrize(
    "text, message",
    [
        ("one\n\nthree\n", "line 2 of 3 is empty"),
        ("one\n \t\n", "line 2 of 2 is empty"),
        ("one\ntwo\n\n", "line 3 of 3 is empty"),
        ("", "line 1 of 1 is empty"),
        (b"one\n\xff\xfe\n", "not UTF-8"),
        ("Öl\n".encode("latin-1"), "not UTF-8"),
    ],
)
def test_a_file_that_is_not_one_sentence_a_line_is_refused_by_name(tmp_path, text, message):
    with pytest.raises(ValueError, match=f"some.text.*{message}"):
        read_lines(write(tmp_path / "some.text", text))


@pytest.mark.parametrize("name", ["nowhere.en", "nowhere.en.gz"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=name):
        read_lines(tmp_path / name)


PACKED = gzip.compress(b"one\n" * 1000, mtime=0)


@pytest.mark.parametrize("data", [b"plain text", PACKED[:30], PACKED[:-8] + b"0" * 8], ids=["plain", "cut", "changed"])
def test_a_damaged_gz_file_is_named(tmp_path, data):
    with pytest.raises((OSError, ValueError), match="some.gz"):
        read_lines(write(tmp_path / "some.gz", data))


def test_both_sides_of_a_pair_end_with_the_end_token(tokenizer):
    [row, _] = encode_pairs([(TEXT[0], TEXT[1]), (TEXT[2], TEXT[3])], tokenizer)
    assert row == {"input_ids": tokenizer(TEXT[0])["input_ids"], "labels": tokenizer(TEXT[1])["input_ids"]}


def test_bleu_is_100_for_the_reference_0_for_other_words_and_ignores_padding(tokenizer):
    labels = tokenizer(TEXT[:4], padding=True, return_tensors="np")["input_ids"]
    masked = labels.copy()
    masked[labels == 0] = -100
    assert bleu_of_ids(labels, masked, tokenizer) == pytest.approx(100)
    others = tokenizer(TEXT[4:8], padding=True, return_tensors="np")["input_ids"]
    assert bleu_of_ids(others, masked, tokenizer) < 10


# ---------------------------------------------------------------------------------------------------------------- training

SMALL = dict(vocab_size=60, hidden_size=32, intermediate_size=64, num_attention_heads=4, encoder_layers=1, decoder_layers=1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """(train files, validation files)."""
    directory = tmp_path_factory.mktemp("corpus")
    return write_corpus(directory, "train", 300, seed=0), write_corpus(directory, "val", 30, seed=1)


def run_of(corpus, output, **changes):
    settings = dict(
        train=corpus[0], validation=corpus[1], output=output, preset="tiny", overrides=SMALL, epochs=3, batch_size=32,
        learning_rate=5e-3, warmup_steps=20, eval_epochs=1, seed=0,
    )  # fmt: skip
    return TranslationRun(**{**settings, **changes})


@pytest.fixture(scope="module")
def short(corpus, tmp_path_factory):
    """A run of three epochs, undisturbed."""
    output = tmp_path_factory.mktemp("short") / "model"
    train_translation(run_of(corpus, output))
    return output


def weights(output):
    return load_file(output / "model.safetensors")


def are_equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def learned(corpus, tmp_path_factory):
    """A run long enough to learn the toy language: its directory and metrics."""
    output = tmp_path_factory.mktemp("learned") / "model"
    overrides = {**SMALL, "dropout": 0.0, "embedding_dropout": 0.0}
    return output, train_translation(run_of(corpus, output, overrides=overrides, epochs=40, eval_epochs=10, batch_size=16))


def test_training_learns_to_translate(learned, corpus):
    output, metrics = learned
    assert metrics["eval_bleu"] > 50
    history = json.loads((max(output.with_name("model-run").glob("checkpoint-*")) / "trainer_state.json").read_text())
    losses = [entry["eval_loss"] for entry in history["log_history"] if "eval_loss" in entry]
    assert losses[0] > losses[-1]


def test_the_checkpoint_loads_and_translates(learned, corpus):
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(learned[0]), AutoTokenizer.from_pretrained(learned[0])
    assert (type(model).__name__, model.config.hidden_size) == ("VanillaSeq2SeqForConditionalGeneration", 32)
    assert (model.generation_config.num_beams, model.generation_config.max_new_tokens) == (5, 128)
    pairs = toy_corpus(20, seed=2)
    outputs = model.generate(**tokenizer([source for source, _ in pairs], return_tensors="pt", padding=True))
    texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    assert sum(text == target for text, (_, target) in zip(texts, pairs, strict=True)) >= 5


def test_the_same_seed_gives_the_same_weights(short, corpus, tmp_path):
    train_translation(run_of(corpus, tmp_path / "again"))
    assert are_equal(weights(tmp_path / "again"), weights(short))
    assert (tmp_path / "again/tokenizer.json").read_text() == (short / "tokenizer.json").read_text()


def test_another_seed_gives_other_weights(short, corpus, tmp_path):
    train_translation(run_of(corpus, tmp_path / "other", seed=1))
    assert not are_equal(weights(tmp_path / "other"), weights(short))


def test_half_stores_float16_that_loads_as_float32(short, corpus, tmp_path):
    train_translation(run_of(corpus, tmp_path / "half", half=True))
    assert are_equal(weights(tmp_path / "half"), {name: weight.half() for name, weight in weights(short).items()})
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "half").dtype == torch.float32


class Stop(Exception):
    """In the place of a process that is killed."""


class StopAt(TrainerCallback):
    """Ends the training once the checkpoint of `step` is saved."""

    def __init__(self, step):
        self.step = step

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Stop


@pytest.mark.parametrize("step", [10, 20], ids=["after one epoch", "after two epochs"])
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(short, corpus, tmp_path, monkeypatch, step):
    run = run_of(corpus, tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(translation, "Seq2SeqTrainer", partial(Seq2SeqTrainer, callbacks=[StopAt(step)]))
        with pytest.raises(Stop):
            train_translation(run)
    assert not run.output.exists()
    torch.randn(7)  # whatever happened in between
    train_translation(run)
    assert are_equal(weights(run.output), weights(short))


def test_a_run_that_goes_on_does_only_the_steps_that_are_left(corpus, tmp_path, monkeypatch):
    run, steps = run_of(corpus, tmp_path / "model", epochs=2), []

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    monkeypatch.setattr(translation, "Seq2SeqTrainer", partial(Seq2SeqTrainer, callbacks=[StopAt(10)]))
    with pytest.raises(Stop):
        train_translation(run)
    monkeypatch.setattr(translation, "Seq2SeqTrainer", partial(Seq2SeqTrainer, callbacks=[Count()]))
    train_translation(run)
    assert steps == list(range(11, 21))


def test_a_checkpoint_that_was_being_written_is_passed_over(short, corpus, tmp_path, monkeypatch):
    """trainer_state.json is written last."""
    run = run_of(corpus, tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(translation, "Seq2SeqTrainer", partial(Seq2SeqTrainer, callbacks=[StopAt(20)]))
        with pytest.raises(Stop):
            train_translation(run)
    (tmp_path / "model-run/checkpoint-20/trainer_state.json").unlink()
    (tmp_path / "model-run/checkpoint-20/optimizer.pt").write_bytes(b"half")
    train_translation(run)
    assert are_equal(weights(run.output), weights(short))


@pytest.mark.parametrize(
    "epochs, eval_epochs, expected", [(2, 1, [10, 20]), (2, 2, [20]), (1, 1, [10]), (1, 2, [10]), (3, 2, [20, 30])]
)
def test_validation_and_checkpoints_come_at_the_end_of_every_so_many_epochs(corpus, tmp_path, epochs, eval_epochs, expected):
    """An epoch has 10 steps, of 32 of 300 sentences. Going on is exact only from the end of an epoch."""
    train_translation(run_of(corpus, tmp_path / "model", epochs=epochs, eval_epochs=eval_epochs))
    checkpoints = {int(path.name.removeprefix("checkpoint-")): path for path in (tmp_path / "model-run").glob("checkpoint-*")}
    assert sorted(checkpoints) == expected
    state = json.loads((checkpoints[max(checkpoints)] / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_bleu" in entry] == expected


def test_an_existing_output_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "model").mkdir()
    missing = (tmp_path / "nowhere.en", tmp_path / "nowhere.de")
    with pytest.raises(FileExistsError, match=r"model exists already.*--force"):
        train_translation(run_of((missing, missing), tmp_path / "model"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_force_trains_again_with_the_settings_given_now(short, corpus, tmp_path):
    train_translation(run_of(corpus, tmp_path / "model", epochs=1, seed=1))
    train_translation(run_of(corpus, tmp_path / "model"), force=True)
    assert are_equal(weights(tmp_path / "model"), weights(short))


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(preset="huge"), ValueError, "no preset 'huge', expected one of .*base.*big.*tiny"),
        (dict(overrides={**SMALL, "dropout": 1.5}), ValueError, "dropout must be in .* got 1.5"),
        (dict(overrides={**SMALL, "dropuot": 0.3}), ValueError, "dropuot"),
        (dict(overrides={**SMALL, "vocab_size": 5000}), ValueError, "expected 5000"),
    ],
)
def test_settings_that_cannot_be_are_refused_and_nothing_is_written(corpus, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        train_translation(run_of(corpus, tmp_path / "model", **changes))
    assert list(tmp_path.iterdir()) == []
