"""Specs of full-sequence graphs, for all targets.

| model | takes | returns |
|---|---|---|
| encoder | tokens, and their types if the model has types | what its head returns |
| vision | images, of one size or of any | what its head returns |
| decoder without a language model | tokens, padded on either side | as an encoder |
| seq2seq without a head | tokens, and the decoder's tokens | both `last_hidden_state`s |
| seq2seq with a head that reads the source twice | tokens | what its head returns |

All are `onnx/model.onnx`. What a head returns is in `heads.HEADS`.
"""

from collections.abc import Callable

from ..heads import HEADS, READS_CHOICES, READS_IMAGES, READS_TARGETS, Head
from .graph_spec import GraphSpec, TensorSpec

FILE = "onnx/model.onnx"
ENCODER_FILE = "onnx/encoder_model.onnx"
DECODER_FILE = "onnx/decoder_model_merged.onnx"
FLAGS = (0, 1)


def image_length(config: dict) -> int | str:
    """Return the number of states of an image: first tokens and patches.

    If images of any size are read, it is the name of an axis, "sequence_length".
    """
    if reads_any_size(config):
        return "sequence_length"
    (height, width), (rows, columns) = pair(config["image_size"]), pair(config["patch_size"])
    return config["num_first_tokens"] + (height // rows) * (width // columns)


# Sizes that depend on the config, by their names in `heads.Output.axes`.
SIZES: dict[str, Callable[[dict], int | str]] = {
    "hidden_size": lambda config: config["hidden_size"],
    "vocab_size": lambda config: config["vocab_size"],
    "num_labels": lambda config: len(config["id2label"]),
    # a decoder's states have the width of its embeddings
    "decoder_size": lambda config: config.get("embedding_size") or config["hidden_size"],
    "image_length": image_length,
}
IMAGE_SIZES = ("trained", "free")  # that graphs read


def axis_size(axis: int | str, config: dict) -> int | str:
    return SIZES[axis](config) if isinstance(axis, str) and axis in SIZES else axis


def head_outputs(config: dict, head: Head) -> tuple[TensorSpec, ...]:
    """Return the specs of the outputs of a full-sequence graph with `head`, without outputs that
    `config` does not have."""
    return tuple(
        TensorSpec(
            output.name,
            "float32",
            ("batch_size", *(axis_size(axis, config) for axis in output.axes)),
        )
        for output in head.outputs
        if output.needs is None or config.get(output.needs)
    )


def sequence_specs(config: dict, architecture: str) -> dict[str, GraphSpec] | None:
    """Return {"encoder": spec} of the full-sequence graph, or None if the class `architecture`
    generates.

    `config` is the checkpoint's config.json, and `architecture` a key of `HEADS`.
    """
    head = HEADS[architecture]
    if head.generates:
        return None
    outputs = head_outputs(config, head)
    if head.reads == READS_IMAGES:
        return {"encoder": image_spec(config, outputs)}
    return {"encoder": GraphSpec(FILE, sequence_inputs(config, head), outputs)}


# ------------------------------------------------------------------------------------------- images


def pair(size: int | list[int]) -> tuple[int, ...]:
    """Return (height, width) of `size`. A single number is both."""
    return (size, size) if isinstance(size, int) else tuple(size)


def reads_any_size(config: dict) -> bool:
    """Return True if the graph interpolates positions and reads images of any size. Otherwise
    images must have the config's `image_size`."""
    return bool(config.get("interpolate_pos_encoding"))


def image_spec(config: dict, outputs: tuple[TensorSpec, ...]) -> GraphSpec:
    """Return the spec of a graph that reads images and has the `outputs`.

    The example for `serve` has 4 x 5 patches, and some pixels beyond.
    """
    size = ("height", "width") if reads_any_size(config) else pair(config["image_size"])
    pixels = TensorSpec("pixel_values", "float32", ("batch_size", config["num_channels"], *size))
    height, width = pair(config["patch_size"])
    example = {"height": 4 * height + height // 2, "width": 5 * width + width // 2}
    return GraphSpec(FILE, (pixels,), outputs, example)


# ---------------------------------------------------------------------------------------- sequences


def sequence_inputs(config: dict, head: Head) -> tuple[TensorSpec, ...]:
    """Return the specs of input_ids, attention_mask and, if the model has types, token_type_ids.

    They are (B, S), or (B, C, S) for several choices. If the decoder reads tokens of its own,
    decoder_input_ids and decoder_attention_mask (B, T) follow. `head` says what the model reads.
    """
    shape = (
        ("batch_size", "num_choices", "source_length")
        if head.reads == READS_CHOICES
        else ("batch_size", "source_length")
    )
    tensors = token_inputs(config, shape)
    if types := config.get("type_vocab_size"):
        tensors += (TensorSpec("token_type_ids", "int64", shape, (0, types - 1), default=0),)
    if head.reads == READS_TARGETS:
        tensors += token_inputs(config, ("batch_size", "target_length"), prefix="decoder_")
    return tensors


def token_inputs(config: dict, shape: tuple[str, ...], prefix: str = "") -> tuple[TensorSpec, ...]:
    return (
        TensorSpec(f"{prefix}input_ids", "int64", shape, (0, config["vocab_size"] - 1)),
        TensorSpec(f"{prefix}attention_mask", "int64", shape, FLAGS, default=1),
    )


def source_encoder_spec(config: dict, outputs: tuple[TensorSpec, ...]) -> GraphSpec:
    """Return the spec of the encoder of a seq2seq model that generates. `outputs` are those of the
    graph: its states, or the keys and values that the decoder reads."""
    return GraphSpec(ENCODER_FILE, token_inputs(config, ("batch_size", "source_length")), outputs)
