"""The fields of the module Transformer of sentence-transformers, in sentence_bert_config.json.

sentence-transformers passes most of them to transformers. The runtime applies two, and the others
must leave the vectors as they are.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..heads import CLASSIFY, EMBED, EMBED_SPARSE, has_task
from ..inference.sentence_settings import TRANSFORMER_KINDS, SentenceSettings

# patterns of the fields of a task, and the values that sentence-transformers writes for each task
TASK_FIELDS = (
    "transformer_task",
    r"modality_config\.text\.method_output_name",
    "module_output_name",
)
TASKS = {
    EMBED: ("feature-extraction", "last_hidden_state", "token_embeddings"),
    EMBED_SPARSE: ("fill-mask", "logits", "token_embeddings"),
    CLASSIFY: ("sequence-classification", "logits", "scores"),
}
# patterns of fields that change no vector, whatever their values
WITHOUT_EFFECT = (
    "|".join(TRANSFORMER_KINDS),  # these are applied
    "backend|cache_dir|unpad_inputs",
    r"(model|tokenizer|processor|config)_(args|kwargs)\."
    "(attn_implementation|dtype|torch_dtype|trust_remote_code|low_cpu_mem_usage|device_map"
    "|use_safetensors|use_fast|use_cache|padding_side|add_pooling_layer|cache_dir|token"
    "|local_files_only|reference_compile|unpad_inputs|use_memory_efficient_attention)",
    r"processing_kwargs\.(text|common)\.(padding|pad_to_multiple_of|padding_side|return_\w+)",
    r"(processing_kwargs|modality_config)\.(image|audio|video)\b.*",
)
# patterns of fields with the values that change no vector
DEFAULTS: dict[str, tuple[Any, ...]] = {
    r"processing_kwargs\.(text|common)\.truncation": ("longest_first", True),
    r"processing_kwargs\.(text|common)\.add_special_tokens": (True,),
    r"modality_config\.text\.method": ("forward",),
}
# Without messages, which sentence-transformers calls a modality, no chat template is applied. The
# prompt of a reranker replaces it.
CHAT_TEMPLATE = r"modality_config\.message\..*|processing_kwargs\.chat_template\..*"
# where the fields of an object belong, which are arguments of `from_pretrained`
PLACES = {
    f"{owner}_{ending}": f"it in {name}"
    for owner, name in (
        ("config", "config.json"),
        ("tokenizer", "tokenizer_config.json"),
        ("processor", "tokenizer_config.json"),
    )
    for ending in ("args", "kwargs")
}


def field_problems(
    directory: Path, settings: SentenceSettings, architecture: str, config: dict[str, Any]
) -> list[str]:
    """Return a message for each field of the module Transformer that would change results and is
    not applied. A model without a task in `TASKS` has none.

    `config` is the config.json of the model in `directory`, of the class `architecture`.
    """
    tasks = [TASKS[task] for task in TASKS if has_task(architecture, task)]
    if not tasks:
        return []
    defaults = DEFAULTS | {name: (value,) for name, value in zip(TASK_FIELDS, tasks[0])}
    fields = {name: value for name, value in flat_fields(settings.transformer) if value is not None}
    has_messages = any(name.startswith("modality_config.message.") for name in fields)
    ignored = [*WITHOUT_EFFECT]
    if config.get("reranker") or not has_messages:
        ignored.append(CHAT_TEMPLATE)
    problems = []
    for name in [name for name in fields if not re.fullmatch("|".join(ignored), name)]:
        matches = [values for pattern, values in defaults.items() if re.fullmatch(pattern, name)]
        known = matches[0] if matches else ()
        if fields[name] not in known:
            place = PLACES.get(name.partition(".")[0], "no such field")
            expected = " or ".join(map(repr, known)) or place
            seen = f"{directory / settings.transformer_name} has {name}={fields[name]!r:.60}"
            problems.append(f"{seen}, which is not applied: expected {expected}")
    return problems


def flat_fields(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the fields of `content`, and of the objects in it with the names of
    both: "model_kwargs.dtype"."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from flat_fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
