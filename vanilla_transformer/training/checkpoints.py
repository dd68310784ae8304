"""The state of a run: which checkpoint of it is whole and can be gone on from."""

import json
from dataclasses import asdict
from pathlib import Path

from accelerate import PartialState
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from .recipe import Recipe

UNFINISHED = "run.json"  # in the state directory until the run is done: its recipe
FILES = "files.json"  # in each checkpoint, written last: the sizes of its files


class WholeCheckpoints(TrainerCallback):
    """Notes the sizes of a checkpoint's files once they are written, so that one that was cut short is known."""

    def on_save(self, args, state, control, **kwargs):
        PartialState().wait_for_everyone()  # each process writes a file of its own
        if args.should_save:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (checkpoint / FILES).write_text(json.dumps(sizes(checkpoint)))


def sizes(checkpoint: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(checkpoint.iterdir()) if file.name != FILES}


def is_whole(checkpoint: Path) -> bool:
    try:
        return json.loads((checkpoint / FILES).read_text()) == sizes(checkpoint)
    except (FileNotFoundError, json.JSONDecodeError):
        return False


def whole_checkpoints(state: Path) -> list[Path]:
    """Oldest first."""
    return sorted(filter(is_whole, state.glob("checkpoint-*")), key=lambda path: int(path.name.rpartition("-")[2]))


def unfinished_checkpoint(state: Path, recipe: Recipe, force: bool) -> Path | None:
    """The newest whole checkpoint of an unfinished run of the same recipe, if `state` holds one.

    Raises:
        ValueError: if it is of a run of another recipe, unless `force` is given.
    """
    if force or not (state / UNFINISHED).is_file():
        return None
    before, now = json.loads((state / UNFINISHED).read_text()), json.loads(json.dumps(asdict(recipe)))
    for table in now:
        if before.get(table) != now[table]:
            found = f"{state} is the state of an unfinished run with {table} {before.get(table)}, expected {now[table]}"
            raise ValueError(f"{found}; --force starts anew")
    return next(reversed(whole_checkpoints(state)), None)


def final_state(checkpoint: Path) -> TrainerState | None:
    """The state of the run in `checkpoint`, if that is the last one: its updates are all done, or were stopped early."""
    state = TrainerState.load_from_json(checkpoint / TRAINER_STATE_NAME)
    return state if state.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"] else None
