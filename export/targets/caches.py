"""Specs of decoder graphs whose caches have a fixed size and are written in place: `past_key_values` and `present` are one
buffer. The encoder of a seq2seq model returns the keys and values of cross-attention, which its decoder takes as they are."""

from .sequences import DECODER_FILE, FILE, source_encoder_spec
from .spec import GraphSpec, TensorSpec


def fixed_cache_specs(
    config: dict,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    axes: tuple[str, str],
) -> dict[str, GraphSpec]:
    """The graphs of a model that generates, by role; `axes` are the rows and the positions of a cache."""
    if config["model_type"] == "vanilla-decoder":
        layers = config["num_hidden_layers"]
        past = states(config, layers, "past_key_values.{}.", *axes)
        present = states(config, layers, "present.{}.", *axes)
        return {"decoder": GraphSpec(FILE, (*inputs, *past), (*outputs, *present))}
    layers = config["decoder_layers"]
    mask = TensorSpec("encoder_attention_mask", "int64", ("batch_size", "source_length"))
    past = states(config, layers, "past_key_values.{}.decoder.", *axes)
    present = states(config, layers, "present.{}.decoder.", *axes)
    cross = states(config, layers, "past_key_values.{}.encoder.", "batch_size", "source_length")
    computed = states(config, layers, "present.{}.encoder.", "batch_size", "source_length")
    return {
        "encoder": source_encoder_spec(config, computed),
        "decoder": GraphSpec(DECODER_FILE, (*inputs, mask, *past, *cross), (*outputs, *present)),
    }


def states(config: dict, layers: int, prefix: str, rows: str, positions: str) -> tuple[TensorSpec, ...]:
    """Keys and values of each layer."""
    heads = config["num_attention_heads"]
    widths = {"key": config["head_dim"], "value": config["value_head_dim"]}
    return tuple(
        TensorSpec(f"{prefix.format(layer)}{part}", "float32", (rows, heads, positions, width))
        for layer in range(layers)
        for part, width in widths.items()
    )
