"""Servers of LibreTranslate's protocol over engines of this process, and their answers."""

import contextlib

from served import served

from vanilla_transformer_export.serving.protocols.libretranslate import PROTOCOL

SLOTS = 8
CARD = "---\nlanguage:\n- en\n- de\nbase_model: someone/tiny-en-de\n---\n\n# A card\n"
WORDS = [f"w{number}" for number in range(40)]
ENGLISH = dict(source="en", target="de")


@contextlib.contextmanager
def serving(*models, token=None, **settings):
    """Yield the address of a server of `models`."""
    with served(token, (PROTOCOL,), **settings) as server:
        served_models = server.server.service.models.models
        served_models.update({model.name: model for model in models})
        try:
            yield server.url
        finally:
            served_models.clear()  # the engines keep running


def answer(client, body, path="/translate"):
    result = client.post(path, json={**ENGLISH, **body})
    assert result.status_code == 200, result.text
    return result.json()


def error_message(response, status=400):
    assert (response.status_code, list(response.json())) == (status, ["error"]), response.text
    return response.json()["error"]


def pairs(translation):
    return [[list(one), list(other)] for one, other in translation.alignments]
