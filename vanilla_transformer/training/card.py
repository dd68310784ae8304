"""The model card of a finished run: README.md beside its weights, as the Hub shows it."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

from ..info import shape_fields
from .curves import CURVES, TIMES
from .tasks import TASKS

CARD = "README.md"
TRANSLATES = """`pipeline("translation", model=..., trust_remote_code=True)` translates, even if
vanilla-transformer is not installed. With `import vanilla_transformer`, `trust_remote_code` is not
needed. The tasks `translation_xx_to_yy` need this import."""


def model_card(record: dict, model: PreTrainedModel, name: str, has_curves: bool) -> ModelCard:
    """Return the model card of a run. Its text comes from `record`, the content of training.json.

    `name` is the title. With `has_curves` it shows curves.png.
    """
    config = model.config
    recipe = record["recipe"]
    task = TASKS[recipe["task"]]
    named_scores = scores(record["metrics"])
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=task.pipeline,
        tags=["vanilla-transformer", config.model_type],
        model_name=name,
        eval_results=[eval_result(recipe, *score) for score in named_scores] or None,
    )
    auto_class = next(
        auto for auto, loaded in config.auto_classes().items() if loaded == type(model).__name__
    )
    shape = ", ".join(f"{field}={getattr(config, field)}" for field in shape_fields(config))
    command = command_line()
    parts = [
        f"# {name}",
        f"`{type(model).__name__}` with {record['parameters']:,} parameters: {shape}. "
        f"{start(recipe)} by the recipe below. Load it with `{auto_class}.from_pretrained(..., "
        "trust_remote_code=True)`.",
        TRANSLATES if task.carries_pipeline else "",
        "## Scores",
        scores_table(named_scores, record["metrics"]),
        "## Training",
        f"![Loss, learning rate and metrics over updates]({CURVES})" if has_curves else "",
        f"The seed is {recipe['training'].get('seed', 42)}. The updates took "
        f"{record['seconds']:,.0f} seconds ({record['hardware']}). Versions: "
        f"{', '.join(f'{package} {version}' for package, version in record['versions'].items())}.",
        f"```\n{command}\n```" if command else "",
        f"```toml\n{toml(recipe)}\n```",
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, parts)) + "\n")


def start(recipe: dict) -> str:
    path = recipe["model"].get("path")
    teachers = recipe["training"].get("teachers")
    opening = f"Trained from `{path}`" if path else "Trained from scratch"
    return (
        f"{opening} on the predictions of {len(teachers)} other models instead of labels,"
        if teachers
        else opening
    )


def scores(metrics: dict) -> list[tuple[str, str, float]]:
    """Return (split, metric, value) for all numeric metrics except times.

    `metrics` are by name, such as "test_bleu".
    """
    # "epoch" belongs to no split
    splits = ((*name.split("_", 1), value) for name, value in metrics.items() if "_" in name)
    return [
        score for score in splits if isinstance(score[2], int | float) and score[1] not in TIMES
    ]


def eval_result(recipe: dict, split: str, metric: str, value: float) -> EvalResult:
    data = recipe["data"]
    files = data.get(split, data.get("train"))  # a split may be part of the training text
    names = [Path(file).name for file in ([files] if isinstance(files, str) else files or [])]
    return EvalResult(
        task_type=TASKS[recipe["task"]].pipeline,
        dataset_type=data.get("dataset", "text"),
        dataset_name=data.get("dataset", ", ".join(names)),
        dataset_split=split,
        metric_type=metric,
        metric_value=float(f"{value:.6g}"),
    )


def scores_table(named_scores: list[tuple[str, str, float]], metrics: dict) -> str:
    if not named_scores:
        return "It was not evaluated: the recipe has neither validation nor test text."
    rows = [f"| {split} | {metric} | {value:.4g} |" for split, metric, value in named_scores]
    signatures = dict.fromkeys(
        value for name, value in metrics.items() if name.endswith("_signature")
    )
    notes = [f"\n\nSignature: `{signature}`." for signature in signatures]
    return "\n".join(["| text | metric | value |", "|---|---|---:|", *rows]) + "".join(notes)


def command_line() -> str | None:
    """Return the command line of this process, or `None` if another program calls this package."""
    program = Path(sys.argv[0]).name
    return shlex.join([program, *sys.argv[1:]]) if program == "vanilla-transformer" else None


def toml(recipe: dict) -> str:
    """Return the recipe as TOML. Values that are `None`, which TOML lacks, are left out."""
    tables = {key: value for key, value in recipe.items() if isinstance(value, dict)}
    blocks = [
        "\n".join(
            f"{key} = {toml_value(value)}" for key, value in recipe.items() if key not in tables
        )
    ]
    for name, table in tables.items():
        rows = [f"{key} = {toml_value(value)}" for key, value in table.items() if value is not None]
        if rows:
            blocks.append("\n".join([f"[{name}]", *rows]))
    return "\n\n".join(blocks)


def toml_value(value: Any) -> str:
    """Return a value as TOML; strings, numbers, booleans and lists are written as in JSON."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)
