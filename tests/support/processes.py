"""A training run and sharded models in two processes, for `test_distributed.py`."""

import json
import os
import socket
from pathlib import Path

import torch
from checkpoints import VOCABULARY, build
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from vanilla_transformer import VanillaSeq2SeqForConditionalGeneration
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.run import train

MODELS = ("pretraining", "answers", "causal-relative", "causal-learned", "seq2seq")
PLANS = {"tensor parallel": DistributedConfig(tp_size=2), "FSDP2": DistributedConfig(fsdp_size=2)}


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def environment(rank: int, port: str) -> dict[str, str]:
    """Return the environment variables that torchrun sets for process `rank` of two.

    `port` is that of the first process.
    """
    settings = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    return settings | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def run_two(folder: Path):
    """Train FOLDER/recipe.json to FOLDER/model in two processes, and write FOLDER/sharded.json.

    The processes are forked, because the imports take longer than the work.
    """
    torch.multiprocessing.start_processes(
        work, (free_port(), folder), nprocs=2, start_method="fork"
    )


def work(rank: int, port: str, folder: Path):
    torch.set_num_threads(1)  # the threads of the first process are not in a fork
    os.environ.update(environment(rank, port))
    train(Recipe(**json.loads((folder / "recipe.json").read_text())), folder / "model")
    results = {f"{name}, {plan}": compared(name, plan, folder) for name in MODELS for plan in PLANS}
    results["trained"] = trained(folder)
    if rank == 0:
        (folder / "sharded.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


def compared(name: str, plan: str, folder: Path) -> dict:
    """Compare the model `name`, sharded by the plan `plan`, with the same model in one process.

    Return the distances of outputs and gradients, whether tokens are equal, and `values`: the
    number of values of each parameter, in this process and in all. `folder` gets the checkpoint.
    """
    single, rows = build(name), torch.arange(4)
    if distributed.get_rank() == 0:
        single.save_pretrained(folder / name)
    distributed.barrier()
    sharded = type(single).from_pretrained(folder / name, distributed_config=PLANS[plan])
    # With FSDP2 each process has its own rows, and gradients are averaged.
    mine = rows.chunk(2)[distributed.get_rank()] if plan == "FSDP2" else rows
    # Before a forward pass: FSDP2 keeps what it gathered for the last group until the backward
    # pass.
    values = {
        name: [local(weight).numel(), weight.numel()] for name, weight in sharded.named_parameters()
    }
    actual, expected = gradients(sharded, mine), gradients(single, rows)
    return {
        "values": values,
        "outputs": distance(outputs(sharded, mine), outputs(single, rows)[mine]),
        "gradients": max(
            distance(actual.pop(name), gradient) for name, gradient in expected.items()
        ),
        "gradients of nothing": list(actual),
        "tokens": torch.equal(tokens(sharded, mine), tokens(single, rows)[mine]),
    }


def trained(folder: Path) -> dict[str, list[float]]:
    """Return {"copies": losses, "shards": losses} of `Trainer`.

    Each process has a copy of the model, or a part of it. Both models are saved to `folder`.
    """
    losses = {}
    for name, options in {"copies": {}, "shards": {"distributed_config": PLANS["FSDP2"]}}.items():
        model = VanillaSeq2SeqForConditionalGeneration.from_pretrained(
            folder / "seq2seq", **options
        )
        settings = dict(
            max_steps=2,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
        )
        arguments = TrainingArguments(
            str(folder / name), optim="sgd", learning_rate=0.1, report_to="none", **settings
        )
        rows = [{key: value[0] for key, value in inputs(model, [row]).items()} for row in range(4)]
        trainer = Trainer(
            model,
            arguments,
            train_dataset=[row | {"labels": row["decoder_input_ids"]} for row in rows],
        )
        trainer.train()
        model.save_pretrained(folder / f"trained-{name}")
        losses[name] = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return losses


def inputs(model, rows):
    """Return arguments of `forward` for some `rows` of four, two of which end in padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, VOCABULARY, (4, 8), generator=generator)
    mask = (torch.arange(8) < torch.tensor([[8], [5], [8], [3]])).long()
    tensors = {"input_ids": ids[rows], "attention_mask": mask[rows]}
    return tensors | (
        {"decoder_input_ids": ids.flip(1)[rows, :6]} if model.config.is_encoder_decoder else {}
    )


def outputs(model, rows):
    with torch.no_grad():
        return model(**inputs(model, rows))[0]


def gradients(model, rows):
    model(**inputs(model, rows))[0].square().sum(-1).mean().backward()
    return {
        name: gather(weight.grad)
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


def tokens(model, rows):
    """Return four generated tokens for each of `rows`; none if the model does not generate."""
    lengths = {"min_new_tokens": 4, "max_new_tokens": 4}
    return (
        model.generate(**inputs(model, rows), **lengths)
        if model.can_generate()
        else torch.empty(len(rows), 0)
    )


def gather(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def distance(one, other):
    """Return the largest difference of `one` and `other`.

    It is relative to the largest value of `other` if that is above 1.
    """
    return ((one - other).abs().max() / other.abs().max().clamp(min=1)).item()
