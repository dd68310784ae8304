"""Tokenizers of ALBERT and DeBERTa-v3, whose repositories have a SentencePiece model alone."""

import json

import pytest
import sentencepiece
import transformers
from families import random_config, random_model

from vanilla_transformer.conversion import convert

LINES = ["the quick brown fox jumps over the lazy dog", "how are you doing today, my friend?"]
SPECIAL = ["[CLS]", "[SEP]", "[MASK]"]


def write_sentencepiece(path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 50), model_prefix=str(path.with_suffix("")), vocab_size=36,
        pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, user_defined_symbols=SPECIAL, minloglevel=2,
    )  # fmt: skip
    path.with_suffix(".vocab").unlink()
    path.with_suffix(".model").rename(path)


@pytest.mark.parametrize(
    "family, architecture, file, settings",
    [
        ("albert", "AlbertModel", "spiece.model", {"do_lower_case": True}),
        (
            "deberta-v2",
            "DebertaV2Model",
            "spm.model",
            {"do_lower_case": False, "vocab_type": "spm"},
        ),
    ],
)
def test_sentencepiece_model_becomes_tokenizer_with_same_tokens(
    family, architecture, file, settings, tmp_path
):
    config = random_config(family, architecture, 0)
    config.vocab_size = 64
    random_model(architecture, config).save_pretrained(tmp_path / "theirs")
    write_sentencepiece(tmp_path / "theirs" / file)
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps(settings))
    convert(tmp_path / "theirs", tmp_path / "ours")
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("theirs", "ours")
    )
    for text in ("the quick  brown Fox!", "héllo dogs\t", ""):
        expected, got = theirs(text, "my fox"), ours(text, "my fox")
        assert dict(got) == dict(expected) and len(got["input_ids"]) >= 4
    assert (tmp_path / "ours" / "tokenizer.json").is_file()
