"""Tests of the public names of the package: lazy imports, annotations and types."""

import dataclasses
import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from checkpoints import PAD
from messages import raises

import vanilla_transformer_export as package

NAMES = ["ImageRuntime", "Options", "Runtime", "TextRuntime", "__version__"]
NAMES += ["evaluate", "export", "load_checkpoint", "verify"]


def run(code, *flags):
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=120
    )
    return done.stdout.split(), done.stderr


def test_public_names_are_listed_and_unknown_name_raises():
    assert sorted(package.__all__) == NAMES and set(NAMES) <= set(dir(package))
    assert package.__version__ == version("vanilla-transformer")
    for name in NAMES:
        assert getattr(package, name) is not None
    with raises(AttributeError, seen="runtimes", expected="ImageRuntime"):
        _ = package.runtimes


def test_package_import_loads_only_standard_library():
    code = (
        "import sys; before = set(sys.modules); import vanilla_transformer_export; "
        "print(*sorted(set(sys.modules) - before))"
    )
    modules, errors = run(code)
    top = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names
    assert (top, errors) == ({"vanilla_transformer_export"}, "")


@pytest.mark.parametrize(
    "missing, name, extra",
    [
        ("onnx", "export", "export,cpu"),
        ("torch", "verify", "torch,cpu"),
        ("onnxruntime", "Runtime", "cpu"),
    ],
)
def test_missing_package_error_names_extra(missing, name, extra):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys(['torch', {missing!r}])); "
        f"import vanilla_transformer_export as p; p.{name}"
    )
    _, errors = run(code)
    assert f"pip install 'vanilla-transformer[{extra}]'" in errors.splitlines()[-1]
    assert missing in errors.splitlines()[-1]


def public_callables():
    for name in NAMES:
        value = getattr(package, name)
        if inspect.isclass(value):
            yield from (
                (f"{name}.{key}", member)
                for key, member in vars(value).items()
                if is_public(key) and callable(member)
            )
        elif callable(value):
            yield name, value


def is_public(name):
    return not name.startswith("_") or name == "__init__"


@pytest.mark.parametrize(
    "name, function",
    [*public_callables()],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_public_signatures_are_annotated(name, function):
    signature = inspect.signature(function)
    parameters = [
        parameter for parameter in signature.parameters.values() if parameter.name != "self"
    ]
    assert [
        parameter.name for parameter in parameters if parameter.annotation is parameter.empty
    ] == []
    assert name.endswith("__init__") or signature.return_annotation is not signature.empty


# ------------------------------------------------------------------------------------------ options


def test_options_have_names_and_defaults_of_transformers():
    """`seed` exists only here, and special tokens default to those of the model."""
    from transformers import GenerationConfig

    theirs = GenerationConfig()
    documented = {
        "max_new_tokens": 20,
        "num_beams": 1,
        "top_k": 50,
        "temperature": 1.0,
        "top_p": 1.0,
        "length_penalty": 1.0,
    }
    for field in dataclasses.fields(package.Options):
        name = field.name
        assert name == "seed" or hasattr(theirs, name), name
        assert field.metadata["help"] and field.metadata["kind"].expected
        value = getattr(theirs, name, None)
        assert value is None or value == field.default, name
        assert documented.get(name, field.default) == field.default


def test_option_values_are_validated_and_misspelled_name_suggests_option(exported):
    for field in dataclasses.fields(package.Options):
        expected = field.metadata["kind"].expected
        with raises(ValueError, seen=(field.name, "object"), expected=expected):
            package.Options(**{field.name: object()})
    runtime = package.Runtime(exported("causal").directory, threads=1)
    with raises(ValueError, seen=("num_beam", "num_beams")):
        runtime.generate(np.array([[5, 6]]), num_beam=3)
    assert package.Options(pad_token_id=PAD).pad_token_id == PAD


# -------------------------------------------------------------------------------------------- types

PROBE = "import vanilla_transformer_export as package\n" + "".join(
    f"reveal_type(package.{name})\n" for name in NAMES
)
# Types of the large libraries are skipped, since reading them takes most of the time.
SETTINGS = """
[mypy]
follow_imports = silent
ignore_missing_imports = true
[mypy-torch.*,transformers.*,onnx.*,onnx_ir.*,onnxruntime.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_lazy_names_have_types(tmp_path):
    """mypy does not follow the editable install to a folder of another name, so the test adds a
    link."""
    pytest.importorskip("mypy", reason="comes with the extra test")
    folder = Path(package.__file__).parent
    (tmp_path / "vanilla_transformer_export").symlink_to(folder)
    (tmp_path / "vanilla_transformer").symlink_to(folder.with_name("vanilla_transformer"))
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "probe.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    notes = [
        line.partition("Revealed type is ")[2]
        for line in done.stdout.splitlines()
        if "Revealed type" in line
    ]
    types = {
        name: note.strip('"').replace("builtins.", "")
        for name, note in zip(NAMES, notes, strict=True)
    }
    assert not {"Any", "object"} & set(types.values()), done.stdout
    assert types["__version__"] == "str" and types["export"].endswith("-> dict[str, Any]")
    assert types["Runtime"].endswith("-> vanilla_transformer_export.runtime.Runtime")
