"""Tests of BLEU and chrF, against sacreBLEU."""

import runpy
import sys

import pytest
import sacrebleu
from messages import raises

from vanilla_transformer.errors import UsageError
from vanilla_transformer.training.metrics import bleu, bleu_metric, check_tokenize, chrf

OUTPUTS = ["the cat, the dog sat on the mat .", "a bird sings in the old tree"]
REFERENCES = ["the cat , the dog sat on a mat .", "a bird sings in an old tree"]


@pytest.mark.parametrize("tokenize", ["13a", "none", "char", "intl"])
def test_bleu_and_signature_match_sacrebleu(tokenize):
    score, signature = bleu(OUTPUTS, REFERENCES, tokenize)
    assert score == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES], tokenize=tokenize).score
    assert (
        signature
        == f"nrefs:1|case:mixed|eff:no|tok:{tokenize}|smooth:exp|version:{sacrebleu.__version__}"
    )


def test_bleu_is_corpus_level_and_cased():
    """Check that the score is not a mean over outputs, and that case matters."""
    assert bleu(["a b c d"], ["a b c d"], "none")[0] == pytest.approx(100)
    together = bleu(["a b c d", "x"], ["a b c d", "y"], "none")[0]
    assert together == pytest.approx(100 * (4 / 5) ** 0.25)  # only one unigram is wrong
    assert bleu(["A B C D"], ["a b c d"], "none")[0] == 0


def test_tokenized_text_gives_no_warning(caplog):
    bleu(["a b c ."] * 200, ["a b c ."] * 200, "none")
    assert caplog.text == ""


def test_chrf_matches_sacrebleu():
    assert chrf(OUTPUTS, REFERENCES) == sacrebleu.corpus_chrf(OUTPUTS, [REFERENCES]).score


@pytest.mark.parametrize("metric", [bleu, chrf])
def test_missing_reference_raises(metric):
    with raises(ValueError, seen=1, expected=2):
        metric(OUTPUTS, REFERENCES[:1])


@pytest.mark.parametrize("call", [lambda name: bleu(OUTPUTS, REFERENCES, name), check_tokenize])
def test_unknown_tokenization_raises_and_suggests_nearest(call):
    with raises(UsageError, seen=("bleu_tokenize", "13b", "13a")):
        call("13b")


def test_tokenization_with_missing_package_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "MeCab", None)
    sys.modules.pop("sacrebleu.tokenizers.tokenizer_ja_mecab", None)
    check_tokenize("ja-mecab")
    with raises(UsageError, seen=("evaluation.bleu_tokenize", "ja-mecab")):
        bleu_metric("ja-mecab", "evaluation.bleu_tokenize")


@pytest.mark.filterwarnings("ignore:.* found in sys.modules")
def test_sacrebleu_is_imported_lazily(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "sacrebleu"]:
        monkeypatch.setitem(sys.modules, name, None)  # makes its import fail
    functions = runpy.run_module("vanilla_transformer.training.metrics")
    with raises(ImportError, seen="sacrebleu"):
        functions["chrf"](OUTPUTS, REFERENCES)
