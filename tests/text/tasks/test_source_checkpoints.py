"""Tests of exports of converted checkpoints, against the pipelines of the source models."""

import pytest
from heads import LABELLED, MANY, TAGS, save_family
from pipelines_compared import CONTEXTS, QUESTIONS, WINDOWS, same
from transformers import pipeline

from vanilla_transformer.conversion import convert
from vanilla_transformer_export import TextRuntime, export

FAMILIES = {
    "bert": (
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMaskedLM",
    ),
    "distilbert": (
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMaskedLM",
    ),
    "roberta": (
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMaskedLM",
    ),
    "xlm-roberta": (
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMaskedLM",
    ),
    "mpnet": (
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMaskedLM",
    ),
    "bart": ("ForSequenceClassification", "ForQuestionAnswering"),
    "t5": ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
}
LABELS = {
    "ForSequenceClassification": LABELLED,
    "ForTokenClassification": {
        "id2label": TAGS,
        "label2id": {label: index for index, label in TAGS.items()},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, head", [(family, head) for family, heads in FAMILIES.items() for head in heads]
)
def test_export_of_converted_checkpoint_matches_source_pipeline(tmp_path, family, head):
    save_family(family, head, tmp_path / "source", **LABELS.get(head, {}))
    convert(tmp_path / "source", tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "export", cases=1)
    runtime, source = TextRuntime(tmp_path / "export", threads=1), str(tmp_path / "source")
    texts = [text.lower() for text in MANY]
    if head == "ForSequenceClassification":
        same(
            runtime.classify(texts, top_k=None),
            pipeline("text-classification", model=source)(texts, top_k=None),
        )
        labels = ["man", "house"]
        same(
            runtime.zero_shot(texts, labels),
            pipeline("zero-shot-classification", model=source)(texts, labels),
        )
    elif head == "ForTokenClassification":
        pipe = pipeline("token-classification", model=source)
        for strategy in ("none", "simple", "average"):
            same(runtime.tag(texts, strategy), pipe(texts, aggregation_strategy=strategy))
    elif head == "ForQuestionAnswering":
        expected = pipeline("question-answering", model=source)(
            question=QUESTIONS, context=CONTEXTS, top_k=2, **WINDOWS
        )
        same(runtime.answer(QUESTIONS, CONTEXTS, top_k=2, **WINDOWS), expected)
    else:
        masked = ["the [MASK] man sees", "[MASK] river [MASK]"]
        same(runtime.fill_mask(masked), pipeline("fill-mask", model=source)(masked))
