"""Translation over HTTP: split texts into sentences, generate each, join the results, as
`TextRuntime.translate` does."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import TooLong
from ...inference import options as option_fields
from ...scheduler.request import Generated, GenerationInput
from ...text.tasks.translation import Plan, Splitting, parts_of, plan_of
from ..models import ServedModel

LONG = 1000  # characters: what takes longer than about a millisecond is no work for the event loop
MOST_SENTENCES = 4096  # per request
LONGEST_TOKEN = 16  # characters: no language has sentences whose tokens have more on average


async def translate(
    model: ServedModel,
    texts: Sequence[str],
    src_lang: str | None = None,
    tgt_lang: str | None = None,
    splitting: Splitting = Splitting(),  # noqa: B008, it cannot change
    **options: Any,
) -> list[list[str]]:
    """Return `num_return_sequences` translations of each text, best first. The first is the result
    of `TextRuntime.translate`; the second joins the second-best of each sentence, and so on.
    `options` are those of `Runtime.generate`.

    Raises:
        UsageError, ValueError: as `TextRuntime.translate`.
        TooLong, RequestError: as `Admission.admit` and `Client.generate`; TooLong for more than
            `MOST_SENTENCES`.
    """
    assert model.scheduler is not None  # every model that translates has one
    size = sum(map(len, texts))
    plan, inputs = await offloaded(
        size, planned, model, texts, splitting, src_lang, tgt_lang, options
    )
    answers = await model.scheduler.generate(inputs) if inputs else []
    num_results = options.get("num_return_sequences") or 1
    return await offloaded(size, joined, model, plan, answers, num_results)


async def offloaded(size: int, function: Callable, *args: Any) -> Any:
    """Call `function` and return its result, in a thread if there are more than `LONG`
    characters."""
    return await asyncio.to_thread(function, *args) if size > LONG else function(*args)


def planned(
    model: ServedModel,
    texts: Sequence[str],
    splitting: Splitting,
    src_lang: str | None,
    tgt_lang: str | None,
    options: dict[str, Any],
) -> tuple[Plan, list[GenerationInput]]:
    assert model.scheduler is not None
    splitting.check()
    check_sentences(model, texts, splitting)
    options = {"num_return_sequences": 1, **option_fields.check(options)}
    plan = plan_of(model.runtime, texts, splitting, src_lang, tgt_lang, options)
    options["max_new_tokens"] = min(plan.limit, model.admission.slot_size.length)
    admit = model.admission.admit
    return plan, [admit(row, {**options, **target}) for row, target in zip(plan.rows, plan.targets)]


def check_sentences(model: ServedModel, texts: Sequence[str], splitting: Splitting) -> None:
    """Raise TooLong for more than `MOST_SENTENCES`, or for a sentence that no slot holds. Called
    before their tokens take memory."""
    assert model.scheduler is not None
    if sum(map(len, texts)) <= MOST_SENTENCES:
        return
    parts = [part for text in texts for part in parts_of(model.runtime, text, splitting)]
    sizes = [len(part.text) for part in parts if part.is_translated]
    if len(sizes) > MOST_SENTENCES:
        raise TooLong(
            f"the texts have {len(sizes)} sentences together, expected at most {MOST_SENTENCES}"
        )
    longest = max(sizes, default=0)
    most = model.admission.slot_size.source * LONGEST_TOKEN
    if longest > most:
        raise TooLong(f"a sentence has {longest} characters, expected at most {most}")


def joined(
    model: ServedModel, plan: Plan, answers: Sequence[Sequence[Generated]], num_results: int
) -> list[list[str]]:
    """Return `num_results` translations of each text, best first."""
    decoded = model.runtime.decode([answer.tokens for own in answers for answer in own])
    return [
        list(own)
        for own in zip(*(plan.join(decoded[place::num_results]) for place in range(num_results)))
    ]
