"""Generation over HTTP: texts become inputs of an engine, and its results become texts, as
`TextRuntime` does. Long texts are tokenized and decoded in threads."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.inputs import Generated, GenerationInput
from ..errors import TooLong
from ..text.languages import Direction
from ..text.tasks.alignment import Translation
from ..text.tasks.segments import TextOptions, check_aligning, plain_text
from ..text.tasks.translation import (
    Plan,
    decode_texts,
    make_plan,
    unknown_token,
)
from .models import ServedModel

MAX_INLINE_CHARACTERS = 1000  # about 1 ms of tokenization; longer work leaves the event loop
MAX_SENTENCES = 4096  # per request
MAX_KEPT = 100  # texts that stay unchanged
MAX_TOKEN_LENGTH = 16  # characters per token: no language has more on average


async def translate(
    model: ServedModel,
    texts: Sequence[str],
    direction: Direction,
    text_options: TextOptions,
    options: dict[str, Any],
) -> list[list[Any]]:
    """Return `num_return_sequences` translations of each text, those of beam search best first. The
    only result of a blank text is that text.

    The first joins the first result of each sentence, as `TextRuntime.translate` does; the second
    joins the second results, and so on. `direction` has the languages of a multilingual model, or
    the word before each text. `text_options` say how texts are split into sentences, and what is
    aligned: a translation may be a `Translation`. `options` are those of `Runtime.generate`.

    Raises:
        UsageError: if an option or a language is invalid.
        ValueError: if the export does not translate or cannot align words.
        TooLong: if there are more than `MAX_SENTENCES`, or a sentence is too long for a slot.
        RequestError: if the queue is full or the server is shutting down.
    """
    filled = [text for text in texts if text.strip()]
    size = sum(map(len, filled))
    groups: list[list[Any]] = []
    if filled:
        job = await call_off_loop(size, plan_job, model, filled, direction, text_options, options)
        answers = await model.client.generate(job.inputs)
        count = options.get("num_return_sequences") or 1
        groups = await call_off_loop(size, job.join_all, answers, count)
    rest = iter(groups)
    is_aligned = text_options.return_alignments
    return [
        next(rest) if text.strip() else [Translation(text, []) if is_aligned else text]
        for text in texts
    ]


@dataclass(frozen=True)
class TranslationJob:
    """The plan of a translation, and a generation input for each sentence that is not copied.
    `added` is the number of characters before each text, of the word of a language."""

    plan: Plan
    inputs: list[GenerationInput]
    added: int

    def join(self, results: Sequence[Generated]) -> list[Any]:
        """Return the translation of each text, from the result of each of `inputs`."""
        joined = self.plan.join(results)
        if not self.plan.text_options.return_alignments:
            return joined
        return [result.without_prefix(self.added) for result in joined]

    def join_all(self, answers: list[list[Generated]], count: int) -> list[list[Any]]:
        """Return `count` translations of each text, from as many results of each of `inputs`."""
        columns = zip(*answers, strict=True) if answers else [()] * count
        return [list(group) for group in zip(*map(self.join, columns), strict=True)]


def plan_job(
    model: ServedModel,
    texts: Sequence[str],
    direction: Direction,
    text_options: TextOptions,
    options: dict[str, Any],
) -> TranslationJob:
    """Return the job of translating `texts`. The arguments are those of `translate`.

    Raises:
        UsageError: if an option or a language is invalid.
        ValueError: if the export does not translate, or a text is blank.
        TooLong: if there are more than `MAX_SENTENCES`, or a sentence is too long for a slot.
    """
    options = {"num_return_sequences": 1, **options}
    texts = [*map(direction.add_word, texts)]
    languages = direction.src_lang, direction.tgt_lang
    plan = make_plan(model.runtime, texts, text_options, *languages, options)
    if len(plan.sentences) > MAX_SENTENCES:
        seen = f"the texts have {len(plan.sentences)} sentences together"
        raise TooLong(f"{seen}, expected at most {MAX_SENTENCES}")
    slot = model.admission.slot_size
    check_characters("sentence", map(len, plan.texts), slot.source)
    fitting = plan.options[0]  # of all texts: they have one language
    if fitting.max_new_tokens > slot.length:
        fitting = dataclasses.replace(fitting, max_new_tokens=slot.length)
    admit = model.admission.admit
    unknown = unknown_token(model.runtime, text_options.replace_unknowns)
    inputs = [
        dataclasses.replace(
            admit(row, fitting, place=place), is_aligned=is_aligned, unknown_token=unknown
        )
        for row, (_, place, is_aligned) in zip(plan.rows, plan.sentences, strict=True)
    ]
    return TranslationJob(plan, inputs, len(direction.add_word("")))


async def continue_texts(
    model: ServedModel,
    texts: list[str],
    options: dict[str, Any],
    src_lang: str | None = None,
    tgt_lang: str | None = None,
    replace_unknowns: bool = False,
) -> list[list[str]]:
    """Return the `num_return_sequences` texts that the model generates for each text, as
    `TextRuntime.generate` does, with its arguments. `options` are those of `Runtime.generate`.

    Raises:
        UsageError: if an option or a language is invalid.
        ValueError: if the export cannot align words, or a text is blank.
        TooLong: if a text is too long for a slot.
        RequestError: if the queue is full or the server is shutting down.
    """
    slot = model.admission.slot_size
    check_characters("text", map(len, texts), slot.source or slot.length)
    check_aligning(model.info, replace_unknowns=replace_unknowns)
    size = sum(map(len, texts))
    unknown = unknown_token(model.runtime, replace_unknowns)

    def admit() -> list[GenerationInput]:
        rows, checked = model.runtime.checked_rows(texts, src_lang, tgt_lang, options)
        admitted = model.admission.admit_all(rows, checked)
        return [dataclasses.replace(row, unknown_token=unknown) for row in admitted]

    inputs = await call_off_loop(size, admit)
    answers = await model.client.generate(inputs)

    def decode() -> list[list[str]]:
        results = [result for group in answers for result in group]
        rows = [row.source or [] for row in inputs]  # a decoder has none
        decoded = iter(decode_texts(model.runtime, texts, rows, results, unknown))
        return [[plain_text(next(decoded)) for _ in group] for group in answers]

    return await call_off_loop(size, decode)


async def call_off_loop(num_characters: int, function: Callable, *args: Any) -> Any:
    """Return `function(*args)`, called in a thread if `num_characters` is more than
    `MAX_INLINE_CHARACTERS`.

    `num_characters` is what the function has to tokenize, or work that takes as long.
    """
    return (
        await asyncio.to_thread(function, *args)
        if num_characters > MAX_INLINE_CHARACTERS
        else function(*args)
    )


def check_characters(name: str, sizes: Iterable[int], max_tokens: int) -> None:
    """Raise TooLong if one of `sizes`, numbers of characters, cannot be of `max_tokens` tokens.

    It needs no tokens, so it saves their memory. `name` is what has as many characters, for the
    message.
    """
    longest, limit = max(sizes, default=0), max_tokens * MAX_TOKEN_LENGTH
    if longest > limit:
        raise TooLong(f"a {name} has {longest} characters, expected at most {limit}")
