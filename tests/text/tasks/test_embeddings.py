"""Tests of embeddings, against sentence-transformers."""

import json
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from checkpoints import SIZES, copy_folder, edit_json, list_file
from command_line import main
from heads import MANY, TEXTS, close, save_head, word_pieces
from messages import check_message, raises
from pipelines_compared import both
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    LayerNorm,
    Normalize,
    Pooling,
    Transformer,
)
from sentence_transformers.util import quantize_embeddings

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


def test_width_of_concatenated_poolings_goes_through_the_modules(make_embedder):
    width = SIZES["hidden_size"]
    modules = [Pooling(width, pooling_mode=("mean", "max", "cls")), LayerNorm(3 * width)]
    modules += [Dense(3 * width, 7), Normalize(), Dense(7, 5, bias=False), LayerNorm(5)]
    model, runtime = make_embedder(*modules)
    assert abs(model[3].linear.bias).max() > 0.01
    for facts in runtime.info.manifest["sentence_modules"]:
        if facts["folder"].startswith("3"):
            del facts["bias"]  # which has the default True
    np.testing.assert_allclose(runtime.embed(MANY), model.encode(MANY), rtol=1e-4, atol=1e-5)
    runtime.info.manifest["sentence_modules"][0]["pooling_mode"] = "mean"
    del runtime.__dict__["sentence_modules"]
    with raises(ValueError, seen=f"({3 * width},)", expected=f"({width},)"):
        runtime.embed(["a"])


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


@pytest.mark.parametrize(
    "prompts, default",
    [
        ({"query": "the book : ", "document": "the house : "}, None),
        ({"query": "the book : "}, "query"),
        ({"document": "the house : ", "passage": "a man : "}, "passage"),
        ({"STS": "a man : "}, "STS"),
        ({}, None),
    ],
)
def test_queries_and_documents_get_their_prompts(make_embedder, prompts, default):
    model, runtime = make_embedder(
        Pooling(SIZES["hidden_size"]), prompts=prompts, default_prompt_name=default
    )
    options = [{}, {"truncate_dim": 5}, {"prompt": "two : "}]
    options += [{"prompt_name": default}] if default else []
    for name in ("encode_query", "encode_document"):
        for given in options:
            expected = getattr(model, name)(TEXTS, **given)
            got = getattr(runtime, name)(TEXTS, **given)
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    if "document" in prompts:
        assert abs(runtime.encode_document(TEXTS) - runtime.embed(TEXTS, prompt="")).max() > 1e-3


def test_prompt_of_passages_is_named_but_not_used(make_embedder):
    model, runtime = make_embedder(Pooling(SIZES["hidden_size"]), prompts={"passage": "a man : "})
    with pytest.warns(UserWarning) as caught:
        got = runtime.encode_document(TEXTS)
    check_message(str(caught[0].message), seen="passage", expected="document")
    np.testing.assert_allclose(got, model.encode_document(TEXTS), rtol=0, atol=1e-5)


def test_precisions_match_sentence_transformers(make_embedder):
    _, runtime = make_embedder(Pooling(SIZES["hidden_size"]), Normalize(), prompts=PROMPTS)
    vectors = runtime.embed(MANY)
    ranges = np.stack([vectors[2:].min(0), vectors[2:].max(0)])  # others are outside
    ranges[:, 3] = 0
    for precision in ("int8", "uint8", "binary", "ubinary", "float32"):
        needs = {"ranges": ranges} if precision in ("int8", "uint8") else {}
        expected = quantize_embeddings(vectors, precision, **needs)
        got = runtime.embed(MANY, precision=precision, **needs)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
        alone = runtime.embed(MANY[1:2], precision=precision, **needs)
        np.testing.assert_array_equal(alone, got[1:2])
    cut = runtime.encode_query(MANY, truncate_dim=13, precision="ubinary")
    expected = quantize_embeddings(runtime.encode_query(MANY)[:, :13], "ubinary")
    np.testing.assert_array_equal(cut, expected)
    lists = {"precision": "uint8", "ranges": ranges.tolist()}
    np.testing.assert_array_equal(
        runtime.encode_document(MANY, **lists), quantize_embeddings(vectors, "uint8", ranges)
    )


@pytest.mark.parametrize(
    "options, seen, expected",
    [
        ({"precision": "half"}, ("precision", "half"), ("int8", "ubinary")),
        ({"precision": 8}, ("precision", 8), "int8"),
        ({"precision": ["int8"]}, ("precision", "int8"), "binary"),
        ({"precision": "int8"}, ("ranges", None), "(2, E)"),
        ({"precision": "int8", "ranges": [[0.0], [0.0]]}, ("ranges", 1), 32),
        ({"precision": "uint8", "ranges": [1.0, 2.0]}, ("ranges", 1.0), "(2, E)"),
        ({"precision": "uint8", "ranges": [[0.0], ["a"]]}, ("ranges", "a"), "(2, E)"),
        ({"precision": "uint8", "ranges": [[1.0] * 32, [0.0] * 32]}, "ranges", "(2, E)"),
        ({"precision": "uint8", "ranges": [[0.0] * 32, [np.nan] * 32]}, "ranges", "(2, E)"),
        ({"precision": "binary", "ranges": [[0.0], [1.0]]}, ("ranges", "binary"), "int8"),
        ({"ranges": [[0.0], [1.0]]}, ("ranges", "float32"), "int8"),
    ],
    ids=str,
)
def test_wrong_precisions_raise(make_embedder, options, seen, expected):
    _, runtime = make_embedder(Pooling(SIZES["hidden_size"]))
    with raises(UsageError, seen=seen, expected=expected):
        runtime.embed(["a"], **options)


def test_files_keep_the_type_of_a_precision(make_embedder, tmp_path):
    _, runtime = make_embedder(Pooling(SIZES["hidden_size"]))
    table = pyarrow.table({"text": MANY})
    pyarrow.parquet.write_table(table, tmp_path / "texts.parquet")
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in MANY))
    directory = str(runtime.info.directory)
    expected = runtime.embed(MANY, precision="binary")
    for name in ("texts.parquet", "texts.txt"):
        arguments = ["--input", str(tmp_path / name), "--output", str(tmp_path / f"out {name}")]
        main(["predict", directory, *arguments, "--set", "precision=binary"])
    column = pyarrow.parquet.read_table(tmp_path / "out texts.parquet").column("embedding")
    assert column.type == pyarrow.list_(pyarrow.int8())
    np.testing.assert_array_equal(column.to_pylist(), expected)
    lines = (tmp_path / "out texts.txt").read_text().splitlines()
    np.testing.assert_array_equal([json.loads(line) for line in lines], expected)
    out = tmp_path / "wrong.parquet"
    arguments = ["--input", str(tmp_path / "texts.parquet"), "--output", str(out)]
    for wrong in ("precision=half", "precision=[]", "precision=int8"):
        with pytest.raises(SystemExit):
            main(["predict", directory, *arguments, "--set", wrong])
    assert not out.exists()


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
    with raises(ValueError, seen="'a text'", expected="embed"):
        runtime.similarity("a text", np.zeros(3))
