"""Tests of the command `predict`."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import perturbed
from command_line import main
from heads import LABELS, MANY, PAIRS
from messages import check_message, raises
from PIL import Image
from pipelines_compared import CONTEXTS, QUESTIONS, same
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from vanilla_transformer_export import ImageRuntime, export


def run_predict(capsys, *arguments):
    capsys.readouterr()
    main(["predict", *map(str, arguments)])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_predict_runs_task_of_export(made, translator, capsys):
    runtime = made("classify")[1]
    pair = json.dumps(dict(zip(("text", "text_pair"), PAIRS[0])))
    actual = run_predict(capsys, runtime.path.parent, "a man", pair, "--set", "top_k=null")
    same(
        actual, [*runtime.classify(["a man"], top_k=None), *runtime.classify(PAIRS[:1], top_k=None)]
    )
    assert {entry["label"] for entry in actual[0]} == set(LABELS.values())
    labels = ["--task", "zero-shot", "--set", 'candidate_labels=["a", "b"]']
    same(
        run_predict(capsys, runtime.path.parent, "a man", *labels),
        runtime.zero_shot(["a man"], ["a", "b"]),
    )
    runtime = made("answer")[1]
    question = json.dumps({"question": QUESTIONS[0], "context": CONTEXTS[0]})
    same(
        run_predict(capsys, runtime.path.parent, question),
        runtime.answer(QUESTIONS[:1], CONTEXTS[:1]),
    )
    directory = translator.path.parent
    options = ["--set", "max_new_tokens=9"]
    expected = translator.generate(["w5 w6"], max_new_tokens=9)
    for extra_options in ([], ["--task", "translate"], ["--max-new-tokens", "9"]):
        capsys.readouterr()
        main(["predict", str(directory), "w5 w6", *options, *extra_options])
        assert capsys.readouterr().out.splitlines() == expected
    options = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 9}
    given = [f"--set={name}={value}" for name, value in options.items()]
    main(["predict", str(directory), "w5 w6", "w7", *given])
    assert capsys.readouterr().out.splitlines() == [
        text for given in ("w5 w6", "w7") for text in translator.generate([given], **options)
    ]


def test_predict_reads_and_writes_json_lines(made, tmp_path, capsys, monkeypatch):
    runtime = made("tag")[1]
    lines = [MANY[3], "", MANY[0], *MANY[4:]]
    (tmp_path / "in").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    options = ["--set", "aggregation_strategy=simple", "--batch-size", "2"]
    call = [runtime.path.parent, "--input", tmp_path / "in", *options]
    [report] = run_predict(capsys, *call, "--output", tmp_path / "out")
    assert (report["lines"], report["bad"]) == (len(lines), 0)
    result = [
        json.loads(line) for line in (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    ]
    first, _, third, *_ = expected = runtime.tag(lines, aggregation_strategy="simple")
    same(result, expected)
    same(run_predict(capsys, *call), result)
    with raises(SystemExit, seen="out", expected="--force"):
        run_predict(capsys, *call, "--output", tmp_path / "out")
    objects = ["", json.dumps({"text": MANY[0]}), MANY[3]]
    given = io.TextIOWrapper(io.BytesIO("\n".join(objects).encode()))
    monkeypatch.setattr("sys.stdin", given)
    same(run_predict(capsys, runtime.path.parent, *options), [[], third, first])


def test_blank_text_has_result_where_the_task_takes_it(made, tmp_path, capsys):
    runtime = made("classify")[1]
    expected = runtime.classify(["", " "])
    same(run_predict(capsys, runtime.path.parent, "", " "), expected)
    (tmp_path / "in.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
    results = run_predict(capsys, runtime.path.parent, "--input", tmp_path / "in.jsonl")
    same([result["prediction"] for result in results], expected)
    zero_shot = ["--task", "zero-shot", "--set", 'candidate_labels=["a"]']
    with raises(SystemExit, seen=("argument 2", "' '"), expected="not blank"):
        run_predict(capsys, runtime.path.parent, "a", " ", *zero_shot)


def test_number_of_bad_lines_is_on_standard_error(made, tmp_path, capsys):
    (tmp_path / "in").write_text(f"a\n{'b' * 1_000_001}\nc\n")
    files = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    main(["predict", str(made("classify")[1].path.parent), *files])
    reasons = f"{tmp_path / 'out'}.bad.jsonl"
    assert f"1 of 3 lines are bad and have no result: {reasons}" in capsys.readouterr().err
    assert "1,000,000 bytes" in Path(reasons).read_text()


@pytest.mark.parametrize(
    "name, arguments, seen, expected, code",
    [
        (
            "classify",
            ["a", "--task", "tag"],
            ("tag", "VanillaEncoderForSequenceClassification"),
            (),
            2,
        ),
        ("classify", ["a", "--task", "nothing"], (), "classify", 2),
        ("classify", ["a", "--set", "top=1"], ("classify", "top"), "top_k", 2),
        ("answer", ["a", "--set", "max_windows=3"], ("answer", "max_windows"), "doc_stride", 2),
        ("tag", ["a", "--set", "max_windows=3"], ("tag", "max_windows"), "stride", 2),
        ("classify", ["a", "--task", "zero-shot"], ("zero_shot", "candidate_labels"), "--set", 2),
        ("classify", ["a", "--input", "in"], "--input", (), 2),
        ("classify", ["a", "--output", "out"], ("--output", "--output-dir", "--input"), (), 2),
        ("classify", ["a", "--force"], ("--force", "--output"), (), 2),
        ("classify", ["a", "--num-beams", "2"], ("classify", "num_beams"), (), 2),
        ("classify", ["a"] * 2 + ['{"text": "a"'], (3, "JSON"), (), 1),
        ("classify", ['{"question": "a"}'], (1, "question"), "text_pair", 1),
        ("answer", ["who ?"], (1, "who ?"), "JSON", 1),
        ("answer", ['{"question": "a", "context": ""}'], (1, 0, "''"), (), 1),
    ],
)
def test_wrong_arguments_exit_with_one_line_error(
    made, capsys, name, arguments, seen, expected, code
):
    export = made(name)[1].path.parent
    capsys.readouterr()  # discards the output of the export
    with pytest.raises(SystemExit) as stopped:
        main(["predict", str(export), *arguments])
    line = str(stopped.value) if code == 1 else capsys.readouterr().err
    check_message(line, seen=seen, expected=expected)
    assert line.strip().count("\n") == 0
    assert (stopped.value.code == 2) == (code == 2)


def test_predict_reads_images(tmp_path, capsys):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    fields = {
        **sizes,
        "image_size": 16,
        "patch_size": 8,
        "id2label": {0: "cat", 1: "dog", 2: "bird"},
    }
    perturbed("VanillaVisionForImageClassification", fields).save_pretrained(tmp_path / "model")
    ViTImageProcessorPil(size=16).save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "export", cases=1)
    expected = ImageRuntime(tmp_path / "export", threads=1).classify([tmp_path / "a.png"], top_k=2)
    line = json.dumps({"image": str(tmp_path / "a.png")})
    for given in (tmp_path / "a.png", line):
        same(run_predict(capsys, tmp_path / "export", given, "--set", "top_k=2"), expected)
    lines = [tmp_path / "a.png", tmp_path / "none.png", tmp_path, tmp_path / "a.png"]
    (tmp_path / "paths").write_text("".join(f"{line}\n" for line in lines))
    files = ["--input", tmp_path / "paths", "--output", tmp_path / "out.jsonl"]
    report = run_predict(capsys, tmp_path / "export", *files, "--set", "top_k=2")[0]
    assert (report["lines"], report["bad"]) == (4, 2)
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    same(results, [*expected, None, None, *expected])
    bad = (tmp_path / "out.jsonl.bad.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in bad] == [2, 3]
