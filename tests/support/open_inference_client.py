"""Rows of texts and of tokens as inputs of Triton's client, and its answers as arrays."""

import json

import httpx
import numpy as np
import tritonclient.http as triton

READERS, GENERATORS = ("encoder", "classification", "pretraining"), ("seq2seq", "causal")
# no word begins with w1 or w2, which are special tokens also inside of words
ROWS = [[5, 9, 30, 7, 41], [8, 33], [6, 44, 7]]
WORDS = [" ".join(f"w{token}" for token in row) for row in ROWS]


def batch():
    """Return the ids and the mask of `ROWS`."""
    longest = max(map(len, ROWS))
    ids = np.array([row + [0] * (longest - len(row)) for row in ROWS])
    return ids, np.array([[1] * len(row) + [0] * (longest - len(row)) for row in ROWS])


def tensor(name, values, in_binary=True):
    datatype = {"i": "INT64", "f": "FP32", "O": "BYTES"}[values.dtype.kind]
    result = triton.InferInput(name, list(values.shape), datatype)
    result.set_data_from_numpy(values, binary_data=in_binary)
    return result


def texts(values=WORDS, in_binary=True):
    return [tensor("text", np.array(values, object), in_binary)]


def tokens(in_binary=True, **more):
    ids, mask = batch()
    return [
        tensor(name, own, in_binary)
        for name, own in {"input_ids": ids, "attention_mask": mask, **more}.items()
    ]


def infer(client, model, inputs, *names, in_binary=True, **options):
    """Return the outputs `names`, by default all, as arrays."""
    expected = [triton.InferRequestedOutput(name, binary_data=in_binary) for name in names]
    actual = client.infer(model, inputs, outputs=expected or None, **options)
    return {
        each["name"]: actual.as_numpy(each["name"]) for each in actual.get_response()["outputs"]
    }


def post(server, model, body, **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        f"{server.url}/v2/models/{model}/infer", content=content, headers=headers, timeout=60
    )
