"""Tests of the verbs of the command, end to end on tiny data."""

import contextlib
import io
import json
import os
import re

import pytest
import sacrebleu
from checkpoints import toy_corpus
from command_line import command, main
from messages import check_message
from training_command import training
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

TEXTS = [source for source, _ in toy_corpus(6, seed=9)]
SHAPE = dict(
    hidden_size=32,
    intermediate_size=40,
    num_attention_heads=4,
    encoder_layers=1,
    decoder_layers=1,
    head_dim=6,
)
SETTINGS = [
    "tokenizer.vocab_size=60",
    "training.num_train_epochs=5",
    "training.tokens_per_update=256",
    "training.warmup_steps=20",
]
SETTINGS += [
    "training.learning_rate=1e-2",
    *(f"model.{name}={value}" for name, value in SHAPE.items()),
]


def run_here(*arguments):
    """Run the command in this process, where torch is loaded. Return its output and its errors."""
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        main([str(argument) for argument in arguments])
    return printed.getvalue(), errors.getvalue()


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """Train a checkpoint with the command, in this process; return its path and what it printed."""
    output = tmp_path_factory.mktemp("trained") / "model"
    return output, run_here(*training(corpus, *SETTINGS), "--output", output)[0]


@pytest.fixture(scope="module")
def translator(trained):
    """Export the trained checkpoint with the command, in this process.

    Return its path, what it printed, and what it wrote for people.
    """
    out = trained[0].with_name("out")
    return out, *run_here("export", trained[0], out)


def test_train_writes_a_checkpoint_and_prints_the_metrics(trained):
    output, printed = trained
    assert 0 <= json.loads(printed.splitlines()[-1])["validation_bleu"] <= 100
    config = json.loads((output / "config.json").read_text())
    assert (
        config["vocab_size"],
        config["hidden_size"],
        config["decoder_layers"],
        config["head_dim"],
    ) == (60, 32, 1, 6)
    assert (output / "tokenizer.json").is_file()


def test_export_prints_path_file_sizes_and_parity(translator):
    out, printed, _ = translator
    facts = json.loads(printed.splitlines()[-1])
    assert facts["out"] == str(out)
    sizes = {
        path.relative_to(out).as_posix(): path.stat().st_size
        for path in out.rglob("*")
        if path.is_file() and path.name not in ("manifest.json", "README.md")
    }
    assert facts["files"] == sizes
    assert facts["parity"]["failures"] == 0 < facts["parity"]["cases"]


def test_export_prints_size_error_and_next_command_for_people(translator):
    out, _, errors = translator
    size, error, next_command = errors.splitlines()[-3:]
    graphs = sum(path.stat().st_size for path in (out / "onnx").iterdir())
    assert size == f"{out} has {graphs / 1e6:,.1f} MB of graphs and weights"
    assert re.fullmatch(r"fp32: largest error against torch \d\.\de-\d\d, tolerance 5e-05", error)
    assert next_command == f'next: vanilla-transformer predict {out} "A dog runs."'


def test_export_records_the_pipeline_that_a_trained_translator_carries(translator):
    manifest = json.loads((translator[0] / "manifest.json").read_text())
    assert manifest["pipeline"] == "translation"


def test_verify_prints_its_report_and_succeeds(trained, translator, capsys):
    main(["verify", str(translator[0]), str(trained[0]), "--cases", "7"])
    line = capsys.readouterr().out.removesuffix("\n")
    assert line.startswith("7 cases: ")
    assert line.endswith("0 failures")


@pytest.mark.parametrize(
    "options, generate",
    [
        ([], {}),
        (["--num-beams", "1", "--max-new-tokens", "7"], dict(num_beams=1, max_new_tokens=7)),
    ],
)
def test_generate_prints_same_translations_as_transformers(trained, translator, options, generate):
    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(trained[0]),
        AutoTokenizer.from_pretrained(trained[0]),
    )
    outputs = model.generate(**tokenizer(TEXTS, return_tensors="pt", padding=True), **generate)
    expected = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    assert any(expected)
    for arguments, stdin in ((TEXTS, None), ([], "".join(text + "\n" for text in TEXTS))):
        done = command("generate", translator[0], *arguments, *options, input=stdin)
        assert (done.stdout.split("\n"), done.stderr, done.returncode) == ([*expected, ""], "", 0)


def test_evaluate_prints_same_bleu_for_torch_and_onnxruntime(trained, translator, corpus, capsys):
    arguments = (
        "--source",
        corpus[2],
        "--references",
        corpus[3],
        "--num-beams",
        2,
        "--max-new-tokens",
        12,
        "--batch-size",
        7,
    )
    actual = []
    for directory in (trained[0], translator[0]):
        main(["evaluate", str(directory), *map(str, arguments)])
        actual.append(json.loads(capsys.readouterr().out))
    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(trained[0]),
        AutoTokenizer.from_pretrained(trained[0]),
    )
    sources, targets = (file.read_text(encoding="utf-8").splitlines() for file in corpus[2:])
    outputs = [
        model.generate(**tokenizer(source, return_tensors="pt"), num_beams=2, max_new_tokens=12)
        for source in sources
    ]
    texts = [tokenizer.decode(output[0], skip_special_tokens=True) for output in outputs]
    assert [result["engine"] for result in actual] == ["torch", "onnxruntime"]
    assert [result["sentences"] for result in actual] == [20, 20]
    expected = sacrebleu.corpus_bleu(texts, [targets]).score
    assert [result["bleu"] for result in actual] == pytest.approx([expected, expected], abs=0.01)
    assert expected > 0


def test_generate_prints_one_line_per_input_line(translator):
    done = command(
        "generate",
        translator[0],
        "--max-new-tokens",
        3,
        input="the man sees\u2028a dog.\nthe boy.\n",
    )
    assert (done.returncode, done.stdout.count("\n")) == (0, 2)


def test_generate_keeps_empty_input_lines_and_rejects_empty_arguments(
    translator,
):
    done = command("generate", translator[0], input="a dog.\n\na man.\n")
    assert (done.returncode, [bool(line) for line in done.stdout.split("\n")]) == (
        0,
        [True, False, True, False],
    )
    done = command("generate", translator[0], "a dog.", "")
    assert done.returncode == 1
    check_message(done.stderr, seen=(1, 2, "''"))
    assert done.stderr.count("\n") == 1


def test_generate_needs_neither_torch_nor_transformers(translator, tmp_path):
    """Modules that raise ImportError shadow the real ones."""
    for name in ("torch", "transformers", "onnx", "safetensors"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed')")
    search = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = command("generate", translator[0], TEXTS[0], env={**os.environ, "PYTHONPATH": search})
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("options", [["--num-beams", "99999999"], ["--bleu-tokenize", "nope"]])
def test_invalid_evaluate_options_are_usage_errors(trained, corpus, options, capsys):
    with pytest.raises(SystemExit) as caught:
        main(
            [
                "evaluate",
                str(trained[0]),
                "--source",
                str(corpus[2]),
                "--references",
                str(corpus[3]),
                *options,
            ]
        )
    assert caught.value.code == 2
    expected = {
        "99999999": "is 99999999",
        "nope": "unknown bleu_tokenize 'nope'; did you mean 'none'?",
    }
    assert expected[options[1]] in capsys.readouterr().err
