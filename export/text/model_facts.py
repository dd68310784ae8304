"""Facts that users of an export should know, for `info` of the command line and `/info` of a
server."""

from tokenizers import Tokenizer

from ..engine.model import find_target
from ..heads import CLASSIFY, CLASSIFY_IMAGES, EMBED, EMBED_SPARSE, HEADS, TAG
from ..inference.config import VISION
from ..inference.cpu_quota import cpu_quota
from ..inference.export_info import IMAGE_PROCESSOR, TOKENIZERS, ExportInfo
from .problems import (
    export_problems,
    label_problems,
    pooling_problems,
    text_problems,
    vocabulary_problems,
)
from .sentence_modules import read_poolings
from .tasks.classification import default_scoring
from .tasks.embedding import max_length
from .tasks.task import JsonObject

LABELED = {CLASSIFY, CLASSIFY_IMAGES, TAG}  # tasks whose results have names of labels


def model_facts(info: ExportInfo, threads: int, tokenizer: Tokenizer | None = None) -> JsonObject:
    """Return the choices that a runtime of the export `info` with `threads` makes, and warnings of
    those that are probably wrong. Without a `tokenizer`, its vocabulary is not checked.

    The keys are architecture, reads (texts, token ids, images or pixel values), target, device,
    dtype, calibration (the numbers `matmuls` and `row_scales`, those with a scale for each row, or
    None), rows_are_independent, threads, cpu_quota, changed_files and warnings. Models of texts
    have max_position_embeddings and token_types (whether the graph reads them) too. Models that
    embed texts add `embedding_facts`, or for sparse vectors `prompt_facts`, pooling_strategy,
    activation_function, max_active_dims and similarity, classifiers problem_type and
    activation (of scores), and models that name labels `labels`.
    """
    target, tasks = find_target(info), HEADS[info.architecture].tasks
    is_vision, settings = info.config["model_type"] == VISION, info.sentence_settings
    # what a runtime takes depends on the files of the checkpoint
    file, inputs, otherwise = (
        (IMAGE_PROCESSOR, "images", "pixel values")
        if is_vision
        else (TOKENIZERS[0], "texts", "token ids")
    )
    facts = {
        "architecture": info.architecture,
        "reads": inputs if file in info.manifest["files"] else otherwise,
        "target": info.manifest["target"],
        "device": target.default_device,
        "dtype": info.dtype,
        "calibration": calibration(info.manifest, info.dtype),
        "rows_are_independent": info.dtype in target.independent_dtypes,
        "threads": threads,
        "cpu_quota": cpu_quota(),
        "changed_files": info.changed_files,
    }
    warnings = [*export_problems(info)]
    if not is_vision:
        tensors = [tensor for spec in info.specs.values() for tensor in spec.inputs]
        facts["max_position_embeddings"] = info.config["max_position_embeddings"]
        facts["token_types"] = any(tensor.name == "token_type_ids" for tensor in tensors)
        warnings += text_problems(info)
    if tokenizer is not None:
        warnings += vocabulary_problems(info, tokenizer)
    if EMBED_SPARSE in tasks:
        facts |= prompt_facts(info) | info.config.get("splade", {})
        facts["max_active_dims"] = settings.max_active_dims
        facts["similarity"] = settings.similarity_fn_name or "dot"
    if EMBED in tasks:  # after it, because `similarity` of BGE-M3 is that of its dense vectors
        facts |= embedding_facts(info)
        warnings += pooling_problems(info)
    if CLASSIFY in tasks or CLASSIFY_IMAGES in tasks:
        facts["problem_type"] = info.config.get("problem_type")
        facts["activation"], _ = default_scoring(info.directory, info.config, settings)
    if "id2label" in info.config and not LABELED.isdisjoint(tasks):
        facts["labels"] = list(info.config["id2label"].values())
        warnings += label_problems(info)
    return {**facts, "warnings": warnings}


def calibration(manifest: dict, dtype: str) -> dict[str, int] | None:
    """Return the numbers of calibrated matrix multiplications and of scales for each row, or None
    without a calibration of the weights in `dtype`."""
    facts = manifest.get("calibration") if dtype == "int8" else None
    return facts and {name: facts[name] for name in ("matmuls", "row_scales")}


def embedding_facts(info: ExportInfo) -> JsonObject:
    """Return the facts of a model that embeds: pooling, modules (those after it), similarity,
    truncate_dim and those of `prompt_facts`."""
    settings = info.sentence_settings
    modules = info.manifest.get("sentence_modules") or []
    return {
        **prompt_facts(info),
        "pooling": list(read_poolings(modules[0] if modules else {})),
        "modules": [module["type"] for module in modules[1:]],
        "similarity": settings.similarity_fn_name or "cosine",
        "truncate_dim": settings.truncate_dim,
    }


def prompt_facts(info: ExportInfo) -> JsonObject:
    """Return max_seq_length, prompts (their names) and default_prompt_name of a model that
    embeds."""
    settings = info.sentence_settings
    return {
        "max_seq_length": max_length(info),
        "prompts": list(settings.prompts),
        "default_prompt_name": settings.default_prompt_name,
    }
