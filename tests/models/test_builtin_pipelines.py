"""Tests of the built-in pipelines of transformers 5 with our checkpoints.

Expected values are computed from the logits of the model for a single text without padding.
"""

import pytest
import torch
from heads import LABELLED, LABELS, TAGS, TEXTS, close, save_head
from transformers import AutoTokenizer, pipeline

from vanilla_transformer.training.tokenizer import train_tokenizer

HEADS = {  # task: (architecture, fields)
    "text-generation": ("VanillaDecoderForCausalLM", {"position_embedding_type": "rotary"}),
    "fill-mask": ("VanillaEncoderForMaskedLM", {}),
    "text-classification": ("VanillaEncoderForSequenceClassification", LABELLED),
    "text-classification-by-a-decoder": ("VanillaDecoderForSequenceClassification", LABELLED),
    "text-classification-by-both-stacks": ("VanillaSeq2SeqForSequenceClassification", LABELLED),
    "token-classification": ("VanillaEncoderForTokenClassification", {"id2label": TAGS}),
    "token-classification-by-a-decoder": (
        "VanillaDecoderForTokenClassification",
        {"id2label": TAGS},
    ),
    "feature-extraction": ("VanillaEncoderModel", {}),
}
CLASSIFIERS = [
    "text-classification",
    "text-classification-by-a-decoder",
    "text-classification-by-both-stacks",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A function: task -> directory of a checkpoint for that task."""
    directories = {}

    def make(task):
        if task not in directories:
            architecture, fields = HEADS[task]
            variant = "decoder" if "Decoder" in architecture else "seq2seq"
            tokenizer = train_tokenizer(
                [*TEXTS, "This example is about animals or people ."] * 2, 70, variant=variant
            )
            tokenizer.add_special_tokens({"mask_token": "<mask>"})
            directories[task] = save_head(
                architecture, tokenizer, tmp_path_factory.mktemp(task), **fields
            )
        return directories[task]

    return make


def outputs(model, tokenizer, text, pair=None):
    with torch.no_grad():
        return model(**tokenizer(text, pair, return_tensors="pt"))


# ---------------------------------------------------------------------------------- text-generation


def greedy_search(model, ids, steps):
    """Append the most probable token to `ids`, `steps` times, without a cache."""
    for _ in range(steps):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.fixture(scope="module")
def generator(checkpoint):
    return pipeline("text-generation", model=checkpoint("text-generation"))


def prompt_ids(tokenizer, text):
    return tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]


GREEDY_KWARGS = dict(max_new_tokens=5, do_sample=False, eos_token_id=None)


@pytest.mark.parametrize("text", TEXTS)
def test_text_generation_appends_most_probable_tokens(generator, text):
    ids = greedy_search(generator.model, prompt_ids(generator.tokenizer, text), 5)
    expected = generator.tokenizer.decode(ids[0], skip_special_tokens=True)
    assert expected.startswith(text)
    assert generator(text, **GREEDY_KWARGS) == [{"generated_text": expected}]
    assert generator(text, return_full_text=False, **GREEDY_KWARGS) == [
        {"generated_text": expected[len(text) :]}
    ]


def test_text_generation_batch_matches_single_texts(generator):
    generator.tokenizer.padding_side, before = "left", generator.tokenizer.padding_side
    try:
        batched = generator(TEXTS, batch_size=3, **GREEDY_KWARGS)
    finally:
        generator.tokenizer.padding_side = before
    assert batched == [generator(text, **GREEDY_KWARGS) for text in TEXTS]


def test_text_generation_returns_beams(generator):
    ids = prompt_ids(generator.tokenizer, TEXTS[0])
    result = generator(
        TEXTS[0], **{**GREEDY_KWARGS, "max_new_tokens": 1}, num_beams=3, num_return_sequences=3
    )
    with torch.no_grad():
        best = generator.model(ids).logits[0, -1].topk(3).indices
    decode = generator.tokenizer.decode
    expected = [
        decode(torch.cat([ids[0], token[None]]), skip_special_tokens=True) for token in best
    ]
    assert [item["generated_text"] for item in result] == expected


def test_text_generation_returns_token_ids(generator):
    [result] = generator(TEXTS[0], return_tensors=True, **GREEDY_KWARGS)
    expected = greedy_search(generator.model, prompt_ids(generator.tokenizer, TEXTS[0]), 5)
    assert list(result["generated_token_ids"]) == expected[0].tolist()


# ---------------------------------------------------------------------------------------- fill-mask


@pytest.fixture(scope="module")
def unmasker(checkpoint):
    return pipeline("fill-mask", model=checkpoint("fill-mask"))


def expected_fills(unmasker, text, top_k, candidate_ids=None):
    ids = unmasker.tokenizer(text)["input_ids"]
    mask_index = ids.index(unmasker.tokenizer.mask_token_id)
    probabilities = (
        outputs(unmasker.model, unmasker.tokenizer, text).logits[0, mask_index].softmax(-1)
    )
    order = sorted(
        candidate_ids or range(len(probabilities)), key=lambda token: -probabilities[token]
    )[:top_k]
    decode = unmasker.tokenizer.decode
    return [
        {
            "score": probabilities[token].item(),
            "token": token,
            "token_str": decode([token]),
            "sequence": decode(
                [*ids[:mask_index], token, *ids[mask_index + 1 :]], skip_special_tokens=True
            ),
        }
        for token in order
    ]


MASKED = ["the <mask> man sees a house", "two <mask>"]


@pytest.mark.parametrize("text", MASKED)
def test_fill_mask_returns_most_probable_tokens(unmasker, text):
    close(unmasker(text), expected_fills(unmasker, text, 5))
    close(unmasker(text, top_k=2), expected_fills(unmasker, text, 2))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_fill_mask_batch_matches_single_texts(unmasker, batch_size):
    close(
        unmasker(MASKED, batch_size=batch_size),
        [expected_fills(unmasker, text, 5) for text in MASKED],
    )


def test_fill_mask_restricts_candidates_to_targets(unmasker):
    targets = ["\u2581the", "\u2581a"]
    close(
        unmasker(MASKED[0], targets=targets),
        expected_fills(unmasker, MASKED[0], 2, unmasker.tokenizer.convert_tokens_to_ids(targets)),
    )


# ------------------------------------------------------------------------------ text-classification


@pytest.fixture(scope="module", params=CLASSIFIERS)
def classifier(request, checkpoint):
    return pipeline("text-classification", model=checkpoint(request.param))


def expected_labels(classifier, text, pair=None, apply=lambda logits: logits.softmax(-1)):
    scores = apply(outputs(classifier.model, classifier.tokenizer, text, pair).logits[0]).tolist()
    return sorted(
        ({"label": LABELS[i], "score": score} for i, score in enumerate(scores)),
        key=lambda item: -item["score"],
    )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_text_classification_returns_most_probable_label(classifier, batch_size):
    close(
        classifier(TEXTS, batch_size=batch_size),
        [expected_labels(classifier, text)[0] for text in TEXTS],
    )
    close(classifier(TEXTS[0]), expected_labels(classifier, TEXTS[0])[:1])


def test_text_classification_top_k_none_returns_every_label(classifier):
    close(classifier(TEXTS[0], top_k=None), expected_labels(classifier, TEXTS[0]))


def test_text_classification_function_to_apply(classifier):
    close(
        classifier(TEXTS[0], top_k=3, function_to_apply="sigmoid"),
        expected_labels(classifier, TEXTS[0], apply=torch.sigmoid),
    )
    close(
        classifier(TEXTS[0], top_k=3, function_to_apply="none"),
        expected_labels(classifier, TEXTS[0], apply=lambda logits: logits),
    )


def test_text_classification_accepts_text_pairs(classifier):
    close(
        classifier({"text": TEXTS[0], "text_pair": TEXTS[1]}),
        expected_labels(classifier, TEXTS[0], TEXTS[1])[0],
    )


# ----------------------------------------------------------------------------- token-classification


@pytest.fixture(
    scope="module", params=["token-classification", "token-classification-by-a-decoder"]
)
def tagger(request, checkpoint):
    return pipeline("token-classification", model=checkpoint(request.param))


def expected_entities(tagger, text):
    """Return the expected entity of every token with a tag other than "O"."""
    tokens = tagger.tokenizer(text, return_offsets_mapping=True)
    probabilities = outputs(tagger.model, tagger.tokenizer, text).logits[0].softmax(-1)
    result = []
    special = tagger.tokenizer(text, return_special_tokens_mask=True)["special_tokens_mask"]
    for index, (token, (start, end)) in enumerate(
        zip(tokens["input_ids"], tokens["offset_mapping"])
    ):
        if special[index]:
            continue
        score, tag = probabilities[index].max(-1)
        if TAGS[tag.item()] != "O":
            word = tagger.tokenizer.convert_ids_to_tokens(token)
            result.append(
                {
                    "entity": TAGS[tag.item()],
                    "score": score.item(),
                    "index": index,
                    "word": word,
                    "start": start,
                    "end": end,
                }
            )
    return result


@pytest.mark.parametrize("batch_size", [1, 3])
def test_token_classification_returns_tag_of_each_token(tagger, batch_size):
    expected = [expected_entities(tagger, text) for text in TEXTS]
    assert len({entity["entity"] for entities in expected for entity in entities}) > 1
    close(tagger(TEXTS, batch_size=batch_size), expected)
    close(tagger(TEXTS[0]), expected[0])


def test_token_classification_simple_aggregation_joins_entity_tokens(tagger):
    groups = []
    for entity in expected_entities(tagger, TEXTS[0]):
        kind = entity["entity"][2:]
        before = groups[-1][-1] if groups else {"index": None, "entity": "O"}
        # An I- tag of the same kind directly after an entity continues the entity.
        if (
            entity["entity"] == f"I-{kind}"
            and before["entity"][2:] == kind
            and before["index"] == entity["index"] - 1
        ):
            groups[-1].append(entity)
        else:
            groups.append([entity])
    expected = [
        {
            "entity_group": group[0]["entity"][2:],
            "score": sum(entity["score"] for entity in group) / len(group),
            "word": tagger.tokenizer.convert_tokens_to_string([entity["word"] for entity in group]),
            "start": group[0]["start"],
            "end": group[-1]["end"],
        }
        for group in groups
    ]
    close(tagger(TEXTS[0], aggregation_strategy="simple"), expected)


# ------------------------------------------------------------------------------- feature-extraction


@pytest.mark.parametrize("batch_size", [1, 3])
def test_feature_extraction_returns_last_hidden_state(checkpoint, batch_size):
    extractor = pipeline("feature-extraction", model=checkpoint("feature-extraction"))
    expected = [
        outputs(extractor.model, extractor.tokenizer, text).last_hidden_state for text in TEXTS
    ]
    close(extractor(TEXTS[0]), expected[0].tolist())
    for result, state in zip(
        extractor(TEXTS, batch_size=batch_size, return_tensors=True), expected
    ):
        torch.testing.assert_close(result[:, : state.shape[1]], state)  # a batch keeps its padding


# ------------------------------------------------------------------------- zero-shot-classification

CANDIDATES = ["animals", "people", "house"]


def entailment(zero_shot, text, template):
    """Return the logits (candidates, labels) of `text` paired with each filled-in template."""
    pairs = [
        outputs(zero_shot.model, zero_shot.tokenizer, text, template.format(name)).logits[0]
        for name in CANDIDATES
    ]
    return torch.stack(pairs)


def expected_ranking(text, scores):
    order = sorted(range(len(CANDIDATES)), key=lambda index: -scores[index])
    return {
        "sequence": text,
        "labels": [CANDIDATES[i] for i in order],
        "scores": [scores[i].item() for i in order],
    }


@pytest.mark.parametrize("task", CLASSIFIERS)
def test_zero_shot_classification_ranks_candidates_by_entailment(checkpoint, task):
    zero_shot = pipeline("zero-shot-classification", model=checkpoint(task))
    default, other = "This example is {}.", "a book about {}"
    expected = [
        expected_ranking(text, entailment(zero_shot, text, default)[:, 2].softmax(0))
        for text in TEXTS
    ]
    close(zero_shot(TEXTS[0], CANDIDATES), expected[0])
    close(zero_shot(TEXTS, CANDIDATES, batch_size=2), expected)
    scores = entailment(zero_shot, TEXTS[0], other)[:, 2].softmax(0)
    close(
        zero_shot(TEXTS[0], candidate_labels=CANDIDATES, hypothesis_template=other),
        expected_ranking(TEXTS[0], scores),
    )
    multi_label_scores = entailment(zero_shot, TEXTS[0], default)[:, [0, 2]].softmax(-1)[:, 1]
    close(
        zero_shot(TEXTS[0], CANDIDATES, multi_label=True),
        expected_ranking(TEXTS[0], multi_label_scores),
    )


# ---------------------------------------------------------------------------------------- all tasks


@pytest.mark.parametrize("task", HEADS)
def test_pipeline_loads_model_and_tokenizer_of_directory(checkpoint, task):
    result = pipeline(task.partition("-by-")[0], model=checkpoint(task))
    assert type(result.model).__name__ == HEADS[task][0]
    assert (
        result.tokenizer.get_vocab() == AutoTokenizer.from_pretrained(checkpoint(task)).get_vocab()
    )
