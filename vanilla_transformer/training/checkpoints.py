"""The state of a run: whose it is, and which checkpoint of it is whole and can be gone on from."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from accelerate import PartialState
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from ..errors import UsageError
from ..files import keep
from .data import paths_of
from .recipe import Recipe
from .values import SPLITS

logger = logging.get_logger(__name__)

RUN = "run.json"  # in the state directory: the recipe of the run, and the hashes of its text
FILES = "files.json"  # in each checkpoint, written last: the hashes of its files
# What of a recipe changes nothing of the weights that come out.
NEUTRAL = re.compile(
    r"save_dtype|(generation|evaluation)\..*|data\.directory|training\.(log\w*|report_to|run_name|disable_tqdm)"
)
# Schedules that do not look at where the training ends.
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")


class WholeCheckpoints(TrainerCallback):
    """Notes the hashes of a checkpoint's files once they are written, so that one that was cut short or damaged is known, and
    keeps `save_total_limit` of them. (`Trainer` itself would remove whatever else is called checkpoint-something.)"""

    def on_train_begin(self, args, state, control, **kwargs):
        self.limit, args.save_total_limit = args.save_total_limit, None

    def on_save(self, args, state, control, **kwargs):
        PartialState().wait_for_everyone()  # each process writes a file of its own
        if args.should_save:
            run = Path(args.output_dir)
            checkpoint = run / f"checkpoint-{state.global_step}"
            (checkpoint / FILES).write_text(json.dumps(hashes(checkpoint)), encoding="utf-8")
            best = Path(state.best_model_checkpoint or checkpoint)
            others = [path for path in marked_checkpoints(run) if path not in (checkpoint, best)]
            too_many = len({checkpoint, best}) + len(others) - (self.limit or math.inf)
            for path in others[: max(0, too_many)]:
                shutil.rmtree(path)


def hashes(checkpoint: Path) -> dict[str, str]:
    return {file.name: sha256(file) for file in sorted(checkpoint.iterdir()) if file.is_file() and file.name != FILES}


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def marked_checkpoints(state: Path) -> list[Path]:
    """Those that a run wrote to their end, oldest first. Averages and whatever else a user puts there are none."""
    found = [path for path in state.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted((path for path in found if (path / FILES).is_file()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def is_whole(checkpoint: Path) -> bool:
    try:
        expected = json.loads((checkpoint / FILES).read_text(encoding="utf-8"))
    except ValueError:
        return False
    return expected == hashes(checkpoint)


def whole_checkpoints(state: Path) -> Iterator[Path]:
    """Newest first, with a warning for each that is not."""
    for checkpoint in reversed(marked_checkpoints(state)):
        if is_whole(checkpoint):
            yield checkpoint
        else:
            logger.warning_once(f"{checkpoint} is damaged: its files are not those of its {FILES}, so it is passed over")


def check_state(state: Path, recipe: Recipe, restart: bool) -> None:
    """Whether `state` may hold the state of a run of `recipe`.

    Args:
        restart: whether that of another recipe, or one that is damaged, will do too: it is moved aside.

    Raises:
        FileExistsError: if `state` holds something that no run wrote.
        UsageError: if it has checkpoints of another recipe or text, naming what differs, unless that changes no weights.
    """
    if not state.is_dir() or not any(state.iterdir()):
        return
    if not (state / RUN).is_file():
        expected = "expected another --output, or it moved away"
        raise FileExistsError(f"{state} is not the state of a run, it has no {RUN}: {expected}")
    if not restart and marked_checkpoints(state):
        check_same(state, run_facts(recipe))


def open_state(state: Path, recipe: Recipe, restart: bool) -> None:
    """Makes the directory `state`, or notes that what is there goes on as a run of `recipe`."""
    if restart and state.is_dir() and any(state.iterdir()):
        moved = keep(state, state)
        PartialState().print(f"{state} is now {moved}")
    state.mkdir(parents=True, exist_ok=True)
    write_whole(state / RUN, json.dumps(run_facts(recipe)))


def run_facts(recipe: Recipe) -> dict:
    """The recipe and its text, as they are in JSON."""
    texts = {split: [sha256(path) for path in paths_of(recipe.data, split)] for split in SPLITS if split in recipe.data}
    return json.loads(json.dumps(asdict(recipe) | {"text": {} if "dataset" in recipe.data else texts}))


def check_same(state: Path, facts: dict) -> None:
    try:
        before = json.loads((state / RUN).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{state / RUN} is damaged ({error}); --restart moves {state} aside and begins anew") from None
    one, other = flat(before), flat(facts)
    chosen_by_score = any(other.get(f"training.{name}") for name in ("load_best_model_at_end", "early_stopping_patience"))
    for key in sorted(one.keys() | other.keys()):
        is_neutral = NEUTRAL.fullmatch(key) and not (chosen_by_score and key.startswith(("generation.", "evaluation.")))
        if one.get(key) != other.get(key) and not is_neutral and not is_longer(key, one, other):
            raise UsageError(
                f"{state} is the state of a run with {key}={one.get(key)!r}, expected {other.get(key)!r}: "
                "--restart moves it aside and begins anew"
            )


def flat(tables: dict) -> dict:
    """`table.key` -> value."""
    found = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    return found | {
        f"{table}.{key}": value for table, keys in tables.items() if isinstance(keys, dict) for key, value in keys.items()
    }


def is_longer(key: str, before: dict, now: dict) -> bool:
    """Whether `key` is of more updates by a schedule that is the same for any number of them."""
    schedule, steps = now.get("training.lr_scheduler_type"), [facts.get("training.max_steps") for facts in (before, now)]
    is_endless = schedule in ENDLESS and not now.get("training.warmup_ratio")
    return key == "training.max_steps" and is_endless and None not in steps and 0 < steps[0] < steps[1]


def write_whole(path: Path, text: str) -> None:
    """In one step, whatever happens in between."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def final_state(checkpoint: Path, max_steps: int) -> TrainerState | None:
    """The state of the run in `checkpoint`, if that is the last one: its updates are all done, or were stopped early."""
    state = TrainerState.load_from_json(checkpoint / TRAINER_STATE_NAME)
    is_last = state.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"]
    return state if is_last and not (state.global_step == state.max_steps < max_steps) else None
