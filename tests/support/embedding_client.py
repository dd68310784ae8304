"""Requests in the protocol of text-embeddings-inference, and their errors."""

import httpx
from messages import check_message

LONG = " ".join(["the old man"] * 30)  # 92 tokens


def post(url, path, **body):
    return httpx.post(url + path, json=body, timeout=60)


def check_rejected(answer, status, kind, seen=(), expected=()):
    assert answer.status_code == status, answer.text
    assert answer.json()["error_type"] == kind
    check_message(answer.json()["error"], seen=seen, expected=expected)
