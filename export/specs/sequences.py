"""Graphs that read whole sequences, for all targets, and what each head returns of them.

| model | takes | returns |
|---|---|---|
| encoder | tokens, and their types if the model has types | what its head returns |
| vision | images, of one size or of any | what its head returns |
| decoder without a language model | tokens, padded on either side | as an encoder |
| seq2seq without a head | tokens, and the decoder's tokens | both `last_hidden_state`s |
| seq2seq with a head that reads the source twice | tokens | what its head returns |

All are `onnx/model.onnx`. A new head is one line of `OUTPUTS`, and its graph, see
`graphs.sequences`.
"""

from collections.abc import Callable

from .graph_spec import GraphSpec, TensorSpec

FILE = "onnx/model.onnx"
ENCODER_FILE = "onnx/encoder_model.onnx"
DECODER_FILE = "onnx/decoder_model_merged.onnx"
FLAGS = (0, 1)


def per_token(name: str, *size: int, length: str = "source_length") -> TensorSpec:
    return TensorSpec(name, "float32", ("batch_size", length, *size))


def per_sequence(name: str, size: int | str) -> TensorSpec:
    return TensorSpec(name, "float32", ("batch_size", size))


def hidden_states(config: dict) -> tuple[TensorSpec, ...]:
    pooled = (
        (per_sequence("pooler_output", config["hidden_size"]),) if config.get("pooler_act") else ()
    )
    return per_token("last_hidden_state", config["hidden_size"]), *pooled


def image_states(config: dict) -> tuple[TensorSpec, ...]:
    states, *pooled = hidden_states(config)
    length = (
        sum(first_tokens_and_patches(config)) if not reads_any_size(config) else "sequence_length"
    )
    return TensorSpec(
        states.name, states.dtype, ("batch_size", length, config["hidden_size"])
    ), *pooled


def decoder_size(config: dict) -> int:
    """Return the width of a decoder's states: that of its embeddings."""
    return config.get("embedding_size") or config["hidden_size"]


def decoder_states(config: dict) -> tuple[TensorSpec, ...]:
    return (per_token("last_hidden_state", decoder_size(config)),)


def both_states(config: dict) -> tuple[TensorSpec, ...]:
    states = per_token("last_hidden_state", decoder_size(config), length="target_length")
    return states, per_token("encoder_last_hidden_state", config["hidden_size"])


def vocabulary_logits(config: dict) -> tuple[TensorSpec, ...]:
    return (per_token("logits", config["vocab_size"]),)


def pretraining_logits(config: dict) -> tuple[TensorSpec, ...]:
    return per_token("prediction_logits", config["vocab_size"]), per_sequence(
        "seq_relationship_logits", 2
    )


def next_sentence_logits(config: dict) -> tuple[TensorSpec, ...]:
    return (per_sequence("logits", 2),)


def sequence_labels(config: dict) -> tuple[TensorSpec, ...]:
    return (per_sequence("logits", len(config["id2label"])),)


def token_labels(config: dict) -> tuple[TensorSpec, ...]:
    return (per_token("logits", len(config["id2label"])),)


def answers(config: dict) -> tuple[TensorSpec, ...]:
    return per_token("start_logits"), per_token("end_logits")


def choices(config: dict) -> tuple[TensorSpec, ...]:
    return (per_sequence("logits", "num_choices"),)


# Each architecture that reads whole sequences -> what it returns, given the config.
OUTPUTS: dict[str, Callable[[dict], tuple[TensorSpec, ...]]] = {
    "VanillaEncoderModel": hidden_states,
    "VanillaEncoderForMaskedLM": vocabulary_logits,
    "VanillaEncoderForPreTraining": pretraining_logits,
    "VanillaEncoderForNextSentencePrediction": next_sentence_logits,
    "VanillaEncoderForSequenceClassification": sequence_labels,
    "VanillaEncoderForTokenClassification": token_labels,
    "VanillaEncoderForQuestionAnswering": answers,
    "VanillaEncoderForMultipleChoice": choices,
    "VanillaDecoderModel": decoder_states,
    "VanillaDecoderForSequenceClassification": sequence_labels,
    "VanillaDecoderForTokenClassification": token_labels,
    "VanillaDecoderForQuestionAnswering": answers,
    "VanillaSeq2SeqModel": both_states,
    "VanillaSeq2SeqForSequenceClassification": sequence_labels,
    "VanillaSeq2SeqForQuestionAnswering": answers,
    "VanillaVisionModel": image_states,
    "VanillaVisionForImageClassification": sequence_labels,
}
GENERATORS = ("VanillaDecoderForCausalLM", "VanillaSeq2SeqForConditionalGeneration")
EXPORTABLE = (*OUTPUTS, *GENERATORS)
READS_CHOICES = "VanillaEncoderForMultipleChoice"  # several sequences for each
READS_TARGETS = "VanillaSeq2SeqModel"  # the decoder's tokens too
READS_IMAGES = ("VanillaVisionModel", "VanillaVisionForImageClassification")
IMAGE_SIZES = ("trained", "free")  # that graphs read
# the state at an end token, so every row must have one
READS_AT_END = "VanillaSeq2SeqForSequenceClassification"


def sequence_specs(config: dict, architecture: str) -> dict[str, GraphSpec] | None:
    """The one graph, in the role of an encoder; `None` for an `architecture` that generates.

    Args:
        config: the checkpoint's config.json.
    """
    if architecture not in OUTPUTS:
        return None
    outputs = OUTPUTS[architecture](config)
    if architecture in READS_IMAGES:
        return {"encoder": GraphSpec(FILE, image_inputs(config), outputs, example_image(config))}
    return {"encoder": GraphSpec(FILE, sequence_inputs(config, architecture), outputs)}


# ------------------------------------------------------------------------------------------- images


def pair(size: int | list[int]) -> tuple[int, ...]:
    """Height and width; one number is both."""
    return (size, size) if isinstance(size, int) else tuple(size)


def reads_any_size(config: dict) -> bool:
    """Whether the graph interpolates positions; else it reads images of the size of its model's
    training."""
    return bool(config.get("interpolate_pos_encoding"))


def first_tokens_and_patches(config: dict) -> tuple[int, int]:
    """The numbers of both in an image of the size of training."""
    rows, columns = (
        side // patch for side, patch in zip(pair(config["image_size"]), pair(config["patch_size"]))
    )
    return config["num_first_tokens"], rows * columns


def image_inputs(config: dict) -> tuple[TensorSpec, ...]:
    size = ("height", "width") if reads_any_size(config) else pair(config["image_size"])
    return (TensorSpec("pixel_values", "float32", ("batch_size", config["num_channels"], *size)),)


def example_image(config: dict) -> dict[str, int]:
    """Of 4 x 5 patches, and some pixels beyond."""
    height, width = pair(config["patch_size"])
    return {"height": 4 * height + height // 2, "width": 5 * width + width // 2}


# ---------------------------------------------------------------------------------------- sequences


def sequence_inputs(config: dict, architecture: str) -> tuple[TensorSpec, ...]:
    """Tokens (B, S), with several choices of them (B, C, S), and where a decoder reads others,
    these (B, T)."""
    shape = (
        ("batch_size", "num_choices", "source_length")
        if architecture == READS_CHOICES
        else ("batch_size", "source_length")
    )
    tensors = token_inputs(config, shape)
    if types := config.get("type_vocab_size"):
        tensors += (TensorSpec("token_type_ids", "int64", shape, (0, types - 1), default=0),)
    if architecture == READS_TARGETS:
        tensors += token_inputs(config, ("batch_size", "target_length"), prefix="decoder_")
    return tensors


def token_inputs(config: dict, shape: tuple[str, ...], prefix: str = "") -> tuple[TensorSpec, ...]:
    return (
        TensorSpec(f"{prefix}input_ids", "int64", shape, (0, config["vocab_size"] - 1)),
        TensorSpec(f"{prefix}attention_mask", "int64", shape, FLAGS, default=1),
    )


def source_encoder_spec(config: dict, outputs: tuple[TensorSpec, ...]) -> GraphSpec:
    """The encoder of a seq2seq model that generates, which returns what its decoder takes."""
    return GraphSpec(ENCODER_FILE, token_inputs(config, ("batch_size", "source_length")), outputs)
