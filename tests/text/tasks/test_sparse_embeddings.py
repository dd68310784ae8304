"""Tests of sparse embeddings, against SparseEncoder of sentence-transformers."""

import json
import shutil

import httpx
import numpy as np
import onnx
import pytest
from checkpoints import edit_json
from command_line import main, read_json
from heads import MANY, TEXTS, save_family
from messages import check_message, raises
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
from served_models import serving
from transformers import AutoModelForMaskedLM

from vanilla_transformer.conversion import convert
from vanilla_transformer_export import TextRuntime, export
from vanilla_transformer_export.errors import UsageError

PROMPTS = {"query": "the book : "}
POOLINGS = [("max", "relu"), ("max", "log1p_relu"), ("sum", "relu")]
# absolute; the sum of 40 logits has 40 times the error of one, about 1e-6 in torch and here
ERROR = {"max": 1e-5, "sum": 4e-5}
FAMILIES = ("bert", "distilbert", "xlm-roberta", "modernbert")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that saves a SparseEncoder of a family and its export. It returns their folder."""
    made = {}

    def make(family, strategy="max", function="relu", **options):
        key = (family, strategy, function, *options.items())
        if key not in made:
            root = tmp_path_factory.mktemp("sparse")
            save_family(family, "ForMaskedLM", root / "base")
            modules = [
                MLMTransformer(str(root / "base"), max_seq_length=40),
                SpladePooling(pooling_strategy=strategy, activation_function=function),
            ]
            model = SparseEncoder(modules=modules, device="cpu", prompts=PROMPTS)
            model.save(str(root / "theirs"))
            export(root / "theirs", root / "export", cases=2, **options)
            made[key] = root
        return made[key]

    return make


def dense(vectors, size):
    """Return sparse vectors as an array (B, V)."""
    result = np.zeros((len(vectors), size), np.float32)
    for row, vector in zip(result, vectors, strict=True):
        indices = [entry["index"] for entry in vector]
        assert indices == sorted(set(indices)) and all(entry["value"] for entry in vector)
        row[indices] = [entry["value"] for entry in vector]
    return result


def check_equal(vectors, expected, strategy="max"):
    expected = expected.to_dense().numpy()
    assert expected.max() - expected.min() > 0.1
    got = dense(vectors, expected.shape[1])
    np.testing.assert_allclose(got, expected, rtol=0, atol=ERROR[strategy])


@pytest.mark.parametrize(
    "family, strategy, function",
    [("bert", *pooling) for pooling in POOLINGS]
    + [(family, *pooling) for family, pooling in zip(FAMILIES[1:], POOLINGS)],
)
def test_vectors_equal_sparse_encoder(saved, family, strategy, function):
    root = saved(family, strategy, function)
    model = SparseEncoder(str(root / "theirs"), device="cpu")
    runtime = TextRuntime(root / "export", threads=1)
    texts = [*MANY, " ", "the river " * 60]  # the last one is cut
    for options in ({}, {"prompt_name": "query"}, {"prompt": "two : "}, {"max_active_dims": 7}):
        expected = model.encode(texts, **options)
        check_equal(runtime.embed_sparse(texts, **options), expected, strategy)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_cpu_target_gives_the_same_bits_alone_and_in_a_batch(saved, strategy, dtype):
    root = saved("bert", strategy, target="cpu", dtype=dtype)
    runtime = TextRuntime(root / "export", threads=1)
    together = runtime.embed_sparse(MANY)
    assert [runtime.embed_sparse([text])[0] for text in MANY] == together
    if dtype == "fp32":
        expected = SparseEncoder(str(root / "theirs"), device="cpu").encode(MANY)
        check_equal(together, expected, strategy)


@pytest.mark.parametrize("size", [98, 105])
def test_vocabulary_of_any_size_gives_the_same_bits_in_a_batch(saved, tmp_path, size):
    root = shutil.copytree(saved("bert"), tmp_path / "bert")
    model = AutoModelForMaskedLM.from_pretrained(root / "theirs")
    model.resize_token_embeddings(size)
    model.save_pretrained(root / "theirs")
    export(root / "theirs", tmp_path / "export", target="cpu", cases=2)
    runtime = TextRuntime(tmp_path / "export", threads=1)
    texts = [f"{text} {number}" for text in MANY for number in range(10)]
    together = runtime.embed_sparse(texts)
    assert [runtime.embed_sparse([text])[0] for text in texts] == together
    expected = SparseEncoder(str(root / "theirs"), device="cpu").encode(texts)
    check_equal(together, expected)


def test_graph_returns_pooled_logits_only(saved):
    root = saved("bert")
    [output] = onnx.load(root / "export/onnx/model.onnx").graph.output
    assert output.name == "sentence_embedding"
    axes = [axis.dim_param or axis.dim_value for axis in output.type.tensor_type.shape.dim]
    config = json.loads((root / "export/config.json").read_text())
    assert axes == ["batch_size", config["vocab_size"]]
    main(["verify", str(root / "export"), str(root / "theirs"), "--cases", "5"])
    main(["certify", str(root / "export")])


def test_converted_checkpoint_is_the_same_model(saved, tmp_path):
    root = saved("distilbert")
    convert(root / "theirs", tmp_path / "ours")
    expected = SparseEncoder(str(root / "theirs"), device="cpu").encode(TEXTS)
    got = SparseEncoder(str(tmp_path / "ours"), device="cpu", trust_remote_code=True).encode(TEXTS)
    np.testing.assert_allclose(got.to_dense(), expected.to_dense(), rtol=0, atol=1e-5)
    export(tmp_path / "ours", tmp_path / "export", cases=1)
    check_equal(TextRuntime(tmp_path / "export", threads=1).embed_sparse(TEXTS), expected)


def test_files_of_older_versions_are_read(saved, tmp_path):
    shutil.copytree(saved("bert") / "theirs", tmp_path / "theirs")
    types = [
        {"idx": 0, "name": "0", "path": "", "type": f"{OLD}.MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": f"{OLD}.SpladePooling"},
    ]
    (tmp_path / "theirs/modules.json").write_text(json.dumps(types))
    path = tmp_path / "theirs/1_SpladePooling/config.json"
    path.write_text(json.dumps({"pooling_strategy": "max", "word_embedding_dimension": 3}))
    expected = SparseEncoder(str(tmp_path / "theirs"), device="cpu").encode(TEXTS)
    export(tmp_path / "theirs", tmp_path / "export", cases=1)
    check_equal(TextRuntime(tmp_path / "export", threads=1).embed_sparse(TEXTS), expected)


OLD = "sentence_transformers.sparse_encoder.models"


def test_facts_name_the_pooling(saved):
    facts = read_json("info", saved("bert", "sum") / "export", "--json")
    assert (facts["pooling_strategy"], facts["activation_function"]) == ("sum", "relu")
    assert facts["prompts"] == ["document", "query"] and facts["max_seq_length"] == 40
    assert facts["warnings"] == []


def test_command_writes_sparse_vectors(saved, tmp_path, capsys):
    root = saved("bert")
    expected = TextRuntime(root / "export", threads=1).embed_sparse(TEXTS, max_active_dims=3)
    capsys.readouterr()
    main(["predict", str(root / "export"), *TEXTS, "--set", "max_active_dims=3"])
    lines = capsys.readouterr().out.splitlines()
    for line, vector in zip(lines, expected, strict=True):
        assert [each["index"] for each in json.loads(line)] == [each["index"] for each in vector]


def test_endpoint_is_that_of_text_embeddings_inference(saved):
    root = saved("bert")
    model = SparseEncoder(str(root / "theirs"), device="cpu")
    with serving({"it": TextRuntime(root / "export", threads=1)}) as server:

        def post(path, **body):
            return httpx.post(f"{server.url}{path}", json=body, timeout=60)

        for path in ("/embed_sparse", "/", "/models/it/embed_sparse"):
            check_equal(post(path, inputs=MANY).json(), model.encode(MANY))
        check_equal(post("/embed_sparse", inputs=TEXTS[0]).json(), model.encode(TEXTS[:1]))
        ids = model.tokenizer(TEXTS)["input_ids"]
        check_equal(post("/embed_sparse", inputs=ids).json(), model.encode(TEXTS))
        query = model.encode_query(TEXTS)
        check_equal(post("/embed_sparse", inputs=TEXTS, prompt_name="query").json(), query)
        long = "the river " * 60
        check_equal(post("/embed_sparse", inputs=long).json(), model.encode([long]))
        assert post("/embed_sparse", inputs=long, truncate=False).status_code == 413
        assert post("/embed", inputs="a").status_code == 424
        assert post("/v1/embeddings", input="a").status_code == 400
        info = httpx.get(f"{server.url}/info").json()
        assert info["model_type"] == {"embedding": {"pooling": "splade"}}
        assert info["max_input_length"] == 40 and info["pooling_strategy"] == "max"
        tensor = {"name": "text", "shape": [2], "datatype": "BYTES", "data": TEXTS[:2]}
        [output] = post("/v2/models/it/infer", inputs=[tensor]).json()["outputs"]
        got = np.reshape(output["data"], output["shape"])
        np.testing.assert_allclose(got, model.encode(TEXTS[:2]).to_dense(), rtol=0, atol=1e-5)


def test_model_without_the_head_is_rejected(tmp_path):
    save_family("bert", "ForMaskedLM", tmp_path / "model")
    export(tmp_path / "model", tmp_path / "export", cases=1)
    runtime = TextRuntime(tmp_path / "export", threads=1)
    with raises(
        ValueError, seen="VanillaEncoderForMaskedLM", expected="VanillaEncoderForSparseEmbedding"
    ):
        runtime.embed_sparse(["a"])
    with serving({"it": runtime}) as server:
        answer = httpx.post(f"{server.url}/embed_sparse", json={"inputs": "a"})
    assert answer.status_code == 424
    check_message(answer.json()["error"], seen="it", expected="sparse")


@pytest.mark.parametrize(
    "options, seen, expected",
    [
        ({"max_active_dims": 0}, ("max_active_dims", 0), 1),
        ({"max_active_dims": "3"}, ("max_active_dims", "3"), 1),
        ({"prompt_name": "passage"}, "passage", "query"),
    ],
)
def test_wrong_options_raise(saved, options, seen, expected):
    with raises(UsageError, seen=seen, expected=expected):
        TextRuntime(saved("bert") / "export", threads=1).embed_sparse(["a"], **options)


@pytest.mark.parametrize(
    "config, rest, seen, expected",
    [
        ({"pooling_strategy": "mean"}, [], ("pooling_strategy", "mean"), ("max", "sum")),
        ({"activation_function": "gelu"}, [], "gelu", ("relu", "log1p_relu")),
        ({}, ["Normalize"], "Normalize", "SpladePooling"),
        ({}, ["SparseAutoEncoder"], "SparseAutoEncoder", "SpladePooling"),
    ],
)
def test_wrong_modules_raise_before_files_are_written(
    saved, tmp_path, config, rest, seen, expected
):
    shutil.copytree(saved("bert") / "theirs", tmp_path / "theirs")
    edit_json(tmp_path / "theirs/1_SpladePooling/config.json", **config)
    path = tmp_path / "theirs/modules.json"
    types = [f"sentence_transformers.models.{name}" for name in rest]
    modules = json.loads(path.read_text())
    modules += [{"idx": 2, "name": "2", "path": "2_Other", "type": name} for name in types]
    path.write_text(json.dumps(modules))
    with raises(ValueError, seen=seen, expected=expected):
        export(tmp_path / "theirs", tmp_path / "export", cases=1)
    assert not (tmp_path / "export").exists()


def test_model_without_projection_to_the_vocabulary_is_rejected(saved, tmp_path):
    shutil.copytree(saved("bert") / "theirs", tmp_path / "theirs")
    edit_json(tmp_path / "theirs/config.json", architectures=["BertModel"])
    with raises(ValueError, seen="VanillaEncoderModel", expected="VanillaEncoderForMaskedLM"):
        export(tmp_path / "theirs", tmp_path / "export", cases=1)
    assert not (tmp_path / "export").exists()
