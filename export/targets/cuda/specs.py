"""The inputs and outputs of the cuda target's graphs. The specs of full-sequence
graphs are in `sequences`.

There is one cache for each input, not for each beam: `past_key_values` have `slots`, `first_slot`
is where the keys and values of the first of `count` new tokens go, `visible` says which slots each
token reads, and `tokens` has the token of each slot. `logit_indices` are the new tokens whose
logits are returned. `next_input_ids` and so on are the inputs of the next step, if the most likely
token follows each of these. Caches have the dtype of the computation. `beam_search.onnx` takes the
logits instead, and selects `num_beams` of `candidates`.
"""

from dataclasses import replace

from ...specs.alignment import ROLE as ALIGNMENT
from ...specs.alignment import alignment_spec
from ...specs.caches import NAMES, cache_tensors, fixed_cache_specs
from ...specs.graph_spec import GraphSpec, TensorSpec
from ...specs.sequences import sequence_specs

CACHE_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def graph_specs(
    config: dict, architecture: str, dtype: str, activations: str
) -> dict[str, GraphSpec]:
    """Return the spec of each graph by role, for any `dtype` of the weights."""
    return sequence_specs(config, architecture) or decoder_specs(config, CACHE_DTYPES[activations])


def decoder_specs(config: dict, dtype: str) -> dict[str, GraphSpec]:
    """Return `{role: spec}` of the graphs of a model that generates.

    They are `"decoder"`, `"beams"` and, for a seq2seq model, `"encoder"` and `"alignment"`.

    Args:
        config: the fields of the model's config.json.
        dtype: the dtype of the caches, such as `"float16"`.
    """
    logits = TensorSpec("logits", "float32", ("batch_size", "logits", config["vocab_size"]))

    def state(prefix: str, count: str) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec(f"{prefix}input_ids", "int64", ("batch_size", count)),
            TensorSpec(f"{prefix}position_ids", "int64", ("batch_size", count)),
            TensorSpec(f"{prefix}first_slot", "int64", ("batch_size",)),
            TensorSpec(f"{prefix}visible", "bool", ("batch_size", count, "slots")),
            TensorSpec(f"{prefix}tokens", "int64", ("batch_size", 1, "slots", 1)),
        )

    input_ids, position_ids, first_slot, visible, tokens = state("", "target_length")
    count = TensorSpec("count", "int64", ("batch_size",))
    logit_indices = TensorSpec("logit_indices", "int64", ("batch_size", "logits"))
    slot_numbers = TensorSpec("slot_numbers", "int64", ("slots",))
    inputs = (
        input_ids,
        position_ids,
        count,
        first_slot,
        visible,
        logit_indices,
        slot_numbers,
        tokens,
    )
    outputs = (logits, *state("next_", "logits"))
    specs = fixed_cache_specs(config, inputs, outputs, ("batch_size", "slots"), dtype)
    merged = {role: with_merged_heads(spec) for role, spec in specs.items()}
    source = cache_tensors(merged["decoder"], is_source=True)
    if source and dtype != "bfloat16":  # which numpy, where the rows of a batch are chosen, lacks
        merged[ALIGNMENT] = alignment_spec(config, source)
    return {**merged, "beams": beam_search_spec(config["vocab_size"])}


def with_merged_heads(spec: GraphSpec) -> GraphSpec:
    """Return `spec` with caches (rows, positions, heads * width) instead of (rows, heads,
    positions, width)."""

    def merge(tensor: TensorSpec) -> TensorSpec:
        if not tensor.name.startswith(NAMES):
            return tensor
        rows, heads, length, width = tensor.shape
        return replace(tensor, shape=(rows, length, int(heads) * int(width)))

    return replace(
        spec, inputs=tuple(map(merge, spec.inputs)), outputs=tuple(map(merge, spec.outputs))
    )


def beam_search_spec(vocab_size: int) -> GraphSpec:
    """Return the spec of the graph of a step of beam search over `vocab_size` tokens."""

    def tensor(name: str, dtype: str, *shape: str | int) -> TensorSpec:
        return TensorSpec(name, dtype, shape)

    def state(prefix: str) -> tuple[TensorSpec, ...]:
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
        is_on_demand=True,  # when the sizes of all axes are known: then no shape is left to compute
    )
