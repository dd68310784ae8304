"""Translation over HTTP: split texts into sentences, generate each sentence, and join the results,
as `TextRuntime.translate` does."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...engine.inputs import GenerationInput
from ...engine.limits import Admission
from ...errors import TooLong
from ...inference.options import Options
from ...text.tasks.alignment import unknown_token
from ...text.tasks.segments import TextOptions
from ...text.tasks.translation import Plan, join_results, make_plan, tokenize
from ..models import ServedModel

MAX_INLINE_CHARACTERS = 1000  # about 1 ms of tokenization; longer work leaves the event loop
MAX_SENTENCES = 4096  # per request
MAX_KEPT = 100  # texts that stay unchanged
MAX_TOKEN_LENGTH = 16  # characters per token: no language has more on average


async def translate(
    model: ServedModel,
    texts: Sequence[str],
    src_lang: str | None = None,
    tgt_lang: str | None = None,
    text_options: TextOptions = TextOptions(),  # noqa: B008, it cannot change
    **options: Any,
) -> list[list[Any]]:
    """Return `num_return_sequences` translations of each text, those of beam search best first.

    The first joins the first result of each sentence, as `TextRuntime.translate` does; the second
    joins the second results, and so on. `src_lang` and `tgt_lang` are the languages of a
    multilingual model. `text_options` say how texts are split into sentences, and what is aligned:
    a translation may be a `Translation`. `options` are those of `Runtime.generate`.

    Raises:
        UsageError: if an option or a language is invalid.
        ValueError: if the export does not translate or cannot align words, or a text is blank.
        TooLong: if there are more than `MAX_SENTENCES`, or a sentence is too long for a slot.
        RequestError: if the scheduler rejects the request.
    """
    assert model.scheduler is not None  # every model that translates has one
    size = sum(map(len, texts))
    plan, inputs = await call_off_loop(
        size, plan_inputs, model, texts, text_options, src_lang, tgt_lang, options
    )
    answers = await model.scheduler.generate(inputs) if inputs else []
    num_results = options.get("num_return_sequences") or 1
    rows = [row.source or [] for row in inputs]

    def join() -> list[list[Any]]:
        columns = zip(*answers, strict=True) if answers else [()] * num_results
        joined = [join_results(model.runtime, plan, rows, column) for column in columns]
        return [list(group) for group in zip(*joined, strict=True)]

    return await call_off_loop(size, join)


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


def plan_inputs(
    model: ServedModel,
    texts: Sequence[str],
    text_options: TextOptions,
    src_lang: str | None,
    tgt_lang: str | None,
    options: dict[str, Any],
) -> tuple[Plan, list[GenerationInput]]:
    """Return the plan of the translation, and a generation input for each sentence that is not
    copied.

    `text_options` say how `texts` are split into sentences, and what is aligned. `src_lang` and
    `tgt_lang` are the languages of a multilingual model, and `options` are generation options by
    name.

    Raises:
        UsageError: if an option or a language is invalid.
        ValueError: if the export does not translate, or a text is blank.
        TooLong: if there are more than `MAX_SENTENCES`, or a sentence is too long for a slot.
    """
    options = {"num_return_sequences": 1, **options}
    plan = make_plan(model.runtime, texts, text_options, src_lang, tgt_lang, options)
    check_sentences(plan.sentences, model.admission.slot_size.source)
    fitting = fit_slot(plan.options[0], model.admission)  # of all texts: they have one language
    rows = tokenize(model.runtime, plan)
    admit = model.admission.admit
    unknown = unknown_token(model.runtime, plan.aligning.replace_unknowns)
    return plan, [
        dataclasses.replace(
            admit(row, fitting, place=place), is_aligned=is_aligned, unknown_token=unknown
        )
        for row, place, is_aligned in zip(rows, plan.places, plan.are_aligned, strict=True)
    ]


def fit_slot(options: Options, admission: Admission) -> Options:
    """Return `options` with at most as many new tokens as a slot of `admission` has."""
    limit = min(options.max_new_tokens, admission.slot_size.length)
    is_more = options.max_new_tokens > limit
    return dataclasses.replace(options, max_new_tokens=limit) if is_more else options


def check_sentences(sentences: Sequence[str], max_tokens: int) -> None:
    """Raise TooLong for more than `MAX_SENTENCES`, or for one that cannot be of `max_tokens`
    tokens. This check needs no tokens, so it saves their memory."""
    if len(sentences) > MAX_SENTENCES:
        raise TooLong(
            f"the texts have {len(sentences)} sentences together, expected at most {MAX_SENTENCES}"
        )
    check_characters("sentence", map(len, sentences), max_tokens)


def check_characters(name: str, sizes: Iterable[int], max_tokens: int) -> None:
    """Raise TooLong if one of `sizes`, numbers of characters, cannot be of `max_tokens` tokens.

    `name` is what has as many characters, for the message.
    """
    longest, limit = max(sizes, default=0), max_tokens * MAX_TOKEN_LENGTH
    if longest > limit:
        raise TooLong(f"a {name} has {longest} characters, expected at most {limit}")
