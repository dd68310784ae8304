"""Comparisons of results with expected ones."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..engine.inputs import Generated
from .reference import Arrays
from .tolerances import Tolerance, relative_errors

# results that are no outputs of a graph
SEARCHED = ("greedy", "greedy_margins", "beams", "beam_scores", "logprobs", "scales")


class Comparison(NamedTuple):
    """A comparison: whether it is as expected, what was seen, what was expected, and the traceback
    if an error ended it."""

    ok: bool
    seen: str
    expected: str
    traceback: str = ""


def compare_values(expected: Arrays, results: Arrays, tolerance: Tolerance) -> Comparison:
    """Compare the outputs of graphs in `results` with those in `expected`, by name.

    Names in `SEARCHED` are left out, and so are `results` that `expected` does not have.
    """
    names = [name for name in expected if name not in SEARCHED]
    for name in names:
        values, shape = results[name], expected[name].shape
        if values.shape != shape:
            return Comparison(False, f"{name} has shape {values.shape}", f"{shape}")
    errors = np.concatenate([value_errors(results[name], expected[name]) for name in names])
    largest, mean = float(errors.max(initial=0)), float(errors.mean())
    seen = f"largest error {largest:.1e}, mean {mean:.1e}, of {errors.size} values"
    return Comparison(tolerance.problem(largest, mean) is None, seen, str(tolerance))


def value_errors(values: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the relative errors (N,) of all values, without those that a shortlist excludes."""
    is_excluded = np.isneginf(expected) & np.isneginf(values)
    return relative_errors(values, expected)[~is_excluded]


def compare_tokens(
    expected: Arrays, rows: Sequence[np.ndarray], tolerance: Tolerance
) -> Comparison:
    """Compare the tokens of each of `rows` (T,) with those of greedy search in `expected`.

    If there are more `rows` than in `expected`, these start again. A row is compared up to its
    first near tie: two logits whose difference is below twice the tolerance may change places.
    """
    is_clear = expected["greedy_margins"] > 2 * tolerance.max_error
    lengths = np.logical_and.accumulate(is_clear, axis=1).sum(axis=1)
    same = compared = 0
    for place, row in enumerate(rows):
        length = int(lengths[place % len(lengths)])
        tokens = expected["greedy"][place % len(lengths), :length]
        same += int((row[:length] == tokens[: len(row)]).sum())
        compared += length
    count = len(rows) * is_clear.shape[1]
    seen = f"{same} of {compared} tokens equal"
    expected_tokens = f"all before a near tie or the end, at most {count}"
    return Comparison(same == compared, seen, expected_tokens)


def compare_beams(expected: Arrays, results: Arrays, tolerance: Tolerance) -> Comparison:
    """Compare the sequences of beam search in `results` with those in `expected`, by their scores
    only: several may be the best."""
    scale = float(expected["scales"].max())
    errors = np.abs(results["beam_scores"] - expected["beam_scores"]) / scale
    largest = float(errors.max())
    both = [results["beams"], expected["beams"]]
    length = min(rows.shape[1] for rows in both)
    same = (both[0][:, :length] == both[1][:, :length]).all(axis=1)
    seen = f"{same.sum()} of {len(same)} sequences equal, largest error of a score {largest:.1e}"
    allowed = 2 * tolerance.max_error
    return Comparison(largest <= allowed, seen, f"scores within {allowed:.2g}")


def compare_logprobs(
    expected: Arrays, served: Sequence[Generated], tolerance: Tolerance
) -> Comparison:
    """Compare the log probabilities of the reference's tokens, which end the prompts of `served`
    sequences, with the rows of the reference in turn."""
    rows, length = expected["logprobs"].shape
    largest = 0.0
    for place, sequence in enumerate(served):
        assert sequence.prompt_logprobs is not None  # they were requested
        logprobs = [token.logprob for token in sequence.prompt_logprobs[-length:]]
        errors = np.abs(logprobs - expected["logprobs"][place % rows])
        largest = max(largest, float((errors / expected["scales"][place % rows]).max()))
    allowed = 2 * tolerance.max_error
    seen = f"largest error of a log probability {largest:.1e}"
    return Comparison(largest <= allowed, seen, f"at most {allowed:.2g}")


def compare_all(expected: Arrays, results: Arrays, tolerance: Tolerance) -> Comparison:
    """Compare the `results` of a run with those of another, `expected`: by their bits, and if these
    differ, within the `tolerance`."""
    if all(np.array_equal(expected[name], results[name]) for name in results):
        return Comparison(True, f"the same bits in {', '.join(results)}", "")
    parts = [compare_values(expected, results, tolerance)]
    if "greedy" in expected:
        parts.append(compare_tokens(expected, [*results["greedy"]], tolerance))
        parts.append(compare_beams(expected, results, tolerance))
    return together(parts)


def together(parts: Sequence[Comparison]) -> Comparison:
    """Return one comparison for several: of those that failed, or of all if none failed."""
    parts = [part for part in parts if not part.ok] or parts
    seen, expected = ("; ".join(dict.fromkeys(texts)) for texts in list(zip(*parts))[1:3])
    return Comparison(all(part.ok for part in parts), seen, expected)
