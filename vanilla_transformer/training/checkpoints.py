"""The state of a run: which run it belongs to, and which of its checkpoints can be resumed from."""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from ..checkpoint_files import for_every_version
from ..errors import UsageError
from ..files import CHECKPOINT_FILES, read_object, sha256
from ..outputs import keep, replace_text
from .data import split_files
from .names import flat
from .recipe import Recipe
from .values import SPLITS

logger = logging.get_logger(__name__)

RUN = "run.json"  # in the state directory: recipe and text hashes of the run
# keys of a recipe that do not change the resulting weights
NEUTRAL = re.compile(
    r"save_dtype|(generation|evaluation)\..*|data\.(directory|test)|text\.test"
    r"|training\.(log\w*|report_to|run_name|disable_tqdm)"
)
# schedules that do not depend on the number of updates
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")


class CompleteCheckpoints(TrainerCallback):
    """A callback that records the hashes of each checkpoint's files and keeps `save_total_limit`
    checkpoints: the newest ones, and the best one if the run selects it. Without a limit all stay.

    The hashes show if a checkpoint was cut short or damaged. (`Trainer` itself would remove
    everything else that is called checkpoint-something.)
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.limit = args.save_total_limit
        args.save_total_limit = None
        if state.best_model_checkpoint:  # the state directory may have moved since
            state.best_model_checkpoint = str(best_checkpoint(Path(args.output_dir), state))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Mark the checkpoint that is about to be written as one of the run."""
        if control.should_save and args.should_save:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            checkpoint.mkdir(parents=True, exist_ok=True)
            replace_text(checkpoint / CHECKPOINT_FILES, "{}")

    on_epoch_end = on_step_end

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        PartialState().wait_for_everyone()  # each process writes its own file
        if args.should_save:
            run = Path(args.output_dir)
            checkpoint = run / f"checkpoint-{state.global_step}"
            for_every_version(checkpoint)
            replace_text(checkpoint / CHECKPOINT_FILES, json.dumps(hashes(checkpoint)))
            best = Path(state.best_model_checkpoint or checkpoint)
            others = [
                path
                for path in marked_checkpoints(run)
                if path not in (checkpoint, best) and read_hashes(path)
            ]
            too_many = len({checkpoint, best}) + len(others) - (self.limit or math.inf)
            for path in others[: max(0, too_many)]:
                remove(path)


def remove(checkpoint: Path) -> None:
    """Remove the files of `checkpoint` that the run wrote, and the directory if it is then empty.

    The user's files in the same directory stay.
    """
    for name in (*read_hashes(checkpoint), CHECKPOINT_FILES):
        (checkpoint / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        checkpoint.rmdir()


def best_checkpoint(run: Path, state: TrainerState) -> Path:
    """Return the path of the best checkpoint so far in the directory `run`, by the trainer's
    `state`.

    Raises ValueError if it is damaged or missing.
    """
    best = run / Path(state.best_model_checkpoint).name
    if not is_complete(best):
        raise ValueError(
            f"{best}, the best checkpoint so far, is damaged or missing: start again with --restart"
        )
    return best


def hashes(checkpoint: Path) -> dict[str, str]:
    return {
        file.name: sha256(file)
        for file in sorted(checkpoint.iterdir())
        if file.is_file() and file.name != CHECKPOINT_FILES
    }


def numbered_checkpoints(state: Path) -> list[Path]:
    """Return the paths in the directory `state` that are named as `Trainer` names checkpoints."""
    return [
        path for path in state.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)
    ]


def marked_checkpoints(state: Path) -> list[Path]:
    """Return the checkpoints in the directory `state` that a run finished or began to write, oldest
    first.

    Averages and other directories of the user are not among them.
    """
    marked = (path for path in numbered_checkpoints(state) if (path / CHECKPOINT_FILES).is_file())
    return sorted(marked, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def read_hashes(checkpoint: Path) -> dict[str, str]:
    """Return {file name: sha256} as recorded in a checkpoint; empty if it was cut short or its
    record damaged."""
    noted = read_object(checkpoint / CHECKPOINT_FILES)
    return noted if all(Path(name).name == name for name in noted) else {}


def is_complete(checkpoint: Path) -> bool:
    expected = read_hashes(checkpoint)
    return bool(expected) and expected.items() <= hashes(checkpoint).items()


def last_checkpoints(state: Path, count: int) -> list[Path]:
    """Return the last `count` checkpoints in the directory `state`, oldest first.

    If there are fewer, all are returned, with a warning.

    Raises:
        ValueError: if one of them is damaged. No older one replaces it, because the mean would then
            be another.
    """
    last = marked_checkpoints(state)[-count:]
    damaged = [str(path) for path in last if not is_complete(path)]
    if damaged:
        raise ValueError(
            f"average_last={count}, and {', '.join(damaged)} is damaged: remove it, or start "
            "again with --restart"
        )
    if len(last) < count:
        logger.warning_once(
            f"average_last={count}, and {state} has {len(last)} checkpoints: the result is the "
            "mean of those"
        )
    return last


def complete_checkpoints(state: Path) -> Iterator[Path]:
    """Yield the undamaged checkpoints in the directory `state`, newest first. Log a warning for
    each damaged one."""
    for checkpoint in reversed(marked_checkpoints(state)):
        if is_complete(checkpoint):
            yield checkpoint
        else:
            logger.warning_once(
                f"{checkpoint} is damaged, its files do not match its {CHECKPOINT_FILES}: it is "
                "skipped"
            )


def check_state(state: Path, facts: dict, restart: bool) -> None:
    """Check that the directory `state` may hold the state of a run with these `facts`.

    Args:
        facts: `run_facts` of its recipe.
        restart: accept the state of another recipe, or a damaged one, which is then moved aside.

    Raises:
        FileExistsError: if `state` is a file, a directory that is not the state of a run, or with
            `restart` a mount point. Also if it has a checkpoint that no run wrote.
        UsageError: if it has checkpoints of another recipe or text, naming what differs, unless
            that changes no weights. `restart` accepts them.
        ValueError: if its record is damaged, without `restart`.
    """
    if state.exists() and not state.is_dir():
        raise FileExistsError(f"{state} is a file, expected the state of a run or a new path")
    if not state.is_dir() or not any(state.iterdir()):
        return
    expected = "expected another --output, or it moved away"
    if not (state / RUN).is_file():
        raise FileExistsError(f"{state} is not the state of a run, it has no {RUN}: {expected}")
    before = read_facts(state, restart)
    if not {"task", "data", "training"} <= before.keys():
        raise FileExistsError(
            f"{state} is not the state of a run, its {RUN} holds no recipe: {expected}"
        )
    if restart:
        if os.path.ismount(state):
            raise FileExistsError(
                f"{state} is a mount point, which --restart cannot move aside: expected another "
                f"--output"
            )
        return
    marked = marked_checkpoints(state)
    foreign = [path for path in numbered_checkpoints(state) if path not in marked]
    if foreign:
        raise FileExistsError(
            f"{foreign[0]} was not written by this run, which may need its name: move it elsewhere"
        )
    if marked:
        check_same(state, before, facts)


def read_facts(state: Path, restart: bool) -> dict:
    """Return what the last call of the run recorded in the directory `state`: the fields of its
    recipe and hashes of its text.

    A damaged record raises ValueError. With `restart`, the result of a damaged record has the keys
    "task", "data" and "training", all None.
    """
    try:
        noted = json.loads((state / RUN).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        if restart:
            return {"task": None, "data": None, "training": None}
        raise ValueError(
            f"{state / RUN} is damaged ({error}): --restart moves {state} aside and starts again"
        ) from None
    return noted if isinstance(noted, dict) else {}


def open_state(state: Path, facts: dict, restart: bool) -> None:
    """Create the directory `state` if needed, and record there that it belongs to a run with these
    `facts`.

    With `restart` an existing state is first moved aside.
    """
    if restart and state.is_dir() and any(state.iterdir()):
        moved = keep(state, state)
        PartialState().print(f"{state} is now {moved}")
    state.mkdir(parents=True, exist_ok=True)
    replace_text(state / RUN, json.dumps(facts))


def run_facts(recipe: Recipe) -> dict:
    """Return the fields of the recipe as JSON values, with hashes of the files that it reads.

    "text" has the sha256 of the files of each split, of the data set and of the teachers."""
    files = {
        "teachers": [
            file for path in recipe.training.get("teachers", []) for file in files_in(path)
        ]
    }
    if "dataset" in recipe.data:
        files["dataset"] = files_in(recipe.data["dataset"])
    else:
        files |= {
            split: split_files(recipe.data, split) for split in SPLITS if split in recipe.data
        }
    return json.loads(
        json.dumps(
            asdict(recipe)
            | {"text": {name: list(map(sha256, paths)) for name, paths in files.items()}}
        )
    )


def files_in(path: str) -> list[Path]:
    """Return the sorted paths of all files in the directory `path` and its subdirectories.

    They begin with `path`. The list is empty if there is no such directory, as for a Hub id.
    """
    return sorted(file for file in Path(path).rglob("*") if file.is_file())


def check_same(state: Path, before: dict, facts: dict) -> None:
    """Raise UsageError if `facts` differ from those `before` in a way that changes the weights.

    Both have the fields of a recipe and hashes of its text: those of the run whose state is in the
    directory `state`, and of this run.
    """
    one = flat(before)
    other = flat(facts)
    chosen_by_score = any(
        other.get(f"training.{name}")
        for name in ("load_best_model_at_end", "early_stopping_patience")
    )
    for key in sorted(one.keys() | other.keys()):
        is_neutral = NEUTRAL.fullmatch(key) and not (
            chosen_by_score and key.startswith(("generation.", "evaluation."))
        )
        if one.get(key) != other.get(key) and not is_neutral and not is_longer(key, one, other):
            raise UsageError(
                f"{state} is the state of a run with {key}={one.get(key)!r}, expected "
                f"{other.get(key)!r}: "
                "--restart moves it aside and starts again"
            )


def is_longer(key: str, before: dict, now: dict) -> bool:
    """Return True if `key` is `training.max_steps` and `now` only adds updates to those `before`.

    It is False under a schedule that depends on the number of updates. Both dicts have keys such as
    "training.max_steps".
    """
    schedule = now.get("training.lr_scheduler_type")
    steps = [facts.get("training.max_steps") for facts in (before, now)]
    # a value below 1 is a share of the updates
    is_endless = schedule in ENDLESS and not 0 < now.get("training.warmup_steps", 0) < 1
    return (
        key == "training.max_steps" and is_endless and None not in steps and 0 < steps[0] < steps[1]
    )


def final_state(checkpoint: Path, max_steps: int) -> TrainerState | None:
    """Return the trainer's state in `checkpoint` if the run is finished, else None.

    A run is finished if all its updates are done and `max_steps` does not add more, or if it was
    stopped early.
    """
    state = TrainerState.load_from_json(checkpoint / TRAINER_STATE_NAME)
    is_last = state.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"]
    return state if is_last and not (state.global_step == state.max_steps < max_steps) else None
