"""Reranking as clients of Cohere (https://docs.cohere.com/reference/rerank) and Jina
(https://api.jina.ai/redoc) call it, and those of vLLM and infinity, which have the same fields."""

import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, WithJsonSchema

from ...errors import RequestError, UsageError
from ...text.tasks import reranking
from ...text.tasks.task import JsonObject
from ...text.text_model import Cut, TextModel
from ..models import ServedModel
from .protocol import STRICT, ModelName, Protocol, choose_model, server_settings, short_repr
from .text_embeddings import RERANKS, cut_for, rows_to_rank
from .text_embeddings_requests import check_number

router = APIRouter(tags=["Cohere and Jina"])

DOCUMENTS = {
    "type": "array",
    "items": {
        "anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "properties": {"text": {"type": "string"}},
                "required": ["text"],
            },
        ]
    },
}


class RankRequest(BaseModel):
    """A query and documents to rank. A field that is null counts as absent; unknown fields are
    rejected."""

    model_config = STRICT

    model: ModelName = None
    query: str = Field(description="query that the documents are compared with")
    documents: Annotated[list[Any], WithJsonSchema(DOCUMENTS)] = Field(
        description="documents to rank: texts, or objects with the field text"
    )
    top_n: int | None = Field(
        None, ge=1, description="number of results, at most one for each document; by default all"
    )
    return_documents: bool | None = Field(
        False, description="include the document of each result in the response"
    )
    max_tokens_per_doc: int | None = Field(
        None, ge=1, description="number of tokens after which a document is cut; by default none"
    )


def error_body(error: RequestError) -> JsonObject:
    """Return the error in the field that Cohere has for it, and in that of Jina, which Jina's
    clients read."""
    return {"message": error.message, "detail": error.message}


PROTOCOL = Protocol(router, error_body)


@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rank(request: Request, body: RankRequest) -> Response:
    """Score how well each document answers the query. Return the best document first.

    `results` in the response is a list of `{"index": number, "relevance_score": number}`, where
    `index` is the position of the document in the request. With `return_documents` each entry has
    the `document` too. The score is the sigmoid of the model's logit. Documents that are too long
    are cut, or rejected if the server has `--auto-truncate false`. The model must have one
    label."""
    model = await choose_model(request, RERANKS, body.model)
    check_number("documents", body.documents, server_settings(request).max_batch)
    documents = [read_document(item, index) for index, item in enumerate(body.documents)]
    cut = cut_for(request, model)
    answer = await model.read(len(documents), rank_documents, model, body, documents, cut)
    return JSONResponse(answer)


def read_document(item: Any, index: int) -> JsonObject:
    """Return a document as an object with its text. Raises UsageError for another value than a text
    or such an object. `index` is its position, for the message."""
    document = {"text": item} if isinstance(item, str) else item
    if not isinstance(document, dict) or not isinstance(document.get("text"), str):
        raise UsageError(
            f"documents has {short_repr(item)} at {index}, expected a text or an object with the "
            "field text",
            "documents",
        )
    return document


def rank_documents(
    model: ServedModel, body: RankRequest, documents: list[JsonObject], cut: Cut
) -> JsonObject:
    """Return the response to a request, whose `documents` have a text each. Raises TooLong for one
    that `cut` rejects."""
    texts = [document["text"] for document in documents]
    if body.max_tokens_per_doc is not None:
        texts = cut_texts(model.runtime, texts, body.max_tokens_per_doc)
    rows = rows_to_rank(model, [(body.query, text) for text in texts], cut)
    ranks = reranking.rank_texts(reranking.score_rows(model.runtime, rows), body.top_n)
    results = [{"index": rank["index"], "relevance_score": rank["score"]} for rank in ranks]
    if body.return_documents:
        results = [result | {"document": documents[result["index"]]} for result in results]
    tokens = sum(len(row.ids) for row in rows)
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "object": "list",
        "model": model.name,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "meta": {"tokens": {"input_tokens": tokens}},
    }


def cut_texts(runtime: TextModel, texts: list[str], max_tokens: int) -> list[str]:
    """Return the part of each text that its first `max_tokens` tokens stand for."""
    encodings = runtime.encode(texts, special_tokens=False)
    return [
        text[: encoding.offsets[max_tokens - 1][1]] if len(encoding.ids) > max_tokens else text
        for text, encoding in zip(texts, encodings, strict=True)
    ]
