"""Texts to an engine's jobs, one for each sentence, and what comes back to texts, as `TextRuntime.translate`."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ..engine.jobs import Generated, Job
from ..engine.refusals import TooLong
from ..runtime import options as option_fields
from ..runtime.tasks.translation import Plan, parts_of, plan_of
from .models import ServedModel

LONG = 1000  # characters: what takes longer than about a millisecond is no work for the event loop
MOST_SENTENCES = 4096  # of one request
LONGEST_TOKEN = 16  # characters: no language has sentences whose tokens have more on average


async def translate(
    model: ServedModel, texts: Sequence[str], src_lang: str | None = None, tgt_lang: str | None = None, **options: Any
) -> list[list[str]]:
    """Of each text its `num_return_sequences` translations, the best first. The first is what `TextRuntime.translate` gives,
    the second is joined of the second of each sentence, and so on. `options` as `Runtime.generate`.

    Raises:
        UsageError, ValueError: as `TextRuntime.translate`.
        TooLong, Refusal: as `Engine.job` and `Engine.answers`; TooLong for more than `MOST_SENTENCES`.
    """
    assert model.engine is not None  # every model that translates has one
    size = sum(map(len, texts))
    plan, jobs = await offloaded(size, planned, model, texts, src_lang, tgt_lang, options)
    answers = await model.engine.answers(jobs)
    return await offloaded(size, joined, model, plan, answers)


async def offloaded(size: int, function: Callable, *args: Any) -> Any:
    """What `function` returns: from a thread if `size` characters make it long, else at once."""
    return await asyncio.to_thread(function, *args) if size > LONG else function(*args)


def planned(
    model: ServedModel, texts: Sequence[str], src_lang: str | None, tgt_lang: str | None, options: dict[str, Any]
) -> tuple[Plan, list[Job]]:
    assert model.engine is not None
    check_sentences(model, texts)
    options = {"num_return_sequences": 1, **option_fields.check(options)}
    plan = plan_of(model.runtime, texts, True, src_lang, tgt_lang, options)
    options["max_new_tokens"] = min(plan.limit, model.engine.room.length)
    job = model.engine.job
    return plan, [job(row, {**options, **target}) for row, target in zip(plan.rows, plan.targets)]


def check_sentences(model: ServedModel, texts: Sequence[str]) -> None:
    """Raises TooLong for more than `MOST_SENTENCES`, and for one that no slot holds, before their tokens take memory."""
    assert model.engine is not None
    if sum(map(len, texts)) <= MOST_SENTENCES:
        return
    sizes = [len(part) for text in texts for part, is_sentence in parts_of(model.runtime, text, split=True) if is_sentence]
    if len(sizes) > MOST_SENTENCES:
        raise TooLong(f"the texts have {len(sizes)} sentences together, expected at most {MOST_SENTENCES}")
    if (longest := max(sizes)) > (most := model.engine.room.source * LONGEST_TOKEN):
        raise TooLong(f"a sentence has {longest} characters, expected at most {most}")


def joined(model: ServedModel, plan: Plan, answers: Sequence[Sequence[Generated]]) -> list[list[str]]:
    count = len(answers[0])
    decoded = model.runtime.decode([answer.tokens for own in answers for answer in own])
    return [list(own) for own in zip(*(plan.join(decoded[place::count]) for place in range(count)))]
