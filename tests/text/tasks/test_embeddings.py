"""Tests of embeddings, against sentence-transformers."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from checkpoints import SIZES, copy_folder, edit_json, list_file
from heads import MANY, TEXTS, close, save_head, word_pieces
from messages import raises
from pipelines_compared import both
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    LayerNorm,
    Normalize,
    Pooling,
    Transformer,
)

from vanilla_transformer_export import TextRuntime, export
from vanilla_transformer_export.errors import UsageError

PROMPTS = {"query": "the book : ", "document": ""}
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@pytest.fixture(scope="module")
def make_embedder(tmp_path_factory):
    """Return a function that builds a SentenceTransformer and the runtime of its export.

    Its arguments are the modules behind the encoder. All exports share one graph.
    """
    root = tmp_path_factory.mktemp("embedder")
    architecture, fields = "VanillaEncoderModel", {"type_vocab_size": 2}
    plain = save_head(architecture, word_pieces(), root / "plain", **fields)
    export(plain, root / "export", cases=1)

    def make(*modules, **settings):
        folder = tmp_path_factory.mktemp("embedder")
        transformers.set_seed(1)
        model = SentenceTransformer(
            modules=[Transformer(plain, max_seq_length=30), *modules], device="cpu", **settings
        )
        model.save(str(folder / "model"))
        # The graph does not depend on the modules.
        directory = copy_folder(root / "export", folder)
        facts = []
        for path in (folder / "model").rglob("*"):
            name = path.relative_to(folder / "model").as_posix()
            if (
                "_" in name
                and not name.startswith(("README", "config.json", "model"))
                and path.is_file()
            ):
                (directory / name).parent.mkdir(exist_ok=True)
                shutil.copy(path, directory / name)
                list_file(directory, name)
        for module in json.loads((folder / "model" / "modules.json").read_text())[1:]:
            config = folder / "model" / module["path"] / "config.json"
            content = json.loads(config.read_text()) if config.is_file() else {}
            facts.append(
                {"type": module["type"].rpartition(".")[2], "folder": module["path"], **content}
            )
        edit_json(directory / "manifest.json", sentence_modules=facts)
        return model, TextRuntime(directory, threads=1)

    return make


@pytest.mark.parametrize("pooling", [*POOLINGS, POOLINGS], ids=str)
@pytest.mark.parametrize("include_prompt", [True, False])
def test_embeddings_match_sentence_transformers(make_embedder, pooling, include_prompt):
    modules = (
        Pooling(SIZES["hidden_size"], pooling_mode=pooling, include_prompt=include_prompt),
        Normalize(),
    )
    model, runtime = make_embedder(
        *modules, prompts=PROMPTS, default_prompt_name="query" if pooling == "max" else None
    )
    for options in (
        {},
        {"prompt_name": "query"},
        {"prompt_name": "document"},
        {"prompt": "a man"},
        {"truncate_dim": 5},
    ):
        result = runtime.embed(MANY, **options)
        np.testing.assert_allclose(result, model.encode(MANY, **options), rtol=1e-5, atol=1e-5)
        assert result.dtype == np.float32


BLANK = ["a man", " ", "", "\n\t"]


def test_blank_text_embeddings_match_sentence_transformers(make_embedder):
    model, runtime = make_embedder(
        Pooling(SIZES["hidden_size"], pooling_mode="mean"), Normalize(), prompts=PROMPTS
    )
    for options in ({}, {"prompt_name": "query"}):
        np.testing.assert_allclose(
            runtime.embed(BLANK, **options), model.encode(BLANK, **options), rtol=1e-5, atol=1e-5
        )


def test_blank_text_labels_match_pipelines(made):
    pipe, runtime = both(made, "classify", "text-classification")
    pairs = [{"text": "a man", "text_pair": " "}, {"text": "", "text_pair": "a man"}]
    texts = [*BLANK, *pairs]
    close(runtime.classify(texts, top_k=None), [pipe(each, top_k=None) for each in texts])
    pipe, runtime = both(made, "tag", "token-classification")
    assert (
        [each == [] for each in runtime.tag(BLANK)]
        == [each == [] for each in pipe(BLANK)]
        == [False, True, True, True]
    )


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_dense_module_and_similarity_match_sentence_transformers(make_embedder, name):
    width = SIZES["hidden_size"]
    activation = {
        "cosine": torch.nn.Identity(),
        "dot": torch.nn.ReLU(),
        "euclidean": torch.nn.Sigmoid(),
    }.get(name)
    dense = Dense(width, 6, bias=name != "dot", activation_function=activation or torch.nn.Tanh())
    model, runtime = make_embedder(
        Pooling(width, pooling_mode="mean"), dense, similarity_fn_name=name, truncate_dim=5
    )
    actual, reference = runtime.embed(MANY), model.encode(MANY)
    np.testing.assert_allclose(actual, reference, rtol=1e-5, atol=1e-5)
    expected = model.similarity(reference, reference[:2]).numpy()
    np.testing.assert_allclose(
        runtime.similarity(actual, actual[:2]), expected, rtol=1e-4, atol=1e-4
    )


def test_layer_norm_module_matches_sentence_transformers(make_embedder):
    width = SIZES["hidden_size"]
    module = LayerNorm(width)
    torch.nn.init.normal_(module.norm.weight)
    torch.nn.init.normal_(module.norm.bias)
    model, runtime = make_embedder(Pooling(width, pooling_mode="mean"), module, Normalize())
    np.testing.assert_allclose(runtime.embed(MANY), model.encode(MANY), rtol=1e-5, atol=1e-5)


def test_mean_pooling_is_default_without_modules(make_embedder):
    _, runtime = make_embedder(Pooling(SIZES["hidden_size"]))
    runtime.info.manifest["sentence_modules"] = []
    plain = runtime.path.parent.with_name("model")
    (plain / "modules.json").unlink()
    model = SentenceTransformer(str(plain), device="cpu")
    np.testing.assert_allclose(runtime.embed(TEXTS), model.encode(TEXTS), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_export_converts_pickled_module_weights_to_safetensors(tmp_path):
    plain = save_head("VanillaEncoderModel", word_pieces(), tmp_path / "plain", type_vocab_size=2)
    width = SIZES["hidden_size"]
    model = SentenceTransformer(
        modules=[Transformer(plain), Pooling(width), Dense(width, 5), Normalize()], device="cpu"
    )
    model.save(str(tmp_path / "model"), safe_serialization=False)
    shutil.copy(tmp_path / "plain" / "model.safetensors", tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").unlink(missing_ok=True)
    if (safe := tmp_path / "model" / "2_Dense" / "model.safetensors").is_file():
        safe.unlink()
        torch.save(model[2].state_dict(), tmp_path / "model" / "2_Dense" / "pytorch_model.bin")
    manifest = export(tmp_path / "model", tmp_path / "export", cases=1)
    assert (
        "2_Dense/model.safetensors" in manifest["files"]
        and "2_Dense/pytorch_model.bin" not in manifest["files"]
    )
    result = TextRuntime(tmp_path / "export", threads=1).embed(TEXTS)
    np.testing.assert_allclose(result, model.encode(TEXTS), rtol=1e-5, atol=1e-5)
    export(tmp_path / "model", tmp_path / "export", cases=1, force=True)


def test_unknown_prompts_and_unsupported_modules_raise(make_embedder, monkeypatch):
    _, runtime = make_embedder(Pooling(SIZES["hidden_size"]), prompts=PROMPTS)
    for options, seen, expected in (
        ({"prompt_name": "qurey"}, "qurey", ("document", "query")),
        ({"prompt_name": "query", "prompt": "a"}, ("prompt", "a", "prompt_name", "query"), ()),
        ({"truncate_dim": 0}, ("truncate_dim", 0), 1),
    ):
        with raises(UsageError, seen=seen, expected=expected):
            runtime.embed(["a"], **options)
    pooling = {"type": "Pooling", "pooling_mode": "mean"}
    for modules, seen, expected in (
        ([{"type": "Normalize"}], "Normalize", ("Pooling", "Dense", "Normalize")),
        ([{"type": "Pooling", "pooling_mode": "median"}], "median", "cls"),
        ([pooling, {"type": "Dense", "use_residual": True}], ("use_residual", True), ()),
        ([pooling, {"type": "Dense", "activation_function": "torch.nn.Mish"}], "torch.nn.Mish", ()),
        ([pooling, {"type": "Dense"}], "Dense", ()),
        (
            [pooling, {"type": "Dense", "folder": "2_Dense"}],
            "2_Dense/model.safetensors",
            (),
        ),
        (
            [pooling, {"type": "Normalize", "module_input_name": "token_embeddings"}],
            (),
            "sentence_embedding",
        ),
    ):
        monkeypatch.setitem(runtime.info.manifest, "sentence_modules", modules)
        runtime.__dict__.pop("sentence_modules", None)
        with raises(ValueError, seen=seen, expected=expected):
            runtime.embed(["a"])
    with raises(ValueError, seen=(1, 2, 3)):
        runtime.similarity(np.zeros(2), np.zeros(3))
