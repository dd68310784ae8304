"""What each portable graph takes and returns, under the names that optimum and Transformers.js know.

| variant | file | takes | returns |
|---|---|---|---|
| decoder | onnx/model.onnx | the tokens that are not in the cache yet, and the cache | `logits`, the longer cache |
| seq2seq | onnx/encoder_model.onnx | tokens | `last_hidden_state` |
| | onnx/decoder_model_merged.onnx | as the decoder, and the encoder's output | as the decoder |

One decoder graph serves the first step (a cache of length 0) and every later one. A cache is a key (B, H, past, d_k) and
a value (B, H, past, d_v) per layer, `past_key_values.0.key` in and `present.0.key` out; a seq2seq decoder has the pairs
`past_key_values.0.decoder.key` and `past_key_values.0.encoder.key`. The encoder's pair grows once: the positions of
`encoder_hidden_states` from `past_source_length` on are projected and appended, so from the second step on none are.

Files are named after the precision of their weights, as on the Hub: `onnx/model_int8.onnx`.
"""

from dataclasses import replace

from ..sequences import DECODER_FILE, FILE, sequence_specs, source_encoder_spec
from ..spec import GraphSpec, TensorSpec


def graph_specs(config: dict, architecture: str, dtype: str) -> dict[str, GraphSpec]:
    specs = sequence_specs(config, architecture) or decoder_specs(config)
    if dtype == "fp32":
        return specs
    return {role: replace(spec, file=spec.file.replace(".onnx", f"_{dtype}.onnx")) for role, spec in specs.items()}


def decoder_specs(config: dict) -> dict[str, GraphSpec]:
    input_ids = TensorSpec("input_ids", "int64", ("batch_size", "target_length"))
    if config["model_type"] == "vanilla-decoder":
        mask = TensorSpec("attention_mask", "int64", ("batch_size", "past_length + target_length"))
        positions = TensorSpec("position_ids", "int64", ("batch_size", "target_length"))
        attentions = {"": ("past_length", "past_length + target_length")}
        layers = config["num_hidden_layers"]
        return {"decoder": decoder_spec(FILE, (input_ids, mask, positions), config, layers, attentions)}
    mask = TensorSpec("encoder_attention_mask", "int64", ("batch_size", "source_length"))
    states = TensorSpec("encoder_hidden_states", "float32", ("batch_size", "source_length", config["hidden_size"]))
    attentions = {
        "decoder.": ("past_length", "past_length + target_length"),
        "encoder.": ("past_source_length", "source_length"),
    }
    return {
        "encoder": source_encoder_spec(config, (replace(states, name="last_hidden_state"),)),
        "decoder": decoder_spec(DECODER_FILE, (input_ids, mask, states), config, config["decoder_layers"], attentions),
    }


def decoder_spec(
    file: str, inputs: tuple[TensorSpec, ...], config: dict, layers: int, attentions: dict[str, tuple[str, str]]
) -> GraphSpec:
    """With the caches of each of `attentions`, whose lengths before and after the step are named."""
    logits = TensorSpec("logits", "float32", ("batch_size", "target_length", config["vocab_size"]))
    heads = config["num_attention_heads"]
    widths = {"key": config["head_dim"], "value": config["value_head_dim"]}
    past = []
    present = []
    for layer in range(layers):
        for attention, (before, after) in attentions.items():
            for part, width in widths.items():
                name = f"{layer}.{attention}{part}"
                past.append(TensorSpec(f"past_key_values.{name}", "float32", ("batch_size", heads, before, width)))
                present.append(TensorSpec(f"present.{name}", "float32", ("batch_size", heads, after, width)))
    return GraphSpec(file, (*inputs, *past), (logits, *present))
