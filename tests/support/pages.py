"""README.md and the pages of docs/: their blocks of code, and how these run.

A block that cannot run has a comment above it, "<!-- not run: REASON -->". What a block prints may
stand below it, after "It prints:"; there, `...` is any text.
"""

import doctest
import json
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

import standins
from checkpoints import toy_corpus
from heads import word_pieces
from sentence_transformers import SentenceTransformer
from shell import commands
from transformers import BertConfig, BertModel

from vanilla_transformer.training.recipe import read_recipe
from vanilla_transformer_export.cli import main as cli

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LANGUAGES = ("python", "bash", "toml", "text")  # "text" is a drawing
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n\n)?"
    r"^```(?P<language>[\w-]*)\n(?P<code>.*?)^```$"
    r"(?:\n\nIt prints:\n\n```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
DIRECTIVE = re.compile(r"^```\{.*?^```$", re.MULTILINE | re.DOTALL)
ANY_TEXT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A code block of a page, which begins at `line`.

    `reason` is why it does not run, and `output` is what it prints according to the page; both may
    be `None`.
    """

    line: int
    language: str
    code: str
    reason: str | None
    output: str | None


def blocks(page: Path) -> list[Block]:
    """Return all code blocks of the file `page` except Sphinx directives."""
    text = re.sub(
        r"^```\{.*?^```$",
        lambda match: "\n" * match[0].count("\n"),
        page.read_text(),
        flags=re.MULTILINE | re.DOTALL,
    )
    matches = BLOCK.finditer(text)
    return [
        Block(text[: match.start("code")].count("\n"), **match.groupdict()) for match in matches
    ]


def run(page: Path, folder: Path, printed) -> int:
    """Run the blocks of `page` in the working directory `folder`, and return how many ran.

    `printed()` returns the text that was printed since its last call.
    """
    (folder / "model_cards").symlink_to(ROOT / "model_cards")
    (folder / "examples").symlink_to(ROOT / "examples")
    if page.name == "README.md":
        write_corpus(folder)
    if page.name in ("README.md", "serving-tasks.md"):
        save_embedder(folder / "sentence-transformers" / "all-MiniLM-L6-v2")
    runnable = [
        block for block in blocks(page) if block.reason is None and block.language != "text"
    ]
    names = {"__name__": page.stem}
    printed()
    for block in runnable:
        location = f"{page.name}:{block.line}"
        if block.language == "python":
            exec(compile("\n" * block.line + block.code, page, "exec"), names)
        elif block.language == "toml":
            name = block.code.splitlines()[0].removeprefix("# ")
            (folder / name).write_text(block.code)
        else:
            for call in commands(block.code, folder):
                run_call(call, is_cut=page.name == "README.md")
        output = printed()
        if block.output is not None:
            assert doctest.OutputChecker().check_output(block.output, output, ANY_TEXT), (
                f"{location} prints\n{output}"
            )
    return len(runnable)


def write_corpus(folder: Path) -> None:
    """Write the parallel text that a reader of the README has to `folder`."""
    pairs = toy_corpus(60, seed=0)
    for split in ("train", "val"):
        for side, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            (folder / f"{split}.{side}").write_text("".join(line + "\n" for line in lines))


def save_embedder(directory: Path) -> None:
    """Write a stand-in for the embedder of the README: one layer of BERT, random, with pooling."""
    tokenizer = word_pieces()
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=384, num_hidden_layers=1)
    transformer = directory.with_name("transformer")
    for part in (BertModel(config), tokenizer):
        part.save_pretrained(transformer)
    SentenceTransformer(str(transformer)).save_pretrained(str(directory))


def run_call(call: list[str], is_cut: bool) -> None:
    """Run the command `call`, a list of words, in this process: importing torch each time is slow.

    With `is_cut`, training is of a small model for a few updates.
    """
    program, *arguments = call
    if program == "python" and arguments[:2] == ["-m", "vanilla_transformer_export"]:
        program, arguments = "vanilla-transformer", arguments[2:]
    if program == "vanilla-transformer":
        cli.main(cut(arguments) if is_cut and arguments[0] == "train" else arguments)
        return
    assert program == "python" and arguments[0].startswith("examples/"), call
    run_script(*arguments)


def run_script(script: str, *arguments: str) -> None:
    before = sys.argv
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        sys.argv = before


def cut(arguments: list[str]) -> list[str]:
    """Return the `arguments` of `train` with changes that reduce sizes and steps."""
    read = cli.parse(arguments)
    changes = standins.small(read_recipe(read.recipe, dict(read.set)))
    return [
        *arguments,
        *(
            word
            for key, value in changes.items()
            for word in ("--set", f"{key}={json.dumps(value)}")
        ),
    ]
