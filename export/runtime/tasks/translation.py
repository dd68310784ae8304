"""Texts of any length, translated sentence by sentence."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from .rows import require, single_texts
from .sentences import WIDE_ENDS, sentences_and_spaces

if TYPE_CHECKING:
    from ..text import TextRuntime

BATCH_SIZE = 32  # sentences that run together
ONE_FOR_EACH = ("num_return_sequences", "target_prefix")  # what is for texts that stay whole


def translate(runtime: "TextRuntime", texts: Sequence[str], /, split: bool = True, **options: Any) -> list[str]:
    """The translation of each text, which may be as long as you like: its sentences are translated one by one, and joined by
    what stands between them, so that line breaks and paragraphs stay.

    Args:
        texts: strings.
        split: by the rules of `vanilla_transformer_export.runtime.tasks.sentences`; without, each text is one sentence.
        options: as `generate`, but one translation for each text, and without `target_prefix`.

    Raises:
        UsageError: for options that do not go with one translation of each text, and as `generate`.
        ValueError: for an export that is no encoder-decoder, a text that is empty, a sentence of more tokens than the model has
            positions, and as `generate`.
    """
    require(runtime, "translate", "Seq2SeqForConditionalGeneration")
    if not isinstance(split, bool):
        raise UsageError(f"split must be True or False, got {split!r:.60}")
    for name in ONE_FOR_EACH:
        if options.get(name) not in (None, 1):
            found = f"{name} is {options[name]!r:.60}"
            raise UsageError(f"{found}, and translate gives one translation of each whole text: use generate")
    parts = [list(sentences_and_spaces(text)) if split else [(text, True)] for text in single_texts(texts)]
    sentences = [part for each in parts for part, is_sentence in each if is_sentence]
    translated = iter(translations(runtime, sentences, options))
    return [joined([(next(translated) if is_sentence else part, is_sentence) for part, is_sentence in each]) for each in parts]


def translations(runtime: "TextRuntime", sentences: list[str], options: dict[str, Any]) -> list[str]:
    """Of each sentence; those of similar length run together."""
    found = [""] * len(sentences)
    order = sorted(range(len(sentences)), key=lambda place: len(sentences[place]))
    for start in range(0, len(order), BATCH_SIZE):
        chosen = order[start : start + BATCH_SIZE]
        for place, text in zip(chosen, runtime.generate([sentences[place] for place in chosen], **options), strict=True):
            found[place] = text
    return found


def joined(parts: list[tuple[str, bool]]) -> str:
    """The text of `parts`, with a space between two sentences that had none, as in Chinese, unless the first ends as there."""
    text = ""
    is_open = False  # a sentence came last
    for part, is_sentence in parts:
        if is_sentence and is_open and text and text[-1] not in WIDE_ENDS:
            text += " "
        text += part
        is_open = is_sentence or (is_open and not part)
    return text
