"""Checks of types and ranges in an export's config.json."""

import reprlib
from pathlib import Path

from ..shared.generation_options import KINDS
from ..shared.options import COUNT, COUNT_OR_0, Kind, is_int64

MAX_LAYERS = 10_000  # more than any model has, and a bound for the number of tensor names
LAYERS = Kind(
    f"a whole number from 1 to {MAX_LAYERS}",
    lambda value: is_int64(value) and 1 <= value <= MAX_LAYERS,
)
VISION = "vanilla-vision"
ONE_STACK = ("vanilla-encoder", "vanilla-decoder", VISION)
LAYERS_OF = dict.fromkeys(ONE_STACK, "num_hidden_layers") | {"vanilla-seq2seq": "decoder_layers"}
REQUIRED = {
    **dict.fromkeys(("hidden_size", "num_attention_heads", "head_dim", "value_head_dim"), COUNT),
    "id2label": Kind("an object", lambda value: isinstance(value, dict)),
}
OF_TEXT = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), COUNT),
    "position_embedding_type": Kind("a string", lambda value: isinstance(value, str)),
}
PIXELS = Kind(
    "a number of pixels, or a list of two",
    lambda value: (
        COUNT.holds(value)
        or (isinstance(value, list) and len(value) == 2 and all(map(COUNT.holds, value)))
    ),
)
OF_IMAGES = {
    **dict.fromkeys(("num_channels", "num_first_tokens"), COUNT),
    **dict.fromkeys(("image_size", "patch_size"), PIXELS),
}
# Fields that may be missing or null.
OPTIONAL = {
    "type_vocab_size": COUNT_OR_0,
    "embedding_size": COUNT,
    "sliding_window": COUNT,
    "num_key_value_heads": COUNT,
    "layer_types": Kind("a list", lambda value: isinstance(value, list)),
    "position_ids_from": Kind(
        "'place', 'mask' or 'ids'", lambda value: value in ("place", "mask", "ids")
    ),
}
# added to embeddings, from a table of fixed size
LEARNED_POSITIONS = ("learned", "learned_relative")
RELATIVE_POSITIONS = ("relative", "learned_relative")  # added to self-attention scores
SPECIAL_TOKENS = ("eos_token_id", "pad_token_id", "decoder_start_token_id")


def cache_window(config: dict) -> int | None:
    """Return the number of last tokens that caches must keep, or None for all: the sliding window,
    if all layers have it."""
    has_full_layer = "full_attention" in (config.get("layer_types") or ())
    return None if has_full_layer else config.get("sliding_window")


def check_config(config: dict, path: Path) -> None:
    """Check the fields of `config`, the content of the file `path`. Its model type is that of the
    manifest.

    Raises:
        ValueError: for a field that is missing or has an invalid type or range, and for an unknown
            model type.
    """
    if config["model_type"] not in LAYERS_OF:
        raise ValueError(
            f"{path.parent} has a model of type {config['model_type']!r}, expected one of "
            f"{list(LAYERS_OF)}"
        )
    inputs = OF_IMAGES if config["model_type"] == VISION else OF_TEXT
    required = {**REQUIRED, **inputs, LAYERS_OF[config["model_type"]]: LAYERS}
    optional = {**OPTIONAL, **{name: KINDS[name] for name in SPECIAL_TOKENS}}
    for name, kind in {**required, **optional}.items():
        value = config.get(name)
        if not kind.holds(value) and not (value is None and name in optional):
            raise ValueError(
                f"{path} has {name} {reprlib.repr(value)}, expected {kind.expected}: export again"
            )
