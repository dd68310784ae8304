"""The pipelines that transformers 5 has work on our checkpoints, named by their directory.

Each expectation is computed from the logits of the model, for one text alone, without padding.
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
    """A task -> the directory of a checkpoint for it."""
    made = {}

    def make(task):
        if task not in made:
            architecture, fields = HEADS[task]
            variant = "decoder" if "Decoder" in architecture else "seq2seq"
            tokenizer = train_tokenizer(
                [*TEXTS, "This example is about animals or people ."] * 2, 70, variant=variant
            )
            tokenizer.add_special_tokens({"mask_token": "<mask>"})
            made[task] = save_head(architecture, tokenizer, tmp_path_factory.mktemp(task), **fields)
        return made[task]

    return make


def outputs(model, tokenizer, text, pair=None):
    with torch.no_grad():
        return model(**tokenizer(text, pair, return_tensors="pt"))


# ---------------------------------------------------------------------------------- text-generation


def greedy(model, ids, steps):
    """The most probable token after all those before it, without a cache."""
    for _ in range(steps):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.fixture(scope="module")
def continues(checkpoint):
    return pipeline("text-generation", model=checkpoint("text-generation"))


def prompt_ids(tokenizer, text):
    return tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]


PROMPT = dict(max_new_tokens=5, do_sample=False, eos_token_id=None)


@pytest.mark.parametrize("text", TEXTS)
def test_text_generation_appends_the_most_probable_tokens(continues, text):
    ids = greedy(continues.model, prompt_ids(continues.tokenizer, text), 5)
    wanted = continues.tokenizer.decode(ids[0], skip_special_tokens=True)
    assert wanted.startswith(text)
    assert continues(text, **PROMPT) == [{"generated_text": wanted}]
    assert continues(text, return_full_text=False, **PROMPT) == [
        {"generated_text": wanted[len(text) :]}
    ]


def test_text_generation_takes_lists_and_batches(continues):
    continues.tokenizer.padding_side, before = "left", continues.tokenizer.padding_side
    try:
        together = continues(TEXTS, batch_size=3, **PROMPT)
    finally:
        continues.tokenizer.padding_side = before
    assert together == [continues(text, **PROMPT) for text in TEXTS]


def test_text_generation_returns_beams(continues):
    ids = prompt_ids(continues.tokenizer, TEXTS[0])
    found = continues(
        TEXTS[0], **{**PROMPT, "max_new_tokens": 1}, num_beams=3, num_return_sequences=3
    )
    with torch.no_grad():
        best = continues.model(ids).logits[0, -1].topk(3).indices
    decode = continues.tokenizer.decode
    wanted = [decode(torch.cat([ids[0], token[None]]), skip_special_tokens=True) for token in best]
    assert [one["generated_text"] for one in found] == wanted


def test_text_generation_returns_token_ids(continues):
    [found] = continues(TEXTS[0], return_tensors=True, **PROMPT)
    wanted = greedy(continues.model, prompt_ids(continues.tokenizer, TEXTS[0]), 5)
    assert list(found["generated_token_ids"]) == wanted[0].tolist()


# ---------------------------------------------------------------------------------------- fill-mask


@pytest.fixture(scope="module")
def fills(checkpoint):
    return pipeline("fill-mask", model=checkpoint("fill-mask"))


def filled(fills, text, top_k, among=None):
    ids = fills.tokenizer(text)["input_ids"]
    place = ids.index(fills.tokenizer.mask_token_id)
    probabilities = outputs(fills.model, fills.tokenizer, text).logits[0, place].softmax(-1)
    order = sorted(among or range(len(probabilities)), key=lambda token: -probabilities[token])[
        :top_k
    ]
    decode = fills.tokenizer.decode
    return [
        {
            "score": probabilities[token].item(),
            "token": token,
            "token_str": decode([token]),
            "sequence": decode([*ids[:place], token, *ids[place + 1 :]], skip_special_tokens=True),
        }
        for token in order
    ]


MASKED = ["the <mask> man sees a house", "two <mask>"]


@pytest.mark.parametrize("text", MASKED)
def test_fill_mask_gives_the_most_probable_tokens(fills, text):
    close(fills(text), filled(fills, text, 5))
    close(fills(text, top_k=2), filled(fills, text, 2))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_fill_mask_takes_lists_and_batches(fills, batch_size):
    close(fills(MASKED, batch_size=batch_size), [filled(fills, text, 5) for text in MASKED])


def test_fill_mask_chooses_among_targets(fills):
    targets = ["\u2581the", "\u2581a"]
    close(
        fills(MASKED[0], targets=targets),
        filled(fills, MASKED[0], 2, fills.tokenizer.convert_tokens_to_ids(targets)),
    )


# ------------------------------------------------------------------------------ text-classification


@pytest.fixture(scope="module", params=CLASSIFIERS)
def classifies(request, checkpoint):
    return pipeline("text-classification", model=checkpoint(request.param))


def classes(classifies, text, pair=None, apply=lambda logits: logits.softmax(-1)):
    scores = apply(outputs(classifies.model, classifies.tokenizer, text, pair).logits[0]).tolist()
    return sorted(
        ({"label": LABELS[i], "score": score} for i, score in enumerate(scores)),
        key=lambda one: -one["score"],
    )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_text_classification_gives_the_most_probable_label(classifies, batch_size):
    close(
        classifies(TEXTS, batch_size=batch_size), [classes(classifies, text)[0] for text in TEXTS]
    )
    close(classifies(TEXTS[0]), classes(classifies, TEXTS[0])[:1])


def test_text_classification_gives_every_label(classifies):
    close(classifies(TEXTS[0], top_k=None), classes(classifies, TEXTS[0]))


def test_text_classification_applies_the_function_asked_for(classifies):
    close(
        classifies(TEXTS[0], top_k=3, function_to_apply="sigmoid"),
        classes(classifies, TEXTS[0], apply=torch.sigmoid),
    )
    close(
        classifies(TEXTS[0], top_k=3, function_to_apply="none"),
        classes(classifies, TEXTS[0], apply=lambda logits: logits),
    )


def test_text_classification_takes_pairs(classifies):
    close(
        classifies({"text": TEXTS[0], "text_pair": TEXTS[1]}),
        classes(classifies, TEXTS[0], TEXTS[1])[0],
    )


# ----------------------------------------------------------------------------- token-classification


@pytest.fixture(
    scope="module", params=["token-classification", "token-classification-by-a-decoder"]
)
def tags(request, checkpoint):
    return pipeline("token-classification", model=checkpoint(request.param))


def tagged(tags, text):
    """Every token with a tag other than "O"."""
    tokens = tags.tokenizer(text, return_offsets_mapping=True)
    probabilities = outputs(tags.model, tags.tokenizer, text).logits[0].softmax(-1)
    found = []
    special = tags.tokenizer(text, return_special_tokens_mask=True)["special_tokens_mask"]
    for index, (token, (start, end)) in enumerate(
        zip(tokens["input_ids"], tokens["offset_mapping"])
    ):
        if special[index]:
            continue
        score, tag = probabilities[index].max(-1)
        if TAGS[tag.item()] != "O":
            word = tags.tokenizer.convert_ids_to_tokens(token)
            found.append(
                {
                    "entity": TAGS[tag.item()],
                    "score": score.item(),
                    "index": index,
                    "word": word,
                    "start": start,
                    "end": end,
                }
            )
    return found


@pytest.mark.parametrize("batch_size", [1, 3])
def test_token_classification_gives_the_tag_of_each_token(tags, batch_size):
    wanted = [tagged(tags, text) for text in TEXTS]
    assert len({entity["entity"] for entities in wanted for entity in entities}) > 1
    close(tags(TEXTS, batch_size=batch_size), wanted)
    close(tags(TEXTS[0]), wanted[0])


def test_token_classification_joins_the_tokens_of_an_entity(tags):
    groups = []
    for entity in tagged(tags, TEXTS[0]):
        kind = entity["entity"][2:]
        before = groups[-1][-1] if groups else {"index": None, "entity": "O"}
        # An entity goes on with an I- of its kind, directly after it.
        if (
            entity["entity"] == f"I-{kind}"
            and before["entity"][2:] == kind
            and before["index"] == entity["index"] - 1
        ):
            groups[-1].append(entity)
        else:
            groups.append([entity])
    wanted = [
        {
            "entity_group": group[0]["entity"][2:],
            "score": sum(entity["score"] for entity in group) / len(group),
            "word": tags.tokenizer.convert_tokens_to_string([entity["word"] for entity in group]),
            "start": group[0]["start"],
            "end": group[-1]["end"],
        }
        for group in groups
    ]
    close(tags(TEXTS[0], aggregation_strategy="simple"), wanted)


# ------------------------------------------------------------------------------- feature-extraction


@pytest.mark.parametrize("batch_size", [1, 3])
def test_feature_extraction_gives_the_last_hidden_state(checkpoint, batch_size):
    extracts = pipeline("feature-extraction", model=checkpoint("feature-extraction"))
    wanted = [outputs(extracts.model, extracts.tokenizer, text).last_hidden_state for text in TEXTS]
    close(extracts(TEXTS[0]), wanted[0].tolist())
    for found, state in zip(extracts(TEXTS, batch_size=batch_size, return_tensors=True), wanted):
        torch.testing.assert_close(found[:, : state.shape[1]], state)  # a batch keeps its padding


# ------------------------------------------------------------------------- zero-shot-classification

CANDIDATES = ["animals", "people", "house"]


def entailment(chooses, text, template):
    """The logits (candidates, labels) of the text and the template with each candidate."""
    pairs = [
        outputs(chooses.model, chooses.tokenizer, text, template.format(name)).logits[0]
        for name in CANDIDATES
    ]
    return torch.stack(pairs)


def chosen(text, scores):
    order = sorted(range(len(CANDIDATES)), key=lambda index: -scores[index])
    return {
        "sequence": text,
        "labels": [CANDIDATES[i] for i in order],
        "scores": [scores[i].item() for i in order],
    }


@pytest.mark.parametrize("task", CLASSIFIERS)
def test_zero_shot_classification_compares_the_entailment_of_the_candidates(checkpoint, task):
    chooses = pipeline("zero-shot-classification", model=checkpoint(task))
    default, other = "This example is {}.", "a book about {}"
    wanted = [chosen(text, entailment(chooses, text, default)[:, 2].softmax(0)) for text in TEXTS]
    close(chooses(TEXTS[0], CANDIDATES), wanted[0])
    close(chooses(TEXTS, CANDIDATES, batch_size=2), wanted)
    scores = entailment(chooses, TEXTS[0], other)[:, 2].softmax(0)
    close(
        chooses(TEXTS[0], candidate_labels=CANDIDATES, hypothesis_template=other),
        chosen(TEXTS[0], scores),
    )
    several = entailment(chooses, TEXTS[0], default)[:, [0, 2]].softmax(-1)[:, 1]
    close(chooses(TEXTS[0], CANDIDATES, multi_label=True), chosen(TEXTS[0], several))


# ------------------------------------------------------------------------------------------ for all


@pytest.mark.parametrize("task", HEADS)
def test_a_pipeline_loads_the_model_and_the_tokenizer_of_the_directory(checkpoint, task):
    found = pipeline(task.partition("-by-")[0], model=checkpoint(task))
    assert type(found.model).__name__ == HEADS[task][0]
    assert (
        found.tokenizer.get_vocab() == AutoTokenizer.from_pretrained(checkpoint(task)).get_vocab()
    )
