"""Tests of the codes of languages, and of the languages that a model card names."""

from types import SimpleNamespace

import pytest
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES as NLLB

from vanilla_transformer_export.text.language_names import MACROLANGUAGES, TABLE, TWO_LETTERS
from vanilla_transformer_export.text.languages import (
    Directions,
    Languages,
    language_name,
    model_languages,
    names_by_code,
    sentence_languages,
)


def test_language_codes_have_two_letters_if_unambiguous():
    codes = names_by_code(NLLB)
    assert len(codes) == len(NLLB) and sorted(codes.values()) == sorted(NLLB)
    chosen = {
        "en": "eng_Latn",
        "ar": "arb_Arab",
        "zh-Hant": "zho_Hant",
        "lv": "lvs_Latn",
        "no": None,
        "ace_Latn": "ace_Latn",
    }
    assert {code: codes.get(code) for code in chosen} == chosen
    mbart = names_by_code(["en_XX", "de_DE", "pt_XX"])
    assert mbart == {"en": "en_XX", "de": "de_DE", "pt": "pt_XX"}
    words = names_by_code([">>fr<<", ">>fr_BE<<", ">>deu<<", ">>ger<<", ">>cmn_Hans<<", ">>xyz<<"])
    expected = {
        "fr": ">>fr<<",
        "fr-BE": ">>fr_BE<<",
        "deu": ">>deu<<",
        "ger": ">>ger<<",
        "zh": ">>cmn_Hans<<",
        "xyz": ">>xyz<<",
    }
    assert words == expected
    assert [language_name(code) for code in ("sw", "zh-Hant", "ace_Latn")] == [
        "Swahili",
        "Chinese (Hant)",
        "ace_Latn",
    ]


def test_macrolanguage_code_names_its_only_individual_language():
    """The expected codes are those of SIL's tables of ISO 639-3.

    NLLB-200 has one Pashto, Quechua and Fula, and two Norwegian languages with codes of their own.
    """
    codes = names_by_code(NLLB)
    expected = {
        "ps": "pbt_Arab",
        "qu": "quy_Latn",
        "ff": "fuv_Latn",
        "mg": "plt_Latn",
        "sq": "als_Latn",
        "nb": "nob_Latn",
    }
    expected |= {
        "ckb_Arab": "ckb_Arab",
        "prs_Arab": "prs_Arab",
        "ltg_Latn": "ltg_Latn",
        "id": "ind_Latn",
        "tw": "twi_Latn",
    }
    assert {code: codes.get(code) for code in expected} == expected
    assert names_by_code(["azb_Arab", "deu_Latn"]) == {"az": "azb_Arab", "de": "deu_Latn"}
    both = ["pbt_Arab", "pst_Arab"]
    assert names_by_code(both) == {name: name for name in both}
    assert names_by_code(["pbt_Arab", "pus_Arab"]) == {"pbt_Arab": "pbt_Arab", "ps": "pus_Arab"}
    # both are individual languages of Malay
    assert names_by_code(["ind_Latn", "min_Latn"]) == {"id": "ind_Latn", "min_Latn": "min_Latn"}
    assert names_by_code(["fuv_Latn", "fuv_Adlm"]) == {"ff-Latn": "fuv_Latn", "ff-Adlm": "fuv_Adlm"}
    assert len(set(MACROLANGUAGES.values())) == 34 and len(MACROLANGUAGES) == 238


def test_macrolanguages_agree_with_cldr():
    standard = {row.split(" ")[1].split("/")[0] for row in map(str.strip, TABLE.split(";"))}
    preferred = {
        code: TWO_LETTERS[code]
        for code in MACROLANGUAGES
        if code in TWO_LETTERS and code not in standard
    }
    assert len(preferred) > 25
    assert preferred == {code: MACROLANGUAGES[code] for code in preferred}


def test_unambiguous_language_without_script_is_accepted_as_code():
    names = names_by_code(NLLB)
    codes = Directions([(code, code) for code in names], names, False).codes
    expected = {
        "ceb": "ceb_Latn",
        "ckb": "ckb_Arab",
        "pbt": "ps",
        "eng": "en",
        "ps": "ps",
        "zh": "zh-Hans",
        "ace": None,
    }
    assert {sent: codes.get(sent) for sent in expected} == expected


def card(*lines, name="x"):
    return "\n".join(["---", *lines, f"base_model: {name}", "---", "# A card of en-fr"])


@pytest.mark.parametrize(
    "text, expected",
    [
        (card("language: [de, en]", name="me/opus-mt-de-en"), [("de", "en")]),
        (card("language:", "  - 'no'", '  - "en"', name="x-en-no"), [("en", "no")]),
        (card("language: [no, en]", name="x-en-no"), [("en", "no")]),
        (card("language: en", name="x-en-de"), []),
        (card("language: [en, de]"), []),  # the source is not known
        (card("language: [en, de]", name="x-en-de-en"), []),
        (card("license: mit", name="x-en-de"), []),
        ("# no metadata en-de", []),
        (None, []),
    ],
)
def test_language_pair_is_read_from_model_card(tmp_path, text, expected):
    architecture = "VanillaSeq2SeqForConditionalGeneration"
    info = SimpleNamespace(directory=tmp_path, architecture=architecture)
    runtime = SimpleNamespace(info=info, languages=Languages())
    if text is not None:
        (tmp_path / "README.md").write_text(text)
    assert model_languages(info, Languages()) == expected
    assert [*sentence_languages(runtime.info, runtime.languages).values()] == [
        source for source, _ in expected
    ]
    assert model_languages(info, Languages(), [("it", "pt"), ("it", "pt")]) == [("it", "pt")]
    runtime.info.architecture = "VanillaSeq2SeqForSequenceClassification"
    assert model_languages(info, Languages(), [("it", "pt")]) == []
