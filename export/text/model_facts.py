"""Facts that users of an export should know, for `info` of the command line and `/info` of a
server."""

from typing import Any

from ..heads import CLASSIFY, EMBED, HEADS
from ..inference.cpu_quota import cpu_quota
from .sentence_modules import read_poolings
from .tasks.classification import activation_name, label_problems, sentence_config
from .tasks.embedding import length_and_case, length_problems, pooling_problems
from .text_model import TextModel


def model_facts(runtime: TextModel) -> dict[str, Any]:
    """Return the choices that `runtime` makes, and warnings of those that are probably wrong.

    The keys are target, device, dtype, calibration (the numbers `matmuls` and `row_scales`, those
    with a scale for each row, or None), rows_are_independent, threads, cpu_quota,
    max_position_embeddings, token_types (whether the graph reads them) and warnings. Models that
    embed add `embedding_facts`, and classifiers `label_facts`.
    """
    info, opened = runtime.info, runtime.runtime
    tasks = HEADS[info.architecture].tasks
    facts = {
        "target": opened.target,
        "device": opened.device,
        "dtype": opened.dtype,
        "calibration": calibration(info.manifest, opened.dtype),
        "rows_are_independent": opened.rows_are_independent,
        "threads": opened.threads,
        "cpu_quota": cpu_quota(),
        "max_position_embeddings": info.config["max_position_embeddings"],
        "token_types": any(
            tensor.name == "token_type_ids"
            for spec in info.specs.values()
            for tensor in spec.inputs
        ),
    }
    warnings = vocabulary_problems(runtime)
    if EMBED in tasks:
        facts |= embedding_facts(runtime)
        warnings += pooling_problems(runtime) + length_problems(runtime)
    if CLASSIFY in tasks:
        facts |= label_facts(runtime)
        warnings += label_problems(runtime)
    return {**facts, "warnings": warnings}


def calibration(manifest: dict, dtype: str) -> dict[str, int] | None:
    """Return the numbers of calibrated matrix multiplications and of scales for each row, or None
    without a calibration of the weights in `dtype`."""
    facts = manifest.get("calibration") if dtype == "int8" else None
    return facts and {name: facts[name] for name in ("matmuls", "row_scales")}


def vocabulary_problems(runtime: TextModel) -> list[str]:
    """Return a warning if the tokenizer has tokens that the model has no embedding for."""
    size = runtime.info.config["vocab_size"]
    tokens = runtime.tokenizer.get_vocab(with_added_tokens=True)
    unknown = sorted((id, token) for token, id in tokens.items() if id >= size)
    if not unknown:
        return []
    seen = f"{len(unknown)} tokens from id {unknown[0][0]} on, such as {unknown[0][1]!r}"
    problem = f"expected ids below vocab_size={size}: texts with them are an error"
    return [f"{runtime.info.directory} has a tokenizer with {seen}, {problem}"]


def embedding_facts(runtime: TextModel) -> dict[str, Any]:
    """Return the facts of a model that embeds: max_seq_length, pooling, modules (those after it),
    prompts (their names), default_prompt_name, similarity and truncate_dim."""
    config = sentence_config(runtime)
    modules = runtime.info.manifest.get("sentence_modules") or []
    return {
        "max_seq_length": length_and_case(runtime)[0],
        "pooling": list(read_poolings(modules[0] if modules else {})),
        "modules": [module["type"] for module in modules[1:]],
        "prompts": list(config.get("prompts") or {}),
        "default_prompt_name": config.get("default_prompt_name"),
        "similarity": config.get("similarity_fn_name") or "cosine",
        "truncate_dim": config.get("truncate_dim"),
    }


def label_facts(runtime: TextModel) -> dict[str, Any]:
    """Return the facts of a classifier: problem_type, activation (of its scores) and labels."""
    config = runtime.info.config
    return {
        "problem_type": config.get("problem_type"),
        "activation": activation_name(runtime),
        "labels": list(config["id2label"].values()),
    }
