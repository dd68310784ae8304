"""The inputs and outputs of the cpu target's decoder graphs. `specs.sequences` has the specs of
full-sequence graphs.

Decoder graphs write caches of fixed size in place: `past_key_values` and `present` are one buffer
of `max_length` positions. They return only the logits of each row's last token before its padding.

A decoder reads `last_position` (the cache position of each row's last token that is not padding)
and `total_length` (the longest row, new tokens included). The rows of a seq2seq decoder are the
beams of each input in order, all `past_length` tokens long. `cache_indirection` is the beam whose
key and value a beam reads at each position.

Beside `encoder` and `decoder`, a seq2seq model has the graph `step`, a decode step for continuous
batching. Its rows differ in length, and each has its own source in a cache of `max_source`
positions. `last_source_position` is the position of the last source token of each row,
`total_source_length` the longest source. The graph `alignment` is that of all targets.

The graph `candidates` of small seq2seq models is `decoder` with the `count` best `tokens` of each
row and their `log_p` in place of the logits.
"""

from ...specs.alignment import ROLE as ALIGNMENT
from ...specs.alignment import alignment_spec
from ...specs.caches import NAMES, cache_specs, cache_tensors, fixed_cache_specs
from ...specs.graph_spec import GraphSpec, TensorSpec
from ...specs.sequences import sequence_specs

STEP_FILE = "onnx/decoder_step_model.onnx"
CANDIDATES_FILE = "onnx/decoder_candidates_model.onnx"
# Maximum bytes of the projection to the vocabulary of a model with the graph `candidates`, which
# reads them again for each block of rows. With 6 MB it gains no time.
MAX_PROJECTION_BYTES = 2**22


def graph_specs(
    config: dict, architecture: str, dtype: str, activations: str
) -> dict[str, GraphSpec]:
    """Return the spec of each graph by role; all compute in `activations` "fp32"."""
    specs = sequence_specs(config, architecture) or decoder_specs(config)
    if step_role(config, architecture) == "step":
        specs = specs | {"step": step_spec(config)}
    if specs.keys() >= {"encoder", "decoder"}:
        decoder = specs["decoder"]
        source = cache_tensors(decoder, is_source=True)
        if projection_bytes(config, dtype) <= MAX_PROJECTION_BYTES:
            specs = specs | {"candidates": candidates_spec(decoder)}
        specs = specs | {ALIGNMENT: alignment_spec(config, source)}
    return specs


def projection_bytes(config: dict, dtype: str) -> int:
    """Return the bytes of the projection to the vocabulary in `dtype`, in int4 those of int8."""
    return config["vocab_size"] * config["hidden_size"] * (4 if dtype == "fp32" else 1)


def candidates_spec(decoder: GraphSpec) -> GraphSpec:
    """Return the spec of the step of beam search that returns the best tokens of each row in place
    of the logits of `decoder`."""
    best = (
        TensorSpec("log_p", "float32", ("rows", "count")),
        TensorSpec("tokens", "int64", ("rows", "count")),
    )
    count = TensorSpec("count", "int64", (1,))
    _, *present = decoder.outputs
    return GraphSpec(CANDIDATES_FILE, (*decoder.inputs, count), (*best, *present))


def step_role(config: dict, architecture: str) -> str | None:
    """Return the role of the graph whose rows can join and leave between two steps.

    It is `"decoder"` for a decoder-only model, else `"step"`. It is `None` for a model that does
    not generate. It is also `None` if head_dim is no multiple of 8 or differs from value_head_dim,
    which `GroupQueryAttention` does not support.

    Args:
        config: the fields of the model's config.json.
        architecture: the name of the model class.
    """
    if (
        sequence_specs(config, architecture)
        or config["head_dim"] % 8
        or config["value_head_dim"] != config["head_dim"]
    ):
        return None
    return "decoder" if config["model_type"] == "vanilla-decoder" else "step"


def step_spec(config: dict) -> GraphSpec:
    source = (
        TensorSpec("last_source_position", "int32", ("rows",)),
        TensorSpec("total_source_length", "int32", (1,)),
    )
    past, present = (
        (
            *cache_specs(config, name, "rows", {"decoder.": "max_length"}),
            *cache_specs(config, name, "rows", {"encoder.": "max_source"}),
        )
        for name in NAMES
    )
    logits = TensorSpec("logits", "float32", ("rows", config["vocab_size"]))
    return GraphSpec(STEP_FILE, (*decoder_inputs(1), *source, *past), (logits, *present))


def decoder_specs(config: dict) -> dict[str, GraphSpec]:
    logits = TensorSpec("logits", "float32", ("rows", config["vocab_size"]))
    inputs = (
        decoder_inputs("target_length")
        if config["model_type"] == "vanilla-decoder"
        else seq2seq_inputs()
    )
    return fixed_cache_specs(config, inputs, (logits,), ("rows", "max_length"))


def decoder_inputs(tokens: int | str) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("input_ids", "int64", ("rows", tokens)),
        TensorSpec("position_ids", "int64", ("rows", tokens)),
        TensorSpec("last_position", "int32", ("rows",)),
        TensorSpec("total_length", "int32", (1,)),
    )


def seq2seq_inputs() -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("input_ids", "int64", ("rows", 1)),
        TensorSpec("past_length", "int32", (1,)),
        TensorSpec("num_beams", "int32", (1,)),
        TensorSpec("cache_indirection", "int32", ("batch_size", "num_beams", "max_length")),
    )
