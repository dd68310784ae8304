"""Tests of imports between the folders of export/, and of the table of heads, which several folders
read. Imports in functions and for type checking count."""

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
# What each folder or module may import from, besides itself.
ALLOWED = {
    "errors": "",
    "shared": "",
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
    "text_runtime": "errors heads specs inference requests runtime scheduler text image_runtime",
    "image_runtime": "errors specs inference runtime text",
    "files": "errors heads specs inference runtime text text_runtime image_runtime",
    "serving": "errors arguments heads specs inference requests model scheduler text runtime "
    "text_runtime image_runtime",
    # needs torch and transformers, so no other folder imports it
    "ort_models": "errors exporting heads inference runtime specs targets",
    "certification": "errors heads specs inference requests model scheduler runtime",
    "exporting": "errors arguments heads specs inference graphs one_graph targets runtime text "
    "text_runtime certification",
}
ALL = ("__init__", "__main__", "cli", "ray")  # may import from everywhere
EVERYWHERE = ("shared",)  # modules of vanilla_transformer, which import nothing from here
# Imports still to be removed. Annotations of tasks name the runtime that has them as methods.
TEXT_TASKS = ("classification", "embedding", "masks", "pairs", "question_answering", "rows")
EXCEPTIONS = {
    ("serving/protocols/open_inference.py", "__init__"),
    ("serving/protocols/text_embeddings.py", "__init__"),
    ("text/language_pairs.py", "text_runtime"),
    ("text/model_facts.py", "text_runtime"),
    *(
        (f"text/tasks/{name}.py", "text_runtime")
        for name in (*TEXT_TASKS, "reranking", "tagging", "translation")
    ),
}


def test_table_of_heads_matches_its_users():
    """Check the functions of tasks, formats of pipelines, metrics and writers of graphs."""
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


def top_folder(parts: tuple[str, ...]) -> str:
    return parts[0] if parts else "__init__"


def imports(path: Path) -> Iterator[str]:
    """Yield the folders and modules of export/ that `path` imports from."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) + 1 - node.level]
            base += tuple((node.module or "").split(".")) if node.module else ()
            for alias in node.names:
                is_module = (ROOT.joinpath(*base, alias.name)).with_suffix(".py").exists()
                is_folder = ROOT.joinpath(*base, alias.name).is_dir()
                yield top_folder((*base, alias.name) if is_module or is_folder else base)


def test_imports_follow_allowed_directions():
    result = set()
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        folder = name.partition("/")[0].removesuffix(".py")
        if folder in ALL:
            continue
        for imported_folder in imports(path):
            allowed = (folder, *EVERYWHERE, *ALLOWED[folder].split())
            if imported_folder not in allowed:
                result.add((name, imported_folder))
    assert result == EXCEPTIONS
