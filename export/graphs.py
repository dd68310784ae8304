"""The contract: what each portable graph takes and returns, under the names optimum and Transformers.js know.

| variant | file | takes | returns |
|---|---|---|---|
| encoder | onnx/model.onnx | tokens, and their types if the model has types | what its head returns, see `sequence_outputs` |
| decoder | onnx/model.onnx | the tokens that are not in the cache yet, and the cache | `logits`, the longer cache |
| decoder without a language model | onnx/model.onnx | tokens, whole sequences | as an encoder |
| seq2seq | onnx/encoder_model.onnx | tokens | `last_hidden_state` |
| | onnx/decoder_model_merged.onnx | as the decoder, and the encoder's output | as the decoder |
| seq2seq without a head | onnx/model.onnx | tokens, and the decoder's tokens | both `last_hidden_state`s |
| seq2seq with a head that reads the source twice | onnx/model.onnx | tokens | what its head returns |

One decoder graph serves the first step (a cache of length 0) and every later one. A cache is a key (B, H, past, d_k) and
a value (B, H, past, d_v) per layer, `past_key_values.0.key` in and `present.0.key` out; a seq2seq decoder has the pairs
`past_key_values.0.decoder.key` and `past_key_values.0.encoder.key`. The encoder's pair grows once: the positions of
`encoder_hidden_states` behind `past_source_length` are projected and appended, so from the second step on none are. Models
without a language model read whole sequences, with no cache; their rows may be padded on either side.

The graphs of the cpu target are the same where there is no cache. Those that generate write caches of fixed size in place
(`past_key_values` and `present` are one buffer of `max_length` positions) and return the logits of each row's last real token
only. A decoder reads `last_position` (each row's last real token, its place in the cache) and `total_length` (the longest row,
new tokens included). A seq2seq encoder returns the keys and values of cross-attention, `present.0.encoder.key`, which its
decoder takes as they are. The rows of that decoder are the beams of each input in order, all `past_length` tokens long;
`cache_indirection` says for each beam which one's key and value it reads at each position.

Those of the cuda target have one cache for each input, not for each beam: `past_key_values` have `slots`, `first_slot` is where
the keys and values of the first of `count` new tokens go, `visible` says which slots each token reads, and `tokens` has the
token of each slot. `logits_of` says behind which of the new tokens logits are wanted. `next_input_ids` and so on are what the
next step takes, if the likeliest token follows each of these. Caches have the type that is computed in. `beam_search.onnx`
takes the logits instead, and chooses `num_beams` of `candidates`.
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
    "rows": 12,
    "num_beams": 4,
    "max_length": 11,
    "slots": 13,
    "logits": 6,
    "candidates": 8,
    "num_ends": 9,
    "num_choices": 4,
}
# What each target can hold its weights in.
DTYPES = {
    "portable": ("fp32", "int8"),
    "cpu": ("fp32", "int8", "int4"),
    "cuda": ("fp32", "fp16", "bf16", "int8", "int4"),
}
KNOWN_DTYPES = "; ".join(f"{target} with {', '.join(dtypes)}" for target, dtypes in DTYPES.items())  # for messages
INDICES = ("count", "first_slot", "logits_of", "slot_numbers")  # into what the example holds of tokens and slots
EXAMPLE_LENGTHS = {"last_position": 3, "total_length": 4, "past_length": 3, "num_beams": 4}


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


def graph_specs(
    config: dict, architecture: str, target: str = "portable", dtype: str = "fp32", activations: str = "fp32"
) -> dict[str, GraphSpec]:
    """`config` is a checkpoint's config.json as a dict, `architecture` the name of its class; `dtype` is that of the weights,
    `activations` that of what is computed.

    Returns the graphs by role: `"encoder"` reads whole sequences, `"decoder"` continues them, seq2seq models that generate
    have both. Files of the portable target are named after their precision, as on the Hub: `onnx/model_int8.onnx`.
    """
    outputs = sequence_outputs(config)
    if architecture in outputs:
        specs = {"encoder": GraphSpec("onnx/model.onnx", sequence_inputs(config, architecture), outputs[architecture])}
    else:
        specs = DECODER_SPECS[target](config)
    specs = {role: half(spec, activations) for role, spec in specs.items()}
    if target != "portable" or dtype == "fp32":
        return specs
    return {role: replace(spec, file=spec.file.replace(".onnx", f"_{dtype}.onnx")) for role, spec in specs.items()}


def sequence_inputs(config: dict, architecture: str) -> tuple[TensorSpec, ...]:
    """Tokens (B, S), with several choices of them (B, C, S), and where a decoder reads others, these (B, T)."""
    shape = ("batch_size", "source_length")
    if architecture == "VanillaEncoderForMultipleChoice":
        shape = ("batch_size", "num_choices", "source_length")
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * bool(config.get("type_vocab_size"))
    tensors = [TensorSpec(name, "int64", shape) for name in names]
    if architecture == "VanillaSeq2SeqModel":
        decoder = ("decoder_input_ids", "decoder_attention_mask")
        tensors += [TensorSpec(name, "int64", ("batch_size", "target_length")) for name in decoder]
    return tuple(tensors)


def sequence_outputs(config: dict) -> dict[str, tuple[TensorSpec, ...]]:
    """What each architecture that reads whole sequences returns: of each token (B, S, ...), or of the sequence (B, ...)."""
    width, vocabulary, labels = config["hidden_size"], config["vocab_size"], len(config["id2label"])

    def per_token(name, *size, length="source_length"):
        return TensorSpec(name, "float32", ("batch_size", length, *size))

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
        "VanillaEncoderForMultipleChoice": (per_sequence("logits", "num_choices"),),
        "VanillaDecoderModel": (per_token("last_hidden_state", width),),
        "VanillaDecoderForSequenceClassification": (per_sequence("logits", labels),),
        "VanillaDecoderForTokenClassification": (per_token("logits", labels),),
        "VanillaDecoderForQuestionAnswering": (per_token("start_logits"), per_token("end_logits")),
        "VanillaSeq2SeqModel": (
            per_token("last_hidden_state", width, length="target_length"),
            per_token("encoder_last_hidden_state", width),
        ),
        "VanillaSeq2SeqForSequenceClassification": (per_sequence("logits", labels),),
        "VanillaSeq2SeqForQuestionAnswering": (per_token("start_logits"), per_token("end_logits")),
    }


def portable_decoder_specs(config):
    if config["model_type"] == "vanilla-decoder":
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
        "encoder": encoder_spec("onnx/encoder_model.onnx", (replace(hidden, name="last_hidden_state"),)),
        "decoder": decoder_spec("onnx/decoder_model_merged.onnx", inputs, config, config["decoder_layers"]),
    }


def encoder_spec(file, outputs):
    inputs = (TensorSpec(name, "int64", ("batch_size", "source_length")) for name in ("input_ids", "attention_mask"))
    return GraphSpec(file, tuple(inputs), outputs)


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
    logits = TensorSpec("logits", "float32", ("rows", config["vocab_size"]))
    if config["model_type"] == "vanilla-decoder":
        inputs = (
            TensorSpec("input_ids", "int64", ("rows", "target_length")),
            TensorSpec("position_ids", "int64", ("rows", "target_length")),
            TensorSpec("last_position", "int32", ("rows",)),
            TensorSpec("total_length", "int32", (1,)),
        )
        return fixed_decoder_specs(config, inputs, (logits,), ("rows", "max_length"))
    inputs = (
        TensorSpec("input_ids", "int64", ("rows", 1)),
        TensorSpec("past_length", "int32", (1,)),
        TensorSpec("num_beams", "int32", (1,)),
        TensorSpec("cache_indirection", "int32", ("batch_size", "num_beams", "max_length")),
    )
    return fixed_decoder_specs(config, inputs, (logits,), ("rows", "max_length"))


def cuda_decoder_specs(config):
    logits = TensorSpec("logits", "float32", ("batch_size", "logits", config["vocab_size"]))

    def state(prefix, count):
        return (
            TensorSpec(f"{prefix}input_ids", "int64", ("batch_size", count)),
            TensorSpec(f"{prefix}position_ids", "int64", ("batch_size", count)),
            TensorSpec(f"{prefix}first_slot", "int64", ("batch_size",)),
            TensorSpec(f"{prefix}visible", "bool", ("batch_size", count, "slots")),
            TensorSpec(f"{prefix}tokens", "int64", ("batch_size", 1, "slots", 1)),
        )

    input_ids, position_ids, first_slot, visible, tokens = state("", "target_length")
    count = TensorSpec("count", "int64", ("batch_size",))
    logits_of = TensorSpec("logits_of", "int64", ("batch_size", "logits"))
    slot_numbers = TensorSpec("slot_numbers", "int64", ("slots",))
    inputs = (input_ids, position_ids, count, first_slot, visible, logits_of, slot_numbers, tokens)
    specs = fixed_decoder_specs(config, inputs, (logits, *state("next_", "logits")), ("batch_size", "slots"))
    return {**specs, "beams": beam_search_spec(config["vocab_size"])}


def beam_search_spec(vocab_size):
    """Of B inputs, K beams and C candidates, `search.Options.candidates`."""

    def tensor(name, dtype, *shape):
        return TensorSpec(name, dtype, shape)

    def state(prefix):
        per_beam = ("batch_size", "num_beams")
        return (
            tensor(f"{prefix}scores", "float32", *per_beam),
            tensor(f"{prefix}visible", "bool", *per_beam, "slots"),
            tensor(f"{prefix}tokens", "int64", "batch_size", 1, "slots", 1),
            tensor(f"{prefix}finished_scores", "float32", *per_beam),
            tensor(f"{prefix}finished_visible", "bool", *per_beam, "slots"),
            tensor(f"{prefix}finished_tokens", "int64", *per_beam),
            tensor(f"{prefix}finished_lengths", "int64", *per_beam),
            tensor(f"{prefix}can_improve", "bool", "batch_size", 1),
            tensor(f"{prefix}length", "int64", 1),
        )

    constants = (
        tensor("logits", "float32", "batch_size", "num_beams", vocab_size),
        tensor("first_slot", "int64", "batch_size"),
        tensor("slot_numbers", "int64", "slots"),
        tensor("is_best", "bool", "candidates"),
        tensor("eos_token_ids", "int64", "num_ends"),
        tensor("max_length", "int64", 1),
        tensor("length_penalty", "float32", 1),
        tensor("stops_early", "bool", 1),
        tensor("never_stops_early", "bool", 1),
    )
    return GraphSpec(
        "onnx/beam_search.onnx",
        (*constants, *state("")),
        (tensor("input_ids", "int64", "batch_size", "num_beams"), *state("next_")),
    )


def fixed_decoder_specs(config, inputs, outputs, axes):
    """With caches of the fixed size `axes`, of rows and positions, that are written in place; a seq2seq model has an encoder
    too, which returns the keys and values of cross-attention."""
    heads, widths = config["num_attention_heads"], {"key": config["head_dim"], "value": config["value_head_dim"]}
    is_pair = config["model_type"] == "vanilla-seq2seq"

    def states(prefix, rows, positions):
        return tuple(
            TensorSpec(f"{prefix}{part}".format(layer), "float32", (rows, heads, positions, width))
            for layer in range(config["decoder_layers"] if is_pair else config["num_hidden_layers"])
            for part, width in widths.items()
        )

    if not is_pair:
        past, present = (states(f"{prefix}.{{}}.", *axes) for prefix in ("past_key_values", "present"))
        return {"decoder": GraphSpec("onnx/model.onnx", (*inputs, *past), (*outputs, *present))}
    inputs = (*inputs, TensorSpec("encoder_attention_mask", "int64", ("batch_size", "source_length")))
    past, present = (states(f"{prefix}.{{}}.decoder.", *axes) for prefix in ("past_key_values", "present"))
    cross, computed = (
        states(f"{prefix}.{{}}.encoder.", "batch_size", "source_length") for prefix in ("past_key_values", "present")
    )
    return {
        "encoder": encoder_spec("onnx/encoder_model.onnx", computed),
        "decoder": GraphSpec("onnx/decoder_model_merged.onnx", (*inputs, *past, *cross), (*outputs, *present)),
    }


DECODER_SPECS = {"portable": portable_decoder_specs, "cpu": cpu_decoder_specs, "cuda": cuda_decoder_specs}


def half(spec: GraphSpec, activations: str) -> GraphSpec:
    """Caches are of the type that is computed in; logits and hidden states are float32 always."""
    names = {"fp16": "float16", "bf16": "bfloat16"}

    def typed(tensors):
        return tuple(
            replace(tensor, dtype=names[activations]) if tensor.name.startswith(("past_key_values", "present")) else tensor
            for tensor in tensors
        )

    return replace(spec, inputs=typed(spec.inputs), outputs=typed(spec.outputs)) if activations in names else spec


def example_inputs(spec: GraphSpec, vocab_size: int) -> dict[str, np.ndarray]:
    """Inputs to trace `spec` with. Their masks have one padded row: tracing drops a mask that is all ones."""
    rng = np.random.default_rng(0)
    example = {}
    for tensor in spec.inputs:
        shape = [EXAMPLE_SIZES.get(size, size) for size in tensor.shape]
        if "float" in tensor.dtype:
            example[tensor.name] = rng.standard_normal(shape).astype(np.float32)
        elif tensor.dtype == "bool":
            example[tensor.name] = rng.random(shape) < 0.5
        elif "mask" in tensor.name:
            example[tensor.name] = np.ones(shape, np.int64)
            example[tensor.name][1, ..., :2] = 0
        elif tensor.dtype == "int32" or tensor.name in INDICES:
            example[tensor.name] = np.full(shape, EXAMPLE_LENGTHS.get(tensor.name, 0), tensor.dtype)
        elif tensor.name == "token_type_ids":
            example[tensor.name] = np.zeros(shape, np.int64)
        elif tensor.name == "position_ids":
            example[tensor.name] = np.tile(np.arange(shape[1]), (shape[0], 1))
        else:
            example[tensor.name] = rng.integers(0, vocab_size, shape)
    return example


def stacked(rows: list[list[int]], pad_token_id: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Lists of token ids -> `input_ids` and `attention_mask` (B, S), padded on the right."""
    lengths = np.array([len(row) for row in rows])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    ids = np.full(mask.shape, pad_token_id or 0)
    ids[mask == 1] = np.concatenate(rows)
    return ids, mask
