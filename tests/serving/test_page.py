"""Tests of the web page at `/`: its content, the data that it requests, and its streams."""

import asyncio
import base64
import dataclasses
import hashlib
import json
import re
from contextlib import aclosing
from html.parser import HTMLParser

import httpx
import pytest
from messages import check_message
from opened_engines import text_client
from served import served as in_thread
from served_models import loaded_model
from serving_load import with_words

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.engine.inputs import Event
from vanilla_transformer_export.engine.limits import shutting_down
from vanilla_transformer_export.serving import page
from vanilla_transformer_export.serving.app import create_app
from vanilla_transformer_export.serving.models import ServedModels

pytestmark = pytest.mark.filterwarnings("ignore:.*was cut after")
MOST_BYTES = 24 * 1024
TEXT = "w5 w6 w30. W7 w9 w21!\n\n w20 w21 w22"


@pytest.fixture(scope="module")
def served(exported_for, tmp_path_factory):
    """A translator, a decoder and an encoder, as a server has them."""
    result = {}
    for name, kind, languages in (
        ("pair", "seq2seq", [("en", "de"), ("de", "en")]),
        ("poet", "causal", []),
    ):
        export = with_words(exported_for(kind, "cpu")[1], tmp_path_factory.mktemp(name))
        result[name] = loaded_model(name, *text_client(export, slots=4), languages)
    reader = TextRuntime(
        with_words(exported_for("encoder", "cpu")[1], tmp_path_factory.mktemp("reader")), threads=1
    )
    yield ServedModels({**result, "reader": loaded_model("reader", reader)})
    for model in result.values():
        model.client.close()


@pytest.fixture(scope="module")
def app(served):
    return create_app(served, (page.PROTOCOL,))


def open_runtime(served, name):
    """Return a runtime of the model `name`, without an engine."""
    return TextRuntime(served.models[name].runtime.info.directory, threads=1)


def ask(app, method, path, **body):
    async def answer():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, **({"json": body} if body else {}))

    return asyncio.run(answer())


def events(answer) -> list[dict]:
    parts = answer.text.split("\n\n")
    assert parts.pop() == "" and all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


class Elements(HTMLParser):
    """The start tags of a page, and its form fields without a label."""

    def __init__(self, text):
        super().__init__()
        self.found, self.unlabelled, self.labels = [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.found.append((tag, attributes))
        self.labels += tag == "label"
        if (
            tag in ("textarea", "input", "select")
            and not self.labels
            and "hidden" not in attributes
        ):
            self.unlabelled.append((tag, attributes))

    def handle_endtag(self, tag):
        self.labels -= tag == "label"


@pytest.mark.parametrize("path", ["/", "/models/pair/"])
def test_content_security_policy_allows_only_page_script_and_style(app, path):
    answer = ask(app, "GET", path)
    assert (
        answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    )
    policy = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )
    for element, directive in (("script", "script-src"), ("style", "style-src")):
        [content] = re.findall(f"<{element}>(.*?)</{element}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"


def test_page_is_small_and_loads_no_external_resources():
    assert len(page.PAGE.encode()) < MOST_BYTES
    elements = Elements(page.PAGE)
    for tag, attributes in elements.found:
        urls = [attributes.get(name, "") for name in ("src", "href", "action")]
        assert not any(url and not url.startswith(("data:", "openapi.json")) for url in urls), (
            tag,
            attributes,
        )
        # the policy blocks inline handlers and styles
        assert not any(name.startswith("on") or name == "style" for name in attributes)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|url\(|@import", page.PAGE
    )


def test_every_field_has_a_label():
    elements = Elements(page.PAGE)
    assert elements.unlabelled == [] and sum(tag == "textarea" for tag, _ in elements.found) > 5
    assert any(attributes.get("aria-live") == "polite" for _, attributes in elements.found)


def test_page_models_endpoint_lists_models_with_tasks(app):
    facts = {each["name"]: each for each in ask(app, "GET", "/page/models").json()}
    assert [each["task"] for each in facts.values()] == ["translate", "generate", "fill-mask"]
    assert facts["pair"]["pairs"] == [["en", "de"], ["de", "en"]]
    assert [each["name"] for each in ask(app, "GET", "/models/poet/page/models").json()] == ["poet"]


def test_every_served_task_has_template_and_script_entry(app):
    """Each task of the page has a template and a JavaScript entry of the same name."""
    templates = {
        attributes["id"] for tag, attributes in Elements(page.PAGE).found if tag == "template"
    }
    assert {each["task"] for each in ask(app, "GET", "/page/models").json()} <= templates
    task_names = re.findall(r"^  '?([\w-]+)'?: \{$", page.PAGE, re.MULTILINE)
    assert set(task_names) == templates


def test_page_needs_no_token_but_its_models_do():
    with in_thread(token=b"secret", protocols=(page.PROTOCOL,)) as server:
        assert httpx.get(f"{server.url}/").text == page.PAGE
        answers = [
            httpx.get(f"{server.url}/page/models", headers=headers)
            for headers in ({}, {"Authorization": "Bearer secret"})
        ]
    assert [answer.status_code for answer in answers] == [401, 200]
    assert "token" in answers[0].json()["error"]


@pytest.mark.parametrize("text", [TEXT, "w5", "12. w5\n***", "\n w9 w12 w33.\n", "w5 w6. w8 w9."])
def test_streamed_translation_matches_translate(app, served, text):
    answer = ask(app, "POST", "/page/stream", text=text, source="en", target="de", model="pair")
    *pieces, aligned, last = events(answer)
    assert last == {"done": True} and answer.headers["content-type"].startswith("text/event-stream")
    [expected] = open_runtime(served, "pair").translate([text], num_beams=1, return_alignments=True)
    assert "".join(piece["text"] for piece in pieces) == expected.text
    pairs = [[list(one), list(other)] for one, other in expected.alignments]
    assert aligned == {"alignments": pairs}
    assert len(pieces) > 1 or text == "12. w5\n***"


def test_translator_without_an_alignment_graph_streams_its_text_only(served):
    pair = served.models["pair"]
    specs = {role: spec for role, spec in pair.info.specs.items() if role != "alignment"}
    info = dataclasses.replace(pair.info, specs=specs)
    lacking = loaded_model("pair", pair.runtime, pair.client, [("en", "de")])
    lacking.plan = dataclasses.replace(lacking.plan, info=info)
    other_app = create_app(ServedModels({"pair": lacking}), (page.PROTOCOL,))
    answer = ask(other_app, "POST", "/page/stream", text=TEXT, source="en", target="de")
    *pieces, last = events(answer)
    assert last == {"done": True} and all([*piece] == ["text"] for piece in pieces)


def test_streamed_generation_matches_generate(app, served):
    *pieces, _ = events(
        ask(app, "POST", "/models/poet/page/stream", text="w5 w9", max_new_tokens=9)
    )
    expected = open_runtime(served, "poet").generate(["w5 w9"], max_new_tokens=9)
    assert ["".join(piece["text"] for piece in pieces)] == expected


def test_positive_temperature_samples(app):
    options = dict(text="w5 w9", max_new_tokens=12, model="poet")
    texts = {
        ask(app, "POST", "/page/stream", **options, temperature=temperature).text
        for temperature in (0, 0, 5, 5, 5)
    }
    assert len(texts) == 4


@pytest.mark.parametrize(
    "body, status, seen, expected",
    [
        (dict(text=" ", model="pair", source="en", target="de"), 400, "' '", ()),
        (dict(text="w5", model="pair", source="en", target="fr"), 400, "fr", "en to de"),
        (dict(text="w5", model="nobody"), 404, "nobody", ("pair", "poet", "reader")),
        (dict(text="w5", model="reader"), 400, "reader", ()),
        (dict(text="w5"), 400, 2, ("pair", "poet")),
        (dict(text="w5 " * 99, model="poet"), 413, 99, ()),
        (dict(text="w5", model="poet", max_new_tokens=0), 400, "max_new_tokens", ()),
        (dict(text=5, model="poet"), 400, "text", ()),
    ],
)
def test_invalid_request_returns_error_message(app, body, status, seen, expected):
    answer = ask(app, "POST", "/page/stream", **body)
    assert answer.status_code == status
    check_message(answer.json()["error"], seen=seen, expected=expected)


class FailingEngine:
    """An engine that streams two tokens and then fails. `closed` is True after its stream ended."""

    def __init__(self, served):
        self.admission, self.closed = served.client.admission, False

    async def stream(self, job, results):
        try:
            for token in (5, 6):
                yield Event(0, token)
            raise shutting_down()
        finally:
            self.closed = True


def test_error_after_first_text_is_sent_as_event(served):
    poet = served.models["poet"]
    failing_app = create_app(
        ServedModels({"poet": loaded_model("poet", poet.runtime, FailingEngine(poet))}),
        (page.PROTOCOL,),
    )
    result = events(ask(failing_app, "POST", "/page/stream", text="w5"))
    assert result == [{"text": "w5"}, {"text": " w6"}, {"error": shutting_down().message}]


def test_disconnected_client_closes_stream(served):
    poet = served.models["poet"]
    model = loaded_model("poet", poet.runtime, FailingEngine(poet))

    async def read_two_events():
        pieces = page.completion(model, page.PageRequest(text="w5"))
        async with aclosing(page.events(pieces)) as event_stream:
            await anext(event_stream)
            await anext(event_stream)

    asyncio.run(read_two_events())
    assert model.client.closed
