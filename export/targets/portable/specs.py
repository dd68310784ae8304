"""The inputs and outputs of portable graphs, under the names that optimum and Transformers.js know.

| variant | file | takes | returns |
|---|---|---|---|
| decoder | onnx/model.onnx | tokens that the cache lacks, the cache | `logits`, the longer cache |
| seq2seq | onnx/encoder_model.onnx | tokens | `last_hidden_state` |
| | onnx/decoder_model_merged.onnx | as the decoder, and the encoder's output | as the decoder |
| | onnx/alignment_model.onnx | target tokens and the encoder's output | `cross_attentions` |

One decoder graph serves the first step (a cache of length 0) and every later one. A cache is a key
(B, H, past, d_k) and a value (B, H, past, d_v) per layer, `past_key_values.0.key` in and
`present.0.key` out; a seq2seq decoder has the pairs `past_key_values.0.decoder.key` and
`past_key_values.0.encoder.key`. The encoder's pair grows once: the positions of
`encoder_hidden_states` from `past_source_length` on are projected and appended, so from the second
step on none are.

Files are named after the precision of their weights, as on the Hub: `onnx/model_int8.onnx`.
"""

from dataclasses import replace

from ...specs.alignment import ROLE as ALIGNMENT
from ...specs.alignment import alignment_spec
from ...specs.caches import SOURCE_MASK, cache_specs
from ...specs.graph_spec import GraphSpec, TensorSpec
from ...specs.sequences import DECODER_FILE, FILE, sequence_specs, source_encoder_spec


def graph_specs(
    config: dict, architecture: str, dtype: str, activations: str
) -> dict[str, GraphSpec]:
    """Return the spec of each graph by role; all compute in `activations` "fp32"."""
    specs = sequence_specs(config, architecture) or decoder_specs(config)
    if dtype == "fp32":
        return specs
    return {
        role: replace(spec, file=spec.file.replace(".onnx", f"_{dtype}.onnx"))
        for role, spec in specs.items()
    }


def decoder_specs(config: dict) -> dict[str, GraphSpec]:
    length = "past_length + target_length"
    ids = TensorSpec("input_ids", "int64", ("batch_size", "target_length"))
    if config["model_type"] == "vanilla-decoder":
        mask = TensorSpec("attention_mask", "int64", ("batch_size", length))
        inputs = (ids, mask, replace(ids, name="position_ids"))
        return {"decoder": decoder_spec(FILE, inputs, config, {"": "past_length"}, {"": length})}
    states = TensorSpec(
        "encoder_hidden_states", "float32", ("batch_size", "source_length", config["hidden_size"])
    )
    before = {"decoder.": "past_length", "encoder.": "past_source_length"}
    after = {"decoder.": length, "encoder.": "source_length"}
    return {
        "encoder": source_encoder_spec(config, (replace(states, name="last_hidden_state"),)),
        "decoder": decoder_spec(DECODER_FILE, (ids, SOURCE_MASK, states), config, before, after),
        ALIGNMENT: alignment_spec(config, (states,)),
    }


def decoder_spec(
    file: str,
    inputs: tuple[TensorSpec, ...],
    config: dict,
    before: dict[str, str],
    after: dict[str, str],
) -> GraphSpec:
    """Return the spec of a decoder graph, with its caches as further inputs and outputs.

    Args:
        file: the file of the graph in the export.
        inputs: the inputs besides the caches.
        config: the fields of the model's config.json.
        before: `{part of the cache's name: name of its length axis}` of the caches that are read,
            such as `{"encoder.": "past_source_length"}`.
        after: the same of the caches that are returned.
    """
    logits = TensorSpec("logits", "float32", ("batch_size", "target_length", config["vocab_size"]))
    past = cache_specs(config, "past_key_values", "batch_size", before)
    return GraphSpec(
        file, (*inputs, *past), (logits, *cache_specs(config, "present", "batch_size", after))
    )
