"""The command: its verbs end to end on tiny data, and its errors, which are one line and no
traceback."""

import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import sacrebleu
import torch
from checkpoints import copy_folder, toy_corpus, with_tokenizer, write_corpus
from command_line import COMMAND, command, read_error
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer import conversion
from vanilla_transformer_export import Options
from vanilla_transformer_export.arguments import key_value, output_of
from vanilla_transformer_export.cli import main as cli
from vanilla_transformer_export.cli.main import VERBS, main
from vanilla_transformer_export.cli.verbs import generation_options
from vanilla_transformer_export.targets.registry import targets

ROOT = Path(__file__).parents[2]
TEXTS = [source for source, _ in toy_corpus(6, seed=9)]
STATE_DICT = "state_dict.pt"  # the name in arguments of a file that a test writes
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
    "training.num_train_epochs=12",
    "training.tokens_per_update=256",
    "training.warmup_steps=20",
]
SETTINGS += [
    "training.learning_rate=5e-3",
    *(f"model.{name}={value}" for name, value in SHAPE.items()),
]


def last_line(done):
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    return done.stdout.splitlines()[-1]


def training(corpus, *settings):
    """The arguments that train on `corpus`, with `settings` over the recipe's."""
    files = {"data.train": corpus[:2], "data.validation": corpus[2:]}
    files = [f"{name}={json.dumps([str(path) for path in paths])}" for name, paths in files.items()]
    return [
        "train",
        "translation",
        *(word for setting in [*files, *settings] for word in ("--set", setting)),
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    return *write_corpus(directory, "train", 200, seed=0), *write_corpus(
        directory, "val", 20, seed=1
    )


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """What `train` wrote, and what it said."""
    output = tmp_path_factory.mktemp("trained") / "model"
    return output, command(*training(corpus, *SETTINGS), "--output", output)


@pytest.fixture(scope="module")
def translator(trained):
    """What `export` wrote, and what it said."""
    out = trained[0].with_name("out")
    return out, command("export", trained[0], out)


def test_train_writes_a_checkpoint_and_prints_the_metrics(trained):
    output, done = trained
    assert 0 <= json.loads(last_line(done))["validation_bleu"] <= 100
    config = json.loads((output / "config.json").read_text())
    assert (
        config["vocab_size"],
        config["hidden_size"],
        config["decoder_layers"],
        config["head_dim"],
    ) == (60, 32, 1, 6)
    assert (output / "tokenizer.json").is_file()


def test_export_prints_where_the_graphs_are_how_large_and_how_exact(translator):
    out, done = translator
    facts = json.loads(last_line(done))
    assert facts["out"] == str(out)
    sizes = {
        name: (out / name).stat().st_size
        for name in ("onnx/encoder_model.onnx", "onnx/decoder_model_merged.onnx")
    }
    assert facts["files"] == sizes
    assert facts["parity"]["failures"] == 0 < facts["parity"]["cases"]


def test_verify_prints_its_report_and_succeeds(trained, translator, capsys):
    main(["verify", str(translator[0]), str(trained[0]), "--cases", "7"])
    line = capsys.readouterr().out.removesuffix("\n")
    assert line.startswith("7 cases, ")
    assert line.endswith("0 failures")


@pytest.mark.parametrize(
    "options, generate",
    [
        ([], {}),
        (["--num-beams", "1", "--max-new-tokens", "7"], dict(num_beams=1, max_new_tokens=7)),
    ],
)
def test_generate_prints_the_translations_of_transformers(trained, translator, options, generate):
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


def test_evaluate_gives_the_bleu_of_the_translations_in_torch_and_in_onnxruntime(
    trained, translator, corpus, capsys
):
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
    found = []
    for directory in (trained[0], translator[0]):
        main(["evaluate", str(directory), *map(str, arguments)])
        found.append(json.loads(capsys.readouterr().out))
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
    assert [result["engine"] for result in found] == ["torch", "onnxruntime"]
    assert [result["sentences"] for result in found] == [20, 20]
    expected = sacrebleu.corpus_bleu(texts, [targets]).score
    assert [result["bleu"] for result in found] == pytest.approx([expected, expected], abs=0.01)
    assert expected > 0


def test_generate_prints_one_line_for_each_line_it_reads(translator):
    done = command(
        "generate",
        translator[0],
        "--max-new-tokens",
        3,
        input="the man sees\u2028a dog.\nthe boy.\n",
    )
    assert (done.returncode, done.stdout.count("\n")) == (0, 2)


def test_generate_answers_an_empty_line_of_standard_input_with_one_and_refuses_an_empty_argument(
    translator,
):
    done = command("generate", translator[0], input="a dog.\n\na man.\n")
    assert (done.returncode, [bool(line) for line in done.stdout.split("\n")]) == (
        0,
        [True, False, True, False],
    )
    done = command("generate", translator[0], "a dog.", "")
    assert done.returncode == 1
    assert done.stderr.startswith("vanilla-transformer: text 1 of 2 is '', expected a text")
    assert done.stderr.count("\n") == 1


def test_generate_needs_neither_torch_nor_transformers(translator, tmp_path):
    """Modules of these names that fail stand in front of the real ones."""
    for name in ("torch", "transformers", "onnx", "safetensors"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed')")
    search = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = command("generate", translator[0], TEXTS[0], env={**os.environ, "PYTHONPATH": search})
    assert (done.returncode, done.stderr) == (0, "")


# ----------------------------------------------------------------------------------- help and usage


def test_helps_fit_a_terminal_and_load_nothing_heavy():
    """All of them in one process that has loaded nothing before."""
    code = f"""
import sys
from vanilla_transformer_export.cli.main import VERBS, main
from vanilla_transformer_export.targets.registry import targets
for words in ([], *([verb] for verb in {[*VERBS]}), ["export"]):
    try:
        main([*words, "--help"])
    except SystemExit as stop:
        assert not stop.code
heavy = "torch transformers onnx onnxruntime safetensors accelerate datasets".split()
print(sorted({{*heavy}} & sys.modules.keys()))
"""
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    *lines, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    # not one flag
    breakable = [
        line for line in lines if line.startswith(" ") and not re.fullmatch(r" *\[[^][]*\]", line)
    ]
    assert max(map(len, breakable)) <= 80
    assert not [line for line in lines if "default: None" in line or "==" in line]


def test_the_command_describes_the_package_and_lists_the_verbs(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["description"] in " ".join(said.split())
    assert re.findall(r"^    ([\w-]+) +\w", said, re.MULTILINE) == list(VERBS)


def test_helps_list_the_families_and_targets_that_are_registered(capsys):
    for words, names in (
        (["convert"], [family.name for family in conversion.FAMILIES.values()]),
        (
            ["convert"],
            [name for name, family in conversion.FAMILIES.items() if family.converts_back],
        ),
        (["export"], [f"{target.name} with {', '.join(target.dtypes)}" for target in targets()]),
    ):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert [name for name in names if name not in said] == []


@pytest.mark.parametrize(
    "start",
    [[COMMAND], [sys.executable, "-m", "vanilla_transformer_export"]],
    ids=["command", "module"],
)
def test_the_version_is_that_of_the_installed_package(start):
    done = subprocess.run([*start, "--version"], capture_output=True, text=True, timeout=60)
    expected = importlib.metadata.version("vanilla-transformer")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"vanilla-transformer {expected}\n",
        "",
    )


@pytest.mark.parametrize(
    "verb, inputs",
    [
        ("train", "RECIPE"),
        ("average", "CHECKPOINT [CHECKPOINT ...]"),
        ("convert", "SOURCE [OUTPUT]"),
        ("info", "CHECKPOINT"),
        ("attention", "CHECKPOINT SOURCE [TARGET]"),
        ("export", "CHECKPOINT [OUTPUT]"),
        ("verify", "EXPORT CHECKPOINT"),
        ("generate", "EXPORT [TEXT ...]"),
        ("predict", "EXPORT [TEXT ...]"),
        ("evaluate", "MODEL"),
        ("serve", "EXPORT [EXPORT ...]"),
        ("doctor", "[-h] [--json]"),
    ],
)
def test_each_verb_explains_its_inputs_and_all_its_flags(verb, inputs, capsys):
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    usage, _, explained = said.partition("\n\n")
    assert usage.startswith(f"usage: vanilla-transformer {verb} ")
    assert " ".join(usage.split()).endswith(inputs)
    for flag in re.findall(r"--[\w-]+", usage):
        assert re.search(rf"^  .*{flag}\b", explained, re.MULTILINE)


def test_every_verb_is_tested_for_its_help():
    [mark] = test_each_verb_explains_its_inputs_and_all_its_flags.pytestmark
    assert [verb for verb, _ in mark.args[1]] == list(VERBS)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "VERB"),
        (["translate"], "'translate'"),
        (["translate-files", "a", "b"], "no verb 'translate-files', expected one of train, "),
        (["export"], "CHECKPOINT"),
        (["train"], "--output"),
        (["train", "--output", "a"], "RECIPE"),
        (["average", "a"], "--output"),
        (["attention", "a", "b"], "--output"),
        (
            ["generate", "a", "--num-beams", "0"],
            "expected a whole number from 1 to 2**63 - 1, got '0'",
        ),
        (
            ["verify", "a", "b", "--cases", "0"],
            "expected a whole number of at least 1 and below 2**63, got 0",
        ),
        (["generate", "a", "--max-new-tokens", "-3"], "-3"),
        (["generate", "a", "--num-beams", "two"], "'two'"),
        (
            ["generate", "a", "--temperature", "0"],
            "--temperature: expected a float32 number above 0, got '0'",
        ),
        (["generate", "a", "--top-p", "1.5"], "--top-p: expected a number from 0 to 1, got '1.5'"),
        (
            ["generate", "a", "--length-penalty", "NaN"],
            "--length-penalty: expected a float32 number, got 'NaN'",
        ),
        (
            ["generate", "a", "--seed", "-1"],
            "--seed: expected a whole number of at least 0, got '-1'",
        ),
        (
            ["generate", "a", "--top-k", "1.5"],
            "--top-k: expected a whole number from 0 to 2**63 - 1, got '1.5'",
        ),
        (
            ["generate", "a", "--early-stopping", "soon"],
            "--early-stopping: expected True, False or 'never', got 'soon'",
        ),
        (
            ["generate", "a", "--suppress-tokens", "1,2"],
            "--suppress-tokens: expected a list of token ids, got '1,2'",
        ),
        (
            ["generate", "a", "--bad-words-ids", "[1]"],
            "--bad-words-ids: expected a list of lists of token ids",
        ),
        (["generate", "a", "--do-sample=2"], "--do-sample"),
        (
            ["generate", "a", "--set", "num_beams=0"],
            "num_beams must be a whole number from 1 to 2**63 - 1, got 0",
        ),
        (
            ["evaluate", "a", "--num-beams", "true"],
            "expected a whole number from 1 to 2**63 - 1, got 'true'",
        ),
        (["evaluate", "a", "--num-return-sequences", "2"], "no flag '--num-return-sequences'"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_why(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["exprot", "a", "b"], "no verb 'exprot'"),
        (["--versoin"], "no flag '--versoin'; did you mean '--version'?"),
        (["train", "trec", "--ouput", "a"], "no flag '--ouput'; did you mean '--output'?"),
        (["generate", "a", "--num-baems=2"], "no flag '--num-baems'; did you mean '--num-beams'?"),
        (["export", "a", "b", "--target", "cpuu"], "; did you mean 'cpu'?"),
        (
            ["export", "a", "b", "--dtype", "fp32,int9"],
            "no dtype 'int9', expected one of fp32, int8",
        ),
        (["convert", "a", "b", "--to", "gpt-2"], "; did you mean 'gpt2'?"),
        (
            ["generate", "a", "--device", "cdua"],
            "no device 'cdua', expected one of cpu, cuda, tensorrt; did you mean 'cuda'?",
        ),
        (["attention", "a", "b", "--output", "c", "--kind", "cros"], "; did you mean 'cross'?"),
        (
            ["generate", "a", "--set", "num_beam=2"],
            "unknown generation options ['num_beam'], did you mean num_beams?",
        ),
        (
            ["train", "trec", "--output", "a", "--set", "model.dropuot=0"],
            "; did you mean 'dropout'?",
        ),
        (["convert", STATE_DICT, "a", "--set", "norm_frist=true"], "; did you mean 'norm_first'?"),
    ],
    ids=lambda value: " ".join(value[-2:]).rpartition("/")[2] if isinstance(value, list) else "",
)
def test_a_name_that_is_nearly_right_is_wrong_usage_that_names_the_right_one(
    arguments, message, capsys, tmp_path, tmp_path_factory, monkeypatch
):
    state_dict = tmp_path_factory.mktemp("torch") / STATE_DICT
    torch.save({"layers.0.linear1.weight": torch.ones(2, 2)}, state_dict)
    arguments = [str(state_dict) if argument == STATE_DICT else argument for argument in arguments]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    said = capsys.readouterr().err
    assert (caught.value.code, said.count("\n")) == (2, 1)
    assert message in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words, text",
    [
        (["--num-beams", "2", "one", "two"], ["one", "two"]),
        (["one", "--num-beams", "2", "two"], ["one", "two"]),
        (["one", "two", "--num-beams=2"], ["one", "two"]),
        (["--num-beams", "2", "--", "--one", "two"], ["--one", "two"]),
        (["--num-beams", "2", "- one", "-3"], ["- one", "-3"]),
    ],
)
def test_texts_may_stand_before_and_after_flags(words, text):
    args = cli.parse(["generate", "export", *words])
    assert (args.export, args.num_beams, args.text) == (Path("export"), 2, text)


# ---------------------------------------------------------------------- generation, from the fields


@pytest.mark.parametrize(
    "verb, excluded", [("generate", set()), ("evaluate", {"num_return_sequences"})]
)
def test_every_field_of_the_options_is_a_flag_with_its_help(verb, excluded, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    _, _, said = capsys.readouterr().out.partition("\ngeneration:\n")
    said = " ".join(said.replace("-\n", "-").split())
    for field in dataclasses.fields(Options):
        flag = f"--{field.name.replace('_', '-')}"
        explained = re.search(rf"{flag}\b.*?{re.escape(field.metadata['help'])}", said)
        assert bool(explained) == (field.name not in excluded), field.name


@pytest.mark.parametrize(
    "words, expected",
    [
        ("", {}),
        ("--num-beams 2 --max-new-tokens 5", {"num_beams": 2, "max_new_tokens": 5}),
        ("--length-penalty -0.5 --temperature 2", {"length_penalty": -0.5, "temperature": 2}),
        ("--do-sample --seed 0", {"do_sample": True, "seed": 0}),
        ("--no-do-sample", {"do_sample": False}),
        ("--early-stopping never", {"early_stopping": "never"}),
        ("--early-stopping true", {"early_stopping": True}),
        ("--early-stopping False", {"early_stopping": False}),
        (
            "--suppress-tokens [3,4] --bad-words-ids [[3],[4,5]]",
            {"suppress_tokens": [3, 4], "bad_words_ids": [[3], [4, 5]]},
        ),
        ("--eos-token-id 3", {"eos_token_id": 3}),
        ("--eos-token-id=[3,4]", {"eos_token_id": [3, 4]}),
    ],
)
@pytest.mark.parametrize("verb", ["generate", "evaluate"])
def test_flags_give_the_options_that_they_name(verb, words, expected):
    found = generation_options(cli.parse([verb, "model", *words.split()]))
    assert found == expected
    assert [*map(type, found.values())] == [*map(type, expected.values())]


# ------------------------------------------------------------------------------------------ outputs


@pytest.mark.parametrize(
    "words",
    [
        ["a", "b"],
        ["a", "--force", "b"],
        ["--force", "a", "b"],
        ["a", "--output", "b"],
        ["--output=b", "a"],
        ["--output", "b", "a"],
    ],
)
@pytest.mark.parametrize("verb, first", [("export", "checkpoint"), ("convert", "source")])
def test_an_output_is_the_last_argument_or_a_flag(verb, first, words):
    args = cli.parse([verb, *words])
    assert (getattr(args, first), output_of(args)) == ("a", Path("b"))


def test_export_writes_where_the_flag_tells_it(exported, tmp_path, capsys):
    main(["export", "--output", str(tmp_path / "out"), str(exported("encoder").checkpoint)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["out"] == str(tmp_path / "out")
    assert (tmp_path / "out" / "onnx" / "model.onnx").is_file()


@pytest.mark.parametrize("verb", ["export", "convert"])
@pytest.mark.parametrize(
    "words, message",
    [
        ([], "no output, expected OUTPUT or --output OUTPUT"),
        (["b", "--output", "c"], "two outputs, b and --output c: expected one of them"),
        (["--output", "b", "b"], "two outputs, b and --output b: expected one of them"),
    ],
)
def test_no_output_and_two_are_wrong_usage(verb, words, message, exported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        read_error(verb, exported("encoder").checkpoint, *words)
        == f"vanilla-transformer: {message}"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words, message",
    [
        (["average", "a", "--out", "b"], "no flag '--out'; did you mean '--output'?"),
        (
            ["generate", "export", "--num-bea", "3"],
            "no flag '--num-bea'; did you mean '--num-beams'?",
        ),
        (["evaluate", "m", "--target=b"], "no flag '--target'; did you mean "),
        (["verify", "e", "m", "--target", "b"], "no flag '--target'; did you mean "),
        (
            ["doctor", "--target", "b"],
            "no flag '--target', expected one of -h, --help, --json (see ",
        ),
        (["convert", "a", "b", "--output", "c", "--dry-run"], "two outputs, b and --output c"),
    ],
)
def test_an_unknown_flag_is_an_error_before_anything_is_read(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in read_error(*words)


# ------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    "text, expected",
    [
        ("hidden_size=32", ("hidden_size", 32)),
        ("dropout=0.1", ("dropout", 0.1)),
        ("norm_first=true", ("norm_first", True)),
        ("sep_token_id=null", ("sep_token_id", None)),
        ("eos_token_id=[2, 3]", ("eos_token_id", [2, 3])),
        ("hidden_act=gelu", ("hidden_act", "gelu")),
        ('hidden_act="gelu"', ("hidden_act", "gelu")),
        ("do_sample=True", ("do_sample", True)),
        ("norm_first=False", ("norm_first", False)),
        ("sep_token_id=None", ("sep_token_id", None)),
        ("name=a=b", ("name", "a=b")),
        ("name=", ("name", "")),
    ],
)
def test_a_value_is_json_or_else_a_string(text, expected):
    assert key_value(text) == expected


@pytest.mark.parametrize("text", ["hidden_size", ""])
def test_a_field_without_a_name_or_a_value_is_wrong_usage(text, corpus, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*training(corpus, text), "--output", str(tmp_path / "model")])
    assert caught.value.code == 2
    assert "expected key=value" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["info", ""], "expected a path, got ''"),
        (["export", "a", ""], "expected a path, got ''"),
        (["average", "", "--output", "a"], "expected a path, got ''"),
        (["attention", "a", "\udce9", "--output", "a.png"], "expected UTF-8 text, got b'\\xe9'"),
        (
            ["verify", "a", "b", "--seed", "-1"],
            "expected a whole number of at least 0 and below 2**63, got -1",
        ),
        (["verify", "a", "b", "--cases", "9" * 30], "below 2**63, got 9999"),
        (
            ["verify", "a", "b", "--cases", "9" * 5000],
            "expected a whole number of at least 1, got '9999",
        ),
        (
            ["export", "a", "b", "--target", "tpu"],
            "no target 'tpu', expected one of portable, cpu, cuda",
        ),
        (["export", "a", "b", "--dtype", "fp8"], "no dtype 'fp8', expected one of fp32, int8"),
        (["export", "a", "b", "--dtype", "int8,"], "no dtype '', expected one of fp32, int8"),
        (["export", "a", "b", "--dtype", "int4"], "no target 'portable' with dtype 'int4'"),
    ],
    ids=lambda value: (
        " ".join(value)[:40].encode("ascii", "replace").decode() if isinstance(value, list) else ""
    ),
)
def test_options_of_wrong_types_and_ranges_are_wrong_usage(
    arguments, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [["--num-beams", "99999999"], ["--bleu-tokenize", "nope"]])
def test_options_of_evaluate_that_no_model_takes_are_wrong_usage(trained, corpus, options, capsys):
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
    expected = {"99999999": "is 99999999", "nope": "no bleu_tokenize 'nope'; did you mean 'none'?"}
    assert expected[options[1]] in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- errors


def test_an_error_in_a_process_is_one_line_on_stderr_and_ends_with_1(tmp_path):
    done = command("export", tmp_path / "nowhere", tmp_path / "out")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"vanilla-transformer: {tmp_path / 'nowhere'} does not exist, expected a checkpoint "
        "directory or a Hub id\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_no_export_is_an_error(tmp_path, exported):
    assert "has no manifest.json" in read_error("generate", tmp_path, "text")
    assert "has no manifest.json" in read_error("generate", tmp_path / "nowhere", "text")
    assert "has no manifest.json" in read_error(
        "verify", tmp_path / "nowhere", exported("encoder").checkpoint
    )


def test_existing_output_is_an_error_without_force(exported, tmp_path, corpus):
    (tmp_path / "kept").touch()
    assert "--force" in read_error("export", exported("encoder").checkpoint, tmp_path)
    assert "--force" in read_error(*training(corpus), "--output", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_checkpoint_that_does_not_fit_is_an_error(exported, tmp_path):
    checkpoint = shutil.copytree(exported("encoder").checkpoint, tmp_path / "checkpoint")
    weights = load_file(checkpoint / "model.safetensors")
    weights["embeddings.embed_tokens.weight"] = torch.zeros(5, 32)
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    assert "embeddings.embed_tokens.weight" in read_error("export", checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings, message",
    [
        (["model.hidden_size=wide"], "hidden_size"),
        (["model.dropout=1.5"], "dropout must be in [0, 1), got 1.5"),
        (["model.hidden_size=34", "model.num_attention_heads=4"], "hidden_size=34"),
        (["tokenizer.vocab_size=100000"], "expected 100000"),
        (["model.hidden_act=rellu"], "rellu"),
        (["model.dropuot=0.3"], "no key of [model] 'dropuot'; did you mean 'dropout'?"),
        (["training.learning_rat=1"], "did you mean 'learning_rate'?"),
        (["modle.dropout=0.3"], "no key of a recipe 'modle'; did you mean 'model'?"),
        (["task=translating"], "no task 'translating'; did you mean 'translation'?"),
        (
            ["training.tokens_per_batch=300"],
            "tokens_per_update is 4096, expected a multiple of 300",
        ),
        (
            ["training.average_last=3", "training.load_best_model_at_end=true"],
            "average_last=3 does not go with",
        ),
        (
            ["training.average_last=3", "training.save_strategy=no"],
            'average_last=3 does not go with save_strategy="no"',
        ),
        (["training.tokens_per_update=8"], "tokens, expected at most 8"),
    ],
)
def test_a_recipe_that_cannot_be_is_an_error(corpus, tmp_path, settings, message):
    settings = ["tokenizer.vocab_size=60", *settings]
    assert message in read_error(*training(corpus, *settings), "--output", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_that_does_not_exist_is_an_error_that_lists_those_that_do(tmp_path):
    assert "expected one of conll2003, digits, multi30k-en-de" in read_error(
        "train", "multi30k", "--output", tmp_path / "model"
    )


def test_files_that_are_not_parallel_are_an_error(corpus, tmp_path):
    message = read_error(
        *training((corpus[0], corpus[3], corpus[2], corpus[3])), "--output", tmp_path / "model"
    )
    assert "train.en has 200" in message
    assert "val.de has 20" in message


def test_verify_ends_with_1_and_lists_the_differences(exported, tmp_path, capsys):
    other = type(exported("encoder").model)(exported("encoder").model.config)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit) as caught:
        main(
            ["verify", str(exported("encoder").directory), str(tmp_path / "other"), "--cases", "2"]
        )
    assert caught.value.code.count("expected at most 1e-04") == 2  # a string: exit status 1
    assert "2 failures" in capsys.readouterr().out


def test_generate_says_when_the_export_has_no_tokenizer(exported):
    assert "tokenizer.json is missing" in read_error(
        "generate", exported("causal").directory, "text"
    )


def test_generate_runs_on_the_device_it_is_told(exported, tmp_path):
    directory = exported("seq2seq").directory
    assert "this onnxruntime has no CUDA" in read_error(
        "generate", directory, "text", "--device", "cuda"
    )
    given = ("--device", "cpu", "--engine-cache", tmp_path)
    assert "expected device='tensorrt'" in read_error("generate", directory, "text", *given)


def test_generate_says_when_the_model_cannot_generate(exported, tmp_path):
    directory = copy_folder(exported("encoder").directory, tmp_path)
    with_tokenizer(directory, 48)
    said = read_error("generate", directory, "the dog")
    assert "generate is not what a VanillaEncoderModel is for, expected one of embed" in said


def test_a_decoder_continues_text_as_transformers_does(exported, tmp_path, capsys):
    directory = copy_folder(exported("causal").directory, tmp_path)
    tokenizer = with_tokenizer(directory, 48)
    texts = ["the old dog", "a man sees the", "red bird", "a big boy wants"]
    main(["generate", str(directory), *texts, "--max-new-tokens", "6", "--num-beams", "1"])
    found = capsys.readouterr().out
    for text, line in zip(texts, found.removesuffix("\n").split("\n"), strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        new = exported("causal").model.generate(ids, max_new_tokens=6, do_sample=False)[
            0, ids.shape[1] :
        ]
        assert line == tokenizer.decode(new, skip_special_tokens=True)
    assert found.strip()


def test_a_tokenizer_larger_than_the_model_is_an_error(exported, tmp_path):
    directory = copy_folder(exported("causal").directory, tmp_path)
    with_tokenizer(directory, 60)
    assert "[0, 47]" in read_error("generate", directory, "der große alte Bub findet")
