"""One training run, from a recipe to a checkpoint."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import (
    BaseImageProcessor,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerState,
    set_seed,
)

from ..checkpoint import learned_positions, save_tokenizer
from ..files import CONFIG, read_object, write_json
from ..outputs import new_directory, output_path
from ..pipelines import carry_translation
from .averaging import average_weights, load
from .card import CARD, model_card
from .checkpoints import (
    best_checkpoint,
    check_state,
    complete_checkpoints,
    final_state,
    last_checkpoints,
    open_state,
    run_facts,
)
from .curves import CURVES, draw_curves
from .data import split_files
from .prepare import Prepared, check_complete, prepare, set_generation
from .recipe import Recipe
from .record import RECORD, run_record
from .tasks import TASKS
from .trainer import build_metrics, make_trainer, training_arguments
from .values import SPLITS


def train(
    recipe: Recipe, output: Path, force: bool = False, restart: bool = False
) -> dict[str, float]:
    """Train a checkpoint, write it to `output`, and return its metrics on validation and test text.

    The state of the training is kept in `<output>-run`. The same call resumes from its newest
    undamaged checkpoint, and ends with the same weights as an uninterrupted run. Settings that do
    not change the weights may differ: evaluation, saving, logging, and where the text is stored. So
    may the number of updates, if the schedule does not depend on it.

    Args:
        force: replace `output` if vanilla-transformer wrote it.
        restart: move the state of an earlier run aside and start again.

    Raises:
        FileExistsError: if `output` exists and may not be replaced, or `<output>-run` is no state
            of a run.
        FloatingPointError: if the loss is not finite, with the text of the batch; earlier
            checkpoints stay.
        UsageError: for a recipe that is not complete; if `<output>-run` is the state of a run of
            another recipe or text, without `restart`.
        ValueError: for text and settings that do not fit each other.
    """
    state = Path(f"{os.path.abspath(output)}-run")
    arguments = training_arguments(recipe, state)
    inputs = input_paths(recipe)
    for path in (output, state):
        output_path(path, inputs)
    check_complete(recipe)
    with (
        new_directory(output, force, [*inputs, state])
        if arguments.should_save
        else nullcontext() as directory
    ):
        facts = run_facts(recipe)
        check_state(state, facts, restart)
        trainer, prepared = train_model(recipe, facts, arguments, restart)
        metrics = evaluate(recipe, trainer, prepared)
        if arguments.should_save:
            record = run_record(recipe, trainer, metrics)
            write_result(recipe, prepared, record, directory, Path(output).name)
    return metrics


def input_paths(recipe: Recipe) -> list[str | Path]:
    """Return the inputs of a run that may be paths: text files, data set, tokenizer, model and
    teachers."""
    files = [
        path for split in SPLITS if split in recipe.data for path in split_files(recipe.data, split)
    ]
    sources = [recipe.data.get("dataset"), recipe.tokenizer.get("path"), recipe.model.get("path")]
    return [*files, *(name for name in sources if name), *recipe.training.get("teachers", [])]


def train_model(
    recipe: Recipe, facts: dict, arguments: Seq2SeqTrainingArguments, restart: bool
) -> tuple[Seq2SeqTrainer, Prepared]:
    """Run the training to its end, and return its trainer, and what it was made of.

    It resumes from the newest undamaged checkpoint of an earlier call. With `restart` no checkpoint
    is used, and the state of the earlier call is moved aside. The trainer's model has the weights
    of the result. `facts` identify the run and are recorded in its state, which the caller has
    checked with `check_state`. `arguments` are those of the trainer.
    """
    state = Path(arguments.output_dir)
    checkpoint = None if restart else next(complete_checkpoints(state), None)
    set_seed(arguments.seed)
    prepared = prepare(recipe, checkpoint)
    trainer = make_trainer(recipe, arguments, prepared)
    PartialState().wait_for_everyone()  # all processes have looked for a checkpoint
    if arguments.should_save:
        open_state(state, facts, restart)
    PartialState().wait_for_everyone()
    final = checkpoint and final_state(checkpoint, arguments.max_steps)
    if checkpoint and final:
        load_final(trainer, checkpoint, final)
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if count := recipe.training.get("average_last"):
        # who has noted that the last checkpoint is whole
        with arguments.main_process_first(local=False):
            average = average_weights(last_checkpoints(state, count))
            prepared.model.load_state_dict(average.state_dict())
    if recipe.save_dtype == "float16":  # metrics belong to the weights that are saved
        prepared.model.half().float()
    return trainer, prepared


def load_final(trainer: Seq2SeqTrainer, checkpoint: Path, state: TrainerState) -> None:
    """Restore the `state` and the weights of a finished run into `trainer`.

    The weights are those of `checkpoint`, or of the best one if the run selects it. `trainer.train`
    would do one more update before it notices that all are done.
    """
    state.init_training_references(trainer, state.max_steps, state.num_train_epochs, trial=None)
    trainer.state = state
    best = (
        best_checkpoint(checkpoint.parent, state)
        if trainer.args.load_best_model_at_end
        else checkpoint
    )
    trainer.model.load_state_dict(load(best).state_dict())


def evaluate(recipe: Recipe, trainer: Seq2SeqTrainer, prepared: Prepared) -> dict[str, Any]:
    """Return the metrics of the validation and the test text, by names such as "test_bleu".

    A split without `prepared` examples has no metrics. Text is generated with the generation
    settings of the result.
    """
    metrics = {}
    for split in SPLITS[1:]:
        if split in prepared.rows:
            set_generation(prepared.model, recipe)
            trainer.compute_metrics = build_metrics(recipe, prepared, split)
            rows, settings = prepared.rows[split], recipe.generation
            metrics |= trainer.evaluate(rows, metric_key_prefix=split, **settings)
    return metrics


def write_result(
    recipe: Recipe, prepared: Prepared, record: dict, directory: Path, name: str
) -> None:
    model = prepared.model
    set_generation(model, recipe)
    model.config.use_cache = True  # `Trainer` turns it off: with a cache, packed texts would mix
    save_checkpoint(prepared, directory, recipe.save_dtype)
    if TASKS[recipe.task].carries_pipeline:
        carry_translation(directory)
    (directory / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    has_curves = draw_curves(record["history"], directory / CURVES)
    model_card(record, model, name, has_curves).save(directory / CARD)


def save_checkpoint(prepared: Prepared, directory: Path, dtype: str) -> None:
    """Save model and tokenizer to `directory`.

    With dtype `"float16"`, the model becomes float16 and is stored so. Its config says float32,
    which the tensors load as.
    """
    tokenizer, model, _ = prepared
    if dtype == "float16":
        model.half()
    model.save_pretrained(directory)
    if isinstance(tokenizer, BaseImageProcessor):
        tokenizer.save_pretrained(directory)
    else:
        save_tokenizer(tokenizer, directory, learned_positions(model.config))
    # without spaces, which are half of the file
    vocabulary = directory / "tokenizer.json"
    if vocabulary.is_file():
        text = json.dumps(
            json.loads(vocabulary.read_text(encoding="utf-8")),
            ensure_ascii=False,
            separators=(",", ":"),
        )
        vocabulary.write_text(text, encoding="utf-8")
    if dtype == "float16":
        write_json(directory / CONFIG, read_object(directory / CONFIG) | {"dtype": "float32"})
