"""Tests of the languages of translators behind LibreTranslate's protocol."""

import copy
import dataclasses

import httpx
import pytest
from checkpoints import EOS
from messages import check_message, raises
from translation_server import ENGLISH, answer, error_message, pairs, serving

from vanilla_transformer_export.errors import TooLong, UsageError
from vanilla_transformer_export.serving.generation import plan_job
from vanilla_transformer_export.text.languages import (
    Direction,
    Directions,
    Languages,
    model_languages,
    sentence_languages,
)
from vanilla_transformer_export.text.tasks.segments import TextOptions, split_text

pytestmark = pytest.mark.filterwarnings("ignore:.*was cut after")


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
