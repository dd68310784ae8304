"""Tests of the scripts in examples/: they are short and run as their docstrings say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from checkpoints import OPINIONS, toy_corpus
from pages import ROOT, run_script
from standins import classifier, translator
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer_export import Runtime, export

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_tested(path):
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert f"python examples/{path.name}" in text
    assert f'"examples/{path.name}"' in Path(__file__).read_text()


@pytest.mark.slow
def test_one_graph_example_translates(tmp_path, monkeypatch, capsys):
    """The JavaScript versions are tested with the other clients."""
    checkpoint = ROOT / "model_cards/vanilla-seq2seq-tiny-multi30k-en-de"
    texts = ["A man sleeps.", "A dog runs through the grass."]
    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(checkpoint),
        AutoTokenizer.from_pretrained(checkpoint),
    )
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    expected = model.generate(
        inputs.input_ids, attention_mask=inputs.attention_mask, num_beams=1, max_new_tokens=64
    )
    export(checkpoint, tmp_path / "translator", cases=1, generate="greedy")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    run_script("examples/one_graph/generate.py", "translator", *texts)
    assert capsys.readouterr().out.splitlines() == tokenizer.batch_decode(
        expected, skip_special_tokens=True
    )


@pytest.mark.slow
@pytest.mark.skipif(
    "ONNXRUNTIME_INCLUDE" not in os.environ,
    reason="ONNXRUNTIME_INCLUDE names no headers of onnxruntime",
)
def test_one_graph_example_in_c_generates(exported, tmp_path):
    """Compile with the headers of a release and the library of the Python package."""
    [library] = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    program, source = tmp_path / "generate", ROOT / "examples/one_graph/generate.c"
    headers = f"-I{os.environ['ONNXRUNTIME_INCLUDE']}"
    command = ["cc", headers, source, "-o", program, library, f"-Wl,-rpath,{library.parent}"]
    subprocess.run(command, check=True)
    export(exported("seq2seq").checkpoint, tmp_path / "export", cases=1, generate="greedy")
    done = subprocess.run(
        [program, tmp_path / "export/onnx/generate.onnx", "12", "5", "9", "30", "2"],
        capture_output=True,
        text=True,
    )
    expected = Runtime(exported("seq2seq").directory).generate(
        np.array([[5, 9, 30, 2]]), max_new_tokens=12, num_beams=1
    )
    assert (done.stderr, list(map(int, done.stdout.split()))) == ("", expected[0].tolist())


def test_train_translator_saves_model_and_translates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pairs = toy_corpus(60, seed=0)
    for name, lines in zip(("train.en", "train.de"), zip(*pairs, strict=True), strict=True):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    sizes = ("--vocab-size", "60", "--hidden-size", "16", "--epochs", "1")
    run_script(
        "examples/train_translator.py", "train.en", "train.de", "--output", "my-model", *sizes
    )
    assert (tmp_path / "my-model" / "model.safetensors").is_file()
    translated = re.findall(r"^(.+) -> ", capsys.readouterr().out, re.MULTILINE)
    assert translated == [source for source, _ in pairs[:3]]


def test_convert_bert_matches_source_and_is_reproducible(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_script("examples/convert_bert.py", "--output", "encoder")
    printed = capsys.readouterr().out
    assert "VanillaEncoderModel" in printed
    assert float(re.search(r"last hidden states: (\S+)", printed)[1]) < 1e-5
    run_script("examples/convert_bert.py", "encoder-source", "--output", "again")
    assert (tmp_path / "encoder/model.safetensors").read_bytes() == (
        tmp_path / "again/model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("flags", [(), ("--norm-first",)])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_convert_torch_transformer_matches_torch(flags, capsys):
    run_script("examples/convert_torch_transformer.py", *flags)
    printed = capsys.readouterr().out
    assert float(re.search(r"last hidden states: (\S+)", printed)[1]) < 1e-5


def test_generate_without_torch_uses_existing_export(tmp_path, monkeypatch, capsys):
    """The export exists already: torch is imported in this process, so an import by the example
    would not be noticed."""
    monkeypatch.chdir(tmp_path)
    export(translator(tmp_path / "checkpoint"), tmp_path / "made", cases=1)
    run_script(
        "examples/generate_without_torch.py",
        "checkpoint",
        "made",
        "the dog",
        "a bird",
        "--num-beams",
        "2",
    )
    assert re.findall(r"^(.+) -> ", capsys.readouterr().out, re.MULTILINE) == ["the dog", "a bird"]


@pytest.mark.slow
def test_generate_without_torch_exports_in_another_process(tmp_path):
    script = str(ROOT / "examples" / "generate_without_torch.py")
    command = [
        sys.executable,
        script,
        translator(tmp_path / "checkpoint"),
        str(tmp_path / "made"),
        "the dog",
    ]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "the dog -> " in printed and "torch is imported: False" in printed


def test_classify_prints_label_and_score_of_each_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    export(classifier(tmp_path / "checkpoint"), tmp_path / "made", cases=1)
    texts = [line.split(" ", 1)[1] for line in OPINIONS[:3]]
    run_script("examples/classify.py", "made", *texts)
    lines = capsys.readouterr().out.splitlines()
    assert [re.fullmatch(r"(?:good|bad) [01]\.\d\d (.+)", line)[1] for line in lines] == texts
