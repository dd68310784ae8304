"""The contract: what each portable graph takes and returns, under the names optimum and Transformers.js know.

| variant | file | takes | returns |
|---|---|---|---|
| encoder | onnx/model.onnx | tokens, and their types if the model has types | what its head returns, see `encoder_outputs` |
| decoder | onnx/model.onnx | the tokens that are not in the cache yet, and the cache | `logits`, the longer cache |
| seq2seq | onnx/encoder_model.onnx | tokens | `last_hidden_state` |
| | onnx/decoder_model_merged.onnx | as the decoder, and the encoder's output | as the decoder |

One decoder graph serves the first step (a cache of length 0) and every later one. A cache is a key (B, H, past, d_k) and
a value (B, H, past, d_v) per layer, `past_key_values.0.key` in and `present.0.key` out; a seq2seq decoder has the pairs
`past_key_values.0.decoder.key` and `past_key_values.0.encoder.key`. The encoder's pair grows once: the positions of
`encoder_hidden_states` behind `past_source_length` are projected and appended, so from the second step on none are.

The graphs of the cpu target are the same for encoders. Their decoders write caches of fixed size in place (`past_key_values`
and `present` are one buffer of `max_length` positions), return the logits of each row's last real token only, and read
`last_position` (each row's last real token, its place in the cache) and `total_length` (the longest row, new tokens included).
A seq2seq encoder returns the keys and values of cross-attention, `present.0.encoder.key`, which the decoder takes as they are:
its rows continue one batch entry each, or several (beams) in order.
"""

from dataclasses import dataclass, replace

import numpy as np

# Sizes of the example that is traced: all different, and above 1, because tracing takes 0, 1 and equal sizes for fixed.
EXAMPLE_SIZES = {
    "batch_size": 3,
    "source_length": 7,
    "target_length": 2,
    "past_length": 5,
    "past_source_length": 4,
    "past_length + target_length": 7,
    "rows": 6,
    "max_length": 11,
}
TARGETS = ("portable", "cpu")
PARTS = ("key", "value")


@dataclass(frozen=True)
class TensorSpec:
    """One input or output; a `str` in `shape` is an axis, shared by all tensors that name it."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]

    @property
    def axes(self) -> dict[int, str]:
        return {index: size for index, size in enumerate(self.shape) if isinstance(size, str)}


@dataclass(frozen=True)
class GraphSpec:
    """One ONNX file, relative to the export directory, with its inputs and outputs in order."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def graph_specs(config: dict, architecture: str, target: str = "portable") -> dict[str, GraphSpec]:
    """`config` is a checkpoint's config.json as a dict, `architecture` the name of its class.

    Returns the graphs by role: `{"encoder": ...}`, `{"decoder": ...}`, or both for seq2seq.
    """
    if target == "cpu" and config["model_type"] != "vanilla-encoder":
        return cpu_decoder_specs(config)
    variant = config["model_type"].removeprefix("vanilla-")
    if variant == "encoder":
        return {"encoder": encoder_spec("onnx/model.onnx", config, encoder_outputs(config)[architecture])}
    if variant == "decoder":
        inputs = (
            TensorSpec("input_ids", "int64", ("batch_size", "target_length")),
            TensorSpec("attention_mask", "int64", ("batch_size", "past_length + target_length")),
            TensorSpec("position_ids", "int64", ("batch_size", "target_length")),
        )
        return {"decoder": decoder_spec("onnx/model.onnx", inputs, config, config["num_hidden_layers"])}
    hidden = TensorSpec("encoder_hidden_states", "float32", ("batch_size", "source_length", config["hidden_size"]))
    inputs = (
        TensorSpec("input_ids", "int64", ("batch_size", "target_length")),
        TensorSpec("encoder_attention_mask", "int64", ("batch_size", "source_length")),
        hidden,
    )
    return {
        "encoder": encoder_spec("onnx/encoder_model.onnx", config, (replace(hidden, name="last_hidden_state"),)),
        "decoder": decoder_spec("onnx/decoder_model_merged.onnx", inputs, config, config["decoder_layers"]),
    }


def encoder_outputs(config: dict) -> dict[str, tuple[TensorSpec, ...]]:
    """What the graph of each encoder architecture returns: of each token (B, S, ...), or of the sequence (B, ...)."""
    width, vocabulary, labels = config["hidden_size"], config["vocab_size"], len(config["id2label"])

    def per_token(name, *size):
        return TensorSpec(name, "float32", ("batch_size", "source_length", *size))

    def per_sequence(name, size):
        return TensorSpec(name, "float32", ("batch_size", size))

    pooled = (per_sequence("pooler_output", width),) if config.get("pooler_act") else ()
    return {
        "VanillaEncoderModel": (per_token("last_hidden_state", width), *pooled),
        "VanillaEncoderForMaskedLM": (per_token("logits", vocabulary),),
        "VanillaEncoderForPreTraining": (
            per_token("prediction_logits", vocabulary),
            per_sequence("seq_relationship_logits", 2),
        ),
        "VanillaEncoderForNextSentencePrediction": (per_sequence("logits", 2),),
        "VanillaEncoderForSequenceClassification": (per_sequence("logits", labels),),
        "VanillaEncoderForTokenClassification": (per_token("logits", labels),),
        "VanillaEncoderForQuestionAnswering": (per_token("start_logits"), per_token("end_logits")),
    }


def encoder_spec(file, config, outputs):
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * bool(config.get("type_vocab_size"))
    return GraphSpec(file, tuple(TensorSpec(name, "int64", ("batch_size", "source_length")) for name in names), outputs)


def decoder_spec(file, inputs, config, layers):
    logits = TensorSpec("logits", "float32", ("batch_size", "target_length", config["vocab_size"]))
    past, present = [], []
    attentions = {"": ("past_length", "past_length + target_length")}
    if config["model_type"] == "vanilla-seq2seq":
        attentions = {"decoder.": attentions[""], "encoder.": ("past_source_length", "source_length")}
    for layer in range(layers):
        for attention, lengths in attentions.items():
            for part, width in (("key", config["head_dim"]), ("value", config["value_head_dim"])):
                for tensors, prefix, length in (
                    (past, "past_key_values", lengths[0]),
                    (present, "present", lengths[1]),
                ):
                    shape = ("batch_size", config["num_attention_heads"], length, width)
                    tensors.append(TensorSpec(f"{prefix}.{layer}.{attention}{part}", "float32", shape))
    return GraphSpec(file, (*inputs, *past), (logits, *present))


def cpu_decoder_specs(config):
    is_pair = config["model_type"] == "vanilla-seq2seq"
    length = 1 if is_pair else "target_length"  # what a seq2seq model starts from is one token
    inputs = [
        TensorSpec("input_ids", "int64", ("rows", length)),
        TensorSpec("position_ids", "int64", ("rows", length)),
        TensorSpec("last_position", "int32", ("rows",)),
        TensorSpec("total_length", "int32", (1,)),
    ]
    heads, width = config["num_attention_heads"], config["head_dim"]
    own, cross = ("rows", heads, "max_length", width), ("batch_size", heads, "source_length", width)
    attentions = {"decoder.": own, "encoder.": cross} if is_pair else {"": own}
    if is_pair:
        inputs.append(TensorSpec("encoder_attention_mask", "int64", ("batch_size", "source_length")))
    layers = range(config["decoder_layers"] if is_pair else config["num_hidden_layers"])

    def states(prefix, attention):
        return [
            TensorSpec(f"{prefix}.{i}.{attention}{part}", "float32", attentions[attention]) for i in layers for part in PARTS
        ]

    past = [tensor for attention in attentions for tensor in states("past_key_values", attention)]
    logits = TensorSpec("logits", "float32", ("rows", config["vocab_size"]))
    step = (*inputs, *past), (logits, *states("present", next(iter(attentions))))
    if not is_pair:
        return {"decoder": GraphSpec("onnx/model.onnx", *step)}
    encoder = encoder_spec("onnx/encoder_model.onnx", config, tuple(states("present", "encoder.")))
    return {"encoder": encoder, "decoder": GraphSpec("onnx/decoder_model_merged.onnx", *step)}


def example_inputs(spec: GraphSpec, vocab_size: int) -> dict[str, np.ndarray]:
    """Inputs to trace `spec` with. Their masks have one padded row: tracing drops a mask that is all ones."""
    rng = np.random.default_rng(0)
    example = {}
    for tensor in spec.inputs:
        shape = [EXAMPLE_SIZES.get(size, size) for size in tensor.shape]
        if tensor.dtype == "float32":
            example[tensor.name] = rng.standard_normal(shape).astype(np.float32)
        elif "mask" in tensor.name:
            example[tensor.name] = np.ones(shape, np.int64)
            example[tensor.name][1, :2] = 0
        elif tensor.dtype == "int32":  # a cache with 3 tokens and one more
            example[tensor.name] = np.full(shape, 3 if tensor.name == "last_position" else 4, np.int32)
        elif tensor.name == "token_type_ids":
            example[tensor.name] = np.zeros(shape, np.int64)
        elif tensor.name == "position_ids":
            example[tensor.name] = np.tile(np.arange(shape[1]), (shape[0], 1))
        else:
            example[tensor.name] = rng.integers(0, vocab_size, shape)
    return example
