"""`pipeline("question-answering")`: the span of a context that answers a question (Devlin et al.
2019, section 4.2)."""

from collections.abc import Iterable, Iterator, Sequence
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pipelines.base import ChunkPipeline

from .answer_spans import find_answers, read_window
from .options import without_none


class QuestionAnsweringPipeline(ChunkPipeline):
    """A pipeline that answers a question from a context.

    A result is `{"score": float, "start": int, "end": int, "answer": str}`, with `answer` =
    `context[start:end]`. `score` is the probability that the answer starts at its first token times
    the probability that it ends at its last token. Each is a softmax over the context's tokens (and
    the tokenizer's CLS token, if there is one). Spans with the same text, upper or lower case, add
    up their scores. Only the best `2 * top_k + 10` spans of a window count (`top_k` if answers are
    not aligned to words). A context too long for the model is read in overlapping windows, each
    with the question and its own softmax.

    A call takes `question=` and `context=`: two strings, two lists of the same length, or a list of
    questions and one context. As its argument or as `data=`, it also takes a dict `{"question":
    ..., "context": ...}` or an object with `question_text` and `context_text` (a `SquadExample`). A
    list, a generator or a dataset of these works too, and so do a question and a context as two
    arguments. One example, alone or in a list, gives one result. A list of several gives a list,
    and a generator or dataset gives an iterator of results.

    The arguments are those of a call, or of `transformers.pipeline` for every call.

    Args:
        top_k (`int`, defaults to 1): above 1, a result is a list of up to `top_k` answers, best
            first (one answer alone is still a dict).
        max_answer_len (`int`, defaults to 15): maximum tokens of an answer.
        handle_impossible_answer (`bool`, defaults to `False`): the empty answer `""` competes too,
            with the lowest score that a window gives its CLS token (0 for a tokenizer without one).
        align_to_words (`bool`, defaults to `True`): extend answers to whole words, as the tokenizer
            splits them.
        max_seq_len (`int`, defaults to 384, or the tokenizer's `model_max_length` if that is less):
            maximum tokens of a window.
        doc_stride (`int`, defaults to 128, or half of `max_seq_len` if that is less): tokens that
            windows share.
        max_question_len (`int`, *optional*): cut the question to this many tokens.
        padding (`bool` or `str`, defaults to `False`): as in a call of the tokenizer, per window.
        batch_size (`int`, defaults to 1): windows that go through the model together.

    Raises:
        ValueError: for a missing or slow tokenizer, a model without start and end logits, and
            arguments out of range. Also for examples in another form, an empty question or context,
            windows that share all their room for the context, and a token id outside the model's
            vocabulary.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            name = "None" if tokenizer is None else type(tokenizer).__name__
            raise ValueError(
                "question answering needs a fast tokenizer, which knows its characters' offsets: "
                f"got {name}"
            )
        super().__init__(model=model, tokenizer=tokenizer, **kwargs)

    def _sanitize_parameters(
        self,
        top_k=None,
        topk=None,
        max_answer_len=None,
        handle_impossible_answer=None,
        align_to_words=None,
        max_seq_len=None,
        doc_stride=None,
        max_question_len=None,
        padding=None,
    ):
        top_k = topk if top_k is None else top_k
        lengths = {
            "max_seq_len": max_seq_len,
            "doc_stride": doc_stride,
            "max_question_len": max_question_len,
        }
        for name, value in {"top_k": top_k, "max_answer_len": max_answer_len, **lengths}.items():
            smallest = 0 if name == "doc_stride" else 1
            if value is not None and value < smallest:
                raise ValueError(f"{name} must be at least {smallest}, got {value}")
        preprocess = {**lengths, "padding": padding}
        postprocess = {
            "top_k": top_k,
            "max_answer_len": max_answer_len,
            "handle_impossible_answer": handle_impossible_answer,
            "align_to_words": align_to_words,
        }
        return without_none(preprocess), {}, without_none(postprocess)

    def __call__(
        self,
        *args: Any,
        question: str | Sequence[str] | None = None,
        context: str | Sequence[str] | None = None,
        data: Any = None,
        X: Any = None,  # noqa: N803, the name of version 4
        **kwargs: Any,
    ) -> Any:
        examples = _examples(args, question, context, data if data is not None else X)
        if isinstance(examples, list) and len(examples) < 2:
            return super().__call__(examples[0], **kwargs) if examples else []
        return super().__call__(examples, **kwargs)

    def preprocess(
        self,
        example: Any,
        max_seq_len: int | None = None,
        doc_stride: int | None = None,
        max_question_len: int | None = None,
        padding: bool | str = False,
    ) -> Iterator[dict[str, Any]]:
        question, context = _question_and_context(example)
        if max_seq_len is None:
            max_seq_len = min(self.tokenizer.model_max_length, 384)
        if doc_stride is None:
            doc_stride = min(max_seq_len // 2, 128)
        if doc_stride > max_seq_len:
            raise ValueError(
                f"doc_stride must be at most max_seq_len={max_seq_len}, got {doc_stride}"
            )
        question_tokens = self.tokenizer(
            question, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        question_len = len(question_tokens["input_ids"])
        if max_question_len is not None and question_len > max_question_len:
            question = question[: question_tokens["offset_mapping"][max_question_len - 1][1]]
            question_len = max_question_len
        # The tokenizer rejects windows that do not advance, without a reason. A short context needs
        # none.
        max_context = (
            max_seq_len - question_len - self.tokenizer.num_special_tokens_to_add(pair=True)
        )
        if max_context <= doc_stride:
            context_len = len(
                self.tokenizer(context, add_special_tokens=False, verbose=False)["input_ids"]
            )
            if context_len > max_context:
                raise ValueError(
                    f"a context of {context_len} tokens does not fit: max_seq_len={max_seq_len} "
                    f"and a question of {question_len} leave {max_context}, expected more than "
                    f"doc_stride={doc_stride}, or a shorter question"
                )
            doc_stride = 0
        # Padding goes to the side of the question, so that the context's words and positions stay
        # as they are.
        question_first = self.tokenizer.padding_side == "right"
        windows = self.tokenizer(
            *((question, context) if question_first else (context, question)),
            truncation="only_second" if question_first else "only_first",
            max_length=max_seq_len,
            stride=doc_stride,
            padding=padding,
            return_overflowing_tokens=True,
        )
        last = len(windows.encodings) - 1
        vocab_size = self.model.get_input_embeddings().num_embeddings
        for index, encoding in enumerate(windows.encodings):
            largest = max(encoding.ids)
            if largest >= vocab_size:
                raise ValueError(
                    f"the tokenizer gave token id {largest}, but the model's vocabulary has "
                    f"{vocab_size} entries: "
                    "they do not belong together"
                )
            model_inputs = {
                name: torch.tensor([windows[name][index]])
                for name in self.tokenizer.model_input_names
            }
            yield {
                **model_inputs,
                "context": context,
                "encoding": encoding,
                "is_last": index == last,
            }

    def _forward(self, inputs):
        outputs = self.model(
            **{name: inputs.pop(name) for name in self.tokenizer.model_input_names}
        )
        if "start_logits" not in outputs or "end_logits" not in outputs:
            raise ValueError(
                f"expected a model with start and end logits, got {type(self.model).__name__}"
            )
        return {
            "start_logits": outputs["start_logits"],
            "end_logits": outputs["end_logits"],
            **inputs,
        }

    def postprocess(
        self,
        windows: Iterable[dict[str, Any]],
        top_k: int = 1,
        max_answer_len: int = 15,
        handle_impossible_answer: bool = False,
        align_to_words: bool = True,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        windows = list(windows)
        answers = find_answers(
            [self._read(window) for window in windows],
            windows[0]["context"],
            top_k,
            max_answer_len,
            handle_impossible_answer,
            align_to_words,
        )
        return answers[0] if len(answers) == 1 else answers

    def _read(self, window):
        """Return the `Window` of a result of `_forward`."""
        count, pads_left = len(window["encoding"].ids), self.tokenizer.padding_side == "left"
        # A batch pads its windows to the same length, which their encodings know nothing of.
        kept = slice(-count, None) if pads_left else slice(count)
        logits = [window[name][0].float().numpy()[kept] for name in ("start_logits", "end_logits")]
        return read_window(
            window["encoding"], logits, 0 if pads_left else 1, self.tokenizer.cls_token_id
        )


def _examples(args, question, context, data):
    """Return the examples of a call as a list, or `data` itself if it is a generator or a dataset.

    `args` are the positional arguments. Raises ValueError for a combination of arguments that is no
    example. The content of examples is not checked.
    """
    if args and not (question is None and context is None and data is None):
        raise ValueError(f"examples come as arguments or by name, not both: got {args!r} and names")
    if len(args) == 2 and all(isinstance(arg, str) for arg in args):
        question, context = args
    elif args:
        data = args[0] if len(args) == 1 else list(args)
    if data is None:
        if isinstance(question, str) and isinstance(context, str):
            return [{"question": question, "context": context}]
        if isinstance(question, list | tuple) and isinstance(context, str | list | tuple):
            contexts = [context] * len(question) if isinstance(context, str) else context
            if len(question) != len(contexts):
                raise ValueError(
                    f"expected as many contexts as questions, got {len(contexts)} and "
                    f"{len(question)}"
                )
            return [{"question": one, "context": other} for one, other in zip(question, contexts)]
        raise ValueError(
            "expected question= and context= as two strings, two lists, or a list of questions and "
            "one context, got "
            f"{question!r} and {context!r}"
        )
    if isinstance(data, GeneratorType | Dataset):
        return data
    if isinstance(data, dict) or hasattr(data, "question_text"):
        return [data]
    if isinstance(data, Iterable) and not isinstance(data, str):
        return list(data)
    raise ValueError(f"expected an example or several, got {data!r}")


def _question_and_context(example):
    if isinstance(example, dict):
        texts = {name: example.get(name) for name in ("question", "context")}
    elif hasattr(example, "question_text") and hasattr(example, "context_text"):
        texts = {"question": example.question_text, "context": example.context_text}
    else:
        raise ValueError(
            "expected an example that is a dict with a question and a context, or that has "
            "question_text and "
            f"context_text, got {example!r}"
        )
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{name} must be a non-empty string, got {text!r}")
    return texts["question"], texts["context"]
