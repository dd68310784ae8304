"""Reranking: how well each of several texts answers a query, by a classifier with one label.

A model that was a language model, such as Qwen3-Reranker, reads the query and the text in the
prompt of its config.json.
"""

from collections.abc import Sequence
from string import Formatter

import numpy as np

from ...errors import UsageError
from ...heads import RANKED, RERANK
from ..checks import (
    Pair,
    check_count,
    check_flags,
    check_list,
    check_strings,
)
from ..scores import sigmoid
from ..text_model import Cut, Row, TextModel, TokenRow, plain_row
from .embedding import max_length, select_prompt
from .task import JsonObject, TaskCall


def rerank(
    runtime: TextModel,
    queries: Sequence[str],
    texts: Sequence[Sequence[str]],
    /,
    top_k: int | None = None,
    raw_scores: bool = False,
    prompt_name: str | None = None,
    prompt: str | None = None,
) -> list[list[JsonObject]]:
    """Return the texts of each query, best first: lists of `{"index": int, "score": float}`, where
    `index` is the place of the text in its list.

    Args:
        queries: strings; they may be blank.
        texts: a list of texts for each query. Those that are too long are truncated.
        top_k: number of texts to return for each query; `None` returns all.
        raw_scores: False returns the sigmoid of the logit. For a model with the answers "yes" and
            "no" it is the probability of "yes" against "no".
        prompt_name: name of an instruction in config_sentence_transformers.json, for a model whose
            prompt has one; by default its `default_prompt_name`, or else that of the model.
        prompt: the instruction itself, in place of `prompt_name`.

    Raises:
        UsageError: if `top_k` is invalid, `prompt_name` is unknown, both a prompt and a name are
            set, or a prompt is set for a model that has none.
        ValueError: if the export has no sequence classification head with one label, the number of
            lists is not the number of queries, a list is empty, or a text is no string.
    """
    runtime.require(RERANK)
    if len(runtime.info.config["id2label"]) != 1:
        raise ValueError(
            f"this export has the labels {list(runtime.info.config['id2label'].values())!r:.80}, "
            "expected one label, whose score ranks texts"
        )
    if top_k is not None:
        check_count("top_k", top_k)
    check_flags(raw_scores=raw_scores)
    lists = check_candidates(check_strings(queries, "queries"), texts)
    pairs = [(query, text) for query, candidates in lists for text in candidates]
    instruction = select_instruction(runtime, prompt_name, prompt)
    rows = pair_rows(runtime, pairs, instruction, Cut(max_length(runtime.info)))
    scores = score_rows(runtime, rows, raw_scores)
    ends = np.cumsum([len(candidates) for _, candidates in lists])[:-1]
    return [rank_texts(scores_of_query, top_k) for scores_of_query in np.split(scores, ends)]


def score_rows(runtime: TextModel, rows: Sequence[Row], raw_scores: bool = False) -> np.ndarray:
    """Return the score of each of `rows`, (B,) float32, as `rerank` does. Each row is a pair of a
    query and a text, see `pair_rows`."""
    logits = np.array(runtime.run_rows(rows, lambda row, outputs: outputs["logits"][0]))
    return logits if raw_scores else sigmoid(logits)


def rank_texts(scores: np.ndarray, top_k: int | None = None) -> list[JsonObject]:
    """Return the `top_k` best texts by their `scores` (B,), as `rerank` does for a query."""
    best = np.argsort(-scores, kind="stable")[:top_k].tolist()
    return [{"index": index, "score": float(scores[index])} for index in best]


def check_candidates(queries: list[str], texts: object) -> list[tuple[str, list[str]]]:
    """Return each of `queries` with its list of texts. Raises ValueError for another number of
    lists, and for an empty list or a text that is no string."""
    lists = check_list(texts, "lists of strings, the texts of each query")
    if len(lists) != len(queries):
        raise ValueError(
            f"{len(queries)} queries and {len(lists)} lists of texts, expected one list for each "
            "query"
        )
    return [(query, check_strings(of_query)) for query, of_query in zip(queries, lists)]


# -------------------------------------------------------------------------------------- the prompt


def select_instruction(
    runtime: TextModel, prompt_name: str | None = None, prompt: str | None = None
) -> str:
    """Return the instruction of the prompt, empty for a model without a prompt.

    Raises UsageError if `prompt_name` is unknown, both are set, or one of them is set for a model
    whose prompt has no instruction.
    """
    reranker = runtime.info.config.get("reranker") or {}
    instruction = select_prompt(runtime.info.sentence_settings, prompt_name, prompt)
    if instruction and "{instruction}" not in reranker.get("template", ""):
        if prompt_name is None and prompt is None:
            return ""
        raise UsageError(
            f"the prompt is {instruction!r:.60}, expected None: this model has no instruction"
        )
    return instruction or reranker.get("instruction") or ""


def pair_rows(
    runtime: TextModel, pairs: Sequence[Pair], instruction: str, cut: Cut
) -> Sequence[Row]:
    """Return the tokens of each pair of a query and a text, in the prompt of the model if it has
    one. `cut` truncates or rejects them.

    The end of a prompt is never truncated: the model answers after it.
    """
    reranker = runtime.info.config.get("reranker")
    if not reranker:
        return runtime.encode_texts(pairs, cut)
    template = reranker["template"]
    texts = [
        template.format(instruction=instruction, query=query, document=text)
        for query, text in pairs
    ]
    literal, name, *_ = list(Formatter().parse(template))[-1]
    *rows, end = runtime.encode([*texts, literal if name is None else ""], special_tokens=False)
    kept = [keep_end(row.ids, end.ids, cut) for row in rows]
    if any(len(row.ids) > cut.longest for row in rows):
        runtime.warn_of_cut(cut)
    return kept


def keep_end(ids: list[int], end: list[int], cut: Cut) -> TokenRow:
    """Return the row of `ids` or, if there are too many for `cut`, of their start and `end`."""
    return plain_row(ids if cut.fits(len(ids)) else [*ids[: max(cut.longest - len(end), 0)], *end])


PIPELINES = {"text-ranking": TaskCall(rerank, RANKED)}
