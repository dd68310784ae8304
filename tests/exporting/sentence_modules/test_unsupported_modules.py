"""Tests of modules and files of sentence-transformers that are rejected."""

import json
import shutil
import warnings

import pytest
import torch
from checkpoints import edit_json
from command_line import main
from families import random_config
from messages import check_message, raises
from safetensors.torch import load_file, save_file
from sentence_models import TEXTS
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    LayerNorm,
    Normalize,
    Pooling,
    Transformer,
)

from vanilla_transformer.conversion import convert, plan_conversion
from vanilla_transformer_export import export


@pytest.mark.parametrize("kind", ["sentence_transformers.models.WordWeights", "my_package.Pooling"])
def test_error_names_unknown_module(saved, kind, tmp_path):
    modules = json.loads((saved / "modules.json").read_text())
    modules[2]["type"] = kind
    (saved / "modules.json").write_text(json.dumps(modules))
    with raises(ValueError, seen=kind.removeprefix("sentence_transformers.models.")):
        convert(saved, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    "content, seen",
    [
        ("{}", "{}"),
        ("[", "modules.json"),
        ("[]", "modules.json"),
        ('["a"]', "a"),
        (
            '[{"type": "sentence_transformers.models.Transformer", "path": "0_Transformer"}]',
            "0_Transformer",
        ),
        ('[{"type": "sentence_transformers.models.Transformer", "path": "../x"}]', "modules.json"),
        ('[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]', "Pooling"),
    ],
)
def test_invalid_modules_json_is_rejected(saved, content, seen, tmp_path):
    (saved / "modules.json").write_text(content)
    with raises(ValueError, seen=seen):
        convert(saved, tmp_path / "ours")


@pytest.mark.parametrize(
    "name", ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
)
def test_error_names_missing_module_file(saved, name, tmp_path):
    (saved / name).unlink()
    with raises(FileNotFoundError, seen=(name, "modules.json")):
        convert(saved, tmp_path / "ours")


def save_with(module, base, folder, tensors, **fields):
    """Save an embedder with `module` behind its pooling, and change tensors and fields of that.

    Return the embedder's directory.
    """
    directory, width = base
    modules = [Transformer(directory), Pooling(width), module, Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "theirs"))
    [place] = folder.glob("theirs/2_*")
    save_file(load_file(place / "model.safetensors") | tensors, place / "model.safetensors")
    edit_json(place / "config.json", **fields)
    return folder / "theirs"


WIDTH = random_config("bert", "BertModel", 0).hidden_size


@pytest.mark.parametrize(
    "tensors, fields, seen, expected",
    [
        ({"linear.bias": (1,)}, {}, "(1,)", "(8,)"),
        ({"linear.bias": (8, 1)}, {}, "(8, 1)", "(8,)"),
        ({"linear.weight": (8, 5)}, {"in_features": 5}, "(8, 5)", f"(8, {WIDTH})"),
        ({"linear.weight": (8, 5)}, {}, "(8, 5)", f"(8, {WIDTH})"),
        ({}, {"in_features": 5}, ("in_features", 5), WIDTH),
        ({}, {"out_features": 5}, f"(8, {WIDTH})", f"(5, {WIDTH})"),
        ({}, {"bias": False}, "linear.bias", "linear.weight"),
        ({"extra": (1,)}, {}, "extra", "linear.bias"),
        ({"norm.weight": (1,), "norm.bias": (1,)}, {}, "(1,)", f"({WIDTH},)"),
        ({"norm.bias": (1,)}, {}, "(1,)", f"({WIDTH},)"),
        ({"norm.weight": (5,), "norm.bias": (5,)}, {"dimension": 5}, "(5,)", f"({WIDTH},)"),
        ({}, {"dimension": 5}, ("dimension", 5), WIDTH),
    ],
    ids=str,
)
def test_module_that_sentence_transformers_rejects_is_an_error(
    base, tmp_path, tensors, fields, seen, expected
):
    is_norm = "dimension" in fields or "norm.bias" in tensors
    module = LayerNorm(WIDTH) if is_norm else Dense(WIDTH, 8)
    tensors = {name: torch.ones(shape) for name, shape in tensors.items()}
    theirs = save_with(module, base(), tmp_path, tensors, **fields)
    with pytest.raises(RuntimeError, match=r"state_dict|shape"):
        SentenceTransformer(str(theirs), device="cpu").encode(TEXTS)
    folder = "2_LayerNorm" if is_norm else "2_Dense"
    with raises(ValueError, seen=(folder, seen), expected=expected) as error:
        export(theirs, tmp_path / "onnx", cases=1)
    assert "\n" not in str(error.value) and not (tmp_path / "onnx").exists()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["linear.weight", "norm.bias"])
def test_module_weights_that_are_not_finite_are_an_error(base, tmp_path, name, value):
    module = Dense(WIDTH, 8) if "linear" in name else LayerNorm(WIDTH)
    tensor = module.state_dict()[name].clone()
    tensor.view(-1)[1] = value
    theirs = save_with(module, base(), tmp_path, {name: tensor})
    with raises(ValueError, seen=(str(theirs), name, "NaN"), expected="numbers"):
        export(theirs, tmp_path / "onnx", cases=1)
    assert not (tmp_path / "onnx").exists()


@pytest.mark.parametrize("change", [0, 1])
def test_older_weights_of_modules_and_heads_are_a_warning(saved, tmp_path, change):
    pairs = {"2_Dense/model.safetensors": "2_Dense/pytorch_model.bin"}
    for head, size in {"sparse_linear": 1, "colbert_linear": 4}.items():  # as of BGE-M3
        save_file(torch.nn.Linear(WIDTH, size).state_dict(), saved / f"{head}.safetensors")
        pairs[f"{head}.safetensors"] = f"{head}.pt"
    for name, older in pairs.items():
        tensors = load_file(saved / name)
        torch.save({key: tensor + change for key, tensor in tensors.items()}, saved / older)
    notes = convert(saved, tmp_path / "ours")["notes"]
    for older in pairs.values():
        shutil.copy(saved / older, tmp_path / "ours" / older)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export(tmp_path / "ours", tmp_path / "onnx", cases=1)
    for messages in (notes, [str(warning.message) for warning in caught]):
        problems = [message for message in messages if "expected the same" in message]
        assert len(problems) == len(pairs) * change
        for (name, older), problem in zip(pairs.items(), problems, strict=False):
            check_message(problem, seen=older, expected=f"{name} is read")


def test_adapters_and_code_are_reported_as_left_out(base, tmp_path):
    theirs = tmp_path / "theirs"
    shutil.copytree(base()[0], theirs)
    for name in (
        "adapter_config.json",
        "adapter_model.safetensors",
        "modeling_other.py",
        "unrelated.py",
        "notes.txt",
    ):
        (theirs / name).write_text("{}")
    edit_json(
        theirs / "config.json",
        auto_map={"AutoModel": "modeling_other.Model", "AutoConfig": "someone/x--there.Config"},
    )
    expected = ["adapter_config.json", "adapter_model.safetensors", "modeling_other.py"]
    assert "adapter_config.json is left out" in str(plan_conversion(theirs)).splitlines()
    assert convert(theirs, tmp_path / "ours")["left_out"] == expected


def test_force_replaces_our_files_but_not_foreign_folders(saved, tmp_path):
    convert(saved, tmp_path / "ours")
    convert(saved, tmp_path / "ours", force=True)
    export(tmp_path / "ours", tmp_path / "onnx", cases=2)
    main(["export", str(tmp_path / "ours"), str(tmp_path / "onnx"), "--force"])
    (tmp_path / "ours" / "checkpoint-2").mkdir()
    shutil.copy(tmp_path / "ours" / "config.json", tmp_path / "ours" / "checkpoint-2")
    with raises(FileExistsError, seen="checkpoint-2/config.json"):
        convert(saved, tmp_path / "ours", force=True)
