"""The files that other programs read beside the graphs: config.json, genai_config.json, and the
card of a repository on the Hub."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id, yaml_dump

from ..heads import HEADS
from ..inference.export_info import CARD, IMAGE_PROCESSOR, TOKENIZER_CONFIG, TOKENIZERS
from ..shared.files import card_metadata, read_object, write_json
from ..shared.options import as_list, without_none
from ..specs.caches import key_heads
from .checkpoint import Checkpoint
from .graphs import Graphs

# Which of Transformers.js's model types runs graphs of these roles as they are. "marian" is in no
# mapping of classifiers, so that the files it names for a pipeline are these graphs; "bart" is.
MODEL_TYPES = {("encoder",): "bert", ("decoder",): "opt", ("encoder", "decoder"): "marian"}
MARIAN_NAMES = {
    "d_model": "hidden_size",
    "encoder_attention_heads": "num_attention_heads",
    "decoder_attention_heads": "num_attention_heads",
}
# One of the classes for which Transformers.js gives token types; transformers 5 reads
# tokenizer.json for it as it stands.
TYPED_TOKENIZER = "ConvBertTokenizer"
UNTYPED_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast", "PreTrainedTokenizer")
# Calls of pipelines in JavaScript that are not `pipe('A text.')`, by the Hub's name of the task.
CALLS = {
    "feature-extraction": "pipe('A text.', { pooling: 'mean' })",
    "fill-mask": "pipe(`A ${pipe.tokenizer.mask_token} text.`)",
    "question-answering": "pipe('What is it?', 'It is a text.')",
    "text-generation": "pipe('A text', { max_new_tokens: 20 })",
    "image-classification": "pipe('image.jpg')",
    "image-feature-extraction": "pipe('image.jpg')",
}
# that hold for its exports
OF_THE_BASE = ("language", "license", "license_name", "license_link", "datasets")
# that genai has under the same names
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
GENAI_CONFIG = "genai_config.json"
NO_TOKENIZER = "no-tokenizer"


def client_config(
    config: dict, roles: Collection[str], dtypes: Sequence[str], external: Sequence[str] = ()
) -> dict:
    """Return the config.json of an export: that of the checkpoint, with a model type that
    Transformers.js has for such graphs.

    It also says which files load without options, and always has a `label2id`. The manifest has the
    true model type.

    Args:
        config: config.json of the checkpoint.
        roles: roles of the graphs, with "encoder", "decoder" or both. Others are ignored.
        dtypes: dtypes of the files, the default first; none for graphs that Transformers.js cannot
            run. A browser's wasm loads int8 if it is one of them.
        external: names of graph files whose weights are in a file of their own.
    """
    model_type = MODEL_TYPES[tuple(role for role in ("encoder", "decoder") if role in roles)]
    if config["model_type"] == "vanilla-vision":
        model_type = "vit"
    names = MARIAN_NAMES if model_type == "marian" else {}
    numbers = config.get("label2id") or {
        label: int(number) for number, label in config["id2label"].items()
    }
    fields = config | {name: config[ours] for name, ours in names.items()}
    fields |= {"label2id": numbers, "model_type": model_type}
    if not dtypes:
        return fields
    loaded: dict[str, Any] = {"dtype": dtypes[0]}
    if "int8" in dtypes[1:]:
        loaded["device_config"] = {"wasm": {"dtype": "int8"}}
    if external:
        loaded["use_external_data_format"] = dict.fromkeys(external, True)
    return {**fields, "transformers.js_config": loaded}


def adapt_tokenizer(directory: Path, has_types: bool, is_decoder: bool) -> None:
    """Change tokenizer_config.json in `directory`, if there is one, so that Transformers.js returns
    the ids and the token types of transformers.

    With `has_types`, a generic or missing tokenizer class becomes one that has token types.
    transformers decides by other fields of the file. For a decoder, `add_bos_token` is set if
    tokenizer.json puts a token before each text and none after it: prompts would lack it.
    """
    path = directory / TOKENIZER_CONFIG
    if not path.is_file():
        return
    config = read_object(path)
    changes: dict[str, Any] = {}
    if has_types and config.get("tokenizer_class", UNTYPED_TOKENIZERS[0]) in UNTYPED_TOKENIZERS:
        changes["tokenizer_class"] = TYPED_TOKENIZER
    template = single_template(read_object(directory / TOKENIZERS[0]))
    if is_decoder and "SpecialToken" in template[0] and "SpecialToken" not in template[-1]:
        changes["add_bos_token"] = True
    if changes:
        write_json(path, config | changes)


def single_template(tokenizer: dict) -> list[dict]:
    """Return the parts that a tokenizer makes of one text: dicts with the key "Sequence" for the
    text, "SpecialToken" for others.

    `tokenizer` is the content of tokenizer.json.
    """
    processor = tokenizer.get("post_processor") or {}
    parts = processor.get("processors", [processor])
    return next(
        (part["single"] for part in parts if part.get("type") == "TemplateProcessing"),
        [{"Sequence": {}}],
    )


# -------------------------------------------------------------------------------- onnxruntime-genai


def write_genai_config(directory: Path, config: dict, generation: dict, file: str) -> dict:
    """Write genai_config.json for onnxruntime-genai to `directory`, and return the entry for the
    manifest.

    `file` is the portable graph of a decoder-only model. `config` and `generation` are its
    config.json and generation_config.json. The entry has the keys config and tokenizer, True if
    genai supports them, and `because` if not. If `head_dim` and `value_head_dim` differ, no file is
    written.

    If genai would tokenize differently, `tokenizer_dir` in the file is a folder that does not
    exist. Loading the tokenizer then fails, instead of returning wrong ids.
    """
    width = config["head_dim"]
    if width != config["value_head_dim"]:
        two_widths = (
            f"head_dim is {width} and value_head_dim {config['value_head_dim']}, "
            "onnxruntime-genai needs equal widths"
        )
        return {"config": False, "tokenizer": False, "because": two_widths}
    because = unread_by_genai(read_object(directory / "tokenizer.json"))
    tokens = {name: generation.get(name) for name in ("bos_token_id", "eos_token_id")}
    pads = [*as_list(generation.get("pad_token_id")), *as_list(tokens["eos_token_id"]), None]
    length = config["max_position_embeddings"]
    decoder = {
        "filename": file,
        "hidden_size": config["hidden_size"],
        "head_size": width,
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": key_heads(config),
        "num_hidden_layers": config["num_hidden_layers"],
        "inputs": {
            **{name: name for name in ("input_ids", "attention_mask", "position_ids")},
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    model = {
        "type": "decoder",
        "vocab_size": config["vocab_size"],
        "context_length": length,
        **tokens,
        "pad_token_id": pads[0],
        "tokenizer_dir": NO_TOKENIZER if because else None,
        "decoder": decoder,
    }
    search = {"max_length": length, "past_present_share_buffer": False}
    search |= {name: generation.get(name) for name in SAMPLING}
    content = {"model": without_none(model), "search": without_none(search)}
    write_json(directory / GENAI_CONFIG, content)
    return without_none({"config": True, "tokenizer": because is None, "because": because})


def unread_by_genai(tokenizer: dict) -> str | None:
    """Return why onnxruntime-genai does not read the content `tokenizer` of tokenizer.json, or None
    if it does.

    It reads byte-level BPE; it reads some other kinds with different ids. `tokenizer` is empty if
    there is no file.
    """
    if not tokenizer:
        return "the checkpoint has no tokenizer.json"
    parts = {
        name: (tokenizer.get(name) or {}).get("type")
        for name in ("model", "normalizer", "pre_tokenizer", "decoder")
    }
    expected = {
        "model": "BPE",
        "normalizer": None,
        "pre_tokenizer": "ByteLevel",
        "decoder": "ByteLevel",
    }
    if parts != expected or tokenizer["pre_tokenizer"].get("add_prefix_space"):
        types = " and ".join(f"{name} {parts[name]}" for name in ("model", "pre_tokenizer"))
        return f"genai supports byte-level BPE without a normalizer, this tokenizer has {types}"
    if "SpecialToken" in single_template(tokenizer)[0]:
        return "genai adds no special tokens, this tokenizer puts one in front of each text"
    return None


# --------------------------------------------------------------------------------------------- card


def base_name(checkpoint: str | os.PathLike) -> str | None:
    """Return the name of the base model for a model card, or None if a repository cannot have that
    name.

    It is `checkpoint` if that is a Hub id, else the name of that directory.
    """
    name = Path(checkpoint).resolve().name if Path(checkpoint).is_dir() else os.fspath(checkpoint)
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def write_card(directory: Path, checkpoint: Checkpoint, graphs: Graphs) -> None:
    """Write README.md, the card of an export of `checkpoint`, to `directory`.

    License, language and datasets are those of the checkpoint's card, if there is one.
    """
    base, of_base = base_name(checkpoint.source), card_metadata(checkpoint.card)
    is_standard, dtypes = graphs.target.is_standard, graphs.dtypes
    task = HEADS[checkpoint.architecture].hub_task
    if task == "text2text-generation" and of_base.get("pipeline_tag") in (
        "translation",
        "summarization",
    ):
        task = of_base["pipeline_tag"]
    name = base or "a checkpoint"
    lines = [
        f"# {name} in ONNX",
        "",
        f"Graphs of {name} ({checkpoint.architecture}),",
        f"written by `vanilla-transformer export` for the target {graphs.target.name} in "
        f"{' and '.join(dtypes)}. manifest.json says",
        "with which versions, and how much they differ from the checkpoint.",
    ]
    # what makes them of texts and images
    inputs = (directory / name for name in ("tokenizer.json", IMAGE_PROCESSOR))
    if is_standard and task and any(file.is_file() for file in inputs):
        call = CALLS.get(task, "pipe('A text.')")
        lines += ["", "```js", SNIPPET.format(task=task, call=call), "```"]
    write_lines(
        directory,
        lines,
        of_base,
        base_model=base,
        base_model_relation="quantized" if {"int8", "int4"} & {*dtypes} else None,
        library_name="transformers.js" if is_standard else "onnxruntime",
        pipeline_tag=of_base.get("pipeline_tag", task),
    )


def write_generator_card(
    directory: Path, checkpoint: Checkpoint, graphs: Graphs, mode: str
) -> None:
    """Write README.md, the card of one graph that generates by `mode`, to `directory`.

    It names no library but onnxruntime: no other has a class for the graph. `graphs` are those that
    it is made from.
    """
    base, of_base = base_name(checkpoint.source), card_metadata(checkpoint.card)
    lines = [
        f"# {base or 'a checkpoint'} in one ONNX graph",
        "",
        f"This graph takes token ids and returns sequences, by {mode} search, for the target "
        f"{graphs.target.name} in {' and '.join(graphs.dtypes)}.",
        f"`vanilla-transformer export --generate {mode}` wrote it. manifest.json has the versions.",
    ]
    tag = of_base.get("pipeline_tag", "text2text-generation")
    write_lines(
        directory, lines, of_base, base_model=base, library_name="onnxruntime", pipeline_tag=tag
    )


def write_lines(directory: Path, lines: list[str], of_base: dict[str, Any], **fields: Any) -> None:
    """Write the `lines` of a card to README.md in `directory`, after its metadata in YAML.

    These are `fields` that are not None, and those of `of_base`, the metadata of the checkpoint's
    card, that hold for exports.
    """
    known = without_none({name: of_base.get(name) for name in OF_THE_BASE} | fields)
    known["tags"] = ["onnx", "vanilla-transformer"]
    text = "\n".join(["---", yaml_dump(known).rstrip(), "---", "", *lines])
    (directory / CARD).write_text(f"{text}\n", encoding="utf-8")


SNIPPET = """import {{ pipeline }} from '@huggingface/transformers';

const pipe = await pipeline('{task}', 'NAME'); // the Hub id of this repository
console.log(await {call});"""
