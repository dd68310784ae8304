"""Tests of sentence-transformers' modules in checkpoints and exports: embeddings stay the same."""

import json
import shutil

import numpy as np
import pytest
import torch
from checkpoints import edit_json, seal
from command_line import main
from messages import check_message, raises
from random_prompts import pad_rows
from safetensors.torch import load_file, save_file
from sentence_models import LONGEST, TEXTS, embedder
from sentence_transformers import CrossEncoder, SentenceTransformer

from vanilla_transformer.conversion import convert
from vanilla_transformer.training.averaging import average
from vanilla_transformer_export import Runtime, export, load_checkpoint, verify


def embeddings(directory):
    """Return the embeddings of `TEXTS` with each prompt."""
    model = SentenceTransformer(str(directory), device="cpu")
    return np.stack([model.encode(TEXTS, prompt_name=name) for name in ("query", "document")])


@pytest.mark.parametrize(
    "pooling, rest",
    [
        ("mean", ()),
        ("cls", ("dense",)),
        ("max", ("normalize",)),
        ("mean", ("dense", "normalize")),
        ("cls", ("normalize",)),
        ("max", ("dense",)),
    ],
)
def test_conversion_keeps_embeddings(base, pooling, rest, tmp_path):
    model = embedder(base(), pooling, rest)
    model.save(str(tmp_path / "theirs"))
    expected = np.stack([model.encode(TEXTS, prompt_name=name) for name in ("query", "document")])
    result = convert(tmp_path / "theirs", tmp_path / "ours")
    assert result["modules"] == ["Pooling", *(name.capitalize() for name in rest)]
    np.testing.assert_allclose(embeddings(tmp_path / "ours"), expected, rtol=1e-5, atol=1e-5)
    assert not np.allclose(expected[0], expected[1], atol=1e-2)  # the prompt matters
    assert SentenceTransformer(str(tmp_path / "ours"), device="cpu").max_seq_length == LONGEST
    convert(tmp_path / "ours", tmp_path / "back", to="bert")
    np.testing.assert_allclose(embeddings(tmp_path / "back"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "family, name",
    [
        ("roberta", "RobertaModel"),
        ("distilbert", "DistilBertModel"),
        ("xlm-roberta", "XLMRobertaModel"),  # as multilingual-e5 and bge-m3
        ("mpnet", "MPNetModel"),
        ("t5", "T5EncoderModel"),  # as sentence-t5
    ],
)
def test_other_families_with_prompt_excluded_from_pooling_keep_embeddings(
    base, family, name, tmp_path
):
    # pad_token_id is that of the tokenizer
    model = embedder(base(name, family, pad_token_id=0), include_prompt=False)
    model.save(str(tmp_path / "theirs"))
    convert(tmp_path / "theirs", tmp_path / "ours")
    expected = embeddings(tmp_path / "theirs")
    assert not np.allclose(expected[0], expected[1], atol=1e-2)  # the prompt matters
    np.testing.assert_allclose(embeddings(tmp_path / "ours"), expected, rtol=1e-5, atol=1e-5)


def test_layout_of_older_versions_is_converted(saved, tmp_path):
    """Most checkpoints on the Hub have this layout.

    Classes, poolings and the length have other names, Dense is a pickle, and modules without
    weights have no folder.
    """
    expected = embeddings(saved)
    modules = json.loads((saved / "modules.json").read_text())
    for module in modules:
        module["type"] = "sentence_transformers.models." + module["type"].rpartition(".")[2]
    (saved / "modules.json").write_text(json.dumps(modules))
    modes = {
        f"pooling_mode_{name}": name == "mean_tokens"
        for name in ("cls_token", "mean_tokens", "max_tokens")
    }
    width = json.loads((saved / "config.json").read_text())["hidden_size"]
    (saved / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": width, **modes})
    )
    torch.save(
        load_file(saved / "2_Dense" / "model.safetensors"), saved / "2_Dense" / "pytorch_model.bin"
    )
    (saved / "2_Dense" / "model.safetensors").unlink()
    shutil.rmtree(saved / "3_Normalize")
    (saved / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": LONGEST, "do_lower_case": False})
    )
    edit_json(saved / "tokenizer_config.json", model_max_length=512)
    convert(saved, tmp_path / "ours")
    assert {file.name for file in (tmp_path / "ours" / "2_Dense").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    np.testing.assert_allclose(embeddings(saved), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(embeddings(tmp_path / "ours"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "activation", ["torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"]
)
@pytest.mark.parametrize(
    "place", ["config_sentence_transformers.json", "config.json", "config.json of old"]
)
def test_cross_encoder_keeps_activation(base, activation, place, tmp_path):
    directory, _ = base(
        "BertForSequenceClassification",
        type_vocab_size=2,
        id2label={0: "LABEL_0"},
        label2id={"LABEL_0": 0},
    )
    name = activation.rpartition(".")[2]
    model = CrossEncoder(directory, device="cpu", activation_fn=getattr(torch.nn, name)())
    model.save_pretrained(str(tmp_path / "theirs"))
    if place != "config_sentence_transformers.json":
        for file in (
            "modules.json",
            "config_sentence_transformers.json",
            "sentence_bert_config.json",
        ):
            (tmp_path / "theirs" / file).unlink()
        keys = {"sentence_transformers": {"activation_fn": activation}}
        keys = {"sbert_ce_default_activation_function": activation} if "old" in place else keys
        edit_json(tmp_path / "theirs" / "config.json", **keys)
    pairs = [("two dogs", "the old man"), ("a red house", "the book")]
    expected = CrossEncoder(str(tmp_path / "theirs"), device="cpu").predict(pairs)
    np.testing.assert_allclose(expected, model.predict(pairs), rtol=1e-6)
    convert(tmp_path / "theirs", tmp_path / "ours")
    actual = CrossEncoder(str(tmp_path / "ours"), device="cpu").predict(pairs)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------- export and average


def embed_by_manifest(directory, ids, mask):
    """Return embeddings: onnxruntime's outputs after the modules of the manifest, in numpy."""
    result = Runtime(directory).encode(ids, mask)
    for module in json.loads((directory / "manifest.json").read_text())["sentence_modules"]:
        if module["type"] == "Pooling":
            real = mask[:, :, None]
            result = {
                "mean": (result * real).sum(1) / real.sum(1),
                "cls": result[:, 0],
                "max": np.where(real, result, -np.inf).max(1),
            }[module["pooling_mode"]]
        elif module["type"] == "Dense":
            weights = load_file(directory / "2_Dense" / "model.safetensors")
            assert module["activation_function"].endswith(".Tanh")
            result = np.tanh(
                result @ weights["linear.weight"].numpy().T + weights["linear.bias"].numpy()
            )
        else:
            assert module["type"] == "Normalize"
            result = result / np.linalg.norm(result, axis=1, keepdims=True)
    return result


OTHERS = [pytest.param(pooling, marks=pytest.mark.slow) for pooling in ("cls", "max")]


@pytest.mark.parametrize("pooling", ["mean", *OTHERS])
def test_export_lists_and_copies_sentence_modules(base, pooling, tmp_path):
    model = embedder(base(), pooling)
    model.save(str(tmp_path / "theirs"))
    convert(tmp_path / "theirs", tmp_path / "ours")
    manifest = export(tmp_path / "ours", tmp_path / "onnx", cases=2)
    assert [module["type"] for module in manifest["sentence_modules"]] == [
        "Pooling",
        "Dense",
        "Normalize",
    ]
    for name in (
        "modules.json",
        "config_sentence_transformers.json",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
    ):
        assert (tmp_path / "onnx" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
        assert name in manifest["files"]
    encoded = [
        model.tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"] for text in TEXTS
    ]
    result = embed_by_manifest(tmp_path / "onnx", *pad_rows(encoded, pad=0))
    np.testing.assert_allclose(result, model.encode(TEXTS), rtol=1e-4, atol=1e-5)


def change_weight(directory):
    path = directory / "2_Dense" / "model.safetensors"
    weights = load_file(path)
    weights["linear.weight"][-1, 2] += 0.01
    save_file(weights, path)


def change_manifest(directory, number, **fields):
    modules = json.loads((directory / "manifest.json").read_text())["sentence_modules"]
    modules[number] |= fields
    edit_json(directory / "manifest.json", sentence_modules=modules)


FAULTS = {
    "weight": change_weight,
    "activation": lambda directory: change_manifest(
        directory, 1, activation_function="torch.nn.Identity"
    ),
    "pooling": lambda directory: change_manifest(directory, 0, pooling_mode="max"),
}


def test_fault_of_a_module_is_found(base, tmp_path):
    """The graph is right, and so are the hashes."""
    embedder(base()).save(str(tmp_path / "theirs"))
    weights = tmp_path / "theirs" / "2_Dense" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    export(tmp_path / "theirs", tmp_path / "onnx", target="cpu", dtype="int8", cases=1)
    model = load_checkpoint(tmp_path / "theirs")
    assert verify(tmp_path / "onnx", model, cases=1).failures == []
    for name, fault in FAULTS.items():
        directory = shutil.copytree(tmp_path / "onnx", tmp_path / name)
        fault(directory)
        seal(directory)
        with pytest.raises(SystemExit) as end:
            main(["certify", str(directory)])
        assert str(end.value) == f"{directory} is not certified: int8 vectors"
        [failure] = verify(directory, model, cases=1).failures
        check_message(failure, seen="vectors", expected="5e-05")


def test_export_of_checkpoint_without_modules_lists_none(base, tmp_path):
    convert(base()[0], tmp_path / "ours")
    assert export(tmp_path / "ours", tmp_path / "onnx", cases=2)["sentence_modules"] == []


def test_module_weights_are_averaged(saved, tmp_path):
    convert(saved, tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    dense = load_file(tmp_path / "first" / "2_Dense" / "model.safetensors")
    other = {name: tensor + torch.randn_like(tensor) for name, tensor in dense.items()}
    save_file(other, tmp_path / "second" / "2_Dense" / "model.safetensors")
    average([tmp_path / "first", tmp_path / "second"], tmp_path / "mean")
    result = load_file(tmp_path / "mean" / "2_Dense" / "model.safetensors")
    for name, tensor in dense.items():
        torch.testing.assert_close(
            result[name], ((tensor.double() + other[name].double()) / 2).float(), rtol=0, atol=0
        )
    assert embeddings(tmp_path / "mean").shape == (2, 3, 8)
    average([tmp_path / "first"], tmp_path / "same")
    np.testing.assert_array_equal(embeddings(tmp_path / "same"), embeddings(tmp_path / "first"))


def test_average_of_different_modules_is_rejected(saved, tmp_path):
    convert(saved, tmp_path / "first")
    for name, change, seen, expected in (
        (
            "pooling",
            lambda path: edit_json(path / "1_Pooling" / "config.json", pooling_mode="cls"),
            ("pooling_mode", "cls"),
            (),
        ),
        (
            "prompt",
            lambda path: edit_json(path / "config_sentence_transformers.json", prompts={}),
            "prompts",
            (),
        ),
        ("none", lambda path: (path / "modules.json").unlink(), "[]", ("Pooling", "Dense")),
        ("pickle", pickle_dense, "pickle/2_Dense/model.safetensors", "first/2_Dense"),
    ):
        shutil.copytree(tmp_path / "first", tmp_path / name)
        change(tmp_path / name)
        with raises(ValueError, seen=seen, expected=expected):
            average([tmp_path / "first", tmp_path / name], tmp_path / "mean")
        assert not (tmp_path / "mean").exists()


def pickle_dense(checkpoint):
    """Rename the weights of the Dense module as if they were pickled."""
    weights = checkpoint / "2_Dense" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))


def test_average_of_pickled_modules_is_rejected(saved, tmp_path):
    convert(saved, tmp_path / "first")
    pickle_dense(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    with raises(ValueError, seen="second/2_Dense/pytorch_model.bin", expected="safetensors"):
        average([tmp_path / "first", tmp_path / "second"], tmp_path / "mean")


@pytest.mark.parametrize(
    "tensors", [{"other": (8, 8)}, {"linear.weight": (3, 3), "linear.bias": (8,)}], ids=str
)
def test_average_of_modules_with_different_tensors_is_rejected(saved, tmp_path, tensors):
    convert(saved, tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    weights = tmp_path / "second" / "2_Dense" / "model.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, weights)
    with raises(ValueError, seen="second/2_Dense/model.safetensors", expected="first/2_Dense"):
        average([tmp_path / "first", tmp_path / "second"], tmp_path / "mean")
    weights.write_bytes(b"no tensors")
    with raises(ValueError, seen="second/2_Dense/model.safetensors"):
        average([tmp_path / "first", tmp_path / "second"], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
