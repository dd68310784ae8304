"""Tests of sparse and multi-vector embeddings of BGE-M3, against its formulas in float64."""

import functools
import json
import os
import shutil

import httpx
import numpy as np
import pytest
import torch
from checkpoints import copy_folder, seal
from command_line import main, read_json
from families import random_config, random_model
from heads import MANY, TEXTS, save_head, word_pieces
from messages import raises
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from served_models import serving
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer, XLMRobertaTokenizer

from vanilla_transformer.conversion import convert
from vanilla_transformer_export import TextRuntime, export, load_checkpoint, verify
from vanilla_transformer_export.ort_models import ORTModelForFeatureExtraction

LONGEST = 40  # tokens
LONG = "the river " * 60
ROWS = [
    *MANY,
    "",
    "dog dog dog xyz",
    LONG,
]  # special tokens only; an unknown token; one that is cut
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
WORDS = {word for text in [*MANY, LONG, "dog"] for word in text.split()}
FILES = ("sparse_linear.pt", "colbert_linear.pt")


def save_m3(folder):
    """Save a random checkpoint with the files of BGE-M3, whose heads are in float16."""
    vocab = [*SPECIAL, "<mask>", "▁", *(f"▁{word}" for word in sorted(WORDS - {"Zürich"}))]
    tokenizer = XLMRobertaTokenizer(vocab=[(token, -1.0) for token in vocab])
    config = random_config("xlm-roberta", "XLMRobertaModel", 0)
    config.update({"vocab_size": len(vocab), "max_position_embeddings": 64, "pad_token_id": 1})
    random_model("XLMRobertaModel", config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    width = config.hidden_size
    modules = [Transformer(str(folder / "base"), max_seq_length=LONGEST)]
    modules += [Pooling(width, pooling_mode="cls"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "theirs"))
    torch.manual_seed(0)
    for name, size in zip(FILES, (1, width), strict=True):
        head = torch.nn.Linear(width, size).half()
        torch.nn.init.constant_(head.bias, 0.2)  # most tokens have a weight
        torch.save(head.state_dict(), folder / "theirs" / name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that exports a checkpoint of BGE-M3. It returns the folder of both."""
    root = tmp_path_factory.mktemp("m3")
    save_m3(root)

    def make(**options):
        name = "-".join(["export", *options.values()])
        if not (root / name).exists():
            export(root / "theirs", root / name, cases=2, **options)
        return TextRuntime(root / name, threads=1)

    make.root = root
    return make


@pytest.fixture
def theirs(saved, tmp_path):
    """A copy of the checkpoint."""
    return shutil.copytree(saved.root / "theirs", tmp_path / "theirs")


@functools.cache
def torch_parts(checkpoint):
    """Return the tokenizer, the model and the two heads in float64."""
    heads = [torch.load(checkpoint / name) for name in FILES]
    return (
        AutoTokenizer.from_pretrained(checkpoint),
        AutoModel.from_pretrained(checkpoint).double().eval(),
        *({key: tensor.double() for key, tensor in head.items()} for head in heads),
    )


def formulas(checkpoint, text):
    """Return the weights by token id and the vectors of a text, computed in float64."""
    tokenizer, model, sparse, colbert = torch_parts(checkpoint)
    inputs = tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")
    with torch.no_grad():
        states = model(**inputs).last_hidden_state[0]
    weights = torch.relu(states @ sparse["weight"].T + sparse["bias"])[:, 0]
    unused = tokenizer.convert_tokens_to_ids(SPECIAL)
    by_id = {}
    for id, weight in zip(inputs["input_ids"][0].tolist(), weights.tolist(), strict=True):
        if id not in unused and weight > 0:
            by_id[id] = max(weight, by_id.get(id, 0.0))
    vectors = states[1:] @ colbert["weight"].T + colbert["bias"]
    return by_id, normalize(vectors, dim=-1).numpy()


def check_sparse(vectors, checkpoint, texts=ROWS, error=1e-5):
    for text, vector in zip(texts, vectors, strict=True):
        expected, _ = formulas(checkpoint, text)
        got = {entry["index"]: entry["value"] for entry in vector}
        assert list(got) == sorted(expected)
        assert got == pytest.approx(expected, rel=0, abs=error)


def check_vectors(vectors, checkpoint, texts=ROWS, error=1e-5):
    for text, got in zip(texts, vectors, strict=True):
        _, expected = formulas(checkpoint, text)
        assert np.shape(got) == expected.shape
        np.testing.assert_allclose(got, expected, rtol=0, atol=error)


@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_embeddings_equal_the_formulas(saved, target):
    runtime, checkpoint = saved(target=target), saved.root / "theirs"
    sparse, vectors = runtime.embed_sparse(ROWS), runtime.embed_multi_vector(ROWS)
    check_sparse(sparse, checkpoint)
    check_vectors(vectors, checkpoint)
    assert sum(map(len, sparse)) > 2 * len(ROWS) and sparse[ROWS.index("")] == []
    assert all(array.dtype == np.float32 for array in vectors)
    assert len(vectors[ROWS.index("")]) == 1 and len(vectors[-1]) == LONGEST - 1
    dense = SentenceTransformer(str(checkpoint), device="cpu").encode(ROWS)
    np.testing.assert_allclose(runtime.embed(ROWS), dense, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_cpu_target_gives_the_same_bits_alone_and_in_a_batch(saved, dtype):
    runtime = saved(target="cpu", dtype=dtype)
    assert [runtime.embed_sparse([text])[0] for text in ROWS] == runtime.embed_sparse(ROWS)
    for text, vectors in zip(ROWS, runtime.embed_multi_vector(ROWS), strict=True):
        assert np.array_equal(runtime.embed_multi_vector([text])[0], vectors)


@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_int8_is_near_the_formulas(saved, target):
    vectors = saved(target=target, dtype="int8").embed_multi_vector(MANY)
    for text, got in zip(MANY, vectors, strict=True):
        cosines = (got * formulas(saved.root / "theirs", text)[1]).sum(axis=1)
        assert cosines.mean() > 0.98


def test_heads_are_no_part_of_the_graph(saved):
    runtime = saved(target="portable")
    manifest = runtime.info.manifest
    assert {"sparse_linear.safetensors", "colbert_linear.safetensors"} <= manifest["files"].keys()
    outputs = [tensor.name for tensor in runtime.info.specs["encoder"].outputs]
    assert outputs == ["last_hidden_state", "pooler_output"]
    main(["verify", str(runtime.info.directory), str(saved.root / "theirs"), "--cases", "5"])
    main(["certify", str(runtime.info.directory)])


@pytest.mark.parametrize("name", ["sparse_linear", "colbert_linear"])
def test_wrong_weight_of_a_head_is_found(saved, tmp_path, name, capsys):
    """The hashes are right: only what the head computes reveals it. An export from before has no
    vectors to compare with, and says so."""
    source = saved(target="cpu", dtype="int8").info.directory
    main(["certify", str(source)])
    directory = copy_folder(source, tmp_path)
    weights = load_file(directory / f"{name}.safetensors")
    weights["weight"][-1, 4] += 0.01
    save_file(weights, directory / f"{name}.safetensors")
    seal(directory)
    with pytest.raises(SystemExit) as end:
        main(["certify", str(directory)])
    assert str(end.value) == f"{directory} is not certified: int8 vectors"
    model = load_checkpoint(saved.root / "theirs")
    [failure] = verify(directory, model, cases=2).failures
    assert "reference, vectors: token_" in failure
    with np.load(directory / "reference.npz") as file:
        arrays = {key: file[key] for key in file if not key.endswith(("vector", "token_weights"))}
    np.savez(directory / "reference.npz", **arrays)
    seal(directory)
    capsys.readouterr()
    main(["certify", str(directory)])
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warn")]
    assert line.startswith("warn   int8 vectors: ") and "export again" in line


def test_optimum_classes_keep_the_heads(saved, tmp_path):
    theirs = saved.root / "theirs"
    model = ORTModelForFeatureExtraction.from_pretrained(theirs, export=True)
    model.save_pretrained(tmp_path / "export")
    check_sparse(TextRuntime(tmp_path / "export", threads=1).embed_sparse(ROWS), theirs)


def test_options_select_prompts_and_values(saved):
    runtime = saved(target="portable")
    checkpoint = saved.root / "theirs"
    [vector] = runtime.embed_sparse(TEXTS[:1], max_active_dims=2)
    expected = sorted(formulas(checkpoint, TEXTS[0])[0].values())[-2:]
    assert sorted(entry["value"] for entry in vector) == pytest.approx(expected, abs=1e-5)
    check_sparse(runtime.embed_sparse(["man"], prompt="two "), checkpoint, ["two man"])
    check_vectors(runtime.embed_multi_vector(["man"], prompt="two "), checkpoint, ["two man"])


def test_conversion_and_the_way_back_keep_the_heads(saved, tmp_path):
    theirs = saved.root / "theirs"
    convert(theirs, tmp_path / "ours")
    assert not list((tmp_path / "ours").glob("*.pt"))
    export(tmp_path / "ours", tmp_path / "export", cases=1)
    check_sparse(TextRuntime(tmp_path / "export", threads=1).embed_sparse(ROWS), theirs)
    convert(tmp_path / "ours", tmp_path / "back", to="xlm-roberta")
    for name in FILES:
        expected, got = (torch.load(folder / name) for folder in (theirs, tmp_path / "back"))
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[key], expected[key]) for key in expected)
    for name, source in {"ours": theirs, "back": tmp_path / "ours", "export": theirs}.items():
        options = {"to": "xlm-roberta"} if name == "back" else {}
        write = export if name == "export" else convert
        write(source, tmp_path / name, force=True, **options)  # the files are ours to replace


def test_safetensors_beside_pickles_count(saved, theirs, tmp_path):
    convert(theirs, tmp_path / "ours")
    for head in ("sparse_linear", "colbert_linear"):
        shutil.copy(tmp_path / "ours" / f"{head}.safetensors", theirs)
        (theirs / f"{head}.pt").write_bytes(b"damaged")
    export(theirs, tmp_path / "export", cases=1)
    got = TextRuntime(tmp_path / "export", threads=1).embed_sparse(ROWS)
    check_sparse(got, saved.root / "theirs")


def test_facts_are_those_of_dense_and_sparse_vectors(saved):
    facts = read_json("info", saved(target="portable").info.directory, "--json")
    assert facts["pooling"] == ["cls"] and facts["similarity"] == "cosine"
    assert facts["max_active_dims"] is None and facts["max_seq_length"] == LONGEST
    assert facts["warnings"] == []


def test_command_writes_all_three(saved, capsys):
    runtime = saved(target="portable")
    for task, method in {
        "embed": runtime.embed,
        "embed-sparse": runtime.embed_sparse,
        "embed-multi-vector": runtime.embed_multi_vector,
    }.items():
        capsys.readouterr()
        main(["predict", str(runtime.info.directory), *TEXTS, "--task", task])
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        for line, expected in zip(lines, method(TEXTS), strict=True):
            if task == "embed-sparse":
                assert line == expected
            else:
                np.testing.assert_allclose(line, expected, rtol=0, atol=1e-6)


def test_endpoints_return_all_three(saved):
    runtime, checkpoint = saved(target="cpu"), saved.root / "theirs"
    with serving({"it": runtime}) as server:

        def post(path, **body):
            answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            return answer.json()

        texts = [text for text in ROWS if text]
        check_sparse(post("/embed_sparse", inputs=texts), checkpoint, texts)
        check_vectors(post("/predict/multi-vector", inputs=ROWS), checkpoint)
        for path in ("/embed", "/"):
            np.testing.assert_allclose(post(path, inputs=TEXTS), runtime.embed(TEXTS), atol=1e-6)
        info = httpx.get(f"{server.url}/info").json()
        assert info["model_type"] == {"embedding": {"pooling": "cls"}}


class Payload:
    def __reduce__(self):
        return (os.mkdir, ("payload-ran",))


@pytest.mark.parametrize(
    "content, seen, expected",
    [
        ({"weight": Payload()}, "sparse_linear.pt", "weights_only"),
        ([torch.zeros(2)], ("sparse_linear.pt", "list"), "state dict"),
        ({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}, "(1, 3)", "18)"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, "(2, 3)", "18)"),
        ({"weight": torch.zeros(1, 18), "bias": torch.tensor(0.0)}, "()", "(1,)"),
        ({"weight": torch.zeros(1, 3)}, "weight", "bias"),
        ({"weight": torch.zeros(1, 18), "bias": torch.tensor([torch.nan])}, "finite", "numbers"),
    ],
    ids=["code", "list", "width", "size", "number", "no bias", "no number"],
)
def test_wrong_weights_raise_before_files_are_written(
    theirs, tmp_path, monkeypatch, content, seen, expected
):
    monkeypatch.chdir(tmp_path)
    torch.save(content, theirs / "sparse_linear.pt")
    with raises(ValueError, seen=("sparse_linear", seen), expected=expected):
        export(theirs, tmp_path / "export", cases=1)
    assert not (tmp_path / "payload-ran").exists() and not (tmp_path / "export").exists()


@pytest.mark.parametrize("name", FILES)
def test_missing_head_raises(theirs, tmp_path, name):
    (theirs / name).unlink()
    [other] = {*FILES} - {name}
    for write in (convert, export):
        with raises(FileNotFoundError, seen=other, expected=name):
            write(theirs, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_heads_of_another_class_raise(theirs, tmp_path):
    save_head("VanillaEncoderForMaskedLM", word_pieces(), tmp_path / "masked")
    for name in FILES:
        shutil.copy(theirs / name, tmp_path / "masked")
    with raises(ValueError, seen="VanillaEncoderForMaskedLM", expected="VanillaEncoderModel"):
        export(tmp_path / "masked", tmp_path / "out", cases=1)


def test_encoder_without_heads_has_no_such_task(theirs, tmp_path):
    for name in FILES:
        (theirs / name).unlink()
    export(theirs, tmp_path / "export", cases=1)
    runtime = TextRuntime(tmp_path / "export", threads=1)
    for method in (runtime.embed_sparse, runtime.embed_multi_vector):
        with raises(ValueError, seen="VanillaEncoderModel", expected="VanillaEncoderM3Model"):
            method(TEXTS)
