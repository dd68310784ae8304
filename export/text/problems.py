"""Warnings of what is probably wrong with an export: its files, its vocabulary, its labels, and the
settings of sentence-transformers.

sentence-transformers passes most fields of its module Transformer, in sentence_bert_config.json, to
transformers. The runtime applies two, and the others must leave the vectors as they are.
"""

import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..engine.model import find_target
from ..heads import CLASSIFY, EMBED, EMBED_SPARSE, has_task
from ..inference.export_info import MANIFEST, ExportInfo
from ..inference.sentence_settings import TRANSFORMER_KINDS, SentenceSettings
from ..shared.options import without_none
from .sentence_modules import read_poolings

MAX_UNUSED = 1 / 32  # of the embeddings; tables are padded, such as 50,280 tokens to 50,368
UNNAMED = re.compile(r"LABEL_\d+")  # transformers' name of a label without one
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


def export_problems(info: ExportInfo) -> Iterator[str]:
    """Yield a warning for each file that differs from the manifest or that it does not list.

    Yield one too for an encoder in int8 on the target portable: its activations have one scale for
    all rows.
    """
    for name in info.changed_files:
        expected = "expected the file of the manifest: export again"
        yield f"{info.directory / name} changed since the export, {expected}"
    for name in info.unlisted_files:
        expected = f"expected a file that {MANIFEST} lists: export again"
        yield f"{info.directory / name} has no effect, {expected}"
    if info.dtype == "int8" and not info.generates and find_target(info).is_standard:
        seen = f"{info.directory} is for the target {info.manifest['target']} in int8"
        yield f"{seen}, where the rows of a batch change each other, expected the target cpu"


def vocabulary_problems(info: ExportInfo, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a warning if the tokenizer has tokens that the model has no embedding for, or if an
    encoder has embeddings for many more tokens: then the tokenizer is that of another model."""
    size = info.config["vocab_size"]
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    unknown = sorted((id, token) for token, id in tokens.items() if id >= size)
    if unknown:
        seen = f"{len(unknown)} tokens from id {unknown[0][0]} on, such as {unknown[0][1]!r}"
        problem = f"expected ids below vocab_size={size}: texts with them are an error"
        yield f"{info.directory} has a tokenizer with {seen}, {problem}"
    elif not info.generates and size - len(tokens) > MAX_UNUSED * size:
        expected = f"expected about vocab_size={size}: it may be that of another model"
        yield f"{info.directory} has a tokenizer with {len(tokens)} tokens, {expected}"


def label_problems(info: ExportInfo) -> Iterator[str]:
    """Yield a warning if the labels of the export have no names. A single label needs none: its
    score ranks texts or is a number."""
    labels = list(info.config["id2label"].values())
    if len(labels) > 1 and all(UNNAMED.fullmatch(str(label)) for label in labels):
        yield f"{info.directory} has the labels {reprlib.repr(labels)}, expected names in id2label"


def text_problems(info: ExportInfo) -> Iterator[str]:
    """Yield a warning if `max_seq_length` is more than the model has positions, if the default
    prompt is none of the prompts, and those of `field_problems`."""
    settings = info.sentence_settings
    longest, limit = settings.max_seq_length, info.config["max_position_embeddings"]
    if longest and longest > limit:
        cut = f"expected at most max_position_embeddings={limit}: texts are cut there"
        yield f"{info.directory} has max_seq_length={longest}, {cut}"
    name, prompts = settings.default_prompt_name, settings.prompts
    if name is not None and name not in prompts:
        expected = f"expected one of {list(prompts)}: texts get none"
        yield f"{info.directory} has default_prompt_name={name!r}, {expected}"
    yield from field_problems(info.directory, settings, info.architecture, info.config)


def pooling_problems(info: ExportInfo) -> Iterator[str]:
    """Yield a warning if the export configures no pooling, or one that does not fit the attention:
    the first token of a decoder reads no other."""
    is_decoder = info.config["model_type"] == "vanilla-decoder"
    unfit, kind = ("cls", "a decoder") if is_decoder else ("lasttoken", "an encoder")
    if not (modules := info.manifest.get("sentence_modules")):
        expected = "expected a Pooling in modules.json: it is the mean"
        yield f"{info.directory} configures no pooling, {expected}"
    elif unfit in read_poolings(modules[0]):
        problem = f"which does not fit the attention of {kind}"
        yield f"{info.directory} has the pooling {unfit!r}, {problem}"


def field_problems(
    directory: Path, settings: SentenceSettings, architecture: str, config: dict[str, Any]
) -> Iterator[str]:
    """Yield a message for each field of the module Transformer that would change results and is
    not applied. A model without a task in `TASKS` has none.

    `config` is the config.json of the model in `directory`, of the class `architecture`.
    """
    task = next((task for task in TASKS if has_task(architecture, task)), None)
    if task is None:
        return
    defaults = DEFAULTS | {name: (value,) for name, value in zip(TASK_FIELDS, TASKS[task])}
    fields = without_none(dict(flat_fields(settings.transformer)))
    has_messages = any(name.startswith("modality_config.message.") for name in fields)
    is_ignored = config.get("reranker") or not has_messages
    ignored = "|".join([*WITHOUT_EFFECT, *([CHAT_TEMPLATE] if is_ignored else ())])
    for name, value in fields.items():
        matches = (values for pattern, values in defaults.items() if re.fullmatch(pattern, name))
        known = next(matches, ())
        if value not in known and not re.fullmatch(ignored, name):
            place = PLACES.get(name.partition(".")[0], "no such field")
            expected = " or ".join(map(repr, known)) or place
            seen = f"{directory / settings.transformer_name} has {name}={value!r:.60}"
            yield f"{seen}, which is not applied: expected {expected}"


def flat_fields(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the fields of `content`, and of the objects in it with the names of
    both: "model_kwargs.dtype"."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from flat_fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
