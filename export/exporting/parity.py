"""The comparison of an export with its checkpoint in torch, over a seeded sample of shapes and
paddings."""

import copy
import dataclasses
import os
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from ..heads import HEADS, READS_IMAGES
from ..inference.decoder import GenerationRequest, cross_states, next_input_name
from ..inference.inputs import move_padding
from ..inference.options import Options, as_list
from ..runtime import Runtime
from ..specs.graph_spec import concrete_shape
from .shortlist_head import with_shortlist

TOLERANCE = 1e-4  # times what `error_scale` says, float32
OF_LARGEST = 0.1  # sums that a vector's largest value comes from round all of its values by as much
LATER_STEPS = (1, 3, 1)  # tokens fed per step once a cache is there
STEP = "step"  # the role of a graph
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Report:
    """The result of a comparison with torch. `tokens` counts choices of the largest logit: greedy
    tokens, or a head's labels, answers and choices. `ties` counts the choices that differ where
    torch's two best logits are closer than twice the tolerance. Each difference beyond the
    tolerance is a line of `failures`. Quantized weights have no tolerance (`None`); only errors and
    equal tokens are reported.

    Half precision is compared with torch in float64, and so is torch in the same precision: both
    round what they compute to as many bits and differ in the order of sums only, so `judge` expects
    errors at most twice as large as torch's own."""

    tolerance: float | None = TOLERANCE
    cases: int = 0
    values: int = 0
    tokens: int = 0
    max_error: float = 0.0
    error_sum: float = 0.0
    agreeing: int = 0
    ties: int = 0
    torch_max_error: float = 0.0
    torch_error_sum: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def mean_error(self) -> float:
        return self.error_sum / max(self.values, 1)

    @property
    def torch_mean_error(self) -> float:
        return self.torch_error_sum / max(self.values, 1)

    @property
    def half_tolerance(self) -> float | None:
        """Largest error allowed in half precision, twice that of torch; None if torch was not run
        in that precision."""
        return 2 * self.torch_max_error or None

    def summary(self) -> dict[str, Any]:
        both = {"torch_max_error": self.torch_max_error, "torch_mean_error": self.torch_mean_error}
        return {
            "cases": self.cases,
            "values": self.values,
            "max_error": self.max_error,
            "mean_error": self.mean_error,
            "tolerance": self.tolerance if self.tolerance is not None else self.half_tolerance,
            "tokens": self.tokens,
            "agreeing_tokens": self.agreeing,
            "ties": self.ties,
            "failures": len(self.failures),
            **(both if self.torch_max_error else {}),
        }

    def __str__(self) -> str:
        allowed = (
            "tolerance none"
            if self.tolerance is None
            else f"tolerance {self.tolerance:.0e} x max(1, |value|, largest / 10)"
        )
        if self.torch_max_error:
            allowed = (
                f"torch in the same precision: {self.torch_max_error:.1e}, "
                f"{self.torch_mean_error:.1e}"
            )
        return (
            f"{self.cases} cases, {self.values} values: largest error {self.max_error:.1e}, mean "
            f"{self.mean_error:.1e} "
            f"({allowed}); {self.tokens} top choices, {self.agreeing} agree, {self.ties} ties; "
            f"{len(self.failures)} failures"
        )

    def compare(
        self,
        result: np.ndarray,
        expected: np.ndarray,
        real: np.ndarray,
        case: str,
        same: np.ndarray | None = None,
    ) -> None:
        """Add the errors of `result` against `expected`, both (B, ..., C), to the counts, and
        failures beyond the tolerance.

        Only places where the boolean `real` (B, ...) is True count. Errors are relative to
        `error_scale`. `same` is torch's result in the precision of `result`, if `expected` has
        another precision. `case` names the batch in failures.
        """
        never = np.isneginf(expected)  # tokens outside a shortlist
        if not np.isfinite(result[~never]).all() or not np.isneginf(result[never]).all():
            self.failures.append(f"{case}: some values are not finite")
            return
        finite = real[(...,) + (None,) * (result.ndim - real.ndim)] & ~never
        scale = error_scale(np.where(never, 0, expected))[finite]
        errors = np.abs(result[finite] - expected[finite]) / scale
        if same is not None:
            torch_errors = np.abs(same[finite] - expected[finite]) / scale
            self.torch_max_error = max(self.torch_max_error, float(torch_errors.max(initial=0)))
            self.torch_error_sum += float(torch_errors.sum(dtype=np.float64))
        self.values += errors.size
        self.max_error = max(self.max_error, float(errors.max(initial=0)))
        self.error_sum += float(errors.sum(dtype=np.float64))
        if self.tolerance is not None and errors.size and errors.max() > self.tolerance:
            self.failures.append(
                f"{case}: error {errors.max():.1e}, expected at most {self.tolerance:.0e}"
            )

    def judge(self) -> None:
        """Add a failure if the largest or the mean error is more than twice torch's own in half
        precision.

        No error is allowed where torch's own numbers are not finite.
        """
        for name, error, allowed in (
            ("largest", self.max_error, 2 * self.torch_max_error),
            ("mean", self.mean_error, 2 * self.torch_mean_error),
        ):
            if not error <= allowed < np.inf:
                self.failures.append(
                    f"{name} error {error:.1e}, expected at most twice that of torch, {allowed:.1e}"
                )

    def compare_tokens(
        self, logits: np.ndarray, expected: np.ndarray, real: np.ndarray, case: str
    ) -> None:
        """Count how often `logits` and `expected`, both (B, ..., V), have the same largest logit.

        Only places where `real` (B, ...) is True count. A choice that differs without a tie is a
        failure, unless there is no tolerance. `case` names the batch in failures.
        """
        if logits.shape[-1] < 2:
            return
        logits = logits[real]
        expected = expected[real]
        self.tokens += len(logits)
        differs = logits.argmax(axis=-1) != expected.argmax(axis=-1)
        self.agreeing += int((~differs).sum())
        if self.tolerance is None:
            return
        best, second = np.sort(expected, axis=-1)[:, :-3:-1].T
        tied = best - second < 2 * self.tolerance * np.maximum(1, np.abs(best))
        self.ties += int((differs & tied).sum())
        wrong = int((differs & ~tied).sum())
        if wrong > 0:
            self.failures.append(f"{case}: {wrong} of {len(logits)} top choices differ")


def error_scale(expected: np.ndarray) -> np.ndarray:
    """Return the number that the error of each value of `expected` (..., C) is divided by, in the
    same shape.

    It is the largest of 1, the value's magnitude, and `OF_LARGEST` times the largest magnitude of
    its vector.
    """
    sizes = np.abs(expected)
    return np.maximum(
        np.maximum(1, sizes), OF_LARGEST * sizes.max(axis=-1, keepdims=True, initial=0)
    )


def verify(
    directory: str | os.PathLike,
    model: PreTrainedModel,
    cases: int = 60,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
) -> Report:
    """Return a report of the comparison of the export in `directory` with `model`, its checkpoint
    in torch.

    `model` must be in float32 and evaluation mode. The export runs on `device` with the weights of
    `dtype`, the first by default. Each of `cases` is a batch of 1 to 5 rows of 1 to 33 random
    tokens: full rows, rows of different lengths padded on the right, or the same with one row that
    is all padding. Prompts of a decoder are padded on the left. Decoders are compared at the first
    step and at later ones, with torch reading the whole sequence at once, without a cache.

    float32 may differ by `TOLERANCE`, half precision by twice the error of torch in that precision,
    quantized weights by any error. Raises ValueError if the export is of another model. `seed` is
    that of the random inputs.
    """
    runtime = Runtime(directory, device=device, dtype=dtype)
    check_same_model(runtime, model)
    compare = compare_sequences
    if "decoder" in runtime.specs:
        compare = compare_seq2seq if model.config.is_encoder_decoder else compare_decoder
    rng = np.random.default_rng(seed)
    report = Report(TOLERANCE if runtime.dtype == "fp32" else None)
    longest = 33
    if getattr(model.config, "has_learned_positions", False):
        longest = min(longest, model.config.max_position_embeddings - sum(LATER_STEPS))
    with torch.no_grad(), with_shortlist(model, runtime.info.manifest.get("shortlist")):
        models = references(model, runtime.dtype)
        for number in range(cases):
            if HEADS[runtime.architecture].reads == READS_IMAGES:
                compare_images(Case(runtime, models, rng, report, f"case {number}"))
                report.cases += 1
                continue
            padding = ("none", "right", "empty row")[number % 3]
            ids, mask = sample(rng, model.config.vocab_size, longest, padding)
            case = Case(
                runtime,
                models,
                rng,
                report,
                f"case {number} {ids.shape}, padding: {padding}",
            )
            compare(case, ids, mask)
            report.cases += 1
    if runtime.dtype in HALF:
        report.judge()
    return report


@dataclass(frozen=True)
class Case:
    """A random batch to compare. It has the export, the models of `references`, the random
    generator, the report, and the name of the batch."""

    runtime: Runtime
    models: list[PreTrainedModel]
    rng: np.random.Generator
    report: Report
    name: str

    @property
    def config(self) -> PretrainedConfig:
        return self.models[0].config

    def compare(
        self, result: np.ndarray, expected: list[np.ndarray], real: np.ndarray, part: str
    ) -> None:
        reference, *same = expected
        self.report.compare(result, reference, real, f"{self.name}, {part}", *same)


def references(model: PreTrainedModel, dtype: str) -> list[PreTrainedModel]:
    """Return the models that an export with weights of `dtype` is compared with.

    For fp16 and bf16 these are two copies of `model`, first in float64, then in `dtype`. For other
    dtypes it is `model` alone.
    """
    if dtype not in HALF:
        return [model]
    dtypes = (torch.float64, HALF[dtype])
    # `to` has no types.
    return [copy.deepcopy(model).to(kind) for kind in dtypes]  # type: ignore[arg-type]


def array(states: torch.Tensor) -> np.ndarray:
    # numpy has no bfloat16
    return (states.float() if states.dtype == torch.bfloat16 else states).numpy()


def check_same_model(runtime: Runtime, model: PreTrainedModel) -> None:
    """Raise ValueError unless the export has the architecture and all sizes of `model`.

    Otherwise the comparison would fail inside numpy.
    """
    widths = (
        "vocab_size",
        "hidden_size",
        "embedding_size",
        "num_attention_heads",
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

    `padding` is "none", "right", or "empty row": on the right, and one row is all padding. `rng`
    makes the numbers. Ids are below `vocab_size`.
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
    images = torch.from_numpy(pixel_values)
    interpolates = "height" in spec.inputs[0].shape
    expected = [model(images, interpolate_pos_encoding=interpolates) for model in case.models]
    for tensor in spec.outputs:
        values = [array(outputs[tensor.name]) for outputs in expected]
        real = np.ones(values[0].shape[:-1], bool)
        case.compare(results[tensor.name], values, real, tensor.name)
        if tensor.name == "logits":
            case.report.compare_tokens(
                results[tensor.name], values[0], real, f"{case.name}, {tensor.name}"
            )


def compare_sequences(case: Case, ids: np.ndarray, mask: np.ndarray) -> None:
    """Compare all outputs of a graph that reads full sequences with torch, for random `ids` and
    their `mask` (B, S).

    Differences beyond the tolerance are added to `case.report`.
    """
    feeds = sequence_inputs(case, ids, mask)
    results = case.runtime.outputs(**feeds)
    inputs = {
        name: torch.from_numpy(values) for name, values in torch_inputs(feeds, case.config).items()
    }
    expected = [model(**inputs) for model in case.models]
    for spec in case.runtime.specs["encoder"].outputs:
        real = feeds["attention_mask"] == 1
        if "source_length" not in spec.shape:
            real = real.any(axis=-1)
        if "target_length" in spec.shape:
            real = real[:, None] & (feeds["decoder_attention_mask"] == 1)
        values = [array(outputs[spec.name]) for outputs in expected]
        case.compare(results[spec.name], values, real, spec.name)
        if spec.name.endswith("logits"):
            compare_choices(case, results[spec.name], values[0], real, spec.name)


def compare_choices(
    case: Case, logits: np.ndarray, expected: np.ndarray, real: np.ndarray, part: str
) -> None:
    if logits.shape == real.shape:  # the choice is a token or one of the choices
        logits = np.where(real, logits, -np.inf)
        expected = np.where(real, expected, -np.inf)
        real = np.asarray(real.any(axis=-1))
    case.report.compare_tokens(logits, expected, real, f"{case.name}, {part}")


def sequence_inputs(case: Case, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Return {input: array} of the graph for random `ids` and their `mask` (B, S).

    Ids and mask may be changed to fit the model, such as end tokens, choices or left padding.
    Further inputs are random.
    """
    spec = case.runtime.specs["encoder"]
    names = {tensor.name for tensor in spec.inputs}
    config = case.config
    rng = case.rng
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


def torch_inputs(feeds: dict[str, np.ndarray], config: PretrainedConfig) -> dict[str, np.ndarray]:
    """Return the inputs of torch for the graph's inputs `feeds`.

    Positions are added if torch would count padding as positions. Decoder graphs count only tokens.
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
    encoded = [model.get_encoder()(torch.from_numpy(ids), source_mask) for model in case.models]
    if case.runtime.specs["encoder"].outputs[0].name == "last_hidden_state":
        states = [array(outputs.last_hidden_state) for outputs in encoded]
        case.compare(case.runtime.encode(ids, mask), states, mask == 1, "encoder")
    first = case.rng.integers(1, 5)
    config = case.config
    tokens = case.rng.integers(0, config.vocab_size, (len(ids), first + sum(LATER_STEPS)))
    # only after what is decoded is there padding, which would not count
    if config.position_ids_from == "ids":
        tokens[tokens == config.pad_token_id] = (config.pad_token_id + 1) % config.vocab_size
    inputs = dict(
        attention_mask=source_mask, decoder_input_ids=torch.from_numpy(tokens), use_cache=False
    )
    expected = [
        array(model(encoder_outputs=outputs, **inputs).logits)
        for model, outputs in zip(case.models, encoded)
    ]
    real = np.repeat(np.any(mask, axis=1, keepdims=True), tokens.shape[1], axis=1)
    options = Options(max_new_tokens=sum(LATER_STEPS))
    request = GenerationRequest(
        options, tokens[:, :first], np.ones_like(tokens[:, :first]), (ids, mask)
    )
    compare_steps(case, request, tokens, expected, real)
    compare_lookup(case, request, tokens, expected, real)
    if case.runtime.info.step == STEP:
        compare_rows(case, (ids, mask), tokens, expected, real)


def compare_rows(
    case: Case,
    source: tuple[np.ndarray, np.ndarray],
    tokens: np.ndarray,
    expected: list[np.ndarray],
    real: np.ndarray,
) -> None:
    """Compare the logits of the decode step if each row has a source of its own length.

    `source` are ids and mask. `tokens` (B, T) are fed one by one. `expected` has the logits (B, T,
    V) of each of `references`, and `real` (B, T) is False for rows without a source. Differences
    beyond the tolerance are added to `case.report`.
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
    states |= cross_states(model.encode(ids, mask))
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
        references = [logits_of_model[:, position] for logits_of_model in expected]
        case.compare(logits, references, real[:, position], f"step {position + 1}")
        case.report.compare_tokens(
            logits, references[0], real[:, position], f"{case.name}, step {position + 1}"
        )


def compare_decoder(case: Case, ids: np.ndarray, mask: np.ndarray) -> None:
    """Compare the logits of a decoder with torch, for random prompts `ids` and their `mask` (B, S).

    They are padded on the left first. Differences beyond the tolerance are added to `case.report`.
    """
    if not case.runtime.model.decoders.supports_empty_prompts:
        mask[~mask.any(axis=1), 0] = 1
    ids, mask = move_padding(ids, mask, "left", 0)
    later = case.rng.integers(0, case.config.vocab_size, (len(ids), sum(LATER_STEPS)))
    tokens = np.concatenate([ids, later], axis=1)
    full_mask = np.concatenate([mask, np.ones_like(later)], axis=1)
    positions = np.maximum(full_mask.cumsum(axis=1) - 1, 0)
    inputs = [torch.from_numpy(values) for values in (tokens, full_mask, positions)]
    expected = [array(model(*inputs, use_cache=False).logits) for model in case.models]
    request = GenerationRequest(Options(max_new_tokens=sum(LATER_STEPS)), ids, mask)
    compare_steps(case, request, tokens, expected, full_mask == 1)
    compare_lookup(case, request, tokens, expected, full_mask == 1)


def compare_lookup(
    case: Case,
    request: GenerationRequest,
    tokens: np.ndarray,
    expected: list[np.ndarray],
    real: np.ndarray,
) -> None:
    """Compare the logits of the graph for prompt lookup, which reads several tokens at once, if the
    export has one.

    Only the first row is compared. `expected` has the logits (B, T, V) of each of `references`.
    `real` is True for tokens that are not padding.
    """
    runtime = case.runtime
    if "lookup" not in runtime.info.manifest["variants"][runtime.dtype]["graphs"]:
        return
    options = dataclasses.replace(request.options, prompt_lookup_num_tokens=max(LATER_STEPS))
    source = None if request.source is None else (request.source[0][:1], request.source[1][:1])
    first = GenerationRequest(options, request.input_ids[:1], request.attention_mask[:1], source)
    compare_steps(case, first, tokens[:1], [logits[:1] for logits in expected], real[:1])


def compare_steps(
    case: Case,
    request: GenerationRequest,
    tokens: np.ndarray,
    expected: list[np.ndarray],
    real: np.ndarray,
) -> None:
    """Feed `tokens` (B, T) in steps, the first those of `request`, and compare the logits after
    each token.

    Graphs that return only the last logits of a step are compared there. `expected` has the logits
    (B, T, V) of each of `references`. `real` (B, T) is True for tokens that are not padding.
    """
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
    case: Case, logits: np.ndarray, end: int, expected: list[np.ndarray], real: np.ndarray
) -> None:
    """Compare `logits` (B, t, V), those after the last t of the first `end` tokens.

    `expected` has the logits (B, T, V) of each of `references`. `real` (B, T) is True for tokens
    that are not padding.
    """
    step = slice(end - logits.shape[1], end)
    part = f"after token {end}"
    references = [states[:, step] for states in expected]
    case.compare(logits, references, real[:, step], part)
    case.report.compare_tokens(logits, references[0], real[:, step], f"{case.name}, {part}")
