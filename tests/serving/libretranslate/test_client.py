"""Tests of translations from LibreTranslate's own client, against `TextRuntime.translate`."""

import asyncio
import contextlib
import copy
import dataclasses
import json
import re
from urllib.error import HTTPError

import httpx
import pytest
from checkpoints import EOS, copy_folder, edit_json, seal
from hypothesis import given
from hypothesis import strategies as st
from libretranslatepy import LibreTranslateAPI
from messages import check_message, raises
from opened_engines import text_client
from served_models import loaded_model
from translation_server import ENGLISH, SLOTS, WORDS, answer, error_message, pairs, serving

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.serving.generation import MAX_INLINE_CHARACTERS, translate
from vanilla_transformer_export.serving.protocols.libretranslate import PUBLIC_PATHS
from vanilla_transformer_export.text.languages import Direction
from vanilla_transformer_export.text.tasks.segments import TextOptions

pytestmark = pytest.mark.filterwarnings("ignore:.*was cut after")
TEXT = "w5 w6 w30 . W7 w9 w21 .\n\n w20 w21 w22 "


def test_libretranslate_client_matches_translate(url, alone):
    api = LibreTranslateAPI(url)
    for text in ("w5 w6", TEXT, "w5 ü. W6!"):
        assert api.translate(text, "en", "de") == alone.translate([text])[0]
    assert api.languages() == [
        {"code": "en", "name": "English", "targets": ["de"]},
        {"code": "de", "name": "German", "targets": []},
    ]
    with raises(HTTPError, seen=403):
        api.detect("w5")
    with raises(HTTPError, seen=400):
        api.translate("w5", "en", "fr")


def test_api_key_is_token_of_server(model, alone):
    with serving(model, token=b"secret") as url:
        assert (
            LibreTranslateAPI(url, "secret").translate("w5", "en", "de")
            == alone.translate(["w5"])[0]
        )
        for key in ("wrong", None):
            with raises(HTTPError, seen=401):
                LibreTranslateAPI(url, key).translate("w5", "en", "de")


def test_languages_and_frontend_settings_need_no_token(model):
    """Clients read `keyRequired` before they have a key. Mastodon sends no key to /languages."""
    with serving(model, token=b"secret") as url:
        assert LibreTranslateAPI(url).languages()[0]["code"] == "en"
        assert [httpx.get(f"{url}/models/tiny{path}").status_code for path in PUBLIC_PATHS] == [
            200,
            200,
        ]
        settings = httpx.get(f"{url}/frontend/settings").json()
        assert settings["apiKeys"] is settings["keyRequired"] is True
        assert (
            httpx.post(f"{url}/languages").status_code
            == httpx.get(f"{url}/translate").status_code
            == 401
        )


@given(
    st.lists(
        st.sampled_from([*WORDS, ".", "!", "7", "\n", "\n\n", "?", " ", "Å", "W9", "。"]),
        min_size=1,
        max_size=12,
    )
)
def test_random_texts_match_translate(model, alone, words):
    text = " ".join(["w3", *words])
    [[result]] = asyncio.run(translate(model, [text], Direction("en", "de"), TextOptions(), {}))
    assert [result] == alone.translate([text])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_json_with_byte_order_mark_is_accepted(client, encoding):
    body = json.dumps({"q": "w5 ü . W6", **ENGLISH}, ensure_ascii=False)
    sent = [client.post("/translate", content=body.encode(each)) for each in ("utf-8", encoding)]
    assert [each.status_code for each in sent] == [200, 200] and sent[0].json() == sent[1].json()
    cut = client.post("/translate", content=body.encode("utf-16")[:-1])
    assert cut.status_code == 400 and "not valid JSON" in cut.json()["error"]


def test_form_requests_match_json_requests(client, alone):
    text = "w5 ü . W6\nw7"
    expected = {"translatedText": alone.translate([text])[0]}
    # as browsers send them
    fields = {"q": text.replace("\n", "\r\n"), **ENGLISH, "format": "", "alternatives": "0"}
    assert client.post("/translate", data=fields).json() == expected
    assert (
        client.post(
            "/translate", files={name: (None, value) for name, value in fields.items()}
        ).json()
        == expected
    )
    # as `curl -d` sends it
    raw = "&".join(f"{name}={value}" for name, value in fields.items()).encode()
    assert (
        client.post(
            "/translate", content=raw, headers={"Content-Type": "application/x-www-form-urlencoded"}
        ).json()
        == expected
    )
    assert (
        answer(client, {"q": text, "format": None, "alternatives": None, "secret": "x"}) == expected
    )
    several = client.post("/translate", data={"q": ["w5", "w6"], **ENGLISH}).json()
    assert several == {"translatedText": alone.translate(["w5", "w6"])}


def test_list_returns_list_and_texts_without_letters_are_copied(client, alone):
    first, last = alone.translate(["w5", TEXT])
    actual = answer(client, {"q": ["w5", " \n", "", TEXT], "alternatives": 0})
    assert actual == {"translatedText": [first, " \n", "", last]}
    assert answer(client, {"q": ["\N{DOG FACE} 1"]}) == {"translatedText": ["\N{DOG FACE} 1"]}
    assert answer(client, {"q": " "}) == {"translatedText": " "}
    text = "w5 w6 .\n12345\n*** w30 ."
    html = f"<p>{text} 7.</p>"
    parts = alone.translate([" ".join([*text.split("\n"), "7."])])
    assert "12345" in alone.translate([text])[0].split("\n")
    for copies in (True, False):
        expected = alone.translate([text], copy_letterless=copies)
        assert answer(client, {"q": [text], "copy_letterless": copies}) == {
            "translatedText": expected
        }
    assert answer(client, {"q": html, "format": "html"}) == {"translatedText": f"<p>{parts[0]}</p>"}
    several = answer(client, {"q": ["12345", "1\n2"], "alternatives": 2})
    assert several == {"translatedText": ["12345", "1\n2"], "alternatives": [[], []]}


def test_alternatives_are_next_best_beams(client, alone):
    """Each alternative joins the translations of the same rank of all sentences."""
    sentences = ["w5 w6 w30 .", "W7 w9 ."]
    best = [
        alone.generate([sentence], num_beams=4, num_return_sequences=4) for sentence in sentences
    ]
    joined = [" ".join(own) for own in zip(*best)]
    expected = [other for other in dict.fromkeys(joined[1:]) if other != joined[0]]
    assert len(expected) > 1
    actual = {"translatedText": joined[0], "alternatives": expected}
    assert answer(client, {"q": " ".join(sentences), "alternatives": 3}) == actual
    again = answer(client, {"q": [" ".join(sentences), " "], "alternatives": "3"})
    assert again == {"translatedText": [joined[0], " "], "alternatives": [expected, []]}
    one = answer(client, {"q": sentences[0], "alternatives": 1})  # the model's two beams
    assert one["translatedText"] == alone.translate(sentences[:1])[0]


def test_alignments_are_those_of_translate(client, alone):
    found = alone.translate([TEXT, "w5 12:30"], return_alignments=True)
    assert len(found[0].alignments) > 2
    expected = {"translatedText": found[0].text, "alignments": pairs(found[0])}
    assert answer(client, {"q": TEXT, "alignments": True}) == expected
    form = {**ENGLISH, "q": TEXT, "alignments": "true"}
    assert client.post("/translate", data=form).json() == expected
    assert answer(client, {"q": [TEXT, " ", "w5 12:30"], "alignments": True}) == {
        "translatedText": [found[0].text, " ", found[1].text],
        "alignments": [pairs(found[0]), [], pairs(found[1])],
    }
    for off in (None, False):
        assert answer(client, {"q": TEXT, "alignments": off}) == {"translatedText": found[0].text}


def test_alignments_beside_alternatives_are_of_the_best_translation(client, alone):
    options = dict(num_beams=4, num_return_sequences=4)
    best, *_ = alone.generate(["w5 w6 w30 ."], return_alignments=True, **options)
    found = answer(client, {"q": "w5 w6 w30 .", "alignments": True, "alternatives": 3})
    assert len(found["alternatives"]) > 0
    assert (found["translatedText"], found["alignments"]) == (best.text, pairs(best))


def test_alignments_of_html_and_without_a_graph_are_rejected(client, model):
    body = {**ENGLISH, "q": "w5", "alignments": True}
    html = error_message(client.post("/translate", json={**body, "format": "html"}))
    check_message(html, seen=("alignments", "html"), expected="text")
    lacking = copy.copy(model)
    specs = {role: spec for role, spec in model.info.specs.items() if role != "alignment"}
    lacking.plan = dataclasses.replace(
        model.plan, info=dataclasses.replace(model.info, specs=specs)
    )
    lacking.runtime = copy.copy(model.runtime)
    lacking.runtime.info = lacking.info
    with serving(lacking) as url, httpx.Client(base_url=url) as other:
        message = error_message(other.post("/translate", json=body))
        check_message(message, seen="no alignment graph", expected="--target cpu")
        assert answer(other, {"q": "w5"})["translatedText"]


HTML = (
    '<p class="a">w5 w6 <b>w30</b> &amp; W7.\n <code>w8</code> w9 <i>w20<br>w21</i><!-- w9 --></p>'
)


def test_html_matches_translate(client, alone):
    [expected] = alone.translate([HTML], markup="html")
    assert answer(client, {"q": HTML, "format": "html"}) == {"translatedText": expected}
    actual = answer(client, {"q": [HTML, "<br>", "", "<p>7"], "format": "html", "alternatives": 1})
    assert actual["translatedText"] == [expected, "<br>", "", "<p>7"]


def test_html_has_alternatives(client):
    """Without tags they are those of the text without tags."""
    text = "w5 w6 w30 . W7 w9 ."
    html = "w5 <b>w6 <i>w30</i> .</b> W7 <u>w9 .</u>"
    plain = answer(client, {"q": text, "alternatives": 3})
    marked = answer(client, {"q": html, "alternatives": 3, "format": "html"})
    assert re.sub("<.*?>", "", marked["translatedText"]) == plain["translatedText"]
    texts = [re.sub("<.*?>", "", other) for other in marked["alternatives"]]
    assert len(texts) > 1 and [*dict.fromkeys(texts)] == plain["alternatives"]
    assert all(
        sorted(re.findall("<.*?>", other)) == sorted(re.findall("<.*?>", html))
        for other in marked["alternatives"]
    )


def test_placeholders_are_kept(client, alone):
    text = "w5 {name} w6 %s. W7 Ada w9"
    for keep in (True, ["{name}", "%s", "Ada"]):
        actual = answer(client, {"q": text, "keep": keep})["translatedText"]
        assert actual == alone.translate([text], keep=keep)[0]
        assert "{name}" in actual and "%s" in actual and ("Ada" in actual) == (keep is not True)
    html = answer(client, {"q": f"<p>{text}</p>", "keep": True, "format": "html"})
    assert "{name}" in html["translatedText"]
    form = client.post("/translate", data={"q": text, **ENGLISH, "keep": "true"}).json()
    assert form == {"translatedText": alone.translate([text], keep=True)[0]}
    for keep in ("{name}", [1], ["x"] * 101, [""]):
        result = client.post("/translate", json={"q": text, **ENGLISH, "keep": keep})
        assert "keep" in error_message(result)


def test_long_texts_match_translate(client, alone):
    lines = [" ".join(WORDS[start : start + 16]) for start in range(3, 24)]
    result = answer(client, {"q": "\n".join(lines)})
    assert result["translatedText"] == alone.translate(["\n".join(lines)])[0]
    html = answer(client, {"q": "<p>".join(lines), "format": "html"})["translatedText"]
    assert html == "<p>".join(alone.translate(lines))
    assert sum(map(len, lines)) > MAX_INLINE_CHARACTERS


def test_frontend_settings_health_and_disabled_endpoints(client):
    settings = client.get("/frontend/settings").json()
    assert settings == {
        "apiKeys": False,
        "charLimit": -1,
        "filesTranslation": False,
        "frontendTimeout": 500,
        "keyRequired": False,
        "language": {
            "source": {"code": "en", "name": "English"},
            "target": {"code": "de", "name": "German"},
        },
        "suggestions": False,
        "supportedFilesFormat": [],
    }
    assert client.get("/health").json() == {"status": "ok", "models": {"tiny": "ready"}}
    for path in ("/detect", "/suggest", "/translate_file", "/models/tiny/detect"):
        error = error_message(client.post(path, json={"q": "w5"}), 403)
        assert "disabled on this server" in error
        assert ("source" in error and "/languages" in error) == ("detect" in path)


def test_openapi_document_has_all_content_types_of_body(client):
    document = client.get("/openapi.json").json()
    operation = document["paths"]["/translate"]["post"]
    content = operation["requestBody"]["content"]
    assert set(content) == {
        "application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
    }
    assert {tuple(each["schema"]["required"]) for each in content.values()} == {
        ("q", "source", "target")
    }
    assert {"200", "400", "413", "429", "503"} <= set(operation["responses"])
    [error] = {
        each["content"]["application/json"]["schema"]["$ref"]
        for each in map(operation["responses"].get, ("400", "503"))
    }
    assert list(document["components"]["schemas"][error.rpartition("/")[2]]["properties"]) == [
        "error"
    ]


def test_translations_are_as_long_as_a_slot(model, alone):
    """A request may ask for more tokens than a slot has; a sentence is then cut at its end."""
    endless = {"suppress_tokens": [EOS]}
    direction = model.directions.find("en", "de")
    options = {"max_new_tokens": 99, **endless}
    [[text]] = asyncio.run(translate(model, ["w5 w6"], direction, TextOptions(), options))
    assert text == alone.translate(["w5 w6"], max_new_tokens=30, **endless)[0]


def test_alternatives_have_the_beams_of_the_model(directory, tmp_path):
    """One alternative needs two beams; a model with more keeps its own."""
    copied = copy_folder(directory, tmp_path)
    edit_json(copied / "generation_config.json", num_beams=6)
    seal(copied)
    runtime, engine = text_client(copied, slots=SLOTS)
    texts = [f"w{number} w{number + 3} w5" for number in range(2, 12)]
    with (
        contextlib.closing(engine),
        serving(loaded_model("six", runtime, engine)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        answers = [answer(client, {"q": text, "alternatives": 1}) for text in texts]
    alone = TextRuntime(copied, threads=1)
    best, two = (alone.generate(texts, num_beams=count) for count in (6, 2))
    assert [item["translatedText"] for item in answers] == best != two
