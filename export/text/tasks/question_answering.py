"""Extractive question answering (Devlin et al. 2019, section 4.2), like our pipeline
"question-answering"."""

from collections.abc import Sequence

from tokenizers import Encoding

from ...errors import UsageError
from ...heads import ANSWER, QUESTION
from ...shared.answer_spans import Window, find_answers, read_window
from ..checks import check_count, check_flags, check_texts
from ..text_model import MAX_WINDOWS, Cut, Outputs, TextModel, check_windows
from .task import JsonObject, TaskCall

MAX_SEQ_LEN, DOC_STRIDE = 384, 128


def answer(
    runtime: TextModel,
    questions: Sequence[str],
    contexts: Sequence[str],
    /,
    top_k: int = 1,
    max_answer_len: int = 15,
    handle_impossible_answer: bool = False,
    align_to_words: bool = True,
    max_seq_len: int | None = None,
    doc_stride: int | None = None,
    max_question_len: int | None = None,
    *,
    max_windows: int | None = None,
) -> list[list[JsonObject]]:
    """Return the spans of each context that answer the question at the same index, best first.

    An answer is `{"score": float, "start": int, "end": int, "answer": str}`, where `answer` is
    `context[start:end]`. A context that is too long for one window is read in overlapping windows,
    each with the question. Results equal our pipeline "question-answering".

    Args:
        questions, contexts: lists of the same length.
        top_k: maximum number of answers per question.
        max_answer_len: maximum number of tokens of an answer.
        handle_impossible_answer: include the empty answer `""`. Its score is the lowest score of
            the CLS token over all windows.
        align_to_words: extend answers to full words, as the tokenizer splits them.
        max_seq_len: maximum number of tokens of a window; by default 384, or the tokenizer's
            `model_max_length` if that is less.
        doc_stride: number of tokens that windows share; by default 128, or half of `max_seq_len` if
            that is less.
        max_question_len: truncate the question to this number of tokens.
        max_windows: maximum number of windows of a context; None is no limit.

    Raises:
        UsageError: if an argument is out of range.
        ValueError: if the export has no question answering head, the lists are empty or differ in
            length, a text is blank, or a question is so long that windows cannot advance.
        TooLong: if a context needs more than `max_windows`.
    """
    runtime.require(ANSWER)
    for name, value in (("top_k", top_k), ("max_answer_len", max_answer_len)):
        check_count(name, value)
    check_flags(handle_impossible_answer=handle_impossible_answer, align_to_words=align_to_words)
    if max_question_len is not None:
        check_count("max_question_len", max_question_len)
    sizes = window_sizes(runtime, max_seq_len, doc_stride)
    examples = check_examples(questions, contexts)
    windows = []
    for number, (question, context) in enumerate(examples):
        if max_question_len is not None:
            [encoding] = runtime.encode([question], special_tokens=False)
            if len(encoding.ids) > max_question_len:
                question = question[: encoding.offsets[max_question_len - 1][1]]
        windows.append(make_windows(runtime, question, context, number, *sizes, max_windows))
    names = [f"context {number} with its question" for number in range(len(examples))]
    sequence = context_sequence(runtime)
    cls_id = runtime.tokenizer_settings.special_tokens["cls_token"]

    def read(row: Encoding, outputs: Outputs) -> Window:
        return read_window(row, [outputs["start_logits"], outputs["end_logits"]], sequence, cls_id)

    all_windows = runtime.run_windows(windows, read, names)
    return [
        find_answers(
            group, context, top_k, max_answer_len, handle_impossible_answer, align_to_words
        )
        for (_, context), group in zip(examples, all_windows)
    ]


def window_sizes(
    runtime: TextModel, max_seq_len: int | None, doc_stride: int | None
) -> tuple[int, int]:
    """Return the number of tokens of a window and of what two windows share, with defaults for
    None. Raises UsageError for a size out of range."""
    if max_seq_len is None:
        max_seq_len = min(runtime.tokenizer_settings.longest or MAX_SEQ_LEN, MAX_SEQ_LEN)
    check_count("max_seq_len", max_seq_len)
    if doc_stride is None:
        doc_stride = min(max_seq_len // 2, DOC_STRIDE)
    check_count("doc_stride", doc_stride, min_value=0)
    if doc_stride > max_seq_len:
        raise UsageError(f"doc_stride is {doc_stride}, expected at most max_seq_len, {max_seq_len}")
    return max_seq_len, doc_stride


def check_examples(questions: object, contexts: object) -> list[tuple[str, str]]:
    first, second = check_texts(questions, "question"), check_texts(contexts, "context")
    if len(first) != len(second):
        raise ValueError(
            f"{len(first)} questions and {len(second)} contexts, expected one context for each "
            "question"
        )
    return list(zip(first, second))


def context_sequence(runtime: TextModel) -> int:
    """Return the position, 0 or 1, of the context in the pair that the tokenizer reads.

    As in the pipeline, the context is second if the tokenizer pads on the right, else first.
    """
    return 1 if runtime.tokenizer_settings.padding_side == "right" else 0


def make_windows(
    runtime: TextModel,
    question: str,
    context: str,
    number: int,
    max_seq_len: int,
    doc_stride: int,
    max_windows: int | None,
) -> list[Encoding]:
    """Return the windows of the context, each with the question, of at most `max_seq_len` tokens.

    Windows share `doc_stride` tokens. `number` is the context's index, for errors.

    Raises:
        ValueError: if the context has no tokens or the windows cannot advance.
        TooLong: if there are more than `max_windows`, unless that is None.
    """
    sequence = context_sequence(runtime)
    pair = (question, context) if sequence else (context, question)
    [encoding] = runtime.encode_texts([pair])
    length = encoding.sequence_ids.count(sequence)
    if not length:
        raise ValueError(f"context {number} has no tokens, expected words that the tokenizer knows")
    room = max_seq_len - (len(encoding.ids) - length)
    if length <= room:
        return [encoding]
    if room <= doc_stride:
        raise ValueError(
            f"max_seq_len={max_seq_len} leaves {room} tokens for context {number} besides its "
            f"question, expected more than doc_stride={doc_stride}, as the context has {length}"
        )
    check_windows(f"context {number}", length, room - doc_stride, max_windows)
    [first] = runtime.encode_texts(
        [pair], Cut(max_seq_len, "only_second" if sequence else "only_first", doc_stride)
    )
    return [first, *first.overflowing]


PIPELINES = {
    "question-answering": TaskCall(
        answer,
        QUESTION,
        lambda result, row, options: result if options.get("top_k", 1) > 1 else result[0],
        defaults={"max_windows": MAX_WINDOWS},
    )
}
