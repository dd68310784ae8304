"""Recipes: the settings of a training run, as a TOML file with several tables."""

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import UsageError, did_you_mean
from ..options import Kind
from .checks import check_together
from .names import check_name
from .tasks import TASKS
from .tasks.task import Task
from .values import (
    GENERATION,
    TRAINING,
    KeyType,
    check_table,
    model_keys,
    tokenizer_keys,
    trainer_keys,
)

FOLDER = Path(__file__).parent / "recipes"
LARGEST_FILE = 1_000_000  # bytes
# keys of [training]; only teachers can label the text they give
TEXT_AUGMENTATION = ("word_replacement", "span_crop")
SAVE_DTYPES = ("float32", "float16")


@dataclass
class Recipe:
    """One run.

    Attributes:
        task: a name of `tasks.TASKS`.
        data: the files or the data set of each split; the keys depend on the task.
        tokenizer: `kind`, `vocab_size` and `lowercase` of a new tokenizer (see `train_tokenizer`),
            or the `path` of an existing one; and `bpe_dropout`, the probability that a merge of
            training text is skipped (see `BpeDropout`; 0).
        model: fields of the task's config; `preset` for seq2seq; or `path`, a checkpoint to start
            from.
        training: fields of `Seq2SeqTrainingArguments`, and these keys:

            - `tokens_per_update`: tokens of the longer side, padding included, that an update sees
              over all processes;
            - `tokens_per_batch`: how many of those run at once on one process (all by default);
            - `average_last`: how many of the last checkpoints are averaged for the result (1);
            - `early_stopping_patience`: evaluations without a better metric after which the run
              ends (none);
            - `r_drop`: weight of R-Drop (Liang et al. 2021, alpha; 0). The model sees each row of a
              batch twice, with other dropout each time. A classifier with `tokenizer.bpe_dropout`
              sees whole words, then subwords (Wang et al. 2021);
            - `teachers`: checkpoints of the same task whose mean prediction a classifier learns
              instead of the labels;
            - `word_replacement`: share of words that are replaced for teachers and student (0);
            - `span_crop`: share of texts that are cut to a span of words for both (0).
        generation: fields of the result's `GenerationConfig` that an export supports.
        evaluation: arguments of the task's metrics.
        save_dtype: dtype of the saved tensors, `"float32"` or `"float16"`; they load as float32.

    Raises:
        UsageError: for an unknown key, with the nearest known one, for a value of the wrong type or
            range, and for values that cannot be combined. `prepare.check_complete` checks the
            content of files.
    """

    task: str
    data: dict = field(default_factory=dict)
    tokenizer: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)
    training: dict = field(default_factory=dict)
    generation: dict = field(default_factory=dict)
    evaluation: dict = field(default_factory=dict)
    save_dtype: str = "float32"

    def __post_init__(self) -> None:
        check_name("task", self.task, TASKS)
        check_name("save_dtype", self.save_dtype, SAVE_DTYPES)
        task = TASKS[self.task]
        types = key_types(task)
        for table in types:
            check_table(table, getattr(self, table), types)
        check_together(vars(self), task)


def key_types(task: Task) -> dict[str, dict[str, KeyType | Kind]]:
    """Return {table: {key: type and range}} of all keys that a recipe may have with `task`."""
    return {
        "data": task.data,
        "tokenizer": {} if task.processor else tokenizer_keys(),
        "model": model_keys(task.config),
        "training": trainer_keys() | TRAINING,
        "generation": GENERATION if task.model.can_generate() else {},
        "evaluation": task.evaluation,
    }


def read_recipe(name: str, changes: dict[str, Any] | None = None) -> Recipe:
    """Read the recipe in the file `name`, or of that name in `recipes/`.

    `changes` are values by `table.key` that replace those of the recipe.

    Raises:
        FileNotFoundError: for a name that is neither, with the nearest recipe.
        ValueError: for a file that is not TOML.
        UsageError: for an unknown key, a value of the wrong type or range, and values that cannot
            be combined.
    """
    path = recipe_path(name)
    tables = read_tables(path)
    for key, value in (changes or {}).items():
        table, dot, name = key.partition(".")
        if not dot:
            tables[key] = value
        elif isinstance(tables.setdefault(table, {}), dict):
            tables[table][name] = value
    # max_steps of the recipe would take precedence over the epochs
    names = {*(changes or {})} & {"training.num_train_epochs", "training.max_steps"}
    if names == {"training.num_train_epochs"} and isinstance(tables["training"], dict):
        tables["training"].pop("max_steps", None)
    check_tables(tables)
    if "task" not in tables:
        raise UsageError(f"{path} has no task, expected one of {', '.join(TASKS)}")
    return Recipe(**tables)


def recipe_path(name: str) -> Path:
    """Return the path of the recipe `name`, a file or a name in `recipes/`. Raises
    FileNotFoundError if it is neither."""
    path = Path(name) if Path(name).is_file() else FOLDER / f"{name}.toml"
    if not path.is_file():
        known = sorted(file.stem for file in FOLDER.glob("*.toml"))
        seen = f"{name} is neither a file nor a recipe, expected one of {', '.join(known)}"
        raise FileNotFoundError(f"{seen}{did_you_mean(name, known)}")
    return path


def check_tables(tables: dict[str, Any]) -> None:
    """Raise UsageError for an unknown table of a recipe. The message suggests the nearest table, or
    the key of that name."""
    known = [item.name for item in fields(Recipe)]
    types = key_types(TASKS[tables["task"]]) if tables.get("task") in [*TASKS] else {}
    for name in tables:
        check_name(
            "recipe key",
            name,
            known,
            [f"{table}.{name}" for table, keys in types.items() if name in keys],
        )


def read_tables(path: Path) -> dict[str, Any]:
    """Return the tables of the TOML file at `path`. Raises ValueError if it is not TOML or too
    large."""
    size = path.stat().st_size
    if size > LARGEST_FILE:
        raise ValueError(f"{path} has {size} bytes, expected a recipe of at most {LARGEST_FILE}")
    try:
        return tomllib.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:  # errors of TOML and UTF-8, and too deep nesting
        raise ValueError(f"{path} is not a recipe: {error}") from None
