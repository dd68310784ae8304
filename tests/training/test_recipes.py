"""Tests of recipes: errors are raised before text is read, and every shipped recipe runs."""

import dataclasses

import pytest
import standins
from command_line import main
from messages import raises
from transformers import GenerationConfig, Seq2SeqTrainingArguments

from vanilla_transformer.errors import UsageError
from vanilla_transformer.training.dry_run import dry_run
from vanilla_transformer.training.recipe import FOLDER, Recipe, key_types, read_recipe
from vanilla_transformer.training.run import train
from vanilla_transformer.training.tasks import TASKS
from vanilla_transformer.training.trainer import training_arguments
from vanilla_transformer_export.shared.generation_options import KINDS

RECIPES = pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.toml")))
GENERATED = [
    "max_new_tokens",
    "max_length",
    "min_new_tokens",
    "min_length",
    "num_beams",
    "top_k",
    "no_repeat_ngram_size",
]


# ------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("training.learning_rate", "abc", "a number of at least 0"),
        ("training.learning_rate", "1e-3", "a number of at least 0"),
        ("training.learning_rate", -1, "a number of at least 0"),
        ("training.learning_rate", float("nan"), "a number of at least 0"),
        ("training.learning_rate", float("inf"), "at most"),
        ("training.weight_decay", True, "a number of at least 0"),
        ("training.max_steps", 1.5, "a whole number of at least 1, or -1"),
        ("training.max_steps", 0, "a whole number of at least 1, or -1"),
        ("training.max_steps", 10**30, "at most"),
        ("training.num_train_epochs", -1, "a number above 0"),
        ("training.label_smoothing_factor", 2, "a number from 0 to 1"),
        ("training.adam_beta2", 1, "a number from 0 to below 1"),
        ("training.r_drop", -1, "a number of at least 0"),
        ("training.bf16", "yes", "true or false"),
        ("training.bf16", 1, "true or false"),
        ("training.eval_steps", 0, "a number, whole from 1 on"),
        ("training.logging_steps", 2.5, "a number, whole from 1 on"),
        ("training.warmup_steps", 1.5, "a number, whole from 1 on"),
        ("training.seed", "x", "a whole number from 0 to 4294967295"),
        ("training.seed", 2**32, "a whole number from 0 to 4294967295"),
        ("training.average_last", 0, "a whole number of at least 1"),
        ("training.tokens_per_update", 0, "a whole number of at least 1"),
        ("training.early_stopping_patience", 0, "a whole number of at least 1"),
        ("training.word_replacement", 2, "a number from 0 to 1"),
        ("training.log_level", "x", "one of 'detail', 'debug', "),
        ("training.ddp_backend", "x", "one of 'nccl', 'gloo', "),
        ("training.log_level_replica", float("nan"), "one of 'detail', 'debug', "),
        ("training.per_device_eval_batch_size", 2**63 - 1, "a whole number from 1 to 2**24"),
        ("model.return_dict", None, "true"),
        ("model.return_dict", False, "true"),
        ("training.report_to", "nope", "one of 'none', 'all', "),
        ("training.report_to", ["nope"], "one of 'none', 'all', "),
        ("training.run_name", "\ud800", "text that can be written as UTF-8"),
        ("training.lr_scheduler_kwargs", {"a": ["\ud800"]}, "text that can be written as UTF-8"),
        ("data.train", ["a", "\ud800"], "text that can be written as UTF-8"),
        ("data.validation", "x", "a file for each of source, target"),
        ("data.validation", ["a", "b", "c"], "a file for each of source, target"),
        ("training.eval_strategy", "epochs", "one of no, steps, epoch"),
        ("training.optim", "adam", "one of adamw_torch, "),
        ("training.teachers", "a", "a list that is not empty"),
        ("training.teachers", [], "a list that is not empty"),
        ("training.lr_scheduler_kwargs", 1, "a table"),
        ("tokenizer.kind", "bpes", "one of 'bpe', 'word', 'byte-bpe', 'character'"),
        ("tokenizer.vocab_size", 4, "a whole number of at least 5"),
        ("tokenizer.lowercase", "yes", "true or false"),
        ("tokenizer.bpe_dropout", 1, "a number from 0 to below 1"),
        ("tokenizer.path", "", "a string that is not empty"),
        ("model.hidden_size", "big", "a whole number"),
        ("model.dropout", "0.1", "a number or a whole number"),
        ("model.path", 5, "a string"),
        ("model.tie_word_embeddings", "no", "true or false"),
        ("generation.num_beams", 0, "a whole number from 1 to 2**63 - 1"),
        ("generation.length_penalty", "1", "a float32 number"),
        *[(f"generation.{name}", 2**63, "a whole number from ") for name in GENERATED],
        ("generation.early_stopping", "always", "True, False or 'never'"),
        ("evaluation.bleu_tokenize", 13, "a string"),
        ("data.train", 3, "a string or a list"),
        ("data.train", [], "a string or a list that is not empty"),
        ("data.train", ["a", 3], "a string or a list"),
        ("data.streaming", "false", "true or false"),
    ],
)
def test_value_of_wrong_type_or_range_raises_with_expected_values(key, value, expected):
    with pytest.raises(UsageError) as caught:
        read_recipe("translation", {key: value})
    message = str(caught.value)
    assert (
        message.startswith(f"{key} is ")
        and f", expected {expected}" in message
        and "\n" not in message
    )
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "changes, seen, expected",
    [
        ({"data": 1}, 1, ()),
        ({"data": [1], "data.train": "a"}, 1, ()),
        ({"task": ["translation"]}, "translation", ()),
        ({"save_dtype": 16}, ("save_dtype", 16), ()),
        ({"training.learning_rat": 1}, ("learning_rat", "learning_rate"), ()),
        ({"training.output_dir": "a"}, "output_dir", ()),
        ({"trainin.seed": 1}, ("trainin", "training"), ()),
        ({"generation.num_return_sequences": 2}, "num_return_sequences", ()),
        ({"generation.temperature": 0.5}, "do_sample", ()),
        ({"evaluation.bleu_tokenize": "nope"}, ("evaluation.bleu_tokenize", "nope", "none"), ()),
        (
            {"training.metric_for_best_model": "blue"},
            ("training.metric_for_best_model", "blue", "bleu"),
            (),
        ),
        (
            {"training.lr_scheduler_kwargs": {"min_lrr": 1}},
            ("training.lr_scheduler_kwargs", "min_lrr"),
            (),
        ),
        (
            {"training.lr_scheduler_type": "cosine_with_min_lr"},
            ("training.lr_scheduler_kwargs", "min_lr"),
            (),
        ),
        ({"model.hidden_size": -1}, ("hidden_size", -1), 1),
        ({"model.hidden_size": 10, "model.num_attention_heads": 3}, "hidden_size", ()),
        ({"model.hidden_act": "gelus"}, ("hidden_act", "gelus"), ()),
        ({"model.preset": "huge"}, "huge", ()),
        ({"model.d_model": 32, "model.hidden_size": 64}, ("model.hidden_size", 2), ()),
        ({"model.vocab_size": 9}, ("tokenizer.vocab_size", 8000), ("model.vocab_size", 9)),
        (
            {"tokenizer.kind": "word", "tokenizer.bpe_dropout": 0.1},
            ("bpe_dropout", 0.1),
            (0, "word"),
        ),
        ({"tokenizer.kind": "byte-bpe", "tokenizer.lowercase": True}, "tokenizer.lowercase", ()),
        (
            {"training.tokens_per_batch": 7, "training": {"tokens_per_batch": 7}},
            ("tokens_per_batch", 7),
            (),
        ),
        (
            {"training.gradient_accumulation_steps": 2},
            ("gradient_accumulation_steps", 2),
            "tokens_per_update",
        ),
        ({"training.average_last": 5, "training.save_total_limit": 2}, ("save_total_limit", 2), ()),
        (
            {"training.average_last": 5, "training.load_best_model_at_end": True},
            ("average_last", 5),
            (),
        ),
        (
            {"training.early_stopping_patience": 2},
            ("early_stopping_patience", 2),
            "metric_for_best_model",
        ),
        (
            {"training.early_stopping_patience": 2, "training.eval_strategy": "no"},
            2,
            "eval_strategy",
        ),
        ({"data.dataset": "d", "data.train": ["a", "b"]}, ("data.dataset", "d"), "data.train"),
        ({"data.dataset": "d", "data.directory": "x"}, ("data.dataset", "d"), "data.directory"),
        ({"data.columns": ["a", "b"]}, ("data.columns", "a", "b"), "data.dataset"),
    ],
)
def test_invalid_keys_and_combinations_raise(changes, seen, expected):
    with raises(UsageError, seen=seen, expected=expected) as caught:
        read_recipe("translation", changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, changes, seen, expected",
    [
        ("trec", {"data.fold": 5}, ("data.fold", 5), (0, 4)),
        ("trec", {"data": {"train": "a", "folds": 5}}, ("data.folds", 5, "data.fold", None), ()),
        ("trec", {"data.validation": "a"}, ("data.validation", "a"), "data.folds"),
        ("trec", {"data.encoding": "latin-11"}, ("data.encoding", "latin-11"), ()),
        ("trec", {"generation.num_beams": 2}, "num_beams", ()),
        ("trec-masked-lm", {"data.labelled": False}, ("data.folds", 5), ("data.labelled", "true")),
        ("tiny-shakespeare", {"data.validation_fraction": 1}, ("data.validation_fraction", 1), ()),
        (
            "tiny-shakespeare",
            {"data.documents": "lines"},
            ("data.documents", "lines"),
            ("file", "line"),
        ),
        ("squad", {"data.stride": 400}, ("data.stride", 400), ("data.max_length", 384)),
        ("squad", {"evaluation.max_answer_length": 0}, ("max_answer_length", 0), ()),
    ],
)
def test_values_invalid_for_task_raise(name, changes, seen, expected):
    with raises(UsageError, seen=seen, expected=expected):
        read_recipe(name, changes)


def test_library_defaults_are_accepted():
    """Check each default separately. Defaults of `None` mean that nothing is set."""
    hints = key_types(TASKS["translation"])
    for field in dataclasses.fields(Seq2SeqTrainingArguments):
        value = field.default
        if field.name in hints["training"] and value not in (None, dataclasses.MISSING):
            Recipe("translation", training={field.name: getattr(value, "value", value)})
    for name, value in GenerationConfig._get_default_generation_params().items():
        if name in hints["generation"] and value is not None:
            Recipe("translation", generation={name: value})
    for name_of_task, task in TASKS.items():
        config = task.config()
        for name in config.field_names():
            if getattr(config, name, None) is not None:
                Recipe(name_of_task, model={name: getattr(config, name)})


def test_generation_values_rejected_by_exports_are_rejected_in_recipes():
    hints = key_types(TASKS["translation"])["generation"]
    values = [
        -1,
        0,
        0.5,
        1,
        1.5,
        2,
        True,
        "x",
        "never",
        [],
        [1],
        [[1]],
        [["x"]],
        [-0.5],
        float("nan"),
    ]
    num_rejected = 0
    for name in hints.keys() & KINDS.keys():
        for value in values:
            if not KINDS[name].holds(value):
                num_rejected += 1
                with raises(UsageError, seen="generation"):
                    Recipe("translation", generation={name: value})
    assert num_rejected > 80


def test_hub_token_is_rejected_without_being_printed(tmp_path, capsys):
    for name in ("hub_token", "push_to_hub_token", "token"):
        with pytest.raises(SystemExit) as stopped:
            main(
                [
                    "train",
                    "translation",
                    "--output",
                    str(tmp_path / "out"),
                    "--set",
                    f"training.{name}=hf_geheim",
                ]
            )
        message = capsys.readouterr().err
        assert stopped.value.code == 2
        assert (
            message.count("\n") == 1
            and "HF_TOKEN" in message
            and "hf auth login" in message
            and "geheim" not in message
        )
    assert list(tmp_path.iterdir()) == []
    secrets = [
        field.name
        for field in dataclasses.fields(Seq2SeqTrainingArguments)
        if field.name.endswith("token")
    ]
    assert secrets == ["hub_token"]


def test_hub_token_of_environment_is_not_written_to_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_geheim")
    (tmp_path / "text").write_text("".join(line + "\n" for line in standins.OPINIONS))
    data = {"train": str(tmp_path / "text")}
    model = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
    training = {"tokens_per_update": 128, "max_steps": 1}
    train(
        Recipe(
            "sequence-classification", data, {"kind": "word", "vocab_size": 15}, model, training
        ),
        tmp_path / "model",
    )
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"training.json", "training_args.bin", "README.md"} <= {path.name for path in files}
    assert not [path for path in files if b"hf_geheim" in path.read_bytes()]


# -------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "content, seen, expected",
    [
        (b'task = "\xff"', "utf-8", ()),
        (b"task = ", "a.toml", ()),
        (b"#" * 1_000_001, 1000001, 1000000),
        (b"a = " + b"[" * 100_000, "a.toml", ()),
        (b"a = " + b"9" * 5000, "a.toml", ()),
        (b"", "a.toml", ()),
        (b'task = "translation"\ndata = [1]', (), ()),
        (
            b'task = "translation"\n[training]\nseed = 2020-01-01',
            ("training.seed", "datetime.date"),
            (),
        ),
    ],
)
def test_invalid_recipe_file_raises(tmp_path, content, seen, expected):
    (tmp_path / "a.toml").write_bytes(content)
    with raises(ValueError, seen=seen, expected=expected):
        read_recipe(str(tmp_path / "a.toml"))


def test_directory_as_recipe_raises(tmp_path):
    with raises(FileNotFoundError, seen=tmp_path, expected="multi30k-en-de"):
        read_recipe(str(tmp_path))


@pytest.mark.parametrize(
    "change",
    ["data=1", "model.path=5", "training.learning_rate=abc", "generation.num_beams=0", ".=1"],
)
def test_train_command_prints_one_line_error_and_writes_nothing(tmp_path, capsys, change):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "translation", "--output", str(tmp_path / "out"), "--set", change])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------- shipped recipes


def make_runnable(name, folder, changes=None):
    """Return the recipe with generated text, smaller sizes and fewer steps.

    Paths of text that the recipe leaves to its user are filled in.
    """
    lacking = standins.lacking(read_recipe(name), folder)
    recipe = read_recipe(name, lacking)
    recipe = read_recipe(name, lacking | standins.small(recipe))
    if "dataset" not in recipe.data:
        standins.write_text(recipe, folder)
        recipe.data["directory"] = str(folder)
    return recipe


@RECIPES
def test_every_recipe_supports_dry_run(name, tmp_path):
    recipe = make_runnable(name, tmp_path)
    changed_keys = {*standins.STEPS, "teachers"}
    expected_training = {
        key: value for key, value in read_recipe(name).training.items() if key not in changed_keys
    }
    assert {
        key: value for key, value in recipe.training.items() if key not in changed_keys
    } == expected_training
    lines = {line.split()[0]: line for line in dry_run(recipe).splitlines()}
    assert lines.keys() >= {"train", "shape", "parameters", "updates", "time", "memory"}


@pytest.mark.slow
@RECIPES
def test_every_recipe_trains_and_reports_task_metrics(name, tmp_path):
    recipe = make_runnable(name, tmp_path)
    metrics = train(recipe, tmp_path / "model")
    assert {f"validation_{metric}" for metric in TASKS[recipe.task].metric_names} <= metrics.keys()


def test_invalid_trainer_arguments_raise_usage_error(tmp_path):
    recipe = read_recipe("translation", {"training.dataloader_prefetch_factor": 2})
    with raises(UsageError, seen="--dataloader_prefetch_factor"):
        training_arguments(recipe, tmp_path)
    with raises(UsageError, seen=("training.tokens_per_update", 4096), expected=1000):
        training_arguments(
            read_recipe("translation", {"training.tokens_per_batch": 1000}), tmp_path
        )


def test_epochs_that_are_set_replace_updates_of_recipe():
    epochs = {"training.num_train_epochs": 3}
    assert "max_steps" in read_recipe("translation").training
    assert "max_steps" not in read_recipe("translation", epochs).training
    both = read_recipe("translation", {**epochs, "training.max_steps": 7})
    assert (both.training["max_steps"], both.training["num_train_epochs"]) == (7, 3)
