"""The config of a checkpoint as graphs read it."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..runtime.config import LEARNED_POSITIONS, RELATIVE_POSITIONS

SOURCE = "configuration_vanilla_transformer.py"
DEPTHS = ("encoder_layers", "decoder_layers")
LABELS = {0: "LABEL_0", 1: "LABEL_1"}  # transformers' default, which it does not write to config.json


class Config:
    """The fields of config.json as attributes, completed by `complete`, of a model of the class `architecture`."""

    def __init__(self, fields: dict[str, Any], architecture: str):
        self.fields = complete(fields)
        self.architecture = architecture

    def __getattr__(self, name: str) -> Any:
        if name == "fields" or name not in self.fields:
            raise AttributeError(f"config.json has no field {name!r}")
        return self.fields[name]

    @property
    def is_seq2seq(self) -> bool:
        return self.model_type == "vanilla-seq2seq"

    @property
    def has_learned_positions(self) -> bool:
        return self.position_embedding_type in LEARNED_POSITIONS

    @property
    def has_rotary_positions(self) -> bool:
        return self.fields.get("position_embedding_type") == "rotary"

    @property
    def has_relative_positions(self) -> bool:
        return self.position_embedding_type in RELATIVE_POSITIONS

    @property
    def position_size(self) -> int:
        """Width of the positions and token types, and of the embedding norm."""
        return self.embedding_size if self.embedding_norm else self.hidden_size

    @property
    def prefix(self) -> str:
        """Prefix of the names of the weights that are not of a head."""
        return "" if self.architecture.endswith("Model") else "model."


def complete(content: dict[str, Any]) -> dict[str, Any]:
    """Return the `content` of config.json with the defaults of its config class for missing fields.

    The paper's symbols are replaced by the names of their fields.
    """
    symbols, defaults = class_defaults(content["model_type"])
    fields = {**defaults, **{symbols.get(name, name): value for name, value in content.items()}}
    if fields.get("id2label") is None:
        fields["id2label"] = {number: f"LABEL_{number}" for number in range(content.get("num_labels", len(LABELS)))}
    depth = content.get("N") or content.get("num_hidden_layers") or 6
    derived = {
        "num_hidden_layers": depth,
        **dict.fromkeys(DEPTHS, depth),
        "head_dim": fields["hidden_size"] // fields["num_attention_heads"],
        "final_norm": fields["norm_first"],
        "embedding_size": fields["hidden_size"],
    }
    fields |= {name: value for name, value in derived.items() if name in defaults and fields[name] is None}
    if fields["value_head_dim"] is None:
        fields["value_head_dim"] = fields["head_dim"]
    return fields


@cache
def class_defaults(model_type: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the paper's symbols with their fields, and the default of each field of the config class of `model_type`.

    Both are read from the source of the config classes: importing these would import torch.
    """
    package = find_spec("vanilla_transformer")
    assert package is not None and package.submodule_search_locations is not None  # it is in the same distribution
    module = ast.parse(Path(package.submodule_search_locations[0], SOURCE).read_text(encoding="utf-8"))
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    defaults = {name: all_constants(classes, name) for name in classes}
    symbols = next(value for name, value in constants(module.body).items() if name == "PAPER_SYMBOLS")
    return symbols, next(fields for fields in defaults.values() if fields.get("model_type") == model_type)


def all_constants(classes: dict[str, ast.ClassDef], name: str) -> dict[str, Any]:
    """Return the constants in the bodies of the class `name` and its bases in the file."""
    if name not in classes:
        return {}
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    inherited = [all_constants(classes, base) for base in bases]
    return {key: value for part in [*inherited, constants(classes[name].body)] for key, value in part.items()}


def constants(body: list[ast.stmt]) -> dict[str, Any]:
    """Return the names in `body` that are assigned a literal."""
    literals = {}
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                try:
                    literals[ast.unparse(target)] = ast.literal_eval(node.value)
                except ValueError:  # an expression, of which no field has one
                    continue
    return literals
