"""Tests of the command's help, flags and outputs."""

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command_line import COMMAND, main, read_error
from messages import check_message

from vanilla_transformer import conversion
from vanilla_transformer_export import Options, export
from vanilla_transformer_export.arguments import get_output, key_value
from vanilla_transformer_export.cli import main as cli
from vanilla_transformer_export.cli.main import VERBS
from vanilla_transformer_export.cli.verbs import generation_options
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.targets.registry import targets

ROOT = Path(__file__).parents[2]


# ----------------------------------------------------------------------------------- help and usage


def test_help_fits_80_columns_and_imports_no_heavy_packages():
    """All help texts are printed in one new process."""
    code = f"""
import sys
from vanilla_transformer_export.cli.main import VERBS, main
from vanilla_transformer_export.errors import UsageError
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
    # a line with a single flag cannot be wrapped
    breakable = [
        line for line in lines if line.startswith(" ") and not re.fullmatch(r" *\[[^][]*\]", line)
    ]
    assert max(map(len, breakable)) <= 80
    assert not [line for line in lines if "default: None" in line or "==" in line]


def test_help_describes_package_and_lists_verbs(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["description"] in " ".join(printed.split())
    assert re.findall(r"^    ([\w-]+) +\w", printed, re.MULTILINE) == list(VERBS)


def test_help_lists_registered_families_and_targets(capsys):
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
        printed = " ".join(capsys.readouterr().out.split())
        assert [name for name in names if name not in printed] == []


@pytest.mark.parametrize(
    "start",
    [[COMMAND], [sys.executable, "-m", "vanilla_transformer_export"]],
    ids=["command", "module"],
)
def test_version_matches_installed_package(start):
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
        ("info", "[CHECKPOINT]"),
        ("attention", "CHECKPOINT SOURCE [TARGET]"),
        ("export", "CHECKPOINT [OUTPUT]"),
        ("verify", "EXPORT CHECKPOINT"),
        ("certify", "EXPORT"),
        ("generate", "EXPORT [TEXT ...]"),
        ("predict", "EXPORT [TEXT ...]"),
        ("evaluate", "MODEL"),
        ("serve", "EXPORT [EXPORT ...]"),
        ("doctor", "[-h] [--json]"),
    ],
)
def test_verb_help_explains_inputs_and_all_flags(verb, inputs, capsys):
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    usage, _, explained = printed.partition("\n\n")
    assert usage.startswith(f"usage: vanilla-transformer {verb} ")
    assert " ".join(usage.split()).endswith(inputs)
    for flag in re.findall(r"--[\w-]+", usage):
        assert re.search(rf"^  .*{flag}\b", explained, re.MULTILINE)


def test_every_verb_has_a_help_test():
    [mark] = test_verb_help_explains_inputs_and_all_flags.pytestmark
    assert [verb for verb, _ in mark.args[1]] == list(VERBS)


@pytest.mark.parametrize(
    "arguments, seen, expected",
    [
        ([], "VERB", ()),
        (["translate"], "translate", ()),
        (["translate-files", "a", "b"], "translate-files", ()),
        (["export"], "CHECKPOINT", ()),
        (["train"], "--output", ()),
        (["train", "--output", "a"], "RECIPE", ()),
        (["average", "a"], "--output", ()),
        (["attention", "a", "b"], "--output", ()),
        (["generate", "a", "--num-beams", "0"], 0, (1, "2**63")),
        (["verify", "a", "b", "--cases", "0"], 0, (1, "2**63")),
        (["generate", "a", "--max-new-tokens", "-3"], -3, ()),
        (["generate", "a", "--num-beams", "two"], "two", ()),
        (["generate", "a", "--temperature", "0"], ("--temperature", 0), ("float32", 0)),
        (["generate", "a", "--top-p", "1.5"], ("--top-p", 1.5), (0, 1)),
        (["generate", "a", "--length-penalty", "NaN"], ("--length-penalty", "NaN"), "float32"),
        (["generate", "a", "--seed", "-1"], ("--seed", -1), 0),
        (["generate", "a", "--top-k", "1.5"], ("--top-k", 1.5), (0, "2**63", 1)),
        (
            ["generate", "a", "--early-stopping", "soon"],
            ("--early-stopping", "soon"),
            (True, False, "never"),
        ),
        (["generate", "a", "--suppress-tokens", "1,2"], ("--suppress-tokens", "1,2"), ()),
        (["generate", "a", "--bad-words-ids", "[1]"], "--bad-words-ids", ()),
        (["generate", "a", "--do-sample=2"], "--do-sample", ()),
        (["generate", "a", "--set", "num_beams=0"], ("num_beams", 0), (1, "2**63")),
        (["evaluate", "a", "--num-beams", "true"], "true", (1, "2**63")),
        (["evaluate", "a", "--num-return-sequences", "2"], "--num-return-sequences", ()),
    ],
)
def test_usage_error_exits_with_2_and_a_reason(arguments, seen, expected, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    check_message(capsys.readouterr().err, seen=seen, expected=expected)


@pytest.mark.parametrize(
    "arguments, seen, expected",
    [
        (["exprot", "a", "b"], "exprot", ()),
        (["--versoin"], "--versoin", "--version"),
        (["train", "trec", "--ouput", "a"], "--ouput", "--output"),
        (["generate", "a", "--num-baems=2"], "--num-baems", "--num-beams"),
        (["export", "a", "b", "--target", "cpuu"], "cpuu", "cpu"),
        (["export", "a", "b", "--dtype", "fp32,int9"], "int9", ("fp32", "did you mean 'int8'?")),
        (["export", "a", "b", "--target", "cpu", "--dtype", "in4"], ("cpu", "in4"), "'int4'?"),
        (["convert", "a", "b", "--to", "gpt-2"], "gpt-2", "gpt2"),
        (["generate", "a", "--device", "cdua"], "cdua", "cuda"),
        (["attention", "a", "b", "--output", "c", "--kind", "cros"], "cros", "cross"),
        (["generate", "a", "--set", "num_beam=2"], "num_beam", "num_beams"),
        (["train", "trec", "--output", "a", "--set", "model.dropuot=0"], "dropuot", "dropout"),
    ],
    ids=lambda value: " ".join(value[-2:]).rpartition("/")[2] if isinstance(value, list) else "",
)
def test_misspelled_name_is_usage_error_with_suggestion(
    arguments, seen, expected, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    message = capsys.readouterr().err
    assert (caught.value.code, message.count("\n")) == (2, 1)
    check_message(message, seen=seen, expected=expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"target": "cpuu"}, {"target": "cpu", "dtype": "int9"}])
def test_flags_of_export_and_options_of_python_have_the_same_errors(options, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["export", "a", str(tmp_path / "b"), *(f"--{k}={v}" for k, v in options.items())])
    with pytest.raises(UsageError) as caught:
        export("a", tmp_path / "b", **options)
    assert capsys.readouterr().err == f"vanilla-transformer: {caught.value}\n"


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
def test_texts_are_accepted_before_and_after_flags(words, text):
    args = cli.parse(["generate", "export", *words])
    assert (args.export, args.num_beams, args.text) == (Path("export"), 2, text)


# --------------------------------------------------------------------------------- generation flags


@pytest.mark.parametrize(
    "verb, excluded", [("generate", set()), ("evaluate", {"num_return_sequences"})]
)
def test_every_option_field_has_a_flag_with_its_help(verb, excluded, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    _, _, printed = capsys.readouterr().out.partition("\ngeneration:\n")
    printed = " ".join(printed.replace("-\n", "-").split())
    for field in dataclasses.fields(Options):
        flag = f"--{field.name.replace('_', '-')}"
        explained = re.search(rf"{flag}\b.*?{re.escape(field.metadata['help'])}", printed)
        assert bool(explained) == (field.name not in excluded), field.name


@pytest.mark.parametrize(
    "words, expected",
    [
        ("", {}),
        ("--num-beams 2 --max-new-tokens 5", {"num_beams": 2, "max_new_tokens": 5}),
        ("--length-penalty -0.5 --temperature 2", {"length_penalty": -0.5, "temperature": 2.0}),
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
def test_generation_flags_are_parsed_to_options(verb, words, expected):
    actual = generation_options(cli.parse([verb, "model", *words.split()]))
    assert actual == expected
    assert [*map(type, actual.values())] == [*map(type, expected.values())]


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
def test_output_is_last_argument_or_flag(verb, first, words):
    args = cli.parse([verb, *words])
    assert (getattr(args, first), get_output(args)) == ("a", Path("b"))


def test_export_writes_to_output_flag(exported, tmp_path, capsys):
    main(["export", "--output", str(tmp_path / "out"), str(exported("encoder").checkpoint)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["out"] == str(tmp_path / "out")
    assert (tmp_path / "out" / "onnx" / "model.onnx").is_file()


@pytest.mark.parametrize("verb", ["export", "convert"])
@pytest.mark.parametrize(
    "words, seen, expected",
    [
        ([], (), ("OUTPUT", "--output")),
        (["b", "--output", "c"], ("b", "--output c"), ()),
        (["--output", "b", "b"], ("b", "--output b"), ()),
    ],
)
def test_missing_or_duplicate_output_is_an_error(
    verb, words, seen, expected, exported, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    message = read_error(verb, exported("encoder").checkpoint, *words)
    check_message(message, seen=seen, expected=expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words, seen, expected",
    [
        (["average", "a", "--out", "b"], "--out", "--output"),
        (["generate", "export", "--num-bea", "3"], "--num-bea", "--num-beams"),
        (["evaluate", "m", "--target=b"], "--target", ()),
        (["verify", "e", "m", "--target", "b"], "--target", ()),
        (["doctor", "--target", "b"], "--target", ("--help", "--json")),
        (["convert", "a", "b", "--output", "c", "--dry-run"], "--output", ()),
    ],
)
def test_unknown_flag_is_an_error_before_inputs_are_read(
    words, seen, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    check_message(read_error(*words), seen=seen, expected=expected)


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
def test_value_is_parsed_as_json_or_kept_as_string(text, expected):
    assert key_value(text) == expected
