"""What is asked of an engine, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..inference.options import Options

# why an answer ended: by an end token, or by the most tokens it may have
STOP, LENGTH = "stop", "length"


@dataclass(frozen=True, eq=False)
class Job:
    """One input that is to be continued, checked; `Admission.job` makes it. Its beams, or its
    samples, are rows of the batch.

    Args:
        options: resolved, see `options.resolve`.
        prompt: the tokens before the first new one; for seq2seq the start token and what the target
            begins with.
        source: for seq2seq what the encoder reads.
        top_logprobs: how many of the likeliest tokens are reported at each place, beside the one
            that was taken; `None` for no probabilities at all.
        scores_prompt: whether the tokens of the prompt are reported too, all but the first.
        padding: how many tokens of it stood before the prompt, which some options count, as
            transformers does.
    """

    options: Options
    prompt: Sequence[int]
    source: Sequence[int] | None = None
    top_logprobs: int | None = None
    scores_prompt: bool = False
    padding: int = 0

    @property
    def rows(self) -> int:
        return self.options.rows_per_input


@dataclass(frozen=True)
class TokenLogprobs:
    """log p of a token, by the softmax of the model's logits, and of the likeliest ones in its
    place, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Generated:
    """One of the answers to a job, the best first: the new `tokens`, the end token among them if it
    came; beam search's `score`; and what the job asked of probabilities, of the prompt's tokens
    (without the first) and of the new ones."""

    tokens: list[int]
    finish_reason: str
    score: float | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class Event:
    """The next `token` of the answer number `index` of a job, at once; `finish_reason` with its
    last one."""

    index: int
    token: int
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None
