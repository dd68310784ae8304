"""Token classification and named entities, like transformers' pipeline "token-classification"."""

import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from tokenizers import Encoding

from ...errors import UsageError
from ...heads import TAG, TEXT
from ..checks import check_choice, check_count, check_strings, is_strings, with_names
from ..scores import softmax
from ..text_model import MAX_WINDOWS, Cut, TextModel, check_windows
from .task import JsonObject, TaskCall

# aggregation of the tokens of a word: (tokens, labels) -> (labels,)
WORD_SCORES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "first": lambda scores: scores[0],
    "average": lambda scores: scores.mean(axis=0),
    "max": lambda scores: scores[scores.max(axis=1).argmax()],
}
STRATEGIES = ("none", "simple", *WORD_SCORES)
T = TypeVar("T")


def tag(
    runtime: TextModel,
    texts: Sequence[str],
    /,
    aggregation_strategy: str = "none",
    ignore_labels: Sequence[str] = ("O",),
    stride: int | None = None,
    *,
    max_windows: int | None = None,
) -> list[list[JsonObject]]:
    """Return the labeled tokens of each text, as the pipeline "token-classification" does. A token
    is `{"entity": str, "score": float, "index": int, "word": str, "start": int, "end": int}`.
    Aggregation returns entities, `{"entity_group": str, "score": float, "word": str, "start": int,
    "end": int}`. `start` and `end` are offsets in the text, `index` is an index of a token.

    Args:
        texts: strings. Texts longer than the tokenizer's `model_max_length` are truncated, or split
            into windows if `stride` is set.
        aggregation_strategy: `"none"` returns tokens. `"simple"` joins neighbors with the same
            label; `B-` begins a new entity. The others first give each word one label: `"first"` of
            its first token, `"average"` by the mean of its scores, `"max"` of the token with the
            best score.
        ignore_labels: labels to omit; with aggregation, labels without `B-` and `I-`.
        stride: number of tokens that the windows of a long text share; needs aggregation.
        max_windows: maximum number of windows of a text; None is no limit.

    Raises:
        UsageError: if the strategy is unknown, or `stride` is set without aggregation or not less
            than `model_max_length`.
        ValueError: if the export has no token classification head, a text is a pair, has no tokens
            or too many, or a label has no name.
        TooLong: if a text needs more than `max_windows`.
    """
    runtime.require(TAG)
    check_choice("aggregation_strategy", aggregation_strategy, STRATEGIES)
    if not is_strings(ignore_labels):
        seen = f"ignore_labels is {reprlib.repr(ignore_labels)}"
        raise UsageError(f"{seen}, expected a list of strings", "ignore_labels")
    labels = runtime.label_names()
    texts = check_strings(texts)
    cut = make_cut(runtime, aggregation_strategy, stride)
    if cut is not None and stride and max_windows is not None:
        for row, name in with_names(runtime.encode_texts(texts)):
            special = runtime.tokenizer.num_special_tokens_to_add(False)
            check_windows(name, len(row.ids), cut.longest - special - stride, max_windows)
    rows = runtime.encode_texts(texts, cut)
    windows = [[row, *(row.overflowing if stride is not None else ())] for row in rows]
    names = [name for _, name in with_names(texts)]
    all_scores = runtime.run_windows(
        windows, lambda row, outputs: softmax(outputs["logits"]), names
    )
    results = []
    for text, group, scores in zip(texts, windows, all_scores):
        entities = [
            entity
            for row, row_scores in zip(group, scores)
            for entity in aggregate(
                runtime, text_tokens(runtime, text, row, row_scores), labels, aggregation_strategy
            )
            if entity.get("entity", entity.get("entity_group")) not in ignore_labels
        ]
        results.append(remove_overlaps(entities) if len(group) > 1 else entities)
    return results


def make_cut(runtime: TextModel, strategy: str, stride: int | None) -> Cut | None:
    """Return the truncation of texts, or None if the tokenizer has no limit. With `stride` windows
    overlap by that many tokens.

    Raises UsageError for a `stride` out of range, or without aggregation (`strategy` "none").
    """
    longest = runtime.tokenizer_settings.longest
    if stride is not None:
        room = (
            None
            if longest is None
            else longest - runtime.tokenizer.num_special_tokens_to_add(False)
        )
        check_count("stride", stride, min_value=0, max_value=None if room is None else room - 1)
        if strategy == "none":
            raise UsageError(
                f"stride is {stride} with aggregation_strategy 'none', expected another strategy"
            )
    return None if longest is None else Cut(longest, stride=stride)


class Token(NamedTuple):
    """A token of a text: its `word`, span, `place` in the row and `scores` (labels,). It
    `continues_word` if it is not the first token of a word."""

    word: str
    start: int
    end: int
    place: int
    scores: np.ndarray
    continues_word: bool


def text_tokens(runtime: TextModel, text: str, row: Encoding, scores: np.ndarray) -> list[Token]:
    """Return the tokens of `row` that are not special. `scores` are (S, labels)."""
    knows_words = bool(getattr(runtime.tokenizer.model, "continuing_subword_prefix", None))
    unknown = runtime.tokenizer_settings.special_tokens["unk_token"]
    tokens = []
    facts = zip(row.ids, row.offsets, row.special_tokens_mask, scores, strict=True)
    for place, (token_id, (start, end), is_special, token_scores) in enumerate(facts):
        word = runtime.tokenizer.id_to_token(token_id) or ""
        # Without marks for subwords, a token without a space before it is one, as in the pipeline.
        continues_word = (
            len(word) != end - start
            if knows_words
            else start > 0 and " " not in text[start - 1 : start + 1]
        )
        if token_id == unknown:
            word, continues_word = text[start:end], False
        if not is_special:
            tokens.append(Token(word, start, end, place, token_scores, continues_word))
    return tokens


def aggregate(
    runtime: TextModel, tokens: list[Token], labels: list[str], strategy: str
) -> list[JsonObject]:
    """Return the labeled tokens or entities of `tag` for `tokens` of a text."""
    merge = WORD_SCORES.get(strategy)
    words = grouped(tokens, lambda last, token: merge is not None and token.continues_word)
    labeled = []
    for word in words:
        scores = merge(np.stack([token.scores for token in word])) if merge else word[0].scores
        best = int(scores.argmax())
        fields = {"entity": labels[best], "score": float(scores[best])}
        fields |= {"index": word[0].place} if strategy == "none" else {}
        text = runtime.join_tokens([token.word for token in word]) if merge else word[0].word
        labeled.append({**fields, "word": text, "start": word[0].start, "end": word[-1].end})
    return labeled if strategy == "none" else group_entities(runtime, labeled)


def group_entities(runtime: TextModel, entities: list[dict]) -> list[JsonObject]:
    """Return neighbors with the same label joined to one entity. A label with `B-` begins a new
    entity.

    `entities` are labeled tokens or words. The results have the keys entity_group, score (mean),
    word, start and end.
    """
    return [
        {
            "entity_group": group[0]["entity"].split("-", 1)[-1],
            "score": float(np.mean([entity["score"] for entity in group])),
            "word": runtime.join_tokens([entity["word"] for entity in group]),
            "start": group[0]["start"],
            "end": group[-1]["end"],
        }
        for group in grouped(entities, continues_entity)
    ]


def continues_entity(last: dict, entity: dict) -> bool:
    """Return True if `entity` has the label of `last`, without `B-` and `I-`, and no `B-`."""
    before, label = (
        one["entity"][2:] if one["entity"].startswith(("B-", "I-")) else one["entity"]
        for one in (last, entity)
    )
    return before == label and not entity["entity"].startswith("B-")


def grouped(items: Iterable[T], continues: Callable[[T, T], bool]) -> list[list[T]]:
    """Return `items` in lists: an item is in the list of the one before if it `continues` it."""
    groups: list[list[T]] = []
    for item in items:
        if groups and continues(groups[-1][-1], item):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def remove_overlaps(entities: list[dict]) -> list[JsonObject]:
    """Return the entities by their start, without overlaps between windows. The longest entity is
    kept; if two are equally long, the one with the best score."""
    kept: list[dict] = []
    for entity in sorted(entities, key=lambda entity: entity["start"]):
        if not kept or not kept[-1]["start"] <= entity["start"] < kept[-1]["end"]:
            kept.append(entity)
        elif (entity["end"] - entity["start"], entity["score"]) > (
            kept[-1]["end"] - kept[-1]["start"],
            kept[-1]["score"],
        ):
            kept[-1] = entity
    return kept


PIPELINES = {"token-classification": TaskCall(tag, TEXT, defaults={"max_windows": MAX_WINDOWS})}
