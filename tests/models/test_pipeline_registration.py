"""Tests of the registration of our pipelines in transformers: tasks, names and former defaults."""

import json
import subprocess
import sys

import pytest
import transformers
from messages import raises
from transformers import BartConfig, pipeline

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.pipelines import PIPELINES, register_pipelines

# ----------------------------------------------------------------------------------- language pairs


@pytest.mark.parametrize(
    "task",
    [
        "translation_en_de",
        "translation_",
        "translation_en_to_",
        "translations",
        "summarization_a_to_b",
    ],
)
def test_other_task_names_raise_key_error(task):
    with raises(KeyError, seen=task):
        pipeline(task, model="unused", config=BartConfig())


# ------------------------------------------------------------------------------------- registration


# sentencepiece 0.2.1 crashes at the end of a process where its own warning is an error
WARNINGS = ("-W", "error", "-W", "ignore:builtin type:DeprecationWarning")


def run_in_fresh_process(code):
    done = subprocess.run(
        [sys.executable, *WARNINGS, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


TASKS = ["question-answering", "summarization", "text2text-generation", "translation"]


def test_import_registers_our_removed_tasks_and_no_others_without_peft(tmp_path):
    (tmp_path / "peft.py").write_text("raise SystemExit('imported')")
    before, after, registered, peft = run_in_fresh_process(f"""
import json, sys
sys.path.insert(0, {str(tmp_path)!r})
import transformers.pipelines as pipelines
before = sorted(pipelines.REMOVED_TASKS)
tasks = set(pipelines.PIPELINE_REGISTRY.supported_tasks)
import vanilla_transformer
added = set(pipelines.PIPELINE_REGISTRY.supported_tasks) - tasks
after = sorted(pipelines.REMOVED_TASKS)
print(json.dumps([before, after, sorted(added), "peft" in sys.modules]))
""")
    assert set(TASKS) < set(before)
    assert after == [task for task in before if task not in TASKS]
    assert registered == sorted(PIPELINES) == TASKS
    assert not peft


@pytest.mark.slow
def test_registering_twice_changes_nothing_and_does_not_warn():
    assert run_in_fresh_process("""
import importlib, json
import transformers.pipelines as pipelines
import vanilla_transformer
from vanilla_transformer.pipelines import register_pipelines
registry = pipelines.PIPELINE_REGISTRY
entry, check = registry.supported_tasks["translation"], registry.check_task
register_pipelines()
importlib.reload(vanilla_transformer)
same = entry is registry.supported_tasks["translation"]
print(json.dumps(same and check is registry.check_task))
""")


def test_registering_works_without_removed_tasks(monkeypatch):
    monkeypatch.delattr(transformers.pipelines, "REMOVED_TASKS")
    register_pipelines()
    assert (
        transformers.pipelines.PIPELINE_REGISTRY.supported_tasks["translation"]["impl"]
        is TranslationPipeline
    )


def test_task_that_stays_removed_raises_key_error():
    with raises(KeyError, seen="visual-question-answering"):
        pipeline("visual-question-answering")


@pytest.mark.parametrize(
    "task, seen",
    [
        ("summarization", "sshleifer/distilbart-cnn-12-6"),
        ("text2text-generation", "google-t5/t5-base"),
        ("translation_en_to_fr", "google-t5/t5-base"),
        ("question-answering", "distilbert/distilbert-base-cased-distilled-squad"),
    ],
)
def test_task_without_model_loads_its_former_default(task, seen, monkeypatch):
    def load(name, *_, **__):
        raise InterruptedError(name)

    monkeypatch.setattr(transformers.pipelines.AutoConfig, "from_pretrained", load)
    with raises(InterruptedError, seen=seen):
        pipeline(task)


def test_language_pair_without_default_model_raises():
    with raises(ValueError, seen=("en", "ja")):
        pipeline("translation_en_to_ja")
