"""The results of torch for the inputs of a proof, under the names of `outcome`."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from ..engine.alignments import recorded_heads
from ..graphs.encoder_attention import block_size, min_block_length
from ..heads import SPARSE_EMBEDDING
from ..inference.export_info import ExportInfo
from ..shared.files import PICKLE, PICKLED_HEAD, WEIGHTS
from ..specs import alignment
from .compare import Report, Tolerance, expected_tolerance
from .outcome import BEAMS, greedy_margins, token_facts
from .reference import (
    LENGTHS,
    TORCH,
    Arrays,
    Reference,
    compared_outputs,
    decoder_ids,
    reference_inputs,
)

# tokens of greedy search before near ties that a reference should have: more than `MIN_TOKENS`, as
# weights that are rounded to integers have other margins
MIN_CLEAR = 30
SOURCE = ("input_ids", "attention_mask")
COPIES, ROUNDS = 4, 8  # rows of each length to choose from at a time, and how often at most


@contextmanager
def torch_model(model: PreTrainedModel, shortlist: list[int] | None) -> Iterator[None]:
    """Let `model` compute what its export does in the block: minus infinity for all tokens but
    those of the `shortlist`, if there is one. Gradients are off."""
    with torch.no_grad(), ExitStack() as stack:
        if shortlist is not None:
            head = model.get_output_embeddings()
            is_excluded = torch.ones(head.out_features, dtype=torch.bool)
            is_excluded[shortlist] = False
            hook = head.register_forward_hook(
                lambda layer, inputs, logits: logits.masked_fill(is_excluded, -torch.inf)
            )
            stack.callback(hook.remove)
        yield


def make_reference(model: PreTrainedModel, info: ExportInfo) -> Reference:
    """Return the reference of an export of `model`: random inputs from seed 0, torch's outputs, and
    for a model that generates torch's tokens of greedy search and of beam search, and what the
    alignment graph returns, if there is one."""
    rng = np.random.default_rng(0)
    if not info.generates:
        reference = reference_inputs(info, rng, long_length(model.config))
        reference.results[TORCH] = torch_outcome(model, info, reference)
        return reference
    reference, greedy = clear_rows(model, info, rng)
    results = torch_outcome(model, info, reference)
    reference.results[TORCH] = {
        **results,
        **greedy,
        **token_facts(results["logits"], reference),
        **search(model, reference, num_beams=BEAMS, output_scores=True),
        **alignment_weights(model, info, reference),
    }
    return reference


def clear_rows(
    model: PreTrainedModel, info: ExportInfo, rng: np.random.Generator
) -> tuple[Reference, Arrays]:
    """Return random rows, and torch's `greedy` tokens (B, T) with their `greedy_margins`.

    Of many rows of each length, the one is chosen that has the most tokens before a near tie.
    """
    tolerance = max(expected_tolerance(info, dtype) for dtype in info.dtypes)
    lengths = np.arange(len(LENGTHS))
    rounds: list[Arrays] = []
    for _ in range(ROUNDS):
        candidates = reference_inputs(info, rng, copies=COPIES)
        greedy = search(model, candidates)["greedy"]
        margins = greedy_margins(next_logits(model, candidates.feeds, greedy), greedy, candidates)
        rounds.append({"greedy": greedy, "greedy_margins": margins, **candidates.inputs})
        rows = {name: np.concatenate([arrays[name] for arrays in rounds]) for name in rounds[0]}
        clear = tolerance.clear_lengths(rows["greedy_margins"]).reshape(-1, len(lengths))
        best = {
            name: array[clear.argmax(axis=0) * len(lengths) + lengths]
            for name, array in rows.items()
        }
        if clear.max(axis=0).sum() >= MIN_CLEAR:
            break
    searched = {name: best.pop(name) for name in ("greedy", "greedy_margins")}
    return Reference(best, candidates.options), searched


def torch_outcome(model: PreTrainedModel, info: ExportInfo, case: Reference) -> Arrays:
    """Return the outputs of `model` for the inputs of `case`, by name.

    A model that generates also has the `logits` (B, T, V) before each of `tokens`.
    """
    feeds = case.feeds
    if info.generates:
        results = {}
        for tensor in compared_outputs(info):
            encoded = model.get_encoder()(**tensors(model, feeds, SOURCE))
            results[tensor.name] = encoded[tensor.name].numpy()
        return results | {"logits": next_logits(model, feeds, feeds["tokens"])}
    inputs: dict[str, Any] = tensors(model, with_positions(feeds, model.config))
    spec = info.specs["encoder"]
    if "pixel_values" in inputs:
        inputs["interpolate_pos_encoding"] = "height" in spec.inputs[0].shape
    outputs = model(**inputs)
    if info.architecture == SPARSE_EMBEDDING:
        pooled = splade_pooling(outputs["logits"], inputs["attention_mask"], info.config["splade"])
        return {"sentence_embedding": pooled.numpy()}
    return {tensor.name: outputs[tensor.name].numpy() for tensor in spec.outputs}


def splade_pooling(
    logits: torch.Tensor, mask: torch.Tensor, config: dict[str, str]
) -> torch.Tensor:
    """Return the sparse embeddings (B, V) of the logits (B, S, V), as the module SpladePooling with
    this `config` does. `mask` (B, S) is 0 for padding."""
    values = torch.log1p((logits * mask[..., None]).relu())
    if config["activation_function"] == "log1p_relu":
        values = torch.log1p(values)
    return values.sum(dim=1) if config["pooling_strategy"] == "sum" else values.amax(dim=1)


def tensors(model: PreTrainedModel, feeds: Arrays, names: Iterable[str] = ()) -> dict[str, Any]:
    """Return {name: tensor} of those `names` in `feeds`, or of all; numbers that are not integers
    in the dtype of `model`."""
    arrays = {name: torch.from_numpy(feeds[name]) for name in names or feeds}
    return {
        name: array.to(model.dtype) if array.is_floating_point() else array
        for name, array in arrays.items()
    }


def with_positions(feeds: Arrays, config: PretrainedConfig) -> Arrays:
    """Return `feeds` with positions if torch would count padding as positions. Decoder graphs count
    positions of tokens only."""
    prefix = {"vanilla-decoder": "", "vanilla-seq2seq": "decoder_"}.get(config.model_type)
    mask = feeds.get(f"{prefix}attention_mask")
    if prefix is None or config.position_ids_from != "place" or mask is None:
        return feeds
    return {**feeds, f"{prefix}position_ids": np.maximum(mask.cumsum(axis=1) - 1, 0)}


def next_logits(model: PreTrainedModel, feeds: Arrays, tokens: np.ndarray) -> np.ndarray:
    """Return the logits (B, T, V) before each of `tokens` (B, T), which follow the prompts in
    `feeds`. Torch reads all of a sequence at once, without a cache."""
    ids, mask = feeds["input_ids"], feeds["attention_mask"]
    if (start := feeds.get("start")) is not None:
        targets = decoder_ids(start, tokens)
        inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": targets}
    else:
        mask = np.concatenate([mask, np.ones_like(tokens[:, :-1])], axis=1)
        inputs = {
            "input_ids": np.concatenate([ids, tokens[:, :-1]], axis=1),
            "attention_mask": mask,
        }
        inputs["position_ids"] = np.maximum(mask.cumsum(axis=1) - 1, 0)
    outputs = model(**tensors(model, inputs), use_cache=False)
    return outputs.logits[:, -tokens.shape[1] :].numpy()


def alignment_weights(model: PreTrainedModel, info: ExportInfo, case: Reference) -> Arrays:
    """Return the cross-attention of `model` as `outcome.alignment_weights` does."""
    if alignment.ROLE not in info.specs:
        return {}
    inputs = tensors(model, case.inputs, SOURCE)
    targets = torch.from_numpy(decoder_ids(case.inputs["start"], case.inputs["tokens"]))
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")  # other implementations return no weights
    try:
        outputs = model(**inputs, decoder_input_ids=targets, output_attentions=True)
    finally:
        model.set_attn_implementation(implementation)
    heads = [outputs.cross_attentions[head.layer][:, head.head] for head in recorded_heads(info)]
    return {alignment.OUTPUT: torch.stack(heads, dim=1).numpy()}


def search(model: PreTrainedModel, reference: Reference, **options: Any) -> Arrays:
    """Return what transformers generates from the inputs of `reference`, as `outcome.searches`
    does: `greedy` (B, T), or with `num_beams` the `beam_scores` (B,)."""
    inputs, start = reference.inputs, reference.start
    # the runtime applies the settings of the model outside of graphs
    first = None if start is None else int(start[0, 0])
    settings = model.generation_config
    model.generation_config = GenerationConfig(decoder_start_token_id=first)
    try:
        result = model.generate(  # type: ignore[operator]  # a model that generates
            **tensors(model, inputs, SOURCE),
            return_dict_in_generate=True,
            **reference.options,
            **options,
        )
    finally:
        model.generation_config = settings
    if "num_beams" in options:
        return {"beam_scores": result.sequences_scores.numpy()}
    prompt = inputs["input_ids"].shape[1] if start is None else 1
    tokens = result.sequences[:, prompt:].numpy()
    missing = reference.options["max_new_tokens"] - tokens.shape[1]  # if all rows ended before
    fill = reference.generation_options.fill_token_id
    return {"greedy": np.pad(tokens, ((0, 0), (0, missing)), constant_values=fill)}


def long_length(config: PretrainedConfig) -> int:
    """Return the number of tokens of a row that an encoder reads in blocks.

    The last block is not full. It is 0 if the model has no such layers, or too few positions.
    """
    if config.model_type != "vanilla-encoder" or config.has_position_bias:
        return 0
    if "sliding_attention" not in config.types_of_layers(config.num_hidden_layers):
        return 0
    window = config.sliding_window
    length = min_block_length(window) + block_size(window) // 2
    return length if length <= config.max_position_embeddings else 0


def rounding(
    model: PreTrainedModel, info: ExportInfo, cases: Iterable[tuple[str, Reference]]
) -> Tolerance:
    """Return the largest and the mean error of torch's results of `cases`, which have titles,
    against those in float64.

    `model` computes in float64 for a while, and is then as before.
    """
    report = Report()
    for title, case in cases:
        model.double()
        try:
            exact = torch_outcome(model, info, case)
        finally:
            model.float()
        stored = {name: case.results[TORCH][name] for name in exact}
        report.compare_all(stored, exact, case.real_values(info), title)
    return Tolerance(report.max_error, report.mean_error)


class TorchFiles(NamedTuple):
    """The weights of heads in the checkpoint `directory`, as torch reads them: `Files` for
    `outcome.head_vectors`."""

    directory: Path

    def read(self, name: str) -> bytes | None:
        """Return the weights `name`, or those of a pickle in its place, as a safetensors file in
        float32. Return None without either."""
        pickle = name.replace(WEIGHTS, PICKLE).replace(".safetensors", PICKLED_HEAD)
        paths = [self.directory / name, self.directory / pickle]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            return None
        is_pickle = path == paths[1]
        tensors = torch.load(path, "cpu", weights_only=True) if is_pickle else load_file(path)
        return save({key: tensor.float().contiguous() for key, tensor in tensors.items()})
