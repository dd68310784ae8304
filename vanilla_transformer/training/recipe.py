"""Recipes: what a training run is made of, as a TOML file with a table for each part."""

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, Seq2SeqTrainingArguments

from .tasks import TASKS

FOLDER = Path(__file__).parent / "recipes"
TOKENIZER = ("kind", "vocab_size", "lowercase", "path", "dropout")
AUGMENTATION = ("replaced", "spans")  # of the training text, which only teachers can label
# Keys of [training] beside the fields of `Trainer`'s.
OWN = ("tokens_per_update", "tokens_per_batch", "average_last", "early_stopping_patience", "r_drop", "teachers", *AUGMENTATION)
SET_BY_RUN = {"output_dir", "predict_with_generate", "remove_unused_columns"}
RESEGMENTED = ("translation", "sequence-classification")  # whose text may have other pieces in each epoch
UNSMOOTHED = ("question-answering", "pretraining")  # their losses are not of `labels` alone
MASKED = ("masked-lm", "pretraining")  # few of whose tokens have a label
SAVE_DTYPES = ("float32", "float16")
SPLITS = ("train", "validation", "test")


@dataclass
class Recipe:
    """One run.

    Attributes:
        task: a name of `tasks.TASKS`.
        data: the files, or the data set, of each split; which names there are depends on the task.
        tokenizer: `kind`, `vocab_size` and `lowercase` of a new one (see `train_tokenizer`), or `path`, of one to take; and
            `dropout`, of the merges of training text (see `BpeDropout`; 0).
        model: fields of the task's config; `preset` for seq2seq; or `path`, a checkpoint to go on from.
        training: fields of `Seq2SeqTrainingArguments`, and
            `tokens_per_update`: tokens of the longer side, padding included, that an update sees over all processes;
            `tokens_per_batch`: how many of those run at once on one process (all by default);
            `average_last`: how many of the last checkpoints are averaged for the result (1);
            `early_stopping_patience`: evaluations without a better metric after which the run ends (none);
            `r_drop`: weight of R-Drop (Liang et al. 2021, alpha; 0), for which the model sees each row of a batch
            twice, under two draws of dropout, and a classifier with `tokenizer.dropout` in whole words, then in pieces
            (Wang et al. 2021);
            `teachers`: checkpoints of the same task whose mean prediction a classifier learns instead of the labels;
            `replaced`: the share of words in whose place it and they see others (0), and
            `spans`: that of texts of which they see only some words, one behind the other (0).
        generation: fields of the result's `GenerationConfig`.
        evaluation: what the task's metrics take.
        save_dtype: of the result's tensors, `"float32"` or `"float16"`; they load as float32.
    """

    task: str
    data: dict = field(default_factory=dict)
    tokenizer: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)
    training: dict = field(default_factory=dict)
    generation: dict = field(default_factory=dict)
    evaluation: dict = field(default_factory=dict)
    save_dtype: str = "float32"

    def __post_init__(self):
        check_name("task", self.task, TASKS)
        check_name("save_dtype", self.save_dtype, SAVE_DTYPES)
        for table, names in known_names(TASKS[self.task]).items():
            for name in getattr(self, table):
                check_name(f"key of [{table}]", name, names)
        if self.task not in RESEGMENTED and (dropout := self.tokenizer.get("dropout")):
            raise ValueError(f"tokenizer.dropout is {dropout}, expected 0: the pieces of {self.task} are not drawn")
        if self.task in UNSMOOTHED and (smoothing := self.training.get("label_smoothing_factor")):
            raise ValueError(f"label_smoothing_factor is {smoothing}, expected 0: the loss of {self.task} has none")
        can_r_drop = self.task not in UNSMOOTHED and "tokens_per_update" in self.training
        if (r_drop := self.training.get("r_drop")) and not can_r_drop:
            raise ValueError(f"r_drop is {r_drop}, expected 0: it takes batches by tokens_per_update, and one loss of `labels`")
        if teachers := self.training.get("teachers"):
            if not isinstance(teachers, list):
                raise ValueError(f"teachers is {teachers!r}, expected a list of checkpoints")
            if self.task != "sequence-classification":
                raise ValueError(f"{self.task} has teachers, expected none: they are for sequence-classification")
            for name in ("label_smoothing_factor", "r_drop"):
                if value := self.training.get(name):
                    raise ValueError(f"{name} is {value}, expected 0: it is of labels, which a run with teachers does not see")
        if count := self.training.get("average_last"):
            if self.training.get("load_best_model_at_end"):
                raise ValueError(f"average_last={count} does not go with load_best_model_at_end=true")
            if self.training.get("save_strategy") == "no":
                raise ValueError(f'average_last={count} does not go with save_strategy="no", which leaves nothing to average')


def known_names(task) -> dict[str, set[str]]:
    """The keys each table may have."""
    arguments = {item.name for item in dataclasses.fields(Seq2SeqTrainingArguments)} - SET_BY_RUN
    return {
        "data": {*task.DATA},
        "tokenizer": {*TOKENIZER},
        "model": {*task.CONFIG.field_names(), "path", *(["preset"] if hasattr(task.CONFIG, "preset") else [])},
        "training": arguments | {*OWN},
        "generation": {*GenerationConfig().to_dict()},
        "evaluation": {*task.EVALUATION},
    }


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    """Raises ValueError naming the nearest known name."""
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        raise ValueError(f"no {what} {name!r}" + (f"; did you mean {close[0]!r}?" if close else f", expected {sorted(known)}"))


def read_recipe(name: str, changes: dict[str, Any] | None = None) -> Recipe:
    """The recipe of the file `name`, or of that name in `recipes/`, with `changes` over it: values of `table.key`.

    Raises:
        FileNotFoundError: for a name that is neither.
        ValueError: for a file that is not TOML, and for names that no recipe has, with the nearest one that it can have.
    """
    path = Path(name) if Path(name).is_file() else FOLDER / f"{name}.toml"
    if not path.is_file():
        known = sorted(file.stem for file in FOLDER.glob("*.toml"))
        raise FileNotFoundError(f"{name} is neither a file nor a recipe, expected one of {', '.join(known)}")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not a recipe: {error}") from None
    for key, value in (changes or {}).items():
        table, dot, name = key.partition(".")
        if dot:
            tables.setdefault(table, {})[name] = value
        else:
            tables[key] = value
    fields = {item.name for item in dataclasses.fields(Recipe)}
    for table in tables:
        check_name("key of a recipe", table, fields)
    if "task" not in tables:
        raise ValueError(f"{path} has no task, expected one of {', '.join(TASKS)}")
    return Recipe(**tables)
