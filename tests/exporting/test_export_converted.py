"""Export, info and load_checkpoint convert checkpoints of other families, and leave no temporary
files."""

import hashlib
import json
import tempfile
from pathlib import Path

import huggingface_hub
import numpy as np
import onnx_ir as ir
import pytest
import torch
from checkpoints import default_graphs
from command_line import main, read_error, read_json
from families import random_config, random_model
from messages import check_message, raises
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from vanilla_transformer.checkpoint_files import FILES
from vanilla_transformer.conversion import conversion_plan, convert
from vanilla_transformer.errors import UsageError
from vanilla_transformer_export import Runtime, export, load_checkpoint
from vanilla_transformer_export.engine.batch import batch_request
from vanilla_transformer_export.engine.groups import Group

WORDS = ["[PAD]", "[UNK]", "a", "bird", "sings"]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Directory and model of a BERT with a tokenizer and pickled weights, as in old checkpoints."""
    directory = tmp_path_factory.mktemp("theirs") / "tiny-bert"
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=8,
        intermediate_size=12,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=20,
    )
    model = BertForMaskedLM(BertConfig(vocab_size=len(WORDS), **sizes))
    model.config.save_pretrained(directory)
    torch.save(
        {name: tensor for name, tensor in model.state_dict().items()},
        directory / "pytorch_model.bin",
    )
    words = Tokenizer(
        WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(directory)
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(content | {"architectures": ["BertForMaskedLM"]})
    )
    return directory, model.eval()


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The directory in which temporary directories are created."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_hub_id_is_looked_up_twice(theirs, tmp_path, monkeypatch):
    """config.json is downloaded first, then all other files of the same commit; each export opens
    its source once."""
    downloads = []

    def download(hub_id, allow_patterns, ignore_patterns, revision=None):
        directory = theirs[0] if hub_id == "someone/bert" else tmp_path / "ours"
        assert revision == (directory.name if downloads else None)
        downloads.append(allow_patterns)
        return str(directory)

    with monkeypatch.context() as patch:
        convert(theirs[0], tmp_path / "ours")
        patch.setattr(huggingface_hub, "snapshot_download", download)
        export("someone/ours", tmp_path / "ours-export", cases=1)
        assert downloads == [["config.json"], list(FILES)]
        downloads.clear()
        export("someone/bert", tmp_path / "bert-export", cases=1)
    # the weights of this BERT are pickled
    assert downloads == [["config.json"], list(FILES), ["pytorch_model*.bin"]]


def test_export_converts_checkpoint(theirs, temporary, tmp_path):
    directory, model = theirs
    manifest = export(directory, tmp_path / "out")
    assert manifest["architecture"] == "VanillaEncoderForMaskedLM"
    assert list(temporary.iterdir()) == []
    ids = np.array([[2, 3, 4], [3, 4, 0]])
    mask = np.array([[1, 1, 1], [1, 1, 0]])
    [logits] = Runtime(tmp_path / "out").outputs(ids, mask).values()
    expected = model(torch.from_numpy(ids), torch.from_numpy(mask)).logits.detach().numpy()
    assert np.abs(logits - expected)[mask == 1].max() < 1e-5
    assert "tiny-bert" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_keep_saves_converted_checkpoint(theirs, temporary, tmp_path, capsys):
    directory, _ = theirs
    (tmp_path / "words.txt").write_text("a bird")
    main(["export", str(directory), str(tmp_path / "out"), "--keep", str(tmp_path / "kept")])
    convert(directory, tmp_path / "by hand")
    kept, by_hand = (tmp_path / name / "model.safetensors" for name in ("kept", "by hand"))
    assert (
        hashlib.sha256(kept.read_bytes()).digest() == hashlib.sha256(by_hand.read_bytes()).digest()
    )
    with raises(FileExistsError, seen="kept"):
        export(directory, tmp_path / "again", keep=tmp_path / "kept")
    assert not (tmp_path / "again").exists()


def test_keep_is_rejected_without_conversion(theirs, tmp_path):
    convert(theirs[0], tmp_path / "ours")
    with raises(UsageError, seen=("keep", "kept", "ours")):
        export(tmp_path / "ours", tmp_path / "out", keep=tmp_path / "kept")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


def test_insufficient_disk_space_raises_before_files_are_written(
    theirs, temporary, tmp_path, monkeypatch
):
    directory, _ = theirs

    class Full:
        free = 1000

    monkeypatch.setattr(conversion_plan.shutil, "disk_usage", lambda path: Full)
    with raises(OSError, seen=("0.0", "MB"), expected=("0.0", "MB")):
        export(directory, tmp_path / "out")
    assert not (tmp_path / "out").exists() and list(temporary.iterdir()) == []


def test_info_and_model_match_converted_checkpoint(theirs, temporary, tmp_path):
    directory, _ = theirs
    convert(directory, tmp_path / "ours")
    facts = [read_json("info", path, "--json") for path in (directory, tmp_path / "ours")]
    assert facts[0] == facts[1]
    actual, expected = (
        load_checkpoint(directory).state_dict(),
        load_checkpoint(tmp_path / "ours").state_dict(),
    )
    assert actual.keys() == expected.keys() and all(
        torch.equal(actual[name], expected[name]) for name in actual
    )
    assert list(temporary.iterdir()) == []


# The shapes of ELECTRA-small and OPT-350m: token embeddings narrower than the layers.
NARROW = {
    "electra": ("ElectraForMaskedLM", dict(embedding_size=16, type_vocab_size=2)),
    "opt": (
        "OPTForCausalLM",
        dict(word_embed_proj_dim=16, do_layer_norm_before=False, _remove_final_layer_norm=False),
    ),
}
TARGETS = [
    ("portable", "fp32"),
    ("portable", "int8"),
    ("cpu", "fp32"),
    ("cpu", "int8"),
    ("cuda", "fp32"),
]


def narrow_model(family, directory):
    architecture, fields = NARROW[family]
    config = random_config(family, architecture, 0)
    config.update(dict(fields, hidden_size=24, num_attention_heads=3))
    model = random_model(architecture, config)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("target, dtype", TARGETS)
@pytest.mark.parametrize("family", NARROW)
def test_models_with_narrow_embeddings_match_transformers_logits(family, target, dtype, tmp_path):
    theirs = narrow_model(family, tmp_path / "theirs")
    manifest = export(tmp_path / "theirs", tmp_path / "out", cases=2, target=target, dtype=dtype)
    if dtype == "int8":  # the table of token embeddings is in 8 bits too
        for file in default_graphs(manifest).values():
            assert num_integer_tables(tmp_path / "out" / file) == 1
    ids = torch.randint(4, theirs.config.vocab_size, (3, 7))
    with torch.no_grad():
        expected = theirs(ids).logits[:, -1].numpy()
    actual = last_logits(Runtime(tmp_path / "out", device="cpu"), ids.numpy())
    if dtype == "fp32":
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert cosines(actual, expected).min() > 0.99


def num_integer_tables(path):
    """Return the number of integer embedding tables in a graph."""
    lookups = [
        node.inputs[0]
        for node in ir.load(path).graph
        if node.op_type in ("Gather", "GatherBlockQuantized")
    ]
    return sum(
        table.is_initializer() and table.dtype in (ir.DataType.INT8, ir.DataType.UINT8)
        for table in lookups
    )


def last_logits(runtime, ids):
    mask = np.ones_like(ids)
    if runtime.architecture == "VanillaEncoderForMaskedLM":
        return runtime.outputs(ids, mask)["logits"][:, -1]
    request = batch_request([Group(row) for row in runtime.inputs(ids, mask, None, {})])
    return runtime.model.factory.open(request).prefill(request.input_ids, request.attention_mask)[
        :, -1
    ]


def cosines(x, y):
    return (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)


@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_opt_with_narrow_embeddings_matches_transformers_tokens(target, tmp_path):
    theirs = narrow_model("opt", tmp_path / "theirs")
    export(tmp_path / "theirs", tmp_path / "out", cases=2, target=target)
    ids = torch.randint(4, theirs.config.vocab_size, (3, 5))
    settings = dict(max_new_tokens=8, no_repeat_ngram_size=1)
    for beams in (1, 3):
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=beams, do_sample=False, **settings
        )
        actual = Runtime(tmp_path / "out").generate(
            ids.numpy(), np.ones(ids.shape, int), num_beams=beams, **settings
        )
        assert actual.tolist() == expected.tolist() and len(expected.unique()) > 4


def test_error_names_unsupported_family(tmp_path):
    Path(tmp_path, "config.json").write_text(
        '{"model_type": "mamba", "architectures": ["MambaModel"]}'
    )
    check_message(read_error("info", tmp_path), seen=("model_type", "mamba"))
    for run in (load_checkpoint, lambda source: export(source, tmp_path / "out")):
        with raises(ValueError, seen=("model_type", "mamba")):
            run(tmp_path)
    assert not (tmp_path / "out").exists()
