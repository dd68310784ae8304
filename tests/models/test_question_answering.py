"""Tests of `pipeline("question-answering")` for our models and BERT.

The pipeline returns what it returned in transformers 4. The expected answers come from
`answers_by_hand`, which loops over windows and spans and computes in float64.
"""

import functools
import math
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from checkpoints import SIZES
from heads import word_pieces
from messages import raises
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    ByT5Tokenizer,
    pipeline,
)

from vanilla_transformer import (
    QuestionAnsweringPipeline,
    VanillaDecoderForQuestionAnswering,
    VanillaEncoderConfig,
    VanillaEncoderForQuestionAnswering,
    VanillaSeq2SeqForQuestionAnswering,
)
from vanilla_transformer.training.tokenizer import train_tokenizer

QUESTION = "who sees the red house?"
CONTEXT = (
    "The old man sees a red house. A woman reads the book, and the Man runs to the river near the "
    "big old house."
)
QUESTIONS = [QUESTION, "where is it?", "what does the old woman read?"]
CONTEXTS = [
    CONTEXT,
    "two dogs run",
    "the boy walks, the man runs." + " the boy walks, the man runs." * 5,
]
EXAMPLES = [
    {"question": question, "context": context} for question, context in zip(QUESTIONS, CONTEXTS)
]


def pair_encoding():
    """Return a tokenizer of question </s> context </s>, whose words keep their leading space."""
    return train_tokenizer([QUESTION, *CONTEXTS] * 2, 60)


def ours(tokenizer, **fields):
    sizes = {**SIZES, "vocab_size": len(tokenizer), "num_hidden_layers": 1, "type_vocab_size": 2}
    config = VanillaEncoderConfig(**sizes, **fields)
    return VanillaEncoderForQuestionAnswering(config)


def other_stacks(model_class):
    def make(tokenizer):
        return model_class(
            model_class.config_class(
                **{**SIZES, "vocab_size": len(tokenizer), "num_hidden_layers": 1}
            )
        )

    return make


def bert(tokenizer):
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    return BertForQuestionAnswering(config)


def build(make_model, tokenizer):
    transformers.set_seed(0)
    model = make_model(tokenizer).eval()
    torch.nn.init.normal_(model.qa_outputs.weight, std=0.6)
    return model


@pytest.fixture(
    scope="module",
    params=[
        (ours, word_pieces),
        (bert, word_pieces),
        (ours, pair_encoding),
        (other_stacks(VanillaDecoderForQuestionAnswering), pair_encoding),
        (other_stacks(VanillaSeq2SeqForQuestionAnswering), pair_encoding),
    ],
    ids=["ours", "bert", "ours-without-cls", "decoder", "seq2seq"],
)
def answer(request, tmp_path_factory):
    make_model, make_tokenizer = request.param
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer = make_tokenizer()
    build(make_model, tokenizer).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return pipeline("question-answering", model=str(directory))


def softmax(logits):
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def answers_by_hand(
    answer,
    question,
    context,
    top_k=1,
    max_answer_len=15,
    max_seq_len=384,
    doc_stride=128,
    impossible=False,
    align=True,
):
    """Return the best `top_k` answers, best first, from loops over windows and spans."""
    tokenizer = answer.tokenizer
    cls = [tokenizer.cls_token_id] if tokenizer.cls_token_id is not None else []
    sep = [tokenizer.sep_token_id if cls else tokenizer.eos_token_id]
    words = r"\w+|[^\w ]" if cls else r" ?\w+|[^\w ]"
    question_ids = tokenizer(question, add_special_tokens=False)["input_ids"]
    tokens = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = tokens["input_ids"], tokens["offset_mapping"]
    head = cls + question_ids + sep
    max_context_tokens = max_seq_len - len(head) - 1
    result, null_scores = {}, []
    for window in range(0, max(1, len(ids) - doc_stride), max_context_tokens - doc_stride):
        window_tokens = range(window, min(window + max_context_tokens, len(ids)))
        inputs = {"input_ids": torch.tensor([head + [ids[i] for i in window_tokens] + sep])}
        if cls:
            inputs["token_type_ids"] = torch.tensor(
                [[0] * len(head) + [1] * (len(window_tokens) + 1)]
            )
        with torch.no_grad():
            logits = answer.model(**inputs)
        starts, ends = (
            scores[0].double().tolist() for scores in (logits.start_logits, logits.end_logits)
        )
        candidates = [len(head) + i for i in range(len(window_tokens))] + [0] * len(cls)
        start, end = (
            softmax([starts[i] for i in candidates]),
            softmax([ends[i] for i in candidates]),
        )
        null_scores.append(start[-1] * end[-1] if cls else 0)
        spans = [
            (start[i] * end[j], window_tokens[i], window_tokens[j])
            for i in range(len(window_tokens))
            for j in range(i, min(i + max_answer_len, len(window_tokens)))
        ]
        for score, first, last in sorted(spans, reverse=True)[: 2 * top_k + 10 if align else top_k]:
            begin, stop = offsets[first][0], offsets[last][1]
            if align:
                # A word cut by the edge of a window keeps only its part within the window.
                low, high = offsets[window_tokens[0]][0], offsets[window_tokens[-1]][1]
                spans_of_words = [match.span() for match in re.finditer(words, context)]
                begin = max(low, next(a for a, b in spans_of_words if a <= begin < b))
                stop = min(high, next(b for a, b in spans_of_words if a < stop <= b))
            text = context[begin:stop]
            entry = result.setdefault(
                text.lower(), {"score": 0, "start": begin, "end": stop, "answer": text}
            )
            entry["score"] += score
    answers = list(result.values())
    if impossible:
        answers.append({"score": min(null_scores), "start": 0, "end": 0, "answer": ""})
    return sorted(answers, key=lambda entry: -entry["score"])[:top_k]


def close(actual_answers, expected_answers):
    actual_answers = [actual_answers] if isinstance(actual_answers, dict) else actual_answers
    assert [{**entry, "score": None} for entry in actual_answers] == [
        {**entry, "score": None} for entry in expected_answers
    ]
    assert [entry["score"] for entry in actual_answers] == pytest.approx(
        [entry["score"] for entry in expected_answers], rel=1e-5
    )
    return True


@pytest.fixture(scope="module")
def three_answers(answer):
    """Return the expected answer to each of `EXAMPLES`, with all defaults."""
    return [answers_by_hand(answer, **example)[0] for example in EXAMPLES]


# ------------------------------------------------------------------------------------------ results


def test_task_loads_our_pipeline_and_checkpoint_model(answer):
    assert type(answer) is QuestionAnsweringPipeline
    classes = ("VanillaEncoder", "VanillaDecoder", "VanillaSeq2Seq", "Bert")
    assert type(answer.model).__name__ in [f"{name}ForQuestionAnswering" for name in classes]
    assert answer.task == "question-answering"


@pytest.mark.parametrize("example", EXAMPLES, ids=["long", "short", "repeated"])
def test_answer_is_span_of_context(answer, example):
    result = answer(**example)
    assert list(result) == ["score", "start", "end", "answer"]
    assert [type(value) for value in result.values()] == [float, int, int, str]
    assert result["answer"] == example["context"][result["start"] : result["end"]]
    close(result, answers_by_hand(answer, **example))


WINDOWS = dict(max_seq_len=40, doc_stride=9)


@pytest.mark.parametrize(
    "options",
    [
        dict(top_k=3),
        dict(top_k=25),
        dict(top_k=4, max_answer_len=2),
        dict(top_k=5, align_to_words=False),
        dict(align_to_words=False, max_answer_len=1),
        dict(top_k=5, handle_impossible_answer=True),
        dict(top_k=4, **WINDOWS),
        dict(top_k=4, handle_impossible_answer=True, **WINDOWS),
        dict(top_k=4, align_to_words=False, **WINDOWS),
        dict(top_k=2, max_seq_len=45, doc_stride=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("example", [EXAMPLES[0], EXAMPLES[2]], ids=["long", "repeated"])
def test_answers_match_reference(answer, example, options):
    names = {"handle_impossible_answer": "impossible", "align_to_words": "align"}
    expected = answers_by_hand(
        answer, **example, **{names.get(name, name): value for name, value in options.items()}
    )
    close(answer(**example, **options), expected)
    close(answer(**example, **options, batch_size=3), expected)
    close(answer(**example, **options, padding="max_length"), expected)


def test_number_of_answers_is_limited_by_spans_of_context(answer):
    result = answer(question=QUESTION, context="two dogs", top_k=50)
    result.sort(key=lambda entry: (entry["start"], entry["end"]))
    assert [entry["answer"].strip() for entry in result] == ["two", "two dogs", "dogs"]


def test_single_answer_is_dict_despite_top_k(answer):
    assert answer(question=QUESTION, context="dogs", top_k=5)["answer"] == "dogs"


def test_pipeline_arguments_are_defaults_of_calls(answer):
    again = pipeline(
        "question-answering", model=answer.model, tokenizer=answer.tokenizer, top_k=3, **WINDOWS
    )
    close(again(**EXAMPLES[0]), answers_by_hand(answer, **EXAMPLES[0], top_k=3, **WINDOWS))
    close(again(**EXAMPLES[0], top_k=1), answers_by_hand(answer, **EXAMPLES[0], top_k=1, **WINDOWS))


def test_window_sizes_follow_model_max_length(answer, monkeypatch):
    monkeypatch.setattr(answer.tokenizer, "model_max_length", 40)
    close(
        answer(**EXAMPLES[2]), answers_by_hand(answer, **EXAMPLES[2], max_seq_len=40, doc_stride=20)
    )


def test_max_question_len_truncates_question(answer):
    tokens = answer.tokenizer(QUESTION, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    cut = QUESTION[: tokens[4][1]]
    close(answer(**EXAMPLES[0], max_question_len=5), answers_by_hand(answer, cut, CONTEXT))
    close(
        answer(**EXAMPLES[0], max_question_len=len(tokens)),
        answers_by_hand(answer, QUESTION, CONTEXT),
    )


def test_half_precision_model_gives_scores(answer):
    half = build(ours if "Vanilla" in type(answer.model).__name__ else bert, answer.tokenizer).to(
        torch.bfloat16
    )
    result = pipeline("question-answering", model=half, tokenizer=answer.tokenizer)(**EXAMPLES[1])
    assert 0 < result["score"] < 1


@pytest.mark.parametrize("make_model", [ours, bert])
def test_left_padding_puts_context_before_question(make_model):
    tokenizer = word_pieces(padding_side="left")
    answer = pipeline("question-answering", model=build(make_model, tokenizer), tokenizer=tokenizer)
    ids = tokenizer(CONTEXT, QUESTION, return_tensors="pt")
    with torch.no_grad():
        logits = answer.model(**ids)
    length = len(tokenizer(CONTEXT, add_special_tokens=False)["input_ids"])
    start, end = (
        scores[0, : length + 1].softmax(-1) for scores in (logits.start_logits, logits.end_logits)
    )
    best = max(
        (start[i] * end[j], i, j)
        for i in range(1, length + 1)
        for j in range(i, min(i + 15, length + 1))
    )
    alone = answer(**EXAMPLES[0], align_to_words=False)
    assert alone["score"] == pytest.approx(best[0].item(), rel=1e-5)
    assert (alone["start"], alone["end"]) == (
        ids.token_to_chars(best[1]).start,
        ids.token_to_chars(best[2]).end,
    )
    [impossible] = [
        entry
        for entry in answer(**EXAMPLES[0], handle_impossible_answer=True, top_k=1000)
        if entry["answer"] == ""
    ]
    assert impossible["score"] == pytest.approx((start[0] * end[0]).item(), rel=1e-5)


def test_left_padded_batches_give_same_answers():
    tokenizer = word_pieces(padding_side="left")
    # Padding would shift absolute positions.
    model = build(functools.partial(ours, position_embedding_type="relative"), tokenizer)
    answer = pipeline(
        "question-answering",
        model=model,
        tokenizer=tokenizer,
        handle_impossible_answer=True,
        top_k=4,
    )
    alone = [answer(**example) for example in EXAMPLES]
    for batch_size in (2, 3):
        for actual, expected in zip(answer(EXAMPLES, batch_size=batch_size), alone):
            close(actual, expected)
    for actual, expected in zip(answer(EXAMPLES, padding="max_length", max_seq_len=200), alone):
        close(actual, expected)


# --------------------------------------------------------------------------------------- call forms


class Rows(Dataset):
    def __len__(self):
        return len(EXAMPLES)

    def __getitem__(self, index):
        return EXAMPLES[index]  # an IndexError ends the iteration


def squad(example):
    return SimpleNamespace(question_text=example["question"], context_text=example["context"])


@pytest.mark.parametrize(
    "ask",
    [
        lambda answer: answer(question=QUESTIONS, context=CONTEXTS),
        lambda answer: answer(question=tuple(QUESTIONS), context=tuple(CONTEXTS)),
        lambda answer: answer(EXAMPLES),
        lambda answer: answer(tuple(EXAMPLES)),
        lambda answer: answer(*EXAMPLES),
        lambda answer: answer(data=EXAMPLES),
        lambda answer: answer(X=EXAMPLES),
        lambda answer: answer([{**example, "id": 7} for example in EXAMPLES]),
        lambda answer: answer([squad(example) for example in EXAMPLES]),
        lambda answer: answer(EXAMPLES, batch_size=2),
        lambda answer: answer(question=QUESTIONS, context=CONTEXTS, batch_size=8),
    ],
)
def test_several_examples_give_a_list(answer, three_answers, ask):
    result = ask(answer)
    assert isinstance(result, list)
    close(result, three_answers)


@pytest.mark.parametrize(
    "ask",
    [
        lambda answer: answer(question=QUESTION, context=CONTEXT),
        lambda answer: answer(question=[QUESTION], context=[CONTEXT]),
        lambda answer: answer(QUESTION, CONTEXT),
        lambda answer: answer(EXAMPLES[0]),
        lambda answer: answer(EXAMPLES[:1]),
        lambda answer: answer(data=EXAMPLES[0]),
        lambda answer: answer(squad(EXAMPLES[0])),
    ],
)
def test_one_example_gives_a_dict(answer, three_answers, ask):
    result = ask(answer)
    assert isinstance(result, dict)
    close(result, three_answers[:1])


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize(
    "stream", [lambda: (example for example in EXAMPLES), Rows], ids=["generator", "dataset"]
)
def test_streams_give_an_iterator(answer, three_answers, stream, batch_size):
    result = answer(stream(), batch_size=batch_size)
    assert not isinstance(result, list)
    close(list(result), three_answers)


def test_several_questions_may_share_a_context(answer):
    result = answer(question=QUESTIONS, context=CONTEXT)
    close(result, [answers_by_hand(answer, question, CONTEXT)[0] for question in QUESTIONS])


def test_empty_list_gives_no_answers(answer):
    assert answer([]) == []


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "arguments, seen, expected",
    [
        (dict(), None, ()),
        (dict(question=QUESTION), None, ("question", "context")),
        (dict(question=QUESTION, context=CONTEXTS), (), ("question", "context")),
        (dict(question=QUESTIONS, context=CONTEXTS[:2]), (2, 3), ()),
        (dict(question="", context=CONTEXT), (), "question"),
        (dict(question=QUESTION, context=" \n"), " \\n", "context"),
        (dict(question=[QUESTION, None], context=CONTEXT), None, "question"),
        (dict(question=[QUESTION, QUESTION], context=[CONTEXT, 7]), 7, "context"),
        (dict(data={"question": QUESTION}), None, ()),
        (dict(data=[EXAMPLES[0], QUESTION]), (), "dict"),
        (dict(data=QUESTION), (), ()),
        (dict(data=5), 5, ()),
        (dict(**EXAMPLES[0], top_k=0), ("top_k", 0), 1),
        (dict(**EXAMPLES[0], max_answer_len=0), ("max_answer_len", 0), 1),
        (dict(**EXAMPLES[0], max_seq_len=-1), ("max_seq_len", -1), 1),
        (dict(**EXAMPLES[0], max_question_len=0), ("max_question_len", 0), 1),
        (
            dict(**EXAMPLES[1], max_seq_len=40, doc_stride=41),
            ("doc_stride", 41),
            ("max_seq_len", 40),
        ),
        (dict(**EXAMPLES[0], doc_stride=-1), ("doc_stride", -1), 0),
    ],
)
def test_invalid_arguments_raise_and_error_names_value(answer, arguments, seen, expected):
    with raises(ValueError, seen=seen, expected=expected):
        answer(**arguments)


def test_positional_and_keyword_examples_together_raise(answer):
    with raises(ValueError, seen=QUESTION):
        answer(EXAMPLES[0], question=QUESTION)


def test_misspelled_argument_raises_type_error(answer):
    with raises(TypeError, seen="max_anser_len"):
        answer(**EXAMPLES[0], max_anser_len=3)


@pytest.mark.parametrize("max_seq_len, doc_stride", [(4, 1), (30, 29), (40, 40)])
def test_windows_that_do_not_advance_raise_and_error_names_sizes(answer, max_seq_len, doc_stride):
    expected = ("doc_stride", doc_stride)
    with raises(ValueError, seen=("max_seq_len", max_seq_len), expected=expected):
        answer(**EXAMPLES[2], max_seq_len=max_seq_len, doc_stride=doc_stride)


def test_short_context_ignores_doc_stride(answer):
    example = EXAMPLES[1]
    close(answer(**example, max_seq_len=60, doc_stride=60), answers_by_hand(answer, **example))


@pytest.mark.parametrize(
    "make_tokenizer, name", [(ByT5Tokenizer, "ByT5Tokenizer"), (lambda: None, "None")]
)
def test_slow_or_missing_tokenizer_raises(answer, make_tokenizer, name):
    with raises(ValueError, seen=name):
        QuestionAnsweringPipeline(answer.model, make_tokenizer())


def test_model_without_start_and_end_logits_raises():
    tokenizer = word_pieces()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
    )
    answer = pipeline("question-answering", model=BertForMaskedLM(config), tokenizer=tokenizer)
    with raises(ValueError, seen="BertForMaskedLM"):
        answer(**EXAMPLES[0])


def test_tokenizer_larger_than_model_vocabulary_raises():
    tokenizer = word_pieces()
    answer = pipeline("question-answering", model=build(ours, range(20)), tokenizer=tokenizer)
    largest = max(tokenizer(QUESTION, CONTEXT)["input_ids"])
    with raises(ValueError, seen=(largest, 20)):
        answer(**EXAMPLES[0])
