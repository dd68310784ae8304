"""Tests of the registry of families: a family is one line of it and one module."""

import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from families import assert_exact, compute_outputs, make_arguments, random_model
from messages import raises

import vanilla_transformer
from vanilla_transformer import conversion
from vanilla_transformer.conversion import FAMILIES, Family, convert
from vanilla_transformer.conversion.converter import get_converter

ROOT = Path(__file__).parents[2]
REGISTRY = Path(conversion.__file__).with_name("registry.py")
DATA2VEC_MODULE = """
from vanilla_transformer.conversion.roberta import tensor_maps, to_vanilla_config

CLASSES = {"Model": "VanillaEncoderModel", "ForMaskedLM": "VanillaEncoderForMaskedLM"}
"""  # the text model of data2vec is RoBERTa (Baevski et al. 2022)


@pytest.fixture
def register_family(monkeypatch):
    """Return a function that registers a family, with the source text of its module."""

    def register(family, text):
        module = ModuleType(f"{conversion.__name__}.{family.module}")
        exec(text, vars(module))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(FAMILIES, family.model_type, family)

    return register


def test_family_needs_only_registry_line_and_module(register_family, tmp_path):
    theirs = transformers.Data2VecTextConfig(
        vocab_size=50, hidden_size=12, num_attention_heads=3, num_hidden_layers=2,
        intermediate_size=20, max_position_embeddings=30,
    )  # fmt: skip
    theirs = random_model("Data2VecTextForMaskedLM", theirs, torch.float64)
    theirs.save_pretrained(tmp_path / "theirs")
    with raises(ValueError, seen=("model_type", "data2vec-text")):
        convert(tmp_path / "theirs", tmp_path / "ours")
    register_family(Family("data2vec-text", "data2vec", "encoder"), DATA2VEC_MODULE)
    facts = convert(tmp_path / "theirs", tmp_path / "ours")
    ours = (
        getattr(vanilla_transformer, facts["architecture"])
        .from_pretrained(tmp_path / "ours")
        .eval()
    )
    inputs = make_arguments(theirs)
    assert_exact(
        compute_outputs(ours, inputs)["logits"],
        compute_outputs(theirs, inputs)["logits"],
        torch.float64,
    )
    with raises(ValueError, seen="data2vec-text"):
        convert(tmp_path / "ours", tmp_path / "back", to="data2vec-text")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_registry_line_matches_module(model_type):
    family, converter = FAMILIES[model_type], get_converter(model_type)
    config_class = transformers.CONFIG_MAPPING[model_type]
    classes = [getattr(transformers, theirs) for theirs in converter.ARCHITECTURES]
    assert all(theirs.config_class is config_class for theirs in classes)
    assert transformers.AutoModel._model_mapping[config_class] is classes[0]  # the base model
    ours = [
        getattr(vanilla_transformer, name).config_class.model_type
        for name in converter.ARCHITECTURES.values()
    ]
    assert max(set(ours), key=ours.count) == f"vanilla-{family.variant}"
    assert (converter.to_source_config is not None) == family.converts_back


def test_every_family_module_is_registered():
    modules = {
        path.stem for path in REGISTRY.parent.glob("*.py") if "\nCLASSES = " in path.read_text()
    }
    assert modules == {family.module for family in FAMILIES.values()}


def test_registry_file_loads_without_torch():
    program = f"import runpy, sys; runpy.run_path({str(REGISTRY)!r}); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "transformers", "vanilla_transformer"} & set(loaded)
    assert runpy.run_path(str(REGISTRY))["FAMILIES"] == FAMILIES


def table_rows():
    """The rows "converts from" and "converts to" of docs/convert.md, with a cell of family names
    for each variant."""
    rows = {"from": FAMILIES.values(), "to": [f for f in FAMILIES.values() if f.converts_back]}
    return [
        f"| converts {way} | {' | '.join(names_by_variant(families))} |"
        for way, families in rows.items()
    ]


def names_by_variant(families):
    return [
        ", ".join(family.name for family in families if family.variant == variant)
        for variant in ("encoder", "decoder", "seq2seq", "vision")
    ]


def test_family_tables_in_docs_match_registry():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    rows = [
        row
        for page in pages
        for row in page.read_text().splitlines()
        if row.startswith("| converts ")
    ]
    assert rows and rows == table_rows() * (len(rows) // 2)
