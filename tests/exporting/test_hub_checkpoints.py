"""Tests of checkpoints as on the Hub, from their files to vectors, scores and tokens."""

import sys

import numpy as np
import pytest
import torch
import transformers
from checkpoints import edit_json
from hub_checkpoints import (
    DEBERTA,
    EMBEDDERS,
    EUROBERT,
    QWEN2,
    QWEN3,
    SMOLLM,
    TEXTS,
    make_pair_tokenizer,
    make_tokenizer,
    save_checkpoint,
    save_embedder,
)
from messages import raises
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import pipeline

from vanilla_transformer import VanillaEncoderModel
from vanilla_transformer.conversion import convert
from vanilla_transformer_export import TextRuntime, export
from vanilla_transformer_export.ort_models import stand_in_for_optimum


@pytest.fixture(autouse=True)
def optimum():
    """The stand-in of optimum, for `backend="onnx"` of sentence-transformers."""
    before = set(sys.modules)
    stand_in_for_optimum()
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "optimum":
            del sys.modules[name]


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", EMBEDDERS)
def test_embedder_gives_vectors_of_its_source(name, side, tmp_path):
    save_embedder(name, tmp_path / "theirs", side)
    theirs = SentenceTransformer(str(tmp_path / "theirs"), device="cpu")
    facts = convert(tmp_path / "theirs", tmp_path / "ours")
    assert facts["modules"] == [kind for kind, _ in EMBEDDERS[name][3]]
    ours = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    export(tmp_path / "ours", tmp_path / "export", cases=2)
    runtime = TextRuntime(tmp_path / "export", threads=1)
    drop_in = SentenceTransformer(str(tmp_path / "export"), device="cpu", backend="onnx")
    for prompt in ("query", "document"):
        expected = theirs.encode(TEXTS, prompt_name=prompt)
        assert np.abs(expected[0] - expected[1]).max() > 0.05
        close(ours.encode(TEXTS, prompt_name=prompt), expected)
        close(runtime.embed(TEXTS, prompt_name=prompt), expected)
        close(drop_in.encode(TEXTS, prompt_name=prompt), expected)


def test_qwen2_that_is_not_causal_becomes_encoder(tmp_path):
    name = "Alibaba-NLP/gte-Qwen2-1.5B-instruct"
    save_embedder(name, tmp_path / "theirs")
    causal = SentenceTransformer(str(tmp_path / "theirs"), device="cpu").encode(TEXTS)
    edit_json(tmp_path / "theirs" / "config.json", is_causal=False)
    expected = SentenceTransformer(str(tmp_path / "theirs"), device="cpu").encode(TEXTS)
    assert np.abs(causal - expected).max() > 0.05
    assert convert(tmp_path / "theirs", tmp_path / "ours")["architecture"] == "VanillaEncoderModel"
    close(SentenceTransformer(str(tmp_path / "ours"), device="cpu").encode(TEXTS), expected)
    with raises(ValueError, seen=("is_causal", False, "Qwen2ForCausalLM")):
        config = {"architectures": "Qwen2ForCausalLM"}
        convert(tmp_path / "theirs", tmp_path / "language model", config=config)


def test_class_with_code_of_its_own_is_no_decoder_unless_named(tmp_path):
    content = QWEN3 | {"architectures": ["VoyageQwen3BidirectionalEmbedModel"]}
    theirs = save_checkpoint(tmp_path / "theirs", content, "Qwen3Model")
    with raises(ValueError, seen=("architectures", "VoyageQwen3BidirectionalEmbedModel")):
        convert(tmp_path / "theirs", tmp_path / "ours")
    config = {"architectures": "Qwen3Model", "is_causal": False}
    convert(tmp_path / "theirs", tmp_path / "ours", config=config)
    theirs.config.is_causal = False
    ids = torch.randint(4, 200, (2, 7))
    with torch.no_grad():
        expected = theirs(ids).last_hidden_state
        got = VanillaEncoderModel.from_pretrained(tmp_path / "ours").eval()(ids).last_hidden_state
    close(got, expected)


@pytest.mark.parametrize(
    "content, architecture",
    [
        (SMOLLM, "LlamaForCausalLM"),
        (QWEN2 | {"auto_map": {}}, "Qwen2ForCausalLM"),
        (QWEN3, "Qwen3ForCausalLM"),
    ],
    ids=["SmolLM2", "Qwen2.5", "Qwen3"],
)
def test_language_model_generates_tokens_of_its_source(content, architecture, tmp_path):
    theirs = save_checkpoint(tmp_path / "theirs", content, architecture)
    convert(tmp_path / "theirs", tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "export", cases=2)
    runtime = TextRuntime(tmp_path / "export", threads=1)
    tokenizer = make_tokenizer()
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    for options in ({"num_beams": 1}, {"num_beams": 3}):
        settings = options | {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
        expected = theirs.generate(**inputs, **settings, pad_token_id=0)
        got = runtime.runtime.generate(
            inputs["input_ids"].numpy(), inputs["attention_mask"].numpy(), **settings
        )
        assert got[:, -8:].tolist() == expected[:, -8:].tolist()


def test_eurobert_fills_masks_as_its_source(tmp_path):
    theirs = save_checkpoint(tmp_path / "theirs", EUROBERT, "EuroBertForMaskedLM")
    convert(tmp_path / "theirs", tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "export", cases=2)
    tokenizer = make_tokenizer(side="right")
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        expected = theirs(**inputs).logits
        ours = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours")
        got = ours.eval()(**inputs).logits
    mask = inputs["attention_mask"].bool()
    close(got[mask], expected[mask])
    outputs = TextRuntime(tmp_path / "export").runtime.outputs(
        **{name: tensor.numpy() for name, tensor in inputs.items()}
    )
    close(outputs["logits"][mask.numpy()], expected[mask])


def test_zero_shot_with_deberta_equals_pipeline(tmp_path):
    tokenizer = make_pair_tokenizer()
    architecture = DEBERTA["architectures"][0]
    theirs = save_checkpoint(tmp_path / "theirs", DEBERTA, architecture, tokenizer=tokenizer)
    assert convert(tmp_path / "theirs", tmp_path / "ours")["architecture"].endswith(
        "Classification"
    )
    export(tmp_path / "ours", tmp_path / "export", cases=2)
    runtime = TextRuntime(tmp_path / "export", threads=1)
    pipe = pipeline("zero-shot-classification", model=theirs, tokenizer=tokenizer)
    labels = ["China", "gravity", "no"]
    for options in ({}, {"multi_label": True}):
        results = runtime.zero_shot(TEXTS, labels, **options)
        for got, expected in zip(results, pipe(TEXTS, labels, **options), strict=True):
            assert got["labels"] == expected["labels"]
            close(got["scores"], np.array(expected["scores"]))


def test_norms_of_half_precision_gemma_keep_their_weights(tmp_path):
    save_embedder("google/embeddinggemma-300m", tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    half = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(half, path, {"format": "pt"})
    edit_json(tmp_path / "theirs" / "config.json", dtype="bfloat16")
    convert(tmp_path / "theirs", tmp_path / "ours")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    expected = half["layers.0.input_layernorm.weight"].float() + 1
    assert torch.equal(ours["layers.0.self_attn_norm.weight"], expected)
    assert not torch.equal(expected, expected.bfloat16().float())


def test_gemma_whose_scores_are_divided_by_zero_is_rejected(tmp_path):
    save_embedder("google/embeddinggemma-300m", tmp_path / "theirs")
    edit_json(tmp_path / "theirs" / "config.json", query_pre_attn_scalar=0)
    with raises(ValueError, seen="query_pre_attn_scalar=0", expected="at least 1"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_of_half_precision_deberta_are_not_rounded(dtype, tmp_path):
    theirs = save_checkpoint(tmp_path / "theirs", DEBERTA, DEBERTA["architectures"][0])
    theirs.to(dtype).save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "export", cases=2)
    ids = torch.randint(4, 200, (2, 40))
    with torch.no_grad():
        expected = theirs.float()(ids).logits
    close(TextRuntime(tmp_path / "export").runtime.outputs(ids.numpy())["logits"], expected)


@pytest.mark.parametrize(
    "change, seen, expected",
    [
        ({"activation_function": "a.module.Act"}, "a.module.Act", "torch.nn.Tanh"),
        ({"bias": True}, "linear.weight", "linear.bias"),
        ({"in_features": 23}, 23, 24),
        ({"out_features": 35}, (36, 24), (35, 24)),
    ],
)
def test_dense_that_embed_cannot_follow_is_not_exported(change, seen, expected, tmp_path):
    save_embedder("google/embeddinggemma-300m", tmp_path / "theirs")
    edit_json(tmp_path / "theirs" / "2_Dense" / "config.json", **change)
    with raises(ValueError, seen=seen, expected=expected):
        export(tmp_path / "theirs", tmp_path / "export", cases=1)
    assert not (tmp_path / "export").exists()
    export(tmp_path / "theirs", tmp_path / "export", cases=1, leave_out=["modules.json"])


def test_pooling_that_embed_does_not_know_is_not_exported(tmp_path):
    save_embedder("Qwen/Qwen3-Embedding-0.6B", tmp_path / "theirs")
    edit_json(tmp_path / "theirs" / "1_Pooling" / "config.json", pooling_mode="median")
    with raises(ValueError, seen="median", expected="lasttoken"):
        export(tmp_path / "theirs", tmp_path / "export", cases=1)
    assert not (tmp_path / "export").exists()


def test_module_that_embed_does_not_follow_is_named(tmp_path):
    save_embedder("Qwen/Qwen3-Embedding-0.6B", tmp_path / "theirs")
    modules = tmp_path / "theirs" / "modules.json"
    modules.write_text(modules.read_text().replace(".Normalize", ".WeightedLayerPooling"))
    with raises(ValueError, seen="WeightedLayerPooling", expected="Pooling"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    facts = convert(tmp_path / "theirs", tmp_path / "ours", leave_out=["modules.json"])
    assert facts["modules"] == [] and not (tmp_path / "ours" / "modules.json").exists()
    assert facts["architecture"] == "VanillaDecoderForCausalLM"
