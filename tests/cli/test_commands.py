"""Tests of every command of README.md, docs/, the cards, the benchmarks and the launch file.

A shell splits each command, which runs on synthetic text. Commands that need a GPU, hours or
several machines are only parsed, by their own parsers. test_docs.py runs the blocks of README.md
and docs/.
"""

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import standins
from accelerate.commands.launch import launch_command_parser
from pages import PAGES
from shell import LAUNCH, PROGRAMS, commands, ours

from vanilla_transformer.training.recipe import FOLDER, key_types, read_recipe
from vanilla_transformer.training.run import train
from vanilla_transformer.training.tasks import TASKS
from vanilla_transformer_export.cli import main as cli

ROOT = Path(__file__).parents[2]
CARDS = sorted((ROOT / "model_cards").glob("*/README.md"))
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))

PARSED = {  # commands that are only parsed, and the reason
    "python benchmarks/speed.py": "an hour; test_quick_runs.py runs it with --quick",
    "python benchmarks/speed.py --resume": "the same",
    "python benchmarks/speed.py --device cuda": (
        "a GPU; test_benchmarks_cuda.py runs it with --quick"
    ),
    "python benchmarks/training_speed.py --data DIR": (
        "some minutes and Multi30k; test_quick_runs.py runs it on less text"
    ),
    "python benchmarks/one_graph.py": "some minutes; test_quick_runs.py runs it with --quick",
    "python benchmarks/serving.py --captions FILE": (
        "an hour; test_serving_benchmark.py runs it with --quick"
    ),
    "python benchmarks/bulk.py EXPORT --captions FILE": (
        "some minutes; test_bulk.py runs it on fewer lines"
    ),
    "python benchmarks/fine_tuning.py ENCODER --data DATA --work WORK": (
        "an hour; test_quality.py runs it on a tiny encoder"
    ),
    "python benchmarks/embeddings.py CHECKPOINT --texts FILE --openvino PYTHON": (
        "an environment with OpenVINO, and else as without it"
    ),
    "python benchmarks/dtypes.py CHECKPOINT --inputs FILE --work DIR": (
        "some minutes; test_dtypes_benchmark.py runs it on a tiny encoder"
    ),
    "python benchmarks/dtypes.py CHECKPOINT --inputs FILE --calibrate FILE --work DIR": "the same",
    "python benchmarks/embeddings.py CHECKPOINT --texts FILE": (
        "a checkpoint of sentence-transformers; test_embeddings_benchmark.py runs its worker"
    ),
    "python benchmarks/openvino_beams.py --openvino PYTHON": (
        "an environment with OpenVINO; test_quick_runs.py runs it without"
    ),
    "python benchmarks/sentence_splitting.py FILE": (
        "libraries of other sentence splitters, which nothing here needs"
    ),
    "vanilla-transformer serve": "the program that the page of serving starts",
    "vanilla-transformer serve my-export": "the same, with another name of the export",
    "vanilla-transformer VERB --help": "VERB is any; test_help_and_usage.py reads all",
    "python -m vanilla_transformer_export": "the program by itself; test_cli_errors.py runs it",
    "accelerate launch --cpu": "without what it launches; test_distributed.py does that",
    "vanilla-transformer export facebook/nllb-200-distilled-600M OUT": (
        "the Hub; test_export_converted.py has another"
    ),
    "vanilla-transformer export YOUR_NAME/encoder": "the Hub; test_export_converted.py has others",
    "vanilla-transformer serve minilm": "the program that the page of serving starts",
    "vanilla-transformer info --preset base": "test_info.py runs it with --json",
    "vanilla-transformer export NAME OUT": "the Hub; test_export_converted.py has others",
    "vanilla-transformer export NAME OUT --dtype int8": "the same",
    "vanilla-transformer attention CHECKPOINT picture.png --output maps.png": (
        "a picture; test_attention_maps.py draws over one"
    ),
    "vanilla-transformer train digits --output my-digits": (
        "minutes, and images that the page of training makes"
    ),
    "sbatch --nodes 4 slurm.sh RECIPE --data DIR --output OUT": (
        "several machines; test_distributed.py has stand-ins for them"
    ),
}
BENCHMARKS_RUN = (  # commands that run to the end
    "python benchmarks/speed_pages.py",
    "python benchmarks/report.py FILE",
    "python benchmarks/report.py benchmarks/results/cpu-avx2.json",
    "python benchmarks/linear_baseline.py --data DATA",
    "python benchmarks/outside.py",
    "python benchmarks/scores.py --data DATA",
    "python benchmarks/captions.py CARD --data DIR",
    "python benchmarks/captions.py CARD --data DATA/multi30k",
)

# The paths of these are links to those of the other commands of their scripts.
SAME_FILES = ("python benchmarks/report.py FILE", "python benchmarks/captions.py CARD --data DIR")
FOLDS = 2

# Number of JSON lines. scores: two of a translator and one of a classifier. linear_baseline: each
# fold and all of them, with two kinds of features. captions: two forms and five kinds of noise.
LINES = {"scores": 2 + 1, "linear_baseline": 2 * (FOLDS + 1), "captions": 2 + 5}


def spans(text: str) -> set[str]:
    """Return the commands in a text, between backquotes or after a comment sign."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    result = {" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)}
    result |= {line.strip() for line in re.findall(r"^# {3}(.*)$", text, re.MULTILINE)}
    return {span for span in result if span.split(" ")[0] in PROGRAMS}


def blocks(text: str) -> list[str]:
    """Return the shell scripts of a text: the code blocks that call one of PROGRAMS."""
    result = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    calls = rf'^\s*(?:\w+=")?(?:{"|".join(PROGRAMS)}) '
    return [
        block
        for language, block in result
        if language in ("", "bash") and re.search(calls, block, re.MULTILINE)
    ]


TEXTS = [path.read_text() for path in (*PAGES, LAUNCH, *CARDS, *BENCHMARKS)]
SPANS = sorted(set.union(*map(spans, TEXTS)))


def program_spans(program):
    return [span for span in SPANS if span.split(" ")[0] == program]


def test_every_command_is_run_or_listed_with_a_reason():
    known = {
        *PARSED,
        *BENCHMARKS_RUN,
        *program_spans("make"),
        *program_spans("pip"),
        "vanilla-transformer doctor",
        "vanilla-transformer info EXPORT",  # test_model_facts.py
    }
    assert {span for span in SPANS if " " in span} - {*program_spans("make")} == known - {
        *program_spans("make")
    }
    assert [len(blocks(text)) for text in TEXTS[len(PAGES) :]] == [
        0,
        *([1] * len(CARDS)),
        *([0] * len(BENCHMARKS)),
    ]


# ------------------------------------------------------------------------------------------- parsed


def test_accelerate_launch_accepts_cpu_option(tmp_path):
    [call] = commands("accelerate launch --cpu", tmp_path)
    assert launch_command_parser().parse_args([*call[2:], "script"]).cpu


class ParsedArguments(Exception):
    """Raised with the arguments that a script's parser has read from its command line."""


@pytest.mark.parametrize("command", [command for command in PARSED if "benchmarks/" in command])
def test_long_benchmark_command_is_accepted_by_its_parser(command, tmp_path, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def stop(*args):
        raise ParsedArguments(parse(*args))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    [[_, script, *arguments]] = commands(command, tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(ParsedArguments):
        runpy.run_path(str(ROOT / script), run_name="__main__")


@pytest.mark.parametrize("command", program_spans("make"))
def test_make_target_and_its_files_exist(command, tmp_path):
    [[_, *arguments]] = commands(command, tmp_path)
    printed = subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    files = re.findall(r"\S+\.py\b|\.ci/\w+", printed)
    assert files or any(name in printed for name in ("pytest", "sphinx", "model_cards"))
    assert all((ROOT / file).is_file() for file in files)


def test_pip_commands_install_existing_extras(tmp_path):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    calls = commands("\n".join(program_spans("pip")), tmp_path)
    installed = [call[2] for call in calls if call[1] == "install"]
    result = {
        extra for name in installed for extra in re.sub(r".*\[(.*)\]", r"\1", name).split(",")
    }
    # tensorrt-cu13 needs a GPU; sentencex is in a list of sentence splitters
    assert result - {*extras} == {"tensorrt-cu13<11", "sentencex"}


def test_set_keys_in_documentation_are_recipe_keys():
    known = {
        f"{table}.{key}"
        for task in TASKS.values()
        for table, keys in key_types(task).items()
        for key in keys
    }
    texts = [*TEXTS, *(path.read_text() for path in FOLDER.glob("*.toml"))]
    result = {key for text in texts for key in re.findall(r"--set '?([a-z_]+\.[a-z_]+)=", text)}
    assert len(result) > 15 and result <= known


# --------------------------------------------------------------------------------------- benchmarks


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Build a directory like the repository's root, with two cards trained for a few updates.

    The placeholders of commands are files and links in it.
    """
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(
        ROOT / "benchmarks",
        folder / "benchmarks",
        ignore=shutil.ignore_patterns("__pycache__", "node_modules"),
    )
    changes = {"data.directory": "multi30k", **standins.small(read_recipe("multi30k-en-de-cased"))}
    recipe = read_recipe("multi30k-en-de-cased", changes)
    (folder / "DATA").mkdir()
    (folder / "docs").mkdir()
    for page in ("README.md", "docs/speed.md", "docs/results.md"):
        shutil.copy(ROOT / page, folder / page)
    standins.write_text(recipe, folder / "DATA" / "multi30k")
    tokenized = read_recipe("multi30k-en-de", changes)
    standins.write_text(tokenized, folder / "DATA" / "multi30k")
    changes = {"data.directory": "trec", "data.folds": FOLDS}
    questions = read_recipe("trec", standins.small(read_recipe("trec")) | changes)
    standins.write_text(questions, folder / "DATA" / "trec")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "DATA")
        train(recipe, folder / "model_cards" / "card")
        train(questions, folder / "model_cards" / "classifier")
    with open(folder / "model_cards" / "card" / "README.md", "a") as file:
        file.write("\n## Outside its domain\n\n| text | translation |\n|---|---|\n| `A MAN` | |\n")
    for name, target in {
        "CARD": "model_cards/card",
        "DIR": "DATA/multi30k",
        "FILE": "benchmarks/results/cpu-avx2.json",
    }.items():
        (folder / name).symlink_to(folder / target)
    for name in ("SOURCE", "TARGET", "TRAIN.en", "TRAIN.de"):
        (folder / name).write_text("a line\n")
    return folder


@pytest.mark.parametrize("command", [name for name in BENCHMARKS_RUN if name not in SAME_FILES])
def test_benchmark_command_runs(command, repository, tmp_path, monkeypatch, capsys):
    [[_, script, *arguments]] = commands(command, tmp_path)
    monkeypatch.chdir(repository)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as done:
        assert done.code is None
    printed = capsys.readouterr().out
    if count := LINES.get(Path(script).stem):
        assert (
            len([json.loads(line) for line in printed.splitlines() if line.startswith("{")])
            == count
        )
    if "outside" in script:
        assert re.search(
            r"^\| `A MAN` \| `.*` \|$",
            (repository / "CARD" / "README.md").read_text(),
            re.MULTILINE,
        )
    assert printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [[], ["Two dogs run across a field."]], ids=["as it is", "with a sentence"]
)
def test_demo_runs(arguments, monkeypatch, capsys):
    """The script and its arguments are those of `make demo`, which the test of `make` checks."""
    monkeypatch.setattr(sys, "argv", ["benchmarks/demo.py", *arguments])
    runpy.run_path(str(ROOT / "benchmarks/demo.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert (
        "0 failures" in printed
        and f"{6 + len(arguments)} of {6 + len(arguments)} translations are the same" in printed
    )


# -------------------------------------------------------------------------------------------- cards


def card(path):
    """Return the test parameter of a card; only the first card of each task is not slow."""
    is_first = not path.parent.name.endswith(("en-fr", "trec", "gpu-shape"))
    return pytest.param(path, id=path.parent.name, marks=[] if is_first else [pytest.mark.slow])


EACH_CARD = pytest.mark.parametrize("path", [card(path) for path in CARDS])


def read_card_commands(path, folder):
    [script] = blocks(path.read_text())
    return [ours(call) for call in commands(script, folder)]


def shrink(arguments: list[str]) -> list[str]:
    """Return the arguments with `--set` flags for small sizes and few steps.

    Synthetic text is written where the arguments expect their data.
    """
    read = cli.parse(arguments)
    recipe = read_recipe(read.recipe, dict(read.set))
    standins.write_text(recipe, read.data)
    changes = [f"{key}={json.dumps(value)}" for key, value in standins.small(recipe).items()]
    return [*arguments, *(word for change in changes for word in ("--set", change))]


def stand_in(arguments: list[str]) -> None:
    """Write a stand-in for the output of the command `arguments`; its name selects the model."""
    read = cli.parse(arguments)
    name, data = str(read.output), read_recipe(read.recipe, dict(read.set)).data
    if name == "masked":
        standins.checkpoint(Path(name))
    elif name.startswith(("words", "pieces")):
        kind = "word" if name.startswith("words") else "bpe"
        standins.classifier(Path(name), kind, data["label_names"])
    else:
        standins.translator(Path(name))


@EACH_CARD
def test_card_commands_pass_dry_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    calls = read_card_commands(path, tmp_path)
    assert cli.parse(calls[-1]).output == Path(path.parent.name)
    for arguments in calls[:-1]:
        stand_in(arguments)
    # one call of those that differ only by a number
    calls = [*{re.sub(r"\d", "", " ".join(call)): call for call in calls}.values()]
    before = {*os.listdir(), *(cli.parse(arguments).data.name for arguments in calls)}
    for arguments in calls:
        cli.main([*shrink(arguments), "--dry-run"])
        assert "updates" in capsys.readouterr().out
    assert {*os.listdir()} == before


@pytest.mark.slow
@EACH_CARD
def test_card_commands_train_in_sequence(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in read_card_commands(path, tmp_path):
        cli.main(shrink(arguments))
    assert (tmp_path / path.parent.name / "model.safetensors").is_file()


@EACH_CARD
def test_card_snippet_runs(path, monkeypatch, capsys):
    monkeypatch.chdir(path.parents[1])
    [snippet] = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    exec(snippet, {})
    assert capsys.readouterr().out.strip()
