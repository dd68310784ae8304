"""Settings in generation_config.json that have no effect in its generation mode."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .checkpoint_files import (
    GENERATION_CONFIG,
    OPTIONAL_TOKENS,
    check_generation,
    is_absent_token,
    read_json,
)
from .generation_options import BEAMS, SAMPLING, SAMPLING_ONLY, defaults_of_mode

if TYPE_CHECKING:
    from transformers import GenerationConfig

# By mode: the values that have no effect anyway, of the settings that only this mode uses.
OF_SAMPLING = defaults_of_mode(SAMPLING) | SAMPLING_ONLY
OF_BEAMS = defaults_of_mode(BEAMS) | {"num_beam_groups": 1, "diversity_penalty": 0}
OUTPUTS = dict.fromkeys(
    ("output_attentions", "output_hidden_states", "output_scores", "output_logits"), False
)
CACHE = dict.fromkeys(("cache_implementation", "cache_config"))
# that select a mode
SELECTORS = dict.fromkeys(("do_sample", "num_beams", "return_dict_in_generate", "use_cache"))
# the max_length that conversion added to a generation_config.json without a length
DEFAULT_LENGTH = "_default_max_length"
OF_CONFIGS = (*OPTIONAL_TOKENS, "decoder_start_token_id", "use_cache")  # also fields of a config


def read_generation_settings(
    directory: Path, config: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings in generation_config.json in `directory`, and a note for each setting
    that has no effect.

    Those without effect and those that are None are left out. Without the file, token ids and
    `use_cache` come from `config`, the content of config.json. torch is not needed.

    Raises:
        ValueError: for settings of a wrong type, and tokens outside the vocabulary.
    """
    path = directory / GENERATION_CONFIG
    check_generation(path, config["vocab_size"])
    others = {name: config.get(name) for name in OF_CONFIGS}
    settings = SimpleNamespace(**SELECTORS | (read_json(path) if path.is_file() else others))
    notes = drop_unused_settings(settings)
    return {name: value for name, value in vars(settings).items() if value is not None}, notes


def forget_default_length(settings: dict[str, Any]) -> None:
    """Remove the `max_length` from `settings` if conversion added it, as it was not in the source.

    `settings` are those of a generation_config.json. They are changed in place.
    """
    default = settings.pop(DEFAULT_LENGTH, None)
    if default is not None and settings.get("max_length") == default:
        settings["max_length"] = None


def drop_unused_settings(generation: "GenerationConfig | SimpleNamespace") -> list[str]:
    """Set the settings of `generation` that have no effect to None. Return a note for each of
    them."""
    unused = list(unused_settings(generation))
    notes = [
        f"generation_config: {name}={getattr(generation, name)!r} is left out, {reason}"
        for name, reason in unused
    ]
    for name, _ in unused:
        setattr(generation, name, None)
    return notes


def unused_settings(generation: "GenerationConfig | SimpleNamespace") -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of each setting of `generation` that has no effect."""
    for neutral, is_used, reason in modes(generation):
        for name, value in {} if is_used else neutral.items():
            if getattr(generation, name, None) not in (None, value):
                yield name, reason
    for name in OPTIONAL_TOKENS:
        if is_absent_token(name, getattr(generation, name, None)):
            yield name, "which is not a token"


def modes(generation: "GenerationConfig | SimpleNamespace") -> list[tuple[dict, bool, str]]:
    """Return (settings, is_used, reason) of each mode of generation.

    `settings` maps the settings of the mode to the values that have no effect. `is_used` is True if
    `generation` uses the mode. `reason` says why the settings have no effect if not.
    """
    return [
        (OF_SAMPLING, generation.do_sample is True, "which has no effect without do_sample"),
        (OF_BEAMS, (generation.num_beams or 1) > 1, "which has no effect without beams"),
        (
            OUTPUTS,
            generation.return_dict_in_generate is True,
            "which has no effect without return_dict_in_generate",
        ),
        (CACHE, generation.use_cache is not False, "which has no effect without use_cache"),
    ]
