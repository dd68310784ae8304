"""Tests of multilingual models, against the source tokenizers and `generate` of transformers."""

import json
import shutil

import pytest
import sentencepiece
import torch
import transformers
from checkpoints import edit_json, perturbed, seal
from command_line import main
from messages import raises
from transformers import AutoTokenizer, MBart50Tokenizer, MBartTokenizer, NllbTokenizer
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES as NLLB_CODES

from vanilla_transformer.conversion.tokenizers import find_tokenizer
from vanilla_transformer_export import TextRuntime, evaluate, export
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.exporting.languages import read_languages

TEXTS = ["the dog sees a bird", "a man reads", "der Hund sieht einen Vogel im Park"]
LINES = [
    f"{subject} {verb} {thing} {place}."
    for subject in ("the dog", "a man", "der Hund", "eine Frau")
    for verb in ("sees", "reads", "sieht", "liest")
    for thing in ("a bird", "the book", "einen Vogel")
    for place in ("in the park", "at home", "im Park", "zu Hause")
]
SETTINGS = dict(max_new_tokens=8, min_new_tokens=6, num_beams=1)


@pytest.fixture(scope="session")
def spm(tmp_path_factory):
    """Return a function that trains a SentencePiece model of type "unigram" or "bpe"."""
    directory = tmp_path_factory.mktemp("spm")
    (directory / "text").write_text("\n".join(LINES), encoding="utf-8")

    def train(kind):
        if not (path := directory / f"{kind}.model").is_file():
            settings = dict(vocab_size=90, hard_vocab_limit=False, model_type=kind, minloglevel=2)
            files = dict(input=str(directory / "text"), model_prefix=str(directory / kind))
            sentencepiece.SentencePieceTrainer.train(**files, **settings)
        return path.read_bytes()

    return train


KINDS = {
    "nllb": ("bpe", NllbTokenizer, {}, ["eng_Latn", "deu_Latn", "fra_Latn"]),
    "nllb-legacy": (
        "bpe",
        NllbTokenizer,
        dict(legacy_behaviour=True),
        ["eng_Latn", "deu_Latn", "fra_Latn"],
    ),
    "m2m_100": ("bpe", transformers.M2M100Tokenizer, {}, ["en", "de", "fr"]),
    "mbart": ("unigram", MBartTokenizer, {}, ["en_XX", "de_DE", "fr_XX"]),
    "mbart50": ("unigram", MBart50Tokenizer, {}, ["en_XX", "de_DE", "fr_XX"]),
}
VOCABULARY = 360  # larger than the vocabulary of each tokenizer


def source_directory(kind, spm, directory):
    """Write the tokenizer files of a source repository, without tokenizer.json."""
    directory.mkdir()
    model_type, tokenizer_class, settings, _ = KINDS[kind]
    (directory / "sentencepiece.bpe.model").write_bytes(spm(model_type))
    content = {"tokenizer_class": tokenizer_class.__name__, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    (directory / "config.json").write_text(
        json.dumps({"model_type": "mbart" if "mbart" in kind else "m2m_100"})
    )
    if kind.startswith("nllb"):
        edit_json(directory / "tokenizer_config.json", **nllb_tokens(spm(model_type)))
    if kind == "m2m_100":
        model = sentencepiece.SentencePieceProcessor(model_proto=spm(model_type))
        names = [
            "<s>",
            "<pad>",
            "</s>",
            "<unk>",
            *(model.id_to_piece(id) for id in range(3, len(model))),
        ]
        (directory / "vocab.json").write_text(
            json.dumps({name: id for id, name in enumerate(names)})
        )
    return directory


def nllb_tokens(spm):
    """Return the added tokens of NLLB as transformers 4 wrote them.

    Languages follow the pieces, and the mask token follows the languages.
    """
    # four special tokens, one more than in the SentencePiece model
    first = len(sentencepiece.SentencePieceProcessor(model_proto=spm)) + 1
    names = dict(enumerate(["<s>", "<pad>", "</s>", "<unk>"])) | dict(
        enumerate([*NLLB_CODES, "<mask>"], first)
    )
    flags = dict(lstrip=False, rstrip=False, normalized=False, single_word=False, special=True)
    tokens = {
        str(id): dict(content=name, **flags | dict(lstrip=name == "<mask>"))
        for id, name in names.items()
    }
    return dict(
        added_tokens_decoder=tokens, additional_special_tokens=NLLB_CODES, mask_token="<mask>"
    )


@pytest.fixture(scope="session")
def nllb_export(tmp_path_factory, spm):
    """Return a small model like NLLB and the directory of its export."""
    directory = tmp_path_factory.mktemp("languages")
    model = perturbed(
        "VanillaSeq2SeqForConditionalGeneration",
        dict(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_attention_heads=4,
            encoder_layers=1, decoder_layers=1, pad_token_id=1, eos_token_id=2,
            decoder_start_token_id=2, bos_token_id=0, norm_first=True
        ),
        scale=0.4,
    )  # fmt: skip
    model.lm_head.bias.data[41:] -= 100  # lower ids are text in all tokenizers
    model.save_pretrained(directory / "checkpoint")
    find_tokenizer(source_directory("nllb", spm, directory / "source")).save(
        directory / "checkpoint"
    )
    export(directory / "checkpoint", directory / "export", cases=2)
    return model, directory / "export"


@pytest.fixture(scope="session", params=KINDS)
def multilingual(request, nllb_export, spm, tmp_path_factory):
    """Return the kind, the model, the source tokenizer, the runtime and three languages."""
    kind = request.param
    directory = tmp_path_factory.mktemp(kind)
    source = source_directory(kind, spm, directory / "source")
    model, export_directory = nllb_export
    start = dict(decoder_start_token_id=None) if kind == "mbart" else {}
    runtime = TextRuntime(export_with(export_directory, source, directory / "export", **start))
    return kind, model, AutoTokenizer.from_pretrained(source), runtime, KINDS[kind][3]


def export_with(export_directory, source, out, **generation):
    """Copy an export, replace its tokenizer by that of `source`, and return the copy."""
    shutil.copytree(export_directory, out)
    (out / "tokenizer.json").unlink()
    result = find_tokenizer(source)
    result.save(saved := out.with_name("saved"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(saved / name, out / name)
    for name in ("generation_config.json", "config.json"):
        edit_json(out / name, **generation)
    edit_json(
        out / "manifest.json",
        languages=read_languages(out, generation.get("decoder_start_token_id", 2)),
    )
    seal(out)
    return out


def generate_reference(model, tokenizer, kind, text, source, target, **settings):
    """Return the text and ids that `generate` of transformers gives.

    The target language of mBART is the start token (Liu et al. 2020, 2.2).
    """
    tokenizer.src_lang = source
    token = tokenizer.convert_tokens_to_ids(f"__{target}__" if kind == "m2m_100" else target)
    option = "decoder_start_token_id" if kind == "mbart" else "forced_bos_token_id"
    inputs = tokenizer(text, return_tensors="pt")
    outputs = model.generate(**inputs, **{**SETTINGS, **settings, option: token})
    return tokenizer.decode(outputs[0], skip_special_tokens=True), outputs[0].tolist()


def test_translations_match_transformers(multilingual):
    kind, model, tokenizer, runtime, (english, german, french) = multilingual
    actual = set()
    for source, target in ((english, french), (french, english), (german, german)):
        for beams in (1, 3):
            reference, _ = generate_reference(
                model, tokenizer, kind, TEXTS[0], source, target, num_beams=beams
            )
            assert runtime.generate(
                TEXTS[:1], src_lang=source, tgt_lang=target, **{**SETTINGS, "num_beams": beams}
            ) == [reference]
            actual.add(reference)
    assert len(actual) > 1  # languages change the generated text


def test_source_token_ids_match_transformers(multilingual):
    _, _, tokenizer, runtime, languages = multilingual
    for language in languages:
        tokenizer.src_lang = language
        assert runtime.rows(TEXTS, language) == tokenizer(TEXTS)["input_ids"]
    tokenizer.src_lang = languages[0]
    # English is the default source language
    assert runtime.rows(TEXTS) == tokenizer(TEXTS)["input_ids"]


def test_batch_with_several_languages_matches_single_texts(multilingual):
    kind, model, tokenizer, runtime, (english, german, french) = multilingual
    sources, targets = [english, english, german], [german, french, english]
    reference = [
        generate_reference(model, tokenizer, kind, *row)[0] for row in zip(TEXTS, sources, targets)
    ]
    assert runtime.generate(TEXTS, src_lang=sources, tgt_lang=targets, **SETTINGS) == reference
    texts, scores = runtime.generate_with_scores(
        TEXTS, src_lang=sources, tgt_lang=targets, **SETTINGS
    )
    assert texts == reference and (scores < 0).all()
    assert (
        "".join(runtime.stream(TEXTS[2], src_lang=german, tgt_lang=english, **SETTINGS))
        == reference[2]
    )


def test_unknown_missing_or_duplicate_language_raises(multilingual):
    _, _, _, runtime, (english, german, _) = multilingual
    for name, other in (("src_lang", {"tgt_lang": german}), ("tgt_lang", {})):
        unknown = f"{english}_no"  # the same language with another region or script is nearest
        with raises(UsageError, seen=(name, unknown), expected=english):
            runtime.generate(TEXTS, **{name: unknown}, **other)
    with raises(UsageError, seen=("src_lang", 5)):
        runtime.generate(TEXTS, src_lang=5, tgt_lang=german)
    with raises(UsageError, seen=("tgt_lang", 2), expected=3):
        runtime.generate(TEXTS, tgt_lang=[german, german])
    with raises(UsageError, seen=("tgt_lang", None), expected="generation_config.json"):
        runtime.generate(TEXTS)
    option = runtime.languages.target
    with raises(UsageError, seen=("tgt_lang", german, option)):
        runtime.generate(TEXTS, tgt_lang=german, **{option: 5})
    assert runtime.generate(
        TEXTS, **{option: runtime.languages.tokens[german]}
    ) == runtime.generate(TEXTS, tgt_lang=german)


def test_target_language_defaults_to_generation_config(nllb_export, spm, tmp_path):
    source = source_directory("mbart50", spm, tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(source)
    romanian = tokenizer.convert_tokens_to_ids("ro_RO")
    runtime = TextRuntime(
        export_with(nllb_export[1], source, tmp_path / "export", forced_bos_token_id=romanian)
    )
    reference = [
        generate_reference(nllb_export[0], tokenizer, "mbart50", text, "en_XX", "ro_RO")[0]
        for text in TEXTS
    ]
    assert runtime.generate(TEXTS, **SETTINGS) == reference
    reference = [
        generate_reference(nllb_export[0], tokenizer, "mbart50", text, "en_XX", "de_DE")[0]
        for text in TEXTS
    ]
    # the default target language is not used
    assert runtime.generate(TEXTS, tgt_lang="de_DE", **SETTINGS) == reference


def test_target_prefix_follows_language_token(multilingual):
    kind, model, tokenizer, runtime, (english, german, _) = multilingual
    prefix = "ein Hund"
    token = runtime.languages.tokens[german]
    start = [token] if kind == "mbart" else [model.config.decoder_start_token_id, token]
    decoder_prompt = [*start, *tokenizer(prefix, add_special_tokens=False)["input_ids"]]
    tokenizer.src_lang = english
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    outputs = model.generate(
        **inputs,
        decoder_input_ids=torch.tensor([decoder_prompt]),
        **SETTINGS,
        decoder_start_token_id=start[0],
    )
    [result] = runtime.generate(
        TEXTS[:1], target_prefix=[prefix], src_lang=english, tgt_lang=german, **SETTINGS
    )
    assert result == tokenizer.decode(outputs[0], skip_special_tokens=True) and prefix in result


def test_manifest_lists_languages(nllb_export):
    model, directory = nllb_export
    languages = json.loads((directory / "manifest.json").read_text())["languages"]
    first = languages["tokens"]["ace_Arab"]
    assert (
        list(languages["tokens"]) == NLLB_CODES
        and languages["tokens"]["zul_Latn"] == first + len(NLLB_CODES) - 1
    )
    others = {name: languages[name] for name in ("source", "before", "after", "target")}
    assert others == dict(source="eng_Latn", before=[None], after=[2], target="forced_bos_token_id")


def test_nllb_languages_are_added_without_tokenizer_config(spm, tmp_path):
    bare = source_directory("nllb", spm, tmp_path / "bare")
    full = AutoTokenizer.from_pretrained(bare, src_lang="deu_Latn")
    (bare / "tokenizer_config.json").unlink()
    find_tokenizer(bare).save(tmp_path / "saved")
    result = AutoTokenizer.from_pretrained(tmp_path / "saved", src_lang="deu_Latn")
    assert (
        result(LINES)["input_ids"] == full(LINES)["input_ids"]
        and result.get_vocab() == full.get_vocab()
    )


def test_evaluation_with_languages_is_equal_for_checkpoint_and_export(nllb_export, tmp_path):
    for name, lines in (("source", TEXTS), ("references", ["a man reads"] * 3)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = dict(source=tmp_path / "source", references=tmp_path / "references")
    settings = dict(files, src_lang="deu_Latn", tgt_lang="fra_Latn", **SETTINGS)
    directory = nllb_export[1]
    checkpoint = directory.with_name("checkpoint")
    result = evaluate(directory, **settings)
    assert result == {**evaluate(checkpoint, **settings), "engine": "onnxruntime"}
    with raises(UsageError, seen=("tgt_lang", "fra"), expected="fra_Latn"):
        evaluate(checkpoint, **{**settings, "tgt_lang": "fra"})


def test_generate_command_accepts_language_options(nllb_export, spm, capsys, tmp_path):
    model, directory = nllb_export
    tokenizer = AutoTokenizer.from_pretrained(source_directory("nllb", spm, tmp_path / "source"))
    reference = [
        generate_reference(model, tokenizer, "nllb", text, "deu_Latn", "fra_Latn")[0]
        for text in TEXTS
    ]
    options = [
        "--src-lang",
        "deu_Latn",
        "--tgt-lang",
        "fra_Latn",
        "--max-new-tokens",
        "8",
        "--min-new-tokens",
        "6",
    ]
    main(["generate", str(directory), *TEXTS, *options])
    assert capsys.readouterr().out.splitlines() == reference
    main(["generate", str(directory), TEXTS[0], "--stream", *options])
    assert capsys.readouterr().out.splitlines() == reference[:1]
    (tmp_path / "lines").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    main(
        [
            "generate",
            str(directory),
            "--input",
            str(tmp_path / "lines"),
            "--output",
            str(tmp_path / "out"),
            *options,
        ]
    )
    assert (tmp_path / "out").read_text(encoding="utf-8").splitlines() == reference
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(directory), TEXTS[0], "--tgt-lang", "fra"])
    assert stop.value.code == 2 and "'fra'" in (error := capsys.readouterr().err)
    assert "'fra_Latn'" in error
