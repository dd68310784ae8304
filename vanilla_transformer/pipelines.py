"""The text pipelines that transformers 5 removed, with the arguments and results of transformers 4.

`text2text-generation`, `summarization`, `translation` (with every `translation_xx_to_yy`) and
`question-answering` serve our models and transformers' own. `register_pipelines` makes
`transformers.pipeline` find them. Where the package is not installed, a checkpoint that carries the
code of `translation` has that one: `carry_translation`.
"""

import functools
import shutil
from pathlib import Path

import transformers.pipelines
from transformers.models.auto.modeling_auto import (
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
)

from . import pipelines_vanilla_transformer
from .configuration_vanilla_transformer import TRANSLATION
from .files import CONFIG, read_object, write_json
from .pipelines_question_answering import QuestionAnsweringPipeline
from .pipelines_vanilla_transformer import (
    LANGUAGE_PAIR,
    SummarizationPipeline,
    Text2TextGenerationPipeline,
    TranslationPipeline,
)

T5 = {"model": ("google-t5/t5-base", "a9723ea")}
# task: its class, what loads its model, and the model (with its revision) that transformers 4 took
# where none is named
PIPELINES = {
    "text2text-generation": (Text2TextGenerationPipeline, AutoModelForSeq2SeqLM, T5),
    "summarization": (
        SummarizationPipeline,
        AutoModelForSeq2SeqLM,
        {"model": ("sshleifer/distilbart-cnn-12-6", "a4f8f3e")},
    ),
    "translation": (
        TranslationPipeline,
        AutoModelForSeq2SeqLM,
        {("en", "fr"): T5, ("en", "de"): T5, ("en", "ro"): T5},
    ),
    "question-answering": (
        QuestionAnsweringPipeline,
        AutoModelForQuestionAnswering,
        {"model": ("distilbert/distilbert-base-cased-distilled-squad", "564e9b5")},
    ),
}


def register_pipelines() -> None:
    """Make `transformers.pipeline` find the classes of `PIPELINES` under their tasks, and every
    `translation_xx_to_yy`.

    Doing it again changes nothing, and a task that somebody else has registered stays theirs.
    """
    registry = transformers.pipelines.PIPELINE_REGISTRY
    for task, (pipeline_class, model_class, default) in PIPELINES.items():
        # transformers 5 rejects the names in `REMOVED_TASKS` before it looks into the registry.
        getattr(transformers.pipelines, "REMOVED_TASKS", {}).pop(task, None)
        # `registry.register_pipeline` is for code that travels with a checkpoint: a pipeline
        # registered by it writes itself into the checkpoints it saves, which then ask for
        # `trust_remote_code`.
        entry = {"impl": pipeline_class, "pt": (model_class,), "default": default, "type": "text"}
        registry.supported_tasks.setdefault(task, entry)
    # The language pairs have no end, so they cannot be entries or aliases of the registry. Looking
    # a task up is the one step that every use of the name goes through; the pipeline itself still
    # gets the full name.
    if getattr(registry.check_task, "func", None) is not _check_task:
        registry.check_task = functools.partial(_check_task, registry, registry.check_task)


def _check_task(registry, check_task, task):
    pair = LANGUAGE_PAIR.fullmatch(task)
    if pair and task not in registry.supported_tasks:
        return "translation", registry.supported_tasks["translation"], pair.groups()
    return check_task(task)


def carry_translation(directory: Path) -> None:
    """Copy the code of the pipeline `translation` into the checkpoint `directory`, and name it in
    the config."""
    shutil.copy(pipelines_vanilla_transformer.__file__, directory)
    config = read_object(directory / CONFIG) | {"custom_pipelines": TRANSLATION}
    write_json(directory / CONFIG, config, sort_keys=True)
