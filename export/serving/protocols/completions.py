"""Completions in the format of OpenAI's `/v1/completions`: incremental text, stop texts and log
probabilities. Offsets of tokens are positions in the returned text."""

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from ...engine.inputs import LENGTH, STOP, Event, Generated, GenerationInput, TokenLogprobs
from ...engine.loop import Client
from ...text.tasks.task import JsonObject
from ...text.text_model import TextModel
from ..generation import call_off_loop

INSPECTION_COST = 30  # characters that are tokenized in the time that inspecting one token takes
MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON lacks
Chunk = JsonObject  # a choice of a response, or the next part of a choice
KINDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class StopTexts:
    """A filter that ends a text before the first stop text.

    `add` takes the next part of the text and returns the part that is final. Characters that may
    begin a stop text stay in `held` until more text follows. If the text has a stop text,
    `is_stopped` is True, and `add` must not be called again.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = stops
        self.held = ""
        self.is_stopped = False

    def add(self, piece: str) -> str:
        text = self.held + piece
        positions = [text.find(stop) for stop in self.stops if stop in text]
        self.is_stopped = bool(positions)
        certain = (
            min(positions)
            if positions
            else len(text) - max((overlap_length(text, stop) for stop in self.stops), default=0)
        )
        self.held = text[certain:]
        return text[:certain]


def overlap_length(text: str, stop: str) -> int:
    """Return the length of the longest beginning of `stop`, shorter than `stop`, with which `text`
    ends."""
    return next(
        (
            size
            for size in range(min(len(text), len(stop) - 1), 0, -1)
            if text.endswith(stop[:size])
        ),
        0,
    )


def finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


class Answer:
    """One completion of a prompt. `begins` is the start of its text: the prompt if it is echoed, or
    an empty string."""

    def __init__(self, runtime: TextModel, stops: Sequence[str], begins: str, has_logprobs: bool):
        self.detokenizer = runtime.detokenizer()
        self.stops = StopTexts(stops)
        self.length = len(begins)  # length of the text so far, with the characters held back
        self.names = runtime.token_names if has_logprobs else None
        self.logprobs: list[tuple] = []  # of the tokens since the last part
        self.tokens = 0
        self.finish_reason: str | None = None

    def add(self, event: Event) -> str:
        """Return the text that is final after the token of `event`. The last token or a stop text
        sets `finish_reason`."""
        self.tokens += 1
        self.note(event.token, event.logprobs, self.length)
        piece = self.detokenizer.add(event.token)
        if event.finish_reason is not None:
            piece += self.detokenizer.end()
        self.length += len(piece)
        text = self.stops.add(piece)
        if self.stops.is_stopped:
            self.finish_reason = STOP
        elif event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            text += self.stops.held
        return text

    def note(self, token: int, known: TokenLogprobs | None, offset: int) -> None:
        """Note the log probabilities `known` of a token at the character `offset` of the text, if
        the answer has any. They are None for the first token of the prompt."""
        if self.names is None:
            return
        if known is None:
            self.logprobs.append((self.names(token), None, None, offset))
            return
        top: dict[str, float] = {}
        for other, logprob in (*known.top, (known.token, known.logprob)):
            top.setdefault(self.names(other), finite(logprob))  # the first token of a name counts
        self.logprobs.append((self.names(token), finite(known.logprob), top, offset))

    def take_logprobs(self) -> dict[str, list] | None:
        """Return what was noted since the last call as columns, {name of `KINDS`: values}."""
        if self.names is None:
            return None
        rows, self.logprobs = self.logprobs, []
        return {kind: [row[column] for row in rows] for column, kind in enumerate(KINDS)}


@dataclass
class Completion:
    """The answers to one prompt.

    Args:
        first: index of the first answer in the response.
        begins: start of the texts: the prompt if it is echoed, or an empty string.
        is_empty: True if the request asks for no new token. The input asks for one, the minimum.
    """

    runtime: TextModel
    input: GenerationInput
    first: int
    begins: str
    stops: Sequence[str]
    is_empty: bool
    answers: list[Answer] = field(init=False)

    def __post_init__(self) -> None:
        has_logprobs = self.input.top_logprobs is not None
        count = self.input.options.num_return_sequences
        self.answers = [
            Answer(self.runtime, self.stops, self.begins, has_logprobs) for _ in range(count)
        ]

    @property
    def tokens(self) -> int:
        """Number of new tokens of all answers so far."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def is_buffered(self) -> bool:
        """True if the answers are complete at the end only: with beams, log probabilities of the
        prompt, or no new token."""
        return self.input.options.num_beams > 1 or self.input.scores_prompt or self.is_empty

    @property
    def inspects_tokens(self) -> bool:
        """True if each token is inspected: for stop texts, log probabilities or no new token."""
        return bool(self.stops) or self.input.top_logprobs is not None or self.is_empty

    def size(self, generated: list[Generated]) -> int:
        """Return the cost of `full_choices` for the answers `generated`, as the number of
        characters whose tokenization takes as long."""
        tokens = (
            sum(len(result.tokens) for result in generated)
            + len(self.input.prompt) * self.input.scores_prompt
        )
        return INSPECTION_COST * tokens if self.inspects_tokens else tokens

    async def chunks(self, client: Client) -> AsyncGenerator[Chunk, None]:
        """Yield the parts of the answers as they are generated. Generation stops once all answers
        have ended, such as at stop texts.

        Raises RequestError before the first part if `client` rejects the request. If
        `is_buffered`, each answer is one part.
        """
        if self.is_buffered:
            [generated] = await client.generate([self.input])
            for chunk in await call_off_loop(self.size(generated), self.full_choices, generated):
                yield chunk
            return
        async with aclosing(client.stream(self.input)) as events:
            has_started = False
            async for event in events:
                if not has_started:  # before the first event the request may be rejected
                    has_started = True
                    for chunk in self.echo(None):
                        yield chunk
                for chunk in self.handle_event(event):
                    yield chunk
                if all(answer.finish_reason for answer in self.answers):
                    return

    def replay(self, generated: list[Generated]) -> Iterator[Chunk]:
        """Yield the parts of answers that were generated completely, token by token, up to stop
        texts. If no new token was requested, an answer is one empty part after the echo."""
        yield from self.echo(generated[0].prompt_logprobs)
        for index, result in enumerate(generated):
            if self.is_empty:
                yield self.chunk(index, "", LENGTH)
                continue
            last = len(result.tokens) - 1
            for position, token in enumerate(result.tokens):
                known = result.logprobs[position] if result.logprobs else None
                yield from self.handle_event(
                    Event(index, token, result.finish_reason if position == last else None, known)
                )

    def handle_event(self, event: Event) -> Iterator[Chunk]:
        """Yield a chunk with the text of an answer that is final after the token of `event`.

        Nothing is yielded without such text, unless the answer ends with this token. The last chunk
        has the finish reason, and its text may be empty. After it, the answer yields nothing more.
        """
        answer = self.answers[event.index]
        if answer.finish_reason is None:
            text = answer.add(event)
            if text or answer.finish_reason is not None:
                yield self.chunk(event.index, text, answer.finish_reason)

    def echo(self, known: list[TokenLogprobs] | None) -> Iterator[Chunk]:
        """Yield the echoed prompt as a part of each answer; nothing if it is not echoed.

        `known` are the log probabilities of its tokens after the first, None if they are not
        requested.
        """
        if not self.begins and known is None:
            return
        for index, answer in enumerate(self.answers):
            if known is not None:
                self.add_prompt(answer, known)
            yield self.chunk(index, self.begins, None)

    def add_prompt(self, answer: Answer, known: list[TokenLogprobs]) -> None:
        detokenizer, offset = self.runtime.detokenizer(), 0
        for token, logprob in zip(self.input.prompt, [None, *known], strict=True):
            answer.note(token, logprob, min(offset, len(self.begins)))
            offset += len(detokenizer.add(token))

    def chunk(self, index: int, text: str, finish_reason: str | None) -> Chunk:
        return {
            "text": text,
            "index": self.first + index,
            "logprobs": self.answers[index].take_logprobs(),
            "finish_reason": finish_reason,
        }

    def full_choices(self, generated: list[Generated]) -> list[Chunk]:
        """Return each answer of `generated` as one choice of the response."""
        if self.inspects_tokens:
            return join_chunks(self.replay(generated))
        texts = self.runtime.decode([result.tokens for result in generated])
        for answer, result in zip(self.answers, generated, strict=True):
            answer.tokens, answer.finish_reason = len(result.tokens), result.finish_reason
        return [
            self.chunk(index, self.begins + text, generated[index].finish_reason)
            for index, text in enumerate(texts)
        ]


def join_chunks(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return the complete choices, sorted by index, each joined from its chunks."""
    parts: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        parts.setdefault(chunk["index"], []).append(chunk)
    return [merge_chunks(parts[index]) for index in sorted(parts)]


def merge_chunks(parts: list[Chunk]) -> Chunk:
    logprobs = None
    if parts[0]["logprobs"] is not None:
        logprobs = {
            kind: [value for part in parts for value in part["logprobs"][kind]] for kind in KINDS
        }
    return {**parts[-1], "text": "".join(part["text"] for part in parts), "logprobs": logprobs}
