"""The comparison of an export with its checkpoint in torch, over a seeded sample of shapes and
paddings."""

import os
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from ..certification.reference import real_values
from ..certification.tolerances import (
    TOLERANCES,
    Tolerance,
    relative_errors,
    relative_margins,
)
from ..graphs.encoder_attention import block_size, min_block_length
from ..heads import HEADS, READS_IMAGES
from ..inference.decoder import GenerationRequest, cross_states, next_input_name
from ..inference.inputs import move_padding
from ..inference.options import Options, as_list
from ..runtime import Runtime
from ..specs.graph_spec import GraphSpec, concrete_shape
from .shortlist_head import with_shortlist

LATER_STEPS = (1, 3, 1)  # tokens fed per step once a cache is there
STEP = "step"  # the role of a graph


@dataclass
class Report:
    """The result of a comparison with torch in float32. `tokens` counts choices of the largest
    logit: greedy tokens, or a head's labels, answers and choices. `ties` counts the choices that
    differ where torch's two best logits are closer than twice the tolerance. Each difference beyond
    the tolerance is a line of `failures`."""

    tolerance: Tolerance = TOLERANCES["fp32"]
    cases: int = 0
    values: int = 0
    tokens: int = 0
    max_error: float = 0.0
    error_sum: float = 0.0
    agreeing: int = 0
    ties: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def mean_error(self) -> float:
        return self.error_sum / max(self.values, 1)

    def summary(self) -> dict[str, Any]:
        return {
            "cases": self.cases,
            "values": self.values,
            "max_error": self.max_error,
            "mean_error": self.mean_error,
            "tokens": self.tokens,
            "agreeing_tokens": self.agreeing,
            "ties": self.ties,
            "failures": len(self.failures),
        }

    def __str__(self) -> str:
        return (
            f"{self.cases} cases, {self.values} values: largest error {self.max_error:.1e}, mean "
            f"{self.mean_error:.1e} (tolerance: {self.tolerance}); {self.tokens} top choices, "
            f"{self.agreeing} agree, {self.ties} ties; {len(self.failures)} failures"
        )

    def compare(
        self, result: np.ndarray, expected: np.ndarray, real: np.ndarray, case: str
    ) -> None:
        """Add the errors of `result` against `expected`, both (B, ..., C), to the counts, and
        failures beyond the tolerance.

        Only places where the boolean `real` (B, ...) is True count. If an error there is not
        finite, that is a failure, and nothing is counted. `case` names the batch in failures.
        """
        errors = relative_errors(result, expected)[real]
        if not np.isfinite(errors).all():
            self.failures.append(f"{case}: some values are not finite")
            return
        errors = errors[np.isfinite(expected[real])]  # tokens outside a shortlist have no logit
        self.values += errors.size
        largest = float(errors.max(initial=0))
        self.max_error = max(self.max_error, largest)
        self.error_sum += float(errors.sum())
        if problem := self.tolerance.problem(largest, 0):
            self.failures.append(f"{case}: {problem}")

    def judge(self) -> None:
        """Add a failure if the mean error of all values is too high."""
        if problem := self.tolerance.problem(0, self.mean_error):
            self.failures.append(problem)

    def compare_tokens(
        self, logits: np.ndarray, expected: np.ndarray, real: np.ndarray, case: str
    ) -> None:
        """Count how often `logits` and `expected`, both (B, ..., V), have the same largest logit.

        Only places where `real` (B, ...) is True count. A choice that differs is a failure, unless
        the two best logits of `expected` are closer than twice the tolerance. `case` names the
        batch in failures.
        """
        if logits.shape[-1] < 2:
            return
        logits = logits[real]
        expected = expected[real]
        differs = logits.argmax(axis=-1) != expected.argmax(axis=-1)
        is_tied = differs & (relative_margins(expected) < 2 * self.tolerance.max_error)
        wrong = int((differs & ~is_tied).sum())
        self.tokens += len(logits)
        self.agreeing += int((~differs).sum())
        self.ties += int(is_tied.sum())
        if wrong > 0:
            self.failures.append(f"{case}: {wrong} of {len(logits)} top choices differ")


def verify(
    directory: str | os.PathLike,
    model: PreTrainedModel,
    cases: int = 60,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
) -> Report:
    """Return a report of the comparison of the export in `directory` with `model`, its checkpoint
    in torch. Differences are in `failures` of the report and raise no error.

    `model` must be in float32 and evaluation mode. The export runs on `device` with the weights of
    `dtype`, the first by default. Each of `cases` is a batch of 1 to 5 rows of 1 to 33 random
    tokens: full rows, rows of different lengths padded on the right, or the same with one row that
    is all padding. A short table of learned positions allows fewer tokens. An encoder with windows
    gets one more row, of `long_length` tokens. A vision model gets 1 to 5 random images. Prompts of
    a decoder are padded on the left. Decoders are compared at the first
    step and at later ones, with torch reading the whole sequence at once, without a cache.

    Errors may be those of `TOLERANCES` for the dtype. Raises ValueError if the export is of another
    model. `seed` is that of the random inputs.
    """
    runtime = Runtime(directory, device=device, dtype=dtype)
    check_same_model(runtime, model)
    compare = compare_sequences
    if "decoder" in runtime.specs:
        compare = compare_seq2seq if model.config.is_encoder_decoder else compare_decoder
    rng = np.random.default_rng(seed)
    report = Report(TOLERANCES[runtime.dtype])
    longest = min(33, max_positions(model.config) - sum(LATER_STEPS))
    with torch.no_grad(), with_shortlist(model, runtime.info.manifest.get("shortlist")):
        for number in range(cases):
            if HEADS[runtime.architecture].reads == READS_IMAGES:
                compare_images(Case(runtime, model, rng, report, f"case {number}"))
                report.cases += 1
                continue
            padding = ("none", "right", "empty row")[number % 3]
            ids, mask = sample(rng, model.config.vocab_size, longest, padding)
            case = Case(
                runtime,
                model,
                rng,
                report,
                f"case {number} {ids.shape}, padding: {padding}",
            )
            compare(case, ids, mask)
            report.cases += 1
        if length := long_length(model.config):
            ids = rng.integers(0, model.config.vocab_size, (1, length))
            name = f"case {cases} {ids.shape}, in blocks"
            compare(Case(runtime, model, rng, report, name), ids, np.ones_like(ids))
            report.cases += 1
    report.judge()
    return report


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


def max_positions(config: PretrainedConfig) -> int:
    """Return the number of learned positions, or 2**31 if the model has none."""
    is_learned = getattr(config, "has_learned_positions", False)
    return config.max_position_embeddings if is_learned else 2**31


@dataclass(frozen=True)
class Case:
    """A random batch to compare. It has the export, the model in torch, the random generator, the
    report, and the name of the batch."""

    runtime: Runtime
    model: PreTrainedModel
    rng: np.random.Generator
    report: Report
    name: str

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    def compare(
        self, result: np.ndarray, expected: np.ndarray, real: np.ndarray, part: str
    ) -> None:
        self.report.compare(result, expected, real, f"{self.name}, {part}")

    def compare_logits(
        self, logits: np.ndarray, expected: np.ndarray, real: np.ndarray, part: str
    ) -> None:
        """Compare `logits` with `expected`, and the indices of the largest of both."""
        self.compare(logits, expected, real, part)
        self.report.compare_tokens(logits, expected, real, f"{self.name}, {part}")


def check_same_model(runtime: Runtime, model: PreTrainedModel) -> None:
    """Raise ValueError unless the export has the architecture and all sizes of `model`.

    Otherwise the comparison would fail inside numpy.
    """
    widths = (
        "vocab_size",
        "hidden_size",
        "embedding_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "value_head_dim",
    )
    sizes = (
        *widths,
        "num_hidden_layers",
        "decoder_layers",
        "num_labels",
        "image_size",
        "patch_size",
        "num_channels",
    )
    facts = {"architecture": runtime.architecture, **runtime.config}
    facts["num_labels"] = len(runtime.config.get("id2label") or ())
    expected = {
        "architecture": type(model).__name__,
        **{name: getattr(model.config, name, None) for name in sizes},
    }
    for name, value in expected.items():
        if facts.get(name, value) != value:
            export = runtime.info.directory
            raise ValueError(
                f"{export} has {name}={facts[name]!r}, expected {value!r} as in the checkpoint"
            )


def sample(
    rng: np.random.Generator, vocab_size: int, longest: int, padding: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return random ids and a mask, both (B, S), with B up to 5 and S up to `longest`.

    `padding` is "none", "right", or "empty row": on the right, and one of several rows is all
    padding. `rng` makes the numbers. Ids are below `vocab_size`.
    """
    shape = rng.integers(1, 6), rng.integers(1, longest + 1)
    ids = rng.integers(0, vocab_size, shape)
    mask = np.ones(shape, np.int64)
    if padding != "none":
        lengths = rng.integers(1, shape[1] + 1, shape[0])
        lengths[rng.integers(shape[0])] = shape[1]
        if padding == "empty row" and shape[0] > 1:
            lengths[rng.integers(shape[0])] = 0
        mask = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
    return ids, mask


def compare_images(case: Case) -> None:
    """Compare all outputs of the graph of an image model with torch, for random images.

    Differences beyond the tolerance are added to `case.report`."""
    spec = case.runtime.specs["encoder"]
    patch = case.config.patch_shape
    height, width = (int(case.rng.integers(side, 8 * side)) for side in patch)
    sizes = {"batch_size": int(case.rng.integers(1, 6)), "height": height, "width": width}
    pixel_values = case.rng.standard_normal(concrete_shape(spec.inputs[0], sizes)).astype(
        np.float32
    )
    results = case.runtime.outputs(pixel_values=pixel_values)
    expected = torch_outputs(case.model, spec, {"pixel_values": pixel_values})
    for name, values in expected.items():
        compare = case.compare_logits if name == "logits" else case.compare
        compare(results[name], values, np.ones(values.shape[:-1], bool), name)


def compare_sequences(case: Case, ids: np.ndarray, mask: np.ndarray) -> None:
    """Compare all outputs of a graph that reads full sequences with torch, for random `ids` and
    their `mask` (B, S).

    Differences beyond the tolerance are added to `case.report`.
    """
    spec = case.runtime.specs["encoder"]
    feeds = sequence_inputs(spec, case.config, case.rng, (ids, mask))
    results = case.runtime.outputs(**feeds)
    expected = torch_outputs(case.model, spec, feeds)
    for output in spec.outputs:
        values, real = expected[output.name], real_values(output, feeds)
        case.compare(results[output.name], values, real, output.name)
        if output.name.endswith("logits"):
            compare_choices(case, results[output.name], values, real, output.name)


def compare_choices(
    case: Case, logits: np.ndarray, expected: np.ndarray, real: np.ndarray, part: str
) -> None:
    if logits.shape == real.shape:  # the choice is a token or one of the choices
        logits = np.where(real, logits, -np.inf)
        expected = np.where(real, expected, -np.inf)
        real = np.asarray(real.any(axis=-1))
    case.report.compare_tokens(logits, expected, real, f"{case.name}, {part}")


def sequence_inputs(
    spec: GraphSpec,
    config: PretrainedConfig,
    rng: np.random.Generator,
    rows: tuple[np.ndarray, np.ndarray],
) -> dict[str, np.ndarray]:
    """Return {input: array} of the graph for `rows`, random ids and their mask (B, S).

    Ids and mask may be changed to fit the model, such as end tokens, choices or left padding.
    Further inputs are random.
    """
    ids, mask = rows
    names = {tensor.name for tensor in spec.inputs}
    feeds = {}
    # ids that the decoder reads too, shifted
    if config.is_encoder_decoder and "decoder_input_ids" not in names:
        ids = np.where(mask == 1, ids, config.pad_token_id)
        ids[np.arange(len(ids)), mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)] = as_list(
            config.eos_token_id
        )[0]
    if "num_choices" in spec.outputs[0].shape:
        mask = mask[rng.integers(len(mask), size=(len(mask), 3))]
        ids = rng.integers(0, config.vocab_size, mask.shape)
    either_side = config.model_type == "vanilla-decoder" or config.position_ids_from != "place"
    if either_side and ids.ndim == 2 and rng.integers(2):
        ids, mask = move_padding(ids, mask, "left", 0)
    if "token_type_ids" in names:
        feeds["token_type_ids"] = rng.integers(0, config.type_vocab_size, ids.shape)
    if "decoder_input_ids" in names:
        target = rng.permutation(mask)  # as long as the sources, in another order
        feeds["decoder_input_ids"] = rng.integers(0, config.vocab_size, target.shape)
        feeds["decoder_attention_mask"] = target
    return {"input_ids": ids, "attention_mask": mask, **feeds}


def torch_outputs(
    model: PreTrainedModel, spec: GraphSpec, feeds: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return {output: array} that `model` computes in torch from `feeds`, the inputs of the graph
    of `spec`, which reads full sequences or images."""
    inputs: dict[str, Any] = {
        name: torch.from_numpy(values) for name, values in torch_inputs(feeds, model.config).items()
    }
    if "pixel_values" in inputs:
        inputs["interpolate_pos_encoding"] = "height" in spec.inputs[0].shape
    outputs = model(**inputs)
    return {tensor.name: outputs[tensor.name].numpy() for tensor in spec.outputs}


def torch_inputs(feeds: dict[str, np.ndarray], config: PretrainedConfig) -> dict[str, np.ndarray]:
    """Return the inputs of torch for the graph's inputs `feeds`.

    Positions are added if torch would count padding as positions. The other inputs are unchanged.
    Decoder graphs count positions of tokens only.
    """
    prefix = {"vanilla-decoder": "", "vanilla-seq2seq": "decoder_"}.get(config.model_type)
    if (
        prefix is None
        or config.position_ids_from != "place"
        or f"{prefix}attention_mask" not in feeds
    ):
        return feeds
    positions = np.maximum(feeds[f"{prefix}attention_mask"].cumsum(axis=1) - 1, 0)
    return {**feeds, f"{prefix}position_ids": positions}


def compare_seq2seq(case: Case, ids: np.ndarray, mask: np.ndarray) -> None:
    """Compare an encoder-decoder with torch, for random sources `ids` and their `mask` (B, S).

    The states of the encoder, if it returns any, and the logits of the decoder are compared.
    Differences beyond the tolerance are added to `case.report`.
    """
    source_mask = torch.from_numpy(mask)
    encoded = case.model.get_encoder()(torch.from_numpy(ids), source_mask)
    if case.runtime.specs["encoder"].outputs[0].name == "last_hidden_state":
        states = encoded.last_hidden_state.numpy()
        case.compare(case.runtime.encode(ids, mask), states, mask == 1, "encoder")
    first = case.rng.integers(1, 5)
    config = case.config
    tokens = case.rng.integers(0, config.vocab_size, (len(ids), first + sum(LATER_STEPS)))
    # only after what is decoded is there padding, which would not count
    if config.position_ids_from == "ids":
        tokens[tokens == config.pad_token_id] = (config.pad_token_id + 1) % config.vocab_size
    expected = case.model(
        encoder_outputs=encoded,
        attention_mask=source_mask,
        decoder_input_ids=torch.from_numpy(tokens),
        use_cache=False,
    ).logits.numpy()
    real = np.repeat(np.any(mask, axis=1, keepdims=True), tokens.shape[1], axis=1)
    options = Options(max_new_tokens=sum(LATER_STEPS))
    request = GenerationRequest(
        options, tokens[:, :first], np.ones_like(tokens[:, :first]), (ids, mask)
    )
    compare_steps(case, request, tokens, expected, real)
    if case.runtime.info.step == STEP:
        compare_rows(case, (ids, mask), tokens, expected, real)


def compare_rows(
    case: Case,
    source: tuple[np.ndarray, np.ndarray],
    tokens: np.ndarray,
    expected: np.ndarray,
    real: np.ndarray,
) -> None:
    """Compare the logits of the decode step if each row has a source of its own length.

    `source` are ids and mask. `tokens` (B, T) are fed one by one. `expected` has the logits (B, T,
    V) of torch, and `real` (B, T) is False for rows without a source. Differences beyond the
    tolerance are added to `case.report`.
    """
    model = case.runtime.model
    spec = model.info.specs[STEP]
    ids, mask = source
    lengths = np.maximum(mask.sum(axis=1), 1)
    sizes = {"rows": len(ids), "max_length": tokens.shape[1]}
    states = {
        tensor.name: np.zeros(concrete_shape(tensor, sizes), np.float32)
        for tensor in spec.inputs
        if ".decoder." in tensor.name
    }
    states |= cross_states(model.outputs({"input_ids": ids, "attention_mask": mask}))
    names = [tensor.name for tensor in spec.outputs]
    for position in range(tokens.shape[1]):
        counts = {
            "position_ids": np.full((len(ids), 1), position),
            "last_position": np.full(len(ids), position, np.int32),
            "total_length": np.array([position + 1], np.int32),
            "last_source_position": (lengths - 1).astype(np.int32),
            "total_source_length": lengths.max(keepdims=True).astype(np.int32),
        }
        feeds = {"input_ids": tokens[:, position : position + 1], **counts, **states}
        logits, *present = model.session(STEP).run(names, feeds)
        states = {next_input_name(name): array for name, array in zip(names[1:], present)}
        part = f"step {position + 1}"
        case.compare_logits(logits, expected[:, position], real[:, position], part)


def compare_decoder(case: Case, ids: np.ndarray, mask: np.ndarray) -> None:
    """Compare the logits of a decoder with torch, for random prompts `ids` and their `mask` (B, S).

    They are padded on the left first. If the export does not support empty prompts, these get a
    token in `mask`, which is changed. Differences beyond the tolerance are added to `case.report`.
    """
    if not case.runtime.model.decoders.supports_empty_prompts:
        mask[~mask.any(axis=1), 0] = 1
    ids, mask = move_padding(ids, mask, "left", 0)
    later = case.rng.integers(0, case.config.vocab_size, (len(ids), sum(LATER_STEPS)))
    tokens = np.concatenate([ids, later], axis=1)
    full_mask = np.concatenate([mask, np.ones_like(later)], axis=1)
    positions = np.maximum(full_mask.cumsum(axis=1) - 1, 0)
    inputs = [torch.from_numpy(values) for values in (tokens, full_mask, positions)]
    expected = case.model(*inputs, use_cache=False).logits.numpy()
    request = GenerationRequest(Options(max_new_tokens=sum(LATER_STEPS)), ids, mask)
    compare_steps(case, request, tokens, expected, full_mask == 1)


def compare_steps(
    case: Case,
    request: GenerationRequest,
    tokens: np.ndarray,
    expected: np.ndarray,
    real: np.ndarray,
) -> None:
    """Feed `tokens` (B, T) in steps, the first those of `request`, and compare the logits after
    each token. Graphs that return only the last logits of a step are compared there. `expected` has
    the logits (B, T, V)."""
    end = request.input_ids.shape[1]
    with closing(case.runtime.model.decoders.start(request)) as decoder:
        lengths = LATER_STEPS if decoder.max_step_tokens != 1 else (1,) * sum(LATER_STEPS)
        logits = decoder.prefill(request.input_ids, request.attention_mask)
        compare_step(case, logits, end, expected, real)
        for length in lengths:
            logits = decoder.step(tokens[:, end : end + length])
            end += length
            compare_step(case, logits, end, expected, real)


def compare_step(
    case: Case, logits: np.ndarray, end: int, expected: np.ndarray, real: np.ndarray
) -> None:
    """Compare `logits` (B, t, V), those after the last t of the first `end` tokens.

    `expected` has the logits (B, T, V) of torch. `real` (B, T) is True for tokens
    that are not padding.
    """
    step = slice(end - logits.shape[1], end)
    case.compare_logits(logits, expected[:, step], real[:, step], f"after token {end}")
