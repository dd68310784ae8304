"""Tests of the pipelines with tokenizers of many languages."""

import pytest
import transformers
from families import bart
from messages import raises
from transformers import MBart50Tokenizer, MBartTokenizer, pipeline


@pytest.fixture(scope="module")
def multilingual():
    tokenizer = MBart50Tokenizer(
        vocab=[
            ("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -1.0),
            ("▁man", -1.0), ("▁dog", -1.0)
        ],
        src_lang="en_XX", tgt_lang="fr_XX",
    )  # fmt: skip
    transformers.set_seed(0)
    return bart(len(tokenizer)), tokenizer


def test_multilingual_tokenizer_receives_languages(multilingual):
    model, tokenizer = multilingual
    english, german, french = tokenizer.convert_tokens_to_ids(["en_XX", "de_DE", "fr_XX"])
    by_argument = pipeline(
        "translation", model=model, tokenizer=tokenizer, src_lang="en_XX", tgt_lang="de_DE"
    )
    by_name = pipeline("translation_en_XX_to_de_DE", model=model, tokenizer=tokenizer)
    for translate in (by_argument, by_name):
        inputs = translate.preprocess("a man", **translate._preprocess_params)
        assert inputs["input_ids"][0, 0] == english
        [result] = translate("a man", return_tensors=True, max_new_tokens=4)
        assert result["translation_token_ids"][1] == german
        [result] = translate(
            "a man", src_lang="en_XX", tgt_lang="fr_XX", return_tensors=True, max_new_tokens=4
        )
        assert result["translation_token_ids"][1] == french
        batched = translate(["a man", "a dog"], batch_size=2, return_tensors=True, max_new_tokens=4)
        assert [result["translation_token_ids"][1] for result in batched] == [german, german]


def test_unknown_or_missing_language_raises(multilingual):
    model, tokenizer = multilingual
    translate = pipeline(
        "translation", model=model, tokenizer=tokenizer, src_lang="en_XX", tgt_lang="de_DE"
    )
    for name in ("src_lang", "tgt_lang"):
        with raises(ValueError, seen=(name, "fr_FR"), expected="fr_XX"):
            translate("a man", **{name: "fr_FR"})
    with raises(ValueError, seen=("src_lang", "en_XX", "tgt_lang", None)):
        pipeline("translation", model=model, tokenizer=tokenizer, src_lang="en_XX")("a man")


def test_mbart_without_start_token_starts_with_target_language():
    """The language is the `decoder_start_token_id`, as documented for mBART.

    See https://huggingface.co/docs/transformers/model_doc/mbart
    """
    tokenizer = MBartTokenizer(
        vocab=[
            ("<s>", 0.0),
            ("<pad>", 0.0),
            ("</s>", 0.0),
            ("<unk>", 0.0),
            ("▁a", -1.0),
            ("▁man", -1.0),
            ("▁dog", -1.0),
        ]
    )
    transformers.set_seed(0)
    model = bart(len(tokenizer)).eval()
    model.generation_config.decoder_start_token_id = None
    translate = pipeline(
        "translation", model=model, tokenizer=tokenizer, src_lang="de_DE", tgt_lang="ro_RO"
    )
    [result] = translate("a man", return_tensors=True, max_new_tokens=4, num_beams=1)
    tokenizer.src_lang = "de_DE"
    start = tokenizer.convert_tokens_to_ids("ro_RO")
    settings = dict(decoder_start_token_id=start, max_new_tokens=4, num_beams=1)
    expected = model.generate(**tokenizer("a man", return_tensors="pt"), **settings)[0]
    assert result["translation_token_ids"].tolist() == expected.tolist() and expected[0] == start
