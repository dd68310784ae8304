"""Inputs and results of the scheduler."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..inference.options import Options

# why a sequence ended: at an end token, or at the maximum length
STOP, LENGTH = "stop", "length"


@dataclass(frozen=True, eq=False)
class GenerationInput:
    """One checked input to generate from, made by `Admission.admit`.

    Each of its beams or samples is a row of the batch.

    Args:
        options: resolved options, see `options.resolve`.
        prompt: tokens before the first new one. For seq2seq it is the decoder prompt, which begins
            with the start token.
        source: source tokens of a seq2seq model, read by the encoder.
        top_logprobs: number of best tokens that are reported with their log probabilities at each
            position, besides the generated token; `None` for no log probabilities.
        scores_prompt: True to report log probabilities of the prompt's tokens too, without the
            first.
        padding: number of padding tokens before the prompt. Some options count them, as in
            transformers.
        seed: seed of sampling in place of `options.seed`, derived from it with `logits.row_seed`.
        is_scored: True to report the score of each sequence without beams too.
        uniforms: returns the random numbers of sampling, by default those of `seed`.
    """

    options: Options
    prompt: Sequence[int]
    source: Sequence[int] | None = None
    top_logprobs: int | None = None
    scores_prompt: bool = False
    padding: int = 0
    seed: int | None = None
    is_scored: bool = False
    uniforms: Callable[[], float] | None = None

    @property
    def num_rows(self) -> int:
        return self.options.rows_per_input

    @property
    def num_independent_results(self) -> int:
        """The number of results that finish independently of each other.

        It is `num_return_sequences` with sampling, otherwise 1, because beams finish together.
        """
        return self.options.num_return_sequences if self.options.do_sample else 1


@dataclass(frozen=True)
class TokenLogprobs:
    """The log probability of a token, and `top`, the best tokens at its position with theirs.

    `top` is `[(token, log probability), …]`, best first. The values are the log softmax of the
    model's logits.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Generated:
    """One sequence generated from an input. The beams of an input are sorted, best first.

    Args:
        tokens: the new tokens, including the end token if it was generated.
        finish_reason: `STOP` (an end token) or `LENGTH` (the maximum number of tokens).
        score: the score of beam search, otherwise `None`.
        prompt_logprobs: log probabilities of the prompt's tokens after the first, if requested.
        logprobs: log probabilities of the new tokens, if requested.
    """

    tokens: list[int]
    finish_reason: str
    score: float | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class Event:
    """A new `token` of a streamed input, in its sequence number `index`.

    The last token of a sequence has a `finish_reason`. `logprobs` is set if requested.
    """

    index: int
    token: int
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None


class Update(NamedTuple):
    """A change of the request `number`: its new `events`, and in the last update its `results` or
    its `error`.

    The results are the sequences of each input. Those of beam search are sorted, best first;
    samples are in the order of their numbers.
    """

    number: int
    events: list[Event]
    results: list[list[Generated]] | None
    error: Exception | None

    @property
    def is_last(self) -> bool:
        """True if the request is answered or has failed."""
        return self.results is not None or self.error is not None

    def read_results(self) -> list[list[Generated]]:
        """Return the results of the last update, or raise its error."""
        if self.error is not None:
            raise self.error
        assert self.results is not None  # it is the last update
        return self.results


class Activity(NamedTuple):
    """A step of a worker, for metrics.

    Args:
        waits: the seconds that each part waited that has joined.
        first_tokens: the seconds from the arrival of a request to its first token.
        rows: the number of rows of the step.
        tokens: the number of their new tokens.
    """

    waits: list[float]
    first_tokens: list[float]
    rows: int
    tokens: int


def ignore_activity(activity: Activity) -> None:
    """Do nothing, where there are no metrics."""
