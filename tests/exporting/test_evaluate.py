"""Task metrics match their definitions, and torch and onnxruntime give the same values."""

import functools
import gzip
import json
import math
import sys
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
import torch
import transformers
from checkpoints import copy_folder, edit_json, perturbed, seal, toy_corpus
from command_line import main, read_error
from filelock import FileLock
from messages import raises
from tokenizers import Tokenizer, models, pre_tokenizers

from vanilla_transformer.training.data import read_lines
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer_export import evaluate, export
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.exporting import evaluation as module
from vanilla_transformer_export.exporting.evaluation import compare

SIZES = dict(vocab_size=60, hidden_size=32, intermediate_size=40, num_attention_heads=4)
LABELS = {0: "good", 1: "bad", 2: "neither"}
MODELS = {
    "seq2seq": ("VanillaSeq2SeqForConditionalGeneration", dict(encoder_layers=1, decoder_layers=1)),
    "causal": ("VanillaDecoderForCausalLM", dict(num_hidden_layers=1)),
    "masked-lm": ("VanillaEncoderForMaskedLM", dict(num_hidden_layers=1)),
    "classifier": (
        "VanillaEncoderForSequenceClassification",
        dict(num_hidden_layers=1, id2label=LABELS),
    ),
    "decoder-classifier": (
        "VanillaDecoderForSequenceClassification",
        dict(num_hidden_layers=1, id2label=LABELS),
    ),
    "seq2seq-classifier": (
        "VanillaSeq2SeqForSequenceClassification",
        dict(encoder_layers=1, decoder_layers=1, id2label=LABELS),
    ),
    "encoder": ("VanillaEncoderModel", dict(num_hidden_layers=1)),
}
TEXTS = [text for text, _ in toy_corpus(24, seed=5)]


def train_toy_tokenizer():
    tokenizer = train_tokenizer([text for pair in toy_corpus(50, seed=0) for text in pair], 59)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    return tokenizer


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function from a name of `MODELS` and a target to the checkpoint and the export."""
    root = tmp_path_factory.mktemp("evaluate")

    @functools.cache
    def make(name, target="portable"):
        checkpoint, directory = root / name, root / f"{name}-{target}"
        with FileLock(f"{directory}.lock"):
            if not directory.exists():
                architecture, fields = MODELS[name]
                perturbed(architecture, {**SIZES, **fields}).save_pretrained(checkpoint)
                train_toy_tokenizer().save_pretrained(checkpoint)
                export(checkpoint, directory, cases=2, target=target)
        return checkpoint, directory

    return make


@pytest.fixture
def files(tmp_path):
    """Paths of a file with one text per line, and of a file with the name or id of its label."""
    (tmp_path / "text").write_text("\n".join(TEXTS) + "\n")
    (tmp_path / "labels").write_text("\n".join(["good", "1", "neither", "bad"] * 6) + "\n")
    return {"text": tmp_path / "text", "labels": tmp_path / "labels"}


def load(checkpoint):
    from vanilla_transformer_export import load_checkpoint

    return load_checkpoint(checkpoint), transformers.AutoTokenizer.from_pretrained(checkpoint)


def evaluate_both(exported, name, target="portable", **settings):
    """Evaluate with torch and onnxruntime, check that the results are equal, and return them."""
    checkpoint, directory = exported(name, target)
    expected, actual = evaluate(checkpoint, **settings), evaluate(directory, **settings)
    assert (expected.pop("engine"), actual.pop("engine")) == ("torch", "onnxruntime")
    assert actual == pytest.approx(expected, rel=1e-4)
    return expected


@pytest.mark.parametrize("target", ["portable", "cpu"])
@torch.no_grad()
def test_perplexity_matches_torch_loss_within_windows(exported, files, monkeypatch, target):
    monkeypatch.setattr(module, "WINDOW", 10)
    result = evaluate_both(exported, "causal", target, text=files["text"], batch_size=4)
    model, tokenizer = load(exported("causal")[0])
    ids = tokenizer(files["text"].read_text(), add_special_tokens=False, return_tensors="pt")[
        "input_ids"
    ][0]
    windows = [window for window in ids.split(10) if len(window) > 1]
    losses = [
        model(window[None], labels=window[None]).loss.item() * (len(window) - 1)
        for window in windows
    ]
    count = sum(len(window) - 1 for window in windows)
    assert result["tokens"] == count > 100 and len(ids) % 10
    assert result["perplexity"] == pytest.approx(math.exp(sum(losses) / count), rel=1e-4)


@pytest.mark.parametrize("target", ["portable", "cpu"])
@torch.no_grad()
def test_last_window_of_one_token_is_ignored(exported, files, monkeypatch, target):
    model, tokenizer = load(exported("causal")[0])
    ids = tokenizer(files["text"].read_text(), add_special_tokens=False, return_tensors="pt")[
        "input_ids"
    ]
    monkeypatch.setattr(module, "WINDOW", ids.shape[1] - 1)
    result = evaluate_both(exported, "causal", target, text=files["text"])
    assert result["tokens"] == ids.shape[1] - 2
    assert result["perplexity"] == pytest.approx(
        math.exp(model(ids[:, :-1], labels=ids[:, :-1]).loss), rel=1e-4
    )


def test_perplexity_does_not_depend_on_max_logits(exported, files, monkeypatch):
    monkeypatch.setattr(module, "WINDOW", 20)
    expected = evaluate(exported("causal")[0], text=files["text"])["perplexity"]
    monkeypatch.setattr(module, "MAX_LOGITS", 1)
    assert evaluate(exported("causal")[0], text=files["text"])["perplexity"] == pytest.approx(
        expected, rel=1e-5
    )


def test_text_may_be_compressed_and_have_empty_lines(exported, tmp_path):
    with gzip.open(tmp_path / "text.gz", "wt") as file:
        file.write("the old dog\n\nsees a man.\n")
    assert evaluate_both(exported, "causal", text=tmp_path / "text.gz")["tokens"] > 3


@torch.no_grad()
def test_pseudo_perplexity_masks_each_token_in_turn(exported, files):
    result = evaluate_both(exported, "masked-lm", text=files["text"], batch_size=7)
    model, tokenizer = load(exported("masked-lm")[0])
    total = count = 0
    for text in TEXTS:
        encoded = tokenizer(text, return_special_tokens_mask=True)
        for place, special in enumerate(encoded["special_tokens_mask"]):
            if not special:
                ids = torch.tensor([encoded["input_ids"]])
                ids[0, place] = tokenizer.mask_token_id
                total -= (
                    model(ids).logits[0, place].log_softmax(-1)[encoded["input_ids"][place]].item()
                )
                count += 1
    assert result == pytest.approx(
        {"pseudo_perplexity": math.exp(total / count), "tokens": count}, rel=1e-4
    )


def test_pseudo_perplexity_of_a_long_line_keeps_its_tokens_once(tmp_path):
    """Equal logits give each of four tokens the probability 1/4. A copy of the line for each of its
    tokens would take 70 MB."""
    tokenizer = Tokenizer(models.WordLevel({"<mask>": 0, "a": 1, "b": 2, "c": 3}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    engine = SimpleNamespace(
        mask_token_id=0,
        config={"vocab_size": 4, "pad_token_id": 0},
        encode=lambda texts, special_tokens: tokenizer.encode_batch(texts),
        logits=lambda ids, mask: np.zeros((*ids.shape, 4), np.float32),
    )
    (tmp_path / "text").write_text("a b c " * 1000 + "\n")
    tracemalloc.start()
    try:
        result = module.pseudo_perplexity(engine, tmp_path / "text", 8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result == {"pseudo_perplexity": 4.0, "tokens": 3000}
    assert peak < 20e6


def test_windows_lines_and_other_spaces_give_same_tokens(exported, files, tmp_path):
    clean = evaluate_both(exported, "masked-lm", text=files["text"])
    lines = [
        text.replace(" ", space)
        for text, space in zip(TEXTS, ["\t", "\u00a0", "  ", " \u3000"] * 6)
    ]
    (tmp_path / "text").write_bytes(
        ("\ufeff" + "".join(f" {line} \r\n" for line in lines)).encode()
    )
    assert evaluate_both(exported, "masked-lm", text=tmp_path / "text") == pytest.approx(clean)
    checkpoint, directory = exported("masked-lm")
    expected = train_toy_tokenizer()(TEXTS)["input_ids"]
    for encode in (
        module.TorchEngine(checkpoint).encode,
        module.OnnxEngine(directory).encode,
    ):
        assert [
            encoding.ids for encoding in encode(read_lines(tmp_path / "text"), True)
        ] == expected


@pytest.mark.parametrize(
    "name",
    [
        "classifier",
        "decoder-classifier",
        pytest.param("seq2seq-classifier", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_accuracy_is_share_of_correct_labels_by_name_or_id(exported, files, name):
    actual = evaluate_both(exported, name, text=files["text"], labels=files["labels"], batch_size=5)
    model, tokenizer = load(exported(name)[0])
    expected = [0, 1, 2, 1] * 6
    right = [
        model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits.argmax()
        for text in TEXTS
    ]
    right = sum(int(got) == label for got, label in zip(right, expected))
    assert actual == {"accuracy": pytest.approx(right / 24, abs=1e-4), "sentences": 24}
    assert 0 < right < 24


def test_compare_returns_both_metrics_and_difference(exported, files):
    checkpoint, directory = exported("classifier")
    result = compare(directory, checkpoint, text=files["text"], labels=files["labels"])
    accuracy = evaluate(checkpoint, text=files["text"], labels=files["labels"])["accuracy"]
    assert result == {
        "metric": "accuracy",
        "onnxruntime": accuracy,
        "torch": accuracy,
        "difference": 0,
    }


def test_verify_with_text_prints_metric_of_both_engines(exported, files, capsys):
    checkpoint, directory = exported("causal", "cpu")
    main(["verify", str(directory), str(checkpoint), "--cases", "2", "--text", str(files["text"])])
    report, metric = capsys.readouterr().out.splitlines()
    assert report.startswith("2 cases: ")
    metric = json.loads(metric)
    assert metric["metric"] == "perplexity" and metric["torch"] > 1
    assert metric["difference"] == pytest.approx(metric["onnxruntime"] - metric["torch"], abs=1e-5)
    assert abs(metric["difference"]) < 1e-3 * metric["torch"]


def test_verify_with_references_compares_bleu(exported, tmp_path, capsys, monkeypatch):
    for side, lines in zip(("en", "de"), zip(*toy_corpus(6, seed=1))):
        (tmp_path / side).write_text("\n".join(lines) + "\n")
    checkpoint, directory = exported("seq2seq", "cpu")
    texts = ["--source", str(tmp_path / "en"), "--references", str(tmp_path / "de")]
    words = ["verify", str(directory), str(checkpoint), *texts, "--cases", "1"]
    main(words)
    result = json.loads(capsys.readouterr().out.splitlines()[1])
    assert (result["metric"], result["difference"]) == ("bleu", 0)
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    assert read_error(*words).endswith(": pip install 'vanilla-transformer[train,cpu]'")


@pytest.mark.parametrize(
    "settings", [dict(num_return_sequences=2, num_beams=3), dict(prompt_lookup_num_tokens=3)]
)
def test_bleu_of_one_translation_per_text_whatever_the_checkpoint_sets(
    exported, tmp_path, settings
):
    original, _ = exported("seq2seq", "cpu")
    checkpoint = copy_folder(original, tmp_path / "checkpoint")
    edit_json(checkpoint / "generation_config.json", **settings)
    export(checkpoint, tmp_path / "export", cases=2, target="cpu")
    sources = [source for source, _ in toy_corpus(6, seed=1)]
    model, tokenizer = load(checkpoint)
    inputs = [tokenizer(source, return_tensors="pt") for source in sources]
    outputs = [
        tokenizer.decode(model.generate(**row, num_return_sequences=1)[0], True) for row in inputs
    ]
    references = [f"{output} and more" for output in outputs]
    for name, lines in (("en", sources), ("de", references)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    files = dict(source=tmp_path / "en", references=tmp_path / "de")
    expected = round(sacrebleu.corpus_bleu(outputs, [references]).score, 2)
    for directory in (checkpoint, tmp_path / "export"):
        assert evaluate(directory, **files)["bleu"] == expected
        with raises(UsageError, seen=("num_return_sequences", 2), expected=1):
            evaluate(directory, **files, num_return_sequences=2)


def test_bleu_uses_requested_tokenization(exported, tmp_path, capsys):
    checkpoint, _ = exported("seq2seq", "cpu")
    sources = [source for source, _ in toy_corpus(6, seed=1)]
    model, tokenizer = load(checkpoint)
    outputs = [
        tokenizer.decode(model.generate(**tokenizer(source, return_tensors="pt"))[0], True)
        for source in sources
    ]
    # the comma is a token for 13a, and the end of a word for none
    references = [f"{output}, {output}" for output in outputs]
    for name, lines in (("en", sources), ("de", references)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    for tokenize in ("none", "13a"):
        files = ["--source", str(tmp_path / "en"), "--references", str(tmp_path / "de")]
        main(["evaluate", str(checkpoint), *files, "--bleu-tokenize", tokenize])
        result = json.loads(capsys.readouterr().out)
        assert result["bleu"] == round(
            sacrebleu.corpus_bleu(outputs, [references], tokenize=tokenize).score, 2
        )
        assert f"tok:{tokenize}" in result["signature"]


# ------------------------------------------------------------------------------------ invalid input


@pytest.mark.parametrize(
    "name, given, seen, expected",
    [
        ("encoder", ["text"], "VanillaEncoderModel", "VanillaEncoderForMaskedLM"),
        ("causal", [], "VanillaDecoderForCausalLM", "--text"),
        ("causal", ["text", "labels"], ("--text", "--labels"), ()),
        ("classifier", ["text"], "--text", "--labels"),
        ("seq2seq", ["text"], ("--source", "--text"), "--references"),
    ],
)
def test_error_names_unexpected_or_missing_files(exported, files, name, given, seen, expected):
    for directory in exported(name):
        with raises(ValueError, seen=seen, expected=expected):
            evaluate(directory, **{file: files[file] for file in given})


def test_error_names_unknown_labels(exported, files):
    files["labels"].write_text("\n".join(["good", "ugly", "7"] * 8) + "\n")
    with raises(ValueError, seen=(7, "ugly"), expected=(0, 1, 2, "bad", "good")):
        evaluate(exported("classifier")[1], **files)


def test_different_numbers_of_texts_and_labels_are_rejected(exported, files):
    files["labels"].write_text("good\n")
    with raises(ValueError, seen="text"):
        evaluate(exported("classifier")[1], **files)


@pytest.fixture
def pair(tmp_path):
    """Paths of a file of sentences and of a file of their translations."""
    for side, lines in zip(("source", "references"), zip(*toy_corpus(4, seed=1))):
        (tmp_path / side).write_text("\n".join(lines) + "\n")
    return {side: tmp_path / side for side in ("source", "references")}


def test_unknown_bleu_tokenize_is_rejected_with_suggestion(exported, pair, monkeypatch):
    monkeypatch.setattr(module, "read_files", None)  # files are not read
    for directory in exported("seq2seq"):
        with raises(UsageError, seen=("bleu_tokenize", "nope", "none")):
            evaluate(directory, **pair, bleu_tokenize="nope")


def test_device_is_that_of_the_export_and_not_of_a_checkpoint(exported, pair, capsys):
    checkpoint, directory = exported("seq2seq")
    files = [f"--{side}={path}" for side, path in pair.items()]
    main(["evaluate", str(directory), *files, "--device", "cpu"])
    expected = evaluate(directory, **pair)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == expected
    with raises(OSError, seen="CUDA"):
        evaluate(directory, **pair, device="cuda")
    with raises(UsageError, seen=("device", "cpu", "checkpoint"), expected="an export"):
        evaluate(checkpoint, **pair, device="cpu")


@pytest.mark.parametrize("name", ["engine", "self", "texts", "input_ids", "num_beam"])
def test_options_named_like_arguments_are_rejected_as_unknown(exported, pair, name):
    with raises(UsageError, seen=name):
        evaluate(exported("seq2seq")[1], **pair, **{name: 1})


def test_perplexity_of_tokens_outside_vocabulary_is_rejected(exported, files, tmp_path):
    directory = copy_folder(exported("causal")[1], tmp_path)
    larger = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = larger["model"]["vocab"]
    larger["model"]["vocab"] = {
        token: index + 1000 * (index > 40) for token, index in vocabulary.items()
    }
    (directory / "tokenizer.json").write_text(json.dumps(larger))
    seal(directory)
    with raises(ValueError, expected=("vocab_size", 60)):
        evaluate(directory, text=files["text"])


def test_error_names_missing_checkpoint(tmp_path, files):
    with raises(FileNotFoundError, seen="nowhere"):
        evaluate(tmp_path / "nowhere", text=files["text"])


def test_generation_options_are_rejected_for_perplexity(exported, files):
    with raises(ValueError, seen="num_beams"):
        evaluate(exported("causal")[1], text=files["text"], num_beams=2)


@pytest.mark.parametrize("text, count", [("", 0), ("a", 1)])
def test_perplexity_of_fewer_than_2_tokens_is_rejected(exported, tmp_path, text, count):
    (tmp_path / "text").write_text(text)
    with raises(ValueError, seen=f"{count} tokens", expected=2):
        evaluate(exported("causal")[1], text=tmp_path / "text")


def test_tokenizer_without_mask_token_is_rejected(exported, files, tmp_path):
    directory = copy_folder(exported("masked-lm")[1], tmp_path)
    edit_json(directory / "tokenizer_config.json", mask_token=None)
    seal(directory)
    with raises(ValueError, seen="mask"):
        evaluate(directory, text=files["text"])


@pytest.mark.parametrize("content, seen, expected", [("[1]", (), "JSON"), ("{", ("JSON",), ())])
def test_error_names_invalid_tokenizer_config(exported, files, tmp_path, content, seen, expected):
    directory = copy_folder(exported("masked-lm")[1], tmp_path)
    (directory / "tokenizer_config.json").write_text(content)
    seal(directory)
    with raises(ValueError, seen=("tokenizer_config.json", *seen), expected=expected):
        evaluate(directory, text=files["text"])


def test_rows_of_similar_length_are_batched_together():
    rows = ["x" * length for length in (9, 2, 7, 1, 8)]
    assert module.batches(rows, 2) == [[3, 1], [2, 4], [0]]
