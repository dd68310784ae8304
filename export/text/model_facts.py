"""Facts that users of an export should know, for `info` of the command line and `/info` of a
server."""

from typing import Any

from tokenizers import Tokenizer

from ..engine.model import find_target
from ..heads import CLASSIFY, EMBED, EMBED_SPARSE, HEADS
from ..inference.cpu_quota import cpu_quota
from ..inference.export_info import ExportInfo
from .sentence_modules import read_poolings
from .tasks.classification import activation_name, label_problems, sentence_config
from .tasks.embedding import length_and_case, length_problems, pooling_problems


def model_facts(
    info: ExportInfo, threads: int, tokenizer: Tokenizer | None = None
) -> dict[str, Any]:
    """Return the choices that a runtime of the export `info` with `threads` makes, and warnings of
    those that are probably wrong. Without a `tokenizer`, its vocabulary is not checked.

    The keys are target, device, dtype, calibration (the numbers `matmuls` and `row_scales`, those
    with a scale for each row, or None), rows_are_independent, threads, cpu_quota,
    max_position_embeddings, token_types (whether the graph reads them) and warnings. Models that
    embed add `embedding_facts` or `sparse_facts`, and classifiers `label_facts`.
    """
    target, tasks = find_target(info), HEADS[info.architecture].tasks
    facts = {
        "target": info.manifest["target"],
        "device": target.default_device,
        "dtype": info.dtype,
        "calibration": calibration(info.manifest, info.dtype),
        "rows_are_independent": info.dtype in target.independent_dtypes,
        "threads": threads,
        "cpu_quota": cpu_quota(),
        "max_position_embeddings": info.config["max_position_embeddings"],
        "token_types": any(
            tensor.name == "token_type_ids"
            for spec in info.specs.values()
            for tensor in spec.inputs
        ),
    }
    warnings = [] if tokenizer is None else vocabulary_problems(info, tokenizer)
    if EMBED in tasks:
        facts |= embedding_facts(info)
        warnings += pooling_problems(info) + length_problems(info)
    if EMBED_SPARSE in tasks:
        facts |= sparse_facts(info)
        warnings += length_problems(info)
    if CLASSIFY in tasks:
        facts |= label_facts(info)
        warnings += label_problems(info)
    return {**facts, "warnings": warnings}


def calibration(manifest: dict, dtype: str) -> dict[str, int] | None:
    """Return the numbers of calibrated matrix multiplications and of scales for each row, or None
    without a calibration of the weights in `dtype`."""
    facts = manifest.get("calibration") if dtype == "int8" else None
    return facts and {name: facts[name] for name in ("matmuls", "row_scales")}


def vocabulary_problems(info: ExportInfo, tokenizer: Tokenizer) -> list[str]:
    """Return a warning if the tokenizer has tokens that the model has no embedding for."""
    size = info.config["vocab_size"]
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    unknown = sorted((id, token) for token, id in tokens.items() if id >= size)
    if not unknown:
        return []
    seen = f"{len(unknown)} tokens from id {unknown[0][0]} on, such as {unknown[0][1]!r}"
    problem = f"expected ids below vocab_size={size}: texts with them are an error"
    return [f"{info.directory} has a tokenizer with {seen}, {problem}"]


def embedding_facts(info: ExportInfo) -> dict[str, Any]:
    """Return the facts of a model that embeds: pooling, modules (those after it), similarity,
    truncate_dim and those of `prompt_facts`."""
    config = sentence_config(info)
    modules = info.manifest.get("sentence_modules") or []
    return {
        **prompt_facts(info),
        "pooling": list(read_poolings(modules[0] if modules else {})),
        "modules": [module["type"] for module in modules[1:]],
        "similarity": config.get("similarity_fn_name") or "cosine",
        "truncate_dim": config.get("truncate_dim"),
    }


def sparse_facts(info: ExportInfo) -> dict[str, Any]:
    """Return the facts of a model that embeds texts as sparse vectors: pooling_strategy,
    activation_function, max_active_dims, similarity and those of `prompt_facts`."""
    config = sentence_config(info)
    return {
        **prompt_facts(info),
        **info.config["splade"],
        "max_active_dims": config.get("max_active_dims"),
        "similarity": config.get("similarity_fn_name") or "dot",
    }


def prompt_facts(info: ExportInfo) -> dict[str, Any]:
    """Return max_seq_length, prompts (their names) and default_prompt_name of a model that
    embeds."""
    config = sentence_config(info)
    return {
        "max_seq_length": length_and_case(info)[0],
        "prompts": list(config.get("prompts") or {}),
        "default_prompt_name": config.get("default_prompt_name"),
    }


def label_facts(info: ExportInfo) -> dict[str, Any]:
    """Return the facts of a classifier: problem_type, activation (of its scores) and labels."""
    config = info.config
    return {
        "problem_type": config.get("problem_type"),
        "activation": activation_name(info),
        "labels": list(config["id2label"].values()),
    }
