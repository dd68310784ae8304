"""Sources with git-lfs pointers in place of large files, and files in place of directories."""

import json

import pytest
from checkpoints import copy_folder, with_words
from command_line import read_error
from heads import export_for_images
from messages import check_message

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A BERT checkpoint of transformers with a tokenizer."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    sizes = dict(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    BertModel(BertConfig(**sizes)).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"],
)
@pytest.mark.parametrize("verb", ["convert", "export"])
def test_error_names_lfs_pointer_in_checkpoint(checkpoint, tmp_path, name, verb):
    source = copy_folder(checkpoint, tmp_path / "source")
    (source / name).write_text(POINTER)
    message = read_error(verb, source, tmp_path / "out")
    check_message(message, seen=(source / name, "git-lfs"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-00001-of-00001.safetensors"])
def test_error_names_lfs_pointer_of_pickle_or_shard(checkpoint, tmp_path, name):
    source = copy_folder(checkpoint, tmp_path / "source")
    (source / "model.safetensors").unlink()
    (source / name).write_text(POINTER)
    if name.startswith("model"):
        (source / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": name}})
        )
    for arguments in (["info", source], ["convert", source, tmp_path / "out"]):
        check_message(read_error(*arguments), seen=(name, "git-lfs"))


def test_error_names_lfs_pointer_of_text_file_or_image(exported, tmp_path):
    for name in ("texts.parquet", "texts.jsonl", "texts.txt", "picture.png"):
        (tmp_path / name).write_text(POINTER)
    export = with_words(exported("encoder").directory, tmp_path)
    for name in ("texts.parquet", "texts.jsonl", "texts.txt"):
        files = ["--input", tmp_path / name, "--output-dir", tmp_path / "out"]
        message = read_error("predict", export, *files)
        check_message(message, seen=(tmp_path / name, "git-lfs"))
    export_for_images(tmp_path)
    message = read_error("predict", tmp_path / "export", tmp_path / "picture.png")
    check_message(message, seen=(tmp_path / "picture.png", "git-lfs"))


def test_error_names_lfs_pointer_in_export(exported, tmp_path):
    export = copy_folder(exported("encoder").directory, tmp_path)
    [graph, *_] = sorted(export.rglob("*.onnx"))
    graph.write_text(POINTER)
    check_message(read_error("predict", export, "a"), seen=(graph, "git-lfs"))


def test_error_for_checkpoint_file_suggests_its_directory(checkpoint, tmp_path):
    for name in ("model.safetensors", "config.json", "vocab.txt"):
        file = checkpoint / name
        assert (
            f"is not a directory, expected a checkpoint directory or a Hub id, such as {checkpoint}"
            in read_error("info", file)
        )
        for flags in ([], ["--dry-run"], ["--to", "bert"], ["--variant", "fp16"]):
            message = read_error("convert", file, tmp_path / "out", *flags)
            check_message(message, seen=file, expected=(checkpoint, "torch.nn.Transformer"))
            assert not (tmp_path / "out").exists()


def test_error_for_export_file_suggests_its_directory(exported):
    export = exported("encoder").directory
    graph = next(export.rglob("*.onnx"))
    for words in (
        ["predict", graph, "a"],
        ["generate", graph, "a"],
        ["serve", graph],
        ["serve", export / "config.json"],
    ):
        message = read_error(*words)
        assert "is a file, expected a directory `vanilla-transformer export` wrote" in message
        assert message.endswith(f", such as {export}")
