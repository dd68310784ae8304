"""The config of a checkpoint, checked before anything is built from it. Without torch and
transformers."""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from . import HAS_TORCH
from .checkpoint_files import read_json, readers_errors, shorten
from .files import CONFIG
from .standins import standins

if HAS_TORCH:
    from .configuration_vanilla_transformer import CONFIGS
else:
    with standins():
        from .configuration_vanilla_transformer import CONFIGS

FLAGS = [False, True, None]
MAX_LABELS = 2**17
ADAPTER_CONFIG = "adapter_config.json"  # of PEFT


def build_known_config(content: dict, name: str, directory: Path) -> Any:
    """Return the config of a Vanilla Transformer checkpoint, from the `content` of the config.json
    in `directory` and the `name` of its model class.

    Raises ValueError for a wrong value, and for another family or class.
    """
    if content["model_type"] is None:
        raise ValueError(f"{directory / CONFIG} has the model_type None, expected a name")
    model_type = content["model_type"]
    if model_type not in CONFIGS:
        known = [
            name
            for config_class in CONFIGS.values()
            for name in config_class.auto_classes().values()
        ]
        problem = f"{directory} has model_type {model_type} and architecture {name}"
        raise ValueError(f"{problem}, expected one of {', '.join(known)}: convert it first")
    config_class = CONFIGS[model_type]
    known = config_class.auto_classes().values()
    if name not in known:
        raise ValueError(
            f"{directory} has model_type {model_type} and architecture {name}, expected one of "
            f"{', '.join(known)}"
        )
    for flag, allowed in {
        "return_dict": [True],
        "output_hidden_states": FLAGS,
        "output_attentions": FLAGS,
    }.items():
        if not any(content.get(flag, allowed[0]) is value for value in allowed):
            raise ValueError(
                f"{directory / CONFIG} has {flag} {shorten(content[flag])}, expected {allowed[0]}"
            )
    config = build_config(config_class, content, directory)
    # a file may name other code; our models are saved with ours
    config.auto_map = dict(config.default_auto_map)
    return config


def read_raw_config(directory: Path) -> tuple[dict, str]:
    """Return the content of config.json in `directory`, and the first name in its `architectures`,
    or "none".

    The content always has `model_type`. A missing one, as in files of 2019, is that of the
    architecture, or None. Raises FileNotFoundError without config.json, and ValueError for a
    damaged one.
    """
    path = directory / CONFIG
    if not path.is_file():
        expected = "expected a checkpoint directory"
        if (directory / ADAPTER_CONFIG).is_file():
            expected = (
                "it is an adapter of PEFT, expected a whole checkpoint: save "
                "AutoPeftModel.from_pretrained(...).merge_and_unload() with its tokenizer"
            )
        elif any(directory.glob("*.npz")):
            expected = (
                "it is a model of Marian itself, expected a checkpoint of transformers, such as "
                "those of Helsinki-NLP: convert it with convert_marian_to_pytorch of transformers 4"
            )
        raise FileNotFoundError(f"{directory} has no config.json: {expected}")
    content = read_json(path)
    model_type = content.get("model_type")
    if not isinstance(model_type, str | None):
        raise ValueError(f"{path} has the model_type {shorten(model_type)}, expected a name")
    names = content.get("architectures") or ["none"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ValueError(f"{path} has the architectures {shorten(names)}, expected a list of names")
    return content | {"model_type": model_type or class_model_type(names[0])}, names[0]


def class_model_type(architecture: str) -> str | None:
    """Return the model_type of the family that the class `architecture` belongs to, such as "bert".

    It is None for an unknown class, and always where transformers is not installed.
    """
    if not HAS_TORCH:
        return None
    from .class_names import find_model_type

    return find_model_type(architecture)


def build_config(config_class: type, content: dict, directory: Path) -> Any:
    """Return a `config_class` with the fields of `content`, that of the config.json in `directory`.

    Fields that the class lacks are kept, except those that select implementations for a machine.
    Raises ValueError for a wrong value, a nested config, quantized weights, and a name that would
    replace a method.
    """
    path = directory / CONFIG
    if parts := sorted(content.keys() & {"decoder", "generator", "text_config", "text_encoder"}):
        raise ValueError(
            f"{path} has the nested configs {', '.join(parts)}, expected the config of a "
            "single model"
        )
    settable = {
        "model_type",
        "is_decoder",
        "add_cross_attention",
        *(field.name for field in fields(config_class)),
        *config_class.attribute_map,
    }
    for name in content:
        attribute = inspect.getattr_static(config_class, name, None)
        if attribute is not None and name not in settable and not isinstance(attribute, property):
            raise ValueError(
                f"{path} has the key {name}, an attribute of the config class: expected only fields"
            )
    labels = content.get("num_labels")
    if labels is not None and (type(labels) is not int or not 0 <= labels <= MAX_LABELS):
        raise ValueError(f"{path} has num_labels {shorten(labels)}, expected at most {MAX_LABELS}")
    for name in ("id2label", "label2id"):
        if not isinstance(content.get(name) or {}, dict):
            raise ValueError(f"{path} has {name} {shorten(content[name])}, expected a JSON object")
        if (count := len(content.get(name) or {})) > MAX_LABELS:
            raise ValueError(f"{path} has {count} labels in {name}, expected at most {MAX_LABELS}")
    attention = content.get("_attn_implementation")
    if not isinstance(attention, str | None):
        raise ValueError(f"{path} has _attn_implementation {shorten(attention)}, expected a name")
    if "quantization_config" in content:
        raise ValueError(f"{path} has a quantization_config, expected weights in floating point")
    # these describe the machine that wrote the file, which is another one
    of_machine = ("attn_implementation", "experts_implementation")
    with readers_errors(path):
        config = config_class.from_dict(
            {name: value for name, value in content.items() if name not in of_machine}
        )
    # Of others' pairs of stacks a half may be alone, as `BartForCausalLM` or `T5EncoderModel`:
    # their converters look.
    is_half = config_class not in CONFIGS.values() and not config.is_encoder_decoder
    if config.is_encoder_decoder != config_class.is_encoder_decoder and not is_half:
        raise ValueError(
            f"{path} has is_encoder_decoder {config.is_encoder_decoder}, expected "
            f"{not config.is_encoder_decoder}"
        )
    return config


def check_depth(config: Any, shapes: dict[str, tuple], where: Path | str) -> None:
    """Raise ValueError if `config` has more layers than the tensors of the files, or a width above
    their largest size.

    It runs before anything is built or counted, because a config can name any depth and width.
    `shapes` is {name: (shape, dtype)}. Errors call the checkpoint `where`.
    """
    layers = len(
        {number for name in shapes for number in re.findall(r"(?<=\.)\d+(?=\.)", f".{name}")}
    )
    widest = max((size for shape, _ in shapes.values() for size in shape), default=0)
    for field, maximum in {
        "encoder_layers": layers,
        "decoder_layers": layers,
        "num_hidden_layers": layers,
        "hidden_size": widest,
    }.items():
        value = getattr(config, field, 0)
        if value > maximum:
            raise ValueError(
                f"{field} is {value} in the config of {where}, expected at most {maximum} by its "
                f"tensors"
            )
