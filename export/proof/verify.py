"""The proof of an export against its checkpoint in torch."""

import os
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ..heads import model_class
from ..runtime import Runtime
from .checks import Subject, attempt, compare_manifests, stored_tolerance
from .compare import TOLERANCES, Report, Tolerance
from .outcome import outcome
from .reference import FILE, PADDINGS, TORCH, Reference, case_inputs
from .torch import make_reference, rounding, torch_model, torch_outcome

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# how much more a float32 export may differ from torch than torch's float32 from its float64
ROUNDING = 4
STEPS = (1, 3)  # tokens of the first steps, where a step takes several; one token each after them
# fields of the config that are sizes
SIZES = (
    *("vocab_size", "hidden_size", "embedding_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "value_head_dim", "num_hidden_layers", "decoder_layers", "num_labels"),
    *("image_size", "patch_size", "num_channels"),
)


def verify(
    directory: str | os.PathLike,
    model: "PreTrainedModel",
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
    is all padding. A short table of learned positions allows fewer tokens. A vision model gets 1 to
    5 random images. Prompts of a decoder are padded on the left. Decoders are compared at the first
    step and at later ones, with torch reading the whole sequence at once, without a cache.

    Then the export is compared with its reference, which `certify` reads too: longer rows, greedy
    and beam search, requests in the batches of `serve`, the heads of text embeddings, and
    manifest.json. An export without one, written where torch was not installed, is compared with a
    new one, which lacks the heads.

    Errors may be those of `TOLERANCES` for the dtype. In fp32 they may also be 4 times those of
    torch's own float32 against its float64, but not more than in fp16. `seed` is that of the random
    inputs. Raises ValueError if the export is of another model.
    """
    runtime = Runtime(directory, device=device, dtype=dtype)
    check_same_model(runtime, model)
    info = runtime.info
    with torch_model(model, info.manifest.get("shortlist")):
        has_reference = (info.directory / FILE).is_file()
        reference = Reference.read(info.directory) if has_reference else make_reference(model, info)
        return prove(runtime, model, reference, cases, seed)


def check_same_model(runtime: Runtime, model: "PreTrainedModel") -> None:
    """Raise ValueError unless the export has the architecture and all sizes of `model`.

    Otherwise the comparison would fail inside numpy.
    """
    facts = {"architecture": model_class(runtime.architecture), **runtime.config}
    facts["num_labels"] = len(runtime.config.get("id2label") or ())
    expected = {name: getattr(model.config, name, None) for name in SIZES}
    for name, value in {"architecture": type(model).__name__, **expected}.items():
        if facts.get(name, value) != value:
            export = runtime.info.directory
            raise ValueError(
                f"{export} has {name}={facts[name]!r}, expected {value!r} as in the checkpoint"
            )


def prove(
    runtime: Runtime,
    model: "PreTrainedModel",
    reference: Reference | None,
    cases: int,
    seed: int = 0,
) -> Report:
    """Compare an open export with `model`, see `verify`, inside `torch_model`. Return the report.

    One graph is made from an export without a `reference`. A `reference` without a manifest is that
    of an export which is being written.
    """

    def compare(tolerance: Tolerance) -> Report:
        report = Report(tolerance)
        for title, case in torch_cases(runtime, model, cases, seed):
            results, real = outcome(runtime.model, case, STEPS), case.real_values(runtime.info)
            report.compare_all(results, case.results[TORCH], real, f"{title}, ")
            report.cases += 1
        if reference is not None:
            if reference.manifest:
                tolerance = stored_tolerance(reference, runtime.dtype)
            report.problems += reference_problems(Subject(runtime, reference, tolerance))
        return report

    report = compare(TOLERANCES[runtime.dtype])
    if report.failures and runtime.dtype == "fp32":
        compared = torch_cases(runtime, model, cases, seed)
        if reference is not None and not reference.manifest:
            compared = chain([("reference", reference)], compared)
        report = compare(widened(rounding(model, runtime.info, compared)))
    return report


def widened(rounding: Tolerance) -> Tolerance:
    """Return the tolerance in float32 of a model for which torch's own errors are `rounding`: at
    least the usual one, at most that of float16."""
    limits = zip(TOLERANCES["fp32"], rounding, TOLERANCES["fp16"])
    return Tolerance(*(min(max(usual, ROUNDING * error), half) for usual, error, half in limits))


def torch_cases(
    runtime: Runtime, model: "PreTrainedModel", cases: int, seed: int
) -> Iterable[tuple[str, Reference]]:
    """Yield the title and the random inputs of each case, with torch's results."""
    rng, info = np.random.default_rng(seed), runtime.info
    takes_empty = not info.generates or runtime.model.factory.supports_empty_prompts
    paddings = PADDINGS if takes_empty else PADDINGS[:2]
    for number in range(cases):
        padding = paddings[number % len(paddings)]
        case = case_inputs(info, rng, padding)
        case.results[TORCH] = torch_outcome(model, info, case)
        shape = next(iter(case.feeds.values())).shape
        yield f"case {number} {shape}, padding: {padding}", case


def reference_problems(subject: Subject) -> list[str]:
    """Return a line for each check of the reference that fails."""
    checks = {name: attempt(check) for name, check in subject.checks.items()}
    if subject.reference.manifest:
        manifest = subject.model.info.manifest
        checks["manifest"] = compare_manifests(manifest, subject.reference)
    return [f"reference, {name}: {check}" for name, check in checks.items() if not check.ok]
