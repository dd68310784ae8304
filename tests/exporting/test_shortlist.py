"""An export with a vocabulary shortlist generates the tokens of the full model with all other
tokens suppressed."""

import json

import numpy as np
import onnx
import pytest
import torch
from checkpoints import perturbed
from command_line import main
from messages import raises
from tokenizers import Tokenizer, models, pre_tokenizers

import vanilla_transformer
from vanilla_transformer_export import Runtime, export, verify
from vanilla_transformer_export.exporting.shortlist import shortlist_from_text

SIZES = dict(vocab_size=48, hidden_size=32, intermediate_size=40, num_attention_heads=4)
MODELS = {
    "seq2seq": ("VanillaSeq2SeqForConditionalGeneration", dict(encoder_layers=1, decoder_layers=1)),
    "causal": (
        "VanillaDecoderForCausalLM",
        dict(num_hidden_layers=1, tie_word_embeddings=False, lm_head_bias=False, embedding_size=24),
    ),
}
TOKENS = [9, 4, 30, 31, 32, 40, 47, 9]


def build(name):
    architecture, fields = MODELS[name]
    return perturbed(architecture, {**SIZES, **fields})


@pytest.mark.parametrize("target", [pytest.param("portable", marks=pytest.mark.slow), "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_shortlist_matches_full_model_with_other_tokens_suppressed(name, target, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path / "checkpoint")
    manifest = export(
        tmp_path / "checkpoint", tmp_path / "out", cases=3, target=target, shortlist=TOKENS
    )
    config = model.generation_config
    special = {
        config.bos_token_id,
        config.eos_token_id,
        config.pad_token_id,
        config.decoder_start_token_id,
    } - {None}
    assert manifest["shortlist"] == sorted({*TOKENS, *special})
    suppressed = sorted(set(range(48)) - set(manifest["shortlist"]))
    ids = np.random.default_rng(0).integers(4, 48, (3, 6))
    for beams in (1, 3):
        settings = dict(max_new_tokens=9, num_beams=beams)
        # The probabilities of the shortlist sum to 1, so those of torch are renormalized.
        options = dict(do_sample=False, suppress_tokens=suppressed, renormalize_logits=True)
        with torch.no_grad():
            expected = model.generate(torch.from_numpy(ids), **options, **settings)
        actual = Runtime(tmp_path / "out").generate(ids, np.ones_like(ids), **settings)
        assert actual.tolist() == expected.tolist()
    report = verify(tmp_path / "out", model, cases=6)
    assert report.failures == [] and report.agreeing == report.choices > 0
    assert type(model.lm_head) is torch.nn.Linear


def test_quantized_shortlist_shrinks_output_matrix_and_generates_only_its_tokens(tmp_path):
    build("causal").save_pretrained(tmp_path / "checkpoint")
    manifest = export(
        tmp_path / "checkpoint",
        tmp_path / "out",
        cases=2,
        target="cpu",
        dtype="int8",
        shortlist=TOKENS,
    )
    tokens = Runtime(tmp_path / "out").generate(np.array([[5, 6, 7]]), max_new_tokens=12)[0, 3:]
    assert set(tokens.tolist()) <= {*TOKENS, 0, 1, 2, 3}
    graph = onnx.load(tmp_path / "out" / "onnx" / "model.onnx").graph
    shapes = [tuple(weight.dims) for weight in graph.initializer]
    # (D, V) of the narrow embeddings; the input embeddings are (V, D)
    assert (24, len(manifest["shortlist"])) in shapes and (24, 48) not in shapes


@pytest.mark.parametrize("tokens, seen", [([], ()), ([5, 48], (5, 48)), ([-1, 3], (-1, 3))])
def test_tokens_outside_vocabulary_are_rejected(tokens, seen, tmp_path):
    build("causal").save_pretrained(tmp_path / "checkpoint")
    with raises(ValueError, seen=(0, 47, *seen)):
        export(tmp_path / "checkpoint", tmp_path / "out", shortlist=tokens)
    assert not (tmp_path / "out").exists()


def test_model_that_does_not_generate_is_rejected(tmp_path):
    config = vanilla_transformer.VanillaEncoderConfig(**SIZES, num_hidden_layers=1)
    vanilla_transformer.VanillaEncoderModel(config).save_pretrained(tmp_path / "checkpoint")
    with raises(ValueError, seen=("VanillaEncoderModel", "shortlist"), expected=None):
        export(tmp_path / "checkpoint", tmp_path / "out", shortlist=TOKENS)


def test_shortlist_from_text_reads_windows_lines_and_rejects_invalid_files(tmp_path):
    words = {
        name: index
        for index, name in enumerate(["<unk>", "<s>", "w2", "w3", "w4", "\u2028", "\x85"])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.enable_truncation(1)  # not applied to the text
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "words.txt").write_bytes("\ufeffw2 \u2028\r\n\r\nw4 \x85 w2\r\n".encode())
    assert shortlist_from_text(tmp_path / "words.txt", tmp_path) == [1, 2, 4, 5, 6]
    (tmp_path / "words.txt").write_bytes(b"w2\nw\xff\n")
    with raises(ValueError, seen=("words.txt", 2, "0xff")):
        shortlist_from_text(tmp_path / "words.txt", tmp_path)
    with raises(FileNotFoundError, seen="nowhere.txt"):
        shortlist_from_text(tmp_path / "nowhere.txt", tmp_path)


@pytest.mark.slow
def test_export_command_reads_shortlist_from_text(tmp_path, capsys):
    build("seq2seq").save_pretrained(tmp_path / "checkpoint")
    words = {"<s>": 0, "</s>": 1, "<pad>": 2, **{f"w{i}": i for i in range(3, 48)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    (tmp_path / "words.txt").write_text("w7 w9\nw7 w44\n")
    arguments = [str(tmp_path / name) for name in ("checkpoint", "out")]
    shortlist = ["--shortlist", str(tmp_path / "words.txt")]
    with raises(SystemExit, seen="tokenizer.json"):
        main(["export", *arguments, *shortlist])
    tokenizer.save(str(tmp_path / "checkpoint" / "tokenizer.json"))
    main(["export", *arguments, *shortlist])
    assert (
        {0, 1, 2, 7, 9, 44}
        <= set(json.loads((tmp_path / "out" / "manifest.json").read_text())["shortlist"])
        <= set(range(10)) | {44}
    )
    capsys.readouterr()


def test_shortlist_has_all_tokens_that_generation_config_names(tmp_path):
    model = build("seq2seq")
    named = {"forced_bos_token_id": 20, "forced_eos_token_id": 21, "eos_token_id": [2, 22]}
    model.generation_config.update(**named)
    model.save_pretrained(tmp_path / "checkpoint")
    manifest = export(tmp_path / "checkpoint", tmp_path / "out", cases=1, shortlist=TOKENS)
    assert {20, 21, 22} <= {*manifest["shortlist"]}
