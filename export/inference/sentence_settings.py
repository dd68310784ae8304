"""The settings of sentence-transformers beside the weights of a model: prompts, similarity, length
of texts. Each file is read and checked here only."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..shared.options import FLAG, Kind, check_option, integers, without_none

MODEL_CONFIG = "config_sentence_transformers.json"
# Configs of the module Transformer, in the order in which sentence-transformers looks for them.
TRANSFORMER_CONFIGS = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
SETTINGS_FILES = (MODEL_CONFIG, *TRANSFORMER_CONFIGS)
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")

STRING = Kind("a string", lambda value: isinstance(value, str))
PROMPTS = Kind(
    "an object with a string for each name",
    lambda value: (
        isinstance(value, dict) and all(isinstance(text, str | None) for text in value.values())
    ),
)
COUNT = integers("a whole number of at least 1", 1, math.inf)
SIMILARITY = Kind(f"one of {', '.join(SIMILARITIES)}", lambda value: value in SIMILARITIES)
MODEL_KINDS = {
    "prompts": PROMPTS,
    "default_prompt_name": STRING,
    "similarity_fn_name": SIMILARITY,
    "truncate_dim": COUNT,
    "max_active_dims": COUNT,
    "activation_fn": STRING,
}
TRANSFORMER_KINDS = {"max_seq_length": COUNT, "do_lower_case": FLAG}


@dataclass(frozen=True)
class SentenceSettings:
    """The checked settings of config_sentence_transformers.json and of the module Transformer.

    A field is None, or False or empty, if its file does not set it. `transformer` is the content
    of the file of the module, and `transformer_name` its name.
    """

    prompts: dict[str, str | None] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    truncate_dim: int | None = None
    max_active_dims: int | None = None
    activation_fn: str | None = None
    max_seq_length: int | None = None
    do_lower_case: bool = False
    transformer: dict[str, Any] = field(default_factory=dict)
    transformer_name: str = TRANSFORMER_CONFIGS[0]


def parse_settings(directory: Path, contents: Mapping[str, dict[str, Any]]) -> SentenceSettings:
    """Return the settings in `contents`, those of `SETTINGS_FILES` that `directory` has, by name.

    Of several configs of the module Transformer the first one that is not empty counts. Raises
    ValueError for a value of another type or outside its range.
    """
    names = [name for name in TRANSFORMER_CONFIGS if contents.get(name)]
    name = names[0] if names else TRANSFORMER_CONFIGS[0]
    transformer = contents.get(name, {})
    return SentenceSettings(
        **checked_values(directory / MODEL_CONFIG, contents.get(MODEL_CONFIG, {}), MODEL_KINDS),
        **checked_values(directory / name, transformer, TRANSFORMER_KINDS),
        transformer=transformer,
        transformer_name=name,
    )


def checked_values(path: Path, content: dict[str, Any], kinds: dict[str, Kind]) -> dict[str, Any]:
    """Return the fields of `content`, the file `path`, that have a kind in `kinds` and are not
    null. Raises ValueError for a value that is not of its kind."""
    values = without_none({name: content.get(name) for name in kinds})
    try:
        for name, value in values.items():
            check_option(name, value, kinds[name])
    except UsageError as error:
        raise ValueError(f"{path}: {error}") from None
    return values
