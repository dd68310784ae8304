"""Specs of caches: the keys and values that a decoder graph reads, `past_key_values`, and returns,
`present`."""

from .graph_spec import GraphSpec, TensorSpec
from .sequences import DECODER_FILE, FILE, source_encoder_spec

NAMES = ("past_key_values", "present")
SOURCE_MASK = TensorSpec("encoder_attention_mask", "int64", ("batch_size", "source_length"))


def cache_specs(
    config: dict, name: str, rows: str, lengths: dict[str, str], dtype: str = "float32"
) -> tuple[TensorSpec, ...]:
    """Return the specs of the keys and values of each layer: key, then value of each attention.

    `config` is the checkpoint's config.json. Shapes are (rows, key heads, positions, width).

    Args:
        name: beginning of the names of all tensors, such as "present".
        rows: name of the first axis.
        lengths: {attention: name of its axis of positions}, with the attentions `"decoder."` and
            `"encoder."`, or `""` if a layer has only one.
    """
    depth = config[
        "num_hidden_layers" if config["model_type"] == "vanilla-decoder" else "decoder_layers"
    ]
    widths = {"key": config["head_dim"], "value": config["value_head_dim"]}
    return tuple(
        TensorSpec(
            f"{name}.{layer}.{attention}{part}",
            dtype,
            (rows, key_heads(config), length, width),
        )
        for layer in range(depth)
        for attention, length in lengths.items()
        for part, width in widths.items()
    )


def cache_tensors(spec: GraphSpec, is_source: bool = False) -> list[TensorSpec]:
    """Return the inputs of the decoder graph `spec` that are caches: of its own tokens, or of those
    of the source."""
    caches = [tensor for tensor in spec.inputs if tensor.name.startswith("past_key_values")]
    return [tensor for tensor in caches if (".encoder." in tensor.name) == is_source]


def key_heads(config: dict) -> int:
    """Return the number of heads of keys and values: `num_key_value_heads`, by default all."""
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def fixed_cache_specs(
    config: dict,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    axes: tuple[str, str],
    dtype: str = "float32",
) -> dict[str, GraphSpec]:
    """Return {role: spec} of the graphs of a model whose caches have a fixed size and are written
    in place.

    `past_key_values` and `present` are one buffer. The encoder of a seq2seq model returns the keys
    and values of cross-attention, which its decoder takes as they are.

    Args:
        inputs, outputs: those of the decoder besides caches and the mask of the source.
        axes: names of the axes of rows and of positions of a cache.
        dtype: that of caches. Logits and hidden states are always float32.
    """
    rows, length = axes
    is_decoder = config["model_type"] == "vanilla-decoder"
    lengths = {"" if is_decoder else "decoder.": length}
    past, present = (cache_specs(config, name, rows, lengths, dtype) for name in NAMES)
    if is_decoder:
        return {"decoder": GraphSpec(FILE, (*inputs, *past), (*outputs, *present))}
    source = {"encoder.": "source_length"}
    cross, computed = (cache_specs(config, name, "batch_size", source, dtype) for name in NAMES)
    return {
        "encoder": source_encoder_spec(config, computed),
        "decoder": GraphSpec(
            DECODER_FILE, (*inputs, SOURCE_MASK, *past, *cross), (*outputs, *present)
        ),
    }
