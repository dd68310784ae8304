"""Tests of imports between the folders of export/, and of the table of heads, which several folders
read. Imports in functions and for types count."""

import ast
from collections.abc import Iterator
from pathlib import Path

import vanilla_transformer_export
from vanilla_transformer_export.exporting.evaluation import METRICS
from vanilla_transformer_export.graphs.sequences import WRITERS
from vanilla_transformer_export.heads import GENERATORS, HEADS, PIPELINES, READS_CHOICES
from vanilla_transformer_export.serving.protocols import pipelines
from vanilla_transformer_export.text_runtime import task_function

ROOT = Path(vanilla_transformer_export.__file__).resolve().parent
# Each folder or module -> what it may import from, beside itself.
ALLOWED = {
    "errors": "",
    "terminal": "errors",
    "arguments": "errors terminal",
    "heads": "errors",
    "specs": "errors heads",
    "inference": "errors specs",
    "graphs": "errors heads specs inference",
    "one_graph": "errors specs inference graphs",
    "targets": "errors heads specs inference graphs one_graph",
    "requests": "errors heads specs inference",
    "model": "errors heads specs inference targets requests",
    "scheduler": "errors specs inference requests model",
    "runtime": "errors heads specs inference targets requests model scheduler",
    "text": "errors heads specs inference requests",
    "text_runtime": "errors heads specs inference runtime scheduler text image_runtime",
    "image_runtime": "errors specs inference runtime text",
    "files": "errors heads specs inference runtime text text_runtime image_runtime",
    "serving": "errors arguments heads specs inference requests model scheduler text runtime "
    "text_runtime image_runtime",
    # torch and transformers over exports, which nothing else imports
    "ort_models": "errors exporting heads inference runtime specs targets",
    "certification": "errors heads specs inference requests model scheduler runtime",
    "exporting": "errors arguments heads specs inference graphs one_graph targets runtime text "
    "text_runtime certification",
}
ALL = ("__init__", "__main__", "cli", "ray")  # which may import from everywhere
# What is still to go. Tasks name the runtime whose methods they are in their annotations.
TEXT_TASKS = ("classification", "embedding", "masks", "pairs", "question_answering", "rows")
EXCEPTIONS = {
    ("serving/protocols/open_inference.py", "__init__"),
    ("serving/protocols/text_embeddings.py", "__init__"),
    ("text/language_pairs.py", "text_runtime"),
    *(
        (f"text/tasks/{name}.py", "text_runtime")
        for name in (*TEXT_TASKS, "tagging", "translation")
    ),
}


def test_the_table_of_heads_fits_what_reads_it():
    """Functions of tasks, formats of pipelines, metrics and writers of graphs."""
    tasks = {task for head in HEADS.values() for task in head.tasks}
    assert all(callable(task_function(task)) for task in tasks)
    assert {*pipelines.FORMATS, *pipelines.GENERATION_OPTIONS} <= {*PIPELINES}
    generated = [task for name in GENERATORS for task in HEADS[name].tasks]
    names = {name for task in generated for name in task.pipelines}
    assert names == {*pipelines.GENERATION_OPTIONS}
    assert {head.metric for head in HEADS.values()} - {None} == {*METRICS}
    written = {
        name.partition("For")[2]
        for name, head in HEADS.items()
        if not head.generates and head.reads != READS_CHOICES
    }
    assert written == {*WRITERS}


def folder_of(parts: tuple[str, ...]) -> str:
    return parts[0] if parts else "__init__"


def imports(path: Path) -> Iterator[str]:
    """The folders and modules of export/ that `path` imports from."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) + 1 - node.level]
            base += tuple((node.module or "").split(".")) if node.module else ()
            for alias in node.names:
                is_module = (ROOT.joinpath(*base, alias.name)).with_suffix(".py").exists()
                is_folder = ROOT.joinpath(*base, alias.name).is_dir()
                yield folder_of((*base, alias.name) if is_module or is_folder else base)


def test_imports_point_one_way():
    result = set()
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        own = name.partition("/")[0].removesuffix(".py")
        if own in ALL:
            continue
        for other in imports(path):
            if other != own and other not in ALLOWED[own].split():
                result.add((name, other))
    assert result == EXCEPTIONS
