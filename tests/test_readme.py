"""What README.md shows runs, and what it names exists."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vanilla_transformer_export import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAPER_FILES = ("layers_vanilla_transformer.py", "modeling_vanilla_transformer.py")
MODELING = "".join((ROOT / "vanilla_transformer" / name).read_text() for name in PAPER_FILES)
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^\$ (vanilla-transformer .*)$", README, re.MULTILINE)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A directory that looks like the repository's root to a snippet, with a toy corpus: half of this README, in capitals."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "model_cards").symlink_to(ROOT / "model_cards")
    lines = [line for line in README.splitlines() if re.search("[a-z]{3}", line)]
    for name, chosen in (("train", lines[::2]), ("val", lines[::30])):
        (folder / f"{name}.en").write_text("".join(line + "\n" for line in chosen))
        (folder / f"{name}.de").write_text("".join(line.upper() + "\n" for line in chosen))
    return folder


def run(arguments, folder):
    result = subprocess.run(arguments, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_python_snippets_run(workplace):
    assert len(SNIPPETS) == 5
    output = run([sys.executable, "-c", "\n".join(SNIPPETS)], workplace)
    assert "translation_text" in output
    assert "(2, 3, 64)" in output
    assert "VanillaEncoderForMaskedLM\nTrue\n" in output


def test_command_lines_run_in_order(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    outputs = []
    for line in COMMANDS:  # in this process: importing torch each time would take longer than all they do
        cli.main(shlex.split(line)[1:])
        outputs.append(capsys.readouterr().out)
    verbs = [shlex.split(line)[1] for line in COMMANDS]
    first = ["train", "evaluate", "export", "verify", "evaluate", "generate", "generate", "export", "verify", "generate"]
    assert verbs == [*first, "info", "attention", "convert", "convert", "doctor"]
    assert outputs[1].replace('"torch"', "") == outputs[4].replace('"onnxruntime"', "")  # the same BLEU
    assert "0 failures" in outputs[3] and "0 failures" in outputs[8]


def test_links_lead_from_the_package_s_page_to_files_that_there_are():
    """There, a link that is relative to the repository leads nowhere."""
    home = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    links = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", README, re.MULTILINE))
    files = [re.fullmatch(rf"{home}/(?:blob|raw)/main/(.+)", link)[1] for link in links.values()]
    assert len(files) > 5 and all((ROOT / file).is_file() for file in files)
    text = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    assert {*re.findall(r"\]\[([^\]]+)\]", text)} == {*links}
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", text) == []
    assert f"git+{home}" in text


@pytest.mark.parametrize("reference", re.findall(r"`([^`]+)`", README.split("| paper | symbol |")[1].split("\n\n")[0]))
def test_the_paper_table_names_what_is_in_the_code(reference):
    scope = MODELING
    for number, name in enumerate(reference.split(".")):
        indent = "    " * number
        found = re.search(rf"^{indent}(?:class {name}\b|def {name}\b|{name} = )", scope, re.MULTILINE)
        assert found, reference
        scope = re.split(r"\n(?=class |def )", scope[found.start() :])[0]


def test_the_tree_lists_every_module():
    modules = [*ROOT.glob("vanilla_transformer/*.py"), *ROOT.glob("export/*.py")]
    tree = README.split("## The tree")[1].split("## Install")[0]
    assert [path.name for path in modules if path.name not in tree and path.name != "__init__.py"] == []
