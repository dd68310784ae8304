"""Tests of question answering as a training task: windows, answers and runs."""

import json
from functools import partial

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from messages import raises
from training_texts import ENCODER, TRAINING
from transformers import pipeline

from vanilla_transformer.training.prepare import prepare
from vanilla_transformer.training.recipe import Recipe
from vanilla_transformer.training.run import train
from vanilla_transformer.training.tasks import question_answering
from vanilla_transformer.training.tasks.task import Scored
from vanilla_transformer.training.tokenizer import train_tokenizer

PLACES = ("garden", "kitchen", "old house")
STORIES = [
    (f"the {who} {did} in the {place} today.", place)
    for who in ("cat", "dog")
    for did in ("is", "was")
    for place in PLACES
]


def squad(*stories, **answer):
    """Return (context, answer) pairs in the format of SQuAD."""
    result = [
        {"text": text, "answer_start": context.index(text)} | answer for context, text in stories
    ]
    items = [
        {"context": context, "qas": [{"id": f"q{number}", "question": "where?", "answers": [one]}]}
        for number, ((context, _), one) in enumerate(zip(stories, result, strict=True))
    ]
    return {"version": "1.1", "data": [{"title": "t", "paragraphs": items}]}


def reader(path, **data):
    files, training = (
        {"train": str(path), "validation": str(path)},
        {"tokens_per_update": 256, "num_train_epochs": 30},
    )
    model = ENCODER | {"type_vocab_size": 2}
    return Recipe(
        "question-answering",
        files | data,
        {"kind": "bpe", "vocab_size": 50},
        model,
        {**TRAINING, **training},
    )


@pytest.fixture
def stories(tmp_path):
    path = tmp_path / "train.json"
    path.write_text(json.dumps(squad(*STORIES)))
    return path


def encode_windows(context, answer, **data):
    """Return a character tokenizer and the rows of the context's windows."""
    columns = {"id": ["q"], "question": ["who?"], "context": [context]}
    columns["answers"] = [{"text": [answer], "answer_start": [context.index(answer)]}]
    tokenizer = train_tokenizer(
        ["who? ann ran."], kind="character", variant="encoder", token_types=True
    )
    result = question_answering.encode(columns, tokenizer, data)
    rows = [dict(zip(result, values, strict=True)) for values in zip(*result.values(), strict=True)]
    return tokenizer, rows


def test_question_dataset_matches_squad_file(stories, tmp_path):
    expected = question_answering.read({"train": str(stories)}, "train")
    DatasetDict(train=expected.add_column("title", ["t"] * len(expected))).save_to_disk(
        tmp_path / "saved"
    )
    data = {"dataset": str(tmp_path / "saved")}
    assert question_answering.read(data, "train").to_dict() == expected.to_dict()
    assert question_answering.read(data, "validation") is None


def test_answer_positions_match_characters():
    tokenizer, [row] = encode_windows("ann ran.", "ran")
    assert tokenizer.decode(row["input_ids"]) == "<s>who?</s>ann ran.</s>"
    assert row["token_type_ids"] == [0] * 6 + [1] * 9
    assert (row["start_positions"], row["end_positions"]) == (10, 12)
    assert row["offsets"] == [None] * 6 + [[place, place + 1] for place in range(8)] + [None]


def test_windows_overlap_by_stride_and_label_answer_or_first_token():
    tokenizer, rows = encode_windows("ann ran.", "ran", max_length=12, stride=3)
    assert [tokenizer.decode(row["input_ids"][6:-1]) for row in rows] == ["ann r", "n ran", "ran."]
    assert [(row["start_positions"], row["end_positions"]) for row in rows] == [
        (0, 0),
        (8, 10),
        (6, 8),
    ]
    assert [row["offsets"][6] for row in rows] == [[0, 1], [2, 3], [4, 5]]
    with raises(ValueError, seen=4, expected=(4, "max_length", 10)):
        encode_windows("ann ran.", "ran", max_length=10, stride=3)


@pytest.mark.parametrize("kind", ["bpe", "byte-bpe"])
def test_subword_positions_restore_every_answer(kind):
    context = "The old man (of Rome) sees some red house; one woman reads the book."
    words = context.replace("(", "").split()
    answers = [
        " ".join(words[first:last])
        for first in range(len(words))
        for last in range(first + 1, len(words) + 1)
    ]
    answers = [answer for answer in answers if answer in context]
    assert len(answers) > 60
    columns = {
        "id": answers,
        "question": ["who?"] * len(answers),
        "context": [context] * len(answers),
    }
    columns["answers"] = [
        {"text": [answer], "answer_start": [context.index(answer)]} for answer in answers
    ]
    tokenizer = train_tokenizer(
        [context] * 2, 60 if kind == "bpe" else 290, kind, variant="encoder"
    )
    result = question_answering.encode(columns, tokenizer, {})
    for answer, first, last, offsets in zip(
        answers, result["start_positions"], result["end_positions"], result["offsets"], strict=True
    ):
        assert context[offsets[first][0] : offsets[last][1]].strip() == answer


def test_question_answering_model_learns_answers(stories, tmp_path):
    metrics = train(reader(stories), tmp_path / "model")
    assert (metrics["validation_exact_match"], metrics["validation_f1"]) == (100, 100)
    answer = pipeline("question-answering", model=str(tmp_path / "model"))
    assert [
        answer(question="where?", context=context)["answer"].strip() for context, _ in STORIES
    ] == [place for _, place in STORIES]


def test_scores_use_best_span_over_all_windows(stories):
    _, _, rows = prepare(reader(stories, max_length=20, stride=4))
    rows = rows["validation"]
    windows = len(rows)
    assert windows > len(STORIES)
    assert not {*question_answering.SCORED} & {*prepare(reader(stories))[2]["train"].column_names}
    starts, ends = np.zeros((2, windows, 20))
    # windows predict the answer if they contain it, otherwise the first token
    for window, row in enumerate(rows):
        if row["start_positions"]:
            starts[window, row["start_positions"]] = ends[window, row["end_positions"]] = 5.0
        starts[window, 0] = ends[window, 0] = 9.0  # token outside the context
    labels = np.array(rows["start_positions"]), np.array(rows["end_positions"])
    score = partial(question_answering.metrics, scored=Scored(rows, None, None, {}))
    assert score(((starts, ends), labels)) == {"exact_match": 100, "f1": 100}
    one_token = Scored(rows, None, None, {"max_answer_length": 1})
    assert question_answering.metrics(((starts, ends), labels), one_token)["exact_match"] < 100
    wrong = next(window for window, row in enumerate(rows) if row["id"] == "q0")
    token = next(token for token, place in enumerate(rows[wrong]["offsets"]) if place is not None)
    starts[wrong, token] = ends[wrong, token] = 6.0  # "the", not in the answer
    assert score(((starts, ends), labels))["exact_match"] == pytest.approx(100 * 11 / 12)
    with pytest.raises(ValueError):
        score(((starts, ends), (labels[0][::-1], labels[1])))


def test_best_span_has_highest_score_within_max_length():
    rng = np.random.default_rng(0)
    row = {
        "context": "abcdefgh",
        "offsets": [None, None, *([place, place + 1] for place in range(8)), None],
    }
    for _ in range(20):
        start, end = rng.normal(size=(2, 11))
        spans = [
            (start[i] + end[j], "abcdefgh"[i - 2 : j - 1])
            for i in range(2, 10)
            for j in range(i, min(i + 3, 10))
        ]
        assert question_answering.best_span(row, start, end, 3) == max(spans)


@pytest.mark.parametrize(
    "text, gold, exact, f1",
    [
        ("The Eiffel Tower!", "eiffel tower", True, 1.0),
        ("an old  house", "the old house", True, 1.0),
        ("in the old house", "old house", False, 0.8),  # 2 of 3 words, 2 of 2
        ("house house", "old house", False, 0.5),
        ("theatre", "atre", False, 0.0),
    ],
)
def test_answer_comparison_follows_squad(text, gold, exact, f1):
    assert (question_answering.normalize(text) == question_answering.normalize(gold)) == exact
    assert question_answering.f1(text, gold) == pytest.approx(f1)


def test_best_of_several_answers_counts():
    rows = Dataset.from_list(
        [
            {
                "id": "q",
                "start_positions": 0,
                "context": "an old house",
                "answers": ["hut", "old"],
                "offsets": [[3, 6]],
            }
        ]
    )
    prediction = (np.zeros((1, 1)),) * 2, (np.zeros(1), np.zeros(1))
    scores = question_answering.metrics(prediction, Scored(rows, None, None, {}))
    assert scores == {"exact_match": 100, "f1": 100}


def unanswered(*stories):
    """Return `stories` in the format of SQuAD 2.0, with a second question without an answer."""
    content = squad(*stories)
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            question = paragraph["qas"][0]
            other = {"id": f"{question['id']}-no", "question": "why?", "answers": []}
            paragraph["qas"].append(other | {"is_impossible": True})
    return content


def test_unanswered_question_has_first_token_as_target_and_empty_answer(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps(unanswered(*STORIES)))
    _, _, rows = prepare(reader(tmp_path / "train.json"))
    rows = rows["validation"]
    assert len(rows) == 2 * len(STORIES)
    for row in rows:
        is_unanswered = row["id"].endswith("-no")
        assert (row["answers"] == [""]) == is_unanswered
        assert (row["start_positions"] == 0) == is_unanswered


def test_scores_of_unanswered_questions_follow_run_qa(tmp_path):
    """The empty answer counts if start[0] + end[0] is above the score of the best span."""
    (tmp_path / "train.json").write_text(json.dumps(unanswered(*STORIES)))
    rows = prepare(reader(tmp_path / "train.json"))[2]["validation"]
    starts, ends = np.zeros((2, len(rows), max(map(len, rows["input_ids"]))))
    for window, row in enumerate(rows):
        starts[window, row["start_positions"]] = ends[window, row["end_positions"]] = 5.0
        starts[window, 0] += 1.0  # 11 for the empty answer of questions without one, else 1
        last = max(token for token, place in enumerate(row["offsets"]) if place is not None)
        starts[window, last - 2] += 0.5  # otherwise the best span is "the", an article
        ends[window, last] += 0.5
    labels = np.array(rows["start_positions"]), np.array(rows["end_positions"])
    score = partial(question_answering.metrics, scored=Scored(rows, None, None, {}))
    assert score(((starts, ends), labels)) == {"exact_match": 100, "f1": 100}
    starts[:, 0] = 20.0  # the empty answer everywhere
    assert score(((starts, ends), labels)) == {"exact_match": 50, "f1": 50}
    starts[:, 0] = ends[:, 0] = -9.0  # and nowhere
    assert score(((starts, ends), labels)) == {"exact_match": 50, "f1": 50}


def test_answers_may_have_either_form(tmp_path):
    listed, joined = squad(*STORIES), squad(*STORIES)
    for article in joined["data"]:
        for paragraph in article["paragraphs"]:
            [answer] = paragraph["qas"][0]["answers"]
            paragraph["qas"][0]["answers"] = {name: [answer[name]] for name in answer}
    results = []
    for name, content in {"a": listed, "b": joined}.items():
        (tmp_path / name).write_text(json.dumps(content))
        results.append(question_answering.read({"train": str(tmp_path / name)}, "train").to_list())
    rows = [
        row | {"answers": [{"text": "x", "answer_start": 0}], "context": "x"} for row in results[0]
    ]
    DatasetDict(train=Dataset.from_list(rows)).save_to_disk(tmp_path / "set")
    [first, *_] = question_answering.read({"dataset": str(tmp_path / "set")}, "train")
    assert first["answers"] == {"text": ["x"], "answer_start": [0]}
    assert results[0] == results[1] and len(results[0]) == len(STORIES)


def test_invalid_squad_files_raise(tmp_path):
    path = tmp_path / "bad.json"
    for content, seen, expected in [
        (squad(STORIES[0], answer_start=3), ("q0", "' cat i'", 3), "garden"),
        (squad(STORIES[0], text=""), "q0", "''"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, "bad.json", ()),
        ({"questions": []}, ("bad.json", "SQuAD", "data"), ()),
    ]:
        path.write_text(json.dumps(content))
        with raises(ValueError, seen=seen, expected=expected):
            question_answering.read({"train": str(path)}, "train")
    for change, seen in [
        (lambda paragraph: paragraph["qas"][0].update(answers="here"), ("q0", "'here'")),
        (
            lambda paragraph: paragraph["qas"][0].update(question=5),
            ("q0", 5, "the cat is in the garden today."),
        ),
        (lambda paragraph: paragraph.update(context=None), ("q0", "where?", None)),
    ]:
        no_text = squad(STORIES[0])
        change(no_text["data"][0]["paragraphs"][0])
        path.write_text(json.dumps(no_text))
        with raises(ValueError, seen=seen):
            question_answering.read({"train": str(path)}, "train")
    path.write_text("{")
    with raises(ValueError, seen=("bad.json", "JSON", "SQuAD")):
        question_answering.read({"train": str(path)}, "train")
