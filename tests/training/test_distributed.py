"""Tests of data parallel training, tensor parallelism and FSDP2, against one process."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from checkpoints import build, write_corpus
from messages import raises
from processes import MODELS, PLANS, free_port, run_two
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM
from transformers.distributed import DistributedConfig

from vanilla_transformer.layers_vanilla_transformer import VanillaLayer
from vanilla_transformer.training.batches import TokenBatches
from vanilla_transformer.training.recipe import FOLDER as RECIPES
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.run import train
from vanilla_transformer.training.trainer import check_processes

LAUNCH = RECIPES.with_name("launch")
SMALL = dict(
    hidden_size=32, intermediate_size=64, num_attention_heads=4, encoder_layers=1, decoder_layers=1
)
EXACT = dict(dropout=0.0, embedding_dropout=0.0)  # processes draw different dropout masks


def recipe(folder, **training):
    """Return a recipe with two batches per update.

    Its 30 validation rows do not fill the batches of two processes.
    """
    train_files, validation_files = (
        write_corpus(folder, "train", 120, seed=0),
        write_corpus(folder, "val", 30, seed=1),
    )
    data = {"train": list(map(str, train_files)), "validation": list(map(str, validation_files))}
    settings = dict(
        tokens_per_update=512, tokens_per_batch=256, num_train_epochs=1, learning_rate=5e-3,
        label_smoothing_factor=0.1, save_strategy="steps", save_steps=2, logging_steps=1,
        average_last=2, per_device_eval_batch_size=8, seed=0,
    )  # fmt: skip
    tokenizer, generation = {"kind": "bpe", "vocab_size": 60}, {"max_new_tokens": 20}
    return Recipe("translation", data, tokenizer, SMALL | EXACT, settings | training, generation)


@contextlib.contextmanager
def start_process(arguments, folder):
    """Start a command, and kill its process tree at the end of the block."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        arguments, cwd=folder, env=variables, stdout=PIPE, stderr=PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for result in [*psutil.Process(process.pid).children(recursive=True), process]:
                    result.kill()


def run(arguments, folder):
    with start_process(arguments, folder) as process:
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    return output


@pytest.fixture(scope="module")
def single_process_run(tmp_path_factory):
    """Train the recipe in one process and return the model directory."""
    folder = tmp_path_factory.mktemp("one")
    train(recipe(folder), folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def two_process_run(tmp_path_factory):
    """Return the folder of a training run of two processes, and of models of which each holds a
    shard."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "recipe.json").write_text(json.dumps(asdict(recipe(folder))))
    run_two(folder)
    return folder


# ------------------------------------------------------------------------------------ data parallel


def report(output):
    return json.loads((output / "training.json").read_text())


def check_same_run(actual, expected):
    """Check that two runs have the same losses, tokens, metrics and weights."""
    assert report(actual)["hardware"].startswith("2 processes")
    histories = [
        [record for record in report(output)["history"] if "loss" in record]
        for output in (actual, expected)
    ]
    assert len(histories[0]) == len(histories[1]) == report(expected)["history"][-2]["step"]
    for record, other in zip(*histories, strict=True):
        assert record["loss"] == pytest.approx(other["loss"], abs=1e-4)
        assert record["tokens"] == other["tokens"]
    for metric in ("validation_bleu", "validation_chrf"):
        assert report(actual)["metrics"][metric] == report(expected)["metrics"][metric]
    weights = load_file(expected / "model.safetensors")
    for name, weight in load_file(actual / "model.safetensors").items():
        torch.testing.assert_close(weight, weights[name], atol=1e-4, rtol=0)


def test_two_processes_train_like_one(two_process_run, single_process_run):
    check_same_run(two_process_run / "model", single_process_run)


def command(folder) -> list[str]:
    """Write the recipe, and return the arguments for `accelerate launch` or `torchrun`."""
    tables = {
        name: table for name, table in asdict(recipe(folder)).items() if isinstance(table, dict)
    }
    lines = ['task = "translation"']
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    (folder / "recipe.toml").write_text("\n".join(lines))
    return [
        "-m",
        "vanilla_transformer_export.cli.main",
        "train",
        "recipe.toml",
        "--output",
        "model",
    ]


@pytest.mark.slow
def test_accelerate_launch_trains_and_prints_metrics_once(single_process_run, tmp_path):
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
    ]
    printed = run([*launch, "--main_process_port", free_port(), *command(tmp_path)], tmp_path)
    [metrics] = [json.loads(line) for line in printed.splitlines() if line.startswith('{"')]
    assert metrics == report(tmp_path / "model")["metrics"]
    check_same_run(tmp_path / "model", single_process_run)


@pytest.mark.slow
def test_killed_run_of_two_processes_resumes_to_same_weights(single_process_run, tmp_path):
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        free_port(),
    ]
    arguments = [*launch, *command(tmp_path)]
    with start_process(arguments, tmp_path) as process:
        while process.poll() is None and not list(
            tmp_path.glob("model-run/checkpoint-*/files.json")
        ):
            time.sleep(0.01)
    assert not (tmp_path / "model").exists()
    run(arguments, tmp_path)
    check_same_run(tmp_path / "model", single_process_run)


@pytest.mark.slow
def test_slurm_launch_script_trains_on_two_machines(single_process_run, tmp_path, monkeypatch):
    # two machines with one process each
    programs = {"scontrol": "echo 127.0.0.1", "srun": '"$@" & "$@" & wait'}
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "SLURM_JOB_NODELIST": "a,b",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "1",
        "PROCESSES": "1",
    }
    paths = [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    for name, value in {**variables, "PORT": free_port(), "PATH": ":".join(paths)}.items():
        monkeypatch.setenv(name, value)
    run(["bash", LAUNCH / "slurm.sh", *command(tmp_path)[3:]], tmp_path)
    check_same_run(tmp_path / "model", single_process_run)


def test_launch_scripts_have_valid_syntax():
    for path in LAUNCH.glob("*.sh"):
        subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize("changes, seen, expected", [
    ({"args": SimpleNamespace(n_gpu=2)}, 2, ()),
    ({"is_fsdp_enabled": True}, (), ("FSDP", "DeepSpeed")),
    ({"is_deepspeed_enabled": True}, (), ("FSDP", "DeepSpeed")),
])  # fmt: skip
def test_unsupported_parallel_trainers_raise(changes, seen, expected):
    trainer = {
        "args": SimpleNamespace(n_gpu=1),
        "is_fsdp_enabled": False,
        "is_deepspeed_enabled": False,
    }
    check_processes(SimpleNamespace(**trainer))
    with raises(ValueError, seen=seen, expected=expected):
        check_processes(SimpleNamespace(**trainer | changes))


def test_batches_are_split_to_fill_every_update():
    lengths = [(length,) for length in (3, 1, 4, 1, 5, 2)]
    batches = TokenBatches(range(6), lengths, limit=6, divisor=4).batches
    assert len(batches) == 4
    assert sorted(index for batch in batches for index in batch) == list(range(6))
    assert all(len(batch) * max(lengths[index][0] for index in batch) <= 6 for batch in batches)
    assert len(TokenBatches(range(6), lengths, limit=6, divisor=8).batches) == 6  # one row each


# ------------------------------------------------------------------------------------------- shards


@pytest.fixture(scope="module")
def sharded(two_process_run):
    return json.loads((two_process_run / "sharded.json").read_text())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_sharded_model_matches_outputs_gradients_and_tokens_of_unsharded_model(sharded, name, plan):
    result = sharded[f"{name}, {plan}"]
    assert result["outputs"] < 1e-5
    assert result["gradients"] < 1e-5
    assert result["gradients of nothing"] == []
    assert result["tokens"]


CUT = (
    r"embed_tokens\.|lm_head\.|attn\.[qkv]_proj\.|attn\.o_proj\.weight|up_proj\.|down_proj\.weight"
)
CUT_RELATIVE = CUT.replace("attn", "cross_attn")  # the heads of self-attention stay together


@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallelism_halves_heads_inner_units_and_vocabulary(sharded, name):
    pattern = CUT_RELATIVE if name == "causal-relative" else CUT
    for parameter, (here, everywhere) in sharded[f"{name}, tensor parallel"]["values"].items():
        assert here == (everywhere // 2 if re.search(pattern, parameter) else everywhere), parameter


@pytest.mark.parametrize("name", MODELS)
def test_fsdp2_halves_every_parameter(sharded, name):
    for parameter, (here, everywhere) in sharded[f"{name}, FSDP2"]["values"].items():
        assert 2 * here == everywhere, parameter


def test_trainer_with_shards_matches_copies_and_checkpoints_load(two_process_run, sharded):
    losses = sharded["trained"]
    assert len(losses["shards"]) == 2
    assert losses["shards"] == pytest.approx(losses["copies"], abs=1e-5)
    copies, shards = two_process_run / "trained-copies", two_process_run / "trained-shards"
    assert {path.name for path in shards.iterdir()} == {path.name for path in copies.iterdir()}
    assert (shards / "config.json").read_text() == (copies / "config.json").read_text()
    models = [AutoModelForSeq2SeqLM.from_pretrained(path) for path in (shards, copies)]
    weights, others = (dict(model.named_parameters()) for model in models)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], atol=1e-5, rtol=0)


def test_heads_not_divisible_by_tp_size_raise():
    model = build("encoder")
    with raises(ValueError, seen=("num_attention_heads", 4), expected=("tp_size", 3)):
        model.maybe_distribute_model(model, DistributedConfig(tp_size=3), None)


def test_accelerate_fsdp_wraps_vanilla_layers():
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    plugin.set_auto_wrap_policy(build("seq2seq"))
    assert plugin.auto_wrap_policy.keywords["transformer_layer_cls"] == {VanillaLayer}
