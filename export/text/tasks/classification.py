"""Classification of texts, also zero-shot, like transformers' pipelines; next sentence prediction
and multiple choice."""

import itertools
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding

from ...errors import TooLong, UsageError
from ...heads import CHOICES, CHOOSE, CLASSIFY, NEXT_SENTENCE, PAIR, TEXT, ZERO_SHOT
from ...inference.sentence_settings import MODEL_CONFIG, SentenceSettings
from ..checks import (
    Pair,
    check_choice,
    check_count,
    check_flags,
    check_list,
    check_text,
    check_texts,
    check_texts_or_pairs,
    is_strings,
    parse_pair,
    with_names,
)
from ..scores import (
    FUNCTIONS,
    Scoring,
    activation,
    default_function,
    rank_labels,
    softmax,
)
from ..text_model import Cut, Row, TextModel
from .task import JsonObject, TaskCall

MAX_PAIRS = 2000  # of a text and a label in a request
OLD_ACTIVATION = "sbert_ce_default_activation_function"  # a field of config.json


def classify(
    runtime: TextModel,
    texts: Sequence[str | Pair | dict[str, str]],
    /,
    top_k: int | None = 1,
    function_to_apply: str | None = None,
) -> list[list[JsonObject]]:
    """Return the labels of each text, best first: lists of `{"label": str, "score": float}`.

    The pipeline "text-classification" returns the same with `top_k`.

    Args:
        texts: strings, or pairs `(text, text_pair)` or `{"text": ..., "text_pair": ...}`. They are
            not cut.
        top_k: number of labels to return; `None` returns all.
        function_to_apply: function from logits to scores: `"softmax"`, `"sigmoid"` or `"none"`. By
            default it is the activation that a cross-encoder of sentence-transformers recorded.
            Else `config.problem_type` decides: none for "regression", the sigmoid for
            "multi_label_classification" and for a single label, otherwise the softmax.

    Raises:
        UsageError: if `top_k` or `function_to_apply` is invalid.
        ValueError: if the export has no sequence classification head, a text is invalid, has no
            tokens or too many, a label has no name, or the recorded activation is unknown.
    """
    runtime.require(CLASSIFY)
    if top_k is not None:
        check_count("top_k", top_k)
    function = scoring(runtime, function_to_apply)
    return label_rows(runtime, runtime.encode_texts(check_texts_or_pairs(texts)), function, top_k)


def label_rows(
    runtime: TextModel, rows: Sequence[Row], function: Scoring, top_k: int | None = None
) -> list[list[JsonObject]]:
    """Return the labels of each of `rows` with their scores, as `classify` does. `function`
    makes scores of logits."""
    labels = runtime.label_names()
    return runtime.run_rows(
        rows, lambda row, outputs: rank_labels(labels, function(outputs["logits"]), top_k)
    )


def scoring(runtime: TextModel, name: str | None) -> Scoring:
    """Return the function from logits to scores with this `name`; None is the export's default, by
    its config.

    Raises UsageError for an unknown name, and ValueError for an unknown activation in the export.
    """
    if name is not None:
        check_choice("function_to_apply", name, FUNCTIONS)
        return FUNCTIONS[name]
    info = runtime.info
    return default_scoring(info.directory, info.config, info.sentence_settings)[1]


def default_scoring(
    directory: Path, config: dict[str, Any], settings: SentenceSettings
) -> tuple[str, Scoring]:
    """Return the function from logits to scores by default, and its name: a key of `FUNCTIONS`, or
    the torch class that a cross-encoder applies to its logits.

    sentence-transformers has stored that class in three places: in its own config, or in `config`,
    the config.json of the model in `directory`. Raises ValueError for a function that is not
    supported.
    """
    nested = config.get("sentence_transformers")
    places = {
        f"activation_fn of {directory / MODEL_CONFIG}": settings.activation_fn,
        f"sentence_transformers.activation_fn of {directory / 'config.json'}": (
            nested.get("activation_fn") if isinstance(nested, dict) else None
        ),
        f"{OLD_ACTIVATION} of {directory / 'config.json'}": config.get(OLD_ACTIVATION),
    }
    for place, name in places.items():
        if name:
            return name, activation(name, place)
    name = default_function(config)
    return name, FUNCTIONS[name]


def zero_shot(
    runtime: TextModel,
    texts: Sequence[str],
    /,
    candidate_labels: str | Sequence[str],
    hypothesis_template: str = "This example is {}.",
    multi_label: bool = False,
    *,
    max_pairs: int | None = None,
) -> list[JsonObject]:
    """Score how well each of `candidate_labels` fits each text, with a model of natural language
    inference (Yin et al. 2019). Each result is `{"sequence": text, "labels": [str, ...], "scores":
    [float, ...]}`, best label first, as the pipeline "zero-shot-classification" returns it.

    Args:
        texts: strings. A text that exceeds the tokenizer's `model_max_length` with its hypothesis
            is truncated, as in the pipeline.
        candidate_labels: list of labels, or a string with commas between the labels.
        hypothesis_template: statement about a text, with `{}` in place of the label.
        multi_label: True if labels are independent of each other, as a single label always is.
            Otherwise the scores of all labels sum to 1.
        max_pairs: maximum number of pairs of a text and a label; None is no limit.

    Raises:
        UsageError: if there are no labels, or the template lacks `{}`.
        ValueError: if the export has no sequence classification head, no label of the model begins
            with "entail", or a text is blank, invalid or too long with its hypothesis.
        TooLong: if there are more than `max_pairs`.
    """
    runtime.require(ZERO_SHOT)
    check_flags(multi_label=multi_label)
    texts = check_texts(texts)
    candidates = parse_candidates(candidate_labels)
    count = len(texts) * len(candidates)
    if max_pairs is not None and count > max_pairs:
        raise TooLong(f"texts and candidate_labels are {count} pairs, expected at most {max_pairs}")
    hypotheses = [make_hypothesis(hypothesis_template, label) for label in candidates]
    entailment, contradiction = entailment_and_contradiction(runtime)
    pairs = [(text, hypothesis) for text in texts for hypothesis in hypotheses]
    rows = encode_pairs(runtime, pairs, runtime.tokenizer_settings.longest)
    logits = np.array(runtime.run_rows(rows, lambda row, outputs: outputs["logits"]))
    by_text = logits.reshape(len(texts), len(candidates), -1)
    if multi_label or len(candidates) == 1:
        scores = softmax(by_text[..., [contradiction, entailment]])[..., 1]
    else:
        scores = softmax(by_text[..., entailment])
    return [ranked(text, candidates, row) for text, row in zip(texts, scores)]


def encode_pairs(runtime: TextModel, pairs: Sequence[Pair], longest: int | None) -> list[Encoding]:
    """Return the tokens of each pair of a text and a hypothesis.

    Texts are truncated so that a row has at most `longest` tokens; None is no limit. Hypotheses are
    not: where one leaves no room for a text, the pair stays whole, as in the pipeline.
    """
    if longest is None:
        return runtime.encode_texts(pairs)
    room = longest - runtime.tokenizer.num_special_tokens_to_add(True)
    lengths = {
        text: len(runtime.tokenizer.encode(text, add_special_tokens=False)) for _, text in pairs
    }
    fits = [lengths[hypothesis] < room for _, hypothesis in pairs]
    truncated = iter(
        runtime.encode_texts(list(itertools.compress(pairs, fits)), Cut(longest, "only_first"))
    )
    encodings = iter(
        runtime.encode_texts([pair for pair, is_short in zip(pairs, fits) if not is_short])
    )
    return [next(truncated if is_short else encodings) for is_short in fits]


def ranked(text: str, labels: list[str], scores: np.ndarray) -> JsonObject:
    order = scores.argsort()[::-1].tolist()
    return {
        "sequence": text,
        "labels": [labels[label] for label in order],
        "scores": scores[order].tolist(),
    }


def parse_candidates(labels: object) -> list[str]:
    if isinstance(labels, str):
        labels = [label.strip() for label in labels.split(",") if label.strip()]
    if not labels or not is_strings(labels):
        raise UsageError(
            f"candidate_labels is {reprlib.repr(labels)}, expected a list of at least one string"
        )
    return list(labels)


def make_hypothesis(template: object, label: str) -> str:
    try:
        hypothesis = template.format(label)  # type: ignore[attr-defined]
    except (AttributeError, IndexError, KeyError, ValueError):
        hypothesis = template
    if hypothesis == template:
        raise UsageError(
            f"hypothesis_template is {template!r:.80}, expected a text with {{}} for the label"
        )
    return hypothesis


def entailment_and_contradiction(runtime: TextModel) -> tuple[int, int]:
    """Return the indices (entailment, contradiction) of the labels. As in the pipeline,
    contradiction is the first label, or the last one (-1) if entailment is first.

    Raises ValueError if no label begins with "entail".
    """
    labels = runtime.label_names()
    matches = [number for number, label in enumerate(labels) if label.lower().startswith("entail")]
    if not matches:
        raise ValueError(
            f"the labels of this model are {reprlib.repr(labels)}, expected one that begins with "
            f"'entail', as zero-shot classification needs"
        )
    return matches[0], -1 if matches[0] == 0 else 0


# ------------------------------------------------------------------------- pairs and choices


def next_sentence(runtime: TextModel, pairs: Sequence[Pair | dict[str, str]], /) -> np.ndarray:
    """Return two logits for each pair (B, 2), float32: the second text follows the first, and it
    does not (Devlin et al. 2019, section 3.1). Their softmax is the probabilities.

    Args:
        pairs: `(text, text_pair)` or `{"text": ..., "text_pair": ...}`. They are not truncated.

    Raises:
        ValueError: if the export has no next sentence head, or a pair is a single text, has no
            tokens or has too many.
    """
    runtime.require(NEXT_SENTENCE)
    items = with_names(check_list(pairs, "pairs", "pairs"))
    rows = runtime.encode_texts([parse_pair(pair, name) for pair, name in items])
    # a pretraining head has the logits of tokens first
    return np.array(runtime.run_rows(rows, lambda row, outputs: [*outputs.values()][-1]))


def choose(
    runtime: TextModel, texts: Sequence[str], choices: Sequence[Sequence[str]], /
) -> list[np.ndarray]:
    """Return the logits of the choices of each text (C,), float32: how well a choice continues the
    text. Their softmax is the probabilities.

    Args:
        texts: strings. They are not truncated.
        choices: a list of possible continuations for each text.

    Raises:
        ValueError: if the export has no multiple choice head, the number of lists is not the number
            of texts, a list is empty, or a text or choice is blank or has too many tokens together.
    """
    runtime.require(CHOOSE)
    pairs = check_choices(texts, choices)
    rows = runtime.encode_texts([pair for group in pairs for pair in group])
    scores = np.array(runtime.run_rows(rows, lambda row, outputs: outputs["logits"][0]))
    return np.split(scores, np.cumsum([len(group) for group in pairs])[:-1])


def check_choices(texts: object, choices: object) -> list[list[Pair]]:
    lists = check_list(choices, "lists of strings", "choices")
    strings = check_list(texts, "strings")
    if len(strings) != len(lists):
        raise ValueError(
            f"{len(strings)} texts and {len(lists)} lists of choices, expected one list for each "
            f"text"
        )
    pairs = []
    for (text, name), options in zip(with_names(strings), lists):
        if not isinstance(options, list | tuple) or not options:
            raise ValueError(
                f"{name} has the choices {reprlib.repr(options)}, expected a list of at least "
                f"one string"
            )
        first = check_text(text, name)
        pairs.append(
            [
                (first, check_text(choice, f"choice {index} of {name}"))
                for index, choice in enumerate(options)
            ]
        )
    return pairs


PIPELINES = {
    "text-classification": TaskCall(classify, TEXT, defaults={"top_k": None}, is_always_list=True),
    "zero-shot-classification": TaskCall(
        zero_shot,
        TEXT,
        lambda result, row, options: [
            {"label": label, "score": score}
            for label, score in zip(result["labels"], result["scores"])
        ],
        defaults={"max_pairs": MAX_PAIRS},
    ),
    "next-sentence": TaskCall(
        next_sentence,
        PAIR,
        lambda logits, row, options: rank_labels(["isNext", "notNext"], softmax(logits)),
    ),
    "multiple-choice": TaskCall(
        choose,
        CHOICES,
        lambda logits, row, options: rank_labels(row["choices"], softmax(logits)),
    ),
}
