"""Tests of LibreTranslate's endpoints with its own client, against `TextRuntime.translate`."""

import asyncio
import contextlib
import copy
import dataclasses
import json
import re
from urllib.error import HTTPError

import httpx
import pytest
from checkpoints import EOS, copy_folder, edit_json, list_file, seal
from hypothesis import given
from hypothesis import strategies as st
from libretranslatepy import LibreTranslateAPI
from messages import check_message, raises
from opened_engines import text_client
from served import served
from served_models import loaded_model
from tokenizers import Tokenizer, models, pre_tokenizers

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.errors import TooLong, UsageError
from vanilla_transformer_export.serving.generation import (
    MAX_INLINE_CHARACTERS,
    plan_job,
    translate,
)
from vanilla_transformer_export.serving.protocols.libretranslate import PROTOCOL, PUBLIC_PATHS
from vanilla_transformer_export.text.languages import (
    Direction,
    Directions,
    Languages,
    model_languages,
    sentence_languages,
)
from vanilla_transformer_export.text.tasks.segments import TextOptions, split_text

pytestmark = pytest.mark.filterwarnings("ignore:.*was cut after")
SLOTS = 8
CARD = "---\nlanguage:\n- en\n- de\nbase_model: someone/tiny-en-de\n---\n\n# A card\n"
WORDS = [f"w{number}" for number in range(40)]
TEXT = "w5 w6 w30 . W7 w9 w21 .\n\n w20 w21 w22 "
ENGLISH = dict(source="en", target="de")


@pytest.fixture(scope="module")
def directory(exported_for, tmp_path_factory):
    """An export with a tokenizer of words and language tokens, and a card with its languages."""
    result = copy_folder(exported_for("seq2seq", "cpu")[1], tmp_path_factory.mktemp("translator"))
    words = [*WORDS, *(f"v{number}" for number in range(4)), ">>deu<<", ">>fra<<", "unknown", "."]
    tokenizer = Tokenizer(
        models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="unknown")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["w0", f"w{EOS}", "unknown", ">>deu<<", ">>fra<<"])
    tokenizer.save(str(result / "tokenizer.json"))
    list_file(result, "tokenizer.json")
    edit_json(result / "generation_config.json", max_new_tokens=10, num_beams=2)
    seal(result)
    (result / "README.md").write_text(CARD)
    return result


@pytest.fixture(scope="module")
def alone(directory):
    return TextRuntime(directory, threads=1)


@pytest.fixture(scope="module")
def load(directory):
    """A function that creates a `ServedModel`. Its engine runs until the tests of this file end."""
    engines = []

    def make(name, languages=None, given=()):
        runtime, engine = text_client(directory, slots=SLOTS, max_source=40, max_length=30)
        engines.append(engine)
        if languages is not None:
            runtime.languages = languages
        return loaded_model(name, runtime, engines[-1], given)

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def model(load):
    return load("tiny")


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


@pytest.fixture(scope="module")
def url(model):
    with serving(model, max_batch=4) as result:
        yield result


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def answer(client, body, path="/translate"):
    result = client.post(path, json={**ENGLISH, **body})
    assert result.status_code == 200, result.text
    return result.json()


def error_message(response, status=400):
    assert (response.status_code, list(response.json())) == (status, ["error"]), response.text
    return response.json()["error"]


# --------------------------------------------------------------------------------------- the client


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


def pairs(translation):
    return [[list(one), list(other)] for one, other in translation.alignments]


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


# ---------------------------------------------------------------------------------------- languages


def test_source_auto_is_detected_as_only_source_language(client, alone):
    [expected] = alone.translate(["w5"])
    detected = {"confidence": 0, "language": "en"}
    assert answer(client, {"q": "w5", "source": "auto"}) == {
        "translatedText": expected,
        "detectedLanguage": detected,
    }
    assert answer(client, {"q": ["w5"], "source": "auto"})["detectedLanguage"] == [detected]


def test_model_is_selected_by_path_body_or_languages(model, load, alone):
    back = load("back", given=[("de", "en")])
    twin = load("twin", given=[("en", "de"), ("en", "fr")])
    [expected] = alone.translate(["w5"])
    with serving(model, back, twin) as url, httpx.Client(base_url=url) as client:
        french = {"q": "w5", "source": "EN", "target": "Fr"}
        assert (
            answer(client, french)
            == answer(client, {"q": "w5"}, "/models/tiny/translate")
            == {"translatedText": expected}
        )
        assert answer(client, {"q": "w5", "model": "twin"}) == {"translatedText": expected}
        assert {each["code"]: each["targets"] for each in client.get("/languages").json()} == {
            "en": ["de", "fr"],
            "de": ["en"],
            "fr": [],
        }
        assert [each["code"] for each in client.get("/models/back/languages").json()] == [
            "en",
            "de",
        ]
        error_text = error_message(client.post("/translate", json={"q": "w5", **ENGLISH}))
        check_message(error_text, seen=2, expected=("tiny", "twin"))
        error_text = error_message(
            client.post("/models/back/translate", json={"q": "w5", **ENGLISH})
        )
        check_message(error_text, seen=("en", "de"), expected=("de", "en"))
        error_text = error_message(
            client.post("/translate", json={"q": "w5", **ENGLISH, "source": "auto"})
        )
        check_message(error_text, seen=("source", "auto"), expected=("de", "en"))
        error_text = error_message(client.get("/models/x/languages"), 404)
        check_message(error_text, seen="x", expected=("tiny", "back", "twin"))
        for path in (
            "/models/x/translate",
            "/models/x/predict/translation",
            "/models/x/v1/none",
        ):
            for body in (b"{", b"[]", b'{"q": 5}', b'{"q": NaN}', b""):
                response = client.post(path, content=body)
                assert response.status_code == 404, (path, body, response.text)
                check_message(response.text, seen="x", expected=("tiny", "back", "twin"))


TOKENS = {"eng_Latn": 40, "deu_Latn": 41, "zho_Hans": 42, "zho_Hant": 43}
MULTILINGUAL = Languages(TOKENS, "eng_Latn", [None], [EOS], "forced_bos_token_id")


def test_tokenizer_languages_have_own_codes_and_iso_codes(load, alone, monkeypatch):
    monkeypatch.setattr(alone, "languages", MULTILINGUAL)
    with serving(load("many", MULTILINGUAL)) as url, httpx.Client(base_url=url) as client:
        languages = client.get("/languages").json()
        assert {each["code"]: each["name"] for each in languages} == {
            "en": "English",
            "de": "German",
            "zh-Hans": "Chinese (Hans)",
            "zh-Hant": "Chinese (Hant)",
        }
        assert languages[0]["targets"] == ["de", "en", "zh-Hant"]
        actual = set()
        for source, target, own in (
            ("en", "de", ("eng_Latn", "deu_Latn")),
            ("deu_Latn", "zh", ("deu_Latn", "zho_Hans")),
            ("ZH_hant", "ENG_latn", ("zho_Hant", "eng_Latn")),
        ):
            [expected] = alone.translate(["w5 w6. W7."], src_lang=own[0], tgt_lang=own[1])
            assert answer(client, {"q": "w5 w6. W7.", "source": source, "target": target}) == {
                "translatedText": expected
            }
            actual.add(expected)
        assert len(actual) == 3
        assert "en to de, en to zh-Hans, " in error_message(
            client.post("/translate", json={"q": "w5", "source": "en", "target": "en"})
        )


def test_language_words_are_prepended_to_text(load, alone, monkeypatch):
    words = Languages(words=[">>deu<<", ">>fra<<"])
    monkeypatch.setattr(alone, "languages", words)
    model = load("words", words)
    assert model.languages == [("en", "de"), ("en", "fr")]
    with serving(model) as url, httpx.Client(base_url=url) as client:
        for target, word in (("de", ">>deu<<"), ("fra", ">>fra<<")):
            [expected] = alone.translate([f"{word} w5 w6. W7."])
            assert answer(client, {"q": "w5 w6. W7.", "target": target}) == {
                "translatedText": expected
            }
            [aligned] = alone.translate([f"{word} w5 w6. W7."], return_alignments=True)
            spans = [[[place - 8 for place in one], other] for one, other in pairs(aligned)]
            found = answer(client, {"q": "w5 w6. W7.", "target": target, "alignments": True})
            assert found == {"translatedText": expected, "alignments": spans} and spans


def test_model_of_unknown_languages_accepts_any_code_but_auto(model, alone):
    unknown = copy.copy(model)
    unknown.plan = dataclasses.replace(model.plan, directions=Directions([], {}, False))
    with serving(unknown) as url, httpx.Client(base_url=url) as client:
        assert answer(client, {"q": "w5", "target": "xx"}) == {
            "translatedText": alone.translate(["w5"])[0]
        }
        assert client.get("/languages").json() == []
        assert client.get("/frontend/settings").json()["language"]["source"] == {
            "code": "",
            "name": "",
        }
        error_text = error_message(
            client.post("/translate", json={"q": "w5", **ENGLISH, "source": "auto"})
        )
        assert error_text.endswith("expected one of: the code of a language")


def test_sentences_are_split_in_the_language_of_the_text(alone, monkeypatch):
    languages = Languages(
        {"eng_Latn": 40, "spa_Latn": 41}, "eng_Latn", [None], [EOS], "forced_bos_token_id"
    )
    monkeypatch.setattr(alone, "languages", languages)
    monkeypatch.setattr(
        alone, "sentence_languages", sentence_languages(alone.info, alone.languages)
    )
    text = "w1 Gov. W2"  # an abbreviation in English, not in Spanish

    def count(splitting, src_lang):
        return sum(
            part.is_sentence
            for segment in split_text(alone, text, splitting.in_language(alone, src_lang))
            for part in segment.parts
        )

    assert [count(TextOptions(), name) for name in (None, "eng_Latn", "spa_Latn")] == [1, 1, 2]
    assert count(TextOptions(language="es"), "eng_Latn") == 2


def test_long_texts_are_split_in_the_language_of_the_text(load, monkeypatch):
    """The rules of English find one sentence in the text, which is too long."""
    served_model = load("long")
    runtime = served_model.runtime
    languages = Languages(
        {"eng_Latn": 40, "spa_Latn": 41}, "eng_Latn", [None], [EOS], "forced_bos_token_id"
    )
    monkeypatch.setattr(runtime, "languages", languages)
    monkeypatch.setattr(
        runtime, "sentence_languages", sentence_languages(runtime.info, runtime.languages)
    )
    texts, options = ["w1 Gov. W2 " * 900], {"max_new_tokens": 5}
    spanish = Direction("es", "en", "spa_Latn", "eng_Latn")
    job = plan_job(served_model, texts, spanish, TextOptions(), options)
    assert len(job.plan.sentences) == len(job.inputs) == 901
    [checked] = {id(each.options): each.options for each in job.inputs}.values()
    assert (checked.max_new_tokens, checked.forced_bos_token_id) == (5, 40)
    with raises(TooLong, seen="characters"):
        english = Direction("en", "es", "eng_Latn", "spa_Latn")
        plan_job(served_model, texts, english, TextOptions(), options)


def test_configured_languages_must_be_supported_by_model(alone, monkeypatch):
    monkeypatch.setattr(alone, "languages", MULTILINGUAL)
    assert model_languages(
        alone.info, alone.languages, [("EN", "zho_Hant"), ("deu-latn", "en")]
    ) == [
        ("en", "zh-Hant"),
        ("de", "en"),
    ]
    with raises(UsageError, seen="fr", expected=("de", "en")):
        model_languages(alone.info, alone.languages, [("en", "fr")])
    monkeypatch.setattr(alone, "languages", Languages(words=[">>deu<<"]))
    assert model_languages(alone.info, alone.languages, [("fr", "deu")]) == [("fr", "de")]
    with raises(UsageError, seen="fr"):
        model_languages(alone.info, alone.languages, [("de", "fr")])


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "changes, seen, expected",
    [
        ({"q": None}, None, ()),
        ({"q": 5}, 5, ()),
        ({"q": ["w5", None]}, ("w5", None), ()),
        ({"q": {"w5": 1}}, ("w5", 1), ()),
        ({"q": ""}, "''", ()),
        ({"q": []}, "[]", ()),
        ({"q": ["w5"] * 5}, 5, 4),
        ({"source": "fr"}, ("fr", "de"), ()),
        ({"target": "d" * 99}, ("en", "d" * 49), ()),
        ({"target": "en"}, "en", ()),
        ({"target": ""}, ("en", "''"), ()),
        ({"target": ["de"]}, "de", ()),
        ({"target": "auto"}, ("en", "auto"), ()),
        ({"format": "pdf"}, ("format", "pdf"), ("text", "html")),
        ({"format": ["html"]}, ("format", "html"), ("text", "html")),
        ({"alternatives": "two"}, ("alternatives", "two"), ()),
        ({"alternatives": 1.5}, ("alternatives", 1.5), ()),
        ({"alternatives": -1}, ("alternatives", -1), 0),
        ({"alternatives": SLOTS}, ("alternatives", SLOTS), SLOTS - 1),
        ({"alternatives": 10**30}, (), SLOTS - 1),
        ({"model": 5}, 5, ()),
        ({"api_key": 5}, ("api_key", 5), ()),
    ],
    ids=ascii,
)
def test_invalid_value_error_names_value(client, changes, seen, expected):
    check_message(
        error_message(client.post("/translate", json={"q": "w5", **ENGLISH, **changes})),
        seen=seen,
        expected=expected,
    )


@pytest.mark.parametrize("field", ["q", "source", "target"])
def test_missing_field_error_names_field(client, field):
    body = {name: value for name, value in {"q": "w5", **ENGLISH}.items() if name != field}
    expected = f"{field} is missing, expected it in the body"
    assert expected in error_message(client.post("/translate", json=body))
    assert expected in error_message(client.post("/translate", data=body))


@pytest.mark.parametrize(
    "kind, content, seen",
    [
        ("application/json", b"", ("JSON", "char 0")),
        ("application/json", b'{"q": "w5",', ("JSON", "char 11")),
        ("application/json", b'{"q": "\xff"}', "JSON"),
        ("application/json", b'{"q": "\\ud83d", "source": "en", "target": "de"}', ()),
        ("application/json", b"[" * 10_000, "JSON"),
        ("application/json", b"[1]", 1),
        ("text/plain", b"w5", "JSON"),
        ("application/x-www-form-urlencoded", b"q=%ff&source=en&target=de", ()),
        ("application/x-www-form-urlencoded", b"q=\xff&source=en&target=de", ()),
        ("application/x-www-form-urlencoded", b"", "q is missing"),
        ("multipart/form-data", b"w5", "boundary"),
        ("multipart/form-data; boundary=x", b"w5", ()),
    ],
    ids=ascii,
)
def test_invalid_body_returns_400(client, kind, content, seen):
    check_message(
        error_message(client.post("/translate", content=content, headers={"Content-Type": kind})),
        seen=seen,
    )


def test_file_in_form_returns_400(client):
    files = {"q": ("a.txt", b"w5"), "source": (None, "en"), "target": (None, "de")}
    assert "Too many files" in error_message(client.post("/translate", files=files))


def test_too_many_sentences_return_413(client):
    for body, seen, expected in (
        ({"q": "w5\n" * 4097}, 4097, 4096),
        ({"q": "w5<p>" * 4097, "format": "html"}, 4097, 4096),
        ({"q": "w5 " * 4097}, 12290, 640),
    ):
        answer = client.post("/translate", json={**ENGLISH, **body})
        check_message(error_message(answer, 413), seen=seen, expected=expected)


def test_sentence_longer_than_slot_returns_413(client):
    long = "w5 " * 41
    for body in ({"q": long}, {"q": f"<p>{long}</p>", "format": "html"}, {"q": f"w5. W{long}"}):
        result = client.post("/translate", json={**ENGLISH, **body})
        check_message(error_message(result, 413), seen=41, expected=40)


@pytest.mark.parametrize(
    "fields, warning",
    [
        ({"fromat": "html"}, "299 - \"'fromat' is ignored, expected 'format'\""),
        (
            {"zzz": 1, "alternative": 2},
            "299 - \"'alternative' is ignored, expected 'alternatives'\"",
        ),
        ({"zzz": 1}, None),
        ({}, None),
    ],
)
def test_unknown_field_that_resembles_a_field_is_named_in_warning_header(client, fields, warning):
    response = client.post("/translate", json={**ENGLISH, "q": "w5 w6", **fields})
    assert response.json() == answer(client, {"q": "w5 w6"})
    assert response.headers.get("Warning") == warning


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
