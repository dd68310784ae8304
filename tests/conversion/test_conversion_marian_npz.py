"""Tests of conversion of Marian's own files, against transformers' Marian classes."""

import json
import math
import shutil

import numpy as np
import pytest
import sentencepiece
import torch
import yaml
from families import assert_exact, compute_outputs, make_arguments, random_model
from messages import raises
from transformers import GenerationConfig, MarianConfig, MarianTokenizer

import vanilla_transformer
from vanilla_transformer.conversion import convert, converted, plan_conversion
from vanilla_transformer.info import info
from vanilla_transformer_export.cli.main import main

TEXTS = ["a man sees the dog", "the park", "number 12 in the park"]
FIELDS = {  # fields that Marian writes for a transformer-base, in its order, and more
    "dec-depth": 2, "dim-emb": 12, "enc-depth": 3, "layer-normalization": False,
    "right-left": False, "tied-embeddings": False, "tied-embeddings-all": True,
    "tied-embeddings-src": False, "transformer-aan-depth": 2,
    "transformer-decoder-autoreg": "self-attention", "transformer-dim-ffn": 20,
    "transformer-ffn-activation": "swish", "transformer-ffn-depth": 2, "transformer-heads": 3,
    "transformer-no-projection": False, "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d", "transformer-preprocess": "", "transformer-tied-layers": [],
    "transformer-train-position-embeddings": False, "type": "transformer", "ulr": False,
    "ulr-dim-emb": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """Train a SentencePiece model and return its file."""
    directory = tmp_path_factory.mktemp("pieces")
    (directory / "text").write_text(
        "\n".join(f"a man sees the dog number {i} in the park" for i in range(200))
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "text"),
        model_prefix=str(directory / "source"),
        vocab_size=40,
        minloglevel=2,
    )
    return directory / "source.model"


@pytest.fixture(scope="module")
def marian_checkpoint(pieces, tmp_path_factory):
    """Write a directory as Marian does.

    Return it with transformers' model of the same weights and its tokenizer.
    """
    raw, theirs = (tmp_path_factory.mktemp(name) for name in ("raw", "theirs"))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    names = ["</s>", "<unk>", *(processor.id_to_piece(i) for i in range(3, 40))]
    pad = len(names)
    for directory in (raw, theirs):
        for name in ("source.spm", "target.spm"):
            shutil.copyfile(pieces, directory / name)
    (theirs / "vocab.json").write_text(
        json.dumps({name: i for i, name in enumerate([*names, "<pad>"])})
    )
    (theirs / "tokenizer_config.json").write_text(
        json.dumps({"source_lang": "en", "target_lang": "de"})
    )
    model = marian_model(pad)
    arrays = {name: array for name, array in marian_arrays(model)}
    text = yaml.dump(FIELDS) + "version: v1.9.0\n"
    arrays["special:model.yml"] = np.array([*text.encode(), 0], dtype=np.int8)
    np.savez(raw / "opus.spm32k-spm32k.transformer-align.model1.npz.best-perplexity.npz", **arrays)
    (raw / "opus.spm32k-spm32k.vocab.yml").write_text(
        yaml.dump({name: i for i, name in enumerate(names)}, allow_unicode=True)
    )
    (raw / "decoder.yml").write_text(
        yaml.dump({"relative-paths": True, "beam-size": 3, "normalize": 1, "word-penalty": 0})
    )
    return raw, model, MarianTokenizer.from_pretrained(theirs)


def marian_model(pad):
    """Return a random model whose last row of embeddings, that of padding, is zero.

    Marian's own models have no such row.
    """
    config = MarianConfig(
        vocab_size=pad + 1, d_model=12, encoder_layers=3, decoder_layers=2, encoder_ffn_dim=20,
        decoder_ffn_dim=20, encoder_attention_heads=3, decoder_attention_heads=3,
        activation_function="swish", scale_embedding=True, pad_token_id=pad, eos_token_id=0,
        bos_token_id=0, decoder_start_token_id=pad, forced_eos_token_id=0,
    )  # fmt: skip
    model = random_model("MarianMTModel", config)
    with torch.no_grad():
        model.model.shared.weight[pad] = 0
        model.final_logits_bias[0, pad] = 0
    model.generation_config = GenerationConfig(
        num_beams=3, max_length=512, bad_words_ids=[[pad]], forced_eos_token_id=0, pad_token_id=pad,
        eos_token_id=0, bos_token_id=0, decoder_start_token_id=pad,
    )  # fmt: skip
    return model


def marian_arrays(model):
    """Yield names and arrays as in Marian's source (src/models/transformer.h): matrices (in, out),
    vectors as rows."""
    yield "Wemb", model.model.shared.weight[:-1].detach().numpy()
    yield "decoder_ff_logit_out_b", model.final_logits_bias[:, :-1].numpy()
    for side, stack in (("encoder", model.model.encoder), ("decoder", model.model.decoder)):
        for i, layer in enumerate(stack.layers, start=1):
            attentions = {"self": (layer.self_attn, layer.self_attn_layer_norm)}
            if side == "decoder":
                attentions["context"] = layer.encoder_attn, layer.encoder_attn_layer_norm
            linears, norms = {}, {"ffn_ffn": layer.final_layer_norm}
            for name, (attention, norm) in attentions.items():
                for letter, linear in zip(
                    "qkvo",
                    (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj),
                ):
                    linears[f"{name}_{{}}{letter}"] = linear
                norms[f"{name}_Wo"] = norm
            linears |= {"ffn_{}1": layer.fc1, "ffn_{}2": layer.fc2}
            for name, linear in linears.items():
                yield f"{side}_l{i}_{name.format('W')}", linear.weight.detach().numpy().T
                yield f"{side}_l{i}_{name.format('b')}", linear.bias.detach().numpy()[None]
            for name, norm in norms.items():
                yield f"{side}_l{i}_{name}_ln_scale", norm.weight.detach().numpy()[None]
                yield f"{side}_l{i}_{name}_ln_bias", norm.bias.detach().numpy()[None]


def test_marian_directory_is_converted_with_same_outputs_and_texts(marian_checkpoint, tmp_path):
    raw, theirs, tokenizer = marian_checkpoint
    result = convert(raw, tmp_path / "ours")
    assert (
        result["architecture"] == "VanillaSeq2SeqForConditionalGeneration"
        and result["left_out"] == []
    )
    ours = vanilla_transformer.VanillaSeq2SeqForConditionalGeneration.from_pretrained(
        tmp_path / "ours"
    ).eval()
    inputs = make_arguments(theirs)
    assert_exact(
        compute_outputs(ours, inputs)["logits"],
        compute_outputs(theirs, inputs)["logits"],
        torch.float32,
    )
    expected, actual = (model.generation_config.to_diff_dict() for model in (theirs, ours))
    assert {name: actual.get(name) for name in expected} == expected
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    options = dict(max_length=None, max_new_tokens=8, min_new_tokens=4, no_repeat_ngram_size=2)
    tokens = theirs.generate(**batch, **options)
    assert len(tokens.unique()) > 4, "a model that repeats itself proves little"
    assert ours.generate(**batch, **options).tolist() == tokens.tolist()
    converted_tokenizer = vanilla_transformer.checkpoint.load_tokenizer(tmp_path / "ours")
    assert converted_tokenizer(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
    assert converted_tokenizer.batch_decode(
        tokens, skip_special_tokens=True
    ) == tokenizer.batch_decode(tokens, skip_special_tokens=True)


def test_dry_run_prints_mapping_and_writes_nothing(marian_checkpoint, capsys, tmp_path):
    main(["convert", str(marian_checkpoint[0]), str(tmp_path / "ours"), "--dry-run"])
    assert (
        "shared.weight -> model.encoder.embeddings.embed_tokens.weight" in capsys.readouterr().out
    )
    assert not (tmp_path / "ours").exists()


def test_info_and_converted_accept_marian_directory(marian_checkpoint):
    raw, theirs, _ = marian_checkpoint
    weights = {
        tensor.data_ptr(): tensor
        for name, tensor in theirs.state_dict().items()
        if "embed_positions" not in name
    }
    assert info(raw)["total_parameters"] == sum(tensor.numel() for tensor in weights.values())
    with converted(raw) as ours:
        assert (ours / "tokenizer.json").is_file()


@pytest.fixture
def raw(marian_checkpoint, tmp_path):
    """Return a copy of Marian's directory that a test may change."""
    return shutil.copytree(marian_checkpoint[0], tmp_path / "raw")


def edit_arrays(raw, change):
    """Apply `change` to the arrays of the .npz file."""
    [file] = raw.glob("*.npz")
    arrays = dict(np.load(file))
    change(arrays)
    np.savez(file, **arrays)


def set_fields(**fields):
    def change(arrays):
        text = yaml.dump(
            {name: value for name, value in (FIELDS | fields).items() if value is not None}
        )
        arrays["special:model.yml"] = np.array([*text.encode(), 0], dtype=np.int8)

    return change


WRONG_FIELDS = {
    "type": "s2s", "tied-embeddings-all": False, "layer-normalization": True, "right-left": True,
    "transformer-ffn-depth": 3, "transformer-decoder-autoreg": "rnn",
    "transformer-no-projection": True, "transformer-postprocess": "da",
    "transformer-postprocess-emb": "nd", "transformer-preprocess": "n",
    "transformer-tied-layers": [1, 1, 2], "transformer-train-position-embeddings": True,
    "transformer-ffn-activation": "gelu", "transformer-heads": 0, "dim-emb": "wide",
    "ulr-dim-emb": 8,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_FIELDS)
def test_unsupported_model_raises_with_field_name(name, raw, tmp_path):
    edit_arrays(raw, set_fields(**{name: WRONG_FIELDS[name]}))
    with raises(ValueError, seen=("best-perplexity.npz", name)):
        convert(raw, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_missing_fields_get_marian_defaults_except_required_ones(raw):
    edit_arrays(
        raw,
        set_fields(
            **{
                "transformer-preprocess": None,
                "ulr-dim-emb": None,
                "transformer-ffn-activation": None,
            }
        ),
    )
    assert plan_conversion(raw).model.config.hidden_act == "swish"
    edit_arrays(raw, set_fields(**{"tied-embeddings-all": None}))
    with raises(ValueError, seen="tied-embeddings-all=None", expected="true"):
        plan_conversion(raw)


@pytest.mark.parametrize(
    "change, seen, expected",
    [
        (lambda arrays: arrays.update(Wpos=np.zeros((4, 4), np.float32)), "Wpos", ()),
        (
            lambda arrays: arrays.update(encoder_l1_self_Wx=np.zeros((4, 4), np.float32)),
            "encoder_l1_self_Wx",
            (),
        ),
        (lambda arrays: arrays.update(Wemb=arrays["Wemb"][1:]), ("Wemb", 38), 39),
        (lambda arrays: arrays.pop("Wemb"), ("Wemb", 0), ()),
        (lambda arrays: arrays.pop("special:model.yml"), "special:model.yml", ()),
        (
            lambda arrays: arrays.pop("encoder_l2_ffn_b1"),
            ("MarianMTModel", "encoder.layers.1.fc1.bias"),
            (),
        ),
        (
            lambda arrays: arrays.update(encoder_l1_ffn_b1=np.array([None, 1], dtype=object)),
            ("allow_pickle", False),
            (),
        ),
        (
            lambda arrays: arrays.update(encoder_l1_ffn_b1=np.zeros((1, 20), np.int8)),
            ("encoder_l1_ffn_b1", "torch.int8", 1, 20),
            (),
        ),
        (
            lambda arrays: arrays.update(encoder_l1_ffn_b1=np.zeros((1, 7), np.float32)),
            ("layers.0.fc1.bias", 7),
            (),
        ),
    ],
)
def test_invalid_tensors_raise_with_name(change, seen, expected, raw, tmp_path):
    edit_arrays(raw, change)
    with raises(ValueError, seen=seen, expected=expected):
        convert(raw, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("name", ["source.spm", "target.spm", "decoder.yml", "*vocab.yml"])
def test_error_names_missing_file(name, raw):
    next(raw.glob(name)).unlink()
    with raises(FileNotFoundError, seen=name):
        plan_conversion(raw)


@pytest.mark.parametrize(
    "name, pattern", [("model2.npz", "*.npz"), ("trg.vocab.yml", "*vocab.yml")]
)
def test_error_names_two_models_or_vocabularies(name, pattern, raw):
    [file] = raw.glob(pattern)
    shutil.copyfile(file, raw / name)
    with raises(FileNotFoundError, seen=(name, file.name), expected="one"):
        plan_conversion(raw)


@pytest.mark.parametrize(
    "content, seen, expected",
    [
        ("a: [", "vocab.yml", ()),
        ("- a", ("vocab.yml", "a"), ()),
        ("</s>: 0\n<unk>: 2", 2, (0, 1)),
        ("</s>: 0\n<unk>: x", "vocab.yml", ()),
        ("</s>: 0\na: 1", "<unk>", ()),
        ("</s>: 0\n<unk>: 1\n<pad>: 2", "<pad>", ()),
    ],
)
def test_invalid_vocabulary_error_is_one_line(content, seen, expected, raw):
    next(raw.glob("*vocab.yml")).write_text(content)
    with raises(ValueError, seen=seen, expected=expected) as caught:
        plan_conversion(raw)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_truncated_model_is_rejected(share, raw):
    [file] = raw.glob("*.npz")
    content = file.read_bytes()
    file.write_bytes(content[: math.floor(len(content) * share)])
    with raises(ValueError, seen="best-perplexity.npz"):
        plan_conversion(raw)
