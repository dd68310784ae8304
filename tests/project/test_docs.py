"""Tests of README.md and docs/: code blocks run or state what they need, and names and links
exist."""

import ast
import dataclasses
import os
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pages
import pytest
from pages import PAGES, ROOT, blocks
from shell import PROGRAMS, RAYS, commands, ours

import vanilla_transformer
import vanilla_transformer_export
from vanilla_transformer.training.recipe import FOLDER
from vanilla_transformer.training.tasks import TASKS
from vanilla_transformer_export import Options, ray
from vanilla_transformer_export.cli import main as cli

DOCS = [page for page in PAGES if page.name != "README.md"]
# Number of blocks in each page that do not run and state what they need.
NOT_RUN = {
    "README.md": 2,
    "hub.md": 2,
    "quickstart.md": 1,
    "deploy.md": 1,
    "export.md": 1,
    "files.md": 1,
    "fine-tuning.md": 1,
    "clients.md": 1,
    "coming-from-optimum.md": 1,
    "coming-from-text-embeddings-inference.md": 1,
    "training.md": 4,
    "run.md": 4,
    "serving.md": 2,
    "serving-ray.md": 2,
    "serving-tasks.md": 2,
    "serving-translate.md": 3,
}
# Run in `make test`; the other pages run in `make test-all`.
FAST = ("README.md", "models.md", "convert.md")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def page_name(page):
    return page.name


def has_code(page):
    return any(block.reason is None and block.language != "text" for block in blocks(page))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=() if page.name in FAST else pytest.mark.slow)
        for page in filter(has_code, PAGES)
    ],
)
def test_code_blocks_of_page_run_in_order(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # as in an active environment
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert pages.run(page, tmp_path, lambda: capsys.readouterr().out)


PAGE = """# A page

```{toctree}
index
```

```python
number = 2
print(f"{number} dogs")
```

It prints:

```text
SHOWN
```

<!-- not run: needs a GPU. -->

```bash
vanilla-transformer doctor
```
"""


def test_blocks_have_language_reason_and_output(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    first, second = blocks(page)
    assert (first.language, first.reason, first.output) == ("python", None, "SHOWN\n")
    assert (second.language, second.reason, second.output) == ("bash", "needs a GPU.", None)
    assert (
        PAGE.splitlines()[first.line] == "number = 2"
        and PAGE.splitlines()[second.line] == "vanilla-transformer doctor"
    )


@pytest.mark.parametrize(
    "shown, is_right", [("2 dogs", True), ("... dogs", True), ("3 dogs", False)]
)
def test_output_of_block_must_match_page(shown, is_right, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("SHOWN", shown))
    if is_right:
        assert pages.run(page, tmp_path, lambda: capsys.readouterr().out) == 1
        return
    with pytest.raises(AssertionError, match="page.md:7 prints\n2 dogs"):
        pages.run(page, tmp_path, lambda: capsys.readouterr().out)


def test_blocks_that_do_not_run_state_what_they_need():
    result = {page.name: [block for block in blocks(page) if block.reason] for page in PAGES}
    assert {name: len(marked) for name, marked in result.items() if marked} == NOT_RUN
    for block in (block for page in PAGES for block in blocks(page)):
        assert block.language in pages.LANGUAGES, block
        is_drawing = block.language == "text"
        assert not is_drawing or not re.search(
            rf"^\s*(?:\$ )?(?:{'|'.join(PROGRAMS)}) ", block.code, re.MULTILINE
        ), block
    reasons = [block.reason for marked in result.values() for block in marked]
    assert all(re.search(r"^needs .+\.$", reason) for reason in reasons)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name in NOT_RUN], ids=page_name)
def test_blocks_that_do_not_run_are_parsed(page, tmp_path):
    for block in (block for block in blocks(page) if block.reason):
        if block.language == "python":
            assert ast.parse(block.code).body
            continue
        (tmp_path / PROJECT["name"]).mkdir(exist_ok=True)  # `git clone` would create this
        calls = commands(block.code, tmp_path)
        assert calls
        for call in calls:
            check_call(call)


def check_call(call: list[str]) -> None:
    program, *arguments = call
    if program == "git":
        assert arguments == ["clone", PROJECT["urls"]["Source"]]
    elif program == "pip":
        assert arguments[:3] == ["install", "-c", "constraints.txt"]
        assert (ROOT / "constraints.txt").is_file()
        if arguments[3:] == ["torch"]:
            return
        assert arguments[3:-1] == ["-e"]
        extras = re.fullmatch(r"\.\[(.+)\]", arguments[-1])[1].split(",")
        assert {*extras} <= PROJECT["optional-dependencies"].keys()
    elif program == RAYS:
        assert arguments[:2] == ["run", f"{ray.__name__}:{ray.app.__name__}"]
        assert ray.settings_from(dict(each.split("=", 1) for each in arguments[2:]), {})
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        assert cli.parse(ours(call)).run


# ----------------------------------------------------------------------------------- names in pages


def test_index_lists_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    entries = re.findall(
        r"^([a-z-]+)$",
        "\n".join(re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)),
        re.MULTILINE,
    )
    assert sorted(entries) == sorted(page.stem for page in DOCS if page.stem != "index")


def anchors(page):
    """Return the anchors of the page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=page_name
)
def test_links_lead_to_existing_files_and_headings(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    references = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))
    assert {*re.findall(r"\]\[([^\]]+)\]", text)} == references.keys()
    links = [*re.findall(r"\]\(([^)]+)\)", text), *references.values()]
    for link in links:
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_api_reference_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text()
    documented = {
        name.rpartition(".")[2]
        for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text, re.MULTILINE)
    }
    public = {*vanilla_transformer.__all__, *vanilla_transformer_export.__all__}
    assert {name for name in public if not name.startswith("__")} <= documented


def test_api_reference_directives_are_in_eval_rst_blocks():
    text = (ROOT / "docs" / "api.md").read_text()
    outside = re.sub(r"^```\{eval-rst\}\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"^\.\. .*$", outside, re.MULTILINE)


def test_quickstart_lists_all_extras():
    extras = PROJECT["optional-dependencies"]
    entries = re.findall(
        r"^\|.*`pip install \"\.\[(.+)\]\"`",
        (ROOT / "docs" / "quickstart.md").read_text(),
        re.MULTILINE,
    )
    assert {extra for group in entries for extra in group.split(",")} == set(extras)


def test_table_of_verbs_matches_parser():
    text = (ROOT / "docs" / "command-line.md").read_text()
    result = dict(re.findall(r"^\| `([\w-]+).*`\[([\w,]+)\]` \|$", text, re.MULTILINE))
    assert result == {name: verb.extras for name, verb in cli.VERBS.items()}


def test_table_of_recipes_lists_all_shipped_recipes():
    table = (ROOT / "docs" / "training.md").read_text().split("| recipe |")[1].split("\n\n")[0]
    recipes = {
        name
        for line in table.splitlines()
        for name in re.findall(r"`([\w-]+)`", line.split("|")[1])
    }
    assert recipes == {path.stem for path in FOLDER.glob("*.toml")}


def test_table_of_data_keys_lists_those_of_each_task():
    table = (ROOT / "docs" / "training.md").read_text().split("| keys of `data` |")[1]
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \|$", table.split("\n\n")[0], re.MULTILINE)
    keys = {task: {*re.findall(r"`(\w+)(?: = true)?`", cell)} for task, cell in rows}
    assert keys == {name: {*task.data} for name, task in TASKS.items()}


def test_generated_tables_and_docstrings_are_up_to_date(tmp_path):
    """docs/options.py restores changed tables of pages and changed lines of docstrings."""
    page = "docs/settings.md"
    places = ("docs/options.py", page, "export/runtime.py", "export/exporting/export.py")
    texts = {place: (ROOT / place).read_text() for place in places}
    for place, text in texts.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(
            text.replace("| `num_beams` |", "| `beams` |")
            .replace("num_beams: hypo", "num_beams: hyper")
            .replace("| `--port N` | `8000` |", "| `--port N` | `80` |")
            .replace("| `--target TARGET` | `portable`", "| `--target TARGET` | `cpu`")
            .replace("image_size: of images", "image_size: of sounds")
        )
    runpy.run_path(str(tmp_path / "docs/options.py"), run_name="__main__")
    for place, text in texts.items():
        assert (tmp_path / place).read_text() == text, "run .venv/bin/python docs/options.py"
    assert {field.name for field in dataclasses.fields(Options)} <= {
        *re.findall(r"^\| `(\w+)` \|", texts[page], re.MULTILINE)
    }


PAPER = (ROOT / "docs" / "paper.md").read_text().split("| paper | symbol |")[1].split("\n\n")[0]
PAPER_FILES = ("layers_vanilla_transformer.py", "modeling_vanilla_transformer.py")
MODELING = "".join((ROOT / "vanilla_transformer" / name).read_text() for name in PAPER_FILES)


@pytest.mark.parametrize("reference", re.findall(r"`([^`]+)`", PAPER))
def test_names_in_paper_table_exist_in_code(reference):
    scope = MODELING
    for number, name in enumerate(reference.split(".")):
        indent = "    " * number
        result = re.search(
            rf"^{indent}(?:class {name}\b|def {name}\b|{name} = )", scope, re.MULTILINE
        )
        assert result, reference
        scope = re.split(r"\n(?=class |def )", scope[result.start() :])[0]


def test_architecture_page_lists_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = (ROOT / "vanilla_transformer", ROOT / "export")
    modules = [
        path
        for folder in folders
        for path in folder.rglob("*.py")
        if "__pycache__" not in path.parts
    ]
    missing = [path for path in modules if path.name not in text and path.name != "__init__.py"]
    assert [path.relative_to(ROOT).as_posix() for path in missing] == []


def test_files_named_in_contributing_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = re.findall(
        r"`((?:vanilla_transformer|export|tests|docs|benchmarks|examples|\.ci)/[\w./-]*)`", text
    )
    assert len(files) > 20
    assert [file for file in files if "NAME" not in file and not (ROOT / file).exists()] == []
