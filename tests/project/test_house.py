"""Tests of the structure of export/: one folder for each target, one direction of imports, and the
modules that may need torch."""

import ast
import importlib
import json
import tomllib
from dataclasses import replace
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import main
from messages import raises
from standins import SHAPE, STORY, saved
from targets import prompts

import vanilla_transformer_export
from vanilla_transformer import VanillaDecoderConfig, VanillaDecoderForCausalLM
from vanilla_transformer.training.tokenizer import train_tokenizer
from vanilla_transformer_export import Runtime, export, verify
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.targets import registry
from vanilla_transformer_export.targets.portable import PORTABLE
from vanilla_transformer_export.targets.portable.rows import PortableRows, PortableRowsFactory

ROOT = Path(vanilla_transformer_export.__file__).resolve().parent
FILES = sorted(path for path in ROOT.rglob("*.py") if "__pycache__" not in path.parts)


def relative_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


HEAVY = ("torch", "transformers", "safetensors", "onnx", "onnx_ir", "vanilla_transformer")
# Only modules that make graphs or compare with torch may import `HEAVY` at the top.
# Modules in folders of graphs that do not import `HEAVY`.
LIGHT = ("__init__", "config", "quantization", "input_scales")
IN_TARGETS = ("graphs", "generation")  # modules of a target
ORT_MODELS = {  # transformers' model classes over exports
    f"ort_models/{name}.py"
    for name in (
        "base",
        "decoder_cache",
        "encoder_graph",
        "generation",
        "opening",
        "pipelines",
        "task_models",
    )
}
MAY_BE_HEAVY = {
    *ORT_MODELS,
    "ort_models/__init__.py",
    *(f"one_graph/{name}.py" for name in ("beam_search", "loop", "ops", "searches")),
    *(
        f"exporting/{name}.py"
        for name in ("calibration", "checkpoint", "companion_files", "evaluation", "export")
    ),
    *(f"exporting/{name}.py" for name in ("graphs", "loading", "one_graph", "shortlist")),
    "exporting/alignment_heads.py",
    "proof/torch.py",
    *(
        relative_name(path)
        for path in FILES
        if path.parent.name == "graphs" and path.stem not in LIGHT
    ),
    *(
        relative_name(path)
        for path in FILES
        if path.parts[-3] == "targets" and path.stem in IN_TARGETS
    ),
    "targets/cuda/overflow.py",
}
TORCH = {
    *ORT_MODELS,
    *("exporting/calibration.py", "exporting/loading.py", "proof/torch.py"),
    "targets/cuda/overflow.py",
}
# These import `HEAVY` packages inside functions that make graphs, or for type checking.
LAZY_IMPORTERS = {
    *("cli/checkpoints.py", "cli/training.py"),
    *("targets/target.py", "one_graph/generation_config.py", "one_graph/step.py"),
    *("exporting/plan.py", "proof/verify.py", "inference/options.py"),
    *(
        relative_name(path)
        for path in FILES
        if path.parts[-3] == "targets" and path.stem == "__init__"
    ),
}


# -------------------------------------------------------------------------------------- the targets


class OneByOneFactory:
    supports_empty_prompts = True
    start_search = None

    def __init__(self, factory):
        self.factory = factory

    def open(self, request):
        return OneByOneRows(self.factory.open(request))


class OneByOneRows:
    all_logits = False
    places = best_tokens = None
    shrinks = False
    steps = []

    def __init__(self, rows: PortableRows):
        self.rows = rows
        self.select = rows.select
        self.close = rows.close

    def prefill(self, input_ids, attention_mask):
        return self.rows.prefill(input_ids, attention_mask)[:, -1:]

    def step(self, tokens):
        assert tokens.shape[1] == 1
        self.steps.append(len(tokens))
        return self.rows.step(tokens)


THROWAWAY = replace(
    PORTABLE,
    name="throwaway",
    help="for this test",
    opsets=(20,),
    open=lambda export: OneByOneFactory(PortableRowsFactory(export)),
)


@pytest.fixture
def throwaway():
    registry.register(THROWAWAY)
    yield
    registry.unregister("throwaway")


def test_registered_target_works_in_api_and_commands(throwaway, exported_for, tmp_path, capsys):
    """Run export, verify, generate, stream, doctor and the help of the command."""
    model, directory = exported_for("causal", "portable")
    checkpoint, out = f"{directory}-checkpoint", tmp_path / "out"
    main(["export", checkpoint, str(out), "--target", "throwaway", "--dtype", "int8,fp32"])
    assert json.loads(capsys.readouterr().out)["parity"]["cases"] == 12
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["target"], manifest["opset"], manifest["default_dtype"]) == (
        "throwaway",
        20,
        "int8",
    )
    assert verify(out, model, cases=9, dtype="fp32").failures == []
    runtime, (ids, mask) = Runtime(out, dtype="fp32"), prompts("causal")
    OneByOneRows.steps.clear()
    for options in ({}, {"num_beams": 3}):
        expected = model.generate(
            torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            max_new_tokens=7,
            **options,
        )
        assert (
            runtime.generate(ids, mask, max_new_tokens=7, **options).tolist() == expected.tolist()
        )
    steps = list(runtime.stream(ids, mask, max_new_tokens=7))
    assert (
        np.stack(steps, axis=1).tolist()
        == runtime.generate(ids, mask, max_new_tokens=7)[:, 7:].tolist()
    )
    # the target's own decoder ran, with a row per input or per beam
    assert set(OneByOneRows.steps) == {4, 12}
    main(["doctor"])
    assert "target throwaway runs on the CPU" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "throwaway" in printed and "for this test" in printed


def test_evaluate_supports_registered_target(throwaway, tmp_path, capsys):
    """The decoder returns logits one token at a time, and the perplexity equals that of torch."""
    config = VanillaDecoderConfig(vocab_size=40, num_hidden_layers=1, **SHAPE)
    checkpoint = saved(
        VanillaDecoderForCausalLM(config),
        train_tokenizer(STORY, 40, variant="decoder"),
        tmp_path / "model",
    )
    (tmp_path / "text").write_text("\n".join(STORY))
    export(checkpoint, tmp_path / "out", cases=1, target="throwaway")
    result = []
    for model in (tmp_path / "out", checkpoint):
        main(["evaluate", str(model), "--text", str(tmp_path / "text")])
        result.append(json.loads(capsys.readouterr().out))
    assert [each["engine"] for each in result] == ["onnxruntime", "torch"]
    assert (
        result[0]["perplexity"] == pytest.approx(result[1]["perplexity"], rel=1e-4)
        and result[0]["tokens"] > 10
    )


def test_duplicate_and_unknown_targets_raise(throwaway, exported, tmp_path):
    with raises(ValueError, seen="throwaway"):
        registry.register(THROWAWAY)
    with raises(UsageError, seen="portabel", expected="portable"):
        export(exported("encoder").checkpoint, tmp_path / "out", target="portabel")
    assert not (tmp_path / "out").exists()


def test_export_for_unregistered_target_error_names_target(exported, tmp_path):
    registry.register(THROWAWAY)
    export(exported("encoder").checkpoint, tmp_path / "out", target="throwaway", cases=1)
    registry.unregister("throwaway")
    with raises(ValueError, seen="throwaway"):
        Runtime(tmp_path / "out")


def test_graph_of_other_target_raises(exported_for, tmp_path):
    """The manifest of a cpu export names the target portable."""
    from checkpoints import copy_folder, edit_json

    directory = copy_folder(exported_for("causal", "cpu")[1], tmp_path)
    edit_json(directory / "manifest.json", target="portable")
    with raises(ValueError, seen=("config.json", "attention_mask")):
        Runtime(directory)


def test_target_names_are_not_compared_outside_their_folders():
    """Comparisons with a device are allowed: devices and targets share names."""
    names = {target.name for target in registry.targets()}
    comparisons = []
    for path in FILES:
        folder = path.relative_to(ROOT).parts
        if folder[0] == "targets" and len(folder) > 2:
            continue
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            for constant in compared_constants(node):
                if constant in names and (
                    "device" not in ast.get_source_segment(source, node) or constant == "portable"
                ):
                    comparisons.append(f"{relative_name(path)}:{node.lineno} {constant}")
    assert comparisons == []


def compared_constants(node):
    """Return the constants that `node` compares with, looks up, or has as keys."""
    if isinstance(node, ast.Compare):
        result = [node.left, *node.comparators]
        result += [
            each
            for part in result
            if isinstance(part, ast.Tuple | ast.List | ast.Set)
            for each in part.elts
        ]
    elif isinstance(node, ast.Subscript):
        result = [node.slice]
    elif isinstance(node, ast.Dict):
        result = node.keys
    elif isinstance(node, ast.MatchValue):
        result = [node.value]
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("get", "pop", "setdefault")
    ):
        result = node.args[:1]
    else:
        result = []
    return [part.value for part in result if isinstance(part, ast.Constant)]


# ------------------------------------------------------------------------------------------ imports


def imported_packages(tree, everywhere):
    """Yield the packages imported at the top of a file, or anywhere in it if `everywhere`."""
    nodes = ast.walk(tree) if everywhere else tree.body
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def test_only_expected_modules_import_heavy_packages():
    trees = {relative_name(path): ast.parse(path.read_text()) for path in FILES}
    heavy = {
        name for name, tree in trees.items() if set(imported_packages(tree, False)) & set(HEAVY)
    }
    assert heavy == MAY_BE_HEAVY
    assert {
        name for name, tree in trees.items() if set(imported_packages(tree, True)) & set(HEAVY)
    } - heavy == LAZY_IMPORTERS


def test_only_expected_modules_import_torch():
    trees = {relative_name(path): ast.parse(path.read_text()) for path in FILES}
    assert {
        name
        for name, tree in trees.items()
        if set(imported_packages(tree, False)) & {"torch", "transformers"}
    } == TORCH


def module_name(path, package="vanilla_transformer_export", root=ROOT):
    names = (package, *path.relative_to(root).with_suffix("").parts)
    return ".".join(names).removesuffix(".__init__")


def top_imports(tree, has_types):
    """Yield the import statements that run when a module is imported, and with `has_types` those
    for types."""
    for node in ast.iter_child_nodes(tree):
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            has_types or not is_for_types
        ):
            yield from top_imports(node, has_types)


def parents(name):
    return [name[:place] for place, letter in enumerate(name) if letter == "."]


def imported_modules(name, path, modules, has_types=False):
    """Return those of `modules` that importing the module `name` of the file `path` needs first.

    Its own packages count only if it takes more from them than their modules: they may be
    unfinished.
    """
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    needed = set()
    for node in top_imports(ast.parse(path.read_text()), has_types):
        if isinstance(node, ast.Import):
            needed |= {alias.name for alias in node.names}
        else:
            base = resolve_name("." * node.level + (node.module or ""), package)
            names = {f"{base}.{alias.name}" for alias in node.names}
            needed |= (names & modules) | ({base} if names - modules else set())
    needed |= {parent for other in needed for parent in parents(other)} - {*parents(name)}
    return (needed & modules) - {name}


def test_every_module_can_be_imported_first():
    """Without a cycle of imports, no module meets one that is not finished, whatever comes first.
    A process for each module would show the same, and takes minutes."""
    paths = {module_name(path): path for path in FILES if path.stem != "__main__"}
    needed = {name: imported_modules(name, path, paths.keys()) for name, path in paths.items()}
    order = [*TopologicalSorter(needed).static_order()]  # raises CycleError with the cycle
    assert len(order) > 150 and sum(map(len, needed.values())) > 750
    for name in order:
        importlib.import_module(name)


def test_models_conversion_and_training_have_no_cycle_of_types_either():
    root = ROOT.parent / "vanilla_transformer"
    paths = {module_name(path, root.name, root): path for path in root.rglob("*.py")}
    assert len(paths) > 100
    needed = {
        name: imported_modules(name, path, paths.keys(), has_types=True) - {*parents(name)}
        for name, path in paths.items()
    }
    assert sum(map(len, needed.values())) > 300
    assert [*TopologicalSorter(needed).static_order()]  # raises CycleError with the cycle


def test_package_list_in_pyproject_matches_folders():
    """An editable install also finds folders that a wheel would lack."""
    root = Path(__file__).parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        "vanilla_transformer": root / "vanilla_transformer",
        "vanilla_transformer_export": root / "export",
    }
    result = [
        ".".join((name, *path.parent.relative_to(folder).parts))
        for name, folder in folders.items()
        for path in folder.rglob("__init__.py")
    ]
    assert sorted(set(result)) == sorted(settings["packages"])
