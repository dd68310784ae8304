"""Tests of code beside the weights, which never runs, and of paths and Hub ids."""

import io
import json
import sys
import time

import huggingface_hub
import pytest
import torch
from checkpoint_verbs import VERBS, verbs
from checkpoints import build, copy_folder, edit_json
from command_line import main, read_error
from huggingface_hub.errors import LocalEntryNotFoundError
from messages import check_message, raises
from models import AUTO_CLASSES

from vanilla_transformer import VanillaDecoderForCausalLM
from vanilla_transformer.checkpoint import load_tokenizer
from vanilla_transformer.checkpoint_files import checkpoint_directory
from vanilla_transformer.training.averaging import average
from vanilla_transformer_export import load_checkpoint

# --------------------------------------------------------------------------------------------- code


MARK = "open({mark!r}, 'w').write('ran')\n"


@pytest.fixture
def foreign_code(checkpoint, tmp_path, monkeypatch):
    """Add code to `checkpoint` that creates a file when it runs, and let stdin answer yes.

    Return the path of that file.
    """
    mark = tmp_path / "ran"
    (checkpoint / "theirs.py").write_text(MARK.format(mark=str(mark)) + "class Theirs: pass\n")
    autos = ("AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM")
    edit_json(checkpoint / "config.json", auto_map={name: "theirs.Theirs" for name in autos})
    edit_json(
        checkpoint / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["theirs.Theirs", "theirs.Theirs"]},
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))
    return mark


def test_commands_neither_run_remote_code_nor_ask_to(checkpoint, foreign_code, tmp_path):
    for side, text in zip(("en", "de"), ("the dog", "der Hund"), strict=True):
        (tmp_path / f"a.{side}").write_text(f"{text}\n")
    commands = verbs(checkpoint, tmp_path / "out") | {"info": ["info", checkpoint]}
    commands["evaluate"] = [
        "evaluate",
        checkpoint,
        "--source",
        tmp_path / "a.en",
        "--references",
        tmp_path / "a.de",
    ]
    for verb in ("info", "average", "attention", "evaluate"):
        main([str(argument) for argument in commands[verb]])
    assert sys.stdin.read(2) == "y\n"
    assert not foreign_code.exists()


@pytest.mark.parametrize("verb", ["info", "average", "attention", "evaluate", "export", "convert"])
def test_checkpoint_with_only_remote_code_is_rejected(checkpoint, foreign_code, verb):
    edit_json(checkpoint / "config.json", model_type="theirs")
    edit_json(checkpoint / "tokenizer_config.json", tokenizer_class="Theirs")
    arguments = (verbs(checkpoint, checkpoint.parent / "out") | {"info": ["info", checkpoint]})[
        verb
    ]
    line = read_error(*arguments)
    assert "trust_remote_code" not in line
    assert sys.stdin.read(2) == "y\n" and not foreign_code.exists()


def test_tokenizer_with_only_remote_code_raises(checkpoint, foreign_code):
    edit_json(checkpoint / "config.json", model_type="theirs")
    edit_json(checkpoint / "tokenizer_config.json", tokenizer_class="Theirs")
    with raises(ValueError, seen="copy"):
        load_tokenizer(checkpoint)
    assert not foreign_code.exists()


def test_average_writes_package_code_and_not_code_of_inputs(checkpoint, foreign_code, tmp_path):
    average([checkpoint, checkpoint], tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["auto_map"] == VANILLA_SEQ2SEQ_MAP
    code = {path.name for path in (tmp_path / "out").glob("*.py")}
    assert code == {
        f"{part}_vanilla_transformer.py" for part in ("configuration", "layers", "modeling")
    }
    assert not foreign_code.exists()


MODELING = "modeling_vanilla_transformer"
VANILLA_SEQ2SEQ_MAP = {
    "AutoConfig": "configuration_vanilla_transformer.VanillaSeq2SeqConfig",
    **{
        name: f"{MODELING}.{model_class.__name__}"
        for name, model_class in AUTO_CLASSES["seq2seq"].items()
    },
}


@pytest.mark.parametrize(
    "fields, seen, expected",
    [
        (dict(hidden_act="gelu"), ("hidden_act", "gelu"), "relu"),
        (dict(layer_norm_eps=0.1), ("layer_norm_eps", 0.1), 1e-05),
        (dict(id2label={"0": "A", "1": "B"}), ("id2label.0", "A"), "LABEL_0"),
    ],
)
def test_average_of_different_configs_raises(checkpoint, tmp_path, fields, seen, expected):
    (tmp_path / "more").mkdir()
    other = copy_folder(checkpoint, tmp_path / "more")
    edit_json(other / "config.json", use_cache=False, dtype="float16", transformers_version="5")
    average([checkpoint, other], tmp_path / "out")
    edit_json(other / "config.json", **fields)
    with raises(ValueError, seen=(other, *seen), expected=(expected, checkpoint)):
        average([checkpoint, other], tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_average_of_different_tokenizers_raises(checkpoint, tmp_path):
    (tmp_path / "more").mkdir()
    other = copy_folder(checkpoint, tmp_path / "more")
    content = json.loads((other / "tokenizer.json").read_text())
    content["truncation"] = dict(max_length=8, strategy="LongestFirst", stride=0, direction="Right")
    (other / "tokenizer.json").write_text(json.dumps(content))  # other bytes, the same tokenizer
    average([checkpoint, other], tmp_path / "out")
    token, *_ = content["model"]["vocab"]
    number = content["model"]["vocab"][token]
    content["model"]["vocab"][token] = 47
    (other / "tokenizer.json").write_text(json.dumps(content))
    with raises(
        ValueError, seen=("tokenizer.json", "model.vocab", 47), expected=(number, "tokenizer.json")
    ):
        average([checkpoint, other], tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_average_copies_all_tokenizer_files(checkpoint, tmp_path):
    for name in ("source.spm", "vocab.txt", "target_vocab.json", "special_tokens_map.json"):
        (checkpoint / name).write_text("{}")
    average([checkpoint], tmp_path / "out")
    for name in (
        "tokenizer.json",
        "source.spm",
        "vocab.txt",
        "target_vocab.json",
        "special_tokens_map.json",
    ):
        assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()
    result, before = (
        json.loads((path / "tokenizer_config.json").read_text())
        for path in (tmp_path / "out", checkpoint)
    )
    assert result == before | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }


# -------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize("verb", ["info", *VERBS])
@pytest.mark.parametrize("source", ["/no/where", "a/b/c", "./x", "..x", "x..y", "a b", "~/x"])
def test_error_names_path_that_does_not_exist(source, verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = read_error(*(verbs(source, "out") | {"info": ["info", source]})[verb])
    check_message(line, seen=source)


@pytest.mark.parametrize("verb", ["info", *VERBS])
def test_unreachable_hub_id_is_reported_in_one_line(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = read_error(
        *(verbs("someone/nothing", "out") | {"info": ["info", "someone/nothing"]})[verb]
    )
    reason = "it is not in the cache and the Hub cannot be reached"
    assert line == (
        "vanilla-transformer: someone/nothing is neither a checkpoint directory nor on the Hub: "
        f"{reason}"
    )


@pytest.mark.parametrize("verb", ["info", *VERBS])
def test_file_or_broken_link_instead_of_directory_is_rejected(verb, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        if (verb, name) != ("convert", "file"):  # convert reads a file as a state dict
            arguments = (
                verbs(tmp_path / name, tmp_path / "out") | {"info": ["info", tmp_path / name]}
            )[verb]
            assert "is not a directory, expected a checkpoint directory or a Hub id" in read_error(
                *arguments
            )


def test_subfolders_of_hub_repository_are_not_downloaded(saved, monkeypatch):
    downloads = []

    def download(hub_id, allow_patterns, ignore_patterns, revision=None):
        downloads.append((hub_id, "*.safetensors" in allow_patterns, ignore_patterns))
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert isinstance(load_checkpoint("someone/model"), torch.nn.Module)
    assert downloads == [("someone/model", False, ["*/*"]), ("someone/model", True, ["*/*"])]


def test_failed_hub_download_error_names_hub_id_without_text_of_hub_client(monkeypatch):
    def download(*_, **__):
        raise LocalEntryNotFoundError("many\nlines about a Repo id")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with raises(FileNotFoundError, seen="someone/model") as raised:
        checkpoint_directory("someone/model")
    assert type(raised.value) is FileNotFoundError
    assert "Repo id" not in str(raised.value)


def test_empty_name_is_not_working_directory(saved, monkeypatch):
    monkeypatch.chdir(saved)
    with raises(FileNotFoundError, seen="''"):
        load_checkpoint("")
    assert "''" in read_error("info", "")
    assert isinstance(load_checkpoint("."), torch.nn.Module)


def test_model_type_that_contradicts_architecture_raises(tmp_path):
    model = build("causal")
    assert isinstance(model, VanillaDecoderForCausalLM)
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", model_type="vanilla-encoder")
    with raises(ValueError, seen=("model_type", "vanilla-encoder", "VanillaDecoderForCausalLM")):
        load_checkpoint(tmp_path)


def test_folder_of_an_adapter_says_how_to_merge_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with raises(FileNotFoundError, seen=(tmp_path, "adapter"), expected="merge_and_unload"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("verb", ["convert", "info", "export"])
def test_directory_that_marian_wrote_names_its_converter(tmp_path, verb):
    for name in ("model.npz", "decoder.yml", "opus.vocab.yml", "source.spm", "target.spm"):
        (tmp_path / name).write_text("")
    message = read_error(verb, tmp_path, *([] if verb == "info" else [tmp_path.parent / "out"]))
    check_message(message, seen=(tmp_path, "Marian"), expected="convert_marian_to_pytorch")


def test_too_many_labels_are_rejected_at_once(checkpoint):
    labels = {str(number): f"label {number}" for number in range(200_000)}
    edit_json(checkpoint / "config.json", id2label=labels)
    start = time.monotonic()
    with raises(ValueError, seen=("config.json", 200_000, "id2label"), expected=2**17):
        load_checkpoint(checkpoint)
    assert time.monotonic() - start < 10
