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
from vanilla_transformer_export.text.tasks.task import pipeline_call, task_function

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
    "engine": "errors heads specs inference targets",
    "runtime": "errors heads specs inference targets engine",
    "text": "errors heads specs inference engine",
    "text_runtime": "errors heads specs inference engine runtime text image_runtime",
    "image_runtime": "errors heads specs inference runtime text",
    "attention_maps": "errors inference engine text text_runtime",
    "files": "errors heads specs inference runtime text text_runtime image_runtime",
    "serving": "errors arguments heads specs inference engine text runtime "
    "text_runtime image_runtime",
    # needs torch and transformers, so no other folder imports it
    "ort_models": "errors exporting heads inference runtime specs targets",
    "proof": "errors heads specs inference graphs engine runtime text",
    "exporting": "errors arguments heads specs inference graphs one_graph targets engine runtime "
    "text text_runtime proof",
}
ALL = ("__init__", "__main__", "cli", "ray")  # may import from everywhere
EVERYWHERE = ("shared",)  # modules of vanilla_transformer, which import nothing from here
# Imports still to be removed.
EXCEPTIONS = {
    ("serving/protocols/open_inference.py", "__init__"),
    ("serving/protocols/text_embeddings.py", "__init__"),
}


def test_table_of_heads_matches_its_users():
    """Check the functions of tasks, formats of pipelines, metrics and writers of graphs."""
    tasks = {task for head in HEADS.values() for task in head.tasks}
    assert all(callable(task_function(task)) for task in tasks)
    assert all(pipeline_call(name) for name in {*PIPELINES} - {*pipelines.GENERATION_OPTIONS})
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


def loaded_imports(path: Path) -> Iterator[str]:
    """Yield the modules of export/ that `path` imports when it is loaded or for type checking."""
    package = path.relative_to(ROOT).parts[:-1]
    nodes = [*ast.parse(path.read_text()).body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) + 1 - node.level]
            base += tuple((node.module or "").split(".")) if node.module else ()
            for alias in node.names:
                is_module = ROOT.joinpath(*base, alias.name).with_suffix(".py").exists()
                yield ".".join((*base, alias.name) if is_module else base)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)


def test_modules_do_not_import_each_other():
    graph = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        graph[".".join(parts).removesuffix(".__init__")] = {*loaded_imports(path)}
    reached = dict(graph)
    for _ in graph:  # until nothing more is reached
        further = {
            name: modules.union(*(reached.get(module, ()) for module in modules))
            for name, modules in reached.items()
        }
        if further == reached:
            break
        reached = further
    assert not [name for name in graph if name in reached[name]]


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
